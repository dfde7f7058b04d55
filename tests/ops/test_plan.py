"""Work plans: one for all layers of a step, made when the step's tokens are stored.

The stand-in's attention raises an error for a plan that was made for other lengths, such as a plan
of an earlier step. test_kernels_attention.py tests the contents of plans.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.masking_utils import create_chunked_causal_mask

from hf_fp8kv import FP8PagedCache, ops
from hf_fp8kv.attention.fp8_paged import fp8_paged_attention
from hf_fp8kv.modeling.tensor_parallel import TensorParallel
from tests.helpers.assertions import assert_same
from tests.helpers.standin import PlanCall, triton_standin
from tests.helpers.tiny_models import tiny

GREEDY = {
    "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None,
    "disable_compile": True,
}  # fmt: skip
STEPS = GREEDY["max_new_tokens"] - 1  # the first token comes from the prefill
STATIC = {"max_cache_len": 50}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[PlanCall]:
    return triton_standin(monkeypatch)


def tokens(batch: int, count: int = 1, heads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, heads, count, 16), torch.randn(batch, heads, count, 16)


def cache_of(name: str = "gqa", backend: str = "triton", **keywords: Any) -> tuple[Any, Any]:
    model, inputs = tiny(name, attn_implementation="fp8_paged")
    return (model, inputs), FP8PagedCache(model.config, page_size=16, backend=backend, **keywords)


# Grid: each model and each way to generate with a growing and with a preallocated cache.
@pytest.mark.parametrize(
    ("name", "groups", "keywords", "more"),
    [
        ("gqa", 1, {}, {}), ("sliding_and_full", 2, {}, {}), ("kv_sharing", 2, STATIC, {}),
        ("gqa", 1, STATIC, {}), ("sliding_and_full", 2, STATIC, {}), ("kv_sharing", 2, {}, {}),
        ("chunked", 2, STATIC, {}), ("gqa", 1, {}, {"num_beams": 3}),
        ("gqa", 1, STATIC, {"num_beams": 3}),
    ],
    ids=str,
)  # fmt: skip
def test_one_plan_a_step(
    name: str, groups: int, keywords: Any, more: Any, made: list[PlanCall]
) -> None:
    takes = inspect.signature(create_chunked_causal_mask).parameters
    if name == "chunked" and "block_sequence_ids" not in takes:
        pytest.skip("these transformers cannot generate with chunks and any static cache")
    answers = []
    for backend in ("reference", "triton"):
        (model, inputs), cache = cache_of(name, backend, **keywords)
        answers.append(model.generate(**inputs, past_key_values=cache, **GREEDY, **more))
    assert_same(answers[1], answers[0])
    addresses = len({x.plan.data_ptr() for x in made})
    if keywords:
        # Allocation and prefill each make an additional plan.
        assert more or len(made) == (STEPS + 2) * groups
        assert addresses == groups, "an address changed"
    else:
        assert len(made) == STEPS * groups
        assert addresses == len(made), "a plan was overwritten"
    if more:
        assert {len(x.lengths) for x in made} == {6}


def test_a_plan_is_made_for_the_lengths_and_the_window(made: list[PlanCall]) -> None:
    (model, inputs), cache = cache_of("sliding_and_full", prefill="stored")
    model.generate(**inputs, past_key_values=cache, **GREEDY)
    window = model.config.sliding_window
    length = inputs["input_ids"].shape[1] + STEPS
    assert {x.lengths[0] for x in made[-2:]} == {length}
    # `start` excludes positions before the window, for any number of query tokens.
    assert {x.start for x in made[-2:]} == {0, max(length - window, 0)}
    assert {x.window for x in made} == {0}

    made.clear()
    (model, inputs), cache = cache_of("sliding_and_full", **STATIC)
    model.generate(**inputs, past_key_values=cache, **GREEDY)
    # Masks are complete, and all pages exist. Layers only read their window, in each step.
    assert {x.window for x in made[-2:]} == {0, window}
    assert {x.start for x in made} == {0}
    assert [x.tokens for x in made[-2:]] == [1, 1]
    assert inputs["input_ids"].shape[1] in {x.tokens for x in made}


@pytest.mark.parametrize(
    ("keywords", "expected"), [({}, [2, 4, 2, 4]), (STATIC, [2, 2, 4, 4, 2, 4, 2, 4])], ids=str
)
def test_layers_with_different_head_counts_have_separate_plans(
    keywords: Any, expected: list[int], made: list[PlanCall]
) -> None:
    _, cache = cache_of(**keywords)
    for _ in range(3):
        cache.update(*tokens(2), 0)
        cache.update(*tokens(2, heads=4), 1)
    assert [x.heads for x in made] == expected
    assert made[-1].plan.data_ptr() != made[-2].plan.data_ptr()


@pytest.mark.parametrize("keywords", [{}, STATIC], ids=str)
def test_plans_are_for_the_query_rows(keywords: dict[str, int], made: list[PlanCall]) -> None:
    """The number of query rows follows from the config and the KV heads of this process."""
    for heads, size, rows in ((2, 1, 2), (1, 1, 4), (1, 2, 2)):
        made.clear()
        _, cache = cache_of(tensor_parallel=TensorParallel(0, size), **keywords)
        for count in (5, 1):
            cache.update(*tokens(2, count, heads), 0)
        assert {x.rows for x in made} == {rows}
    if not keywords:
        _, cache = cache_of()
        for count in (5, 3):
            cache.update(*tokens(2, count), 0)
        assert made[-1].rows == 6


def _crop_and_repeat(cache: FP8PagedCache) -> FP8PagedCache:
    cache.crop(-1)
    cache.batch_repeat_interleave(2)
    return cache


# Number of sequences after each change, and the change.
CHANGES: dict[str, tuple[int, Callable[[FP8PagedCache], Any]]] = {
    "copy": (2, lambda cache: (copy.deepcopy(cache), cache)),
    "repeat": (4, lambda cache: cache.batch_repeat_interleave(2)),
    "select": (1, lambda cache: cache.batch_select_indices(torch.tensor([1]))),
    "crop": (2, lambda cache: cache.crop(-1)),
    "a different batch of the same length": (4, _crop_and_repeat),
}


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("keywords", [{}, STATIC], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_a_step_does_not_use_an_earlier_plan(change: str, keywords: dict[str, int]) -> None:
    outputs = []
    for backend in ("reference", "triton"):
        torch.manual_seed(3)
        (model, inputs), cache = cache_of("gqa", backend, **keywords)
        with torch.no_grad():
            model(**inputs, past_key_values=cache)
            model(inputs["input_ids"][:, :1], past_key_values=cache)
            batch, make = CHANGES[change]
            caches = make(cache)
            for one in caches if isinstance(caches, tuple) else (cache, cache):
                ids = torch.randint(3, 50, (batch, 1))
                outputs.append(model(ids, past_key_values=one).logits)
    for x, y in zip(outputs[:2], outputs[2:], strict=True):
        torch.testing.assert_close(y, x)


@pytest.mark.parametrize("keywords", [{}, STATIC], ids=str)
def test_other_backends_have_no_plans(keywords: dict[str, int]) -> None:
    _, cache = cache_of(backend="reference", prefill="stored", **keywords)
    keys, values = cache.update(*tokens(2), 0)
    assert keys.plan is None
    assert values.plan is None


@pytest.mark.usefixtures("interpreted")
@pytest.mark.skipif(ops.available_backends()["triton"] is not None, reason="needs Triton")
def test_layers_with_different_lengths_lose_no_token(device: torch.device) -> None:
    """The layer that makes the plan does not run in a step, or holds different tokens."""
    config = tiny("gqa")[0].config
    caches = [
        FP8PagedCache(config, page_size=16, backend=backend, max_cache_len=300, prefill="stored")
        for backend in ("triton", "reference")
    ]
    module = torch.nn.Module()

    def check(change: Callable[[FP8PagedCache], Any], layer: int) -> None:
        query = torch.randn(1, 4, 1, 16, device=device)
        outputs = []
        for cache in caches:
            change(cache)
            keys, values = cache.layers[layer].store.stored()
            outputs.append(fp8_paged_attention(module, query, keys, values, None)[0])
        torch.testing.assert_close(*outputs, atol=2e-5, rtol=2e-5)

    def update(layer: int, count: int) -> Callable[[FP8PagedCache], Any]:
        key, value = (x.to(device) for x in tokens(1, count))
        return lambda cache: cache.update(key, value, layer)

    check(update(0, 140), 0)
    check(update(1, 140), 1)
    check(update(1, 130), 1)
    check(lambda cache: cache.layers[0].crop(-100), 1)
    check(update(0, 1), 1)
    check(lambda cache: cache.layers[1].reset(), 0)
    check(update(1, 130), 1)
