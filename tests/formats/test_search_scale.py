"""Tests of the search for scales of K: identical bits in all backends, and the gain in accuracy."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_fp8kv import ops
from hf_fp8kv.formats import FORMATS, codec
from hf_fp8kv.formats.codec import compute_dynamic_scale, decode, encode, search_scale
from hf_fp8kv.ops import Pages, StoredSide, reference
from hf_fp8kv.ops.blocks import pack_pages
from tests.helpers.codes import read_codes, round_up_dim
from tests.helpers.grids import pairwise

BACKENDS = ["reference", "torch", "cpu"]
FORMAT_NAMES = sorted(FORMATS)
NUM_HEADS, NUM_SLOTS = 2, 16


def make_pages(name: str, num_tokens: int, dim: int, center: Tensor | None = None) -> Pages:
    """Return pages of one sequence, whose codes are 0xFF and whose scales are NaN."""
    num_pages = -(-num_tokens // NUM_SLOTS)
    scales = torch.full((num_pages, NUM_HEADS, NUM_SLOTS, 2), math.nan, dtype=torch.bfloat16)
    k, v = (
        torch.full((num_pages, NUM_HEADS, *shape), 0xFF, dtype=torch.uint8)
        for shape in ((NUM_SLOTS, dim), (dim, NUM_SLOTS))
    )
    return pack_pages(
        StoredSide(None, center, name, dim), k, StoredSide(None, None, name, dim), v, scales,
        torch.randperm(num_pages)[None].int(),
    )  # fmt: skip


def write_and_read(
    key: Tensor, name: str, backend: str, center: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Write `key`, `[1, H, T, D]`, as K and V, and return the codes of K and the scales of both."""
    num_tokens = key.shape[2]
    pages = make_pages(name, num_tokens, key.shape[3], center)
    ops.write(pages, key, key, torch.tensor([num_tokens], dtype=torch.int32), backend)

    def read_in_order(pool: Tensor) -> Tensor:
        return pool[pages.table[0].long()].transpose(0, 1).flatten(1, 2)[:, :num_tokens]

    assert pages.token_scales is not None
    k_scales, v_scales = (read_in_order(x) for x in pages.token_scales.unbind(-1))
    return read_in_order(read_codes(pages, "k")), k_scales, v_scales


def make_random_vectors(dim: int, num_rows: int = 30) -> Tensor:
    """Return vectors with very different magnitudes and distributions, `[3 * num_rows, dim]`."""
    magnitude = torch.exp2(torch.randint(-60, 60, (3 * num_rows, 1)))
    outlier = torch.randn(num_rows, dim)
    outlier[:, 0] *= 30
    x = torch.cat([torch.randn(num_rows, dim), torch.randn(2, num_rows, dim).prod(0), outlier])
    return x * magnitude


def make_special_vectors(dim: int) -> Tensor:
    """Return vectors with values at the limits of float32, next to zeros or ordinary values."""
    edges = [0.0, -0.0, 1e-45, -1e-40, 1e-35, -1e-35, 1e-30, 1e38, -3.4e38]
    edges += [math.inf, -math.inf, math.nan]
    vectors = [torch.zeros(len(edges), dim), torch.randn(len(edges), dim)]
    for x in vectors:
        x[:, dim // 3] = torch.tensor(edges)
    vectors += [torch.full((1, dim), x) for x in edges]
    vectors += [torch.randn(1, dim) * magnitude for magnitude in (1e-40, 1e-35, 1e-28, 1e37)]
    return torch.cat(vectors)


def make_tied_vectors(dim: int) -> Tensor:
    """Return vectors of few significant bits. With some scales, many values are ties of codes."""
    vectors = torch.randint(-511, 512, (30, dim)) / 2.0 ** torch.randint(0, 9, (30, 1))
    vectors[:10] = vectors[:10].abs().clamp(min=257)
    return vectors


def assert_same_codes(actual: Tensor, expected: Tensor, name: str) -> None:
    """Assert that codes are equal. A NaN may have either sign."""
    fmt = FORMATS[name]
    is_nan = decode(expected, fmt).isnan()
    assert torch.equal(decode(actual, fmt).isnan(), is_nan)
    assert torch.equal(actual[~is_nan], expected[~is_nan])


def assert_same_scales(actual: Tensor, expected: Tensor) -> None:
    """Assert that scales are equal. NaNs compare equal."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def check_write(key: Tensor, name: str, backend: str, center: Tensor | None = None) -> None:
    """Assert that written codes and scales match `search_scale` and `encode`."""
    codes, scales, v_scales = write_and_read(key, name, backend, center)
    fmt = FORMATS[name]
    x = key[0].float()
    centered_x = x if center is None else x - center[:, None]
    expected = search_scale(centered_x, fmt)
    assert_same_scales(scales, expected)
    assert_same_scales(v_scales, compute_dynamic_scale(x, fmt))
    expected_codes = encode(centered_x * expected.float().reciprocal()[..., None], fmt)
    assert_same_codes(codes, expected_codes, name)


def reshape_to_keys(vectors: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Reshape vectors to `[1, H, T, D]`, and drop the vectors of an incomplete token."""
    num_tokens = len(vectors) // NUM_HEADS
    return vectors[: num_tokens * NUM_HEADS].view(1, NUM_HEADS, num_tokens, -1).to(dtype)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Backends vectorize over the values of a vector, so each format is paired with each size and dtype,
# on each backend, with and without a center.
WRITE_CASES = pairwise(FORMAT_NAMES, [1, 5, 24, 80, 256], DTYPES, [False, True], BACKENDS)


@pytest.mark.parametrize(("name", "dim", "dtype", "is_centered", "backend"), WRITE_CASES, ids=str)
def test_every_backend_writes_the_same_bytes(name, dim, dtype, is_centered, backend):
    if reason := ops.explain_backends().get(backend):
        pytest.skip(reason)
    dim = round_up_dim(dim, name)
    key = reshape_to_keys(
        torch.cat([make_random_vectors(dim), make_tied_vectors(dim), make_special_vectors(dim)]),
        dtype,
    )
    if not is_centered:
        check_write(key, name, backend)
        return
    center = 3 * torch.randn(NUM_HEADS, dim)
    key = torch.cat([key, (center[:, None] + torch.randn(1, NUM_HEADS, 40, dim)).to(dtype)], 2)
    key[..., -1, :] = center.to(dtype)
    key[..., -2, 0] = math.nan
    key[..., -3, -1] = -math.inf
    check_write(key, name, backend, center)


# Each format is paired with each size and backend, because backends split long sums by size.
SUM_CASES = pairwise(FORMAT_NAMES, [1023, 1024, 1040, 4096], BACKENDS)


@pytest.mark.parametrize(("name", "dim", "backend"), SUM_CASES, ids=str)
def test_sums_of_the_largest_errors_are_exact(name, dim, backend):
    if reason := ops.explain_backends().get(backend):
        pytest.skip(reason)
    fmt, dim = FORMATS[name], round_up_dim(dim, name)
    max_power = 2.0 ** math.floor(math.log2(fmt.max))
    step = max(max_power * 2.0**-fmt.mantissa_bits, fmt.min_subnormal)
    # The first scale is 1, and all values except one are nearly midpoints of two codes.
    fractions = torch.randint(500, 513, (4, dim)) / 1024
    magnitudes = max_power + step * (torch.randint(0, 3, (4, dim)) + fractions)
    x = magnitudes * torch.randn(4, dim).sign()
    x[:, 3] = fmt.max
    error = (decode(encode(x, fmt), fmt) - x).abs() * fmt.error_unit
    assert ((error >= 500) & (error <= 512)).sum() == 4 * (dim - 1)
    check_write(reshape_to_keys(torch.cat([x, x * 1.001, torch.randn(8, dim)])), name, backend)


def compute_unit_factor(name: str) -> float:
    """Return a factor that gives normally distributed vectors scales of about 1."""
    return FORMATS[name].max / 3


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_the_chosen_scale_is_proportional_to_the_magnitude(name):
    """At the smallest magnitude, the squares of errors underflow to zero in float32."""
    fmt = FORMATS[name]
    x = torch.randn(200, 64) * compute_unit_factor(name)
    expected = search_scale(x, fmt).double()
    assert len((expected / compute_dynamic_scale(x, fmt).double()).unique()) > 8
    for power in (-95, -60, -1, 30, 80):
        scales = search_scale(x * 2.0**power, fmt).double()
        assert torch.equal(scales, expected * 2.0**power)


# -- gain in accuracy ------------------------------------------------------------------------------


def compute_squared_error(x: Tensor, scale: Tensor, name: str) -> Tensor:
    """Return the squared error of each vector, in float64, if it is stored with `scale`."""
    fmt = FORMATS[name]
    codes = encode(x * scale.float().reciprocal()[..., None], fmt)
    decoded = decode(codes, fmt).double() * scale.double()[..., None]
    return (decoded - x.double()).square().sum(-1)


def list_candidate_scales(x: Tensor, name: str) -> list[Tensor]:
    """Return the candidate scales of an octave, computed in float64."""
    first_scale = compute_dynamic_scale(x, FORMATS[name]).double()
    scales = []
    for index in range(codec.SEARCH_STEPS):
        mantissa, exponent = torch.frexp(
            (first_scale * 2.0 ** (index / codec.SEARCH_STEPS)).float()
        )
        rounded_up = torch.ldexp((mantissa.double() * 256).ceil() / 256, exponent)
        scales.append(rounded_up.to(torch.bfloat16))
    return scales


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_the_best_scale_of_an_octave_is_chosen(name):
    x = torch.cat([torch.randn(300, 64), torch.randn(2, 300, 64).prod(0)])
    chosen_scales = search_scale(x, FORMATS[name])
    scales = torch.stack(list_candidate_scales(x, name))
    assert (scales == chosen_scales).any(0).all()
    min_errors = torch.stack([compute_squared_error(x, scale, name) for scale in scales]).amin(0)
    # The search ranks rounded errors, and the first scale is among the candidates.
    assert (compute_squared_error(x, chosen_scales, name) <= 1.02 * min_errors).all()
    base_errors = compute_squared_error(x, compute_dynamic_scale(x, FORMATS[name]), name)
    assert (min_errors <= base_errors).all()
    if name in ("fp8_e4m3", "fp8_e3m4"):
        ratio = compute_squared_error(x, chosen_scales, name)[:300].sum() / base_errors[:300].sum()
        assert ratio.sqrt() <= 0.92, "docs/architecture.md promises this for Gaussian vectors"


@given(
    max_value=st.floats(min_value=2.0**-80, max_value=2.0**127, width=32),
    name=st.sampled_from(FORMAT_NAMES),
    fractions=st.lists(st.floats(min_value=-1, max_value=1, width=32), max_size=20),
)
def test_the_largest_value_never_saturates(max_value, name, fractions):
    fmt = FORMATS[name]
    x = torch.tensor([max_value, *(fraction * max_value for fraction in fractions)])
    scale = search_scale(x, fmt)
    scaled = x * scale.float().reciprocal()
    # The reciprocal is rounded, so the quotient may be slightly above the format's largest value.
    assert scaled[0] <= fmt.max * (1 + 2.0**-22)
    decoded = decode(encode(scaled, fmt), fmt)[0].double() * scale.double()
    step = max(max_value * 2.0**-fmt.mantissa_bits, fmt.min_subnormal * scale.item())
    assert abs(decoded - max_value) <= step / 2 * (1 + 2.0**-20)


@pytest.mark.parametrize("dim", [1, 80])
def test_dynamic_errors_of_several_formats_match_the_reference(dim: int) -> None:
    """The values have all magnitudes or are zero, and are stored as V in each format."""
    x = torch.randn(len(FORMAT_NAMES), 1, 2, 200, dim, generator=torch.Generator().manual_seed(dim))
    x *= torch.logspace(-35, 30, 200)[:, None]
    x[..., ::7, 1:] = 0.0
    errors_by_format = codec.compute_dynamic_errors(x, tuple(FORMATS[n] for n in FORMAT_NAMES))
    for name, values, errors in zip(FORMAT_NAMES, x, errors_by_format, strict=True):
        side = StoredSide(None, None, name, dim)
        codes, scales = reference.quantize(values, side, search=False)
        expected = decode(codes, FORMATS[name]) * scales.float()[..., None] - values
        # A quotient and a product with a reciprocal may differ in their last bit.
        magnitude = values.abs().amax(-1, keepdim=True)
        torch.testing.assert_close(errors / magnitude, expected / magnitude, rtol=0, atol=1e-6)
