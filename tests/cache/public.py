"""Calls that a model makes to a cache, and functions that read the state of a cache."""

import functools
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.layers import AttentionLayer
from hf_fp8kv import FP8PagedCache
from tests.helpers.tiny_models import build_variant


def attend(query: torch.Tensor, key: Any, value: Any, scaling: float) -> torch.Tensor:
    """Return "fp8_paged" attention of queries `[B, Hq, T, D]` to keys and values of `update`."""
    layer = AttentionLayer(query.shape[1] // key.shape[1])
    attention = ALL_ATTENTION_FUNCTIONS["fp8_paged"]
    return attention(layer, query, key, value, None, scaling=scaling)[0]


def list_tensors(cache: FP8PagedCache) -> list[torch.Tensor]:
    """Return all tensors of the stored keys and values that compiled code reads or writes."""
    handles = [handle for layer in cache.paged_layers for handle in (layer.keys, layer.values)]
    return [getattr(handle, name) for handle in handles for name in handle.__tensor_flatten__()[0]]


@functools.cache
def get_shared_variant(name: str, attention: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a model and its prompt. Tests share them and must not change them."""
    return build_variant(name, attn_implementation=attention)
