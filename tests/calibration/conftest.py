"""Fixtures of a tiny model with biased keys, and of a few layers of a trained model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.tiny_models import build_variant

NUM_LAYERS = 6


@pytest.fixture(scope="session")
def biased_model() -> Any:
    """Return a tiny model whose keys have a large bias."""
    return build_variant("qwen2", key_bias=30.0)[0]


@pytest.fixture(scope="session")
def real_model(demo_model_path: Path) -> tuple[Any, Any]:
    """Return the first layers of the demo model, in float32, and its tokenizer.

    K and V are from a trained model. The predictions are not, but errors of K and V change them
    as much as predictions of the whole model.
    """
    model = AutoModelForCausalLM.from_pretrained(
        demo_model_path, num_hidden_layers=NUM_LAYERS, dtype=torch.float32
    )
    return model, AutoTokenizer.from_pretrained(demo_model_path)
