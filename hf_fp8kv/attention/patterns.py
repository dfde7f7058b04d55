"""Which pattern a mask function of transformers stands for: causal, with a window, or another.

transformers does not tag its patterns, and combines them from functions of two positions that are
compared. So the function is called with positions that are no numbers (`_Position`), and what it
returns says which distances it allows (`_Distances`). This works under torch.compile too, and for
functions that are made there, which cannot be looked into.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function


class _Unknown:
    """The result of what is not followed."""

    device = None

    def _unknown(self, other: object = None, /) -> Any:
        return _Unknown()

    def new_ones(self, *_: object, **__: object) -> Any:
        """As of a tensor."""
        return _Unknown()

    def to(self, *_: object, **__: object) -> Any:
        """As of a tensor."""
        return self

    def __bool__(self) -> bool:
        raise TypeError("a position has no value")

    __add__: Any = _unknown
    __sub__: Any = _unknown
    __and__: Any = _unknown
    __le__: Any = _unknown
    __gt__: Any = _unknown
    __eq__: Any = _unknown
    __radd__ = __rsub__ = __mul__ = __floordiv__ = __abs__ = __or__ = _unknown
    __rand__ = __ror__ = __lt__ = __ge__ = __ne__ = _unknown
    __hash__ = None  # type: ignore[assignment]


class _Distances(_Unknown):
    """Pairs of positions of which the query's is at least `low` and at most `high` ahead."""

    def __init__(self, low: int | None, high: int | None) -> None:
        self.low, self.high = low, high

    def __and__(self, other: object, /) -> Any:
        if not isinstance(other, _Distances):
            return _Unknown()
        lows = [x for x in (self.low, other.low) if x is not None]
        highs = [x for x in (self.high, other.high) if x is not None]
        return _Distances(max(lows) if lows else None, min(highs) if highs else None)


class _Position(_Unknown):
    """The position of a query or a key, plus `shift`."""

    def __init__(self, is_query: bool, shift: int = 0) -> None:
        self.is_query, self.shift = is_query, shift

    def new_ones(self, *_: object, **__: object) -> Any:
        return _Distances(None, None)

    def _moved(self, by: int) -> "_Position":
        return _Position(self.is_query, self.shift + by)

    def __add__(self, other: object, /) -> Any:
        return self._moved(other) if isinstance(other, int) else _Unknown()

    def __sub__(self, other: object, /) -> Any:
        return self._moved(-other) if isinstance(other, int) else _Unknown()

    def __le__(self, other: object, /) -> Any:
        if isinstance(other, _Position) and other.is_query and not self.is_query:
            return _Distances(self.shift - other.shift, None)
        return _Unknown()

    def __gt__(self, other: object, /) -> Any:
        if isinstance(other, _Position) and other.is_query and not self.is_query:
            return _Distances(None, self.shift - other.shift - 1)
        return _Unknown()


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
    allowed = function(_Unknown(), _Unknown(), _Position(True), _Position(False))
    if not isinstance(allowed, _Distances) or allowed.low != 0:
        return None
    return 0 if allowed.high is None else allowed.high + 1
