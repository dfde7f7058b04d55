"""Tests of engines that compile a step except its attention, with padded shapes."""

from typing import Any

import pytest
import torch
from transformers import CompileConfig

from hf_fp8kv import ConfigError, serving
from tests.helpers.serving_tools import (
    batching,
    enable,
    generate_batch,
    greedy,
    head_scales,
    prompts,
)
from tests.helpers.tiny_models import build_variant

pytestmark = pytest.mark.text

# Steps are traced and run without code generation. The tests do not cover the generated code.
TRACE_OPTIONS = {"backend": "eager", "mode": None, "dynamic": True}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class TestCompiled:
    @pytest.mark.full  # torch needs 12 s to trace the layers of one model
    @pytest.mark.parametrize("name", ["llama", "gpt_oss"])
    def test_compiled_steps_give_the_same_tokens(self, name: str) -> None:
        """Attention is not compiled, so a new number of requests needs no new compilation."""
        model = build_variant(name, **({"sliding_window": 9} if name == "gpt_oss" else {}))[0]
        expected = enable(model, prompts(), scales=head_scales(model))
        config = CompileConfig(fullgraph=False, **TRACE_OPTIONS)
        initial_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        tokens = generate_batch(model, prompts(), max_batch_tokens=64, varlen_compile_config=config)
        assert tokens == expected
        num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - initial_graphs
        # The parts without attention are 11 graphs. Compiling attention for each step makes 55.
        assert 0 < num_graphs < 25

    def test_a_whole_step_as_one_graph_is_rejected(self) -> None:
        model = build_variant("llama", attn_implementation="sdpa")[0]
        serving.enable(model)
        # decode_compile_config is accepted, because the engine uses it only for its own attention.
        config = batching(varlen_compile_config=CompileConfig(fullgraph=True, **TRACE_OPTIONS))
        with pytest.raises(ConfigError, match="varlen_compile_config: expected fullgraph=False"):
            model.init_continuous_batching(greedy(), config)
        assert model.config._attn_implementation == "sdpa"

    def test_the_default_compile_level_is_accepted(self) -> None:
        model = build_variant("llama")[0]
        serving.enable(model)
        manager = model.init_continuous_batching(greedy(), batching(default_compile_level=1))
        assert manager.continuous_batching_config.varlen_compile_config is not None
