"""Machine code of a compiled kernel: its registers, its spills, and the loop that reads pages.

Read from the machine code that Triton made: of NVIDIA's by the tools that come with Triton
(nvdisasm, cuobjdump), of AMD's from the assembly itself. No GPU is needed.
"""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Assembly:
    """Facts about a kernel's machine code.

    Attributes:
        registers: per thread; of AMD's, vector and accumulation registers together.
        spills: of NVIDIA's, instructions that keep registers in local memory; of AMD's, vector
            registers that are kept in memory.
        loop_spills: of NVIDIA's, those of them that are in the main loop.
        doubles: instructions on float64.
        loop: instructions of the main loop: the innermost one that multiplies matrices. Where
            there are several, that with the most loads of 16 bytes, and of those the shortest: the
            others mask what some row does not see. 0: none.
        wide_bytes: bytes that a thread loads in it, 16 at a time, from global memory.
        byte_loads: loads of single bytes from shared memory in it.
        conversions: instructions in it that convert 8-bit floating-point numbers.
        ahead: of what a round of it loads 16 bytes at a time, the most that is under way while it
            multiplies: 2.0 are two rounds.
    """

    registers: int
    spills: int
    doubles: int
    loop: int
    wide_bytes: int
    byte_loads: int
    conversions: int
    loop_spills: int = 0
    ahead: float = 0.0


def read_assembly(asm: dict[str, Any]) -> Assembly:
    """Return what the `asm` of a kernel that Triton compiled says."""
    if "amdgcn" in asm:
        return read_amd(asm["amdgcn"])
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(asm["cubin"])
        usage = _run_tool("cuobjdump", "--dump-resource-usage", str(binary))
        # Without its analysis of data flow, which takes a quarter of the time, and is not read.
        return read_nvidia(_run_tool("nvdisasm", "-c", "-ndf", str(binary)), usage)


def _run_tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    process = subprocess.run([path, *arguments], capture_output=True, text=True, check=True)
    return process.stdout


# "/*0a30*/   @!P0 LDGSTS.E.BYPASS.128 [R5], [R6.64] ;" and ".L_x_3:"
_SASS = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T0-9]+\s+)?(?P<line>[A-Z][^;]*);")
_SASS_LABEL = re.compile(r"^(\.L_x_\d+):", re.MULTILINE)
_SASS_JUMP = re.compile(r"BRA.*\((\.L_x_\d+)\)")
_SASS_PRODUCT = re.compile(r"(H|Q|I|B|O)?G?MMA\b|UTC\w*MMA")
_SASS_WIDE = r"(LDG|LDGSTS)\.\S*\b128\b"
_SASS_SPILL = r"(STL|LDL)\b"
_SASS_DOUBLE = re.compile(r"D(ADD|MUL|FMA|SETP|MNMX)\b|[IF]2F\.F64|F2F\.F32\.F64|F2I\S*\.F64|DMMA")


def read_nvidia(text: str, usage: str) -> Assembly:
    """Return what nvdisasm's `text` and cuobjdump's resource `usage` say."""
    lines, labels = _find_lines(text, _SASS, _SASS_LABEL)
    loop = _find_main_loop(lines, labels, _SASS_JUMP, _SASS_PRODUCT, _SASS_WIDE)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    return Assembly(
        registers=int(registers[1]),
        spills=_count(_SASS_SPILL, lines),
        loop_spills=_count(_SASS_SPILL, loop),
        doubles=sum(_SASS_DOUBLE.match(line) is not None for line in lines),
        loop=len(loop),
        wide_bytes=16 * _count(_SASS_WIDE, loop),
        byte_loads=_count(r"LDS\.[US]8\b", loop),
        conversions=_count(r"F2FP\.\S*(E4M3|E5M2)", loop),
        ahead=_count_copies(loop),
    )


def _count_copies(loop: Sequence[str]) -> float:
    """Return the rounds of copies to shared memory that are under way together.

    What the strictest wait leaves, and the groups that a round adds. Loads to registers are not
    counted: what they bring is waited for in the same round.
    """
    groups = _count(r"LDGDEPBAR\b", loop)
    left = [int(m[1], 16) for line in loop if (m := re.match(r"DEPBAR\.LE SB0, (\w+)", line))]
    copied = groups and left and _count(r"LDGSTS\.\S*\b128\b", loop)
    return (min(left) + groups) / groups if copied else 0.0


# "  v_mfma_f32_16x16x32_fp8_fp8 a[0:3], ..." and ".LBB0_5:"
_GCN = re.compile(r"^\s+(?P<line>[a-z]+_[a-z0-9_]+\b[^\n;]*)", re.MULTILINE)
_GCN_LABEL = re.compile(r"^(\.LBB\d+_\d+):", re.MULTILINE)
_GCN_JUMP = re.compile(r"s_c?branch\S*\s+(\.LBB\d+_\d+)")
_GCN_PRODUCT = re.compile(r"v_s?mfma")
_GCN_LOAD = re.compile(r"(global|buffer|flat)_load_")
_GCN_WIDE_LOAD = re.compile(r"(global|buffer|flat)_load_(lds_)?dwordx4")


def read_amd(text: str) -> Assembly:
    """Return what the assembly `text` of a kernel for AMD says."""
    code = text[: text.find(".amdhsa_kernel")]
    lines, labels = _find_lines(code, _GCN, _GCN_LABEL)
    loop = _find_main_loop(lines, labels, _GCN_JUMP, _GCN_PRODUCT, _GCN_WIDE_LOAD.pattern)

    def read_field(name: str) -> int:
        field = re.search(rf"\.{name}:\s+(\d+)", text)
        assert field is not None, name
        return int(field[1])

    return Assembly(
        registers=read_field("vgpr_count"),
        spills=read_field("vgpr_spill_count"),
        doubles=_count(r"v_\w+_f64", lines),
        loop=len(loop),
        wide_bytes=16 * _count(_GCN_WIDE_LOAD.pattern, loop),
        byte_loads=_count(r"ds_read_[ui]8", loop),
        conversions=_count(r"v_cvt_\w*(fp8|bf8)", loop),
        ahead=_count_loads_ahead(loop),
    )


def _count_loads_ahead(loop: Sequence[str]) -> float:
    """Return the share of AMD's wide loads that is under way at a product of the loop, at most.

    They end in order: a wait for vmcnt(n) leaves the last n.
    """
    under_way: list[bool] = []
    most = 0
    for line in [*loop, *loop]:
        if _GCN_LOAD.match(line):
            under_way.append(_GCN_WIDE_LOAD.match(line) is not None)
        elif left := re.match(r"s_waitcnt.*vmcnt\((\d+)\)", line):
            under_way = under_way[max(0, len(under_way) - int(left[1])) :]
        elif _GCN_PRODUCT.match(line):
            most = max(most, sum(under_way))
    return most / max(1, _count(_GCN_WIDE_LOAD.pattern, loop))


def _find_lines(
    text: str, instruction: re.Pattern[str], label: re.Pattern[str]
) -> tuple[list[str], dict[str, int]]:
    """Return the instructions, and for each label the index of the one that follows it."""
    instructions = [(m.start(), m["line"].strip()) for m in instruction.finditer(text)]
    starts = [start for start, _ in instructions]
    labels = {
        m[1]: next((i for i, start in enumerate(starts) if start > m.start()), len(starts))
        for m in label.finditer(text)
    }
    return [line for _, line in instructions], labels


def _find_main_loop(
    lines: Sequence[str],
    labels: dict[str, int],
    jump: re.Pattern[str],
    product: re.Pattern[str],
    wide: str,
) -> Sequence[str]:
    """Return the instructions of the main loop, see `Assembly`; `wide` are its widest loads."""
    loops = set()
    for end, line in enumerate(lines):
        target = jump.match(line)
        start = labels.get(target[1]) if target else None
        if start is not None and start <= end:
            loops.add((start, end))
    multiply = [i for i, line in enumerate(lines) if product.match(line)]
    loops = {(a, b) for a, b in loops if any(a <= i <= b for i in multiply)}
    inner = [
        (a, b)
        for a, b in loops
        if not any(a <= c and d <= b and (c, d) != (a, b) for c, d in loops)
    ]

    def rank(loop: tuple[int, int]) -> tuple[int, int]:
        start, end = loop
        return -_count(wide, lines[start : end + 1]), end - start

    start, end = min(inner, key=rank, default=(0, -1))
    return [line for line in lines[start : end + 1] if not line.startswith("NOP")]


def _count(pattern: str, lines: Sequence[str]) -> int:
    compiled = re.compile(pattern)
    return sum(compiled.match(line) is not None for line in lines)
