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
from hf_fp8kv.scales import SCALE_FORMATS
from tests.helpers.declared import LAYERS, TOO_SMALL, declare, load, save_plain, save_w8a8
from tests.scales.test_export import content, random_scales
from tests.scales.test_scales import assert_same
from tests.scales.test_sources import scale_error

pytestmark = pytest.mark.filterwarnings("ignore")

NEW = random_scales("head", seed=5, layers=LAYERS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return save_plain(tmp_path_factory.mktemp("checkpoint") / "plain")


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all files, as a reader without the index finds them."""
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        if path.name != "kv_scales.safetensors":
            new = load_file(path)
            assert not new.keys() & tensors.keys()
            tensors |= new
    return tensors


# Grid: every format replaces itself, and scales move between each pair of locations.
@pytest.mark.parametrize(
    ("source", "target"),
    [
        *((f, f) for f in SCALE_FORMATS),
        *itertools.permutations(("compressed-tensors", "tgi", "hf_fp8kv"), 2),
        ("tgi", "vllm-json"),
    ],
)
def test_existing_scales_are_replaced(tmp_path, plain, source, target):
    TOO_SMALL.save_pretrained(tmp_path / "old", format=source, checkpoint=plain)
    before = content(tmp_path / "old")
    arguments = {"format": target, "checkpoint": tmp_path / "old"}
    if source not in ("hf_fp8kv", "vllm-json"):
        with scale_error("expected a checkpoint without KV scales", "--overwrite"):
            NEW.save_pretrained(tmp_path / "new", **arguments)
        assert not (tmp_path / "new").exists()
    paths = NEW.save_pretrained(tmp_path / "new", **arguments, overwrite=True)
    assert content(tmp_path / "old") == before
    assert all(path.is_file() for path in paths)
    # The copy matches a copy of the original weights, except the names of files and the index.
    NEW.save_pretrained(tmp_path / "direct", format=target, checkpoint=plain)
    actual, expected = (all_tensors(tmp_path / name) for name in ("new", "direct"))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)
    configs = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("new", "direct")]
    assert configs[0] == configs[1]
    assert_same(*(KVScales.from_pretrained(tmp_path / name) for name in ("new", "direct")))
    if source == target and source not in ("hf_fp8kv", "vllm-json"):
        index = "model.safetensors.index.json"
        actual, expected = ((tmp_path / name / index) for name in ("new", "direct"))
        if expected.exists():
            assert json.loads(actual.read_text()) == json.loads(expected.read_text())


@pytest.mark.parametrize("weights", ["copy", "link"])
def test_scales_in_the_files_of_the_weights_are_replaced(tmp_path, plain, weights):
    """LLM Compressor writes scales into the files of the weights, with the old config."""
    old = tmp_path / "old"
    declare(plain, old)
    tensors = all_tensors(old)
    tensors["model.layers.0.self_attn.k_zero_point"] = torch.zeros(1, dtype=torch.int8)
    for path in (*old.glob("*.safetensors"), old / "model.safetensors.index.json"):
        path.unlink()
    names = sorted(tensors)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    half = len(names) // 2
    files = dict.fromkeys(names[:half], first) | dict.fromkeys(names[half:], second)
    for file in (first, second):
        save_file({n: tensors[n] for n in names if files[n] == file}, old / file, {"format": "pt"})
    index = {"metadata": {"total_size": 1, "mine": 2}, "weight_map": files}
    (old / "model.safetensors.index.json").write_text(json.dumps(index))
    for target in ("compressed-tensors", "hf_fp8kv"):
        new = tmp_path / target
        NEW.save_pretrained(new, format=target, checkpoint=old, weights=weights, overwrite=True)
        assert_same(KVScales.from_pretrained(new), NEW)
        remaining, expected = all_tensors(new), load_file(plain / "model.safetensors")
        assert all(torch.equal(remaining.pop(name), tensor) for name, tensor in expected.items())
        assert len(remaining) == (2 * LAYERS if target == "compressed-tensors" else 0)
        written = json.loads((new / "model.safetensors.index.json").read_text())
        assert written["weight_map"].keys() == all_tensors(new).keys()
        assert written["metadata"] == {"mine": 2}  # the size of the old tensors is removed
        with safe_open(new / first, "pt") as file:
            assert file.metadata() == {"format": "pt"}
    # Each shard in the same folder is rewritten as a whole.
    NEW.save_pretrained(old, format="compressed-tensors", overwrite=True)
    assert_same(KVScales.from_pretrained(old), NEW)
    assert all_tensors(old).keys() == all_tensors(tmp_path / "compressed-tensors").keys()


def save_in_files(folder: Path, plain: Path, count: int) -> None:
    """Save a checkpoint with scales among its weights, in `count` files."""
    declare(plain, folder)
    tensors = sorted(all_tensors(folder).items())
    for path in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
        path.unlink()
    if count == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return
    weight_map = {}
    for i in range(count):
        file, part = f"model-{i}.safetensors", dict(tensors[i::count])
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("count", [1, 2])
def test_an_interrupted_replacement_leaves_a_complete_folder(tmp_path, plain, monkeypatch, count):
    """All files of an index exist, all weights are complete, and the call can be repeated."""
    expected = load_file(plain / "model.safetensors")
    replace, unlink = Path.replace, Path.unlink

    def stop(self: Path, *arguments: Any, **options: Any) -> Any:
        act = replace if arguments else unlink
        if arguments or not self.name.endswith(".part"):
            remaining[0] -= 1
            if remaining[0] < 0:
                raise KeyboardInterrupt
        return act(self, *arguments, **options)

    for num_steps in itertools.count():
        folder, remaining = tmp_path / str(num_steps), [num_steps]
        save_in_files(folder, plain, count)
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(Path, "replace", stop)
            patch.setattr(Path, "unlink", stop)
            TOO_SMALL.save_pretrained(folder, format="compressed-tensors", overwrite=True)
        index = folder / "model.safetensors.index.json"
        if not (folder / "model.safetensors").exists():
            weight_map = json.loads(index.read_text())["weight_map"]
            actual = {name: load_file(folder / weight_map[name])[name] for name in expected}
            assert all((folder / file).exists() for file in weight_map.values())
        else:
            actual = load_file(folder / "model.safetensors")
        assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
        NEW.save_pretrained(folder, format="compressed-tensors", overwrite=True)
        assert_same(KVScales.from_pretrained(folder), NEW)
        if remaining[0] >= 0:
            break
    assert num_steps > 4


def test_a_full_disk_while_weights_are_rewritten_changes_no_files(tmp_path, plain):
    resource = pytest.importorskip("resource")
    save_in_files(tmp_path / "old", plain, 1)
    before, limits = content(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "old" / "model.safetensors").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, limits[1]))
    try:
        for target in ("old", "new"):
            source = tmp_path / "old" if target == "new" else None
            with scale_error("expected a folder that can be written, got .*too large"):
                NEW.save_pretrained(
                    tmp_path / target, format="tgi", checkpoint=source, overwrite=True
                )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert content(tmp_path) == before


def test_output_scales_of_projections_are_removed(tmp_path, plain):
    old = tmp_path / "old"
    old.mkdir()
    outputs = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    tensors = load_file(plain / "model.safetensors")
    for layer in range(LAYERS):
        for side in "kv":
            name = f"model.layers.{layer}.self_attn.{side}_proj.output_scale"
            tensors[name] = torch.tensor([0.25])
    save_file(tensors, old / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    groups = {
        "group_0": {"targets": ["Linear"], "weights": weights},
        "group_1": {"targets": ["re:.*k_proj"], "output_activations": outputs},
        "group_2": {"targets": ["re:.*v_proj"], "weights": weights, "output_activations": outputs},
    }
    block = {"quant_method": "compressed-tensors", "config_groups": groups}
    (old / "config.json").write_text(json.dumps(config | {"quantization_config": block}))
    assert KVScales.from_pretrained(old).layers[0].k == 0.25
    for target in ("compressed-tensors", "hf_fp8kv"):
        new = tmp_path / target
        NEW.save_pretrained(new, format=target, checkpoint=old, overwrite=True)
        assert_same(KVScales.from_pretrained(new), NEW)
        assert not [name for name in all_tensors(new) if "output_scale" in name]
        config_entry = json.loads((new / "config.json").read_text())["quantization_config"]
        without = {"targets": ["re:.*v_proj"], "weights": weights}
        assert config_entry["config_groups"] == {"group_0": groups["group_0"], "group_2": without}
        assert ("kv_cache_scheme" in config_entry) == (target == "compressed-tensors")


def test_a_declaration_that_cannot_be_removed_is_rejected(tmp_path, plain):
    TOO_SMALL.save_pretrained(tmp_path / "old", format="modelopt", checkpoint=plain)
    before = content(tmp_path)
    with scale_error(r"hf_quant_config\.json", "Choose modelopt"):
        NEW.save_pretrained(
            tmp_path / "new", format="tgi", checkpoint=tmp_path / "old", overwrite=True
        )
    assert content(tmp_path) == before


@pytest.mark.parametrize("save", [save_plain, save_w8a8], ids=["dense", "w8a8"])
def test_a_model_with_replaced_scales_loads_and_uses_them(tmp_path, caplog, save):
    pytest.importorskip("compressed_tensors")
    declare(save(tmp_path / "plain"), tmp_path / "old")
    NEW.save_pretrained(
        tmp_path / "new", format="compressed-tensors", checkpoint=tmp_path / "old", overwrite=True
    )
    caplog.set_level(logging.WARNING)
    model = load(tmp_path / "new")
    assert "newly initialized" not in caplog.text
    if CACHE == "past_key_values":  # compressed-tensors 0.20 has no scale with transformers 5.24
        scale = model.model.layers[1].self_attn.k_scale
        assert torch.equal(scale.flatten(), NEW.layers[1].k.flatten().to(scale.dtype))
    cache = FP8PagedCache.from_pretrained(tmp_path / "new")
    with torch.no_grad():
        logits = model(torch.arange(3, 20)[None], past_key_values=cache).logits
        expected = load(tmp_path / "plain")(torch.arange(3, 20)[None]).logits
    assert torch.equal(logits, expected)
