"""Launch parameters of the attention kernels, by architecture, head size and format.

None of these numbers was measured on a GPU yet. They follow from compiling for each target
(`hf-fp8kv check --kernels`): no spills, and registers and shared memory that leave room for
`expected_programs` programs of the decode kernel on one processor.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from .target import Target

_Entry = TypeVar("_Entry")
_Config = TypeVar("_Config", "LaunchConfig", "PlanConfig")


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

# What a program of the decode kernel takes as long as none is compiled: warps, registers of a
# thread and shared memory, as the tables below have it for a head size of 128. Without a limit a
# thread takes all registers that there are.
_DECODE_TAKES = {"cuda": (4, 168, 40 << 10), "hip": (2, 256, 16 << 10)}
_ALL_REGISTERS = {"cuda": 255, "hip": 256}
# Query rows up to which the product's shape is the smallest.
FEW_ROWS = 16


@dataclass(frozen=True)
class PlanConfig:
    """How sequences are split for the decode kernel.

    Attributes:
        unit: tokens that parts are multiples of: of most tiles a multiple too.
        rounds: ranges for each place on the GPU.
        split_cost: in tokens, what splitting takes longer: another part for each place and the
            start of the merging, about 4 us, in which a program reads 160 tokens of 260 bytes if
            all places are taken.
        merge_cost: in tokens, what each part of a sequence takes: 30 ns if 16 are merged in 0.5 us,
            in which a program that is alone reads 2.5.
    """

    unit: int = 64
    rounds: int = 1
    split_cost: int = 160
    merge_cost: float = 2.5


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


def plan_config() -> PlanConfig:
    """Return how sequences are split."""
    return _apply_overrides(PlanConfig())


def expected_programs(target: Target, config: LaunchConfig | None = None) -> int:
    """Return how many programs of the decode kernel one processor should hold.

    With few rows, it is what launch parameters are chosen for, for any heads and format; with more
    only a guess, of what `config` says. `config`: launch parameters; None: those for few rows.
    """
    if "programs" in _overrides:
        return int(_overrides["programs"])
    warps, registers, shared = _DECODE_TAKES[target.vendor]
    if config is not None and config.rows > FEW_ROWS:
        warps = config.warps
        registers = config.registers or _ALL_REGISTERS[target.vendor]
    return max(1, target.fit(registers, warps, shared))


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


def _has_room(target: Target, width: int, widest: int) -> bool:
    """Return whether tiles of 16 bits leave room for as many programs as codes of 8 do.

    They do where a processor has 228 KB: three programs of the decode kernel with three stages, two
    of the extend kernel with two, up to the head size `widest` (`check --kernels`).
    """
    return target.shares.shared >= 200 << 10 and width <= widest


def decode_config(target: Target, workload: Workload) -> LaunchConfig:
    """Return the launch parameters of the decode kernel."""
    width, rows, exact, wide, biased, padded = workload
    table = _DECODE if target.is_nvidia else _DECODE_HIP
    tile, warps, stages, registers = _look_up(_DECODE_FLOAT32 if exact else table, width)
    if wide and not exact and not _has_room(target, width, 256):
        stages = max(1, stages - 1)
    # What more rows need in shared memory exceeds the 99 KB of some GPUs.
    most = 16 if exact and width > 64 else 32 if width > 256 else DECODE_ROWS
    rows = min(FEW_ROWS if rows <= FEW_ROWS else 32 if rows <= 32 else 64, most)
    if rows > FEW_ROWS or biased:
        registers = None
    elif registers is not None and expected_programs(target) < 3:
        # Said, since compilers do not always take what there is.
        registers = 240
    if target.family == 10 and registers is not None and (padded or wide):
        tile = 32  # its compiler spills otherwise
    return _apply_overrides(LaunchConfig(rows, tile, warps, stages, registers))


def extend_config(target: Target, workload: Workload) -> LaunchConfig:
    """Return the launch parameters of the extend kernel."""
    if workload.exact:
        table = _EXTEND_FLOAT32
    elif not target.is_nvidia:
        table = _EXTEND_HIP
    else:
        families = {9: _EXTEND, 10: _EXTEND_SM_100}
        table = _EXTEND_SM_80 if target.arch == 80 else families.get(target.family, _EXTEND_MMA)
    rows, tile, warps, stages = _look_up(table, workload.width)
    widest = 256 if target.family == 9 else 128
    if workload.wide and not workload.exact and not _has_room(target, workload.width, widest):
        stages = max(1, stages - 1)
    return _apply_overrides(LaunchConfig(rows, tile, warps, stages))


def _apply_overrides(config: _Config) -> _Config:
    chosen = {name: value for name, value in _overrides.items() if hasattr(config, name)}
    return replace(config, **chosen) if chosen else config


@contextmanager
def override(**parameters: Any) -> Iterator[None]:
    """Replace attributes of `LaunchConfig` and `PlanConfig` inside the `with` block.

    For experiments. `programs` replaces what `expected_programs` returns.
    """
    global _overrides
    fields = {*LaunchConfig.__dataclass_fields__, *PlanConfig.__dataclass_fields__}
    unknown = parameters.keys() - {"programs", *fields}
    if unknown:
        raise TypeError(f"expected launch parameters, got {sorted(unknown)}")
    before, _overrides = _overrides, {**_overrides, **parameters}
    try:
        yield
    finally:
        _overrides = before
