"""Copies of checkpoints that have KV scales, with others in their place (`overwrite=True`)."""

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
from tests.scales.test_sources import refused

pytestmark = pytest.mark.filterwarnings("ignore")

NEW = random_scales("head", seed=5, layers=LAYERS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return save_plain(tmp_path_factory.mktemp("checkpoint") / "plain")


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every file, as a reader finds them that does not ask the index."""
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        if path.name != "kv_scales.safetensors":
            found = load_file(path)
            assert not found.keys() & tensors.keys()
            tensors |= found
    return tensors


# Grid: every format by itself, and each way from one place of scales to a different one.
@pytest.mark.parametrize(
    ("source", "target"),
    [
        *((f, f) for f in SCALE_FORMATS),
        *itertools.permutations(("compressed-tensors", "tgi", "hf_fp8kv"), 2),
        ("tgi", "vllm-json"),
    ],
)
def test_other_scales_take_the_place_of_those_that_are_there(tmp_path, plain, source, target):
    TOO_SMALL.save_pretrained(tmp_path / "old", format=source, checkpoint=plain)
    before = content(tmp_path / "old")
    arguments = {"format": target, "checkpoint": tmp_path / "old"}
    if source not in ("hf_fp8kv", "vllm-json"):
        with refused("expected a checkpoint without KV scales", "--overwrite"):
            NEW.save_pretrained(tmp_path / "new", **arguments)
        assert not (tmp_path / "new").exists()
    paths = NEW.save_pretrained(tmp_path / "new", **arguments, overwrite=True)
    assert content(tmp_path / "old") == before
    assert all(path.is_file() for path in paths)
    # It is what a copy of the original weights is, but for names of files and the index.
    NEW.save_pretrained(tmp_path / "direct", format=target, checkpoint=plain)
    found, wanted = (all_tensors(tmp_path / name) for name in ("new", "direct"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    configs = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("new", "direct")]
    assert configs[0] == configs[1]
    assert_same(*(KVScales.from_pretrained(tmp_path / name) for name in ("new", "direct")))
    if source == target and source not in ("hf_fp8kv", "vllm-json"):
        index = "model.safetensors.index.json"
        found, wanted = ((tmp_path / name / index) for name in ("new", "direct"))
        if wanted.exists():
            assert json.loads(found.read_text()) == json.loads(wanted.read_text())


@pytest.mark.parametrize("weights", ["copy", "link"])
def test_scales_among_the_weights(tmp_path, plain, weights):
    """As LLM Compressor writes them: in the files of the weights, with the config of before."""
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
        left, wanted = all_tensors(new), load_file(plain / "model.safetensors")
        assert all(torch.equal(left.pop(name), tensor) for name, tensor in wanted.items())
        assert len(left) == (2 * LAYERS if target == "compressed-tensors" else 0)
        written = json.loads((new / "model.safetensors.index.json").read_text())
        assert written["weight_map"].keys() == all_tensors(new).keys()
        assert written["metadata"] == {"mine": 2}  # no count of other tensors
        with safe_open(new / first, "pt") as file:
            assert file.metadata() == {"format": "pt"}
    # In its own folder the shards are written again, each as a whole.
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
def test_a_folder_is_whole_whenever_its_scales_are_replaced(tmp_path, plain, monkeypatch, count):
    """Every file that an index names is there, all weights too, and the call can be repeated."""
    wanted = load_file(plain / "model.safetensors")
    replace, unlink = Path.replace, Path.unlink

    def stop(self: Path, *arguments: Any, **options: Any) -> Any:
        act = replace if arguments else unlink
        if arguments or not self.name.endswith(".part"):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
        return act(self, *arguments, **options)

    for at in itertools.count():
        folder, left = tmp_path / str(at), [at]
        save_in_files(folder, plain, count)
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(Path, "replace", stop)
            patch.setattr(Path, "unlink", stop)
            TOO_SMALL.save_pretrained(folder, format="compressed-tensors", overwrite=True)
        index = folder / "model.safetensors.index.json"
        if not (folder / "model.safetensors").exists():
            weight_map = json.loads(index.read_text())["weight_map"]
            found = {name: load_file(folder / weight_map[name])[name] for name in wanted}
            assert all((folder / file).exists() for file in weight_map.values())
        else:
            found = load_file(folder / "model.safetensors")
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        NEW.save_pretrained(folder, format="compressed-tensors", overwrite=True)
        assert_same(KVScales.from_pretrained(folder), NEW)
        if left[0] >= 0:
            break
    assert at > 4


def test_a_disk_that_is_full_while_weights_are_written_again(tmp_path, plain):
    resource = pytest.importorskip("resource")
    save_in_files(tmp_path / "old", plain, 1)
    before, limits = content(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "old" / "model.safetensors").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, limits[1]))
    try:
        for target in ("old", "new"):
            source = tmp_path / "old" if target == "new" else None
            with refused("expected a folder that can be written, got .*too large"):
                NEW.save_pretrained(
                    tmp_path / target, format="tgi", checkpoint=source, overwrite=True
                )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert content(tmp_path) == before


def test_outputs_of_projections_that_were_the_cache_once(tmp_path, plain):
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
        kept = json.loads((new / "config.json").read_text())["quantization_config"]
        without = {"targets": ["re:.*v_proj"], "weights": weights}
        assert kept["config_groups"] == {"group_0": groups["group_0"], "group_2": without}
        assert ("kv_cache_scheme" in kept) == (target == "compressed-tensors")


def test_a_declaration_that_would_stay_is_refused(tmp_path, plain):
    TOO_SMALL.save_pretrained(tmp_path / "old", format="modelopt", checkpoint=plain)
    before = content(tmp_path)
    with refused(r"hf_quant_config\.json", "Choose modelopt"):
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
    if CACHE == "past_key_values":  # compressed-tensors 0.20 has none with transformers 5.24
        scale = model.model.layers[1].self_attn.k_scale
        assert torch.equal(scale.flatten(), NEW.layers[1].k.flatten().to(scale.dtype))
    cache = FP8PagedCache.from_pretrained(tmp_path / "new")
    with torch.no_grad():
        logits = model(torch.arange(3, 20)[None], past_key_values=cache).logits
        wanted = load(tmp_path / "plain")(torch.arange(3, 20)[None]).logits
    assert torch.equal(logits, wanted)
