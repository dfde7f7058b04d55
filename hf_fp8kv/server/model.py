"""The model of a server: its names, its tokenizer, and the prompts made from messages."""

import inspect
import os
from collections.abc import Mapping
from typing import Any

from transformers.cli.serving.model_manager import ModelManager

from ..errors import ConfigError
from .errors import UNSUPPORTED_CODE, APIError, make_field_error
from .schemas import AnyBody, CompletionBody

# A token for an unknown word or dropped spaces may stand for more characters than its text has.
_MIN_LENGTH_BOUND = 128  # characters


class ServedModel:
    """A model on which `hf_fp8kv.serving.enable` was called, and its tokenizer.

    Args:
        model: The model.
        processor: The model's tokenizer, or a processor that contains one.
        name: The name of the model, a folder or a Hub id.
        served_name: The only name that clients may use. None means `name`, with or without its
            folder and, for a Hub id, `name@main`.
        template: A chat template that replaces the tokenizer's template.
        template_arguments: Arguments of the chat template.

    Raises:
        ConfigError: The model is not a text model, its tokenizer is not fast, or the template does
            not render a message.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        name: str,
        *,
        served_name: str | None = None,
        template: str | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = getattr(processor, "tokenizer", processor)
        modality = ModelManager.get_model_modality(model, processor=processor).value
        if modality != "LLM" or not hasattr(self.tokenizer, "backend_tokenizer"):
            raise ConfigError(
                f"{name}: expected a text model with a fast tokenizer, got {type(model).__name__} "
                f"({modality}) with {type(self.tokenizer).__name__}. Choose another model"
            )
        self.short_name = served_name or name.rstrip("/").rsplit("/", 1)[-1]
        revision_names = () if os.path.exists(name) or "@" in name else (f"{name}@main",)
        self.names = (served_name,) if served_name else (name, *revision_names, self.short_name)
        self._template_arguments = dict(template_arguments or {})
        if template is not None:
            self.tokenizer.chat_template = template
            try:
                self._render([{"role": "user", "content": "?"}], tokenize=False)
            except Exception as error:  # a template is a program, which may fail in any way
                raise ConfigError(
                    "--chat-template: expected a template that renders a user's message, got "
                    f"{type(error).__name__}: {error}. Correct it, or omit it to use the model's "
                    "template"
                ) from error
        self._reserved_arguments = frozenset(
            inspect.signature(self.tokenizer.apply_chat_template).parameters
        )
        self._template_shows_tools = template_shows_tools(self.tokenizer)
        self.tokenizer("a")  # the first use initializes the tokenizer, which threads share later
        # An upper bound on the number of characters that one token may stand for.
        self.max_token_length = max([_MIN_LENGTH_BOUND, *map(len, self.tokenizer.get_vocab())])

    def check_name(self, name: str | None) -> str:
        """Return the model's name for a response: the requested name, or by default the short name.

        Raises:
            APIError: The request names another model.
        """
        if name is not None and name not in self.names:
            raise APIError(
                404,
                f"model: expected {self.short_name!r}, the only served model, got {name!r:.100}",
                param="model",
                code="model_not_found",
            )
        return name or self.short_name

    def make_model_entry(self, name: str) -> dict[str, Any]:
        """Return the model's entry in OpenAI's list of models, under one of its names."""
        return {"id": name, "object": "model", "created": 0, "owned_by": ""}

    def check_template_fields(self, body: AnyBody) -> None:
        """Raise APIError for tools that the template omits, or arguments that the server sets."""
        if isinstance(body, CompletionBody):
            return
        if body.tools and not self._template_shows_tools:
            raise make_field_error(
                "tools",
                "expected none, because this model's chat template does not show tools to it. "
                "Omit them, or serve a model that was trained to call tools",
                UNSUPPORTED_CODE,
            )
        for name in body.chat_template_kwargs.keys() & self._reserved_arguments:
            raise make_field_error(
                f"chat_template_kwargs.{name}", "the server sets this field. Omit it"
            )

    def make_prompts(self, body: AnyBody) -> list[list[int]]:
        """Return the tokens of each prompt of a request.

        Raises:
            APIError: The chat template refuses the messages.
        """
        if isinstance(body, CompletionBody):
            options = {"add_special_tokens": body.add_special_tokens}
            return [
                list(self.tokenizer(prompt, **options)["input_ids"])
                if isinstance(prompt, str)
                else prompt
                for prompt in body.prompts
            ]
        arguments = {**body.chat_template_kwargs, "tools": body.template_tools}
        try:
            inputs = self._render(body.chat_messages, **arguments)
        except Exception as error:  # a template is a program, which may refuse anything
            reason = f"{type(error).__name__}: {error}"
            raise APIError(400, f"cannot make a prompt from the messages: {reason:.300}") from error
        return [list(inputs["input_ids"])]

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        arguments = {
            "add_generation_prompt": True,
            "return_dict": True,
            **self._template_arguments,
            **options,
        }
        return self.tokenizer.apply_chat_template(messages, **arguments)


def template_shows_tools(tokenizer: Any) -> bool:
    """Return whether the chat template writes the names of tools to the prompt."""
    name = "weather_of_tomorrow"  # does not occur in any template
    function = {"name": name, "description": "", "parameters": {"type": "object", "properties": {}}}
    try:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}],
            tools=[{"type": "function", "function": function}],
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception:  # a template is a program, which may refuse anything
        return False
    return name in str(prompt)
