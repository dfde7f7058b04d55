"""The fields of requests for structured output, and the grammars that they stand for."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from .errors import APIError
from .tool_calls import CHOICE, forced_tool, tool_functions

# Between the parts of JSON: a space, or a line break and an indentation. Models that do not know
# how to go on would write white space without end.
_WHITESPACE = r"( |\n {0,32})"
# Limits of a grammar: its characters, and parts whose time or memory is not linear in these.
_CHARACTERS = 65_536
_EXPRESSIONS = 8_192  # characters of regular expressions
_PATTERN_PROPERTIES = 100
_MULTIPLES = 10_000

# vLLM's field.
STRUCTURED = "structured_outputs"
# The field, and what makes its grammar with llguidance's LLMatcher.
_Asked = tuple[str, Callable[[Any], str]]


def read_grammar(body: Mapping[str, Any]) -> _Asked | None:
    """Return the field of a request that has a grammar, and what makes it; None: there is none.

    Raises APIError: fields are wrong, or two of them have a grammar.
    """
    found = [read(body[name]) for name, read in _READERS.items() if name in body]
    tools = _read_tools(body)
    if tools is not None and STRUCTURED not in body:
        return tools  # OpenAI's own fields are about the text, and such an answer has none
    asked = [one for one in [tools, *found] if one is not None]
    if len(asked) > 1:
        (field, _), (other, _) = asked[:2]
        raise _wrong(other, f"nothing beside {field}, since an answer has one form")
    return asked[0] if asked else None


def _read_response_format(given: Any) -> _Asked | None:
    where = "response_format"
    kind = _kind(where, given)
    if kind != "json_schema":
        _check_names(where, given, ("type",))
        return None if kind == "text" else _json(where, {"type": "object"})
    _check_names(where, given, ("type", "json_schema"))
    return _read_schema(f"{where}.json_schema", given.get("json_schema"), ())


def _read_text(given: Any) -> _Asked | None:
    _check_names("text", given, ("format", "verbosity"))
    if given.get("verbosity") not in (None, "medium"):
        raise _wrong("text.verbosity", "medium")
    where, inner = "text.format", given.get("format")
    if inner is None:
        return None
    kind = _kind(where, inner)
    if kind == "json_schema":
        return _read_schema(where, inner, ("type",))
    _check_names(where, inner, ("type",))
    return None if kind == "text" else _json(where, {"type": "object"})


def _kind(where: str, given: Any) -> str:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise _wrong(f"{where}.type", "one of text, json_object, json_schema")
    return str(kind)


def _read_schema(where: str, given: Any, others: tuple[str, ...]) -> _Asked:
    _check_names(where, given, ("name", "description", "schema", "strict", *others))
    if not isinstance(given.get("schema"), dict):
        raise _wrong(f"{where}.schema", "a JSON schema, which is an object")
    return _json(f"{where}.schema", given["schema"])


def _read_structured_outputs(given: Any) -> _Asked | None:
    where = STRUCTURED
    _check_names(where, given, ("json", "regex", "choice", "json_object"))
    asked = {name: value for name, value in given.items() if value not in (None, False)}
    if len(asked) != 1:
        raise _wrong(where, "one of json, regex, choice, json_object")
    ((name, value),) = asked.items()
    where = f"{where}.{name}"
    if name == "json_object":
        if value is not True:
            raise _wrong(where, "true or false")
        return _json(where, {"type": "object"})
    if name == "json":
        if isinstance(value, str):  # as other servers take it
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                value = None
        if not isinstance(value, dict):
            raise _wrong(where, "a JSON schema, which is an object")
        return _json(where, value)
    if name == "regex":
        if not isinstance(value, str) or not value:
            raise _wrong(where, "a regular expression")
        if len(value) > _EXPRESSIONS:
            raise _wrong(where, f"at most {_EXPRESSIONS} characters")
        return where, lambda matcher: str(matcher.grammar_from_regex(value))
    texts = value if isinstance(value, list) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise _wrong(where, "a list of texts")
    lark = "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return _limited(where, lark, lambda matcher: str(matcher.grammar_from_lark(lark)))


_READERS: Mapping[str, Callable[[Any], _Asked | None]] = {
    "response_format": _read_response_format,
    "text": _read_text,
    STRUCTURED: _read_structured_outputs,
}
FORMAT_FIELDS = frozenset(_READERS)


def _read_tools(body: Mapping[str, Any]) -> _Asked | None:
    """Read the tools of a request that has to call one.

    Of one that is named, the answer is its arguments; else a list of names and parameters, as in
    vLLM's server.
    """
    name = forced_tool(body)
    if name is None:
        return None
    schemas = {f["name"]: f.get("parameters") or {"type": "object"} for f in tool_functions(body)}
    if name:
        return _json(CHOICE, schemas[name])
    rules = []
    for index, (tool, schema) in enumerate(schemas.items()):
        begin = json.dumps(f'{{"name": {json.dumps(tool)}, "parameters": ')
        options = {"x-guidance": {"whitespace_pattern": _WHITESPACE}}
        rules.append(f'call_{index}: {begin} %json {json.dumps(schema | options)} "}}"')
    any_call = " | ".join(f"call_{index}" for index in range(len(schemas)))
    more = "" if body.get("parallel_tool_calls") is False else ' (", " call)*'
    lark = "\n".join([f'start: "[" call{more} "]"', f"call: {any_call}", *rules])
    make = lambda matcher: str(matcher.grammar_from_lark(lark))  # noqa: E731
    return _limited(CHOICE, lark, make, *schemas.values())


def _json(where: str, schema: dict[str, Any]) -> _Asked:
    options = {"whitespace_pattern": _WHITESPACE}
    text = json.dumps(schema, ensure_ascii=False)
    make = lambda matcher: str(matcher.grammar_from_json_schema(text, defaults=options))  # noqa: E731
    return _limited(where, text, make, schema)


def _limited(where: str, text: str, make: Callable[[Any], str], *schemas: dict[str, Any]) -> _Asked:
    """Return a grammar.

    Raises:
        APIError: Compiling it would take minutes, or a schema changes how it is compiled.
    """
    if len(text) > _CHARACTERS:
        raise _wrong(where, f"at most {_CHARACTERS} characters")
    if any("x-guidance" in schema for schema in schemas):
        raise _wrong(where, "no x-guidance, which would make keywords of the schema optional")
    values = list(_walk(list(schemas)))
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
    return where, make


def _walk(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects in a JSON value."""
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield value
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)


def _check_names(where: str, given: Any, names: tuple[str, ...]) -> None:
    if not isinstance(given, dict):
        raise _wrong(where, f"an object with {', '.join(names)}")
    for name in given.keys() - set(names):
        raise _wrong(f"{where}.{name:.100}", f"nothing; this server knows {', '.join(names)}")


def _wrong(where: str, expected: str) -> APIError:
    return APIError(400, f"{where}: expected {expected}", param=where)
