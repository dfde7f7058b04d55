"""Find the positions beyond the windows, and the pairs of channels of K that RoPE turns together.

RoPE turns K, and therefore the center of K, with the position. It turns a pair of channels by an
angle. Both channels change, but the norm of the pair does not. So pairs are measured instead of
assumed. The text is read at two first positions, and the squares of a pair's channels change by
opposite amounts. This finds halves (Llama), neighbors (GPT-J, Cohere), partial rotation, layers
without RoPE, and the positions that an MLA model keeps in V.
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

# Fields of configs with the number of positions.
_LIMITS = (
    "max_position_embeddings", "n_positions", "max_target_positions",
    "max_encoder_position_embeddings", "max_decoder_position_embeddings",
)  # fmt: skip
# Pairs are measured at position 0, and at half of this or of the model's positions, if fewer.
_MEASURED = 2048
# The default of `max_position`, in windows.
_WINDOWS = 8
# The windows' positions as shares of the last position. Multiples of the golden ratio are spread
# evenly without a period, so no pair of channels turns by the same angle between all neighbors.
SPREAD = 8
_GOLDEN = (5**0.5 - 1) / 2
_PLACES = [n * _GOLDEN % 1 / (SPREAD * _GOLDEN % 1) for n in range(SPREAD, 0, -1)]
# Number of tokens on which pairs are measured.
TOKENS = 128
# Minimum relative change (RMS) of the squares of a rotated channel. 16-bit rounding through many
# layers changes the squares by about one hundredth.
_MIN_CHANGE = 0.1
# Maximum correlation of the changes of a pair's squares. It is -1 for a true pair.
_PAIRED = -0.8


@dataclass(frozen=True)
class Beyond:
    """Positions beyond the windows at which scales are tried."""

    reach: int  # the last position
    untried: str = ""  # reason why the model cannot be run there, or ""

    def spread(self, windows: Sequence[torch.Tensor], count: int = 0) -> list[Batch]:
        """Return windows at far positions, the farthest first. Windows without room are left out.

        With a `count`, windows are repeated at different positions until there are `count` batches.
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
    """Return the last position at which centers are tried.

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


def has_rope(model: PreTrainedModel) -> bool:
    """Return whether the config has parameters of RoPE, for all layers or for types of layers."""
    return bool(config_field(model.config.get_text_config(decoder=True), "rope_parameters"))


@dataclass(frozen=True)
class Partners:
    """The channel with which RoPE rotates each channel of a layer, `[D]`, int64, on the CPU.

    A channel without rotation is its own partner. None means that the partners are unknown, because
    the model takes no `position_ids`.
    """

    k: torch.Tensor | None = None
    v: torch.Tensor | None = None


def measure_partners(
    model: PreTrainedModel, window: torch.Tensor, layers: frozenset[int]
) -> dict[int, Partners]:
    """Measure the partners of every layer on the first `TOKENS` token ids of a window, `[T]`."""
    unknown = dict.fromkeys(layers, Partners())
    if not accepts(type(model), "position_ids") or model.config.is_encoder_decoder:
        return unknown
    room = min(find_limit(model), _MEASURED)
    ids = window[: min(TOKENS, max(room // 4, 2))]

    def record(first: int) -> dict[int, list[torch.Tensor]]:
        states: dict[int, list[torch.Tensor]] = {}
        observe(
            model, Batch((ids,), first), layers,
            lambda index, *pair: states.update({index: [x.double().cpu() for x in pair]}),
        )  # fmt: skip
        return states

    try:
        near, far = record(0), record(room // 2)
    except torch.OutOfMemoryError:
        raise
    except (ConfigError, RuntimeError) as error:  # raised by models that expect fixed positions
        logger.info("%s cannot be run at other positions: %s", type(model).__name__, error)
        return unknown
    return unknown | {
        index: Partners(match_channels(k, far[index][0]), match_channels(v, far[index][1]))
        for index, (k, v) in near.items()
    }


def match_channels(near: torch.Tensor, far: torch.Tensor) -> torch.Tensor:
    """Return each channel's partner, whose square changes by the opposite amount, or itself, `[D]`.

    `near` and `far` are K of the same tokens at two positions, `[N, H, D]`, float64.
    """
    if not near.shape[-1]:  # layers of latents without positions
        return torch.arange(0, device="cpu")
    before, after = (x.flatten(0, 1).square() for x in (near, far))
    change = after - before
    energy = change.square().sum(0)
    turns = energy > _MIN_CHANGE**2 * (before.square().sum(0) + after.square().sum(0))
    size = energy.sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    correlation = (change / size).T @ (change / size)
    best = correlation.argmin(0)
    alone = torch.arange(len(best), device=best.device)
    sure = turns & turns[best] & (correlation[best, alone] < _PAIRED) & (best[best] == alone)
    partner = torch.where(sure, best, alone)
    return _complete_pattern(partner)


def _complete_pattern(partner: torch.Tensor) -> torch.Tensor:
    """Add the pairs that turn too slowly to be measured, by the pattern of the measured pairs.

    Pairs are ordered by speed, the fastest first, so missing pairs follow the measured pairs.
    """
    alone = torch.arange(len(partner), device=partner.device)
    distance = (partner - alone)[partner > alone]
    if not len(distance):
        return partner
    step = int(distance.mode().values)
    first = int(alone[partner != alone].min())
    size = len(partner)
    if step == 1:  # neighbors, up to the last channel
        low = torch.arange(first, size - 1, 2, device=partner.device)
    else:  # two halves of a block of 2 * step channels
        low = torch.arange(first, min(first + step, size - step), device=partner.device)
    guess = alone.clone()
    guess[low], guess[low + step] = low + step, low
    measured = partner != alone
    # There are no further pairs if the measured pairs have a different pattern.
    return guess if torch.equal(guess[measured], partner[measured]) else partner
