"""What 8 bits do to a real model's predictions: another family of tests than parity of kernels.

The bounds are means over several texts; on one text a few tokens decide the mean.
"""

import pydoc_data.topics
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, QuantizedCache, cache_utils

from hf_fp8kv import FP8PagedCache
from hf_fp8kv.quality import Quality, compare

TEXTS = ("objects", "execmodel", "import", "customization")
PREFILL, SCORED = 512, 128


@pytest.fixture(scope="module")
def measured(demo_model_path: Path) -> dict[str, Quality]:
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path)
    model = AutoModelForCausalLM.from_pretrained(
        demo_model_path, dtype=torch.float32, attn_implementation="fp8_paged"
    )
    topics = pydoc_data.topics.topics
    ids = torch.cat(
        [
            tokenizer(topics[name], return_tensors="pt").input_ids[:, : PREFILL + SCORED]
            for name in TEXTS
        ]
    )

    def cache(**keywords: Any) -> Any:
        return lambda: FP8PagedCache(model.config, **keywords)

    caches = {
        "e4m3": cache(),
        "e3m4": cache(dtype="fp8_e3m4"),
        "e5m2": cache(dtype="fp8_e5m2"),
        "K auto, V e4m3": cache(key_dtype="auto"),
    }
    if hasattr(cache_utils, "Fp8QuantizedLayer"):
        caches["transformers fp8"] = lambda: QuantizedCache(backend="fp8", config=model.config)
    found = compare(model, ids, caches, prefill=PREFILL)
    return {name: scores.quality for name, scores in found.items()}


@pytest.mark.parametrize(
    ("name", "bound"), [("e4m3", 5e-3), ("e3m4", 1.2e-3), ("e5m2", 5e-2), ("K auto, V e4m3", 8e-4)]
)
def test_kl(measured: dict[str, Quality], name: str, bound: float) -> None:
    quality = measured[name]
    assert quality.tokens == len(TEXTS) * SCORED
    assert 0 < quality.kl <= bound, quality


def test_order(measured: dict[str, Quality]) -> None:
    """A mantissa bit more is better, one less is worse; and K matters more than V."""
    assert measured["e3m4"].kl < measured["e4m3"].kl / 2
    assert measured["e4m3"].kl < measured["e5m2"].kl / 2
    assert measured["K auto, V e4m3"].kl < measured["e4m3"].kl / 3
    assert measured["e3m4"].top1 > 0.97


def test_better_than_transformers(measured: dict[str, Quality]) -> None:
    stock = measured.get("transformers fp8")
    if stock is None:
        pytest.skip("this transformers has no FP8 cache")
    for name in ("e4m3", "e3m4"):
        assert measured[name].kl < stock.kl, (name, measured[name], stock)
