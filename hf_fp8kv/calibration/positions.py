"""Positions beyond the windows: RoPE turns K, and with it the center of K, with the position."""

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
_UNLIMITED = sys.maxsize
# Assumed if a config has no limit.
_TRAINED = 2048
# The default of `max_position`, in windows.
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


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raise ConfigError for an argument that is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(
            f"{name}: expected a whole number of at least {least}, got {format_value(value)}"
        )


def limit_length(model: PreTrainedModel, max_length: int) -> int:
    """Return `max_length`, or the number of positions of the model if that is smaller."""
    check_count("max_length", max_length)
    return min(max_length, find_limit(model))


def find_reach(model: PreTrainedModel, max_length: int, max_position: int | None) -> int:
    """Return up to which position centers are tried.

    Raises:
        ConfigError: The model has fewer positions than `max_position`.
    """
    limit = find_limit(model)
    if max_position is None:
        return min(_WINDOWS * limit_length(model, max_length), limit)
    check_count("max_position", max_position)
    if max_position > limit:
        raise ConfigError(
            f"max_position: expected at most {limit}, the positions of {type(model).__name__}, got "
            f"{max_position}. Leave it out, or change the model's config"
        )
    return max_position


def find_limit(model: PreTrainedModel) -> int:
    """Return the number of positions of the model, as far as its config limits it."""
    config = model.config.get_text_config(decoder=True)
    limits = [config_field(config, name) for name in _LIMITS]
    return min([int(n) for n in limits if isinstance(n, int | float) and n > 1], default=_UNLIMITED)


def find_trained(model: PreTrainedModel) -> int:
    """Return the number of positions in training, before any scaling of RoPE."""
    original = [r.get("original_max_position_embeddings") for r in _find_ropes(model)]
    known = [int(n) for n in original if isinstance(n, int | float) and n > 0]
    trained = min([*known, find_limit(model)])
    return _TRAINED if trained == _UNLIMITED else trained


def turns_keys(model: PreTrainedModel) -> bool:
    """Return whether the model's config speaks of RoPE."""
    return bool(_find_ropes(model))


def _find_ropes(model: PreTrainedModel) -> list[dict[str, object]]:
    """Return the parameters of RoPE; some models have one for each type of layer."""
    rope = config_field(model.config.get_text_config(decoder=True), "rope_parameters")
    ropes = [rope, *rope.values()] if isinstance(rope, dict) else []
    return [r for r in ropes if isinstance(r, dict) and r]
