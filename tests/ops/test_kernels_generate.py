"""Tests that generate() gives equal tokens with Triton's kernels and with the torch backend.

The tests run on a GPU if there is one, otherwise in Triton's interpreter.
"""

import copy
import dataclasses
import inspect
import os
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CompileConfig

from hf_fp8kv import FP8PagedCache, ops, serving
from tests.helpers.assertions import assert_same
from tests.helpers.planned import centered_scales
from tests.helpers.serving_tools import generate_batch, greedy
from tests.helpers.tiny_models import build_variant

if ops.explain_backends()["triton"] is not None:
    pytest.skip(str(ops.explain_backends()["triton"]), allow_module_level=True)

from hf_fp8kv.attention.fp8_paged import fp8_paged_attention
from hf_fp8kv.ops.triton import decode
from hf_fp8kv.ops.triton.target import assuming, get_target, recording

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GREEDY = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
pytestmark = [
    pytest.mark.text,
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]


def make_model(name: str) -> tuple[Any, dict[str, Any]]:
    model, inputs = build_variant(name, attn_implementation="fp8_paged")
    return model.to(DEVICE), {name: x.to(DEVICE) for name, x in inputs.items()}


def generate_tokens(
    model: Any, inputs: dict[str, Any], backend: str, cache_options: Any = None, **options: Any
) -> Any:
    cache = FP8PagedCache(model.config, page_size=16, backend=backend, **(cache_options or {}))
    return model.generate(**inputs, past_key_values=cache, **{**GREEDY, **options})


PREALLOCATED = {"max_cache_len": 40}
CENTERED = {"scales": centered_scales()}


# Each architecture runs with a growing and a preallocated cache, each format with either.
@pytest.mark.parametrize(
    ("name", "cache_options"),
    [
        ("gqa", {}), ("gqa", {"dtype": "fp8_e3m4", "prefill": "stored"}),
        ("gqa", {**PREALLOCATED, **CENTERED}), ("kv_sharing", PREALLOCATED),
        pytest.param("kv_sharing", CENTERED, marks=pytest.mark.full),
        ("sliding_and_full", {"key_dtype": "auto", "value_dtype": "fp8_e5m2"}),
        ("sliding_and_full", PREALLOCATED), ("latent", {}), ("latent", PREALLOCATED), ("sinks", {}),
    ],
    ids=str,
)  # fmt: skip
def test_several_architectures_give_equal_tokens(name, cache_options):
    model, inputs = make_model(name)
    expected = generate_tokens(model, inputs, "torch", cache_options)
    assert_same(generate_tokens(model, inputs, "triton", cache_options), expected)


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 2}, {"prompt_lookup_num_tokens": 3, "one_row": True}, {"prefill_chunk_size": 5}],
    ids=str,
)
def test_ways_to_generate_give_equal_tokens(options):
    model, inputs = make_model("gqa")
    if "one_row" in options:  # one sequence is allowed, here the sequence without padding
        row = int(inputs["attention_mask"].sum(1).argmax())
        inputs = {name: x[row : row + 1] for name, x in inputs.items()}
        options = {name: x for name, x in options.items() if name != "one_row"}
    cache_options = {"prefill": "stored"}
    expected = generate_tokens(model, inputs, "torch", cache_options, **options)
    assert_same(generate_tokens(model, inputs, "triton", cache_options, **options), expected)


@pytest.mark.full
def test_a_compiled_step_gives_equal_tokens():
    """The step is one graph, with a plan that the first layer makes for all layers.

    In the fast tier, tests/cache/test_compile.py tests this with the reference.
    """
    model, inputs = make_model("gqa")
    expected = generate_tokens(model, inputs, "torch", PREALLOCATED, disable_compile=True)
    config = CompileConfig(fullgraph=True, dynamic=False, backend="aot_eager", mode=None)
    config._compile_all_devices = True  # includes CPUs
    torch._dynamo.reset()
    counters.clear()
    actual = generate_tokens(model, inputs, "triton", PREALLOCATED, compile_config=config)
    assert_same(actual, expected)
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


@torch.no_grad()
def test_keys_take_few_hops_to_the_kernel(monkeypatch):
    """In first and later calls, at most eight functions in six files receive the keys."""
    cache = FP8PagedCache(make_model("gqa")[0].config, backend="triton")
    stacks = []

    def record_launch(kernel: Any, *_: Any, **_constants: Any) -> None:
        stacks.append([x for x in inspect.stack() if f"{os.sep}hf_fp8kv{os.sep}" in x.filename])
        assert kernel.__name__ == "_write"

    monkeypatch.setattr("hf_fp8kv.ops.triton.write.launch", record_launch)
    for num_tokens in (40, 1, 2):
        cache.update(*torch.randn(2, 1, 2, num_tokens, 16), 0)
    for stack in stacks:
        names = [x.function for x in stack][::-1]
        assert len([*names, "launch", "_write"]) <= 8, names
        assert len({*[x.filename for x in stack], "target.py"}) <= 6
    assert len(stacks) == 3


def list_kernels(recorded: Any) -> list[str]:
    return [launch.kernel.__name__ for launch in recorded.launches]


def test_a_decode_step_has_two_launches_per_layer():
    """The plan is one additional launch for all layers."""
    model, inputs = make_model("gqa")
    with recording(dry_run=True) as recorded:
        generate_tokens(model, inputs, "triton", max_new_tokens=3)
    num_layers = model.config.num_hidden_layers
    prefill = ["_write"] * num_layers
    step = ["_write", "_schedule", "_attend", *["_write", "_attend"] * (num_layers - 1)]
    assert list_kernels(recorded) == [*prefill, *step, *step]


@pytest.mark.parametrize("cache_options", [{}, {"max_cache_len": 80}], ids=str)
def test_a_later_prompt_has_two_launches_per_layer(cache_options):
    model, inputs = make_model("gqa")
    cache = FP8PagedCache(model.config, page_size=16, backend="triton", **cache_options)
    ids = inputs["input_ids"].repeat(1, 4)[:1, :40]  # with two query heads per KV head: 80 rows
    with torch.no_grad():
        model(ids[:, :8], past_key_values=cache)
        with recording(dry_run=True) as recorded:
            model(ids, past_key_values=cache)
    kernels = [name for name in list_kernels(recorded) if name != "_schedule"]
    assert kernels == ["_write", "_attend"] * model.config.num_hidden_layers


@pytest.mark.parametrize(("options", "num_tokens"), [({}, 1), ({}, 2), (PREALLOCATED, 1)], ids=str)
def test_layers_use_the_plan_of_their_query_rows(options, num_tokens):
    """With 16 rows, fewer programs fit on an SM, so layers would replace a plan for more programs.

    The model has 16 bits, because with float32 operands a GPU reports how many programs fit.
    """
    sizes = {"num_attention_heads": 16 // num_tokens, "num_key_value_heads": 1}
    model, inputs = build_variant("gqa", attn_implementation="fp8_paged", **sizes)
    model, ids = model.to(DEVICE, torch.bfloat16), inputs["input_ids"].to(DEVICE)
    cache = FP8PagedCache(model.config, page_size=16, backend="triton", **options)
    # Without a cost, sequences of any length are split.
    target = dataclasses.replace(get_target(DEVICE), parameters={"split_cost": 0})
    with torch.no_grad(), assuming(target):
        model(ids, past_key_values=cache)
        with recording(dry_run=True) as recorded:
            model(ids[:, :num_tokens], past_key_values=cache)
    assert list_kernels(recorded).count("_schedule") == 1
    assert list_kernels(recorded).count("_attend") == model.config.num_hidden_layers


def test_requests_use_the_plan_of_their_query_rows(monkeypatch):
    def fail(*_: Any) -> None:
        raise AssertionError("a layer made a separate plan")

    sizes = {"num_attention_heads": 16, "num_key_value_heads": 1}
    model = build_variant("llama", **sizes)[0].to(DEVICE, torch.bfloat16)
    serving.enable(model, backend="triton")
    monkeypatch.setattr(decode, "fill_schedule", fail)
    # The prompts are too long for this kernel.
    prompts = [list(range(3, 3 + num_tokens)) for num_tokens in (6, 9)]
    responses = generate_batch(model, prompts, generation=greedy(max_new_tokens=3))
    assert [len(response) for response in responses] == [3, 3]


def read_dense(cache: FP8PagedCache) -> list[Any]:
    return [x.dense() for layer in cache.layers for x in (layer.keys, layer.values)]


def save_and_load(cache: FP8PagedCache, path: Any) -> FP8PagedCache:
    cache.save(path)
    return FP8PagedCache.load(path, device=DEVICE)


CACHE_CHANGES: dict[str, Any] = {
    "read": lambda cache, *_: cache,
    "fork": lambda cache, *_: cache.fork(),
    "copy": lambda cache, *_: copy.deepcopy(cache),
    "save": lambda cache, path, *_: save_and_load(cache, path / "cache.safetensors"),
    "crop": lambda cache, *_: cache.crop(-1) or cache,
    "reorder": lambda cache, *_: cache.reorder_cache(torch.tensor([1, 0])) or cache,
    "repeat": lambda cache, *_: cache.batch_repeat_interleave(2) or cache,
    "handle": lambda cache, _, handles: [x.dense() for states in handles for x in states] and cache,
    "reset": lambda cache, *_: cache.reset() or cache,
}


@pytest.mark.parametrize("change", CACHE_CHANGES)
def test_tokens_are_stored_without_an_attention_call(change, tmp_path):
    """Tokens are stored before any code reads the pages or changes their owner."""
    config = build_variant("gqa")[0].config
    contents = {}
    for backend in ("torch", "triton"):
        cache = FP8PagedCache(config, page_size=16, backend=backend, prefill="stored")
        generator = torch.Generator().manual_seed(7)
        for num_tokens in (15, 2, 1):
            shape = (2, config.num_key_value_heads, num_tokens, config.head_dim)
            handles = [
                cache.update(*torch.randn(2, *shape, generator=generator).to(DEVICE), i)
                for i in range(config.num_hidden_layers)
            ]
        new_cache = CACHE_CHANGES[change](cache, tmp_path, handles)
        if change == "reset":
            assert new_cache.get_seq_length() == 0
            shape = (2, config.num_key_value_heads, 9, config.head_dim)
            for i in range(config.num_hidden_layers):
                new_cache.update(*torch.randn(2, *shape, generator=generator).to(DEVICE), i)
        contents[backend] = read_dense(new_cache)
        del handles
    for x, y in zip(contents["torch"], contents["triton"], strict=True):
        assert_same(y.cpu(), x.cpu())


@pytest.mark.parametrize("is_forked", [True, False], ids=["a fork grows the pool", "one buffer"])
def test_tokens_are_stored_before_their_memory_changes(is_forked):
    """Between update and attention, the pages move, or the layers' shared buffer is reused."""
    contents = {}
    for backend in ("reference", "triton"):
        generator = torch.Generator().manual_seed(5)
        cache = FP8PagedCache(page_size=16, backend=backend, prefill="stored")
        caches = [cache]
        if is_forked:
            cache.update(*torch.randn(2, 1, 2, 32, 16, generator=generator).to(DEVICE), 0)
            caches.append(cache.fork())
            handles = cache.update(*torch.randn(2, 1, 2, 1, 16, generator=generator).to(DEVICE), 0)
            caches[1].update(*torch.randn(2, 1, 2, 80, 16, generator=generator).to(DEVICE), 0)
            query = torch.randn(1, 2, 1, 16, generator=generator).to(DEVICE)
            fp8_paged_attention(make_causal_module(), query, *handles, None)
        else:
            buffer = torch.empty(2, 1, 2, 3, 16, device=DEVICE)
            for layer in (0, 1, 0, 1):
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
                cache.update(buffer[0], buffer[1], layer)
                cache.layers[layer].keys  # noqa: B018 (stores the tokens)
        contents[backend] = [x for stored_cache in caches for x in read_dense(stored_cache)]
    for x, y in zip(contents["reference"], contents["triton"], strict=True):
        assert_same(y.cpu(), x.cpu())


def make_causal_module() -> torch.nn.Module:
    module = torch.nn.Module().eval()
    module.is_causal = True
    return module


class MemoryErrorMode(TorchDispatchMode):
    """Raises MemoryError in attention."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if "attend" in str(function):
            raise MemoryError("no memory for partial sums")
        return function(*args, **(kwargs or {}))


def test_tokens_stay_stored_if_attention_fails():
    cache = FP8PagedCache(page_size=16, backend="triton", prefill="stored")
    key, value = torch.randn(2, 1, 2, 3, 16, device=DEVICE)
    handles = cache.update(key, value, 0)
    query = torch.randn(1, 2, 3, 16, device=DEVICE)
    with MemoryErrorMode(), pytest.raises(MemoryError):
        fp8_paged_attention(make_causal_module(), query, *handles, None)
    assert ((read_dense(cache)[0] - key).abs() < 0.2).all()


def test_a_handle_of_removed_tokens_stores_no_tokens():
    config = build_variant("gqa")[0].config
    cache = FP8PagedCache(config, page_size=16, backend="triton", prefill="stored")
    shape = (1, config.num_key_value_heads, 3, config.head_dim)
    states = torch.randn(4, *shape, device=DEVICE)
    for i in range(config.num_hidden_layers):
        old_handles = cache.update(states[0], states[1], i)
    cache.reset()
    for i in range(config.num_hidden_layers):
        cache.update(states[2], states[3], i)
    expected = read_dense(cache)
    old_handles[0].dense()
    for x, y in zip(read_dense(cache), expected, strict=True):
        assert_same(x, y)
