"""Protection, the layers of a storage plan that keep 16 bits, and their effect."""

from collections.abc import Mapping
from dataclasses import dataclass
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
        return cls(
            float(data["kl"]),
            float(data["unprotected_kl"]),
            float(data["extra_bytes"]),
            tuple(map(str, data["sides"])),
        )

    def __str__(self) -> str:
        text = f"KL after a stored prompt {self.kl:.1e}"
        sides = f"{', '.join(self.sides)} in 16 bits, {self.extra_bytes:+.1%} bytes"
        protected = f", {self.unprotected_kl:.1e} without protection ({sides})"
        return text + protected * bool(self.sides)
