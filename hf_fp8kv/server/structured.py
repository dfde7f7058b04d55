"""Structured output: answers that are JSON of a schema, or match a regular expression, or a choice.

llguidance computes which tokens may follow in a grammar. The sampler masks all others. A grammar
is compiled before the engine has its request, in separate threads, and its errors end no other
request.
"""

import asyncio
import contextlib
import json
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import llguidance
import numpy as np
from pydantic_core import from_json

from .errors import APIError
from .schemas import walk

logger = logging.getLogger(__name__)

_END = "<|hf_fp8kv end of the grammar|>"  # a token that no model has
_THREADS = 2
_SECONDS = 10.0  # that a request waits for its grammar
# States that the lexer of a grammar may have, some hundred bytes each. The other limits are
# llguidance's own, about 30 ms for a step.
_LEXER_STATES = 50_000
_NO_TOKEN = "none of the model's tokens can follow"
# Between the parts of JSON: a space, or a line break and an indentation. Models that do not know
# how to go on would write white space without end.
_OPTIONS: Any = {"whitespace_pattern": r"( |\n {0,32})"}
# Limits of a grammar: its characters, and parts whose time or memory is not linear in these.
_CHARACTERS = 65_536
_EXPRESSIONS = 8_192  # characters of regular expressions
_PATTERN_PROPERTIES = 100
_MULTIPLES = 10_000

CHOICE = "tool_choice"
# vLLM's field.
STRUCTURED = "structured_outputs"
# The field, and its grammar as llguidance takes it.
_Asked = tuple[str, str]


def read_grammar(request: Any) -> _Asked | None:
    """Return the field of a request that has a grammar, and the grammar; None: there is none.

    Raises:
        APIError: Fields are wrong, or two of them have a grammar.
    """
    given = {name: getattr(request, name) for name in _READERS}
    found = [_READERS[name](value) for name, value in given.items() if value is not None]
    tools = _read_tools(request)
    if tools is not None and given[STRUCTURED] is None:
        return tools  # OpenAI's own fields are about the text, and such an answer has none
    requested = [one for one in [tools, *found] if one is not None]
    if len(requested) > 1:
        (field, _), (other, _) = requested[:2]
        raise _wrong(other, f"nothing beside {field}, since an answer has one form")
    return requested[0] if requested else None


def _read_text(given: Any) -> _Asked | None:
    _check_names("text", given, ("format", "verbosity"))
    if given.get("verbosity") not in (None, "medium"):
        raise _wrong("text.verbosity", "medium")
    form = given.get("format")
    return None if form is None else _read_format("text.format", form, "")


def _read_format(where: str, given: Any, inner: str) -> _Asked | None:
    """Read a form, whose schema is in its object `inner`. Without a name it is in the form."""
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise _wrong(f"{where}.type", "one of text, json_object, json_schema")
    if kind != "json_schema":
        _check_names(where, given, ("type",))
        return None if kind == "text" else _json(where, {"type": "object"})
    if inner:
        _check_names(where, given, ("type", inner))
        where, given = f"{where}.{inner}", given.get(inner)
    extra = () if inner else ("type",)
    _check_names(where, given, ("name", "description", "schema", "strict", *extra))
    return _json(f"{where}.schema", given.get("schema"))


def _read_structured_outputs(given: Any) -> _Asked | None:
    _check_names(STRUCTURED, given, ("json", "regex", "choice", "json_object"))
    requested = {name: value for name, value in given.items() if value not in (None, False)}
    if len(requested) != 1:
        raise _wrong(STRUCTURED, "one of json, regex, choice, json_object")
    ((name, value),) = requested.items()
    where = f"{STRUCTURED}.{name}"
    if name == "json_object":
        if value is not True:
            raise _wrong(where, "true or false")
        return _json(where, {"type": "object"})
    if name == "json":
        if isinstance(value, str):  # as other servers take it
            with contextlib.suppress(ValueError):
                value = from_json(value, allow_inf_nan=False)
        return _json(where, value)
    if name == "regex":
        if not isinstance(value, str) or not value:
            raise _wrong(where, "a regular expression")
        if len(value) > _EXPRESSIONS:
            raise _wrong(where, f"at most {_EXPRESSIONS} characters")
        return where, str(llguidance.LLMatcher.grammar_from_regex(value))
    texts = value if isinstance(value, list) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise _wrong(where, "a list of texts")
    lark = "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    _check_limits(where, lark)
    return where, lark


_READERS: Mapping[str, Callable[[Any], _Asked | None]] = {
    "response_format": lambda given: _read_format("response_format", given, "json_schema"),
    "text": _read_text,
    STRUCTURED: _read_structured_outputs,
}


def _read_tools(request: Any) -> _Asked | None:
    """Read the tools of a request that has to call one.

    Of one that is named, the answer is its arguments; else a list of names and parameters, as in
    vLLM's server.
    """
    name = request.forced_tool
    if name is None:
        return None
    functions = [tool.function for tool in request.tools]
    schemas = {f.name: f.parameters or {"type": "object"} for f in functions}
    if name:
        return _json(CHOICE, schemas[name])
    rules = []
    for index, (tool, schema) in enumerate(schemas.items()):
        begin = json.dumps(f'{{"name": {json.dumps(tool)}, "parameters": ')
        options = {"x-guidance": _OPTIONS}
        rules.append(f'call_{index}: {begin} %json {json.dumps(schema | options)} "}}"')
    any_call = " | ".join(f"call_{index}" for index in range(len(schemas)))
    extra = "" if request.parallel_tool_calls is False else ' (", " call)*'
    lark = "\n".join([f'start: "[" call{extra} "]"', f"call: {any_call}", *rules])
    _check_limits(CHOICE, lark, *schemas.values())
    return CHOICE, lark


def _json(where: str, schema: Any) -> _Asked:
    if not isinstance(schema, dict):
        raise _wrong(where, "a JSON schema, which is an object")
    text = json.dumps(schema, ensure_ascii=False)
    _check_limits(where, text, schema)
    try:
        return where, str(llguidance.LLMatcher.grammar_from_json_schema(text, defaults=_OPTIONS))
    except ValueError as error:  # a number that is not finite
        raise APIError(400, f"{where}: {error}", param=where) from None


def _check_limits(where: str, text: str, *schemas: dict[str, Any]) -> None:
    """Check the text of a grammar, and the schemas in it.

    Raises:
        APIError: Compiling it would take minutes, or a schema changes how it is compiled.
    """
    if len(text) > _CHARACTERS:
        raise _wrong(where, f"at most {_CHARACTERS} characters")
    if any("x-guidance" in schema for schema in schemas):
        raise _wrong(where, "no x-guidance, which would make keywords of the schema optional")
    values = [value for value in walk(list(schemas)) if isinstance(value, dict)]
    # llguidance makes a state for each remainder, also of several at once.
    numbers = [v["multipleOf"] for v in values if isinstance(v.get("multipleOf"), int | float)]
    multiples = [Fraction(str(n)).numerator for n in numbers if 0 < n < math.inf]
    if sum(multiples) > _MULTIPLES or math.lcm(*multiples) > _MULTIPLES:
        expected = f"numbers after multipleOf with a sum and a multiple of at most {_MULTIPLES}"
        raise _wrong(where, expected)
    named = [v["patternProperties"] for v in values if "patternProperties" in v]
    names = [name for v in named if isinstance(v, dict) for name in v]
    if len(names) > _PATTERN_PROPERTIES:
        raise _wrong(where, f"at most {_PATTERN_PROPERTIES} patternProperties")
    patterns = [v["pattern"] for v in values if isinstance(v.get("pattern"), str)]
    if sum(map(len, names + patterns)) > _EXPRESSIONS:
        raise _wrong(where, f"patterns of at most {_EXPRESSIONS} characters")


def _check_names(where: str, given: Any, names: tuple[str, ...]) -> None:
    if not isinstance(given, dict):
        raise _wrong(where, f"an object with {', '.join(names)}")
    for name in given.keys() - set(names):
        raise _wrong(f"{where}.{name:.100}", f"nothing; this server knows {', '.join(names)}")


def _wrong(where: str, expected: str) -> APIError:
    return APIError(400, f"{where}: expected {expected}", param=where)


# -- following a grammar ---------------------------------------------------------------------------


class GrammarError(Exception):
    """A grammar has no next token, or is too complex for llguidance's limits."""


class Guide:
    """Where one request is in its grammar.

    `usable` `[n]`, uint8, has a bit for each token that may be part of a text, the first token's
    lowest. `field` is the request's field that has the grammar.

    Raises:
        GrammarError: The grammar has no text.
    """

    def __init__(self, field: str, matcher: Any, usable: np.ndarray) -> None:
        self.field, self._matcher, self._usable = field, matcher, usable
        self.is_to_blame = False  # the request cannot be answered because of its own grammar
        self._look()
        if self.complete:
            raise GrammarError("it matches nothing but the empty text")

    def fork(self) -> "Guide":
        """Return a guide for another answer, at the same place."""
        return Guide(self.field, self._matcher.deep_copy(), self._usable)

    @property
    def complete(self) -> bool:
        """Whether the text matches, and no longer text begins with it."""
        return self._accepting and not self._allowed.any()

    def accept(self, token: int) -> None:
        """Continue with a token. Raises GrammarError."""
        if not self._matcher.consume_tokens([token]):
            raise GrammarError(_explain(self._matcher))
        self._look()

    def follow(self, token: int) -> str | None:
        """Continue with a token of the answer; return what went wrong."""
        try:
            self.accept(token)
        except GrammarError as error:
            self.is_to_blame = True
            return f"{self.field}: {error}"
        except BaseException as error:  # a panic of the library is no Exception
            logger.exception("a grammar failed")
            return f"{self.field}: the grammar failed: {type(error).__name__}: {error}"
        return None

    def blocked(self, ends: Iterable[int], vocabulary: int) -> np.ndarray:
        """Return which tokens must not follow, bool `[V]`; `ends` are those that end the answer."""
        bits = np.unpackbits(~self._allowed, count=vocabulary, bitorder="little")
        bits[[token for token in ends if token < vocabulary]] = not self._accepting
        return bits.view(bool)

    def _look(self) -> None:
        """Find which tokens may follow, and whether the text may end."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise GrammarError(_explain(self._matcher))
        self._allowed = bits[: len(self._usable)] & self._usable
        self._accepting = bool(self._matcher.is_accepting())
        if not self._accepting and not self._allowed.any():
            raise GrammarError(_NO_TOKEN)


def _explain(matcher: Any) -> str:
    """Return llguidance's message without its state."""
    text = str(matcher.get_error()).split("\n<", 1)[0]
    if text in ("", "NoExtensionBias"):
        return _NO_TOKEN
    return " ".join(text.split())[:300]


# -- compiling a grammar ---------------------------------------------------------------------------


class Grammars:
    """Compiles the grammars of requests for one model, whose logits have V numbers.

    `unavailable` is why the engine cannot follow any. None means that it can.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, unavailable: str | None) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._unavailable = unavailable
        self._pool = ThreadPoolExecutor(_THREADS, "hf_fp8kv grammars")
        self._lock = threading.Lock()
        self._tokens: tuple[Any, np.ndarray] | None = None

    async def compile(self, request: Any) -> Guide | None:
        """Return the guide of a request, or None if it asks for text.

        Raises:
            APIError: The request's fields or its grammar are wrong, or too complex.
        """
        requested = read_grammar(request)
        if requested is None:
            return None
        field, grammar = requested
        if self._unavailable is not None:
            raise _refused(field, f"this server has none, since {self._unavailable}; leave it out")
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._pool, self._compile, field, grammar)
        try:
            return await asyncio.wait_for(work, _SECONDS)
        except TimeoutError:
            expected = f"a grammar that is compiled within {_SECONDS:g} s"
            text = f"{field}: expected {expected}; simplify it, or try again later"
            raise APIError(400, text, param=field) from None

    def _compile(self, field: str, grammar: str) -> Guide:
        with self._lock:
            if self._tokens is None:
                self._tokens = self._read_tokens(field)
        tokens, usable = self._tokens
        limits = llguidance.LLParserLimits(max_lexer_states=_LEXER_STATES, verbose_errors=False)
        try:
            matcher = llguidance.LLMatcher(tokens, grammar, limits=limits, log_level=0)
            if matcher.is_error():
                raise GrammarError(_explain(matcher))
            return Guide(field, matcher, usable)
        except (GrammarError, ValueError) as error:
            raise APIError(400, f"{field}: {error}", param=field) from None

    def _read_tokens(self, field: str) -> tuple[Any, np.ndarray]:
        """Return llguidance's tokenizer, and the bits of tokens that may be part of a text."""
        from tokenizers import Tokenizer

        inner = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        inner.no_padding()
        inner.no_truncation()
        # Some of a model's tokens end an answer, others do not: that is the request's choice.
        inner.add_special_tokens([_END])
        end = inner.token_to_id(_END)
        size = max(self._vocabulary, inner.get_vocab_size())
        try:
            tokens = llguidance.LLTokenizer(inner.to_str(), n_vocab=size, eos_token=end)
        except ValueError as error:
            text = f"this model's tokenizer is not supported ({error}); leave it out"
            raise _refused(field, text) from error
        added = self._tokenizer.added_tokens_decoder.items()
        special = [end, *self._tokenizer.all_special_ids, *(i for i, t in added if t.special)]
        usable = np.arange(size) < self._vocabulary
        usable[special] = False
        return tokens, np.packbits(usable, bitorder="little")


def _refused(field: str, why: str) -> APIError:
    message = f"{field}: no structured output: {why}"
    return APIError(400, message, param=field, code="unsupported_parameter")
