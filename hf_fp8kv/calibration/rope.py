"""Find far positions for windows, and the pairs of channels of K that RoPE rotates together.

RoPE rotates K, and therefore the center of K, with the position. It rotates a pair of channels by
an angle, which changes both channels, but not the norm of the pair. Models pair channels in
different ways, so pairs are measured: the text is read from two first positions, and the squares
of a pair's channels change by opposite amounts. This finds halves (Llama), neighbors (GPT-J,
Cohere), partial rotation, layers without RoPE, and the RoPE part that an MLA model keeps in V.
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
_POSITION_FIELDS = (
    "max_position_embeddings", "n_positions", "max_target_positions",
    "max_encoder_position_embeddings", "max_decoder_position_embeddings",
)  # fmt: skip
# Pairs are measured at position 0, and at half of this or of the model's positions, if fewer.
_MEASURED_POSITIONS = 2048
# The default of `max_position`, in windows.
_WINDOWS = 8
# The positions of windows, as fractions of the last position. Multiples of the golden ratio are
# spread evenly without a period, so no pair rotates by the same angle between all neighbors.
FAR_COUNT = 8
_GOLDEN = (5**0.5 - 1) / 2
_FRACTIONS = [n * _GOLDEN % 1 / (FAR_COUNT * _GOLDEN % 1) for n in range(FAR_COUNT, 0, -1)]
# Number of tokens on which pairs are measured.
TOKENS = 128
# Minimum relative change (RMS) of the squares of a rotated channel. 16-bit rounding through many
# layers changes the squares by about one hundredth.
_MIN_CHANGE = 0.1
# Maximum correlation of the changes of a pair's squares. It is -1 for a true pair.
_MAX_CORRELATION = -0.8


@dataclass(frozen=True)
class FarPositions:
    """Positions beyond the windows, at which centers and scales are tried."""

    last: int  # the farthest position
    skip_reason: str = ""  # why the model cannot be run there, or ""

    def place(self, windows: Sequence[torch.Tensor], count: int = 0) -> list[Batch]:
        """Return windows at far positions, the farthest first, without windows that are too long.

        With a `count`, windows are repeated at different positions until there are `count` batches.
        """
        shorter = [w for w in windows if len(w) < self.last and not self.skip_reason]
        pairs = islice(zip(cycle(shorter), cycle(_FRACTIONS), strict=False), count or len(shorter))
        return [Batch((w,), max(1, round(part * (self.last - len(w))))) for w, part in pairs]


def check_count(name: str, value: object, minimum: int = 1) -> None:
    """Raise ConfigError for an argument that is not a whole number of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(
            f"{name}: expected a whole number of at least {minimum}, got {format_value(value)}"
        )


def find_last(model: PreTrainedModel, max_length: int, max_position: int | None) -> int:
    """Return the last position at which centers and scales are tried.

    Raises:
        ConfigError: An argument is invalid, or the model has fewer positions than `max_position`.
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
    """Return the maximum position count of the config, or `sys.maxsize` if it has none."""
    config = model.config.get_text_config(decoder=True)
    values = (config_field(config, name) for name in _POSITION_FIELDS)
    limits = (int(n) for n in values if isinstance(n, int | float) and n > 1)
    return min(limits, default=sys.maxsize)


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
    positions = min(find_limit(model), _MEASURED_POSITIONS)
    ids = window[: min(TOKENS, max(positions // 4, 2))]

    def record(first: int) -> dict[int, list[torch.Tensor]]:
        states: dict[int, list[torch.Tensor]] = {}
        observe(
            model, Batch((ids,), first), layers,
            lambda index, *pair: states.update({index: [x.double().cpu() for x in pair]}),
        )  # fmt: skip
        return states

    try:
        near, far = record(0), record(positions // 2)
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

    `near` and `far` are K, or V, of the same tokens at two positions, `[N, H, D]`, float64.
    """
    if not near.shape[-1]:  # latents without a RoPE part
        return torch.arange(0, device="cpu")
    before, after = (x.flatten(0, 1).square() for x in (near, far))
    change = after - before
    energy = change.square().sum(0)
    rotates = energy > _MIN_CHANGE**2 * (before.square().sum(0) + after.square().sum(0))
    norm = energy.sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    correlation = (change / norm).T @ (change / norm)
    best = correlation.argmin(0)
    channel = torch.arange(len(best), device=best.device)
    is_pair = rotates & rotates[best] & (best[best] == channel)
    is_pair &= correlation[best, channel] < _MAX_CORRELATION
    return _complete_pattern(torch.where(is_pair, best, channel))


def _complete_pattern(partner: torch.Tensor) -> torch.Tensor:
    """Add the pairs that rotate too slowly to be measured, by the pattern of the measured pairs.

    Pairs are ordered by speed, the fastest first, so missing pairs follow the measured pairs.
    """
    channel = torch.arange(len(partner), device=partner.device)
    distance = (partner - channel)[partner > channel]
    if not len(distance):
        return partner
    step = int(distance.mode().values)
    first = int(channel[partner != channel].min())
    size = len(partner)
    if step == 1:  # neighbors, up to the last channel
        low = torch.arange(first, size - 1, 2, device=partner.device)
    else:  # two halves of a block of 2 * step channels
        low = torch.arange(first, min(first + step, size - step), device=partner.device)
    pattern = channel.clone()
    pattern[low], pattern[low + step] = low + step, low
    measured = partner != channel
    # Measured pairs of a different pattern get no further pairs.
    return pattern if torch.equal(pattern[measured], partner[measured]) else partner
