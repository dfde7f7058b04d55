"""generate() through Triton's kernels: the tokens of the torch backend, in float32.

On a GPU where there is one, otherwise in Triton's interpreter.
"""

import sys
from typing import Any

import pytest
import torch

from hf_fp8kv import FP8PagedCache, ops
from tests.cache.test_compile import compiled, graphs
from tests.helpers.assertions import assert_same
from tests.helpers.tiny_models import tiny

if ops.available_backends()["triton"] is not None:
    pytest.skip(str(ops.available_backends()["triton"]), allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
if "tests.helpers.ir" in sys.modules:  # the GPU that it pretends is none for torch.compile
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
