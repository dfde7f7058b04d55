"""Tests of the server as an ASGI application: run by another server, or mounted."""

import asyncio
import threading
from unittest.mock import AsyncMock

import pytest
from transformers import AutoTokenizer, ContinuousBatchingConfig, LlamaForCausalLM

from hf_fp8kv import make_application, serving
from hf_fp8kv.errors import ConfigError
from tests.helpers.serve_process import (
    CHAT,
    COMPLETIONS,
    NUM_PAGES,
    PAGE_SIZE,
    RESPONSES,
    generate_paged,
    parse_events,
    read_answer,
)

pytest.importorskip("starlette", reason="needs the extra serve")
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from hf_fp8kv.server.answer_text import AnswerDecoder
from hf_fp8kv.server.errors import APIError
from hf_fp8kv.server.jobs import JobPool

pytestmark = pytest.mark.text

QUESTION = "what is a page of a cache"
REQUEST = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12, "temperature": 0}
VALID_REQUESTS: dict[str, dict] = {
    CHAT: REQUEST,
    COMPLETIONS: {"prompt": QUESTION, "max_tokens": 9},
    RESPONSES: {"input": QUESTION, "max_output_tokens": 9},
}
BATCHING_OPTIONS = {"num_blocks": NUM_PAGES, "block_size": PAGE_SIZE, "max_batch_tokens": 64}


@pytest.fixture(scope="module")
def lenient_client(folder):
    """A client of an application that ignores unknown fields."""
    model = serving.enable(LlamaForCausalLM.from_pretrained(folder))
    application = make_application(
        model,
        AutoTokenizer.from_pretrained(folder),
        batching=ContinuousBatchingConfig(**BATCHING_OPTIONS),
        ignore_unknown_fields=True,
    )
    with TestClient(application) as client:
        yield client


@pytest.fixture
def build_application(folder):
    """Yield a function that creates an application. Then check that the engine has ended."""
    old_threads = {thread for thread in threading.enumerate() if not thread.daemon}
    model = LlamaForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    attention = model.config._attn_implementation
    serving.enable(model)
    yield lambda **options: make_application(
        model, tokenizer, **{"batching": ContinuousBatchingConfig(**BATCHING_OPTIONS), **options}
    )
    new_threads = {thread for thread in threading.enumerate() if not thread.daemon} - old_threads
    assert not [thread for thread in new_threads if "generation_loop" in thread.name]
    assert model.config._attn_implementation == attention


def mount_application(application, path: str = "/llm", **options: object) -> TestClient:
    return TestClient(Starlette(routes=[Mount(path, application)], **options))


# With the mount at /v1, the path of a request for an answer contains /v1 twice. Only the second
# /v1 belongs to the application.
@pytest.mark.parametrize("path", ["/llm", "/v1", ""])
def test_a_mounted_application_answers_like_generate(build_application, folder, path):
    application = build_application()
    with mount_application(application, path, lifespan=application.lifespan) as client:
        assert application.failure is None
        response = client.post(f"{path}{CHAT}", json=REQUEST)
        assert response.status_code == 200, response.text
        stream_text = client.post(f"{path}{CHAT}", json={**REQUEST, "stream": True}).text
        expected = generate_paged(folder, QUESTION, 12)
        assert read_answer(response.json()) == read_answer(parse_events(stream_text)) == expected
        assert client.get(f"{path}/health").json()["status"] == "ok"
        assert 'hf_fp8kv_requests_total{status="200"} 2.0' in client.get(f"{path}/metrics").text
        assert "<textarea" in client.get(f"{path}/").text
        assert client.get("/health").status_code == (404 if path else 200)
    assert application.failure == "the engine was not started"


def test_a_mounted_application_does_not_start_without_its_lifespan(build_application):
    with mount_application(build_application()) as client:
        response = client.post(f"/llm{CHAT}", json=REQUEST)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "not_started")
        assert "lifespan=application.lifespan" in response.json()["error"]["message"]


@pytest.mark.parametrize("enable_cors", [False, True])
def test_cors_allows_other_origins_only_if_enabled(build_application, enable_cors):
    origin_headers = {"origin": "https://page.example"}
    preflight_headers = origin_headers | {
        "access-control-request-method": "POST", "access-control-request-headers": "x",
    }  # fmt: skip
    with TestClient(build_application(enable_cors=enable_cors, api_key="sesame")) as client:
        unauthorized = client.get("/v1/models", headers=origin_headers)
        preflight = client.options(CHAT, headers=preflight_headers)
    assert (unauthorized.status_code, preflight.status_code) == (401, 200 if enable_cors else 401)
    for response in (unauthorized, preflight):
        assert ("access-control-allow-origin" in response.headers) is enable_cors


def test_an_engine_without_enough_memory_fails_the_startup(build_application):
    application = build_application(batching=ContinuousBatchingConfig(max_memory_percent=1e-9))
    receive = AsyncMock(return_value={"type": "lifespan.startup"})
    send = AsyncMock()
    with pytest.raises(ConfigError, match="cannot start the engine"):
        asyncio.run(application({"type": "lifespan"}, receive, send))
    ((message,),) = (call.args for call in send.call_args_list)
    assert message["type"] == "lifespan.startup.failed"
    assert "cannot start the engine" in message["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_to_decode_text_fails_only_its_answer(build_application, monkeypatch, stream):
    with TestClient(build_application()) as client:
        monkeypatch.setattr(AnswerDecoder, "finish", lambda _: 1 / 0)
        response = client.post(CHAT, json={**REQUEST, "stop": "\n", "stream": stream})
        assert response.status_code == (200 if stream else 500)
        assert "internal error" in response.text
        assert client.get("/metrics").text.count("hf_fp8kv_requests_active 0.0") == 1


@pytest.mark.parametrize(
    ("path", "field", "value", "expected"),
    [
        (COMPLETIONS, "prompt_logprobs", 0, "Use echo and logprobs"),
        (RESPONSES, "n", 2, "expected 1"),  # has a meaning on another path
        (CHAT, "generation_config", '{"bogus": 1}', "not a field"),
    ],
)
def test_fields_with_a_meaning_are_never_ignored(lenient_client, path, field, value, expected):
    response = lenient_client.post(path, json={**VALID_REQUESTS[path], field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(field)
    assert expected in response.json()["error"]["message"]


@pytest.mark.parametrize("path", VALID_REQUESTS)
def test_unknown_fields_are_ignored_and_logged_on_request(lenient_client, caplog, path):
    unknown_fields = {"bogus": 1, "x" * 999: [], "n": None}
    expected, answer = (
        read_answer(lenient_client.post(path, json=VALID_REQUESTS[path] | fields).json())
        for fields in ({}, unknown_fields)
    )
    assert answer == expected
    (message,) = [message for message in caplog.messages if "unknown fields" in message]
    assert "['bogus', 'xxx" in message
    assert len(message) < 300


def test_a_waiting_job_of_a_closed_pool_gets_503():
    async def run() -> None:
        pool = JobPool("test", 1)
        may_continue = threading.Event()
        running_job, job = (
            asyncio.create_task(pool.run(function)) for function in (may_continue.wait, int)
        )
        await asyncio.sleep(0.01)
        pool.close()
        may_continue.set()
        await asyncio.gather(running_job, job)

    with pytest.raises(APIError) as error_info:
        asyncio.run(run())
    assert (error_info.value.status, error_info.value.code) == (503, "stopping")


def test_an_application_refuses_unsuitable_models_and_options(folder):
    model = LlamaForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with pytest.raises(ConfigError, match=r"enable\(\) was called on, got another Llama"):
        make_application(model, tokenizer)
    serving.enable(model)
    for name, value in {"max_waiting": 0, "max_body": 0, "api_key": " "}.items():
        with pytest.raises(ConfigError, match=name.replace("_", ".")):
            make_application(model, tokenizer, **{name: value})
