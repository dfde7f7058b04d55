"""Tests of torch.compile with a preallocated cache: one graph for all steps, caches and resets.

The conditions of a CUDA graph are read from the graph that a backend receives: the devices of its
tensors, and the addresses that it writes to.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_utils
from torch.utils._pytree import tree_leaves
from transformers import CompileConfig

from hf_fp8kv import FP8PagedCache, OutOfPagesError
from hf_fp8kv.modeling.model_support import CACHE
from tests.helpers.assertions import assert_same
from tests.helpers.planned import make_centered_scales
from tests.helpers.standin import replace_triton
from tests.helpers.tiny_models import build_variant

STATIC = {"scales": make_centered_scales()}
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


@pytest.mark.parametrize(
    ("name", "attention", "keywords"),
    [
        ("gqa", "fp8_paged", STATIC),
        *(pytest.param(*case, {}, marks=pytest.mark.full) for case in (
            ("gqa", "sdpa"), ("kv_sharing", "fp8_paged"), ("sinks", "fp8_paged"),
            ("latent", "fp8_paged"),
        )),
    ],
    ids=str,
)  # fmt: skip
def test_all_steps_use_one_graph(name: str, attention: str, keywords: dict[str, Any]) -> None:
    model, inputs = build_variant(name, attn_implementation=attention)
    options = {"page_size": 16, **keywords}
    first_cache, second_cache = (
        FP8PagedCache(model.config, max_cache_len=50, **options) for _ in range(2)
    )
    growing_cache = FP8PagedCache(model.config, **options)
    expected = model.generate(**inputs, past_key_values=growing_cache, **GREEDY)
    for cache in (first_cache, second_cache, first_cache):
        cache.reset()
        tokens = model.generate(
            **inputs, past_key_values=cache, **GREEDY, compile_config=make_config()
        )
        assert_same(tokens, expected)
        assert counters["stats"]["unique_graphs"] == 1, "compiled again"
    assert not counters["graph_break"]


@pytest.mark.parametrize("is_cuda", [True, False])
@pytest.mark.parametrize("max_cache_len", [50, None])
def test_generate_compiles_only_on_cuda(
    is_cuda: bool, max_cache_len: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = build_variant("gqa")
    device = torch.device("cuda" if is_cuda else "cpu")
    monkeypatch.setattr(type(model), "device", property(lambda _: device))
    inputs = {CACHE: FP8PagedCache(model.config, max_cache_len=max_cache_len)}
    is_compiled = model._valid_auto_compile_criteria(inputs, model.generation_config)
    assert is_compiled is (is_cuda and max_cache_len is not None)


@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
def test_an_overrun_raises_and_stores_no_token(mode: str) -> None:
    model, inputs = build_variant("gqa", attn_implementation="fp8_paged")
    cache = FP8PagedCache(model.config, page_size=16, max_cache_len=20)
    with pytest.raises(OutOfPagesError, match="max_cache_len"):
        model.generate(
            **inputs, past_key_values=cache, compile_config=make_config(mode),
            disable_compile=mode == "eager", **GREEDY,
        )  # fmt: skip
    assert [int(layer.get_seq_length()) for layer in cache.paged_layers] == [20, 20]
    cache.crop(-1)
    model(inputs["input_ids"][:, :1], past_key_values=cache)
    assert [int(layer.get_seq_length()) for layer in cache.paged_layers] == [20, 20]


@pytest.mark.parametrize("name", ["write_by_host", "attend_by_host", "gather_by_host"])
def test_operations_that_read_values_on_the_host_are_cudagraph_unsafe(name: str) -> None:
    assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.hf_fp8kv, name).default.tags


@pytest.mark.parametrize(("name", "keywords"), [("sliding_and_full", {}), ("gqa", STATIC)], ids=str)
def test_a_compiled_step_fits_a_cuda_graph(
    name: str, keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is traced on "meta", which, like CUDA, is not the CPU. Nothing is computed."""
    replace_triton(monkeypatch, compute=False)
    model, inputs = build_variant(name, attn_implementation="fp8_paged")
    model = model.to("meta")
    tokens = inputs["input_ids"].to("meta")
    cache = FP8PagedCache(
        model.config, page_size=16, max_cache_len=50, backend="triton", **keywords
    )
    graph: dict[str, Any] = {}  # facts about the traced graph

    def record_graph(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        metadata = torch._guards.TracingContext.get().fw_metadata
        graph["mutated"] = list(metadata.mutated_inp_runtime_indices)
        graph["static"] = list(metadata.static_input_indices)
        outputs = tree_leaves([node.meta.get("val") for node in module.graph.nodes])
        graph["devices"] = {
            output.device.type for output in outputs if isinstance(output, torch.Tensor)
        }
        # The node of an operation that writes to its arguments has the operation as an argument.
        nodes = module.graph.nodes
        operations = {target for node in nodes for target in (node.target, *node.args)}
        graph["unsafe"] = [
            operation
            for operation in operations
            if torch.Tag.cudagraph_unsafe in getattr(operation, "tags", ())
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
    step(tokens[:, :1], attention_mask=masks, position_ids=positions, past_key_values=cache)
    assert graph["devices"] == {"meta"}, "a tensor of the CPU in the graph"
    assert graph["calls"] == {
        f"hf_fp8kv.{name}.default" for name in ("fill_schedule", "write", "attend")
    }
    assert not graph["unsafe"]
    # A step changes the pages and lengths of each layer, and the schedule of each window.
    assert len(graph["mutated"]) == 2 * 2 + len(cache.groups)
    traced_step: Any = SimpleNamespace(
        mutated_input_idxs=graph["mutated"], static_input_idxs=graph["static"], placeholders=[]
    )
    assert cudagraph_utils.check_for_mutation(traced_step, [], lambda _: False) is None
