"""Tests of the goals of the GPU benchmark, which are judged on artificial results."""

import pytest

from benchmarks.gpu import goals
from benchmarks.gpu.record import complete, summarize

# Titles of goals.
SHARE = "decode e4m3, share of reads, 256k tokens on"
SPEED = "generate() 8 x 32k, tokens/s over the strongest path in 16 bits"
LAUNCHES = "one layer of a step, launches, 1 x 1k"
LATENT = "latent, 128 heads, 16k, time over expanding"


def make_row(section, case, name, **fields):
    return {"section": section, "case": case, "name": name, **fields}


def make_decode_row(case, name, us, share=0.9, tokens_read=goals.LARGE_STEP_TOKENS):
    """Return a row of a step that reaches `share` of the bandwidth of reads, 4 TB/s."""
    return make_row("decode", case, name, us=us, moved=us * share * 4e6, read=tokens_read)


def make_good_rows():
    """Return rows that meet all goals on a GPU whose reads reach 4 TB/s."""
    rows = [make_row("ceilings", "read", "torch", us=1000.0, moved=4e9)]
    for case in goals.REQUIRED_CASES:
        for name, us in (("e4m3", 100.0), ("e3m4", 104.0), ("bf16 pages", 200.0)):
            rows.append(make_decode_row(case, name, us))
    rows += [make_decode_row("1 x 1k", name, 7.0, 0.1, 1024) for name in goals.FORMATS]
    rows += [make_row("layer", "1 x 1k", name, us=6.5, launches=2) for name in goals.FORMATS]
    rows += [make_row("layer", "64 x 4k", name, us=300.0, launches=2) for name in goals.FORMATS]
    for case, us in (("1 x 1 token", 5.0), ("1 x 8192", 90.0)):
        rows.append(make_row("write", case, "e4m3", us=us))
    for name, rate in (("e4m3", 90.0), ("sdpa flash", 100.0)):
        rows.append(make_row("extend", "512 over 8192", name, us=1.0, flops=rate * 1e6))
    for name, rate, num_bytes in (
        (goals.PAGED, 170.0, 52), (goals.FLASH, 60.0, 100), (goals.PAGED_AUTO, 100.0, 100),
        ("StaticCache (repeats K and V) compiled", 20.0, 100),
    ):  # fmt: skip
        fields = {"cache_bytes": num_bytes}
        rows.append(make_row("end to end", "8 x 32k", name, tokens_per_s=rate, **fields))
        rows.append(make_row("end to end", "1 x 1k", name, tokens_per_s=1.0, **fields))
    latent_us = {"e4m3": 10.0, "e3m4": 10.1, goals.STOCK: 600.0, goals.ABSORBED: 15.0}
    for num_heads in (16, 128):
        for batch in (1, 16):
            case = f"{num_heads} heads, {batch} x 16k"
            rows += [make_row("latent", case, name, us=us) for name, us in latent_us.items()]
    return rows


def judge_rows(rows, gpu="NVIDIA H200", dry=False):
    result = {"settings": {"dry": dry}, "hardware": {"gpu": gpu}, "sections": [], "rows": rows}
    return complete(result)


def judge_goal(rows, title):
    [goal] = [goal for goal in judge_rows(rows)["goals"] if goal["what"] == title]
    return goal


def test_good_rows_meet_all_goals_and_missing_rows_meet_none():
    result = judge_rows(make_good_rows())
    assert {goal["state"] for goal in result["goals"]} == {"met"}, result["goals"]
    assert summarize(result)["goals"][SPEED] == 1.7
    assert {goal["state"] for goal in judge_rows([])["goals"]} == {"not measured"}


@pytest.mark.parametrize(
    ("gpu", "dry", "state", "share"),
    [
        ("NVIDIA H200", False, "met", 0.75),
        ("NVIDIA L4", False, "met", None),
        ("NVIDIA H200", True, "not measured", 0.75),
        (None, False, "not measured", None),
    ],
)
def test_goals_are_judged_on_any_gpu_but_not_in_a_dry_run(gpu, dry, state, share):
    """Reads reach 4 TB/s. For a known GPU, there is a share of the datasheet's bandwidth."""
    share_goal, *_ = judge_rows(make_good_rows(), gpu=gpu, dry=dry)["goals"]
    assert (share_goal["state"], share_goal["worst"]) == (state, pytest.approx(0.9))
    assert share_goal["of_datasheet"] == (share and pytest.approx(share))


# Titles of goals, each with a row that misses the goal.
MISSED_GOALS = [
    (SHARE, make_decode_row("98 x 4k", "e4m3", 100.0, 0.84)),
    (SHARE, make_decode_row("98 x 4k", "e4m3" + goals.PADDED_SUFFIX, 100.0, 0.84)),
    ("decode e3m4, time over e4m3, 256k tokens on", make_decode_row("8 x 32k", "e3m4", 106.0)),
    (
        "decode e4m3, time over bf16 pages, 256k tokens on",
        make_decode_row("8 x 32k", "e4m3", 121, 0.86),
    ),
    ("one layer of a step, us, 1 x 1k", make_row("layer", "1 x 1k", "e3m4", us=7.5, launches=2)),
    (LAUNCHES, make_row("layer", "1 x 1k", "e3m4", us=6, launches=3)),
    ("write one token, us", make_row("write", "4 x 1 token", "int8", us=6.5)),
    (
        "extend e4m3, rate over SDPA flash",
        make_row("extend", "512 over 8192", "e4m3", us=1.0, flops=79e6),
    ),
    (SPEED, make_row("end to end", "8 x 32k", goals.PAGED, tokens_per_s=159.0, cache_bytes=52)),
    (
        "generate() 8 x 32k, bytes of the cache over 16 bits",
        make_row("end to end", "8 x 32k", goals.PAGED, tokens_per_s=170.0, cache_bytes=55),
    ),
    (LATENT, make_row("latent", "128 heads, 16 x 16k", "e4m3", us=12.1)),
    (
        "latent, time over absorbed bf16 in torch",
        make_row("latent", "16 heads, 1 x 16k", "e3m4", us=15.1),
    ),
]


def key_of(row):
    return (row["section"], row["case"], row["name"])


@pytest.mark.parametrize(("title", "bad_row"), MISSED_GOALS)
def test_the_worst_value_counts_and_a_failure_misses_the_goal(title, bad_row):
    other_rows = [row for row in make_good_rows() if key_of(row) != key_of(bad_row)]
    goal = judge_goal([*other_rows, bad_row], title)
    assert goal["state"] == "missed"
    assert goal["where"].startswith(f"{bad_row['case']}, {bad_row['name']}")
    failed_row = make_row(*key_of(bad_row), failed="an error")
    goal = judge_goal([*other_rows, failed_row], title)
    assert (goal["state"], goal["why"]) == ("missed", f"failed: {bad_row['case']}")


def test_a_goal_is_not_met_without_a_required_row():
    rows = [row for row in make_good_rows() if key_of(row) != ("decode", "50 x 32k", "e4m3")]
    goal = judge_goal(rows, SHARE)
    assert goal["state"] == "not measured"
    assert "50 x 32k" in goal["why"]
    bad_rows = [*rows, make_decode_row("16 x 32k", "e4m3", 100.0, 0.5)]
    assert judge_goal(bad_rows, SHARE)["state"] == "missed", "a bad value must count"
