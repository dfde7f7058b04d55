"""A fixture of a few layers of a trained model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_LOADED_LAYERS = 6


@pytest.fixture(scope="session")
def model_and_tokenizer(demo_model_path: Path) -> tuple[Any, Any]:
    """Return the first layers of the demo model, in float32, and its tokenizer.

    With so few layers the predictions are poor, but errors of K and V change them as much as those
    of the whole model.
    """
    model = AutoModelForCausalLM.from_pretrained(
        demo_model_path, num_hidden_layers=NUM_LOADED_LAYERS, dtype=torch.float32
    )
    return model, AutoTokenizer.from_pretrained(demo_model_path)
