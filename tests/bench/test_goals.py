"""Goals of the GPU suite, from made-up results."""

import pytest

from benchmarks.gpu import goals
from benchmarks.gpu.results import complete, line

READ = goals.LARGE
SHARE = "decode {}, share of 4.8 TB/s, 256k tokens on"
OVER_E4M3 = "decode e3m4, time over e4m3, 256k tokens on"
GENERATE = "generate() 8 x 32k, tokens/s over the strongest path in 16 bits"


def row(section, case, name, **more):
    return {"section": section, "case": case, "name": name, **more}


def decoded(case, name, us, share=0.9, read=READ):
    return row("decode", case, name, us=us, moved=us * share * 4.8e6, read=read)


def good_rows():
    rows = [row("ceilings", "read", "a", us=1000.0, moved=4e9)]
    for case in goals.CASES:
        rows += [decoded(case, "e4m3", 100.0), decoded(case, "e3m4", 104.0)]
        rows += [decoded(case, "bf16 pages", 200.0)]
    rows += [decoded("1 x 1k", name, 7.0, 0.1, 1024) for name in goals.FORMATS]
    rows += [row("layer", "1 x 1k", name, us=6.5, launches=1) for name in goals.FORMATS]
    rows += [row("layer", "64 x 4k", name, us=300.0, launches=2) for name in goals.FORMATS]
    rows += [row("write", "1 x 1 token", "e4m3", us=5.0), row("write", "1 x 8192", "e4m3", us=90.0)]
    for name, rate in (("e4m3", 90.0), ("sdpa flash", 100.0)):
        rows.append(row("extend", "512 over 8192", name, us=1.0, flops=rate * 1e6))
    for name, speed, size in (
        (goals.PAGED, 170.0, 52), (goals.FLASH, 60.0, 100), (goals.AUTO, 100.0, 100),
        ("StaticCache (repeats K and V) compiled", 20.0, 100),
    ):  # fmt: skip
        rows.append(row("end to end", "8 x 32k", name, tokens_per_s=speed, cache_bytes=size))
        rows.append(row("end to end", "1 x 1k", name, tokens_per_s=1.0, cache_bytes=size))
    for heads in goals.EXPANDED:
        for batch in (1, 16):
            times = {"e4m3": 10.0, "e3m4": 10.1, goals.STOCK: 600.0, goals.ABSORBED: 15.0}
            for name, us in times.items():
                rows.append(row("latent", f"{heads} heads, {batch} x 16k", name, us=us))
    return rows


def judge(rows, gpu="NVIDIA H200", dry=False):
    result = {"settings": {"dry": dry}, "hardware": {"gpu": gpu}, "sections": [], "rows": rows}
    return complete({**result, "versions": {}})


def goal(rows, what, **where):
    [found] = [goal for goal in judge(rows, **where)["goals"] if goal["what"] == what]
    return found


def test_all_are_met():
    found = judge(good_rows())
    assert {goal["state"] for goal in found["goals"]} == {"met"}, found["goals"]
    said = line(found)
    assert (said["missed"], said["not measured"]) == ([], [])
    assert said["goals"][GENERATE] == 1.7


def test_nothing_was_measured():
    found = judge([])
    assert {goal["state"] for goal in found["goals"]} == {"not measured"}
    assert len(line(found)["not measured"]) == len(found["goals"])


@pytest.mark.parametrize(
    ("gpu", "dry"), [("NVIDIA H200", True), ("NVIDIA L4", False), (None, False)]
)
def test_goals_are_for_one_gpu_and_no_dry_run(gpu, dry):
    found = goal(good_rows(), SHARE.format("e4m3"), gpu=gpu, dry=dry)
    assert found["state"] == "not measured"
    assert found["worst"] == pytest.approx(0.9)
    assert found["why"]


@pytest.mark.parametrize("name", goals.FORMATS)
@pytest.mark.parametrize("padded", ["", goals.PADDED])
def test_the_worst_case_of_each_format_counts(name, padded):
    """The share is of the datasheet, not of what was reached in the run."""
    what = SHARE.format(name)
    rows = [*good_rows(), decoded("98 x 4k", name + padded, 100.0, 0.84)]
    found = goal(rows, what)
    assert (found["state"], found["where"]) == ("missed", "98 x 4k" + padded)
    assert (found["worst"], found["best"]) == (pytest.approx(0.84), pytest.approx(0.9))
    assert goal([*rows[:-1], decoded("98 x 4k", name, 100.0, 0.86)], what)["state"] == "met"
    few = decoded("16 x 1k", name, 100.0, 0.5, READ - 1)
    assert goal([*rows[:-1], few], what)["state"] == "met"


@pytest.mark.parametrize("case", goals.CASES)
def test_without_a_batch_size_it_cannot_be_met(case):
    rows = [row for row in good_rows() if row["case"] != case]
    found = goal(rows, SHARE.format("e4m3"))
    assert (found["state"], found["why"]) == ("not measured", f"not measured: {case}")
    worse = [*rows, decoded("16 x 32k", "e4m3", 100.0, 0.5)]
    assert goal(worse, SHARE.format("e4m3"))["state"] == "missed"


def test_what_failed_is_missed():
    rows = [*good_rows(), row("decode", "50 x 4k", "e4m3", failed="relative error 1")]
    found = goal(rows, SHARE.format("e4m3"))
    assert (found["state"], found["why"]) == ("missed", "failed: 50 x 4k")
    assert goal(rows, SHARE.format("e3m4"))["state"] == "met"


def test_e3m4_beside_e4m3_and_e4m3_beside_16_bits():
    assert goal(good_rows(), OVER_E4M3)["worst"] == pytest.approx(1.04)
    slow = [*good_rows(), decoded("32 x 8k", "e4m3", 100.0), decoded("32 x 8k", "e3m4", 106.0)]
    found = goal(slow, OVER_E4M3)
    assert (found["state"], found["where"], found["cases"]) == ("missed", "32 x 8k", 5)
    bf16 = decoded("32 x 8k", "bf16 pages", 160.0)
    what = "decode e4m3, time over bf16 pages, 256k tokens on"
    assert goal([*slow, bf16], what)["worst"] == pytest.approx(100 / 160)
    assert goal([*slow, bf16], what)["state"] == "missed"


@pytest.mark.parametrize(("field", "value"), [("us", 7.5), ("launches", 2)])
def test_a_layer_of_a_step_in_one_launch(field, value):
    what = f"one layer of a step, {field}, 1 x 1k"
    rows = good_rows()
    assert goal(rows, what)["state"] == "met"
    [layer] = [
        r for r in rows if (r["section"], r["case"], r["name"]) == ("layer", "1 x 1k", "e3m4")
    ]
    layer[field] = value
    found = goal(rows, what)
    assert (found["state"], found["worst"], found["where"]) == ("missed", value, "e3m4")
    del layer[field]
    assert goal(rows, what)["state"] == "not measured"


@pytest.mark.parametrize("strongest", goals.STRONG)
def test_generate_is_compared_with_the_strongest_path_in_16_bits(strongest):
    rows = [r for r in good_rows() if (r["section"], r["name"]) != ("end to end", strongest)]
    rows.append(row("end to end", "8 x 32k", strongest, tokens_per_s=110.0, cache_bytes=100))
    found = goal(rows, GENERATE)
    assert (found["state"], found["worst"]) == ("missed", pytest.approx(170 / 110))
    assert found["where"] == f"over {strongest}"


@pytest.mark.parametrize("name", [goals.PAGED, *goals.NEEDED])
def test_generate_without_one_of_those_that_count(name):
    rows = [r for r in good_rows() if (r["section"], r["name"]) != ("end to end", name)]
    found = goal(rows, GENERATE)
    assert (found["state"], found["why"]) == ("not measured", f"not measured: {name}")
    rows.append(row("end to end", "8 x 32k", goals.PAGED, failed="out of memory"))
    assert goal(rows, GENERATE)["state"] == "missed"


@pytest.mark.parametrize(("heads", "most"), goals.EXPANDED.items())
def test_a_step_over_latents_beside_one_that_expands_them(heads, most):
    what, case = f"latent, {heads} heads, 16k, time over expanding", f"{heads} heads, 16 x 16k"
    assert goal(good_rows(), what)["worst"] == pytest.approx(10.1 / 600)
    rows = good_rows()
    [slow] = [r for r in rows if (r["case"], r["name"]) == (case, "e4m3")]
    slow["us"] = 600 * most * 1.01
    found = goal(rows, what)
    assert (found["state"], found["where"], found["cases"]) == ("missed", f"{case}, e4m3", 4)
    rows.remove(slow)
    found = goal(rows, what)
    assert (found["state"], found["why"]) == ("not measured", f"not measured: {case}, e4m3")
    rows.append(row("latent", case, "e4m3", failed="relative error 1"))
    assert goal(rows, what)["state"] == "missed"
    # Other lengths are no goal.
    rows = [*good_rows(), row("latent", f"{heads} heads, 1 x 4k", "e4m3", us=10.0)]
    rows.append(row("latent", f"{heads} heads, 1 x 4k", goals.STOCK, us=50.0))
    assert goal(rows, what)["state"] == "met"


def test_a_step_over_latents_beside_torch_s_products_at_any_length():
    what, case = "latent, time over absorbed bf16 in torch", "16 heads, 1 x 4k"
    assert goal(good_rows(), what)["worst"] == pytest.approx(10.1 / 15)
    rows = [*good_rows(), row("latent", case, "e3m4", us=10.0)]
    rows.append(row("latent", case, goals.ABSORBED, us=9.0))
    found = goal(rows, what)
    assert (found["state"], found["where"]) == ("missed", f"{case}, e3m4")
