"""Tests of torch.compile with a preallocated cache: one graph for all steps, caches and resets.

The conditions of a CUDA graph are read from the graph that a backend receives: the devices of its
tensors, and the addresses that it writes to.
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_utils
from torch._inductor.utils import run_and_get_code
from transformers import CompileConfig
from transformers.cache_utils import StaticCache

from hf_fp8kv import FP8PagedCache, OutOfPagesError
from hf_fp8kv.modeling.model_support import CACHE
from tests.helpers.assertions import assert_same
from tests.helpers.planned import centered_scales
from tests.helpers.standin import replace_triton
from tests.helpers.tiny_models import build_variant

STATIC = {"scales": centered_scales()}
GREEDY = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
pytestmark = [
    pytest.mark.text,
    pytest.mark.usefixtures("no_gradients", "fresh_compiler"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]


def make_config(backend: Any = "aot_eager", mode: str | None = None) -> CompileConfig:
    """Return a config with which generate() compiles even on a CPU. A graph break is an error."""
    config = CompileConfig(fullgraph=True, dynamic=False, backend=backend, mode=mode)
    config._compile_all_devices = True
    return config


# The fast tier has a single model. The last test of this file compiles layers with a window.
@pytest.mark.parametrize(
    ("name", "attention", "keywords"),
    [
        ("gqa", "fp8_paged", STATIC),
        *(pytest.param(*case, {}, marks=pytest.mark.full) for case in (
            ("gqa", "fp8_paged"), ("gqa", "sdpa"), ("kv_sharing", "fp8_paged"),
            ("sliding_and_full", "fp8_paged"),
            ("sinks", "fp8_paged"), ("latent", "fp8_paged"),
        )),
    ],
    ids=str,
)  # fmt: skip
def test_all_steps_use_one_graph(name: str, attention: str, keywords: dict[str, Any]) -> None:
    model, inputs = build_variant(name, attn_implementation=attention)

    def make_cache(**options: Any) -> FP8PagedCache:
        return FP8PagedCache(model.config, page_size=16, max_cache_len=50, **keywords, **options)

    expected = model.generate(
        **inputs, past_key_values=FP8PagedCache(model.config, page_size=16, **keywords), **GREEDY
    )
    first_cache = make_cache()
    options = {**GREEDY, "compile_config": make_config()}
    assert_same(model.generate(**inputs, past_key_values=first_cache, **options), expected)
    assert counters["stats"]["unique_graphs"] == 1, "a step was compiled again"
    assert_same(model.generate(**inputs, past_key_values=make_cache(), **options), expected)
    first_cache.reset()
    assert_same(model.generate(**inputs, past_key_values=first_cache, **options), expected)
    assert counters["stats"]["unique_graphs"] == 1, "a new or reset cache was compiled again"
    assert not counters["graph_break"]


@pytest.mark.parametrize("is_cuda", [True, False])
def test_generate_compiles_only_on_cuda(is_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """generate() treats the static cache of transformers in the same way."""
    model, _ = build_variant("gqa")
    device = torch.device("cuda" if is_cuda else "cpu")
    monkeypatch.setattr(type(model), "device", property(lambda _: device))
    for cache, expected in (
        (FP8PagedCache(model.config, max_cache_len=50), is_cuda),
        (StaticCache(model.config, max_cache_len=50), is_cuda),
        (FP8PagedCache(model.config), False),
    ):
        inputs = {CACHE: cache}
        assert model._valid_auto_compile_criteria(inputs, model.generation_config) is expected


@pytest.mark.parametrize(
    "mode", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.full)]
)
def test_an_overrun_raises_and_stores_no_token(mode: str) -> None:
    model, inputs = build_variant("gqa", attn_implementation="fp8_paged")
    cache = FP8PagedCache(model.config, page_size=16, max_cache_len=20)
    options = {"compile_config": make_config(mode), "disable_compile": mode == "eager"}
    with pytest.raises(OutOfPagesError, match="max_cache_len"):
        model.generate(**inputs, past_key_values=cache, **options, **GREEDY)
    assert [int(layer.get_seq_length()) for layer in cache.paged_layers] == [20, 20]
    cache.crop(-1)
    model(inputs["input_ids"][:, :1], past_key_values=cache)
    assert [int(layer.get_seq_length()) for layer in cache.paged_layers] == [20, 20]


@pytest.mark.full  # Inductor compiles for half a minute
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_compiled_code_has_no_copy_of_the_pool(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor undoes functionalization, so the test reads the generated code."""
    model, inputs = build_variant("gqa", attn_implementation="fp8_paged")
    if backend == "triton":
        replace_triton(monkeypatch)
    cache = FP8PagedCache(model.config, page_size=16, max_cache_len=48, backend=backend)
    model(**inputs, past_key_values=cache)
    mask = torch.ones(2, 1, 1, 48, dtype=torch.bool)
    mask[..., 14:] = False
    step_inputs = {"input_ids": inputs["input_ids"][:, :1], "attention_mask": mask}
    step_inputs["position_ids"] = torch.full((2, 1), 13)
    expected = model(**step_inputs, past_key_values=cache.fork()).logits
    step = torch.compile(model.forward, fullgraph=True, dynamic=False)
    out, sources = run_and_get_code(step, **step_inputs, past_key_values=cache)
    torch.testing.assert_close(out.logits, expected, rtol=1e-4, atol=1e-4)
    code = "\n".join(sources)
    assert "hf_fp8kv.write" in code
    assert "hf_fp8kv.attend" in code
    assert "hf_fp8kv.gather" not in code, "a dense copy of the history"
    shape = str(tuple(cache.layers[0].keys.block.shape))
    allocations = [line for line in code.splitlines() if "empty_strided" in line and "= " in line]
    copies = [line for line in allocations if shape in line]
    assert not copies, copies


# -- the conditions of a CUDA graph --------------------------------------------------------------


def test_operations_that_read_values_on_the_host_are_cudagraph_unsafe() -> None:
    for name in ("write", "attend", "gather"):
        operation = getattr(torch.ops.hf_fp8kv, f"{name}_by_host").default
        assert torch.Tag.cudagraph_unsafe in operation.tags


# The cases have layers with and without a window, static scales, and layers that share keys.
@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("sliding_and_full", {}), ("gqa", STATIC),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (
            ("gqa", {}), ("sliding_and_full", STATIC), ("kv_sharing", {}),
        )),
    ],
    ids=str,
)  # fmt: skip
def test_a_compiled_step_fits_a_cuda_graph(
    name: str, keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is traced on "meta", which, like CUDA, is not the CPU. Nothing is computed."""
    replace_triton(monkeypatch, compute=False)
    model, inputs = build_variant(name, attn_implementation="fp8_paged")
    model = model.to("meta")
    tokens = inputs["input_ids"].to("meta")
    options = {"page_size": 16, "max_cache_len": 50, "backend": "triton"}
    cache = FP8PagedCache(model.config, **options, **keywords)
    graph: dict[str, Any] = {}
    key_handles: dict[int, Any] = {}

    def update(key: torch.Tensor, value: torch.Tensor, layer: int, **kwargs: Any) -> Any:
        handles = FP8PagedCache.update(cache, key, value, layer, **kwargs)
        key_handles[layer], _ = handles
        return handles

    def record_graph(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        metadata = torch._guards.TracingContext.get().fw_metadata
        graph["mutated"] = list(metadata.mutated_inp_runtime_indices)
        graph["static"] = list(metadata.static_input_indices)
        graph["inputs"] = [(tuple(tensor.shape), tensor.dtype) for tensor in inputs]
        nodes = list(module.graph.nodes)
        outputs = torch.utils._pytree.tree_leaves([node.meta.get("val") for node in nodes])
        graph["devices"] = {
            output.device.type for output in outputs if isinstance(output, torch.Tensor)
        }
        # The node of an operation that writes to its arguments has the operation as an argument.
        operations = {target for node in nodes for target in (node.target, *node.args)}
        unsafe_tag = torch.Tag.cudagraph_unsafe
        graph["unsafe"] = [
            operation for operation in operations if unsafe_tag in getattr(operation, "tags", ())
        ]
        graph["calls"] = {
            str(operation) for operation in operations if "hf_fp8kv" in str(operation)
        }
        return module

    model(tokens, past_key_values=cache)
    backend = aot_autograd(fw_compiler=record_graph)
    step = torch.compile(model.forward, fullgraph=True, dynamic=False, backend=backend)
    mask = torch.ones(2, 1, 1, 50, dtype=torch.bool, device="meta")
    masks = mask if name == "gqa" else {"full_attention": mask, "sliding_attention": mask}
    positions = torch.full((2, 1), 13, device="meta")
    step_inputs = {"input_ids": tokens[:, :1], "attention_mask": masks, "position_ids": positions}
    cache.update = update
    model(**step_inputs, past_key_values=cache)
    del cache.update
    step(**step_inputs, past_key_values=cache)

    assert graph["devices"] == {"meta"}, "a tensor of the CPU in the graph"
    assert graph["calls"] == {
        f"hf_fp8kv.{name}.default" for name in ("fill_schedule", "write", "attend")
    }
    assert not graph["unsafe"]
    traced_step: Any = SimpleNamespace(
        mutated_input_idxs=graph["mutated"], static_input_idxs=graph["static"], placeholders=[]
    )
    assert cudagraph_utils.check_for_mutation(traced_step, [], lambda _: False) is None
    # The step writes the pages and the lengths of every layer, and a plan for each window.
    writes: Counter[Any] = Counter()
    for layer, key in key_handles.items():
        written = [key.block, key.lengths]
        window = cache.layers[layer].sliding_window
        first_layer = next(i for i in key_handles if cache.layers[i].sliding_window == window)
        written += [key.schedule] if layer == first_layer else []
        writes.update((tuple(tensor.shape), tensor.dtype) for tensor in written)
    assert Counter(graph["inputs"][i] for i in graph["mutated"]) == writes
