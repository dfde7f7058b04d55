"""Formats (the value of a stored byte) and storage plans (how K and V of a layer are stored).

Constants such as 448, the largest value of E4M3, are only defined here.

A code is a byte with a sign bit, `bits - 1 - mantissa_bits` exponent bits, the mantissa, and zeros
if `bits` is less than 8. E4M3 and E5M2 are defined in "FP8 Formats for Deep Learning" (arXiv
2209.05433), and the FNUZ variant in arXiv 2206.02915 (no infinity, one zero, 0x80 is NaN, the bias
is higher by one). The remaining formats are our own. They have no infinity, and 0x80 is NaN as in
FNUZ, so that NaN is kept even with static scales. E3M4 has a bias of 3 (largest value 31, smallest
step 2^-6), and E2M5 a bias of 1 (largest value 7.875, smallest step 2^-5).

Int8 is sign and magnitude without exponent bits, with the bias that gives a step of 1 (largest
value 127). It is a float format in which all values are subnormal (see docs/architecture.md). Int6
and int4 (largest values 31 and 7) are int8 with fewer bits. Their codes are bytes whose lower bits
are zero, and pages store only the upper bits (`ops.page_layout`).
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..errors import ConfigError

# The format of values stored in the model's dtype. Messages and plans call it "model".
AUTO = "auto"
# A dtype of `enable` that means the plan of `choose_plan`.
ADAPTIVE = "adaptive"

# The smallest dynamic scale. With this bound, the scale of a token of zeros, or of subnormal
# values, has a finite reciprocal in fp32.
MIN_SCALE = 2.0**-100


# Dtypes that stand for stored codes, by their bits.
CODE_DTYPES: dict[int, torch.dtype] = {
    8: torch.uint8,
    6: torch.uint6,  # type: ignore[attr-defined]
    4: torch.uint4,  # type: ignore[attr-defined]
}


@dataclass(frozen=True)
class Format:
    """A floating-point format of at most 8 bits. Integers are formats without exponent bits.

    `max` is the largest finite value, and `max_code` its code. `scale_from_e4m3` times a scale for
    E4M3FN is the scale for this format. `has_unsigned_zero` means that 0x80 is NaN instead of -0.
    `bits` is the number of upper bits of a code that pages store.
    """

    name: str
    mantissa_bits: int
    bias: int
    max_code: int
    nan_code: int
    max: float
    scale_from_e4m3: float
    has_unsigned_zero: bool = False
    inf_code: int | None = None
    torch_dtype: torch.dtype | None = None
    bits: int = 8

    @property
    def code_dtype(self) -> torch.dtype:
        """The dtype that stands for stored codes: uint8, or torch's uint6 or uint4."""
        return CODE_DTYPES[self.bits]

    @property
    def min_subnormal(self) -> float:
        """The difference between adjacent subnormal values, also the smallest positive value."""
        return float(2.0 ** (1 - self.bias - self.mantissa_bits))

    @property
    def error_unit(self) -> float:
        """512 / (largest rounding error), a power of two.

        The largest rounding error is half of the difference between the two largest values.
        """
        step = math.ldexp(0.5, math.frexp(self.max)[1] - self.mantissa_bits)
        return 1024.0 / max(step, self.min_subnormal)


FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        Format("fp8_e4m3", 3, 7, 0x7E, 0x7F, 448.0, 1.0, torch_dtype=torch.float8_e4m3fn),
        # The same bits have half the value, so scales are doubled. 448 / 2 = 224 is below 240.
        Format(
            "fp8_e4m3fnuz",
            3,
            8,
            0x7F,
            0x80,
            240.0,
            2.0,
            has_unsigned_zero=True,
            torch_dtype=torch.float8_e4m3fnuz,
        ),
        Format(
            "fp8_e5m2",
            2,
            15,
            0x7B,
            0x7F,
            57344.0,
            448.0 / 57344.0,
            inf_code=0x7C,
            torch_dtype=torch.float8_e5m2,
        ),
        Format("fp8_e3m4", 4, 3, 0x7F, 0x80, 31.0, 448.0 / 31.0, has_unsigned_zero=True),
        Format("fp8_e2m5", 5, 1, 0x7F, 0x80, 7.875, 448.0 / 7.875, has_unsigned_zero=True),
        Format("int8", 7, -6, 0x7F, 0x80, 127.0, 448.0 / 127.0, has_unsigned_zero=True),
        Format("int6", 5, -4, 0x7C, 0x80, 31.0, 448.0 / 31.0, has_unsigned_zero=True, bits=6),
        Format("int4", 3, -2, 0x70, 0x80, 7.0, 448.0 / 7.0, has_unsigned_zero=True, bits=4),
    )
}

# Default formats with dynamic and with static scales. Checkpoints have static scales for E4M3.
DEFAULT_DTYPE = "fp8_e3m4"
STATIC_DTYPE = "fp8_e4m3"

# The words of a plan, which are also the names of fields.
_ROTATED, _CENTERED = "rotated", "centered"
ALIASES = {"model": AUTO, "fp8": "fp8_e4m3", "fp8_e4m3fn": "fp8_e4m3"}


def parse_dtype(dtype: object, argument: str = "dtype") -> str:
    """Return the canonical name of a storage dtype: a key of `FORMATS`, or "auto" for "model".

    `dtype` is a name, an alias, or a torch dtype.

    Raises:
        ConfigError: `dtype` is not a storage dtype. The message calls it `argument`.
    """
    if isinstance(dtype, str):
        name = ALIASES.get(dtype, dtype)
        if name == AUTO or name in FORMATS:
            return name
    # Int8 is listed separately. It has no `torch_dtype`, because torch stores different bytes.
    names_by_dtype = {torch.int8: "int8", **{fmt.torch_dtype: fmt.name for fmt in FORMATS.values()}}
    if isinstance(dtype, torch.dtype) and dtype in names_by_dtype:
        return names_by_dtype[dtype]
    valid_names = ", ".join(map(repr, (*ALIASES, *FORMATS)))
    raise ConfigError(
        f"{argument}: expected one of {valid_names}, got {dtype!r}. Pass 'model' to store the "
        "model's dtype without quantization"
    )


@dataclass(frozen=True)
class SidePlan:
    """Storage plan of the keys or the values of a layer.

    Attributes:
        format: A key of `FORMATS`, or "auto" for the model's dtype.
        rotated: Whether a Hadamard transform over the head is applied before scaling.
        centered: Whether a center is subtracted first. Only for keys.
    """

    format: str
    rotated: bool = False
    centered: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", parse_dtype(self.format, "format"))
        for field in (_ROTATED, _CENTERED):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(
                    f"{field}: expected True or False, got {getattr(self, field)!r}. "
                    "SidePlan.parse('int8 rotated') parses text"
                )
        if self.is_auto and (self.rotated or self.centered):
            raise ConfigError(
                f"format: expected a quantized format for rotation or a center, got {self}. "
                "'model' stores values unchanged"
            )

    @property
    def is_auto(self) -> bool:
        """Whether values are stored unchanged, in the model's dtype."""
        return self.format == AUTO

    def find_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of stored values for a model's `dtype`."""
        return dtype if self.is_auto else FORMATS[self.format].code_dtype

    def __str__(self) -> str:
        words = ["model" if self.is_auto else self.format]
        words += [field for field in (_ROTATED, _CENTERED) if getattr(self, field)]
        return " ".join(words)

    @classmethod
    def parse(cls, text: str) -> "SidePlan":
        """Parse the `str` of a plan, such as "fp8_e2m5 rotated centered".

        Raises:
            ConfigError: The text has an unknown format or word.
        """
        words = text.split() if isinstance(text, str) else []
        if not words or set(words[1:]) - {_ROTATED, _CENTERED}:
            raise ConfigError(
                f"plan: expected a format, optionally followed by {_ROTATED!r} and {_CENTERED!r}, "
                f"got {text!r}. Write it as in SidePlan.parse('fp8_e2m5 rotated')"
            )
        return cls(words[0], _ROTATED in words[1:], _CENTERED in words[1:])


class LayerPlan(NamedTuple):
    """Storage plan of a layer."""

    k: SidePlan
    v: SidePlan

    @classmethod
    def parse(cls, k: str, v: str) -> "LayerPlan":
        """Parse the `str` of both plans. Raise ConfigError if one of them is invalid."""
        return cls(SidePlan.parse(k), SidePlan.parse(v))

    @classmethod
    def check(cls, plan: object, argument: str) -> "LayerPlan":
        """Return `plan` if it is a `LayerPlan` of two `SidePlan`s, otherwise raise ConfigError."""
        if isinstance(plan, cls) and all(isinstance(side, SidePlan) for side in plan):
            return plan
        raise ConfigError(
            f"{argument}: expected a LayerPlan of two SidePlans, got {plan!r}. "
            "LayerPlan.parse('fp8_e2m5 rotated', 'int8') parses text"
        )

    def __str__(self) -> str:
        return f"K {self.k}, V {self.v}"


def count_plans(plans: Mapping[int, LayerPlan]) -> dict[str, int]:
    """Return the number of layers with each plan, by its `str`, the most frequent first."""
    return dict(Counter(str(plans[index]) for index in sorted(plans)).most_common())


def summarize_plan(plans: Mapping[int, LayerPlan]) -> str:
    """Return the plans on one line, such as "28 x K int8, V int8; 2 x K model, V model"."""
    return "; ".join(list_counts(count_plans(plans)))


def list_counts(counts: Mapping[str, int]) -> list[str]:
    """Return texts such as "28 x K int8, V int8" for a result of `count_plans`."""
    return [f"{count} x {plan}" for plan, count in counts.items()]
