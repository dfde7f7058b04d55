"""The bodies of requests to each path: their fields, and errors that name the expected values.

Fields that the server would have to ignore (beams, images for a text model, ...) are rejected,
because ignoring a field would silently change the meaning of the request. Only unknown fields may
be ignored, with a line in the log.
"""

import itertools
import json
import logging
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

from .errors import UNSUPPORTED_CODE, APIError, make_field_error

logger = logging.getLogger(__name__)

MAX_CHOICES = 1024  # maximum number of answers to all prompts of one request
MAX_REGEX_LENGTH = 8_192  # maximum number of characters of a regular expression
_MAX_FIELD_VALUES = 16_384  # maximum number of values in all lists and objects of a field
_MAX_ERROR_LENGTH = 60  # maximum number of characters of an invalid value in an error
_MAX_RULES_LENGTH = 200  # maximum number of characters of the expected values in an error

# Fields of other servers, with the value that agrees with this server's behavior. The fields of a
# body take precedence.
_NEUTRAL_FIELDS: dict[str, Any] = {
    **dict.fromkeys(
        (
            "use_beam_search",
            "include_stop_str_in_output",
            "continue_final_message",
            "watermark",
            "return_token_ids",
            "return_tokens_as_token_ids",
            "details",
            "return_hidden_states",
            "background",
            "echo",
            "add_special_tokens",
        ),
        False,
    ),
    **dict.fromkeys(
        (
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "add_generation_prompt",
            "include_reasoning",
            "separate_reasoning",
            "stream_reasoning",
            "cache_prompt",
            "_from_model_config",
        ),
        True,
    ),
    **dict.fromkeys(
        (
            "priority",
            "min_length",
            "no_repeat_ngram_size",
            "mirostat",
            "dry_multiplier",
            "xtc_probability",
            "top_n_tokens",
            "top_logprobs",
            "min_new_tokens",
        ),
        0,
    ),
    **dict.fromkeys(
        (
            "length_penalty",
            "typical_p",
            "repeat_penalty",
            "num_beams",
            "n",
            "num_return_sequences",
            "repetition_penalty",
        ),
        1,
    ),
    "suffix": "",
    "modalities": ["text"],
    "include": [],
    "reasoning": {},
    "truncation": "disabled",
    "verbosity": "medium",
}
# Fields that this server refuses, and their replacements.
_REPLACEMENTS = {
    "prompt_logprobs": "echo and logprobs of /v1/completions",
    "bad_words": "logit_bias for single tokens, or structured_outputs.regex",
    **dict.fromkeys(
        (
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "guided_decoding_backend",
        ),
        "structured_outputs",
    ),
    **dict.fromkeys(("reasoning_effort", "thinking"), "chat_template_kwargs"),
    **dict.fromkeys(("previous_response_id", "conversation"), "all items of the conversation"),
    "functions": "tools",
    "function_call": "tool_choice",
}


def _equals_json(a: Any, b: Any) -> bool:
    """Return whether two JSON values are equal. 1 equals 1.0, but not true."""
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def make_value_error(name: str, expected: str, value: Any) -> APIError:
    """Return the error for a field with an invalid value."""
    # The encoder is a generator. Only the beginning of a large list or object is encoded.
    chunks = json.JSONEncoder(default=str).iterencode(value)
    text = "".join(itertools.islice(chunks, _MAX_ERROR_LENGTH))
    text = text if len(text) <= _MAX_ERROR_LENGTH else f"{text[: _MAX_ERROR_LENGTH - 3]}..."
    return make_field_error(name, f"expected {expected}, got {text}")


def make_unsupported_error(name: str, expected: str, value: Any) -> APIError:
    """Return the error for a field with a valid value that this server does not support."""
    message = make_value_error(name, expected, value).message
    message += ". This server supports nothing else"
    return APIError(400, message, param=name, code=UNSUPPORTED_CODE)


def walk_values(value: Any) -> Iterator[Any]:
    """Yield a JSON value and all values in its lists and objects."""
    # A recursive generator would pass each value through every list that contains it. A copy of a
    # list could have millions of values.
    stack = [iter([value])]
    while stack:
        for value in stack[-1]:
            yield value
            if isinstance(value, dict | list):
                stack.append(iter(value.values() if isinstance(value, dict) else value))
                break
        else:
            stack.pop()


_MAX_INT64 = 2**63 - 1
_Count = Annotated[int, Field(ge=1, le=_MAX_INT64)]
_Token = Annotated[int, Field(ge=0, le=_MAX_INT64)]
_MinusOneOrMore = Annotated[int, Field(ge=-1, le=_MAX_INT64)]
_ChoiceCount = Annotated[int, Field(ge=1, le=128)]
_TopCount = Annotated[int, Field(ge=0, le=20)]
_Fraction = Annotated[float, Field(ge=0, le=1)]
_PositiveFraction = Annotated[float, Field(gt=0, le=1)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Temperature = Annotated[float, Field(ge=0, le=2)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_TokenString = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
_ShortText = Annotated[str, Field(max_length=512)]
_TextMap = Annotated[dict[Annotated[str, Field(max_length=64)], _ShortText], Field(max_length=16)]
_Stop = Annotated[str, Field(min_length=1, max_length=1024)]
# OpenAI allows 4 stop strings, which are too few for some tasks of lm_eval.
_Stops = Annotated[
    list[_Stop],
    Field(max_length=16),
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
]
_Prompt = Annotated[str, Field(min_length=1)]
# Millions of tokens fit into a body, so validation stops at the first error.
_Tokens = Annotated[list[_Token], Field(min_length=1, fail_fast=True)]
_Prompts = Annotated[
    list[_Prompt | _Tokens], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)
]


def _parse_json(value: Any) -> Any:
    try:
        return from_json(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError("a string of valid JSON") from None


def _nest_in(value: Any, name: str) -> Any:
    """Move all fields of an object except `type` into a nested object `name`, as in chats."""
    if not isinstance(value, dict) or name in value or not value.keys() - {"type"}:
        return value
    nested = {field: item for field, item in value.items() if field != "type"}
    outer = {"type": value["type"]} if "type" in value else {}
    return outer | {name: nested}


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


Model = TypeVar("Model", bound=_StrictModel)


class Settings(_StrictModel):
    """The settings in a request's `generation_config`, which replace the model's settings."""

    _UNUSED_FIELDS: ClassVar = ("transformers_version", "bos_token_id", "pad_token_id", "use_cache")

    do_sample: bool | None = None
    temperature: _Temperature | None = None
    top_p: _PositiveFraction | None = None
    top_k: _Token | None = None
    min_p: _Fraction | None = None
    max_new_tokens: _Count | None = None
    # -1 means no token.
    eos_token_id: (
        _MinusOneOrMore | Annotated[list[_MinusOneOrMore], Field(max_length=128)] | None
    ) = None

    @classmethod
    def parse(cls, config: Any) -> "Settings":
        """Return the settings in a parsed `generation_config`. Raise APIError or ValueError."""
        if not isinstance(config, dict):
            raise ValueError("a string of a JSON object")
        fields = {
            field: value
            for field, value in config.items()
            if field in cls.model_fields
            or not (value is None or value is False or field in cls._UNUSED_FIELDS)
        }
        return validate(cls, fields, prefix="generation_config.")


class _OpenModel(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class Function(_OpenModel):
    """A function that is a tool, or a call of such a function."""

    name: str
    parameters: dict[str, Any] | None = None  # a JSON schema
    arguments: Annotated[Any, BeforeValidator(_parse_json)] = None


class _ToolCall(_OpenModel):
    function: Function


class Tool(_OpenModel):
    """A tool, or the choice of a tool. Requests to /v1/responses do not nest the function."""

    type: Literal["function"] = "function"
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _nest_function(cls, value: Any) -> Any:
        return _nest_in(value, "function")


def _join_parts(content: Any) -> Any:
    """Return the text of a list of text parts. Return texts and None unchanged."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("text, or a list of parts")
    texts = [
        part["text"]
        for part in content
        if isinstance(part, dict)
        and part.get("type") in ("text", "input_text", "output_text")
        and isinstance(part.get("text"), str)
    ]
    if len(texts) < len(content):
        raise ValueError("text or a list of parts of type 'text', because no images are read")
    return " ".join(texts)


class Message(_OpenModel):
    """A message of a chat. Only the fields in `template_message` are used."""

    role: Annotated[str, Field(min_length=1)]
    tool_calls: list[_ToolCall] | None = None
    content: Annotated[str | None, BeforeValidator(_join_parts), Field(validate_default=True)] = (
        None
    )

    @field_validator("content")
    @classmethod
    def _check_content(cls, content: str | None, info: ValidationInfo) -> str:
        if content is None and not info.data.get("tool_calls"):
            raise ValueError("text, or a list of parts")
        return content or ""  # a message of the assistant that calls tools may have no text

    @property
    def template_message(self) -> dict[str, Any]:
        """The message for a chat template, with text as content and objects as arguments."""
        names = {"role", "tool_calls", "tool_call_id", "reasoning_content"}
        fields = self.model_dump(exclude_unset=True, include=names)
        return {"content": self.content, **{name: value for name, value in fields.items() if value}}


class FunctionCall(_OpenModel):
    """A call of a tool in the input of a ResponseBody."""

    call_id: str
    name: str
    arguments: Annotated[Any, BeforeValidator(_parse_json)]


class FunctionOutput(_OpenModel):
    """The output of a tool in the input of a ResponseBody."""

    call_id: str
    output: str


class _ReasoningText(_OpenModel):
    text: str


class Reasoning(_OpenModel):
    """Reasoning of the model in the input of a ResponseBody."""

    content: list[_ReasoningText] | None = None


_ITEM_TYPES = "one of message, function_call, function_call_output, reasoning"


def _get_item_type(item: Any) -> str:
    item_type = item.get("type", "message") if isinstance(item, dict) else "message"
    return item_type if isinstance(item_type, str) else ""


InputItem = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionOutput, Tag("function_call_output")]
    | Annotated[Reasoning, Tag("reasoning")],
    Discriminator(_get_item_type, custom_error_type="item", custom_error_message=_ITEM_TYPES),
]


def _wrap_input(value: Any) -> Any:
    """Return a list of items for an input that is a text or a single item."""
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list):
        raise ValueError("a string with at least 1 character or a list")
    return value


class JSONSchema(_StrictModel):
    """A JSON schema, with OpenAI's additional fields."""

    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    name: Any = None
    description: Any = None
    strict: Any = None


class ResponseFormat(_StrictModel):
    """The format of an answer: text, a JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[JSONSchema | None, Field(validate_default=True)] = None

    @field_validator("json_schema")
    @classmethod
    def _check_schema(cls, schema: Any, info: ValidationInfo) -> Any:
        if (info.data.get("type") == "json_schema") != (schema is not None):
            raise ValueError("a schema if the type is json_schema, and only then")
        return schema


class _TextOptions(_StrictModel):
    format: Annotated[
        ResponseFormat | None, BeforeValidator(partial(_nest_in, name="json_schema"))
    ] = None
    verbosity: Literal["medium"] | None = None


class StructuredOutputs(_StrictModel):
    """vLLM's field for the format of an answer. It has one constraint. `json` may be a string."""

    json_: Annotated[
        Annotated[dict[str, Any], BeforeValidator(_parse_json)] | None, Field(alias="json")
    ] = None
    regex: Annotated[str, Field(min_length=1, max_length=MAX_REGEX_LENGTH)] | None = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _check_only_constraint(self) -> Self:
        constraints = (self.json_, self.regex, self.choice, self.json_object or None)
        if sum(constraint is not None for constraint in constraints) != 1:
            raise ValueError("one of json, regex, choice, json_object")
        return self


class _StreamOptions(_StrictModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(_StrictModel):
    """The fields that all paths have. `parse_body` removes fields that are null."""

    model: str | None = None
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    # The length and the format of the answer.
    min_tokens: _Token = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[_Token], Field(max_length=128)] = []
    structured_outputs: StructuredOutputs | None = None
    # The choice of tokens.
    generation_config: Annotated[
        Settings | None, BeforeValidator(Settings.parse), BeforeValidator(_parse_json)
    ] = None
    temperature: _Temperature | None = None
    top_p: _PositiveFraction | None = None
    top_k: _MinusOneOrMore | None = None  # -1 means all tokens
    min_p: _Fraction | None = None
    seed: Annotated[int, Field(ge=-_MAX_INT64 - 1, le=_MAX_INT64)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    # The number is limited because each bias slows the steps of all requests.
    logit_bias: Annotated[dict[_TokenString, _Bias], Field(max_length=1024)] = {}
    # Fields that do not change answers.
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    user: _ShortText | None = None
    safety_identifier: _ShortText | None = None
    service_tier: _ShortText | None = None
    prompt_cache_key: _ShortText | None = None
    prompt_cache_retention: _ShortText | None = None
    prompt_cache_options: _TextMap | None = None
    metadata: _TextMap | None = None
    store: bool | None = None

    @property
    def token_limit(self) -> tuple[str | None, int | None]:
        """The name of the field that limits new tokens, and the limit. None means no limit."""
        for name in ("max_completion_tokens", "max_output_tokens", "max_tokens"):
            if getattr(self, name, None) is not None:
                return name, getattr(self, name)
        return None, None


class ToolBody(Body):
    """The fields that chats and responses have: a chat template, and tools."""

    chat_template_kwargs: Annotated[
        dict[str, str | bool | int | float | None], Field(max_length=64)
    ] = {}
    tools: list[Tool] = []
    tool_choice: Literal["auto", "none", "required"] | Tool = "auto"
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        """Check the tools, and remove them if the request forbids calls."""
        choice = self.tool_choice
        if choice == "none":
            self.tools = []
        names = [tool.function.name for tool in self.tools]
        if isinstance(choice, Tool) and choice.function.name not in names:
            expected = f"one of the tools {', '.join(names)}"
            raise make_value_error("tool_choice", expected, choice.function.name)
        if choice == "required" and not names:
            raise make_value_error("tool_choice", '"auto" or "none" without tools', choice)
        if choice == "auto" and names and self.parallel_tool_calls is False:
            raise make_unsupported_error("parallel_tool_calls", "true with tool_choice auto", False)
        return self

    @property
    def max_prompt_length(self) -> int:
        """The number of characters of the longest prompt. Token ids have none."""
        names = {"messages", "input", "instructions", "tools"}
        values = walk_values(self.model_dump(include=names, warnings=False))
        return sum(len(value) for value in values if isinstance(value, str))

    @property
    def forced_tool(self) -> str | None:
        """The tool that must be called. "" means any tool. None means that no call is required."""
        if isinstance(self.tool_choice, Tool):
            return self.tool_choice.function.name
        return "" if self.tool_choice == "required" else None

    @cached_property  # read for each of up to 128 answers
    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools for a chat template, or None if there are no tools."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools] or None


class ChatBody(ToolBody):
    """POST /v1/chat/completions."""

    echo: ClassVar[bool] = False
    messages: Annotated[list[Message], Field(min_length=1)]
    n: _ChoiceCount = 1
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    stop: _Stops = []
    response_format: ResponseFormat | None = None
    logprobs: bool | Literal[0] = False
    top_logprobs: _TopCount = 0

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise make_value_error("top_logprobs", "0 unless logprobs is true", self.top_logprobs)
        return self

    @property
    def num_top_tokens(self) -> int | None:
        """The number of likely tokens to report. None means no log-probabilities."""
        return self.top_logprobs if self.logprobs else None

    @property
    def chat_messages(self) -> list[dict[str, Any]]:
        """The messages for a chat template."""
        return [message.template_message for message in self.messages]


class CompletionBody(Body):
    """POST /v1/completions. The properties mean the same as in a ChatBody."""

    forced_tool: ClassVar[None] = None
    prompt: Annotated[_Prompt | _Tokens | _Prompts, Field(union_mode="left_to_right")]
    add_special_tokens: bool = True
    echo: bool = False
    n: _ChoiceCount = 1
    best_of: _ChoiceCount | None = None
    max_tokens: _Token | None = None
    stop: _Stops = []
    logprobs: Annotated[
        _TopCount | None, BeforeValidator(lambda number: None if number is False else number)
    ] = None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if len(self.prompts) * self.n > MAX_CHOICES:
            expected = f"at most {MAX_CHOICES} answers, {self.n} to each prompt"
            raise make_value_error("prompt", expected, f"{len(self.prompts)} prompts")
        if self.max_tokens == 0 and not self.echo:
            raise make_value_error("max_tokens", "an integer of at least 1 without echo", 0)
        if self.best_of not in (None, self.n):
            raise make_unsupported_error("best_of", "the value of n", self.best_of)
        return self

    @property
    def prompts(self) -> list[Any]:
        """The prompts, each a text or a list of tokens."""
        prompt: Any = self.prompt
        is_single = isinstance(prompt, str) or type(prompt[0]) is int
        return [prompt] if is_single else prompt

    @property
    def max_prompt_length(self) -> int:
        return max(len(prompt) if isinstance(prompt, str) else 0 for prompt in self.prompts)

    @property
    def num_top_tokens(self) -> int | None:
        return self.logprobs


class ResponseBody(ToolBody):
    """POST /v1/responses. The properties mean the same as in a ChatBody."""

    echo: ClassVar[bool] = False
    n: ClassVar[int] = 1
    stop: ClassVar[list[str]] = []
    num_top_tokens: ClassVar[None] = None
    input: Annotated[list[InputItem], Field(min_length=1), BeforeValidator(_wrap_input)]
    instructions: str | None = None
    max_output_tokens: _Count | None = None
    max_tool_calls: _Count | None = None
    text: _TextOptions = _TextOptions()

    @property
    def chat_messages(self) -> list[dict[str, Any]]:
        messages = list[dict[str, Any]]()
        reasoning = None
        for item in self.input:
            if isinstance(item, Reasoning):
                reasoning = "".join(part.text for part in item.content or ())
            elif isinstance(item, FunctionCall):
                function = {"name": item.name, "arguments": item.arguments}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                calls = messages[-1].setdefault("tool_calls", [])
                calls.append({"id": item.call_id, "type": "function", "function": function})
            elif isinstance(item, FunctionOutput):
                fields = {"tool_call_id": item.call_id, "content": item.output}
                messages.append({"role": "tool", **fields})
            else:
                messages.append(item.template_message)
                if reasoning is not None and item.role == "assistant":
                    messages[-1]["reasoning_content"] = reasoning
                    reasoning = None
        if self.instructions:
            if messages and messages[0]["role"] == "system":
                del messages[0]
            messages.insert(0, {"role": "system", "content": self.instructions})
        return messages


AnyBody = ChatBody | CompletionBody | ResponseBody
BODY_TYPES: dict[str, type[AnyBody]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponseBody,
}
_BODY_FIELDS = {name for body_type in BODY_TYPES.values() for name in body_type.model_fields}


def parse_body(content: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object in the bytes of a body, without fields that are null.

    Raises:
        APIError: The bytes are not UTF-8, not JSON or not an object, contain unpaired surrogates,
            or nest lists and objects more than 200 levels deep.
    """
    try:
        body = from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise APIError(400, f"invalid JSON: {error}") from None
    if not isinstance(body, dict):
        raise APIError(400, f"expected a JSON object, got {type(body).__name__}")
    return {name: value for name, value in body.items() if value is not None}


def validate(
    model: type[Model], body: Mapping[str, Any], prefix: str = "", *, ignores_unknown: bool = False
) -> Model:
    """Return a JSON object as an instance of `model`. In errors, fields have the prefix `prefix`.

    Fields that no path has, and that this server does not know, may be ignored.

    Raises:
        APIError: A field is unknown, invalid, or not supported by this server.
    """
    fields = dict[str, Any]()
    ignored_names = list[str]()
    for name, value in sorted(body.items()):
        field = prefix + name
        # One value more than the maximum is enough. `value` itself is not counted.
        counted_values = itertools.islice(walk_values(value), _MAX_FIELD_VALUES + 2)
        num_values = sum(1 for _ in counted_values) - 1
        if name != "prompt" and num_values > _MAX_FIELD_VALUES:
            raise make_value_error(field, f"at most {_MAX_FIELD_VALUES} values in total", value)
        if name in model.model_fields:
            fields[name] = value
        elif name in _NEUTRAL_FIELDS:
            if not _equals_json(value, _NEUTRAL_FIELDS[name]):
                raise make_unsupported_error(field, json.dumps(_NEUTRAL_FIELDS[name]), value)
        elif name in _REPLACEMENTS:
            advice = f"Use {_REPLACEMENTS[name]} instead"
            raise make_field_error(
                field, f"not supported by this server. {advice}", UNSUPPORTED_CODE
            )
        elif ignores_unknown and name not in _BODY_FIELDS:
            ignored_names.append(name)
        else:
            raise make_field_error(
                f"{field:.100}", "not a field of this path. Omit it", "unknown_parameter"
            )
    if ignored_names:
        logger.warning("ignored the unknown fields %.200r of a request", ignored_names)
    try:
        return model.model_validate(fields)
    except ValidationError as failure:
        errors = failure.errors(include_url=False, include_context=False)
        first_error = errors[0]
        field = _get_field(first_error)
        # A value may break the rules of several types, some of which are the same.
        rules = [_describe_rule(error) for error in errors if _get_field(error) == field]
        expected = " or ".join(dict.fromkeys(rules))[:_MAX_RULES_LENGTH]
        value = None if first_error["type"] == "missing" else first_error["input"]
        raise make_value_error(prefix + field, expected, value) from None


def _describe_rule(error: Mapping[str, Any]) -> str:
    """Return the rule that an error of pydantic states, as a noun phrase."""
    text = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    text = re.sub(r" after validation, not \d+$", "", text)
    no_field = f"no field {error['loc'][-1]!s:.60}"
    text = {"missing": "a value", "extra_forbidden": no_field}.get(error["type"], text)
    return re.sub(r"^(\w+) should have ", lambda match: f"a {match[1].lower()} with ", text)


# Number of nested names and indices in the name of a field in errors.
_NAME_DEPTHS = {
    "messages": 2,
    "input": 2,
    "tools": 1,
    "response_format": 2,
    "text": 2,
    "structured_outputs": 1,
}


def _get_field(error: Mapping[str, Any]) -> str:
    """Return the name of the field to which an error of pydantic refers."""
    name, *path = error["loc"]
    if name == "input":  # the index of an item is followed by the item's type
        path[1:2] = ["type"] if error["type"] == "item" else []
    elif name == "text":
        path = [key for key in path if key != "json_schema"]  # added by `_nest_in`
    keys = path[: _NAME_DEPTHS.get(name, 0)]
    return str(name) + "".join(f"[{x}]" if isinstance(x, int) else f".{x:.100}" for x in keys)
