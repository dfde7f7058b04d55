"""Stand-ins for the attention layers of a model, and a config with their shapes."""

from typing import NamedTuple

import torch
from transformers import LlamaConfig


class Heads(NamedTuple):
    """Numbers of heads of a layer, and the head size."""

    num_query_heads: int
    num_kv_heads: int
    dim: int


class AttentionLayer(torch.nn.Module):
    """A stand-in for a layer of a model, with the attributes that attention functions read."""

    is_causal = True

    def __init__(self, num_groups: int, layer_index: int = 0) -> None:
        super().__init__()
        self.layer_idx = layer_index
        self.num_key_value_groups = num_groups


def make_config(heads: Heads, num_layers: int = 1) -> LlamaConfig:
    """Return the config of a model whose layers have these `Heads`."""
    num_query_heads, num_kv_heads, dim = heads
    return LlamaConfig(
        num_hidden_layers=num_layers,
        num_attention_heads=num_query_heads,
        head_dim=dim,
        num_key_value_heads=num_kv_heads,
        hidden_size=num_query_heads * dim,
        vocab_size=8,
        intermediate_size=8,
    )
