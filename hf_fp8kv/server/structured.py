"""Structured output: answers that are JSON of a schema, or match a regular expression, or a choice.

llguidance computes which tokens may follow in a grammar, and the sampler masks all other tokens. A
grammar is compiled in a separate thread before the engine gets its request, so its errors end no
other request.
"""

import asyncio
import json
import logging
import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import cached_property
from typing import Any

import llguidance
import numpy as np
from tokenizers import Tokenizer

from .errors import UNSUPPORTED, APIError, field_error
from .schemas import MAX_EXPRESSION, Request, walk

logger = logging.getLogger(__name__)

_END = "<|hf_fp8kv end of the grammar|>"  # a token that no model has
_THREADS = 2
_SECONDS = 10.0  # that a request waits for its grammar
# States of the lexer of a grammar, some hundred bytes each. The other limits are llguidance's own,
# about 30 ms for a step.
_LEXER_STATES = 50_000
_NO_TOKEN = "none of the model's tokens can follow"
_NONE = "no structured output: "
# Between the parts of JSON: a space, or a line break and an indentation. Without a limit, a model
# that is unsure of the next part could write white space without end.
_OPTIONS: Any = {"whitespace_pattern": r"( |\n {0,32})"}
# Limits of a grammar: its characters, and parts whose time or memory is not linear in these.
_CHARACTERS = 65_536
_PATTERN_PROPERTIES = 100
_MULTIPLES = 10_000

_CHOICE = "tool_choice"
# A field of a request, and its grammar in llguidance's format.
_Grammar = tuple[str, str]


def read_grammar(request: Request) -> _Grammar | None:
    """Return the field of a request that has a grammar, and the grammar, or None without one.

    Raises:
        APIError: A grammar exceeds a limit, or two fields have a grammar.
    """
    tools, structured = _read_tools(request), _read_structured_outputs(request)
    if tools is not None and structured is None:
        return tools  # OpenAI's own fields are about the text, which such an answer lacks
    grammars = [one for one in (tools, _read_format(request), structured) if one is not None]
    if len(grammars) > 1:
        (first, _), (second, _) = grammars[:2]
        text = f"expected nothing next to {first}, since an answer has one form"
        raise field_error(second, text)
    return grammars[0] if grammars else None


def _read_format(request: Request) -> _Grammar | None:
    where, form = "response_format", request.response_format
    if form is None:
        where, form = "text.format", request.text.format
    if form is None or form.type == "text":
        return None
    if form.json_schema is None:
        return _json(where, {"type": "object"})
    inner = ".json_schema" if form is request.response_format else ""
    return _json(f"{where}{inner}.schema", form.json_schema.schema_)


def _read_structured_outputs(request: Request) -> _Grammar | None:
    given, where = request.structured_outputs, "structured_outputs"
    if given is None:
        return None
    if given.json_object:
        return _json(f"{where}.json_object", {"type": "object"})
    if given.json_ is not None:
        return _json(f"{where}.json", given.json_)
    if given.regex is not None:
        return f"{where}.regex", str(llguidance.LLMatcher.grammar_from_regex(given.regex))
    texts = (json.dumps(text, ensure_ascii=False) for text in given.choice or ())
    lark = f"start: {' | '.join(texts)}"
    _check_limits(f"{where}.choice", lark)
    return f"{where}.choice", lark


def _read_tools(request: Request) -> _Grammar | None:
    """Read the tools of a request that must call one.

    The answer consists of the arguments of a named tool. Without a name, it is a list of names and
    parameters, as in vLLM's server.
    """
    name = request.forced_tool
    if name is None:
        return None
    functions = [tool.function for tool in request.tools]
    schemas = {f.name: f.parameters or {"type": "object"} for f in functions}
    if name:
        return _json(_CHOICE, schemas[name])
    rules = []
    for index, (tool, schema) in enumerate(schemas.items()):
        begin = json.dumps(f'{{"name": {json.dumps(tool)}, "parameters": ')
        options = {"x-guidance": _OPTIONS}
        rules.append(f'call_{index}: {begin} %json {json.dumps(schema | options)} "}}"')
    any_call = " | ".join(f"call_{index}" for index in range(len(schemas)))
    extra = "" if request.parallel_tool_calls is False else ' (", " call)*'
    lark = "\n".join([f'start: "[" call{extra} "]"', f"call: {any_call}", *rules])
    _check_limits(_CHOICE, lark, *schemas.values())
    return _CHOICE, lark


def _json(where: str, schema: dict[str, Any]) -> _Grammar:
    text = json.dumps(schema, ensure_ascii=False)
    _check_limits(where, text, schema)
    try:
        return where, str(llguidance.LLMatcher.grammar_from_json_schema(text, defaults=_OPTIONS))
    except ValueError as error:  # a value that is not finite
        raise field_error(where, str(error)) from None


def _check_limits(where: str, text: str, *schemas: dict[str, Any]) -> None:
    """Check the text of a grammar, and the schemas in it.

    Raises:
        APIError: Compiling it would take minutes, or a schema changes how it is compiled.
    """
    if len(text) > _CHARACTERS:
        raise field_error(where, f"expected at most {_CHARACTERS} characters")
    if any("x-guidance" in schema for schema in schemas):
        text = "expected no x-guidance, which would make keywords of the schema optional"
        raise field_error(where, text)
    values = [value for value in walk(list(schemas)) if isinstance(value, dict)]
    # llguidance makes a state for each remainder, and for each combination of remainders.
    numbers = [v["multipleOf"] for v in values if isinstance(v.get("multipleOf"), int | float)]
    multiples = [Fraction(str(n)).numerator for n in numbers if 0 < n < math.inf]
    if sum(multiples) > _MULTIPLES or math.lcm(*multiples) > _MULTIPLES:
        text = f"numbers after multipleOf with a sum and a multiple of at most {_MULTIPLES}"
        raise field_error(where, f"expected {text}")
    named = [v["patternProperties"] for v in values if "patternProperties" in v]
    names = [name for v in named if isinstance(v, dict) for name in v]
    if len(names) > _PATTERN_PROPERTIES:
        raise field_error(where, f"expected at most {_PATTERN_PROPERTIES} patternProperties")
    patterns = [v["pattern"] for v in values if isinstance(v.get("pattern"), str)]
    if sum(map(len, names + patterns)) > MAX_EXPRESSION:
        raise field_error(where, f"expected patterns of at most {MAX_EXPRESSION} characters")


# -- following a grammar ---------------------------------------------------------------------------


class Guide:
    """The current place of one request in its grammar.

    `usable` `[n]`, uint8, has a bit for each token that may be part of a text, the first token's
    lowest. `field` is the request's field that has the grammar.

    Raises:
        APIError: The grammar has no text, or is too complex for llguidance's limits.
    """

    def __init__(self, field: str, matcher: Any, usable: np.ndarray) -> None:
        self.field, self._matcher, self._usable = field, matcher, usable
        self._read_state()
        if self.complete:
            raise field_error(field, "it matches nothing but the empty text")

    def fork(self) -> "Guide":
        """Return a guide at the same place for a different answer."""
        return Guide(self.field, self._matcher.deep_copy(), self._usable)

    @property
    def complete(self) -> bool:
        """Whether the text matches, and no longer text begins with it."""
        return self._accepting and not self._allowed.any()

    def accept(self, token: int) -> None:
        """Continue with a token of the answer. Raises APIError if it cannot follow."""
        try:
            if not self._matcher.consume_tokens([token]):
                raise field_error(self.field, _explain(self._matcher))
            self._read_state()
        except APIError:
            raise
        except BaseException as error:  # a panic of the library is not an Exception
            logger.exception("a grammar failed")
            text = f"{self.field}: the grammar failed: {type(error).__name__}: {error}"
            raise APIError(500, text) from None

    def blocked(self, ends: Iterable[int], vocabulary: int) -> np.ndarray:
        """Return which tokens must not follow, bool `[V]`. `ends` are tokens that end answers."""
        bits = np.unpackbits(~self._allowed, count=vocabulary, bitorder="little")
        bits[[token for token in ends if token < vocabulary]] = not self._accepting
        return bits.view(bool)

    def _read_state(self) -> None:
        """Compute which tokens may follow, and whether the text may end."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise field_error(self.field, _explain(self._matcher))
        self._allowed = bits[: len(self._usable)] & self._usable
        self._accepting = bool(self._matcher.is_accepting())
        if not self._accepting and not self._allowed.any():
            raise field_error(self.field, _NO_TOKEN)


def _explain(matcher: Any) -> str:
    """Return llguidance's message without its state."""
    text = str(matcher.get_error()).split("\n<", 1)[0]
    if text in ("", "NoExtensionBias"):
        return _NO_TOKEN
    return " ".join(text.split())[:300]


# -- compiling a grammar ---------------------------------------------------------------------------


class Grammars:
    """Compiles the grammars of requests for one model, with V logits per token.

    `unavailable` is why the engine cannot follow a grammar. None means that it can.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, unavailable: str | None) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._unavailable = unavailable
        self._pool = ThreadPoolExecutor(_THREADS, "hf_fp8kv grammars")

    async def compile(self, request: Request) -> Guide | None:
        """Return the guide of a request, or None if it has no grammar.

        Raises:
            APIError: The request's fields or its grammar are wrong, or too complex.
        """
        requested = read_grammar(request)
        if requested is None:
            return None
        field, grammar = requested
        if self._unavailable is not None:
            text = f"{_NONE}this server has none, since {self._unavailable}; leave it out"
            raise field_error(field, text, UNSUPPORTED)
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._pool, self._compile, field, grammar)
        try:
            return await asyncio.wait_for(work, _SECONDS)
        except TimeoutError:
            expected = f"a grammar that is compiled within {_SECONDS:g} s"
            text = f"expected {expected}; simplify it, or try again later"
            raise field_error(field, text) from None

    def _compile(self, field: str, grammar: str) -> Guide:
        try:
            tokens, usable = self._tokens
        except ValueError as error:
            text = f"{_NONE}this model's tokenizer is not supported ({error}); leave it out"
            raise field_error(field, text, UNSUPPORTED) from error
        limits = llguidance.LLParserLimits(max_lexer_states=_LEXER_STATES, verbose_errors=False)
        try:
            matcher = llguidance.LLMatcher(tokens, grammar, limits=limits, log_level=0)
            if matcher.is_error():
                raise field_error(field, _explain(matcher))
            return Guide(field, matcher, usable)
        except ValueError as error:
            raise field_error(field, str(error)) from None

    @cached_property  # two threads may read it at once, with the same result
    def _tokens(self) -> tuple[Any, np.ndarray]:
        """llguidance's tokenizer, and the bits of tokens that may be part of a text."""
        inner = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        inner.no_padding()
        inner.no_truncation()
        # Each request chooses which of the model's tokens end its answer, so the grammar's end is
        # an additional token.
        inner.add_special_tokens([_END])
        end = inner.token_to_id(_END)
        size = max(self._vocabulary, inner.get_vocab_size())
        tokens = llguidance.LLTokenizer(inner.to_str(), n_vocab=size, eos_token=end)
        added = self._tokenizer.added_tokens_decoder.items()
        special = [end, *self._tokenizer.all_special_ids, *(i for i, t in added if t.special)]
        usable = np.arange(size) < self._vocabulary
        usable[special] = False
        return tokens, np.packbits(usable, bitorder="little")
