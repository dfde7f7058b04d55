"""Tests that the interpreter of `make kernels-ptx` detects faults in a kernel's PTX.

Each fault replaces every match of a pattern in the text, as a wrong compiler or kernel would.
"""

import linecache
import re
import sys
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

if "tests.tools.ptx.plugin" not in sys.modules:
    pytest.skip("runs in `make kernels-ptx`", allow_module_level=True)

import hf_fp8kv.ops.triton
from hf_fp8kv.formats import AUTO
from hf_fp8kv.ops import reference
from hf_fp8kv.ops.triton import schedule
from hf_fp8kv.ops.triton.gather import gather
from hf_fp8kv.ops.triton.target import Target, assuming
from tests.ops import test_kernels_write as writing
from tests.ops.test_kernels_attention import attend_with_torch, prepare_expected, run_kernel
from tests.ops.test_ops import Case, compute_errors
from tests.tools.ptx import device, memory
from tests.tools.ptx.instructions import compile_program
from tests.tools.ptx.parse import parse

SOURCES = Path(hf_fp8kv.ops.triton.__file__).parent
COMMON_FIELDS = {"lengths": (700, 130, 64), "page_size": 64, "k_dim": 64, "v_dim": 64}


def check_attention(kernel: str, target: str, **options: object) -> None:
    case = Case("", **{**COMMON_FIELDS, "dtype": torch.bfloat16, **options})  # type: ignore[arg-type]
    pages, query, fields, expected = prepare_expected(case)
    with assuming(Target("cuda", int(target[3:]), 4)):
        actual = run_kernel(kernel, case, pages, query, **fields)
    torch_errors = compute_errors(attend_with_torch(case, pages, query, fields), expected)
    assert (compute_errors(actual, expected) <= 2 * torch_errors).all()


def check_schedule() -> None:
    lengths = torch.tensor([700, 130, 64], dtype=torch.int32)
    table = torch.full(
        (schedule.count_schedule_rows(lengths.device, 3, 2), 4), -77, dtype=torch.int32
    )
    schedule.fill_schedule(table, lengths, 1, 0, 0, 2)
    max_parts = schedule.get_max_parts(table, 3)
    sequences, part_counts = table[:max_parts, 0].tolist(), table[-3:, 1].tolist()
    num_parts = sum(part_counts)
    assert [sequences[:num_parts].count(index) for index in range(3)] == part_counts
    assert set(sequences[num_parts:]) == {-1}


def check_gather() -> None:
    case = writing.Case(lengths=(5, 37), page_size=16, center=True)
    pages = writing.make_noise_pages(case)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    scales = pages.regions["token_scales"]
    scales.copy_(torch.randn(scales.shape))
    arguments = (pages, lengths, "k", 0, 38, torch.float32, True)
    expected = reference.gather(*arguments)
    torch.testing.assert_close(gather(*arguments), expected, rtol=0, atol=0, equal_nan=True)


SCENARIOS: dict[str, Callable[[], None]] = {
    "decode": lambda: check_attention("decode", "sm_90"),
    # A causal mask would also hide a token past the end.
    "decode to the end": lambda: check_attention("decode", "sm_90", causal=False),
    "decode e3m4": lambda: check_attention(
        "decode", "sm_80", k_format="fp8_e3m4", v_format="fp8_e3m4"
    ),
    "extend": lambda: check_attention("extend", "sm_90", lengths=(200, 90), num_tokens=70),
    "extend sm_80": lambda: check_attention(
        "extend", "sm_80", lengths=(200, 90), num_tokens=70, k_format=AUTO, v_format=AUTO
    ),
    "schedule": check_schedule,
    "write": lambda: writing.check_write(
        writing.Case(num_tokens=37, lengths=(5, 32), page_size=64, k_dim=24, v_dim=40, limit=60)
    ),
    "gather": check_gather,
}


class PlantedFault(NamedTuple):
    """A change of one kernel, in its whole PTX or in the code of one source line."""

    scenario: str
    kernel: str
    source: str  # part of the source line, or "" for the whole text
    pattern: str
    replacement: str | Callable[[re.Match[str]], str]


NON_CODE_LINES = r"(?:\t\.loc[^\n]*\n|\t//[^\n]*\n|\$L[^\n]*\n)*"


def increment(match: re.Match[str]) -> str:
    return f"{match[1]}{int(match[2]) + 1}"


FAULTS = {
    "a wait one group too late": PlantedFault(
        "decode", "_attend", "", r"(cp\.async\.wait_group\s+)(\d+)", increment
    ),
    "no barrier after a wait": PlantedFault(
        "decode", "_attend", "", rf"(wait_group\s+\d+.\n{NON_CODE_LINES})\tbar\.sync\s+0", r"\1"
    ),
    "no barrier between warps' maxima": PlantedFault(
        "decode", "_attend", "",
        rf"(st\.shared\.b32[^\n]*\n{NON_CODE_LINES})\tbar\.sync\s+0", r"\1",
    ),
    "copies are in no group": PlantedFault("decode", "_attend", "", r"cp\.async\.commit_group", ""),
    "half of each copy": PlantedFault(
        "decode", "_attend", "", r"selp\.b32\s+(%r\d+), 16, 0", r"selp.b32 \1, 8, 0"
    ),
    "copies 16 bytes too far": PlantedFault(
        "decode", "_attend", "", r"(cp\.async\.cg\.shared\.global \[ %r\d+ \+ )0", r"\g<1>16"
    ),
    "the page after the right one": PlantedFault(
        "decode", "_attend", "next_tile * TILE", r"(ld\.global\.b32[^\n]*\+ )0 \]", r"\g<1>4 ]"
    ),
    "sums are not rescaled": PlantedFault(
        "decode", "_attend", "acc * per_row(alpha",
        r"mul\.f32\s+(%r\d+), (%r\d+), %r\d+", r"mov.b32 \1, \2",
    ),
    "one token too many": PlantedFault(
        "decode to the end", "_attend", "position < view.end", r"setp\.lt\.s32", "setp.le.s32"
    ),
    "K has the scale of V": PlantedFault(
        "decode", "_attend", "words << 16",
        r"shl\.b32\s+(%r\d+), (%r\d+), 16", r"and.b32 \1, \2, -65536",
    ),
    "a maximum of the wrong lanes": PlantedFault(
        "decode", "_attend", "", r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+, )4,", r"\g<1>8,"
    ),
    "all programs store one head": PlantedFault(
        "decode", "_attend", "", r"mov\.u32\s+(%r\d+), %ctaid\.x", r"mov.u32 \1, 0"
    ),
    "sums of another part": PlantedFault(
        "decode", "_combine", "part_l = tl.load", r"(ld\.global[^\n]*\+ )0 \]", r"\g<1>8 ]"
    ),
    "rows of a product in another order": PlantedFault(
        "decode e3m4", "_attend", "", r"(mma\.sync[^{]*\{[^}]*\}, \{ )(%r\d+), (%r\d+)", r"\1\3, \2"
    ),
    "a code in the wrong byte": PlantedFault(
        "decode e3m4", "_attend", "", r"(prmt\.b32 low, %r\d+, 0, )0x9180", r"\g<1>0x9181"
    ),
    "no fence before a product": PlantedFault(
        "extend", "_attend", "", r"fence\.proxy\.async\.shared::cta", ""
    ),
    "products are not waited for": PlantedFault(
        "extend", "_attend", "", r"(wgmma\.wait_group\.sync\.aligned )(\d+)", increment
    ),
    "a matrix not transposed": PlantedFault(
        "decode", "_attend", "", r"(ldmatrix[.\w]*x4)\.trans", r"\1"
    ),
    "no barrier at all": PlantedFault("extend sm_80", "_attend", "", r"\tbar\.sync\s+0", ""),
    "rows of an older schedule": PlantedFault(
        "schedule", "_fill_schedule", "tl.store(unused_ptrs, -1", r"@%p\d+ st\.global[^;]*", ""
    ),
    "a token without a place is stored": PlantedFault(
        "write", "_write", "store(code_ptrs, codes, mask=is_stored", r"@%p\d+ (st\.global)", r"\1"
    ),
    "codes one byte too far": PlantedFault(
        "write", "_write", "tl.store(code_ptrs, codes", r"(st\.global[^\n]*\+ )0 \]", r"\g<1>1 ]"
    ),
    "scales are rounded down": PlantedFault(
        "write", "_write", "bits + 0xFFFF", r"add\.s32\s+(%r\d+), (%r\d+), 65535", r"mov.b32 \1, \2"
    ),
    "a token after the last one is read": PlantedFault(
        "gather", "_gather", "position < tl.load(lengths_ptr", r"setp\.lt\.s32", "setp.le.s32"
    ),
}  # fmt: skip
# Faults of the fast tier.
FAST_FAULTS = (
    "a wait one group too late", "no barrier after a wait", "the page after the right one",
    "sums of another part", "all programs store one head", "rows of an older schedule",
)  # fmt: skip


def insert_fault(fault: PlantedFault, text: str) -> str:
    """Return a module's text with the fault, or the same text if it has another kernel."""
    if f".entry {fault.kernel}(" not in text:
        return text
    if not fault.source:
        return re.sub(fault.pattern, fault.replacement, text)
    lines = []
    is_selected = False
    for line in text.splitlines():
        if match := re.search(r"\.loc\s.*// (\w+\.py):(\d+)", line):
            is_selected = fault.source in linecache.getline(str(SOURCES / match[1]), int(match[2]))
        lines.append(re.sub(fault.pattern, fault.replacement, line) if is_selected else line)
    return "\n".join(lines)


def mark_full(names: Iterable[str], fast_names: Container[str]) -> list[Any]:
    """Return the names as parameters. The fast tier only runs the names in `fast_names`."""
    full = pytest.mark.full
    return [name if name in fast_names else pytest.param(name, marks=full) for name in names]


@pytest.mark.parametrize("name", mark_full(SCENARIOS, SCENARIOS.keys() - {"decode to the end"}))
def test_correct_kernels_have_no_fault(name):
    SCENARIOS[name]()


@pytest.mark.parametrize("name", mark_full(FAULTS, FAST_FAULTS))
def test_a_fault_is_detected(name, monkeypatch):
    fault = FAULTS[name]
    changed_texts = []

    def edit(text: str) -> str:
        changed_text = insert_fault(fault, text)
        if changed_text != text:
            changed_texts.append(changed_text)
        return changed_text

    monkeypatch.setattr(device, "edit_ptx", edit)
    with pytest.raises(AssertionError):
        SCENARIOS[fault.scenario]()
    # The faulty kernel can be parsed and executed.
    assert changed_texts
    compile_program(parse(changed_texts[-1]))


@triton.jit
def _sum(x, total, OFFSET: tl.constexpr):
    """Store the number of each of four programs. The last program adds the numbers."""
    i = tl.program_id(0)
    tl.store(x + i + OFFSET, i + 1)
    if i == 3:
        tl.store(total, tl.load(x) + tl.load(x + 1) + tl.load(x + 2) + tl.load(x + 3))


@pytest.mark.parametrize(("offset", "reason"), [(0, "another program"), (1, "outside all tensors")])
def test_a_race_and_a_store_past_the_end_are_detected(offset, reason):
    numbers = torch.zeros(4, dtype=torch.int32)
    total = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(memory.Fault, match=reason):
        _sum[(4,)](numbers, total, offset)


@triton.jit
def _reverse_bits(x):
    reversed_bits = tl.inline_asm_elementwise(
        "brev.b32 $0, $1;", "=r,r", [tl.load(x)], dtype=tl.int32, is_pure=True, pack=1
    )
    tl.store(x, reversed_bits)


def test_an_unknown_instruction_is_refused():
    with pytest.raises(NotImplementedError, match="brev"):
        _reverse_bits[(1,)](torch.zeros(1, dtype=torch.int32))
