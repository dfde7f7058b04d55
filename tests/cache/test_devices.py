"""Tests of layers on several devices, as device_map places them. Pages follow their layers.

The tests need only a CPU. The device "meta" stands for a second device. It computes nothing, and
torch refuses to mix it with the CPU. Tests of models with layers on disk check the values.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import AutoModelForCausalLM

import hf_fp8kv
from hf_fp8kv import BackendError, FP8PagedCache
from tests.cache.public import attend
from tests.helpers.assertions import assert_same
from tests.helpers.tiny_models import build_variant, make_prompt
from tests.reproducible.test_training import make_scales

pytestmark = pytest.mark.text

CPU, META = torch.device("cpu"), torch.device("meta")
NUM_LAYERS = 4
NUM_HEADS = 2
HEAD_DIM = 16
GREEDY = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
DEVICES = (CPU, META, META, CPU)


SCALES = make_scales(NUM_LAYERS, NUM_HEADS, HEAD_DIM, has_center=True)
OPTIONS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static scales": {"scales": SCALES},
    "unquantized keys": {"key_dtype": "auto", "scales": SCALES},
}


@pytest.fixture(params=OPTIONS.values(), ids=OPTIONS)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


def make_cache(options: dict[str, Any], **more_options: Any) -> FP8PagedCache:
    model, _ = build_variant("mistral", num_hidden_layers=NUM_LAYERS, sliding_window=None)
    options = {"page_size": 8, "backend": "torch", "prefill": "stored", **options, **more_options}
    return FP8PagedCache(model.config, **options)


def list_devices(states: Any) -> set[torch.device]:
    tensor_names, _ = states.__tensor_flatten__()
    return {getattr(states, name).device for name in tensor_names}


class StepRunner:
    """Stores the same random tokens in a cache on any devices, and checks where its tensors are."""

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        self.devices = devices
        self.generator = torch.Generator().manual_seed(7)

    def run(self, cache: FP8PagedCache, batch: int, num_tokens: int) -> list[torch.Tensor]:
        outputs = []
        for layer_index, device in enumerate(self.devices):
            shape = batch, 4 * NUM_HEADS, num_tokens, HEAD_DIM
            states = torch.randn(shape, generator=self.generator).to(device)
            k, v, query = states.split([NUM_HEADS, NUM_HEADS, 2 * NUM_HEADS], 1)
            key, value = cache.update(k, v, layer_index)
            assert key.device == value.device == device
            assert list_devices(key) == {device}
            outputs.append(attend(query, key, value, 0.25))
            assert outputs[-1].device == key.dense().device == device
        return outputs


def assert_same_on_cpu(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for output, expected_output, device in zip(actual, expected, DEVICES, strict=True):
        assert output.shape == expected_output.shape
        if device == CPU:
            assert_same(output, expected_output)


def test_pages_are_on_the_device_of_their_layer(options, tmp_path):
    """A cache on two devices matches a cache on one device after growth, forks, beams and crops.

    Both caches hold the same first tokens, stored on the CPU. A layer moves to the device of the
    next tokens that it stores.
    """
    cpu_runner = StepRunner((CPU,) * NUM_LAYERS)
    cpu_cache = make_cache(options)
    cpu_runner.run(cpu_cache, 2, 9)
    caches = [FP8PagedCache.load(cpu_cache.save(tmp_path / "cache")), cpu_cache]
    runners = [StepRunner(DEVICES), cpu_runner]
    runners[0].generator.set_state(cpu_runner.generator.get_state())

    def step_and_compare(batch: int, num_tokens: int) -> None:
        actual = runners[0].run(caches[0], batch, num_tokens)
        assert_same_on_cpu(actual, runners[1].run(caches[1], batch, num_tokens))

    step_and_compare(2, 1)
    originals = list(caches)
    caches = [cache.fork() for cache in originals]
    step_and_compare(2, 3)
    caches = originals
    step_and_compare(2, 2)
    changes: tuple[tuple[Callable[[FP8PagedCache], Any], int, int], ...] = (
        (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), 2, 1),
        (lambda cache: cache.batch_repeat_interleave(2), 4, 400),
        (lambda cache: cache.batch_select_indices(torch.tensor([3, 0])), 2, 1),
        (lambda cache: cache.crop(-5), 2, 2),
        (lambda cache: cache.reset(), 1, 3),
    )
    for change, batch, num_tokens in changes:
        for cache in caches:
            change(cache)
        step_and_compare(batch, num_tokens)
        assert len({cache.memory_footprint().pages_bytes for cache in caches}) == 1


def test_the_cpu_backend_refuses_tokens_on_a_different_device():
    cache = make_cache({}, backend="cpu")
    tokens = torch.randn(1, NUM_HEADS, 3, HEAD_DIM)
    for index in range(NUM_LAYERS):
        cache.update(tokens, tokens, index)
    with pytest.raises(BackendError, match="requires pages on the CPU, got meta"):
        cache.update(tokens.to(META), tokens.to(META), 0)
    assert cache.update(tokens, tokens, 0)[0].shape[2] == 6


@pytest.mark.parametrize(
    ("attention", "max_cache_len"), [("fp8_paged", None), ("sdpa", 40), ("eager", None)]
)
def test_layers_on_disk_give_the_same_tokens(attention, max_cache_len, tmp_path):
    """The second layer is on disk, and accelerate loads it for each call."""
    build_variant("gqa")[0].save_pretrained(tmp_path / "model")
    locations = {
        "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
        "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu",
    }  # fmt: skip
    disk_options = {"device_map": locations, "offload_folder": tmp_path / "offloaded"}
    inputs = make_prompt()
    answers = []
    for load_options in (disk_options, {}):
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", attn_implementation=attention, **load_options
        ).eval()
        weights = model.model.layers[1].parameters()
        assert {weight.is_meta for weight in weights} == {load_options is disk_options}
        cache = FP8PagedCache(
            model.config, scales=make_scales(has_center=True), max_cache_len=max_cache_len
        )
        answers.append(model.generate(**inputs, past_key_values=cache, **GREEDY).tolist())
    assert answers[0] == answers[1]
    # The coarse scales change the tokens, so both models used the cache.
    assert answers[0] != model.generate(**inputs, **GREEDY).tolist()


# Each case has the name of a model, options of the cache, and options of `generate`.
DEVICE_CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "default": ("gqa", {}, {}),
    "chunks": ("sliding_and_full", {"prefill": "stored"}, {"prefill_chunk_size": 7}),
    "latent": ("latent", {}, {}),
    "indexer": ("sparse", {}, {}),
    "preallocated": ("gqa", {"max_cache_len": 64}, {}),
    "offloading": ("softcap", {"offloading": True}, {}),
    "recurrent": ("hybrid", {}, {}),
}


@pytest.mark.parametrize("case_name", DEVICE_CASES)
def test_a_default_device_does_not_change_the_tokens(case_name: str, tmp_path: Path) -> None:
    """Tensors that must be on the CPU are created there. A second call continues a prompt."""
    model_name, cache_options, generate_options = DEVICE_CASES[case_name]
    options = {"max_new_tokens": 6, "do_sample": False, **generate_options}
    model = hf_fp8kv.enable(build_variant(model_name)[0])
    inputs = make_prompt(tokens=25)

    def run_calls() -> list[torch.Tensor]:
        cache = FP8PagedCache(model.config, **cache_options)
        outputs = []
        for stop in (20, 25):
            prompt = {name: tensor[:, :stop] for name, tensor in inputs.items()}
            outputs.append(model.generate(**prompt, past_key_values=cache, **options))
        if case_name != "recurrent":
            cache.batch_select_indices([1])
            loaded = FP8PagedCache.load(cache.save(tmp_path / "cache.safetensors"))
            loaded.fork().batch_repeat_interleave(2)
        return outputs

    expected = run_calls()
    with torch.device("meta"):
        assert all(map(torch.equal, run_calls(), expected))


@pytest.mark.parametrize("max_cache_len", [None, 24], ids=["growing", "preallocated"])
@torch.no_grad()
def test_a_model_may_be_on_two_devices(max_cache_len):
    """The hooks of accelerate move the tensors between layers, and do not change the cache."""
    model, inputs = build_variant(
        "gqa", num_hidden_layers=NUM_LAYERS, attn_implementation="fp8_paged"
    )
    devices = (CPU, CPU, META, META)  # no tensor can be copied from "meta"
    for layer, device in zip(model.model.layers, devices, strict=True):
        hook = AlignDevicesHook(device, skip_keys="past_key_values", place_submodules=True)
        add_hook_to_module(layer, hook)
    add_hook_to_module(model.model.norm, AlignDevicesHook(META, place_submodules=True))
    add_hook_to_module(model.lm_head, AlignDevicesHook(META, place_submodules=True))
    cache = FP8PagedCache(
        model.config, scales=SCALES, page_size=8, backend="torch", max_cache_len=max_cache_len
    )
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for stop in (9, 12, 13):
        start = int(cache.get_seq_length())
        output = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
        assert output.logits.shape[:2] == (2, stop - start)
    assert output.past_key_values is cache
    for layer, device in zip(cache.layers, devices, strict=True):
        if device == CPU or max_cache_len is None:
            assert list_devices(layer.keys) == {device}
