"""Tests of layers on several devices, as device_map places them. Pages follow their layers.

The tests have one device, and "meta" represents a second. It computes nothing, and torch refuses
to mix it with the CPU. Tests of models with layers on disk check the values.
"""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import AutoModelForCausalLM

import hf_fp8kv
from hf_fp8kv import BackendError, FP8PagedCache, KVScales, LayerScales, calibrate
from tests.cache.public import attend
from tests.helpers.assertions import assert_same
from tests.helpers.tiny_models import prompt, tiny

pytestmark = pytest.mark.text

CPU, META = torch.device("cpu"), torch.device("meta")
LAYERS, HEADS, DIM = 4, 2, 16
GREEDY = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
DEVICES = (CPU, META, META, CPU)


def make_scales(num_layers: int = LAYERS) -> KVScales:
    generator = torch.Generator().manual_seed(5)

    def draw(size: int) -> torch.Tensor:
        return (0.5 + torch.rand(HEADS, size, generator=generator)) / 448

    return KVScales({i: LayerScales(draw(1), draw(1), 448 * draw(DIM)) for i in range(num_layers)})


OPTIONS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "center of the first call": {"plan": "fp8 centered"},
    "static scales": {"scales": make_scales()},
    "unquantized keys": {"key_dtype": "auto", "scales": make_scales()},
}


@pytest.fixture(params=OPTIONS.values(), ids=OPTIONS)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


def make_cache(options: dict[str, Any], **keywords: Any) -> FP8PagedCache:
    model, _ = tiny("mistral", num_hidden_layers=LAYERS, sliding_window=None)
    options = {"page_size": 8, "backend": "torch", "prefill": "stored", **options}
    return FP8PagedCache(model.config, **options, **keywords)


def list_devices(handle: Any) -> set[torch.device]:
    """Return the devices of all tensors behind stored keys or values."""
    return {getattr(handle, name).device for name in handle.__tensor_flatten__()[0]}


class StepRunner:
    """Stores the same random tokens in a cache on any devices, and checks where its tensors are."""

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        self.devices = devices
        self.generator = torch.Generator().manual_seed(7)

    def __call__(self, cache: FP8PagedCache, batch: int, num_tokens: int) -> list[torch.Tensor]:
        """Run one step of a model, and return the attention output of each layer."""
        outputs = []
        for layer, device in enumerate(self.devices):
            shapes = [(batch, heads, num_tokens, DIM) for heads in (HEADS, HEADS, 2 * HEADS)]
            k, v, query = (torch.randn(x, generator=self.generator).to(device) for x in shapes)
            key, value = cache.update(k, v, layer)
            assert key.device == value.device == device
            assert list_devices(key) == {device}
            outputs.append(attend(query, key, value, 0.25))
            assert outputs[-1].device == key.dense().device == device
        return outputs


def assert_same_on_cpu(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for x, y, device in zip(actual, expected, DEVICES, strict=True):
        assert x.shape == y.shape
        if device == CPU:
            assert_same(x, y)


def test_pages_are_on_the_device_of_their_layer(options):
    """A cache on two devices matches a cache on one device after growth, forks, beams and crops."""
    caches = [make_cache(options), make_cache(options)]
    steps = [StepRunner(DEVICES), StepRunner((CPU,) * LAYERS)]

    def store_in_both(batch: int, num_tokens: int) -> None:
        assert_same_on_cpu(
            *(step(c, batch, num_tokens) for step, c in zip(steps, caches, strict=True))
        )

    store_in_both(2, 9)
    store_in_both(2, 1)
    originals = list(caches)
    caches = [cache.fork() for cache in originals]
    store_in_both(2, 3)
    caches = originals
    store_in_both(2, 2)
    for cache in caches:
        cache.reorder_cache(torch.tensor([1, 1]))
    store_in_both(2, 1)
    for cache in caches:
        cache.batch_repeat_interleave(2)
    store_in_both(4, 400)
    for cache in caches:
        cache.batch_select_indices(torch.tensor([3, 0]))
        cache.crop(-5)
    store_in_both(2, 2)
    assert caches[0].memory_footprint().pages_bytes == caches[1].memory_footprint().pages_bytes
    for cache in caches:
        cache.reset()
    store_in_both(1, 3)


def test_preallocated_pages_are_on_the_device_of_their_layer(options):
    cache, steps = make_cache(options, max_cache_len=24), StepRunner(DEVICES)
    cpu_cache, expected_steps = make_cache(options, max_cache_len=24), StepRunner((CPU,) * LAYERS)
    for num_tokens in (9, 1):
        assert_same_on_cpu(steps(cache, 2, num_tokens), expected_steps(cpu_cache, 2, num_tokens))


@pytest.mark.parametrize("size", [{}, {"max_cache_len": 24}], ids=["growing", "preallocated"])
def test_a_cache_from_a_file_follows_the_model(options, size, tmp_path):
    """A file is loaded to one device. Each layer moves to the device of its next tokens."""
    cache, steps = make_cache(options, **size), StepRunner((CPU,) * LAYERS)
    steps(cache, 2, 9)
    loaded = FP8PagedCache.load(cache.save(tmp_path / "cache.safetensors"))
    moved_steps = StepRunner(DEVICES)
    moved_steps.generator.set_state(steps.generator.get_state())
    assert_same_on_cpu(moved_steps(loaded, 2, 3), steps(cache, 2, 3))
    assert_same_on_cpu(moved_steps(loaded, 2, 1), steps(cache, 2, 1))


def test_the_cpu_backend_refuses_tokens_on_a_different_device():
    options = {"page_size": 8, "backend": "cpu", "prefill": "stored"}
    cache = FP8PagedCache(make_cache({}).config, **options)
    tokens = torch.randn(1, HEADS, 3, DIM)
    for layer in range(LAYERS):
        cache.update(tokens, tokens, layer)
    with pytest.raises(BackendError, match="requires pages on the CPU, got meta"):
        cache.update(tokens.to(META), tokens.to(META), 0)
    assert cache.layers[0].keys.device == CPU
    key, _ = cache.update(tokens, tokens, 0)
    assert key.device == CPU
    assert key.shape[2] == 6


# -- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [{}, {"max_cache_len": 24}], ids=["growing", "preallocated"])
def test_a_model_may_be_on_two_devices(size):
    """The hooks of accelerate move the tensors between layers, and do not change the cache."""
    model, inputs = tiny("gqa", num_hidden_layers=LAYERS, attn_implementation="fp8_paged")
    devices = (CPU, CPU, META, META)  # no tensor can be copied from "meta"
    for layer, device in zip(model.model.layers, devices, strict=True):
        hook = AlignDevicesHook(device, skip_keys="past_key_values", place_submodules=True)
        add_hook_to_module(layer, hook)
    add_hook_to_module(model.model.norm, AlignDevicesHook(META, place_submodules=True))
    add_hook_to_module(model.lm_head, AlignDevicesHook(META, place_submodules=True))
    cache = FP8PagedCache(model.config, scales=make_scales(), page_size=8, backend="torch", **size)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        for stop in (9, 12, 13):
            start = int(cache.get_seq_length())
            out = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
            assert out.logits.shape[:2] == (2, stop - start)
    assert out.past_key_values is cache
    for layer, device in zip(cache.layers, devices, strict=True):
        if device == CPU or not size:
            assert list_devices(layer.keys) == {device}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny("gqa")[0].save_pretrained(folder)
    return folder


def load_with_disk_layer(checkpoint: Path, tmp_path: Path, attention: str) -> Any:
    """Return the model with its second layer on disk, which accelerate loads for each call."""
    locations = {
        "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
        "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu",
    }  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, device_map=locations, offload_folder=tmp_path / "offloaded",
        attn_implementation=attention,
    )  # fmt: skip
    assert {p.device.type for p in model.model.layers[1].parameters()} == {"meta"}
    return model.eval()


# Each attention function occurs once, and each kind of cache at least once.
@pytest.mark.parametrize(
    ("attention", "size"), [("fp8_paged", {}), ("sdpa", {"max_cache_len": 40}), ("eager", {})]
)
def test_layers_on_disk_give_the_same_tokens(checkpoint, tmp_path, attention, size):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation=attention).eval()
    disk_model = load_with_disk_layer(checkpoint, tmp_path, attention)
    outputs = []
    for x in (model, disk_model):
        cache = FP8PagedCache(x.config, scales=make_scales(2), **size)
        outputs.append(x.generate(**prompt(), past_key_values=cache, **GREEDY).tolist())
    assert outputs[0] == outputs[1]
    stock_tokens = model.generate(**prompt(), **GREEDY).tolist()
    assert outputs[0] != stock_tokens  # coarse scales change tokens


def test_enable_and_calibrate_support_layers_on_disk(checkpoint, tmp_path):
    disk_model = load_with_disk_layer(checkpoint, tmp_path, "sdpa")
    hf_fp8kv.enable(disk_model, scales=make_scales(2))
    actual = disk_model.generate(**prompt(), **GREEDY).tolist()
    hf_fp8kv.disable(disk_model)
    cpu_model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="fp8_paged")
    cache = FP8PagedCache(cpu_model.eval().config, scales=make_scales(2))
    assert actual == cpu_model.generate(**prompt(), past_key_values=cache, **GREEDY).tolist()
    texts = torch.randint(4, 90, (4, 96), generator=torch.Generator().manual_seed(3)).tolist()
    digests = [
        calibrate(x, texts, held_out=0, progress=False).digest for x in (disk_model, cpu_model)
    ]  # fmt: skip
    assert digests[0] == digests[1]


def test_no_argument_or_method_names_a_device():
    """The model determines the devices. accelerate would call a method `to` for each layer."""
    assert not any(name in dir(FP8PagedCache) for name in ("to", "cuda", "cpu"))
    assert not any("device" in name for name in inspect.signature(FP8PagedCache).parameters)


DEVICE_CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "default": ("gqa", {}, {}),
    "centered": ("gqa", {}, {}),
    "torch": ("gqa", {"dtype": "fp8", "backend": "torch"}, {}),
    "reference": ("gqa", {"dtype": "fp8", "backend": "reference"}, {}),
    "scales": ("gqa", {"scales": 0.05}, {}),
    "auto": ("mha", {"dtype": "auto"}, {}),
    "window": ("sliding", {}, {}),
    "chunks": ("sliding_and_full", {"prefill": "stored"}, {"prefill_chunk_size": 7}),
    "latent": ("latent", {}, {}),
    "indexer": ("sparse", {}, {}),
    "preallocated": ("gqa", {"max_cache_len": 64}, {}),
    "offloading": ("softcap", {"offloading": True}, {}),
    "limited": ("gqa", {"max_pages": 12, "page_size": 8}, {}),
    "recurrent": ("hybrid", {}, {}),
}


@pytest.mark.parametrize("case", DEVICE_CASES)
def test_a_default_device_does_not_change_the_tokens(case: str, tmp_path: Path) -> None:
    """Tensors for the CPU are created on the CPU. Half of the cases use `enable`."""
    uses_enable = list(DEVICE_CASES).index(case) % 2 == 0
    name, keywords, options = DEVICE_CASES[case]
    options = {"max_new_tokens": 6, "do_sample": False, **options}
    model, _ = tiny(name)
    ids, mask = prompt(tokens=20).values()
    longer_ids = torch.cat([ids, ids[:, :5] + 1], 1)

    def run_calls() -> list[torch.Tensor]:
        cache = FP8PagedCache(model.config, **keywords)
        call = {"attention_mask": mask, "past_key_values": cache, **options}
        outputs = [model.generate(ids, **call)]
        if uses_enable:
            call["attention_mask"] = mask.new_ones(mask.shape[0], longer_ids.shape[1])
            call["attention_mask"][:, : mask.shape[1]] = mask
            outputs.append(model.generate(longer_ids, **call))
        cache.memory_footprint()
        if case != "recurrent":
            cache.batch_select_indices([1])
            cache.save(tmp_path / "cache.safetensors")
            loaded = FP8PagedCache.load(tmp_path / "cache.safetensors")
            loaded.fork().batch_repeat_interleave(2)
        return outputs

    if uses_enable:
        hf_fp8kv.enable(model)
    expected = run_calls()
    with torch.device("meta"):
        actual = run_calls()
    for x, y in zip(actual, expected, strict=True):
        assert_same(x, y, case)
