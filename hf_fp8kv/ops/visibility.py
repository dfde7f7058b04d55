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
