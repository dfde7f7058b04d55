"""Tests of the default plan: E3M4, scales per token and head, K minus the first call's center."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.first_call import OperationCounter
from hf_fp8kv import FP8PagedCache, KVScales
from hf_fp8kv.formats import FORMATS, LayerPlan
from hf_fp8kv.formats.codec import decode, encode, search_scale
from hf_fp8kv.serving.config import ServingConfig
from tests.cache.public import read_centers
from tests.helpers.assertions import assert_same
from tests.helpers.tiny_models import build_variant, make_causal_config

pytestmark = pytest.mark.text

E3M4, E4M3 = "fp8_e3m4", "fp8_e4m3"
NUM_HEADS, HEAD_DIM = 2, 16


def make_cache(**keywords: Any) -> FP8PagedCache:
    """Return a cache of a model without RoPE. test_rope_rotation.py tests centers with RoPE."""
    config = make_causal_config("llama")
    config.rope_parameters = None
    return FP8PagedCache(config, page_size=8, **keywords)


def make_states(num_tokens: int, batch: int = 2, seed: int = 0) -> torch.Tensor:
    """Return a bias per channel plus small values, `[batch, NUM_HEADS, num_tokens, HEAD_DIM]`."""
    generator = torch.Generator().manual_seed(seed)
    bias = 20 * torch.randn(batch, NUM_HEADS, 1, HEAD_DIM, generator=generator)
    return bias + torch.randn(batch, NUM_HEADS, num_tokens, HEAD_DIM, generator=generator)


def read_keys(cache: FP8PagedCache, layer: int = 0) -> torch.Tensor:
    return cache.layers[layer].keys.dense()[:, :, : cache.host_length()]


@pytest.mark.parametrize(
    ("keywords", "formats", "is_centered"),
    [
        ({}, (E3M4, E3M4), True),
        ({"max_cache_len": 64}, (E3M4, E3M4), True),
        ({"value_dtype": "fp8_e5m2"}, (E3M4, "fp8_e5m2"), True),
        ({"key_dtype": E3M4}, (E3M4, E3M4), False),
        ({"plan": E3M4}, (E3M4, E3M4), False),
        # A prompt may be cut anywhere, and a center would depend on its first chunk.
        ({"prefill": "stored"}, (E3M4, E3M4), False),
        ({"prefill": "stored", "plan": "fp8_e3m4 centered"}, (E3M4, E3M4), True),
        ({"key_dtype": "auto"}, ("auto", E3M4), False),
        ({"key_dtype": E4M3}, (E4M3, E3M4), False),
        ({"dtype": "fp8"}, (E4M3, E4M3), False),
        ({"dtype": torch.float8_e4m3fn}, (E4M3, E4M3), False),
        ({"dtype": E3M4}, (E3M4, E3M4), False),
        ({"dtype": "fp8_e5m2"}, ("fp8_e5m2", "fp8_e5m2"), False),
        ({"dtype": "fp8_e4m3fnuz"}, ("fp8_e4m3fnuz", "fp8_e4m3fnuz"), False),
        ({"plan": ["fp8 centered", "fp8"]}, (E4M3, E4M3), True),
        ({"dtype": "auto"}, ("auto", "auto"), False),
        # Static scales belong to E4M3.
        ({"scales": 0.5}, (E4M3, E4M3), False),
        ({"scales": KVScales.uniform(2)}, (E4M3, E4M3), False),
        ({"scales": 0.5, "key_dtype": E3M4}, (E3M4, E4M3), False),
        ({"scales": 0.5, "plan": "fp8 centered"}, (E4M3, E4M3), True),
    ],
    ids=str,
)  # fmt: skip
def test_keywords_choose_the_plan(
    keywords: dict[str, Any], formats: tuple[str, str], is_centered: bool
) -> None:
    cache = make_cache(**keywords)
    cache.update(make_states(9), make_states(9, seed=1), 0)
    plan = cache.plan[0]
    assert (plan.k.format, plan.v.format, plan.k.centered) == (*formats, is_centered)
    # With a center, scales do not depend on the bias, so the error is small.
    error = (read_keys(cache) - make_states(9)).abs().max()
    assert (error < 0.2) == (is_centered or formats[0] == "auto")


# The numbers of tokens lie around the 32 tokens that a center averages. Each kind of cache has
# short and long calls.
@pytest.mark.parametrize(
    ("num_tokens", "max_len"),
    [(1, None), (31, 144), (32, None), (33, 144), (100, None), (100, 144)],
)
def test_the_center_is_the_mean_of_the_last_tokens(num_tokens: int, max_len: int | None) -> None:
    k, v = make_states(num_tokens), make_states(num_tokens, seed=1)
    cache = make_cache(max_cache_len=max_len)
    cache.update(k, v, 0)
    next_k = make_states(3, seed=2)
    cache.update(next_k, next_k, 0)
    layer: Any = cache.layers[0]
    actual = read_centers(cache)
    torch.testing.assert_close(actual, k[:, :, -32:].mean(2), rtol=1e-6, atol=1e-6)
    # K is stored as the format's specification defines, and V without a center.
    fmt, center = FORMATS[E3M4], actual[:, :, None]
    expected_keys = torch.cat([k, next_k], 2) - center
    scale = search_scale(expected_keys, fmt).float()[..., None]
    expected = decode(encode(expected_keys * scale.reciprocal(), fmt), fmt) * scale + center
    torch.testing.assert_close(read_keys(cache), expected, rtol=1e-6, atol=1e-5)
    values = layer.values.dense()[:, :, : num_tokens + 3]
    assert_same(values[:, :, num_tokens:], round_values(next_k))
    assert (read_keys(cache)[:, :, :num_tokens] - k).abs().max() < 0.2


def round_values(v: torch.Tensor) -> torch.Tensor:
    """Return V as a cache with `dtype="fp8_e3m4"` reads it back."""
    cache = make_cache(dtype=E3M4)
    cache.update(v, v, 0)
    return cache.layers[0].values.dense()


@pytest.mark.parametrize(
    ("value", "max_cache_len"),
    [(7.0, 520), (1e30, None), (torch.nan, 520), (torch.nan, None), (-torch.inf, None)],
)
def test_padding_on_the_left_does_not_change_the_center(
    value: float, max_cache_len: int | None
) -> None:
    """480 of 512 columns are padding in one row, and none in the other."""
    k = make_states(512)
    padded = k.clone()
    padded[0, :, :480] = value
    caches = []
    for keys in (k, padded):
        cache = make_cache(max_cache_len=max_cache_len)
        cache.update(keys, keys, 0)
        caches.append(cache)
    expected, actual = (read_keys(cache) for cache in caches)
    assert_same(actual[1], expected[1])
    assert_same(actual[0, :, 480:], expected[0, :, 480:])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_channel_with_a_nonfinite_value_has_no_center(value: float) -> None:
    k = make_states(12)
    expected = k.mean(2)
    k[1, 0, 4, 3], expected[1, 0, 3] = value, 0.0
    cache = make_cache()
    cache.update(k, torch.ones_like(k), 0)
    torch.testing.assert_close(read_centers(cache), expected)
    assert (read_keys(cache)[0] - k[0]).abs().max() < 0.2


# The cases have padding or none, and growing or preallocated caches.
@pytest.mark.parametrize(
    ("name", "max_len", "is_padded"),
    [("gqa", None, False), ("gqa", 64, True), ("sliding_and_full", None, True)],
)
@torch.no_grad()
def test_a_first_call_adds_few_operations(name: str, max_len: int | None, is_padded: bool) -> None:
    """Centering adds at most 8 operations per layer."""
    model, _ = build_variant(name, attn_implementation="fp8_paged")
    ids = torch.randint(4, 90, (2, 44), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0 if is_padded else 1
    counts = []
    for num_layers in (2, 1, 2):  # the first run computes factors that later runs reuse
        for plan in ("fp8_e3m4", "fp8_e3m4 centered"):
            cache = FP8PagedCache(model.config, plan=plan, page_size=8, max_cache_len=max_len)
            removed_layers = model.model.layers[num_layers:]
            model.model.layers = model.model.layers[:num_layers]
            with OperationCounter() as operations:
                model.model(ids, attention_mask=mask, past_key_values=cache)
            model.model.layers.extend(removed_layers)
            counts.append(operations.count)
    # The difference cancels operations that run once for all layers.
    assert (counts[5] - counts[3]) - (counts[4] - counts[2]) <= 8


MODELS = ("gqa", "mha", "sliding", "sliding_and_full", "softcap", "sinks", "kv_sharing", "latent")


# Growing and preallocated caches alternate over the models, because the same code reads both.
@pytest.mark.parametrize(("name", "max_len"), [*zip(MODELS, [None, 64] * 4, strict=True)])
@torch.no_grad()
def test_pages_and_dense_keys_give_the_same_logits(name: str, max_len: int | None) -> None:
    """Attention adds the center back if it changes the result: for softcap, sinks and dense K."""
    stock_attention = "eager" if name in ("sinks", "softcap") else "sdpa"
    logits = []
    for attention in ("fp8_paged", stock_attention):
        model, inputs = build_variant(name, attn_implementation=attention)
        shift_keys(model)
        cache = FP8PagedCache(model.config, page_size=8, max_cache_len=max_len)
        ids, mask = lengthen_prompt(inputs)
        outputs = []
        for call_ids in (ids, ids[:, 2:5], ids[:, 4:5]):
            mask = mask if not outputs else torch.cat([mask, torch.ones_like(call_ids)], 1)
            outputs.append(model(call_ids, attention_mask=mask, past_key_values=cache).logits)
        assert name == "latent" or all(plan.k.centered for plan in cache.plan.values())
        # Outputs of padding are not compared.
        logits.append(torch.cat([outputs[0][:, -1:], *outputs[1:]], 1))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def lengthen_prompt(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and a mask with more tokens than a center averages."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    return ids.repeat(1, 4), torch.cat([mask, mask[:, -1:].repeat(1, 3 * ids.shape[1])], 1)


def shift_keys(model: PreTrainedModel) -> None:
    """Set the bias of the K projections, if the model has it, to large random values."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if name.endswith("k_proj.bias"):
            weight.data.copy_(10 * torch.randn(weight.shape, generator=generator))


def test_serving_pages_have_no_center() -> None:
    assert ServingConfig.parse().options.layer_plan(0) == LayerPlan.parse(E3M4, E3M4)
    assert ServingConfig.parse(scales=0.5).options.layer_plan(0).k.format == E4M3
