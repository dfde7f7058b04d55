"""Recognition of the pattern of transformers' mask functions: causal, with a window, or neither.

transformers does not label its patterns. It combines functions that compare two positions. Here
such a function is called with symbolic positions (`_Position`), and its result contains the allowed
distances (`_Distances`). This also works under torch.compile, and for functions created there,
which cannot be inspected.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function


class _Symbol:
    """A symbolic value. Operations that are not supported raise TypeError."""

    device = None
    __eq__: Any = None
    __ne__: Any = None
    __bool__: Any = None
    __hash__: Any = None


class _Distances(_Symbol):
    """The set of position pairs in which the query is `low` to `high` positions after the key."""

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
    """Return the window of a causal pattern, 0 without a window, or None for any other pattern.

    torch.compile cannot trace a function that reads a tensor of positions. There the function is
    only called if it is `plain`: positions are not packed, the config has no chunks, and no
    function of a caller is involved (these use vmap). Blocks use a different function.
    """
    if function is causal_mask_function:
        return 0
    if torch.compiler.is_compiling():
        safe = plain and getattr(function, "__name__", "") == "and_mask"
        return _follow(function) if safe else None
    try:
        return _follow(function)
    except Exception:  # a function that reads values may raise anything
        return None


def _follow(function: Callable[..., Any]) -> int | None:
    allowed = function(_Symbol(), _Symbol(), _Position(True), _Position(False))
    if not isinstance(allowed, _Distances) or allowed.low != 0:
        return None
    return 0 if allowed.high == math.inf else int(allowed.high) + 1
