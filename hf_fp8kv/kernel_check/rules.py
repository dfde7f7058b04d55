"""Rules of `check --kernels`: spills, shared memory, width of loads, native conversions."""

from collections.abc import Iterator

from ..formats import FORMATS, Format
from ..ops.triton.target import RESOURCES, Target
from ..ops.triton.tuning import expected_programs
from .assembly import Assembly
from .variants import Variant

# Bytes of shared memory that one program may have: of NVIDIA's all but one KiB.
TARGETS = {
    name: has.shared - (1024 if name.startswith("sm_") else 0) for name, has in RESOURCES.items()
}
# Outside of the main loop: newer versions of ptxas keep a few numbers there that are used after it.
SPILLS_OUTSIDE = 8


def find_violations(
    target: Target,
    variant: Variant,
    assembly: Assembly,
    shared: int,
    programs: int,
    bytes_per_warp: float,
    reads: bool,
) -> Iterator[str]:
    """Yield each rule that a kernel breaks.

    Args:
        shared: bytes of shared memory.
        programs: how many fit on a processor.
        bytes_per_warp: bytes of K and V that a warp's share of a tile is.
        reads: whether it is a kernel with a main loop over pages that must be fast.
    """
    if assembly.loop_spills:
        yield f"{assembly.loop_spills} spills in the main loop"
    elif assembly.spills > (SPILLS_OUTSIDE if assembly.loop and target.is_nvidia else 0):
        yield f"{assembly.spills} spills"
    if shared > TARGETS[target.name]:
        yield f"{shared} bytes of shared memory, there are {TARGETS[target.name]}"
    if assembly.doubles:
        yield f"{assembly.doubles} float64 instructions"
    if not reads:
        return
    if not assembly.loop:
        yield "no main loop"
        return
    lanes = 32 if target.is_nvidia else 64
    if assembly.wide_bytes * lanes < bytes_per_warp:
        yield f"{assembly.wide_bytes * lanes} of {bytes_per_warp:.0f} bytes in 16-byte loads"
    if assembly.byte_loads and not variant.has_few_codes_of_v:
        yield f"{assembly.byte_loads} loads of single bytes from shared memory"
    if not assembly.conversions and any(
        name in FORMATS and _needs_conversion(target, FORMATS[name])
        for name in (variant.k, variant.v)
    ):
        yield "no native conversion"
    expected = expected_programs(target, variant.groups * variant.tokens)
    if variant.main and variant.operation == "decode" and programs < expected:
        yield f"{programs} programs fit on a processor, of {expected}"


def _needs_conversion(target: Target, fmt: Format) -> bool:
    """Return whether codes are converted by an instruction: E5M2's may be bytes of a float16."""
    return target.converts(fmt) and fmt.exponent_bits < 5
