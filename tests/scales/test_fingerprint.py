"""The fingerprint of the weights that static scales were made for, and who warns of a stale one."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_fp8kv import KVScales, LayerScales, ScaleError, calibrate, enable, measure, serving
from hf_fp8kv.cli.scales_table import describe_scales, inspect_table
from hf_fp8kv.utils.digests import fingerprint_weights
from tests.helpers.tiny_models import tiny

TEXTS = [torch.randint(3, 90, (40,), generator=torch.Generator().manual_seed(4)).tolist()]


@pytest.fixture(scope="module")
def made() -> KVScales:
    """Scales of the model that `llama()` returns."""
    model, _ = tiny("gqa")
    return calibrate(model, TEXTS, center=False, held_out=0, progress=False)


def llama() -> Any:
    return tiny("gqa")[0]


def take_step(model: Any, rate: float = 1e-6) -> None:
    """One step of an optimizer, with a learning rate as small as trainers use."""
    ids = torch.tensor(TEXTS)
    model(ids, labels=ids).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=rate).step()


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that returns the warnings about stale scales."""
    caplog.set_level(logging.WARNING, "hf_fp8kv")
    return lambda: [r.message for r in caplog.records if "made for other weights" in r.message]


def test_calibration_says_which_weights_it_saw(made: KVScales) -> None:
    assert made.fingerprint == fingerprint_weights(llama())
    assert list(made.fingerprint) == [0, 1]
    assert made.made_for(llama()) is True
    assert made.made_for(tiny("gqa", seed=1)[0]) is False


def test_a_step_of_an_optimizer_shows(made: KVScales) -> None:
    model = llama()
    take_step(model)
    assert made.made_for(model) is False
    with torch.no_grad():
        one = llama()
        one.model.layers[1].self_attn.v_proj.weight.mul_(1.01)
    assert made.made_for(one) is False
    assert fingerprint_weights(one)[0] == made.fingerprint[0]


def test_it_survives_saving_wrapping_and_another_dtype(made: KVScales, tmp_path: Path) -> None:
    model = llama().bfloat16()
    expected = fingerprint_weights(model)
    assert expected == made.fingerprint  # the same numbers, rounded to bfloat16
    model.save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float32):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        assert fingerprint_weights(loaded) == expected
    assert fingerprint_weights(loaded.model) == expected
    assert fingerprint_weights(torch.nn.Sequential(loaded)) == expected


def test_an_adapter_counts_once_it_does_something(made: KVScales) -> None:
    """The names of PEFT's layers, which keep the projection inside."""
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
        assert made.made_for(model) is True
        wrapped.lora_B["default"].weight[0, 0] = 1e-3
        assert made.made_for(model) is False


def test_nothing_is_said_of_layers_that_are_not_here(made: KVScales) -> None:
    model = llama()
    model.model.layers[1].to("meta")
    assert made.made_for(model) is True  # by the other layer
    assert list(fingerprint_weights(model)) == [0]
    model.to("meta")
    assert made.made_for(model) is None
    assert made.made_for(torch.nn.Linear(2, 2)) is None


def test_files_keep_it(made: KVScales, tmp_path: Path) -> None:
    made.save_pretrained(tmp_path)
    read = KVScales.from_pretrained(tmp_path)
    assert read.fingerprint == made.fingerprint
    assert read.weights_digest == made.weights_digest
    assert made.weights_digest != replace(made, fingerprint={0: "1"}).weights_digest
    made.save_pretrained(tmp_path / "vllm", format="vllm-json")
    assert KVScales.from_pretrained(tmp_path / "vllm").made_for(llama()) is None


def test_people_see_it(made: KVScales) -> None:
    shown = [str(part) for part in inspect_table(made, None, 200)]
    assert f"for weights with the fingerprint {made.weights_digest}" in shown
    assert describe_scales(made)["weights_digest"] == made.weights_digest
    assert not any(
        "weights" in str(part) for part in inspect_table(KVScales(made.layers), None, 200)
    )


@pytest.mark.parametrize("written", [["a"], {"x": "a"}, None, "abc"])
def test_a_damaged_fingerprint_is_refused(made: KVScales, tmp_path: Path, written: Any) -> None:
    path = made.save_pretrained(tmp_path)[-1]
    rewrite(path, lambda about: about | {"fingerprint": written})
    with pytest.raises(ScaleError, match="expected a file of scales as save_pretrained writes it"):
        KVScales.from_file(path)


def read_header(path: Path) -> dict[str, Any]:
    """The metadata of a file of scales."""
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["hf_fp8kv"])


def rewrite(path: Path, change: Callable[[dict], dict], tensors: dict | None = None) -> None:
    """Change the metadata of a file of scales, and its tensors if they are given."""
    tensors = load_file(path) if tensors is None else tensors
    save_file(tensors, path, {"hf_fp8kv": json.dumps(change(read_header(path)))})


CHECKS: dict[str, Callable[[Any, Any], Any]] = {
    "enable": lambda model, scales: enable(model, scales=scales),
    "training": lambda model, scales: enable(model, training="stored", scales=scales),
    "serving": lambda model, scales: serving.enable(model, scales=scales, probe=False),
    "measure": lambda model, scales: measure(model, scales, TEXTS, progress=False),
}


@pytest.mark.parametrize("check", CHECKS)
def test_stale_scales_warn_once_and_fresh_ones_do_not(
    check: str, made: KVScales, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    made.save_pretrained(tmp_path)
    model = llama()
    CHECKS[check](model, tmp_path)
    assert not warnings()
    take_step(model)
    for _ in range(2):
        CHECKS[check](model, tmp_path)
    (message,) = warnings()
    assert str(tmp_path) in message
    assert "LlamaForCausalLM has now: the attention of layers 0, 1 differs" in message
    assert "Calibrate again" in message


def test_scales_without_a_fingerprint_do_not_warn(
    made: KVScales, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    """Files of other tools, constants, scales of one's own."""
    path = made.save_pretrained(tmp_path)[-1]
    rewrite(path, lambda about: about | {"fingerprint": {}})
    old = KVScales.from_file(path)
    assert old.fingerprint == {}
    assert old.weights_digest is None
    assert old.made_for(llama()) is None
    layer = LayerScales(torch.tensor(0.01), torch.tensor(0.01))
    for scales in (path, 0.01, KVScales({0: layer, 1: layer}), None):
        enable(llama(), scales=scales)
    assert not warnings()
