"""Launch parameters of the attention kernels, by architecture, head size and format.

None of these numbers was measured on a GPU yet. They follow from compiling for each target
(`hf-fp8kv check --kernels`): no spills, and registers and shared memory that leave room for
PROGRAMS_PER_PROCESSOR programs of the decode kernel on one processor.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from .target import Target

_Entry = TypeVar("_Entry")


@dataclass(frozen=True)
class LaunchConfig:
    """Launch parameters of one kernel.

    Attributes:
        rows: query rows of a program (query heads of one KV head times query tokens).
        tile: tokens that a program reads at a time.
        warps: of a program.
        stages: tiles that are loaded ahead, plus the one in use.
        registers: the most per thread; None: as the compiler likes.
        combine: who merges the splits of a sequence: "kernel", a second launch, or "last",
            the program that is done last.
    """

    rows: int
    tile: int
    warps: int
    stages: int
    registers: int | None = None
    combine: str = "kernel"

    def options(self) -> dict[str, int]:
        """Return what Triton is told about the launch."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options if self.registers is None else {**options, "maxnreg": self.registers}


# Query rows per KV head up to which the decode kernel is taken.
DECODE_ROWS = 64

# Programs of the decode kernel that one processor holds at once: the split plan fills the GPU once.
# Registers are the limit, and shared memory where there are 100 KB of it.
PROGRAMS_PER_PROCESSOR = {"cuda": 3, "sm_86": 2, "sm_89": 2, "sm_120": 2, "hip": 4}

# The decode kernel by head size, padded to a power of two: (tile, warps, stages, registers). Codes
# of K and V of one tile are 16 KB from 128 on; with 168 registers three programs of four warps fit.
_DECODE = {
    64: (64, 4, 4, 168),
    128: (64, 4, 3, 168),
    256: (32, 4, 3, 168),
    512: (32, 8, 2, None),
    1024: (16, 8, 2, None),
}
# Float32 operands: as long as rounding is to be that of float32, speed is another matter.
_DECODE_FLOAT32 = {128: (32, 4, 2, None), 256: (16, 8, 2, None), 1024: (16, 8, 1, None)}
# AMD: 512 registers for each lane of a processor's four parts.
_DECODE_HIP = {
    128: (32, 2, 2, None),
    256: (32, 4, 2, None),
    512: (32, 8, 1, None),
    1024: (16, 8, 1, None),
}

# The extend kernel: (rows, tile, warps, stages). Two programs of four warps on one processor: one's
# softmax runs beside the other's products.
_EXTEND = {128: (64, 64, 4, 2), 256: (32, 32, 4, 2), 512: (32, 32, 8, 1), 1024: (16, 16, 8, 1)}
# Tensor memory holds the sums there: room for twice the rows.
_EXTEND_SM_100 = {**_EXTEND, 256: (64, 32, 8, 2)}
# Without products of whole warp groups each warp reads all of K and V, and registers are short.
_EXTEND_MMA = {**_EXTEND, 128: (64, 64, 8, 2)}
_EXTEND_SM_80 = {**_EXTEND, 64: (64, 64, 8, 2), 128: (64, 32, 8, 2)}
_EXTEND_FLOAT32 = {128: (16, 32, 4, 1), 1024: (16, 16, 8, 1)}
_EXTEND_HIP = {**_EXTEND, 64: (128, 64, 4, 1), 128: (128, 32, 4, 1), 256: (64, 32, 4, 1)}

_overrides: dict[str, Any] = {}


def programs_per_processor(target: Target) -> int:
    """Return how many programs of the decode kernel one processor is meant to hold."""
    programs = PROGRAMS_PER_PROCESSOR.get(target.name, PROGRAMS_PER_PROCESSOR[target.vendor])
    return int(_overrides.get("programs", programs))


def _look_up(table: Mapping[int, _Entry], width: int) -> _Entry:
    return table[min((w for w in table if w >= width), default=max(table))]


class Workload(NamedTuple):
    """What launch parameters depend on, besides the GPU.

    Attributes:
        width: the larger head size, padded to a power of two.
        rows: query rows per KV head. A program may take fewer: there are then more than one block.
        exact: whether products are of float32.
        wide: whether a side is stored in 16 bits or more.
        biased: whether something is added to logits.
        padded: whether a head size is not a power of two.
    """

    width: int
    rows: int
    exact: bool
    wide: bool
    biased: bool
    padded: bool


def decode_config(target: Target, workload: Workload) -> LaunchConfig:
    """Return the launch parameters of the decode kernel."""
    width, rows, exact, wide, biased, padded = workload
    table = _DECODE if target.is_nvidia else _DECODE_HIP
    tile, warps, stages, registers = _look_up(_DECODE_FLOAT32 if exact else table, width)
    if wide and not exact:
        stages = max(1, stages - 1)
    # What more rows need in shared memory exceeds the 99 KB of some GPUs.
    most = 16 if exact and width > 64 else 32 if width > 256 else DECODE_ROWS
    rows = min(16 if rows <= 16 else 32 if rows <= 32 else 64, most)
    if rows > 16 or biased:
        registers = None
    elif registers is not None and programs_per_processor(target) < 3:
        # Said, since compilers do not always take what there is.
        registers = 240
    if target.arch == 100 and registers is not None and (padded or wide):
        tile = 32  # its compiler spills otherwise
    return _apply_overrides(LaunchConfig(rows, tile, warps, stages, registers))


def extend_config(target: Target, workload: Workload) -> LaunchConfig:
    """Return the launch parameters of the extend kernel."""
    if workload.exact:
        table = _EXTEND_FLOAT32
    elif not target.is_nvidia:
        table = _EXTEND_HIP
    else:
        tables = {80: _EXTEND_SM_80, 90: _EXTEND, 100: _EXTEND_SM_100}
        table = tables.get(int(target.arch), _EXTEND_MMA)
    rows, tile, warps, stages = _look_up(table, workload.width)
    if workload.wide and not workload.exact:
        stages = max(1, stages - 1)
    return _apply_overrides(LaunchConfig(rows, tile, warps, stages))


def _apply_overrides(config: LaunchConfig) -> LaunchConfig:
    chosen = {name: value for name, value in _overrides.items() if hasattr(config, name)}
    return replace(config, **chosen) if chosen else config


@contextmanager
def override(**parameters: Any) -> Iterator[None]:
    """Replace attributes of `LaunchConfig` inside the `with` block, for experiments.

    `programs` replaces `programs_per_processor`: a plan made outside then does not fit inside.
    """
    global _overrides
    unknown = parameters.keys() - {"programs", *LaunchConfig.__dataclass_fields__}
    if unknown:
        raise TypeError(f"expected parameters of {LaunchConfig.__name__}, got {sorted(unknown)}")
    before, _overrides = _overrides, {**_overrides, **parameters}
    try:
        yield
    finally:
        _overrides = before
