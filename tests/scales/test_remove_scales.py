"""Tests of `save_pretrained(overwrite=True)`, which replaces the KV scales of a checkpoint."""

import contextlib
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_fp8kv import FP8PagedCache, KVScales
from hf_fp8kv.modeling.model_support import CACHE
from tests.helpers.declared import (
    NUM_LAYERS,
    TOO_SMALL,
    declare,
    declare_output_scales,
    load,
    save_plain,
    save_w8a8,
)
from tests.scales.test_export import make_random_scales, read_content
from tests.scales.test_scales import assert_same_scales
from tests.scales.test_sources import scale_error

pytestmark = pytest.mark.filterwarnings("ignore")

INDEX_FILE = "model.safetensors.index.json"
NEW_SCALES = make_random_scales("head", seed=5, num_layers=NUM_LAYERS)


def load_all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all files, in the same way as a reader that ignores the index."""
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        if path.name != "kv_scales.safetensors":
            file_tensors = load_file(path)
            assert not file_tensors.keys() & tensors.keys()
            tensors |= file_tensors
    return tensors


@pytest.mark.parametrize("weights", ["copy", "link"])
def test_scales_in_the_files_of_the_weights_are_replaced(tmp_path, plain_folder, weights):
    # LLM Compressor writes scales into the files of the weights.
    old_folder = tmp_path / "old"
    save_with_scales(old_folder, plain_folder)
    for target in ("compressed-tensors", "hf_fp8kv"):
        new_folder = tmp_path / target
        NEW_SCALES.save_pretrained(
            new_folder, format=target, checkpoint=old_folder, weights=weights, overwrite=True
        )
        assert_same_scales(KVScales.from_pretrained(new_folder), NEW_SCALES)
        tensors = load_all_tensors(new_folder)
        weights_before = load_file(plain_folder / "model.safetensors")
        for name, weight in weights_before.items():
            assert torch.equal(tensors[name], weight)
        num_scales = 2 * NUM_LAYERS if target == "compressed-tensors" else 0
        assert len(tensors) == len(weights_before) + num_scales
        new_index = json.loads((new_folder / INDEX_FILE).read_text())
        assert new_index["weight_map"].keys() == tensors.keys()
        assert new_index["metadata"] == {"mine": 2}  # the size of the old tensors was removed
        with safe_open(new_folder / "model-0.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}
    # In place, each shard with scales is replaced by a new file without them.
    NEW_SCALES.save_pretrained(old_folder, format="compressed-tensors", overwrite=True)
    assert_same_scales(KVScales.from_pretrained(old_folder), NEW_SCALES)
    assert (
        load_all_tensors(old_folder).keys()
        == load_all_tensors(tmp_path / "compressed-tensors").keys()
    )


def save_with_scales(folder: Path, plain_folder: Path) -> None:
    declare(plain_folder, folder)
    zero_point = {"model.layers.0.self_attn.k_zero_point": torch.zeros(1, dtype=torch.int8)}
    tensors = sorted((load_all_tensors(folder) | zero_point).items())
    for path in (*folder.glob("*.safetensors"), folder / INDEX_FILE):
        path.unlink()
    weight_map = {}
    for file_index in range(2):
        file = f"model-{file_index}.safetensors"
        file_tensors = dict(tensors[file_index::2])
        save_file(file_tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(file_tensors, file)
    (folder / INDEX_FILE).write_text(
        json.dumps({"metadata": {"total_size": 1, "mine": 2}, "weight_map": weight_map})
    )


def test_an_interrupt_leaves_a_complete_folder(tmp_path, plain_folder, monkeypatch):
    # The call is interrupted before each replaced or deleted file, and then repeated.
    expected = load_file(plain_folder / "model.safetensors")
    replace, unlink = Path.replace, Path.unlink

    def stop_at_step(self: Path, *arguments: Any, **options: Any) -> Any:
        function = replace if arguments else unlink
        if arguments or not self.name.endswith(".part"):
            steps.append(self)
            if len(steps) > max_steps:
                raise KeyboardInterrupt
        return function(self, *arguments, **options)

    for max_steps in itertools.count():
        steps: list[Path] = []
        folder = tmp_path / str(max_steps)
        save_with_scales(folder, plain_folder)
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(Path, "replace", stop_at_step)
            patch.setattr(Path, "unlink", stop_at_step)
            TOO_SMALL.save_pretrained(folder, format="compressed-tensors", overwrite=True)
        weight_map = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
        actual = {name: load_file(folder / weight_map[name])[name] for name in expected}
        assert all((folder / file).exists() for file in weight_map.values())
        assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
        NEW_SCALES.save_pretrained(folder, format="compressed-tensors", overwrite=True)
        assert_same_scales(KVScales.from_pretrained(folder), NEW_SCALES)
        if len(steps) <= max_steps:
            break
    assert max_steps > 4


@pytest.mark.parametrize("format", ["compressed-tensors", "hf_fp8kv"])
def test_output_scales_of_projections_are_removed(tmp_path, plain_folder, format):
    old_folder = declare_output_scales(plain_folder, tmp_path / "old")
    assert KVScales.from_pretrained(old_folder).layers[0].k == torch.tensor(0.002)
    new_folder = tmp_path / "new"
    NEW_SCALES.save_pretrained(new_folder, format=format, checkpoint=old_folder, overwrite=True)
    assert_same_scales(KVScales.from_pretrained(new_folder), NEW_SCALES)
    assert not [name for name in load_all_tensors(new_folder) if "output_scale" in name]
    config_text = (new_folder / "config.json").read_text()
    assert "output_activations" not in config_text
    assert ("kv_cache_scheme" in config_text) == (format == "compressed-tensors")


def test_a_declaration_that_cannot_be_removed_is_refused(tmp_path, plain_folder):
    TOO_SMALL.save_pretrained(tmp_path / "old", format="modelopt", checkpoint=plain_folder)
    old_content = read_content(tmp_path)
    with scale_error(r"hf_quant_config\.json", "Choose modelopt"):
        NEW_SCALES.save_pretrained(
            tmp_path / "new", format="tgi", checkpoint=tmp_path / "old", overwrite=True
        )
    assert read_content(tmp_path) == old_content


@pytest.mark.parametrize("save", [save_plain, save_w8a8], ids=["dense", "w8a8"])
@torch.no_grad()
def test_a_model_with_replaced_scales_loads_and_uses_them(tmp_path, caplog, save):
    pytest.importorskip("compressed_tensors")
    declare(save(tmp_path / "plain"), tmp_path / "old")
    NEW_SCALES.save_pretrained(
        tmp_path / "new", format="compressed-tensors", checkpoint=tmp_path / "old", overwrite=True
    )
    caplog.set_level(logging.WARNING)
    model = load(tmp_path / "new")
    assert "newly initialized" not in caplog.text
    if CACHE == "past_key_values":  # with transformers 5.24, compressed-tensors 0.20 has no scale
        scale = model.model.layers[1].self_attn.k_scale
        assert torch.equal(scale.flatten(), NEW_SCALES.layers[1].k.flatten().to(scale.dtype))
    ids = torch.arange(3, 20)[None]
    logits = model(ids, past_key_values=FP8PagedCache.from_pretrained(tmp_path / "new")).logits
    assert torch.equal(logits, load(tmp_path / "plain")(ids).logits)
