"""Tests of request fields, such as log-probabilities, penalties, several answers and tools."""

import json
import shutil
from collections import defaultdict
from itertools import chain
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tests.helpers.serve_process import (
    CHAT,
    COMPLETIONS,
    CONTEXT_LENGTH,
    PAGE_SIZE,
    RESPONSES,
    STEP_TOKENS,
    HostedServer,
    RunningServer,
    encode,
    generate_stock,
    save_chat_model,
)
from tests.helpers.serving_tools import OpenAIPenalties

pytestmark = pytest.mark.text

pytest.importorskip("starlette", reason="needs the extra serve")
from transformers.cli.serving.utils import build_response_parser  # noqa: E402

from hf_fp8kv.server import sampling  # noqa: E402
from hf_fp8kv.server.answer_text import AnswerDecoder, AnswerPart  # noqa: E402

# The template renders the names of the tools and the last message.
TEMPLATE = (
    "{% for t in tools or [] %}{{ (t.function or t).name }};{% endfor %}{{ messages[-1].content }}"
)
MESSAGES = [{"role": "user", "content": "why"}]
PROMPT = "the pages of a cache are stored in eight bits, and this prompt has more than one step"
LOGPROB_TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture(scope="module")
def model(folder):
    return LlamaForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    with HostedServer(
        folder, "--kv-cache-dtype", "auto", "--chat-template", str(template)
    ) as server:
        yield server


def get_choices(server: RunningServer, path: str = COMPLETIONS, **fields: object) -> list[dict]:
    """Return the text, calls, parts of log-probabilities and finish reason of each choice."""
    response = server.answer(path, **fields)
    choices: dict[int, dict] = defaultdict(lambda: {"text": "", "calls": [], "logprobs": []})
    events = response if fields.get("stream") else [response]
    for event in events:
        for part in event["choices"]:
            choice = choices[part["index"]]
            message = part.get("delta") or part.get("message") or {}
            choice["text"] += part.get("text") or message.get("content") or ""
            choice["calls"] += message.get("tool_calls") or []
            choice["logprobs"] += [part["logprobs"]] if part.get("logprobs") else []
            choice["finish_reason"] = part.get("finish_reason")
    return [choices[index] for index in sorted(choices)]


def join_logprobs(choice: dict) -> dict[str, list]:
    """Return the log-probabilities of a choice of a completion, joined if it was streamed."""
    parts = choice["logprobs"]
    return {name: list(chain.from_iterable(part[name] for part in parts)) for name in parts[0]}


def list_token_logprobs(choice: dict) -> list[dict]:
    return list(chain.from_iterable(part["content"] for part in choice["logprobs"]))


@torch.inference_mode()
def compute_logprobs(model, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


@pytest.mark.parametrize(
    ("stream", "options"), [(False, {}), (True, {"temperature": 1.5, "seed": 4, "top_k": 3})]
)
def test_logprobs_of_prompt_and_answer_match_the_model(server, model, stream, options):
    assert len(PROMPT) > STEP_TOKENS + PAGE_SIZE  # cached in the second request
    for _ in range(2):
        (choice,) = get_choices(
            server, prompt=PROMPT, max_tokens=9, logprobs=3, echo=True, stream=stream,
            frequency_penalty=1.0, **options,
        )  # fmt: skip
        assert choice["text"].startswith(PROMPT)
        logprobs = join_logprobs(choice)
        tokens = encode(choice["text"])
        assert len(tokens) == len(PROMPT) + 9
        assert logprobs["tokens"] == list(choice["text"])
        assert logprobs["text_offset"] == list(range(len(tokens)))
        expected = compute_logprobs(model, tokens)
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        token_logprobs = expected[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor(logprobs["token_logprobs"][1:]), token_logprobs, **LOGPROB_TOLERANCE
        )
        for row, top in enumerate(logprobs["top_logprobs"][1:]):
            torch.testing.assert_close(
                torch.tensor(sorted(top.values(), reverse=True)[:3]),
                expected[row].topk(3).values,
                **LOGPROB_TOLERANCE,
            )
            assert logprobs["tokens"][row + 1] in top
            assert len(top) in (3, 4)


def test_logprobs_of_a_chat_match_the_model(server, model):
    fields = {"messages": MESSAGES, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    (choice,) = get_choices(server, CHAT, **fields)
    tokens = list_token_logprobs(choice)
    assert "".join(token_logprob["token"] for token_logprob in tokens) == choice["text"]
    expected_logprobs = compute_logprobs(model, encode("why" + choice["text"]))
    for position, token_logprob in enumerate(tokens, 2):
        torch.testing.assert_close(
            token_logprob["logprob"], expected_logprobs[position].max().item(), **LOGPROB_TOLERANCE
        )
        assert token_logprob["top_logprobs"][0] == {
            name: token_logprob[name] for name in ("token", "logprob", "bytes")
        }
        assert bytes(token_logprob["bytes"]).decode() == token_logprob["token"]
        assert len(token_logprob["top_logprobs"]) == 2
    (streamed,) = get_choices(server, CHAT, **fields, stream=True)
    streamed_parts = [part["content"] for part in streamed["logprobs"] if part["content"]]
    assert {len(part) for part in streamed_parts} == {1}
    assert [token_logprob["token"] for (token_logprob,) in streamed_parts] == [
        token_logprob["token"] for token_logprob in tokens
    ]


def make_tokenizer(decoder: str) -> Tokenizer:
    """Return a tokenizer with this type of decoder. Some tokens are parts of characters."""
    if decoder == "ByteLevel":
        vocabulary = {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
        merges = [("\u00f0", "\u0141"), ("R", "o"), ("Ro", "m"), ("\u0120", "Rom")]
        vocabulary |= {"".join(pair): 256 + index for index, pair in enumerate(merges)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        words = [
            "\u2581", "\u2581a", "a", "b", "\u00e9", "\u2581Rome", "\u2581b",
            *(f"<0x{byte:02X}>" for byte in range(256)),
        ]  # fmt: skip
        vocabulary = {word: index for index, word in enumerate(words)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        tokenizer.decoder = decoders.Sequence([
            decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ])  # fmt: skip
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


@pytest.fixture(scope="module", params=["ByteLevel", "ByteFallback"])
def byte_server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    backend = make_tokenizer(request.param)
    save_chat_model(folder, vocab_size=backend.get_vocab_size())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(folder)
    with HostedServer(str(folder), "--kv-cache-dtype", "auto") as server:
        yield server, request.param


@pytest.mark.parametrize(
    ("fields", "stream"),
    [
        ({"prompt": "a b"}, False),
        ({"prompt": "a b \U0001f30d Rome", "echo": True}, False),
        ({"prompt": [0, 3, 2, 5, 8], "echo": True}, True),
    ],
)
def test_offsets_index_the_text_and_no_alternative_is_lost(byte_server, fields, stream):
    server, decoder = byte_server
    num_partial_tokens = 0
    for seed in range(2):
        (choice,) = get_choices(
            server, **fields, max_tokens=40, logprobs=6, temperature=1.9, seed=seed, stream=stream
        )
        text = choice["text"]
        logprobs = join_logprobs(choice)
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
        for token, logprob, top, offset in zip(*logprobs.values(), strict=True):
            if token.startswith("bytes:"):
                num_partial_tokens += 1
                assert ord(text[offset]) > 127
            elif token.strip() != "<s>" and (decoder == "ByteLevel" or len(token) > 1):
                # ByteFallback may write U+FFFD for valid bytes next to invalid bytes.
                assert text[offset:].startswith(token)
            if logprob is not None:
                assert top[token] == logprob
                assert len(top) in (6, 7)
    assert num_partial_tokens


def test_an_unknown_character_of_a_prompt_does_not_shift_offsets(server):
    prompt = "a \U0001f30d\u00e9b"
    (choice,) = get_choices(server, prompt=prompt, max_tokens=3, logprobs=0, echo=True)
    assert choice["text"].startswith(prompt)
    logprobs = join_logprobs(choice)
    assert logprobs["tokens"][:5] == ["a", " ", "?", "?", "b"]
    assert logprobs["text_offset"] == list(range(8))


@pytest.mark.parametrize("stream", [False, True])
def test_the_bytes_of_tokens_are_the_text(byte_server, stream):
    server, _ = byte_server
    text = "Rome \U0001f30d\U0001f534 \u00e9 \U0001f9d1\u200d\U0001f680"
    fields = {
        "messages": MESSAGES, "max_tokens": 60, "logprobs": True, "top_logprobs": 3,
        "structured_outputs": {"choice": [text]},
    }  # fmt: skip
    (choice,) = get_choices(server, CHAT, **fields, stream=stream)
    token_logprobs = list_token_logprobs(choice)
    text_bytes = b"".join(bytes(token_logprob["bytes"]) for token_logprob in token_logprobs)
    assert text_bytes.decode() == choice["text"] == text
    for token_logprob in token_logprobs:
        for token in (token_logprob, *token_logprob["top_logprobs"]):
            token_bytes = bytes(token["bytes"])
            spelling = token_bytes.decode(errors="backslashreplace")
            is_partial = "\ufffd" in token_bytes.decode(errors="replace")
            expected = f"bytes:{spelling}" if is_partial else spelling
            assert token["token"] == expected or token["token"].strip() == "<s>"


def test_a_prompt_without_an_answer_is_echoed_with_logprobs(server):
    fields = {"prompt": [encode("first"), encode("second one")], "max_tokens": 0, "echo": True}
    assert server.answer(COMPLETIONS, **fields, logprobs=1)["usage"]["completion_tokens"] == 0
    for stream in (False, True):
        choices = get_choices(server, **fields, logprobs=1, stream=stream)
        assert [choice["text"] for choice in choices] == ["first", "second one"]
        assert {choice["finish_reason"] for choice in choices} == {"length"}
    prompt = "x" * CONTEXT_LENGTH  # fills the context of the model
    (scored,) = get_choices(server, **fields | {"prompt": prompt}, logprobs=0)
    assert scored["text"] == prompt
    assert len(join_logprobs(scored)["tokens"]) == CONTEXT_LENGTH
    assert server.ask(COMPLETIONS, {**fields, "prompt": prompt + "x"})[0] == 400


@pytest.mark.parametrize(
    ("path", "stream", "start", "extra"),
    [
        (CHAT, False, 12, 9),
        (CHAT, True, 0, 0),
        (COMPLETIONS, False, 0, 9),
        (COMPLETIONS, True, 12, 0),
    ],
)
def test_an_answer_and_its_logprobs_end_before_a_stop_string(server, path, stream, start, extra):
    # The usage counts the tokens of the stop string, which may end at the limit of new tokens.
    fields = {CHAT: {"messages": MESSAGES, "logprobs": True},
              COMPLETIONS: {"prompt": "why", "logprobs": 1}}[path]  # fmt: skip
    (choice,) = get_choices(server, path, **fields, max_tokens=40)
    stop = choice["text"][start : start + 4]
    kept_text = choice["text"][: choice["text"].index(stop)]
    fields |= {
        "stop": [stop, "no such text"], "stream": stream,
        "max_tokens": len(kept_text + stop) + extra,
    }  # fmt: skip
    (choice,) = get_choices(server, path, **fields)
    assert (choice["text"], choice["finish_reason"]) == (kept_text, "stop")
    if path == CHAT:
        tokens = [token_logprob["token"] for token_logprob in list_token_logprobs(choice)]
    else:
        tokens = join_logprobs(choice)["tokens"]
    assert "".join(tokens) == kept_text
    if not stream:
        assert server.answer(path, **fields)["usage"]["completion_tokens"] == len(kept_text + stop)


def test_logprobs_of_impossible_tokens_are_finite():
    (token_logprob,) = sampling.make_logprobs(torch.tensor([[0.0, -torch.inf, 0.0]]), [1], 3)
    assert token_logprob.logprob == -9999
    assert min(logprob for _, logprob in token_logprob.top_tokens) == -9999


@pytest.mark.parametrize(
    ("path", "fields", "stream"),
    [(CHAT, {"messages": MESSAGES}, True), (COMPLETIONS, {"prompt": PROMPT}, False)],
)
def test_several_answers_match_answers_of_consecutive_seeds(server, path, fields, stream):
    best_of = {"best_of": 3} if path == COMPLETIONS else {}
    fields = fields | {"max_tokens": 10, "temperature": 1.2, "stream": stream}
    joint_choices = get_choices(server, path, **fields, n=3, seed=2**63 - 2, **best_of)
    single_choices = []
    for seed in (2**63 - 2, 2**63 - 1, -(2**63)):
        single_choices += get_choices(server, path, **fields, seed=seed)
    assert joint_choices == single_choices
    assert len({choice["text"] for choice in joint_choices}) == 3


def test_the_prompt_of_several_answers_is_counted_and_computed_once(server):
    prompt = "z" * (3 * PAGE_SIZE + 1)
    answer = server.answer(COMPLETIONS, prompt=[prompt, "ab"], n=3, max_tokens=4)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt) + 2, 24)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    old_hits = server.metrics()["prefix_hits_total"]
    server.answer(COMPLETIONS, prompt="y" + prompt, n=3, max_tokens=4)
    assert server.metrics()["prefix_hits_total"] - old_hits == 2


def test_lists_of_prompts_and_of_token_ids_get_the_answers_of_single_prompts(server):
    prompts = ["one", "two and more", "three"]
    expected = [get_choices(server, prompt=prompt, max_tokens=8)[0]["text"] for prompt in prompts]
    mixed_batch = [prompts[0], encode(prompts[1]), prompts[2]]
    for batch in (prompts, list(map(encode, prompts)), mixed_batch):
        for stream in (False, True):
            choices = get_choices(server, prompt=batch, max_tokens=8, stream=stream)
            assert [choice["text"] for choice in choices] == expected
    assert get_choices(server, prompt=encode("one"), max_tokens=8)[0]["text"] == expected[0]
    (choice,) = get_choices(server, prompt=encode("one"), max_tokens=8, echo=True)
    assert choice["text"] == "one" + expected[0]


def test_many_prompts_fit_together_if_each_prompt_fits(server):
    answers = get_choices(server, prompt=["x" * 300] * 140, max_tokens=1)  # 42,000 characters
    assert len(answers) == 140
    assert len({choice["text"] for choice in answers}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_one_invalid_prompt_of_several_fails_the_request(server, stream):
    fields = {"prompt": ["fine", "x" * 400], "max_tokens": 4, "stream": stream}
    status, text, _ = server.ask(COMPLETIONS, fields)
    assert status in (200, 400)  # 200 if the first answer had started
    last_event = text.split("data: ")[-2] if status == 200 else text
    assert json.loads(last_event)["error"]["code"] == "context_length_exceeded"
    assert server.wait_until(requests_active=0)["requests_waiting"] == 0


def test_penalties_and_biases_match_generate(server, model):
    plain_text = generate_stock(model, PROMPT, 40)
    logit_bias = dict.fromkeys(encode(plain_text[:2]), -3.0) | {7: 2.5}
    bias_processor = SequenceBiasLogitsProcessor(
        {(token,): bias for token, bias in logit_bias.items()}
    )
    cases = (
        ({"repetition_penalty": 1.4}, RepetitionPenaltyLogitsProcessor(1.4)),
        (
            {"presence_penalty": 0.8, "frequency_penalty": 0.6},
            OpenAIPenalties(len(PROMPT), 0.8, 0.6),
        ),
        ({"logit_bias": {str(token): bias for token, bias in logit_bias.items()}}, bias_processor),
    )
    for fields, processor in cases:
        expected = generate_stock(model, PROMPT, 40, processor)
        assert expected != plain_text
        (completion,) = get_choices(server, prompt=PROMPT, max_tokens=40, **fields)
        response = server.answer(RESPONSES, input=PROMPT, max_output_tokens=40, **fields)
        for output in (completion, response["output"][0]["content"][0]):
            # "?" is the tokenizer's special token.
            assert output["text"] == expected.replace("?", ""), fields


def test_stop_tokens_end_an_answer_after_min_tokens(server, model):
    text = generate_stock(model, PROMPT, 60)
    stop = text[12]
    first_end = text.index(stop)
    second_end = text.index(stop, first_end + 1)
    fields = {"prompt": PROMPT, "max_tokens": 60}
    (choice,) = get_choices(server, **fields, stop_token_ids=encode(stop))
    assert (choice["text"], choice["finish_reason"]) == (text[:first_end], "stop")
    fields["min_tokens"] = first_end + 1
    (choice,) = get_choices(server, **fields, stop_token_ids=encode(stop))
    assert len(choice["text"]) >= first_end + 1
    assert stop not in choice["text"]
    (choice,) = get_choices(server, **fields, stop=stop)
    assert choice["text"] == text[:second_end]


@pytest.mark.parametrize("stream", [False, True])
def test_a_min_tokens_that_leaves_no_token_is_an_error_of_the_request(server, stream):
    fields = {"structured_outputs": {"choice": ["ab"]}, "min_tokens": 3, "stop_token_ids": [0]}
    status, text, _ = server.ask(COMPLETIONS, {"prompt": "hi", "stream": stream, **fields})
    assert status == (200 if stream else 400)
    error = json.loads(text.split("data: ")[-2] if stream else text)["error"]
    assert error["param"] == "structured_outputs.choice"
    assert "min_tokens" in error["message"]


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
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, CLOCK)]
VALID_ARGUMENTS = {
    "clock": [{"zone": zone} for zone in range(10)],
    "weather": [{"day": "today"}, {"day": "tomorrow"}],
}


def test_required_tools_are_called(server):
    def call_tool(seed: int = 0, **fields: object) -> str:
        (choice,) = get_choices(
            server, CHAT, messages=MESSAGES, tools=TOOLS, max_tokens=150, stream=True,
            temperature=1.5, seed=seed, **fields,
        )  # fmt: skip
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert arguments in VALID_ARGUMENTS[call["function"]["name"]]
        return call["function"]["name"]

    assert {
        call_tool(seed, tool_choice="required", parallel_tool_calls=False) for seed in range(6)
    } == {"weather", "clock"}
    # Instructor also sends a format. OpenAI's `response_format` applies to texts, not to calls.
    response_format = {
        "type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}},
    }  # fmt: skip
    tool_choice = {"type": "function", "function": {"name": "clock"}}
    assert call_tool(tool_choice=tool_choice, response_format=response_format) == "clock"
    fields = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 4, "stream": True}
    (choice,) = get_choices(server, CHAT, **fields, tool_choice=tool_choice)
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("calls", [None, []])
def test_a_message_without_calls_keeps_its_content(server, calls):
    # `model_dump()` of OpenAI's client writes such messages.
    message = {"role": "assistant", "content": PROMPT, "refusal": None, "function_call": None}
    (plain_choice,) = get_choices(server, CHAT, messages=[message], max_tokens=8)
    (choice,) = get_choices(server, CHAT, messages=[message | {"tool_calls": calls}], max_tokens=8)
    assert choice == plain_choice


def test_a_response_calls_a_named_tool(server):
    response = server.answer(
        RESPONSES, input="why", max_output_tokens=60,
        tools=[{"type": "function", **function} for function in (WEATHER, CLOCK)],
        tool_choice={"type": "function", "name": "weather"},
    )  # fmt: skip
    (call,) = [item for item in response["output"] if item["type"] == "function_call"]
    assert call["name"] == "weather"
    assert json.loads(call["arguments"])["day"] in ("today", "tomorrow")


@pytest.mark.parametrize(
    ("text", "expected_text", "expected_calls"),
    [
        ('[{"name": "f", "param', '[{"name": "f", "param', []),
        (
            '[{"name": "f", "parameters": {"x": "], "}}, {"name": "g", "parameters": {"y',
            "", [("f", {"x": "], "})],
        ),
        (
            '[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {"y": []}}]',
            "", [("f", {}), ("g", {"y": []})],
        ),
        ("", "", []),
    ],
)  # fmt: skip
def test_a_truncated_list_of_calls_keeps_complete_calls_or_the_text(
    folder, text, expected_text, expected_calls
):
    tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    decoder = AnswerDecoder(tokenizer, forced_tool="")
    assert decoder.add_tokens(encode(text)) == []
    parts = decoder.finish()
    assert join_parts(parts) == (expected_text, "")
    calls = [part.call for part in parts if part.call]
    assert [(name, json.loads(arguments)) for name, arguments in calls] == expected_calls
    assert len(parts) == len(expected_calls) + bool(expected_text)


def test_the_numbers_of_a_call_stay_as_the_model_wrote_them(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    decoder = AnswerDecoder(tokenizer, forced_tool="")
    decoder.add_tokens(encode('[{"name": "f", "parameters": {"x": 1e999}}]'))
    assert [part.call for part in decoder.finish()] == [("f", '{"x": 1e999}')]


def test_a_stop_string_makes_a_forced_call_a_text(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    decoder = AnswerDecoder(tokenizer, forced_tool="f", stop_strings=("y",))
    decoder.add_tokens(encode('{"x": "y"}'))
    assert join_parts(decoder.finish()) == ('{"x": "', "")
    assert decoder.num_calls == 0


def test_an_answer_does_not_begin_with_a_prompt_of_another_template(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = Qwen3Config(
        vocab_size=95, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=320,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    with HostedServer(str(tmp_path)) as server:
        answer = server.answer(
            CHAT, messages=[{"role": "user", "content": "a secret"}], max_tokens=4
        )
    assert len(answer["choices"][0]["message"]["content"]) == 4


MISSING_TOOL_CHOICE = {"type": "function", "function": {"name": "missing"}}
DEEP_SCHEMA = json.loads('{"properties": {"a": ' * 350 + "{}" + "}}" * 350)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("tool_choice", {"tool_choice": MISSING_TOOL_CHOICE}),
        ("tool_choice", {"tool_choice": "sometimes"}),
        ("parallel_tool_calls", {"parallel_tool_calls": False}),
        (
            "structured_outputs.json_object",
            {"tool_choice": "required", "structured_outputs": {"json_object": True}},
        ),
        ("tools[0]", {"tools": [{"function": WEATHER | {"parameters": "x"}}]}),
        (None, {"tools": [{"function": WEATHER | {"parameters": DEEP_SCHEMA}}]}),
    ],
)
def test_invalid_tools_are_refused(server, field, fields):
    status, text, _ = server.ask(CHAT, {"messages": MESSAGES, "tools": TOOLS, **fields})
    assert (status, json.loads(text)["error"]["param"]) == (400, field)


def join_parts(parts: list[AnswerPart]) -> tuple[str, str]:
    return "".join(part.text for part in parts), "".join(part.reasoning for part in parts)


def make_byte_decoder(**options: object) -> AnswerDecoder:
    """Return a decoder for tokens of single bytes, as in models with SentencePiece."""
    bytes_vocabulary = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocabulary = {"a": 0, "b": 1, "\u2581c": 2, **bytes_vocabulary}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return AnswerDecoder(tokenizer, **options)


def test_undecodable_bytes_do_not_end_an_answer():
    # `DecodeStream` of the tokenizers package raises an error for some of these tokens.
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        byte_tokens = torch.randint(3 + 128, 3 + 248, (12,), generator=generator).tolist()
        decoder = make_byte_decoder(stop_strings=["b"])
        text, _ = join_parts(decoder.add_tokens([0, *byte_tokens, 2, 1, 0, 2]))
        assert decoder.is_stopped
        assert decoder.finish() == []
        assert (text[0], text[-2:]) == ("a", " c")


def test_tokens_of_an_incomplete_character_are_not_lost():
    decoder = make_byte_decoder()
    assert join_parts(decoder.add_tokens([0, 3 + 0xC3]) + decoder.finish()) == ("a\ufffd", "")


@pytest.fixture
def parser(folder):
    """Return a parser of reasoning and calls in the format of Qwen 3."""
    return build_response_parser(
        AutoTokenizer.from_pretrained(folder),
        SimpleNamespace(config=SimpleNamespace(model_type="qwen3")),
        [],
    )


CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


@pytest.mark.parametrize("chunk_size", [1, 1000])
def test_reasoning_and_calls_are_parsed_until_a_stop_string(folder, parser, chunk_size):
    tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    decoder = AnswerDecoder(tokenizer, stop_strings=("END",), parser=parser)
    text = f"<think>so</think>well{CALL}{CALL}EN"
    tokens = encode(f"{text}END and more")
    parts = []
    for start in range(0, len(tokens), chunk_size):
        parts += decoder.add_tokens(tokens[start : start + chunk_size])
    parts += decoder.finish()
    assert join_parts(parts) == ("wellEN", "so")
    assert [part.call for part in parts if part.call] == [("f", '{"x": 1}')] * 2
    assert decoder.num_calls == 2
    assert [part.num_tokens for part in parts] == sorted(part.num_tokens for part in parts)
    assert decoder.num_tokens == len(f"{text}END")


def test_an_incomplete_message_keeps_its_text(folder, parser, monkeypatch):
    monkeypatch.setattr(parser, "finalize", Mock(side_effect=ValueError("incomplete")))
    decoder = AnswerDecoder(AutoTokenizer.from_pretrained(folder).backend_tokenizer, parser=parser)
    parts = [*decoder.add_tokens(encode("<think>so</think>half")), *decoder.finish()]
    assert join_parts(parts) == ("half", "so")
