"""Put the size of a slot into vLLM's spec of a layer's cache."""

from collections.abc import Set
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch

from ..utils.warn_once import warn_once
from .dtypes import SCALE_BYTES


class Slot(NamedTuple):
    """The memory of one layer's tokens in vLLM."""

    num_bytes: int  # of a token and head
    block_factor: int  # a block has this multiple of the usual number of tokens


def set_slot(spec: Any, slot: Slot | None) -> Any:
    """Return `spec`, vLLM's `AttentionSpec`, with the slots of a layer.

    None means 8 bits for each value, and room for the dynamic scales of a slot, if any. A spec
    contains `CacheDType.torch_dtype`, int8 for dynamic scales, but no name of a dtype.
    """
    if slot is not None:
        block_size = spec.block_size * slot.block_factor
        return replace(spec, block_size=block_size, state_content_bytes=slot.num_bytes)
    if spec.dtype is not torch.int8 or spec.state_content_bytes is not None:
        return spec
    if spec.kv_quant_mode:  # the dtype is vLLM's own int8
        return spec
    return replace(spec, state_content_bytes=spec.head_size + spec.head_size_v + SCALE_BYTES)


@cache
def customize_backend(backend: Any, slot_bytes: int, all_bytes: Set[int]) -> Any:
    """Return the attention backend of a layer with slots of `slot_bytes`.

    It is a subclass, because vLLM passes no layer to `customize_spec`. `all_bytes` are the sizes of
    slots in all layers that need blocks of one size. Smaller slots then get blocks of more tokens,
    and sizes are rounded up to the smallest size times a power of two, as numbers of tokens are.
    """

    def round_up(num_bytes: int) -> int:
        return smallest << (-(-num_bytes // smallest) - 1).bit_length()

    smallest = min(all_bytes)
    slot = Slot(round_up(slot_bytes), round_up(max(all_bytes)) // round_up(slot_bytes))
    if slot_bytes > smallest:
        warn_once(
            f"plan: a layer takes {slot.num_bytes} bytes per token and head instead of "
            f"{slot_bytes}, because vLLM gives blocks of one size to layers with several windows. "
            "vLLM also keeps a block table for each layer, which takes time in each step"
        )
    return type(backend.__name__, (backend,), {"slot": slot, "__module__": backend.__module__})
