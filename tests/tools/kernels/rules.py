"""Rules that the machine code of kernels must obey: spills, shared memory, loads, conversions."""

from collections.abc import Iterator

from hf_fp8kv.formats import FORMATS
from hf_fp8kv.ops.triton.target import CHIPS, Target
from hf_fp8kv.ops.triton.tuning import FEW_LATENT_ROWS, estimate_programs, get_family

from .assembly import Assembly
from .variants import Variant

# The GPUs, and the maximum bytes of shared memory of one program. NVIDIA reserves one KiB.
TARGETS = {
    name: chip.shared_bytes - 1024 * name.startswith("sm_") for name, (_, chip) in CHIPS.items()
}
# Maximum number of spills outside the main loop. During the loop, newer versions of ptxas keep a
# few values in memory that are used after it.
MAX_SPILLS = 8
# A program with latents uses all registers for its 64 rows. Values that the code before and after
# the main loop needs, and masked tiles, stay in memory. Prompts still take 0.68 to 0.77 of the time
# of 16 rows without spills (H200).
MAX_LATENT_SPILLS = 48


def _get_max_spills(target: Target, variant: Variant, assembly: Assembly) -> int:
    if not assembly.loop_size or not target.is_nvidia:
        return 0
    rows = variant.groups * variant.tokens
    has_many_rows = get_family(target).latent_many_rows and rows > FEW_LATENT_ROWS
    may_spill = "latent" in variant.extras and has_many_rows
    return MAX_LATENT_SPILLS if may_spill else MAX_SPILLS


def find_violations(
    target: Target, variant: Variant, assembly: Assembly, shared: int, warps: int, tile: int,
    *, converts: bool,
) -> Iterator[str]:  # fmt: skip
    """Yield a message for each rule that a kernel violates.

    Args:
        shared: Bytes of shared memory.
        warps: Warps of a program.
        tile: Number of tokens that a round of the main loop reads. 0 if the loop need not be fast.
        converts: Whether the kernel reads 8-bit codes of K that no earlier kernel has converted.
    """
    if assembly.loop_spills:
        yield f"{assembly.loop_spills} spills in the main loop"
    elif assembly.spills > _get_max_spills(target, variant, assembly):
        yield f"{assembly.spills} spills"
    if shared > TARGETS[target.name]:
        yield f"{shared} bytes of shared memory, the limit is {TARGETS[target.name]}"
    if assembly.doubles:
        yield f"{assembly.doubles} float64 instructions"
    if assembly.fused_products and "bias" in variant.extras:
        # The lowest value minus itself would not be 0.
        yield f"{assembly.fused_products} products with log2(e) fused with sums"
    # Moves of bytes also convert E5M2 to float16, so E5M2 needs no instruction.
    fmt = FORMATS.get(variant.k)
    is_native = fmt is not None and fmt.mantissa_bits > 2 and target.converts(fmt)
    if converts and is_native and not assembly.conversions:
        yield "no native conversion"
    if not tile:
        return
    if not assembly.loop_size:
        yield "no main loop"
        return
    # The 8-bit RoPE part of latents has too few bytes for 16-byte loads.
    has_narrow_v = "latent" in variant.extras and variant.v in FORMATS
    lanes = 32 if target.is_nvidia else 64
    wide_bytes = assembly.wide_bytes * lanes
    needed_bytes = 0.0
    for name, dim in list(zip((variant.k, variant.v), variant.dims, strict=True))[
        : 2 - has_narrow_v
    ]:
        bits = FORMATS[name].bits if name in FORMATS else 8 * variant.dtype.itemsize
        # Some launches have fewer than 16 bytes of each part of packed codes for a thread.
        if bits >= 8 or dim // 4 * tile >= 16 * lanes * warps:
            needed_bytes += dim * bits / 8 * tile / warps
    if wide_bytes < needed_bytes:
        yield f"{wide_bytes} of {needed_bytes:.0f} bytes in 16-byte loads"
    if assembly.byte_loads and not has_narrow_v:
        yield f"{assembly.byte_loads} loads of single bytes from shared memory"
    programs = target.count_programs(assembly.registers, warps, shared)
    expected = estimate_programs(target, variant.groups * variant.tokens)
    # Only NVIDIA's assembly unpacks four codes at once.
    is_slow = not target.is_nvidia and any(
        FORMATS[x].bits < 8 for x in (variant.k, variant.v) if x in FORMATS
    )
    if variant.is_main and variant.operation == "decode" and programs < expected and not is_slow:
        yield f"{programs} of {expected} programs fit on an SM"
