"""vLLM's description of a layer's cache, with our bytes."""

from dataclasses import replace
from typing import Any

import torch

from .dtypes import SCALE_BYTES


def customize(spec: Any) -> Any:
    """Return an `AttentionSpec` in which a slot has room for its scales, if it has some.

    A spec knows no name of a dtype; `CacheDType.torch_dtype` is what tells.
    """
    if spec.dtype is not torch.int8 or spec.state_content_bytes is not None:
        return spec
    if spec.kv_quant_mode:  # vLLM's own int8
        return spec
    return replace(spec, state_content_bytes=spec.head_size + spec.head_size_v + SCALE_BYTES)
