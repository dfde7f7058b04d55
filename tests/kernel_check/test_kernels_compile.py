"""Tests of the kernels' machine code, which tests/tools/kernels compiles without a GPU."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton compiles the kernels")

import triton.language as tl

from benchmarks.shared import make_environment
from hf_fp8kv.formats import FORMATS, Format
from hf_fp8kv.formats.codec import decode
from hf_fp8kv.ops.triton import codec, tuning
from hf_fp8kv.ops.triton.target import Resources, Target
from tests.tools.kernels.assembly import Assembly, predict_cycles, read_amd, read_nvidia
from tests.tools.kernels.rules import find_violations
from tests.tools.kernels.variants import Variant
from tests.tools.ptx.instructions import compile_program
from tests.tools.ptx.machine import execute
from tests.tools.ptx.memory import GlobalMemory
from tests.tools.ptx.parse import parse

GOOD_ASSEMBLY = Assembly(
    registers=120, spills=0, doubles=0, loop_size=400, wide_bytes=128, byte_loads=0, conversions=64
)


# -- compiled steps --------------------------------------------------------------------------------

# Variants: each operation on GPUs of both vendors, and on sm_90 each way to convert codes: by an
# instruction (e4m3), by shifting bits (e3m4, e2m5), or without conversion (auto). Growing and
# preallocated caches launch these kernels. A bias may be as large as float32 allows. If one
# side of a long prompt is in 16 bits, the codes of the opposite side are widened.
STEP_VARIANTS = [
    "decode e4m3 D128", "decode auto D128", "decode e4m3 static D128", "decode e2m5 D128 rotated",
    "decode e4m3 D128 bias",
    "extend e3m4 D128 T1024", "extend e4m3 and auto D128 T1024", "extend auto and int8 D128 T1024",
    "write e3m4 D128 T128", "gather e2m5 D128 v rotated",
]  # fmt: skip
TARGET_VARIANTS = {"sm_90": STEP_VARIANTS, "gfx942": [STEP_VARIANTS[0], *STEP_VARIANTS[-3:]]}


# `make oldest` runs this with an old Triton.
@pytest.mark.full  # the kernels compile for 40 s
@pytest.mark.parametrize("target", TARGET_VARIANTS)
def test_kernels_of_a_step_obey_the_rules(target):
    """A separate process compiles, because this process may run kernels in the interpreter."""
    command = [sys.executable, "-m", "tests.tools.kernels", "--json", "--target", target]
    process = subprocess.run(
        [*command, "--variant", *TARGET_VARIANTS[target]], capture_output=True, text=True,
        check=False, env=make_environment(), cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert process.stdout, process.stderr
    rows = json.loads(process.stdout)["targets"][target]
    assert [row for row in rows if row["violations"]] == []
    assert process.returncode == 0
    kernels = {row["kernel"] for row in rows} - {"widen_codes"}
    assert kernels == {"fill_schedule", "attend", "combine", "write", "gather"}
    # On gfx942, products do not read codes from shared memory, so codes are not widened.
    assert any(row["kernel"] == "widen_codes" for row in rows) == (target == "sm_90")
    assert {row["variant"] for row in rows} == set(TARGET_VARIANTS[target])


# -- the rules -------------------------------------------------------------------------------------


def list_violations(
    assembly: Assembly, *, target: str = "sm_90", shared_bytes: int = 38912, k: str = "fp8_e4m3",
    extras: tuple[str, ...] = (), queries_per_head: int = 4,
):  # fmt: skip
    """Return the violations of a fast decode kernel with four warps and tiles of 64 tokens."""
    gpu = Target.parse(target)
    variant = Variant(
        "decode", k=k, v=k, extras=extras, queries_per_head=queries_per_head, is_main=True
    )
    gpu = replace(gpu, parameters={"programs": 3 if gpu.is_nvidia else 1})
    return list(
        find_violations(
            gpu, variant, assembly, shared_bytes, num_warps=4, tile_tokens=64, converts=True
        )
    )


MANY_HEADS = {"extras": ("latent",), "queries_per_head": 128}


# sm_80 has no instruction that converts E4M3, and sm_86 has less shared memory. A warp on AMD GPUs
# has 64 lanes, so half of the bytes per lane suffice.
@pytest.mark.parametrize(
    ("changes", "options", "expected"),
    [
        ({}, {}, []),
        ({"spills": 8}, {}, []),  # outside the main loop
        ({"spills": 9}, {}, ["9 spills"]),
        ({"spills": 8, "loop_spills": 1}, {}, ["1 spills in the main loop"]),
        ({"loop_size": 0}, {}, ["no main loop"]),
        ({"wide_bytes": 64}, {}, ["2048 of 4096 bytes in 16-byte loads"]),
        ({"byte_loads": 8}, {}, ["8 loads of single bytes from shared memory"]),
        ({"conversions": 0}, {}, ["no native conversion"]),
        ({"registers": 255}, {}, ["2 of 3 programs fit on an SM"]),
        ({"doubles": 1}, {}, ["1 float64 instructions"]),
        ({"fused_products": 1}, {"extras": ("bias",)}, ["1 products with log2(e) fused with sums"]),
        ({"fused_products": 1}, {"extras": ("softcap",)}, []),
        ({"hgmma": 52, "loop_spills": 21}, MANY_HEADS, ["21 spills in the main loop"]),
        ({"hmma": 72, "hgmma": 8}, MANY_HEADS, ["8 products of warp groups and 72 of warps"]),
        ({}, MANY_HEADS, ["0 products of warp groups"]),
        ({"hmma": 68}, {**MANY_HEADS, "queries_per_head": 16}, []),
        ({"conversions": 0}, {"target": "sm_80"}, []),
        (
            {},
            {"target": "sm_86", "shared_bytes": 110_000},
            ["bytes of shared memory", "programs fit"],
        ),
        ({"spills": 1, "wide_bytes": 64}, {"target": "gfx950"}, ["1 spills"]),
        ({"wide_bytes": 64}, {"target": "gfx950"}, []),
        (
            {"wide_bytes": 64, "conversions": 0}, {"target": "gfx942", "k": "fp8_e4m3fnuz"},
            ["no native conversion"],
        ),
    ],
)  # fmt: skip
def test_each_rule_reports_its_violation(changes, options, expected):
    violations = list_violations(replace(GOOD_ASSEMBLY, **changes), **options)
    assert all(part in text for text, part in zip(violations, expected, strict=True)), violations


def test_an_unlisted_gpu_is_described_by_its_resources():
    """The GPUs are a small chip with 100 KB of shared memory per SM, and a B300."""
    assert Target.parse("sm_90").count_programs(32, 4, 0) == 16
    assert Target.parse("gfx942").count_programs(257, 4, 16384) == 1
    chip = Target("cuda", 121, 48, resources=Resources(100 << 10, 1536))
    assert chip.count_programs(168, 2, 37888) == 2
    assert tuning.estimate_programs(chip) == 2
    b300 = Target("cuda", 103, 148, resources=Resources(228 << 10, 2048))
    assert tuning.estimate_programs(b300) == 6
    workload = tuning.Workload(width=256, rows=64)
    b200_config = tuning.choose_extend_config(Target.parse("sm_100"), workload)
    assert tuning.choose_extend_config(b300, workload) == b200_config


# -- reading machine code --------------------------------------------------------------------------

SASS = """
.text._attend:
        /*0000*/                   STL [R1], R2 ;
.L_x_1:
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
        /*0030*/              @!P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0040*/                   FADD R1, R2, R3 ;
        /*0050*/               @P1 BRA `(.L_x_2) ;
.L_x_0:
        /*0058*/                   DEPBAR.LE SB0, 0x2 ;
        /*0060*/                   LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64] ;
        /*0064*/                   LDGDEPBAR ;
        /*0068*/                   LDGDEPBAR ;
        /*0070*/                   LDS.U8 R9, [R3] ;
        /*0080*/                   F2FP.F16.E4M3.UNPACK_B R4, R4.H1 ;
        /*0090*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
        /*00a0*/                   FMUL R4, R4, R4 ;
        /*00b0*/              @!P0 BRA `(.L_x_0) ;
        /*00c0*/                   DADD R2, R4, R6 ;
.L_x_3:
        /*00d0*/                   BRA `(.L_x_3);
        /*00e0*/                   NOP;
"""
GCN = """
_attend:
.LBB0_1:
	global_load_dwordx4 v[0:3], v[4:5], off
	ds_read_u8 v9, v1
	v_cvt_pk_f32_fp8_e32 v[0:1], v2
	v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], a[0:3]
	s_waitcnt vmcnt(0)
	s_cbranch_scc1 .LBB0_1
; %bb.2:
	v_add_f64 v[0:1], v[2:3], v[4:5]
	s_endpgm
	.amdhsa_kernel _attend
    .vgpr_count:     215
    .vgpr_spill_count: 3
"""


def test_assembly_is_parsed():
    """NVIDIA's main loop is the shortest loop with products."""
    assembly = read_nvidia(SASS, "Function _attend:\n  REG:168 STACK:0 SHARED:0 LOCAL:0")
    assert assembly == Assembly(
        registers=168, spills=1, doubles=1, loop_size=3, wide_bytes=16, byte_loads=0, conversions=0,
        hmma=1, cycles=1.75,
    )  # fmt: skip
    assert read_amd(GCN) == Assembly(
        registers=215, spills=3, doubles=1, loop_size=6, wide_bytes=16, byte_loads=1, conversions=1
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "cycles"),
    [
        ("HGMMA.64x32x16.F32 R24, gdesc[UR8], R24, gsb0", (64 + 32) * 32 / 512),
        ("HGMMA.64x64x16.F32.BF16 R88, R4, gdesc[UR4].tnspB, R88", 8),
        ("HMMA.16816.F32.BF16 R4, R8, R10, R4", 1),
        ("LDSM.16.MT88.4 R96, [R120+0x14800]", 4),
        ("LDS R4, [R3]", 1),
        ("STS.64 [R3], R4", 2),
        ("LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64]", 4),
        ("LDG.E.128 R4, desc[UR4][R2.64]", 0),
    ],
)
def test_cycles_are_predicted_from_instructions(line, cycles):
    """Only a warp group's product overlaps the reads of its operands. Issuing takes a quarter."""
    assert predict_cycles([line, "FADD R1, R2, R3"]) == 2 / 4 + cycles


# -- the assembly of codec.py ----------------------------------------------------------------------


SHIFT_PTX = [
    ".visible .entry _move(.param .u64 codes, .param .u64 values) .reqntid 256 {{ .reg .b32 %r<4>",
    ".reg .b64 %rd<5>", "mov.u32 %r3, %tid.x",
    "ld.param.b64 %rd1, [codes]", "mad.wide.u32 %rd3, %r3, 4, %rd1", "ld.global.b32 %r2, [%rd3]",
    "{} ld.param.b64 %rd2, [values]", "mad.wide.u32 %rd4, %r3, 8, %rd2",
    "st.global.v2.b32 [%rd4], {{%r0, %r1}}", "ret", "}}",
]  # fmt: skip


@pytest.mark.parametrize("keep_nan", [False, True], ids=["", "nan"])
@pytest.mark.parametrize(
    "fmt",
    [
        *FORMATS.values(),
        # The package does not have this format, whose NaN differs from the NaN of its formats.
        Format("fp8_e3m4fn", 4, 3, 0x7E, 0x7F, 30.0, 448 / 30.0),
    ],
    ids=lambda fmt: fmt.name,
)
def test_packed_shifts_convert_all_codes_at_all_positions(fmt, keep_nan, monkeypatch):
    monkeypatch.setitem(codec.FORMATS, fmt.name, fmt)
    monkeypatch.setattr(Target, "converts", lambda *_: False)
    used_codec = codec.choose_codec.__wrapped__(
        fmt.name, Target.parse("sm_80"), tl.float16, False, keep_nan
    )
    has_nan = keep_nan or fmt.inf_code is not None
    codes = torch.stack([(torch.arange(256) * 37 + position * 11) % 256 for position in range(4)])
    codes &= 0xFF << (8 - fmt.bits)  # unpacked codes end with zeros
    words = (codes << torch.tensor([[0], [8], [16], [24]])).sum(0)
    bits = torch.zeros(256, 4, dtype=torch.int16)
    words = words.to(torch.int32)
    program = parse(";".join(SHIFT_PTX).format(re.sub(r"\$(\d)", r"%r\1", used_codec.assembly)))
    addresses = [words.data_ptr(), bits.data_ptr()]
    memory = GlobalMemory([words, bits])
    execute(program, compile_program(program), addresses, (1, 1, 1), memory, shared_size=0)
    actual = bits.T.view(torch.float16).float() * used_codec.factor
    expected = decode(codes.to(torch.uint8), fmt)
    if not has_nan:
        is_number = ~expected.isnan()
        actual, expected = actual[is_number], expected[is_number]
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize(
    "fmt",
    [
        Format("fp8_e5m2fnuz", 2, 16, 0x7F, 0x80, 57344.0, 448 / 57344.0, has_unsigned_zero=True),
        Format("fp8_e4m3ieee", 3, 7, 0x77, 0x7F, 240.0, 448 / 240.0, inf_code=0x78),
    ],
    ids=lambda fmt: fmt.name,
)
def test_a_format_without_packed_shifts_is_refused(fmt, monkeypatch):
    monkeypatch.setitem(codec.FORMATS, fmt.name, fmt)
    with pytest.raises(AssertionError, match=fmt.name):
        codec.choose_codec.__wrapped__(fmt.name, Target.parse("sm_80"), tl.float16, False, False)
