"""Engines that compile their steps: the model around its attention, with padded shapes."""

from typing import Any

import pytest
import torch
from transformers import CompileConfig
from transformers.generation.continuous_batching import cache as stock

from hf_fp8kv import ConfigError, serving
from hf_fp8kv.serving.probe import check_kinds
from tests.helpers.serving_tools import batched, batching, enable, greedy, head_scales, prompts
from tests.helpers.tiny_models import tiny

pytestmark = pytest.mark.text

# Steps are traced and run without a compiler of code, which these tests do not cover.
TRACED = {"backend": "eager", "mode": None, "dynamic": True}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class TestCompiled:
    # Full: torch needs 12 s to trace transformers' layers of one model.
    @pytest.mark.full
    @pytest.mark.parametrize("name", ["llama", "gpt_oss"])
    def test_the_same_tokens(self, name: str) -> None:
        """Attention is not compiled, so no number of requests needs a separate compilation."""
        model = tiny(name, **({"sliding_window": 9} if name == "gpt_oss" else {}))[0]
        wanted = enable(model, prompts(), scales=head_scales(model))
        config = CompileConfig(fullgraph=False, **TRACED)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found = batched(model, prompts(), max_batch_tokens=64, varlen_compile_config=config)
        assert found == wanted
        made = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
        # The parts between attentions are 11 graphs. Attention compiled for each step makes 55.
        assert 0 < made < 25

    def test_a_whole_step_as_one_graph_is_refused(self) -> None:
        model = tiny("llama", attn_implementation="sdpa")[0]
        serving.enable(model)
        # decode_compile_config is not refused: the engine uses it for its own attention only.
        config = batching(varlen_compile_config=CompileConfig(fullgraph=True, **TRACED))
        with pytest.raises(ConfigError, match="varlen_compile_config: expected fullgraph=False"):
            model.init_continuous_batching(greedy(), config)
        assert model.config._attn_implementation == "sdpa"

    def test_the_engine_s_own_level_fits(self) -> None:
        model = tiny("llama")[0]
        serving.enable(model)
        manager = model.init_continuous_batching(greedy(), batching(default_compile_level=1))
        assert manager.continuous_batching_config.varlen_compile_config is not None


def test_which_models_can_have_graphs() -> None:
    """The engine hands over their steps as block tables."""
    for name in ("gpt_oss", "llama"):
        config = tiny(name)[0].config
        able = all(
            stock.ATTN_TYPE_TO_ALLOCATOR[kind].supports_block_table
            for kind in stock.group_layers_by_attn_type(config)
        )
        assert (able, any(check_kinds(config))) == (name == "llama", name == "gpt_oss")
