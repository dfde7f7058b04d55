"""Every backend against reference.py, on the same bytes.

Memory is poisoned before it is written: codes, scales and whole pages hold NaN. So a backend that
reads a hidden slot returns NaN. Results are compared by their relative RMS error per sequence, with
a bound that follows from float32. `test_faults_are_far_above_the_bound` shows that faults exceed it
more than fifty times.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hf_fp8kv import ops
from hf_fp8kv.errors import BackendError, ConfigError, FP8KVError, OutOfPagesError
from hf_fp8kv.formats import AUTO, FORMATS
from hf_fp8kv.formats.codec import code_table
from hf_fp8kv.ops import AttentionSpec, Pages, StoredSide, reference
from hf_fp8kv.ops.blocks import pack_pages
from hf_fp8kv.ops.pages import PAGE_FIELDS, flatten, unflatten
from hf_fp8kv.ops.triton.target import Target, assuming
from hf_fp8kv.ops.visibility import mask_bounds
from hf_fp8kv.utils import warn_once
from tests.helpers.assertions import assert_same, assert_same_bytes, assert_same_pool
from tests.helpers.blocks import merge_blocks, separate_pages, split_into_blocks
from tests.helpers.grids import pairwise

pytestmark = pytest.mark.text

CPU = pytest.param(
    "cpu",
    marks=pytest.mark.skipif(
        ops.available_backends()["cpu"] is not None, reason=str(ops.available_backends()["cpu"])
    ),
)
BACKENDS = ["torch", CPU]
Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. The last `tokens` of `lengths` are the queries."""

    name: str
    lengths: tuple[int, ...] = (37,)
    tokens: int = 1
    q_heads: int = 6
    heads: int = 2
    k_dim: int = 32
    v_dim: int = 32
    page_size: int = 16
    key: str = "fp8_e4m3"
    value: str = "fp8_e4m3"
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
    latent: bool = False  # K holds latents, which are also the values, and V their positions

    def __str__(self) -> str:
        return self.name

    @property
    def q_dim(self) -> int:
        return self.k_dim + self.v_dim if self.latent else self.k_dim

    @property
    def out_dim(self) -> int:
        return self.k_dim if self.latent else self.v_dim

    @property
    def start(self) -> int:
        """The first position that is visible to some query."""
        return self.edge(min(self.lengths)) if self.window and not self.from_zero else 0

    def edge(self, length: int) -> int:
        """Return the first position that is visible to the first query of a sequence."""
        return max(0, length - self.tokens - self.window + 1)

    @property
    def stop(self) -> int:
        return max(self.lengths)


def static(*shape: int, least: float) -> Tensor:
    """Return scales that differ in every head and channel."""
    return least * (1 + torch.rand(shape))


def nan_code(name: str) -> int:
    return FORMATS[name].nan_code


def poisoned(case: Case) -> Pages:
    """Return pages in random order with NaN in every byte. Some pages are in no table."""
    columns = -(-case.stop // case.page_size) + 1
    batch = len(case.lengths)
    pages = batch * columns + 3
    slots, heads = case.page_size, case.heads

    def pool(name: str, *shape: int) -> Tensor:
        if name == AUTO:
            return torch.full((pages, heads, *shape), math.nan, dtype=case.dtype)
        return torch.full((pages, heads, *shape), nan_code(name), dtype=torch.uint8)

    def side(name: str, dim: int, least: float) -> StoredSide:
        has_static = name != AUTO and not case.dynamic
        scale = static(heads, dim, least=least) if has_static else None
        return StoredSide(scale, None, name, dim, case.rotated and name != AUTO)

    k, v = side(case.key, case.k_dim, 0.013), side(case.value, case.v_dim, 0.007)
    if case.center and case.key != AUTO:
        k = k._replace(center=2 * torch.randn(batch, heads, case.k_dim))
    scales = None
    if k.is_dynamic or v.is_dynamic:
        scales = torch.full((pages, heads, slots, 2), math.nan, dtype=torch.bfloat16)
    return pack_pages(
        k, pool(case.key, slots, case.k_dim), v, pool(case.value, case.v_dim, slots), scales,
        torch.randperm(pages)[: batch * columns].view(batch, columns).int(),
    )  # fmt: skip


def map_pages(function: Callable[[Tensor], Tensor], pages: Pages) -> Pages:
    """Return the same pages, in one block, with `function` applied to each tensor."""
    leaves = flatten(merge_blocks(pages))
    return unflatten([function(x) if isinstance(x, Tensor) else x for x in leaves])


def copy(pages: Pages) -> Pages:
    return map_pages(torch.clone, pages)


def with_scales(pages: Pages, k: Tensor | None, v: Tensor | None) -> Pages:
    """Return the same pages with these static scales, or with dynamic scales for None."""
    return pages._replace(k=pages.k._replace(static_scale=k), v=pages.v._replace(static_scale=v))


def fill(pages: Pages, case: Case, backend: str = "reference") -> Pages:
    """Write each sequence separately, in two calls that meet in the middle of a page."""
    generator = torch.Generator().manual_seed(1)
    for row, length in enumerate(case.lengths):
        one, center = pages._replace(table=pages.table[row : row + 1]), pages.k.center
        if center is not None:
            one = one._replace(k=one.k._replace(center=center[row : row + 1]))
        shape = (1, case.heads, length)
        key = torch.randn(*shape, case.k_dim, generator=generator).to(case.dtype)
        if center is not None:
            key += center[row][None, :, None].to(case.dtype)
        value = torch.randn(*shape, case.v_dim, generator=generator).to(case.dtype)
        for begin, end in ((0, length // 3), (length // 3, length)):
            if begin < end:
                at = torch.tensor([end], dtype=torch.int32)
                ops.write(one, key[:, :, begin:end], value[:, :, begin:end], at, backend)
    return pages


def arguments(case: Case, pages: Pages) -> dict[str, Any]:
    """Return the fields of the spec, and poison hidden tokens again."""
    batch, width = len(case.lengths), case.stop - case.start
    found: dict[str, Any] = {
        "scaling": case.k_dim**-0.5,
        "causal": case.causal and case.mask != "bool",
        "window": case.window,
        "softcap": case.softcap,
        "latent": case.latent,
    }
    if case.sinks:
        found["sinks"] = torch.randn(case.q_heads).to(case.dtype)
    if case.padding:
        mask = torch.ones(batch, 1, 1, width, dtype=torch.uint8)
        mask[0, ..., : case.padding] = 0
        found["mask"] = mask
        poison(pages, 0, range(case.padding))
    if case.mask == "bool":
        mask = torch.rand(batch, 1, case.tokens, width) < 0.7
        mask[..., 0] = True
        mask[..., width // 2] = False
        found["mask"] = mask
        poison(pages, 0, [width // 2])
    elif case.mask:
        found["bias"] = torch.randn(1, case.q_heads, case.tokens, width).to(case.dtype)
    return found


def poison(pages: Pages, row: int, positions: range | list[int]) -> None:
    for position in positions:
        page, slot = int(pages.table[row, position // pages.page_size]), position % pages.page_size
        for side, codes, at in (
            (pages.k, pages.k_codes, (page, slice(None), slot)),
            (pages.v, pages.v_codes, (page, ..., slot)),
        ):
            codes[at] = math.nan if side.format == AUTO else nan_code(side.format)
        if pages.token_scales is not None:
            pages.token_scales[page, :, slot] = math.nan


def attend(case: Case, pages: Pages, query: Tensor, backend: str, **kwargs: Any) -> Tensor:
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=query.device)
    spec = AttentionSpec(**kwargs)
    return ops.attend(query, pages, lengths, case.start, case.stop, spec, backend=backend)


def errors(found: Tensor, expected: Tensor) -> Tensor:
    """Return the relative RMS error of each sequence, `[B]`, NaN if any value is NaN."""
    found, expected = found.double(), expected.double()
    axes = tuple(range(1, found.ndim))
    return ((found - expected).square().mean(axes) / expected.square().mean(axes)).sqrt()


def bound(case: Case, backend: str = "") -> float:
    """Return the largest relative RMS error that rounding can explain.

    A sum of n values, rounded after each, has an error of about sqrt(n) units of 2^-24 of its size.
    A logit sums Dk products, and its size is at most 2 * sqrt(Dk) * scaling = 2. The output sums
    one product per token. Both results have this error, and no order of sums is better, so a factor
    of four covers it. A result in 16 bits is rounded once more. "cpu" multiplies prompts in
    bfloat16 if the model does and the CPU can. Then V and the weights are also rounded, and so is
    K, whose error doubles in a logit of that size.
    """
    result = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}.get(case.dtype, 0.0)
    if case.name.startswith("prompt") and backend == "cpu" and case.dtype == torch.bfloat16:
        result *= math.sqrt(1 + 1 + 1 + 2**2)
    return 4 * 2.0**-24 * math.sqrt(case.q_dim + case.stop) + result


NAMES = sorted(FORMATS)
NEXT = dict(zip([*NAMES, AUTO], [*NAMES[1:], AUTO, NAMES[0]], strict=True))
# Grid: K and V are read separately, so each format is once the format of K, once of V, next to a
# different format. The dtype of the query determines how a code is multiplied by its scale.
_FORMATS = [
    Case(f"{name} {'dynamic' if dynamic else 'static'} {str(dtype)[6:]}", key=name,
         value=NEXT[name], dynamic=dynamic, dtype=dtype, lengths=(300, 133), page_size=64,
         k_dim=64, v_dim=64)
    for name, dynamic, dtype in pairwise(
        [*NAMES, AUTO], [True, False], [torch.float32, torch.bfloat16, torch.float16]
    )
]  # fmt: skip
_FORMATS += [
    Case("auto", key=AUTO, value=AUTO, page_size=64),
    Case("auto bf16", key=AUTO, value=AUTO, dtype=torch.bfloat16),
]
_SHAPES = [
    Case("one token", lengths=(1,)),
    *(
        Case(f"{n} tokens, pages of {size}", lengths=(n,), page_size=size, dynamic=dynamic)
        for size, dynamic in ((16, True), (64, False))
        for n in (size - 1, size, size + 1)
    ),
    Case("pages of 3", page_size=3),
    Case("pages of 48", page_size=48, lengths=(199,)),
    Case("MHA", q_heads=3, heads=3, lengths=(199,), k_dim=24, v_dim=40),
    Case("seven heads share K", q_heads=14, heads=2, lengths=(199,)),
    Case("all heads share K", q_heads=5, heads=1, lengths=(63, 5)),
    Case("Dk 80, Dv 5", k_dim=80, v_dim=5, lengths=(199,)),
    Case("Dk 1", k_dim=1, v_dim=1),
    Case("long", lengths=(1300,), page_size=64, k_dim=128, v_dim=128, heads=1, q_heads=4),
    Case("ragged", lengths=(700, 333, 1), page_size=64),
    Case("17 queries, ragged", tokens=17, lengths=(70, 17)),
    Case("70 queries", tokens=70, lengths=(150,), page_size=64),
    Case("more queries than tokens", tokens=5, lengths=(40, 3)),
    Case("bidirectional, ragged", tokens=3, causal=False, lengths=(150, 33)),
]
_EXTRAS = [
    Case("window", window=7, lengths=(199, 190)),
    Case("window, 17 queries", window=20, tokens=17, lengths=(199,)),
    Case("window wider than the rest", window=500, tokens=3),
    Case("window, bidirectional", window=9, causal=False, tokens=3),
    Case("softcap, center", softcap=2.0, center=True, lengths=(199,), tokens=3),
    Case("sinks, center, static", sinks=True, center=True, dynamic=False, tokens=3),
    Case("sinks, softcap, ragged", sinks=True, softcap=4.0, lengths=(150, 33), heads=3),
    Case("sinks bf16", sinks=True, dtype=torch.bfloat16),
    Case("padding", padding=21, lengths=(199, 199)),
    Case("padding of whole pages", padding=130, lengths=(199,), tokens=17),
    Case("padding and window, auto", padding=3, lengths=(70,), window=66, tokens=3, key=AUTO,
         value=AUTO),
    Case("bool mask", mask="bool", tokens=3, lengths=(199, 199)),
    Case("bias of several tokens", mask="bias", tokens=3, lengths=(70,)),
    Case("bias bf16", mask="bias", dtype=torch.bfloat16),
    Case("everything", window=150, softcap=4.0, sinks=True, center=True, tokens=3, lengths=(199,),
         mask="bias", dynamic=False, key="fp8_e3m4"),
]  # fmt: skip
_ROTATED = [
    Case("rotated, e2m5", rotated=True, key="fp8_e2m5", value="fp8_e2m5", k_dim=64, v_dim=128,
         center=True, lengths=(199, 33)),
    Case("rotated, int8, static, sinks", rotated=True, key="int8", value="int8", dynamic=False,
         center=True, sinks=True, lengths=(33, 20), tokens=3),
    Case("rotated by blocks", rotated=True, key="int8", k_dim=96, v_dim=80, lengths=(70,),
         softcap=3.0, center=True),
    Case("rotated, small blocks", rotated=True, k_dim=24, v_dim=6, tokens=17, lengths=(70,)),
    Case("rotated, V auto", rotated=True, key="fp8_e3m4", value=AUTO, dtype=torch.bfloat16),
    Case("rotated, 16 bits", rotated=True, k_dim=256, v_dim=256, dtype=torch.float16, padding=5,
         heads=1, q_heads=3),
]  # fmt: skip
# Latents of one KV head. The scales of positions always differ from the scales of latents.
LATENTS = [
    dataclasses.replace(case, latent=True, heads=1)
    for case in (
        Case("latent, e3m4, 32 heads", key="fp8_e3m4", value=AUTO, k_dim=128, v_dim=64,
             q_heads=32, lengths=(199, 33)),
        Case("latent, static", dynamic=False, k_dim=48, v_dim=8, lengths=(70,), tokens=3),
        Case("latent, both of 8 bits", value="fp8_e5m2", k_dim=64, v_dim=32, lengths=(63, 64)),
        Case("latent, rotated", key="fp8_e2m5", value="int8", rotated=True, k_dim=64, v_dim=16,
             lengths=(65,), tokens=17),
        Case("latent, rotated, static", key="int8", value=AUTO, rotated=True, dynamic=False,
             k_dim=96, v_dim=16, lengths=(300, 199), page_size=64),
        Case("latent, auto", key=AUTO, value=AUTO, k_dim=40, v_dim=24, lengths=(15, 16, 17)),
        Case("latent, auto bf16", key=AUTO, value=AUTO, k_dim=64, v_dim=32, dtype=torch.bfloat16),
        Case("latent, window", value=AUTO, k_dim=64, v_dim=16, window=20, lengths=(199, 190)),
        Case("latent, sinks, softcap", value=AUTO, k_dim=64, v_dim=16, sinks=True, softcap=3.0,
             lengths=(70,), tokens=3, q_heads=16),
        Case("latent, padding", value=AUTO, k_dim=64, v_dim=16, padding=21, lengths=(199, 199)),
        Case("latent, bias", value=AUTO, k_dim=64, v_dim=16, mask="bias", tokens=3, lengths=(70,)),
        Case("latent, no positions, an odd number of vectors", value=AUTO, k_dim=40, v_dim=0,
             q_heads=20, lengths=(65, 15)),
        Case("latent, one head", value=AUTO, k_dim=24, v_dim=8, q_heads=1, lengths=(133, 70)),
        Case("latent, 3 heads", k_dim=40, v_dim=24, q_heads=3, tokens=5, lengths=(99,), page_size=8,
             value="fp8_e3m4", padding=13),
        Case("latent, 128 heads", key="int8", value=AUTO, k_dim=144, v_dim=8, q_heads=128,
             lengths=(63, 66), tokens=2, mask="bool", dtype=torch.float16),
        Case("latent, long", value=AUTO, k_dim=512, v_dim=64, lengths=(700,), page_size=64,
             q_heads=16, dtype=torch.bfloat16),
    )
]  # fmt: skip
# Many query rows per head. "cpu" passes such calls to torch's attention if the model has 16 bits.
PROMPTS = [
    Case("prompt, ragged", tokens=64, lengths=(150, 64, 33, 65), dtype=torch.bfloat16),
    Case("prompt, one page too many", tokens=22, lengths=(33, 32), heads=1, q_heads=3,
         dtype=torch.float16),
    Case("prompt, window", tokens=70, window=20, lengths=(199, 71, 70, 15), dynamic=False,
         dtype=torch.bfloat16),
    Case("prompt, wide window", tokens=70, window=120, lengths=(199, 121, 70), from_zero=True),
    Case("prompt, MHA", tokens=64, q_heads=3, heads=3, key="fp8_e5m2", value="int8",
         lengths=(100,), k_dim=24, v_dim=40, page_size=48, dtype=torch.float16),
    Case("prompt, center, static", tokens=80, center=True, dynamic=False, key="fp8_e3m4",
         lengths=(199, 81), dtype=torch.float16),
    Case("prompt, rotated", tokens=66, rotated=True, key="fp8_e2m5", value="int8", center=True,
         k_dim=64, v_dim=96, lengths=(199, 66), dtype=torch.float16),
    Case("prompt, fp16", tokens=66, dtype=torch.float16, lengths=(199, 66), value=AUTO),
    Case("prompt, K auto bf16", tokens=66, dtype=torch.bfloat16, key=AUTO, value="fp8_e3m4",
         lengths=(199,), window=100),
]  # fmt: skip
CASES = [*_FORMATS, *_SHAPES, *_EXTRAS, *_ROTATED, *LATENTS, *PROMPTS]


def edge_case(tokens: int, slot: int, from_zero: bool) -> Case:
    """Return a case with NaN before a window that begins at slot 15, 0 or 1 of a page.

    It has two sequences. The second sequence is a page longer.
    """
    name = f"edge at slot {slot}, {tokens} queries{', from 0' if from_zero else ''}"
    lengths = 32 + slot + 19 + tokens, 48 + slot + 19 + tokens
    return Case(name, window=20, tokens=tokens, from_zero=from_zero, lengths=lengths)


EDGES = [edge_case(*axes) for axes in itertools.product((1, 3, 17), (15, 16, 17), (False, True))]


LAYOUTS: dict[str, Callable[[Pages], Pages]] = {
    "whole": merge_blocks, "blocks": split_into_blocks, "gaps": separate_pages,
}  # fmt: skip


def in_layouts(cases: list[Case]) -> Any:
    """Parametrize a test by each case with each backend, and alternating layouts."""
    # Grid: a layout determines where a page is, but not its contents.
    parameters = []
    for i, case in enumerate(cases):
        parameters.append(pytest.param(case, "torch", ("whole", "blocks", "gaps")[i % 3]))
        parameters.append(
            pytest.param(case, "cpu", ("whole", "blocks", "gaps")[i % 3], marks=CPU.marks)
        )
    return pytest.mark.parametrize(("case", "backend", "layout"), parameters, ids=str)


def prepare(case: Case) -> tuple[Pages, Tensor, dict[str, Any]]:
    pages = fill(poisoned(case), case)
    query = torch.randn(len(case.lengths), case.q_heads, case.tokens, case.q_dim).to(case.dtype)
    return pages, query, arguments(case, pages)


@in_layouts(CASES)
def test_attention_equals_the_reference(case, backend, layout):
    pages, query, kwargs = prepare(case)
    expected = attend(case, pages, query.float(), "reference", **kwargs)
    found = attend(case, LAYOUTS[layout](pages), query, backend, **kwargs)
    assert found.dtype == case.dtype
    assert found.shape == (len(case.lengths), case.tokens, case.q_heads, case.out_dim)
    assert expected.isfinite().all()
    worst, most = errors(found, expected).max().item(), bound(case, backend)
    assert worst <= most, f"{worst:.2e} > {most:.2e}"


# A plan splits 600 tokens into two parts, and 70 rows exceed the decode kernel's block.
APART = [
    Case("apart, ragged", tokens=9, lengths=(150, 64, 33, 65), dtype=torch.bfloat16),
    Case("apart, window", tokens=5, window=20, lengths=(99, 71), dynamic=False, page_size=8),
    Case("apart, sinks, center", tokens=3, lengths=(600, 65), sinks=True, softcap=3.0, center=True,
         rotated=True, key="int8", page_size=64),
    Case("apart, 70 heads", tokens=2, heads=1, q_heads=70, lengths=(40, 33)),
    Case("apart, latent", tokens=3, heads=1, latent=True, k_dim=64, v_dim=16, value=AUTO,
         q_heads=16, lengths=(199, 33), dtype=torch.bfloat16),
]  # fmt: skip


def check_apart(case: Case, backend: str, device: str = "cpu") -> None:
    """Check that a deterministic query token has the same bits alone, and the right values."""
    pages, query, kwargs = prepare(case)
    expected = attend(case, pages, query.float(), "reference", **kwargs)
    pages, query = map_pages(lambda x: x.to(device), pages), query.to(device)
    kwargs = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in kwargs.items()}
    kwargs["deterministic"] = True
    found = attend(case, pages, query, backend, **kwargs)
    assert errors(found.cpu(), expected).max() <= bound(case, backend)
    for row, token in itertools.product(range(len(case.lengths)), range(case.tokens)):
        length = case.lengths[row] - case.tokens + 1 + token
        alone = dataclasses.replace(case, lengths=(length,), tokens=1)
        center = pages.k.center
        own = pages._replace(table=pages.table[row : row + 1])
        if center is not None:
            own = own._replace(k=own.k._replace(center=center[row : row + 1]))
        one = attend(alone, own, query[row : row + 1, :, token : token + 1], backend, **kwargs)
        assert torch.equal(one[0, 0], found[row, token]), (row, token)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", APART, ids=str)
def test_deterministic_attention_depends_on_nothing_else(case, backend):
    check_apart(case, backend)


@pytest.mark.parametrize("backend", [CPU])
def test_a_prompt_too_large_for_all_heads_at_once(backend):
    """A head has 18 MB of dense keys and values. At most 64 MB are made dense at a time."""
    case = Case("prompt, wide", key=AUTO, value=AUTO, dtype=torch.bfloat16, lengths=(1100,),
                tokens=64, heads=4, q_heads=4, k_dim=4096, v_dim=4096, page_size=64)  # fmt: skip
    pages, query, kwargs = prepare(case)
    expected = attend(case, pages, query, "torch", **kwargs)
    found = attend(case, pages, query, backend, **kwargs)
    assert errors(found, expected).max() <= 2 * bound(case, backend)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_auto_is_plain_attention(backend):
    """Only this test does not use the reference, but torch's attention on the original values."""
    case = Case("auto", key=AUTO, value=AUTO, lengths=(133,), tokens=5)
    pages, query, kwargs = prepare(case)
    generator = torch.Generator().manual_seed(1)
    key = torch.randn(1, case.heads, 133, case.k_dim, generator=generator)
    value = torch.randn(1, case.heads, 133, case.v_dim, generator=generator)
    mask = torch.ones(5, 133, dtype=torch.bool).tril(128)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), attn_mask=mask, enable_gqa=True
    )
    found = attend(case, pages, query, backend, **kwargs)
    assert errors(found, expected.transpose(1, 2)).max() <= bound(case)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_latents_are_keys_and_values(backend):
    """A projection expands latents for each head, as in a model. K is [latent, positions]."""
    case = Case("latent, auto", key=AUTO, value=AUTO, lengths=(133,), tokens=5, heads=1,
                k_dim=64, v_dim=16, latent=True)  # fmt: skip
    pages, query, kwargs = prepare(case)
    latent, positions = (
        reference.gather(pages, torch.tensor([133]), side, 0, 133, torch.float32, ragged=False)
        for side in "kv"
    )
    to_key, to_value = torch.randn(6, 24, 64).double(), torch.randn(6, 40, 64).double()
    query = torch.cat([torch.randn(1, 6, 5, 24), query[..., 64:]], -1).double()
    expanded = torch.cat([latent.double() @ to_key.mT, positions.double().expand(1, 6, -1, -1)], -1)
    mask = torch.ones(5, 133, dtype=torch.bool).tril(128)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, expanded, latent.double() @ to_value.mT, mask, scale=kwargs["scaling"]
    )
    absorbed = torch.cat([query[..., :24] @ to_key, query[..., 24:]], -1).float()
    found = attend(case, pages, absorbed, backend, **kwargs).double().transpose(1, 2)
    assert errors(found @ to_value.mT, expected).max() <= 8 * bound(case)


def at_the_edge(case: Case) -> tuple[Pages, Tensor, dict[str, Any], Tensor]:
    """Return the results of `prepare`, with NaN before the window, and torch's attention.

    The visible positions are computed here independently of visibility.py.
    """
    pages, query, kwargs = prepare(case)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    dense = [
        reference.gather(pages, lengths, side, 0, case.stop, torch.float64, ragged=True)
        for side in ("k", "v")
    ]
    seen = torch.zeros(len(case.lengths), 1, case.tokens, case.stop, dtype=torch.bool)
    for row, length in enumerate(case.lengths):
        for token in range(case.tokens):
            last = length - case.tokens + token
            seen[row, 0, token, last - case.window + 1 : last + 1] = True
        poison(pages, row, range(case.edge(length)))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(), *dense, attn_mask=seen, enable_gqa=True, scale=kwargs["scaling"]
    )
    return pages, query, kwargs, expected.transpose(1, 2)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("case", EDGES, ids=str)
def test_a_window_that_begins_at_the_edge_of_a_page(case, backend):
    pages, query, kwargs, expected = at_the_edge(case)
    found = attend(case, pages, query, backend, **kwargs)
    worst = errors(found, expected).max().item()
    assert worst <= bound(case), f"{worst:.2e} > {bound(case):.2e}"


# The smallest fault is one lost token of a thousand.
FAR = 50


def faults(
    case: Case, pages: Pages, query: Tensor, sinks: Tensor
) -> Iterator[tuple[str, Pages, Tensor, dict[str, Any]]]:
    """Yield a name, pages, query and changed fields of the spec for each fault."""
    hidden_positions = {
        "the last page dropped": slice(case.stop // 64 * 64, None),
        "one token lost": 500,
        "causality off by one": -1,
    }
    for fault, positions in hidden_positions.items():
        mask = torch.ones(1, 1, 1, case.stop, dtype=torch.uint8)
        mask[..., positions] = 0
        yield fault, pages, query, {"mask": mask}
    k, v = pages.k.static_scale, pages.v.static_scale
    assert k is not None
    assert v is not None
    yield "V's scale doubled", with_scales(pages, k, 2 * v), query, {}
    yield "K and V scales swapped", with_scales(pages, v, k), query, {}
    yield "K's scale 1 % off", with_scales(pages, 1.01 * k, v), query, {}
    table = pages.table.clone()
    table[0, 5] = table[0, 4]
    yield "a page read twice", pages._replace(table=table), query, {}
    yield "a sink forgotten", pages, query, {"sinks": sinks - 20}
    if case.latent:
        latent, positions = query.split([case.k_dim, case.v_dim], -1)
        swapped, zeroed = (positions, latent), (latent, 0 * positions)
        yield "latents and positions swapped", pages, torch.cat(swapped, -1), {}
        yield "no positions", pages, torch.cat(zeroed, -1), {}


@pytest.mark.parametrize("shape", [{}, {"latent": True, "heads": 1, "q_heads": 16}], ids=str)
def test_faults_are_far_above_the_bound(shape):
    """A backend with such a fault therefore fails, because its bound is around the reference."""
    case = Case("fault", dynamic=False, lengths=(1037,), tokens=3, page_size=64, sinks=True,
                k_dim=64, v_dim=64, **shape)  # fmt: skip
    pages, query, kwargs = prepare(case)
    expected = attend(case, pages, query, "reference", **kwargs)
    for fault, faulty, changed_query, changed in faults(case, pages, query, kwargs["sinks"]):
        found = attend(case, faulty, changed_query, "reference", **{**kwargs, **changed})
        assert errors(found, expected).max() > FAR * bound(case), fault


def with_holes(case: Case, pages: Pages, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the spec with padding left of the first sequence, and holes in the second sequence."""
    mask = torch.ones(2, 1, 1, case.stop - case.start, dtype=torch.uint8)
    for row, hidden in enumerate((range(case.start, 333), [case.start + 1, 901])):
        poison(pages, row, [x for x in hidden if pages.table[row, x // pages.page_size] >= 0])
        mask[row, ..., torch.tensor(list(hidden)) - case.start] = 0
    return {**kwargs, "mask": mask, "bounds": mask_bounds(mask[:, 0, 0] != 0, case.start)}


HOLES = [
    Case(f"T{tokens} window {window}", lengths=(1037, 1001), tokens=tokens, page_size=64,
         heads=1, q_heads=3, window=window, from_zero=from_zero)
    for tokens, window, from_zero in [(1, 0, True), (3, 0, True), (3, 900, False), (2, 500, True)]
]  # fmt: skip


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("case", HOLES, ids=str)
def test_bounds_of_a_mask(case, backend):
    pages, query, kwargs = prepare(case)
    kwargs = with_holes(case, pages, kwargs)
    expected = attend(case, pages, query, "reference", **{**kwargs, "bounds": None})
    found = attend(case, pages, query, backend, **kwargs)
    assert errors(found, expected).max() <= bound(case)


# Grid: a code or a dynamic scale is NaN, in K or V, in each format.
@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize(("name", "side", "dynamic"), pairwise(NAMES, ["k", "v"], [True, False]))
def test_a_visible_nan_is_not_hidden(name, side, dynamic, backend):
    case = Case("NaN", key=name, value=name, dynamic=dynamic, lengths=(70, 70))
    pages, query, kwargs = prepare(case)
    key, value = torch.randn(2, 2, 1, 32), torch.randn(2, 2, 1, 32)
    (key if side == "k" else value)[1, 0, 0, 3] = math.nan
    ops.write(pages, key, value, torch.tensor([51, 51], dtype=torch.int32), backend)
    found = attend(case, pages, query, backend, **kwargs)
    assert found[0].isfinite().all(), "another sequence"
    assert found[1, :, 3:].isfinite().all(), "another head"
    seen = found[1, :, :3].isnan()
    assert seen.any(-1).all()


SPECIAL = torch.tensor(
    [0.0, -0.0, 1e-45, -1e-38, 1e-30, 3e38, -3e38, math.inf, -math.inf, math.nan, 447, 449, -5e4]
)


WRITES = [
    *_FORMATS,
    *_ROTATED,
    Case("center", center=True, value="fp8_e5m2"),
    Case("center, static", center=True, dynamic=False, key="fp8_e3m4"),
    Case("rotated, Dv 2", rotated=True, dynamic=False, center=True, v_dim=2, value="int8"),
    Case("odd sizes", dtype=torch.bfloat16, v_dim=40, k_dim=24),
    Case("K auto fp16", key=AUTO, dtype=torch.float16, k_dim=5, v_dim=3),
]


@in_layouts(WRITES)
def test_written_bytes_equal_the_reference(case, backend, layout):
    case = dataclasses.replace(case, lengths=(150, 90))
    other = poisoned(case)
    pages = LAYOUTS[layout](copy(other))
    lengths = torch.tensor([0, 0], dtype=torch.int32)
    for tokens in (1, 15, 17, 40, 1):
        # As in a model, heads come after tokens. The values have very different sizes.
        shape = (2, tokens, case.heads, case.k_dim + case.v_dim)
        states = torch.randn(shape) * torch.exp2(torch.randint(-20, 10, (2, tokens, case.heads, 1)))
        key, value = states.to(case.dtype).transpose(1, 2).split([case.k_dim, case.v_dim], dim=3)
        lengths += tokens
        ops.write(pages, key, value, lengths, backend)
        ops.write(other, key, value, lengths, "reference")
        assert_same_pool(merge_blocks(pages), other)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", NAMES)
def test_special_values(name, dynamic, backend):
    case = Case("special", key=name, value=name, dynamic=dynamic, k_dim=5, v_dim=5, lengths=(13,))
    pages = poisoned(case)
    other = copy(pages)
    # Each value is alone, so that it determines the scale, and next to ordinary values.
    x = torch.zeros(1, 2, 13, 5)
    x[0, 0, :, 1] = SPECIAL
    x[0, 1] = torch.randn(13, 5)
    x[0, 1, :, 2] = SPECIAL
    lengths = torch.tensor([13], dtype=torch.int32)
    ops.write(pages, x, x, lengths, backend)
    ops.write(other, x, x, lengths, "reference")
    table = code_table(FORMATS[name], torch.device("cpu"))
    for found, expected in ((pages.k_codes, other.k_codes), (pages.v_codes, other.v_codes)):
        # The sign of NaN times a NaN scale is undefined.
        nan = table[expected.int()].isnan()
        assert_same(nan, table[found.int()].isnan())
        assert_same(found[~nan], expected[~nan])
    if dynamic:
        assert pages.token_scales is not None
        torch.testing.assert_close(
            pages.token_scales, other.token_scales, rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["contiguous", "last axis with gaps", "expanded", "float64"])
def test_any_strides_and_dtypes(layout, backend):
    case = Case(layout, lengths=(20,))
    key = torch.randn(1, 2, 20, 64)[..., ::2]
    value = torch.randn(1, 1, 20, 32).expand(1, 2, 20, 32)
    if layout == "contiguous":
        key, value = key.contiguous(), value.contiguous()
    elif layout == "expanded":
        key = value
    elif layout == "float64":
        key, value = key.double(), value.double()
        case = dataclasses.replace(case, dtype=torch.float64, key=AUTO)
    pages = poisoned(case)
    other = copy(pages)
    lengths = torch.tensor([20], dtype=torch.int32)
    ops.write(pages, key, value, lengths, backend)
    ops.write(other, key, value, lengths, "reference")
    assert_same_pool(pages, other)
    query = torch.randn(1, 1, 6, 64)[..., ::2].transpose(1, 2).to(case.dtype)
    found = attend(case, pages, query, backend, **arguments(case, pages))
    expected = attend(case, pages, query, "reference", **arguments(case, pages))
    assert errors(found, expected).max() <= bound(case)


@pytest.mark.parametrize(
    ("backend", "layout"),
    [("reference", "whole"), ("torch", "whole"), ("torch", "blocks"),
     pytest.param("cpu", "whole", marks=CPU.marks)],
)  # fmt: skip
@pytest.mark.parametrize("hole", [False, True], ids=["past the table", "a page that is missing"])
def test_an_overrun_changes_nothing(hole, backend, layout):
    case = Case("overrun", lengths=(40, 40))
    pages = poisoned(case)
    if hole:
        pages.table[1, 2] = -1
    before, pages = copy(pages), LAYOUTS[layout](pages)
    key = torch.randn(2, 2, 20, 32)
    lengths = torch.tensor([20, 50 if hole else 70], dtype=torch.int32)
    with pytest.raises(OutOfPagesError, match="Reserve pages"):
        ops.write(pages, key, key, lengths, backend)
    assert_same_pool(merge_blocks(pages), before)


@in_layouts([c for c in CASES if c.tokens == 1 and not (c.window or c.padding or c.mask)])
def test_gather_equals_the_reference_exactly(case, backend, layout):
    pages = fill(poisoned(case), case)
    laid_out = LAYOUTS[layout](pages)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    least = min(case.lengths)
    spans = ((0, case.stop, True), (least // 3, least, False), (0, 0, False))
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for side, (start, stop, ragged), dtype in itertools.product("kv", spans, dtypes):
        arguments = lengths, side, start, stop, dtype, ragged
        found = ops.gather(laid_out, *arguments, backend)
        assert found.dtype == dtype
        assert_same(found, ops.gather(pages, *arguments, "reference"))
        assert found.is_contiguous()


@pytest.mark.parametrize("backend", ops.BACKENDS)
def test_gather_refuses_unknown_sides(backend):
    pages, lengths = poisoned(Case("side", lengths=(5,))), torch.tensor([5], dtype=torch.int32)
    with pytest.raises(ConfigError, match="side: expected 'k' or 'v', got 'x'"):
        ops.gather(pages, lengths, "x", 0, 5, torch.float32, True, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_every_code_is_decoded_exactly(name, backend):
    case = Case(name, key=name, value=name, lengths=(64,), heads=1, k_dim=4, v_dim=4, dynamic=False)
    pages = with_scales(poisoned(case), torch.ones(1, 4), torch.ones(1, 4))
    expected = code_table(FORMATS[name], torch.device("cpu")).view(64, 4)
    codes = torch.arange(256, dtype=torch.uint8).view(4, 16, 4)
    pages.k_codes[pages.table[0, :4], 0] = codes
    pages.v_codes[pages.table[0, :4], 0] = codes.transpose(1, 2)
    lengths = torch.tensor([64], dtype=torch.int32)
    for side in ("k", "v"):
        actual = ops.gather(pages, lengths, side, 0, 64, torch.float32, False, backend)[0, 0]
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_without_visible_tokens(backend):
    """The sequence begins past its end, in the middle of a tile and of the next tile."""
    for hidden in (9, 130):
        case = Case("hidden", lengths=(hidden, 37), padding=hidden, page_size=64)
        pages, query, kwargs = prepare(case)
        kwargs["bounds"] = torch.tensor([[max(case.lengths), hidden], [0, 0]], dtype=torch.int32)
        found = attend(case, pages, query, backend, **kwargs)
        assert (found[0] == 0).all()
        expected = attend(case, pages, query, "reference", **kwargs)
        assert errors(found, expected)[1] <= bound(case)


GPUS = {
    "triton": ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950"),
    # A target cannot be assumed for "mps" and "xpu".
    "torch": ("sm_70", "sm_75", "gfx906", "gfx908", "gfx90a", "gfx1100", "gfx1201", "mps", "xpu"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("expected", "name"), [(backend, name) for backend, names in GPUS.items() for name in names]
)
def test_supported_gpus(expected, name, monkeypatch, caplog):
    monkeypatch.setattr(warn_once, "_WARNED", set())
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
    warnings = [] if expected == "triton" else [name]
    assert [record.message.rpartition(" ")[2] for record in caplog.records] == warnings


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_an_additive_mask_is_a_bias(backend):
    case = Case("additive", tokens=3, lengths=(70,))
    pages, query, kwargs = prepare(case)
    mask, bias = torch.randn(2, 1, case.q_heads, 3, 70)
    right = attend(case, pages, query, backend, **kwargs, bias=mask)
    assert_same(attend(case, pages, query, backend, **kwargs, mask=mask), right)
    right = attend(case, pages, query, backend, **kwargs, bias=mask + bias)
    assert_same(attend(case, pages, query, backend, **kwargs, mask=mask, bias=bias), right)


# Arguments of a call by name, and the operations.
Call = dict[str, Any]
SPOILED = (
    "query", "key", "value", "lengths", "table", "start", "stop", "mask", "bias", "sinks",
    "k_center",
)  # fmt: skip
OPERATIONS: dict[str, Callable[[Call, Pages, AttentionSpec, str], Tensor | None]] = {
    "write": lambda x, pages, _, backend: ops.write(
        pages, x["key"], x["value"], x["lengths"], backend
    ),
    "attend": lambda x, pages, spec, backend: ops.attend(
        x["query"], pages, x["lengths"], x["start"], x["stop"], spec, backend=backend
    ),
    "gather": lambda x, pages, _, backend: ops.gather(
        pages, x["lengths"], "k", x["start"], x["stop"], torch.float32, True, backend
    ),
}  # fmt: skip


def draw(rng: random.Random) -> tuple[Case, Call]:
    """Return a call whose sizes fit each other."""
    pick, tokens, latent = rng.choice, rng.choice((1, 1, 2, 5, 33)), rng.random() < 0.2
    heads, mask = 1 if latent else pick((1, 2)), pick(("", "padding", "bool", "bias"))
    case = Case(
        "prompt", lengths=tuple(tokens + rng.randrange(40) for _ in range(pick((1, 2, 3)))),
        tokens=tokens, heads=heads, q_heads=heads * pick((1, 2, 3)), k_dim=pick((8, 24)),
        v_dim=pick((8, 16)), page_size=pick((8, 16)), key=pick([*NAMES, AUTO]), latent=latent,
        value=pick([*NAMES, AUTO]), dynamic=pick((True, False)), window=pick((0, 0, 7)),
        center=not latent and pick((True, False)), causal=pick((True, False)),
        softcap=pick((0.0, 4.0)), sinks=pick((True, False)), padding=int(mask == "padding"),
        mask=mask.removeprefix("padding"), from_zero=mask in ("padding", "bool"),
        dtype=pick((torch.float32, torch.bfloat16)),
    )  # fmt: skip
    pages, query, spec = prepare(case)
    shape = len(case.lengths), heads, tokens
    return case, {
        **dict(zip(PAGE_FIELDS, flatten(pages), strict=True)), **spec, "query": query,
        "key": torch.randn(*shape, case.k_dim).to(case.dtype),
        "value": torch.randn(*shape, case.v_dim).to(case.dtype),
        "lengths": torch.tensor(case.lengths, dtype=torch.int32),
        "start": case.start, "stop": case.stop,
    }  # fmt: skip


def spoil(rng: random.Random, x: Any) -> Any:
    """Return a changed number, or a tensor with a changed dtype, size or number of axes."""
    if isinstance(x, int):
        return x + rng.choice((-9, -1, 1, 16, 99))
    kind = rng.random()
    if kind < 0.2:
        return x[None] if kind < 0.1 else x[0]
    if kind < 0.25:
        return x.to(torch.float64 if x.is_floating_point() else torch.int64)
    axis = rng.randrange(x.ndim)
    size = x.shape[axis]
    new = rng.choice((0, 1, 2, 3, size - 1, size + 1, 2 * size))
    return x.index_select(axis, torch.arange(new) % size)


def outcome(operation: str, x: Call, backend: str) -> tuple[Tensor | type | None, Pages]:
    """Return the result of an operation or the kind of its error, and the pages after it."""
    pages = copy(unflatten([x[name] for name in PAGE_FIELDS]))
    spec = AttentionSpec(**{name: x[name] for name in AttentionSpec._fields if name in x})
    try:
        return OPERATIONS[operation](x, pages, spec, backend), pages
    except FP8KVError as error:
        return type(error), pages


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("others", "calls"),
    [
        (["torch", "cpu"], 300),
        pytest.param(["torch", "cpu"], 1500, marks=pytest.mark.full),
        pytest.param(["triton"], 300, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_each_other(others, calls):
    """Every backend refuses what the reference refuses, and agrees with it otherwise."""
    if missing := [why for name in others if (why := ops.available_backends()[name])]:
        pytest.skip(missing[0])
    rng, refused = random.Random(calls), 0
    for number in range(calls):
        torch.manual_seed(number)
        case, x = draw(rng)
        operation, name = rng.choice(list(OPERATIONS)), None
        if rng.random() < 0.7:
            name = rng.choice([name for name in SPOILED if x.get(name) is not None])
            x[name] = spoil(rng, x[name])
        with torch.set_grad_enabled(rng.random() < 0.2):
            expected, written = outcome(operation, x, "reference")
            refused += isinstance(expected, type)
            assert name or not isinstance(expected, type), number
            for backend in others:
                if backend == "triton" and expected is OutOfPagesError:
                    continue  # kernels skip tokens without a page
                found, after = outcome(operation, x, backend)
                what = f"{number}: {operation} with a changed {name} by {backend}"
                assert_same_pool(after, written, what)
                if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
                    assert found is expected, what
                elif operation == "gather":
                    assert_same_bytes(found.nan_to_num(9), expected.nan_to_num(9), what)
                else:
                    error = (found - expected).double().norm()
                    assert error <= 2 * bound(case, backend) * expected.double().norm(), what
    assert 0.25 < refused / calls < 0.75
