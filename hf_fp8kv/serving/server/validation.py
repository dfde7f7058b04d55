"""Validation of request bodies.

What the server would silently ignore (beams, pictures for a text model, ...) is rejected: an answer
to another question is worse than none.
"""

import json
from collections.abc import Mapping
from typing import Any

from .checks import (
    MAX_STOPS,
    Check,
    are_end_tokens,
    are_tokens,
    check_field,
    instance,
    integer,
    integer_within,
    invalid,
    is_integer,
    is_number,
    is_same,
    is_stop,
    listed,
    number_within,
    unsupported,
)  # fmt: skip
from .errors import APIError
from .messages import check_item, check_messages, check_tools
from .structured_output import FORMAT_FIELDS

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
GENERATES = (CHAT, COMPLETIONS, RESPONSES)

# Choices of one request, of all its prompts.
MAX_CHOICES = 1024
# Fields of other servers with the only values that mean what this one does anyway.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((
        "use_beam_search", "include_stop_str_in_output", "continue_final_message", "watermark",
        "return_token_ids", "return_tokens_as_token_ids", "details", "return_hidden_states",
    ), (False,)),
    **dict.fromkeys((
        "skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt",
        "include_reasoning", "separate_reasoning", "stream_reasoning", "cache_prompt",
    ), (True,)),
    **dict.fromkeys((
        "priority", "min_length", "no_repeat_ngram_size", "mirostat", "dry_multiplier",
        "xtc_probability", "top_n_tokens",
    ), (0,)),
    **dict.fromkeys(("length_penalty", "typical_p", "repeat_penalty", "num_beams"), (1,)),
    **dict.fromkeys((
        "truncate_prompt_tokens", "allowed_token_ids", "logits_processors", "chat_template",
        "documents", "mm_processor_kwargs", "guided_json", "guided_regex", "guided_choice",
        "guided_grammar", "regex", "ebnf", "json_schema", "lora_path", "kv_transfer_params",
        "vllm_xargs", "cache_salt",
    ), ()),
}  # fmt: skip
# Fields that other servers have, and transformers' does not; the rest of them it has.
OWN_FIELDS = frozenset({
    "structured_outputs", "top_k", "min_p", "min_tokens", "ignore_eos", "stop_token_ids",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words",
    "prompt_logprobs", "add_special_tokens", "echo", *_NEUTRAL,
})  # fmt: skip
# Fields that must be absent, and those of which only these values mean what the server does anyway.
_ABSENT = (
    "audio", "prediction", "previous_response_id", "conversation", "reasoning_effort",
    "web_search_options", "moderation", "image", "background_options", "context_management",
    "access_programs",
)  # fmt: skip
_ONLY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_ABSENT, ()),
    **_NEUTRAL,
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "background": (False,),
    "include": ([],),
    "reasoning": ({},),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}


def parse_body(raw: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object in the bytes of a body.

    Raises:
        APIError: not UTF-8, not JSON, not an object, or contains unpaired surrogates.
    """
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_reject_constant)
        # Unpaired surrogates are legal JSON, and no tokenizer takes them; UTF-8 has none.
        if b"\\ud" in raw or b"\\uD" in raw:
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
    return sum(count_characters(one) for one in inner if isinstance(one, str | list | dict))


def _count_values(value: Any) -> int:
    """Return the number of values in all lists and objects of a JSON value."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return len(inner) + sum(_count_values(one) for one in inner if isinstance(one, list | dict))


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
    for name in sorted(body.keys() - ((fields | OWN_FIELDS) & _CHECKED)):
        message = f"{name:.100}: not a field of {path}; leave it out"
        raise APIError(400, message, param=name, code="unknown_parameter")
    for name, check in _FIELDS.items():
        if name in body:
            check_field(name, body[name], check)
    if "generation_config" in body:
        _check_generation_config("generation_config", body["generation_config"])
    for name, values in _ONLY.items():
        if name in body and not any(is_same(body[name], value) for value in values):
            raise unsupported(name, " or ".join(map(json.dumps, values)) or "nothing", body[name])
    _CHECKS[path](body)
    if "best_of" in body and body["best_of"] != body.get("n", 1):
        raise unsupported("best_of", "as many as n", body["best_of"])
    if body.get("stream") and "prompt_logprobs" in body:
        raise unsupported("prompt_logprobs", "no stream", body["prompt_logprobs"])
    body.pop("suffix", None)  # handlers would stream it, as a part of its own
    _check_template_arguments(body, template_names)
    body.setdefault("stream", False)  # transformers would stream what `responses` does not stream
    return body


# -- one field -------------------------------------------------------------------------------------


def _check_generation_config(name: str, value: Any) -> None:
    """Check a string with a JSON object, of names and values that GenerationConfig takes."""
    from transformers import GenerationConfig

    try:
        config = json.loads(value)
        if not isinstance(config, dict) or len(value) > _MAX_CONFIG:
            raise TypeError
        GenerationConfig(**config)
    except Exception:  # it checks its values in many ways
        expected = f"a GenerationConfig as a JSON object in a string of at most {_MAX_CONFIG}"
        raise invalid(name, expected, value) from None
    for field, given in config.items():
        where = f"{name}.{field}"
        if given is None or field in _CONFIG_IGNORED:
            continue
        if field in _CONFIG:
            check_field(where, given, _CONFIG[field])
        elif given is not False and not (
            field in _CONFIG_ONLY and is_same(given, _CONFIG_ONLY[field])
        ):
            raise unsupported(where, f"one of {', '.join(_CONFIG)}", given)


_MAX_CONFIG = 16_384  # characters
_MAX_VALUES = 16_384  # each answer parses them again on the event loop
# Each costs time in each step, in which others wait.
_MAX_BIASES = 1024


def _is_bias(value: Any) -> bool:
    return isinstance(value, dict) and len(value) <= _MAX_BIASES and all(
        token.isascii() and token.isdigit() and len(token) < 10
        and is_number(number) and -100 <= number <= 100
        for token, number in value.items()
    )  # fmt: skip


_BOOL = instance(bool, "true or false")
_COUNT = integer(1)
# OpenAI's limits.
_LABEL: Check = (
    lambda x: isinstance(x, str) and len(x) <= 512, "text of at most 512 characters",
)  # fmt: skip
_PAIRS: Check = (
    lambda x: isinstance(x, dict) and len(x) <= 16
    and all(len(name) <= 64 and _LABEL[0](text) for name, text in x.items()),
    "up to 16 pairs of texts, of at most 64 and 512 characters",
)  # fmt: skip
_STREAM_OPTIONS = ("include_usage", "include_obfuscation", "continuous_usage_stats")
_SAMPLING: Mapping[str, Check] = {
    "temperature": number_within(0, 2),
    "top_p": (lambda x: is_number(x) and 0 < x <= 1, "a number above 0 and at most 1"),
    "min_p": number_within(0, 1),
}
_PENALTIES: Mapping[str, Check] = {
    "repetition_penalty": (
        lambda x: is_number(x) and 0 < x <= 100, "a number above 0 and at most 100",
    ),
    "presence_penalty": number_within(-2, 2),
    "frequency_penalty": number_within(-2, 2),
}  # fmt: skip
_TOP = integer_within(0, 20)
_AT_LEAST_ONE = object()
_FIELDS: Mapping[str, Check] = {
    **dict.fromkeys(("messages", "input", "tools"), (
        lambda x: _count_values(x) <= _MAX_VALUES, f"at most {_MAX_VALUES} values in all",
    )),
    **_SAMPLING,
    **_PENALTIES,
    "stop": (is_stop, f"a text of up to 1024 characters, or a list of up to {MAX_STOPS}"),
    "stop_token_ids": listed(lambda x: is_integer(x, 0), 128, "tokens"),
    "ignore_eos": _BOOL,
    "min_tokens": integer(0),
    "bad_words": listed(
        lambda x: isinstance(x, str) and 0 < len(x) <= 256, 128, "texts of up to 256 characters"
    ),
    "stream": _BOOL,
    "max_tokens": integer(0),
    "max_completion_tokens": _COUNT,
    "max_output_tokens": _COUNT,
    "n": integer_within(1, 128),
    "best_of": integer_within(1, 128),
    "echo": _BOOL,
    "top_logprobs": _TOP,
    "prompt_logprobs": _TOP,
    "logit_bias": (
        _is_bias,
        f"an object of up to {_MAX_BIASES} tokens, as texts, and numbers from -100 to 100",
    ),
    "add_special_tokens": _BOOL,
    "top_k": integer(-1),
    "seed": integer(-(2**63)),
    "parallel_tool_calls": _BOOL,
    "instructions": instance(str, "text"),
    "chat_template_kwargs": (
        lambda x: isinstance(x, dict) and len(x) <= 64, "an object of up to 64 arguments",
    ),
    "stream_options": (
        lambda x: isinstance(x, dict) and x.keys() <= set(_STREAM_OPTIONS)
        and all(isinstance(option, bool | None) for option in x.values()),
        f"an object of {', '.join(_STREAM_OPTIONS)}, each true or false",
    ),
    **dict.fromkeys((
        "user", "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_retention",
    ), _LABEL),
    **dict.fromkeys(("metadata", "prompt_cache_options"), _PAIRS),
    "store": _BOOL,
    "max_tool_calls": _COUNT,
}  # fmt: skip
# All fields whose type and size are checked. Functions check the last ones.
_CHECKED = frozenset({
    *_FIELDS, *_ONLY, *FORMAT_FIELDS, "model", "prompt", "tool_choice", "logprobs",
    "generation_config",
})  # fmt: skip
# Of a GenerationConfig: what may be set, ...
_CONFIG: Mapping[str, Check] = {
    **_SAMPLING,
    "do_sample": _BOOL,
    "top_k": integer(0),
    "max_new_tokens": _COUNT,
    "eos_token_id": (are_end_tokens, "an integer of at least -1, or a list of up to 128"),
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


def _check_chat(body: dict[str, Any]) -> None:
    check_messages(body)
    check_tools(body)
    _check_only(body, echo=False, add_special_tokens=False, max_tokens=_AT_LEAST_ONE)
    if is_same(body.get("logprobs"), 0):
        del body["logprobs"]
    check_field("logprobs", body.get("logprobs", False), _BOOL)
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise invalid("top_logprobs", "logprobs to be true", body["top_logprobs"])


def _check_completions(body: dict[str, Any]) -> None:
    prompts = split_prompts(body.get("prompt"))
    if not prompts or not all(map(_is_prompt, prompts)):
        expected = "text, a list of tokens, or a list of prompts of one or the other"
        raise invalid("prompt", expected, body.get("prompt"))
    if len(prompts) * body.get("n", 1) > MAX_CHOICES:
        text = f"at most {MAX_CHOICES} answers, {body.get('n', 1)} to each prompt"
        raise invalid("prompt", text, f"{len(prompts)} prompts")
    if body.get("logprobs") is False:
        del body["logprobs"]
    check_field("logprobs", body.get("logprobs", 0), _TOP)
    if not body.get("echo"):
        _check_only(body, max_tokens=_AT_LEAST_ONE)


def _check_responses(body: dict[str, Any]) -> None:
    if "prompt" in body:  # a stored template
        raise invalid("prompt", "nothing", body["prompt"])
    _check_only(body, echo=False, add_special_tokens=False, top_logprobs=0, prompt_logprobs=None)
    given = body.get("input")
    items = [given] if isinstance(given, dict) else given
    if not isinstance(items, str | list) or not items:
        raise invalid("input", "text, or a list of one message or more", given)
    for index, item in enumerate(items if isinstance(items, list) else []):
        check_item(f"input[{index}]", item)
    check_tools(body)


_CHECKS = {CHAT: _check_chat, COMPLETIONS: _check_completions, RESPONSES: _check_responses}


def split_prompts(given: Any) -> list[Any]:
    """Return the prompts of a completion, each a text or a list of tokens."""
    is_many = isinstance(given, list) and bool(given) and type(given[0]) is not int
    return given if is_many else [given]


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return prompt != ""
    return bool(prompt) and are_tokens(prompt)


def _check_only(body: Mapping[str, Any], **fields: Any) -> None:
    """Check fields that have one value on this path; None: they must be absent."""
    for name, value in fields.items():
        if name not in body:
            continue
        if value is _AT_LEAST_ONE:
            check_field(name, body[name], _COUNT)
        elif not is_same(body[name], value):
            raise unsupported(name, "nothing" if value is None else json.dumps(value), body[name])


def _check_template_arguments(body: dict[str, Any], names: frozenset[str]) -> None:
    """Let a client fill in the model's template, but not replace it or change how it is used."""
    for name, value in body.get("chat_template_kwargs", {}).items():
        where = f"chat_template_kwargs.{name}"
        if name in names:
            raise APIError(400, f"{where}: the server sets it; leave it out", param=where)
        if not isinstance(value, str | bool | int | float | None):
            raise invalid(where, "text, a number, true, false or null", value)
