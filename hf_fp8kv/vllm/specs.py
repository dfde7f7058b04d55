"""Put the size of a slot into vLLM's spec of a layer's cache."""

from collections.abc import Set
from dataclasses import replace
from functools import cache
from typing import Any

from ..utils.warn_once import warn_once


@cache
def customize_backend(backend: Any, slot_bytes: int, all_bytes: Set[int]) -> Any:
    """Return the attention backend of a layer with slots of `slot_bytes`.

    It is a subclass, because vLLM passes no layer to `customize_spec`. `all_bytes` are the sizes of
    slots in all layers that need blocks of one size. Smaller slots then get blocks of more tokens,
    and sizes are rounded up to the smallest size times a power of two, as numbers of tokens are.

    The attribute `slot` of the subclass has the bytes of a token and head, and the factor by which
    a block has more tokens than usual.
    """

    min_bytes = min(all_bytes)

    def round_up(num_bytes: int) -> int:
        """Return the smallest product of `min_bytes` and a power of two that is large enough."""
        return min_bytes << (-(-num_bytes // min_bytes) - 1).bit_length()

    def customize_spec(spec: Any) -> Any:
        spec = backend.customize_spec(spec)
        block_size = spec.block_size * block_factor
        return replace(spec, block_size=block_size, state_content_bytes=num_bytes)

    num_bytes = round_up(slot_bytes)
    block_factor = round_up(max(all_bytes)) // num_bytes
    if slot_bytes > min_bytes:
        warn_once(
            f"plan: a layer takes {num_bytes} bytes per token and head instead of {slot_bytes}, "
            "because vLLM gives blocks of one size to layers with several windows. vLLM also keeps "
            "a block table for each layer, which takes time in each step"
        )
    attributes = {
        "slot": (num_bytes, block_factor),
        "customize_spec": staticmethod(customize_spec),
        "__module__": backend.__module__,
    }
    return type(backend.__name__, (backend,), attributes)
