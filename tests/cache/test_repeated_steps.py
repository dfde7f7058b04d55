"""Tests of `LayerStorage.repeat`: decode steps without checks give the results of full steps.

test_benchmarks.py counts the calls of such a step.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.profiler import profile
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.layers import AttentionLayer, Heads, make_config
from hf_fp8kv import ConfigError, FP8PagedCache
from hf_fp8kv.attention import fp8_paged
from hf_fp8kv.attention.compact import make_compact
from hf_fp8kv.cache.layer_storage import LayerStorage
from tests.helpers.assertions import assert_same
from tests.ops.test_dispatch import NameRecorder, TensorSubclass

HEADS = Heads(4, 2, 32)
NUM_LAYERS = 2
BATCH = 2
PROMPT_TOKENS = 20


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return the numbers of repeated updates and of repeated calls of attention."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str, operation: str) -> None:
        function = getattr(owner, name)

        def call(*args: Any) -> Any:
            result = function(*args)
            if result is not None:
                counts[operation] += 1
            return result

        monkeypatch.setattr(owner, name, call)

    count(LayerStorage, "repeat", "updates")
    count(fp8_paged, "_repeat", "attention")
    return counts


class Decoder:
    def __init__(self, backend: str, *, window: int | None = None, **options: Any) -> None:
        config = make_config(HEADS, NUM_LAYERS)
        if window is not None:
            config.sliding_window = window
            config.layer_types = ["sliding_attention"] * NUM_LAYERS
        config._attn_implementation = "fp8_paged"
        self.cache = FP8PagedCache(config, backend=backend, page_size=16, **options)
        self.modules = [AttentionLayer(2, index).eval() for index in range(NUM_LAYERS)]
        self.generator = torch.Generator().manual_seed(0)
        self.convert = self.convert_query = lambda states: states
        self.keywords: dict[str, Any] = {"sliding_window": window}

    def decode(self, num_steps: int) -> None:
        for num_tokens in (PROMPT_TOKENS, *[1] * num_steps):
            self.step(num_tokens)

    def step(self, num_tokens: int = 1, *, is_padded: bool = False) -> list[torch.Tensor]:
        attend = ALL_ATTENTION_FUNCTIONS["fp8_paged"]
        length = int(self.cache.get_seq_length()) + num_tokens
        is_token = torch.ones(BATCH, length, dtype=torch.bool)
        is_token[0, :3] = False
        mask = make_compact(is_token, 0, length, 0, num_tokens) if is_padded else None
        outputs = []
        for module in self.modules:
            query, key, value = (
                self.convert(torch.randn(BATCH, num, num_tokens, 32, generator=self.generator))
                for num in (HEADS.num_query_heads, HEADS.num_kv_heads, HEADS.num_kv_heads)
            )
            keys, values = self.cache.update(key, value, module.layer_idx)
            query = self.convert_query(query)
            outputs.append(attend(module, query, keys, values, mask, **self.keywords)[0])
        return outputs


@torch.no_grad()
@pytest.mark.parametrize(
    ("backend", "is_padded", "options"),
    [
        ("cpu", True, {"scales": 0.05}), ("cpu", False, {"window": 24}),
        ("cpu", False, {"plan": ("int8 rotated", "fp8_e2m5 rotated")}),
        ("torch", True, {}), ("torch", False, {"dtype": "int8"}), ("torch", False, {"window": 24}),
        ("reference", False, {"plan": ("int8 rotated", "fp8_e2m5 rotated")}),
        pytest.param("triton", True, {}, marks=pytest.mark.full),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.usefixtures("interpreted")
def test_repeated_steps_give_the_same_results(
    backend: str, is_padded: bool, options: dict[str, Any], counts: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Steps cross page boundaries, crops, other numbers of tokens, forks and reorders."""
    outputs = []
    caches = []
    for is_repeated in (True, False):
        if not is_repeated:
            monkeypatch.setattr(LayerStorage, "repeat", lambda *_: None)
            monkeypatch.setattr(fp8_paged, "_repeat", lambda *_: None)
        decoder = Decoder(backend, **options)
        run_results = decoder.step(PROMPT_TOKENS)
        for step in range(34):
            run_results += decoder.step(3 if step == 9 else 1, is_padded=is_padded)
            if step in (5, 20) and "window" not in options:
                decoder.cache.crop(-2)
            if step == 25:
                fork = decoder.cache.fork()
            if step == 29:
                decoder.cache.reorder_cache(torch.tensor([1, 0]))
        caches.append((decoder.cache, fork))
        decoder.cache = fork
        for _ in range(4):
            run_results += decoder.step(is_padded=is_padded)
        outputs.append(run_results)
    # At least 23 of 38 steps of 2 layers are repeated.
    assert min(counts["updates"], counts["attention"]) > 44, counts
    for actual, expected in zip(*outputs, strict=True):
        assert_same(actual, expected)
    for cache, full_cache in zip(*caches, strict=True):
        assert cache.host_length() == full_cache.host_length()
        for layer, full_layer in zip(cache.paged_layers, full_cache.paged_layers, strict=True):
            assert_same(layer.keys.dense(), full_layer.keys.dense())
            assert_same(layer.values.dense(), full_layer.values.dense())


def reset(decoder: Decoder) -> None:
    decoder.cache.reset()
    decoder.step(PROMPT_TOKENS)


def change_dtype(decoder: Decoder) -> None:
    decoder.convert = torch.Tensor.bfloat16
    reset(decoder)


def move(decoder: Decoder) -> None:
    for layer in decoder.cache.paged_layers:
        blocks = layer.pool.blocks
        blocks._set_blocks([block.clone() for block in blocks.tensors])


def replace_module(decoder: Decoder) -> None:
    decoder.modules[1] = AttentionLayer(2, 1).eval()


def set_attributes(**attributes: Any) -> Callable[[Decoder], None]:
    return lambda decoder: vars(decoder).update(attributes)


def add_keywords(**keywords: Any) -> Callable[[Decoder], None]:
    return lambda decoder: decoder.keywords.update(keywords)


def change_strides(states: torch.Tensor) -> torch.Tensor:
    return states.repeat(1, 1, 1, 2)[..., :32]


def make_subclass(states: torch.Tensor) -> torch.Tensor:
    return states.as_subclass(TensorSubclass)


# Changes before a step. A change may return a context for the step. The update is not repeated.
UNUSUAL_STEPS: dict[str, Callable[[Decoder], Any]] = {
    "dtype": change_dtype, "reset": reset, "moved": move,
    "strides": set_attributes(convert=change_strides),
    "subclass": set_attributes(convert=make_subclass),
    "gradients": lambda _: torch.enable_grad(), "mode": lambda _: NameRecorder(),
    "profiler": lambda _: profile(),
}  # fmt: skip
# Changes before a step. The update is repeated, but the call of attention is not.
UNUSUAL_ATTENTION: dict[str, Callable[[Decoder], Any]] = {
    "sinks": add_keywords(s_aux=torch.zeros(4)), "softcap": add_keywords(softcap=9.0),
    "bias": add_keywords(position_bias=torch.zeros(1, 4, 1, PROMPT_TOKENS + 5)),
    "scaling": add_keywords(scaling=0.5), "window": add_keywords(sliding_window=16),
    "unknown keyword": add_keywords(output_attentions=False),
    "strides of the query": set_attributes(convert_query=change_strides),
    "heads": set_attributes(convert_query=lambda query: query.repeat(1, 2, 1, 1)),
    "dtype of the query": set_attributes(convert_query=torch.Tensor.bfloat16),
    "subclass of the query": set_attributes(convert_query=make_subclass),
    "gradient": set_attributes(convert_query=lambda query: query.clone().requires_grad_()),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        *((change, (0, 0)) for change in UNUSUAL_STEPS.values()),
        *((change, (NUM_LAYERS, 0)) for change in UNUSUAL_ATTENTION.values()),
        (replace_module, (NUM_LAYERS, 1)),
    ],
    ids=[*UNUSUAL_STEPS, *UNUSUAL_ATTENTION, "module"],
)
def test_an_unusual_step_is_not_repeated(
    change: Callable[[Decoder], Any], expected: tuple[int, int], counts: Counter[str]
) -> None:
    decoder = Decoder("torch")
    decoder.decode(3)
    counts.clear()
    decoder.step()
    assert (counts["updates"], counts["attention"]) == (NUM_LAYERS, NUM_LAYERS)
    context = change(decoder) or nullcontext()
    counts.clear()
    with context:
        decoder.step()
    assert (counts["updates"], counts["attention"]) == expected


@torch.no_grad()
def test_offloaded_and_preallocated_layers_are_not_repeated(counts: Counter[str]) -> None:
    for options in ({"offloading": True}, {"max_cache_len": 64}):
        Decoder("torch", **options).decode(3)
    assert (counts["updates"], counts["attention"]) == (0, 0)


@torch.no_grad()
def test_a_refused_step_after_repeated_steps_changes_nothing(counts: Counter[str]) -> None:
    decoder = Decoder("torch", max_pages=4)
    decoder.decode(12)
    assert counts["updates"]
    with pytest.raises(Exception, match="max_pages"):
        decoder.step()
    assert decoder.cache.host_length() == 32
    decoder.cache.batch_select_indices(torch.tensor([1]))
    with pytest.raises(ConfigError, match="expected 1 sequences, which the cache holds, got 2"):
        decoder.step()
    states = torch.ones(1, 2, 1, 32)
    assert decoder.cache.update(states, states, 0)[0].shape == (1, 2, 33, 32)


@torch.no_grad()
def test_a_layer_that_was_emptied_gets_an_exact_token(counts: Counter[str]) -> None:
    decoder = Decoder("torch")
    decoder.decode(3)
    assert counts["updates"]
    decoder.cache.layers[0].reset()
    states = torch.randn(BATCH, 2, 1, 32)
    keys, _ = decoder.cache.update(states, states, 0)
    assert torch.equal(keys, states)


@torch.no_grad()
@pytest.mark.parametrize("name", ["scaling", "softcap"])
def test_a_tensor_that_changes_in_place_changes_the_attention(
    name: str, counts: Counter[str]
) -> None:
    decoder = Decoder("torch", prefill="stored")
    value = torch.tensor(2.0)
    decoder.keywords[name] = value
    decoder.decode(3)
    num_repeats = counts["attention"]
    assert num_repeats
    value.fill_(0.5)
    decoder.step()
    assert counts["attention"] == num_repeats


def test_a_compact_mask_is_contiguous() -> None:
    """Repeated launches assume contiguous columns, and a user's mask may be column-major."""
    is_token = torch.ones(40, BATCH, dtype=torch.bool).T
    assert make_compact(is_token, 0, 40, 0, 1).get_columns(0, 40).stride(3) == 1
