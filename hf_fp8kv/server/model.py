"""The server's one model: its names, its tokenizer, and prompts made from messages."""

import inspect
import os
from collections.abc import Mapping
from typing import Any

from transformers.cli.serving.model_manager import ModelManager

from ..errors import ConfigError
from .errors import UNSUPPORTED, APIError, field_error
from .schemas import Request, TokenizeRequest

# Tokens of unknown words, or of dropped spaces, stand for more characters than their own text has.
_LONG_TOKEN = 128


class ServedModel:
    """A model that `hf_fp8kv.serving.enable` was called on, and its tokenizer.

    Args:
        model: The model.
        processor: Its tokenizer, or a processor that has one.
        name: The model's own name.
        served_name: The only name that clients may use. None means the model's own name, with or
            without its folder.
        template: A chat template that replaces the tokenizer's.
        arguments: Arguments of the chat template.

    Raises:
        ConfigError: The model is not a text model that continuous batching can run, or the
            template does not render a message.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        name: str,
        *,
        served_name: str | None = None,
        template: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.tokenizer = model, getattr(processor, "tokenizer", processor)
        modality = ModelManager.get_model_modality(model, processor=processor).value
        if modality != "LLM" or not hasattr(self.tokenizer, "backend_tokenizer"):
            raise ConfigError(
                f"{name}: expected a text model with a fast tokenizer, got {type(model).__name__} "
                f"({modality}) with {type(self.tokenizer).__name__}; choose another"
            )
        short = name.rstrip("/").rsplit("/", 1)[-1]
        revision = () if os.path.exists(name) or "@" in name else (f"{name}@main",)
        self.names = (served_name,) if served_name else (name, *revision, short)
        self._arguments = dict(arguments or {})
        if template is not None:
            self.tokenizer.chat_template = template
            try:
                self._render([{"role": "user", "content": "?"}], tokenize=False)
            except Exception as error:  # a template is a program, which may fail in any way
                raise ConfigError(
                    "--chat-template: expected a template that renders a user's message, got "
                    f"{type(error).__name__}: {error}; correct it, or leave it out for the "
                    "model's own"
                ) from error
        signature = inspect.signature(self.tokenizer.apply_chat_template)
        self._own_arguments = frozenset(signature.parameters)
        self._shows_tools = shows_tools(self.tokenizer)
        self.tokenizer("a")  # its first use sets it up. Later, threads share it
        # A generous bound on the characters that one token may stand for.
        self.longest_token = max([_LONG_TOKEN, *map(len, self.tokenizer.get_vocab())])

    def check_name(self, name: str | None) -> str:
        """Return the model's name for an answer: the requested one, or the short one.

        Raises:
            APIError: The request names a different model.
        """
        if name is not None and name not in self.names:
            raise APIError(
                404,
                f"model: expected {self.names[-1]!r}, the only one here, got {name!r:.100}",
                param="model",
                code="model_not_found",
            )
        return name or self.names[-1]

    def describe(self, name: str | None = None) -> dict[str, Any]:
        """Return the model in the format of OpenAI's list of models."""
        return {"id": name or self.names[-1], "object": "model", "created": 0, "owned_by": ""}

    def check(self, request: Request) -> None:
        """Raise APIError for tools or arguments that the chat template does not take."""
        if request.tools and not self._shows_tools:
            raise field_error(
                "tools",
                "expected none, since this model's chat template does not show them to the model; "
                "leave them out, or serve a model that was trained to call tools",
                UNSUPPORTED,
            )
        for name in request.chat_template_kwargs.keys() & self._own_arguments:
            raise field_error(f"chat_template_kwargs.{name}", "the server sets it; leave it out")

    def make_prompts(self, request: Request | TokenizeRequest) -> list[list[int]]:
        """Return the tokens of each prompt of a request.

        Raises:
            APIError: The chat template refuses the messages.
        """
        if request.prompts:
            special = request.add_special_tokens
            return [
                list(self.tokenizer(prompt, add_special_tokens=special)["input_ids"])
                if isinstance(prompt, str)
                else prompt
                for prompt in request.prompts
            ]
        try:
            inputs = self._render(request.chat, **request.template_arguments)
        except Exception as error:  # a template is a program, which may refuse anything
            text = f"{type(error).__name__}: {error}"
            text = f"cannot make a prompt of these messages: {text:.300}"
            raise APIError(400, text) from error
        return [list(inputs["input_ids"])]

    def _render(self, messages: list[dict[str, Any]], **given: Any) -> Any:
        given = {"add_generation_prompt": True, "return_dict": True, **self._arguments, **given}
        return self.tokenizer.apply_chat_template(messages, **given)


def shows_tools(tokenizer: Any) -> bool:
    """Return whether the chat template writes the names of tools into a prompt."""
    name = "weather_of_tomorrow"
    function = {"name": name, "description": "", "parameters": {"type": "object", "properties": {}}}
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}], tools=[{"type": "function", "function": function}],
            tokenize=False, add_generation_prompt=True,
        )  # fmt: skip
    except Exception:  # a template is a program, which may refuse anything
        return False
    return name in str(text)
