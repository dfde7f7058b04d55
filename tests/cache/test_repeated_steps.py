"""Tests of `LayerStore.repeat`: decode steps that leave out checks give the results of full steps.

test_benchmarks.py counts the calls of such a step.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch.profiler import profile
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.layers import AttentionLayer, Heads, make_config
from hf_fp8kv import ConfigError, FP8PagedCache
from hf_fp8kv.attention import fp8_paged
from hf_fp8kv.attention.compact import make_compact
from hf_fp8kv.cache.layer_store import LayerStore
from hf_fp8kv.modeling.model_support import DETERMINISTIC
from hf_fp8kv.ops import dense_prompts
from tests.helpers.assertions import assert_same
from tests.ops.test_dispatch import NameRecorder, TensorSubclass

HEADS, NUM_LAYERS, BATCH, PROMPT_TOKENS = Heads(4, 2, 32), 2, 2, 20


class Counts:
    updates = attention = 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    counts = Counts()

    def count(owner: Any, name: str, attribute: str) -> None:
        function = getattr(owner, name)

        def call(*args: Any) -> Any:
            result = function(*args)
            setattr(counts, attribute, getattr(counts, attribute) + (result is not None))
            return result

        monkeypatch.setattr(owner, name, call)

    count(LayerStore, "repeat", "updates")
    count(fp8_paged, "_repeat", "attention")
    return counts


class Decoder:
    def __init__(self, backend: str, *, window: int | None = None, **options: Any) -> None:
        config = make_config(HEADS, NUM_LAYERS)
        if window is not None:
            config.sliding_window, config.layer_types = window, ["sliding_attention"] * NUM_LAYERS
        config._attn_implementation = "fp8_paged"
        self.cache = FP8PagedCache(config, backend=backend, page_size=16, **options)
        self.modules = [AttentionLayer(2, i).eval() for i in range(NUM_LAYERS)]
        self.generator = torch.Generator().manual_seed(0)
        self.convert = self.convert_query = lambda states: states
        self.keywords: dict[str, Any] = {"sliding_window": window}

    def decode(self, num_steps: int) -> None:
        for num_tokens in (PROMPT_TOKENS, *[1] * num_steps):
            self.step(num_tokens)

    def step(self, num_tokens: int = 1, *, padded: bool = False) -> list[torch.Tensor]:
        length = int(self.cache.get_seq_length()) + num_tokens
        is_token = torch.ones(BATCH, length, dtype=torch.bool)
        is_token[0, :3] = False
        mask = make_compact(is_token, 0, length, 0, num_tokens) if padded else None
        outputs = []
        for module in self.modules:
            query, key, value = (
                self.convert(torch.randn(BATCH, n, num_tokens, 32, generator=self.generator))
                for n in (4, 2, 2)
            )
            keys, values = self.cache.update(key, value, module.layer_idx)
            attend, query = ALL_ATTENTION_FUNCTIONS["fp8_paged"], self.convert_query(query)
            outputs.append(attend(module, query, keys, values, mask, **self.keywords)[0])
        return outputs


@torch.no_grad()
@pytest.mark.parametrize(
    ("backend", "padded", "options"),
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
    backend: str, padded: bool, options: dict[str, Any], counts: Counts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Steps cross page boundaries, crops, other numbers of tokens, forks and reorders."""
    outputs = []
    caches = []
    for repeats in (True, False):
        if not repeats:
            monkeypatch.setattr(LayerStore, "repeat", lambda *_: None)
            monkeypatch.setattr(fp8_paged, "_repeat", lambda *_: None)
        decoder = Decoder(backend, **options)
        run_results = decoder.step(PROMPT_TOKENS)
        for step in range(34):
            run_results += decoder.step(3 if step == 9 else 1, padded=padded)
            if step in (5, 20) and "window" not in options:
                decoder.cache.crop(-2)
            if step == 25:
                fork = decoder.cache.fork()
            if step == 29:
                decoder.cache.reorder_cache(torch.tensor([1, 0]))
        caches.append((decoder.cache, fork))
        decoder.cache = fork
        for _ in range(4):
            run_results += decoder.step(padded=padded)
        outputs.append(run_results)
        if repeats:
            repeated = counts.updates, counts.attention
    assert min(repeated) > 44, repeated
    for actual, expected_result in zip(*outputs, strict=True):
        assert_same(actual, expected_result)
    for cache, expected in zip(*caches, strict=True):
        assert cache.host_length() == expected.host_length()
        for layer, expected_layer in zip(cache.paged_layers, expected.paged_layers, strict=True):
            assert_same(layer.keys.dense(), expected_layer.keys.dense())
            assert_same(layer.values.dense(), expected_layer.values.dense())


def reset(decoder: Decoder) -> None:
    decoder.cache.reset()
    decoder.step(PROMPT_TOKENS)


def change_dtype(decoder: Decoder) -> None:
    decoder.convert = torch.Tensor.bfloat16
    reset(decoder)


def move(decoder: Decoder) -> None:
    for layer in decoder.cache.paged_layers:
        blocks = layer.store.pool.blocks
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
    "heads": set_attributes(convert_query=lambda x: x.repeat(1, 2, 1, 1)),
    "dtype of the query": set_attributes(convert_query=torch.Tensor.bfloat16),
    "subclass of the query": set_attributes(convert_query=make_subclass),
    "gradient": set_attributes(convert_query=lambda x: x.clone().requires_grad_()),
}  # fmt: skip
CHANGES = [
    *((change, (0, 0)) for change in UNUSUAL_STEPS.values()),
    *((change, (NUM_LAYERS, 0)) for change in UNUSUAL_ATTENTION.values()),
    (replace_module, (NUM_LAYERS, 1)),
]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("change", "expected"), CHANGES, ids=[*UNUSUAL_STEPS, *UNUSUAL_ATTENTION, "module"]
)
def test_an_unusual_step_is_not_repeated(
    change: Callable[[Decoder], Any], expected: tuple[int, int], counts: Counts
) -> None:
    decoder = Decoder("torch")
    decoder.decode(3)
    counts.updates = counts.attention = 0
    decoder.step()
    assert (counts.updates, counts.attention) == (NUM_LAYERS, NUM_LAYERS)
    context = change(decoder) or nullcontext()
    counts.updates = counts.attention = 0
    with context:
        decoder.step()
    assert (counts.updates, counts.attention) == expected


@torch.no_grad()
def test_offloaded_and_preallocated_layers_are_not_repeated(counts: Counts) -> None:
    for options in ({"offloading": True}, {"max_cache_len": 64}):
        decoder = Decoder("torch", **options)
        decoder.decode(3)
    assert (counts.updates, counts.attention) == (0, 0)


@torch.no_grad()
def test_a_refused_step_after_repeated_steps_changes_nothing(counts: Counts) -> None:
    decoder = Decoder("torch", max_pages=4)
    decoder.decode(12)
    assert counts.updates
    with pytest.raises(Exception, match="max_pages"):
        decoder.step()
    assert decoder.cache.host_length() == 32
    decoder.cache.batch_select_indices(torch.tensor([1]))
    with pytest.raises(ConfigError, match="expected 1 sequences, which the cache holds, got 2"):
        decoder.step()
    states = torch.ones(1, 2, 1, 32)
    assert decoder.cache.update(states, states, 0)[0].shape == (1, 2, 33, 32)


@torch.no_grad()
def test_a_layer_that_was_emptied_gets_an_exact_token(counts: Counts) -> None:
    decoder = Decoder("torch")
    decoder.decode(3)
    assert counts.updates
    decoder.cache.layers[0].reset()
    states = torch.randn(BATCH, 2, 1, 32)
    keys, _ = decoder.cache.update(states, states, 0)
    assert torch.equal(keys, states)


@torch.no_grad()
@pytest.mark.parametrize("name", ["scaling", "softcap"])
def test_a_tensor_that_changes_in_place_changes_the_attention(name: str, counts: Counts) -> None:
    decoder = Decoder("torch", prefill="stored")
    value = torch.tensor(2.0)
    decoder.keywords[name] = value
    decoder.decode(3)
    num_repeats = counts.attention
    assert num_repeats
    value.fill_(0.5)
    decoder.step()
    assert counts.attention == num_repeats


def test_a_compact_mask_is_contiguous() -> None:
    """Repeated launches assume this, and a mask of a user may be column-major."""
    is_token = torch.ones(40, BATCH, dtype=torch.bool).T
    assert make_compact(is_token, 0, 40, 0, 1).get_columns(0, 40).stride(3) == 1


class StoredPrompt(Decoder):
    def __init__(self, num_tokens: int = 40, **options: Any) -> None:
        super().__init__("torch", prefill="stored", dtype="fp8_e3m4", **options)
        states = torch.randn(4, BATCH, 2, num_tokens, 32).bfloat16()
        self.query = torch.cat([*states[2:]], 1)
        self.key, self.value = self.cache.update(states[0], states[1], 0)

    def attend(self, mask: Any = None, **keywords: Any) -> torch.Tensor:
        attend = ALL_ATTENTION_FUNCTIONS["fp8_paged"]
        keywords = {"sliding_window": None, **keywords}
        return attend(self.modules[0], self.query, self.key, self.value, mask, **keywords)[0]


@torch.no_grad()
def test_stored_prompts_prefer_cudnn_on_an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention reads a dense copy of the stored values instead of pages if this is faster."""
    attend = mock.Mock(side_effect=dense_prompts.scaled_dot_product_attention)
    monkeypatch.setattr(dense_prompts, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(dense_prompts, "_MIN_TOKENS", 40)
    stored = StoredPrompt()
    expected = stored.attend(scaling=0.5)
    monkeypatch.setattr(dense_prompts, "_read_capability", lambda _: (9, 0))
    assert not attend.called
    actual = stored.attend(scaling=0.5)
    with torch.autocast("cpu", torch.float16):
        assert stored.attend().dtype == torch.bfloat16
    assert attend.call_count == 2
    assert actual.is_contiguous()
    # Stored values are rounded to bfloat16, by at most 2 ** -9 each.
    assert (actual - expected).float().norm() <= 2**-8 * expected.float().norm()
    attend.reset_mock()
    is_token = torch.ones(BATCH, 40, dtype=torch.bool)
    is_token[0, :3] = False
    for keywords in (
        {"mask": make_compact(is_token, 0, 40, 0, 40)},
        {"mask": torch.ones(BATCH, 1, 40, 40, dtype=torch.bool).tril()},
        {"position_bias": torch.zeros(1, 4, 40, 40)}, {"softcap": 5.0}, {"sliding_window": 10},
        {"is_causal": False}, {"s_aux": torch.zeros(4)},
    ):  # fmt: skip
        stored.attend(**keywords)
    StoredPrompt(39).attend()
    StoredPrompt(max_cache_len=50).attend()
    for name, value in (("_MAX_HEAD_DIM", 16), ("_MAX_DENSE_BYTES", BATCH * 2 * 40 * 64)):
        with monkeypatch.context() as context:
            context.setattr(dense_prompts, name, value)
            stored.attend()
    DETERMINISTIC.set(stored.modules[0], True)
    stored.attend()
    DETERMINISTIC.set(stored.modules[0], False)
    stored.query = stored.query.float()
    stored.attend()
    chunk = StoredPrompt()
    chunk.key, chunk.value = chunk.cache.update(*torch.zeros(2, BATCH, 2, 40, 32).bfloat16(), 0)
    chunk.attend()
    assert not attend.called


@pytest.mark.parametrize("capability", [(9, 0), (8, 0), (10, 0), None])
def test_prompts_prefer_cudnn_on_an_h100(
    capability: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = mock.Mock(side_effect=fp8_paged.sdpa_kernel)
    monkeypatch.setattr(fp8_paged, "sdpa_kernel", kernel)
    monkeypatch.setattr(dense_prompts, "_read_capability", lambda _: capability)
    module, attend = AttentionLayer(2, 0).eval(), ALL_ATTENTION_FUNCTIONS["fp8_paged"]

    def run(num_tokens: int, mask: Any = None, **keywords: Any) -> None:
        query, key = torch.randn(1, 4, num_tokens, 32), torch.randn(1, 2, num_tokens, 32)
        attend(module, query, key, key, mask, **keywords)

    with torch.no_grad():
        run(512)
        requested = [[item.name for item in call.args[0]] for call in kernel.call_args_list]
        expected = [["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]]
        assert requested == (expected if capability == (9, 0) else [])
        kernel.reset_mock()
        run(511)
        run(512, torch.ones(1, 1, 512, 512, dtype=torch.bool))
        run(512, is_causal=False)
        torch.use_deterministic_algorithms(True)
        run(512)
        torch.use_deterministic_algorithms(False)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            run(512)
    with torch.enable_grad():
        run(512)
    assert not kernel.called
