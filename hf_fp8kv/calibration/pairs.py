"""Pairs of channels of K that a model rotates together (RoPE), measured instead of assumed.

RoPE turns a pair of channels by an angle that depends on the position: each of the two changes, and
the norm of the pair does not. So the text is run at two first positions, and the pairs are those
whose changes of the squares cancel. It finds halves (Llama), neighbours (GPT-J, Cohere), partial
rotation, layers without any, and the positions that an MLA model keeps in V.
"""

import logging
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..errors import ConfigError
from ..modeling.model_support import accepts
from .observe import Batch, observe
from .positions import find_trained

logger = logging.getLogger(__name__)

TOKENS = 128
# The share by which a channel's squares must change (RMS) before it counts as rotated: 16-bit
# rounding through many layers changes them by about one hundredth.
_MOVED = 0.1
# The correlation of the changes of the two squares; of a true pair it is -1.
_CANCELLED = -0.8


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
    room = find_trained(model)
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
    moved = energy > _MOVED**2 * (before.square().sum(0) + after.square().sum(0))
    size = energy.sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    correlation = (change / size).T @ (change / size)
    best = correlation.argmin(0)
    alone = torch.arange(len(best), device=best.device)
    sure = moved & moved[best] & (correlation[best, alone] < _CANCELLED) & (best[best] == alone)
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
    if (guess[known] != partner[known]).any():
        return partner  # another pattern: what was seen is all that is known
    return guess
