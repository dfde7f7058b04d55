"""Tests of each format against its definition: all codes, all 16-bit inputs, ties and edges.

The references share no code with the library. They follow the papers in exact rational or float64
arithmetic, and this file has its own table of formats.
"""

import functools
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hf_fp8kv.errors import ConfigError
from hf_fp8kv.formats import FORMATS, MIN_SCALE, codec, parse_dtype
from hf_fp8kv.formats.codec import compute_dynamic_scale, decode, encode, make_code_table
from tests.helpers.assertions import assert_same

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Spec:
    """A format as a paper defines it. `nan_codes` and `inf_codes` are codes of both signs."""

    mantissa_bits: int
    bias: int
    max_value: float
    nan_codes: frozenset[int]
    inf_codes: frozenset[int] = frozenset()
    nan_code: int = 0x7F  # the code that a positive NaN becomes
    has_negative_zero: bool = True
    unused_bits: int = 0  # lower bits that are zero in all codes


NAN_IS_0X80 = {"nan_codes": frozenset({0x80}), "nan_code": 0x80}
E5M2_NAN_CODES = frozenset({0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF})
SPECS = {
    "fp8_e4m3": Spec(3, 7, 448.0, frozenset({0x7F, 0xFF})),
    "fp8_e4m3fnuz": Spec(3, 8, 240.0, **NAN_IS_0X80, has_negative_zero=False),
    "fp8_e5m2": Spec(2, 15, 57344.0, E5M2_NAN_CODES, frozenset({0x7C, 0xFC})),
    "fp8_e3m4": Spec(4, 3, 31.0, **NAN_IS_0X80, has_negative_zero=False),
    "fp8_e2m5": Spec(5, 1, 7.875, **NAN_IS_0X80, has_negative_zero=False),
    # Without exponent bits, all steps are 1.
    "int8": Spec(7, -6, 127.0, **NAN_IS_0X80, has_negative_zero=False),
    "int6": Spec(5, -4, 31.0, **NAN_IS_0X80, has_negative_zero=False, unused_bits=2),
    "int4": Spec(3, -2, 7.0, **NAN_IS_0X80, has_negative_zero=False, unused_bits=4),
}
ALL_CODES = torch.arange(256, dtype=torch.uint8)

each_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


def compute_value(code: int, spec: Spec) -> Fraction:
    sign = -1 if code & 0x80 else 1
    exponent, fraction = divmod((code & 0x7F) >> spec.unused_bits, 1 << spec.mantissa_bits)
    if exponent == 0:
        return sign * Fraction(fraction) * Fraction(2) ** (1 - spec.bias - spec.mantissa_bits)
    mantissa = 1 + Fraction(fraction, 1 << spec.mantissa_bits)
    return sign * mantissa * Fraction(2) ** (exponent - spec.bias)


def list_levels(spec: Spec) -> Floats:
    """Return the values of the positive codes up to the code of the largest value."""
    values = [
        float(compute_value(code, spec))
        for code in range(0, 0x80, 1 << spec.unused_bits)
        if code not in spec.nan_codes | spec.inf_codes
    ]
    assert values == sorted(values)
    assert values[-1] == spec.max_value
    return np.array(values)


def round_to_codes(values: Floats, spec: Spec, is_negative: npt.NDArray[np.bool_]) -> torch.Tensor:
    """Return the nearest codes, with ties to even and saturation, as uint8.

    The search is exact, because midpoints and all inputs (up to float32) are exact in float64.
    """
    levels = list_levels(spec)
    magnitude = np.minimum(np.abs(values), spec.max_value)
    with np.errstate(invalid="ignore"):
        lower = np.clip(np.searchsorted(levels, magnitude, side="right") - 1, 0, len(levels) - 2)
        midpoints = (levels[lower] + levels[lower + 1]) / 2
        rounds_up = (magnitude > midpoints) | ((magnitude == midpoints) & (lower % 2 == 1))
    code = (lower + rounds_up) << spec.unused_bits
    code = np.where(is_negative & ((code > 0) | spec.has_negative_zero), code | 0x80, code)
    return torch.from_numpy(np.where(np.isnan(values), spec.nan_code, code).astype(np.uint8))


def assert_codes(actual: torch.Tensor, expected: torch.Tensor, spec: Spec) -> None:
    """Assert that codes are equal. A NaN may have either sign, and CUDA drops its sign."""
    nan_codes = torch.tensor(sorted(spec.nan_codes), dtype=torch.uint8)
    is_nan = torch.isin(actual.cpu(), nan_codes)
    assert_same(torch.where(is_nan, spec.nan_code, actual.cpu()), expected)


@functools.cache
def make_float32_grid() -> torch.Tensor:
    """Return all signs and exponents, with mantissas at, next to and between 5-bit values.

    The last exponent gives infinities and NaN with many payloads.
    """
    low_bits = np.array([0, 1, 2, 0x1FFFF, 0x20000, 0x20001, 0x3FFFE, 0x3FFFF])
    single_bits = 1 << np.arange(23)
    mantissas = np.unique(
        np.concatenate([
            (np.arange(32)[:, None] << 18 | low_bits).ravel(), single_bits, single_bits - 1
        ])
    )  # fmt: skip
    positive = (np.arange(256)[:, None] << 23 | mantissas).ravel()
    bits = np.concatenate([positive, positive | 1 << 31]).astype(np.uint32)
    return torch.from_numpy(bits.view(np.float32))


def make_float32_ties(spec: Spec) -> torch.Tensor:
    """Return all values, midpoints and edges of saturation, each with two float32 neighbors.

    The edges include the midpoint to the value that would follow the largest value.
    """
    values = list_levels(spec)
    step = values[-1] - values[-2]
    edges = [spec.max_value + step * factor for factor in (0.25, 0.5, 0.75, 1.0, 2.0)]
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2, edges]).astype(np.float32)
    neighbors = [
        np.nextafter(points, np.float32(target), dtype=np.float32) for target in (-np.inf, np.inf)
    ]
    all_values = np.concatenate([points, *neighbors])
    return torch.from_numpy(np.concatenate([all_values, -all_values]))


EVERY_16_BIT_PATTERN = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)


@functools.cache
def make_inputs(kind: str, spec: Spec) -> torch.Tensor:
    """Return the inputs of a kind, or every value of a dtype with 16 bits."""
    if kind in ("bfloat16", "float16"):
        return EVERY_16_BIT_PATTERN.view(getattr(torch, kind))
    return make_float32_grid() if kind == "float32-grid" else make_float32_ties(spec)


INPUT_KINDS = ["bfloat16", "float16", "float32-grid", "float32-ties"]


@functools.cache
def compute_expected_codes(kind: str, spec: Spec) -> torch.Tensor:
    inputs = make_inputs(kind, spec)
    return round_to_codes(inputs.double().numpy(), spec, torch.signbit(inputs).numpy())


@each_format
def test_the_constants_of_a_format_follow_from_its_definition(fmt):
    spec = SPECS[fmt.name]
    values = list_levels(spec)
    assert fmt.max == spec.max_value == values[fmt.max_code >> spec.unused_bits]
    assert fmt.max_code == len(values) - 1 << spec.unused_bits
    assert fmt.bits == 8 - spec.unused_bits
    assert fmt.min_subnormal == values[1]
    assert fmt.error_unit == 1024 / (values[-1] - values[-2])
    assert fmt.nan_code == spec.nan_code
    assert fmt.inf_code == min(spec.inf_codes, default=None)
    assert fmt.has_unsigned_zero is not spec.has_negative_zero


@each_format
def test_every_code_decodes_to_its_definition(fmt, device):
    spec = SPECS[fmt.name]
    actual = decode(ALL_CODES.to(device), fmt)
    assert actual.dtype == torch.float32
    for code, value in enumerate(actual.tolist()):
        if code % (1 << spec.unused_bits):
            continue
        sign = -1 if code & 0x80 else 1
        if code in spec.nan_codes:
            assert math.isnan(value), f"{code:#04x}"
        elif code in spec.inf_codes:
            assert value == sign * math.inf, f"{code:#04x}"
        else:
            assert Fraction(value) == compute_value(code, spec), f"{code:#04x}"
            # The sign of a zero must match as well.
            assert math.copysign(1, value) == sign, f"{code:#04x}"
    if fmt.torch_dtype:
        torch.testing.assert_close(
            actual.cpu(), ALL_CODES.view(fmt.torch_dtype).float(), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("kind", INPUT_KINDS)
@each_format
def test_a_value_becomes_the_nearest_code_ties_to_even(fmt, kind, device):
    spec = SPECS[fmt.name]
    codes = encode(make_inputs(kind, spec).to(device), fmt)
    assert_codes(codes, compute_expected_codes(kind, spec), spec)


def test_codes_do_not_depend_on_shapes_and_strides():
    fmt = FORMATS["fp8_e4m3"]
    values = torch.randn(6, 10) * 1000
    original_values = values.clone()
    codes = encode(values, fmt)
    assert torch.equal(values, original_values), "the input must not change"
    assert torch.equal(encode(values.T, fmt), codes.T)
    assert torch.equal(encode(values[::2, 1::3], fmt), codes[::2, 1::3])
    assert torch.equal(decode(codes.T, fmt), decode(codes, fmt).T)
    assert decode(codes[2, 3], fmt).shape == ()
    assert encode(values[:0], fmt).shape == decode(codes[:0], fmt).shape == (0, 10)


@each_format
def test_a_vector_with_nan_or_infinity_gets_the_scale_nan_and_is_read_as_nan(fmt):
    vectors = torch.tensor(
        [[1.0, value, 0.0] for value in (math.nan, -math.nan, math.inf, -math.inf, 2.0)]
    )
    scale = compute_dynamic_scale(vectors, fmt)
    assert scale.isnan().tolist() == [True] * 4 + [False]
    codes = encode(vectors * scale.float().reciprocal()[:, None], fmt)
    assert decode(codes, fmt).isnan().all(1).tolist() == [True] * 4 + [False]


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_are_per_vector_and_correct_for_every_16_bit_value(fmt, dtype, device):
    # Each positive finite value has a vector: half of the value, and the negative value.
    vectors = make_float32_grid() if dtype == torch.float32 else EVERY_16_BIT_PATTERN.view(dtype)
    largest = vectors[vectors.isfinite() & (vectors >= 0)]
    vectors = largest[:, None] * torch.tensor([0.5, -1.0], dtype=dtype)
    scale = compute_dynamic_scale(vectors.to(device), fmt).cpu()
    assert scale.shape == vectors.shape[:-1]
    # numpy rounds as IEEE 754 specifies. Rounding up to bfloat16 adds 1 to the upper half.
    quotient = largest.float().numpy() / np.float32(fmt.max)
    bits = np.maximum(quotient, np.float32(MIN_SCALE)).view(np.uint32)
    expected_bits = (bits >> 16) + (bits & 0xFFFF > 0)
    assert np.array_equal(scale.view(torch.int16).numpy().view(np.uint16), expected_bits)
    # No value saturates. The quotient, the reciprocal and the product round by 2^-24 each.
    scaled = vectors[:, 1].float() * scale.float().reciprocal()
    assert scaled.abs().max() <= fmt.max * (1 + 2.0**-22)
    # Rounding up costs less than 2^-7, which is less than half of the last step, or a step of int8.
    tolerance = 1 if fmt.name == "int8" else 0
    codes = encode(scaled[torch.from_numpy(quotient >= MIN_SCALE)], fmt) & 0x7F
    assert codes.min() >= fmt.max_code - tolerance


# Digests of 2026-11-22. If a digest changes, saved caches and scales change their meaning.
GOLDEN_DIGESTS = {
    "fp8_e4m3": "53f788649983ea3c",
    "fp8_e4m3fnuz": "e575762e9ff01098",
    "fp8_e5m2": "eaaf27140bab45bb",
    "fp8_e3m4": "bebf5163e3327147",
    "fp8_e2m5": "436e373be07bede2",
    "int8": "55c963ac94f29f57",
    "int6": "277d83f448e6bf3e",
    "int4": "45c581da44d4c3d6",
}


@pytest.mark.parametrize("name", SPECS)
def test_codes_values_and_scales_match_earlier_versions(name):
    fmt = FORMATS[name]
    # The values are not random, because generators may differ between versions of torch.
    values = (torch.arange(80 * 64) * 2654435761 % 2**32 - 2**31).float() * 2.0**-31
    vectors = values.view(80, 64) ** 3 * 2.0 ** torch.arange(-40, 40)[:, None]
    encoded_tensors = [
        encode(torch.cat([make_float32_grid(), make_float32_ties(SPECS[name])]), fmt),
        decode(ALL_CODES[:: 1 << SPECS[name].unused_bits], fmt).nan_to_num(nan=-12345.0),
        compute_dynamic_scale(vectors, fmt),
        codec.search_scale(vectors, fmt),
    ]
    digest = hashlib.sha256(
        b"".join(values.view(torch.uint8).numpy().tobytes() for values in encoded_tensors)
    )
    assert digest.hexdigest()[:16] == GOLDEN_DIGESTS[name]


@each_format
def test_a_scale_for_e4m3_still_covers_448(fmt):
    largest = torch.tensor([448.0]) / fmt.scale_from_e4m3
    assert largest.item() <= fmt.max
    decoded = decode(encode(largest, fmt), fmt) * fmt.scale_from_e4m3
    assert decoded.item() == pytest.approx(448.0, rel=2.0**-23)


@pytest.fixture
def flushed_subnormals() -> Iterator[None]:
    """Flush subnormal values to zero in one thread, because each thread has the setting."""
    torch.set_num_threads(1)  # conftest.py resets the number before the next test
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal values")
    make_code_table.cache_clear()
    try:
        assert (torch.tensor([2.0**-149]) * 1.0).item() == 0.0
        yield
    finally:
        torch.set_flush_denormal(False)
        make_code_table.cache_clear()


@each_format
def test_flushing_subnormals_changes_nothing(fmt, flushed_subnormals):
    spec = SPECS[fmt.name]
    codes = [encode(make_inputs(kind, spec), fmt) for kind in INPUT_KINDS]
    vectors = make_float32_grid()[:, None]
    values = decode(ALL_CODES, fmt)
    scales = compute_dynamic_scale(vectors, fmt)
    torch.set_flush_denormal(False)
    make_code_table.cache_clear()
    for kind, actual in zip(INPUT_KINDS, codes, strict=True):
        assert_codes(actual, compute_expected_codes(kind, spec), spec)
    assert torch.equal(values.view(torch.int32), decode(ALL_CODES, fmt).view(torch.int32))
    assert torch.equal(
        scales.view(torch.int16), compute_dynamic_scale(vectors, fmt).view(torch.int16)
    )


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("fp8", "fp8_e4m3"), ("fp8_e4m3fn", "fp8_e4m3"), ("auto", "auto"), ("model", "auto"),
        (torch.int8, "int8"), (torch.float8_e4m3fn, "fp8_e4m3"),
        (torch.float8_e4m3fnuz, "fp8_e4m3fnuz"), (torch.float8_e5m2, "fp8_e5m2"),
        *((name, name) for name in SPECS),
    ],
    ids=str,
)  # fmt: skip
def test_spellings_of_a_storage_dtype_have_one_canonical_name(name, canonical):
    assert parse_dtype(name) == canonical


@pytest.mark.parametrize("name", ["FP8", None, torch.uint8, ["fp8"]], ids=str)
def test_an_error_for_an_unknown_name_lists_the_known_names(name):
    with pytest.raises(
        ConfigError, match=r"key_dtype: expected one of 'model', 'fp8'.*got"
    ) as error:
        parse_dtype(name, "key_dtype")
    assert repr(name) in str(error.value)
    assert all(repr(fmt_name) in str(error.value) for fmt_name in FORMATS)
