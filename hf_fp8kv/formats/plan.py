"""Plans: how K and V of a layer are stored, format, rotation and center."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ConfigError
from .formats import AUTO, parse_dtype

_ROTATED, _CENTERED = "rotated", "centered"


@dataclass(frozen=True)
class SidePlan:
    """How the keys of a layer are stored, or its values.

    Attributes:
        format: a key of `FORMATS`, or "auto".
        rotated: whether a Hadamard transform over the head comes before scaling.
        centered: whether a center is subtracted first; of keys only.
    """

    format: str
    rotated: bool = False
    centered: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", parse_dtype(self.format, "format"))
        for name in (_ROTATED, _CENTERED):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"{name}: expected True or False, got {getattr(self, name)!r}; "
                    "SidePlan.parse('int8 rotated') makes a plan of text"
                )
        if self.is_auto and (self.rotated or self.centered):
            raise ConfigError(
                "format 'auto' expected neither rotation nor a center, since it stores numbers as "
                f"they are, got {self}; choose an 8-bit format"
            )

    @property
    def is_auto(self) -> bool:
        """Whether numbers are stored as they are, in the model's dtype."""
        return self.format == AUTO

    def __str__(self) -> str:
        marks = [_ROTATED] * self.rotated + [_CENTERED] * self.centered
        return " ".join([self.format, *marks])

    @classmethod
    def parse(cls, text: str) -> "SidePlan":
        """Return the plan of which `text` is the `str`, such as "fp8_e2m5 rotated centered".

        Raises:
            ConfigError: an unknown format or word.
        """
        name, *marks = (isinstance(text, str) and text.split()) or [""]
        if not name or set(marks) - {_ROTATED, _CENTERED}:
            raise ConfigError(
                f"plan: expected a format, then {_ROTATED!r} or {_CENTERED!r} or both or neither, "
                f"got {text!r}; write it as in SidePlan.parse('fp8_e2m5 rotated centered')"
            )
        return cls(name, _ROTATED in marks, _CENTERED in marks)


class LayerPlan(NamedTuple):
    """How a layer is stored."""

    k: SidePlan
    v: SidePlan

    @classmethod
    def parse(cls, k: str, v: str) -> "LayerPlan":
        """Return the plan from both sides' `str`; raise ConfigError for others."""
        return cls(SidePlan.parse(k), SidePlan.parse(v))

    def check(self) -> None:
        """Raise ConfigError for sides that are no `SidePlan`, such as their `str`."""
        for name, side in zip("kv", self, strict=True):
            if not isinstance(side, SidePlan):
                raise ConfigError(
                    f"plan: expected a SidePlan for {name}, got {side!r}; "
                    "LayerPlan.parse('fp8_e2m5 rotated', 'int8') makes a plan of text"
                )

    def __str__(self) -> str:
        return f"K {self.k}, V {self.v}"


def count_plans(layers: Mapping[int, LayerPlan]) -> dict[str, int]:
    """Return how many layers have each plan, by its `str`, the most frequent first."""
    return dict(Counter(str(layers[index]) for index in sorted(layers)).most_common())


def summarize_plan(layers: Mapping[int, LayerPlan]) -> str:
    """Return the plans of layers in a line, such as "28 x K int8, V int8; 2 x K auto, V auto"."""
    return "; ".join(f"{count} x {plan}" for plan, count in count_plans(layers).items())
