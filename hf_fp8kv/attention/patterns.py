"""Which pattern a mask function of transformers stands for: causal, with a window, or another.

transformers does not tag its patterns, and combines them from functions of two positions that are
compared. So the function is called with positions that are no numbers (`_Position`), and what it
returns says which distances it allows (`_Distances`). This works under torch.compile too, and for
functions that are made there, which cannot be looked into.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function


class _Symbol:
    """What stands for numbers; an operation that is not followed raises TypeError."""

    device = None
    __eq__: Any = None
    __ne__: Any = None
    __bool__: Any = None
    __hash__: Any = None


class _Distances(_Symbol):
    """Pairs of positions of which the query's is at least `low` and at most `high` ahead."""

    def __init__(self, low: float = -math.inf, high: float = math.inf) -> None:
        self.low, self.high = low, high

    def to(self, *_: object, **__: object) -> "_Distances":
        """As of a tensor."""
        return self

    def __and__(self, other: "_Distances", /) -> "_Distances":
        if not isinstance(other, _Distances):
            return NotImplemented
        return _Distances(max(self.low, other.low), min(self.high, other.high))


class _Position(_Symbol):
    """The position of a query or a key, plus `shift`."""

    def __init__(self, is_query: bool, shift: int = 0) -> None:
        self.is_query, self.shift = is_query, shift

    def new_ones(self, *_: object, **__: object) -> _Distances:
        """As of a tensor."""
        return _Distances()

    def __add__(self, other: int, /) -> "_Position":
        if not isinstance(other, int):
            return NotImplemented
        return _Position(self.is_query, self.shift + other)

    def __sub__(self, other: int, /) -> "_Position":
        return self + -other

    def __le__(self, query: "_Position", /) -> _Distances:
        return _Distances(low=self._before(query))

    def __gt__(self, query: "_Position", /) -> _Distances:
        return _Distances(high=self._before(query) - 1)

    def _before(self, query: "_Position") -> int:
        if self.is_query or not query.is_query:
            raise TypeError("not a key that is compared with a query")
        return self.shift - query.shift


def causal_window(function: Callable[..., Any], *, plain: bool = False) -> int | None:
    """Return the window of a causal pattern, 0 for a plain one; None for every other pattern.

    torch.compile cannot trace a function that looks into a tensor of positions. So there it is
    called only if it is `plain`: no position is packed, no chunk is named by the config, and no
    function of a caller takes part (these use vmap). Blocks are joined by another function.
    """
    if function is causal_mask_function:
        return 0
    if torch.compiler.is_compiling():
        safe = plain and getattr(function, "__name__", "") == "and_mask"
        return _follow(function) if safe else None
    try:
        return _follow(function)
    except Exception:  # whatever a function does that looks at values
        return None


def _follow(function: Callable[..., Any]) -> int | None:
    allowed = function(_Symbol(), _Symbol(), _Position(True), _Position(False))
    if not isinstance(allowed, _Distances) or allowed.low != 0:
        return None
    return 0 if allowed.high == math.inf else int(allowed.high) + 1
