"""Tests of how prompts share the tokens of a step."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.generation.continuous_batching.requests import RequestStatus

from hf_fp8kv import serving
from hf_fp8kv.server.sampling import Sequence
from hf_fp8kv.server.scheduling import MAX_SCORED_TOKENS, limit_scoring, share_steps, share_tokens
from tests.helpers.serving_tools import PAGE, batching, greedy, open_manager
from tests.helpers.tiny_models import build_variant

pytestmark = pytest.mark.text


def make_prompt(name: str, num_tokens: int, created_time: float) -> SimpleNamespace:
    return SimpleNamespace(
        request_id=name, status=RequestStatus.PENDING, remaining_prefill_tokens=[0] * num_tokens,
        created_time=created_time,
    )  # fmt: skip


def make_decoding_request(name: str) -> SimpleNamespace:
    return SimpleNamespace(request_id=name, status=RequestStatus.DECODING)


DECODING_A, DECODING_B = make_decoding_request("a"), make_decoding_request("b")
LONG, SHORT, MIDDLE, NEWEST = (
    make_prompt("long", 5000, 1.0), make_prompt("short", 20, 2.0), make_prompt("middle", 300, 3.0),
    make_prompt("newest", 4000, 4.0),
)  # fmt: skip


@pytest.mark.parametrize(
    ("candidates", "num_tokens", "order", "limits"),
    [
        # A prompt alone, or next to decoding requests, gets all tokens of a step.
        ([LONG], 256, "long", {}),
        ([DECODING_A, LONG], 256, "a long", {}),
        ([LONG, SHORT], 256, "short long", {"short": 20}),
        ([LONG, NEWEST], 256, "newest long", {"newest": 128}),
        # The shortest prompt comes first. A prompt that does not fit into the half gets the rest.
        ([DECODING_A, DECODING_B, LONG, NEWEST, MIDDLE, SHORT], 258,
         "a b short middle long newest", {"short": 20, "middle": 108}),
        # The oldest request has the earliest time, at any place in the list.
        ([SHORT, NEWEST, LONG], 64, "short newest long", {"short": 20, "newest": 12}),
        # The step has room for only one prompt token.
        ([DECODING_A, DECODING_B, LONG, SHORT], 3, "a b long short", {}),
    ],
)  # fmt: skip
def test_share_tokens_prefers_short_prompts(candidates, num_tokens, order, limits):
    ordered, actual_limits = share_tokens(candidates, num_tokens)
    assert [state.request_id for state in ordered] == order.split()
    assert actual_limits == limits


def test_scored_prompts_share_the_logits_of_a_step():
    def make_scored(name: str, num_tokens: int) -> SimpleNamespace:
        state = make_prompt(name, num_tokens, 1.0)
        state.logit_processor_kwargs = {"sequence": Sequence([1], 9, num_prompt_top_tokens=0)}
        return state

    plain = make_prompt("plain", 900, 1.0)
    plain.logit_processor_kwargs = {}
    decoding = make_scored("decodes", 0)
    decoding.status = RequestStatus.DECODING
    first, second, third = make_scored("1", 400), make_scored("2", 300), make_scored("3", 10)
    admitted, limits = limit_scoring([decoding, first, plain, second, third])
    assert [state.request_id for state in admitted] == ["decodes", "1", "plain", "2"]
    assert limits == {"1": 400, "2": MAX_SCORED_TOKENS - 400}


def submit_requests(
    prompts: dict[str, list[int]], num_pages: int, *, is_fair: bool = True
) -> tuple[Any, Any]:
    """Return a model and its manager before the first step. Each request gets two new tokens."""
    model = build_variant("llama", max_position_embeddings=512)[0]
    serving.enable(model)
    model.set_attn_implementation("fp8_paged")  # as `manager.start` does
    config = batching(max_batch_tokens=32, pages=num_pages)
    manager = model.init_continuous_batching(greedy(), config)
    manager.warmup()
    if is_fair:
        share_steps(manager.batch_processor.scheduler)
    for name, prompt in prompts.items():
        manager.add_request(prompt, request_id=name, max_new_tokens=2, eos_token_id=-1)
    return model, manager


def make_token_ids(count: int, offset: int) -> list[int]:
    return [3 + (7 * n + offset) % 50 for n in range(count)]


def test_a_shortage_of_pages_restarts_the_newer_request():
    prompts = {"old": make_token_ids(200, 203), "new": make_token_ids(180, 183)}
    model, manager = submit_requests(prompts, 16)
    processor = manager.batch_processor
    restarted_ids, states = set(), {}
    for _ in range(60):
        if not processor.prepare_next_batch():
            break
        processor._generation_step(model)
        processor.update_batch()
        for name, state in processor.scheduler.active_requests.items():
            if states.setdefault(name, state) is not state:
                restarted_ids.add(name)
    assert restarted_ids == {"new"}
    assert not processor.scheduler.has_pending_requests()


@pytest.mark.parametrize("is_fair", [True, False])
def test_a_short_prompt_does_not_wait_for_a_long_prompt(is_fair):
    """The test compares the steps, of 32 tokens each, in which prompts get their first token."""
    sizes = {"long": (400, 4), "short": (10, 5), "middle": (50, 6)}
    prompts = {name: make_token_ids(*size) for name, size in sizes.items()}
    model, manager = submit_requests(prompts, 96, is_fair=is_fair)
    processor = manager.batch_processor
    first_steps: dict[str, int] = {}  # number of the step with the first token
    answers = {}
    step = 0
    while len(answers) < len(prompts):
        step += 1
        assert processor.prepare_next_batch()
        processor._generation_step(model)
        processor.update_batch()
        for state in processor.scheduler.active_requests.values():
            if state.generated_tokens:
                first_steps.setdefault(state.request_id, step)
        for name in prompts:
            if (answer := manager.get_result(name, timeout=0.001)) is not None:
                answers[name] = answer.generated_tokens
        assert step < 100
    if is_fair:
        assert first_steps == {"short": 1, "middle": 4, "long": 15}
    else:
        assert min(first_steps.values()) == first_steps["long"] == 13
    for name, prompt in prompts.items():
        config = batching(pages=96)
        (output,) = model.generate_batch([prompt], greedy(max_new_tokens=2), config).values()
        assert answers[name] == output.generated_tokens


def test_new_requests_are_admitted_after_all_running_requests_are_canceled() -> None:
    """An engine that evicts a request admits no request until a running request finishes."""
    model, _ = build_variant("gqa", max_position_embeddings=512)
    serving.enable(model)
    model.register_forward_pre_hook(lambda *_: time.sleep(0.01))
    prompts = [list(range(first_token, first_token + 3 * PAGE)) for first_token in (2, 40)]
    with open_manager(model, pages=9) as manager:
        for prompt in prompts:
            manager.add_request(prompt, max_new_tokens=6 * PAGE)
        deadline = time.monotonic() + 30
        while manager.batch_processor is None or not (
            manager.batch_processor.scheduler.block_new_requests
        ):
            assert time.monotonic() < deadline, "no request was evicted"
            time.sleep(0.001)
        scheduler = manager.batch_processor.scheduler
        (running_id,), (waiting_id,) = scheduler.active_requests, scheduler.waiting_requests
        manager.cancel_request(running_id)
        added_id = manager.add_request([5, 6, 7], max_new_tokens=2)
        lengths: dict[str, int] = {}
        while {waiting_id, added_id} - lengths.keys() and (x := manager.get_result(timeout=20)):
            lengths[x.request_id] = len(x.generated_tokens)
        for request_id in (waiting_id, added_id):
            manager.cancel_request(request_id)  # otherwise the manager waits for it at exit
        assert lengths.keys() >= {waiting_id, added_id}
        assert (lengths[waiting_id], lengths[added_id]) == (6 * PAGE, 2)
