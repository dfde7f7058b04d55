"""Tests of `hf-fp8kv serve` over HTTP: answers, errors and shutdown."""

import contextlib
import functools
import gc
import importlib
import json
import os
import re
import select
import signal
import socket
import threading
import time
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import DEFAULT, MagicMock, Mock

import pytest
from transformers import (
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaForCausalLM,
)  # fmt: skip
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

from hf_fp8kv import choose_plan
from hf_fp8kv.errors import EngineError
from tests.helpers import command_line
from tests.helpers.serve_process import (
    CHAT,
    COMPLETIONS,
    CONTEXT_LENGTH,
    NUM_PAGES,
    PAGE_SIZE,
    RESPONSES,
    HostedServer,
    Server,
    generate_paged,
    parse_events,
    read_answer,
    save_chat_model,
)

pytestmark = pytest.mark.text


def import_required(name: str) -> types.ModuleType:
    """Import a module of the extra `serve`. In CI, a missing module fails instead of skipping."""
    if os.environ.get("CI"):
        return importlib.import_module(name)
    return pytest.importorskip(name, reason="needs the extra serve")


openai, uvicorn, _ = map(import_required, ("openai", "uvicorn", "starlette"))
bind_socket = import_required("hf_fp8kv.server.server_config").bind_socket
schemas = import_required("hf_fp8kv.server.schemas")
engine = import_required("hf_fp8kv.server.engine")
make_connection_class = import_required("hf_fp8kv.server.connections").make_connection_class
ServedModel = import_required("hf_fp8kv.server.model").ServedModel
template_shows_tools = import_required("hf_fp8kv.server.model").template_shows_tools

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
STORY = "tell me a long story of pages and tokens"


@pytest.fixture(scope="module")
def server(folder):
    with HostedServer(folder, "--max-body", "128kB") as server:
        yield server


@pytest.fixture
def run_command(monkeypatch, capsys):
    return command_line.make_runner(monkeypatch, capsys)


def make_chat(content: object = "hello", role: str = "user", **fields: object) -> dict:
    return {"messages": [{"role": role, "content": content}], "max_tokens": 4, **fields}


def get_status(server, path: str, fields: object = None, **options: object) -> int:
    return server.ask(path, fields, **options)[0]


def read_json(server, path: str) -> dict:
    return json.loads(server.ask(path)[1])


def ask_for_error(server, path: str, fields: object = None, **options: object) -> tuple[int, dict]:
    status, text, _ = server.ask(path, fields, **options)
    return status, json.loads(text)["error"]


def get_text(server, question: str, **options: object) -> str:
    answer = server.answer(CHAT, **make_chat(question, **options))
    assert isinstance(answer, dict) or len(answer) > 2  # an answer, or the events of a stream
    return read_answer(answer)


def test_a_chosen_plan_and_a_saved_plan_give_the_same_answers(folder, tmp_path):
    plan = choose_plan(LlamaForCausalLM.from_pretrained(folder))
    plan.save_pretrained(tmp_path)
    expected = generate_paged(folder, "which plan", 12, plan=plan)
    for options in (("--kv-cache-dtype", "adaptive"), ("--plan", str(tmp_path))):
        with HostedServer(folder, *options) as server:
            assert get_text(server, "which plan", max_tokens=12) == expected
            pages = read_json(server, f"/v1/models/{Path(folder).name}")["kv_cache"]
            assert pages["formats"] == [
                f"{count} x {text}" for text, count in Counter(map(str, plan.plan.values())).items()
            ]


def test_sampling_depends_only_on_the_fields_of_its_request(server):
    def sample_texts(**fields: object) -> set[str]:
        return {get_text(server, STORY, max_tokens=12, **fields) for _ in range(3)}

    greedy_texts = sample_texts()
    assert len(greedy_texts) == 1
    for limits in ({}, {"top_k": -1}, {"min_p": 0.01}):
        assert len(sample_texts(temperature=2.0, **limits)) > 1
    for fields in ({"top_p": 1e-6}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-40}):
        assert sample_texts(**{"temperature": 2.0} | fields) == greedy_texts


def test_a_truncated_response_is_incomplete(server, folder):
    request = {"model": folder, "input": "once", "max_output_tokens": 3}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        response = client.responses.create(**request)
        *_, last_event = client.responses.create(stream=True, **request)
    assert last_event.type == "response.incomplete"
    for truncated in (response, last_event.response):
        assert (truncated.model, truncated.usage.output_tokens) == (folder, 3)
        assert (truncated.status, truncated.incomplete_details.reason) == (
            "incomplete", "max_output_tokens",
        )  # fmt: skip
    assert response.output_text == last_event.response.output_text


def test_without_a_limit_an_answer_fills_the_context(server):
    answer = server.answer(CHAT, messages=make_chat(STORY)["messages"])
    assert answer["usage"]["total_tokens"] == CONTEXT_LENGTH
    assert answer["choices"][0]["finish_reason"] == "length"


def test_usage_counts_cached_tokens(server):
    text = "what is cached " * 6
    stream_usage = {"stream": True, "stream_options": {"include_usage": True}}

    def count_cached_tokens(path: str, request: dict) -> int:
        *_, usage_line = (
            line for line in server.ask(path, request)[1].splitlines() if '"usage"' in line
        )
        event = json.loads(usage_line.removeprefix("data: "))
        usage = event.get("response", event)["usage"]
        details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
        return details["cached_tokens"]

    cases = (
        (CHAT, len(text) + 5, make_chat(text), stream_usage),
        (COMPLETIONS, len(text), {"prompt": text, "max_tokens": 3}, stream_usage),
        (RESPONSES, len(text) + 5, {"input": text, "max_output_tokens": 3}, {"stream": True}),
    )
    for path, num_tokens, request, stream_fields in cases:
        num_full = (num_tokens - 1) // PAGE_SIZE * PAGE_SIZE
        for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}):
            server.answer(path, **request, **salt)  # RESPONSES has the same prompt as CHAT
            for fields in ({}, stream_fields):
                assert count_cached_tokens(path, request | salt | fields) == num_full
        assert count_cached_tokens(path, request | {"cache_salt": path}) == 0
    metrics = server.metrics()
    assert metrics["prefix_tokens_total"] > metrics["prefix_hits_total"] * PAGE_SIZE > 0
    # K and V, two layers, two heads of 16 codes, and a scale of two bytes for each head.
    assert metrics["bytes_total"] == NUM_PAGES * PAGE_SIZE * 2 * 2 * 2 * (16 + 2)
    assert metrics["bytes_used"] == metrics["pages_used"] * metrics["bytes_total"] / NUM_PAGES


HUGE_MULTIPLE = {"type": "integer", "multipleOf": 10**400}
# The path, the field in the error, the status, and the changed fields or all bytes of the body.
# There is one case for each rule.
INVALID_REQUESTS = [
    (CHAT, None, 400, b'{"messages":[{"role":"user","content":"\\ud800"}]}'),
    (CHAT, None, 400, b"[" * 30000 + b"]" * 30000),
    (CHAT, None, 400, b"[]"),
    (CHAT, None, 400, b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}'),
    (CHAT, "messages", 400, make_chat([{}] * 16_384)),
    (CHAT, "messages[0].content", 400, {"messages": [{"role": "user"}]}),
    (CHAT, "messages[0].content", 400, make_chat([{"type": "image_url"}])),
    (CHAT, None, 400, make_chat("x", "wizard")),  # refused by the template
    (CHAT, "model", 404, {"model": "no/such"}),
    (CHAT, "bogus", 400, {"bogus": 1}),
    (CHAT, "add_generation_prompt", 400, {"add_generation_prompt": False}),
    (COMPLETIONS, "stream_options", 400, {"stream_options": {"x": True}}),
    (CHAT, "max_tokens", 400, {"max_tokens": 0}),
    (CHAT, "max_tokens", 400, {"max_tokens": True}),
    (CHAT, "max_tokens", 400, {"max_tokens": CONTEXT_LENGTH - 3}),
    (CHAT, "max_tokens", 400, make_chat("x" * CONTEXT_LENGTH)),
    (CHAT, "temperature", 400, {"temperature": -1}),
    (CHAT, "seed", 400, {"seed": 2**70}),
    (CHAT, "n", 400, {"n": 129}),
    (CHAT, "stop", 400, {"stop": [""]}),
    (CHAT, "stop", 400, {"stop": list("abcdefghijklmnopq")}),
    (CHAT, "stop_token_ids", 400, {"stop_token_ids": [100_000]}),
    (CHAT, "logit_bias", 400, {"logit_bias": {str(token): 1 for token in range(1025)}}),
    (CHAT, "logit_bias", 400, {"logit_bias": {"a": 1}}),
    (CHAT, "logit_bias", 400, {"logit_bias": {"100000": 1}}),
    (CHAT, "structured_outputs.json", 400, {"structured_outputs": {"json": HUGE_MULTIPLE}}),
    (CHAT, "top_logprobs", 400, {"top_logprobs": 3}),
    (CHAT, "cache_salt", 400, {"cache_salt": ""}),
    (RESPONSES, "metadata", 400, {"metadata": {str(n): "x" for n in range(17)}}),
    (CHAT, "generation_config", 400, {"generation_config": "{"}),
    (CHAT, "generation_config.num_beams", 400, {"generation_config": '{"num_beams": 4}'}),
    (CHAT, "chat_template_kwargs.chat_template", 400, {
        "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
    (CHAT, "tools", 400, {"tools": [TOOL]}),  # not shown by the chat template
    (RESPONSES, "tools[0]", 400, {"tools": [{"type": "web_search"}]}),
    (CHAT, "tool_choice", 400, {"tool_choice": "required"}),
    (COMPLETIONS, "suffix", 400, {"suffix": "the end"}),
    (COMPLETIONS, "max_tokens", 400, {"max_tokens": 0}),
    (COMPLETIONS, "best_of", 400, {"best_of": 3, "n": 2}),
    (COMPLETIONS, "prompt", 400, {"prompt": None}),
    (COMPLETIONS, "prompt", 400, {"prompt": [[1, 2], [-1]]}),
    (COMPLETIONS, "prompt", 400, {"prompt": [1, 100_000]}),
    (COMPLETIONS, "prompt", 400, {"prompt": ["x"] * 40, "n": 30}),
    (RESPONSES, "text.verbosity", 400, {"text": {"verbosity": "low"}}),
    (RESPONSES, "input[0].type", 400, {"input": [{"type": []}]}),
    (RESPONSES, "input", 400, {"input": ""}),
    (CHAT, "repetition_penalty", 400, {"repetition_penalty": 1e-38}),  # overflows float32
]  # fmt: skip


@pytest.mark.parametrize(("path", "field", "status", "change"), INVALID_REQUESTS)
def test_an_error_names_the_refused_field(server, path, field, status, change):
    valid = {CHAT: make_chat(), COMPLETIONS: {"prompt": "x"}, RESPONSES: {"input": "x"}}
    body = change if isinstance(change, bytes) else json.dumps(valid[path] | change).encode()
    actual_status, error = ask_for_error(server, path, body=body)
    assert (actual_status, error["param"]) == (status, field), error
    assert error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {
            "tools": [TOOL], "tool_choice": "none", "cache_salt": "x" * 512, "suffix": "", "n": 1,
            "stop": [f"no {number}" for number in range(16)], "user": "x" * 512, "seed": 3,
            "metadata": {f"{n:64}": "x" * 512 for n in range(16)}, "store": False,
        },
        {
            "tools": [], "parallel_tool_calls": False, "logprobs": 0, "top_logprobs": 0,
            "frequency_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {}, "echo": False,
            "use_beam_search": False, "length_penalty": 1.0, "skip_special_tokens": True,
            "guided_json": None, "priority": 0, "service_tier": "auto", "prompt_cache_key": "x",
            "stream_options": {"include_usage": None},
        },
    ],
)  # fmt: skip
def test_fields_without_effect_are_accepted(server, fields):
    answer, expected = (
        server.answer(CHAT, **make_chat(max_tokens=8, **added)) for added in (fields, {})
    )
    assert answer["choices"] == expected["choices"]


@pytest.mark.parametrize(
    ("path", "params_type", "valid_fields"),
    [
        (CHAT, openai.types.chat.completion_create_params.CompletionCreateParamsBase, make_chat()),
        (COMPLETIONS, openai.types.CompletionCreateParams, {"prompt": "x"}),
        (RESPONSES, openai.types.responses.ResponseCreateParams, {"input": "x"}),
    ],
)
def test_every_field_of_openai_is_validated(server, path, params_type, valid_fields):
    field_types: dict[str, type] = {}
    for typed_dict in typing.get_args(params_type) or (params_type,):
        field_types |= typing.get_type_hints(typed_dict)
    assert {"model", "user"} < field_types.keys()
    for field in sorted(field_types.keys() - {"instructions"}):
        status, text, _ = server.ask(path, {**valid_fields, field: [[""] * 99] * 99})
        assert status in (400, 404), (field, text)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}you have tools{% endif %}{{ messages[0].content }}", False),
        ("{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ messages[0].content }}", True),
        ("{{ raise_exception('no') }}", False),
    ],
)
def test_tools_are_shown_only_by_templates_that_render_them(folder, template, expected):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    assert template_shows_tools(tokenizer) is expected


def test_a_generation_config_of_transformers_is_accepted(server):
    config = GenerationConfig(max_new_tokens=3, min_p=0.5, num_beams=1, pad_token_id=0)
    request = make_chat(generation_config=config.to_json_string())
    del request["max_tokens"]
    assert server.answer(CHAT, **request)["usage"]["completion_tokens"] == 3


def test_a_client_with_a_too_large_body_can_read_the_error(server):
    # The body exceeds the buffers of a connection.
    status, error = ask_for_error(server, CHAT, body=b" " * 16_000_000)
    assert (status, error["code"]) == (413, "too_large")


def test_idle_connections_are_closed_and_excess_connections_are_refused():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    server = uvicorn.Server(
        uvicorn.Config(
            app, http=make_connection_class(3, 0.3, 60), lifespan="off", log_level="error"
        )
    )
    server.capture_signals = contextlib.nullcontext
    with socket.create_server(("127.0.0.1", 0)) as sock, contextlib.ExitStack() as stack:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        stack.callback(thread.join)
        stack.callback(setattr, server, "should_exit", True)

        def connect(data: bytes) -> socket.socket:
            client = stack.enter_context(socket.create_connection(sock.getsockname(), timeout=20))
            client.sendall(data)
            return client

        request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
        silent_client, partial_client = connect(b""), connect(b"GET / HTT")
        reused_client = connect(request)
        assert reused_client.recv(1000).startswith(b"HTTP/1.1 200")
        reused_client.sendall(request[:9])
        head, _, content = connect(b"").recv(1000).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"content-length: %d" % len(content) in head
        assert json.loads(content)["error"]["code"] == "too_many_connections"
        for client in (silent_client, partial_client, reused_client):
            with contextlib.suppress(ConnectionResetError):
                assert not client.recv(1000).startswith(b"HTTP/1.1 503")
        assert connect(request).recv(1000).startswith(b"HTTP/1.1 200")


def test_a_request_with_a_bad_chunk_has_one_response(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(
            b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\nnot a length\r\n"
        )
        assert re.findall(rb"HTTP/1.1 (\d+)", client.makefile("rb").read()) == [b"400"]


def test_a_declared_body_that_is_too_large_is_refused_unread(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(
            b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"expect: 100-continue\r\ncontent-length: 99999999999\r\n\r\n"
        )
        assert client.recv(4000).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (128 * CONTEXT_LENGTH, "characters"),
        (128 * CONTEXT_LENGTH - 9, f"{128 * CONTEXT_LENGTH - 4} tokens"),
    ],
)
def test_too_long_texts_are_refused_before_tokenization(server, length, message):
    status, error = ask_for_error(server, CHAT, make_chat("x" * length))
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert message in error["message"]


def test_long_prompts_wait_for_one_thread_and_short_prompts_pass(tmp_path, monkeypatch, caplog):
    started: list[str] = []
    may_continue = threading.Event()
    stock_make_prompts = ServedModel.make_prompts

    def wait_and_make_prompts(self, request):
        started.append(request.prompt[:6])
        assert len(request.prompt) < 100_000 or may_continue.wait(60)
        return stock_make_prompts(self, request)

    def make_long_prompt(name: str) -> dict:
        # The new tokens do not fit, so the request fails after its prompt is tokenized.
        return {"prompt": f"{name:6}" + "x" * 100_000, "max_tokens": 10**6}

    def get_error(name: str) -> tuple[int, str]:
        status, error = ask_for_error(server, COMPLETIONS, make_long_prompt(name))
        return status, error["code"]

    monkeypatch.setattr(ServedModel, "make_prompts", wait_and_make_prompts)
    with (
        HostedServer(
            save_chat_model(tmp_path, context=1000), "--cb-num-blocks", "80", "--max-body", "1MB"
        ) as server,
        ThreadPoolExecutor(4) as pool, contextlib.ExitStack() as clients,
    ):  # fmt: skip
        with server.abandon_request(COMPLETIONS, **make_long_prompt("gone")):
            server.wait_until(requests_waiting=1)
        futures = [pool.submit(get_error, f"long {n}") for n in range(4)]
        server.wait_until(requests_waiting=4)
        for _ in range(12):  # a prompt without a client runs, and 4 + 12 prompts wait
            clients.enter_context(server.abandon_request(COMPLETIONS, **make_long_prompt("left")))
        server.wait_until(requests_waiting=16)
        assert get_error("excess") == (429, "too_many_bytes")
        assert get_status(server, COMPLETIONS, {"prompt": "short", "max_tokens": 1}) == 200
        clients.close()
        server.wait_until(**{'requests_total{status="499"}': 13, "requests_waiting": 4})
        assert len(started) == 2  # one long prompt and the short prompt
        may_continue.set()
        assert {future.result() for future in futures} == {(400, "context_length_exceeded")}
        assert sorted(started) == ["gone  ", *(f"long {n}" for n in range(4)), "short"]
        gc.collect()  # asyncio logs errors that are not retrieved
    assert "never retrieved" not in caplog.text


def test_a_request_ends_when_its_client_leaves_while_its_body_is_parsed(folder, monkeypatch):
    may_continue = threading.Event()
    wait = Mock(side_effect=lambda _: may_continue.wait(60) and DEFAULT, wraps=schemas.parse_body)
    monkeypatch.setattr(schemas, "parse_body", wait)
    with HostedServer(folder) as server:
        with server.abandon_request(COMPLETIONS, prompt="x" * 100_000):
            server.wait_until(requests_waiting=1)
        server.wait_until(**{'requests_total{status="499"}': 1, "requests_waiting": 0})
        may_continue.set()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("LocalHost:80", 200), ("a.localhost:1", 200), ("[::1]:8000", 200),
        ("localhost.evil.example", 421), ("notlocalhost", 421), ("10.0.0.1", 421), ("", 421),
        ("127.0.0.1.evil.example", 421),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("path", "fields"), [(CHAT, make_chat(max_tokens=1)), ("/health", None)])
def test_a_rebound_host_name_is_refused(server, path, fields, host, status):
    actual_status, text, _ = server.ask(path, fields, headers={"host": host})
    assert actual_status == status, text
    assert status == 200 or json.loads(text)["error"]["code"] == "wrong_host"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/health", None), ("/metrics", None), ("/v1/models", None), ("/", None),
        ("/openapi.json", None), ("/v1/models/no", None), (CHAT, make_chat(model="no")),
        (CHAT, make_chat()), (CHAT, make_chat(max_tokens=-1)),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 2}),
        (RESPONSES, {"input": "x", "max_output_tokens": 2}),
    ],
)  # fmt: skip
def test_no_answer_contains_the_path_of_the_model(server, folder, path, fields):
    status, text, headers = server.ask(path, fields)
    assert status in (200, 400, 404)
    assert folder not in text + str(headers)


@contextlib.contextmanager
def send_incomplete_body(server) -> Iterator[socket.socket]:
    """Send a body except its last kilobyte."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 128000\r\n"
            b"content-type: application/json\r\n\r\n" + b" " * 127_000
        )
        yield connection


def test_held_bodies_are_limited_in_bytes_and_short_requests_pass(server):
    with contextlib.ExitStack() as stack:
        # All bodies together have 8 MB, but the server holds at most 2 MB.
        clients = [stack.enter_context(send_incomplete_body(server)) for _ in range(60)]
        refused_clients = [client for client in clients if select.select([client], [], [], 0.01)[0]]
        assert 0 < len(refused_clients) < len(clients)
        for client in refused_clients:
            answer = client.recv(4000)
            assert answer.startswith(b"HTTP/1.1 429 ")
            assert b"retry-after" in answer
        assert get_status(server, CHAT, make_chat()) == 200
        status, error = ask_for_error(server, CHAT, body=b" " * 127_000)
        assert (status, error["code"]) == (429, "too_many_bytes")
    while get_status(server, CHAT, body=b" " * 127_000) == 429:
        time.sleep(0.02)  # the server still counts bodies of closed connections


def test_stalled_clients_are_disconnected_and_waiting_clients_are_not(folder):
    with (
        HostedServer(folder, "--client-timeout", "1") as server, ThreadPoolExecutor(1) as pool,
        socket.socket() as reader, send_incomplete_body(server) as sender,
    ):  # fmt: skip
        future = pool.submit(get_status, server, CHAT, make_chat("x", "sloth", max_tokens=1))
        assert sender.recv(4000).startswith(b"HTTP/1.1 408 ")
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        reader.settimeout(60)
        reader.connect(("127.0.0.1", server.port))
        with pytest.raises(ConnectionError):  # the responses are never read
            reader.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 500_000)
        assert future.result() == 200


def test_unsupported_paths_and_content_types_are_refused(server):
    for path in ("/load_model", "/docs"):
        status, text, _ = server.ask(path, {})
        assert status == 404
        assert f"{path}: expected one of /v1/chat/completions" in text
    headers = {"content-type": "application/x-www-form-urlencoded"}
    assert get_status(server, CHAT, body=b"a=b", headers=headers) == 415


def test_requests_with_the_same_id_get_their_own_answers(server):
    def ask(letter: str) -> tuple[str, str]:
        _, text, headers = server.ask(CHAT, make_chat(letter), headers={"x-request-id": "same"})
        return headers["x-request-id"], read_answer(json.loads(text))

    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(ask, "abcd")
    assert list(answers) == [("same", get_text(server, letter)) for letter in "abcd"]


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.full)])
def test_the_pages_of_a_disconnected_client_are_freed(server, slow_steps, stream):
    canceled_metric = 'requests_total{status="499"}'
    token_metric = f'inter_token_latency_seconds_count{{model_name="{Path(server.model).name}"}}'
    old_metrics = server.wait_until(requests_active=0)
    with server.abandon_request(CHAT, **make_chat(STORY, max_tokens=250, stream=stream)):
        server.wait_until(requests_active=1)
    metrics = server.wait_until(
        **{canceled_metric: old_metrics.get(canceled_metric, 0) + 1, "requests_active": 0}
    )
    assert metrics["requests_waiting"] == 0
    assert metrics[token_metric] - old_metrics.get(token_metric, 0) < 200, (
        "all tokens were computed"
    )
    # All pages are free for a second request.
    answer = server.answer(COMPLETIONS, prompt="x" * (CONTEXT_LENGTH - 9), max_tokens=9)
    assert answer["usage"]["completion_tokens"] == 9


@pytest.fixture
def call_in_each_step(monkeypatch):
    """Return a function that makes each later step of an engine call another function first."""

    def patch_steps(function: Callable[[], object]) -> None:
        update_batch = ContinuousBatchProcessor.update_batch

        def call_and_update(self: ContinuousBatchProcessor) -> None:
            function()
            update_batch(self)

        monkeypatch.setattr(ContinuousBatchProcessor, "update_batch", call_and_update)

    return patch_steps


@pytest.fixture
def slow_steps(call_in_each_step):
    """Slow each step by 10 ms, during which clients get the CPU, so that requests have to wait."""
    call_in_each_step(functools.partial(time.sleep, 0.01))


def test_an_access_token_is_required_and_excess_requests_get_429(folder, slow_steps):
    with HostedServer(
        folder, "--host", "0.0.0.0", "--max-waiting", "2", "--cb-block-size", "32",
        "--cb-num-blocks", "8", environment={"HF_FP8KV_API_KEY": "sesame"},
    ) as server:  # fmt: skip
        for headers in ({}, {"authorization": "Bearer simsim"}, {"authorization": "sesame"}):
            for path, fields in ((CHAT, make_chat()), ("/metrics", None), ("/v1/models", None)):
                status, error = ask_for_error(server, path, fields, headers=headers)
                assert (status, error["code"]) == (401, "invalid_api_key")
        assert get_status(server, "/health") == get_status(server, "/") == 200
        auth = {"authorization": "Bearer sesame"}
        request = make_chat(STORY, max_tokens=50)
        answers = []
        statuses = set()
        with ThreadPoolExecutor(24) as pool:
            # Repeat until some requests wait, because a slow machine may read them one by one.
            while statuses != {200, 429} and len(answers) < 240:
                answers += pool.map(lambda _: server.ask(CHAT, request, headers=auth), range(24))
                statuses = {status for status, _, _ in answers}
        assert statuses == {200, 429}
        assert all(headers["retry-after"] for status, _, headers in answers if status == 429)
        assert get_status(server, "/health", headers={"host": "any.example"}) == 200
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame") as client:
            assert client.models.list().data[0].object == "model"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--chat-template-kwargs", "5"], 2, "expected a JSON object"),
        (["--host", "0.0.0.0", "--device", "cpu"], 1, "HF_FP8KV_API_KEY"),
        (["--default-seed", str(2**70)], 2, "--default-seed"),
        (["--max-body", "0"], 1, "--max-body: expected at least 1"),
        (["--device", "toaster"], 1, "cannot load a language model"),
        (["--device", "cpu", "--dtype", "int8"], 2, "expected one of auto"),
        (["--cb-max-memory-percent", "7"], 2, "--cb-max-memory-percent"),
        (["--cb-num-blocks", "1", "--cb-block-size", "-4"], 2, "--cb-block-size"),
    ],
)
def test_a_wrong_command_line_is_explained(
    run_command, folder, monkeypatch, options, code, message
):
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: pytest.fail("the server started"))
    monkeypatch.delenv("HF_FP8KV_API_KEY", raising=False)
    exit_code, _, err = run_command("serve", folder, "--port", "0", *options)
    assert exit_code == code, err
    assert message in " ".join(err.split())


def test_a_port_in_use_is_reported_before_the_model_is_loaded(run_command, folder):
    with contextlib.closing(bind_socket("127.0.0.1", 0)) as sock:  # bound, but not listening yet
        port = str(sock.getsockname()[1])
        code, _, err = run_command("serve", folder, "--port", port, "--device", "cpu")
    assert (code, "cannot listen" in err, "Traceback" in err) == (1, True, False)
    bind_socket("127.0.0.1", int(port)).close()


def test_unusable_files_and_processes_are_explained(run_command, folder, tmp_path, monkeypatch):
    template = tmp_path / "template"
    template.write_text("{{ messages[0].content.nothing.more }}")
    cases = (
        (folder, ["--chat-template", str(template)], 1, "--chat-template: expected a tem"),
        (tmp_path, [], 1, "no config.json in it"),
        (tmp_path / "none", [], 1, "no such folder"),
        (tmp_path, [], 2, "expected a single process"),
    )
    for model, options, num_processes, message in cases:
        monkeypatch.setenv("WORLD_SIZE", str(num_processes))  # as in a process of torchrun
        code, _, err = run_command("serve", str(model), "--port", "0", "--device", "cpu", *options)
        assert (code, message in " ".join(err.split())) == (1, True), err


def test_custom_names_lengths_and_templates_are_used(folder, tmp_path):
    (tmp_path / "template").write_text("<{% for m in messages %}{{ m.content }}{% endfor %}>")
    options = ("--chat-template", str(tmp_path / "template"), "--served-model-name", "mine")
    with HostedServer(folder, *options, "--max-model-len", "40") as server:
        assert read_json(server, "/v1/models")["data"][0]["id"] == "mine"
        model = read_json(server, "/v1/models/mine")
        assert (model["id"], model["max_model_len"]) == ("mine", 40)
        answer, chunks = (
            server.answer(CHAT, **make_chat("x", model="mine", stream=stream))
            for stream in (False, True)
        )
        assert answer["usage"]["prompt_tokens"] == len("<x>")
        assert {chunk["model"] for chunk in (answer, *chunks)} == {"mine"}
        assert get_status(server, CHAT, make_chat(model=folder)) == 404
        assert get_status(server, CHAT, make_chat(STORY, max_tokens=1)) == 400


def test_a_failed_engine_ends_the_server(folder, call_in_each_step):
    # A supervisor must notice the failure, because no later request could be answered.
    effects = [*[None] * 19, MemoryError("no memory for step 20")]
    with HostedServer(folder, "--grace", "60") as server:
        call_in_each_step(Mock(side_effect=effects))
        with ThreadPoolExecutor(4) as pool:
            answers = pool.map(server.ask, [CHAT] * 4, [make_chat(STORY, max_tokens=90)] * 4)
        for status, text, _ in answers:
            assert status in (500, 503)  # before or after the end of the engine's thread
            assert "no memory for step 20" in text
        error = server.wait(30)
    assert isinstance(error, EngineError)  # the command line then exits with 1
    assert "the engine ended: no memory for step 20. Start the server again" in str(error)


def test_a_step_that_still_runs_does_not_delay_the_end(folder, call_in_each_step):
    may_continue = threading.Event()
    with HostedServer(folder) as server:
        call_in_each_step(functools.partial(may_continue.wait, 60))
        with server.abandon_request(CHAT, **make_chat()):
            server.wait_until(requests_active=1)
        start = time.monotonic()
        server.stop()
        assert time.monotonic() - start < 10
        may_continue.set()


@pytest.mark.parametrize(
    "sends_twice", [False, pytest.param(True, marks=pytest.mark.full)], ids=["once", "twice"]
)
def test_a_signal_drains_requests_and_a_second_signal_ends_them(folder, sends_twice, tmp_path):
    # uvicorn prefers httptools if it is installed, but httptools does not limit headers.
    (tmp_path / "httptools.py").write_text("HttpRequestParser = None")
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with (
        Server(
            folder, "--grace", "100", "--metrics-interval", "0.1", environment=environment
        ) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        with (
            socket.create_connection(("127.0.0.1", server.port), timeout=60) as client,
            pytest.raises(ConnectionError),
        ):
            client.sendall(b"GET /health HTTP/1.1\r\nx: y\r\n" + b"x: %1000d\r\n" % 1 * 16_000)
        future = pool.submit(server.ask, CHAT, make_chat(STORY, max_tokens=270, stream=True))
        server.wait_until(requests_active=1)
        server.wait_for_log(
            r"INFO: +requests: \d+ active, \d+ waiting, \d+ finished; [\d.]+ tokens/s; "
            rf"pages: \d+ of {NUM_PAGES} used, \d+ tokens, .* of .*; prefixes: \d+ hits, \d+ tokens"
        )
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_log("stopping: 1 requests get 100 s")
        status, text, headers = server.ask(CHAT, make_chat())
        assert (status, json.loads(text)["error"]["code"]) == (503, "stopping")
        assert headers["retry-after"]
        status, text, _ = server.ask("/health")
        assert (status, json.loads(text)["status"]) == (503, "unhealthy")
        assert json.loads(text)["error"]["code"] == "stopping"
        if sends_twice:
            server.process.send_signal(signal.SIGTERM)
        *_, last_event = parse_events(future.result()[1])
        assert server.process.wait(120) == 0
        server.wait_for_log("Finished server process")
        assert "Traceback" not in server.log
        assert "/metrics HTTP" in server.log
        assert "/health" not in server.log
    if sends_twice:
        error = last_event["error"]
        assert (error["code"], error["type"]) == ("stopping", "server_error")
    else:
        assert last_event["choices"][0]["finish_reason"] == "length"
        assert last_event["usage"]["completion_tokens"] == 270


@pytest.mark.full
def test_jobs_that_still_run_do_not_delay_the_exit(tmp_path):
    # The template takes hours for the role "snail". Its client gets 503, or has left.
    loops = "".join(f"{{% for {name} in range(90000) %}}" for name in "ijk")
    template = tmp_path / "template"
    template.write_text(
        "{% if messages[0].role == 'snail' %}" + loops + "{% endfor %}" * 3 + "{% endif %}:"
    )
    store = tmp_path / "store"
    options = (
        "--chat-template", str(template), "--cb-num-blocks", "80", "--grace", "1",
        "--max-body", "1MB",
    )  # fmt: skip
    model = save_chat_model(tmp_path, context=1000)
    request = make_chat("x" * 100_000, "snail")
    with (
        Server(model, *options, "--prefix-store", str(store)) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        assert get_status(server, COMPLETIONS, {"prompt": STORY, "max_tokens": 9}) == 200
        with contextlib.ExitStack() as clients:
            for _ in range(3):  # one request runs, and two requests wait
                clients.enter_context(server.abandon_request(CHAT, **request))
            server.wait_until(requests_waiting=3)
        server.wait_until(**{'requests_total{status="499"}': 3})
        future = pool.submit(ask_for_error, server, CHAT, request)
        server.wait_until(requests_waiting=1)
        assert server.stop() == 0
        status, error = future.result()
        assert (status, error["code"]) == (503, "stopping")
        assert "stopping: ending 1 requests" in server.log
        assert "Finished server process" in server.log
        assert "Traceback" not in server.log
    assert len(list(store.glob("*.safetensors"))) == len(STORY) // PAGE_SIZE


def test_the_web_page_loads_nothing_from_other_hosts(server):
    status, text, headers = server.ask("/")
    assert (status, headers["content-type"]) == (200, "text/html;charset=utf-8")
    assert "connect-src 'self'" in headers["content-security-policy"]
    assert not re.findall(r"(?:https?:)?//[a-z]", text)


def test_a_model_lists_how_many_tokens_fit(server):
    pages = read_json(server, f"/v1/models/{Path(server.model).name}")["kv_cache"]
    # A token has K and V of 2 layers with 2 heads of 16 values: 256 bytes in bf16, 144 in pages.
    assert pages["tokens"] / pages["bf16_tokens"] == pytest.approx(256 / 144, rel=0.01)
    assert all(plan.startswith("2 x K") for plan in pages["formats"])


@pytest.mark.parametrize(
    ("options", "min_tokens", "share"),
    [
        ({}, 1, 1 / 8), ({}, 2**25, 1 / 4), ({"max_memory_percent": 0.5}, 1, 0.5),
        ({"num_blocks": 9}, 1, None),
    ],
)  # fmt: skip
def test_the_default_memory_on_a_cpu_is_limited(folder, monkeypatch, options, min_tokens, share):
    # 4 GiB of 32 GiB, unless the configuration has a limit or 2**25 tokens need 8 GiB in bf16.
    model = LlamaForCausalLM.from_pretrained(folder)
    record = MagicMock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(type(model), "init_continuous_batching", record)
    monkeypatch.setattr(engine, "_count_free_bytes", lambda: 32 * 2**30)
    monkeypatch.setattr(engine, "_MIN_CPU_TOKENS", min_tokens)
    with pytest.raises(KeyboardInterrupt):
        engine.Engine(model, ContinuousBatchingConfig(**options), None)
    record.assert_called_once()
    assert record.call_args.kwargs["continuous_batching_config"].max_memory_percent == share
