"""Tests of requests from clients of OpenAI's API, and of the responses that the clients read.

client_requests.json contains one request of each type that eight clients sent to the server
(2026-11-27). The tests send the requests to a tiny model with random weights, and parse
the responses with the types of the package openai, as these clients do.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.serve_process import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    TOOLS_TEMPLATE,
    HostedServer,
    save_chat_model,
)

pytestmark = pytest.mark.text

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("llguidance", reason="needs the extra serve")
from openai.types import Completion  # noqa: E402
from openai.types.chat import ChatCompletion, ChatCompletionChunk  # noqa: E402
from openai.types.responses import Response, ResponseStreamEvent  # noqa: E402
from pydantic import TypeAdapter  # noqa: E402

REQUESTS = json.loads(Path(__file__).with_name("client_requests.json").read_text())
VOCAB_SIZE = 95
RESPONSE_TYPES = {CHAT: ChatCompletion, COMPLETIONS: Completion, RESPONSES: Response}
EVENT_ADAPTER = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clients")
    (folder / "template").write_text(TOOLS_TEMPLATE)
    options = ("--chat-template", str(folder / "template"), "--cb-num-blocks", "256")
    with HostedServer(save_chat_model(folder, context=4096), *options) as server:
        yield server


def adapt_request(fields: dict) -> dict:
    """Adapt a request to the tiny model, whose tokens are letters, and raise its token limits."""
    adapted = {name: value for name, value in fields.items() if name != "model"}
    if isinstance(adapted.get("prompt"), list):
        adapted["prompt"] = [
            prompt if isinstance(prompt, str) else (torch.tensor(prompt) % VOCAB_SIZE).tolist()
            for prompt in adapted["prompt"]
        ]
    structured_outputs = adapted.get("structured_outputs") or {}
    if "regex" in structured_outputs:  # the tiny model has no token for line breaks
        adapted["structured_outputs"] = {"regex": structured_outputs["regex"].replace(r"\n", " ")}
    if find_text_schema(adapted) or forces_call(adapted):
        limits = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
        adapted |= dict.fromkeys(limits & adapted.keys(), 150)
    return adapted


def find_text_schema(fields: dict) -> dict | None:
    """Return the JSON schema of the answer, from the fields of the endpoint of the request."""
    text_options = fields.get("text") or {}
    output_format = fields.get("response_format") or text_options.get("format") or {}
    return output_format.get("json_schema", output_format).get("schema")


def forces_call(fields: dict) -> bool:
    return fields.get("tool_choice") not in (None, "auto", "none")


def parse(response_type: type, text: str) -> Any:
    """Parse a response. A Completion is not validated, because it does not allow null logprobs."""
    if response_type is Completion:
        return response_type.construct(**json.loads(text))
    return response_type.model_validate_json(text)


def check_stream(path: str, fields: dict, text: str) -> None:
    """Check that a client can parse the events of a stream. Other tests check their contents."""
    events = [line.removeprefix("data: ") for line in text.split("\n") if line]
    if path == RESPONSES:
        *_, last_event = map(EVENT_ADAPTER.validate_json, events)
        assert last_event.response.output
        return
    assert events.pop() == "[DONE]"
    chunks = [parse(ChatCompletionChunk if path == CHAT else Completion, event) for event in events]
    if (fields.get("stream_options") or {}).get("include_usage"):
        assert not chunks[-1].choices
        assert chunks.pop().usage.total_tokens
    assert {len(chunk.choices) for chunk in chunks} == {1}


def check_answer(path: str, fields: dict, text: str) -> None:
    response = parse(RESPONSE_TYPES[path], text)
    assert response.usage.total_tokens
    calls: list[Any] = []
    texts: list[str] = []
    if path == RESPONSES:
        calls = [item for item in response.output if item.type == "function_call"]
        texts = [response.output_text]
    elif path == CHAT:
        messages = [choice.message for choice in response.choices]
        calls = [call.function for message in messages for call in message.tool_calls or ()]
        texts = [message.content for message in messages]
    is_cut_off = '"length"' in text or '"incomplete"' in text
    if is_cut_off or fields.get("stop"):
        return
    if forces_call(fields):
        assert calls
        assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
    elif schema := find_text_schema(fields):
        for content in texts:
            property_names = json.loads(content).keys()
            assert property_names >= set(schema.get("required", ()))
            assert property_names <= schema["properties"].keys()


# Together, these clients send every field for which this file has a check.
FAST_CLIENTS = {"openai", "instructor", "lm-eval", "guidellm"}


@pytest.mark.parametrize(
    "client",
    [
        pytest.param(name, marks=() if name in FAST_CLIENTS else pytest.mark.full)
        for name in REQUESTS
    ],
)
def test_clients_can_read_their_responses(server, client):
    for request in REQUESTS[client]:
        fields = adapt_request(request["body"])
        status, text, _ = server.ask(request["path"], fields)
        assert status == 200, (text, request)
        check = check_stream if fields.get("stream") else check_answer
        check(request["path"], fields, text)
