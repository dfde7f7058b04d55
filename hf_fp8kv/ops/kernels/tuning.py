"""How kernels are cut for a GPU: every launch parameter, by architecture, head size and format.

None of these numbers was measured on a GPU yet. They follow from compiling for each target
(`hf-fp8kv check --kernels`): no spills, and registers and shared memory that leave room for
PROGRAMS_PER_PROCESSOR programs of the decode kernel on one processor.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from .target import Target

__all__ = ["Cut", "decode_cut", "extend_cut", "override", "programs_per_processor"]


@dataclass(frozen=True)
class Cut:
    """How one launch is cut.

    Attributes:
        rows: query rows of a program (query heads of one KV head times query tokens).
        tile: tokens that a program reads at a time.
        warps: of a program.
        stages: tiles that are loaded ahead, plus the one in use.
        combine: who merges the parts of a split sequence: "kernel", a second launch, or "last",
            the program that is done last.
    """

    rows: int
    tile: int
    warps: int
    stages: int
    combine: str = "kernel"


# Query rows per KV head up to which the decode kernel is taken.
DECODE_ROWS = 64

# Programs of the decode kernel that one processor holds at once: the split plan fills the GPU once.
PROGRAMS_PER_PROCESSOR = {"cuda": 3, "hip": 2}

# The decode kernel by head size, padded to a power of two: (tile, warps, stages). Codes of K and V
# of one tile are 16 KB up to 128.
_DECODE = {
    64: (64, 4, 4),
    128: (64, 4, 3),
    256: (32, 4, 3),
    512: (32, 8, 2),
    1024: (16, 8, 2),
}
# Where numbers are held in 32 bits, and on GPUs with 64 KB of shared memory, less is loaded ahead.
_DECODE_FLOAT32 = {64: (32, 4, 2), 128: (32, 4, 2), 256: (16, 4, 2), 512: (16, 8, 1)}
_DECODE_HIP = {64: (64, 4, 2), 128: (64, 4, 2), 256: (32, 4, 2), 512: (32, 8, 1)}

# The extend kernel: (rows, tile, warps, stages).
_EXTEND = {
    64: (128, 64, 8, 3),
    128: (128, 64, 8, 3),
    256: (64, 32, 4, 2),
    512: (32, 32, 8, 1),
    1024: (16, 16, 8, 1),
}
_EXTEND_FLOAT32 = {64: (64, 32, 4, 1), 128: (32, 32, 4, 1), 256: (16, 32, 4, 1)}
_EXTEND_HIP = {64: (128, 64, 4, 1), 128: (128, 32, 4, 1), 256: (64, 32, 4, 1)}

_overrides: dict[str, Any] = {}


def programs_per_processor(target: Target) -> int:
    """Returns how many programs of the decode kernel one processor is meant to hold."""
    return int(_overrides.get("programs", PROGRAMS_PER_PROCESSOR[target.vendor]))


def _look_up(table: Mapping[int, tuple[int, ...]], width: int) -> tuple[int, ...]:
    return table[min((w for w in table if w >= width), default=max(table))]


def decode_cut(target: Target, width: int, rows: int, *, exact: bool, wide: bool) -> Cut:
    """Returns the cut of the decode kernel.

    Args:
        target: the GPU.
        width: the larger head size, padded to a power of two.
        rows: query rows per KV head.
        exact: whether products are of float32.
        wide: whether a side is stored in 16 bits or more.
    """
    if exact:
        tile, warps, stages = _look_up(_DECODE_FLOAT32, width)
    elif target.is_nvidia:
        tile, warps, stages = _look_up(_DECODE, width)
    else:
        tile, warps, stages = _look_up(_DECODE_HIP, width)
    if wide and not exact:
        stages = max(1, stages - 1)
    rows = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if rows == 64 and width > 256:
        tile = min(tile, 16)
    return _overridden(Cut(rows, tile, warps, stages))


def extend_cut(target: Target, width: int, *, exact: bool, wide: bool) -> Cut:
    """Returns the cut of the extend kernel; arguments as in `decode_cut`."""
    if exact:
        rows, tile, warps, stages = _look_up(_EXTEND_FLOAT32, width)
    elif target.is_nvidia:
        rows, tile, warps, stages = _look_up(_EXTEND, width)
    else:
        rows, tile, warps, stages = _look_up(_EXTEND_HIP, width)
    if wide and not exact:
        stages = max(1, stages - 1)
    return _overridden(Cut(rows, tile, warps, stages))


def _overridden(cut: Cut) -> Cut:
    chosen = {name: value for name, value in _overrides.items() if hasattr(cut, name)}
    return replace(cut, **chosen) if chosen else cut


@contextmanager
def override(**parameters: Any) -> Iterator[None]:
    """Inside, these parameters replace those of the tables; for experiments.

    Args:
        parameters: attributes of `Cut`, and `programs` for `programs_per_processor`. A plan made
            outside does not fit inside where `programs` differs.
    """
    global _overrides
    unknown = parameters.keys() - {"programs", *Cut.__dataclass_fields__}
    if unknown:
        raise TypeError(f"expected parameters of {Cut.__name__}, got {sorted(unknown)}")
    before, _overrides = _overrides, {**_overrides, **parameters}
    try:
        yield
    finally:
        _overrides = before
