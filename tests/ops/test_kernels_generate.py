"""generate() through Triton's kernels: the tokens of the torch backend, in float32.

On a GPU where there is one, otherwise in Triton's interpreter.
"""

import copy
import sys
from typing import Any

import pytest
import torch

from hf_fp8kv import FP8PagedCache, ops, serving
from tests.cache.test_compile import compiled, graphs
from tests.helpers.assertions import assert_same
from tests.helpers.serving_tools import batched, greedy
from tests.helpers.tiny_models import tiny

if ops.available_backends()["triton"] is not None:
    pytest.skip(str(ops.available_backends()["triton"]), allow_module_level=True)

from hf_fp8kv.attention.fp8_paged import fp8_paged_attention
from hf_fp8kv.ops.triton import decode, extend, plan, tuning, write
from hf_fp8kv.ops.triton.target import target_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
if "tests.tools.ir" in sys.modules:  # the GPU that it pretends is none for torch.compile
    GREEDY["disable_compile"] = True
pytestmark = [
    pytest.mark.text,
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]


def setting(name: str) -> tuple[Any, dict[str, Any]]:
    model, inputs = tiny(name, attn_implementation="fp8_paged")
    return model.to(DEVICE), {key: x.to(DEVICE) for key, x in inputs.items()}


def tokens(model: Any, inputs: dict[str, Any], backend: str, cache: Any = None, **more: Any) -> Any:
    cache = FP8PagedCache(model.config, page_size=16, backend=backend, **(cache or {}))
    return model.generate(**inputs, past_key_values=cache, **{**GREEDY, **more})


CACHES = [
    {},
    {"dtype": "fp8_e3m4", "prefill": "stored"},
    {"scales": 0.05, "center_keys": True},
    {"key_dtype": "auto", "value_dtype": "fp8_e5m2"},
    {"max_cache_len": 40},
    {"max_cache_len": 40, "scales": 0.05, "center_keys": True},
]


@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_tokens(cache):
    model, inputs = setting("gqa")
    expected = tokens(model, inputs, "torch", cache)
    assert_same(tokens(model, inputs, "triton", cache), expected)


@pytest.mark.parametrize("cache", [{}, {"max_cache_len": 40}], ids=str)
@pytest.mark.parametrize("name", ["sliding_and_full", "kv_sharing", "latent", "sinks"])
def test_tokens_of_other_architectures(name, cache):
    model, inputs = setting(name)
    expected = tokens(model, inputs, "torch", cache)
    assert_same(tokens(model, inputs, "triton", cache), expected)


@pytest.mark.parametrize(
    "more",
    [{"num_beams": 2}, {"prompt_lookup_num_tokens": 3, "only": 0}, {"prefill_chunk_size": 5}],
    ids=str,
)
def test_ways_to_generate(more):
    model, inputs = setting("gqa")
    if "only" in more:  # these take one sequence, here the one without padding
        row = int(inputs["attention_mask"].sum(1).argmax())
        inputs = {key: x[row : row + 1] for key, x in inputs.items()}
        more = {key: x for key, x in more.items() if key != "only"}
    cache = {"prefill": "stored"}
    expected = tokens(model, inputs, "torch", cache, **more)
    assert_same(tokens(model, inputs, "triton", cache, **more), expected)


def test_a_compiled_step():
    """One graph, with a plan that the first layer makes for all."""
    model, inputs = setting("gqa")
    cache = {"max_cache_len": 40}
    expected = tokens(model, inputs, "torch", cache, disable_compile=True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert_same(tokens(model, inputs, "triton", cache, compile_config=compiled()), expected)
    assert graphs() == 1
    torch._dynamo.reset()


def test_forks_and_crops():
    model, inputs = setting("gqa")
    found = {}
    for backend in ("torch", "triton"):
        cache = FP8PagedCache(model.config, page_size=16, backend=backend)
        model.generate(**inputs, past_key_values=cache, **GREEDY)
        fork = cache.fork()
        cache.crop(-4)
        ids = inputs["input_ids"][:, :1]
        with torch.no_grad():
            mask = inputs["attention_mask"]
            outputs = []
            for one in (cache, fork):
                length = one.get_seq_length()
                seen = torch.nn.functional.pad(mask, (0, length + 1 - mask.shape[1]), value=1)
                outputs.append(model(ids, attention_mask=seen, past_key_values=one).logits)
        found[backend] = outputs
    for x, y in zip(found["torch"], found["triton"], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.fixture
def started(monkeypatch):
    """Names of the kernels that start."""
    names: list[str] = []
    for module in (decode, extend, plan, write):
        launch = module.launch

        def note(kernel: Any, *args: Any, launch: Any = launch, **constants: Any) -> None:
            names.append(kernel.__name__)
            launch(kernel, *args, **constants)

        monkeypatch.setattr(module, "launch", note)
    return names


def test_a_decode_step_is_one_launch_a_layer(started):
    """Besides the plan, one for all layers."""
    model, inputs = setting("gqa")
    tokens(model, inputs, "triton", max_new_tokens=3)
    layers = model.config.num_hidden_layers
    prefill, step = ["_write"] * layers, ["_plan", *["_decode"] * layers]
    assert started == [*prefill, *step, *step]


@pytest.mark.parametrize("keywords", [{}, {"max_cache_len": 80}], ids=str)
def test_a_later_prompt_is_two_launches_a_layer(keywords, started):
    model, inputs = setting("gqa")
    cache = FP8PagedCache(model.config, page_size=16, backend="triton", **keywords)
    ids = inputs["input_ids"].repeat(1, 4)[:1, :40]  # of two query heads per KV head: 80 rows
    with torch.no_grad():
        model(ids[:, :8], past_key_values=cache)
        started.clear()
        model(ids, past_key_values=cache)
    found = [name for name in started if name != "_plan"]
    assert found == ["_write", "_extend"] * model.config.num_hidden_layers


@pytest.mark.parametrize("cache", [{}, {"max_cache_len": 40}], ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_layers_take_the_plan_of_their_query_rows(cache, count, monkeypatch):
    """16 rows: fewer programs fit on a processor; a plan for more would be made anew by layers."""
    if count > 1 and cache:
        pytest.skip("the plan stays at its address, and is for steps of one token")
    sizes = {"num_attention_heads": 16 // count, "num_key_value_heads": 1}
    model, inputs = tiny("gqa", attn_implementation="fp8_paged", **sizes)
    model, ids = model.to(DEVICE), inputs["input_ids"].to(DEVICE)
    cache = FP8PagedCache(model.config, page_size=16, backend="triton", **cache)
    monkeypatch.setattr(decode, "make_plan", _refuse)
    # As if sequences of any length were worth splitting.
    with torch.no_grad(), tuning.override(split_cost=0):
        model(ids, past_key_values=cache)
        model(ids[:, :count], past_key_values=cache)
        if count == 1:
            target = target_of(torch.device(DEVICE))
            ranges = target.processors * tuning.expected_programs(target, 16)
            plans = [keys.plan for keys, _ in (layer.stored() for layer in cache.layers)]
            assert plans[0] is plans[1]
            assert plan.max_parts(plans[0], len(ids), 1) == ranges + len(ids) - 1
            assert ranges < target.processors * tuning.expected_programs(target, 1)


def test_requests_take_the_plan_of_their_query_rows(monkeypatch):
    sizes = {"num_attention_heads": 16, "num_key_value_heads": 1}
    model = tiny("llama", **sizes)[0].to(DEVICE)
    serving.enable(model, backend="triton")
    monkeypatch.setattr(decode, "make_plan", _refuse)
    # Prompts of so many tokens that they are not for this kernel.
    texts = [list(range(3, 3 + count)) for count in (6, 9)]
    assert [len(x) for x in batched(model, texts, generation=greedy(max_new_tokens=3))] == [3, 3]


def _refuse(*_: Any) -> None:
    raise AssertionError("a layer made a plan of its own")


def _read(cache: FP8PagedCache) -> list[Any]:
    return [x.dense() for layer in cache.layers for x in (layer.keys, layer.values)]


def _save_and_load(cache: FP8PagedCache, path: Any) -> FP8PagedCache:
    cache.save(path)
    return FP8PagedCache.load(path)


LEFT: dict[str, Any] = {
    "read": lambda cache, *_: cache,
    "fork": lambda cache, *_: cache.fork(),
    "copy": lambda cache, *_: copy.deepcopy(cache),
    "save": lambda cache, path, *_: _save_and_load(cache, path / "cache.safetensors"),
    "crop": lambda cache, *_: cache.crop(-1) or cache,
    "reorder": lambda cache, *_: cache.reorder_cache(torch.tensor([1, 0])) or cache,
    "repeat": lambda cache, *_: cache.batch_repeat_interleave(2) or cache,
    "handle": lambda cache, _, handles: [x.dense() for both in handles for x in both] and cache,
    "reset": lambda cache, *_: cache.reset() or cache,
}


@pytest.mark.parametrize("name", LEFT)
def test_tokens_left_to_an_attention_that_does_not_come(name, tmp_path):
    """They are stored before anything looks at the pages, or changes whose they are."""
    config = tiny("gqa")[0].config
    found = {}
    for backend in ("torch", "triton"):
        cache = FP8PagedCache(config, page_size=16, backend=backend, prefill="stored")
        generator = torch.Generator().manual_seed(7)
        for count in (15, 2, 1):
            shape = (2, config.num_key_value_heads, count, config.head_dim)
            handles = [
                cache.update(*torch.randn(2, *shape, generator=generator).to(DEVICE), i)
                for i in range(config.num_hidden_layers)
            ]
        after = LEFT[name](cache, tmp_path, handles)
        if name == "reset":
            assert after.get_seq_length() == 0
            shape = (2, config.num_key_value_heads, 9, config.head_dim)
            for i in range(config.num_hidden_layers):
                after.update(*torch.randn(2, *shape, generator=generator).to(DEVICE), i)
        found[backend] = _read(after)
        del handles
    for x, y in zip(found["torch"], found["triton"], strict=True):
        assert_same(y.cpu(), x.cpu())


def test_a_fork_grows_the_pool_between_update_and_attention():
    attention = torch.nn.Module().eval()
    attention.is_causal = True
    found = {}
    for backend in ("reference", "triton"):
        generator = torch.Generator().manual_seed(5)

        def tokens(count: int, generator: torch.Generator = generator) -> tuple[Any, Any]:
            key, value = torch.randn(2, 1, 2, count, 16, generator=generator).to(DEVICE)
            return key, value

        cache = FP8PagedCache(page_size=16, backend=backend)
        cache.update(*tokens(32), 0)
        fork = cache.fork()
        handles = cache.update(*tokens(1), 0)
        fork.update(*tokens(80), 0)
        query = torch.randn(1, 2, 1, 16, generator=generator).to(DEVICE)
        fp8_paged_attention(attention, query, *handles, None)
        found[backend] = [*_read(cache), *_read(fork)]
    for x, y in zip(found["reference"], found["triton"], strict=True):
        assert_same(y.cpu(), x.cpu())


def test_one_buffer_for_the_tokens_of_all_layers():
    found = {}
    for backend in ("reference", "triton"):
        generator = torch.Generator().manual_seed(6)
        cache = FP8PagedCache(page_size=16, backend=backend, prefill="stored")
        buffer = torch.empty(2, 1, 2, 3, 16, device=DEVICE)
        for layer in (0, 1, 0, 1):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
            cache.update(buffer[0], buffer[1], layer)
            cache.layers[layer].keys  # noqa: B018 (stores them)
        found[backend] = _read(cache)
    for x, y in zip(found["reference"], found["triton"], strict=True):
        assert_same(y.cpu(), x.cpu())


def test_an_attention_that_fails_leaves_its_tokens(monkeypatch):
    def fail(*_: Any) -> None:
        raise MemoryError("no room for partial sums")

    attention = torch.nn.Module().eval()
    attention.is_causal = True
    cache = FP8PagedCache(page_size=16, backend="triton", prefill="stored")
    key, value = torch.randn(2, 1, 2, 3, 16, device=DEVICE)
    handles = cache.update(key, value, 0)
    with monkeypatch.context() as patch:
        patch.setattr(decode, "split_kv_decode", fail)
        with pytest.raises(MemoryError):
            fp8_paged_attention(attention, torch.randn(1, 2, 3, 16, device=DEVICE), *handles, None)
    assert ((_read(cache)[0] - key).abs() < 0.2).all()


def test_a_handle_that_is_read_after_its_tokens_are_gone_stores_nothing():
    config = tiny("gqa")[0].config
    cache = FP8PagedCache(config, page_size=16, backend="triton", prefill="stored")
    shape = (1, config.num_key_value_heads, 3, config.head_dim)
    tokens = torch.randn(4, *shape, device=DEVICE)
    for i in range(config.num_hidden_layers):
        old = cache.update(tokens[0], tokens[1], i)
    cache.reset()
    for i in range(config.num_hidden_layers):
        cache.update(tokens[2], tokens[3], i)
    expected = _read(cache)
    old[0].dense()
    for x, y in zip(_read(cache), expected, strict=True):
        assert_same(x, y)
