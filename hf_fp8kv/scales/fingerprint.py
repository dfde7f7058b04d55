"""Comparison of a model's weights with the fingerprint that its static scales carry.

K and V move when a model is trained. Older scales then saturate, or are coarser than necessary.
"""

import logging
from collections.abc import Mapping

import torch

from ..utils.digests import fingerprint_weights
from ..utils.text import format_list
from ..utils.warn_once import warn_once

logger = logging.getLogger(__name__)

_STALE = (
    "static scales (%s) were made for other weights than %s has now: the attention of layers %s "
    "differs. %s. Calibrate again (hf_fp8kv.calibrate), or use dynamic scales (scales=None); "
    "scales.made_for(model) tells at any time"
)
_HARM = "What its K and V have grown to since saturates"
_HARM_OF_PLANS = "Nothing saturates, but their plan and centers may suit it no longer"


def compare_weights(model: torch.nn.Module, fingerprint: Mapping[int, str]) -> list[int] | None:
    """Return the layers whose attention has other weights than a fingerprint says.

    None means that no layer has both.
    """
    found = fingerprint_weights(model) if fingerprint else {}
    both = sorted(found.keys() & fingerprint.keys())
    return [index for index in both if found[index] != fingerprint[index]] if both else None


def warn_if_stale(model: torch.nn.Module, scales: object) -> None:
    """Warn once if static scales carry the fingerprint of other weights than the model has."""
    if other := compare_weights(model, getattr(scales, "fingerprint", {})):
        origin, kind = getattr(scales, "origin", ""), type(model).__name__
        harm = _HARM_OF_PLANS if getattr(scales, "is_dynamic", False) else _HARM
        warn_once(logger, _STALE % (origin, kind, format_list(other), harm))
