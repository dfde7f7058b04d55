"""Tests of layers with a window: refused crops, calls that stop, and freed memory.

test_machine.py compares such layers with dense tensors.
"""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import Gemma3TextConfig

from hf_fp8kv import ConfigError, FP8PagedCache
from hf_fp8kv.attention.fp8_paged import fp8_paged_attention
from tests.cache.public import list_tensors
from tests.helpers.assertions import assert_same
from tests.helpers.standin import replace_triton

WINDOW = 20
PAGE_SIZE = 8
BATCH_SIZE = 2
MAX_LEN = 200
# Maximum number of pages of 8 tokens for a window of 20 tokens.
MAX_PAGES = 4
NUM_LAYERS = 3
NUM_HEADS = 2
HEAD_DIM = 4
EXACT = {"dtype": "auto", "page_size": PAGE_SIZE}
# Bytes of a page of K and V in float32.
PAGE_BYTES = PAGE_SIZE * 2 * NUM_HEADS * HEAD_DIM * 4


def make_cache(sliding_layers: tuple[int, ...] = (0, 2), **keywords: Any) -> FP8PagedCache:
    types = [
        "sliding_attention" if index in sliding_layers else "full_attention"
        for index in range(NUM_LAYERS)
    ]
    config = Gemma3TextConfig(
        num_hidden_layers=NUM_LAYERS, layer_types=types, sliding_window=WINDOW, head_dim=HEAD_DIM,
        num_key_value_heads=NUM_HEADS, num_attention_heads=2, hidden_size=8,
    )  # fmt: skip
    return FP8PagedCache(config, **{**EXACT, **keywords})


def make_states(num_tokens: int) -> torch.Tensor:
    return torch.randn(BATCH_SIZE, NUM_HEADS, num_tokens, HEAD_DIM)


def add_random_tokens(caches: list[Any], num_tokens: int) -> None:
    states = make_states(num_tokens)
    for cache in caches:
        for index in range(NUM_LAYERS):
            cache.update(states + index, index - states, index)


def check_num_pages(cache: FP8PagedCache) -> None:
    for layer in cache.layers:
        if layer.is_sliding:
            assert layer.memory_footprint()["pages"] <= MAX_PAGES * BATCH_SIZE * PAGE_BYTES


def assert_same_layers(
    actual: FP8PagedCache, expected: FP8PagedCache, layers: Any = range(NUM_LAYERS)
) -> None:
    length = expected.host_length()
    assert actual.host_length() == length
    for index in layers:
        first_token = max(length - WINDOW + 1, 0) if actual.layers[index].is_sliding else 0
        for side in ("keys", "values"):
            handles = [getattr(cache.layers[index], side) for cache in (actual, expected)]
            windows = [
                handle.dense()[:, :, first_token - handle.start : length - handle.start]
                for handle in handles
            ]
            assert_same(*windows, f"layer {index}, {side}")


@pytest.mark.parametrize("max_len", [None, MAX_LEN])
def test_attention_uses_the_window_of_the_layer_by_default(max_len: int | None) -> None:
    """Some pages contain tokens that have left the window. Attention must not read them."""
    cache = make_cache(max_cache_len=max_len)
    query = make_states(1)
    add_random_tokens([cache], 37)
    states = make_states(1)
    handles = cache.update(states, -states, 0)
    module = torch.nn.Module().eval()
    module.is_causal = True
    actual, _ = fp8_paged_attention(module, query, *handles, None)
    visible_states = [
        handle.dense()[:, :, 38 - WINDOW - handle.start : 38 - handle.start] for handle in handles
    ]
    expected = scaled_dot_product_attention(query, *visible_states)
    torch.testing.assert_close(actual, expected.transpose(1, 2))


def test_addresses_of_a_preallocated_cache_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_triton(monkeypatch)
    ring_cache = make_cache(max_cache_len=MAX_LEN, backend="triton")
    add_random_tokens([ring_cache], 1)
    addresses = [tensor.data_ptr() for tensor in list_tensors(ring_cache)]
    for num_tokens in (30, 1, 70, 2):
        add_random_tokens([ring_cache], num_tokens)
    ring_cache.reorder_cache(torch.tensor([0, 0]))
    ring_cache.crop(-1)
    ring_cache.reset()
    add_random_tokens([ring_cache], 90)
    assert [tensor.data_ptr() for tensor in list_tensors(ring_cache)] == addresses


@pytest.mark.parametrize("length", [30, 100, 101, 103])
def test_a_ring_may_be_cropped_to_its_first_complete_page(length: int) -> None:
    """A crop in one or more steps is refused if it needs a token that was overwritten."""
    first_intact = max((length - 1) // PAGE_SIZE - MAX_PAGES + 1, 0) * PAGE_SIZE
    max_crop = length - (first_intact + WINDOW - 1) if first_intact else length
    cache = make_cache(max_cache_len=MAX_LEN)
    growing_cache = make_cache()
    growing_cache.activate_past_recording()
    add_random_tokens([cache, growing_cache], length)
    for num_refused in (max_crop + 1, max_crop):
        if first_intact:
            with pytest.raises(ConfigError, match=f"token {first_intact} on"):
                cache.crop(-num_refused)
        if num_refused > max_crop:
            cache.crop(-min(max_crop, 3))
            growing_cache.crop(-min(max_crop, 3))
        assert_same_layers(cache, growing_cache)


def test_layers_of_different_lengths_cannot_start_to_record() -> None:
    cache = make_cache(max_cache_len=MAX_LEN)
    add_random_tokens([cache], 96)
    cache.layers[0].crop(-1)
    with pytest.raises(ConfigError, match="the same number of tokens"):
        cache.activate_past_recording()
    assert not cache.layers[0].record_past


def test_a_long_call_that_stops_at_a_layer_is_reported() -> None:
    cache = make_cache()
    add_random_tokens([cache], 33)
    states = torch.ones(BATCH_SIZE, NUM_HEADS, 50, HEAD_DIM)
    cache.update(states, states, 0)  # layer 2, which has the same window, is never called
    refused_calls = (lambda: cache.update(states, states, 0), cache.fork, lambda: cache.crop(-1))
    for call in refused_calls:
        with pytest.raises(ConfigError, match=r"tokens 33 to 82.*Reset the cache"):
            call()
    cache.reset()
    add_random_tokens([cache], 50)
    check_num_pages(cache)
    cache.reset()
    for _ in range(2):
        cache.update(states, states, 0)
    with pytest.raises(ConfigError, match="Pass each call to all layers"):
        cache.update(states, states, 2)


@pytest.mark.parametrize("max_len", [None, MAX_LEN])
def test_no_token_outside_the_window_is_read(max_len: int | None) -> None:
    """Tokens before the window may be NaN, whether their page is freed or not."""
    caches = [make_cache(dtype="fp8_e4m3", max_cache_len=max_len) for _ in range(2)]
    for num_tokens in (60, *[1] * 10, 9, 50, *[1] * 10):
        states = make_states(num_tokens)
        for cache in caches:
            for index in range(NUM_LAYERS):
                cache.update(states, states, index)
            if num_tokens == 60:
                states[:, :, : 60 - WINDOW] = torch.nan
        assert_same_layers(*caches, layers=(0, 2))


def test_memory_is_freed_when_a_quarter_is_in_use() -> None:
    cache, small_cache = (make_cache(sliding_layers=()) for _ in range(2))
    add_random_tokens([cache, small_cache], 320)
    full_bytes = cache.memory_footprint().pages_bytes
    old_block = weakref.ref(cache.layers[1].keys.block.untyped_storage())
    for _ in range(16):
        cache.crop(-10)
        assert cache.memory_footprint().pages_bytes == full_bytes, "at least half is in use"
    cache.crop(-100)
    small_cache.crop(-260)
    num_pages = -(-60 // PAGE_SIZE) * BATCH_SIZE
    assert cache.memory_footprint().pages_bytes == NUM_LAYERS * num_pages * PAGE_BYTES
    assert old_block() is None, "a freed block is kept alive"
    # Alternating growth and crops moves no pages.
    addresses = set()
    for _ in range(20):
        add_random_tokens([cache, small_cache], 9)
        for each_cache in (cache, small_cache):
            each_cache.crop(-8)
        addresses.add(cache.layers[1].keys.block.data_ptr())
    assert len(addresses) <= 2
    assert_same_layers(cache, small_cache)


def test_recording_does_not_restore_tokens_that_a_ring_has_lost(tmp_path: Path) -> None:
    cache, full_cache = (make_cache((1, 2), max_cache_len=length) for length in (MAX_LEN, None))
    full_cache.activate_past_recording()
    add_random_tokens([cache, full_cache], 77)
    cache.activate_past_recording()
    add_random_tokens([cache, full_cache], 20)
    loaded_cache = FP8PagedCache.load(cache.save(tmp_path / "cache.safetensors"))
    for copied_cache in (cache, cache.fork(), loaded_cache):
        with pytest.raises(ConfigError, match="token 48 on"):
            copied_cache.crop(-60)
        assert {int(layer.get_seq_length()) for layer in copied_cache.layers} == {97}
        copied_cache.crop(-30)
    full_cache.crop(-30)
    assert_same_layers(cache, full_cache)


@pytest.mark.usefixtures("no_garbage_collection")
def test_handles_keep_their_values_after_a_reset() -> None:
    cache = make_cache(prefill="stored")
    states = make_states(30)
    key = cache.update(states, states, 1)[0]
    storage = weakref.ref(key.block.untyped_storage())
    cache.reset()
    assert_same(key.dense(), states)
    del key
    assert storage() is None
