"""Tests of layers with a window: refused crops, calls that stop, freed memory, and budgets.

test_machine.py compares such layers with dense tensors.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import Gemma3TextConfig

from hf_fp8kv import ConfigError, FP8PagedCache
from hf_fp8kv.attention.fp8_paged import fp8_paged_attention
from hf_fp8kv.errors import OutOfPagesError
from tests.cache.public import list_tensors
from tests.helpers.assertions import assert_same

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


def make_config() -> Any:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3TextConfig(
        num_hidden_layers=NUM_LAYERS, layer_types=types, sliding_window=WINDOW, head_dim=HEAD_DIM,
        num_key_value_heads=NUM_HEADS, num_attention_heads=2, hidden_size=8,
    )  # fmt: skip


def make_cache(**keywords: Any) -> FP8PagedCache:
    return FP8PagedCache(make_config(), **{**EXACT, **keywords})


def make_states(num_tokens: int, batch: int = BATCH_SIZE, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, NUM_HEADS, num_tokens, HEAD_DIM, generator=generator)


def add_random_tokens(caches: list[Any], num_tokens: int, seed: int) -> None:
    """Store the same tokens in all layers and caches."""
    x = make_states(num_tokens, seed=seed)
    for cache in caches:
        for layer in range(NUM_LAYERS):
            cache.update(x + layer, layer - x, layer)


def check_num_pages(cache: FP8PagedCache) -> None:
    """Assert that layers with a window have at most the pages that a window needs."""
    for layer in cache.layers:
        if layer.is_sliding:
            assert layer.store.memory_footprint()["pages"] <= MAX_PAGES * BATCH_SIZE * PAGE_BYTES


def assert_same_layers(
    actual: FP8PagedCache, expected: FP8PagedCache, layers: Any = range(NUM_LAYERS)
) -> None:
    """Assert that the next token attends to the same tokens in these layers."""
    length = expected.host_length()
    assert actual.host_length() == length
    for index in layers:
        first_token = max(length - WINDOW + 1, 0) if actual.layers[index].is_sliding else 0
        for side in ("keys", "values"):
            handles = [getattr(cache.layers[index], side) for cache in (actual, expected)]
            windows = [x.dense()[:, :, first_token - x.start : length - x.start] for x in handles]
            assert_same(*windows, f"layer {index}, {side}")


@pytest.mark.parametrize("max_len", [None, MAX_LEN])
def test_attention_uses_the_window_of_the_layer_by_default(max_len: int | None) -> None:
    """Some pages contain tokens that have left the window. Attention must not read them."""
    cache, query = make_cache(max_cache_len=max_len), make_states(1)
    add_random_tokens([cache], 37, 0)
    x = make_states(1, seed=1)
    handles = cache.update(x, -x, 0)
    module = torch.nn.Module().eval()
    module.is_causal = True
    actual, _ = fp8_paged_attention(module, query, *handles, None)
    visible_states = [x.dense()[:, :, 38 - WINDOW - x.start : 38 - x.start] for x in handles]
    expected = scaled_dot_product_attention(query, *visible_states)
    torch.testing.assert_close(actual, expected.transpose(1, 2))


def test_a_ring_may_be_saved_during_a_step(tmp_path: Path) -> None:
    """The ring is saved after only the first layer has stored the tokens of a call."""
    ring_cache = make_cache(max_cache_len=MAX_LEN)
    add_random_tokens([ring_cache], 60, 0)
    x = make_states(30, seed=1)
    ring_cache.update(x, -x, 0)
    copied = FP8PagedCache.load(ring_cache.save(tmp_path / "ring.safetensors"))
    for index in (1, 2):
        for cache in (ring_cache, copied):
            cache.update(x, -x, index)
    assert_same_layers(copied, ring_cache)


def test_addresses_of_a_ring_do_not_change() -> None:
    ring_cache = make_cache(max_cache_len=MAX_LEN)
    add_random_tokens([ring_cache], 1, 0)
    addresses = [tensor.data_ptr() for tensor in list_tensors(ring_cache)]
    for seed, num_tokens in enumerate((30, 1, 70, 2)):
        add_random_tokens([ring_cache], num_tokens, seed)
    ring_cache.reorder_cache(torch.tensor([0, 0]))
    ring_cache.crop(-1)
    ring_cache.reset()
    add_random_tokens([ring_cache], 90, 7)
    assert [tensor.data_ptr() for tensor in list_tensors(ring_cache)] == addresses


@pytest.mark.parametrize("length", [30, 100, 101, 103])
def test_a_ring_may_be_cropped_to_its_first_complete_page(length: int) -> None:
    """A crop in one or more steps is refused if it needs a token that was overwritten."""
    first_intact = max((length - 1) // PAGE_SIZE - MAX_PAGES + 1, 0) * PAGE_SIZE
    max_crop = length - (first_intact + WINDOW - 1) if first_intact else length
    cache = make_cache(max_cache_len=MAX_LEN)
    add_random_tokens([cache], length, 0)
    if first_intact:
        with pytest.raises(ConfigError, match=f"token {first_intact} on"):
            cache.crop(-max_crop - 1)
        assert cache.host_length() == length
    for _ in range(min(max_crop, 3)):
        cache.crop(-1)
    growing_cache = make_cache()
    growing_cache.activate_past_recording()
    add_random_tokens([growing_cache], length, 0)
    growing_cache.crop(-min(max_crop, 3))
    assert_same_layers(cache, growing_cache)
    if first_intact:
        with pytest.raises(ConfigError, match=f"token {first_intact} on"):
            cache.fork().crop(-max_crop)
    cache.crop(-length)
    add_random_tokens([cache], 9, 1)
    cache.crop(-8)
    assert cache.host_length() == 1


def test_recording_does_not_restore_tokens_that_a_ring_has_lost(tmp_path: Path) -> None:
    model_config = make_config()
    model_config.layer_types = ["full_attention", "sliding_attention", "sliding_attention"]
    cache = FP8PagedCache(model_config, **EXACT, max_cache_len=MAX_LEN)
    full_cache = FP8PagedCache(model_config, **EXACT)
    full_cache.activate_past_recording()
    add_random_tokens([cache, full_cache], 77, 0)
    cache.activate_past_recording()
    add_random_tokens([cache, full_cache], 20, 1)
    cache.save(tmp_path / "one.safetensors")
    for copied in (cache, cache.fork(), FP8PagedCache.load(tmp_path / "one.safetensors")):
        with pytest.raises(ConfigError, match="token 48 on"):
            copied.crop(-60)
        assert {int(layer.get_seq_length()) for layer in copied.layers} == {97}
        copied.crop(-30)
    full_cache.crop(-30)
    assert_same_layers(cache, full_cache)


def test_a_crop_frees_recorded_tokens() -> None:
    cache = make_cache()
    add_random_tokens([cache], MAX_LEN, 0)
    with pytest.raises(ConfigError, match="activate_past_recording"):
        cache.crop(-WINDOW)
    cache.reset()
    cache.activate_past_recording()
    add_random_tokens([cache], MAX_LEN, 0)
    used_bytes = cache.layers[0].store.memory_footprint()["used"]
    assert used_bytes == MAX_LEN // PAGE_SIZE * BATCH_SIZE * PAGE_BYTES
    cache.crop(-1)
    check_num_pages(cache)


def test_a_long_call_that_a_later_layer_refuses_changes_nothing() -> None:
    cache, expected = make_cache(), make_cache()
    add_random_tokens([cache, expected], 33, 0)
    footprints = [cache.layers[i].store.memory_footprint() for i in (0, 2)]
    x = torch.ones(BATCH_SIZE, NUM_HEADS, 50, HEAD_DIM)
    for refused_layer in range(1, NUM_LAYERS):
        for layer in range(refused_layer):
            cache.update(x, x, layer)
        with pytest.raises(ConfigError):
            cache.update(x[..., :3], x, refused_layer)
        assert_same_layers(cache, expected)
        assert [cache.layers[i].store.memory_footprint() for i in (0, 2)] == footprints
    add_random_tokens([cache, expected], 50, 1)
    assert_same_layers(cache, expected)
    check_num_pages(cache)


def test_a_long_call_that_stops_at_a_layer_is_reported() -> None:
    cache = make_cache()
    add_random_tokens([cache], 33, 0)
    x = torch.ones(BATCH_SIZE, NUM_HEADS, 50, HEAD_DIM)
    cache.update(x, x, 0)  # layer 2, which has the same window, is never called
    for call in (lambda: cache.update(x, x, 0), cache.fork, lambda: cache.crop(-1)):
        with pytest.raises(ConfigError, match=r"tokens 33 to 82.*Reset the cache"):
            call()
    cache.reset()
    add_random_tokens([cache], 50, 1)
    check_num_pages(cache)
    cache.reset()
    for _ in range(2):
        cache.update(x, x, 0)
    with pytest.raises(ConfigError, match="Pass each call to all layers"):
        cache.update(x, x, 2)


def test_a_reset_during_a_long_call_does_not_change_forks() -> None:
    cache, new_cache = make_cache(), make_cache()
    add_random_tokens([cache, new_cache], 33, 0)
    fork = cache.fork()
    x = torch.ones(BATCH_SIZE, NUM_HEADS, 50, HEAD_DIM)
    cache.update(x, x, 0)
    cache.reset()
    for num_tokens in (1, 60):
        assert_same_layers(fork, new_cache)
        add_random_tokens([fork, new_cache], num_tokens, 1)
    assert_same_layers(fork, new_cache)


@pytest.mark.parametrize("max_len", [None, MAX_LEN])
def test_no_token_outside_the_window_is_read(max_len: int | None) -> None:
    """Tokens before the window may be NaN, whether their page is freed or not."""
    caches = [make_cache(dtype="fp8_e4m3", max_cache_len=max_len) for _ in range(2)]
    for seed, num_tokens in enumerate([60, *[1] * 10, 9, 50, *[1] * 10]):
        x = make_states(num_tokens, seed=seed)
        for cache in caches:
            for layer in range(NUM_LAYERS):
                cache.update(x, x, layer)
            if not seed:
                x[:, :, : 60 - WINDOW] = torch.nan
        assert_same_layers(*caches, layers=(0, 2))


# -- freed memory --------------------------------------------------------------------------------


def test_memory_is_freed_when_a_quarter_is_in_use() -> None:
    cache, small_cache = FP8PagedCache(**EXACT), FP8PagedCache(**EXACT)  # without windows
    add_random_tokens([cache, small_cache], 320, 0)
    full_bytes, pages_bytes = cache.memory_footprint().pages_bytes, []
    for _ in range(16):
        cache.crop(-10)
        pages_bytes.append(cache.memory_footprint().pages_bytes)
    assert pages_bytes == [full_bytes] * 16, "half is in use"
    cache.crop(-100)
    small_cache.crop(-260)
    num_pages = -(-60 // PAGE_SIZE) * BATCH_SIZE
    assert cache.memory_footprint().pages_bytes == NUM_LAYERS * num_pages * PAGE_BYTES
    # Alternating growth and crops moves no pages.
    add_random_tokens([cache, small_cache], 10, 1)
    addresses = {cache.layers[1].keys.block.data_ptr()}
    for step in range(20):
        add_random_tokens([cache, small_cache], 9, step)
        cache.crop(-8)
        small_cache.crop(-8)
        addresses.add(cache.layers[1].keys.block.data_ptr())
    assert len(addresses) <= 2
    assert_same_layers(cache, small_cache)


def test_memory_waits_for_forks_that_hold_pages() -> None:
    cache = make_cache()
    add_random_tokens([cache], 160, 0)
    fork = cache.fork()
    cache.crop(-160)
    add_random_tokens([cache], 9, 1)
    full_bytes = cache.layers[1].store.memory_footprint()["pages"]
    assert full_bytes >= 160 // PAGE_SIZE * BATCH_SIZE * PAGE_BYTES
    del fork
    # The next allocation of a page frees the pages of the fork.
    add_random_tokens([cache], 8, 2)
    assert cache.layers[1].store.memory_footprint()["pages"] < full_bytes // 2
    expected = make_cache()
    add_random_tokens([expected], 9, 1)
    add_random_tokens([expected], 8, 2)
    assert_same_layers(cache, expected)


def test_selecting_a_sequence_frees_memory() -> None:
    cache = make_cache()
    add_random_tokens([cache], 100, 0)
    cache.batch_repeat_interleave(4)
    x = torch.ones(4 * BATCH_SIZE, NUM_HEADS, 80, HEAD_DIM)
    for layer in range(NUM_LAYERS):
        cache.update(x, x, layer)
    full_bytes = cache.memory_footprint().pages_bytes
    cache.batch_select_indices(torch.tensor([3]))
    assert cache.memory_footprint().pages_bytes < full_bytes / 3


# -- lengths of layers, budgets and refused calls. Layers 0 and 2 have a window ------------------


def add_tokens(cache: FP8PagedCache, x: torch.Tensor, layers: Any = range(NUM_LAYERS)) -> None:
    for layer in layers:
        cache.update(x, -x, layer)


def assert_last_window(cache: FP8PagedCache, x: torch.Tensor, layer: int = 0) -> None:
    """Assert that a layer stores the last window of `x`, which contains all tokens of the layer."""
    keys, stop = cache.layers[layer].keys, x.shape[2]
    assert int(cache.layers[layer].get_seq_length()) == stop
    first_token = max(stop - WINDOW + 1, 0)
    span = slice(first_token - keys.start, stop - keys.start)
    assert_same(keys.dense()[:, :, span], x[:, :, first_token:])


def test_long_calls_stay_within_the_budget() -> None:
    types, x = ["sliding_attention"] * NUM_LAYERS, make_states(262)
    model_config = Gemma3TextConfig(**{**make_config().to_dict(), "layer_types": types})
    cache = FP8PagedCache(model_config, **EXACT, max_pages=BATCH_SIZE * MAX_PAGES)
    for start, stop in itertools.pairwise((0, 20, 50, 110, 111, 262)):
        add_tokens(cache, x[:, :, start:stop])
        assert_last_window(cache, x[:, :, :stop])
    assert cache.budget.num_held <= BATCH_SIZE * MAX_PAGES


def test_each_ring_refuses_a_crop_by_its_length() -> None:
    x = make_states(96)
    for change in (lambda cache: cache.layers[0].reset(), lambda cache: cache.layers[0].crop(-100)):
        cache = make_cache(max_cache_len=MAX_LEN, prefill="stored")
        add_tokens(cache, x)
        cache.crop(-12)
        change(cache)
        with pytest.raises(ConfigError, match="token 64 on"):
            cache.layers[2].crop(-8)
        assert_last_window(cache, x[:, :, :84], 2)
    cache = make_cache(max_cache_len=MAX_LEN, prefill="stored")
    add_tokens(cache, x, [0, 1])
    add_tokens(cache, x[:, :, :57], [2])
    with pytest.raises(ConfigError, match="token 32 on"):
        cache.crop(-10)
    with pytest.raises(ConfigError, match="the same number of tokens"):
        cache.activate_past_recording()
    assert not cache.layers[0].record_past
    assert_last_window(cache, x, 0), assert_last_window(cache, x[:, :, :57], 2)


@pytest.mark.parametrize("change", ["batch_repeat_interleave", "activate_past_recording"])
def test_a_change_beyond_the_budget_changes_nothing(change: str) -> None:
    cache = make_cache(max_cache_len=64, max_pages=BATCH_SIZE * (MAX_PAGES + 8), prefill="stored")
    x = make_states(41)
    add_tokens(cache, x[:, :, :40])
    with pytest.raises(OutOfPagesError):
        getattr(cache, change)(*([2] if change == "batch_repeat_interleave" else []))
    assert not cache.layers[0].record_past
    add_tokens(cache, x[:, :, 40:])
    assert_last_window(cache, x)


def test_a_refused_step_keeps_the_recorded_past() -> None:
    cache, x = make_cache(), make_states(60)
    cache.activate_past_recording()
    add_tokens(cache, x)
    footprint = cache.memory_footprint()
    add_tokens(cache, x[:, :, :1], [0, 1])
    with pytest.raises(ConfigError):
        cache.update(x[:, :, :1, :3], x[:, :, :1, :3], 2)
    assert cache.memory_footprint() == footprint
    cache.crop(-40)
    assert_last_window(cache, x[:, :, :20])
