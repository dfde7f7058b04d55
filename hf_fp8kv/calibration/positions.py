"""Positions beyond the windows, where centers of K must hold, too.

RoPE turns K with the position, so the mean of K over the first thousand positions is not that of
the next thousands: in pairs of channels that turn slowly it is large, and points elsewhere there.
What is chosen inside the windows is therefore tried with the windows moved to other positions.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from transformers import PreTrainedModel

from ..errors import ConfigError
from ..modeling.model_support import config_field
from ..utils.text import format_value
from .observe import Batch

# What configs call the number of positions.
_LIMITS = (
    "max_position_embeddings", "n_positions", "max_target_positions",
    "max_encoder_position_embeddings", "max_decoder_position_embeddings",
)  # fmt: skip
# Where nothing else is asked for: so many windows long.
_WINDOWS = 8
# The windows' places as parts of the way to the last one. Multiples of the golden ratio are spread
# evenly without a period, so no pair of channels turns by the same angle from each to the next.
SPREAD = 8
_GOLDEN = (5**0.5 - 1) / 2
_PLACES = [n * _GOLDEN % 1 / (SPREAD * _GOLDEN % 1) for n in range(SPREAD, 0, -1)]


@dataclass(frozen=True)
class Beyond:
    """Positions beyond the windows at which scales are tried."""

    reach: int  # up to here
    untried: str = ""  # why the model cannot be run there, if it cannot

    def spread(self, windows: Sequence[torch.Tensor], count: int = 0) -> list[Batch]:
        """Return windows at other positions than their own, the farthest first.

        `count` repeats them, at other places; 0: each once. Windows that there is no room for are
        left out.
        """
        shorter = [w for w in windows if len(w) < self.reach and not self.untried]
        pairs = islice(zip(cycle(shorter), cycle(_PLACES), strict=False), count or len(shorter))
        return [Batch((w,), max(1, round(place * (self.reach - len(w))))) for w, place in pairs]


def check_count(name: str, value: object) -> None:
    """Raise ConfigError for an argument that is not a whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}: expected a whole number above 0, got {format_value(value)}")


def limit_length(model: PreTrainedModel, max_length: int) -> int:
    """Return `max_length`, or less where the model has fewer positions."""
    check_count("max_length", max_length)
    return min([max_length, *_find_limits(model)])


def find_reach(model: PreTrainedModel, max_length: int, max_position: int | None) -> int:
    """Return up to which position centers are tried; raise ConfigError for more than there are."""
    limits = _find_limits(model)
    if max_position is None:
        return min([_WINDOWS * limit_length(model, max_length), *limits])
    check_count("max_position", max_position)
    if limits and max_position > min(limits):
        raise ConfigError(
            f"max_position: expected at most {min(limits)}, which is what {type(model).__name__} "
            f"has positions for, got {max_position}; leave it out, or change the model's config"
        )
    return max_position


def find_limit(model: PreTrainedModel) -> int:
    """Return how many positions the model has, as far as its config says."""
    return min(_find_limits(model), default=sys.maxsize)


def find_trained(model: PreTrainedModel) -> int:
    """Return how many positions the model was trained for, before any scaling of RoPE."""
    ropes = _find_ropes(model)
    original = [r.get("original_max_position_embeddings") for r in ropes]
    known = [int(n) for n in original if isinstance(n, int | float) and n > 0]
    return min([*known, *_find_limits(model)], default=2048)


def turns_keys(model: PreTrainedModel) -> bool:
    """Return whether the model's config speaks of RoPE."""
    return bool(_find_ropes(model))


def _find_limits(model: PreTrainedModel) -> list[int]:
    config = model.config.get_text_config(decoder=True)
    limits = [config_field(config, name) for name in _LIMITS]
    return [int(n) for n in limits if isinstance(n, int | float) and n > 1]


def _find_ropes(model: PreTrainedModel) -> list[dict[str, object]]:
    """Return the parameters of RoPE; some models have one for each type of layer."""
    rope = config_field(model.config.get_text_config(decoder=True), "rope_parameters")
    ropes = [rope, *rope.values()] if isinstance(rope, dict) else []
    return [r for r in ropes if isinstance(r, dict) and r]
