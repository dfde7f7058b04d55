"""Structured output: answers that match a JSON schema, a regular expression, or one of the choices.

llguidance computes which tokens may follow in a grammar, and the sampler masks all other tokens. A
grammar is compiled in a separate thread before the engine gets the request, so an error in the
grammar fails no other request.
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

from .errors import UNSUPPORTED_CODE, APIError, field_error
from .schemas import MAX_REGEX_LENGTH, Request, walk_values

logger = logging.getLogger(__name__)

_END_TOKEN = "<|hf_fp8kv end of the grammar|>"  # no model has this token
_NUM_THREADS = 2
_MAX_SECONDS = 10.0  # time that a request waits for its grammar
# Maximum number of lexer states of a grammar, some hundred bytes each. All other limits are
# llguidance's defaults, about 30 ms for a step.
_MAX_LEXER_STATES = 50_000
_NO_TOKEN_FOLLOWS = "none of the model's tokens can follow"
_REFUSAL = "this server has no structured output: "
# White space between the parts of JSON: a space, or a line break and an indentation. Without a
# limit, a model that is unsure of the next part could write white space forever.
_DEFAULTS: Any = {"whitespace_pattern": r"( |\n {0,32})"}
# Limits of a grammar: characters, and parts whose time or memory is not linear in the characters.
_MAX_CHARACTERS = 65_536
_MAX_PATTERN_PROPERTIES = 100
_MAX_MULTIPLE = 10_000

_TOOL_CHOICE = "tool_choice"
# The name of a request's field, and its grammar in llguidance's format.
_Grammar = tuple[str, str]


def read_grammar(request: Request) -> _Grammar | None:
    """Return the field of a request that has a grammar, and the grammar. None means no grammar.

    Raises:
        APIError: A grammar exceeds a limit, or two fields have a grammar.
    """
    tools, outputs = _read_tools(request), _read_structured_outputs(request)
    if tools is not None and outputs is None:
        return tools  # OpenAI's format fields apply to text, which a forced call does not have
    grammars = [x for x in (tools, _read_format(request), outputs) if x is not None]
    if len(grammars) > 1:
        (field, _), (other_field, _) = grammars[:2]
        message = f"expected no second field besides {field}, because an answer has only one form"
        raise field_error(other_field, message)
    return grammars[0] if grammars else None


def _read_format(request: Request) -> _Grammar | None:
    field, output_format = "response_format", request.response_format
    if output_format is None:
        field, output_format = "text.format", request.text.format
    if output_format is None or output_format.type == "text":
        return None
    if output_format.json_schema is None:
        return _make_json_grammar(field, {"type": "object"})
    schema_key = ".json_schema" if output_format is request.response_format else ""
    return _make_json_grammar(f"{field}{schema_key}.schema", output_format.json_schema.schema_)


def _read_structured_outputs(request: Request) -> _Grammar | None:
    outputs, field = request.structured_outputs, "structured_outputs"
    if outputs is None:
        return None
    if outputs.json_object:
        return _make_json_grammar(f"{field}.json_object", {"type": "object"})
    if outputs.json_ is not None:
        return _make_json_grammar(f"{field}.json", outputs.json_)
    if outputs.regex is not None:
        return f"{field}.regex", str(llguidance.LLMatcher.grammar_from_regex(outputs.regex))
    texts = (json.dumps(text, ensure_ascii=False) for text in outputs.choice or ())
    lark = f"start: {' | '.join(texts)}"
    _check_limits(f"{field}.choice", lark)
    return f"{field}.choice", lark


def _read_tools(request: Request) -> _Grammar | None:
    """Return the grammar of a request that must call a tool, or None for other requests.

    The answer consists of the arguments of the named tool. Without a name, the answer is a list of
    names and parameters, as in vLLM's server.
    """
    name = request.forced_tool
    if name is None:
        return None
    functions = [tool.function for tool in request.tools]
    schemas = {function.name: function.parameters or {"type": "object"} for function in functions}
    if name:
        return _make_json_grammar(_TOOL_CHOICE, schemas[name])
    rules = []
    for index, (tool, schema) in enumerate(schemas.items()):
        prefix = json.dumps(f'{{"name": {json.dumps(tool)}, "parameters": ')
        options = {"x-guidance": _DEFAULTS}
        rules.append(f'call_{index}: {prefix} %json {json.dumps(schema | options)} "}}"')
    any_call = " | ".join(f"call_{index}" for index in range(len(schemas)))
    more_calls = "" if request.parallel_tool_calls is False else ' (", " call)*'
    lark = "\n".join([f'start: "[" call{more_calls} "]"', f"call: {any_call}", *rules])
    _check_limits(_TOOL_CHOICE, lark, *schemas.values())
    return _TOOL_CHOICE, lark


def _make_json_grammar(field: str, schema: dict[str, Any]) -> _Grammar:
    text = json.dumps(schema, ensure_ascii=False)
    _check_limits(field, text, schema)
    try:
        return field, str(llguidance.LLMatcher.grammar_from_json_schema(text, defaults=_DEFAULTS))
    except ValueError as error:  # the schema has a value that is not finite
        raise field_error(field, str(error)) from None


def _check_limits(field: str, text: str, *schemas: dict[str, Any]) -> None:
    """Check the limits of a grammar's text and of the schemas in it.

    Raises:
        APIError: Compiling it would take minutes, or a schema has options of the compiler.
    """
    if len(text) > _MAX_CHARACTERS:
        raise field_error(field, f"expected at most {_MAX_CHARACTERS} characters")
    if any("x-guidance" in schema for schema in schemas):
        message = "expected no x-guidance, which would make keywords of the schema optional"
        raise field_error(field, message)
    values = [value for value in walk_values(list(schemas)) if isinstance(value, dict)]
    # llguidance creates a state for each remainder, and for each combination of remainders.
    divisors = [v["multipleOf"] for v in values if isinstance(v.get("multipleOf"), int | float)]
    multiples = [Fraction(str(n)).numerator for n in divisors if 0 < n < math.inf]
    if sum(multiples) > _MAX_MULTIPLE or math.lcm(*multiples) > _MAX_MULTIPLE:
        expected = f"values of multipleOf with a sum and a multiple of at most {_MAX_MULTIPLE}"
        raise field_error(field, f"expected {expected}")
    patterns_by_name = [v["patternProperties"] for v in values if "patternProperties" in v]
    names = [name for v in patterns_by_name if isinstance(v, dict) for name in v]
    if len(names) > _MAX_PATTERN_PROPERTIES:
        raise field_error(field, f"expected at most {_MAX_PATTERN_PROPERTIES} patternProperties")
    patterns = [v["pattern"] for v in values if isinstance(v.get("pattern"), str)]
    if sum(map(len, names + patterns)) > MAX_REGEX_LENGTH:
        raise field_error(field, f"expected patterns of at most {MAX_REGEX_LENGTH} characters")


# -- state of a grammar ----------------------------------------------------------------------------


class Guide:
    """The state of one request in its grammar.

    `text_bits` `[n]`, uint8, has a bit for each token that may be part of a text, from the lowest
    bit of the first byte. `field` is the request's field that has the grammar.

    Raises:
        APIError: No text matches the grammar, or it is too complex for llguidance's limits.
    """

    def __init__(self, field: str, matcher: Any, text_bits: np.ndarray) -> None:
        self.field, self._matcher, self._text_bits = field, matcher, text_bits
        self._read_state()
        if self.is_complete:
            raise field_error(field, "it matches only the empty text")

    def fork(self) -> "Guide":
        """Return a guide in the same state for a different answer."""
        return Guide(self.field, self._matcher.deep_copy(), self._text_bits)

    @property
    def is_complete(self) -> bool:
        """Whether the text matches the grammar, and no longer text that matches begins with it."""
        return self._is_accepting and not self._allowed_bits.any()

    def accept(self, token: int) -> None:
        """Advance by a token of the answer. Raise APIError if the token cannot follow."""
        try:
            if not self._matcher.consume_tokens([token]):
                raise field_error(self.field, _get_error(self._matcher))
            self._read_state()
        except APIError:
            raise
        except BaseException as error:  # a panic in llguidance is not an Exception
            logger.exception("a grammar failed")
            message = f"{self.field}: the grammar failed: {type(error).__name__}: {error}"
            raise APIError(500, message) from None

    def blocked_mask(self, end_tokens: Iterable[int], vocab_size: int) -> np.ndarray:
        """Return which tokens must not follow, bool `[V]`. `end_tokens` end the answer."""
        bits = np.unpackbits(~self._allowed_bits, count=vocab_size, bitorder="little")
        bits[[token for token in end_tokens if token < vocab_size]] = not self._is_accepting
        return bits.view(bool)

    def _read_state(self) -> None:
        """Compute which tokens may follow, and whether the text may end."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise field_error(self.field, _get_error(self._matcher))
        self._allowed_bits = bits[: len(self._text_bits)] & self._text_bits
        self._is_accepting = bool(self._matcher.is_accepting())
        if not self._is_accepting and not self._allowed_bits.any():
            raise field_error(self.field, _NO_TOKEN_FOLLOWS)


def _get_error(matcher: Any) -> str:
    """Return the error message of llguidance, without the dump of its state."""
    message = str(matcher.get_error()).split("\n<", 1)[0]
    if message in ("", "NoExtensionBias"):
        return _NO_TOKEN_FOLLOWS
    return " ".join(message.split())[:300]


# -- compiling a grammar ---------------------------------------------------------------------------


class Grammars:
    """Compiles the grammars of requests for one model with `vocab_size` logits per token.

    `unavailable_reason` is the reason why the engine cannot follow a grammar. None means it can.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, unavailable_reason: str | None) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._unavailable_reason = unavailable_reason
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "hf_fp8kv grammars")

    async def compile(self, request: Request) -> Guide | None:
        """Return the guide of a request, or None if the request has no grammar.

        Raises:
            APIError: The request's fields or its grammar are wrong, or too complex.
        """
        grammar = read_grammar(request)
        if grammar is None:
            return None
        field, source = grammar
        if self._unavailable_reason is not None:
            message = f"{_REFUSAL}{self._unavailable_reason}. Omit the field"
            raise field_error(field, message, UNSUPPORTED_CODE)
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._pool, self._compile_grammar, field, source)
        try:
            return await asyncio.wait_for(future, _MAX_SECONDS)
        except TimeoutError:
            expected = f"a grammar that is compiled within {_MAX_SECONDS:g} s"
            message = f"expected {expected}. Simplify it, or try again later"
            raise field_error(field, message) from None

    def _compile_grammar(self, field: str, grammar: str) -> Guide:
        try:
            tokenizer, text_bits = self._grammar_tokenizer
        except ValueError as error:
            message = f"{_REFUSAL}this model's tokenizer is not supported ({error}). Omit it"
            raise field_error(field, message, UNSUPPORTED_CODE) from error
        limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        try:
            matcher = llguidance.LLMatcher(tokenizer, grammar, limits=limits, log_level=0)
            if matcher.is_error():
                raise field_error(field, _get_error(matcher))
            return Guide(field, matcher, text_bits)
        except ValueError as error:
            raise field_error(field, str(error)) from None

    @cached_property  # two threads may compute it concurrently, with the same result
    def _grammar_tokenizer(self) -> tuple[Any, np.ndarray]:
        """The tokenizer for llguidance, and a bit for each token that may be part of a text."""
        backend = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        backend.no_padding()
        backend.no_truncation()
        # Each request chooses which of the model's tokens end its answer, so an additional token
        # marks the end of the grammar.
        backend.add_special_tokens([_END_TOKEN])
        end_token = backend.token_to_id(_END_TOKEN)
        n_vocab = max(self._vocab_size, backend.get_vocab_size())
        tokenizer = llguidance.LLTokenizer(backend.to_str(), n_vocab=n_vocab, eos_token=end_token)
        added = self._tokenizer.added_tokens_decoder.items()
        special_ids = [*self._tokenizer.all_special_ids, *(i for i, x in added if x.special)]
        is_text = np.arange(n_vocab) < self._vocab_size
        is_text[[end_token, *special_ids]] = False
        return tokenizer, np.packbits(is_text, bitorder="little")
