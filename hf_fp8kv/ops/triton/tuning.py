"""Launch parameters of the attention kernels: a table for each family of GPUs.

Those of decoding on sm_90 were searched on an H100 (docs/performance.md). All others follow from
compiling for each target (`make kernels`): no spills, and registers and shared memory that leave
room for `expected_programs` programs of the decode kernel on one processor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias, TypeVar

from .target import Target

_Row = TypeVar("_Row")
_Table: TypeAlias = Mapping[int, tuple[int, int, int, int | None]]
_ExtendTable: TypeAlias = Mapping[int, tuple[int, int, int, int]]
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
# Query rows of latents up to which a program takes 16. For 16 sequences of 16k tokens an H200 took
# 202 us with 32 heads in this way and 265 us with 64 rows a program, but 466 and 269 with 64 heads.
FEW_LATENT_ROWS = 32
# Query rows up to which it is known, before a kernel is compiled, how many programs fit.
FEW_ROWS = 16

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


@dataclass(frozen=True)
class Family:
    """Launch parameters for GPUs that are alike. Tables have a row for each largest head size.

    Attributes:
        takes: for a number of query rows, what a program of the decode kernel takes: registers of a
            thread, warps, bytes of shared memory. A plan is made before a kernel is compiled, for
            all layers. `make kernels` checks that this number of programs fits.
        guess: the same without warps, of programs that are compiled first.
        guess_large: of latents, and of more than 32 rows.
        decode: for a number of rows, (tile, warps, stages, registers) with swapped operands.
        decode_rows_first: without.
        extend: (rows, tile, warps, stages).
        wide: the head size up to which tiles of 16 and 8 bits have the same number of stages.
        widened: stages that the extend kernel has more if codes were converted before. It is None
            where products do not read K and V from shared memory, and no codes are converted.
        limits: whether the extend kernel has a limit of registers under complete masks.
        latent, latent_stages: warps and stages of latents, with 16 rows of a program.
        latent_many: of latents with more than FEW_LATENT_ROWS rows, (rows, tile, warps, stages)
            with swapped operands. Without them a program takes 16 rows.
        latent_masked: with a mask or a bias for each query and token.
        latent_rotated: where the query is rotated, and in chunks.
        latent_moved: whether codes that become numbers by moving bits are read in chunks.
    """

    takes: Mapping[int, tuple[int, int, int]]
    guess: tuple[int, int]
    guess_large: tuple[int, int]
    decode: Mapping[int, _Table]
    decode_rows_first: _Table
    extend: _ExtendTable
    wide: int = 0
    widened: int | None = None
    limits: bool = False
    latent: int = 8
    latent_stages: int = 2
    latent_many: tuple[int, int, int, int] | None = None
    latent_masked: int = 8
    latent_rotated: int | None = None
    latent_moved: bool = False


# With swapped operands the product's shape has room for 8 rows where it had 16 before, and a warp
# needs half the instructions per byte. Codes of K and V of one tile are 16 KB from 128 on; with
# 168 registers six programs of two warps fit.
_FEW: _Table = {
    64: (64, 2, 4, 168), 128: (64, 2, 3, 168), 256: (32, 2, 3, 168), 512: (32, 4, 2, None),
    1024: (16, 4, 2, None),
}  # fmt: skip
# Without processors that multiply whole warp groups each warp reads all of K and V, and registers
# are short.
_CUDA = Family(
    takes={8: (168, 2, 37 << 10), 16: (240, 2, 41 << 10)},
    guess=(255, 48 << 10),
    guess_large=(255, 72 << 10),
    decode={
        8: _FEW,
        16: {width: (*row[:3], row[3] and 240) for width, row in _FEW.items()},
        32: {64: (64, 2, 4, None), 128: (64, 2, 3, None), 256: (32, 4, 3, None)},
    },
    # Swapping saves nothing if rows and tokens are equally many.
    decode_rows_first={
        64: (64, 4, 4, None), 128: (64, 4, 3, None), 256: (32, 4, 3, None), 512: (32, 8, 2, None),
        1024: (16, 8, 2, None),
    },
    extend={128: (64, 64, 8, 2), 256: (32, 32, 4, 2), 512: (32, 32, 8, 1), 1024: (16, 16, 8, 1)},
    limits=True,
)  # fmt: skip
# Two programs of four warps on one processor: one's softmax runs beside the other's products.
_SM_90 = replace(
    _CUDA, extend={**_CUDA.extend, 128: (64, 64, 4, 2)}, wide=256, widened=1, limits=False,
    latent=4, latent_stages=3, latent_many=(64, 32, 8, 2),
)  # fmt: skip
_FAMILIES = {
    "sm_80": replace(
        _CUDA, extend={**_CUDA.extend, 64: (64, 64, 8, 2), 128: (64, 32, 8, 2)}, latent_rotated=4
    ),
    "sm_90": _SM_90,
    # Tensor memory holds the sums: room for twice the rows.
    "sm_10": replace(
        _SM_90, extend={**_SM_90.extend, 256: (64, 32, 8, 2)}, wide=128, widened=0, latent=8,
        latent_stages=2, latent_many=None,
    ),
    "sm_": _CUDA,
    # Products have 16 rows; 512 registers for each lane of a processor's four parts.
    "gfx": Family(
        takes={16: (256, 1, 16 << 10)},
        guess=(256, 16 << 10),
        guess_large=(512, 16 << 10),
        decode={16: {128: (32, 1, 2, None), 256: (32, 2, 2, None)}},
        decode_rows_first={
            128: (32, 2, 2, None), 256: (32, 4, 2, None), 512: (32, 8, 1, None),
            1024: (16, 8, 1, None),
        },
        extend={
            64: (128, 64, 4, 1), 128: (128, 32, 4, 1), 256: (64, 32, 4, 1), 512: (32, 32, 8, 1),
            1024: (16, 16, 8, 1),
        },
        latent=4, latent_masked=4, latent_moved=True,
    ),
}  # fmt: skip
# For float32 operands, which take many registers.
_DECODE_FLOAT32: _Table = {128: (32, 4, 2, None), 256: (16, 8, 2, None), 1024: (16, 8, 1, None)}
_EXTEND_FLOAT32: _ExtendTable = {128: (16, 32, 4, 1), 1024: (16, 16, 8, 1)}
_NONE: _Table = {}


def plan_config(target: Target) -> PlanConfig:
    """Return how sequences are split."""
    return _replace(PlanConfig(), target)


def family_of(target: Target) -> Family:
    """Return the launch parameters for GPUs like this one."""
    return next(x for name, x in _FAMILIES.items() if target.name.startswith(name))


def expected_programs(
    target: Target, rows: int = 1, config: LaunchConfig | None = None, *, latent: bool = False
) -> int:
    """Return how many programs of the decode kernel one processor should hold.

    Args:
        target: the GPU.
        rows: query rows per KV head. Up to FEW_ROWS launch parameters are chosen for the number, of
            any heads up to 256 and any format.
        config: other launch parameters, of more rows or for other products. The number is a guess.
        latent: whether what is read are latents.
    """
    family = family_of(target)
    if config is None and rows > FEW_ROWS:
        config = decode_config(target, Workload(128, rows, False, False, False))
    if config is None:
        takes = family.takes[min(most for most in family.takes if rows <= most)]
    else:
        most, shared = family.guess_large if latent or config.rows > 32 else family.guess
        takes = config.registers or most, config.warps, shared
    return int(target.parameters.get("programs") or max(1, target.fit(*takes)))


def _look_up(table: Mapping[int, _Row], width: int) -> _Row:
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


def decode_config(target: Target, workload: Workload) -> LaunchConfig:
    """Return the launch parameters of the decode kernel."""
    family = family_of(target)
    if workload.latent:
        return _latent_config(target, workload)
    width, rows, exact, wide, biased, complete, *_ = workload
    few = min((most for most in (*family.takes, 32) if rows <= most), default=64)
    # What more rows need in shared memory exceeds the 99 KB of some GPUs.
    rows = min(few, 16 if exact and width > 64 else 32 if width > 256 else DECODE_ROWS)
    swapped = family.decode.get(rows, _NONE)
    is_swapped = not exact and width <= max(swapped, default=0)
    table = swapped if is_swapped else family.decode_rows_first
    tile, warps, stages, registers = _look_up(_DECODE_FLOAT32 if exact else table, width)
    if wide and not exact:
        tile = max(16, tile // 2)  # as many bytes
    if biased:
        registers = None
    elif registers is not None and expected_programs(target, rows) < 3:
        registers = _MANY_REGISTERS
    # Half of the others' tiles; what a complete mask or a bias says of each query and token, in a
    # tile as large, would spill.
    masked_tile = 16 if complete or biased else max(16, tile // 2)
    config = LaunchConfig(rows, tile, warps, stages, registers, masked_tile, is_swapped)
    return _replace(config, target)


def extend_config(target: Target, workload: Workload, *, widened: bool = False) -> LaunchConfig:
    """Return the launch parameters of the extend kernel.

    `widened`: codes were converted before, so their tiles go from memory to products as they are.
    """
    family = family_of(target)
    if workload.latent:
        return _latent_config(target, workload)
    table = _EXTEND_FLOAT32 if workload.exact else family.extend
    rows, tile, warps, stages = _look_up(table, workload.width)
    if workload.wide and not workload.exact and workload.width > family.wide:
        stages = max(1, stages - 1)
    if widened:
        stages += family.widened or 0
    config = LaunchConfig(rows, tile, warps, stages, masked_tile=max(16, tile // 2))
    if family.limits and workload.complete and not workload.exact:
        config = replace(config, registers=_MANY_REGISTERS)
    return _replace(config, target)


def _latent_config(target: Target, workload: Workload) -> LaunchConfig:
    """Return the launch parameters of either kernel, of latents."""
    family = family_of(target)
    rows, tile, warps, stages = 16, 32, family.latent, family.latent_stages
    in_chunks = family.latent_moved and workload.moved
    is_masked, swapped = workload.complete or workload.biased, False
    if workload.exact or workload.width > 512:
        tile, warps, stages = 16, 8, 1
    elif family.latent_many and workload.rows > FEW_LATENT_ROWS and not is_masked:
        (rows, tile, warps, stages), swapped = family.latent_many, True
    else:
        if is_masked:
            warps = family.latent_masked
        if workload.rotated and family.latent_rotated:
            # With the sums of rotation, whole rows of the query would be too many registers.
            warps, in_chunks = family.latent_rotated, True
    chunks = 4 if in_chunks and workload.width >= 64 else 1
    config = LaunchConfig(rows, tile, warps, stages, swapped=swapped, chunks=chunks)
    config = _replace(config, target)
    return replace(config, swapped=config.swapped and config.chunks == 1)


def _replace(config: _Config, target: Target) -> _Config:
    chosen = {name: x for name, x in target.parameters.items() if hasattr(config, name)}
    return replace(config, **chosen) if chosen else config
