"""Which requests are answered: the fields of a body, checked before anything is done with it.

What transformers' server would leave out without a word (penalties, several answers, pictures for a
model of text, ...) is refused: an answer to another question is worse than none.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from .errors import APIError

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "GENERATES",
    "OWN_FIELDS",
    "RESPONSES",
    "characters",
    "check_body",
    "parse_body",
]

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
GENERATES = (CHAT, COMPLETIONS, RESPONSES)

# Fields that other servers have, and transformers' does not.
OWN_FIELDS = frozenset({"top_k"})
_TEXT_PARTS = ("text", "input_text", "output_text")
# Only these values mean what the server does anyway.
_ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "audio": (),
    "prediction": (),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "previous_response_id": (),
    "background": (False,),
    "conversation": (),
    "include": ([],),
    "reasoning": ({},),
    "reasoning_effort": (),
    "text": ({}, {"format": {"type": "text"}}),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_SEEDS = 2**63


def parse_body(raw: bytes) -> dict[str, Any]:
    """Returns the JSON object in the bytes of a body.

    Raises:
        APIError: it is not UTF-8, not JSON, not an object, or holds text that is no text.
    """
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
        # Halves of UTF-16 pairs are legal JSON, and no tokenizer takes them.
        json.dumps(body, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise APIError(400, f"expected JSON in UTF-8, got other bytes: {error}") from None
    except RecursionError:
        raise APIError(400, "expected JSON of some depth, got one nested too deeply") from None
    except ValueError as error:
        raise APIError(400, f"expected JSON, got what is none: {error}") from None
    if not isinstance(body, dict):
        raise APIError(400, f"expected a JSON object, got a {type(body).__name__}")
    return body


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def characters(value: Any) -> int:
    """Returns the length of all texts in a JSON value."""
    if isinstance(value, str):
        return len(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(characters, inner))


def check_body(
    path: str, body: dict[str, Any], fields: frozenset[str], template_names: frozenset[str]
) -> dict[str, Any]:
    """Returns the body without fields that are null; `model` is not looked at.

    Args:
        path: one of GENERATES.
        body: the JSON object.
        fields: what transformers' server knows of the path.
        template_names: what chat_template_kwargs must not name.

    Raises:
        APIError: a field cannot mean what it says.
    """
    body = {name: value for name, value in body.items() if value is not None}
    for name in sorted(body.keys() - fields - OWN_FIELDS):
        raise APIError(
            400, f"{name:.100}: expected a field that {path} has; leave it out",
            param=name, code="unknown_parameter",
        )  # fmt: skip
    for name, check in _FIELDS.items():
        if name in body:
            check(name, body[name])
    for name, values in _ONLY.items():
        if name in body and not any(_same(body[name], value) for value in values):
            raise APIError(
                400,
                f"{name}: expected {_list(values)}, got {_short(body[name])}; "
                "this server does nothing else",
                param=name,
                code="unsupported_parameter",
            )
    _REQUIRED[path](body)
    _template_arguments(body, template_names)
    body.setdefault("stream", False)  # transformers would stream what `responses` does not stream
    return body


def _same(a: Any, b: Any) -> bool:
    return (type(a) is type(b) and a == b) or (_is_number(a) and _is_number(b) and a == b)


def _list(values: tuple[Any, ...]) -> str:
    return " or ".join(map(json.dumps, values)) if values else "nothing"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _wrong(name: str, expected: str, value: Any) -> APIError:
    return APIError(400, f"{name}: expected {expected}, got {_short(value)}", param=name)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(low: float, high: float, *, above: bool = False) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        fits = _is_number(value) and (low < value if above else low <= value) and value <= high
        if not fits or not math.isfinite(value):
            span = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
            raise _wrong(name, f"a number {span}", value)

    return check


def _whole(low: int, high: int) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < high:
            raise _wrong(name, f"a whole number, {low} or more", value)

    return check


def _of(kind: type, expected: str) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, kind):
            raise _wrong(name, expected, value)

    return check


def _generation_config(name: str, value: Any) -> None:
    """A JSON object in a string, of names and values that GenerationConfig takes."""
    from transformers import GenerationConfig

    expected = "a GenerationConfig as a JSON object in a string"
    try:
        given = json.loads(value)
        if not isinstance(given, dict):
            raise TypeError
        GenerationConfig(**given)
    except Exception:  # it checks its values in many ways
        raise _wrong(name, expected, value) from None
    for field, found in given.items():
        where = f"{name}.{field}"
        if found is None or field in _CONFIG_ANY:
            continue
        if field in _CONFIG:
            _CONFIG[field](where, found)
        elif found is not False and (
            field not in _CONFIG_ONLY or not _same(found, _CONFIG_ONLY[field])
        ):
            raise APIError(
                400,
                f"{where}: expected one of {', '.join(_CONFIG)}, got {_short(found)}; this server "
                "does nothing else",
                param=where,
                code="unsupported_parameter",
            )


def _ends(name: str, value: Any) -> None:
    for end in value if isinstance(value, list) else [value]:
        _whole(-1, _SEEDS)(name, end)


_CONFIG: Mapping[str, Callable[[str, Any], None]] = {
    "do_sample": _of(bool, "true or false"),
    "temperature": _number(0, 2),
    "top_p": _number(0, 1, above=True),
    "top_k": _whole(0, _SEEDS),
    "max_new_tokens": _whole(1, _SEEDS),
    "eos_token_id": _ends,
}
# What changes no answer here, and values with which nothing is done.
_CONFIG_ANY = ("transformers_version", "bos_token_id", "pad_token_id", "use_cache")
_CONFIG_ONLY = {
    "_from_model_config": True,
    "length_penalty": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1,
}


def _stop(name: str, value: Any) -> None:
    stops = [value] if isinstance(value, str) else value
    fits = isinstance(stops, list) and len(stops) <= 4
    if not fits or not all(isinstance(stop, str) and stop for stop in stops):
        raise _wrong(name, "a text, or a list of up to four", value)


_FIELDS: Mapping[str, Callable[[str, Any], None]] = {
    "stop": _stop,
    "stream": _of(bool, "true or false"),
    "max_tokens": _whole(1, _SEEDS),
    "max_completion_tokens": _whole(1, _SEEDS),
    "max_output_tokens": _whole(1, _SEEDS),
    "temperature": _number(0, 2),
    "top_p": _number(0, 1, above=True),
    "top_k": _whole(-1, _SEEDS),
    "seed": _whole(-_SEEDS, _SEEDS),
    "suffix": _of(str, "text"),
    "instructions": _of(str, "text"),
    "generation_config": _generation_config,
    "chat_template_kwargs": _of(dict, "an object"),
    "stream_options": _of(dict, "an object"),
}


# -- what each way of asking needs ---------------------------------------------------------------


def _chat(body: dict[str, Any]) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "a list of one message or more", messages)
    for at, message in enumerate(messages):
        _message(f"messages[{at}]", message)
    _tools(body)


def _completions(body: dict[str, Any]) -> None:
    if not isinstance(body.get("prompt"), str) or not body["prompt"]:
        raise _wrong("prompt", "text", body.get("prompt"))


def _responses(body: dict[str, Any]) -> None:
    if "prompt" in body:  # a stored template
        raise _wrong("prompt", "it left out", body["prompt"])
    given = body.get("input")
    if isinstance(given, dict):
        given = [given]
    if not isinstance(given, str | list) or not given:
        raise _wrong("input", "text, or a list of one message or more", given)
    if isinstance(given, list):
        for at, item in enumerate(given):
            if not isinstance(item, dict):
                raise _wrong(f"input[{at}]", "an object", item)
            if item.get("type", "message") == "message":
                _message(f"input[{at}]", item)
    _tools(body)


_REQUIRED = {CHAT: _chat, COMPLETIONS: _completions, RESPONSES: _responses}


def _message(where: str, message: Any) -> None:
    if not isinstance(message, dict):
        raise _wrong(where, "an object", message)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise _wrong(f"{where}.role", "text", role)
    if content is not None and not isinstance(content, str | list):
        raise _wrong(f"{where}.content", "text, or a list of parts", content)
    for at, part in enumerate(content if isinstance(content, list) else []):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise _wrong(f"{where}.content[{at}]", "a part with type text and a text", part)
    calls = message.get("tool_calls")
    if "tool_calls" in message and not isinstance(calls, list):
        raise _wrong(f"{where}.tool_calls", "a list", calls)
    for at, call in enumerate(calls or []):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong(f"{where}.tool_calls[{at}]", "an object with a function's name", call)


def _tools(body: dict[str, Any]) -> None:
    tools = body.get("tools", [])
    if not isinstance(tools, list):
        raise _wrong("tools", "a list of functions", tools)
    for at, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if not named or tool.get("type", "function") != "function":
            raise _wrong(f"tools[{at}]", "a function with a name", tool)


def _template_arguments(body: dict[str, Any], names: frozenset[str]) -> None:
    """A client fills in the model's template; it does not bring one, nor change how it is used."""
    for name, value in body.get("chat_template_kwargs", {}).items():
        where = f"chat_template_kwargs.{name}"
        if name in names:
            raise APIError(400, f"{where}: this server sets it itself; leave it out", param=where)
        if not isinstance(value, str | bool | int | float | None):
            raise _wrong(where, "text, a number, true, false or null", value)
