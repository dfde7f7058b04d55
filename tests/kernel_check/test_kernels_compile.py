"""The kernels compiled for every GPU, on a machine without one; see hf_fp8kv/kernel_check/.

Compiling happens in processes of their own: this one may run kernels in Triton's interpreter.
"""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="kernels are compiled by Triton")

import triton
import triton.language as tl
from packaging.version import Version

from hf_fp8kv import cli
from hf_fp8kv.formats import AUTO, FORMATS, Format
from hf_fp8kv.formats.codec import decode
from hf_fp8kv.kernel_check import check as kernel_check
from hf_fp8kv.kernel_check.assembly import Assembly, read_amd, read_nvidia
from hf_fp8kv.kernel_check.check import TARGETS, Row, check_targets
from hf_fp8kv.kernel_check.rules import find_violations
from hf_fp8kv.kernel_check.variants import Variant, list_variants
from hf_fp8kv.ops.triton import codec, tuning
from hf_fp8kv.ops.triton.target import Resources, Target
from tests.helpers.ptx import evaluate

NEWER = Version(triton.__version__) >= Version("3.8")
GOOD = Assembly(
    registers=120, spills=0, doubles=0, loop=400, wide_bytes=128, byte_loads=0, conversions=64
)


# -- what is compiled ------------------------------------------------------------------------------


def _broken(rows: list[Row]) -> list[str]:
    return [f"{r.variant}, {r.kernel}: {'; '.join(r.violations)}" for r in rows if r.violations]


# Some of every operation, and the format that every GPU reads by moving bits.
SOME = [
    "decode e4m3 D128", "decode e3m4 D128 new blocks",
    "decode e4m3 D128 window softcap sinks mask center",
    "extend e4m3 D128 T1024", "extend e4m3 D128 T1024 window softcap sinks mask center",
    "write e4m3 D128", "write e3m4 D128 T128", "write e4m3 static D128 T128 center",
    "gather e4m3 D128 k", "gather e2m5 D128 v rotated",
]  # fmt: skip
# Compiled for one target: the other formats, and shapes.
OTHERS = [
    "decode e4m3fnuz D128", "decode e5m2 D128", "decode e2m5 D128", "decode int8 D128",
    "decode auto D128", "decode e4m3 static D128", "decode e4m3 D256", "extend e4m3 D256 T1024",
    "decode int8 static D128 rotated",
]  # fmt: skip


def test_kernels_keep_the_rules():
    # sm_86 is as sm_89 but for its conversions: among the slow ones.
    # gfx950 with Triton 3.8 and 3.9: docs/kernels.md.
    left_out = {"sm_86", "gfx950"} if NEWER else {"sm_86"}
    targets = [name for name in TARGETS if name not in left_out]
    found = check_targets(targets, variants=SOME)
    assert list(found) == targets
    for target, rows in found.items():
        assert _broken(rows) == [], target
        kernels = {"plan", "decode", "extend", "write", "gather"}
        # Where the last program does not merge the parts of a sequence, "combine" does.
        assert {row.kernel for row in rows} - {"combine"} == kernels, target
        assert len(rows) >= len(SOME), target


# What growing and preallocated caches launch; `make oldest` compiles it with an older Triton.
STEPS = [
    "decode e4m3 D128 new blocks", "decode e3m4 D128 new blocks", "decode auto D128 new blocks",
    "decode e4m3 static D128 new center", "extend e3m4 D128 T1024", "write e3m4 D128 T128",
    "gather e3m4 D128 k", "decode e2m5 D128 new blocks rotated center",
    "extend e2m5 D128 T1024 rotated", "write e2m5 D128 T128 rotated center",
]  # fmt: skip


def test_what_a_step_runs_keeps_the_rules():
    rows = check_targets(["sm_90"], variants=STEPS)["sm_90"]
    assert _broken(rows) == []
    assert {row.kernel for row in rows} >= {"plan", "decode", "extend", "write", "gather"}


def test_other_formats_and_shapes_keep_the_rules():
    rows = check_targets(["sm_90"], variants=OTHERS)["sm_90"]
    assert _broken(rows) == []
    assert len(rows) >= len(OTHERS)


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_all_variants_keep_the_rules(target):
    assert _broken(check_targets([target])[target]) == []


def test_what_is_always_compiled_is_some_of_every_operation():
    few, everything = list_variants([*SOME, *OTHERS]), list_variants()
    assert len(few) == len(SOME) + len(OTHERS)
    assert len({v.name for v in everything}) == len(everything)
    assert {v.operation for v in few} == {v.operation for v in everything}
    assert {v.k for v in few} >= {*FORMATS, AUTO}
    for operation in ("decode", "write"):
        assert {v.k for v in everything if v.operation == operation} == {*FORMATS, AUTO}


def test_a_process_that_fails_is_a_row(monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho it broke >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    found = check_targets(["sm_90", "sm_80", "sm_100"])
    assert list(found) == ["sm_90", "sm_80", "sm_100"]
    for (row,) in found.values():
        assert row.violations == ("the process ended with 3: it broke",)


@pytest.fixture(scope="module")
def failures() -> list[dict[str, Any]]:
    """Rows of a compiler that dies, and of what does not compile; of one process, slow to start."""
    code = (
        "import os, sys;"
        "from hf_fp8kv.kernel_check import check;"
        "from hf_fp8kv.kernel_check.variants import Variant;"
        "die = lambda: (sys.stderr.write('LLVM ERROR\\n'), sys.stderr.flush(), os.abort());"
        "compile_kernels = check.compile_kernels;"
        "check.compile_kernels = lambda name, _: [check.Row(name, 'a', 'b')]"
        " if name == 'sm_90' else die();"
        "check.main('sm_80,sm_90');"
        "check._write_rows(compile_kernels('sm_90', [Variant('decode', k='no format')]))"
    )
    return [json.loads(line) for line in _python("-c", code).splitlines()]


def test_a_compiler_that_dies_fails_its_target_alone(failures):
    assert [(row["target"], row["violations"]) for row in failures[:-1]] == [
        ("sm_80", ["the process ended with -6: LLVM ERROR"]), ("sm_90", []),
    ]  # fmt: skip


def test_what_does_not_compile_is_a_row_that_says_why(failures):
    assert failures[-1]["violations"] == ["does not compile: KeyError: 'no format'"]


def _python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False,
        env=kernel_check.make_environment(), cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- the rules -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bad() -> dict[str, dict[str, int]]:
    return json.loads(_python("-m", "tests.helpers.bad_kernels", "sm_90"))


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("good", []),
        ("strides unknown", ["0 of 4096 bytes in 16-byte loads"]),
        ("V by rows", ["2048 of 4096 bytes in 16-byte loads", "64 loads of single bytes"]),
        ("large", ["spills", "327680 bytes of shared memory", "programs fit"]),
        ("converted by bits", ["no native conversion"]),
        ("float64", ["float64 instructions"]),
    ],
)  # fmt: skip
def test_a_kernel_that_is_made_bad_breaks_its_rules(bad, name, broken):
    facts = dict(bad[name])
    shared = facts.pop("shared")
    if NEWER and name != "large":
        facts |= {"spills": 0, "loop_spills": 0}  # that of 3.9 spills a number of a small kernel
    found = _violations(Assembly(**facts), shared=shared)
    assert len(found) == len(broken)
    for violation, part in zip(found, broken, strict=True):
        assert part in violation


def _violations(
    found: Assembly, *, target: str = "sm_90", shared: int = 38912, k: str = "fp8_e4m3"
):
    """What a main kernel of decoding, of four warps and tiles of 64, breaks."""
    gpu, variant = Target.parse(target), Variant("decode", k=k, v=k, main=True)
    programs = gpu.fit(found.registers, 4, shared)
    size = variant.bytes_per_token * 64 / 4
    with tuning.override(programs=3 if gpu.is_nvidia else 1):
        return list(find_violations(gpu, variant, found, shared, programs, size, reads=True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({"spills": 8}, []),  # outside of the main loop
        ({"spills": 9}, ["9 spills"]),
        ({"spills": 2, "loop": 0}, ["2 spills", "no main loop"]),
        ({"spills": 8, "loop_spills": 1}, ["1 spills in the main loop"]),
        ({"loop": 0}, ["no main loop"]),
        ({"wide_bytes": 64}, ["2048 of 4096 bytes in 16-byte loads"]),
        ({"byte_loads": 8}, ["8 loads of single bytes from shared memory"]),
        ({"conversions": 0}, ["no native conversion"]),
        ({"registers": 255}, ["2 programs fit on a processor, of 3"]),
        ({"doubles": 1}, ["1 float64 instructions"]),
    ],
)
def test_each_rule_says_what_it_found(change, said):
    assert _violations(replace(GOOD, **change)) == said


def test_rules_know_what_a_gpu_has():
    # No instruction converts E4M3 there, and its shared memory is less.
    assert _violations(replace(GOOD, conversions=0), target="sm_80") == []
    assert "bytes of shared memory" in _violations(GOOD, target="sm_86", shared=110_000)[0]
    assert _violations(replace(GOOD, conversions=0), k="fp8_e3m4") == []
    assert _violations(replace(GOOD, spills=1, wide_bytes=64), target="gfx950") == ["1 spills"]
    # 64 lanes: half as many bytes per lane.
    assert _violations(replace(GOOD, wide_bytes=64), target="gfx950") == []
    fnuz = replace(GOOD, wide_bytes=64, conversions=0)
    assert _violations(fnuz, target="gfx942", k="fp8_e4m3fnuz") == ["no native conversion"]
    assert _violations(fnuz, target="gfx942") == []


@pytest.mark.parametrize(
    ("target", "registers", "warps", "shared", "programs"),
    [
        ("sm_90", 168, 4, 39424, 3),
        ("sm_90", 169, 4, 39424, 2),
        ("sm_90", 128, 4, 0, 4),
        ("sm_90", 32, 4, 0, 16),
        ("sm_86", 32, 4, 0, 12),
        ("sm_86", 128, 4, 39424, 2),
        ("gfx942", 128, 4, 16384, 4),
        ("gfx942", 257, 4, 16384, 1),
        ("gfx942", 64, 4, 40000, 1),
    ],
)
def test_programs_that_fit_on_a_processor(target, registers, warps, shared, programs):
    assert Target.parse(target).fit(registers, warps, shared) == programs


def test_a_gpu_is_asked_for_what_it_has():
    """A chip that is in no list, with 100 KB of shared memory."""
    spark = Target("cuda", 121, 48, resources=Resources(100 << 10, 1536))
    assert spark.fit(168, 2, 37888) == 2
    assert tuning.expected_programs(spark) == 2
    b300 = Target("cuda", 103, 148, resources=Resources(228 << 10, 2048))
    assert tuning.expected_programs(b300) == 6
    usual = tuning.Workload(256, 64, False, False, False)
    assert tuning.extend_config(b300, usual) == tuning.extend_config(Target.parse("sm_100"), usual)


# -- reading machine code --------------------------------------------------------------------------

SASS = """
.text._decode:
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
_decode:
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
	.amdhsa_kernel _decode
    .vgpr_count:     215
    .vgpr_spill_count: 3
"""


def test_the_main_loop_of_nvidias_is_the_shortest_that_multiplies():
    found = read_nvidia(SASS, "Function _decode:\n  REG:168 STACK:0 SHARED:0 LOCAL:0")
    assert found == Assembly(
        registers=168, spills=1, doubles=1, loop=3, wide_bytes=16, byte_loads=0, conversions=0
    )


def test_copies_that_a_wait_leaves_unfinished_are_ahead():
    text = SASS[SASS.index(".L_x_0:") :]
    assert read_nvidia(text, "REG:168").ahead == 2.0
    assert read_nvidia(text.replace("SB0, 0x2", "SB0, 0x0"), "REG:168").ahead == 1.0
    to_registers = text.replace("LDGSTS.E.BYPASS", "LDG.E")
    assert read_nvidia(to_registers, "REG:168").ahead == 0.0


def test_what_amds_assembly_says():
    assert read_amd(GCN) == Assembly(
        registers=215, spills=3, doubles=1, loop=6, wide_bytes=16, byte_loads=1, conversions=1,
        ahead=1.0,
    )  # fmt: skip


@pytest.mark.parametrize(("left", "ahead"), [(0, 0.0), (1, 0.0), (2, 0.5), (4, 1.0)])
def test_amds_loads_end_in_order(left, ahead):
    """Two wide loads, a narrow one after each, and a wait before the product."""
    loads = "\tglobal_load_dwordx4 v[0:3], v[4:5], off\n\tglobal_load_dword v7, v[4:5], off\n"
    wait = f"{loads * 2}\ts_waitcnt lgkmcnt(0) vmcnt({left})\n\tv_mfma"
    text = GCN.replace("\tglobal_load_dwordx4 v[0:3], v[4:5], off\n", "")
    assert read_amd(text.replace("\tv_mfma", wait)).ahead == ahead


# -- codec.py's assembly ---------------------------------------------------------------------------


# A format that may come one day, of another NaN.
MADE_UP = [Format("fp8_e3m4fn", 3, 4, 3, 0x7E, 0x7F, 30.0, 448 / 30.0)]


@pytest.mark.parametrize("keep_nan", [False, True], ids=["", "nan"])
@pytest.mark.parametrize("fmt", [*FORMATS.values(), *MADE_UP], ids=lambda fmt: fmt.name)
def test_packed_moves_give_every_code_its_number_in_every_place(fmt, keep_nan, monkeypatch):
    monkeypatch.setitem(codec.FORMATS, fmt.name, fmt)
    monkeypatch.setattr(Target, "converts", lambda *_: False)
    moved = codec.codec_for.__wrapped__(
        fmt.name, Target.parse("sm_80"), tl.float16, False, keep_nan
    )
    nan = keep_nan or fmt.inf_code is not None
    codes = torch.arange(256).repeat(4)
    for place in range(4):
        codes[256 * place : 256 * place + 256] = (torch.arange(256) * 37 + place * 11) % 256
    words = codes.view(4, 256)
    packed = (words << torch.tensor([[0], [8], [16], [24]])).sum(0).tolist()
    bits = torch.tensor([evaluate(moved.assembly, word) for word in packed], dtype=torch.int32)
    found = bits.to(torch.int16).view(torch.float16).float().T * moved.factor
    wanted = decode(words.to(torch.uint8), fmt)
    if not nan:
        kept = ~wanted.isnan()
        found, wanted = found[kept], wanted[kept]
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize(
    "fmt",
    [
        Format("fp8_e5m2fnuz", 5, 2, 16, 0x7F, 0x80, 57344.0, 448 / 57344.0, unsigned_zero=True),
        Format("fp8_e4m3ieee", 4, 3, 7, 0x77, 0x7F, 240.0, 448 / 240.0, inf_code=0x78),
    ],
    ids=lambda fmt: fmt.name,
)
def test_a_format_that_cannot_be_moved_is_refused(fmt, monkeypatch):
    monkeypatch.setitem(codec.FORMATS, fmt.name, fmt)
    with pytest.raises(AssertionError, match=fmt.name):
        codec.codec_for.__wrapped__(fmt.name, Target.parse("sm_80"), tl.float16, False, False)


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch, capsys):
    """Returns what `check --kernels` did, given the rows that a check finds."""
    asked = []

    def _run(*arguments: str, rows: list[Row] | None = None) -> tuple[int, str, str]:
        def found(names, *, variants, progress):
            asked.append(variants)
            progress("sm_90: decode e4m3 D128", 0.5)
            return dict.fromkeys(names, rows)

        monkeypatch.setenv("COLUMNS", "160")
        monkeypatch.setattr(kernel_check, "check_targets", found)
        monkeypatch.setattr(sys, "argv", ["hf-fp8kv", "check", "--kernels", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        return exit_.value.code or 0, out, err

    _run.asked = asked
    return _run


ROW = Row("sm_90", "decode e4m3 D128", "decode", registers=168, shared=39424, loop=480, per_kib=120)


def test_check_kernels_prints_a_table_per_target(run):
    code, out, err = run(rows=[ROW])
    assert code == 0
    assert all(name in out for name in TARGETS)
    assert "decode e4m3 D128" in out
    assert "168" in out
    assert "ok" in out
    assert "sm_90: decode e4m3 D128" in err


def test_check_kernels_fails_if_a_rule_is_broken(run):
    code, out, _ = run("--target", "sm_90", rows=[ROW, replace(ROW, violations=("2 spills",))])
    assert code == 1
    assert "2 spills" in out


def test_check_kernels_as_json(run):
    code, out, _ = run("--json", "--target", "sm_90", "--target", "gfx942", rows=[ROW])
    found = json.loads(out)
    assert code == 0
    assert list(found["targets"]) == ["sm_90", "gfx942"]
    assert found["targets"]["sm_90"] == json.loads(json.dumps([asdict(ROW)]))
    assert found["triton"]


def test_a_summary_shows_what_changed_in_what_reads_pages(run, tmp_path):
    plan = Row("sm_90", "decode e4m3 D128", "plan", registers=7777)
    code, out, _ = run("--summary", "--json", "--target", "sm_90", rows=[ROW, plan])
    assert code == 0
    assert all(name in {v.name for v in list_variants()} for name in run.asked[-1])
    assert len(run.asked[-1]) == 10
    (tmp_path / "before.json").write_text(out)
    faster = replace(ROW, registers=104, per_kib=55.5, in_flight=98304)
    code, out, _ = run(
        "--summary", "--before", str(tmp_path / "before.json"), "--target", "sm_90",
        rows=[faster, plan],
    )  # fmt: skip
    assert code == 0
    assert "168 > 104" in out
    assert "120 > 55.5" in out
    assert "0 > 98304" in out
    assert "39424 >" not in out
    assert "7777" not in out


@pytest.mark.parametrize("content", [None, "no json", "[]", '{"rows": []}', '{"targets": [1]}'])
def test_a_comparison_wants_an_earlier_report(run, tmp_path, content):
    path = tmp_path / "before.json"
    if content is not None:
        path.write_text(content)
    code, _, err = run("--summary", "--before", str(path), rows=[ROW])
    assert code == 2
    assert "check --kernels --json" in " ".join(err.split())
    assert not run.asked


def test_check_kernels_wants_a_target_that_is_known(run):
    code, _, err = run("--target", "sm_70", rows=[])
    assert code == 2
    assert "sm_80, sm_86" in " ".join(err.split())


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        (["--target", "sm_90"], "--kernels"),
        (["--summary"], "--kernels"),
        (["--kernels", "--before", "x"], "--summary"),
    ],
)
def test_options_that_need_another(monkeypatch, capsys, options, needed):
    monkeypatch.setattr(sys, "argv", ["hf-fp8kv", "check", *options])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    assert f"requires {needed}" in capsys.readouterr().err
