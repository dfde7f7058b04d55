"""Put the size of a slot with scales into vLLM's spec of a layer's cache."""

from dataclasses import replace
from typing import Any

import torch

from .dtypes import SCALE_BYTES


def add_scale_bytes(spec: Any) -> Any:
    """Return `spec`, vLLM's `AttentionSpec`, with room for the dynamic scales of a slot, if any.

    A spec contains `CacheDType.torch_dtype`, int8 for dynamic scales, but no name of a dtype.
    """
    if spec.dtype is not torch.int8 or spec.state_content_bytes is not None:
        return spec
    if spec.kv_quant_mode:  # the dtype is vLLM's own int8
        return spec
    return replace(spec, state_content_bytes=spec.head_size + spec.head_size_v + SCALE_BYTES)
