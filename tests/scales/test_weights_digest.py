"""Tests of the digest of a model's weights, and of warnings about outdated scales."""

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

from hf_fp8kv import KVScales, calibrate, enable, serving
from hf_fp8kv.utils.digests import digest_decoder, digest_weights
from tests.helpers.tiny_models import build_variant

TEXTS = [torch.randint(3, 90, (40,), generator=torch.Generator().manual_seed(4)).tolist()]


@pytest.fixture(scope="module")
def model_scales() -> KVScales:
    return calibrate(make_model(), TEXTS, center=False, progress=False)


def make_model() -> Any:
    return build_variant("gqa")[0]


@pytest.fixture
def read_warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that lists the logged warnings about outdated scales."""
    caplog.set_level(logging.WARNING, "hf_fp8kv")
    return lambda: [text for text in caplog.messages if "made for different weights" in text]


@pytest.mark.parametrize(
    "name", ["embed_tokens", "layers.0.mlp.up_proj", "layers.1.self_attn.v_proj"]
)
@torch.no_grad()
def test_changes_visible_in_bfloat16_change_the_digest(model_scales: KVScales, name: str) -> None:
    # `digest_weights` also detects changes below the precision of bfloat16.
    model = make_model()
    exact_digest = digest_weights(model)
    model.lm_head.weight.mul_(-1)  # the output head does not affect the digest
    for factor, expected in ((1 + 2**-20, True), (1 + 2**-6, False)):
        model.model.get_submodule(name).weight[-1, -1] *= factor
        assert model_scales.made_for(model) is expected
        assert digest_weights(model) != exact_digest


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


def add_adapter(module: torch.nn.Module, **tensors: torch.Tensor) -> None:
    """Add tensors to a projection, with the names of PEFT's layers."""
    for kind, tensor in tensors.items():
        parameter = torch.nn.Parameter(tensor)
        module.add_module(f"lora_{kind}", torch.nn.ParameterDict({"default": parameter}))


@torch.no_grad()
def test_an_adapter_changes_the_digest_if_it_has_an_effect(model_scales: KVScales) -> None:
    # The magnitude of DoRA scales the whole weight, even if lora_B is zero.
    model = make_model()
    projection = model.model.layers[0].self_attn.k_proj
    add_adapter(projection, A=torch.ones(4, 64), B=torch.zeros(32, 4))
    assert model_scales.made_for(model) is True
    projection.lora_B["default"][0, 0] = 1e-3
    assert model_scales.made_for(model) is False
    projection.lora_B["default"].zero_()
    add_adapter(projection, magnitude_vector=torch.ones(32))
    assert model_scales.made_for(model) is False


def test_weights_on_the_meta_device_have_no_digest(model_scales: KVScales) -> None:
    model = make_model()
    model.model.layers[1].to("meta")
    assert model_scales.made_for(model) is None
    assert model_scales.made_for(torch.nn.Linear(2, 2)) is None


def read_metadata(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["hf_fp8kv"])


def edit_metadata(path: Path, change: Callable[[dict], dict], tensors: dict | None = None) -> None:
    """Change the metadata of a file of scales, and replace its tensors unless `tensors` is None."""
    tensors = load_file(path) if tensors is None else tensors
    save_file(tensors, path, {"hf_fp8kv": json.dumps(change(read_metadata(path)))})


CALLS_WITH_SCALES: dict[str, Callable[[Any, Any], Any]] = {
    "enable": lambda model, scales: enable(model, scales=scales),
    "training": lambda model, scales: enable(model, training="stored", scales=scales),
    "serving": lambda model, scales: serving.enable(model, scales=scales, probe=False),
}


@pytest.mark.parametrize("check", CALLS_WITH_SCALES)
def test_outdated_scales_warn_once_and_current_scales_do_not(
    check: str, model_scales: KVScales, tmp_path: Path, read_warnings: Callable[[], list[str]]
) -> None:
    model_scales.save_pretrained(tmp_path)
    model = make_model()
    CALLS_WITH_SCALES[check](model, tmp_path)
    assert not read_warnings()
    # Take a step of an optimizer, with a low learning rate, as in reinforcement learning.
    model(torch.tensor(TEXTS), labels=torch.tensor(TEXTS)).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=1e-6).step()
    for _ in range(2):
        CALLS_WITH_SCALES[check](model, tmp_path)
    (message,) = read_warnings()
    assert str(tmp_path) in message
    assert "LlamaForCausalLM has now. Values that exceed" in message
    assert "Calibrate again" in message


@pytest.mark.parametrize("apply", [enable, serving.enable])
def test_scales_of_another_model_are_noticed_without_a_digest(
    apply: Any, model_scales: KVScales, caplog: pytest.LogCaptureFixture
) -> None:
    # The scales have the correct shapes, but one more layer or another model type.
    #
    # The text model of a multimodal model, such as Llama 4, may use the scales of that model.
    caplog.set_level(logging.WARNING, "hf_fp8kv")
    scales = replace(model_scales, weights_digest=None, origin=f"same {apply}")
    for model_type in (scales.model_type, None, "llama4"):
        apply(make_model(), scales=replace(scales, model_type=model_type))
    assert not caplog.messages
    layers = scales.layers | {len(scales.layers): scales.layers[0]}
    apply(make_model(), scales=replace(scales, layers=layers))
    apply(make_model(), scales=replace(scales, model_type="opt"))
    assert [text.partition("made for ")[2].partition(",")[0] for text in caplog.messages] == [
        f"a model with {len(layers)} layers",
        "a model of type 'opt'",
    ]
