"""Requests that clients of OpenAI's API send, and the parts of answers that they read.

client_requests.json contains one request of each form that a client sent to
tests/tools/clients.py. The tests send the requests to a tiny model that writes gibberish, and read
the answers with the types of the package openai, as these clients do.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.serve_process import TOOLS_TEMPLATE, hosting, save_chat_model

pytestmark = pytest.mark.text

pytest.importorskip("fastapi", reason="needs the extra serve")
pytest.importorskip("llguidance", reason="needs the extra serve")
from openai.types import Completion  # noqa: E402
from openai.types.chat import ChatCompletion, ChatCompletionChunk  # noqa: E402
from openai.types.responses import Response, ResponseStreamEvent  # noqa: E402
from pydantic import TypeAdapter  # noqa: E402

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
FILE = Path(__file__).with_name("client_requests.json")
REQUESTS = json.loads(FILE.read_text())
VOCABULARY = 95
EVENTS = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clients")
    (folder / "template").write_text(TOOLS_TEMPLATE)
    model = save_chat_model(folder, context=4096)
    given = ("--chat-template", str(folder / "template"), "--cb-num-blocks", "256")
    with hosting(model, *given) as server:
        yield server


def adapted(body: dict) -> dict:
    """A request for the tiny model, whose tokens are letters, with the length that it needs."""
    body = {name: value for name, value in body.items() if name != "model"}
    if isinstance(body.get("prompt"), list):
        body["prompt"] = [
            one if isinstance(one, str) else
            [token % VOCABULARY for token in one] if isinstance(one, list) else one % VOCABULARY
            for one in body["prompt"]
        ]  # fmt: skip
    form = body.get("structured_outputs") or {}
    if "regex" in form:  # the tiny model has no line breaks
        body["structured_outputs"] = {"regex": form["regex"].replace(r"\n", " ")}
    if form_of_text(body) or is_forced(body):
        limits = ("max_tokens", "max_completion_tokens", "max_output_tokens")
        body |= {name: 150 for name in limits if name in body}
    return body


def form_of_text(body: dict) -> dict | None:
    """Return the schema of the answer's text, if it has one."""
    given = body.get("response_format") or (body.get("text") or {}).get("format") or {}
    return (given.get("json_schema") or given).get("schema")


def is_forced(body: dict) -> bool:
    return body.get("tool_choice") not in (None, "auto", "none")


def parse(kind: type, text: str) -> Any:
    """Parse an answer. The client constructs a completion: its type has no null for a logprob."""
    if kind is Completion:
        return kind.construct(**json.loads(text))
    return kind.model_validate_json(text)


def read(path: str, body: dict, text: str) -> list[dict]:
    """Return the choices of an answer, streamed or not, or the items of a response."""
    if not body.get("stream"):
        kind = {CHAT: ChatCompletion, COMPLETIONS: Completion, RESPONSES: Response}[path]
        found = parse(kind, text)
        assert found.usage.output_tokens if path == RESPONSES else found.usage.completion_tokens
        return [one.model_dump() for one in (found.output if path == RESPONSES else found.choices)]
    events = [line.removeprefix("data: ") for line in text.split("\n") if line]
    if path == RESPONSES:
        last = [EVENTS.validate_json(event) for event in events][-1]
        return [one.model_dump() for one in last.response.output]
    assert events.pop() == "[DONE]"
    kind = ChatCompletionChunk if path == CHAT else Completion
    chunks = [parse(kind, event) for event in events]
    if (body.get("stream_options") or {}).get("include_usage"):
        assert not chunks[-1].choices
        assert chunks.pop().usage.total_tokens
    joined: dict[int, dict] = defaultdict(lambda: {"text": "", "content": "", "tool_calls": []})
    for chunk in chunks:
        for choice in chunk.choices:
            one = joined[choice.index]
            one["finish_reason"] = choice.finish_reason
            if path == CHAT:
                one["content"] += choice.delta.content or ""
                one["tool_calls"] += [c.model_dump() for c in choice.delta.tool_calls or []]
            else:
                one["text"] += choice.text
    return [{**one, "message": one} for one in joined.values()]


def check_choice(path: str, body: dict, choice: dict) -> None:
    """Check that a choice contains all that its client reads."""
    cut = choice["finish_reason"] == "length"
    message = choice["message"] if path == CHAT else {"content": choice["text"]}
    if is_forced(body):
        calls = message["tool_calls"] or []
        for call in calls:
            assert call["id"]
            assert call["type"] == "function"
            assert cut or isinstance(json.loads(call["function"]["arguments"]), dict)
        assert calls or cut
    else:
        assert message["content"] or body.get("max_tokens") == 0 or body.get("stop")
        check_text(body, message["content"], cut=cut)
    if not body.get("logprobs") or body.get("stream"):
        return
    if path == CHAT:
        assert len(choice["logprobs"]["content"]) > 0
        return
    found = choice["logprobs"]
    sizes = {len(found[name]) for name in ("tokens", "token_logprobs", "top_logprobs")}
    assert len(sizes) == 1
    if body.get("echo"):  # lm-eval adds up the log probability of a text
        assert found["token_logprobs"][0] is None
        assert all(number <= 0 for number in found["token_logprobs"][1:])
        assert all(max(top.values()) <= 0 for top in found["top_logprobs"][1:])


def check_text(body: dict, text: str, *, cut: bool) -> None:
    schema = form_of_text(body)
    if schema is not None and not cut:
        assert set(schema.get("required", ())) <= json.loads(text).keys() <= {*schema["properties"]}


def check_items(body: dict, items: list[dict], *, cut: bool) -> None:
    """Check that the items of a response contain all that its client reads."""
    calls = [item for item in items if item["type"] == "function_call"]
    texts = [part["text"] for item in items for part in item.get("content") or ()]
    if is_forced(body):
        assert calls or cut
        for call in calls:
            assert call["call_id"]
            assert cut or isinstance(json.loads(call["arguments"]), dict)
    else:
        assert any(texts)
        check_text(body, "".join(texts), cut=cut)


# Together these send each field that the tests of the server read.
FAST = {"openai", "instructor", "lm-eval", "guidellm"}


@pytest.mark.parametrize(
    "client",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.full) for name in REQUESTS],
)
def test_a_client_can_read_its_answers(server, client):
    for request in REQUESTS[client]:
        path, body = request["path"], adapted(request["body"])
        status, text, _ = server.ask(path, body)
        assert status == 200, (text, request)
        if path == RESPONSES:
            check_items(body, read(path, body, text), cut="incomplete" in text)
            continue
        found = read(path, body, text)
        prompts = body.get("prompt")
        many = isinstance(prompts, list) and not isinstance(prompts[0], int)
        assert len(found) == body.get("n", 1) * (len(prompts) if many else 1), request
        for choice in found:
            check_choice(path, body, choice)
