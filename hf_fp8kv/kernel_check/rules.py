"""Rules of `check --kernels`: spills, shared memory, width of loads, native conversions."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..formats import FORMATS, Format
from ..ops.triton.target import Target
from ..ops.triton.tuning import programs_per_processor
from .assembly import Assembly
from .variants import Variant


@dataclass(frozen=True)
class Device:
    """Resources that the programs of one processor share.

    Attributes:
        shared: bytes of shared memory that one program may have.
        shared_in_all: bytes that all of them have together.
        threads: at most that many of them.
    """

    shared: int
    shared_in_all: int
    threads: int


# CUDA C++ Programming Guide, compute capabilities; CDNA 3 and 4 ISA, local data share.
TARGETS = {
    "sm_80": Device(163 << 10, 164 << 10, 2048),
    "sm_86": Device(99 << 10, 100 << 10, 1536),
    "sm_89": Device(99 << 10, 100 << 10, 1536),
    "sm_90": Device(227 << 10, 228 << 10, 2048),
    "sm_100": Device(227 << 10, 228 << 10, 2048),
    "sm_120": Device(99 << 10, 100 << 10, 1536),
    "gfx942": Device(64 << 10, 64 << 10, 2048),
    "gfx950": Device(160 << 10, 160 << 10, 2048),
}
# Bytes of shared memory that a program takes on NVIDIA's besides its own.
RESERVED = 1024


def programs_that_fit(target: Target, registers: int, warps: int, shared: int) -> int:
    """Return how many programs fit on a processor: by registers, threads and shared memory."""
    device = TARGETS[target.name]
    if target.is_nvidia:
        # 64 K registers, given out to warps by eight per thread.
        by_registers = 65536 // (-(-registers // 8) * 8 * 32 * warps)
        return min(
            by_registers,
            device.threads // (32 * warps),
            device.shared_in_all // (shared + RESERVED),
        )
    # Four units, each with 512 registers per lane for its warps, at most eight.
    per_unit = min(8, 512 // (-(-max(registers, 1) // 8) * 8))
    return min(per_unit * 4 // warps, device.shared_in_all // max(shared, 1))


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
    if assembly.spills:
        yield f"{assembly.spills} spills"
    if shared > TARGETS[target.name].shared:
        yield f"{shared} bytes of shared memory, there are {TARGETS[target.name].shared}"
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
    if assembly.byte_loads:
        yield f"{assembly.byte_loads} loads of single bytes from shared memory"
    if not assembly.conversions and any(
        name in FORMATS and _needs_conversion(target, FORMATS[name])
        for name in (variant.k, variant.v)
    ):
        yield "no native conversion"
    if variant.main and variant.operation == "decode" and programs < programs_per_processor(target):
        yield f"{programs} programs fit on a processor, of {programs_per_processor(target)}"


def _needs_conversion(target: Target, fmt: Format) -> bool:
    """Return whether codes are converted by an instruction: E5M2's may be bytes of a float16."""
    return target.converts(fmt) and fmt.exponent_bits < 5
