"""RoPE: the positions beyond the windows, and the pairs of channels of K that it turns together.

RoPE turns K, and with it the center of K, with the position. It turns a pair of channels by an
angle: each of the two changes, and the norm of the pair does not. So pairs are measured instead of
assumed: the text is run at two first positions, and the pairs are those whose changes of the
squares cancel. It finds halves (Llama), neighbours (GPT-J, Cohere), partial rotation, layers
without any, and the positions that an MLA model keeps in V.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from transformers import PreTrainedModel

from ..errors import ConfigError
from ..modeling.model_support import accepts, config_field
from ..utils.text import format_value
from .observe import Batch, observe

logger = logging.getLogger(__name__)

# What configs call the number of positions.
_LIMITS = (
    "max_position_embeddings", "n_positions", "max_target_positions",
    "max_encoder_position_embeddings", "max_decoder_position_embeddings",
)  # fmt: skip
# Pairs are measured at 0 and half of this, or half of the model's positions if these are fewer.
_MEASURED = 2048
# The default of `max_position`, in windows.
_WINDOWS = 8
# The windows' places as parts of the way to the last one. Multiples of the golden ratio are spread
# evenly without a period, so no pair of channels turns by the same angle from each to the next.
SPREAD = 8
_GOLDEN = (5**0.5 - 1) / 2
_PLACES = [n * _GOLDEN % 1 / (SPREAD * _GOLDEN % 1) for n in range(SPREAD, 0, -1)]
# Tokens that pairs are measured on.
TOKENS = 128
# The share by which a channel's squares must change (RMS) before it counts as rotated: 16-bit
# rounding through many layers changes them by about one hundredth.
_MOVED = 0.1
# The correlation of the changes of the two squares; of a true pair it is -1.
_CANCELLED = -0.8


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


def find_reach(model: PreTrainedModel, max_length: int, max_position: int | None) -> int:
    """Return up to which position centers are tried.

    Raises:
        ConfigError: The model has fewer positions than `max_position`.
    """
    check_count("max_length", max_length)
    limit = find_limit(model)
    if max_position is None:
        return min(_WINDOWS * max_length, limit)
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
    return min(
        [int(n) for n in limits if isinstance(n, int | float) and n > 1], default=sys.maxsize
    )


def find_ropes(model: PreTrainedModel) -> list[dict[str, object]]:
    """Return the parameters of RoPE in a config, in some models for each type of layer."""
    rope = config_field(model.config.get_text_config(decoder=True), "rope_parameters")
    ropes = [rope, *rope.values()] if isinstance(rope, dict) else []
    return [r for r in ropes if isinstance(r, dict) and r]


@dataclass(frozen=True)
class Partners:
    """For each channel of a layer the one it is rotated with, or itself: `[D]`, int64, on the CPU.

    None: not known, since the model takes no `position_ids`.
    """

    k: torch.Tensor | None = None
    v: torch.Tensor | None = None


def measure_partners(
    model: PreTrainedModel, window: torch.Tensor, layers: frozenset[int]
) -> dict[int, Partners]:
    """Return the partners of every layer, from the first `TOKENS` of the token ids `[T]`."""
    unknown = dict.fromkeys(layers, Partners())
    if not accepts(type(model), "position_ids") or model.config.is_encoder_decoder:
        return unknown
    room = min(find_limit(model), _MEASURED)
    ids = window[: min(TOKENS, max(room // 4, 2))]

    def record(first: int) -> dict[int, list[torch.Tensor]]:
        found: dict[int, list[torch.Tensor]] = {}
        observe(
            model, Batch((ids,), first), layers,
            lambda index, *pair: found.update({index: [x.double().cpu() for x in pair]}),
        )  # fmt: skip
        return found

    try:
        here, there = record(0), record(room // 2)
    except torch.OutOfMemoryError:
        raise
    except (ConfigError, RuntimeError) as error:  # it does not expect such positions
        logger.info("%s cannot be run at other positions: %s", type(model).__name__, error)
        return unknown
    return unknown | {
        index: Partners(match_channels(k, there[index][0]), match_channels(v, there[index][1]))
        for index, (k, v) in here.items()
    }


def match_channels(here: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Return for each channel the one whose square changes against its own, or itself: `[D]`.

    `here` and `there` are K of the same tokens at two positions, `[N, H, D]`, float64.
    """
    if not here.shape[-1]:  # layers of latents without positions
        return torch.arange(0, device="cpu")
    before, after = (x.flatten(0, 1).square() for x in (here, there))
    change = after - before
    energy = change.square().sum(0)
    turns = energy > _MOVED**2 * (before.square().sum(0) + after.square().sum(0))
    size = energy.sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    correlation = (change / size).T @ (change / size)
    best = correlation.argmin(0)
    alone = torch.arange(len(best), device=best.device)
    sure = turns & turns[best] & (correlation[best, alone] < _CANCELLED) & (best[best] == alone)
    partner = torch.where(sure, best, alone)
    return _complete_pattern(partner)


def _complete_pattern(partner: torch.Tensor) -> torch.Tensor:
    """Add the pairs that turn too slowly to be seen, by the pattern of the others.

    The pairs start with the fastest one, so what is missing comes after those that were seen.
    """
    alone = torch.arange(len(partner), device=partner.device)
    distance = (partner - alone)[partner > alone]
    if not len(distance):
        return partner
    step = int(distance.mode().values)
    first = int(alone[partner != alone].min())
    size = len(partner)
    if step == 1:  # neighbours, up to the last channel
        low = torch.arange(first, size - 1, 2, device=partner.device)
    else:  # two halves of a block of 2 * step channels
        low = torch.arange(first, min(first + step, size - step), device=partner.device)
    guess = alone.clone()
    guess[low], guess[low + step] = low + step, low
    known = partner != alone
    # In another pattern, what was seen is all that is known.
    return guess if torch.equal(guess[known], partner[known]) else partner
