"""Rules that the machine code of kernels must obey: spills, shared memory, loads, conversions."""

from collections.abc import Iterator

from hf_fp8kv.formats import FORMATS
from hf_fp8kv.ops.triton.target import CHIPS, Target
from hf_fp8kv.ops.triton.tuning import FEW_LATENT_ROWS, expected_programs, family_of

from .assembly import Assembly
from .variants import Variant

# Maximum bytes of shared memory of one program. NVIDIA reserves one KiB.
TARGETS = {
    name: has.shared - (1024 if name.startswith("sm_") else 0) for name, (_, has) in CHIPS.items()
}
# Newer versions of ptxas keep a few values outside the main loop that are used after it.
SPILLS_OUTSIDE = 8
# The 64 rows of a program of latents use all registers. Values for the code before and after the
# main loop, and for masked tiles, are kept in memory. Prompts still take 0.68 to 0.77 of the time
# of 16 rows without spills (H200).
LATENT_SPILLS_OUTSIDE = 48


def _spills_outside(target: Target, variant: Variant, assembly: Assembly) -> int:
    if not assembly.loop or not target.is_nvidia:
        return 0
    has_many_rows = (
        family_of(target).latent_many and variant.groups * variant.tokens > FEW_LATENT_ROWS
    )
    return LATENT_SPILLS_OUTSIDE if "latent" in variant.extras and has_many_rows else SPILLS_OUTSIDE


def find_violations(
    target: Target, variant: Variant, assembly: Assembly, shared: int, warps: int, tile: int,
    *, converts: bool,
) -> Iterator[str]:  # fmt: skip
    """Yield each rule that a kernel breaks.

    Args:
        shared: Bytes of shared memory.
        warps: Warps of a program.
        tile: Tokens that a round of the main loop reads. 0 if the kernel need not read pages fast.
        converts: Whether it reads 8-bit codes of K, which no earlier kernel has converted.
    """
    if assembly.loop_spills:
        yield f"{assembly.loop_spills} spills in the main loop"
    elif assembly.spills > _spills_outside(target, variant, assembly):
        yield f"{assembly.spills} spills"
    if shared > TARGETS[target.name]:
        yield f"{shared} bytes of shared memory, the limit is {TARGETS[target.name]}"
    if assembly.doubles:
        yield f"{assembly.doubles} float64 instructions"
    if assembly.fused and "bias" in variant.extras:
        # The lowest value minus itself would not be 0.
        yield f"{assembly.fused} products with log2(e) fused with sums"
    # Codes of E5M2 may also be converted to float16 by moves of bytes.
    stored = FORMATS.get(variant.k)
    is_native = stored is not None and stored.mantissa_bits > 2 and target.converts(stored)
    if converts and is_native and not assembly.conversions:
        yield "no native conversion"
    if not tile:
        return
    if not assembly.loop:
        yield "no main loop"
        return
    # The 8-bit RoPE part of latents has too few bytes for 16-byte loads.
    narrow_v = "latent" in variant.extras and variant.v in FORMATS
    width = variant.bytes_per_token - (variant.dims[1] if narrow_v else 0)
    wide, needed = assembly.wide_bytes * (32 if target.is_nvidia else 64), width * tile / warps
    if wide < needed:
        yield f"{wide} of {needed:.0f} bytes in 16-byte loads"
    if assembly.byte_loads and not narrow_v:
        yield f"{assembly.byte_loads} loads of single bytes from shared memory"
    programs = target.fit(assembly.registers, warps, shared)
    expected = expected_programs(target, variant.groups * variant.tokens)
    if variant.main and variant.operation == "decode" and programs < expected:
        yield f"{programs} programs fit on an SM, of {expected}"
