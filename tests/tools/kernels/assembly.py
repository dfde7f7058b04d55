"""Read the machine code of a compiled kernel: registers, spills, and the loop that reads pages.

NVIDIA's code is disassembled by tools in Triton's wheel (nvdisasm, cuobjdump). For AMD's GPUs
Triton keeps the assembly. No GPU is needed.
"""

import re
import subprocess
import tempfile
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Assembly:
    """Properties of a kernel's machine code.

    Attributes:
        registers: Registers per thread. On AMD, the sum of vector and accumulation registers.
        spills: Number of accesses to local memory (NVIDIA), or of spilled vector registers (AMD).
        loop_spills: Number of spills in the main loop. NVIDIA only.
        doubles: Number of float64 instructions.
        loop_size: Number of instructions of the main loop, or 0. The main loop is the innermost
            loop with matrix products that has the most 16-byte loads. The shortest loop wins a tie.
        wide_bytes: Bytes that a thread loads in the loop with 16-byte loads from global memory.
        byte_loads: Number of loads of single bytes from shared memory in the loop.
        conversions: Number of instructions that convert 8-bit floating-point values, in the loop,
            or in the whole kernel if it has no loop.
        fused_products: Number of unrounded products with log2(e), fused with a sum. NVIDIA only.
        hgmma, hmma, ldsm: Number of products of a warp group, of products of a warp, and of loads
            of matrices from shared memory, in the loop. NVIDIA only.
        cycles: Predicted cycles of an SM for one warp's share of the loop, see `predict_cycles`.
            sm_90 only.
    """

    registers: int
    spills: int
    doubles: int
    loop_size: int
    wide_bytes: int
    byte_loads: int
    conversions: int
    loop_spills: int = 0
    fused_products: int = 0
    hgmma: int = 0
    hmma: int = 0
    ldsm: int = 0
    cycles: float = 0.0


def read_assembly(asm: dict[str, Any]) -> Assembly:
    """Return the properties of a kernel, given the `asm` of Triton's compiled kernel."""
    if "amdgcn" in asm:
        return read_amd(asm["amdgcn"])
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(asm["cubin"])
        usage = _run_tool("cuobjdump", "--dump-resource-usage", binary)
        # -ndf skips the analysis of data flow, which takes a quarter of the time.
        return read_nvidia(_run_tool("nvdisasm", "-c", "-ndf", binary), usage)


def _run_tool(name: str, *arguments: str | Path) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


# "/*0a30*/   @!P0 LDGSTS.E.BYPASS.128 [R5], [R6.64] ;" and ".L_x_3:"
_SASS = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T0-9]+\s+)?(?P<line>[A-Z][^;]*);")
_SASS_LABEL = re.compile(r"^(\.L_x_\d+):", re.MULTILINE)
_SASS_JUMP = r"BRA.*\((\.L_x_\d+)\)"
_SASS_PRODUCT = r"(H|Q|I|B|O)?G?MMA\b|UTC\w*MMA"
_SASS_WIDE = r"(LDG|LDGSTS)\.\S*\b128\b"
_SASS_SPILL = r"(STL|LDL)\b"
_SASS_FUSED = r"FFMA\b.*\b1\.44269502"
_SASS_DOUBLE = r"D(ADD|MUL|FMA|SETP|MNMX)\b|[IF]2F\.F64|F2F\.F32\.F64|F2I\S*\.F64|DMMA"


def read_nvidia(text: str, usage: str) -> Assembly:
    """Return the properties, given nvdisasm's `text` and cuobjdump's resource `usage`."""
    instructions, labels = _find_instructions(text, _SASS, _SASS_LABEL)
    loop = _find_main_loop(instructions, labels, _SASS_JUMP, _SASS_PRODUCT, _SASS_WIDE)
    return Assembly(
        registers=_read_field(r"REG:(\d+)", usage),
        spills=_count(_SASS_SPILL, instructions),
        loop_spills=_count(_SASS_SPILL, loop),
        doubles=_count(_SASS_DOUBLE, instructions),
        loop_size=len(loop),
        wide_bytes=16 * _count(_SASS_WIDE, loop),
        byte_loads=_count(r"LDS\.[US]8\b", loop),
        conversions=_count(r"F2FP\.\S*(E4M3|E5M2)", loop or instructions),
        fused_products=_count(_SASS_FUSED, instructions),
        hgmma=_count(r"HGMMA\b", loop),
        hmma=_count(r"HMMA\b", loop),
        ldsm=_count(r"LDSM\b", loop),
        cycles=predict_cycles(loop),
    )


# A product of a warp group has 64 rows, N columns and 16 channels. Operands with a descriptor are
# read from shared memory. The first operand has 64 rows.
_SASS_GROUP_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x16\S* \w+, (gdesc)?")
# Accesses to shared and local memory. Their last field is the number of bits of a lane, or the
# number of 8 x 8 matrices of 16 bits.
_SASS_SHARED = re.compile(r"(LDSM|STSM|LDGSTS|LDS|STS|LDL|STL)\b\S*?(?:\.(4|2|128|64|U8|S8))?\s")


def predict_cycles(loop: Sequence[str]) -> float:
    """Return the cycles of an SM of sm_90 for one warp's share of a loop.

    The result is the sum of the cycles of issuing, of products and of accesses to shared memory,
    because they do not overlap if a single program runs on an SM and its warps wait for each other.
    A product of a warp group reads its operands while it multiplies. Latencies do not count. Per
    cycle, an SM issues four instructions, multiplies 2,048 pairs and accesses 128 bytes of shared
    memory.
    """
    cycles = len(loop) / 4 + _count(r"HMMA\.16816\b", loop)
    for line in loop:
        if match := _SASS_GROUP_PRODUCT.match(line):
            columns = int(match[1])
            rows_in_shared_memory = columns + 64 if match[2] else columns
            num_bytes = rows_in_shared_memory * 16 * 2
            cycles += max(64 * columns * 16 / 2048, num_bytes / 128) / 4
        elif match := _SASS_SHARED.match(line):
            # Without a field, a lane accesses 32 bits.
            cycles += {"4": 4, "128": 4, "2": 2, "64": 2}.get(match[2], 1)
    return cycles


# "  v_mfma_f32_16x16x32_fp8_fp8 a[0:3], ..." and ".LBB0_5:"
_GCN = re.compile(r"^\s+(?P<line>[a-z]+_[a-z0-9_]+\b[^\n;]*)", re.MULTILINE)
_GCN_LABEL = re.compile(r"^(\.LBB\d+_\d+):", re.MULTILINE)
_GCN_JUMP = r"s_c?branch\S*\s+(\.LBB\d+_\d+)"
_GCN_PRODUCT = r"v_s?mfma"
_GCN_WIDE = r"(global|buffer|flat)_load_(lds_)?dwordx4"


def read_amd(text: str) -> Assembly:
    """Return the properties, given the assembly `text` of a kernel for AMD's GPUs."""
    instructions, labels = _find_instructions(text[: text.find(".amdhsa_kernel")], _GCN, _GCN_LABEL)
    loop = _find_main_loop(instructions, labels, _GCN_JUMP, _GCN_PRODUCT, _GCN_WIDE)
    return Assembly(
        registers=_read_field(r"\.vgpr_count:\s+(\d+)", text),
        spills=_read_field(r"\.vgpr_spill_count:\s+(\d+)", text),
        doubles=_count(r"v_\w+_f64", instructions),
        loop_size=len(loop),
        wide_bytes=16 * _count(_GCN_WIDE, loop),
        byte_loads=_count(r"ds_read_[ui]8", loop),
        conversions=_count(r"v_cvt_\w*(fp8|bf8)", loop or instructions),
    )


def _read_field(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match is not None, (pattern, text)
    return int(match[1])


def _find_instructions(
    text: str, instruction: re.Pattern[str], label: re.Pattern[str]
) -> tuple[list[str], dict[str, int]]:
    """Return the instructions, and for each label the index of the instruction after it."""
    matches = list(instruction.finditer(text))
    starts = [match.start() for match in matches]
    labels = {match[1]: bisect(starts, match.start()) for match in label.finditer(text)}
    return [match["line"].strip() for match in matches], labels


def _find_main_loop(
    instructions: Sequence[str], labels: dict[str, int], jump: str, product: str, wide_load: str
) -> Sequence[str]:
    """Return the instructions of the main loop (see `Assembly`)."""
    jumps = [re.match(jump, line) for line in instructions]
    spans = [
        (labels.get(match[1], len(instructions)), end) for end, match in enumerate(jumps) if match
    ]
    loops = [
        range(start, end + 1)
        for start, end in set(spans)
        if start <= end and _count(product, instructions[start : end + 1])
    ]
    inner_loops = [
        instructions[loop.start : loop.stop]
        for loop in loops
        if not any(_is_inside(other, loop) for other in loops)
    ]
    main_loop = min(inner_loops, key=lambda loop: (-_count(wide_load, loop), len(loop)), default=[])
    return [line for line in main_loop if not line.startswith("NOP")]


def _is_inside(loop: range, outer_loop: range) -> bool:
    return loop != outer_loop and outer_loop.start <= loop.start and loop.stop <= outer_loop.stop


def _count(pattern: str, instructions: Sequence[str]) -> int:
    regex = re.compile(pattern)
    return sum(regex.match(instruction) is not None for instruction in instructions)
