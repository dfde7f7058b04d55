"""Compare every backend with reference.py, on the same bytes.

Memory is poisoned before it is written: codes, scales and whole pages hold NaN. So a backend that
reads a hidden slot returns NaN. Results are compared by their relative RMS error per sequence, with
a limit that follows from float32. "torch" writes, gathers and decodes with the reference.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.gpu.random_data import pack_pages
from hf_fp8kv import ops
from hf_fp8kv.errors import BackendError, ConfigError, FP8KVError, OutOfPagesError
from hf_fp8kv.formats import AUTO, FORMATS
from hf_fp8kv.formats.codec import decode, encode, make_code_table
from hf_fp8kv.ops import AttentionSpec, Pages, StoredSide, reference
from hf_fp8kv.ops.pages import PAGE_FIELDS, flatten, unflatten
from hf_fp8kv.ops.triton.target import Target, assuming
from hf_fp8kv.ops.visibility import find_mask_bounds
from hf_fp8kv.utils import warn_once
from tests.helpers.assertions import assert_same, assert_same_bytes, assert_same_pool
from tests.helpers.blocks import merge_blocks, separate_pages, split_into_blocks
from tests.helpers.codes import replace_codes, round_up_head_size
from tests.helpers.grids import pairwise

pytestmark = pytest.mark.text

CPU_BACKEND = pytest.param(
    "cpu",
    marks=pytest.mark.skipif(
        ops.explain_backends()["cpu"] is not None, reason=str(ops.explain_backends()["cpu"])
    ),
)
BACKENDS = ["torch", CPU_BACKEND]
Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. The last `num_tokens` tokens of each sequence are the queries."""

    name: str
    lengths: tuple[int, ...] = (37,)
    num_tokens: int = 1
    num_query_heads: int = 6
    num_heads: int = 2  # KV heads
    k_dim: int = 32
    v_dim: int = 32
    page_size: int = 16
    k_format: str = "fp8_e4m3"
    v_format: str = "fp8_e4m3"
    dynamic: bool = True
    center: bool = False
    rotated: bool = False
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    padding: int = 0  # hidden tokens at the start of sequence 0
    mask: str = ""  # "bool" or "bias" for a complete mask
    dtype: torch.dtype = torch.float32
    from_zero: bool = False  # `start` is 0 despite a window, as in a static layer
    latent: bool = False  # K holds latents, which are also the values, and V their RoPE part

    def __str__(self) -> str:
        return self.name

    @property
    def query_dim(self) -> int:
        return self.k_dim + self.v_dim if self.latent else self.k_dim

    @property
    def output_dim(self) -> int:
        return self.k_dim if self.latent else self.v_dim

    @property
    def start(self) -> int:
        """The first position that is visible to some query."""
        return self.window_start(min(self.lengths)) if self.window and not self.from_zero else 0

    def window_start(self, length: int) -> int:
        """Return the first position that is visible to a sequence's first query."""
        return max(0, length - self.num_tokens - self.window + 1)

    @property
    def stop(self) -> int:
        return max(self.lengths)


def get_nan_code(name: str) -> int:
    return FORMATS[name].nan_code


def make_pages(case: Case) -> Pages:
    """Return pages in random order, full of NaN codes. Some of them are in no table."""
    num_columns = -(-case.stop // case.page_size) + 1
    batch = len(case.lengths)
    num_pages = batch * num_columns + 3
    page_size, num_heads = case.page_size, case.num_heads

    def make_pool(name: str, *shape: int) -> Tensor:
        if name == AUTO:
            return torch.full((num_pages, num_heads, *shape), math.nan, dtype=case.dtype)
        return torch.full((num_pages, num_heads, *shape), get_nan_code(name), dtype=torch.uint8)

    def make_side(name: str, dim: int, min_scale: float) -> StoredSide:
        is_static = name != AUTO and not case.dynamic
        # Scales differ in every head and channel.
        scale = min_scale * (1 + torch.rand(num_heads, dim)) if is_static else None
        return StoredSide(scale, None, name, dim, case.rotated and name != AUTO)

    k, v = make_side(case.k_format, case.k_dim, 0.013), make_side(case.v_format, case.v_dim, 0.007)
    if case.center and case.k_format != AUTO:
        k = k._replace(center=2 * torch.randn(num_heads, case.k_dim))
    scales = None
    if k.is_dynamic or v.is_dynamic:
        scales = torch.full((num_pages, num_heads, page_size, 2), math.nan, dtype=torch.bfloat16)
    return pack_pages(
        k, make_pool(case.k_format, page_size, case.k_dim),
        v, make_pool(case.v_format, case.v_dim, page_size), scales,
        torch.randperm(num_pages)[: batch * num_columns].view(batch, num_columns).int(),
    )  # fmt: skip


def map_pages(function: Callable[[Tensor], Tensor], pages: Pages) -> Pages:
    """Apply `function` to each tensor of the pages, in one block, and return the new pages."""
    return unflatten(
        [
            function(leaf) if isinstance(leaf, Tensor) else leaf
            for leaf in flatten(merge_blocks(pages))
        ]
    )


def copy_pages(pages: Pages) -> Pages:
    return map_pages(torch.clone, pages)


def replace_scales(pages: Pages, k: Tensor | None, v: Tensor | None) -> Pages:
    """Return the same pages with these static scales, or with dynamic scales for None."""
    return pages._replace(k=pages.k._replace(static_scale=k), v=pages.v._replace(static_scale=v))


def fill(pages: Pages, case: Case, backend: str = "reference") -> Pages:
    """Write each sequence separately, in two calls if it has several tokens."""
    generator = torch.Generator().manual_seed(1)
    for row, length in enumerate(case.lengths):
        row_pages = pages._replace(table=pages.table[row : row + 1])
        shape = (1, case.num_heads, length)
        key = torch.randn(*shape, case.k_dim, generator=generator).to(case.dtype)
        if pages.k.center is not None:
            key += pages.k.center[:, None].to(case.dtype)
        value = torch.randn(*shape, case.v_dim, generator=generator).to(case.dtype)
        for start, stop in ((0, length // 3), (length // 3, length)):
            if start < stop:
                k, v = key[:, :, start:stop], value[:, :, start:stop]
                ops.write(row_pages, k, v, torch.tensor([stop], dtype=torch.int32), backend)
    return pages


def make_spec(case: Case, pages: Pages) -> dict[str, Any]:
    """Return the fields of an AttentionSpec for a case, and poison the hidden tokens again."""
    num_positions = case.stop - case.start
    fields: dict[str, Any] = {
        "scaling": case.k_dim**-0.5,
        "causal": case.causal and case.mask != "bool",
        "window": case.window,
        "softcap": case.softcap,
        "latent": case.latent,
    }
    if case.sinks:
        fields["sinks"] = torch.randn(case.num_query_heads).to(case.dtype)
    if case.padding:
        mask = torch.ones(len(case.lengths), 1, 1, num_positions, dtype=torch.uint8)
        mask[0, ..., : case.padding] = 0
        fields["mask"] = mask
        poison(pages, 0, range(case.padding))
    if case.mask == "bool":
        mask = torch.rand(len(case.lengths), 1, case.num_tokens, num_positions) < 0.7
        mask[..., 0] = True
        mask[..., num_positions // 2] = False
        fields["mask"] = mask
        poison(pages, 0, [num_positions // 2])
    elif case.mask:
        fields["bias"] = torch.randn(1, case.num_query_heads, case.num_tokens, num_positions).to(
            case.dtype
        )
    return fields


def poison(pages: Pages, row: int, positions: range | list[int]) -> None:
    """Replace the codes and dynamic scales of these positions of a sequence by NaN."""
    position = torch.tensor(list(positions), dtype=torch.int64)
    page, slot = pages.table[row, position // pages.page_size].long(), position % pages.page_size
    for name, side in (("k", pages.k), ("v", pages.v)):
        nan = math.nan if side.format == AUTO else get_nan_code(side.format)
        replace_codes(pages, name, (page, slice(None), slot), nan)
    if "token_scales" in pages.regions:
        pages.regions["token_scales"][page, :, slot] = math.nan


def attend(case: Case, pages: Pages, query: Tensor, backend: str, **fields: Any) -> Tensor:
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=query.device)
    return ops.attend(
        query, pages, lengths, case.start, case.stop, AttentionSpec(**fields), backend=backend
    )


def compute_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Return the relative RMS error of each sequence, `[B]`, or NaN if any of its values is NaN."""
    actual, expected = actual.double(), expected.double()
    axes = tuple(range(1, actual.ndim))
    return ((actual - expected).square().mean(axes) / expected.square().mean(axes)).sqrt()


def bound_error(case: Case, backend: str = "") -> float:
    """Return the largest relative RMS error that rounding can explain.

    A sum of n values, rounded after each, has an error of about sqrt(n) units of 2^-24 of its size.
    A logit sums Dk products, and its size is at most 2 * sqrt(Dk) * scaling = 2. The output sums
    one product per token. The result and the reference have this error, and no order of sums is
    better, so a factor of four covers both. A result in 16 bits is rounded once more. "cpu"
    multiplies prompts in bfloat16 if the model does and the CPU can. Then V, the weights and K are
    also rounded, and K's error doubles in a logit of that size.
    """
    rounding_error = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}.get(case.dtype, 0.0)
    if case.name.startswith("prompt") and backend == "cpu" and case.dtype == torch.bfloat16:
        rounding_error *= math.sqrt(1 + 1 + 1 + 2**2)
    return 4 * 2.0**-24 * math.sqrt(case.query_dim + case.stop) + rounding_error


FORMAT_NAMES = sorted(FORMATS)
ALL_NAMES = [*FORMAT_NAMES, AUTO]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NEXT_FORMAT = dict(zip(ALL_NAMES, [*ALL_NAMES[1:], ALL_NAMES[0]], strict=True))
# K and V are read separately, so each format is once the format of K, once of V, next to a
# different format. The dtype of the query determines how a code is multiplied by its scale.
FORMAT_CASES = [
    Case(f"{name} {'dynamic' if dynamic else 'static'} {str(dtype)[6:]}", k_format=name,
         v_format=NEXT_FORMAT[name], dynamic=dynamic, dtype=dtype, lengths=(300, 133), page_size=64,
         k_dim=64, v_dim=64)
    for name, dynamic, dtype in pairwise(ALL_NAMES, [True, False], DTYPES)
]  # fmt: skip
FORMAT_CASES += [
    Case("auto", k_format=AUTO, v_format=AUTO, page_size=64),
    Case("auto bf16", k_format=AUTO, v_format=AUTO, dtype=torch.bfloat16),
]
SHAPE_CASES = [
    Case("one token", lengths=(1,)),
    *(
        Case(f"{n} tokens, pages of {size}", lengths=(n,), page_size=size, dynamic=dynamic)
        for size, dynamic in ((16, True), (64, False))
        for n in (size - 1, size, size + 1)
    ),
    Case("pages of 3", page_size=3),
    Case("pages of 48", page_size=48, lengths=(199,)),
    Case("MHA", num_query_heads=3, num_heads=3, lengths=(199,), k_dim=24, v_dim=40),
    Case("seven heads share K", num_query_heads=14, num_heads=2, lengths=(199,)),
    Case("all heads share K", num_query_heads=5, num_heads=1, lengths=(63, 5)),
    Case("Dk 80, Dv 5", k_dim=80, v_dim=5, lengths=(199,)),
    Case("Dk 1", k_dim=1, v_dim=1),
    Case("int6, Dk 128", k_format="int6", v_format="int6", k_dim=128, lengths=(133,),
         dtype=torch.bfloat16),
    Case("int6, Dk 80, Dv 256", k_format="int6", v_format="int6", k_dim=80, v_dim=256,
         lengths=(199, 33)),
    Case("int6, int4, Dk 256, Dv 96", k_format="int6", v_format="int4", k_dim=256, v_dim=96,
         page_size=48, lengths=(333,), dtype=torch.bfloat16),
    Case("int4, int6, Dk 12, Dv 4", k_format="int4", v_format="int6", k_dim=12, v_dim=4,
         page_size=7, num_tokens=3, lengths=(70, 69), dtype=torch.bfloat16),
    Case("long", lengths=(1300,), page_size=64, k_dim=128, v_dim=128, num_heads=1,
         num_query_heads=4),
    Case("ragged", lengths=(700, 333, 1), page_size=64),
    Case("17 queries, ragged", num_tokens=17, lengths=(70, 17)),
    Case("70 queries", num_tokens=70, lengths=(150,), page_size=64),
    Case("more queries than tokens", num_tokens=5, lengths=(40, 3)),
    Case("bidirectional, ragged", num_tokens=3, causal=False, lengths=(150, 33)),
]  # fmt: skip
FEATURE_CASES = [
    Case("window", window=7, lengths=(199, 190)),
    Case("window, 17 queries", window=20, num_tokens=17, lengths=(199,)),
    Case("window wider than the rest", window=500, num_tokens=3),
    Case("window, bidirectional", window=9, causal=False, num_tokens=3),
    Case("softcap, center", softcap=2.0, center=True, lengths=(199,), num_tokens=3),
    Case("sinks, center, static", sinks=True, center=True, dynamic=False, num_tokens=3),
    Case("sinks, softcap, ragged", sinks=True, softcap=4.0, lengths=(150, 33), num_heads=3),
    Case("sinks bf16", sinks=True, dtype=torch.bfloat16),
    Case("padding", padding=21, lengths=(199, 199)),
    Case("padding of whole pages", padding=130, lengths=(199,), num_tokens=17),
    Case("padding and window, auto", padding=3, lengths=(70,), window=66, num_tokens=3,
         k_format=AUTO, v_format=AUTO),
    Case("bool mask", mask="bool", num_tokens=3, lengths=(199, 199)),
    Case("bias of several tokens", mask="bias", num_tokens=3, lengths=(70,)),
    Case("bias bf16", mask="bias", dtype=torch.bfloat16),
    Case("everything", window=150, softcap=4.0, sinks=True, center=True, num_tokens=3,
         lengths=(199,), mask="bias", dynamic=False, k_format="fp8_e3m4"),
]  # fmt: skip
ROTATION_CASES = [
    Case("rotated, e2m5", rotated=True, k_format="fp8_e2m5", v_format="fp8_e2m5", k_dim=64,
         v_dim=128, center=True, lengths=(199, 33)),
    Case("rotated, int8, static, sinks", rotated=True, k_format="int8", v_format="int8",
         dynamic=False, center=True, sinks=True, lengths=(33, 20), num_tokens=3),
    Case("rotated by blocks", rotated=True, k_format="int8", k_dim=96, v_dim=80, lengths=(70,),
         softcap=3.0, center=True),
    Case("rotated, small blocks", rotated=True, k_dim=24, v_dim=6, num_tokens=17, lengths=(70,)),
    Case("rotated, V auto", rotated=True, k_format="fp8_e3m4", v_format=AUTO, dtype=torch.bfloat16),
    Case("rotated, 16 bits", rotated=True, k_dim=256, v_dim=256, dtype=torch.float16, padding=5,
         num_heads=1, num_query_heads=3),
]  # fmt: skip
# Latents of one KV head. The scales of the RoPE part always differ from the scales of latents.
LATENT_CASES = [
    dataclasses.replace(case, latent=True, num_heads=1)
    for case in (
        Case("latent, e3m4, 32 heads", k_format="fp8_e3m4", v_format=AUTO, k_dim=128, v_dim=64,
             num_query_heads=32, lengths=(199, 33)),
        Case("latent, static", dynamic=False, k_dim=48, v_dim=8, lengths=(70,), num_tokens=3),
        Case("latent, both of 8 bits", v_format="fp8_e5m2", k_dim=64, v_dim=32, lengths=(63, 64)),
        Case("latent, both packed", k_format="int6", v_format="int4", k_dim=40, v_dim=12,
             lengths=(70, 63), page_size=48),
        Case("latent, rotated", k_format="fp8_e2m5", v_format="int8", rotated=True, k_dim=64,
             v_dim=16, lengths=(65,), num_tokens=17),
        Case("latent, rotated, static", k_format="int8", v_format=AUTO, rotated=True, dynamic=False,
             k_dim=96, v_dim=16, lengths=(300, 199), page_size=64),
        Case("latent, auto", k_format=AUTO, v_format=AUTO, k_dim=40, v_dim=24,
             lengths=(15, 16, 17)),
        Case("latent, auto bf16", k_format=AUTO, v_format=AUTO, k_dim=64, v_dim=32,
             dtype=torch.bfloat16),
        Case("latent, window", v_format=AUTO, k_dim=64, v_dim=16, window=20, lengths=(199, 190)),
        Case("latent, sinks, softcap", v_format=AUTO, k_dim=64, v_dim=16, sinks=True, softcap=3.0,
             lengths=(70,), num_tokens=3, num_query_heads=16),
        Case("latent, padding", v_format=AUTO, k_dim=64, v_dim=16, padding=21, lengths=(199, 199)),
        Case("latent, bias", v_format=AUTO, k_dim=64, v_dim=16, mask="bias", num_tokens=3,
             lengths=(70,)),
        Case("latent, no RoPE part, an odd number of vectors", v_format=AUTO, k_dim=40, v_dim=0,
             num_query_heads=20, lengths=(65, 15)),
        Case("latent, one head", v_format=AUTO, k_dim=24, v_dim=8, num_query_heads=1,
             lengths=(133, 70)),
        Case("latent, 3 heads", k_dim=40, v_dim=24, num_query_heads=3, num_tokens=5, lengths=(99,),
             page_size=8, v_format="fp8_e3m4", padding=13),
        Case("latent, 128 heads", k_format="int8", v_format=AUTO, k_dim=144, v_dim=8,
             num_query_heads=128, lengths=(63, 66), num_tokens=2, mask="bool", dtype=torch.float16),
        Case("latent, long", v_format=AUTO, k_dim=512, v_dim=64, lengths=(700,), page_size=64,
             num_query_heads=16, dtype=torch.bfloat16),
    )
]  # fmt: skip
# Many query rows per head. "cpu" passes such calls to torch's attention if the model has 16 bits.
PROMPT_CASES = [
    Case("prompt, ragged", num_tokens=64, lengths=(150, 64, 33, 65), dtype=torch.bfloat16),
    Case("prompt, one page too many", num_tokens=22, lengths=(33, 32), num_heads=1,
         num_query_heads=3, dtype=torch.float16),
    Case("prompt, window", num_tokens=70, window=20, lengths=(199, 71, 70, 15), dynamic=False,
         dtype=torch.bfloat16),
    Case("prompt, packed", num_tokens=65, k_format="int6", v_format="int4", lengths=(199, 71),
         dtype=torch.bfloat16),
    Case("prompt, wide window", num_tokens=70, window=120, lengths=(199, 121, 70), from_zero=True),
    Case("prompt, MHA", num_tokens=64, num_query_heads=3, num_heads=3, k_format="fp8_e5m2",
         v_format="int8", lengths=(100,), k_dim=24, v_dim=40, page_size=48, dtype=torch.float16),
    Case("prompt, center, static", num_tokens=80, center=True, dynamic=False, k_format="fp8_e3m4",
         lengths=(199, 81), dtype=torch.float16),
    Case("prompt, rotated", num_tokens=66, rotated=True, k_format="fp8_e2m5", v_format="int8",
         center=True, k_dim=64, v_dim=96, lengths=(199, 66), dtype=torch.float16),
    Case("prompt, fp16", num_tokens=66, dtype=torch.float16, lengths=(199, 66), v_format=AUTO),
    Case("prompt, K auto bf16", num_tokens=66, dtype=torch.bfloat16, k_format=AUTO,
         v_format="fp8_e3m4", lengths=(199,), window=100),
]  # fmt: skip
CASES = [
    *FORMAT_CASES, *SHAPE_CASES, *FEATURE_CASES, *ROTATION_CASES, *LATENT_CASES, *PROMPT_CASES
]  # fmt: skip


def make_edge_case(num_tokens: int, slot: int, from_zero: bool) -> Case:
    """Return a case with NaN before a window that begins at slot 15, 0 or 1 of a page.

    It has two sequences, of which the second is a page longer.
    """
    name = f"edge at slot {slot}, {num_tokens} queries{', from 0' if from_zero else ''}"
    lengths = 32 + slot + 19 + num_tokens, 48 + slot + 19 + num_tokens
    return Case(name, window=20, num_tokens=num_tokens, from_zero=from_zero, lengths=lengths)


LAYOUTS: dict[str, Callable[[Pages], Pages]] = {
    "whole": merge_blocks, "blocks": split_into_blocks, "gaps": separate_pages,
}  # fmt: skip


def parametrize_layouts(cases: list[Case], torch_cases: list[Case]) -> Any:
    """Parametrize a test with cases for "cpu" and for "torch", and with alternating layouts."""
    # A layout determines where a page is, but not its contents.
    parameters = [
        pytest.param(case, "cpu", layout, marks=CPU_BACKEND.marks)
        for case, layout in zip(cases, itertools.cycle(LAYOUTS), strict=False)
    ]
    parameters += [
        pytest.param(case, "torch", layout)
        for case, layout in zip(torch_cases, itertools.cycle(LAYOUTS), strict=False)
    ]
    return pytest.mark.parametrize(("case", "backend", "layout"), parameters, ids=str)


def prepare(case: Case) -> tuple[Pages, Tensor, dict[str, Any]]:
    """Return filled pages, a random query, and the fields of an AttentionSpec."""
    pages = fill(make_pages(case), case)
    shape = len(case.lengths), case.num_query_heads, case.num_tokens, case.query_dim
    return pages, torch.randn(shape).to(case.dtype), make_spec(case, pages)


def prepare_expected(case: Case) -> tuple[Pages, Tensor, dict[str, Any], Tensor]:
    """Return the results of `prepare`, and the result of the reference."""
    pages, query, fields = prepare(case)
    return pages, query, fields, attend(case, pages, query.float(), "reference", **fields)


def check_attention(
    case: Case, backend: str, change_layout: Callable[[Pages], Pages] = merge_blocks
) -> None:
    """Compare a backend's attention over pages in some layout with the reference."""
    pages, query, fields, expected = prepare_expected(case)
    actual = attend(case, change_layout(pages), query, backend, **fields)
    assert actual.dtype == case.dtype
    shape = len(case.lengths), case.num_tokens, case.num_query_heads, case.output_dim
    assert actual.shape == shape
    assert expected.isfinite().all()
    assert compute_errors(actual, expected).max() <= bound_error(case, backend), case


@parametrize_layouts(
    CASES, SHAPE_CASES + FEATURE_CASES + ROTATION_CASES + LATENT_CASES + FORMAT_CASES[::8]
)
def test_attention_equals_the_reference(case, backend, layout):
    check_attention(case, backend, LAYOUTS[layout])


# A schedule splits 600 tokens into two parts, and 70 rows exceed a block of the decode kernel.
DETERMINISTIC_CASES = [
    Case("deterministic, ragged", num_tokens=9, lengths=(150, 64, 33, 65), dtype=torch.bfloat16),
    Case("deterministic, window", num_tokens=5, window=20, lengths=(99, 71), dynamic=False,
         page_size=8),
    Case("deterministic, sinks, center", num_tokens=3, lengths=(600, 65), sinks=True, softcap=3.0,
         center=True, rotated=True, k_format="int8", page_size=64),
    Case("deterministic, packed", num_tokens=3, lengths=(600, 65), k_format="int6", v_format="int6",
         k_dim=96, v_dim=64, page_size=48, dtype=torch.bfloat16),
    Case("deterministic, 70 heads", num_tokens=2, num_heads=1, num_query_heads=70,
         lengths=(40, 33)),
    Case("deterministic, latent", num_tokens=3, num_heads=1, latent=True, k_dim=64, v_dim=16,
         v_format=AUTO, num_query_heads=16, lengths=(199, 33), dtype=torch.bfloat16),
]  # fmt: skip


def check_deterministic(case: Case, backend: str, device: str = "cpu") -> None:
    """Check that deterministic queries get the bits of separate calls, and correct values."""
    pages, query, fields, expected = prepare_expected(case)
    pages = map_pages(lambda tensor: tensor.to(device), pages)
    query = query.to(device)
    fields = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in fields.items()
    }
    fields["deterministic"] = True
    actual = attend(case, pages, query, backend, **fields)
    assert compute_errors(actual.cpu(), expected).max() <= bound_error(case, backend)
    tokens = sorted({0, case.num_tokens // 2, case.num_tokens - 1})
    for row, token in itertools.product(range(len(case.lengths)), tokens):
        length = case.lengths[row] - case.num_tokens + 1 + token
        token_case = dataclasses.replace(case, lengths=(length,), num_tokens=1)
        row_pages = pages._replace(table=pages.table[row : row + 1])
        token_query = query[row : row + 1, :, token : token + 1]
        token_output = attend(token_case, row_pages, token_query, backend, **fields)
        assert torch.equal(token_output[0, 0], actual[row, token]), (row, token)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", DETERMINISTIC_CASES, ids=str)
def test_deterministic_attention_does_not_depend_on_other_queries(case, backend):
    check_deterministic(case, backend)


@pytest.mark.parametrize("backend", [CPU_BACKEND])
def test_a_large_prompt_is_computed_in_groups_of_heads(backend):
    """Each head has 18 MB of dense keys and values. At most 64 MB are made dense at a time."""
    case = Case("prompt, wide", k_format=AUTO, v_format=AUTO, dtype=torch.bfloat16, lengths=(1100,),
                num_tokens=64, num_heads=4, num_query_heads=4, k_dim=4096, v_dim=4096,
                page_size=64)  # fmt: skip
    pages, query, fields = prepare(case)
    expected = attend(case, pages, query, "torch", **fields)
    actual = attend(case, pages, query, backend, **fields)
    assert compute_errors(actual, expected).max() <= 2 * bound_error(case, backend)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_auto_equals_unquantized_attention(backend):
    """This test compares with torch's attention on the original values, not with the reference."""
    case = Case("auto", k_format=AUTO, v_format=AUTO, lengths=(133,), num_tokens=5)
    pages, query, fields = prepare(case)
    generator = torch.Generator().manual_seed(1)
    key = torch.randn(1, case.num_heads, 133, case.k_dim, generator=generator)
    value = torch.randn(1, case.num_heads, 133, case.v_dim, generator=generator)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(),
        attn_mask=torch.ones(5, 133, dtype=torch.bool).tril(128), enable_gqa=True,
    )  # fmt: skip
    actual = attend(case, pages, query, backend, **fields)
    assert compute_errors(actual, expected.transpose(1, 2)).max() <= bound_error(case)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_latents_are_keys_and_values(backend):
    """A projection expands latents for each head, as in a model. A key is [latent, RoPE part]."""
    case = Case("latent, auto", k_format=AUTO, v_format=AUTO, lengths=(133,), num_tokens=5,
                num_heads=1, k_dim=64, v_dim=16, latent=True)  # fmt: skip
    pages, query, fields = prepare(case)
    latent, rope_part = (
        reference.gather(pages, torch.tensor([133]), side, 0, 133, torch.float32, ragged=False)
        for side in "kv"
    )
    to_key, to_value = torch.randn(6, 24, 64).double(), torch.randn(6, 40, 64).double()
    query = torch.cat([torch.randn(1, 6, 5, 24), query[..., 64:]], -1).double()
    expanded = torch.cat([latent.double() @ to_key.mT, rope_part.double().expand(1, 6, -1, -1)], -1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, expanded, latent.double() @ to_value.mT,
        attn_mask=torch.ones(5, 133, dtype=torch.bool).tril(128), scale=fields["scaling"],
    )  # fmt: skip
    absorbed = torch.cat([query[..., :24] @ to_key, query[..., 24:]], -1).float()
    actual = attend(case, pages, absorbed, backend, **fields).double().transpose(1, 2)
    assert compute_errors(actual @ to_value.mT, expected).max() <= 8 * bound_error(case)


def prepare_edge(case: Case) -> tuple[Pages, Tensor, dict[str, Any], Tensor]:
    """Return the results of `prepare` with NaN before the window, and torch's attention.

    This function computes the visible positions independently of visibility.py.
    """
    pages, query, fields = prepare(case)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    dense = [
        reference.gather(pages, lengths, side, 0, case.stop, torch.float64, ragged=True)
        for side in ("k", "v")
    ]
    is_visible = torch.zeros(len(case.lengths), 1, case.num_tokens, case.stop, dtype=torch.bool)
    for row, length in enumerate(case.lengths):
        for token in range(case.num_tokens):
            last = length - case.num_tokens + token
            is_visible[row, 0, token, last - case.window + 1 : last + 1] = True
        poison(pages, row, range(case.window_start(length)))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(), *dense, attn_mask=is_visible, enable_gqa=True, scale=fields["scaling"]
    )
    return pages, query, fields, expected.transpose(1, 2)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize(
    "case",
    [make_edge_case(*edge) for edge in pairwise([1, 3, 17], [15, 16, 17], [False, True])],
    ids=str,
)
def test_a_window_may_begin_at_the_edge_of_a_page(case, backend):
    pages, query, fields, expected = prepare_edge(case)
    actual = attend(case, pages, query, backend, **fields)
    assert compute_errors(actual, expected).max() <= bound_error(case)


HOLE_CASES = [
    Case(f"T{num_tokens} window {window}", lengths=(1037, 1001), num_tokens=num_tokens,
         page_size=64, num_heads=1, num_query_heads=3, window=window, from_zero=from_zero)
    for num_tokens, window, from_zero in (
        (1, 0, True), (3, 0, True), (3, 900, False), (2, 500, True)
    )
]  # fmt: skip


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("case", HOLE_CASES, ids=str)
def test_bounds_of_a_mask_do_not_change_the_result(case, backend):
    pages, query, fields = prepare(case)
    fields["mask"] = mask = torch.ones(2, 1, 1, case.stop - case.start, dtype=torch.uint8)
    # Add padding before the first sequence, and holes in the second.
    for row, positions in enumerate((range(case.start, 333), [case.start + 1, 901])):
        poison(pages, row, positions)
        mask[row, ..., torch.tensor(list(positions)) - case.start] = 0
    bounds = find_mask_bounds(mask[:, 0, 0] != 0, case.start)
    expected = attend(case, pages, query, "reference", **fields)
    actual = attend(case, pages, query, backend, **fields, bounds=bounds)
    assert compute_errors(actual, expected).max() <= bound_error(case)


# A code or a dynamic scale is NaN, in K or V, in each format.
@pytest.mark.parametrize(
    ("name", "side", "dynamic", "backend"),
    [(*axes, "reference") for axes in pairwise(["fp8_e5m2", "int6"], "kv", [True, False])]
    + [pytest.param(*axes, "cpu", marks=CPU_BACKEND.marks)
       for axes in pairwise(FORMAT_NAMES, "kv", [True, False])]
    + [("int8", "k", True, "torch"), ("fp8_e4m3", "v", False, "torch")],
)  # fmt: skip
def test_a_visible_nan_reaches_the_output(name, side, dynamic, backend):
    case = Case("NaN", k_format=name, v_format=name, dynamic=dynamic, lengths=(70, 70))
    pages, query, fields = prepare(case)
    key, value = torch.randn(2, 2, 2, 1, 32)
    states = key if side == "k" else value
    states[1, 0, 0, 3] = math.nan
    ops.write(pages, key, value, torch.tensor([51, 51], dtype=torch.int32), backend)
    actual = attend(case, pages, query, backend, **fields)
    assert actual[0].isfinite().all(), "another sequence"
    assert actual[1, :, 3:].isfinite().all(), "another head"
    assert actual[1, :, :3].isnan().any(-1).all()


WRITE_CASES = [
    *FORMAT_CASES,
    *ROTATION_CASES,
    Case("center", center=True, v_format="fp8_e5m2"),
    Case("center, static", center=True, dynamic=False, k_format="fp8_e3m4"),
    Case("rotated, Dv 2", rotated=True, dynamic=False, center=True, v_dim=2, v_format="int8"),
    Case("odd sizes", dtype=torch.bfloat16, v_dim=40, k_dim=24),
    Case("K auto fp16", k_format=AUTO, dtype=torch.float16, k_dim=5, v_dim=3),
]


@parametrize_layouts(WRITE_CASES, WRITE_CASES[::8])
def test_written_bytes_equal_the_reference(case, backend, layout):
    case = dataclasses.replace(case, lengths=(150, 90))
    expected_pages = make_pages(case)
    pages = LAYOUTS[layout](copy_pages(expected_pages))
    lengths = torch.tensor([0, 0], dtype=torch.int32)
    for num_tokens in (1, 15, 17, 40, 1):
        # As in a model, heads come after tokens. Magnitudes differ by up to 2**30.
        magnitudes = torch.exp2(torch.randint(-20, 10, (2, num_tokens, case.num_heads, 1)))
        states = magnitudes * torch.randn(2, num_tokens, case.num_heads, case.k_dim + case.v_dim)
        key, value = states.to(case.dtype).transpose(1, 2).split([case.k_dim, case.v_dim], dim=3)
        lengths += num_tokens
        ops.write(pages, key, value, lengths, backend)
        ops.write(expected_pages, key, value, lengths, "reference")
        assert_same_pool(merge_blocks(pages), expected_pages)


def make_vectors(dim: int) -> Tensor:
    """Return vectors of all magnitudes, with ties of codes, and at the limits of float32."""
    outliers = torch.randn(30, dim)
    outliers[:, 0] *= 30
    random_vectors = torch.cat([torch.randn(30, dim), torch.randn(2, 30, dim).prod(0), outliers])
    random_vectors *= torch.exp2(torch.randint(-60, 60, (90, 1)))
    # With few significant bits, many values are ties of codes for some scales.
    tied_vectors = torch.randint(-511, 512, (30, dim)) / 2.0 ** torch.randint(0, 9, (30, 1))
    tied_vectors[:10] = tied_vectors[:10].abs().clamp(min=257)
    edges = torch.tensor([
        0.0, -0.0, 1e-45, -1e-40, 1e-35, -1e-35, 1e-30, 1e38, -3.4e38, 447, 449, -5e4,
        math.inf, -math.inf, math.nan,
    ])  # fmt: skip
    # An edge is next to zeros, so that it determines the scale, or next to ordinary values.
    edge_vectors = torch.cat([torch.zeros(len(edges), dim), torch.randn(len(edges), dim)])
    edge_vectors[:, dim // 3] = edges.repeat(2)
    small_vectors = torch.randn(4, dim) * torch.tensor([[1e-40], [1e-35], [1e-28], [1e37]])
    return torch.cat([
        random_vectors, tied_vectors, edge_vectors, small_vectors, edges[:, None].expand(-1, dim)
    ])  # fmt: skip


def to_comparable_bytes(x: Tensor, name: str) -> Tensor:
    """Return the bytes of `x`, with one code for all NaN, because a NaN may have either sign."""
    if x.dtype != torch.uint8:
        return x.contiguous().view(torch.uint8)
    fmt = FORMATS[name]
    return torch.where(make_code_table(fmt, x.device).isnan()[x.int()], fmt.nan_code, x)


def assert_same_pages(actual: Pages, expected: Pages) -> None:
    """Assert that pages hold the same codes and scales. A NaN may have either sign."""
    formats = {"k": actual.k.format, "v": actual.v.format, "token_scales": AUTO}
    assert actual.regions.keys() == expected.regions.keys()
    for name in actual.regions:
        regions = [pages.regions[name] for pages in (actual, expected)]
        assert_same(*(to_comparable_bytes(region, formats[name]) for region in regions), name)


def check_written(case: Case, key: Tensor, backend: str) -> None:
    """Check the bytes of `key`, stored as keys and as values."""
    pages = make_pages(dataclasses.replace(case, lengths=(key.shape[2],)))
    expected_pages = copy_pages(pages)
    lengths = torch.tensor([key.shape[2]], dtype=torch.int32)
    ops.write(pages, key, key, lengths, backend)
    ops.write(expected_pages, key, key, lengths, "reference")
    assert_same_pages(pages, expected_pages)


# The kernel vectorizes over the values of a vector, so each format has each size and dtype.
@pytest.mark.parametrize("backend", [CPU_BACKEND])
@pytest.mark.parametrize(
    ("name", "dim", "dtype", "scales"),
    pairwise(
        FORMAT_NAMES, [1, 5, 24, 80, 256], [*DTYPES, torch.float64], ["dynamic", "center", "static"]
    ),
    ids=str,
)
def test_values_of_all_kinds_are_stored_like_the_reference(name, dim, dtype, scales, backend):
    dim = round_up_head_size(dim, name)
    case = Case("", k_format=name, v_format=name, dynamic=scales != "static", k_dim=dim, v_dim=dim,
                center=scales == "center")  # fmt: skip
    check_written(case, make_vectors(dim)[:168].view(1, 2, 84, dim).to(dtype), backend)


# Long sums are split by size.
@pytest.mark.parametrize("backend", [CPU_BACKEND])
@pytest.mark.parametrize(
    ("name", "dim"),
    list(zip(FORMAT_NAMES, [1024, 1040, 4096, 1023, 4096, 1040, 1024, 1023], strict=True)),
)
def test_sums_of_the_largest_errors_are_exact(name, dim, backend):
    fmt = FORMATS[name]
    dim = round_up_head_size(dim, name)
    max_power = 2.0 ** math.floor(math.log2(fmt.max))
    step = max(max_power * 2.0**-fmt.mantissa_bits, fmt.min_subnormal)
    # The first scale is 1, and all values except one are nearly midpoints of two codes.
    fractions = torch.randint(500, 513, (4, dim)) / 1024
    x = max_power + step * (torch.randint(0, 3, (4, dim)) + fractions)
    x *= torch.randn(4, dim).sign()
    x[:, 3] = fmt.max
    error = (decode(encode(x, fmt), fmt) - x).abs() * fmt.error_unit
    assert ((error >= 500) & (error <= 512)).sum() == 4 * (dim - 1)
    case = Case("", k_format=name, v_format=name, k_dim=dim, v_dim=dim)
    check_written(case, torch.cat([x, x * 1.001, torch.randn(8, dim)]).view(1, 2, 8, dim), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["last axis with gaps", "expanded", "float64"])
def test_inputs_may_have_any_strides_and_dtypes(layout, backend):
    case = Case(layout, lengths=(20,))
    key = torch.randn(1, 2, 20, 64)[..., ::2]
    value = torch.randn(1, 1, 20, 32).expand(1, 2, 20, 32)
    if layout == "expanded":
        key = value
    elif layout == "float64":
        key, value = key.double(), value.double()
        case = dataclasses.replace(case, dtype=torch.float64, k_format=AUTO)
    pages = make_pages(case)
    expected_pages = copy_pages(pages)
    lengths = torch.tensor([20], dtype=torch.int32)
    ops.write(pages, key, value, lengths, backend)
    ops.write(expected_pages, key, value, lengths, "reference")
    assert_same_pool(pages, expected_pages)
    query = torch.randn(1, 1, 6, 64)[..., ::2].transpose(1, 2).to(case.dtype)
    fields = make_spec(case, pages)
    actual = attend(case, pages, query, backend, **fields)
    expected = attend(case, pages, query, "reference", **fields)
    assert compute_errors(actual, expected).max() <= bound_error(case)


@pytest.mark.parametrize(
    ("backend", "layout"),
    [("reference", "whole"), ("torch", "whole"), ("torch", "blocks"),
     pytest.param("cpu", "whole", marks=CPU_BACKEND.marks)],
)  # fmt: skip
@pytest.mark.parametrize(
    ("length", "has_hole"), [(70, False), (50, True)], ids=["past the table", "a missing page"]
)
def test_an_overrun_changes_nothing(length, has_hole, backend, layout):
    pages = make_pages(Case("overrun", lengths=(40, 40)))
    if has_hole:
        pages.table[1, 2] = -1
    old_pages = copy_pages(pages)
    pages = LAYOUTS[layout](pages)
    key = torch.randn(2, 2, 20, 32)
    with pytest.raises(OutOfPagesError, match="Reserve pages"):
        ops.write(pages, key, key, torch.tensor([20, length], dtype=torch.int32), backend)
    assert_same_pool(merge_blocks(pages), old_pages)


GATHER_CASES = FORMAT_CASES + SHAPE_CASES[:11] + ROTATION_CASES


@parametrize_layouts(GATHER_CASES, GATHER_CASES[::8])
def test_gather_equals_the_reference_exactly(case, backend, layout):
    pages = fill(make_pages(case), case)
    layout_pages = LAYOUTS[layout](pages)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    min_length = min(case.lengths)
    spans = ((0, case.stop, True), (min_length // 3, min_length, False), (0, 0, False))
    for side, (start, stop, ragged), dtype in itertools.product("kv", spans, DTYPES):
        gather_arguments = lengths, side, start, stop, dtype, ragged
        actual = ops.gather(layout_pages, *gather_arguments, backend)
        assert actual.dtype == dtype
        assert_same(actual, ops.gather(pages, *gather_arguments, "reference"))
        assert actual.is_contiguous()
    with pytest.raises(ConfigError, match="side: expected 'k' or 'v', got 'x'"):
        ops.gather(pages, lengths, "x", *gather_arguments[2:], "reference")


@pytest.mark.parametrize("backend", [CPU_BACKEND])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_every_code_is_decoded_exactly(name, backend):
    case = Case(
        name,
        k_format=name,
        v_format=name,
        lengths=(64,),
        num_heads=1,
        k_dim=4,
        v_dim=4,
        dynamic=False,
    )
    pages = replace_scales(make_pages(case), torch.ones(1, 4), torch.ones(1, 4))
    codes = torch.arange(256, dtype=torch.uint8) & -(1 << 8 - FORMATS[name].bits)
    expected = make_code_table(FORMATS[name], torch.device("cpu"))[codes.int()].view(64, 4)
    lengths = torch.tensor([64], dtype=torch.int32)
    for side in "kv":
        replace_codes(pages, side, (pages.table[0, :4], 0), codes.view(4, 16, 4))
        actual = ops.gather(
            pages, lengths, side, 0, 64, dtype=torch.float32, ragged=False, backend=backend
        )
        torch.testing.assert_close(actual[0, 0], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("window", "num_tokens", "dtype"),
    pairwise([0, 40], [1, 3, 70], [torch.float32, torch.float16]),
    ids=str,
)
def test_attention_begins_at_start_and_ends_at_stop(window, num_tokens, dtype, backend):
    """Positions outside hold NaN. One sequence is shorter than most starts."""
    case = Case("", lengths=(199, 33), num_tokens=num_tokens, window=window, dtype=dtype)
    starts = [0, 1, 31, 32, 33, 127, 128, 129, 191, 192, 193]
    spans = [*((start, 199) for start in starts), (199, 199), (31, 192), (48, 150), (3, 3)]
    for start, stop in spans:
        pages, query, fields = prepare(case)
        for row, length in enumerate(case.lengths):
            poison(pages, row, [*range(min(start, length)), *range(stop, length)])
        arguments = pages, torch.tensor(case.lengths, dtype=torch.int32), start, stop
        spec = AttentionSpec(**fields)
        expected = ops.attend(query.float(), *arguments, spec, backend="reference")
        actual = ops.attend(query, *arguments, spec, backend=backend)
        # The RMS error is NaN if all values are zeros.
        difference = (actual - expected).flatten(1).double().norm(dim=1)
        limits = bound_error(case, backend) * expected.flatten(1).double().norm(dim=1)
        assert (difference <= limits).all(), (start, stop, difference)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [9, 130])
def test_a_sequence_without_visible_tokens_gives_zeros(length, backend):
    """The padding covers the whole sequence, and ends inside a tile or inside the next tile."""
    case = Case("hidden", lengths=(length, 37), padding=length, page_size=64)
    pages, query, fields = prepare(case)
    fields["bounds"] = torch.tensor([[max(case.lengths), length], [0, 0]], dtype=torch.int32)
    actual = attend(case, pages, query, backend, **fields)
    assert (actual[0] == 0).all()
    expected = attend(case, pages, query, "reference", **fields)
    assert compute_errors(actual, expected)[1] <= bound_error(case)


GPUS = {
    "triton": ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950"),
    # A target cannot be assumed for "mps" and "xpu".
    "torch": ("sm_70", "sm_75", "gfx906", "gfx908", "gfx90a", "gfx1100", "gfx1201", "mps", "xpu"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("expected", "name"), [(backend, name) for backend, names in GPUS.items() for name in names]
)
def test_each_gpu_gets_its_backend(expected, name, monkeypatch, caplog):
    monkeypatch.setattr(warn_once, "_logged_messages", set())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    device = torch.device(name if name in ("mps", "xpu") else "cuda")
    with assuming(Target.parse(name if device.type == "cuda" else "sm_90")):
        for _ in range(2):
            assert ops.choose_backend("auto", device) == expected
        if expected == "triton":
            assert ops.choose_backend("triton", device) == "triton"
        else:
            with pytest.raises(BackendError, match=f"'triton' cannot run here.*, got {name}"):
                ops.choose_backend("triton", device)
    assert [record.message.rpartition(" ")[2] for record in caplog.records] == (
        [] if expected == "triton" else [name]
    )


def test_an_additive_mask_is_a_bias():
    """The operation itself adds the mask to the bias, for every backend."""
    case = Case("additive", num_tokens=3, lengths=(70,))
    pages, query, fields = prepare(case)
    mask, bias = torch.randn(2, 1, case.num_query_heads, 3, 70)
    for bias_fields, expected_bias in (({}, mask), ({"bias": bias}, mask + bias)):
        expected = attend(case, pages, query, "torch", **fields, bias=expected_bias)
        actual = attend(case, pages, query, "torch", **fields, mask=mask, **bias_fields)
        assert_same(actual, expected)


# The arguments of a call by name.
Call = dict[str, Any]
CHANGEABLE_ARGUMENTS = (
    "query", "key", "value", "lengths", "table", "start", "stop", "mask", "bias", "sinks",
    "k_center",
)  # fmt: skip
OPERATIONS: dict[str, Callable[[Call, Pages, AttentionSpec, str], Tensor | None]] = {
    "write": lambda call, pages, _, backend: ops.write(
        pages, call["key"], call["value"], call["lengths"], backend
    ),
    "attend": lambda call, pages, spec, backend: ops.attend(
        call["query"], pages, call["lengths"], call["start"], call["stop"], spec, backend=backend
    ),
    "gather": lambda call, pages, _, backend: ops.gather(
        pages, call["lengths"], "k", call["start"], call["stop"],
        dtype=torch.float32, ragged=True, backend=backend,
    ),
}  # fmt: skip


def draw_call(rng: random.Random) -> tuple[Case, Call]:
    """Return a random call with consistent sizes."""
    choose = rng.choice
    num_tokens = choose((1, 1, 2, 5, 33))
    latent = rng.random() < 0.2
    num_heads = 1 if latent else choose((1, 2))
    mask = choose(("", "padding", "bool", "bias"))
    case = Case(
        "prompt", lengths=tuple(num_tokens + rng.randrange(40) for _ in range(choose((1, 2, 3)))),
        num_tokens=num_tokens, num_heads=num_heads, num_query_heads=num_heads * choose((1, 2, 3)),
        k_dim=choose((8, 24)), v_dim=choose((8, 16)), page_size=choose((8, 16)),
        k_format=choose(ALL_NAMES), latent=latent,
        v_format=choose(ALL_NAMES), dynamic=choose((True, False)), window=choose((0, 0, 7)),
        center=not latent and choose((True, False)), causal=choose((True, False)),
        softcap=choose((0.0, 4.0)), sinks=choose((True, False)),
        padding=1 if mask == "padding" else 0, mask="" if mask == "padding" else mask,
        from_zero=mask in ("padding", "bool"), dtype=choose((torch.float32, torch.bfloat16)),
    )  # fmt: skip
    # Triton refuses packed codes of smaller heads, and of latents below 64.
    packed = {
        side: 64 if case.latent and side == "k_dim" else 32
        for side, name in (("k_dim", case.k_format), ("v_dim", case.v_format))
        if name != AUTO and FORMATS[name].bits < 8
    }
    case = dataclasses.replace(case, **packed)
    pages, query, spec = prepare(case)
    shape = len(case.lengths), num_heads, num_tokens
    return case, {
        **dict(zip(PAGE_FIELDS, flatten(pages), strict=True)), **spec, "query": query,
        "key": torch.randn(*shape, case.k_dim).to(case.dtype),
        "value": torch.randn(*shape, case.v_dim).to(case.dtype),
        "lengths": torch.tensor(case.lengths, dtype=torch.int32),
        "start": case.start, "stop": case.stop,
    }  # fmt: skip


def change_argument(rng: random.Random, x: Any) -> Any:
    """Return a changed number, or a tensor with a different dtype, size or number of axes."""
    if isinstance(x, int):
        return x + rng.choice((-9, -1, 1, 16, 99))
    fraction = rng.random()
    if fraction < 0.2:
        return x[None] if fraction < 0.1 else x[0]
    if fraction < 0.25:
        return x.to(torch.float64 if x.is_floating_point() else torch.int64)
    axis = rng.randrange(x.ndim)
    size = x.shape[axis]
    new_size = rng.choice((0, 1, 2, 3, size - 1, size + 1, 2 * size))
    return x.index_select(axis, torch.arange(new_size) % size)


def run_operation(operation: str, call: Call, backend: str) -> tuple[Tensor | type | None, Pages]:
    """Return the result of an operation or the class of its error, and the pages after the call."""
    pages = copy_pages(unflatten([call[name] for name in PAGE_FIELDS]))
    spec = AttentionSpec(**{name: call[name] for name in AttentionSpec._fields if name in call})
    try:
        return OPERATIONS[operation](call, pages, spec, backend), pages
    except FP8KVError as error:
        return type(error), pages


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("backends", "num_calls"),
    [
        (["torch", "cpu"], 200),
        pytest.param(["torch", "cpu"], 1500, marks=pytest.mark.full),
        pytest.param(["triton"], 300, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_all_backends_refuse_the_same_sizes(backends, num_calls):
    """Every backend refuses the calls that the reference refuses, and otherwise agrees with it."""
    reasons = [ops.explain_backends()[name] for name in backends]
    if any(reasons):
        pytest.skip(str(reasons))
    rng = random.Random(num_calls)
    num_refused = 0
    for seed in range(num_calls):
        torch.manual_seed(seed)
        case, call = draw_call(rng)
        operation = rng.choice(list(OPERATIONS))
        changed_name = None
        if rng.random() < 0.7:
            changed_name = rng.choice(
                [name for name in CHANGEABLE_ARGUMENTS if call.get(name) is not None]
            )
            call[changed_name] = change_argument(rng, call[changed_name])
        with torch.set_grad_enabled(rng.random() < 0.2):
            expected, expected_pages = run_operation(operation, call, "reference")
            if isinstance(expected, type):
                assert changed_name, seed
                num_refused += 1
            for backend in backends:
                if backend == "triton" and expected is OutOfPagesError:
                    continue  # kernels skip tokens without a page
                actual, new_pages = run_operation(operation, call, backend)
                label = f"{seed}: {operation} with a changed {changed_name} by {backend}"
                assert_same_pool(new_pages, expected_pages, label)
                if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
                    assert actual is expected, label
                elif operation == "gather":
                    assert_same_bytes(actual.nan_to_num(9), expected.nan_to_num(9), label)
                else:
                    error = (actual - expected).double().norm()
                    assert error <= 2 * bound_error(case, backend) * expected.double().norm(), label
    assert 0.25 < num_refused / num_calls < 0.75
