"""Compare Triton's attention kernels, for few and many query rows, with reference.py.

The tests run on a GPU if there is one, otherwise in Triton's interpreter. test_ops.py defines
the cases and the error limit for float32. Memory that was not written holds NaN. For 16-bit dtypes,
a kernel's error may be at most twice the error of PyTorch's attention over the same values. (The
kernel keeps K and V exact, and rounds queries and weights to float16. PyTorch keeps the queries,
and rounds K, V and weights.)
"""

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from hf_fp8kv import ops
from hf_fp8kv.errors import ConfigError
from hf_fp8kv.formats import AUTO, FORMATS
from hf_fp8kv.ops import AttentionSpec, Pages, reference
from hf_fp8kv.ops.blocks import locate_pages
from hf_fp8kv.ops.visibility import find_visible
from tests.helpers.assertions import assert_same, assert_same_pool
from tests.helpers.blocks import split_into_blocks
from tests.helpers.grids import pairwise
from tests.ops.test_ops import (
    CASES,
    DETERMINISTIC_CASES,
    PROMPT_CASES,
    Case,
    attend,
    bound_error,
    check_deterministic,
    compute_errors,
    copy_pages,
    make_edge_case,
    make_pages,
    map_pages,
    poison,
    prepare,
    prepare_edge,
    prepare_expected,
)

if ops.explain_backends()["triton"] is not None:
    pytest.skip(str(ops.explain_backends()["triton"]), allow_module_level=True)

from hf_fp8kv.ops.triton import decode, extend, schedule, tuning
from hf_fp8kv.ops.triton.target import LaunchRecord, Target, assuming, get_target, recording

# Without poison, an output that no program writes may reuse the memory of an earlier output.
pytestmark = pytest.mark.usefixtures("interpreted", "poisoned_outputs")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RUNS_PTX = "tests.tools.ptx.plugin" in sys.modules
IS_INTERPRETED = DEVICE.type == "cpu" and not RUNS_PTX
KERNELS = {"decode": decode.attend, "extend": extend.attend}
Tensor = torch.Tensor


def to_device(x: Any) -> Any:
    """Move a tensor to the device, and return any other object unchanged."""
    return x.to(DEVICE) if isinstance(x, Tensor) else x


def run_kernel(kernel: str, case: Case, pages: Pages, query: Tensor, **fields: Any) -> Tensor:
    """Return a kernel's result on the CPU. Pages are moved to DEVICE unless `is_on_device`."""
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)
    schedules = [fields.pop("schedule")] if "schedule" in fields else []
    is_on_device = fields.pop("is_on_device", False)
    spec = AttentionSpec(**{name: to_device(value) for name, value in fields.items()})
    if not is_on_device and case.page_size == 64:
        pages = split_into_blocks(pages, device=DEVICE)
    elif not is_on_device:
        pages = map_pages(to_device, pages)
    actual = KERNELS[kernel](
        to_device(query), pages, lengths, case.start, case.stop, spec, *schedules
    )
    return actual.cpu()


def check_kernel(
    kernel: str, case: Case, pages: Pages, query: Tensor, expected: Tensor, **fields: Any
) -> Tensor:
    """Return a kernel's result on the CPU, after checking its error."""
    actual = run_kernel(kernel, case, pages, query, **fields)
    assert compute_errors(actual, expected).max() <= bound_error(case)
    return actual


def make_schedule_table(lengths, num_heads, num_tokens=1, window=0, start=0, length=None) -> Tensor:
    num_rows = schedule.count_schedule_rows(DEVICE, len(lengths), num_heads, length)
    table = torch.full((num_rows, 4), -77, dtype=torch.int32, device=DEVICE)
    ends = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    schedule.fill_schedule(table, ends, num_tokens, window, start, num_heads)
    return table


def supports(kernel: str, case: Case) -> bool:
    num_rows = case.num_query_heads // case.num_heads * case.num_tokens
    return kernel == "extend" or num_rows <= tuning.MAX_DECODE_ROWS or case.latent


def assign_kernels(cases: list[Case]) -> list[tuple[Case, str]]:
    """Pair the cases with alternating kernels, which read pages with the same code."""
    pairs = []
    for index, case in enumerate(cases):
        kernels = [kernel for kernel in KERNELS if supports(kernel, case)]
        pairs.append((case, kernels[index % len(kernels)]))
    return pairs


def attend_with_torch(case: Case, pages: Pages, query: Tensor, fields: dict[str, Any]) -> Tensor:
    """Return PyTorch's attention over dense K and V in the query's dtype, `[B, T, Hq, Dv]`."""
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    dense = [
        reference.gather(pages, lengths, side, 0, case.stop, case.dtype, ragged=True)
        for side in ("k", "v")
    ]
    if case.latent:
        dense = [torch.cat(dense, -1), dense[0]]
    causal, window = fields["causal"], fields["window"]
    is_visible = find_visible(lengths, case.num_tokens, 0, case.stop, causal, window)[:, None]
    mask = fields.get("mask")
    if mask is not None:
        is_visible = is_visible & mask.bool()
    bias = torch.zeros(is_visible.shape, dtype=case.dtype).masked_fill(~is_visible, -torch.inf)
    if fields.get("bias") is not None:
        bias = bias + fields["bias"]
    return torch.nn.functional.scaled_dot_product_attention(
        query, *(states.nan_to_num() for states in dense), attn_mask=bias, enable_gqa=True,
        scale=fields["scaling"],
    ).transpose(1, 2)  # fmt: skip


def has_unsupported_head(case: Case) -> bool:
    """Return whether Triton refuses the packed codes of the case, because of a head size."""
    return any(
        name in FORMATS and FORMATS[name].bits < 8 and dim not in (32, 64, 128, 256)
        for name, dim in ((case.k_format, case.k_dim), (case.v_format, case.v_dim))
    )


# Only "cpu" computes prompts in a special way.
KERNEL_CASES = [
    case for case in CASES if case not in PROMPT_CASES and not has_unsupported_head(case)
]


@pytest.mark.parametrize(
    ("case", "kernel"),
    assign_kernels([case for case in KERNEL_CASES if case.dtype == torch.float32]),
    ids=str,
)
def test_float32_equals_the_reference(case, kernel):
    pages, query, fields, expected = prepare_expected(case)
    old_pages = copy_pages(pages)
    actual = check_kernel(kernel, case, pages, query, expected, **fields)
    assert_same_pool(pages, old_pages)
    assert actual.shape == expected.shape


@pytest.mark.parametrize("dims", [(96, 128), (128, 16)], ids=str)
def test_packed_codes_of_other_heads_are_refused(dims):
    case = Case("", k_format="int6", v_format="int4", k_dim=dims[0], v_dim=dims[1])
    pages, query, fields, _ = prepare_expected(case)
    with pytest.raises(ConfigError, match=r"^head size: expected a power of two of at least 32 "):
        run_kernel("decode", case, pages, query, **fields)


# PyTorch's attention supports neither sinks nor softcap, so it gives no limit for these.
CASES_16_BIT = [
    *(case for case in KERNEL_CASES if case.dtype != torch.float32 and not case.sinks),
    Case("K auto, V e4m3, bf16", k_format=AUTO, dtype=torch.bfloat16, lengths=(700,)),
    Case("K e3m4, V auto, fp16", k_format="fp8_e3m4", v_format=AUTO, dtype=torch.float16,
         lengths=(199,)),
    Case("center, fp16", center=True, dtype=torch.float16, lengths=(199,), num_tokens=3),
    Case("window, bf16", window=20, dtype=torch.bfloat16, lengths=(199,), num_tokens=5),
    Case("head size 128, fp16", k_dim=128, v_dim=128, page_size=64, dtype=torch.float16,
         lengths=(700,), num_heads=1, num_query_heads=4),
    Case("head size 256, bf16", k_dim=256, v_dim=256, page_size=64, dtype=torch.bfloat16,
         lengths=(130,), num_heads=1, num_query_heads=2),
    Case("70 queries, bf16", num_tokens=70, lengths=(150,), page_size=64, dtype=torch.bfloat16),
    Case("rotated by blocks, fp16", rotated=True, k_format="int8", v_format="fp8_e2m5", k_dim=96,
         v_dim=80, center=True, dynamic=False, dtype=torch.float16, lengths=(333,), page_size=64),
    Case("rotated, head size 128, bf16", rotated=True, k_format="fp8_e2m5", v_format="int8",
         k_dim=128, v_dim=128, center=True, dtype=torch.bfloat16, lengths=(200,), num_tokens=17,
         page_size=64),
    Case("K int6, V int4, bf16", rotated=True, k_format="int6", v_format="int4", k_dim=128,
         v_dim=64, center=True, dtype=torch.bfloat16, lengths=(333, 65), page_size=64),
    Case("K int4, V int6, pages of 48, fp16", k_format="int4", v_format="int6", k_dim=64, v_dim=32,
         dynamic=False, dtype=torch.float16, lengths=(199,), num_tokens=3, page_size=48),
    Case("K int6, V int6, mask, bf16", k_format="int6", v_format="int6", k_dim=32, v_dim=64,
         mask="bool", num_tokens=3, dtype=torch.bfloat16, lengths=(150, 150)),
]  # fmt: skip


@pytest.mark.parametrize(("case", "kernel"), assign_kernels(CASES_16_BIT), ids=str)
def test_errors_in_16_bits_are_at_most_twice_the_errors_of_pytorch(case, kernel):
    pages, query, fields, expected = prepare_expected(case)
    actual = run_kernel(kernel, case, pages, query, **fields)
    assert actual.dtype == case.dtype
    torch_error = compute_errors(attend_with_torch(case, pages, query, fields), expected)
    error = compute_errors(actual, expected)
    assert (error <= 2 * torch_error).all(), f"{error.tolist()} > 2 * {torch_error.tolist()}"


# GPUs that decode a format in different ways: by an instruction, or by shifting bits.
TARGETS = ["sm_80", "sm_90", "gfx942", "gfx950"]
# Hardware converts only E4M3 and E5M2. E3M4 runs on every GPU as a sample of all formats.
FORMAT_TARGETS = [
    (name, target)
    for name, target in itertools.product(sorted(FORMATS), TARGETS)
    if target in ("sm_80", "gfx942") or name not in ("fp8_e2m5", "int8", "int6", "int4")
]


# How a target decodes a format depends on the dtype of products, but not on the scales.
@pytest.mark.parametrize(
    ("format_target", "dynamic", "dtype", "side", "kernel"),
    pairwise(
        FORMAT_TARGETS, [True, False], [torch.float32, torch.bfloat16], ["k", "v"], list(KERNELS)
    ),
    ids=str,
)
def test_each_way_to_read_a_format_is_correct(format_target, dynamic, dtype, side, kernel):
    """All codes are decoded, and a visible NaN reaches the output."""
    name, target = format_target
    case = Case("", k_format=name, v_format=name, dynamic=dynamic, dtype=dtype, lengths=(90, 70))
    pages, query, fields, expected = prepare_expected(case)
    limit = bound_error(case)
    if dtype != torch.float32:
        limit = bound_target_error(target, case, pages, query, fields, expected)
    key, value = torch.randn(2, 2, 2, 1, 32)
    states = key if side == "k" else value
    states[1, 0, 0, 3] = math.nan
    with assume_target(target):
        actual = run_kernel(kernel, case, pages, query, **fields)
        worst_error = compute_errors(actual, expected).max().item()
        ops.write(pages, key, value, torch.tensor([51, 51], dtype=torch.int32), "reference")
        actual = run_kernel(kernel, case, pages, query, **fields)
    assert worst_error <= limit, f"{worst_error:.2e} > {limit:.2e}"
    assert actual[0].isfinite().all(), "another sequence"
    assert actual[1, :, 3:].isfinite().all(), "another head"
    assert actual[1, :, :3].isnan().any(-1).all()


def assume_target(target: str) -> AbstractContextManager[None]:
    """Launch as on the GPU `target`, with few SMs. Skip the test if a real GPU runs the kernels."""
    if not (IS_INTERPRETED or (RUNS_PTX and target.startswith("sm_"))):
        pytest.skip("a GPU supports only one way to decode a format")
    parsed = Target.parse(target)
    return assuming(dataclasses.replace(parsed, sm_count=4, interpreted=IS_INTERPRETED))


def bound_target_error(
    target: str, case: Case, pages: Pages, query: Tensor, fields: Any, expected: Any
) -> float:
    """Return the largest allowed error. AMD GPUs use bfloat16, with 3 bits less than float16."""
    torch_output = attend_with_torch(case, pages, query, fields)
    torch_error = compute_errors(torch_output, expected).max().item()
    return (4 if target.startswith("gfx") else 2) * torch_error


# -- the split ---------------------------------------------------------------------------------


def make_schedule_rows(lengths, *args, **kwargs):
    """Return the used rows of a schedule with parts, and the rows of its sequences."""
    table = make_schedule_table(lengths, *args, **kwargs)
    max_parts = schedule.get_max_parts(table, len(lengths))
    used_rows = [row for row in table[:max_parts].tolist() if row[0] >= 0]
    assert (table[len(used_rows) : max_parts] == -1).all()
    return used_rows, table[max_parts:].tolist()


@hypothesis.given(
    lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=9),
    num_tokens=st.integers(1, 5),
    window=st.sampled_from([0, 1, 100, 128, 1000]),
    start=st.sampled_from([0, 1, 127, 500]),
    num_heads=st.sampled_from([1, 2, 3, 8]),
    sm_count=st.integers(1, 12),
)
def test_a_schedule_gives_every_token_to_one_program(
    lengths, num_tokens, window, start, num_heads, sm_count
):
    target = get_target(DEVICE)
    if IS_INTERPRETED:
        target = Target("cuda", 90, sm_count, interpreted=True)
    with assuming(target):
        parts, sequences = make_schedule_rows(lengths, num_heads, num_tokens, window, start)
    slots = [row[3] for row in parts if row[3] >= 0]
    assert len(set(slots)) == len(slots)
    for index, length in enumerate(lengths):
        seq_parts = sorted((row for row in parts if row[0] == index), key=lambda row: row[1])
        first, count = sequences[index][:2]
        assert count == len(seq_parts)
        assert seq_parts, "a sequence without a program would have no output"
        expected = range(first, first + count) if count > 1 else [-1]
        assert [row[3] for row in seq_parts] == list(expected)
        low = max(start, length - num_tokens - window + 1 if window else 0, 0)
        assert all(part[2] == following[1] for part, following in itertools.pairwise(seq_parts)), (
            "a gap, or tokens twice"
        )
        assert seq_parts[0][1] == 0
        assert seq_parts[-1][2] == 2**31 - 1
        # All parts except the first begin at a position that must be read.
        assert all(low < row[1] < length for row in seq_parts[1:])


def list_kernels(recorded: LaunchRecord) -> list[str]:
    return [launch.kernel.__name__ for launch in recorded.launches]


SPLIT_CASE = Case("split", lengths=(330, 70, 130), num_tokens=3, page_size=64, sinks=True)


# Few and many parts, and rotation of the merged sums for either order of operands.
@pytest.mark.parametrize(
    ("sm_count", "rotated", "swapped"),
    [
        pytest.param(1, False, False, id="1 SM", marks=pytest.mark.full),
        pytest.param(5, False, False, id="5 SMs"),
        pytest.param(40, True, False, id="40 SMs, rotated"),
        pytest.param(5, True, True, id="5 SMs, rotated, swapped"),
    ],
)
def test_any_split_gives_the_same_result(sm_count, rotated, swapped):
    case = SPLIT_CASE
    if rotated:
        # Blocks of 32 and of 16 channels, next to the padding of a head.
        case = dataclasses.replace(
            SPLIT_CASE, rotated=True, k_format="int8", v_format="fp8_e2m5", k_dim=96, v_dim=80,
            dynamic=False, center=True,
        )  # fmt: skip
    pages, query, fields, expected = prepare_expected(case)
    # Any kernel accepts a schedule for the number of programs that it expects.
    parameters = {"swapped": swapped, "programs": 4}
    with assuming(
        dataclasses.replace(get_target(DEVICE), sm_count=sm_count, parameters=parameters)
    ):
        actual = check_kernel("decode", case, pages, query, expected, **fields)
        # Two layers use the same schedule, made before the calls.
        table = make_schedule_table(case.lengths, case.num_heads, case.num_tokens)
        for _ in range(2):
            output = run_kernel("decode", case, pages, query, schedule=table, **fields)
            assert_same(output, actual)


def test_more_parts_than_fit_in_one_load_are_merged():
    case = Case("35 parts", lengths=(2200,), page_size=64)
    pages, query, fields, expected = prepare_expected(case)
    with assuming(dataclasses.replace(get_target(DEVICE), sm_count=132)):
        _, ((_, num_parts, *_),) = make_schedule_rows(case.lengths, case.num_heads)
        assert num_parts > 4096 // 128  # LOAD_SIZE, MAX_CHANNELS
        check_kernel("decode", case, pages, query, expected, **fields)


@pytest.mark.parametrize(
    ("lengths", "window"), [([1800, 1500], 0), ([1, 0], 0), ([2000, 900], 300), ([130, 140], 20)]
)
def test_a_schedule_for_different_lengths_gives_correct_results(lengths, window):
    """After a crop, for example, a schedule may be for more or fewer tokens, or for a window."""
    case = Case("stale", lengths=(900, 60), page_size=64)
    pages, query, fields, expected = prepare_expected(case)
    table = make_schedule_table(lengths, 2, window=window)
    check_kernel("decode", case, pages, query, expected, schedule=table, **fields)


# Neither head size is a power of two. Cases have one, three and more blocks of query rows.
LATENT = {
    "latent": True, "num_heads": 1, "k_dim": 96, "v_dim": 24, "page_size": 64, "v_format": AUTO,
}  # fmt: skip
CHUNK = Case(
    "chunk",
    lengths=(800, 400),
    num_tokens=30,
    page_size=64,
    num_heads=1,
    num_query_heads=3,
    window=600,
)
LENGTHS = (31, 32, 33, 63, 64, 65, 127, 128, 129)
# Parameters change how a tile is computed, but not the set of tiles. So each parameter runs
# with a few cases: in both kernels, in few and in many parts.
CONFIGURED_CASES: list[tuple[Case, str, int, dict[str, Any]]] = [
    (CHUNK, "extend", 40, {"rows": 32}),
    (Case("many", lengths=tuple(range(1, 60, 3)), num_heads=2, num_query_heads=2), "decode", 3, {}),
    (Case("16 heads", num_query_heads=16, lengths=(400, 130, 64), **LATENT), "decode", 60, {}),
    (Case("20 heads, sinks", num_query_heads=20, lengths=(191, 193), num_tokens=3, sinks=True,
          **LATENT), "decode", 60, {"rows": 64}),
    (Case("128 heads, rotated", num_query_heads=128, lengths=(129,), rotated=True,
          **{**LATENT, "k_format": "fp8_e2m5", "v_format": "int8"}),
     "extend", 1, {"tile": 64}),
    (Case("window, 17 queries", num_query_heads=6, lengths=(200,), num_tokens=17, window=70,
          **LATENT), "decode", 60, {"rows": 64, "tile": 32, "masked_tile": 32}),
    (Case("holes", num_query_heads=16, lengths=(192, 192), num_tokens=2, mask="bool",
          **{**LATENT, "k_format": "int6", "k_dim": 64}),
     "decode", 60, {"tile": 64}),
    (Case("padding, static", num_query_heads=16, lengths=(255, 128), padding=70, num_tokens=2,
          dynamic=False, **{**LATENT, "k_format": "fp8_e3m4"}), "extend", 1, {"rows": 32}),
    (Case("edges, 3 queries", lengths=LENGTHS, num_tokens=3, num_query_heads=4, **LATENT),
     "decode", 4, {}),
    (Case("edges", lengths=LENGTHS, num_query_heads=4, **LATENT), "extend", 4, {}),
    *(
        (Case(f"pages of {size}", lengths=(391,), page_size=size, dynamic=tile != 64), kernel, 4,
         {"tile": tile})
        for tile, size, kernel in pairwise([16, 64, 128], [8, 16, 64, 256], list(KERNELS))
    ),
]  # fmt: skip


@pytest.mark.parametrize(("case", "kernel", "sm_count", "parameters"), CONFIGURED_CASES, ids=str)
def test_any_launch_parameters_give_the_same_result(case, kernel, sm_count, parameters):
    pages, query, fields, expected = prepare_expected(case)
    with assuming(
        dataclasses.replace(get_target(DEVICE), sm_count=sm_count, parameters=parameters)
    ):
        check_kernel(kernel, case, pages, query, expected, **fields)


# The slot determines the mask of a tile, and the tokens determine how many tiles need it.
@pytest.mark.parametrize(
    ("num_tokens", "slot", "from_zero", "kernel"),
    pairwise([1, 3, 17], [15, 16, 17], [False, True], list(KERNELS)),
)
def test_a_window_may_begin_at_the_edge_of_a_page(num_tokens, slot, from_zero, kernel):
    """A page is a tile here, so the edges of page, tile and window coincide."""
    case = make_edge_case(num_tokens, slot, from_zero)
    kernel = kernel if supports(kernel, case) else "extend"
    pages, query, fields, expected = prepare_edge(case)
    with assuming(dataclasses.replace(get_target(DEVICE), parameters={"tile": case.page_size})):
        check_kernel(kernel, case, pages, query, expected, **fields)


@pytest.mark.parametrize("kernel", KERNELS)
def test_pages_past_two_gigabytes_are_read(kernel):
    """Addresses have 64 bits, and kernels only access pages in the table."""
    case = Case(
        "far", lengths=(150,), page_size=64, k_dim=64, v_dim=64, num_heads=2, num_query_heads=2
    )
    pages, query, fields = prepare(case)
    num_pages = 2**31 // (2 * 64 * 64) + 5
    table = torch.tensor([[num_pages - 1, 1, num_pages - 3, num_pages - 4]], dtype=torch.int32)
    torch.utils.deterministic.fill_uninitialized_memory = False

    block = torch.empty((num_pages, pages.block.shape[1]), dtype=torch.uint8, device=DEVICE)
    block[table[0].long().to(DEVICE)] = pages.block[pages.table[0].long()].to(DEVICE)
    far_pages = map_pages(to_device, pages)._replace(
        block=block, table=to_device(table), offsets=locate_pages([block])
    )
    expected = attend(case, pages, query, "reference", **fields)
    check_kernel(kernel, case, far_pages, query, expected, is_on_device=True, **fields)


@pytest.mark.parametrize(
    "case", [case for case in DETERMINISTIC_CASES if not has_unsupported_head(case)], ids=str
)
def test_deterministic_attention_does_not_depend_on_other_queries(case):
    check_deterministic(case, "triton", DEVICE)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("magnitude", [1e-9, 1.0, 1e6])
def test_tiny_and_huge_scales_keep_their_effect(magnitude, kernel):
    """Weights in float16 do not vanish next to a V of zeros or with a scale of 1e-9."""
    case = Case("scales", lengths=(300,), dtype=torch.bfloat16, page_size=64)
    pages = make_pages(case)
    key, value = torch.randn(2, 1, 2, 300, 32) * magnitude
    value[:, :, 100:250] = 0
    ops.write(pages, key, value, torch.tensor([300], dtype=torch.int32), "reference")
    query = (torch.randn(1, 6, 1, 32) / magnitude).to(case.dtype)
    fields = {"scaling": 32**-0.5, "causal": True, "window": 0}
    expected = attend(case, pages, query.float(), "reference", **fields)
    actual = run_kernel(kernel, case, pages, query, **fields)
    assert compute_errors(actual, expected).max() < 2.0**-8


@pytest.mark.parametrize("kernel", KERNELS)
def test_many_zeros_may_precede_the_first_value(kernel):
    """Zeros have the smallest possible scales. Sums of weights must not overflow before a value."""
    case = Case(
        "zeros",
        lengths=(17000,),
        page_size=1024,
        num_heads=1,
        num_query_heads=32,
        k_dim=16,
        v_dim=16,
    )
    pages = make_pages(case)
    key, value = torch.randn(2, 1, 1, 17000, 16)
    value[:, :, :16900] = 0
    ops.write(pages, key, value, torch.tensor([17000], dtype=torch.int32), "reference")
    query = torch.zeros(1, 32, 1, 16)
    fields = {"scaling": 1.0, "causal": True}
    expected = attend(case, pages, query, "reference", **fields)
    parameters = {"programs": 1, "rows": 32} | ({"tile": 1024} if IS_INTERPRETED else {})
    with assuming(dataclasses.replace(get_target(DEVICE), sm_count=1, parameters=parameters)):
        check_kernel(kernel, case, pages, query, expected, **fields)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_with_only_lowest_biases_is_a_mean(dtype, kernel):
    """Additive masks give padding the lowest value. Only rows of -inf attend to nothing."""
    case = Case("lowest", lengths=(150,), num_tokens=3)
    pages, query, fields = prepare(case)
    fields["bias"] = torch.zeros(1, 1, 3, 150)
    fields["bias"][..., 0, :] = torch.finfo(dtype).min
    fields["bias"][..., 1, 70:] = torch.finfo(dtype).min
    expected = attend(case, pages, query, "reference", **fields)
    check_kernel(kernel, case, pages, query, expected, **fields)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_sink_of_minus_infinity_without_visible_tokens_gives_zeros(kernel):
    case = Case("nothing", lengths=(40, 3), num_tokens=5, sinks=True)
    pages, query, fields = prepare(case)
    fields["sinks"] = torch.full_like(fields["sinks"], -math.inf)
    actual = run_kernel(kernel, case, pages, query, **fields)
    assert (actual[1, :2] == 0).all()
    assert actual.isfinite().all()


@pytest.mark.parametrize(
    ("kernel", "num_tokens", "parameters"),
    [("decode", 60, {"tile": 16}), ("extend", 128, {"tile": 32, "rows": 128})],
)
def test_a_part_may_end_before_the_windows_of_all_rows(kernel, num_tokens, parameters):
    """The call has a complete mask in addition to a window, as in static sliding layers."""
    case = Case(
        "window",
        lengths=(600,),
        num_tokens=num_tokens,
        page_size=64,
        num_heads=1,
        num_query_heads=1,
    )
    pages, query, fields = prepare(case)
    mask = find_visible(torch.tensor([600]), num_tokens, 0, 600, True, 3)[:, None]
    fields |= {"mask": mask, "window": 3 + num_tokens - 1, "causal": False}
    expected = attend(case, pages, query, "reference", **fields)
    with assuming(dataclasses.replace(get_target(DEVICE), sm_count=40, parameters=parameters)):
        check_kernel(kernel, case, pages, query, expected, **fields)


def record_prompts(prompt_lengths: Iterable[int], length: int, **options: Any) -> LaunchRecord:
    """Return the launches for prompts of two or eight KV heads on a GPU with 132 SMs."""
    case = Case("chunk", lengths=(9000,), page_size=64, **options)
    pages = make_pages(case)
    lengths = torch.tensor([length], dtype=torch.int32)
    with (
        assuming(dataclasses.replace(get_target(DEVICE), sm_count=132)),
        recording(dry_run=True) as recorded,
    ):
        for num_tokens in prompt_lengths:
            # Expanded, because the largest query has a gigabyte.
            shape = 1, 4 * case.num_heads, num_tokens, 32
            query = torch.zeros(32, dtype=case.dtype).expand(shape)
            extend.attend(query, pages, lengths, 0, length, AttentionSpec(1.0, causal=True))
    return recorded


def test_launches_of_prompts():
    """Chunks of any length run the same compiled kernels, and grids are valid."""
    recorded = record_prompts(range(70, 6000, 90), 9000)
    # Some chunks are split.
    assert {"_attend", "_combine"} <= set(list_kernels(recorded))
    constants = {
        (launch.kernel.__name__, repr(launch.constants))
        for launch in recorded.launches
        if launch.kernel.__name__ != "_fill_schedule"
    }
    assert len(constants) == 2, "the length of a chunk is a constant"
    # Widened chunks that fill a GPU are not split. Blocks then have 64 rows, otherwise 128.
    recorded = record_prompts([512], 8704, num_heads=8, dtype=torch.bfloat16)
    assert list_kernels(recorded) == ["_widen_codes", "_attend"]
    # Only the first axis of a grid may exceed 65535.
    recorded = record_prompts([2**20], 2**20)
    assert all(max(launch.grid[1:], default=1) <= 65535 for launch in recorded.launches)


@pytest.mark.parametrize(
    "case",
    [
        Case("e4m3", lengths=(300, 129), num_tokens=30, page_size=64, num_query_heads=8, k_dim=64,
             v_dim=64, dtype=torch.bfloat16),
        Case("static", lengths=(300, 129), num_tokens=30, page_size=48, num_heads=1, k_dim=80,
             v_dim=40, dtype=torch.bfloat16, k_format="fp8_e3m4", v_format="int8", dynamic=False,
             padding=20),
        Case("rotated K", lengths=(300, 129), num_tokens=30, page_size=16, num_heads=1,
             rotated=True, k_dim=32, v_dim=64, dtype=torch.float16, k_format="int8", v_format=AUTO),
        Case("packed", lengths=(300, 129), num_tokens=30, page_size=24, num_heads=2, k_dim=64,
             v_dim=32, dtype=torch.float16, k_format="int6", v_format="int4"),
    ],
    ids=lambda case: case.name,
)  # fmt: skip
def test_widened_codes_give_the_same_results(case, monkeypatch):
    """With Triton 3.7 the bits are equal, with 3.9 some results differ by one rounding."""
    pages, query, fields, expected = prepare_expected(case)
    monkeypatch.setattr(extend, "MIN_WIDENED_TOKENS", 0)
    monkeypatch.setattr(extend, "MIN_WIDENED_BLOCKS", 2)
    # A GPU has more SMs than these cases have blocks of rows.
    monkeypatch.setattr(extend, "MAX_UNSPLIT_TOKENS", 1000)
    with recording() as recorded:
        result = run_kernel("extend", case, pages, query, **fields)
    assert list_kernels(recorded) == ["_widen_codes", "_attend"]
    assert compute_errors(result, expected).max() <= 2 * compute_errors(
        attend_with_torch(case, pages, query, fields), expected
    ).max()  # fmt: skip
    monkeypatch.setattr(extend, "MAX_WIDENED_BYTES", 0)
    with recording() as recorded:
        unwidened = run_kernel("extend", case, pages, query, **fields)
    assert list_kernels(recorded) == ["_attend"]
    assert compute_errors(unwidened, result).max() <= torch.finfo(case.dtype).eps / 16


def test_rows_that_exceed_shared_memory_are_split():
    """In float32 there are several blocks of rows, but the schedule was made for one block."""
    num_tokens = 21
    case = Case(
        "blocks", lengths=(300, 150), num_tokens=num_tokens, page_size=64, k_dim=128, v_dim=72
    )
    pages, query, fields, expected = prepare_expected(case)
    table = make_schedule_table(case.lengths, 2, num_tokens)
    check_kernel("decode", case, pages, query, expected, schedule=table, **fields)


# -- latents -------------------------------------------------------------------------------------


# Each format runs on each target in `test_each_way_to_read_a_format_is_correct`.
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("name", "target"),
    list(zip(["fp8_e4m3", "fp8_e5m2", "fp8_e2m5", "fp8_e4m3"], TARGETS, strict=True)),
)
def test_each_way_to_read_a_latent_is_correct(name, target, kernel):
    """Each target has separate launch parameters, and a visible NaN reaches the output."""
    rotated = name == "fp8_e2m5"
    shape = {**LATENT, "k_format": name, "rotated": rotated, "dynamic": not rotated}
    case = Case("", num_query_heads=16, lengths=(150, 90), dtype=torch.bfloat16, **shape)
    pages, query, fields, expected = prepare_expected(case)
    limit = bound_target_error(target, case, pages, query, fields, expected)
    with assume_target(target):
        actual = run_kernel(kernel, case, pages, query, **fields)
        assert compute_errors(actual, expected).max() <= limit
        poison(pages, 1, [30])
        actual = run_kernel(kernel, case, pages, query, **fields)
    assert actual[0].isfinite().all()
    assert actual[1].isnan().any(-1).all()
