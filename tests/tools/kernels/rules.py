"""Rules that the machine code of kernels must obey: spills, shared memory, loads, conversions."""

from collections.abc import Iterator

from hf_fp8kv.formats import FORMATS
from hf_fp8kv.ops.triton.target import CHIPS, Target
from hf_fp8kv.ops.triton.tuning import FEW_LATENT_ROWS, estimate_programs, get_family

from .assembly import Assembly
from .variants import Variant

# Maximum bytes of shared memory of one program, by the name of the GPU. NVIDIA reserves one KiB.
MAX_SHARED_BYTES = {
    name: chip.shared_bytes - 1024 if name.startswith("sm_") else chip.shared_bytes
    for name, (_, chip) in CHIPS.items()
}
# Maximum number of spills outside the main loop. Newer versions of ptxas spill a few values that
# are only used after the loop.
MAX_SPILLS = 8
# A program with 64 rows of latents uses all registers. It spills values that are needed before and
# after the main loop, and a few that the loop needs. Rotations mix all channels of rows.
MAX_LATENT_SPILLS = 80
MAX_LATENT_LOOP_SPILLS = 20
MAX_ROTATED_LATENT_SPILLS = 150


def _has_many_latent_rows(target: Target, variant: Variant) -> bool:
    if "latent" not in variant.extras or {"complete", "bias"} & {*variant.extras}:
        return False
    num_rows = variant.queries_per_head * variant.num_tokens
    return get_family(target).has_warp_groups and num_rows > FEW_LATENT_ROWS


def _get_max_spills(target: Target, variant: Variant, assembly: Assembly) -> tuple[int, int]:
    """Return the maximum number of spills, and of those in the main loop."""
    if not assembly.loop_size or not target.is_nvidia:
        return 0, 0
    has_many_rows = _has_many_latent_rows(target, variant)
    max_loop_spills = MAX_LATENT_LOOP_SPILLS if has_many_rows else 0
    if {"latent", "rotated"} <= set(variant.extras):
        return MAX_ROTATED_LATENT_SPILLS, max_loop_spills
    return MAX_LATENT_SPILLS if has_many_rows else MAX_SPILLS, max_loop_spills


def find_violations(
    target: Target, variant: Variant, assembly: Assembly, shared_bytes: int, num_warps: int,
    tile_tokens: int, *, converts: bool,
) -> Iterator[str]:  # fmt: skip
    """Yield a message for each rule that a kernel violates.

    Args:
        shared_bytes: Bytes of shared memory.
        num_warps: Number of warps of a program.
        tile_tokens: Number of tokens that a round of the main loop reads. 0 if the loop need not
            be fast.
        converts: Whether the kernel reads 8-bit codes of K that no earlier kernel has converted.
    """
    max_spills, max_loop_spills = _get_max_spills(target, variant, assembly)
    if assembly.loop_spills > max_loop_spills:
        yield f"{assembly.loop_spills} spills in the main loop"
    elif assembly.spills > max_spills:
        yield f"{assembly.spills} spills"
    if shared_bytes > MAX_SHARED_BYTES[target.name]:
        yield f"{shared_bytes} bytes of shared memory, more than {MAX_SHARED_BYTES[target.name]}"
    if assembly.doubles:
        yield f"{assembly.doubles} float64 instructions"
    if assembly.fused_products and "bias" in variant.extras:
        # A fused product is not rounded. A hidden logit minus its rounded value would not be 0.
        yield f"{assembly.fused_products} products with log2(e) fused with sums"
    # Moves of bytes also convert E5M2 to float16, so E5M2 needs no instruction.
    fmt = FORMATS.get(variant.k)
    is_native = fmt is not None and fmt.mantissa_bits > 2 and target.converts(fmt)
    if converts and is_native and not assembly.conversions:
        yield "no native conversion"
    if not tile_tokens:
        return
    if not assembly.loop_size:
        yield "no main loop"
        return
    if _has_many_latent_rows(target, variant) and (assembly.hmma or not assembly.hgmma):
        yield f"{assembly.hgmma} products of warp groups and {assembly.hmma} of warps in the loop"
    # The 8-bit RoPE part of latents has too few bytes for 16-byte loads.
    has_narrow_v = "latent" in variant.extras and variant.v in FORMATS
    num_lanes = 32 if target.is_nvidia else 64
    wide_bytes = assembly.wide_bytes * num_lanes
    needed_bytes = 0.0
    names = (variant.k,) if has_narrow_v else (variant.k, variant.v)
    for name, dim in zip(names, variant.dims, strict=False):
        bits = FORMATS[name].bits if name in FORMATS else 8 * variant.dtype.itemsize
        # The smallest part of packed codes has two bits per code. Some launches have fewer than 16
        # bytes of it for each thread.
        if bits >= 8 or tile_tokens * dim * 2 // 8 >= 16 * num_lanes * num_warps:
            needed_bytes += tile_tokens * dim * bits / 8 / num_warps
    if wide_bytes < needed_bytes:
        yield f"{wide_bytes} of {needed_bytes:.0f} bytes in 16-byte loads"
    if assembly.byte_loads and not has_narrow_v:
        yield f"{assembly.byte_loads} loads of single bytes from shared memory"
    num_programs = target.count_programs(assembly.registers, num_warps, shared_bytes)
    expected_programs = estimate_programs(target, variant.queries_per_head * variant.num_tokens)
    # Only NVIDIA's assembly unpacks four codes at once.
    unpacks_single_codes = not target.is_nvidia and any(
        FORMATS[name].bits < 8 for name in (variant.k, variant.v) if name in FORMATS
    )
    if (
        variant.is_main
        and variant.operation == "decode"
        and num_programs < expected_programs
        and not unpacks_single_codes
    ):
        yield f"{num_programs} of {expected_programs} programs fit on an SM"
