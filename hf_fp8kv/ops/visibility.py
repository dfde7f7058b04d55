"""The stored positions that are visible to a query, and the definition of a window."""

from typing import TypeVar

import torch
from torch import Tensor

_Position = TypeVar("_Position", int, Tensor)


def first_visible(query_position: _Position, window: int) -> _Position:
    """Return the first position in the window of a query. It is negative if nothing is hidden.

    This defines a window: a query at position p attends to `p - window + 1` to p.
    """
    return query_position - window + 1


def visible(
    lengths: Tensor, tokens: int, start: int, stop: int, causal: bool, window: int
) -> Tensor:
    """Return which stored positions are visible to each query, `[B, T, stop - start]`, bool.

    The queries are the last `tokens` stored tokens: query `t` is at position `lengths[b] - T + t`.
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
    """Return the first visible position, and the last hidden position plus one, `[B, 2]`, int32.

    Args:
        seen: Which positions from `start` on are visible in a mask, `[B, N]`, bool.
        start: Position of the first column.

    If nothing is visible, the first result is `start + N`. If nothing is hidden, the second result
    is `start`. No value is read on the host.
    """
    stop = start + seen.shape[1]
    position = torch.arange(start, stop, dtype=torch.int32, device=seen.device)
    first = torch.where(seen, position, stop).amin(1)
    hidden = torch.where(seen, start, position + 1).amax(1)
    return torch.stack([first, hidden], 1).int()
