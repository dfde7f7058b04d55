"""Put the size of a slot into vLLM's spec of a layer's cache."""

import logging
from dataclasses import replace
from typing import Any

import torch

from ..utils.warn_once import warn_once
from .dtypes import SCALE_BYTES

logger = logging.getLogger(__name__)


def set_slot_bytes(spec: Any, slot_bytes: int | None) -> Any:
    """Return `spec`, vLLM's `AttentionSpec`, with `slot_bytes` for each token and head.

    None means 8 bits for each value, and room for the dynamic scales of a slot, if any. A spec
    contains `CacheDType.torch_dtype`, int8 for dynamic scales, but no name of a dtype.
    """
    if slot_bytes is not None:
        return replace(spec, state_content_bytes=slot_bytes)
    if spec.dtype is not torch.int8 or spec.state_content_bytes is not None:
        return spec
    if spec.kv_quant_mode:  # the dtype is vLLM's own int8
        return spec
    return replace(spec, state_content_bytes=spec.head_size + spec.head_size_v + SCALE_BYTES)


def round_up_slot(layer_name: str, slot_bytes: int, default_bytes: int) -> int:
    """Return the size of a slot in a model whose layers have several windows. Log its cost.

    vLLM gives such layers blocks of one size. If this size is a multiple of a layer's block, the
    layer's blocks get more tokens, otherwise unused bytes. Numbers of tokens are powers of two.
    """
    ratio = -(-slot_bytes // default_bytes)
    rounded_bytes = default_bytes << (ratio - 1).bit_length()
    warn_once(
        logger,
        f"plan: {layer_name} takes {rounded_bytes} bytes per token and head instead of "
        f"{slot_bytes}, because vLLM gives blocks of one size to layers with several windows. vLLM "
        "also keeps a block table for each layer, which takes time in each step",
    )
    return rounded_bytes


def customize_backend(backend: Any, slot_bytes: int) -> Any:
    """Return the attention backend of a layer whose slots have this size.

    It is a subclass, because vLLM passes no layer to `customize_spec`.
    """
    names = {"slot_bytes": slot_bytes, "__module__": backend.__module__}
    return type(backend.__name__, (backend,), names)
