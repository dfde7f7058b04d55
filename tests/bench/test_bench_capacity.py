"""How many tokens the engine's planner makes room for, in the same memory."""

import json
from pathlib import Path
from typing import Any

import pytest

from hf_fp8kv import ConfigError, KVScales, serving
from hf_fp8kv.bench.capacity import GIB, MODELS, planned_tokens, run_capacity_suite, shape
from hf_fp8kv.serving.config import ServingConfig
from tests.helpers.command_line import Runner, runner
from tests.helpers.serving_tools import batching, greedy
from tests.helpers.tiny_models import tiny

pytestmark = pytest.mark.text


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    return runner(monkeypatch, capsys)


def settings(**keywords: Any) -> ServingConfig:
    given = {
        "scales": None, "dtype": "fp8", "key_dtype": None, "value_dtype": None,
        "center_keys": None, "backend": "torch",
    }  # fmt: skip
    return ServingConfig.parse(**{**given, **keywords})


class TestPlan:
    @pytest.mark.parametrize("name", MODELS)
    def test_at_least_1_9_times_the_tokens_of_bf16(self, name: str) -> None:
        """By the engine's own planner, against its best attention, which has no masks either."""
        config = shape(name).get_text_config()
        base = planned_tokens(config, 40 * GIB, None, attention="flash_attention_2")
        for scales in (KVScales.uniform(config.num_hidden_layers, k=0.1, v=0.2), None):
            assert planned_tokens(config, 40 * GIB, settings(scales=scales)) >= 1.9 * base

    def test_the_plan_keeps_to_the_memory(self) -> None:
        """Bytes of the pages that were made, not of what a planner says of itself."""
        config = shape("Llama-3.1-8B")
        memory = 20 * GIB
        for chosen in (settings(), settings(scales=1.0), settings(key_dtype="auto")):
            tokens = planned_tokens(config, memory, chosen)
            stored = 1024 * (2 if chosen.options.uniform_plan.k.format == "auto" else 1) + 1024
            dynamic = 2 * 8 * (2 - (chosen.options.uniform_plan.k.format == "auto"))
            each = 32 * (stored + (dynamic if chosen.options.scales is None else 0))
            assert 0.75 * 0.9 * memory < tokens * each < 0.9 * memory

    @pytest.mark.parametrize("name", ["Gemma-2-9B", "gpt-oss-20b"])
    def test_a_token_has_all_layers(self, name: str) -> None:
        """Also where the engine counts the blocks of groups of layers."""
        config = shape(name).get_text_config()
        each = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
        for chosen, size in ((None, 2), (settings(scales=1.0), 1)):
            tokens = planned_tokens(config, 40 * GIB, chosen, attention="flash_attention_2")
            assert tokens * each * size < 0.9 * 40 * GIB

    def test_unquantised_pages_need_what_bf16_needs(self) -> None:
        config = shape("Llama-3.1-8B")
        base = planned_tokens(config, 40 * GIB, None, attention="flash_attention_2")
        assert planned_tokens(config, 40 * GIB, settings(dtype="auto")) == pytest.approx(
            base, rel=0.05
        )

    def test_a_batch_that_does_not_fit_is_an_error(self) -> None:
        """There is no memory for the activations of a step."""
        with pytest.raises(ConfigError, match=r"expected room .* got 0\.5 GiB"):
            planned_tokens(shape("Llama-3.1-8B"), GIB // 2, settings())

    def test_a_real_engine_has_the_pages_that_were_planned(self) -> None:
        model, _ = tiny("llama")
        serving.enable(model)
        manager = model.init_continuous_batching(
            greedy(), batching(pages=None, max_memory_percent=0.002, max_batch_tokens=64)
        )
        manager.warmup()
        cache = manager.batch_processor.cache
        used = serving.usage(manager)
        assert used is not None
        memory = sum(x.numel() * x.element_size() for x in cache.layer_pages(0).tensors())
        assert used.bytes_total <= memory + cache.page_layout.bytes_per_page * 64
        assert used.bytes_total == used.pages_total * 16 * 2 * 2 * 2 * 18
        manager.batch_processor = None


class TestSuite:
    def test_rows(self) -> None:
        found = run_capacity_suite(config=shape("Qwen2.5-7B"), name="q", memory_gib=10)
        rows = {row["cache"]: row for row in found["rows"]}
        assert rows["bf16, flash"]["ratio"] == 1
        assert rows["bf16, flash"]["bytes_per_token"] == 2 * 2 * 4 * 128 * 28
        assert rows["fp8, static scales"]["bytes_per_token"] == 2 * 4 * 128 * 28
        assert rows["fp8, dynamic scales"]["bytes_per_token"] == 2 * 4 * 130 * 28
        assert rows["fp8, dynamic scales"]["ratio"] > 1.9

    def test_command(self, cli: Runner, tmp_path: Path) -> None:
        tiny("llama", head_dim=64)[0].config.save_pretrained(tmp_path)
        command = ("bench", "--suite", "capacity", "--model", str(tmp_path))
        code, out, _ = cli(*command, "--memory-gib", "9", "--json", "-")
        assert code == 0
        result = json.loads(out)
        assert {row["model"] for row in result["rows"]} == {str(tmp_path)}
        assert result["settings"]["memory_gib"] == 9
        assert "fp8, dynamic scales" in cli(*command)[1]
        assert cli(*command[:-1], str(tmp_path / "no"))[0] != 0
