"""`hf-fp8kv serve`, over HTTP: its answers, its refusals, and its end."""

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import threading
import time
import types
import typing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import pytest
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

import hf_fp8kv.serving
from hf_fp8kv import choose_plan
from hf_fp8kv.errors import ConfigError, EngineError
from tests.helpers import command_line
from tests.helpers.serve_process import (
    CONTEXT,
    PAGE,
    PAGES,
    events,
    generate_answer,
    hosting,
    save_chat_model,
    serving,
    text_in,
)  # fmt: skip

pytestmark = pytest.mark.text


def needed(name: str) -> types.ModuleType:
    """Import a module of the extra `serve`. CI installs it, so that no skip hides these tests."""
    if os.environ.get("CI"):
        return importlib.import_module(name)
    return pytest.importorskip(name, reason="needs the extra serve")


openai, uvicorn, _ = map(needed, ("openai", "uvicorn", "fastapi"))
listen = needed("hf_fp8kv.server.config").listen
limit_connections = needed("hf_fp8kv.server.connections").limit_connections
ServedModel = needed("hf_fp8kv.server.model").ServedModel
shows_tools = needed("hf_fp8kv.server.model").shows_tools

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
MESSAGE = {"type": "message", "role": "user", "content": "x"}
LETTERS = [chr(code) for code in range(0x4E00, 0x4E41)]  # 65
STORY = [{"role": "user", "content": "tell me a long story of pages and tokens"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def server(model):
    with hosting(model, "--max-body", "128kB") as server:
        yield server


@pytest.fixture
def run(monkeypatch, capsys):
    return command_line.runner(monkeypatch, capsys)


def body(**fields: object) -> dict:
    return {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, **fields}


def text_of(server, question: str, **options: object) -> str:
    messages = [{"role": "user", "content": question}]
    answer = server.answer(CHAT, **body(messages=messages, **options))
    assert isinstance(answer, dict) or len(answer) > 2
    return text_in(answer)


# -- what it answers -------------------------------------------------------------------------------


def test_a_chosen_plan_and_a_saved_one_are_the_same(model, tmp_path, monkeypatch):
    plan, used = choose_plan(LlamaForCausalLM.from_pretrained(model)), []
    plan.save_pretrained(tmp_path)
    resolve = hf_fp8kv.serving.resolve_plan
    monkeypatch.setattr(
        hf_fp8kv.serving, "resolve_plan", lambda *given: used.append(resolve(*given)) or used[-1]
    )
    expected = generate_answer(model, "which plan", 12, plan=plan)
    for options in (("--kv-cache-dtype", "adaptive"), ("--plan", str(tmp_path))):
        with hosting(model, *options) as server:
            assert text_of(server, "which plan", max_tokens=12) == expected
        assert used.pop()[1].digest == plan.digest
        assert not used


def test_sixteen_requests_at_once_get_what_generate_answers_from_stored_pages(server, model):
    questions = [f"question {n % 8} about {'pages ' * (n % 8)}" for n in range(16)]
    # These tokens need more pages than there are.
    assert sum(len(q) + 40 for q in questions) > 2 * PAGES * PAGE
    with ThreadPoolExecutor(16) as pool:
        ask = [
            pool.submit(text_of, server, question, stream=n < 8, max_tokens=40)
            for n, question in enumerate(questions)
        ]
        answers = [one.result() for one in ask]
    assert answers[:8] == answers[8:]
    assert answers[:8] == [generate_answer(model, question, 40) for question in questions[:8]]
    assert len(set(answers)) == 8
    assert server.wait_until(requests_active=0)["requests_waiting"] == 0


def test_a_request_is_sampled_as_it_asks_whatever_came_before(server):
    def texts(**fields: object) -> set[str]:
        asked = body(messages=STORY, max_tokens=12, **fields)
        return {text_in(server.answer(CHAT, **asked)) for _ in range(3)}

    hot = {"temperature": 2.0}
    (greedy,) = texts(temperature=0)
    for wide in ({}, {"top_k": -1}, {"min_p": 0.01}):
        assert len(texts(**hot, **wide)) > 1
    for narrow in ({"top_p": 1e-6}, {"top_k": 1}, {"min_p": 1.0}):
        assert texts(**hot, **narrow) == {greedy}
    for cold in ({}, {"temperature": 1e-6}, {"temperature": 1e-40}):
        assert texts(**cold) == {greedy}


def test_an_answer_ends_before_a_text_that_stops_it(server):
    whole = text_of(server, "stop here", max_tokens=60)
    stop = whole[20:23]
    until = whole[: whole.index(stop)]
    for stops in (stop, ["no such text", stop]):
        for stream in (False, True):
            assert text_of(server, "stop here", stream=stream, max_tokens=60, stop=stops) == until
    assert text_of(server, "stop here", stream=True, max_tokens=60, stop="no such text") == whole
    server.wait_until(requests_active=0, requests_waiting=0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_stops_an_answer_with_its_last_token_is_why_it_ended(server, stream):
    def reason(tokens: int) -> str:
        asked = body(messages=STORY, max_tokens=tokens, stop=stop, stream=stream)
        answer = server.answer(CHAT, **asked)
        return (answer[-1] if stream else answer)["choices"][0]["finish_reason"]

    whole = text_in(server.answer(CHAT, **body(messages=STORY, max_tokens=20)))
    stop = whole[-6:]
    assert whole.index(stop) == 14
    assert [reason(20), reason(19)] == ["stop", "length"]


def test_streams_end_as_those_of_openai_do(server):
    name = json.loads(server.ask("/v1/models")[1])["data"][0]["id"]
    sent = {"max_tokens": 2, "stream": True}
    for path, asked in ((CHAT, body(**sent)), ("/v1/completions", {"prompt": "x", **sent})):
        for given in ({}, {"model": name}, {"model": f"{server.model}"}):
            chunks = server.answer(path, **asked, **given)
            assert {chunk["model"] for chunk in chunks} == {given.get("model", name)}


def test_a_response_that_was_cut_short_says_so(server, model):
    asked = {"model": model, "input": "once", "max_output_tokens": 3}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        response = client.responses.create(**asked)
        *_, last = client.responses.create(stream=True, **asked)
    assert last.type == "response.incomplete"
    for found in (response, last.response):
        assert found.status == "incomplete"
        assert found.incomplete_details.reason == "max_output_tokens"
        assert found.model == model
        assert found.usage.output_tokens == 3
    assert response.output_text == last.response.output_text


def test_others_are_answered_while_a_prompt_is_made(server):
    slow = body(messages=[{"role": "sloth", "content": "x"}], max_tokens=1)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.ask, CHAT, slow)
        seen = 0
        while not answer.done():
            seen += json.loads(server.ask("/health")[1]).get("requests_waiting") == 1
            time.sleep(0.02)
    assert answer.result()[0] == 200
    assert seen > 0


def test_without_a_limit_an_answer_ends_where_the_model_does(server):
    answer = server.answer(CHAT, messages=STORY)
    assert answer["usage"]["total_tokens"] == CONTEXT
    assert answer["choices"][0]["finish_reason"] == "length"


def test_the_beginning_of_a_prompt_is_not_computed_twice(server):
    before = server.metrics()
    for _ in range(2):
        text_of(server, "the same beginning " * 4)
    after = server.metrics()
    assert after["prefix_hits_total"] > before["prefix_hits_total"]
    assert after["prefix_tokens_total"] >= before["prefix_tokens_total"] + 4 * PAGE
    # K and V, two layers, two heads of 16 codes, and a scale of two bytes for each head.
    assert after["bytes_total"] == after["pages_total"] * PAGE * 2 * 2 * 2 * (16 + 2)
    assert after["pages_total"] == PAGES
    assert 0 < after["pages_used"] <= PAGES
    assert after["bytes_used"] == after["pages_used"] * after["bytes_total"] / PAGES
    assert after["tokens_held"] <= after["pages_used"] * PAGE


def test_usage_says_what_was_not_computed(server):
    text = "what is cached " * 6
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    for path, asked, more in (
        (CHAT, body(messages=[{"role": "user", "content": text}]), streamed),
        ("/v1/completions", {"prompt": text, "max_tokens": 3}, streamed),
        ("/v1/responses", {"input": text, "max_output_tokens": 3}, {"stream": True}),
    ):
        server.answer(path, **asked)  # the next requests have the same prompt
        for sent in (asked, asked | more):
            found = [x for x in server.ask(path, sent)[1].splitlines() if '"usage"' in x][-1]
            found = json.loads(found.removeprefix("data: "))
            usage = found.get("response", found)["usage"]
            details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
            total = usage.get("prompt_tokens") or usage["input_tokens"]
            assert details["cached_tokens"] == (total - 1) // PAGE * PAGE


# -- what it refuses -------------------------------------------------------------------------------

REFUSED = {
    "no body": (b"", 400),
    "no JSON": (b"{nope", 400),
    "not UTF-8": (b'{"messages":[{"role":"user","content":"\xff"}]}', 400),
    "half a character": (b'{"messages":[{"role":"user","content":"\\ud800"}]}', 400),
    "deep": (b"[" * 30000 + b"]" * 30000, 400),
    "a list": ([], 400),
    "not a number": (b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}', 400),
    "nothing": ({"max_tokens": 4}, 400),
    "no messages": (body(messages=[]), 400),
    "messages that are text": (body(messages="hello"), 400),
    "a number for a message": (body(messages=[1]), 400),
    "no role": (body(messages=[{"content": "x"}]), 400),
    "a picture": (body(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400),
    "what the template refuses": (body(messages=[{"role": "wizard", "content": "x"}]), 400),
    "calls of nothing": (body(messages=[{"role": "assistant", "tool_calls": [5]}]), 400),
    "tools": (body(tools=[5]), 400),
    "no new tokens": (body(max_tokens=0), 400),
    "fewer than none": (body(max_tokens=-1), 400),
    "half a token": (body(max_tokens=1.5), 400),
    "true tokens": (body(max_tokens=True), 400),
    "too many tokens": (body(max_tokens=10**6), 400),
    "far too many tokens": (body(max_tokens=10**30), 400),
    "more than the model holds": (body(max_tokens=CONTEXT - 3), 400),
    "a long prompt": (body(messages=[{"role": "user", "content": "x" * CONTEXT}]), 400),
    "cold": (body(temperature=-1), 400),
    "hot": (body(temperature="hot"), 400),
    "top_p": (body(top_p=0), 400),
    "seed": (body(seed=2**70), 400),
    "many answers": (body(n=129), 400),
    "a penalty": (body(frequency_penalty=3), 400),
    "a stop": (body(stop=[""]), 400),
    "many stops": (body(stop=list("abcdefghijklmnopq")), 400),
    "a long stop": (body(stop="x" * 1025), 400),
    "many biases": (body(logit_bias={str(token): 1 for token in range(1025)}), 400),
    "many ends": (body(generation_config=json.dumps({"eos_token_id": [1] * 129})), 400),
    "a multiple of too much": (
        body(structured_outputs={"json": {"type": "integer", "multipleOf": 10**400}}),
        400,
    ),
    "another model": (body(model="no/such"), 404),
    "an unknown field": (body(bogus=1), 400),
    "a third of a token": (body(top_k=0.3), 400),
    "effort": (body(reasoning_effort="high"), 400),
    "a tool of others": (body(tools=[{"type": "web_search"}]), 400),
    "a config": (body(generation_config="{"), 400),
    "beams": (body(generation_config='{"num_beams": 4}'), 400),
    "a penalty in a config": (body(generation_config='{"repetition_penalty": 1.1}'), 400),
    "typical_p": (body(generation_config='{"typical_p": 0.5}'), 400),
    "a stop in a config": (body(generation_config='{"stop_strings": ["a"]}'), 400),
    "a template": (body(chat_template_kwargs={"chat_template": "{{ 1 }}"}), 400),
    "no stream": (body(stream="yes"), 400),
    "too large": (body(messages=[{"role": "user", "content": "x" * 140_000}]), 413),
}


@pytest.mark.parametrize(("sent", "status"), REFUSED.values(), ids=REFUSED)
def test_a_bad_request_is_refused_and_the_next_is_answered(server, sent, status):
    raw = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
    found, text, _ = server.ask(CHAT, raw=raw)
    assert found == status, text
    error = json.loads(text)["error"]
    assert error["message"]
    assert error["type"] in ("invalid_request_error", "not_found_error")
    assert server.ask(CHAT, body())[0] == 200


@pytest.mark.parametrize(
    ("path", "field", "sent"),
    [
        (CHAT, "bogus", 1),
        (CHAT, "prompt", "x"),
        (CHAT, "generation_config.guidance_scale", {"generation_config": '{"guidance_scale": 2}'}),
        ("/v1/completions", "messages", []),
        ("/v1/responses", "text.verbosity", {"text": {"verbosity": "low"}}),
        ("/v1/responses", "reasoning", {"reasoning": {"effort": "high"}}),
        ("/v1/responses", "tools[0]", {"tools": [{"type": "web_search"}]}),
        ("/v1/responses", "prompt", {"prompt": {"id": "x"}}),
        # The chat template shows no tools to the model.
        (CHAT, "tools", {"tools": [TOOL]}),
        (CHAT, "parallel_tool_calls", {"tools": [TOOL], "parallel_tool_calls": False}),
        (CHAT, "tools", {"tools": [[0] * 16_384], "tool_choice": "none"}),
        (CHAT, "messages", body(messages=[{"role": "user", "content": [{}] * 16_384}])),
        (CHAT, "messages[0].content", {"messages": [{"role": "user"}]}),
        (CHAT, "messages[0].content", {"messages": [{"role": "assistant", "tool_calls": []}]}),
        (CHAT, "tool_choice", {"tool_choice": "required"}),
        (CHAT, "top_logprobs", {"top_logprobs": 3}),
        (CHAT, "logprobs", {"logprobs": 3}),
        (CHAT, "echo", {"echo": True}),
        (CHAT, "logit_bias", {"logit_bias": {"a": 1}}),
        (CHAT, "logit_bias", {"logit_bias": {"100000": 1}}),
        (CHAT, "stop_token_ids", {"stop_token_ids": [100_000]}),
        (CHAT, "repetition_penalty", {"repetition_penalty": 0}),
        (CHAT, "best_of", {"best_of": 3, "n": 2}),
        (CHAT, "user", "x" * 513),
        ("/v1/completions", "user", [""] * 9000),
        (CHAT, "metadata", {"metadata": {"x": [0] * 9000}}),
        ("/v1/responses", "metadata", {"metadata": {str(n): "x" for n in range(17)}}),
        (CHAT, "metadata", {"metadata": {"x" * 65: ""}}),
        (CHAT, "metadata", {"metadata": {"x": "y" * 513}}),
        (CHAT, "stream_options", {"stream_options": {"include_usage": "yes"}}),
        ("/v1/completions", "stream_options", {"stream_options": {"x": True}}),
        (CHAT, "store", "yes"),
        (CHAT, "moderation", {"moderation": {"model": "x"}}),
        (CHAT, "chat_template_kwargs", {"chat_template_kwargs": dict.fromkeys(LETTERS, 1)}),
        (CHAT, "generation_config", json.dumps({"transformers_version": "x" * 20_000})),
        (CHAT, "prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
        (CHAT, "guided_json", {"guided_json": {}}),
        ("/v1/responses", "prompt_logprobs", {"prompt_logprobs": 1}),
        ("/v1/completions", "suffix", {"suffix": "the end"}),
        ("/v1/completions", "logprobs", {"logprobs": True}),
        ("/v1/completions", "logprobs", {"logprobs": 21}),
        ("/v1/completions", "max_tokens", {"max_tokens": 0}),
        ("/v1/completions", "prompt", {"prompt": []}),
        ("/v1/completions", "prompt", {"prompt": None}),
        ("/v1/responses", "input", {"input": None}),
        (CHAT, "messages", {"messages": None}),
        ("/v1/completions", "prompt", {"prompt": ["x", ""]}),
        ("/v1/completions", "prompt", {"prompt": [[1, 2], [-1]]}),
        ("/v1/completions", "prompt", {"prompt": [1, 100_000]}),
        ("/v1/completions", "prompt", {"prompt": ["x"] * 40, "n": 30}),
        *(
            ("/v1/responses", "input[0].type", {"input": [{"type": kind, "text": "x"}]})
            for kind in ("junk", [], {}, 3, None)
        ),
        ("/v1/responses", "input[0].call_id", {"input": [{"type": "function_call", "name": "x"}]}),
        (
            "/v1/responses",
            "input[1].content",
            {"input": [MESSAGE, {"type": "message", "role": "x"}]},
        ),
        ("/v1/responses", "input[0].content", {"input": [{"type": "reasoning", "content": [1]}]}),
    ],
)
def test_what_is_refused_is_named(server, path, field, sent):
    asked = {CHAT: body(), "/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}
    sent = sent if isinstance(sent, dict) else {field: sent}
    status, text, _ = server.ask(path, {**asked[path], **sent})
    assert (status, json.loads(text)["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    "sent",
    [
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [], "parallel_tool_calls": False},
        {"parallel_tool_calls": True, "suffix": None},
        {"stop": [f"no {number}" for number in range(16)]},
        {"n": 1, "logprobs": 0, "top_logprobs": 0, "echo": False},
        {"frequency_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {}, "bad_words": []},
        {"use_beam_search": False, "length_penalty": 1.0, "skip_special_tokens": True},
        {"guided_json": None, "truncate_prompt_tokens": None, "priority": 0, "user": "x" * 512},
        {"metadata": {f"{n:64}": "x" * 512 for n in range(16)}, "store": False, "seed": 3},
        {
            "service_tier": "auto",
            "prompt_cache_key": "x",
            "stream_options": {"include_usage": None},
        },
    ],
)
def test_what_changes_no_answer_is_taken(server, sent):
    found, plain = (server.answer(CHAT, **body(max_tokens=8, **more)) for more in (sent, {}))
    assert found["choices"] == plain["choices"]


@pytest.mark.parametrize(
    ("path", "kind", "asked"),
    [
        (CHAT, openai.types.chat.completion_create_params.CompletionCreateParamsBase, body()),
        ("/v1/completions", openai.types.CompletionCreateParams, {"prompt": "x"}),
        ("/v1/responses", openai.types.responses.ResponseCreateParams, {"input": "x"}),
    ],
)
def test_every_field_of_openai_is_checked(server, path, kind, asked):
    kinds = typing.get_args(kind) or (kind,)
    fields = set().union(*map(typing.get_type_hints, kinds))
    assert {"model", "user"} < fields
    taken = []
    for field in sorted(fields - {"instructions"}):
        status, text, _ = server.ask(path, {**asked, field: [[""] * 99] * 99})
        assert status in (200, 400, 404), text
        taken += [field] if status == 200 else []
    assert not taken


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{{ messages[0].content }}", False),
        ("{% if tools %}you have tools{% endif %}{{ messages[0].content }}", False),
        ("{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ messages[0].content }}", True),
        ("{{ raise_exception('no') }}", False),
    ],
)
def test_whether_a_template_shows_tools(model, template, shown):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    assert shows_tools(tokenizer) is shown


def test_a_config_that_says_nothing_else_is_taken(server):
    given = GenerationConfig(do_sample=False, max_new_tokens=3, num_beams=1, pad_token_id=0)
    asked = body(generation_config=given.to_json_string())
    del asked["max_tokens"]
    assert server.answer(CHAT, **asked)["usage"]["completion_tokens"] == 3


def test_a_client_whose_body_is_too_large_can_read_that(server):
    # The body exceeds the buffers of a connection.
    found, text, _ = server.ask(CHAT, raw=b" " * 16_000_000)
    assert (found, json.loads(text)["error"]["code"]) == (413, "too_large")


def test_connections_without_a_request_are_closed_and_more_than_fit_are_refused():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(
        app, http=limit_connections(3, 0.3, 60), lifespan="off", log_level="error"
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext
    with socket.create_server(("127.0.0.1", 0)) as bound, contextlib.ExitStack() as stack:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        stack.callback(thread.join)
        stack.callback(setattr, server, "should_exit", True)

        def connected(sent: bytes) -> socket.socket:
            found = stack.enter_context(socket.create_connection(bound.getsockname(), timeout=20))
            found.sendall(sent)
            return found

        whole = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
        silent, half = connected(b""), connected(b"GET / HTT")
        again = connected(whole)
        assert again.recv(1000).startswith(b"HTTP/1.1 200")
        again.sendall(whole[:9])
        head, _, content = connected(b"").recv(1000).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"content-length: %d" % len(content) in head
        assert json.loads(content)["error"]["code"] == "too_many_connections"
        for one in (silent, half, again):
            with contextlib.suppress(ConnectionResetError):
                assert not one.recv(1000).startswith(b"HTTP/1.1 503")
        assert connected(whole).recv(1000).startswith(b"HTTP/1.1 200")


def test_a_prompt_that_only_just_fits_is_answered(server):
    template = len("u:;a:")
    prompt = [{"role": "user", "content": "x" * (CONTEXT - template - 4)}]
    assert server.ask(CHAT, body(messages=prompt))[0] == 200
    prompt[0]["content"] += "x"
    assert server.ask(CHAT, body(messages=prompt))[0] == 400


def test_text_that_cannot_fit_is_not_made_into_tokens(server):
    most = 128 * CONTEXT
    for content, says in (("x" * most, "characters"), ("x" * (most - 9), f"{most - 4} tokens")):
        status, text, _ = server.ask(CHAT, body(messages=[{"role": "user", "content": content}]))
        error = json.loads(text)["error"]
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert says in error["message"]


def test_long_prompts_take_turns_and_short_ones_do_not_wait(tmp_path, monkeypatch):
    begun: list[str] = []
    free = threading.Event()
    make_prompts = ServedModel.make_prompts

    def make(self, request):
        begun.append(request.prompt[:6])
        assert len(request.prompt) < 100_000 or free.wait(60)
        return make_prompts(self, request)

    def ask(name: str) -> int:
        return server.ask("/v1/completions", {"prompt": name, "max_tokens": 1})[0]

    long = [f"long {n}" + "x" * 100_000 for n in range(4)]
    folder = save_chat_model(tmp_path, context=100_100)
    monkeypatch.setattr(ServedModel, "make_prompts", make)
    options = ("--cb-num-blocks", "6300")
    with hosting(folder, *options) as server, ThreadPoolExecutor(4) as pool:
        server.ask("/v1/completions", {"prompt": "first", "max_tokens": 1})
        waiting = [pool.submit(server.ask, "/tokenize", {"prompt": one}) for one in long]
        until = time.monotonic() + 60
        while len(begun) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        assert ask("short") == 200
        assert (begun[0], begun[-1], len(begun)) == ("first", "short", 4)  # two of the long ones
        free.set()
        assert [one.result()[0] for one in waiting] == [200] * 4


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((name, 200) for name in ("localhost", "LocalHost:80", "a.localhost:1", "127.8.9.1:80")),
        *((name, 200) for name in ("[::1]", "[::1]:8000")),
        *((name, 421) for name in ("evil.example", "evil.example:80", "localhost.evil.example")),
        *((name, 421) for name in ("notlocalhost", "127.0.0.1.evil.example", "10.0.0.1", "")),
    ],
)
def test_a_page_whose_name_was_rebound_gets_nothing(server, host, status):
    for path, sent in ((CHAT, body()), ("/health", None), ("/v1/models", None), ("/docs", None)):
        found, text, _ = server.ask(path, sent, headers={"host": host})
        assert found == status, text
        if status == 421:
            assert json.loads(text)["error"]["code"] == "wrong_host"


def test_no_answer_has_the_path_of_the_model(server, model):
    asked = [(path, None) for path in ("/health", "/metrics", "/v1/models", "/version", "/docs")]
    asked += [("/openapi.json", None), ("/v1/models/no", None), (CHAT, body(model="no"))]
    asked += [(CHAT, body()), (CHAT, body(max_tokens=-1)), ("/load_model", {})]
    asked += [("/v1/completions", {"prompt": "x", "max_tokens": 2})]
    asked += [("/v1/responses", {"input": "x", "max_output_tokens": 2})]
    asked += [("/tokenize", {"prompt": "x"}), ("/load_model", {"model": "no"})]
    for path, sent in asked:
        status, text, headers = server.ask(path, sent)
        assert status in (200, 400, 404)
        assert model not in text + str(headers), path
    loaded = server.ask("/load_model", {})[1].removeprefix("data:")
    name = json.loads(server.ask("/v1/models")[1])["data"][0]["id"]
    assert json.loads(loaded) == {"status": "ready", "model": name, "cached": True}


def test_detokenize_takes_what_a_request_may_hold(server):
    for count, status in ((CONTEXT, 200), (CONTEXT + 1, 400)):
        found, text, _ = server.ask("/detokenize", {"tokens": [1] * count})
        assert found == status, text


# -- clients that hold what they do not use --------------------------------------------------------


@contextlib.contextmanager
def body_without_end(server) -> Iterator[socket.socket]:
    """Send all of a body but the last kilobyte."""
    where = ("127.0.0.1", server.port)
    with contextlib.closing(socket.create_connection(where, timeout=60)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 128000\r\n"
            b"content-type: application/json\r\n\r\n" + b" " * 127_000
        )
        yield connection


def test_held_bodies_are_limited_in_bytes_and_short_requests_go_through(server):
    with contextlib.ExitStack() as stack:
        # 8 MB, and 2 MB may be held.
        held = [stack.enter_context(body_without_end(server)) for _ in range(60)]
        refused = [one for one in held if select.select([one], [], [], 0.01)[0]]
        assert 0 < len(refused) < len(held)
        for one in refused:
            answer = one.recv(4000)
            assert answer.startswith(b"HTTP/1.1 429 ")
            assert b"retry-after" in answer
        assert server.ask(CHAT, body())[0] == 200
        status, text, _ = server.ask(CHAT, raw=b" " * 127_000)
        assert (status, json.loads(text)["error"]["code"]) == (429, "too_many_bytes")
    while server.ask(CHAT, raw=b" " * 127_000)[0] == 429:
        time.sleep(0.02)  # the server has not seen yet that all have left


def test_clients_that_neither_send_nor_read_are_cut_off_and_those_that_wait_are_not(model):
    slow = body(messages=[{"role": "sloth", "content": "x"}], max_tokens=1)
    with (
        hosting(model, "--client-timeout", "1") as server, ThreadPoolExecutor(1) as pool,
        socket.socket() as deaf, body_without_end(server) as silent,
    ):  # fmt: skip
        waiting = pool.submit(server.ask, CHAT, slow)
        assert silent.recv(4000).startswith(b"HTTP/1.1 408 ")
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        deaf.settimeout(60)
        deaf.connect(("127.0.0.1", server.port))
        asked = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 500_000
        with pytest.raises(ConnectionError):
            deaf.sendall(asked)
        assert waiting.result()[0] == 200


@pytest.mark.parametrize("path", ["/reset", "/v1/audio/transcriptions", "/v1/systemone", "/else"])
def test_what_is_not_for_this_model_is_not_there(server, path):
    assert server.ask(path, {})[0] == 404
    assert server.ask(CHAT, body())[0] == 200


def test_other_content_is_refused(server):
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert server.ask(CHAT, raw=b"a=b", headers=form)[0] == 415
    assert server.ask("/load_model", {"model": "no/such"})[0] == 404


def test_requests_of_one_name_are_not_mixed_up(server):
    with ThreadPoolExecutor(4) as pool:
        same = {"x-request-id": "same"}
        questions = [body(messages=[{"role": "user", "content": letter}]) for letter in "abcd"]
        together = list(pool.map(lambda q: server.ask(CHAT, q, headers=same), questions))
    for question, (status, text, headers) in zip(questions, together, strict=True):
        assert (status, headers["x-request-id"]) == (200, "same")
        alone = json.loads(server.ask(CHAT, question)[1])
        assert json.loads(text)["choices"] == alone["choices"]


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.full)])
def test_the_pages_of_a_client_that_went_away_are_free(server, stream):
    gone = server.wait_until(requests_active=0).get('requests_total{status="499"}', 0)
    with server.leaving(CHAT, **body(messages=STORY, max_tokens=250, stream=stream)):
        server.wait_until(requests_active=1)
    left = server.cpu_ticks()
    found = server.wait_until(**{'requests_total{status="499"}': gone + 1, "requests_active": 0})
    short = server.cpu_ticks() - left
    assert found["requests_waiting"] == 0
    # All pages are free for a second request. CPU time shows that the first has ended.
    began = server.cpu_ticks()
    answer = server.answer(CHAT, **body(messages=STORY, max_tokens=250))
    assert answer["usage"]["completion_tokens"] == 250
    assert short < (server.cpu_ticks() - began) / 2


# -- access, and too many --------------------------------------------------------------------------


@pytest.fixture
def slow_steps(monkeypatch):
    """Steps of 10 ms, in which the engine leaves the CPU to the clients: requests have to wait."""
    update = ContinuousBatchProcessor.update_batch

    def update_slowly(self: ContinuousBatchProcessor) -> None:
        time.sleep(0.01)
        update(self)

    monkeypatch.setattr(ContinuousBatchProcessor, "update_batch", update_slowly)


def test_a_token_is_asked_for_and_a_crowd_is_told_to_come_again(model, slow_steps):
    key = {"HF_FP8KV_API_KEY": "sesame"}
    few = ("--max-waiting", "2", "--cb-block-size", "32", "--cb-num-blocks", "8")
    with hosting(model, "--host", "0.0.0.0", *few, environment=key) as server:
        for headers in ({}, {"authorization": "Bearer simsim"}, {"authorization": "sesame"}):
            for path, sent in ((CHAT, body()), ("/metrics", None), ("/v1/models", None)):
                status, text, _ = server.ask(path, sent, headers=headers)
                assert status == 401
                assert json.loads(text)["error"]["code"] == "invalid_api_key"
        assert server.ask("/health")[0] == 200
        shown = {"authorization": "Bearer sesame"}
        long, crowd = body(messages=STORY, max_tokens=100), []
        with ThreadPoolExecutor(24) as pool:
            # Repeat until some requests wait: a slow machine may read them one by one.
            while {status for status, _, _ in crowd} != {200, 429} and len(crowd) < 240:
                crowd += pool.map(lambda _: server.ask(CHAT, long, headers=shown), range(24))
        assert {status for status, _, _ in crowd} == {200, 429}
        assert all(h["retry-after"] for status, _, h in crowd if status == 429)
        assert server.ask("/health", headers={"host": "any.example"})[0] == 200
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame") as client:
            assert client.models.list().data[0].object == "model"


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--no-such"], 2, "No such option: --no-such"),
        (["--kv-cache-dtype", "int4"], 2, "int4"),
        (["--cb-num-blocks", "many"], 2, "integer"),
        (["--attn-implementation", "sdpa"], 2, "No such option"),
        (["--no-continuous-batching"], 2, "No such option"),
        (["--chat-template-kwargs", "5"], 2, "expected a JSON object"),
        (["--host", "0.0.0.0", "--device", "cpu"], 1, "HF_FP8KV_API_KEY"),
        (["--host", "::", "--device", "cpu"], 1, "HF_FP8KV_API_KEY"),
        (["--log-level", "loud"], 2, "--log-level"),
        (["--default-seed", str(2**70)], 2, "--default-seed"),
        (["--max-body", "0"], 1, "--max-body: expected at least 1"),
        (["--device", "toaster"], 1, "cannot load a language model"),
        (["--device", "cpu", "--dtype", "int8"], 2, "expected one of auto"),
        (["--cb-num-blocks", "0"], 2, "--cb-num-blocks"),
        (["--cb-max-memory-percent", "7"], 2, "--cb-max-memory-percent"),
        (["--cb-num-blocks", "1", "--cb-block-size", "-4"], 2, "--cb-block-size"),
    ],
)
def test_a_command_line_that_cannot_be_is_explained(run, model, monkeypatch, options, code, says):
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: pytest.fail("it serves"))
    monkeypatch.delenv("HF_FP8KV_API_KEY", raising=False)
    before = set(threading.enumerate())
    found, _, err = run("serve", model, "--port", "0", *options)
    assert found == code, err
    assert says in " ".join(err.split())
    # Pools of threads of libraries end with the process.
    new = [t for t in threading.enumerate() if t not in before and not t.daemon]
    assert not [t for t in new if not t.name.startswith(("ThreadPoolExecutor", "hf_fp8kv"))]


def test_two_servers_on_one_port_are_noticed_before_a_model_is_loaded(run, model):
    with contextlib.closing(listen("127.0.0.1", 0)) as first:  # bound, and not listening yet
        port = str(first.getsockname()[1])
        with pytest.raises(ConfigError, match="cannot listen"):
            listen("127.0.0.1", int(port))
        code, _, err = run("serve", str(model), "--port", port, "--device", "cpu")
    assert (code, "cannot listen" in err, "Traceback" in err) == (1, True, False)
    with contextlib.closing(listen("127.0.0.1", int(port))):
        pass


def test_files_that_cannot_be_served_are_explained(run, model, tmp_path):
    (tmp_path / "template").write_text("{{ messages[0].content.nothing.more }}")
    for folder, options, says in (
        (model, ["--chat-template", str(tmp_path / "template")], "--chat-template: expected a tem"),
        (tmp_path, [], "cannot load"),
        (tmp_path / "none", [], "no such folder"),
    ):
        code, _, err = run("serve", str(folder), "--port", "0", "--device", "cpu", *options)
        assert (code, says in " ".join(err.split())) == (1, True), err


def test_names_lengths_and_templates_of_ones_own(model, tmp_path):
    (tmp_path / "template").write_text("<{% for m in messages %}{{ m.content }}{% endfor %}>")
    given = ("--chat-template", str(tmp_path / "template"), "--served-model-name", "mine")
    with hosting(model, *given, "--max-model-len", "40") as server:
        assert json.loads(server.ask("/v1/models")[1])["data"][0]["id"] == "mine"
        found = json.loads(server.ask("/v1/models/mine")[1])
        assert (found["id"], found["max_model_len"]) == ("mine", 40)
        assert server.ask("/v1/models/tiny")[0] == 404
        status, text, _ = server.ask(CHAT, body(model="mine", max_tokens=4))
        assert (status, json.loads(text)["model"]) == (200, "mine")
        assert server.ask(CHAT, body(model=model))[0] == 404
        assert server.ask(CHAT, body(messages=STORY, max_tokens=1))[0] == 400
        made = json.loads(server.ask("/tokenize", {"messages": [MESSAGE]})[1])
        assert (made["count"], made["max_model_len"]) == (3, 40)
        assert json.loads(server.ask("/detokenize", {"tokens": made["tokens"]})[1]) == {
            "prompt": "<x>"
        }
        assert json.loads(server.ask("/tokenize", {"prompt": "abc"})[1])["tokens"] == [65, 66, 67]
        assert json.loads(server.ask("/version")[1])["version"] == version("hf-fp8kv")
        for path, sent in (
            ("/tokenize", {}), ("/tokenize", {"prompt": 5}), ("/tokenize", {"text": "x"}),
            ("/tokenize", {"prompt": "x", "messages": []}), ("/tokenize", {"messages": [5]}),
            ("/detokenize", {"tokens": [95]}), ("/detokenize", {"tokens": "x"}),
            ("/detokenize", {"tokens": [True]}),
        ):  # fmt: skip
            status, text, _ = server.ask(path, sent)
            assert (status, bool(json.loads(text)["error"]["message"])) == (400, True), sent


def test_processes_of_torchrun_are_refused(run, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = run("serve", str(tmp_path), "--port", "0")
    assert (code, "expected a single process" in " ".join(err.split())) == (1, True), err


# -- how it ends -----------------------------------------------------------------------------------


def test_an_engine_that_ends_ends_the_server(model, monkeypatch):
    """A supervisor has to see it, because no later request could be answered."""
    update, steps = ContinuousBatchProcessor.update_batch, []

    def fail(self: ContinuousBatchProcessor) -> None:
        steps.append(1)
        if len(steps) == 20:
            raise MemoryError("no memory for step 20")
        update(self)

    with hosting(model, "--grace", "60") as server:
        monkeypatch.setattr(ContinuousBatchProcessor, "update_batch", fail)
        with ThreadPoolExecutor(4) as pool:
            sent = body(messages=STORY, max_tokens=90)
            asked = [pool.submit(server.ask, CHAT, sent) for _ in range(4)]
            answers = [one.result() for one in asked]
        for status, text, _ in answers:
            assert status in (500, 503)  # before its thread has ended, or after
            assert "no memory for step 20" in text
        error = server.wait(30)
    assert isinstance(error, EngineError)  # the command line exits with 1 then
    assert "the engine ended: no memory for step 20; start the server again" in str(error)


@pytest.mark.parametrize(
    "hurry", [False, pytest.param(True, marks=pytest.mark.full)], ids=["once", "twice"]
)
def test_a_signal_lets_requests_finish_and_a_second_one_ends_them(model, hurry, tmp_path):
    # uvicorn would take this parser, which has no limit for headers, if it is there.
    (tmp_path / "httptools.py").write_text("HttpRequestParser = None")
    paths = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    options = ("--grace", "100", "--metrics-interval", "0.1")
    with (
        serving(model, *options, environment=paths) as server, ThreadPoolExecutor(1) as pool,
    ):  # fmt: skip
        endless = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        with contextlib.closing(endless), pytest.raises(ConnectionError):
            endless.sendall(b"GET /health HTTP/1.1\r\nx: y\r\n" + b"x: %1000d\r\n" % 1 * 16_000)
        answer = pool.submit(server.ask, CHAT, body(messages=STORY, max_tokens=270, stream=True))
        server.wait_until(requests_active=1)
        server.wait_for(
            r"INFO: +requests: \d+ active, \d+ waiting, \d+ answered; [\d.]+ tokens/s; "
            rf"pages: \d+ of {PAGES} used, \d+ tokens, .* of .*; prefixes: \d+ hits, \d+ tokens"
        )
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("stopping: 1 requests get 100 s")
        status, text, headers = server.ask(CHAT, body())
        assert (status, json.loads(text)["error"]["code"]) == (503, "stopping")
        assert headers["retry-after"]
        status, text, _ = server.ask("/health")
        assert (status, json.loads(text)["status"]) == (503, "unhealthy")
        assert json.loads(text)["error"]["code"] == "stopping"
        if hurry:
            server.process.send_signal(signal.SIGTERM)
        *_, last = events(answer.result()[1])
        assert server.process.wait(120) == 0
        server.wait_for("Finished server process")
        assert "Traceback" not in server.log
        assert "/metrics HTTP" in server.log
        assert "/health" not in server.log
    if hurry:
        assert last["error"]["code"] == "stopping"
        assert last["error"]["type"] == "server_error"
    else:
        assert last["choices"][0]["finish_reason"] == "length"
        assert last["usage"]["completion_tokens"] == 270
