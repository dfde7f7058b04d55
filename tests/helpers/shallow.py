"""A checkpoint with the first layers of the demo model, for a tenth of the computation."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hf_fp8kv.utils import demo_model

FIRST_LAYERS, ALL_LAYERS = 2, 30


def save_first_layers(
    checkpoint: Path, folder: Path, layers: int = FIRST_LAYERS, **fields: str
) -> Path:
    """Copy the first layers of a checkpoint, and set fields of its config. Return the folder."""
    tensors = {
        name: tensor
        for name, tensor in load_file(checkpoint / "model.safetensors").items()
        if ".layers." not in name or int(name.split(".layers.")[1].split(".")[0]) < layers
    }
    folder.mkdir()
    for path in checkpoint.glob("*"):
        if path.name != "model.safetensors":
            shutil.copy(path, folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": layers, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def shallow_model_path(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the first layers of the demo model."""
    return save_first_layers(demo_model_path, tmp_path_factory.mktemp("shallow") / "model")


@pytest.fixture(params=["first layers", pytest.param("whole", marks=pytest.mark.full)])
def layers(
    request: pytest.FixtureRequest,
    demo_model_path: Path,
    shallow_model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> int:
    """Set the model at `demo_model_path()` during a test, and return its number of layers."""
    if request.param == "whole":
        return ALL_LAYERS
    monkeypatch.setattr(demo_model, "make_copy", lambda *_, **__: shallow_model_path)
    return FIRST_LAYERS
