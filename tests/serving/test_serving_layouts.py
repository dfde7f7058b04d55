"""Tests of the layout of an engine's cache: layer groups, bytes, ranks and offloading."""

import sys
from typing import Any

import pytest
import torch
import transformers
from transformers.generation.continuous_batching import cache as stock_cache
from transformers.generation.continuous_batching import continuous_api

from hf_fp8kv import ConfigError, serving
from hf_fp8kv.formats import LayerPlan
from hf_fp8kv.serving.engines import flat_tensor
from tests.helpers.planned import PROTECTED_PLANS
from tests.helpers.serving_tools import (
    PAGE_SIZE,
    are_exact,
    draw_head_scales,
    draw_prompts,
    generate_and_enable,
    generate_batch,
    generate_each,
    make_batching_config,
    make_greedy_config,
    record_offloads,
)
from tests.helpers.tiny_models import build_variant

pytestmark = pytest.mark.text

INT8_PLAN = LayerPlan.parse("int8 rotated", "int8")
GEMMA_FIELDS = {"sliding_window": 24, "query_pre_attn_scalar": 1}
LAYER_TYPES = ["sliding_attention", "full_attention", "full_attention"]


# -- the choice of an engine -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [
        (continuous_api.ContinuousBatchingManager, "_create_batch_processor", "Cache in stub"),
        (stock_cache.PagedAttentionCache, "__init__", "MemoryHandler in stub"),
    ],
)
def test_a_method_that_does_not_create_the_cache_is_refused(
    owner: Any, name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stub(self: Any) -> None:
        raise NotImplementedError

    stub.__qualname__ = "stub"
    monkeypatch.setattr(owner, name, stub)
    with pytest.raises(ConfigError, match=message) as error:
        serving.enable(build_variant("llama", attn_implementation="sdpa")[0])
    for detail in (transformers.__version__, "5.18 to 5.24", "FP8PagedCache"):
        assert detail in str(error.value)


def test_a_missing_engine_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, flat_tensor.__name__)
    monkeypatch.delattr(stock_cache, "PagedAttentionMemoryHandler")
    with pytest.raises(ConfigError, match="PagedAttentionMemoryHandler"):
        serving.enable(build_variant("llama")[0])


def test_layers_in_any_order_give_the_same_tokens() -> None:
    model = build_variant(
        "gpt_oss", sliding_window=9, num_hidden_layers=6, layer_types=LAYER_TYPES * 2
    )[0]
    model.set_attn_implementation("fp8_paged")
    # With other seeds, sums in a different order round a value to an adjacent code.
    prompt_ids = draw_prompts(seed=0)
    scales = draw_head_scales(model)
    expected = generate_each(model, prompt_ids, scales=scales)
    assert not are_exact(model, prompt_ids, expected)
    serving.enable(model, scales=scales)
    assert generate_batch(model, prompt_ids, max_batch_tokens=16) == expected


# K and V of a token in layer 0 and in layer 1: two heads of 16 values, and scales.
@pytest.mark.parametrize(
    ("options", "token_bytes"),
    [
        ({}, 2 * 2 * 36), ({"key_dtype": "auto"}, 2 * 2 * 52), ({"dtype": "auto"}, 2 * 2 * 64),
        ({"scales": 0.1}, 2 * 2 * 32),
        ({"plan": {0: PROTECTED_PLANS["K"], 1: INT8_PLAN}}, 2 * (52 + 36)),
        ({"plan": {0: INT8_PLAN, 1: PROTECTED_PLANS["K and V"]}}, 2 * (36 + 64)),
    ],
)  # fmt: skip
def test_planned_bytes_match_allocated_bytes(options: dict[str, Any], token_bytes: int) -> None:
    model = build_variant("llama")[0].to(torch.bfloat16)
    serving.enable(model, **options)
    manager = model.init_continuous_batching(
        make_greedy_config(), make_batching_config(num_pages=5)
    )
    manager.warmup()
    cache = manager.batch_processor.cache
    total_bytes, used_bytes, page_bytes, num_tokens = cache.measure_memory({})
    assert (used_bytes, num_tokens, page_bytes) == (0, 0, PAGE_SIZE * token_bytes)
    assert total_bytes == 5 * page_bytes
    # The engine allocates two more sectors, for the padding of its attention.
    num_bytes = total_bytes + 2 * cache.bytes_per_sector
    assert cache.layers[0].pages.block.untyped_storage().nbytes() == num_bytes


@pytest.mark.parametrize(
    ("name", "fields", "num_pages", "options"),
    [
        ("llama", {}, 16, {"dtype": "fp8_e5m2"}),
        ("gemma2", GEMMA_FIELDS, 20, {"key_dtype": "auto", "value_dtype": "fp8_e5m2"}),
        ("gemma2", GEMMA_FIELDS, 16, {"plan": {0: PROTECTED_PLANS["K"], 1: INT8_PLAN}}),
    ],
)
def test_offloaded_requests_resume(
    name: str, fields: dict[str, int], num_pages: int, options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # Codes and dynamic scales keep their bytes when they return to different blocks.
    #
    # The pages of 8 tokens are too few for all requests at once.
    offloads = record_offloads(monkeypatch)
    model = build_variant(name, **fields)[0]
    prompt_ids = [ids[:40] for ids in draw_prompts() if len(ids) > 16]
    expected = generate_and_enable(model, prompt_ids, **options)
    config = make_batching_config(
        page_size=8, num_pages=num_pages, max_batch_tokens=64, cpu_offload_space=0.01
    )
    assert generate_batch(model, prompt_ids, config=config) == expected
    assert any(offloads)
