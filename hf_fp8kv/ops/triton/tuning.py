"""Launch parameters of the attention kernels, by architecture, head size and format.

Those of decoding on sm_90 were searched on an H100 (docs/performance.md). All others follow from
compiling for each target (`make kernels`): no spills, and registers and shared memory that leave
room for `expected_programs` programs of the decode kernel on one processor.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

from .target import Target

_Table: TypeAlias = Mapping[int, tuple[int, int, int, int | None]]
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
        masked_tile: tokens read at a time where some row does not see them; divides `tile`.
        swapped: whether products are of codes and rows, instead of rows and codes.
        chunks: of latents, in how many parts their channels are: see latent.py.
    """

    rows: int
    tile: int
    warps: int
    stages: int
    registers: int | None = None
    masked_tile: int = 16
    swapped: bool = False
    chunks: int = 1

    def options(self) -> dict[str, int]:
        """Return the options of Triton for a launch."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options if self.registers is None else {**options, "maxnreg": self.registers}


# New tokens per sequence up to which each token is written by separate programs, as in decoding.
SINGLE_TOKENS = 8
# Query rows per KV head up to which the decode kernel is taken.
DECODE_ROWS = 64
# Query rows up to which it is known, before a kernel is compiled, how many programs fit.
FEW_ROWS = 16

# What a program of the decode kernel takes: registers of a thread, warps and shared memory, for so
# many query rows. A plan is made before a kernel is compiled, for all layers; that at least as many
# programs fit as this says is checked (`make kernels`).
_DECODE_TAKES = {
    "cuda": {8: (168, 2, 37 << 10), 16: (240, 2, 41 << 10)},
    "hip": {16: (256, 1, 16 << 10)},
}
# A limit that is said, since without one compilers may spill before they take what there is.
_MANY_REGISTERS = 240


@dataclass(frozen=True)
class PlanConfig:
    """How sequences are split for the decode kernel.

    Attributes:
        unit: tokens that parts are multiples of: of most tiles a multiple too.
        split_cost: in tokens, what splitting takes longer: another part for each place and the
            start of the merging, about 4 us, in which a program reads 80 tokens of 260 bytes if
            all places are taken.
        merge_cost: in tokens, what merging a part takes, 33 ns or, as its loads wait for each
            other, somewhat longer; in 33 ns a program that is alone reads 2.5.
    """

    unit: int = 64
    split_cost: int = 80
    merge_cost: float = 4.0


# The decode kernel by rows and head size, padded to a power of two: (tile, warps, stages,
# registers), with swapped operands: the product's shape then has room for 8 rows where it had 16
# before, and a warp has half as many instructions for a byte. Codes of K and V of one tile are
# 16 KB from 128 on; with 168 registers six programs of two warps fit.
_DECODE: dict[int, _Table] = {
    8: {
        64: (64, 2, 4, 168), 128: (64, 2, 3, 168), 256: (32, 2, 3, 168), 512: (32, 4, 2, None),
        1024: (16, 4, 2, None),
    },
    16: {
        64: (64, 2, 4, 240), 128: (64, 2, 3, 240), 256: (32, 2, 3, 240), 512: (32, 4, 2, None),
        1024: (16, 4, 2, None),
    },
    32: {64: (64, 2, 4, None), 128: (64, 2, 3, None), 256: (32, 4, 3, None)},
}  # fmt: skip
# Without: with as many rows as tokens there is nothing to be saved, and float32 operands, whose
# rounding is to be that of float32, take many registers.
_DECODE_ROWS_FIRST: _Table = {
    64: (64, 4, 4, None), 128: (64, 4, 3, None), 256: (32, 4, 3, None), 512: (32, 8, 2, None),
    1024: (16, 8, 2, None),
}  # fmt: skip
_NONE: _Table = {}
_DECODE_FLOAT32: _Table = {128: (32, 4, 2, None), 256: (16, 8, 2, None), 1024: (16, 8, 1, None)}
# AMD: products have 16 rows; 512 registers for each lane of a processor's four parts.
_DECODE_HIP: _Table = {128: (32, 1, 2, None), 256: (32, 2, 2, None)}
_DECODE_HIP_ROWS_FIRST: _Table = {
    128: (32, 2, 2, None), 256: (32, 4, 2, None), 512: (32, 8, 1, None), 1024: (16, 8, 1, None),
}  # fmt: skip

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


def expected_programs(target: Target, rows: int = 1) -> int:
    """Return how many programs of the decode kernel one processor should hold.

    `rows`: query rows per KV head. Up to FEW_ROWS launch parameters are chosen for it, for any
    heads and format; with more it is a guess.
    """
    takes = _DECODE_TAKES[target.vendor]
    known = [most for most in takes if rows <= most]
    if known:
        return _overridden_programs() or max(1, target.fit(*takes[min(known)]))
    config = decode_config(target, Workload(128, rows, False, False, False))
    return guessed_programs(target, config)


def guessed_programs(target: Target, config: LaunchConfig, *, latent: bool = False) -> int:
    """Return how many programs with these launch parameters one processor holds, about."""
    # Compiled for each target: registers of AMD's are 220 to 370.
    is_large = latent or config.rows > 32
    shared = 16 << 10 if not target.is_nvidia else 72 << 10 if is_large else 48 << 10
    registers = config.registers or (255 if target.is_nvidia else 512 if is_large else 256)
    return _overridden_programs() or max(1, target.fit(registers, config.warps, shared))


def _overridden_programs() -> int:
    return int(_overrides.get("programs", 0))


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
        complete: whether a mask says for each query what it sees: then all tiles are masked ones.
        rotated: whether the query or the output is rotated.
        latent: whether what is read are latents.
        moved: whether K's codes become numbers by moving bits.
    """

    width: int
    rows: int
    exact: bool
    wide: bool
    biased: bool
    complete: bool = False
    rotated: bool = False
    latent: bool = False
    moved: bool = False


def _has_room(target: Target, width: int, widest: int) -> bool:
    """Return whether tiles of 16 bits leave room for as many programs as codes of 8 do.

    They do where a processor has 228 KB: two of the extend kernel with two stages, up to the head
    size `widest` (`make kernels`).
    """
    return target.shares.shared >= 200 << 10 and width <= widest


def decode_config(target: Target, workload: Workload) -> LaunchConfig:
    """Return the launch parameters of the decode kernel."""
    if workload.latent:
        return _latent_config(target, workload)
    width, rows, exact, wide, biased, complete, *_ = workload
    few = min((most for most in (*_DECODE_TAKES[target.vendor], 32) if rows <= most), default=64)
    # What more rows need in shared memory exceeds the 99 KB of some GPUs.
    rows = min(few, 16 if exact and width > 64 else 32 if width > 256 else DECODE_ROWS)
    if target.is_nvidia:
        swapped, others = _DECODE.get(rows, _NONE), _DECODE_ROWS_FIRST
    else:
        swapped, others = _DECODE_HIP if rows <= FEW_ROWS else _NONE, _DECODE_HIP_ROWS_FIRST
    is_swapped = not exact and width <= max(swapped, default=0)
    table = others
    if exact or is_swapped:
        table = _DECODE_FLOAT32 if exact else swapped
    tile, warps, stages, registers = _look_up(table, width)
    if wide and not exact:
        tile = max(16, tile // 2)  # as many bytes
    if biased:
        registers = None
    elif registers is not None and expected_programs(target, rows) < 3:
        registers = _MANY_REGISTERS
    # Half of the others' tiles; what a complete mask or a bias says of each query and token, in a
    # tile as large, would spill.
    masked_tile = 16 if complete or biased else max(16, tile // 2)
    return _apply_overrides(
        LaunchConfig(rows, tile, warps, stages, registers, masked_tile, is_swapped)
    )


def extend_config(target: Target, workload: Workload, *, widened: bool = False) -> LaunchConfig:
    """Return the launch parameters of the extend kernel.

    `widened`: codes were converted before, so their tiles go from memory to products as they are.
    """
    if workload.latent:
        return _latent_config(target, workload)
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
    if widened and target.family == 9:
        stages += 1  # two programs with three stages fit
    config = LaunchConfig(rows, tile, warps, stages, masked_tile=max(16, tile // 2))
    # Where it costs no room: of eight warps one program fits, with any registers. With rotation it
    # is the limit that makes sm_120 spill, of 183 registers that it takes without.
    limited = (warps == 8 and not workload.rotated) or workload.complete
    if table in (_EXTEND_MMA, _EXTEND_SM_80) and limited:
        config = replace(config, registers=_MANY_REGISTERS)
    return _apply_overrides(config)


def _latent_config(target: Target, workload: Workload) -> LaunchConfig:
    """Return the launch parameters of either kernel, of latents."""
    rows, tile, warps, stages = 16, 32, 4, 2
    if workload.exact or workload.width > 512:
        tile, warps, stages = 16, 8, 1
    elif target.is_nvidia and (target.family != 9 or workload.complete or workload.biased):
        # Of 100 KB one program fits; elsewhere registers of four warps are short.
        warps = 8
    # Where codes are converted by an instruction AMD's compiler does so after they are moved.
    in_chunks = workload.moved and not target.is_nvidia
    if target.arch == 80 and workload.rotated and warps == 8 and stages > 1:
        # With the sums of rotation, whole rows of the query would be too many registers.
        warps, in_chunks = 4, True
    chunks = 4 if in_chunks and workload.width >= 64 else 1
    config = _apply_overrides(LaunchConfig(rows, tile, warps, stages, chunks=chunks))
    return replace(config, swapped=False)


def overrides() -> Mapping[str, Any]:
    """Return what `override` replaces; another object as soon as it replaces something else."""
    return _overrides


def _apply_overrides(config: _Config) -> _Config:
    chosen = {name: value for name, value in _overrides.items() if hasattr(config, name)}
    return replace(config, **chosen) if chosen else config


@contextmanager
def override(**parameters: Any) -> Iterator[None]:
    """Replace attributes of `LaunchConfig` and `PlanConfig` inside the `with` block.

    For experiments. `programs` replaces the results of `expected_programs` and
    `guessed_programs`.
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
