"""`hf-fp8kv convert`: what it writes, says and refuses."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_fp8kv.scales import CHECKPOINT_FORMATS, KVScales, LayerScales, save
from tests.scales.test_export import expected, random_scales

DATA = Path(__file__).parents[1] / "data" / "scales"


def assert_holds(folder: Path, scales: KVScales, format: str) -> None:
    """The folder holds what the format keeps of the scales."""
    read = KVScales.from_pretrained(folder)
    assert read.format == format
    assert list(read.layers) == list(scales.layers)
    for index, layer in scales.layers.items():
        k, v = expected(layer, format)
        assert torch.equal(read.layers[index].k.flatten(), k.flatten())
        assert torch.equal(read.layers[index].v.flatten(), v.flatten())


@pytest.mark.parametrize("kind", ["tensor", "centered-head"])
@pytest.mark.parametrize("format", [f for f in CHECKPOINT_FORMATS if f != "hf_fp8kv"])
def test_into_every_format_and_out_of_it(run, tmp_path, format, kind):
    scales = random_scales(kind)
    scales.save_pretrained(tmp_path / "own")
    own, out_folder, back = (str(tmp_path / name) for name in ("own", "out", "back"))
    code, out, err = run("convert", own, out_folder, "--to", format)
    assert code == 0, err
    assert sorted(map(Path, out.splitlines())) == sorted((tmp_path / "out").iterdir())
    assert_holds(tmp_path / "out", scales, format)
    assert f"hf_fp8kv -> {format}: 3 layers, per {kind.removeprefix('centered-')}" in err
    if kind == "centered-head":
        assert err.count("warning: ") == 1
        assert "make room for the centers" in err
    elif format != "vllm-json":
        assert "warning" not in err
    code, out, err = run("convert", out_folder, back, "--to", "hf_fp8kv", "--json")
    assert code == 0, err
    said = json.loads(out)
    assert (said["from"]["format"], said["from"]["model_type"]) == (format, "llama")
    assert said["to"] == {"format": "hf_fp8kv", "folder": back}
    assert sorted(map(Path, said["files"])) == sorted((tmp_path / "back").iterdir())
    assert said["warnings"] == []
    read = KVScales.from_pretrained(back)
    assert read.format == "hf_fp8kv"
    for index, layer in scales.layers.items():
        pairs = zip(
            (read.layers[index].k, read.layers[index].v), expected(layer, format), strict=True
        )
        assert all(torch.equal(x.flatten(), y.flatten()) for x, y in pairs)


def test_a_file_is_read_too_and_what_its_reader_warns_of_is_said_once(run, tmp_path):
    path = next((DATA / "vllm-two-ranks").glob("*.json"))
    code, out, err = run("convert", str(path), str(tmp_path / "out"), "--to", "autofp8", "--json")
    assert code == 0, err
    warnings = json.loads(out)["warnings"]
    assert err.splitlines() == [f"warning: {message}" for message in warnings]
    assert any("ranks differ" in message for message in warnings)


def test_a_copy_of_a_checkpoint(run, tmp_path, model):
    layer = LayerScales(torch.tensor(0.5), torch.tensor(0.25))
    KVScales({0: layer, 1: layer}, model_type="llama").save_pretrained(tmp_path / "own")
    fixed = ["convert", str(tmp_path / "own"), str(tmp_path / "out"), "--to", "compressed-tensors"]
    code, out, err = run(*fixed, "--checkpoint", model, "--weights", "link")
    assert code == 0, err
    files = (tmp_path / "out").glob("*.safetensors")
    assert any(path.samefile(Path(model) / "model.safetensors") for path in files)
    assert str(tmp_path / "out" / "model-kv-scales.safetensors") in out.splitlines()
    assert KVScales.from_pretrained(tmp_path / "out").layers[1].k == 0.5


def test_nothing_is_replaced_without_being_asked(run, tmp_path):
    random_scales("tensor").save_pretrained(tmp_path / "own")
    other = random_scales("tensor", seed=1)
    other.save_pretrained(tmp_path / "out", format="vllm-json")
    arguments = ["convert", str(tmp_path / "own"), str(tmp_path / "out"), "--to", "vllm-json"]
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith("hf-fp8kv: error: ")
    assert err.count("\n") == 1
    assert "--overwrite" in err
    assert_holds(tmp_path / "out", other, "vllm-json")
    assert run(*arguments, "--overwrite")[0] == 0
    assert_holds(tmp_path / "out", random_scales("tensor"), "vllm-json")


def test_ranks_of_the_json(run, tmp_path):
    random_scales("tensor").save_pretrained(tmp_path / "own")
    arguments = ["convert", str(tmp_path / "own"), str(tmp_path / "out"), "--tp-size", "4", "--to"]
    assert run(*arguments, "vllm-json")[0] == 0
    data = json.loads((tmp_path / "out" / "kv_cache_scales.json").read_text())
    assert set(data["kv_cache"]["scaling_factor"]) == {"0", "1", "2", "3"}
    code, _, err = run(*arguments, "autofp8")
    assert code == 1
    assert "tp_size" in err


def test_a_model_type(run, tmp_path):
    nameless = KVScales(random_scales("tensor").layers)
    nameless.save_pretrained(tmp_path / "own")
    arguments = ["convert", str(tmp_path / "own"), str(tmp_path / "out"), "--to", "vllm-json"]
    code, _, err = run(*arguments)
    assert code == 0
    assert "warning: " in err
    assert "model_type is not known" in err
    named = [*arguments, "--overwrite", "--model-type", "qwen2"]
    code, _, err = run(*named)
    assert (code, "is not known" in err) == (0, False)
    out = tmp_path / "out"
    assert KVScales.from_pretrained(out).model_type == "qwen2"
    again = ["convert", str(out), str(tmp_path / "more"), "--to", "tgi", "--model-type", "llama"]
    code, _, err = run(*again)
    assert code == 1
    assert "'llama'" in err
    assert "--lenient" in err
    code, _, err = run(*again, "--lenient")
    assert code == 0
    assert "warning: " in err
    assert KVScales.from_pretrained(tmp_path / "more").model_type == "llama"


def test_missing_layers_are_for_the_lenient(run, tmp_path):
    layers = random_scales("tensor").layers
    KVScales({0: layers[0], 2: layers[2]}, model_type="llama").save_pretrained(
        tmp_path / "there", format="autofp8"
    )
    config = json.loads((tmp_path / "there" / "config.json").read_text())
    (tmp_path / "there" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    arguments = ["convert", str(tmp_path / "there"), str(tmp_path / "out"), "--to", "tgi"]
    code, _, err = run(*arguments)
    assert code == 1
    assert "--lenient" in err
    code, out, err = run(*arguments, "--lenient", "--json")
    assert code == 0, err
    assert any("layers without scales" in message for message in json.loads(out)["warnings"])


def test_an_upload(run, tmp_path, monkeypatch):
    uploaded: list[str] = []

    class FakeApi:
        def __init__(self, token: str | None) -> None:
            pass

        def create_repo(self, repo_id: str, **_: object) -> None:
            assert repo_id == "org/name"

        def list_repo_files(self, repo_id: str, **_: object) -> list[str]:
            return ["kv_cache_scales.json"]

        def upload_folder(self, *, folder_path: Path, **_: object) -> SimpleNamespace:
            uploaded.extend(path.name for path in folder_path.iterdir())
            return SimpleNamespace(commit_url="https://hf.co/org/name/commit/1")

    monkeypatch.setattr(save, "HfApi", FakeApi)
    random_scales("tensor").save_pretrained(tmp_path / "own")
    arguments = ["convert", str(tmp_path / "own"), "--push-to-hub", "org/name", "--to", "vllm-json"]
    code, out, err = run(*arguments)
    assert (code, out, uploaded) == (1, "", [])
    assert "--overwrite" in err
    code, out, err = run(*arguments, "--overwrite")
    assert (code, out) == (0, "https://hf.co/org/name/commit/1\n")
    assert sorted(uploaded) == ["README.md", "kv_cache_scales.json"]
    code, out, _ = run(*arguments, "--overwrite", "--json")
    assert json.loads(out)["to"]["commit"] == "https://hf.co/org/name/commit/1"
