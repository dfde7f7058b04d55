"""Tests of the number of tokens that the planner of an engine fits into a given memory."""

from typing import Any

import pytest

from hf_fp8kv import ConfigError, serving
from hf_fp8kv.bench import capacity
from hf_fp8kv.bench.capacity import GIB, MODELS, get_config, plan_capacity, plan_tokens
from hf_fp8kv.formats import LayerPlan
from hf_fp8kv.serving.config import ServingConfig
from tests.helpers.serving_tools import batching, greedy
from tests.helpers.tiny_models import build_variant

pytestmark = pytest.mark.text
FLASH = "flash_attention_2"


def make_config(**keywords: Any) -> ServingConfig:
    return ServingConfig.parse(backend="torch", **keywords)


@pytest.mark.parametrize("model_name", MODELS)
def test_capacity_is_the_memory_over_the_bytes_per_token(model_name: str) -> None:
    """With 20 GiB more memory, the number of tokens grows by 20 GiB over the bytes per token.

    FP8 pages store at least 1.9 times the tokens of bf16 pages with FlashAttention.
    """
    model_config = get_config(model_name).get_text_config()
    num_kv_heads = model_config.num_key_value_heads * model_config.num_hidden_layers
    dim = getattr(model_config, "head_dim", None)
    dim = dim or model_config.hidden_size // model_config.num_attention_heads
    bf16_tokens = 0
    # Bytes of K and V of a token in one head. None means the pages of transformers.
    # In the last case layer 0 keeps K in 16 bits.
    num_layers = model_config.num_hidden_layers
    protected_plan = dict.fromkeys(range(num_layers), LayerPlan.parse("int8 rotated", "int8"))
    protected_plan[0] = LayerPlan.parse("model", "int8")
    for config, head_bytes in (
        (None, 4 * dim),
        (make_config(dtype="auto"), 4 * dim),
        (make_config(key_dtype="auto", scales=1.0), 3 * dim),
        (make_config(scales=1.0), 2 * dim),
        (make_config(), 2 * dim + 4),
        (make_config(plan=protected_plan), 2 * dim + 4 + dim / num_layers),
    ):
        tokens_in_20_gib, tokens_in_40_gib = (
            plan_tokens(model_config, gib * GIB, config, attention=FLASH) for gib in (20, 40)
        )
        added_tokens = tokens_in_40_gib - tokens_in_20_gib
        expected = capacity.MEMORY_SHARE * 20 * GIB / (num_kv_heads * head_bytes)
        assert tokens_in_20_gib < expected
        if config is None:  # transformers' engine has more tensors that grow with the tokens
            bf16_tokens = tokens_in_40_gib
            # Both numbers of tokens are multiples of the page size.
            assert 0.9 * expected < added_tokens < expected + capacity.PAGE_SIZE
        else:
            # Layers of two kinds with pages of different sizes leave up to 2 % of blocks unused.
            tolerance = 0.021 if head_bytes % 1 else 0.005
            assert added_tokens == pytest.approx(expected, rel=tolerance)
        if config is not None and head_bytes <= 2 * dim + 4:
            assert tokens_in_40_gib >= 1.9 * bf16_tokens


def test_too_little_memory_for_a_step_raises_an_error() -> None:
    with pytest.raises(ConfigError, match=r"expected room .* got 0\.5 GiB"):
        plan_tokens(get_config("Llama-3.1-8B"), GIB // 2, make_config())


def test_an_engine_allocates_the_planned_pages() -> None:
    model, _ = build_variant("llama")
    serving.enable(model)
    manager = model.init_continuous_batching(
        greedy(), batching(pages=None, max_memory_percent=0.002, max_batch_tokens=64)
    )
    manager.warmup()
    cache = manager.batch_processor.cache
    usage = serving.read_usage(manager)
    assert usage is not None
    pool_bytes = cache.layers[0].pages.block.untyped_storage().nbytes()
    assert usage.bytes_total <= pool_bytes + cache.page_layouts[0].bytes_per_page * 64
    # 16 tokens in a page, two layers, two heads, K and V, 16 codes and a scale of 2 bytes.
    assert usage.bytes_total == usage.pages_total * 16 * 2 * 2 * 2 * 18
    manager.batch_processor = None


def test_the_report_of_capacity_has_bytes_and_ratios() -> None:
    rows = {
        row["cache"]: row
        for row in plan_capacity({"Qwen": get_config("Qwen2.5-7B")}, 10, lambda _message: None)
    }
    vector_bytes = {"bf16, flash": 256, "fp8, static scales": 128, "fp8, dynamic scales": 130}
    for name, num_bytes in vector_bytes.items():
        # K and V of four heads in 28 layers.
        assert rows[name]["bytes_per_token"] == 2 * num_bytes * 4 * 28
        assert rows[name]["ratio"] == rows[name]["tokens"] / rows["bf16, flash"]["tokens"]
