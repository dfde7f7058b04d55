"""The number of tokens that the engine's planner makes room for, in the same memory."""

from typing import Any

import pytest

from hf_fp8kv import ConfigError, serving
from hf_fp8kv.bench.capacity import GIB, MODELS, PAGE, PERCENT, plan_capacity, planned_tokens, shape
from hf_fp8kv.serving.config import ServingConfig
from tests.helpers.serving_tools import batching, greedy
from tests.helpers.tiny_models import tiny

pytestmark = pytest.mark.text
FLASH = "flash_attention_2"


def settings(**keywords: Any) -> ServingConfig:
    return ServingConfig.parse(backend="torch", **keywords)


@pytest.mark.parametrize("name", MODELS)
def test_capacity_is_the_memory_over_the_bytes_of_a_token(name: str) -> None:
    """Twenty more GiB hold as many more tokens as a hand calculation says, in all layers.

    FP8 pages hold at least 1.9 times the tokens of bf16 with its best attention.
    """
    config = shape(name).get_text_config()
    heads = config.num_key_value_heads * config.num_hidden_layers
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    base = 0
    for chosen, each in (
        (None, 4 * dim),
        (settings(dtype="auto"), 4 * dim),
        (settings(key_dtype="auto", scales=1.0), 3 * dim),
        (settings(scales=1.0), 2 * dim),
        (settings(), 2 * dim + 4),
    ):
        less, more = (planned_tokens(config, n * GIB, chosen, attention=FLASH) for n in (20, 40))
        assert less * heads * each < PERCENT * 20 * GIB
        expected = PERCENT * 20 * GIB / (heads * each)
        if chosen is None:  # transformers' engine has further tensors, which grow with the tokens
            base = more
            # Both numbers are whole pages.
            assert 0.9 * expected < more - less < expected + PAGE
        else:
            assert more - less == pytest.approx(expected, rel=0.005)
        if each <= 2 * dim + 4:
            assert more >= 1.9 * base


def test_a_step_that_does_not_fit_is_an_error() -> None:
    """There is no memory for the activations of a step."""
    with pytest.raises(ConfigError, match=r"expected room .* got 0\.5 GiB"):
        planned_tokens(shape("Llama-3.1-8B"), GIB // 2, settings())


def test_a_real_engine_has_the_pages_that_were_planned() -> None:
    model, _ = tiny("llama")
    serving.enable(model)
    manager = model.init_continuous_batching(
        greedy(), batching(pages=None, max_memory_percent=0.002, max_batch_tokens=64)
    )
    manager.warmup()
    cache = manager.batch_processor.cache
    used = serving.usage(manager)
    assert used is not None
    memory = cache.layer_pages[0].block.nbytes
    assert used.bytes_total <= memory + cache.page_layout.bytes_per_page * 64
    assert used.bytes_total == used.pages_total * 16 * 2 * 2 * 2 * 18
    manager.batch_processor = None


def test_rows() -> None:
    reported: list[str] = []
    rows = {
        row["cache"]: row for row in plan_capacity({"q": shape("Qwen2.5-7B")}, 10, reported.append)
    }
    base = rows["bf16, flash"]
    values = {"bf16, flash": 256, "fp8, static scales": 128, "fp8, dynamic scales": 130}
    for name, value in values.items():
        assert rows[name]["bytes_per_token"] == 2 * value * 4 * 28
        assert rows[name]["ratio"] == rows[name]["tokens"] / base["tokens"]
