"""The server as an ASGI application: run by another server, or mounted in another application."""

import asyncio
import threading
import time

import pytest
from transformers import AutoTokenizer, ContinuousBatchingConfig, LlamaForCausalLM

from hf_fp8kv import application, serving
from hf_fp8kv.errors import ConfigError
from tests.helpers.serve_process import (
    PAGE,
    PAGES,
    events,
    generate_answer,
    save_chat_model,
    text_in,
)

pytest.importorskip("fastapi", reason="needs the extra serve")
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient
from transformers.generation.continuous_batching.requests import GenerationOutput

from hf_fp8kv.server.text import AnswerText

pytestmark = pytest.mark.text

CHAT = "/v1/chat/completions"
QUESTION = "what is a page of a cache"
BODY = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12, "temperature": 0}
BATCHING = {"num_blocks": PAGES, "block_size": PAGE, "max_batch_tokens": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return save_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def make(folder):
    """Return a function that makes an application. Check at the end that its engine has ended."""
    before = {thread for thread in threading.enumerate() if not thread.daemon}
    model, tokenizer = (
        LlamaForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder),
    )  # fmt: skip
    attention = model.config._attn_implementation
    serving.enable(model)
    yield lambda **options: application(
        model, tokenizer, **{"batching": ContinuousBatchingConfig(**BATCHING), **options}
    )
    left = {thread for thread in threading.enumerate() if not thread.daemon} - before
    assert not [thread for thread in left if "generation_loop" in thread.name]
    assert model.config._attn_implementation == attention


def mounted(llm, path: str = "/llm", **options: object) -> TestClient:
    return TestClient(Starlette(routes=[Mount(path, llm)], **options))


# At /v1 each path contains /v1 twice. Only the second /v1 belongs to the application.
@pytest.mark.parametrize("path", ["/llm", "/v1", ""])
def test_a_mounted_application_answers_what_generate_does(make, folder, path):
    llm = make()
    with mounted(llm, path, lifespan=llm.lifespan) as client:
        assert llm.failure is None
        answer = client.post(f"{path}{CHAT}", json=BODY)
        assert answer.status_code == 200, answer.text
        streamed = client.post(f"{path}{CHAT}", json={**BODY, "stream": True}).text
        expected = generate_answer(folder, QUESTION, 12)
        assert text_in(answer.json()) == text_in(events(streamed)) == expected
        assert client.get(f"{path}/health").json()["status"] == "ok"
        assert len(client.get(f"{path}/v1/models").json()["data"]) == 1
        assert 'hf_fp8kv_requests_total{status="200"} 2.0' in client.get(f"{path}/metrics").text
        assert f"'{path}/openapi.json'" in client.get(f"{path}/docs").text
        if path:
            assert client.get("/health").status_code == 404
    assert llm.failure == "the engine was not started"


def test_nobody_starts_a_mounted_application_by_itself(make):
    llm = make()
    with mounted(llm) as client:
        answer = client.post(f"/llm{CHAT}", json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_started")
        assert "lifespan=application.lifespan" in answer.json()["error"]["message"]


def test_a_server_starts_an_application_and_stops_it_again_and_again(make):
    llm = make(served_name="mine", api_key="sesame")
    for _ in range(2):
        with TestClient(llm, headers={"authorization": "Bearer sesame"}) as client:
            answer = client.post(CHAT, json={**BODY, "model": "mine"})
            assert (answer.status_code, answer.json()["model"]) == (200, "mine")
            refused = client.post(CHAT, json=BODY, headers={"authorization": "Bearer simsim"})
            assert refused.status_code == 401
        assert llm.failure == "the engine was not started"


@pytest.mark.parametrize("cors", [False, True])
def test_pages_of_other_origins_read_answers_only_if_that_is_asked_for(make, cors):
    page = {"origin": "https://page.example"}
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "x"}
    with TestClient(make(cors=cors, api_key="sesame")) as client:
        refused = client.get("/v1/models", headers=page)
        before = client.options(CHAT, headers=page | asks)
    assert (refused.status_code, before.status_code) == (401, 200 if cors else 401)
    for answer in (refused, before):
        assert ("access-control-allow-origin" in answer.headers) is cors


def test_what_the_engine_cannot_do_ends_the_start(make):
    llm = make(batching=ContinuousBatchingConfig(max_memory_percent=1e-9))
    sent: list[dict] = []

    async def receive() -> dict:
        return {"type": "lifespan.startup"}

    async def send(message: dict) -> None:
        sent.append(message)

    asyncio.run(llm({"type": "lifespan"}, receive, send))
    assert [message["type"] for message in sent] == ["lifespan.startup.failed"]
    assert "expected an engine" in sent[0]["message"]
    assert "Traceback" not in sent[0]["message"]
    client = mounted(llm, lifespan=llm.lifespan)
    with pytest.raises(ConfigError, match="expected an engine"), client:
        pass


def test_an_engine_that_ended_is_seen(make, monkeypatch):
    llm = make()
    with TestClient(llm) as client:
        processor = llm.engine._manager.batch_processor
        monkeypatch.setattr(processor, "update_batch", lambda: 1 / 0)
        assert client.post(CHAT, json=BODY).status_code in (500, 503)
        until = time.monotonic() + 60
        while llm.failure is None and time.monotonic() < until:
            time.sleep(0.01)
        assert llm.failure == "division by zero"
        assert client.get("/health").status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_what_goes_wrong_with_an_answers_text_ends_that_answer(make, monkeypatch, stream):
    with TestClient(make()) as client:
        monkeypatch.setattr(AnswerText, "end", lambda _: 1 / 0)
        answer = client.post(CHAT, json={**BODY, "stop": "\n", "stream": stream})
        assert answer.status_code == (200 if stream else 500)
        assert "internal error" in answer.text
        assert client.get("/metrics").text.count("hf_fp8kv_requests_active 0.0") == 1


def test_outputs_that_nobody_takes_are_not_kept(make):
    llm = make()
    with TestClient(llm):
        router = llm.engine._manager.output_router
        router.deliver(GenerationOutput("gone"))
        router.deliver_batch([GenerationOutput("gone")])
        assert router.output_queue.empty()


def test_what_is_no_model_to_serve_is_refused(folder):
    model = LlamaForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with pytest.raises(ConfigError, match=r"enable\(\) was called on, got another Llama"):
        application(model, tokenizer)
    serving.enable(model)
    for wrong in ({"max_waiting": 0}, {"max_body": 0}, {"api_key": " "}):
        with pytest.raises(ConfigError, match=next(iter(wrong)).replace("_", ".")):
            application(model, tokenizer, **wrong)
