"""Tests of torch.compile and torch.export as the first call, and of the calls that they refuse."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import Unsupported
from transformers import DynamicCache

from hf_fp8kv import ConfigError, FP8PagedCache
from hf_fp8kv.paging import memory_blocks
from tests.helpers.tiny_models import build_variant
from tests.tools.compile_first import CASES, assert_close, compile_first, compute_logits

pytestmark = [
    pytest.mark.usefixtures("no_gradients", "fresh_compiler"),
    pytest.mark.filterwarnings("ignore"),
]


def test_a_compiled_first_call_matches_eager_calls() -> None:
    model, inputs = build_variant("llama", attn_implementation="fp8_paged", num_hidden_layers=1)
    compile_first("preallocated", model, inputs)


def test_a_growing_cache_breaks_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of memory has one or two pages, so attention reads several blocks."""
    monkeypatch.setattr(memory_blocks, "BLOCK_BYTES", 3000)
    model, inputs = build_variant("gqa", attn_implementation="fp8_paged", num_hidden_layers=1)
    cache, eager_cache = (
        FP8PagedCache(model.config, page_size=8, prefill="stored") for _ in range(2)
    )
    actual = compute_logits(torch.compile(model, backend="aot_eager"), cache, inputs)
    assert_close(actual, compute_logits(model, eager_cache, inputs))


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, "max_cache_len"), ({"max_cache_len": 40, "max_pages": 99}, "early_initialization")],
)
def test_unsupported_graphs_name_the_remedy(options: dict[str, int], message: str) -> None:
    model, inputs = build_variant("gqa", attn_implementation="fp8_paged", num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(Unsupported, match=message):
        compiled(**inputs, past_key_values=FP8PagedCache(model.config, **options))


class ModelWithCache(torch.nn.Module):
    """A model with its cache as an attribute, because a cache cannot be an argument of export."""

    def __init__(self, model: torch.nn.Module, cache: FP8PagedCache) -> None:
        super().__init__()
        self.model = model
        self.cache = cache

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, past_key_values=self.cache).logits


@pytest.mark.parametrize("max_cache_len", [None, 40])
def test_export_requires_a_preallocated_cache(max_cache_len: int | None) -> None:
    model, inputs = build_variant("gqa", attn_implementation="fp8_paged", num_hidden_layers=1)
    cache = FP8PagedCache(model.config, max_cache_len=max_cache_len)
    ids = inputs["input_ids"]
    with pytest.raises(ConfigError, match="strict=True"):
        torch.export.export(ModelWithCache(model, cache), (ids,), strict=False)
    assert cache.layers[0].keys is None
    if max_cache_len is None:
        with pytest.raises(Unsupported, match="max_cache_len"):
            torch.export.export(ModelWithCache(model, cache), (ids,), strict=True)
        return
    exported = torch.export.export(ModelWithCache(model, cache), (ids,), strict=True)
    expected = model(ids, past_key_values=DynamicCache()).logits
    assert_close([exported.module()(ids)], [expected])
    assert cache.layers[0].keys is None


@pytest.mark.full
def test_compiled_first_calls_match_in_a_separate_process() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "tests.tools.compile_first"], cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    expected_lines = [f"{name} {case}" for name in CASES for case in CASES[name]]
    assert process.stdout.splitlines() == expected_lines
