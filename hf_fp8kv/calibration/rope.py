"""Choose far positions for windows, and find the pairs of channels that RoPE rotates together.

RoPE rotates K, and therefore the center of K, with the position. It rotates a pair of channels by
an angle, which changes both channels, but not the norm of the pair. Models pair channels in
different ways, so pairs are measured. The model reads a text twice, from two start positions, and
the squares of a pair's channels change by opposite amounts. This finds halves (Llama), neighbors
(GPT-J, Cohere), partial rotation, layers without RoPE, and the RoPE part that MLA keeps in V.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from transformers import PreTrainedModel

from ..errors import ConfigError
from ..modeling.model_support import accepts_argument, config_field
from ..utils.arguments import check_count
from .observe import Batch, observe

logger = logging.getLogger(__name__)

# Config fields that hold the number of positions.
_POSITION_FIELDS = (
    "max_position_embeddings", "n_positions", "max_target_positions",
    "max_encoder_position_embeddings", "max_decoder_position_embeddings",
)  # fmt: skip
# Pairs are measured at positions 0 and n / 2. n is the model's number of positions, at most this.
_MAX_PAIR_POSITIONS = 2048
_DEFAULT_POSITION_FACTOR = 8  # default of `max_position`, as a multiple of `max_length`
NUM_FAR_POSITIONS = 8
# Far positions as fractions of the last position. Multiples of the golden ratio are spread
# evenly without a period, so no pair rotates by the same angle between all adjacent positions.
_GOLDEN = (5**0.5 - 1) / 2
_MULTIPLES = [n * _GOLDEN % 1 for n in range(NUM_FAR_POSITIONS, 0, -1)]
_FRACTIONS = [multiple / _MULTIPLES[0] for multiple in _MULTIPLES]
_PAIR_TOKENS = 128  # number of tokens on which pairs are measured
# Minimum relative change (RMS) of the squares of a rotated channel. 16-bit rounding through many
# layers changes the squares by about 1 %.
_MIN_CHANGE = 0.1
# Maximum correlation of the changes of a pair's squares. It is -1 for a true pair.
_MAX_CORRELATION = -0.8


@dataclass(frozen=True)
class FarPositions:
    """Positions after the windows, at which centers and scales are tested."""

    last_position: int  # the farthest position
    skip_reason: str = ""  # why the model cannot be run there, or "" if it can

    def place(self, windows: Sequence[torch.Tensor], num_batches: int = 0) -> list[Batch]:
        """Return windows at far positions, the farthest first. Omit windows that are too long.

        With `num_batches`, windows are repeated at different positions to give this number.
        """
        windows = [w for w in windows if len(w) < self.last_position and not self.skip_reason]
        placements = zip(cycle(windows), cycle(_FRACTIONS), strict=False)
        placed = islice(placements, num_batches or len(windows))
        return [Batch((w,), max(1, round(x * (self.last_position - len(w))))) for w, x in placed]


def get_last_position(model: PreTrainedModel, max_length: int, max_position: int | None) -> int:
    """Return the last position at which centers and scales are tested.

    Raises:
        ConfigError: An argument is invalid, or the model has fewer positions than `max_position`.
    """
    check_count("max_length", max_length)
    limit = find_max_positions(model)
    if max_position is None:
        return min(_DEFAULT_POSITION_FACTOR * max_length, limit)
    check_count("max_position", max_position)
    if max_position > limit:
        raise ConfigError(
            f"max_position: expected at most {limit}, the positions of {type(model).__name__}, got "
            f"{max_position}. Omit max_position, or change the model's config"
        )
    return max_position


def find_max_positions(model: PreTrainedModel) -> int:
    """Return the maximum number of positions in the config, or `sys.maxsize` if it has none."""
    config = model.config.get_text_config(decoder=True)
    values = (config_field(config, name) for name in _POSITION_FIELDS)
    limits = (int(n) for n in values if isinstance(n, int | float) and n > 1)
    return min(limits, default=sys.maxsize)


def has_rope(model: PreTrainedModel) -> bool:
    """Return whether the config has RoPE parameters, for all layers or for each layer type."""
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
    """Measure the partners of every layer on the first `_PAIR_TOKENS` tokens of a window, `[T]`."""
    unknown_partners = dict.fromkeys(layers, Partners())
    if not accepts_argument(type(model), "position_ids") or model.config.is_encoder_decoder:
        return unknown_partners
    num_positions = min(find_max_positions(model), _MAX_PAIR_POSITIONS)
    ids = window[: min(_PAIR_TOKENS, max(num_positions // 4, 2))]

    def record_states(position: int) -> dict[int, list[torch.Tensor]]:
        states: dict[int, list[torch.Tensor]] = {}
        observe(
            model, Batch((ids,), position), layers,
            lambda index, *kv: states.update({index: [x.double().cpu() for x in kv]}),
        )  # fmt: skip
        return states

    try:
        near_states, far_states = record_states(0), record_states(num_positions // 2)
    except torch.OutOfMemoryError:
        raise
    except (ConfigError, RuntimeError) as error:  # raised by models that expect fixed positions
        logger.info("%s cannot be run at other positions: %s", type(model).__name__, error)
        return unknown_partners
    return unknown_partners | {
        index: Partners(*map(match_channels, states, far_states[index]))
        for index, states in near_states.items()
    }


def match_channels(near_states: torch.Tensor, far_states: torch.Tensor) -> torch.Tensor:
    """Return each channel's partner, whose square changes oppositely, or the channel itself, `[D]`.

    The states are K or V of the same tokens at two positions, each `[N, H, D]`, float64.
    """
    if not near_states.shape[-1]:  # latents without a RoPE part
        return torch.arange(0, device="cpu")
    near_squares, far_squares = (x.flatten(0, 1).square() for x in (near_states, far_states))
    change = far_squares - near_squares
    energy = change.square().sum(0)
    is_rotated = energy > _MIN_CHANGE**2 * (near_squares.square() + far_squares.square()).sum(0)
    norm = energy.sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    correlation = (change / norm).T @ (change / norm)
    candidates = correlation.argmin(0)
    channels = torch.arange(len(candidates), device=candidates.device)
    is_pair = is_rotated & is_rotated[candidates] & (candidates[candidates] == channels)
    is_pair &= correlation[candidates, channels] < _MAX_CORRELATION
    return _complete_pattern(torch.where(is_pair, candidates, channels))


def _complete_pattern(partners: torch.Tensor) -> torch.Tensor:
    """Add the pairs that rotate too slowly to be measured, in the pattern of the measured pairs.

    Pairs are ordered by speed, the fastest first, so missing pairs follow the measured pairs.
    """
    channels = torch.arange(len(partners), device=partners.device)
    distances = (partners - channels)[partners > channels]
    if not len(distances):
        return partners
    distance, size = int(distances.mode().values), len(partners)
    is_measured = partners != channels
    start = int(channels[is_measured].min())
    if distance == 1:  # neighbors, up to the last channel
        lower = torch.arange(start, size - 1, 2, device=partners.device)
    else:  # two halves of a block of 2 * distance channels
        lower = torch.arange(start, min(start + distance, size - distance), device=partners.device)
    pattern = channels.clone()
    pattern[lower], pattern[lower + distance] = lower + distance, lower
    # Measured pairs that do not fit the pattern get no further pairs.
    return pattern if torch.equal(pattern[is_measured], partners[is_measured]) else partners
