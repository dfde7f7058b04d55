"""Protection, the layers of a storage plan that keep 16 bits, and their effect."""

import sys
from dataclasses import dataclass, fields

from ..errors import ScaleError
from ..utils.text import format_value

_ADVICE = "Choose the plan again (hf_fp8kv.choose_plan)"


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
    def from_dict(cls, data: object, label: str) -> "Protection":
        """Return the protection of JSON values from `asdict`. Raise ScaleError if they are invalid.

        The message of the error starts with `label`.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(data, dict) or data.keys() != set(names):
            rule = f"an object with the entries {', '.join(names)}"
            raise ScaleError(f"{label}: expected {rule}, got {format_value(data)}. {_ADVICE}")
        sides = data["sides"]
        if not isinstance(sides, list) or not all(isinstance(side, str) for side in sides):
            rule = "a list of names"
            raise ScaleError(
                f"{label}.sides: expected {rule}, got {format_value(sides)}. {_ADVICE}"
            )
        for name in names[:-1]:
            value = data[name]
            # Compare before converting, because an integer may be too large for a float.
            if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
                rule = f"expected a finite number, got {format_value(value)}"
                raise ScaleError(f"{label}.{name}: {rule}. {_ADVICE}")
        kl, unprotected_kl, extra_bytes = (float(data[name]) for name in names[:-1])
        return cls(kl, unprotected_kl, extra_bytes, tuple(sides))

    def __str__(self) -> str:
        text = f"KL after a stored prompt {self.kl:.1e}"
        sides = f"{', '.join(self.sides)} in 16 bits, {self.extra_bytes:+.1%} bytes"
        protected = f", {self.unprotected_kl:.1e} without protection ({sides})"
        return text + protected * bool(self.sides)
