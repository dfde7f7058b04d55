"""A checkpoint with the first layers of the demo model, which needs a tenth of the computation."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hf_fp8kv.utils import demo_model

NUM_FIRST_LAYERS, NUM_LAYERS = 2, 30


def save_first_layers(
    checkpoint: Path, folder: Path, num_layers: int = NUM_FIRST_LAYERS, **config_fields: str
) -> Path:
    """Copy the first layers of a checkpoint, and set fields of its config. Return the folder."""
    tensors = {
        name: tensor
        for name, tensor in load_file(checkpoint / "model.safetensors").items()
        if ".layers." not in name or int(name.split(".layers.")[1].split(".")[0]) < num_layers
    }
    folder.mkdir()
    for path in checkpoint.iterdir():
        if path.name != "model.safetensors":
            shutil.copy(path, folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": num_layers, **config_fields}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def shallow_model_path(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_first_layers(demo_model_path, tmp_path_factory.mktemp("shallow") / "model")


@pytest.fixture(params=["first layers", pytest.param("whole", marks=pytest.mark.full)])
def num_layers(
    request: pytest.FixtureRequest, demo_model_path: Path, shallow_model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> int:  # fmt: skip
    """Replace the demo model, unless the parameter is "whole". Return its number of layers."""
    if request.param == "whole":
        return NUM_LAYERS
    monkeypatch.setattr(demo_model, "convert_once", lambda *_, **__: shallow_model_path)
    return NUM_FIRST_LAYERS
