"""A tiny model with biased keys, and a real one that is small enough for every run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.tiny_models import tiny

LAYERS = 6


@pytest.fixture(scope="session")
def biased() -> Any:
    """A tiny model with a large bias of K."""
    return tiny("qwen2", key_bias=30.0)[0]


@pytest.fixture(scope="session")
def real_model(demo_model_path: Path) -> tuple[Any, Any]:
    """The first layers of the demo model, in float32, and its tokenizer.

    Its K and V are those of a trained model, and its predictions, which are not, are as good a
    measure of what becomes of them.
    """
    model = AutoModelForCausalLM.from_pretrained(
        demo_model_path, num_hidden_layers=LAYERS, dtype=torch.float32
    )
    return model, AutoTokenizer.from_pretrained(demo_model_path)
