"""Visibility: the stored positions that a query sees, and what a window is."""

from typing import TypeVar

import torch
from torch import Tensor

_Position = TypeVar("_Position", int, Tensor)


def first_visible(query_position: _Position, window: int) -> _Position:
    """Return the first position in the window of a query; below 0 where nothing is hidden.

    This is the only place that says what a window is: a query at p sees `p - window + 1` to p.
    """
    return query_position - window + 1


def visible(
    lengths: Tensor, tokens: int, start: int, stop: int, causal: bool, window: int
) -> Tensor:
    """Return which stored position each query may see: `[B, T, stop - start]`, bool.

    The queries are the last `tokens` of what is stored: query `t` is at `lengths[b] - T + t`.
    """
    position = torch.arange(start, stop, device=lengths.device)
    query = (lengths[:, None] - tokens + torch.arange(tokens, device=lengths.device))[..., None]
    seen = (position < lengths[:, None])[:, None].expand(-1, tokens, -1)
    if causal:
        seen = seen & (position <= query)
    if window:
        seen = seen & (position >= first_visible(query, window))
    return seen


def mask_bounds(seen: Tensor, start: int) -> Tensor:
    """Return the first visible position and one past the last hidden one, `[B, 2]`, int32.

    Args:
        seen: `[B, N]`, bool, which positions from `start` on a mask shows.
        start: the position of the first column.

    Where nothing is visible the first is `start + N`; where nothing is hidden the second is
    `start`. No value is read on the host.
    """
    stop = start + seen.shape[1]
    position = torch.arange(start, stop, dtype=torch.int32, device=seen.device)
    first = torch.where(seen, position, stop).amin(1)
    hidden = torch.where(seen, start, position + 1).amax(1)
    return torch.stack([first, hidden], 1).int()
