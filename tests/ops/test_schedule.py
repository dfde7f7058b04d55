"""Tests of schedules: a step makes one schedule for all its layers, when its tokens are stored.

The attention of the stand-in raises an error for a schedule that was made for different lengths,
such as the lengths of an earlier step. test_kernels_attention.py tests the contents of schedules.
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
from tests.helpers.assertions import assert_same
from tests.helpers.standin import ScheduleCall, replace_triton
from tests.helpers.tiny_models import build_variant

GREEDY = {
    "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None,
    "disable_compile": True,
}  # fmt: skip
NUM_STEPS = GREEDY["max_new_tokens"] - 1  # the first token comes from the prefill
PREALLOCATED = {"max_cache_len": 50}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture
def schedule_calls(monkeypatch: pytest.MonkeyPatch) -> list[ScheduleCall]:
    return replace_triton(monkeypatch)


def make_tokens(
    batch: int, length: int = 1, num_heads: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, num_heads, length, 16), torch.randn(batch, num_heads, length, 16)


def make_model_and_cache(
    name: str = "gqa", backend: str = "triton", **options: Any
) -> tuple[Any, dict[str, torch.Tensor], FP8PagedCache]:
    model, inputs = build_variant(name, attn_implementation="fp8_paged")
    return model, inputs, FP8PagedCache(model.config, page_size=16, backend=backend, **options)


# Each model and way to generate runs with a growing and with a preallocated cache.
@pytest.mark.parametrize(
    ("name", "num_schedules", "options", "generation"),
    [
        ("gqa", 1, {}, {}), ("sliding_and_full", 2, {}, {}), ("kv_sharing", 2, {}, {}),
        ("gqa", 1, PREALLOCATED, {}), ("sliding_and_full", 2, PREALLOCATED, {}),
        ("kv_sharing", 2, PREALLOCATED, {}), ("chunked", 2, PREALLOCATED, {}),
        ("gqa", 1, {}, {"num_beams": 3}), ("gqa", 1, PREALLOCATED, {"num_beams": 3}),
    ],
    ids=str,
)  # fmt: skip
def test_a_step_makes_one_schedule_per_group_of_layers(
    name: str, num_schedules: int, options: Any, generation: Any, schedule_calls: list[ScheduleCall]
) -> None:
    parameters = inspect.signature(create_chunked_causal_mask).parameters
    if name == "chunked" and "block_sequence_ids" not in parameters:
        pytest.skip("this version of transformers cannot generate with chunks and a static cache")
    answers = []
    for backend in ("reference", "triton"):
        model, inputs, cache = make_model_and_cache(name, backend, **options)
        answers.append(model.generate(**inputs, past_key_values=cache, **GREEDY, **generation))
    assert_same(answers[1], answers[0])
    num_addresses = len({call.schedule.data_ptr() for call in schedule_calls})
    if options:
        # Allocation and prefill each make an additional schedule.
        assert generation or len(schedule_calls) == (NUM_STEPS + 2) * num_schedules
        assert num_addresses == num_schedules, "an address changed"
    else:
        assert len(schedule_calls) == NUM_STEPS * num_schedules
        assert num_addresses == len(schedule_calls), "a schedule was overwritten"
    if generation:
        assert {len(call.lengths) for call in schedule_calls} == {6}


def test_a_schedule_is_made_for_the_lengths_and_the_window(
    schedule_calls: list[ScheduleCall],
) -> None:
    model, inputs, cache = make_model_and_cache("sliding_and_full", prefill="stored")
    model.generate(**inputs, past_key_values=cache, **GREEDY)
    window = model.config.sliding_window
    length = inputs["input_ids"].shape[1] + NUM_STEPS
    assert {call.lengths[0] for call in schedule_calls[-2:]} == {length}
    # `start` excludes positions before the window, for any number of query tokens.
    assert {call.start for call in schedule_calls[-2:]} == {0, max(length - window, 0)}
    assert {call.window for call in schedule_calls} == {0}

    schedule_calls.clear()
    model, inputs, cache = make_model_and_cache("sliding_and_full", **PREALLOCATED)
    model.generate(**inputs, past_key_values=cache, **GREEDY)
    # Masks are complete, and all pages exist. In each step, layers only read their windows.
    assert {call.window for call in schedule_calls[-2:]} == {0, window}
    assert {call.start for call in schedule_calls} == {0}
    assert [call.num_tokens for call in schedule_calls[-2:]] == [1, 1]
    assert inputs["input_ids"].shape[1] in {call.num_tokens for call in schedule_calls}


@pytest.mark.parametrize(
    ("options", "expected"), [({}, [2, 4, 2, 4]), (PREALLOCATED, [2, 2, 4, 4, 2, 4, 2, 4])], ids=str
)
def test_layers_with_different_head_counts_have_separate_schedules(
    options: Any, expected: list[int], schedule_calls: list[ScheduleCall]
) -> None:
    _, _, cache = make_model_and_cache(**options)
    for _ in range(3):
        cache.update(*make_tokens(2), 0)
        cache.update(*make_tokens(2, num_heads=4), 1)
    assert [call.num_kv_heads for call in schedule_calls] == expected
    assert schedule_calls[-1].schedule.data_ptr() != schedule_calls[-2].schedule.data_ptr()


def crop_and_repeat(cache: FP8PagedCache) -> None:
    """Make a different batch, whose next step has the length of the previous step."""
    cache.crop(-1)
    cache.batch_repeat_interleave(2)


# Number of sequences after each change, and the change, which may return two other caches.
CHANGES: dict[str, tuple[int, Callable[[FP8PagedCache], Any]]] = {
    "copy": (2, lambda cache: (copy.deepcopy(cache), cache)),
    "repeat": (4, crop_and_repeat),
    "select": (1, lambda cache: cache.batch_select_indices(torch.tensor([1]))),
    "crop": (2, lambda cache: cache.crop(-1)),
}


@pytest.mark.usefixtures("schedule_calls")
@pytest.mark.parametrize("options", [{}, PREALLOCATED], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_a_step_does_not_use_an_earlier_schedule(change: str, options: dict[str, int]) -> None:
    outputs = []
    for backend in ("reference", "triton"):
        torch.manual_seed(3)
        model, inputs, cache = make_model_and_cache(backend=backend, **options)
        with torch.no_grad():
            model(**inputs, past_key_values=cache)
            model(inputs["input_ids"][:, :1], past_key_values=cache)
            batch, change_cache = CHANGES[change]
            changed_caches = change_cache(cache) or (cache, cache)
            for changed_cache in changed_caches:
                ids = torch.randint(3, 50, (batch, 1))
                outputs.append(model(ids, past_key_values=changed_cache).logits)
    for expected, actual in zip(outputs[:2], outputs[2:], strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.skipif(ops.explain_backends()["triton"] is not None, reason="needs Triton")
def test_layers_with_different_lengths_keep_all_tokens(device: torch.device) -> None:
    """The layer that makes the schedule may not run in a step, or may hold different tokens."""
    config = build_variant("gqa")[0].config
    caches = [
        FP8PagedCache(config, page_size=16, backend=backend, max_cache_len=300, prefill="stored")
        for backend in ("triton", "reference")
    ]

    def check_change(change: Callable[[FP8PagedCache], Any], index: int) -> None:
        query = torch.randn(1, 4, 1, 16, device=device)
        outputs = []
        for cache in caches:
            change(cache)
            keys, values = cache.layers[index].make_stored_handles()
            outputs.append(fp8_paged_attention(torch.nn.Module(), query, keys, values, None)[0])
        torch.testing.assert_close(*outputs, atol=2e-5, rtol=2e-5)

    def make_update(index: int, num_tokens: int) -> Callable[[FP8PagedCache], Any]:
        key, value = (states.to(device) for states in make_tokens(1, num_tokens))
        return lambda cache: cache.update(key, value, index)

    check_change(make_update(0, 140), 0)
    check_change(make_update(1, 140), 1)
    check_change(make_update(1, 130), 1)
    check_change(lambda cache: cache.layers[0].crop(-100), 1)
    check_change(make_update(0, 1), 1)
    check_change(lambda cache: cache.layers[1].reset(), 0)
    check_change(make_update(1, 130), 1)
