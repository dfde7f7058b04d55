"""The server's one model, loaded as transformers' server loads it and enabled for FP8 pages."""

import inspect
from collections.abc import Mapping
from typing import Any

from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import Modality

from ... import serving
from ...errors import ConfigError
from .errors import APIError

# Tokens of unknown words, or of spaces that are dropped, stand for more than their own characters.
_LONG_TOKEN = 128


class SingleModelManager(ModelManager):
    """A ModelManager that loads one model and its tokenizer when it is made, and no other.

    `pages` are keywords of `hf_fp8kv.serving.enable`, `loading` those of ModelManager; clients call
    the model `served_name`, or what it is called here; `template` stands for its chat template.

    Raises:
        ConfigError: it is not a text model that continuous batching can run, or a template that
            does not render a message.
    """

    def __init__(
        self, name: str, *, pages: Mapping[str, Any], loading: Mapping[str, Any],
        served_name: str | None = None, template: str | None = None,
    ) -> None:  # fmt: skip
        self._pages, self._served_name = pages, served_name
        super().__init__(force_model=name, **loading)
        (loaded,) = self.loaded_models.values()
        self.model: Any = loaded.model
        self.tokenizer: Any = loaded.processor
        modality = super().get_model_modality(self.model, processor=self.tokenizer)
        if modality.value != "LLM" or not hasattr(self.model, "init_continuous_batching"):
            raise ConfigError(
                f"{name}: expected a text model with continuous batching, got "
                f"{type(self.model).__name__} ({modality.value}); choose another"
            )
        if template is not None:
            _replace_template(self.tokenizer, template)
        self.longest_token = _longest_token(self.tokenizer)
        self._renders_tools = _renders_tools(self.tokenizer)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model that clients may use; the first is its own."""
        if self._served_name is not None:
            return (self._served_name,)
        name = str(self.force_model)
        short = name.rstrip("/").rsplit("/", 1)[-1]
        return tuple(dict.fromkeys([name, self.process_model_name(name), short]))

    def check_name(self, asked: object) -> str:
        """Return the model's name in an answer: as it was asked for, if it is this one's, or short.

        Raises APIError if the request names another model.
        """
        if asked is None:
            return self.names[-1]
        if asked not in self.names:
            raise APIError(
                404,
                f"model: expected {self.names[-1]!r}, the only one here, got {asked!r:.100}",
                param="model",
                code="model_not_found",
            )
        return str(asked)

    def check_tools(self, body: Mapping[str, Any]) -> None:
        """Raise APIError for tools that the model would never see."""
        if body.get("tools") and not self._renders_tools:
            raise APIError(
                400,
                "tools: expected none, since this model's chat template does not show them to the "
                "model; leave them out, or serve a model that was trained to call tools",
                param="tools",
                code="unsupported_parameter",
            )

    def template_names(self) -> frozenset[str]:
        """Return the arguments of the chat template that a request must not set."""
        return frozenset(inspect.signature(self.tokenizer.apply_chat_template).parameters)

    def get_model_modality(  # type: ignore[override]  # theirs is a static method
        self, *_: Any, **__: Any
    ) -> Any:
        """Return that the model generates text, whatever stands for its tokenizer in a request."""
        return Modality.LLM

    def list_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        """Return the model in the form of OpenAI's list of models."""
        return [{"id": self.names[-1], "object": "model", "created": 0, "owned_by": ""}]

    get_gen_models = list_models

    def _load_model(self, model_id_and_revision: str, *args: Any, **kwargs: Any) -> Any:
        model = super()._load_model(model_id_and_revision, *args, **kwargs)
        serving.enable(model, **self._pages)
        return model


class GivenModel(SingleModelManager):
    """A SingleModelManager of a model that is there, and enabled for FP8 pages; see there."""

    def __init__(self, model: Any, tokenizer: Any, served_name: str | None = None) -> None:
        self._given = model, tokenizer
        name = str(getattr(model, "name_or_path", "") or type(model).__name__)
        super().__init__(name, pages={}, loading={}, served_name=served_name)

    def _load_model(self, *args: Any, **kwargs: Any) -> Any:
        return self._given[0]

    def _load_processor(self, *args: Any, **kwargs: Any) -> Any:
        return self._given[1]


def _replace_template(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except Exception as error:  # a template is a program, which may fail in any way
        raise ConfigError(
            f"--chat-template: expected a template that renders a user's message, got "
            f"{type(error).__name__}: {error}; correct it, or leave it out for the model's own"
        ) from error


def _renders_tools(tokenizer: Any) -> bool:
    """Return whether a tool's name is in what the chat template makes of a request with it."""
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


def _longest_token(tokenizer: Any) -> int:
    """Return how many characters one token may stand for; a generous bound."""
    tokenizer("a")  # it sets itself up when it is first used; later, threads share it
    return max([_LONG_TOKEN, *map(len, tokenizer.get_vocab())])
