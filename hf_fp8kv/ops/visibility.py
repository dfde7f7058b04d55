"""The stored positions that are visible to a query, and the definition of a window."""

from typing import TypeVar

import torch
from torch import Tensor

_Position = TypeVar("_Position", int, Tensor)


def find_first_visible(query_position: _Position, window: int) -> _Position:
    """Return the first position in the window of a query. It may be negative.

    This defines a window: a query at position p attends to `p - window + 1` to p.
    """
    return query_position - window + 1


def find_visible(
    lengths: Tensor, num_tokens: int, start: int, stop: int, causal: bool, window: int
) -> Tensor:
    """Return whether each position is visible to each query, `[B, T, stop - start]`, bool.

    The queries are the last `num_tokens` tokens: query `t` is at position `lengths[b] - T + t`.
    """
    positions = torch.arange(start, stop, device=lengths.device)
    offsets = torch.arange(num_tokens, device=lengths.device)
    query_positions = (lengths[:, None] - num_tokens + offsets)[..., None]
    is_visible = (positions < lengths[:, None])[:, None].expand(-1, num_tokens, -1)
    if causal:
        is_visible = is_visible & (positions <= query_positions)
    if window:
        is_visible = is_visible & (positions >= find_first_visible(query_positions, window))
    return is_visible


def find_mask_bounds(is_visible: Tensor, start: int) -> Tensor:
    """Return the first visible position, and the last hidden position plus one, `[B, 2]`, int32.

    Args:
        is_visible: Whether a mask shows each position from `start` on, `[B, N]`, bool.
        start: Position of the first column.

    If no position is visible, the first result is `start + N`. If no position is hidden, the second
    result is `start`. No value is read on the host.
    """
    stop = start + is_visible.shape[1]
    positions = torch.arange(start, stop, dtype=torch.int32, device=is_visible.device)
    first = torch.where(is_visible, positions, stop).amin(1)
    hidden_stop = torch.where(is_visible, start, positions + 1).amax(1)
    return torch.stack([first, hidden_stop], 1).int()
