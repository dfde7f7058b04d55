"""Tests of the lengths of the layers of a preallocated cache in compiled code.

test_machine.py tests the lengths of layers in eager code.
"""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from hf_fp8kv import FP8PagedCache
from hf_fp8kv.cache.paged_tensor import densify
from tests.helpers.assertions import assert_same
from tests.helpers.tiny_models import make_causal_config

NUM_LAYERS = 4
BATCH_SIZE = 3
MAX_LEN = 60
pytestmark = [
    pytest.mark.usefixtures("no_gradients", "fresh_compiler"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]
# The layers that are called in each step, in this order.
ORDERS = {
    "backwards": [[3, 2, 1, 0]] * 4,
    "an early exit": [[0, 1, 2, 3], [0, 1], [0, 1], [2, 3, 2, 3], [0, 1, 2, 3]],
}


def make_cache() -> FP8PagedCache:
    config = make_causal_config("llama", num_hidden_layers=NUM_LAYERS)
    options = {"dtype": "auto", "page_size": 8, "prefill": "stored", "max_cache_len": MAX_LEN}
    return FP8PagedCache(config, **options)


def make_states(layer: int, num_tokens: int, seed: int) -> torch.Tensor:
    """Return random keys or values of a layer, `[BATCH_SIZE, 2, num_tokens, 16]`."""
    generator = torch.Generator().manual_seed(100 * seed + layer)
    return torch.randn(BATCH_SIZE, 2, num_tokens, 16, generator=generator)


def run_step(cache: Any, layers: list[int], num_tokens: int, seed: int) -> None:
    """Store random tokens in these layers, in this order."""
    for call_index, layer in enumerate(layers):
        states = make_states(layer, num_tokens, 10 * seed + call_index)
        cache.update(states, -states, layer)


class LayerStack(torch.nn.Module):
    """Calls the layers of a cache in a fixed order, and adds their keys and values."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.order = order

    def forward(self, states: torch.Tensor, cache: Any, width: int) -> torch.Tensor:
        for call_index, layer in enumerate(self.order):
            handles = cache.update(states + layer, call_index - states, layer)
            key, value = (densify(handle)[:, :, :width] for handle in handles)
            # Sum over the columns, because a preallocated cache has more columns than tokens.
            states = states + key.sum(2, True) + value.mean()
        return states


@pytest.mark.parametrize("name", ORDERS)
def test_lengths_are_correct_in_compiled_steps(name: str) -> None:
    """Each order is compiled to one graph."""
    order = ORDERS[name]
    stacks = {tuple(layers): LayerStack(layers) for layers in order}
    caches = [make_cache() for _ in range(2)]
    compiled = {
        layers: torch.compile(stack, fullgraph=True, dynamic=False, backend="eager")
        for layers, stack in stacks.items()
    }
    for cache in caches:
        run_step(cache, [0, 1, 2, 3], 5, 0)
    for seed, layers in enumerate(order * 2):
        for cache in caches:
            if seed == len(order):
                cache.reset()
                run_step(cache, [3, 2, 1, 0], 4, 1)
            if seed == 1:
                cache.reorder_cache(torch.tensor([2, 2, 0]))
                cache.crop(-2)
        states = make_states(0, 1, seed)
        lengths = [int(layer.get_seq_length()) for layer in caches[0].layers]
        actual, expected = (
            functions[tuple(layers)](states, cache, MAX_LEN)
            for cache, functions in zip(caches, (stacks, compiled), strict=True)
        )
        assert_same(actual, expected, f"step {seed}")
        for layer in layers:
            lengths[layer] += 1
        for cache in caches:
            assert [int(layer.get_seq_length()) for layer in cache.layers] == lengths
    for actual, expected in zip(*(cache.layers for cache in caches), strict=True):
        assert_same(actual.keys.dense(), expected.keys.dense())
    assert counters["stats"]["unique_graphs"] == len(stacks)


def test_compiled_first_calls_may_have_graph_breaks() -> None:
    """After a graph break in a step, the next regions store tokens in the remaining layers."""
    cache, reference = make_cache(), make_cache()
    stack = LayerStack([0, 1])
    inputs = [make_states(0, num_tokens, seed) for seed, num_tokens in enumerate((9, 1))]
    expected = [stack(x, reference, MAX_LEN) for x in inputs]
    update = cache.update

    def update_between_breaks(*arguments: Any, **keywords: Any) -> Any:
        torch._dynamo.graph_break()
        handles = update(*arguments, **keywords)
        torch._dynamo.graph_break()
        return handles

    cache.update = update_between_breaks
    compiled = torch.compile(stack, backend="eager")
    for states, expected_output in zip(inputs, expected, strict=True):
        assert_same(compiled(states, cache, MAX_LEN), expected_output)
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [10, 10, 0, 0]
    assert counters["stats"]["unique_graphs"] > 2
