"""transformers' own server application, put together from its parts.

Nothing in transformers is replaced: its application is built as its command builds it, with another
loader of models and another engine.
"""

import asyncio
import importlib
import inspect
import logging
from collections.abc import Mapping
from typing import Any

from ..engines import unsupported_engine
from .answers import TokenTexts
from .errors import INTERNAL, APIError
from .handlers import adapt
from .requests import current_request
from .validation import CHAT, COMPLETIONS, RESPONSES

logger = logging.getLogger(__name__)

# Long prompts that are made into tokens at the same time; more would take gigabytes.
_LONG_PROMPTS = 2
_PACKAGE = "transformers.cli.serving"
_HANDLERS = {
    "chat_handler": ("chat_completion", "ChatCompletionHandler", CHAT),
    "completion_handler": ("completion", "CompletionHandler", COMPLETIONS),
    "response_handler": ("response", "ResponseHandler", RESPONSES),
    "transcription_handler": ("transcription", "TranscriptionHandler", None),
    "systemone_handler": ("systemone", "SystemOneHandler", None),
}
# Exceptions that the request caused, as long as the engine does not have it.
_REQUEST_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
_SERVER_ERRORS = (RuntimeError, OSError, ArithmeticError, AssertionError)


def build_application(
    models: Any, state: Any, *, cors: bool, template_arguments: dict[str, Any]
) -> tuple[Any, dict[str, frozenset[str]]]:
    """Return transformers' FastAPI application, and the fields that its handlers take, by path.

    `models` is a SingleModelManager, `state` a GenerationState; `cors`: whether pages of other
    origins may read answers; `template_arguments` are filled into the chat template.

    Raises:
        ConfigError: this transformers puts its application together in another way.
    """
    build = importlib.import_module(f"{_PACKAGE}.server").build_server
    known: dict[str, Any] = {
        "model_manager": models,
        "generation_state": state,
        "enable_cors": cors,
        "chat_template_kwargs": template_arguments,
        "decision_config": None,
    }
    fields = {}
    turns, texts = asyncio.Semaphore(_LONG_PROMPTS), TokenTexts(models.tokenizer)
    for name, (module, kind, path) in _HANDLERS.items():
        if name in inspect.signature(build).parameters:
            handler = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), kind)
            known[name] = handler(**_select_keywords(handler, known))
            if path is not None:
                adapt(known[name], path, turns, texts)
                fields[path] = frozenset(handler._valid_params_class.__mutable_keys__)
    app = build(**_select_keywords(build, known))
    _convert_errors(app)
    return app, fields


def _select_keywords(called: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that a part of transformers' server takes."""
    parameters = inspect.signature(called).parameters
    needed = {name for name, p in parameters.items() if p.default is p.empty}
    if unknown := ", ".join(sorted(needed - known.keys())):
        raise unsupported_engine(f"has a {called.__name__} that needs {unknown}")
    return {name: known[name] for name in parameters if name in known}


def _convert_errors(app: Any) -> None:
    """Convert all errors of the application to APIError, of status 4xx or 5xx."""
    from fastapi.exceptions import RequestValidationError
    from jinja2 import TemplateError
    from starlette.exceptions import HTTPException

    def convert(request: Any, error: Any) -> APIError:
        if isinstance(error, APIError):
            return error
        if isinstance(error, HTTPException):
            headers = dict(error.headers or {})
            return APIError(error.status_code, str(error.detail), headers=headers)
        if isinstance(error, RequestValidationError):
            return APIError(422, str(error))
        waiting = current_request.get(None)
        by_request = isinstance(error, (*_REQUEST_ERRORS, TemplateError))
        if by_request and waiting is not None and not waiting.submitted:
            logger.warning("a request could not be made into a prompt", exc_info=error)
            text = f"{type(error).__name__}: {error}"
            return APIError(400, f"cannot make a prompt of this request: {text:.300}")
        logger.error("%s %s", request.method, request.url.path, exc_info=error)
        return APIError(500, INTERNAL)

    async def answer(request: Any, error: Any) -> Any:
        return convert(request, error).response()

    others = (*_REQUEST_ERRORS, *_SERVER_ERRORS)
    for kind in (APIError, RequestValidationError, HTTPException, TemplateError, *others):
        app.add_exception_handler(kind, answer)
