"""Tests of the digest of a model's weights, and of warnings about outdated scales."""

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
from hf_fp8kv.utils.digests import digest_decoder, digest_weights
from hf_fp8kv_cli.scales_table import describe_scales, make_tables
from tests.helpers.tiny_models import build_variant

TEXTS = [torch.randint(3, 90, (40,), generator=torch.Generator().manual_seed(4)).tolist()]


@pytest.fixture(scope="module")
def model_scales() -> KVScales:
    """Return scales of the model that `make_model` returns."""
    model, _ = build_variant("gqa")
    return calibrate(model, TEXTS, center=False, progress=False)


def make_model() -> Any:
    return build_variant("gqa")[0]


def take_step(model: Any, rate: float = 1e-6) -> None:
    """Take one step of an optimizer, with a learning rate that is as low as in training."""
    ids = torch.tensor(TEXTS)
    model(ids, labels=ids).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=rate).step()


@pytest.fixture
def read_warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that lists the logged warnings about outdated scales."""
    caplog.set_level(logging.WARNING, "hf_fp8kv")
    return lambda: [r.message for r in caplog.records if "made for different weights" in r.message]


def test_calibration_stores_the_digest_of_the_weights(model_scales: KVScales) -> None:
    assert model_scales.weights_digest == digest_decoder(make_model())
    assert model_scales.made_for(make_model()) is True
    assert model_scales.made_for(build_variant("gqa", seed=1)[0]) is False


def test_a_step_of_an_optimizer_changes_the_digest(model_scales: KVScales) -> None:
    model = make_model()
    take_step(model)
    assert model_scales.made_for(model) is False


@pytest.mark.parametrize(
    "name", ["embed_tokens", "layers.0.mlp.up_proj", "layers.1.self_attn.v_proj"]
)
def test_any_changed_value_changes_the_digest(model_scales: KVScales, name: str) -> None:
    """`digest_weights` also detects changes below the precision of bfloat16."""
    model = make_model()
    exact_digest = digest_weights(model)
    for factor, expected in ((1 + 2**-20, True), (1 + 2**-6, False)):
        with torch.no_grad():
            model.model.get_submodule(name).weight[-1, -1] *= factor
        assert model_scales.made_for(model) is expected
        assert digest_weights(model) != exact_digest


def test_the_output_head_does_not_affect_the_digest(model_scales: KVScales) -> None:
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    assert model_scales.made_for(model) is True


def test_saving_and_wrapping_keep_the_digest(model_scales: KVScales, tmp_path: Path) -> None:
    model = make_model().bfloat16()
    expected = digest_decoder(model)
    assert expected == model_scales.weights_digest  # the digest covers values in bfloat16
    model.save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float32):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        assert digest_decoder(loaded) == expected
    assert digest_decoder(loaded.model) == expected
    assert digest_decoder(torch.nn.Sequential(loaded)) == expected


def test_an_adapter_changes_the_digest_if_it_has_an_effect(model_scales: KVScales) -> None:
    """The modules are named like PEFT's layers, which contain the projection."""
    model = make_model()
    attention = model.model.layers[0].self_attn
    adapter = torch.nn.Module()
    adapter.base_layer = attention.k_proj
    for name, shape in (("lora_A", (64, 4)), ("lora_B", (4, 32))):
        adapter.add_module(name, torch.nn.ModuleDict({"default": torch.nn.Linear(*shape)}))
        adapter.get_submodule(name)["default"].bias = None
    attention.k_proj = adapter
    with torch.no_grad():
        adapter.lora_B["default"].weight.zero_()
        assert model_scales.made_for(model) is True
        adapter.lora_B["default"].weight[0, 0] = 1e-3
        assert model_scales.made_for(model) is False


@pytest.mark.parametrize("name", ["magnitude_vector", "E"])
def test_a_zero_adapter_with_further_tensors_affects_the_digest(
    model_scales: KVScales, name: str
) -> None:
    """The magnitude of DoRA scales the whole weight, even if lora_B is zero."""
    model = make_model()
    adapter = model.model.layers[0].self_attn.k_proj
    for kind, values in (("A", torch.ones(4, 64)), ("B", torch.zeros(32, 4))):
        parameter = torch.nn.Parameter(values)
        adapter.add_module(f"lora_{kind}", torch.nn.ParameterDict({"default": parameter}))
    assert model_scales.made_for(model) is True
    magnitude = torch.nn.Parameter(torch.ones(32))
    adapter.add_module(f"lora_{name}", torch.nn.ParameterDict({"default": magnitude}))
    digest = digest_decoder(model)
    assert digest != model_scales.weights_digest
    with torch.no_grad():
        magnitude[3] = 2
    assert digest_decoder(model) not in (digest, model_scales.weights_digest)


def test_weights_on_the_meta_device_have_no_digest(model_scales: KVScales) -> None:
    model = make_model()
    model.model.layers[1].to("meta")
    assert model_scales.made_for(model) is None
    assert model_scales.made_for(torch.nn.Linear(2, 2)) is None


def test_the_digest_is_saved_in_the_file(model_scales: KVScales, tmp_path: Path) -> None:
    model_scales.save_pretrained(tmp_path)
    loaded = KVScales.from_pretrained(tmp_path)
    assert loaded.weights_digest == model_scales.weights_digest
    model_scales.save_pretrained(tmp_path / "vllm", format="vllm-json")
    assert KVScales.from_pretrained(tmp_path / "vllm").made_for(make_model()) is None


def test_the_digest_is_displayed(model_scales: KVScales) -> None:
    lines = [str(part) for part in make_tables(model_scales, None, 200)]
    assert f"for weights with the digest {model_scales.weights_digest}" in lines
    assert describe_scales(model_scales)["weights_digest"] == model_scales.weights_digest
    assert not any(
        "weights" in str(x) for x in make_tables(KVScales(model_scales.layers), None, 200)
    )


@pytest.mark.parametrize("digest", [["a"], {"0": "a"}, 1, "abc", "ax"])
def test_a_damaged_digest_is_rejected(model_scales: KVScales, tmp_path: Path, digest: Any) -> None:
    path = model_scales.save_pretrained(tmp_path)[-1]
    edit_metadata(path, lambda metadata: metadata | {"weights_digest": digest})
    with pytest.raises(ScaleError, match="expected a file of scales as save_pretrained writes it"):
        KVScales.from_file(path)


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a file of scales."""
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["hf_fp8kv"])


def edit_metadata(path: Path, change: Callable[[dict], dict], tensors: dict | None = None) -> None:
    """Change the metadata of a file of scales, and replace its tensors unless `tensors` is None."""
    tensors = load_file(path) if tensors is None else tensors
    save_file(tensors, path, {"hf_fp8kv": json.dumps(change(read_metadata(path)))})


CHECKS: dict[str, Callable[[Any, Any], Any]] = {
    "enable": lambda model, scales: enable(model, scales=scales),
    "training": lambda model, scales: enable(model, training="stored", scales=scales),
    "serving": lambda model, scales: serving.enable(model, scales=scales, probe=False),
    "measure": lambda model, scales: measure(model, scales, TEXTS, progress=False),
}


@pytest.mark.parametrize("check", CHECKS)
def test_outdated_scales_warn_once_and_current_scales_do_not(
    check: str, model_scales: KVScales, tmp_path: Path, read_warnings: Callable[[], list[str]]
) -> None:
    model_scales.save_pretrained(tmp_path)
    model = make_model()
    CHECKS[check](model, tmp_path)
    assert not read_warnings()
    take_step(model)
    for _ in range(2):
        CHECKS[check](model, tmp_path)
    (message,) = read_warnings()
    assert str(tmp_path) in message
    assert "LlamaForCausalLM has now. Values that exceed" in message
    assert "Calibrate again" in message


def test_scales_without_a_digest_do_not_warn(
    model_scales: KVScales, tmp_path: Path, read_warnings: Callable[[], list[str]]
) -> None:
    """Files of other tools, constants, and scales without metadata have no digest."""
    path = model_scales.save_pretrained(tmp_path)[-1]
    # Earlier versions wrote a fingerprint instead of a digest.
    old_entries = {"weights_digest": None, "fingerprint": {"0": "ab"}}
    edit_metadata(path, lambda metadata: metadata | old_entries)
    loaded = KVScales.from_file(path)
    assert loaded.weights_digest is None
    assert loaded.made_for(make_model()) is None
    layer = LayerScales(torch.tensor(0.01), torch.tensor(0.01))
    for scales in (path, 0.01, KVScales({0: layer, 1: layer}), None):
        enable(make_model(), scales=scales)
    assert not read_warnings()
