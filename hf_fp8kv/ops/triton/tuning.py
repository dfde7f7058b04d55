"""Launch parameters of the attention kernel: tables for each family of GPUs.

Decoding has few query rows. Extending a sequence by a prompt or a chunk has many query rows.

The parameters for decoding on sm_90 were tuned on an H100 (docs/performance.md). All others were
chosen by compiling for each target (`make kernels`): no spills, and `estimate_programs` programs of
decoding fit on one SM.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias, TypeVar

from .target import Target

_Config = TypeVar("_Config", "LaunchConfig", "ScheduleConfig")


@dataclass(frozen=True)
class LaunchConfig:
    """Launch parameters of one kernel. Benchmarks store them under these names.

    Attributes:
        tile: Tokens that a program reads at a time.
        warps: Warps per program.
        stages: Number of tiles that are loaded ahead, plus one.
        registers: Maximum number of registers per thread. None leaves it to the compiler.
        rows: Query rows per program (query heads of one KV head times query tokens).
        masked_tile: Tokens read at a time if some are hidden from some row. Divides `tile`.
        swapped: Whether products are codes times rows, instead of rows times codes.
        isolated: Whether logits of latents are computed in a block. Triton does not compile the
            block for AMD's GPUs.
    """

    tile: int
    warps: int
    stages: int
    registers: int | None = None
    rows: int = 16
    masked_tile: int = 16
    swapped: bool = False
    isolated: bool = True

    def make_options(self) -> dict[str, int]:
        """Return Triton's options for a launch."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options if self.registers is None else {**options, "maxnreg": self.registers}


# Maximum number of new tokens per sequence that separate programs write, as in decoding.
MAX_DECODE_TOKENS = 8
# Maximum number of query rows per KV head for decoding.
MAX_DECODE_ROWS = 64
# Maximum number of query rows of latents for which a program takes 16 rows. For 16 sequences of 16k
# tokens and 32 heads, an H200 took 202 us with 16 rows per program and 265 us with 64. With 64
# heads: 466 us and 269 us.
FEW_LATENT_ROWS = 32
# Maximum number of query rows for which the number of programs per SM is known before compilation.
FEW_ROWS = 16

# An explicit limit, because without one the compiler may spill before it uses all registers.
_MANY_REGISTERS = 240


@dataclass(frozen=True)
class ScheduleConfig:
    """Parameters for splitting sequences into parts.

    Attributes:
        unit: Parts are multiples of this number of tokens, which is a multiple of most tiles.
        split_cost: Cost of splitting, in tokens: an additional part for each program and the launch
            of the merge kernel, about 4 us. In that time a program of a full GPU reads 80 tokens of
            260 bytes.
        merge_cost: Cost of merging one part, in tokens: at least 33 ns, because its loads wait for
            each other. In 33 ns a program that runs alone reads 2.5 tokens.
        max_growth: Factor by which ranges may grow to have fewer parts to merge, because not all
            programs are needed for the bandwidth.
    """

    unit: int = 64
    split_cost: int = 80
    merge_cost: float = 4.0
    max_growth: int = 2


_Table: TypeAlias = Mapping[int, LaunchConfig]


@dataclass(frozen=True)
class Family:
    """Launch parameters for similar GPUs. The key of a table is the maximum head size.

    Attributes:
        resources: Resources of a program in decoding (arguments of `count_programs`), by the
            maximum number of query rows. Schedules are made for all layers before a kernel is
            compiled. `make kernels` checks that the number of programs fits.
        other_resources: Assumed registers per thread and shared memory for all other programs.
        large_resources: As `other_resources`, for latents and for more than 32 rows per program.
        decode: Parameters with swapped operands, by number of rows and head size. `rows`,
            `masked_tile` and `swapped` are set for each call.
        decode_rows_first: As `decode`, without swapped operands, by head size.
        extend: Parameters for extending, by head size.
        latent: Parameters for latents.
        has_warp_groups: Whether groups of four warps compute products, which then read K and V from
            shared memory.
    """

    resources: Mapping[int, Mapping[str, int]]
    other_resources: tuple[int, int]
    large_resources: tuple[int, int]
    decode: Mapping[int, _Table]
    decode_rows_first: _Table
    extend: dict[int, LaunchConfig]
    latent: LaunchConfig = LaunchConfig(32, 8, 2)
    has_warp_groups: bool = False


# With swapped operands, a product has 8 rows instead of 16, and a warp needs half the instructions
# per byte. From head size 128 on, the codes of K and V of one tile are 16 KB. With 168 registers,
# six programs of two warps fit.
_DECODE_FEW_ROWS = {
    64: LaunchConfig(64, 2, 4, 168),
    128: LaunchConfig(64, 2, 3, 168),
    256: LaunchConfig(32, 2, 3, 168),
    512: LaunchConfig(32, 4, 2),
    1024: LaunchConfig(16, 4, 2),
}
# Without instructions for warp groups, each warp reads all of K and V and runs short of registers.
_CUDA = Family(
    resources={
        8: {"registers": 168, "num_warps": 2, "shared": 37 << 10},
        16: {"registers": 240, "num_warps": 2, "shared": 41 << 10},
    },
    other_resources=(255, 48 << 10),
    large_resources=(255, 72 << 10),
    decode={
        8: _DECODE_FEW_ROWS,
        16: {
            width: replace(config, registers=config.registers and _MANY_REGISTERS)
            for width, config in _DECODE_FEW_ROWS.items()
        },
        32: {64: LaunchConfig(64, 2, 4), 128: LaunchConfig(64, 2, 3), 256: LaunchConfig(32, 4, 3)},
    },
    # Swapping saves nothing with equal numbers of rows and tokens.
    decode_rows_first={
        64: LaunchConfig(64, 4, 4),
        128: LaunchConfig(64, 4, 3),
        256: LaunchConfig(32, 4, 3),
        512: LaunchConfig(32, 8, 2),
        1024: LaunchConfig(16, 8, 2),
    },
    extend={
        64: LaunchConfig(64, 8, 2, rows=64),
        128: LaunchConfig(32, 8, 2, rows=64),
        256: LaunchConfig(32, 4, 2, rows=32),
        512: LaunchConfig(32, 8, 1, rows=32),
        1024: LaunchConfig(16, 8, 1),
    },
)
_FAMILIES = {
    # Two programs of four warps on one SM: the softmax of one overlaps with the products of the
    # other.
    "sm_90": replace(
        _CUDA,
        extend=_CUDA.extend | dict.fromkeys((64, 128), LaunchConfig(64, 4, 2, rows=64)),
        latent=LaunchConfig(32, 4, 3),
        has_warp_groups=True,
    ),
    "sm_": _CUDA,  # the kernels have not run on these GPUs
    # Products have 16 rows. Each of the four SIMD units has 512 registers per lane.
    "gfx": Family(
        resources={16: {"registers": 256, "num_warps": 1, "shared": 16 << 10}},
        other_resources=(256, 16 << 10),
        large_resources=(512, 16 << 10),
        decode={16: {128: LaunchConfig(32, 1, 2), 256: LaunchConfig(32, 2, 2)}},
        decode_rows_first={
            128: LaunchConfig(32, 2, 2),
            256: LaunchConfig(32, 4, 2),
            512: LaunchConfig(32, 8, 1),
            1024: LaunchConfig(16, 8, 1),
        },
        extend={
            64: LaunchConfig(64, 4, 1, rows=128),
            128: LaunchConfig(32, 4, 1, rows=128),
            256: LaunchConfig(32, 4, 1, rows=64),
            512: LaunchConfig(32, 8, 1, rows=32),
            1024: LaunchConfig(16, 8, 1),
        },
        latent=LaunchConfig(32, 4, 1, isolated=False),
    ),
}
# For float32 operands, which need many registers.
_DECODE_FLOAT32 = {
    128: LaunchConfig(32, 4, 2),
    256: LaunchConfig(16, 8, 2),
    1024: LaunchConfig(16, 8, 1),
}
_EXTEND_FLOAT32 = {128: LaunchConfig(32, 4, 1), 1024: LaunchConfig(16, 8, 1)}


def choose_schedule_config(target: Target, *, latent: bool = False) -> ScheduleConfig:
    """Return the parameters by which schedules split sequences."""
    # Products limit programs that read latents: a token takes 80 ns, and all programs are needed.
    config = ScheduleConfig(merge_cost=2.0, max_growth=1) if latent else ScheduleConfig()
    return _apply_parameters(config, target)


def get_family(target: Target) -> Family:
    """Return the launch parameters of a GPU's family."""
    return next(family for name, family in _FAMILIES.items() if target.name.startswith(name))


def estimate_programs(
    target: Target, rows: int = 1, config: LaunchConfig | None = None, *, latent: bool = False
) -> int:
    """Return the number of programs in decoding that should run on one SM.

    Args:
        target: The GPU.
        rows: Query rows per KV head. Up to FEW_ROWS, launch parameters are chosen so that this
            number fits, for head sizes up to 256 and any format.
        config: Launch parameters for more rows or other products, for which the result is a guess.
        latent: Whether the call reads latents.
    """
    family = get_family(target)
    if config is None and rows > FEW_ROWS:
        config = choose_decode_config(target, Workload(128, rows))
    if config is None:
        resources = family.resources[min(limit for limit in family.resources if rows <= limit)]
    else:
        is_large = latent or config.rows > 32
        registers, shared = family.large_resources if is_large else family.other_resources
        registers = config.registers or registers
        resources = {"registers": registers, "num_warps": config.warps, "shared": shared}
    return int(target.parameters.get("programs") or max(1, target.count_programs(**resources)))


def _look_up(table: _Table, width: int) -> LaunchConfig:
    return table[min((limit for limit in table if width <= limit), default=max(table))]


# Smallest contraction of a product whose operands are unpacked codes: tokens, and the head size.
MIN_PACKED_TILE = 32


class Workload(NamedTuple):
    """Properties of a call that launch parameters depend on, in addition to the GPU.

    Attributes:
        width: The larger head size, padded to a power of two.
        rows: Query rows per KV head. A program may take fewer, so that there are several blocks.
        has_float32_operands: Whether the operands of products are float32.
        has_16_bit_side: Whether K or V is stored in 16 bits or more.
        has_bias: Whether there is a bias.
        has_query_masks: Whether there is a mask for each query, so that all tiles are masked.
        is_latent: Whether the call reads latents.
        is_widened: Whether codes were decoded to 16 bits before, so that tiles are operands.
        is_packed: Whether K or V has codes of fewer than 8 bits.
    """

    width: int
    rows: int
    has_float32_operands: bool = False
    has_16_bit_side: bool = False
    has_bias: bool = False
    has_query_masks: bool = False
    is_latent: bool = False
    is_widened: bool = False
    is_packed: bool = False


def choose_decode_config(target: Target, workload: Workload) -> LaunchConfig:
    """Return the launch parameters for decoding."""
    family = get_family(target)
    if workload.is_latent:
        return _choose_latent_config(target, workload)
    width = workload.width
    rows = workload.rows
    is_float32 = workload.has_float32_operands
    max_rows = min((limit for limit in (*family.resources, 32) if rows <= limit), default=64)
    # More rows need more shared memory than the 99 KB of some GPUs.
    if is_float32 and width > 64:
        max_rows = min(max_rows, 16)
    rows = min(max_rows, 32 if width > 256 else MAX_DECODE_ROWS)
    swapped_table = family.decode.get(rows, {})
    is_swapped = not is_float32 and width <= max(swapped_table, default=0)
    table = swapped_table if is_swapped else family.decode_rows_first
    config = _look_up(_DECODE_FLOAT32 if is_float32 else table, width)
    tile = config.tile
    registers = config.registers
    if workload.has_16_bit_side and not is_float32:
        tile = max(16, tile // 2)  # the same number of bytes
    if workload.has_bias:
        registers = None
    elif registers is not None and estimate_programs(target, rows) < 3:
        registers = _MANY_REGISTERS
    # Half of the unmasked tile. Masks or a bias with values for each query and token would spill in
    # a tile of that size.
    has_query_values = workload.has_query_masks or workload.has_bias
    masked_tile = 16 if has_query_values else max(16, tile // 2)
    config = replace(
        config,
        tile=tile,
        registers=registers,
        rows=rows,
        masked_tile=masked_tile,
        swapped=is_swapped,
    )
    return _finish(config, target, workload)


def choose_extend_config(target: Target, workload: Workload) -> LaunchConfig:
    """Return the launch parameters for extending."""
    family = get_family(target)
    if workload.is_latent:
        return _choose_latent_config(target, workload)
    is_float32 = workload.has_float32_operands
    config = _look_up(_EXTEND_FLOAT32 if is_float32 else family.extend, workload.width)
    lacks_registers = not is_float32 and not family.has_warp_groups
    num_removed = 1 if lacks_registers and workload.has_16_bit_side else 0
    config = replace(
        config,
        stages=max(1, config.stages + (1 if workload.is_widened else 0) - num_removed),
        masked_tile=max(16, config.tile // 2),
    )
    if family.has_warp_groups and not is_float32:
        config = _share_tiles(config, workload)
    if lacks_registers and target.is_nvidia and workload.has_query_masks:
        config = replace(config, registers=_MANY_REGISTERS)
    return _finish(config, target, workload)


def _share_tiles(config: LaunchConfig, workload: Workload) -> LaunchConfig:
    """Let two groups of four warps read the same tile, if they have enough registers."""
    if workload.width <= 128 <= workload.rows and not workload.is_widened:
        return replace(config, rows=128, warps=8)
    if 128 < workload.width <= 256 and (workload.is_widened or workload.has_16_bit_side):
        return replace(config, rows=64, warps=8)
    return config


def _choose_latent_config(target: Target, workload: Workload) -> LaunchConfig:
    family = get_family(target)
    config = family.latent
    is_masked = workload.has_query_masks or workload.has_bias
    if workload.has_float32_operands or workload.width > 512:
        config = replace(config, tile=16, warps=8, stages=1)
    elif family.has_warp_groups and workload.rows > FEW_LATENT_ROWS and not is_masked:
        # The tile has the same number of bytes for 8 and 16 bits.
        config = LaunchConfig(32 if workload.has_16_bit_side else 64, warps=8, stages=2, rows=64)
    elif is_masked and target.is_nvidia:
        config = replace(config, warps=8)
    elif workload.width < 512:
        # More threads would have fewer than 16 bytes of a quarter. AMD's warps have 64 threads.
        config = replace(config, warps=4 if target.is_nvidia else 2)
    return _finish(config, target, workload)


def _finish(config: LaunchConfig, target: Target, workload: Workload) -> LaunchConfig:
    config = _apply_parameters(config, target)
    if not workload.is_packed:
        return config
    # In products over 16 tokens, Triton uses operands that were joined from parts twice.
    return replace(
        config,
        tile=max(MIN_PACKED_TILE, config.tile),
        masked_tile=max(MIN_PACKED_TILE, config.masked_tile),
    )


def _apply_parameters(config: _Config, target: Target) -> _Config:
    overrides = {
        name: parameter for name, parameter in target.parameters.items() if hasattr(config, name)
    }
    return replace(config, **overrides) if overrides else config
