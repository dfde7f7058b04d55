"""Tests of the order in which transformers' scheduler admits requests to FP8 pages."""

import time

import pytest

from hf_fp8kv import serving
from tests.helpers.serving_tools import PAGE, open_manager
from tests.helpers.tiny_models import build_variant

pytestmark = pytest.mark.text


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
