"""Tests of structured output. Without a grammar, the model writes random text."""

import json
import re
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from tokenizers import decoders
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM
from transformers.generation.continuous_batching.requests import RequestState

from tests.helpers.serve_process import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    HostedServer,
    RunningServer,
    read_answer,
)

pytestmark = pytest.mark.text

pytest.importorskip("starlette", reason="needs the extra serve")
llguidance = pytest.importorskip("llguidance", reason="needs the extra serve")
from hf_fp8kv.server import engine  # noqa: E402
from hf_fp8kv.server import structured as grammars  # noqa: E402
from hf_fp8kv.server.errors import APIError  # noqa: E402
from hf_fp8kv.server.sampling import Sequence  # noqa: E402

CHAT_FIELDS = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 250}
RESPONSE_FIELDS = {"input": "hello", "max_output_tokens": 250}
JSON_OBJECT = {"type": "json_object"}
END_TOKEN = "~"  # ends an answer, if the model has an end token

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 7, "maximum": 150},
        "share": {"type": "number", "minimum": -2, "maximum": 2},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 1, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {"known": {"type": "boolean"}, "kind": {"const": "flat"}},
            "required": ["known", "kind"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
SCHEMA_OPTIONS = {"name": "person", "strict": True}
RESPONSE_FORMAT = {"type": "json_schema", "schema": PERSON, **SCHEMA_OPTIONS}


def is_person(text: str) -> bool:
    person = json.loads(text)
    home = person["home"]
    share = person.get("share", 0)
    return (
        person.keys() - {"share"} == {"name", "age", "tags", "home"}
        and len(person["name"]) <= 8
        and type(person["age"]) is int
        and 7 <= person["age"] <= 150
        and type(share) in (int, float)
        and -2 <= share <= 2
        and 1 <= len(person["tags"]) <= 3
        and set(person["tags"]) <= {"red", "blue"}
        and home.keys() == {"known", "kind"}
        and type(home["known"]) is bool
        and home["kind"] == "flat"
    )


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    """Return a server of the model with a token that ends answers."""
    model_folder = tmp_path_factory.mktemp("ending")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = END_TOKEN
    tokenizer.save_pretrained(model_folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    model.generation_config = GenerationConfig(eos_token_id=ord(END_TOKEN) - 32, pad_token_id=0)
    model.save_pretrained(model_folder)
    with HostedServer(str(model_folder)) as server:
        yield server


def complete(server: RunningServer, **fields: object) -> tuple[str, str]:
    answer = server.answer(COMPLETIONS, **{"prompt": "once upon", "max_tokens": 250} | fields)
    events = answer if fields.get("stream") else [answer]
    assert len(events) > 2 or not fields.get("stream")
    return read_answer(events), events[-1]["choices"][0]["finish_reason"]


def constrain(**constraint: object) -> dict[str, object]:
    return {"structured_outputs": constraint}


def wrap_schema(schema: object, **fields: object) -> dict[str, object]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema, **fields}}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, CHAT_FIELDS | wrap_schema(PERSON, **SCHEMA_OPTIONS)),
        (RESPONSES, RESPONSE_FIELDS | {"text": {"format": RESPONSE_FORMAT}}),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 250} | constrain(json=json.dumps(PERSON))),
    ],
)
def test_each_endpoint_accepts_a_schema(server, path, fields):
    assert is_person(read_answer(server.answer(path, **fields)))


@pytest.mark.parametrize(
    ("path", "fields", "is_object"),
    [
        # The grammar ends a text although the model could continue it.
        (CHAT, CHAT_FIELDS | {"response_format": JSON_OBJECT}, True),
        (RESPONSES, RESPONSE_FIELDS | {"text": {"format": JSON_OBJECT}}, True),
        (CHAT, CHAT_FIELDS | constrain(json_object=True), True),
        (CHAT, CHAT_FIELDS | {"response_format": {"type": "text"}, "max_tokens": 5}, False),
    ],
)
def test_an_answer_is_an_object_only_if_requested(server, path, fields, is_object):
    assert read_answer(server.answer(path, **fields)).startswith("{") == is_object


@pytest.mark.parametrize("temperature", [0, 1.8])
def test_an_answer_matches_its_regular_expression(server, temperature):
    regex = r"^(a/b|\"#|\\\\) [^b-y]x{7}$"
    text, reason = complete(server, **constrain(regex=regex), temperature=temperature, seed=3)
    assert re.fullmatch(regex, text)
    assert reason == "stop"


def test_an_answer_is_one_of_the_choices(server):
    choices = ["red wine", 'say "no" \\ (.*) //', "white"]
    answers = {
        complete(server, prompt=f"{n}", **constrain(choice=choices), temperature=2.0, seed=n)[0]
        for n in range(20)
    }
    assert answers == set(choices)
    # A control character is escaped in the grammar, and this model has no token for it.
    _, text, _ = server.ask(COMPLETIONS, {"prompt": "x", **constrain(choice=["a\x7fb"])})
    assert "none of the model's tokens can follow" in text


def test_a_truncated_answer_has_the_finish_reason_length(server):
    expected, _ = complete(server, **constrain(json=PERSON))
    truncated_answer = complete(server, **constrain(json=PERSON), max_tokens=len(expected) - 1)
    assert truncated_answer == (expected[:-1], "length")
    # The last token is the end token.
    answer = complete(server, **constrain(json=PERSON), max_tokens=len(expected) + 1)
    assert answer == (expected, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_structured_answer_ends_with_the_end_token(server, stream):
    # The end token must not occur before the grammar allows it. No token may follow it.
    for seed in range(2):
        sampling = {"temperature": 2.0, "seed": seed, "stream": stream}
        text, reason = complete(server, **constrain(json=PERSON), **sampling)
        assert is_person(text)
        assert reason == "stop"
        # The next text may end after any token.
        text, reason = complete(server, **constrain(regex=r"[a-f]+"), **sampling, max_tokens=200)
        assert re.fullmatch(r"[a-f]+", text)
        assert reason == ("stop" if len(text) < 200 else "length")
    answer = server.answer(COMPLETIONS, prompt="x", max_tokens=9, **constrain(choice=["ready"]))
    assert answer["usage"]["completion_tokens"] == len("ready") + 1


def test_a_preempted_request_continues_in_its_grammar(server, monkeypatch):
    # Three requests need 13 pages each. The engine has 24 pages.
    requests = [
        constrain(regex=r"([a-f]{3}-[0-9]{3} ){24}\.")
        | {"prompt": f"{n}", "temperature": 1.0, "seed": n, "max_tokens": 240}
        for n in range(3)
    ]
    expected = [complete(server, **fields) for fields in requests]
    preempted_ids: list[str] = []
    stock_create = RequestState.create_equivalent_initial_request

    def create_and_record(state: RequestState) -> RequestState:
        if state.logit_processor_kwargs["sequence"].guide and state.generated_tokens:
            preempted_ids.append(state.request_id)
        return stock_create(state)

    monkeypatch.setattr(RequestState, "create_equivalent_initial_request", create_and_record)
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda fields: complete(server, **fields), requests))
    assert preempted_ids
    assert answers == expected
    assert all(re.fullmatch(r"([a-f]{3}-[0-9]{3} ){24}\.", text) for text, _ in answers)


class FailingMatcher:
    """A matcher of llguidance that panics at the letter z."""

    def __init__(self, matcher):
        self._matcher = matcher

    def __getattr__(self, name):
        return getattr(self._matcher, name)

    def consume_tokens(self, tokens):
        if tokens == [ord("z") - 32]:
            raise BaseException("a bug of the library")  # like a panic of a library in Rust
        return self._matcher.consume_tokens(tokens)


def test_a_failing_grammar_only_fails_its_request(server, monkeypatch):
    # Grammars fail at the letter z or above 30 lexer states.
    stock_init = grammars.Guide.__init__
    monkeypatch.setattr(
        grammars.Guide,
        "__init__",
        lambda self, field, matcher, bits: stock_init(self, field, FailingMatcher(matcher), bits),
    )
    monkeypatch.setattr(grammars, "_MAX_LEXER_STATES", 30)
    requests = [{"max_tokens": 60}, {"max_tokens": 60, **constrain(regex="[a-y]+")}]
    expected_texts = [complete(server, **fields) for fields in requests]

    def submit(regex: str) -> Future:
        fields = {"prompt": "x", "max_tokens": 60, **constrain(regex=regex)}
        return pool.submit(server.ask, COMPLETIONS, fields)

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(complete, server, **fields) for fields in requests * 2]
        panics = [submit("[a-y]{9}z[a-y]{9}") for _ in range(2)]
        overflows = [submit("[a-y]{50}") for _ in range(2)]
        assert [future.result() for future in futures] == expected_texts * 2
    failures = (
        (panics, 500, "the grammar failed: BaseException: a bug of the library"),
        (overflows, 400, "lexer error: too many states"),
    )
    for failed_futures, expected_status, message in failures:
        for future in failed_futures:
            status, text, _ = future.result()
            assert status == expected_status
            assert f"structured_outputs.regex: {message}" in text
    assert [complete(server, **fields) for fields in requests] == expected_texts
    assert server.wait_until(requests_active=0)["requests_waiting"] == 0


MANY_PATTERNS: dict[str, dict] = {f"a{n}": {} for n in range(101)}
LENIENT = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
SCHEMA_FIELD = "response_format.json_schema.schema"
INVALID_GRAMMARS = {
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    "not strict": (wrap_schema(LENIENT), SCHEMA_FIELD),
    "not satisfiable": (wrap_schema({"type": "integer", "minimum": 5, "maximum": 4}), SCHEMA_FIELD),
    "a huge text": (wrap_schema({"enum": ["x" * 70_000]}), SCHEMA_FIELD),
    "not finite": (wrap_schema({"type": "integer", "multipleOf": 1e999}), SCHEMA_FIELD),
    "no int64": (wrap_schema({"type": "integer", "minimum": 2**63}), SCHEMA_FIELD),
    "inexact constant": (wrap_schema({"enum": [2**53 + 1]}), SCHEMA_FIELD),
    "many states": (wrap_schema({"type": "integer", "multipleOf": 1_000_003}), SCHEMA_FIELD),
    "many patterns": (wrap_schema({"patternProperties": MANY_PATTERNS}), SCHEMA_FIELD),
    "long patterns": (wrap_schema({"items": {"pattern": "a?" * 5_000}}), SCHEMA_FIELD),
    "a long expression": (constrain(regex="a?" * 5_000), "structured_outputs.regex"),
    "an unknown name": (wrap_schema({}, grammar="x"), "response_format.json_schema.grammar"),
    "two constraints": (constrain(regex="a", choice=["a"]), "structured_outputs"),
    "two fields": (wrap_schema({}) | constrain(regex="a"), "structured_outputs.regex"),
    "an invalid expression": (constrain(regex="(a"), "structured_outputs.regex"),
    "an empty text": (constrain(regex="()"), "structured_outputs.regex"),
    "a special token": (constrain(regex=r"\?+"), "structured_outputs.regex"),
    "invalid JSON": (constrain(json="{"), "structured_outputs.json"),
    "an unknown grammar": (constrain(grammar="x"), "structured_outputs.grammar"),
}


# Each rule, and each limit of a grammar, has one case.
@pytest.mark.parametrize(("payload", "field"), INVALID_GRAMMARS.values(), ids=INVALID_GRAMMARS)
def test_an_invalid_grammar_is_refused_with_its_field(server, payload, field):
    body = json.dumps(CHAT_FIELDS | payload).replace("Infinity", "1e999").encode()
    status, text, _ = server.ask(CHAT, body=body)
    error = json.loads(text)["error"]
    assert (status, error["param"]) == (400, field), text
    assert error["message"].startswith(f"{field}: ")
    assert len(error["message"]) < 500


def test_grammars_are_refused_if_steps_are_planned_ahead():
    runner = SimpleNamespace(pad_inputs=False)
    processor = SimpleNamespace(use_async_batching=False, model_runner=runner)
    assert engine.explain_fixed_steps(processor) is None
    runner.pad_inputs = True
    assert "CUDA graphs" in engine.explain_fixed_steps(processor)
    processor.use_async_batching = True
    assert "asynchronous" in engine.explain_fixed_steps(processor)


def test_a_matching_text_is_complete_if_the_model_has_no_end_token(folder):
    compiler = grammars.Grammars(AutoTokenizer.from_pretrained(folder), 95, None)

    def make_guide(regex: str) -> grammars.Guide:
        return compiler._compile_grammar("regex", llguidance.LLMatcher.grammar_from_regex(regex))

    for end_tokens, is_complete in (((), True), ((5,), False), ((10**6,), True)):
        sequence = Sequence([1], 9, frozenset(end_tokens), guide=make_guide("a"))
        engine.accept_token(sequence, ord("a") - 32, 95)
        assert engine._must_end(sequence, 95) is is_complete
    sequence = Sequence([1], 9, frozenset({5}), guide=make_guide("aa"))
    engine.accept_token(sequence, 5, 95)  # the grammar ignores an end token
    with pytest.raises(APIError, match="doesn't satisfy the grammar") as error:
        engine.accept_token(sequence, ord("b") - 32, 95)
    assert error.value.status == 400


def test_a_tokenizer_without_bytes_is_refused(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    compiler = grammars.Grammars(tokenizer, 95, None)
    with pytest.raises(APIError, match=r"x: .*this model's tokenizer is not supported"):
        compiler._compile_grammar("x", llguidance.LLMatcher.grammar_from_regex("a"))
