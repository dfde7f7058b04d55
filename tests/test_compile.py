"""The static form under torch.compile: one graph, for every step, cache object and reset."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig

from hf_fp8kv import FP8PagedCache, OutOfPagesError
from tests.tiny_models import tiny

GREEDY = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(backend: Any = "aot_eager") -> CompileConfig:
    """A configuration under which generate() compiles on a CPU too; a graph break is an error."""
    config = CompileConfig(fullgraph=True, dynamic=False, backend=backend, mode=None)
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
    assert torch.equal(model.generate(**inputs, past_key_values=first, **options), expected)
    assert graphs() == 1, "a step was compiled again"
    assert torch.equal(model.generate(**inputs, past_key_values=cache(), **options), expected)
    first.reset()
    assert torch.equal(model.generate(**inputs, past_key_values=first, **options), expected)
    assert graphs() == 1, "a second cache, or a reset one, was compiled again"
    assert not counters["graph_break"]


def test_beams_change_places_between_compiled_steps() -> None:
    model, inputs = tiny("gqa", attn_implementation="fp8_paged")
    options = {**GREEDY, "num_beams": 3}
    expected = model.generate(**inputs, past_key_values=FP8PagedCache(model.config), **options)
    static = FP8PagedCache(model.config, page_size=16, max_cache_len=50)
    got = model.generate(**inputs, past_key_values=static, compile_config=compiled(), **options)
    assert torch.equal(got, expected)


def test_addresses_stay() -> None:
    model, inputs = tiny("gqa", attn_implementation="fp8_paged")
    cache = FP8PagedCache(model.config, page_size=16, max_cache_len=50)

    def addresses() -> list[int]:
        return [
            tensor.data_ptr()
            for layer in cache.paged_layers
            for tensor in (*layer.pool.tensors().values(), layer.table, layer.lengths)
        ]

    model.generate(**inputs, past_key_values=cache, disable_compile=True, **GREEDY)
    before = addresses()
    cache.reorder_cache(torch.tensor([1, 1]))
    cache.crop(-3)
    assert cache.host_length() == 13 + 20 - 1 - 3
    cache.reset()
    model.generate(**inputs, past_key_values=cache, disable_compile=True, **GREEDY)
    assert addresses() == before


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_overrun_raises_and_changes_nothing(how: str) -> None:
    model, inputs = tiny("gqa", attn_implementation="fp8_paged")
    cache = FP8PagedCache(model.config, page_size=16, max_cache_len=20)
    options = {"compile_config": compiled()} if how == "compiled" else {"disable_compile": True}
    with pytest.raises(OutOfPagesError, match="max_cache_len"):
        model.generate(**inputs, past_key_values=cache, **options, **GREEDY)
    assert [layer.host_length() for layer in cache.paged_layers] == [20, 20]


def test_no_copy_of_the_pool_in_compiled_code() -> None:
    """Read in the graph that a backend is handed after functionalization is undone by inductor."""
    from torch._inductor.utils import run_and_get_code

    model, inputs = tiny("gqa", attn_implementation="fp8_paged")
    cache = FP8PagedCache(model.config, page_size=16, max_cache_len=48)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        step = torch.compile(model.forward, fullgraph=True, dynamic=False)
        seen = torch.ones(2, 1, 1, 48, dtype=torch.bool)
        more = {"input_ids": inputs["input_ids"][:, :1], "attention_mask": seen}
        more["position_ids"] = torch.full((2, 1), 13)
        _, sources = run_and_get_code(step, **more, past_key_values=cache)
    code = "\n".join(sources)
    assert "hf_fp8kv.write" in code
    assert "hf_fp8kv.attend" in code
    assert "hf_fp8kv.gather" not in code, "a dense copy of the history"
    pool = cache.paged_layers[0].pool.k
    shape = str(tuple(pool.shape))
    made = [x for x in code.splitlines() if "empty_strided" in x and shape in x and "= " in x]
    assert not made, made
