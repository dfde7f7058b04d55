"""Structured output: answers that match a JSON schema, a regular expression, or one of the choices.

llguidance computes which tokens may follow in a grammar, and the sampler masks all other tokens. A
separate thread compiles each grammar before the engine gets the request, so an error in the grammar
does not fail other requests.
"""

import asyncio
import json
import logging
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import chain
from typing import Any

import llguidance
import numpy as np
from tokenizers import Tokenizer

from .errors import UNSUPPORTED_CODE, APIError, make_field_error
from .jobs import JobPool
from .schemas import MAX_REGEX_LENGTH, AnyBody, CompletionBody, ResponseBody, walk_values

logger = logging.getLogger(__name__)

_END_TOKEN = "<|hf_fp8kv end of the grammar|>"  # no model has this token
_NUM_COMPILE_THREADS = 2
_MAX_COMPILE_SECONDS = 10.0  # time that a request waits for its grammar
# Maximum number of lexer states of a grammar, each some hundred bytes. All other limits are
# llguidance's defaults, with which a step takes at most about 30 ms.
_MAX_LEXER_STATES = 50_000
_NO_TOKEN_FOLLOWS = "none of the model's tokens can follow"
_REFUSAL_PREFIX = "this server has no structured output: "
# White space between the parts of JSON: a space, or a line break and an indentation. Without a
# limit, a model that is unsure of the next part could write white space forever.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"( |\n {0,32})"}
# Limits of a grammar: characters, and parts that need more than linear time or memory.
_MAX_GRAMMAR_CHARACTERS = 65_536
_MAX_PATTERN_PROPERTIES = 100
_MAX_MULTIPLE = 10_000

_TOOL_FIELD = "tool_choice"
# The name of a request's field, and its grammar in llguidance's format.
_Grammar = tuple[str, str]


def read_grammar(body: AnyBody) -> _Grammar | None:
    """Return the field of a request that has a grammar, and the grammar. None means no grammar.

    Raises:
        APIError: A grammar exceeds a limit, or two fields have a grammar.
    """
    call_grammar = _read_tool_grammar(body)
    output_grammar = _read_output_grammar(body)
    if call_grammar is not None and output_grammar is None:
        return call_grammar  # OpenAI's format fields apply to text. A forced call has no text
    candidates = (call_grammar, _read_format_grammar(body), output_grammar)
    grammars = [grammar for grammar in candidates if grammar is not None]
    if len(grammars) > 1:
        (field, _), (other_field, _) = grammars[:2]
        raise make_field_error(
            other_field,
            f"expected no second field besides {field}, because an answer has only one format",
        )
    return grammars[0] if grammars else None


def _read_format_grammar(body: AnyBody) -> _Grammar | None:
    if isinstance(body, CompletionBody):
        return None
    if isinstance(body, ResponseBody):
        field = "text.format"
        schema_field = "text.format"
        output_format = body.text.format
    else:
        field = "response_format"
        output_format = body.response_format
        schema_field = "response_format.json_schema"
    if output_format is None or output_format.type == "text":
        return None
    if output_format.json_schema is None:
        return _make_json_grammar(field, {"type": "object"})
    return _make_json_grammar(f"{schema_field}.schema", output_format.json_schema.schema_)


def _read_output_grammar(body: AnyBody) -> _Grammar | None:
    outputs = body.structured_outputs
    field = "structured_outputs"
    if outputs is None:
        return None
    if outputs.json_object:
        return _make_json_grammar(f"{field}.json_object", {"type": "object"})
    if outputs.json_ is not None:
        return _make_json_grammar(f"{field}.json", outputs.json_)
    if outputs.regex is not None:
        return f"{field}.regex", str(llguidance.LLMatcher.grammar_from_regex(outputs.regex))
    # JSON does not escape the control character DEL, but Lark's strings need it.
    lark_strings = [
        json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
        for text in outputs.choice or ()
    ]
    lark_grammar = f"start: {' | '.join(lark_strings)}"
    _check_limits(f"{field}.choice", lark_grammar)
    return f"{field}.choice", lark_grammar


def _read_tool_grammar(body: AnyBody) -> _Grammar | None:
    """Return the grammar of a request that must call a tool, or None for other requests.

    If the request names a tool, the answer consists of the tool's arguments. Otherwise, the answer
    is a list of names and parameters, as in vLLM's server.
    """
    if isinstance(body, CompletionBody) or body.forced_tool is None:
        return None
    name = body.forced_tool
    functions = [tool.function for tool in body.tools]
    schemas = {function.name: function.parameters or {"type": "object"} for function in functions}
    if name:
        return _make_json_grammar(_TOOL_FIELD, schemas[name])
    rules = []
    for index, (tool, schema) in enumerate(schemas.items()):
        prefix = json.dumps(f'{{"name": {json.dumps(tool)}, "parameters": ')
        json_schema = json.dumps(schema | {"x-guidance": _JSON_OPTIONS})
        rules.append(f'call_{index}: {prefix} %json {json_schema} "}}"')
    any_call = " | ".join(f"call_{index}" for index in range(len(schemas)))
    more_calls = "" if body.parallel_tool_calls is False else ' (", " call)*'
    lark_grammar = "\n".join([f'start: "[" call{more_calls} "]"', f"call: {any_call}", *rules])
    _check_limits(_TOOL_FIELD, lark_grammar, *schemas.values())
    return _TOOL_FIELD, lark_grammar


def _make_json_grammar(field: str, schema: dict[str, Any]) -> _Grammar:
    text = json.dumps(schema, ensure_ascii=False)
    _check_limits(field, text, schema)
    try:
        return field, str(
            llguidance.LLMatcher.grammar_from_json_schema(text, defaults=_JSON_OPTIONS)
        )
    except ValueError as error:  # the schema has a value that is not finite
        raise make_field_error(field, str(error)) from None


def _check_limits(field: str, text: str, *schemas: dict[str, Any]) -> None:
    """Raise APIError if compiling could take minutes, or if a schema has compiler options."""
    if len(text) > _MAX_GRAMMAR_CHARACTERS:
        raise make_field_error(field, f"expected at most {_MAX_GRAMMAR_CHARACTERS} characters")
    if any("x-guidance" in schema for schema in schemas):
        raise make_field_error(
            field, "expected no x-guidance, which would make keywords of the schema optional"
        )
    objects = [value for value in walk_values(list(schemas)) if isinstance(value, dict)]
    # llguidance creates a state for each remainder, and for each combination of remainders.
    multiples = [value.get("multipleOf") for value in objects]
    numerators = [
        Fraction(str(multiple)).numerator
        for multiple in multiples
        if isinstance(multiple, int | float) and 0 < multiple < math.inf
    ]
    if sum(numerators) > _MAX_MULTIPLE or math.lcm(*numerators) > _MAX_MULTIPLE:
        raise make_field_error(
            field,
            f"expected multipleOf with a sum and a common multiple of at most {_MAX_MULTIPLE}",
        )
    _check_integers(field, objects)
    entries = [value.get("patternProperties") for value in objects]
    key_patterns = list(chain.from_iterable(entry for entry in entries if isinstance(entry, dict)))
    if len(key_patterns) > _MAX_PATTERN_PROPERTIES:
        raise make_field_error(
            field, f"expected at most {_MAX_PATTERN_PROPERTIES} patternProperties"
        )
    patterns = [value["pattern"] for value in objects if isinstance(value.get("pattern"), str)]
    if sum(map(len, key_patterns + patterns)) > MAX_REGEX_LENGTH:
        raise make_field_error(field, f"expected patterns of at most {MAX_REGEX_LENGTH} characters")


def _check_integers(field: str, objects: Sequence[dict[str, Any]]) -> None:
    """Raise APIError for numbers that llguidance would change.

    It reads constants as float64, and clamps the bounds of integers to int64.
    """
    for value in objects:
        enum = value.get("enum")
        constants = [value.get("const"), *(enum if isinstance(enum, list) else ())]
        if any(type(number) is int and abs(number) > 2**53 for number in constants):
            raise make_field_error(field, "expected integers from -2^53 to 2^53 in const and enum")
        lower = [value.get(name) for name in ("minimum", "exclusiveMinimum")]
        upper = [value.get(name) for name in ("maximum", "exclusiveMaximum")]
        is_integer = value.get("type") == "integer"
        if is_integer and (
            any(isinstance(bound, int | float) and bound >= 2**63 for bound in lower)
            or any(isinstance(bound, int | float) and bound < -(2**63) for bound in upper)
        ):
            raise make_field_error(field, "expected a range of integers that contains an int64")


class Guide:
    """The state of one request in its grammar.

    `text_bits`, `[n]` uint8, has a bit for each token that may be part of a text, from the lowest
    bit of the first byte on. `field` is the request's field that has the grammar.

    Raises:
        APIError: No text matches the grammar, or it is too complex for llguidance's limits.
    """

    def __init__(self, field: str, matcher: Any, text_bits: np.ndarray) -> None:
        self.field = field
        self._matcher = matcher
        self._text_bits = text_bits
        self._read_state()
        if self.is_complete:
            raise make_field_error(field, "expected a grammar of text, got only the empty text")

    def fork(self) -> "Guide":
        """Return a guide in the same state, for another answer."""
        return Guide(self.field, self._matcher.deep_copy(), self._text_bits)

    @property
    def is_complete(self) -> bool:
        """Whether the text matches the grammar, and no token may follow."""
        return self._is_accepting and not self._allowed_bits.any()

    def accept(self, token: int) -> None:
        """Advance by a token of the answer. Raise APIError if the token cannot follow."""
        try:
            if not self._matcher.consume_tokens([token]):
                raise make_field_error(self.field, _get_error(self._matcher))
            self._read_state()
        except APIError:
            raise
        except BaseException as error:  # a panic in llguidance is not an Exception
            logger.exception("a grammar failed")
            raise APIError(
                500, f"{self.field}: the grammar failed: {type(error).__name__}: {error}"
            ) from None

    def compute_mask(self, end_tokens: Iterable[int], vocab_size: int) -> np.ndarray:
        """Return a mask of tokens that must not follow, `[V]`, bool. `end_tokens` end the text."""
        bits = np.unpackbits(~self._allowed_bits, count=vocab_size, bitorder="little")
        bits[[token for token in end_tokens if token < vocab_size]] = not self._is_accepting
        return bits.view(bool)

    def _read_state(self) -> None:
        """Compute which tokens may follow, and whether the text may end."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise make_field_error(self.field, _get_error(self._matcher))
        self._allowed_bits = bits[: len(self._text_bits)] & self._text_bits
        self._is_accepting = bool(self._matcher.is_accepting())
        if not self._is_accepting and not self._allowed_bits.any():
            raise make_field_error(self.field, _NO_TOKEN_FOLLOWS)


def _get_error(matcher: Any) -> str:
    """Return the error message of llguidance, without the dump of its state."""
    message = str(matcher.get_error()).split("\n<", 1)[0]
    if message in ("", "NoExtensionBias"):
        return _NO_TOKEN_FOLLOWS
    return " ".join(message.split())[:300]


class Grammars:
    """Compiles the grammars of requests for one model with `vocab_size` logits per token.

    `unavailable_reason` is why the engine cannot follow a grammar. None means that it can.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, unavailable_reason: str | None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._unavailable_reason = unavailable_reason
        self.pool = JobPool("grammars", _NUM_COMPILE_THREADS)

    async def compile(self, body: AnyBody) -> Guide | None:
        """Return the guide of a request, or None if the request has no grammar.

        Raises:
            APIError: The request's fields or its grammar are invalid, or too complex.
        """
        grammar = read_grammar(body)
        if grammar is None:
            return None
        field, source = grammar
        if self._unavailable_reason is not None:
            raise make_field_error(
                field,
                f"{_REFUSAL_PREFIX}{self._unavailable_reason}. Omit the field",
                UNSUPPORTED_CODE,
            )
        try:
            async with asyncio.timeout(_MAX_COMPILE_SECONDS):
                return await self.pool.run(self._compile_grammar, field, source)
        except TimeoutError:
            raise make_field_error(
                field,
                f"expected a grammar that is compiled within {_MAX_COMPILE_SECONDS:g} s. Simplify "
                "it, or try again later",
            ) from None

    def _compile_grammar(self, field: str, grammar: str) -> Guide:
        try:
            tokenizer, text_bits = self._grammar_tokenizer
        except ValueError as error:
            raise make_field_error(
                field,
                f"{_REFUSAL_PREFIX}this model's tokenizer is not supported ({error}). Omit it",
                UNSUPPORTED_CODE,
            ) from error
        limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        try:
            matcher = llguidance.LLMatcher(tokenizer, grammar, limits=limits, log_level=0)
            if matcher.is_error():
                raise make_field_error(field, _get_error(matcher))
            return Guide(field, matcher, text_bits)
        except ValueError as error:
            raise make_field_error(field, str(error)) from None

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
        num_ids = max(self._vocab_size, backend.get_vocab_size())
        tokenizer = llguidance.LLTokenizer(backend.to_str(), n_vocab=num_ids, eos_token=end_token)
        added_tokens = self._tokenizer.added_tokens_decoder.items()
        special_ids = [token_id for token_id, token in added_tokens if token.special]
        special_ids += self._tokenizer.all_special_ids
        is_text = np.arange(num_ids) < self._vocab_size
        is_text[[end_token, *special_ids]] = False
        return tokenizer, np.packbits(is_text, bitorder="little")
