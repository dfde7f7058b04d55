"""Protection, the layers of a storage plan that keep 16 bits, and their effect."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Protection:
    """The sides that keep 16 bits, and the loss with and without them after a stored prompt.

    Losses are mean KL divergences from the unquantized cache, in nats, on random tokens.
    """

    kl: float  # loss with the plan
    unprotected_kl: float  # loss with the same plan, if no layer is protected
    extra_bytes: float  # share of bytes that protection adds to a cache of 4,096 tokens
    sides: tuple[str, ...] = ()  # protected sides, such as "K of layer 0", in the order of choice

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Protection":
        """Return the protection of JSON values from `asdict`. Invalid values raise any error."""
        protection = cls(**data)
        numbers = (protection.kl, protection.unprotected_kl, protection.extra_bytes)
        has_numbers = all(
            type(number) in (int, float) and math.isfinite(number) for number in numbers
        )
        sides = data["sides"]
        has_names = type(sides) is list and all(type(side) is str for side in sides)
        if not has_numbers or not has_names:
            raise ValueError(f"protection: expected finite numbers and names, got {data}")
        return replace(protection, sides=tuple(sides))

    def __str__(self) -> str:
        text = f"KL after a stored prompt {self.kl:.1e}"
        if not self.sides:
            return text
        return (
            f"{text}, {self.unprotected_kl:.1e} without protection ({', '.join(self.sides)} in "
            f"16 bits, {self.extra_bytes:+.1%} bytes)"
        )
