"""Requests of each path: their fields, and the errors that name what was expected.

Fields that the server would have to ignore (beams, pictures for a text model, ...) are rejected,
because an answer to a different question is worse than none.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import from_json

from .errors import UNSUPPORTED, APIError, field_error

MAX_CHOICES = 1024  # of one request, for all its prompts
MAX_EXPRESSION = 8_192  # characters of a regular expression
_MAX_VALUES = 16_384  # in all lists and objects of a field
_MAX_CONFIG = 16_384  # characters

# Fields of other servers, with the only values that agree with this server. Any other field is
# unknown.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((
        "use_beam_search", "include_stop_str_in_output", "continue_final_message", "watermark",
        "return_token_ids", "return_tokens_as_token_ids", "details", "return_hidden_states",
        "background",
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
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "include": ([],),
    "reasoning": ({},),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}  # fmt: skip


def _is_same(a: Any, b: Any) -> bool:
    """Return whether two JSON values are equal: 1 equals 1.0, but not true."""
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def invalid(name: str, expected: str, value: Any) -> APIError:
    """Return the error of a field whose value is not the expected one."""
    # The encoder yields parts, and only the first parts of a value of megabytes are made.
    text = "".join(itertools.islice(json.JSONEncoder(default=str).iterencode(value), 60))
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return field_error(name, f"expected {expected}, got {text}")


def unsupported(name: str, expected: str, value: Any) -> APIError:
    """Return the error of a valid field whose value this server does not support."""
    message = f"{invalid(name, expected, value).message}; this server supports nothing else"
    return APIError(400, message, param=name, code=UNSUPPORTED)


def walk(value: Any) -> Iterator[Any]:
    """Yield a JSON value and all values in its lists and objects."""
    # Without recursion, which would pass each value through all lists that contain it, and without
    # copies, because a list may have millions of values.
    stack = [iter([value])]
    while stack:
        for value in stack[-1]:
            yield value
            if isinstance(value, dict | list):
                stack.append(iter(value.values() if isinstance(value, dict) else value))
                break
        else:
            stack.pop()


_INT64 = 2**63 - 1
_Count = Annotated[int, Field(ge=1, le=_INT64)]
_Token = Annotated[int, Field(ge=0, le=_INT64)]
_End = Annotated[int, Field(ge=-1, le=_INT64)]
_Choices = Annotated[int, Field(ge=1, le=128)]
_Top = Annotated[int, Field(ge=0, le=20)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Positive = Annotated[float, Field(gt=0, le=1)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Temperature = Annotated[float, Field(ge=0, le=2)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_TokenText = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
_Label = Annotated[str, Field(max_length=512)]
_Pairs = Annotated[dict[Annotated[str, Field(max_length=64)], _Label], Field(max_length=16)]
_Stop = Annotated[str, Field(min_length=1, max_length=1024)]
_Word = Annotated[str, Field(min_length=1, max_length=256)]
_Prompt = Annotated[str, Field(min_length=1)]
# Millions of tokens fit into a body: one error is enough.
_Tokens = Annotated[list[_Token], Field(min_length=1, fail_fast=True)]
_Prompts = Annotated[
    list[_Prompt | _Tokens], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)
]
_AnyPrompt = Annotated[_Prompt | _Tokens | _Prompts, Field(union_mode="left_to_right")]


def _parse_json(value: Any) -> Any:
    try:
        return from_json(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError("a text that is JSON") from None


def _nest(value: Any, name: str) -> Any:
    """Return an object whose fields are in its object `name`, as in chats, except `type`."""
    if not isinstance(value, dict) or name in value or not value.keys() - {"type"}:
        return value
    inner = {field: x for field, x in value.items() if field != "type"}
    return {field: value[field] for field in value.keys() & {"type"}} | {name: inner}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    # Fields with the only values that change nothing. No values means that the field is refused.
    only: ClassVar[dict[str, tuple[Any, ...]]] = {}

    def check(self) -> None:
        """Raise APIError for fields that contradict each other."""


Kind = TypeVar("Kind", bound=_Strict)


class Defaults(_Strict):
    """The settings in a request's `generation_config`, which replace the model's own."""

    only: ClassVar = {
        "_from_model_config": (True,),
        **dict.fromkeys(("length_penalty", "num_beams", "num_return_sequences"), (1,)),
        **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size"), (0,)),
        "repetition_penalty": (1,),
    }
    _IGNORED: ClassVar = ("transformers_version", "bos_token_id", "pad_token_id", "use_cache")

    do_sample: bool | None = None
    temperature: _Temperature | None = None
    top_p: _Positive | None = None
    top_k: _Token | None = None
    min_p: _Share | None = None
    max_new_tokens: _Count | None = None
    eos_token_id: _End | Annotated[list[_End], Field(max_length=128)] | None = None

    @classmethod
    def parse(cls, text: Any) -> "Defaults":
        """Return the defaults in a string with a JSON object. Raises APIError."""
        name = "generation_config"
        try:
            config = from_json(text)
            if not isinstance(config, dict) or len(text) > _MAX_CONFIG:
                raise TypeError
        except (TypeError, ValueError):
            expected = f"a JSON object in a string of at most {_MAX_CONFIG} characters"
            raise invalid(name, expected, text) from None
        given = {
            field: value
            for field, value in config.items()
            if field in cls.model_fields
            or not (value is None or value is False or field in cls._IGNORED)
        }
        return validate(cls, given, where=f"{name}.")


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _TextPart(_Open):
    type: Literal["text", "input_text", "output_text"]
    text: str


class Function(_Open):
    """A function that is a tool, or a call of it."""

    name: str
    parameters: dict[str, Any] | None = None  # a JSON schema
    arguments: Annotated[Any, BeforeValidator(_parse_json)] = None


class _Call(_Open):
    function: Function


class Tool(_Open):
    """A tool, or the choice of a tool. In responses the function's fields are not nested."""

    type: Literal["function"] = "function"
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _nest_function(cls, value: Any) -> Any:
        return _nest(value, "function")


class Message(_Open):
    """A message of a chat. Other fields are not used."""

    role: Annotated[str, Field(min_length=1)]
    tool_calls: list[_Call] | None = None
    content: Annotated[str | list[_TextPart] | None, Field(validate_default=True)] = None

    @field_validator("content")
    @classmethod
    def _read_content(cls, content: Any, info: ValidationInfo) -> str:
        if content is None and not info.data.get("tool_calls"):
            raise ValueError("text, or a list of parts")
        # An assistant's message that calls tools may have no text.
        text = content or ""
        return text if isinstance(text, str) else " ".join(part.text for part in text)

    @property
    def plain(self) -> dict[str, Any]:
        """The message for a chat template: content is text, and arguments are objects."""
        names = {"role", "tool_calls", "tool_call_id", "reasoning_content"}
        given = self.model_dump(exclude_unset=True, include=names)
        return {"content": self.content, **{name: x for name, x in given.items() if x}}


class FunctionCall(_Open):
    """A call of a tool, in the input of a response."""

    call_id: str
    name: str
    arguments: Annotated[Any, BeforeValidator(_parse_json)]


class FunctionOutput(_Open):
    """The output of a tool, in the input of a response."""

    call_id: str
    output: str


class _Thought(_Open):
    text: str


class Reasoning(_Open):
    """Thoughts of the model, in the input of a response."""

    content: list[_Thought] | None = None


_KINDS = "one of message, function_call, function_call_output, reasoning"


def _kind_of(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    return kind if isinstance(kind, str) else ""


Item = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionOutput, Tag("function_call_output")]
    | Annotated[Reasoning, Tag("reasoning")],
    Discriminator(_kind_of, custom_error_type="kind", custom_error_message=_KINDS),
]
_Messages = Annotated[list[Message], Field(min_length=1)]


def _read_input(value: Any) -> Any:
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    return [value] if isinstance(value, dict) else value


_Input = Annotated[list[Item], Field(min_length=1), BeforeValidator(_read_input)]


class JSONSchema(_Strict):
    """A JSON schema with OpenAI's description of it."""

    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    name: Any = None
    description: Any = None
    strict: Any = None


class Format(_Strict):
    """The form of an answer: text, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[JSONSchema | None, Field(validate_default=True)] = None

    @field_validator("json_schema")
    @classmethod
    def _check_schema(cls, schema: Any, info: ValidationInfo) -> Any:
        if (info.data.get("type") == "json_schema") != (schema is not None):
            raise ValueError("a schema if the type is json_schema, and only then")
        return schema


class _TextOptions(_Strict):
    format: Annotated[Format | None, BeforeValidator(partial(_nest, name="json_schema"))] = None
    verbosity: Literal["medium"] | None = None


class StructuredOutputs(_Strict):
    """vLLM's field for the form of an answer, one of these. JSON may be the text of a schema."""

    json_: Annotated[
        Annotated[dict[str, Any], BeforeValidator(_parse_json)] | None, Field(alias="json")
    ] = None
    regex: Annotated[str, Field(min_length=1, max_length=MAX_EXPRESSION)] | None = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        forms = (self.json_, self.regex, self.choice, self.json_object or None)
        if sum(form is not None for form in forms) != 1:
            raise ValueError("one of json, regex, choice, json_object")
        return self


class _StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(_Strict):
    """The field that all bodies have."""

    model: str | None = None


class Prompted(Body):
    """The fields of requests that have prompts, or messages of a chat."""

    prompt: _AnyPrompt | None = None
    messages: _Messages = []
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[Any]:
        """The prompts, each a text or a list of tokens. A chat has none."""
        given: Any = self.prompt
        is_single = isinstance(given, str) or (given and type(given[0]) is int)
        return [given] if is_single else given or []

    @property
    def chat(self) -> list[dict[str, Any]]:
        """The messages for a chat template."""
        return [message.plain for message in self.messages]


class Request(Prompted):
    """A request to generate. Fields that are null are left out before it is validated."""

    _characters: int = 0  # of its texts

    # The prompt, and the length of the answer.
    input: _Input = []
    instructions: str | None = None
    chat_template_kwargs: Annotated[
        dict[str, str | bool | int | float | None], Field(max_length=64)
    ] = {}
    echo: bool = False
    n: _Choices = 1
    best_of: _Choices | None = None
    max_tokens: _Token | None = None
    max_completion_tokens: _Count | None = None
    max_output_tokens: _Count | None = None
    min_tokens: _Token = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[_Token], Field(max_length=128)] = []
    # OpenAI's four are too few for tasks of lm_eval.
    stop: Annotated[
        list[_Stop],
        Field(max_length=16),
        BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
    ] = []
    # The form of the answer.
    tools: list[Tool] = []
    tool_choice: Literal["auto", "none", "required"] | Tool = "auto"
    parallel_tool_calls: bool | None = None
    max_tool_calls: _Count | None = None
    response_format: Format | None = None
    text: _TextOptions = _TextOptions()
    structured_outputs: StructuredOutputs | None = None
    # How tokens are chosen, and which scores are reported.
    generation_config: Annotated[Defaults | None, BeforeValidator(Defaults.parse)] = None
    temperature: _Temperature | None = None
    top_p: _Positive | None = None
    top_k: _End | None = None
    min_p: _Share | None = None
    seed: Annotated[int, Field(ge=-_INT64 - 1, le=_INT64)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    # Each bias takes time in each step, which other requests share.
    logit_bias: Annotated[dict[_TokenText, _Bias], Field(max_length=1024)] = {}
    bad_words: Annotated[list[_Word], Field(max_length=128)] = []
    logprobs: bool | _Top | None = None
    top_logprobs: _Top = 0
    prompt_logprobs: _Top | None = None
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    # Fields that change no answer.
    user: _Label | None = None
    safety_identifier: _Label | None = None
    service_tier: _Label | None = None
    prompt_cache_key: _Label | None = None
    prompt_cache_retention: _Label | None = None
    prompt_cache_options: _Pairs | None = None
    metadata: _Pairs | None = None
    store: bool | None = None

    def check(self) -> None:
        """Check the tools, and leave them out if none may be called."""
        choice = self.tool_choice
        if choice == "none":
            self.tools = []
        names = [tool.function.name for tool in self.tools]
        if isinstance(choice, Tool) and (name := choice.function.name) not in names:
            raise invalid("tool_choice", f"one of the tools {', '.join(names)}", name)
        if choice == "required" and not names:
            raise invalid("tool_choice", "tools, because one must be called", choice)
        if choice == "auto" and names and self.parallel_tool_calls is False:
            raise unsupported("parallel_tool_calls", "true with tool_choice auto", False)

    @property
    def limit(self) -> tuple[str | None, int | None]:
        """The field that limits new tokens, and the limit."""
        for name in ("max_completion_tokens", "max_output_tokens", "max_tokens"):
            if getattr(self, name) is not None:
                return name, getattr(self, name)
        return None, None

    @property
    def scores(self) -> tuple[int | None, int | None]:
        """Number of likely tokens to report for answer and prompt. None means no scores."""
        return self.top_logprobs if self.logprobs else None, self.prompt_logprobs

    @property
    def lengths(self) -> list[int]:
        """The number of characters of each prompt."""
        return [self._characters]

    @property
    def forced_tool(self) -> str | None:
        """The tool that must be called. "" means any tool, and None that no call is required."""
        if isinstance(self.tool_choice, Tool):
            return self.tool_choice.function.name
        return "" if self.tool_choice == "required" else None

    @cached_property  # one request may have many answers
    def plain_tools(self) -> list[dict[str, Any]] | None:
        """The tools for a chat template, or None without tools."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools] or None

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Other arguments of a chat template."""
        return {**self.chat_template_kwargs, "tools": self.plain_tools}


class ChatRequest(Request):
    """POST /v1/chat/completions."""

    only: ClassVar = {
        **_NEUTRAL, "echo": (False,), "add_special_tokens": (False,),
        **dict.fromkeys(("prompt", "input", "instructions", "text", "best_of"), ()),
    }  # fmt: skip

    messages: _Messages
    max_tokens: _Count | None = None

    def check(self) -> None:
        super().check()
        if self.logprobs not in (None, False, True):  # 0 is false
            raise invalid("logprobs", "true or false", self.logprobs)
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "logprobs to be true", self.top_logprobs)


class CompletionRequest(Request):
    """POST /v1/completions."""

    only: ClassVar = {
        **_NEUTRAL,
        **dict.fromkeys((
            "messages", "input", "instructions", "text", "response_format", "tools", "tool_choice",
            "top_logprobs", "chat_template_kwargs",
        ), ()),
    }  # fmt: skip

    prompt: _AnyPrompt

    def check(self) -> None:
        if len(self.prompts) * self.n > MAX_CHOICES:
            text = f"at most {MAX_CHOICES} answers, {self.n} to each prompt"
            raise invalid("prompt", text, f"{len(self.prompts)} prompts")
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "an integer of at least 1 without echo", 0)
        if self.logprobs is True:
            raise invalid("logprobs", "an integer from 0 to 20", True)
        if self.best_of not in (None, self.n):
            raise unsupported("best_of", "the value of n", self.best_of)

    @cached_property
    def lengths(self) -> list[int]:
        return [len(prompt) if isinstance(prompt, str) else 0 for prompt in self.prompts]

    @property
    def scores(self) -> tuple[int | None, int | None]:
        top = None if self.logprobs is False else self.logprobs
        return top, top if self.echo and self.prompt_logprobs is None else self.prompt_logprobs


class ResponseRequest(Request):
    """POST /v1/responses."""

    only: ClassVar = {
        **_NEUTRAL, "echo": (False,), "add_special_tokens": (False,), "top_logprobs": (0,),
        "n": (1,),
        **dict.fromkeys((
            "prompt", "messages", "prompt_logprobs", "logprobs", "stop", "max_tokens", "best_of",
            "max_completion_tokens", "response_format",
        ), ()),
    }  # fmt: skip

    input: _Input

    @property
    def chat(self) -> list[dict[str, Any]]:
        messages, thoughts = list[dict[str, Any]](), None
        for item in self.input:
            if isinstance(item, Reasoning):
                thoughts = "".join(part.text for part in item.content or ())
            elif isinstance(item, FunctionCall):
                function = {"name": item.name, "arguments": item.arguments}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                calls = messages[-1].setdefault("tool_calls", [])
                calls.append({"id": item.call_id, "type": "function", "function": function})
            elif isinstance(item, FunctionOutput):
                answer = {"tool_call_id": item.call_id, "content": item.output}
                messages.append({"role": "tool", **answer})
            else:
                messages.append(item.plain)
                if thoughts is not None and item.role == "assistant":
                    messages[-1]["reasoning_content"], thoughts = thoughts, None
        if self.instructions:
            if messages and messages[0]["role"] == "system":
                del messages[0]
            messages.insert(0, {"role": "system", "content": self.instructions})
        return messages


class TokenizeRequest(Prompted):
    """POST /tokenize."""

    prompt: str | None = None
    add_generation_prompt: bool = True

    @property
    def template_arguments(self) -> dict[str, Any]:
        return {"add_generation_prompt": self.add_generation_prompt}

    def check(self) -> None:
        if (self.prompt is None) == (not self.messages):
            raise APIError(400, "prompt, messages: expected one of them")


class DetokenizeRequest(Body):
    """POST /detokenize."""

    tokens: Annotated[list[_Token], Field(fail_fast=True)]


# -- bodies ----------------------------------------------------------------------------------------


def parse_body(raw: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object in the bytes of a body, without fields that are null.

    Raises:
        APIError: The bytes are not UTF-8, not JSON or not an object, have unpaired surrogates, or
            have lists and objects more than 200 deep.
    """
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise APIError(400, f"invalid JSON: {error}") from None
    if not isinstance(body, dict):
        raise APIError(400, f"expected a JSON object, got a {type(body).__name__}")
    return {name: value for name, value in body.items() if value is not None}


def validate(kind: type[Kind], body: Mapping[str, Any], where: str = "") -> Kind:
    """Return a body as an object. Errors put `where` before the names of fields.

    Raises:
        APIError: A field is unknown, invalid, or not supported by this server.
    """
    given = dict[str, Any]()
    for name, value in sorted(body.items()):
        field = where + name
        rest_of_path = itertools.islice(walk(value), _MAX_VALUES + 1, None)  # the first is `value`
        if name not in ("prompt", "tokens") and any(True for _ in rest_of_path):
            raise invalid(field, f"at most {_MAX_VALUES} values in all", value)
        if name in kind.only:
            if not any(_is_same(value, one) for one in kind.only[name]):
                expected = " or ".join(map(json.dumps, kind.only[name])) or "nothing"
                raise unsupported(field, expected, value)
        elif name in kind.model_fields:
            given[name] = value
        else:
            message = f"{field:.100}: not a field of this path; leave it out"
            raise APIError(400, message, param=field, code="unknown_parameter")
    if given.get("stream") and "prompt_logprobs" in given:
        raise unsupported("prompt_logprobs", "no stream", given["prompt_logprobs"])
    try:
        parsed = kind.model_validate(given)
    except ValidationError as error:
        first, *others = error.errors(include_url=False, include_context=False)
        name = _name_of(first)
        rules = dict.fromkeys(_expected(one) for one in (first, *others) if _name_of(one) == name)
        value = None if first["type"] == "missing" else first["input"]
        raise invalid(where + name, " or ".join(rules)[:200], value) from None
    parsed.check()
    if isinstance(parsed, Request):
        texts = walk([body.get(name) for name in ("messages", "input", "instructions", "tools")])
        parsed._characters = sum(len(text) for text in texts if isinstance(text, str))
    return parsed


def _expected(error: Mapping[str, Any]) -> str:
    text = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    extra = f"no field {error['loc'][-1]!s:.60}"
    text = {"missing": "a value", "extra_forbidden": extra}.get(error["type"], text)
    return re.sub(r"^(\w+) should have ", lambda match: f"a {match[1].lower()} with ", text)


# How many names and numbers below a field its errors have.
_DEPTHS = {
    "messages": 2, "input": 2, "tools": 1, "response_format": 2, "text": 2, "structured_outputs": 1
}  # fmt: skip


def _name_of(error: Mapping[str, Any]) -> str:
    """Return the field of an error of pydantic, within the message, item or form that has it."""
    name, *path = error["loc"]
    if name == "input":  # an item's number is followed by its kind
        path[1:2] = ["type"] if error["type"] == "kind" else []
    elif name == "text":
        path = [part for part in path if part != "json_schema"]  # added by `_nest`
    parts = path[: _DEPTHS.get(name, 0)]
    return str(name) + "".join(f"[{x}]" if isinstance(x, int) else f".{x:.100}" for x in parts)
