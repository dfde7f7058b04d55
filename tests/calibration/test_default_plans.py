"""Tests of the plan of a model without arguments about storage: `resolve_plan`, and its files."""

import copy
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from huggingface_hub import constants

from hf_fp8kv import ConfigError, FP8PagedCache, PrefixStore, choose_plan
from hf_fp8kv.attention.switching import get_attn_implementations
from hf_fp8kv.calibration import plan_choice
from hf_fp8kv.calibration.plan_choice import (
    PassLimits,
    choose_passes,
    freeze_plan,
    resolve_plan,
    unfreeze_plan,
)
from hf_fp8kv.modeling.tensor_parallel import TensorParallel
from tests.helpers.tiny_models import (
    IMAGE_TOKEN,
    VIDEO_TOKEN,
    VISION_END_TOKEN,
    VISION_START_TOKEN,
    build_variant,
)

LONG_CONTEXT = {"max_position_embeddings": 8192}
NUM_POSITIONS = 3  # 0, 1,024 and 4,096
# The positions, and the predictions with an unquantized cache and with the plan.
NUM_PASSES = NUM_POSITIONS + 2
PLAIN = {"dtype": "fp8_e3m4", "plan": None}


@pytest.fixture(autouse=True)
def hf_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let models keep their plans in a new folder, and return it."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf_home"))
    return tmp_path / "hf_home"


@pytest.fixture(scope="module")
def own_plan() -> Any:
    return choose_plan(make_model())


def make_model(name: str = "llama", **fields: Any) -> Any:
    return build_variant(name, **LONG_CONTEXT, **fields)[0]


@torch.no_grad()
def make_protected_model() -> Any:
    """Return a tiny model whose keys have a large bias in the first layer, which RoPE rotates.

    Protected sides improve its plan.
    """
    model = make_model("qwen2", layer_types=["full_attention"] * 4, num_hidden_layers=4)
    bias = model.model.layers[0].self_attn.k_proj.bias
    bias.copy_(100 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(0)))
    return model


@contextmanager
def recorded_inputs(model: Any) -> Iterator[list[torch.Tensor]]:
    inputs: list[torch.Tensor] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, keywords: inputs.append(keywords["input_ids"]), with_kwargs=True
    )
    yield inputs
    hook.remove()


def resolve_and_count(
    model: Any, store: PrefixStore | None = None, **keywords: Any
) -> tuple[Any, int]:
    """Return the digest of the plan that caches of a model get, and the number of passes."""
    with recorded_inputs(model) as inputs:
        resolved = resolve_plan(model, keywords, prefix_store=store)
    FP8PagedCache(model.config, **resolved)
    return resolved["plan"] and resolved["plan"].digest, len(inputs)


def list_plan_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("plans/*.plan"))


@pytest.mark.parametrize(
    "keywords", [{"plan": "int8"}, {"scales": 1.0}, {"key_dtype": "fp8"}, {"value_dtype": "fp8"}]
)
def test_adaptive_excludes_other_arguments_about_storage(keywords: dict[str, Any]) -> None:
    (name,) = keywords
    with pytest.raises(ConfigError, match=f"{name}: expected None with dtype='adaptive', got"):
        resolve_plan(make_model(), {"dtype": "adaptive", **keywords})


@pytest.mark.parametrize("dtype", [None, "adaptive"])
def test_the_default_is_the_chosen_plan(dtype: str | None, own_plan: Any, hf_home: Path) -> None:
    model = make_model()
    assert resolve_and_count(model, dtype=dtype) == (own_plan.digest, NUM_PASSES)
    for _ in range(2):
        assert resolve_and_count(model, dtype=dtype, page_size=16) == (own_plan.digest, 0)
    assert resolve_and_count(model, scales=None, key_dtype=None) == (own_plan.digest, 0)
    assert len(list_plan_files(hf_home)) == 1
    assert vars(model).keys() - vars(make_model()).keys() == {"_hf_fp8kv_plan_choice"}


def test_plans_are_kept_by_their_bits(own_plan: Any, hf_home: Path) -> None:
    model = make_model()
    narrow_digest, num_passes = resolve_and_count(model, bits=6)
    assert num_passes
    assert narrow_digest != own_plan.digest
    assert resolve_and_count(model) == (own_plan.digest, NUM_PASSES)
    for bits, digest in ((6, narrow_digest), (6.0, narrow_digest), (8, own_plan.digest)):
        assert resolve_and_count(make_model(), bits=bits, dtype=None) == (digest, 0)
    assert len(list_plan_files(hf_home)) == 2
    for name, value in (("dtype", "fp8"), ("plan", "int8"), ("scales", 1.0)):
        with pytest.raises(ConfigError, match=f"{name}: expected None with bits=6, got"):
            resolve_plan(model, {"bits": 6, name: value})
    freeze_plan(model, own_plan, 6)
    assert resolve_and_count(model, bits=6) == (own_plan.digest, 0)
    unfreeze_plan(model)
    assert resolve_and_count(model, bits=6) == (narrow_digest, 0)


def test_a_new_model_takes_the_plan_in_the_file(own_plan: Any, hf_home: Path) -> None:
    assert resolve_and_count(make_model())[1] == NUM_PASSES
    model = make_model()
    assert resolve_and_count(model) == (own_plan.digest, 0)
    plan = resolve_plan(model, {})["plan"]
    assert repr(plan) == repr(own_plan)
    assert (plan.plan, plan.protection) == (own_plan.plan, own_plan.protection)
    assert plan.made_for(model)
    for change in ("weights", "dtype", "class", "config"):
        model = make_model(seed=int(change == "weights"))
        if change == "dtype":
            model.bfloat16()
        elif change == "class":
            model.__class__ = type("OtherModel", (type(model),), {})
        elif change == "config":
            model.config.rms_norm_eps *= 2
        assert resolve_and_count(model)[1] >= NUM_PASSES, change
    assert len(list_plan_files(hf_home)) == 5


@pytest.mark.parametrize("constant", ["_CHOOSER_VERSION", "_MAX_EXTRA_BYTES"])
def test_files_of_a_different_chooser_are_not_used(constant: str, monkeypatch: Any) -> None:
    resolve_plan(make_model(), {})
    monkeypatch.setattr(plan_choice, constant, 0)
    assert resolve_and_count(make_model())[1] == NUM_PASSES


@pytest.mark.full
def test_a_second_process_runs_no_pass(own_plan: Any, hf_home: Path) -> None:
    code = (
        "from tests.calibration import test_default_plans as tests\n"
        "print(*tests.resolve_and_count(tests.make_model()))"
    )
    environment = {**os.environ, "HF_HOME": str(hf_home), "OMP_NUM_THREADS": "1"}
    for num_passes in (NUM_PASSES, 0):
        output = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
        assert output.split()[-2:] == [own_plan.digest, str(num_passes)]


def damage_file(path: Path, kind: str) -> None:
    original_bytes = path.read_bytes()
    path.unlink()
    if kind == "plan of another model":
        resolve_plan(make_model(seed=1), {})
        list_plan_files(path.parents[1])[0].replace(path)
    elif kind == "link":
        path.with_name("target").write_bytes(original_bytes)
        path.symlink_to("target")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        damaged_bytes = bytearray(original_bytes)
        damaged_bytes[-40] ^= 1  # in a center
        path.write_bytes(damaged_bytes)


@pytest.mark.parametrize("kind", ["flipped", "link", "pipe", "plan of another model"])
def test_a_damaged_file_is_replaced(kind: str, own_plan: Any, hf_home: Path, caplog: Any) -> None:
    resolve_plan(make_model(), {})
    (path,) = list_plan_files(hf_home)
    original_bytes = path.read_bytes()
    damage_file(path, kind)
    assert resolve_and_count(make_model()) == (own_plan.digest, NUM_PASSES)
    assert path.read_bytes() == original_bytes
    assert not path.is_symlink()
    assert not caplog.messages


def test_a_plan_is_chosen_if_its_folder_cannot_be_written(
    own_plan: Any, hf_home: Path, caplog: Any
) -> None:
    hf_home.write_text("not a folder")
    caplog.set_level(logging.DEBUG, "hf_fp8kv")
    assert resolve_and_count(make_model()) == (own_plan.digest, NUM_PASSES)
    assert {record.levelname for record in caplog.records} == {"DEBUG"}
    assert sum("is not written" in message for message in caplog.messages) == 1


class CustomError(Exception):
    """An error of a model's own code."""


def raise_in_layer(model: Any, error: BaseException) -> None:
    def fail(*_: Any) -> None:
        torch.rand(1)
        raise error

    model.model.layers[1].register_forward_hook(fail)


@torch.no_grad()
def make_failing_model(failure: str) -> Any:
    if failure == "no attention layer":
        return build_variant("mamba")[0]
    model = make_model()
    if failure == "NaN":
        model.model.layers[1].self_attn.v_proj.weight[3, 5] = torch.nan
    elif failure == "own code":
        raise_in_layer(model, CustomError("two\nlines"))
    elif failure == "memory":
        raise_in_layer(model, torch.OutOfMemoryError("CUDA out of memory"))
    elif failure == "config":
        model.config.to_dict = lambda: 1 / 0
    return model


def read_state(model: Any) -> dict[str, Any]:
    modules = dict(model.named_modules())
    return {
        "training": [module.training for module in modules.values()],
        "attention": get_attn_implementations(model),
        "hooks": [len(module._forward_hooks) for module in modules.values()],
        "gradients": [(id(weight.grad), weight.requires_grad) for weight in model.parameters()],
        "random": torch.get_rng_state().tolist(),
        "attributes": [{*vars(module)} - {"_hf_fp8kv_plan_choice"} for module in modules.values()],
    }


# tests/test_enabling.py has speech models and models on the meta device.
@pytest.mark.parametrize("kind", ["NaN", "own code", "memory", "no attention layer", "config"])
def test_a_failure_gives_the_plain_format_and_one_line(
    kind: str, caplog: pytest.LogCaptureFixture, hf_home: Path, store: PrefixStore
) -> None:
    model = make_failing_model(kind)
    model.model.train() if hasattr(model, "model") else model.train()
    state = read_state(model)
    for prefix_store in (None, store):
        keywords = resolve_plan(model, {"page_size": 16}, prefix_store=prefix_store)
        assert keywords == PLAIN | {"page_size": 16}
        assert read_state(model) == state
    (message,) = caplog.messages
    assert "\n" not in message
    assert f"{type(model).__name__} is stored as fp8_e3m4 without a plan (" in message
    assert "Pass plan=hf_fp8kv.choose_plan(model)" in message
    with pytest.raises(Exception, match=r"."):
        resolve_plan(model, {"dtype": "adaptive"})
    assert read_state(model) == state
    assert caplog.messages == [message]
    assert not list_plan_files(hf_home)
    assert not list_plan_files(store.path)


def test_a_failed_choice_is_not_tried_again_until_the_model_changes(own_plan: Any) -> None:
    model = make_failing_model("own code")
    assert [resolve_and_count(model)[1] for _ in range(2)] == [1, 0]
    model.model.layers[1]._forward_hooks.clear()
    assert resolve_and_count(model, dtype="adaptive") == (own_plan.digest, NUM_PASSES)
    assert resolve_and_count(model) == (own_plan.digest, 0)


def test_threads_choose_one_plan_and_restore_the_attention(own_plan: Any, caplog: Any) -> None:
    model = make_model()
    attention = get_attn_implementations(model)
    with ThreadPoolExecutor(4) as pool:
        caches = list(pool.map(lambda _: FP8PagedCache(model), range(8)))
    assert {cache.options.scales.digest for cache in caches} == {own_plan.digest}
    assert get_attn_implementations(model) == attention
    assert not caplog.messages


def test_an_interrupt_ends_the_choice() -> None:
    model = make_model().train()
    raise_in_layer(model, KeyboardInterrupt())
    state = read_state(model)
    with pytest.raises(KeyboardInterrupt):
        resolve_plan(model, {})
    assert read_state(model) == state


def test_a_choice_leaves_no_trace(own_plan: Any) -> None:
    # The layers draw random numbers, and gradients are accumulated.
    model = make_model().train()
    model.set_attn_implementation("eager")
    model.model.layers[0].register_forward_hook(lambda *_: torch.rand(1) and None)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = read_state(model)
    with torch.inference_mode():
        plan = resolve_plan(model, {})["plan"]
    assert read_state(model) == state
    assert all(bool((weight.grad == 1).all()) for weight in model.parameters())
    assert plan.digest == own_plan.digest
    centers = [layer.k_center for layer in plan.layers.values() if layer.k_center is not None]
    assert not any(center.is_inference() for center in centers)


@pytest.mark.full
def test_a_compiled_model_is_not_compiled_to_choose_a_plan(own_plan: Any) -> None:
    compile_graph = mock.Mock(side_effect=lambda graph, _: graph.forward)
    model = make_model()
    model.compile(backend=compile_graph)
    model.model.forward = torch.compile(model.model.forward, backend=compile_graph)
    assert resolve_and_count(model)[0] == own_plan.digest
    assert not compile_graph.called
    model(torch.arange(3, 10)[None])
    assert compile_graph.called


SPLITS: dict[str, Callable[[Any], Any]] = {
    "mesh": lambda model: setattr(
        model, "_device_mesh", SimpleNamespace(size=lambda: 2, mesh_dim_names=())
    ),
    "DTensor": lambda model: setattr(model.lm_head.weight, "placements", ()),
    "DeepSpeed": lambda model: setattr(model.lm_head.weight, "ds_tensor", None),
    "caller": lambda model: None,
}


@pytest.mark.parametrize("kind", SPLITS)
def test_a_model_split_over_processes_is_plain(
    kind: str, own_plan: Any, caplog: Any, tmp_path: Path
) -> None:
    # Each process has a part of the heads, so processes could choose different plans.
    own_plan.save_pretrained(tmp_path / "plan")
    model = make_model()
    SPLITS[kind](model)
    keywords = {"tensor_parallel": TensorParallel(0, 2)} if kind == "caller" else {}
    with recorded_inputs(model) as inputs:
        assert resolve_plan(model, keywords) == {**PLAIN, **keywords}
    assert not inputs
    (message,) = caplog.messages
    assert "the model is split over processes" in message
    assert (
        resolve_plan(model, {**keywords, "plan": tmp_path / "plan"})["plan"].digest
        == own_plan.digest
    )


@pytest.mark.parametrize(
    ("num_parameters", "num_positions", "expected"),
    [
        (0, 4, PassLimits(4, 16)),  # on a GPU
        (494e6, 4, PassLimits(4, 5)),
        (630e6, 4, PassLimits(4, 2)),  # K and V of a layer
        (1.5e9, 4, PassLimits(3, 0)),
        (3e9, 4, None),
        (5e9, 1, PassLimits(1, 0)),
    ],
)
def test_passes_are_limited_by_counts(
    num_parameters: float, num_positions: int, expected: PassLimits | None
) -> None:
    assert choose_passes(int(num_parameters), 128, num_positions) == expected


def test_large_models_get_fewer_passes_on_a_cpu(monkeypatch: Any, caplog: Any) -> None:
    # An explicit choice is never reduced, and does not replace the reduced plan in its file.
    model = make_protected_model()
    num_parameters = sum(weight.numel() for weight in model.parameters())
    monkeypatch.setattr(plan_choice, "_MAX_EXTRA_BYTES", 1.0)
    full_digest = choose_plan(model, max_extra_bytes=1.0).digest
    digests = []
    for max_passes in (20, 6, 3, 1):
        monkeypatch.setattr(plan_choice, "_MAX_CPU_PRODUCTS", max_passes * 128 * num_parameters)
        copied = copy.deepcopy(model)
        digest, num_passes = resolve_and_count(copied)
        assert num_passes <= max_passes
        assert resolve_and_count(copied, dtype="adaptive")[0] == full_digest
        assert resolve_and_count(copied) == (full_digest, 0)
        assert resolve_and_count(copy.deepcopy(model))[0] == digest
        digests.append(digest)
    assert (digests[0], digests[-1], len({*digests})) == (full_digest, None, 4)
    assert len(caplog.messages) == 2
    assert all("a CPU would take too long" in message for message in caplog.messages)


def read_window(model: Any) -> list[int]:
    with recorded_inputs(model) as inputs:
        choose_plan(model)
    assert all(torch.equal(each_input, inputs[0]) for each_input in inputs)
    return inputs[0].flatten().tolist()


def test_random_tokens_are_not_special() -> None:
    model = make_model()
    window = read_window(model)
    assert not {0, 1} & {*window}, "the ids of padding and of the first token"
    id_fields = (
        "audio_token_id", "boi_token_index", "eoa_token_id", "special_token_ids", "pad_index",
        "vision_start_token_id", "audio_token_index", "codec_bos_id",
    )  # fmt: skip
    ids = list(dict.fromkeys(window))
    for name, token in zip(id_fields, ids, strict=False):
        setattr(model.config, name, [[token]] if name.endswith("ids") else token)
    model.generation_config.forced_bos_token_id = ids[-1]
    model.generation_config.eos_token_id = ids[-3:-1]
    special = {*ids[: len(id_fields)], *ids[-3:]}
    new_window = read_window(model)
    assert not special & {*new_window}
    pairs = zip(window, new_window, strict=True)
    assert all(token == new_token or token in special for token, new_token in pairs)


@pytest.mark.parametrize(
    ("name", "special"),
    [
        ("vision/llava", {IMAGE_TOKEN}),
        ("vision/qwen2_vl", {IMAGE_TOKEN, VIDEO_TOKEN, VISION_START_TOKEN, VISION_END_TOKEN}),
        ("vision/gemma3", {IMAGE_TOKEN}),
    ],
)
def test_random_tokens_have_no_images(name: str, special: set[int]) -> None:
    model, inputs = build_variant(name)
    assert not special & {*read_window(model)}
    cache = FP8PagedCache(model.config, **resolve_plan(model, {}))
    model.generate(**inputs, past_key_values=cache, max_new_tokens=2, do_sample=False)


@pytest.fixture
def store(tmp_path: Path) -> PrefixStore:
    return PrefixStore(tmp_path / "store")


def test_a_prefix_store_keeps_the_first_plan_of_each_model(
    store: PrefixStore, own_plan: Any, hf_home: Path, monkeypatch: Any
) -> None:
    first_model = make_model()
    assert resolve_and_count(first_model, store) == (own_plan.digest, NUM_PASSES)
    (path,) = list_plan_files(store.path)
    original_bytes = path.read_bytes()
    damage_file(path, "flipped")
    assert resolve_and_count(first_model, store) == (own_plan.digest, 0)
    assert path.read_bytes() == original_bytes
    # Models choose only fp8_e3m4, as another machine might.
    monkeypatch.setattr(plan_choice, "_MAX_COST_RATIO", 0.0)
    second_model = make_model()
    list_plan_files(hf_home)[0].unlink()
    for keywords in ({}, {"dtype": "adaptive"}):
        assert resolve_and_count(second_model, store, **keywords) == (own_plan.digest, 0)
    other_digest, num_passes = resolve_and_count(second_model)  # without the store
    assert num_passes == NUM_PASSES
    assert other_digest != own_plan.digest
    assert resolve_and_count(second_model, store) == (own_plan.digest, 0)
    assert resolve_plan(second_model, {"dtype": "fp8"}, prefix_store=store)["plan"] is None
    assert resolve_and_count(make_model(seed=1), store)[0] != own_plan.digest
    assert len(list_plan_files(store.path)) == 2
    assert (store.usage().files, store.usage().bytes) == (0, 0)
