"""Check arguments."""

from ..errors import ConfigError
from .text import format_value


def check_count(
    argument: str, value: object, minimum: int = 1, expected: str = "a whole number"
) -> None:
    """Raise ConfigError unless `value` is a whole number of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(
            f"{argument}: expected {expected} of at least {minimum}, got {format_value(value)}. "
            "Leave it out for the default"
        )
