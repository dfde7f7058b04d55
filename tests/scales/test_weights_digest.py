"""Tests of the digest of a model's weights, and of warnings about outdated scales and plans."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_fp8kv import KVScales, LayerScales, ScaleError, calibrate, enable, measure, serving
from hf_fp8kv.cli.scales_table import describe_scales, make_tables
from hf_fp8kv.utils.digests import digest_decoder, digest_weights
from tests.helpers.tiny_models import tiny

TEXTS = [torch.randint(3, 90, (40,), generator=torch.Generator().manual_seed(4)).tolist()]


@pytest.fixture(scope="module")
def calibrated() -> KVScales:
    """Return scales of the model that `llama()` returns."""
    model, _ = tiny("gqa")
    return calibrate(model, TEXTS, center=False, held_out=0, progress=False)


def llama() -> Any:
    return tiny("gqa")[0]


def take_step(model: Any, rate: float = 1e-6) -> None:
    """Take one step of an optimizer, with a learning rate as small as trainers use."""
    ids = torch.tensor(TEXTS)
    model(ids, labels=ids).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=rate).step()


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that returns the warnings about stale scales."""
    caplog.set_level(logging.WARNING, "hf_fp8kv")
    return lambda: [r.message for r in caplog.records if "made for different weights" in r.message]


def test_calibration_stores_the_digest_of_the_weights(calibrated: KVScales) -> None:
    assert calibrated.weights_digest == digest_decoder(llama())
    assert calibrated.made_for(llama()) is True
    assert calibrated.made_for(tiny("gqa", seed=1)[0]) is False


def test_a_step_of_an_optimizer_changes_the_digest(calibrated: KVScales) -> None:
    model = llama()
    take_step(model)
    assert calibrated.made_for(model) is False


@pytest.mark.parametrize(
    "name", ["embed_tokens", "layers.0.mlp.up_proj", "layers.1.self_attn.v_proj"]
)
def test_any_changed_value_changes_the_digest(calibrated: KVScales, name: str) -> None:
    """`digest_weights` also detects changes below the precision of bfloat16."""
    model = llama()
    exact = digest_weights(model)
    for factor, expected in ((1 + 2**-20, True), (1 + 2**-6, False)):
        with torch.no_grad():
            model.model.get_submodule(name).weight[-1, -1] *= factor
        assert calibrated.made_for(model) is expected
        assert digest_weights(model) != exact


def test_the_digest_leaves_out_the_output_head(calibrated: KVScales) -> None:
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    assert calibrated.made_for(model) is True


def test_the_digest_survives_saving_and_wrapping(calibrated: KVScales, tmp_path: Path) -> None:
    model = llama().bfloat16()
    expected = digest_decoder(model)
    assert expected == calibrated.weights_digest  # the same values, rounded to bfloat16
    model.save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float32):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        assert digest_decoder(loaded) == expected
    assert digest_decoder(loaded.model) == expected
    assert digest_decoder(torch.nn.Sequential(loaded)) == expected


def test_an_adapter_changes_the_digest_if_it_has_an_effect(calibrated: KVScales) -> None:
    """The modules have the names of PEFT's layers, which contain the projection."""
    model = llama()
    attention = model.model.layers[0].self_attn
    wrapped = torch.nn.Module()
    wrapped.base_layer = attention.k_proj
    for name, shape in (("lora_A", (64, 4)), ("lora_B", (4, 32))):
        wrapped.add_module(name, torch.nn.ModuleDict({"default": torch.nn.Linear(*shape)}))
        wrapped.get_submodule(name)["default"].bias = None
    attention.k_proj = wrapped
    with torch.no_grad():
        wrapped.lora_B["default"].weight.zero_()
        assert calibrated.made_for(model) is True
        wrapped.lora_B["default"].weight[0, 0] = 1e-3
        assert calibrated.made_for(model) is False


def test_weights_on_the_meta_device_have_no_digest(calibrated: KVScales) -> None:
    model = llama()
    model.model.layers[1].to("meta")
    assert calibrated.made_for(model) is None
    assert calibrated.made_for(torch.nn.Linear(2, 2)) is None


def test_the_digest_is_saved_in_the_file(calibrated: KVScales, tmp_path: Path) -> None:
    calibrated.save_pretrained(tmp_path)
    loaded = KVScales.from_pretrained(tmp_path)
    assert loaded.weights_digest == calibrated.weights_digest
    calibrated.save_pretrained(tmp_path / "vllm", format="vllm-json")
    assert KVScales.from_pretrained(tmp_path / "vllm").made_for(llama()) is None


def test_the_digest_is_displayed(calibrated: KVScales) -> None:
    lines = [str(part) for part in make_tables(calibrated, None, 200)]
    assert f"for weights with the digest {calibrated.weights_digest}" in lines
    assert describe_scales(calibrated)["weights_digest"] == calibrated.weights_digest
    assert not any(
        "weights" in str(part) for part in make_tables(KVScales(calibrated.layers), None, 200)
    )


@pytest.mark.parametrize("digest", [["a"], {"0": "a"}, 1, "abc", "ax"])
def test_a_damaged_digest_is_rejected(calibrated: KVScales, tmp_path: Path, digest: Any) -> None:
    path = calibrated.save_pretrained(tmp_path)[-1]
    rewrite(path, lambda header: header | {"weights_digest": digest})
    with pytest.raises(ScaleError, match="expected a file of scales as save_pretrained writes it"):
        KVScales.from_file(path)


def read_header(path: Path) -> dict[str, Any]:
    """Return the metadata of a file of scales."""
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["hf_fp8kv"])


def rewrite(path: Path, change: Callable[[dict], dict], tensors: dict | None = None) -> None:
    """Change the metadata of a file of scales, and replace its tensors if `tensors` is set."""
    tensors = load_file(path) if tensors is None else tensors
    save_file(tensors, path, {"hf_fp8kv": json.dumps(change(read_header(path)))})


CHECKS: dict[str, Callable[[Any, Any], Any]] = {
    "enable": lambda model, scales: enable(model, scales=scales),
    "training": lambda model, scales: enable(model, training="stored", scales=scales),
    "serving": lambda model, scales: serving.enable(model, scales=scales, probe=False),
    "measure": lambda model, scales: measure(model, scales, TEXTS, progress=False),
}


@pytest.mark.parametrize("check", CHECKS)
def test_outdated_scales_warn_once_and_current_scales_do_not(
    check: str, calibrated: KVScales, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    calibrated.save_pretrained(tmp_path)
    model = llama()
    CHECKS[check](model, tmp_path)
    assert not warnings()
    take_step(model)
    for _ in range(2):
        CHECKS[check](model, tmp_path)
    (message,) = warnings()
    assert str(tmp_path) in message
    assert "LlamaForCausalLM has now. Values that exceed" in message
    assert "Calibrate again" in message


def test_scales_without_a_digest_do_not_warn(
    calibrated: KVScales, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    """Files of other tools, constants, and scales without metadata have no digest."""
    path = calibrated.save_pretrained(tmp_path)[-1]
    earlier = {"weights_digest": None, "fingerprint": {"0": "ab"}}  # an entry of earlier versions
    rewrite(path, lambda header: header | earlier)
    old = KVScales.from_file(path)
    assert old.weights_digest is None
    assert old.made_for(llama()) is None
    layer = LayerScales(torch.tensor(0.01), torch.tensor(0.01))
    for scales in (path, 0.01, KVScales({0: layer, 1: layer}), None):
        enable(llama(), scales=scales)
    assert not warnings()
