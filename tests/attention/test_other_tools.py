"""Tests with other libraries that use the cache: kvpress drops tokens, and PEFT wraps models.

The tests imitate kvpress and PEFT, which need not be installed.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, DynamicCache

from hf_fp8kv import ConfigError, FP8PagedCache, disable, enable
from hf_fp8kv.attention.fp8_paged import fp8_paged_attention, register
from hf_fp8kv.modeling.model_support import CACHE
from tests.helpers.assertions import assert_same
from tests.helpers.tiny_models import build_variant

pytestmark = [pytest.mark.text, pytest.mark.filterwarnings("ignore")]

Score = Callable[[torch.Tensor], torch.Tensor]
PROMPT_LENGTH = 40


@contextmanager
def press_model(model: Any, score: Score, num_remaining: int) -> Iterator[None]:
    """After each call of a layer, keep the tokens of each head with the highest scores."""

    def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        layer = kwargs[CACHE].layers[module.layer_idx]
        keys, values = layer.keys, layer.values
        indices = score(keys).topk(num_remaining, dim=-1).indices
        indices = indices[..., None].expand(-1, -1, -1, module.head_dim)
        layer.keys = keys.gather(2, indices).contiguous()
        layer.values = values.gather(2, indices).contiguous()

    hooks = [
        layer.self_attn.register_forward_hook(hook, with_kwargs=True)
        for layer in model.model.layers
    ]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


@torch.no_grad()
def compute_logits(model: Any, cache: Any, press: Any) -> torch.Tensor:
    """Press a prompt, and return the logits of two rounds of calls with 3, 1 and 1 tokens."""
    ids = torch.randint(4, 90, (2, PROMPT_LENGTH), generator=torch.Generator().manual_seed(1))
    with press:
        model.model(ids, past_key_values=cache, cache_position=torch.arange(PROMPT_LENGTH))
    lengths = [layer.get_seq_length() for layer in cache.layers]
    logits = []
    for _ in range(2):
        for start, stop in ((0, 3), (3, 4), (4, 5)):
            positions = PROMPT_LENGTH + torch.arange(start, stop)[None]
            chunk = ids[:, start:stop]
            logits.append(model(chunk, past_key_values=cache, position_ids=positions).logits)
        for layer, length in zip(cache.layers, lengths, strict=True):
            layer.keys = layer.keys[:, :, :length]
            layer.values = layer.values[:, :, :length]
        assert [layer.get_seq_length() for layer in cache.layers] == lengths
    return torch.cat(logits, 1)


def score_first_and_last(keys: torch.Tensor) -> torch.Tensor:
    # The first four tokens have the highest score. Later tokens have a higher score than earlier.
    positions = torch.arange(keys.shape[2])
    return torch.where(positions < 4, len(positions), positions).expand(keys.shape[:3])


SCORES: dict[str, Score] = {
    "norm": lambda keys: -keys.norm(dim=-1),
    "sinks and last": score_first_and_last,
    "random": lambda keys: torch.rand(keys.shape[:3], generator=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize(
    ("name", "num_remaining"), [("norm", 17), ("sinks and last", 16), ("random", 15)]
)
def test_pressed_caches_match_dynamic_cache(name: str, num_remaining: int) -> None:
    model, _ = build_variant("gqa", attn_implementation="fp8_paged")
    stock_model, _ = build_variant("gqa", attn_implementation="sdpa")
    press = press_model(stock_model, SCORES[name], num_remaining)
    expected = compute_logits(stock_model, DynamicCache(), press)
    cache = FP8PagedCache(model.config, page_size=16, dtype="auto")
    actual = compute_logits(model, cache, press_model(model, SCORES[name], num_remaining))
    assert cache.get_seq_length() == num_remaining
    assert torch.allclose(actual, expected, rtol=1e-3, atol=1e-3)
    fp8_cache = FP8PagedCache(model.config, page_size=16)
    logits = compute_logits(model, fp8_cache, press_model(model, SCORES[name], num_remaining))
    assert logits.isfinite().all()
    assert fp8_cache.layers[1].get_seq_length() == num_remaining


@pytest.mark.parametrize("is_loaded", [False, True])
def test_functions_are_wrapped_if_kvpress_was_imported_first(
    is_loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention_patch = mock.Mock(side_effect=partial)
    kvpress = SimpleNamespace(attention_patch=attention_patch) if is_loaded else None
    monkeypatch.setitem(sys.modules, "kvpress.attention_patch", kvpress)  # type: ignore[arg-type]
    function = AttentionInterface._global_mapping["fp8_paged"]
    try:
        register()
        registered = AttentionInterface._global_mapping["fp8_paged"]
    finally:
        AttentionInterface._global_mapping["fp8_paged"] = function
    expected_calls = [mock.call(fp8_paged_attention)] if is_loaded else []
    assert attention_patch.call_args_list == expected_calls
    assert (registered is fp8_paged_attention) != is_loaded


def test_a_write_to_stored_keys_names_the_remedy() -> None:
    """Methods of kvpress that mask tokens of single heads write to the keys."""
    cache = FP8PagedCache(build_variant("gqa")[0].config)
    states = torch.randn(1, 2, 9, 16)
    cache.update(states, states, 0)
    keys, _ = cache.update(states[:, :, :1], states[:, :, :1], 0)
    with pytest.raises(ConfigError, match="Write into a dense copy"):
        cache.layers[0].keys.mul_(2)
    with pytest.raises(ConfigError, match="Write into a dense copy"):
        keys[torch.tensor([0]), torch.tensor([0]), torch.tensor([3])] = states[:, 0, 0]


def test_handles_convert_like_dense_tensors() -> None:
    """Conversions read the memory of a tensor without an operation of torch."""
    cache = FP8PagedCache(build_variant("gqa")[0].config, dtype="model")
    states = torch.randn(1, 2, 9, 16)
    cache.update(states, states, 0)
    keys = cache.layers[0].keys
    arrays = (
        keys.numpy(), keys.cpu().detach().numpy(), np.asarray(keys), np.array(keys),
        np.array(keys, dtype=np.float64), np.from_dlpack(keys), torch.from_dlpack(keys).numpy(),
        np.array(keys.tolist(), dtype=np.float32),
    )  # fmt: skip
    for array in arrays:
        assert np.array_equal(array, states.numpy())
    with pytest.raises(ValueError, match="read-only"):
        keys.numpy()[0] = 0
    for name in ("data_ptr", "share_memory_"):
        with pytest.raises(ConfigError, match="Pass a dense copy"):
            getattr(keys, name)()


class PeftWrapper(torch.nn.Module):
    """A stand-in for PEFT's wrapper of a model. A prefix is passed as a filled cache."""

    def __init__(self, model: Any, prefix_length: int) -> None:
        super().__init__()
        self.base_model = model
        self.prefix_length = prefix_length
        peft_type = "PREFIX_TUNING" if prefix_length else "LORA"
        self.active_peft_config = SimpleNamespace(peft_type=peft_type)
        self.prepare_base = model.prepare_inputs_for_generation

    def get_base_model(self) -> Any:
        return self.base_model

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self.prepare_base(*args, **kwargs)
        ids, cache = inputs["input_ids"], inputs[CACHE]
        if self.prefix_length:
            prefix_mask = torch.ones(len(ids), self.prefix_length, dtype=torch.long)
            inputs["attention_mask"] = torch.cat([prefix_mask, inputs["attention_mask"]], 1)
            inputs.pop("position_ids", None)
            if cache.get_seq_length():
                inputs["input_ids"] = ids[:, -1:]
            else:
                inputs[CACHE] = self.make_prefix(len(ids))
        return inputs

    def make_prefix(self, batch: int) -> DynamicCache:
        generator = torch.Generator().manual_seed(7)
        cache = DynamicCache(config=self.base_model.config)
        for index in range(2):
            states = torch.randn(2, batch, 2, self.prefix_length, 16, generator=generator)
            cache.update(*states, index)
        return cache

    def generate(self, **kwargs: Any) -> Any:
        self.base_model.prepare_inputs_for_generation = self.prepare
        try:
            return self.base_model.generate(**kwargs)
        finally:
            self.base_model.prepare_inputs_for_generation = self.prepare_base


@pytest.mark.parametrize(
    ("name", "prefix_length"),
    [("gqa", 0), ("sliding_and_full", 0), ("sliding_and_full", 5), ("sliding_and_full", 20)],
)
def test_a_wrapped_model_can_be_enabled(name: str, prefix_length: int) -> None:
    model, inputs = build_variant(name, attn_implementation="eager")
    wrapper = PeftWrapper(model, prefix_length)
    options: dict[str, Any] = {
        **inputs, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0,
        "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    expected_output = wrapper.generate(**options)
    length = expected_output.past_key_values.get_seq_length()
    # The last new token is not stored.
    assert length == prefix_length + inputs["input_ids"].shape[1] + options["max_new_tokens"] - 1
    assert enable(wrapper, dtype="auto") is wrapper
    output = wrapper.generate(**options)
    assert isinstance(output.past_key_values, FP8PagedCache)
    assert output.past_key_values.get_seq_length() == length
    assert torch.allclose(
        torch.cat(output.logits), torch.cat(expected_output.logits), rtol=1e-3, atol=1e-3
    )
    enable(wrapper)
    fp8_cache = wrapper.generate(**options).past_key_values
    used_bytes = output.past_key_values.memory_footprint().used_bytes
    assert fp8_cache.memory_footprint().used_bytes < used_bytes / 2
    assert disable(wrapper) is wrapper
    stock_output = wrapper.generate(**options)
    assert type(stock_output.past_key_values) is DynamicCache
    assert_same(stock_output.sequences, expected_output.sequences)
