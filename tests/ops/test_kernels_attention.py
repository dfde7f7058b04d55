"""Triton's attention kernel, for few and many query rows, against reference.py on the same bytes.

The tests run on a GPU if there is one, otherwise in Triton's interpreter. test_ops.py has the
cases, the faults and the bound for float32. Memory that was not written holds NaN. In 16 bits
PyTorch is the yardstick: a kernel's error may be twice the error of PyTorch's attention to the same
values, dense. (The kernel keeps K and V exact, and rounds queries and weights to float16. PyTorch
keeps the queries, and rounds K, V and weights.)
"""

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from hf_fp8kv import ops
from hf_fp8kv.formats import AUTO, FORMATS
from hf_fp8kv.ops import AttentionSpec, Pages, reference
from hf_fp8kv.ops.blocks import locate_pages
from hf_fp8kv.ops.visibility import visible
from tests.helpers import gpu_model
from tests.helpers.assertions import assert_same, assert_same_pool
from tests.helpers.blocks import split_into_blocks
from tests.helpers.grids import pairwise
from tests.ops.test_ops import (
    APART,
    CASES,
    PROMPTS,
    Case,
    at_the_edge,
    attend,
    bound,
    check_apart,
    copy,
    edge_case,
    errors,
    map_pages,
    poison,
    poisoned,
    prepare,
)

if ops.available_backends()["triton"] is not None:
    pytest.skip(str(ops.available_backends()["triton"]), allow_module_level=True)

from hf_fp8kv.ops.triton import decode, extend, plan, tuning
from hf_fp8kv.ops.triton.target import Recorded, Target, assuming, recording, target_of

pytestmark = pytest.mark.usefixtures("interpreted", "poisoned_outputs")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = DEVICE.type == "cpu" and "tests.tools.ptx.plugin" not in sys.modules
EXECUTED = "tests.tools.ptx.plugin" in sys.modules
KERNELS = {"decode": decode.attend, "extend": extend.attend}
Tensor = torch.Tensor


def to_device(x: Any) -> Any:
    """Return a tensor on the device, and any other object as it is."""
    return x.to(DEVICE) if isinstance(x, Tensor) else x


def run(kernel: str, case: Case, pages: Pages, query: Tensor, **kwargs: Any) -> Tensor:
    """Return a kernel's result, on the CPU. By default pages of 64 tokens are in several blocks."""
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)
    plans = {"plan": kwargs.pop("plan")} if "plan" in kwargs else {}
    blocks = kwargs.pop("blocks", case.page_size == 64)
    spec = AttentionSpec(**{name: to_device(x) for name, x in kwargs.items()})
    if blocks is not None:  # with None, the pages are already on the device
        pages = split_into_blocks(pages, device=DEVICE) if blocks else map_pages(to_device, pages)
    found = KERNELS[kernel](to_device(query), pages, lengths, case.start, case.stop, spec, **plans)
    return found.cpu()


def prepared(case: Case) -> tuple[Pages, Tensor, dict[str, Any], Tensor]:
    """Return the results of `prepare`, and the reference's result."""
    pages, query, kwargs = prepare(case)
    return pages, query, kwargs, attend(case, pages, query.float(), "reference", **kwargs)


def planned(lengths: Sequence[int], heads: int, tokens: int = 1, window: int = 0) -> Tensor:
    """Return a plan for these lengths."""
    rows = plan.plan_rows(DEVICE, len(lengths), heads)
    table = torch.empty((rows, 4), dtype=torch.int32, device=DEVICE)
    ends = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    plan.make_plan(table, ends, tokens, window, 0, heads)
    return table


def takes(kernel: str, case: Case) -> bool:
    """Return whether a kernel supports the case's number of query rows."""
    rows = case.q_heads // case.heads * case.tokens
    return kernel == "extend" or rows <= tuning.DECODE_ROWS or case.latent


def alternating(cases: Sequence[Any], values: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return each case with one of the values, which alternate."""
    return list(zip(cases, itertools.cycle(values), strict=False))


# Features for which the kernels have separate code, besides shapes.
_FEATURES = (
    "key", "value", "dynamic", "center", "rotated", "causal", "window", "softcap", "sinks",
    "padding", "mask", "latent", "from_zero",
)  # fmt: skip


def in_turn(cases: list[Case]) -> list[tuple[Case, str]]:
    """Return each case with the kernels that a feature of it is new to, or with the next kernel."""
    seen_features: set[tuple[str, str, Any]] = set()
    case_kernels: list[tuple[Case, str]] = []
    for case in cases:
        features = [(name, getattr(case, name)) for name in _FEATURES]
        features = [
            (name, x if name in ("key", "value", "mask") else bool(x)) for name, x in features
        ]
        able_kernels = [kernel for kernel in KERNELS if takes(kernel, case)]
        kernels = [
            kernel
            for kernel in able_kernels
            if any((kernel, *f) not in seen_features for f in features)
        ]
        for kernel in kernels or [able_kernels[len(case_kernels) % len(able_kernels)]]:
            case_kernels.append((case, kernel))
            seen_features.update((kernel, *feature) for feature in features)
    return case_kernels


def torch_attention(case: Case, pages: Pages, query: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Return PyTorch's attention on dense K and V, all in the query's dtype: `[B, T, Hq, Dv]`."""
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    dense = [
        reference.gather(pages, lengths, side, 0, case.stop, case.dtype, ragged=True)
        for side in ("k", "v")
    ]
    if case.latent:
        dense = [torch.cat(dense, -1), dense[0]]
    seen = visible(lengths, case.tokens, 0, case.stop, kwargs["causal"], kwargs["window"])[:, None]
    mask = kwargs.get("mask")
    if mask is not None:
        seen = seen & mask.bool()
    added = torch.zeros(seen.shape, dtype=case.dtype).masked_fill(~seen, -torch.inf)
    if kwargs.get("bias") is not None:
        added = added + kwargs["bias"]
    return torch.nn.functional.scaled_dot_product_attention(
        query, *(x.nan_to_num() for x in dense), attn_mask=added, enable_gqa=True,
        scale=kwargs["scaling"],
    ).transpose(1, 2)  # fmt: skip


# Prompts are only special in how "cpu" computes them.
_CASES = [case for case in CASES if case not in PROMPTS]


# Grid: both kernels read pages with the same code, and each runs with each feature.
@pytest.mark.parametrize(
    ("case", "kernel"), in_turn([c for c in _CASES if c.dtype == torch.float32]), ids=str
)
def test_float32_equals_the_reference(case, kernel):
    pages, query, kwargs, expected = prepared(case)
    before = copy(pages)
    found = run(kernel, case, pages, query, **kwargs)
    assert_same_pool(pages, before)
    assert found.shape == expected.shape
    assert errors(found, expected).max() <= bound(case)


# PyTorch's attention supports neither sinks nor softcap, so it is not a yardstick for them.
_HALF = [
    *(c for c in _CASES if c.dtype != torch.float32 and not c.sinks),
    Case("K auto, V e4m3, bf16", key=AUTO, dtype=torch.bfloat16, lengths=(700,)),
    Case("K e3m4, V auto, fp16", key="fp8_e3m4", value=AUTO, dtype=torch.float16, lengths=(199,)),
    Case("center, fp16", center=True, dtype=torch.float16, lengths=(199,), tokens=3),
    Case("window, bf16", window=20, dtype=torch.bfloat16, lengths=(199,), tokens=5),
    Case("head size 128, fp16", k_dim=128, v_dim=128, page_size=64, dtype=torch.float16,
         lengths=(700,), heads=1, q_heads=4),
    Case("head size 256, bf16", k_dim=256, v_dim=256, page_size=64, dtype=torch.bfloat16,
         lengths=(130,), heads=1, q_heads=2),
    Case("70 queries, bf16", tokens=70, lengths=(150,), page_size=64, dtype=torch.bfloat16),
    Case("rotated by blocks, fp16", rotated=True, key="int8", value="fp8_e2m5", k_dim=96, v_dim=80,
         center=True, dynamic=False, dtype=torch.float16, lengths=(333,), page_size=64),
    Case("rotated, head size 128, bf16", rotated=True, key="fp8_e2m5", value="int8", k_dim=128,
         v_dim=128, center=True, dtype=torch.bfloat16, lengths=(200,), tokens=17, page_size=64),
]  # fmt: skip


@pytest.mark.parametrize(("case", "kernel"), in_turn(_HALF), ids=str)
def test_16_bits_are_within_twice_pytorch_s_error(case, kernel):
    pages, query, kwargs, expected = prepared(case)
    found = run(kernel, case, pages, query, **kwargs)
    assert found.dtype == case.dtype
    yardstick = errors(torch_attention(case, pages, query, kwargs), expected)
    error = errors(found, expected)
    assert (error <= 2 * yardstick).all(), f"{error.tolist()} > 2 * {yardstick.tolist()}"


# GPUs that differ in how they decode a format: by an instruction, or by moving bits.
_READERS = ["sm_80", "sm_90", "gfx942", "gfx950"]
# No hardware converts E3M4, E2M5 or int8, so only E3M4 runs on every GPU.
_READ = [
    (name, target)
    for name in sorted(FORMATS)
    for target in _READERS
    if target in ("sm_80", "gfx942") or name not in ("fp8_e2m5", "int8")
]


# Grid: how a target decodes a format depends on the dtype of products, but not on the scales.
@pytest.mark.parametrize(
    ("read", "dynamic", "dtype", "side", "kernel"),
    pairwise(_READ, [True, False], [torch.float32, torch.bfloat16], ["k", "v"], list(KERNELS)),
    ids=str,
)
def test_every_way_to_read_a_format(read, dynamic, dtype, side, kernel):
    """Every code is decoded, and a visible NaN is not lost."""
    name, target = read
    case = Case("", key=name, value=name, dynamic=dynamic, dtype=dtype, lengths=(150, 70))
    pages, query, kwargs, expected = prepared(case)
    limit = bound(case)
    if dtype != torch.float32:
        limit = yardstick(target, case, pages, query, kwargs, expected)
    key, value = torch.randn(2, 2, 1, 32), torch.randn(2, 2, 1, 32)
    (key if side == "k" else value)[1, 0, 0, 3] = math.nan
    with pretending(target):
        worst = errors(run(kernel, case, pages, query, **kwargs), expected).max().item()
        ops.write(pages, key, value, torch.tensor([51, 51], dtype=torch.int32), "reference")
        found = run(kernel, case, pages, query, **kwargs)
    assert worst <= limit, f"{worst:.2e} > {limit:.2e}"
    assert found[0].isfinite().all(), "another sequence"
    assert found[1, :, 3:].isfinite().all(), "another head"
    assert found[1, :, :3].isnan().any(-1).all()


def pretending(target: str) -> AbstractContextManager[None]:
    """Launch as on a different GPU, with few SMs. Skip the test if a real GPU runs the kernels."""
    if not (INTERPRETED or (EXECUTED and target.startswith("sm_"))):
        pytest.skip("a GPU decodes a format in one way")
    how = Target.parse(target)
    return assuming(dataclasses.replace(how, sm_count=4, interpreted=INTERPRETED))


def yardstick(
    target: str, case: Case, pages: Pages, query: Tensor, kwargs: Any, expected: Any
) -> float:
    """Return the error of a target's products. AMD's bfloat16 has three bits less than float16."""
    theirs = errors(torch_attention(case, pages, query, kwargs), expected).max().item()
    return (4 if target.startswith("gfx") else 2) * theirs


# -- the split ---------------------------------------------------------------------------------


def make_plan(lengths, heads, tokens=1, window=0, start=0, length=None):
    """Return a plan's parts, and the rows of its sequences."""
    batch = len(lengths)
    rows = plan.plan_rows(DEVICE, batch, heads, length)
    table = torch.full((rows, 4), -77, dtype=torch.int32, device=DEVICE)
    ends = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    plan.make_plan(table, ends, tokens, window, start, heads)
    parts = plan.max_parts(table, batch)
    filled = [row for row in table[:parts].tolist() if row[0] >= 0]
    assert all(row[0] == -1 for row in table[len(filled) : parts].tolist())
    return filled, table[parts:].tolist()


@hypothesis.given(
    lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=9),
    tokens=st.integers(1, 5),
    window=st.sampled_from([0, 1, 100, 128, 1000]),
    start=st.sampled_from([0, 1, 127, 500]),
    heads=st.sampled_from([1, 2, 3, 8]),
    sm_count=st.integers(1, 12),
)
def test_a_plan_gives_every_token_to_one_program(lengths, tokens, window, start, heads, sm_count):
    target = target_of(DEVICE)
    if INTERPRETED:
        target = Target("cuda", 90, sm_count, interpreted=True)
    with assuming(target):
        parts, sequences = make_plan(lengths, heads, tokens, window, start)
    slots = [row[3] for row in parts if row[3] >= 0]
    assert len(set(slots)) == len(slots)
    for b, length in enumerate(lengths):
        own = sorted((row for row in parts if row[0] == b), key=lambda row: row[1])
        first, count = sequences[b][:2]
        assert count == len(own)
        assert own, "a sequence without a program would have no output"
        expected = range(first, first + count) if count > 1 else [-1]
        assert [row[3] for row in own] == list(expected)
        low = max(start, length - tokens - window + 1 if window else 0, 0)
        assert all(x[2] == y[1] for x, y in itertools.pairwise(own)), "a gap, or tokens twice"
        assert own[0][1] == 0
        assert own[-1][2] == 2**31 - 1
        # All parts except the first begin at a position that must be read.
        assert all(low < row[1] < length for row in own[1:])


# Grid: few sequences must be split, many need no split, and ragged ones need an order.
@pytest.mark.parametrize("heads", [1, 8, 32])
@pytest.mark.skipif(not INTERPRETED, reason="the model has the SMs of an H200")
def test_plans_take_little_longer_than_the_best(heads):
    """A plan reaches 95 % of the bandwidth, or of the best even split if no plan can reach that."""
    # The interpreter takes a second to plan for the largest batch, so that batch has one case.
    largest = [(64, 32768)] if heads == 8 else []
    for batch, most in ((1, 131072), (8, 131072), (25, 32768), *largest):
        spread = [1024 + (most - 1024) * (7 * i % batch) // batch for i in range(batch)]
        for lengths in ([4096] * batch, [most] * batch, spread, [most, *[1024] * (batch - 1)]):
            with assuming(Target("cuda", 90, 132, interpreted=True)):
                rows, _ = make_plan(lengths, heads)
            units = [-(-n // gpu_model.UNIT) for n in lengths]
            parts = [
                gpu_model.Part(
                    b, begin // gpu_model.UNIT, min(end // gpu_model.UNIT, units[b]), slot < 0
                )
                for b, begin, end, slot in rows
            ]
            took = gpu_model.time_of(parts, lengths, heads)
            share = gpu_model.bound(lengths, heads) / took
            # From 0.5 GB on, the fixed times of a program are negligible.
            if share < 0.95 and (gpu_model.bound(lengths, heads) < 120 or len(set(lengths)) > 1):
                share = max(share, gpu_model.best_time(lengths, heads) / took)
            assert share >= (0.95 if took > 30 else 0.88), (batch, lengths[:3], took, share)


def test_a_plan_for_one_length_has_no_room_for_parts_that_do_not_pay():
    with assuming(dataclasses.replace(target_of(DEVICE), sm_count=132, resources=None)):
        assert plan.plan_rows(DEVICE, 64, 8, 32768) == 64 + 64
        assert plan.plan_rows(DEVICE, 25, 8, 32768) > 25 + 25
        assert plan.plan_rows(DEVICE, 64, 8) > 64 + 64
        parts, sequences = make_plan([900, 900], 8, length=100)
        for length, batch, heads in ((500, 22, 1), (9000, 1, 1), (9000, 22, 8), (9000, 67, 8)):
            room = plan.plan_rows(DEVICE, batch, heads, length) > 2 * batch
            split = any(row[3] >= 0 for row in make_plan([length] * batch, heads)[0])
            assert split == room or (room and length < 1000)
    assert [row[1:] for row in parts] == [[0, 2**31 - 1, -1]] * 2
    assert [row[1] for row in sequences] == [1, 1]


def kernels(recorded: Recorded) -> list[str]:
    """Return the names of the launched kernels."""
    return [launched.kernel.__name__ for launched in recorded.launches]


def test_nothing_is_merged_if_no_sequence_is_split():
    started = []
    pages = poisoned(Case("one", lengths=(64, 64), page_size=64))
    query = torch.zeros(2, 4, 1, 32, dtype=torch.bfloat16)
    ends = torch.tensor([64, 64], dtype=torch.int32)
    for length in (64, None):
        rows = plan.plan_rows(DEVICE, 2, 2, length)
        table = torch.empty((rows, 4), dtype=torch.int32, device=DEVICE)
        with recording(starts=False) as recorded:
            decode.attend(query, pages, ends, 0, 64, AttentionSpec(1.0, causal=True), table)
        started += kernels(recorded)
    assert started == ["_attend", "_attend", "_combine"]


SPLIT = Case("split", lengths=(450, 130, 200), tokens=3, page_size=64, sinks=True, heads=2,
             q_heads=6)  # fmt: skip
# Grid: few and many parts, and rotation of the merged sums for either order of operands.
SPLITS = [
    pytest.param(1, False, False, id="1", marks=pytest.mark.full),
    pytest.param(5, False, False, id="5"),
    pytest.param(40, True, False, id="40-rotated"),
    pytest.param(5, True, True, id="5-rotated-swapped"),
]


# Without poison, an output that no program writes may lie in the memory of an earlier equal output.
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize(("sm_count", "rotated", "swapped"), SPLITS)
def test_any_split_gives_the_same_result(sm_count, rotated, swapped):
    case = SPLIT
    if rotated:
        # Blocks of 32 and of 16 channels, next to the padding of a head.
        case = dataclasses.replace(
            SPLIT, rotated=True, key="int8", value="fp8_e2m5", k_dim=96, v_dim=80, dynamic=False,
            center=True,
        )  # fmt: skip
    pages, query, kwargs, expected = prepared(case)
    # Any kernel accepts a plan for the number of programs that it expects.
    parameters = {"swapped": swapped, "programs": 4}
    with assuming(dataclasses.replace(target_of(DEVICE), sm_count=sm_count, parameters=parameters)):
        found = run("decode", case, pages, query, **kwargs)
        assert errors(found, expected).max() <= bound(case)
        # With a plan that was made before, used by two layers.
        table = planned(case.lengths, case.heads, case.tokens)
        for _ in range(2):
            again = run("decode", case, pages, query, plan=table, **kwargs)
            assert_same(again, found)


def test_a_plan_for_other_lengths_is_correct():
    """For example after a crop: the plan was made for more or fewer tokens, or for a window."""
    case = Case("stale", lengths=(900, 60), page_size=64)
    pages, query, kwargs, expected = prepared(case)
    for ends, window in (([1800, 1500], 0), ([1, 0], 0), ([2000, 900], 300), ([130, 140], 20)):
        table = planned(ends, 2, window=window)
        found = run("decode", case, pages, query, plan=table, **kwargs)
        assert errors(found, expected).max() <= bound(case)


# Neither head size is a power of two. Cases have one, three and more blocks of query rows.
_LATENT = {"latent": True, "heads": 1, "k_dim": 96, "v_dim": 24, "page_size": 64, "value": AUTO}
_CHUNK = Case("chunk", lengths=(800, 400), tokens=30, page_size=64, heads=1, q_heads=3, window=600)
_EDGES = tuple(n for edge in (32, 64, 128) for n in (edge - 1, edge, edge + 1))
# Grid: parameters change how a tile is computed, but not which tiles there are. So each parameter
# runs with a few cases: in both kernels, in few and in many parts.
_CONFIGURED: list[tuple[Case, str, int, dict[str, Any]]] = [
    (_CHUNK, "extend", 40, {"rows": 32}),
    (Case("many", lengths=tuple(range(1, 60, 3)), heads=2, q_heads=2), "decode", 3, {}),
    (Case("16 heads", q_heads=16, lengths=(400, 130, 64), **_LATENT), "decode", 60, {}),
    (Case("20 heads, sinks", q_heads=20, lengths=(191, 193), tokens=3, sinks=True, **_LATENT),
     "decode", 60, {"chunks": 4}),
    (Case("128 heads, rotated", q_heads=128, lengths=(129,), rotated=True,
          **{**_LATENT, "key": "fp8_e2m5", "value": "int8"}),
     "extend", 1, {"tile": 64}),
    (Case("window, 17 queries", q_heads=6, lengths=(200,), tokens=17, window=70, **_LATENT),
     "decode", 60, {"rows": 64, "chunks": 2, "tile": 32, "masked_tile": 32}),
    (Case("holes", q_heads=16, lengths=(192, 192), tokens=2, mask="bool", **_LATENT),
     "decode", 60, {"tile": 64}),
    (Case("padding, static", q_heads=16, lengths=(255, 128), padding=70, tokens=2, dynamic=False,
          **{**_LATENT, "key": "fp8_e3m4"}), "extend", 1, {"chunks": 4}),
    (Case("edges, 3 queries", lengths=_EDGES, tokens=3, q_heads=4, **_LATENT), "decode", 4, {}),
    (Case("edges", lengths=_EDGES, q_heads=4, **_LATENT), "extend", 4, {}),
    *(
        (Case(f"pages of {size}", lengths=(391,), page_size=size, dynamic=tile != 64), kernel, 4,
         {"tile": tile})
        for tile, size, kernel in pairwise([16, 64, 128], [8, 16, 64, 256], list(KERNELS))
    ),
]  # fmt: skip


@pytest.mark.parametrize(("case", "kernel", "sm_count", "config"), _CONFIGURED, ids=str)
def test_any_launch_parameters_give_the_same_result(case, kernel, sm_count, config):
    pages, query, kwargs, expected = prepared(case)
    with assuming(dataclasses.replace(target_of(DEVICE), sm_count=sm_count, parameters=config)):
        assert errors(run(kernel, case, pages, query, **kwargs), expected).max() <= bound(case)


# Grid: the slot determines the mask of a tile, and the tokens determine how many tiles need it.
@pytest.mark.parametrize(
    ("tokens", "slot", "from_zero", "kernel"),
    pairwise([1, 3, 17], [15, 16, 17], [False, True], list(KERNELS)),
)
def test_a_window_that_begins_at_the_edge_of_a_page(tokens, slot, from_zero, kernel):
    """A page is a tile here, so the edges of page, tile and window coincide."""
    case = edge_case(tokens, slot, from_zero)
    kernel = kernel if takes(kernel, case) else "extend"
    pages, query, kwargs, expected = at_the_edge(case)
    parameters = {"tile": case.page_size}
    with assuming(dataclasses.replace(target_of(DEVICE), parameters=parameters)):
        found = run(kernel, case, pages, query, **kwargs)
    assert errors(found, expected).max() <= bound(case)


@pytest.mark.parametrize("kernel", KERNELS)
def test_pages_past_two_gigabytes(kernel):
    """Addresses have 64 bits, and kernels only access the pages in the table."""
    case = Case("far", lengths=(150,), page_size=64, k_dim=64, v_dim=64, heads=2, q_heads=2)
    pages, query, kwargs = prepare(case)
    count = 2**31 // (2 * 64 * 64) + 5
    table = torch.tensor([[count - 1, 1, count - 3, count - 4]], dtype=torch.int32)
    torch.utils.deterministic.fill_uninitialized_memory = False

    block = torch.empty((count, pages.block.shape[1]), dtype=torch.uint8, device=DEVICE)
    block[table[0].long().to(DEVICE)] = pages.block[pages.table[0].long()].to(DEVICE)
    far = map_pages(to_device, pages)._replace(
        block=block, table=to_device(table), offsets=locate_pages([block])
    )
    expected = attend(case, pages, query, "reference", **kwargs)
    found = run(kernel, case, far, query, blocks=None, **kwargs)
    assert errors(found, expected).max() <= bound(case)


@pytest.mark.parametrize("case", APART, ids=str)
def test_deterministic_attention_depends_on_nothing_else(case):
    check_apart(case, "triton", DEVICE)


def test_tiny_and_huge_scales_keep_their_effect():
    """Weights in float16 do not vanish next to a V of zeros or with a scale of 1e-9."""
    for magnitude in (1e-9, 1.0, 1e6):
        case = Case("scales", lengths=(300,), dtype=torch.bfloat16, page_size=64)
        pages = poisoned(case)
        key, value = torch.randn(1, 2, 300, 32), torch.randn(1, 2, 300, 32) * magnitude
        value[:, :, 100:250] = 0
        key *= magnitude
        at = torch.tensor([300], dtype=torch.int32)
        ops.write(pages, key, value, at, "reference")
        query = (torch.randn(1, 6, 1, 32) / magnitude).to(case.dtype)
        kwargs = {"scaling": 32**-0.5, "causal": True, "window": 0}
        expected = attend(case, pages, query.float(), "reference", **kwargs)
        for kernel in KERNELS:
            error = errors(run(kernel, case, pages, query, **kwargs), expected).max()
            assert error < 2.0**-8, f"{kernel} at {magnitude}: {error:.2e}"


def test_many_zeros_before_the_first_value():
    """Zeros have the smallest possible scales. Sums of weights must not overflow before a value."""
    case = Case("zeros", lengths=(17000,), page_size=1024, heads=1, q_heads=32, k_dim=16, v_dim=16)
    pages = poisoned(case)
    key, value = torch.randn(1, 1, 17000, 16), torch.randn(1, 1, 17000, 16)
    value[:, :, :16900] = 0
    ops.write(pages, key, value, torch.tensor([17000], dtype=torch.int32), "reference")
    query, kwargs = torch.zeros(1, 32, 1, 16), {"scaling": 1.0, "causal": True}
    expected = attend(case, pages, query, "reference", **kwargs)
    config = {"programs": 1, "rows": 32} | ({"tile": 1024} if INTERPRETED else {})
    with assuming(dataclasses.replace(target_of(DEVICE), sm_count=1, parameters=config)):
        for kernel in KERNELS:
            found = run(kernel, case, pages, query, **kwargs)
            assert errors(found, expected).max() <= bound(case)


def test_a_row_with_only_lowest_biases_is_a_mean():
    """Additive masks give padding the lowest value. Only rows of -inf attend to nothing."""
    case = Case("lowest", lengths=(150,), tokens=3)
    pages, query, kwargs = prepare(case)
    for lowest in (torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min):
        added = torch.zeros(1, 1, 3, 150)
        added[..., 0, :] = lowest
        added[..., 1, 70:] = lowest
        extra = {**kwargs, "bias": added}
        expected = attend(case, pages, query, "reference", **extra)
        for kernel in KERNELS:
            found = run(kernel, case, pages, query, **extra)
            assert errors(found, expected).max() <= bound(case)


def test_an_infinite_negative_sink_without_visible_tokens():
    case = Case("nothing", lengths=(40, 3), tokens=5, sinks=True)
    pages, query, kwargs = prepare(case)
    kwargs["sinks"] = torch.full_like(kwargs["sinks"], -math.inf)
    for kernel in KERNELS:
        found = run(kernel, case, pages, query, **kwargs)
        assert (found[1, :2] == 0).all()
        assert found.isfinite().all()


@pytest.mark.parametrize(
    ("kernel", "tokens", "config"),
    [("decode", 60, {"tile": 16}), ("extend", 128, {"tile": 32, "rows": 128})],
)
def test_a_split_that_ends_before_the_window_of_every_row(kernel, tokens, config):
    """A call has a complete mask in addition to a window, as in static sliding layers."""
    case = Case("window", lengths=(600,), tokens=tokens, page_size=64, heads=1, q_heads=1)
    pages, query, kwargs = prepare(case)
    mask = visible(torch.tensor([600]), tokens, 0, 600, True, 3)[:, None]
    kwargs |= {"mask": mask, "window": 3 + tokens - 1, "causal": False}
    expected = attend(case, pages, query, "reference", **kwargs)
    with assuming(dataclasses.replace(target_of(DEVICE), sm_count=40, parameters=config)):
        found = run(kernel, case, pages, query, **kwargs)
    assert errors(found, expected).max() <= bound(case)


def test_the_length_of_a_chunk_is_not_a_constant():
    """Otherwise each prompt would wait for a compiler."""
    launched: dict[str, set[str]] = {}

    pages = poisoned(Case("chunk", lengths=(9000,), page_size=64, heads=2))
    lengths = torch.tensor([9000], dtype=torch.int32)
    target = dataclasses.replace(target_of(DEVICE), sm_count=132)
    with assuming(target), recording(starts=False) as recorded:
        for tokens in range(70, 6000, 90):
            query = torch.zeros(1, 8, tokens, 32)
            extend.attend(query, pages, lengths, 0, 9000, AttentionSpec(1.0, causal=True))
    for kernel, _, args, constants, _ in recorded.launches:
        name, plan_table = kernel.fn.__name__, args[1]
        split = ", split" if name == "_attend" and plan_table is not None else ""
        launched.setdefault(name + split, set()).add(repr(constants))
    del launched["_plan"]
    counts = {name: len(found) for name, found in launched.items()}
    assert counts == {"_attend, split": 1, "_combine": 1, "_attend": 1}


@pytest.mark.parametrize(
    "case",
    [
        Case("e4m3", lengths=(300, 129), tokens=90, page_size=64, heads=2, q_heads=8, k_dim=64,
             v_dim=64, dtype=torch.bfloat16),
        Case("static", lengths=(300, 129), tokens=90, page_size=48, heads=1, q_heads=6, k_dim=80,
             v_dim=40, dtype=torch.bfloat16, key="fp8_e3m4", value="int8", dynamic=False,
             padding=20),
        Case("rotated K", lengths=(300, 129), tokens=90, page_size=16, heads=1, q_heads=6,
             rotated=True, k_dim=32, v_dim=64, dtype=torch.float16, key="int8", value=AUTO),
    ],
    ids=lambda case: case.name,
)  # fmt: skip
def test_widened_codes_give_the_same_bits(case, monkeypatch):
    pages, query, kwargs, expected = prepared(case)
    monkeypatch.setattr(extend, "WIDENED_FROM", 0)
    monkeypatch.setattr(extend, "WIDENED_BLOCKS", 2)
    # A GPU has more SMs than these cases have blocks of rows.
    monkeypatch.setattr(extend, "SPLIT_FROM", 1000)
    with recording() as recorded:
        wide = run("extend", case, pages, query, **kwargs)
    assert kernels(recorded) == ["_widen_codes", "_attend"]
    assert errors(wide, expected).max() <= 2 * errors(
        torch_attention(case, pages, query, kwargs), expected
    ).max()  # fmt: skip
    monkeypatch.setattr(extend, "WIDENED_BYTES", 0)
    with recording() as recorded:
        assert_same(run("extend", case, pages, query, **kwargs), wide)
    assert kernels(recorded) == ["_attend"]


def test_grids_of_a_million_tokens():
    """Only the first axis of a grid may exceed 65535."""
    pages = poisoned(Case("long", lengths=(64,), page_size=64))
    query = torch.zeros(32).expand(1, 8, 2**20, 32)
    with recording(starts=False) as recorded:
        spec = AttentionSpec(1.0, causal=True)
        extend.attend(query, pages, torch.tensor([64]), 0, 2**20, spec)
    assert recorded.launches
    assert all(max(x.grid[1:], default=1) <= 65535 for x in recorded.launches)


def test_more_rows_than_shared_memory_holds():
    """In float32 there are several blocks of rows, but the plan was made for one block."""
    tokens = 21
    case = Case("blocks", lengths=(300, 150), tokens=tokens, page_size=64, k_dim=128, v_dim=72)
    pages, query, kwargs, expected = prepared(case)
    table = planned(case.lengths, 2, tokens)
    found = run("decode", case, pages, query, plan=table, **kwargs)
    assert errors(found, expected).max() <= bound(case)


# -- latents -------------------------------------------------------------------------------------


# Grid: test_every_way_to_read_a_format runs each format on each target.
@pytest.mark.parametrize(
    ("name", "target"), alternating(["fp8_e4m3", "fp8_e5m2", "fp8_e2m5", "fp8_e4m3"], _READERS)
)
def test_every_way_to_read_a_latent(name, target):
    """Each target has its launch parameters, and a visible NaN is not lost."""
    rotated = name == "fp8_e2m5"
    extra = {**_LATENT, "key": name, "rotated": rotated, "dynamic": not rotated}
    case = Case("", q_heads=16, lengths=(150, 90), dtype=torch.bfloat16, **extra)
    pages, query, kwargs, expected = prepared(case)
    limit = yardstick(target, case, pages, query, kwargs, expected)
    with pretending(target):
        for kernel in KERNELS:
            assert errors(run(kernel, case, pages, query, **kwargs), expected).max() <= limit
        poison(pages, 1, [30])
        for kernel in KERNELS:
            found = run(kernel, case, pages, query, **kwargs)
            assert found[0].isfinite().all()
            assert found[1].isnan().any(-1).all()
