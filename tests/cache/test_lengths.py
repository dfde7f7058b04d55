"""Lengths of a preallocated cache are correct for any order of layers.

The reference for dtype="auto" is transformers' DynamicCache, whose layers have separate lengths.
"""

import copy
import pickle
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from transformers import DynamicCache

from hf_fp8kv import ConfigError, FP8PagedCache
from hf_fp8kv.cache.paged_tensor import densify
from tests.helpers.assertions import assert_same
from tests.helpers.tiny_models import causal_config

LAYERS, BATCH, WINDOW, ROOM = 4, 3, 8, 60
pytestmark = [
    pytest.mark.usefixtures("no_gradients", "fresh_compiler"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]
# The layers that are called in each step.
ORDERS = {
    "in order": [[0, 1, 2, 3]] * 4,
    "backwards": [[3, 2, 1, 0]] * 4,
    "a new order in each step": [[1, 0, 3, 2], [0, 3, 2, 1], [2, 1, 0, 3], [0, 1, 2, 3]],
    "a layer is left out": [[0, 1, 2, 3], [0, 1, 3], [0, 1, 3], [0, 1, 2, 3]],
    "a layer joins later": [[0, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 3]],
    "the first layer is left out": [[0, 1, 2, 3], [1, 2, 3], [1, 2, 3], [0, 1, 2, 3]],
    "an early exit": [[0, 1, 2, 3], [0, 1], [0, 1], [2, 3, 2, 3], [0, 1, 2, 3]],
    "twice": [[0, 1, 2, 3], [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 2, 3, 0, 1, 2, 3]],
    "one layer twice": [[0, 1, 2, 3], [0, 1, 2, 1, 3], [0, 0, 1, 2, 3], [0, 1, 2, 3]],
}
for seed in range(3):
    rng = random.Random(seed)
    ORDERS[f"random {seed}"] = [rng.choices(range(LAYERS), k=4) for _ in range(6)]


def config(name: str = "llama") -> Any:
    extra = {}
    if name == "gemma3_text":
        extra["layer_types"] = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    return causal_config(name, num_hidden_layers=LAYERS, **extra)


def pair(name: str = "llama", **keywords: Any) -> tuple[FP8PagedCache, DynamicCache]:
    options = {"dtype": "auto", "page_size": 8, "prefill": "stored", "max_cache_len": ROOM}
    return FP8PagedCache(config(name), **options, **keywords), DynamicCache(config=config(name))


def token(layer: int, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + layer)
    return torch.randn(BATCH, 2, count, 16, generator=generator)


def step(cache: Any, layers: list[int], count: int, seed: int) -> list[torch.Tensor]:
    """Run a step that calls these layers in this order, and return K of each call."""
    keys = []
    for call, layer in enumerate(layers):
        x = token(layer, count, 10 * seed + call)
        key, value = cache.update(x, -x, layer)
        assert_same(densify(key), -densify(value))
        keys.append(densify(key).clone())
    return keys


def check(cache: FP8PagedCache, stock: DynamicCache, window: int = ROOM) -> None:
    """Check the length of each layer, and the tokens that the next token attends to."""
    for layer, stock_layer in zip(cache.layers, stock.layers, strict=True):
        length = int(stock_layer.get_seq_length())
        assert int(layer.get_seq_length()) == length
        if length:
            shown = min(length, window - 1) if layer.is_sliding else length
            for mine, whole in ((layer.keys, stock_layer.keys), (layer.values, stock_layer.values)):
                last = slice(length - mine.start - shown, length - mine.start)
                assert_same(mine.dense()[:, :, last], whole[:, :, -shown:])
    assert cache.host_length() == max(int(x.get_seq_length()) for x in stock.layers)


@pytest.mark.parametrize("name", ORDERS)
def test_any_order(name: str, tmp_path: Path) -> None:
    order, first = ORDERS[name], 1 if len(name) % 2 else 9
    cache, stock = pair()
    for seed, layers in enumerate(order):
        count = 1 if seed else first
        actual, expected = (step(x, layers, count, seed) for x in (cache, stock))
        for actual_key, expected_key in zip(actual, expected, strict=True):
            assert_same(actual_key[:, :, : expected_key.shape[2]], expected_key, f"step {seed}")
        check(cache, stock)
    copies = (
        cache.fork(), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)),
        FP8PagedCache.load(cache.save(tmp_path / "cache.safetensors")),
    )  # fmt: skip
    twins = [(copied, copy.deepcopy(stock)) for copied in copies] + [(cache, stock)]
    for mine, other in twins:
        check(mine, other)
        for x in (mine, other):
            x.reorder_cache(torch.tensor([2, 0, 1]))
            step(x, [0, 1, 2, 3], 3, 7)
            x.crop(-2)
            step(x, [1, 2, 3], 1, 8)
        check(mine, other)
    for x in (cache, stock):
        x.batch_repeat_interleave(2)
        x.batch_select_indices(torch.tensor([1, 0, 5]))
    check(cache, stock)
    cache.reset()
    stock = DynamicCache(config=config())
    for seed in (1, 2):
        step(cache, [0, 1, 2, 3], 5, seed), step(stock, [0, 1, 2, 3], 5, seed)
        check(cache, stock)


@pytest.mark.parametrize(
    ("name", "chunk"),
    [("backwards", 1), ("a new order in each step", 5), ("a new order in each step", 20)],
)
def test_windows_and_prompts_in_chunks(name: str, chunk: int) -> None:
    cache, stock = pair("gemma3_text")
    assert cache.layers[0].sliding_window == WINDOW
    for seed, layers in enumerate([*ORDERS[name], [0, 1, 2, 3]]):
        count = chunk if seed < 2 else 1
        step(cache, layers, count, seed), step(stock, layers, count, seed)
        check(cache, stock, WINDOW)


@pytest.mark.parametrize("refused", [0, 2, 3])
def test_a_refused_step_keeps_the_layers_before(refused: int) -> None:
    """The layers before the refused layer have stored the token, as in transformers' caches."""
    cache, stock = pair()
    step(cache, [0, 1, 2, 3], 5, 0), step(stock, [0, 1, 2, 3], 5, 0)
    for x in (cache, stock):
        step(x, list(range(refused)), 1, 1)
    with pytest.raises(ConfigError):
        cache.update(token(refused, 1, 1)[:, :1], token(refused, 1, 1)[:, :1], refused)
    check(cache, stock)
    for x in (cache, stock):
        x.crop(-3)
    check(cache, stock)
    for seed in (2, 3):
        step(cache, [0, 1, 2, 3], 1, seed), step(stock, [0, 1, 2, 3], 1, seed)
        check(cache, stock)


def test_layers_may_receive_different_numbers_of_tokens() -> None:
    cache, stock = pair()
    for seed, counts in enumerate([(5, 5, 5, 5), (1, 2, 1, 3), (2, 2, 2, 2), (3, 1, 3, 1)]):
        for layer, count in enumerate(counts):
            for x in (cache, stock):
                step(x, [layer], count, seed)
        check(cache, stock)


class Stack(torch.nn.Module):
    """Calls the layers of a cache in a fixed order, and adds their keys and values."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: torch.Tensor, cache: Any, width: int) -> torch.Tensor:
        for call, layer in enumerate(self.order):
            key, value = cache.update(x + layer, call - x, layer)
            # A sum over the columns, because a preallocated cache has more columns than tokens.
            x = x + densify(key)[:, :, :width].sum(2, True) + densify(value)[:, :, :width].mean()
        return x


def count_lengths(counts: list[Counter[str]]) -> Callable[..., Any]:
    """Return a compiler backend that counts the operations that write lengths in a graph."""

    def count(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        operations: Counter[str] = Counter()
        for node in module.graph.nodes:
            value = node.meta.get("val")
            is_length = isinstance(value, torch.Tensor) and value.dtype == torch.int32
            if node.op == "call_function" and is_length and value.shape == (BATCH,):
                operations[node.target.overloadpacket.__name__] += 1
        counts.append(operations)
        return module

    return aot_autograd(fw_compiler=count)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_compiled_step_advances_each_layer_once(name: str) -> None:
    cache, _ = pair(name)
    step(cache, [0, 1, 2, 3], 9, 0)
    counts: list[Counter[str]] = []
    run = torch.compile(Stack([0, 1, 2, 3]), fullgraph=True, backend=count_lengths(counts))
    for seed in range(3):
        run(token(0, 1, seed), cache, 0)
    assert counts == [Counter({"advance_by_host": LAYERS, "copy": LAYERS})]
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [12] * LAYERS


@pytest.mark.parametrize(
    "name", ["backwards", "an early exit", pytest.param("one layer twice", marks=pytest.mark.full)]
)
def test_any_order_in_compiled_steps(name: str) -> None:
    """Each order is compiled to one graph."""
    order = ORDERS[name]
    stacks = {tuple(layers): Stack(layers) for layers in order}
    caches = [pair()[0] for _ in range(2)]
    compiled = {
        layers: torch.compile(stack, fullgraph=True, dynamic=False, backend="eager")
        for layers, stack in stacks.items()
    }
    for cache in caches:
        step(cache, [0, 1, 2, 3], 5, 0)
    for seed, layers in enumerate(order * 2):
        if seed == len(order):
            for cache in caches:
                cache.reset()
                step(cache, [3, 2, 1, 0], 4, 1)
        if seed == 1:
            for cache in caches:
                cache.reorder_cache(torch.tensor([2, 2, 0]))
                cache.crop(-2)
        x = token(0, 1, seed)
        lengths = [int(layer.get_seq_length()) for layer in caches[0].layers]
        actual, expected = (
            run[tuple(layers)](x, cache, ROOM)
            for cache, run in zip(caches, (stacks, compiled), strict=True)
        )
        assert_same(actual, expected, f"step {seed}")
        for layer in layers:
            lengths[layer] += 1
        for cache in caches:
            assert [int(layer.get_seq_length()) for layer in cache.layers] == lengths
    for mine, other in zip(*(cache.layers for cache in caches), strict=True):
        assert_same(mine.keys.dense(), other.keys.dense())
    assert counters["stats"]["unique_graphs"] == len(stacks)


@pytest.mark.parametrize("breaks", [False, True])
def test_a_compiled_first_call_and_graph_breaks(breaks: bool) -> None:
    """After a graph break in a step, the next regions store the remaining layers."""
    cache, reference = pair()[0], pair()[0]
    stack = Stack([0, 1])
    inputs = [token(0, count, seed) for seed, count in enumerate((9, 1))]
    expected = [stack(x, reference, ROOM) for x in inputs]
    if breaks:
        update = cache.update

        def break_off(*arguments: Any, **keywords: Any) -> Any:
            torch._dynamo.graph_break()
            result = update(*arguments, **keywords)
            torch._dynamo.graph_break()
            return result

        cache.update = break_off
    run = torch.compile(stack, backend="eager", fullgraph=not breaks)
    for x, expected_output in zip(inputs, expected, strict=True):
        assert_same(run(x, cache, ROOM), expected_output)
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [10, 10, 0, 0]
    assert counters["stats"]["unique_graphs"] > (2 if breaks else 0)
