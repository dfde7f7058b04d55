"""Tests of requests from clients of OpenAI's API, and of the responses that the clients read.

client_requests.json contains one request of each type that eight clients sent to the server
(2026-11-27). The tests send the requests to a tiny model with random weights, and parse
the responses with the types of the package openai, as these clients do.
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
REQUESTS_FILE = Path(__file__).with_name("client_requests.json")
REQUESTS = json.loads(REQUESTS_FILE.read_text())
VOCAB_SIZE = 95
EVENT_ADAPTER = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clients")
    (folder / "template").write_text(TOOLS_TEMPLATE)
    model = save_chat_model(folder, context=4096)
    options = ("--chat-template", str(folder / "template"), "--cb-num-blocks", "256")
    with hosting(model, *options) as server:
        yield server


def adapt_request(fields: dict) -> dict:
    """Adapt a request to the tiny model, whose tokens are letters, and raise its token limits."""
    fields = {name: value for name, value in fields.items() if name != "model"}
    if "prompt" in fields:
        fields["prompt"] = adapt_prompt(fields["prompt"])
    structured_outputs = fields.get("structured_outputs") or {}
    if "regex" in structured_outputs:  # the tiny model has no token for line breaks
        fields["structured_outputs"] = {"regex": structured_outputs["regex"].replace(r"\n", " ")}
    if find_text_schema(fields) or forces_call(fields):
        limits = ("max_tokens", "max_completion_tokens", "max_output_tokens")
        fields |= {name: 150 for name in limits if name in fields}
    return fields


def adapt_prompt(prompt: Any) -> Any:
    """Adapt a text, a token, or a list of texts, of tokens or of lists of tokens."""
    if isinstance(prompt, list):
        return [adapt_prompt(element) for element in prompt]
    return prompt if isinstance(prompt, str) else prompt % VOCAB_SIZE


def find_text_schema(fields: dict) -> dict | None:
    """Return the JSON schema of the answer, or None if the request has no schema."""
    output_format = fields.get("response_format") or (fields.get("text") or {}).get("format") or {}
    return (output_format.get("json_schema") or output_format).get("schema")


def forces_call(fields: dict) -> bool:
    return fields.get("tool_choice") not in (None, "auto", "none")


def parse_response(response_type: type, text: str) -> Any:
    """Parse a response. A Completion is not validated, because it does not allow null logprobs."""
    if response_type is Completion:
        return response_type.construct(**json.loads(text))
    return response_type.model_validate_json(text)


def read_choices(path: str, fields: dict, text: str) -> list[dict]:
    """Return the choices of a response, streamed or not, or the items of a /v1/responses object."""
    if not fields.get("stream"):
        response_type = {CHAT: ChatCompletion, COMPLETIONS: Completion, RESPONSES: Response}[path]
        response = parse_response(response_type, text)
        usage = response.usage
        assert usage.output_tokens if path == RESPONSES else usage.completion_tokens
        entries = response.output if path == RESPONSES else response.choices
        return [entry.model_dump() for entry in entries]
    events = [line.removeprefix("data: ") for line in text.split("\n") if line]
    if path == RESPONSES:
        last_event = [EVENT_ADAPTER.validate_json(event) for event in events][-1]
        return [item.model_dump() for item in last_event.response.output]
    assert events.pop() == "[DONE]"
    response_type = ChatCompletionChunk if path == CHAT else Completion
    chunks = [parse_response(response_type, event) for event in events]
    if (fields.get("stream_options") or {}).get("include_usage"):
        assert not chunks[-1].choices
        assert chunks.pop().usage.total_tokens
    choices: dict[int, dict] = defaultdict(lambda: {"text": "", "content": "", "tool_calls": []})
    for chunk in chunks:
        for part in chunk.choices:
            choice = choices[part.index]
            choice["finish_reason"] = part.finish_reason
            if path == CHAT:
                choice["content"] += part.delta.content or ""
                choice["tool_calls"] += [call.model_dump() for call in part.delta.tool_calls or []]
            else:
                choice["text"] += part.text
    return [{**choice, "message": choice} for choice in choices.values()]


def check_choice(path: str, fields: dict, choice: dict) -> None:
    """Check that a choice contains everything that its client reads."""
    is_truncated = choice["finish_reason"] == "length"
    message = choice["message"] if path == CHAT else {"content": choice["text"]}
    if forces_call(fields):
        calls = message["tool_calls"] or []
        for call in calls:
            assert call["id"]
            assert call["type"] == "function"
            assert is_truncated or isinstance(json.loads(call["function"]["arguments"]), dict)
        assert calls or is_truncated
    else:
        assert message["content"] or fields.get("max_tokens") == 0 or fields.get("stop")
        check_text(fields, message["content"], is_truncated=is_truncated)
    if not fields.get("logprobs") or fields.get("stream"):
        return
    if path == CHAT:
        assert len(choice["logprobs"]["content"]) > 0
        return
    logprobs = choice["logprobs"]
    lengths = {len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs")}
    assert len(lengths) == 1
    if fields.get("echo"):  # lm-eval adds up the log-probability of a text
        assert logprobs["token_logprobs"][0] is None
        assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
        assert all(max(top.values()) <= 0 for top in logprobs["top_logprobs"][1:])


def check_text(fields: dict, text: str, *, is_truncated: bool) -> None:
    schema = find_text_schema(fields)
    if schema is not None and not is_truncated:
        assert set(schema.get("required", ())) <= json.loads(text).keys() <= {*schema["properties"]}


def check_items(fields: dict, items: list[dict], *, is_truncated: bool) -> None:
    """Check that the items of a response contain everything that its client reads."""
    calls = [item for item in items if item["type"] == "function_call"]
    texts = [part["text"] for item in items for part in item.get("content") or ()]
    if forces_call(fields):
        assert calls or is_truncated
        for call in calls:
            assert call["call_id"]
            assert is_truncated or isinstance(json.loads(call["arguments"]), dict)
    else:
        assert any(texts)
        check_text(fields, "".join(texts), is_truncated=is_truncated)


# Together, these clients send every field for which this file has a check.
FAST_CLIENTS = {"openai", "instructor", "lm-eval", "guidellm"}


@pytest.mark.parametrize(
    "client",
    [pytest.param(x, marks=() if x in FAST_CLIENTS else pytest.mark.full) for x in REQUESTS],
)
def test_clients_can_read_their_responses(server, client):
    for request in REQUESTS[client]:
        path, fields = request["path"], adapt_request(request["body"])
        status, text, _ = server.ask(path, fields)
        assert status == 200, (text, request)
        if path == RESPONSES:
            check_items(fields, read_choices(path, fields, text), is_truncated="incomplete" in text)
            continue
        choices = read_choices(path, fields, text)
        prompt = fields.get("prompt")
        has_several_prompts = isinstance(prompt, list) and not isinstance(prompt[0], int)
        num_prompts = len(prompt) if has_several_prompts else 1
        assert len(choices) == fields.get("n", 1) * num_prompts, request
        for choice in choices:
            check_choice(path, fields, choice)
