"""Fields of requests: log probabilities, penalties, several answers, forced tools, ..."""

import asyncio
import json
from collections import Counter
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tests.helpers.serve_process import (
    CONTEXT,
    PAGE,
    Endpoint,
    generate,
    hosting,
    ids,
    save_chat_model,
)
from tests.helpers.serving_tools import OpenAIPenalties

pytestmark = pytest.mark.text

pytest.importorskip("fastapi", reason="needs the extra serve")
from transformers.cli.serving.utils import build_response_parser  # noqa: E402

from hf_fp8kv.server import sampling  # noqa: E402
from hf_fp8kv.server.choices import Choice, Visit  # noqa: E402
from hf_fp8kv.server.structured import Grammars  # noqa: E402
from hf_fp8kv.server.text import AnswerText  # noqa: E402

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
# Renders the tools and the last message.
TEMPLATE = (
    "{% for t in tools or [] %}{{ (t.function or t).name }};{% endfor %}{{ messages[-1].content }}"
)
QUESTION = [{"role": "user", "content": "why"}]
PROMPT = "the pages of a cache are stored in eight bits, and this prompt has more than one step"
MARGIN = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("fields"))


@pytest.fixture(scope="module")
def model(folder):
    return LlamaForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    with hosting(folder, "--kv-cache-dtype", "auto", "--chat-template", str(template)) as server:
        yield server


def choices(server: Endpoint, path: str = COMPLETIONS, **body: object) -> list[dict]:
    """Return the choices of an answer. Join the parts of a streamed answer."""
    answer = server.answer(path, **body)
    if not body.get("stream"):
        return answer["choices"]
    found: dict[int, dict] = {}
    for event in answer:
        for choice in event["choices"]:
            one = found.setdefault(choice["index"], {"text": "", "calls": [], "logprobs": []})
            delta = choice.get("delta", {})
            one["text"] += choice.get("text") or delta.get("content") or ""
            one["calls"] += delta.get("tool_calls", [])
            one["logprobs"].append(choice.get("logprobs"))
            one["finish_reason"] = choice.get("finish_reason")
    return [found[index] for index in sorted(found)]


@torch.inference_mode()
def logprobs_of(model, tokens: list[int]) -> torch.Tensor:
    """Return the log probabilities of the token after each token, `[T, V]`."""
    return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


# -- log probabilities -----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.5, "seed": 4, "top_k": 3}])
def test_log_probabilities_of_prompt_and_answer_are_the_models(server, model, stream, sampled):
    assert len(PROMPT) > 64 + PAGE  # more than a step, and the second time in the pages
    for _ in range(2):
        (found,) = choices(
            server, prompt=PROMPT, max_tokens=9, logprobs=3, echo=True, stream=stream,
            frequency_penalty=1.0, **sampled,
        )  # fmt: skip
        assert found["text"].startswith(PROMPT)
        parts = found["logprobs"] if stream else [found["logprobs"]]
        joined = {name: [*chain.from_iterable(p[name] for p in parts)] for name in parts[0]}
        tokens = ids(found["text"])
        assert len(tokens) == len(PROMPT) + 9
        assert joined["tokens"] == list(found["text"])
        assert joined["text_offset"] == list(range(len(tokens)))
        expected = logprobs_of(model, tokens)
        assert joined["token_logprobs"][0] is None is joined["top_logprobs"][0]
        own = expected[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(joined["token_logprobs"][1:]), own, **MARGIN)
        best = expected[:-1].topk(3).values
        for row, top in enumerate(joined["top_logprobs"][1:]):
            values = sorted(top.values(), reverse=True)
            torch.testing.assert_close(torch.tensor(values[:3]), best[row], **MARGIN)
            assert joined["tokens"][row + 1] in top
            assert len(top) in (3, 4)


def test_log_probabilities_of_a_chat_and_of_its_prompt(server, model):
    asked = {"messages": QUESTION, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    answer = server.answer(CHAT, **asked, prompt_logprobs=1)
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(one["token"] for one in content) == answer["choices"][0]["message"]["content"]
    tokens = ids("why" + answer["choices"][0]["message"]["content"])
    expected = logprobs_of(model, tokens)
    for place, one in enumerate(content, 2):
        torch.testing.assert_close(one["logprob"], expected[place].max().item(), **MARGIN)
        assert one["top_logprobs"][0] == {k: one[k] for k in ("token", "logprob", "bytes")}
        assert bytes(one["bytes"]).decode() == one["token"]
        assert len(one["top_logprobs"]) == 2
    first, *others = answer["prompt_logprobs"]
    assert first is None
    for place, one in enumerate(others):
        found = one[str(tokens[place + 1])]
        own = expected[place, tokens[place + 1]]
        torch.testing.assert_close(found["logprob"], own.item(), **MARGIN)
        assert found["rank"] == 1 + int((expected[place] > own).sum())
    (streamed,) = choices(server, CHAT, **asked, stream=True)
    parts = [part["content"] for part in streamed["logprobs"] if part]
    assert [one["token"] for one in chain.from_iterable(parts)] == [one["token"] for one in content]
    assert max(map(len, parts)) == 1


def test_a_suffix_of_nothing_is_no_part_of_a_stream(server):
    asked = {"prompt": PROMPT, "max_tokens": 3, "logprobs": 1, "stream": True}
    (plain,) = choices(server, **asked)
    (found,) = choices(server, **asked, suffix="")
    assert found == plain


def test_a_prompt_alone_is_scored(server, model):
    asked = {"prompt": [ids("first"), ids("second one")], "max_tokens": 0, "echo": True}
    found = server.answer(COMPLETIONS, **asked, logprobs=1)
    assert found["usage"]["completion_tokens"] == 0
    assert [one["text"] for one in found["choices"]] == ["first", "second one"]
    assert {one["finish_reason"] for one in found["choices"]} == {"length"}
    for one in found["choices"]:
        tokens = ids(one["text"])
        own = logprobs_of(model, tokens)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])
        given = torch.tensor(one["logprobs"]["token_logprobs"][1:])
        torch.testing.assert_close(given, own[:, 0], **MARGIN)
    streamed = choices(server, **asked, logprobs=1, stream=True)
    assert [one["text"] for one in streamed] == ["first", "second one"]
    assert {one["finish_reason"] for one in streamed} == {"length"}
    whole = "x" * CONTEXT  # the length of the model
    (scored,) = choices(server, **asked | {"prompt": whole}, logprobs=0)
    assert (scored["text"], len(scored["logprobs"]["tokens"])) == (whole, CONTEXT)
    assert server.ask(COMPLETIONS, {**asked, "prompt": whole + "x"})[0] == 400


def test_what_cannot_follow_has_a_number_in_json():
    never = float("-inf")
    (one,) = sampling.score_tokens(torch.tensor([[0.0, never, 0.0]]), [1], 3)
    assert one.rank == 3
    assert one.logprob == -9999
    assert sorted(value for _, value in one.top)[0] == -9999


def test_scores_of_a_request_that_is_computed_again_are_its_own():
    """The engine counts the tokens of a step in `position_offset` before."""
    wanted = sampling.Sequence([5, 6, 7], 9, prompt_top=1)
    state = SimpleNamespace(logit_processor_kwargs={"sequence": wanted}, position_offset=4)
    other = SimpleNamespace(logit_processor_kwargs={"sequence": sampling.Sequence([5], 9)})
    requests = [SimpleNamespace(state=one, query_length=4) for one in (other, state)]
    (span,) = sampling._find_spans(requests)
    assert (span.sequence, span.first, span.position, span.tokens) == (wanted, 4, 1, [6, 7])
    state.position_offset = 6
    assert sampling._find_spans(requests) == []


# -- several answers -------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_several_answers_are_those_of_the_next_seeds(server, path, stream):
    asked = {"messages": QUESTION} if path == CHAT else {"prompt": PROMPT}
    asked |= {"max_tokens": 10, "temperature": 1.2, "stream": stream}

    def texts(**more: object) -> list[str]:
        found = choices(server, path, **asked, **more)
        return [one.get("message", {}).get("content") or one["text"] for one in found]

    more = {"best_of": 3} if path == COMPLETIONS else {}
    several = texts(n=3, seed=2**63 - 2, **more)
    alone = [texts(seed=seed)[0] for seed in (2**63 - 2, 2**63 - 1, -(2**63))]
    assert several == alone
    assert len(set(several)) == 3


def test_a_prompt_of_several_answers_counts_once_and_is_computed_once(server):
    prompt = "z" * (3 * PAGE + 1)
    found = server.answer(COMPLETIONS, prompt=[prompt, "ab"], n=3, max_tokens=4)
    assert found["usage"]["prompt_tokens"] == len(prompt) + 2
    assert found["usage"]["completion_tokens"] == 24
    assert found["usage"]["total_tokens"] == len(prompt) + 2 + 24
    assert [one["index"] for one in found["choices"]] == list(range(6))
    before = server.metrics()
    server.answer(COMPLETIONS, prompt="y" + prompt, n=3, max_tokens=4)
    after = server.metrics()
    assert after["prefix_hits_total"] - before["prefix_hits_total"] == 2


def test_other_answers_do_not_wait_for_the_end_of_the_first(server):
    asked = {"prompt": PROMPT, "max_tokens": 120, "n": 2, "stream": True}
    order = [event["choices"][0] for event in server.answer(COMPLETIONS, **asked)]
    ends = [one["index"] for one in order if one.get("finish_reason")]
    begins = next(place for place, one in enumerate(order) if one["index"] == 1)
    assert sorted(ends) == [0, 1]
    assert begins < next(place for place, one in enumerate(order) if one.get("finish_reason"))


def test_prompts_of_a_list_and_of_tokens_are_answered_as_alone(server):
    prompts = ["one", "two and more", "three"]
    alone = [choices(server, prompt=prompt, max_tokens=8)[0]["text"] for prompt in prompts]
    for given in (prompts, [ids(p) for p in prompts], [prompts[0], ids(prompts[1]), prompts[2]]):
        for stream in (False, True):
            found = choices(server, prompt=given, max_tokens=8, stream=stream)
            assert [one["text"] for one in found] == alone
    assert choices(server, prompt=ids("one"), max_tokens=8)[0]["text"] == alone[0]
    (echoed,) = choices(server, prompt=ids("one"), max_tokens=8, echo=True)
    assert echoed["text"] == "one" + alone[0]


def test_prompts_that_fit_one_by_one_are_answered_together(server):
    found = choices(server, prompt=["x" * 300] * 140, max_tokens=1)  # 42,000 characters
    assert len(found) == 140
    assert len({one["text"] for one in found}) == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_of_several_answers_has_usage_if_that_is_asked_for(server, path):
    asked = {"messages": QUESTION} if path == CHAT else {"prompt": "abc"}
    asked |= {"max_tokens": 2, "n": 2, "stream": True}
    plain, (*parts, last) = (
        server.answer(path, **asked, **more)
        for more in ({}, {"stream_options": {"include_usage": True}})
    )
    assert all(event["choices"] for event in plain)
    assert [len({event["id"] for event in one}) for one in (plain, [*parts, last])] == [1, 1]
    assert not any("usage" in event for event in plain + parts)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("count", [1, 3])
def test_answers_of_one_request_leave_room_for_others(folder, count):
    """At most 16 of 60 answers run at once. Answers to a prompt wait for its first answer."""
    running, most = 0, 0
    begun: list[int] = []

    class Engine:
        async def stream(self, sequence, *, each_token):
            nonlocal running, most
            begun.append(sequence.prompt[0])
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            yield [1]
            await asyncio.sleep(0)
            running -= 1

    tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    choices = [
        Choice(at, at % count == 0, sampling.Sequence([at], 1), AnswerText(tokenizer))
        for at in range(60)
    ]

    async def run() -> int:
        visit = Visit(Engine(), SimpleNamespace(unfinished=Counter(), note_end=lambda _: None))
        return sum([len(parts) async for parts in visit.run(choices, streaming=False)])

    assert asyncio.run(run()) == 120  # a part of text for each, and an end
    assert most == 16
    assert [one.finish_reason for one in choices] == ["length"] * 60
    for at in begun:
        assert begun.index(at - at % count) <= begun.index(at)


def test_what_answers_share_is_made_once(server, monkeypatch):
    made, compile_grammar = [], Grammars.compile
    monkeypatch.setattr(
        Grammars,
        "compile",
        lambda self, request: made.append(request) or compile_grammar(self, request),
    )
    asked = {"prompt": PROMPT, "max_tokens": 10, "temperature": 1.2, "repetition_penalty": 1.5}
    asked |= {"structured_outputs": {"regex": "[a-f]{3,10}[g-z]{5}"}}
    several = [one["text"] for one in choices(server, **asked, n=3, seed=4)]
    assert len(made) == 1
    assert several == [choices(server, **asked, seed=seed)[0]["text"] for seed in (4, 5, 6)]
    assert len(set(several)) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_with_one_of_several_is_the_error_of_all(server, stream):
    sent = {"prompt": ["fine", "x" * 400], "max_tokens": 4, "stream": stream}
    status, text, _ = server.ask(COMPLETIONS, sent)
    if status == 200:  # the first had begun
        text = text.split("data: ")[-2]
    else:
        assert status == 400
    assert json.loads(text)["error"]["code"] == "context_length_exceeded"
    assert server.wait_until(requests_active=0)["requests_waiting"] == 0


# -- rules of logits -------------------------------------------------------------------------------


def test_penalties_and_biases_are_those_of_generate(server, model):
    plain = generate(model, PROMPT, 40)
    bias = dict.fromkeys(ids(plain[:2]), -3.0) | {7: 2.5}
    biases = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    cases = [
        ({"repetition_penalty": 1.4}, [RepetitionPenaltyLogitsProcessor(1.4)]),
        (
            {"presence_penalty": 0.8, "frequency_penalty": 0.6},
            [OpenAIPenalties(len(PROMPT), 0.8, 0.6)],
        ),
        ({"logit_bias": {str(token): value for token, value in bias.items()}}, [biases]),
    ]
    for fields, processors in cases:
        expected = generate(model, PROMPT, 40, *processors)
        assert expected != plain
        (completion,) = choices(server, prompt=PROMPT, max_tokens=40, **fields)
        response = server.answer(RESPONSES, input=PROMPT, max_output_tokens=40, **fields)
        for found in (completion, response["output"][0]["content"][0]):
            # "?" is the tokenizer's special token.
            assert found["text"] == expected.replace("?", ""), fields


def test_tokens_and_words_that_must_not_come(server, model):
    plain = generate(model, PROMPT, 40)
    letter, pair = plain[0], plain[10:12]
    (found,) = choices(server, prompt=PROMPT, max_tokens=40, bad_words=[letter, pair])
    assert letter not in found["text"]
    assert pair not in found["text"]
    assert pair[0] in found["text"] or pair[0] == letter


@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.full)])
def test_tokens_end_an_answer_and_not_too_early(server, model, stream):
    plain = generate(model, PROMPT, 60)
    end = plain[12]
    first, second = plain.index(end), plain.index(end, plain.index(end) + 1)
    asked = {"prompt": PROMPT, "max_tokens": 60, "stream": stream}
    asked["stop_token_ids"] = ids(end)
    (found,) = choices(server, **asked)
    assert (found["text"], found["finish_reason"]) == (plain[:first], "stop")
    (later,) = choices(server, **asked, min_tokens=first + 1)
    assert len(later["text"]) >= first + 1
    assert end not in later["text"]
    (stopped,) = choices(
        server, prompt=PROMPT, max_tokens=60, stream=stream, stop=end, min_tokens=first + 1
    )
    assert stopped["text"] == plain[:second]


@pytest.mark.parametrize("stream", [False, True])
def test_words_that_leave_no_token_are_the_fault_of_the_request(server, stream):
    forms = {"structured_outputs": {"choice": ["ab", "b"]}, "bad_words": ["a", "b"]}
    status, text, _ = server.ask(COMPLETIONS, {"prompt": "hi", "stream": stream, **forms})
    assert status == (200 if stream else 400)
    error = json.loads(text.removeprefix("data: ").split("\n\n")[0])["error"]
    assert error["param"] == "structured_outputs.choice"
    assert "bad_words" in error["message"]


# -- forced tools, and stops where answers have a form ---------------------------------------------

WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"day": {"$ref": "#/$defs/day"}},
        "required": ["day"],
        "additionalProperties": False,
        "$defs": {"day": {"enum": ["today", "tomorrow"]}},
    },
}
CLOCK = {
    "name": "clock",
    "parameters": {
        "type": "object",
        "properties": {"zone": {"$ref": "#/$defs/day"}},
        "required": ["zone"],
        "additionalProperties": False,
        "$defs": {"day": {"type": "integer", "minimum": 0, "maximum": 9}},
    },
}
TOOLS = [{"type": "function", "function": one} for one in (WEATHER, CLOCK)]


def is_call(call: dict) -> bool:
    given = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "clock":
        return given.keys() == {"zone"} and given["zone"] in range(10)
    return given.keys() == {"day"} and given["day"] in ("today", "tomorrow")


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.full), True])
def test_tools_that_must_be_called_are_called(server, stream):
    asked = {"messages": QUESTION, "tools": TOOLS, "max_tokens": 150, "stream": stream}
    names = set()
    for seed in range(6):
        (found,) = choices(
            server, CHAT, **asked, tool_choice="required", parallel_tool_calls=False,
            temperature=1.5, seed=seed,
        )  # fmt: skip
        calls = found["calls"] if stream else found["message"]["tool_calls"]
        assert len(calls) == 1
        assert all(map(is_call, calls))
        assert found["finish_reason"] == "tool_calls"
        names.add(calls[0]["function"]["name"])
    assert names == {"weather", "clock"}
    named = {"type": "function", "function": {"name": "clock"}}
    (found,) = choices(server, CHAT, **asked, tool_choice=named)
    calls = found["calls"] if stream else found["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["clock"]
    assert is_call(calls[0])
    (cut,) = choices(server, CHAT, **asked | {"max_tokens": 4}, tool_choice=named)
    assert cut["finish_reason"] == "length"


def test_parameters_that_are_no_schema_are_refused(server):
    nested = {"type": "null"}
    for _ in range(350):
        nested = {"type": "object", "properties": {"a": nested}}
    for path in (CHAT, RESPONSES):
        asked = {"messages": QUESTION} if path == CHAT else {"input": "why"}
        for parameters in ("x", [1], 3, nested):
            function = {"name": "f", "parameters": parameters}
            tool = {"type": "function"} | ({"function": function} if path == CHAT else function)
            body = {**asked, "tools": [tool], "tool_choice": "required"}
            status, text, _ = server.ask(path, body)
            assert status == 400, text


@pytest.mark.parametrize("calls", [None, []])
def test_a_message_that_calls_nothing_keeps_its_content(server, calls):
    """As `model_dump()` writes an answer of OpenAI's client."""
    said = {"role": "assistant", "content": PROMPT, "refusal": None, "function_call": None}
    (plain,) = choices(server, CHAT, messages=[said], max_tokens=8)
    (found,) = choices(server, CHAT, messages=[said | {"tool_calls": calls}], max_tokens=8)
    assert found == plain
    asked = {"messages": [said | {"tool_calls": calls}]}
    assert server.answer("/tokenize", **asked)["tokens"] == ids(PROMPT)


def test_a_response_calls_its_tool(server):
    tools = [{"type": "function", **one} for one in (WEATHER, CLOCK)]
    choice = {"type": "function", "name": "weather"}
    asked = {"input": "why", "tools": tools, "tool_choice": choice, "max_output_tokens": 60}
    calls = server.answer(RESPONSES, **asked)["output"]
    calls = [item for item in calls if item["type"] == "function_call"]
    assert [call["name"] for call in calls] == ["weather"]
    assert json.loads(calls[0]["arguments"])["day"] in ("today", "tomorrow")


def test_a_call_that_must_be_is_not_in_the_form_of_texts(server):
    """Instructor sends both: OpenAI's `response_format` applies to texts, not to calls."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    named = {"type": "function", "function": {"name": "clock"}}
    asked = {"messages": QUESTION, "tools": TOOLS, "max_tokens": 150, "tool_choice": named}
    (found,) = choices(server, CHAT, **asked, response_format=form)
    assert is_call(found["message"]["tool_calls"][0])


def test_the_beginning_of_a_list_of_calls_is_not_lost(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer

    def read(text: str) -> list[object]:
        answer = AnswerText(tokenizer, forced="")
        assert answer.put(ids(text)) == []
        return [part.text or (part.call[0], json.loads(part.call[1])) for part in answer.end()]

    assert read('[{"name": "f", "param') == ['[{"name": "f", "param']
    assert read('[{"name": "f", "parameters": {"x": 1}}]') == [("f", {"x": 1})]
    cut = '[{"name": "f", "parameters": {"x": "], "}}, {"name": "g", "parameters": {"y'
    assert read(cut) == [("f", {"x": "], "})]
    whole = '[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {"y": []}}]'
    assert read(whole) == [("f", {}), ("g", {"y": []})]
    assert read("") == []


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "nobody"}}}),
        ("tool_choice", {"tool_choice": "sometimes"}),
        ("tool_choice", {"tool_choice": {"type": "function"}}),
        ("parallel_tool_calls", {"parallel_tool_calls": False}),
        (
            "structured_outputs.json_object",
            {"tool_choice": "required", "structured_outputs": {"json_object": True}},
        ),
    ],
)
def test_a_choice_of_tools_that_cannot_be_is_refused(server, field, fields):
    status, text, _ = server.ask(CHAT, {"messages": QUESTION, "tools": TOOLS, **fields})
    assert (status, json.loads(text)["error"]["param"]) == (400, field)


# -- parts by themselves ---------------------------------------------------------------------------


def test_rules_count_each_token_of_prompt_and_answer():
    prompt, answer = [1, 2, 2], [4, 5, 5]
    sequence = sampling.Sequence(prompt, 9, frozenset({9, 400}), answer=answer)

    def change(**rules: object) -> list[float]:
        scores = torch.tensor([3.0, -2.0] * 5)
        sequence.kept.clear()
        sampling.TokenRules(**rules).apply(scores, sequence)
        return (scores - torch.tensor([3.0, -2.0] * 5)).tolist()

    assert change(presence_penalty=0.5) == [0, 0, 0, 0, -0.5, -0.5, 0, 0, 0, 0]
    assert change(frequency_penalty=0.5) == [0, 0, 0, 0, -0.5, -1.0, 0, 0, 0, 0]
    assert change(repetition_penalty=2.0) == [0, -2, -1.5, 0, -1.5, -2, 0, 0, 0, 0]
    assert change(logit_bias={3: 1.5, 5: -1}) == [0, 0, 0, 1.5, 0, -1, 0, 0, 0, 0]
    never = float("-inf")
    assert change(min_tokens=3) == [0] * 10
    assert change(min_tokens=4) == [0] * 9 + [never]
    words = ((5, 7), (5, 5, 6), (4, 8), (2, 4, 5, 5, 3), (0,))
    assert change(bad_words=words) == [never, 0, 0, 0, 0, 0, never, never, 0, 0]
    sequence.kept.clear()
    rules = sampling.TokenRules(repetition_penalty=2.0, logit_bias={6: 1.5})
    for tokens in (answer, [*answer, 0]):  # what stays the same is kept from step to step
        fresh = sampling.Sequence(prompt, 9, answer=tokens)
        sequence.answer = tokens
        given, expected = torch.ones(10), torch.ones(10)
        rules.apply(given, sequence)
        rules.apply(expected, fresh)
        assert given.tolist() == expected.tolist()
    assert given[0] == 0.5
    assert not sampling.TokenRules()
    assert sampling.TokenRules(min_tokens=1)


class Parser:
    """Parse thoughts between brackets, with the interface of transformers' parsers."""

    initial_events: tuple[dict, ...] = ()

    def __init__(self) -> None:
        self.field = "content"

    def feed(self, text: str) -> list[dict]:
        events = []
        for letter in text:
            if letter in "[]":
                self.field = "thinking" if letter == "[" else "content"
            else:
                events.append({"type": "region_chunk", "field": self.field, "text": letter})
        return events

    def finalize(self) -> tuple[None, list[dict]]:
        return None, []


def test_bytes_that_are_no_text_end_no_answer():
    """Random answers with tokens for single bytes, as in models of SentencePiece."""
    vocabulary = {"a": 0, "b": 1, "\u2581c": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    generator, failed = torch.Generator().manual_seed(0), 0
    for _ in range(400):
        noise = torch.randint(3 + 128, 3 + 248, (12,), generator=generator).tolist()
        tokens = [0, *noise, 2, 1, 0, 2]
        answer, stream = AnswerText(inner, stops=["b"]), DecodeStream([], skip_special_tokens=True)
        text = "".join(part.text for part in answer.put(tokens))
        assert answer.stopped
        assert answer.end() == []
        assert text.startswith("a")
        assert text.endswith(" c")
        try:
            for token in tokens:
                stream.step(inner, token)
        except Exception:
            failed += 1
    assert failed > 10  # the tested case does occur


@pytest.mark.parametrize(("parser", "thoughts"), [(None, ""), (Parser(), "so it is")])
def test_a_stop_string_ends_an_answer_that_is_parsed(folder, parser, thoughts):
    tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    answer = AnswerText(tokenizer, stops=("]END",), parser=parser)
    text = "[so it is]EN[]END and more"
    parts = []
    for token in ids(text):
        if not answer.stopped:
            parts += answer.put([token])
    parts += answer.end()
    assert "".join(part.thought for part in parts) == thoughts
    assert "".join(part.text for part in parts) == ("EN" if parser else "[so it is]EN[")
    assert [part.tokens for part in parts] == sorted(part.tokens for part in parts)
    assert answer.tokens == text.index("]END") + 4


@pytest.mark.parametrize("at_once", [False, True])
def test_thoughts_and_calls_in_the_form_of_a_model(folder, at_once):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = SimpleNamespace(config=SimpleNamespace(model_type="qwen3"))
    parser = build_response_parser(tokenizer, model, [])
    answer = AnswerText(tokenizer.backend_tokenizer, parser=parser)
    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    tokens = ids(f"<think>so</think>well{call}{call}")
    parts = []
    for some in [tokens] if at_once else [[token] for token in tokens]:
        parts += answer.put(some)
    parts += answer.end()
    assert "".join(part.thought for part in parts) == "so"
    assert "".join(part.text for part in parts) == "well"
    assert [part.call for part in parts if part.call] == [("f", '{"x": 1}')] * 2
    assert answer.calls == 2


def test_an_answer_that_is_no_whole_message_keeps_its_text(folder):
    class Broken(Parser):
        def finalize(self):
            raise ValueError("no whole message")

    tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    answer = AnswerText(tokenizer, parser=Broken())
    parts = [*answer.put(ids("[so]half")), *answer.end()]
    assert "".join(part.text for part in parts) == "half"
    assert "".join(part.thought for part in parts) == "so"


def test_tokens_that_complete_no_character_are_not_lost():
    vocabulary = {"a": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    answer = AnswerText(inner)
    parts = [*answer.put([0, 1 + 0xC3]), *answer.end()]
    assert "".join(part.text for part in parts) == "a\ufffd"
