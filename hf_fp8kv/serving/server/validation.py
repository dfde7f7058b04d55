"""Validation of request bodies.

What transformers' server would silently ignore (penalties, several answers, pictures for a text
model, ...) is rejected: an answer to another question is worse than none.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from .errors import APIError

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
GENERATES = (CHAT, COMPLETIONS, RESPONSES)

# Whether a value is valid, and what is expected.
Check = tuple[Callable[[Any], bool], str]

# Fields that other servers have, and transformers' does not.
OWN_FIELDS = frozenset({"structured_outputs", "top_k"})
# Items of the input of a response that are no messages, and the texts that they must have.
_ITEMS: Mapping[str, tuple[str, ...]] = {
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
_TEXT_PARTS = ("text", "input_text", "output_text")
# Fields that must be absent, and those of which only these values mean what the server does anyway.
_ABSENT = (
    "audio", "prediction", "previous_response_id", "conversation", "reasoning_effort",
    "web_search_options",
)  # fmt: skip
_ONLY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_ABSENT, ()),
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "background": (False,),
    "include": ([],),
    "reasoning": ({},),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}


def parse_body(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in the bytes of a body.

    Raises:
        APIError: not UTF-8, not JSON, not an object, or contains unpaired surrogates.
    """
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_reject_constant)
        # Unpaired surrogates are legal JSON, and no tokenizer takes them.
        json.dumps(body, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise APIError(400, f"invalid UTF-8: {error}") from None
    except RecursionError:
        raise APIError(400, "invalid JSON: nested too deeply") from None
    except ValueError as error:
        raise APIError(400, f"invalid JSON: {error}") from None
    if not isinstance(body, dict):
        raise APIError(400, f"expected a JSON object, got a {type(body).__name__}")
    return body


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not allowed")


def count_characters(value: Any) -> int:
    """Return the length of all texts in a JSON value."""
    if isinstance(value, str):
        return len(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(count_characters, inner))


def check_body(
    path: str, body: dict[str, Any], fields: frozenset[str], template_names: frozenset[str]
) -> dict[str, Any]:
    """Return the body without fields that are null; `model` is not checked.

    `fields` are what transformers' server knows of the path, `template_names` what
    chat_template_kwargs must not name.

    Raises:
        APIError: a field is unknown, invalid, or asks for what this server does not do.
    """
    body = {name: value for name, value in body.items() if value is not None}
    for name in sorted(body.keys() - fields - OWN_FIELDS):
        message = f"{name:.100}: not a field of {path}; leave it out"
        raise APIError(400, message, param=name, code="unknown_parameter")
    for name, check in _FIELDS.items():
        if name in body:
            _check_field(name, body[name], check)
    if "generation_config" in body:
        _check_generation_config("generation_config", body["generation_config"])
    for name, values in _ONLY.items():
        if name in body and not any(_is_same(body[name], value) for value in values):
            raise _unsupported(name, " or ".join(map(json.dumps, values)) or "nothing", body[name])
    _CHECKS[path](body)
    _check_template_arguments(body, template_names)
    body.setdefault("stream", False)  # transformers would stream what `responses` does not stream
    return body


def _is_same(a: Any, b: Any) -> bool:
    return (type(a) is type(b) or (_is_number(a) and _is_number(b))) and bool(a == b)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _format(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _invalid(name: str, expected: str, value: Any) -> APIError:
    return APIError(400, f"{name}: expected {expected}, got {_format(value)}", param=name)


def _unsupported(name: str, expected: str, value: Any) -> APIError:
    error = _invalid(name, expected, value)
    message = f"{error.message}; this server supports nothing else"
    return APIError(400, message, param=name, code="unsupported_parameter")


# -- one field -------------------------------------------------------------------------------------


def _check_field(name: str, value: Any, check: Check) -> None:
    is_valid, expected = check
    if not is_valid(value):
        raise _invalid(name, expected, value)


def _is_integer(value: Any, low: int) -> bool:
    return type(value) is int and low <= value < 2**63


def _integer(low: int) -> Check:
    return lambda value: _is_integer(value, low), f"an integer of at least {low}"


def _instance(kind: type, expected: str) -> Check:
    return lambda value: isinstance(value, kind), expected


def _is_stop(value: Any) -> bool:
    stops = [value] if isinstance(value, str) else value
    return (
        isinstance(stops, list)
        and len(stops) <= 4
        and all(isinstance(stop, str) and stop for stop in stops)
    )


def _are_end_tokens(value: Any) -> bool:
    tokens = value if isinstance(value, list) else [value]
    return all(_is_integer(token, -1) for token in tokens)


def _check_generation_config(name: str, value: Any) -> None:
    """Check a string with a JSON object, of names and values that GenerationConfig takes."""
    from transformers import GenerationConfig

    try:
        config = json.loads(value)
        if not isinstance(config, dict):
            raise TypeError
        GenerationConfig(**config)
    except Exception:  # it checks its values in many ways
        expected = "a GenerationConfig as a JSON object in a string"
        raise _invalid(name, expected, value) from None
    for field, given in config.items():
        where = f"{name}.{field}"
        if given is None or field in _CONFIG_IGNORED:
            continue
        if field in _CONFIG:
            _check_field(where, given, _CONFIG[field])
        elif given is not False and not (
            field in _CONFIG_ONLY and _is_same(given, _CONFIG_ONLY[field])
        ):
            raise _unsupported(where, f"one of {', '.join(_CONFIG)}", given)


_BOOL = _instance(bool, "true or false")
_COUNT = _integer(1)
_SAMPLING: Mapping[str, Check] = {  # NaN is in no range
    "temperature": (lambda x: _is_number(x) and 0 <= x <= 2, "a number from 0 to 2"),
    "top_p": (lambda x: _is_number(x) and 0 < x <= 1, "a number above 0 and at most 1"),
}
_FIELDS: Mapping[str, Check] = {
    **_SAMPLING,
    "stop": (_is_stop, "a text, or a list of up to four"),
    "stream": _BOOL,
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "max_output_tokens": _COUNT,
    "top_k": _integer(-1),
    "seed": _integer(-(2**63)),
    "parallel_tool_calls": _BOOL,
    "instructions": _instance(str, "text"),
    "chat_template_kwargs": _instance(dict, "an object"),
    "stream_options": _instance(dict, "an object"),
}
# Of a GenerationConfig: what may be set, ...
_CONFIG: Mapping[str, Check] = {
    **_SAMPLING,
    "do_sample": _BOOL,
    "top_k": _integer(0),
    "max_new_tokens": _COUNT,
    "eos_token_id": (_are_end_tokens, "an integer of at least -1, or a list of them"),
}
# ... what changes no answer here, and values that do nothing.
_CONFIG_IGNORED = ("transformers_version", "bos_token_id", "pad_token_id", "use_cache")
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


# -- the body of each path -------------------------------------------------------------------------


def check_messages(body: Mapping[str, Any]) -> None:
    """Raise APIError unless `messages` is what a chat template takes."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _invalid("messages", "a list of one message or more", messages)
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message)


def _check_chat(body: dict[str, Any]) -> None:
    check_messages(body)
    _check_tools(body)


def _check_completions(body: dict[str, Any]) -> None:
    if not isinstance(body.get("prompt"), str) or not body["prompt"]:
        raise _invalid("prompt", "text", body.get("prompt"))


def _check_responses(body: dict[str, Any]) -> None:
    if "prompt" in body:  # a stored template
        raise _invalid("prompt", "nothing", body["prompt"])
    given = body.get("input")
    items = [given] if isinstance(given, dict) else given
    if not isinstance(items, str | list) or not items:
        raise _invalid("input", "text, or a list of one message or more", given)
    for index, item in enumerate(items if isinstance(items, list) else []):
        _check_item(f"input[{index}]", item)
    _check_tools(body)


_CHECKS = {CHAT: _check_chat, COMPLETIONS: _check_completions, RESPONSES: _check_responses}


def _check_message(where: str, message: Any) -> None:
    if not isinstance(message, dict):
        raise _invalid(where, "an object", message)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise _invalid(f"{where}.role", "text", role)
    calls = message.get("tool_calls")
    # An assistant that calls tools may have nothing to say.
    if not isinstance(content, str | list) and not (content is None and calls):
        raise _invalid(f"{where}.content", "text, or a list of parts", content)
    for index, part in enumerate(content if isinstance(content, list) else []):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise _invalid(f"{where}.content[{index}]", "a part with type text and a text", part)
    if calls is not None and not isinstance(calls, list):
        raise _invalid(f"{where}.tool_calls", "a list", calls)
    for index, call in enumerate(calls or []):
        if not _has_name(call.get("function") if isinstance(call, dict) else None):
            expected = "an object with a function's name"
            raise _invalid(f"{where}.tool_calls[{index}]", expected, call)


def _check_item(where: str, item: Any) -> None:
    """Check one item of the input of a response."""
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    if kind == "message":
        _check_message(where, item)
        return
    if kind not in _ITEMS:
        raise _invalid(f"{where}.type", f"one of message, {', '.join(_ITEMS)}", kind)
    for name in _ITEMS[kind]:
        if not isinstance(item.get(name), str):
            raise _invalid(f"{where}.{name}", "text", item.get(name))
    parts = item.get("content") or [] if kind == "reasoning" else []
    if not isinstance(parts, list) or not all(_has_text(part) for part in parts):
        raise _invalid(f"{where}.content", "a list of parts with a text", parts)


def _has_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _check_tools(body: dict[str, Any]) -> None:
    """Check tools; leave them out where the request says that none are to be called."""
    if body.get("tool_choice") == "none":
        body.pop("tools", None)
    tools = body.get("tools", [])
    if not isinstance(tools, list):
        raise _invalid("tools", "a list of functions", tools)
    for index, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not _has_name(function) or tool.get("type", "function") != "function":
            raise _invalid(f"tools[{index}]", "a function with a name", tool)
    if tools and body.get("parallel_tool_calls") is False:
        raise _unsupported("parallel_tool_calls", "true", False)


def _has_name(function: Any) -> bool:
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _check_template_arguments(body: dict[str, Any], names: frozenset[str]) -> None:
    """Let a client fill in the model's template, but not replace it or change how it is used."""
    for name, value in body.get("chat_template_kwargs", {}).items():
        where = f"chat_template_kwargs.{name}"
        if name in names:
            raise APIError(400, f"{where}: the server sets it; leave it out", param=where)
        if not isinstance(value, str | bool | int | float | None):
            raise _invalid(where, "text, a number, true, false or null", value)
