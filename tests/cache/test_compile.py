"""The preallocated form under torch.compile: one graph, for every step, cache object and reset.

What only a CUDA graph would show is read from the graph that a backend is handed: on which device
its tensors are, and that what it writes into stays at its address.
"""

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_utils
from transformers import CompileConfig
from transformers.cache_utils import StaticCache

from hf_fp8kv import FP8PagedCache, OutOfPagesError
from tests.helpers.assertions import assert_same
from tests.helpers.standin import triton_standin
from tests.helpers.tiny_models import tiny

GREEDY = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
pytestmark = [
    pytest.mark.text,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(backend: Any = "aot_eager", mode: str | None = None) -> CompileConfig:
    """A configuration under which generate() compiles on a CPU too; a graph break is an error."""
    config = CompileConfig(fullgraph=True, dynamic=False, backend=backend, mode=mode)
    config._compile_all_devices = True
    return config


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("gqa", "fp8_paged"), ("gqa", "sdpa"), ("sliding_and_full", "fp8_paged"),
        ("kv_sharing", "fp8_paged"), ("latent", "fp8_paged"), ("sinks", "fp8_paged"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("keywords", [{}, {"scales": 0.05, "center_keys": True}], ids=str)
def test_one_graph(name: str, attention: str, keywords: dict[str, Any]) -> None:
    if keywords and name != "gqa":
        pytest.skip("the kind of scale is the same to every model")
    model, inputs = tiny(name, attn_implementation=attention)

    def cache(**more: Any) -> FP8PagedCache:
        return FP8PagedCache(model.config, page_size=16, max_cache_len=50, **keywords, **more)

    expected = model.generate(
        **inputs, past_key_values=FP8PagedCache(model.config, page_size=16, **keywords), **GREEDY
    )
    first = cache()
    options = {**GREEDY, "compile_config": compiled()}
    assert_same(model.generate(**inputs, past_key_values=first, **options), expected)
    assert graphs() == 1, "a step was compiled again"
    assert_same(model.generate(**inputs, past_key_values=cache(), **options), expected)
    first.reset()
    assert_same(model.generate(**inputs, past_key_values=first, **options), expected)
    assert graphs() == 1, "a second cache, or a reset one, was compiled again"
    assert not counters["graph_break"]


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_twenty_steps_in_the_mode_that_generate_chooses(backend: str) -> None:
    model, inputs = tiny("gqa", attn_implementation="fp8_paged")
    options = {"page_size": 16, "backend": backend}
    eager = FP8PagedCache(model.config, **options)
    expected = model.generate(**inputs, past_key_values=eager, **GREEDY)
    cache = FP8PagedCache(model.config, max_cache_len=50, **options)
    config = compiled("inductor", CompileConfig().mode)
    assert config.mode == "reduce-overhead"
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = model.generate(**inputs, past_key_values=cache, compile_config=config, **GREEDY)
    assert_same(got, expected)
    assert graphs() == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("on_cuda", [True, False])
def test_what_generate_compiles(on_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the preallocated form is compiled without being asked, as transformers' own is."""
    model, _ = tiny("gqa")
    device = torch.device("cuda" if on_cuda else "cpu")
    monkeypatch.setattr(type(model), "device", property(lambda _: device))
    for cache, expected in (
        (FP8PagedCache(model.config, max_cache_len=50), on_cuda),
        (StaticCache(model.config, max_cache_len=50), on_cuda),
        (FP8PagedCache(model.config), False),
    ):
        inputs = {"past_key_values": cache}
        assert model._valid_auto_compile_criteria(inputs, model.generation_config) is expected


def test_beams_change_places_between_compiled_steps() -> None:
    model, inputs = tiny("gqa", attn_implementation="fp8_paged")
    options = {**GREEDY, "num_beams": 3}
    expected = model.generate(**inputs, past_key_values=FP8PagedCache(model.config), **options)
    cache = FP8PagedCache(model.config, page_size=16, max_cache_len=50)
    got = model.generate(**inputs, past_key_values=cache, compile_config=compiled(), **options)
    assert_same(got, expected)


def tensors_of(layer: Any) -> list[torch.Tensor]:
    """Every tensor of a preallocated layer that a step reads or writes."""
    more = (
        layer.table,
        layer.lengths,
        layer.plan,
        layer.k_static_scale,
        layer.v_static_scale,
        layer.k_center,
    )
    return [*layer.pool.tensors().values(), *(x for x in more if x is not None)]


@pytest.mark.parametrize("keywords", [{}, {"scales": 0.05, "center_keys": True}], ids=str)
def test_addresses_stay(keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    triton_standin(monkeypatch)
    model, inputs = tiny("gqa", attn_implementation="fp8_paged")
    cache = FP8PagedCache(
        model.config, page_size=16, max_cache_len=50, backend="triton", **keywords
    )

    def addresses() -> list[int]:
        return [tensor.data_ptr() for layer in cache.paged_layers for tensor in tensors_of(layer)]

    model.generate(**inputs, past_key_values=cache, disable_compile=True, **GREEDY)
    before = addresses()
    cache.reorder_cache(torch.tensor([1, 1]))
    cache.crop(-3)
    assert cache.host_length() == 13 + 20 - 1 - 3
    cache.reset()
    model.generate(**inputs, past_key_values=cache, disable_compile=True, **GREEDY)
    assert addresses() == before


@pytest.mark.parametrize("how", ["eager", "aot_eager", "inductor"])
def test_overrun_raises_and_changes_nothing(how: str) -> None:
    model, inputs = tiny("gqa", attn_implementation="fp8_paged")
    cache = FP8PagedCache(model.config, page_size=16, max_cache_len=20)
    options = {"disable_compile": True} if how == "eager" else {"compile_config": compiled(how)}
    with pytest.raises(OutOfPagesError, match="max_cache_len"):
        model.generate(**inputs, past_key_values=cache, **options, **GREEDY)
    assert [layer.host_length() for layer in cache.paged_layers] == [20, 20]
    cache.crop(-1)
    model(inputs["input_ids"][:, :1], past_key_values=cache)
    assert [layer.host_length() for layer in cache.paged_layers] == [20, 20]


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_no_copy_of_the_pool_in_compiled_code(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read in the graph that a backend is handed after functionalization is undone by inductor."""
    from torch._inductor.utils import run_and_get_code

    model, inputs = tiny("gqa", attn_implementation="fp8_paged")
    if backend == "triton":
        triton_standin(monkeypatch)
    cache = FP8PagedCache(model.config, page_size=16, max_cache_len=48, backend=backend)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        step = torch.compile(model.forward, fullgraph=True, dynamic=False)
        seen = torch.ones(2, 1, 1, 48, dtype=torch.bool)
        more = {"input_ids": inputs["input_ids"][:, :1], "attention_mask": seen}
        more["position_ids"] = torch.full((2, 1), 13)
        _, sources = run_and_get_code(step, **more, past_key_values=cache)
    code = "\n".join(sources)
    assert "hf_fp8kv.write" in code
    assert ("hf_fp8kv.write_and_attend" if backend == "triton" else "hf_fp8kv.attend") in code
    assert "hf_fp8kv.gather" not in code, "a dense copy of the history"
    pool = cache.paged_layers[0].pool.k
    shape = str(tuple(pool.shape))
    made = [x for x in code.splitlines() if "empty_strided" in x and shape in x and "= " in x]
    assert not made, made


def step_of(model: Any, compile_backend: str | None) -> Any:
    """One decoding step of a whole model: (token, position, cache) -> next token."""
    forward = model.forward
    if compile_backend:
        forward = torch.compile(forward, fullgraph=True, dynamic=False, backend=compile_backend)

    def step(token: torch.Tensor, position: int, cache: FP8PagedCache) -> torch.Tensor:
        seen = (torch.arange(50) <= position).expand(2, 1, 1, -1).contiguous()
        positions = torch.full((2, 1), position)
        out = forward(
            input_ids=token, attention_mask=seen, position_ids=positions, past_key_values=cache
        )
        return out.logits[:, -1:].argmax(-1)

    return step


def walk(model: Any, prompt: torch.Tensor, cache: FP8PagedCache, step: Any) -> list[torch.Tensor]:
    """Decodes with a reorder, a crop and a reset between steps; returns every token."""
    found: list[torch.Tensor] = []

    def run(token: torch.Tensor, position: int, count: int) -> tuple[torch.Tensor, int]:
        for _ in range(count):
            token, position = step(token, position, cache), position + 1
            found.append(token)
        return token, position

    for places in ([1, 0], [1, 1]):
        token = model(prompt, past_key_values=cache).logits[:, -1:].argmax(-1)
        token, position = run(token, prompt.shape[1], 5)
        cache.reorder_cache(torch.tensor(places))
        token, position = run(token[places], position, 5)
        cache.crop(-4)
        run(token, position - 4, 5)
        cache.reset()
    return found


@torch.no_grad()
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_reorder_crop_and_reset_between_compiled_steps(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "triton":
        triton_standin(monkeypatch)
    model, inputs = tiny("gqa", attn_implementation="fp8_paged")
    prompt = inputs["input_ids"]

    def cache() -> FP8PagedCache:
        return FP8PagedCache(model.config, page_size=16, max_cache_len=50, backend=backend)

    expected = walk(model, prompt, cache(), step_of(model, None))
    with torch._dynamo.config.patch(error_on_recompile=True):
        step = step_of(model, "inductor")
        for _ in range(2):
            got = walk(model, prompt, cache(), step)
            assert len(got) == 30
            assert_same(torch.cat(got), torch.cat(expected))
    assert graphs() == 1, "a second cache was compiled again"


# -- what a CUDA graph asks for ------------------------------------------------------------------


def test_only_what_looks_at_values_is_kept_out_of_cuda_graphs() -> None:
    unsafe = torch.Tag.cudagraph_unsafe
    for name in ("write", "attend", "gather"):
        kept, out = (getattr(torch.ops.hf_fp8kv, x).default for x in (name, f"{name}_by_host"))
        assert unsafe not in kept.tags
        assert unsafe in out.tags
    assert unsafe not in torch.ops.hf_fp8kv.plan.default.tags


@torch.no_grad()
@pytest.mark.parametrize("name", ["gqa", "sliding_and_full", "kv_sharing"])
@pytest.mark.parametrize("keywords", [{}, {"scales": 0.05, "center_keys": True}], ids=str)
def test_a_compiled_step_fits_a_cuda_graph(
    name: str, keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced on the device "meta", which like CUDA is not the CPU; nothing is computed."""
    if name == "kv_sharing" and keywords:
        pytest.skip("layers that share are about plans, which kinds of scale are not")
    triton_standin(monkeypatch, computes=False)
    model, inputs = tiny(name, attn_implementation="fp8_paged")
    model = model.to("meta")
    tokens = inputs["input_ids"].to("meta")
    cache = FP8PagedCache(
        model.config, page_size=16, max_cache_len=50, backend="triton", **keywords
    )
    found: dict[str, Any] = {}

    def look(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        facts = torch._guards.TracingContext.get().fw_metadata
        found["mutated"] = list(facts.mutated_inp_runtime_indices)
        found["static"] = list(facts.static_input_indices)
        found["inputs"] = [(tuple(x.shape), x.dtype) for x in inputs]
        nodes = list(module.graph.nodes)
        values = torch.utils._pytree.tree_leaves([node.meta.get("val") for node in nodes])
        found["devices"] = {x.device.type for x in values if isinstance(x, torch.Tensor)}
        # What writes into its arguments is the argument of a node that says so.
        called = {y for node in nodes for y in (node.target, *node.args)}
        unsafe = torch.Tag.cudagraph_unsafe
        found["unsafe"] = [x for x in called if unsafe in getattr(x, "tags", ())]
        found["calls"] = {str(x) for x in called if "hf_fp8kv" in str(x)}
        return module

    model(tokens, past_key_values=cache)
    step = torch.compile(
        model.forward, fullgraph=True, dynamic=False, backend=aot_autograd(fw_compiler=look)
    )
    seen = torch.ones(2, 1, 1, 50, dtype=torch.bool, device="meta")
    masks = seen if name == "gqa" else {"full_attention": seen, "sliding_attention": seen}
    positions = torch.full((2, 1), 13, device="meta")
    step(tokens[:, :1], attention_mask=masks, position_ids=positions, past_key_values=cache)

    # Gemma 3n itself, in transformers 5.17, multiplies by a number that is a tensor of the CPU.
    if name != "kv_sharing":
        assert found["devices"] == {"meta"}, "a tensor of the CPU in the graph"
    assert found["calls"] == {f"hf_fp8kv.{x}.default" for x in ("plan", "write_and_attend")}
    assert not found["unsafe"]
    function: Any = SimpleNamespace(
        mutated_input_idxs=found["mutated"], static_input_idxs=found["static"], placeholders=[]
    )
    assert cudagraph_utils.check_for_mutation(function, [], lambda _: False) is None
    layers = cache.paged_layers
    plans = [layer.plan for layer in layers if layer.fills_plan]
    pools = [tensor for layer in layers for tensor in layer.pool.tensors().values()]
    written = [*pools, layers[0].lengths, *plans]
    assert Counter(found["inputs"][i] for i in found["mutated"]) == Counter(
        (tuple(tensor.shape), tensor.dtype) for tensor in written
    )
    assert len(plans) == len(cache.groups)
