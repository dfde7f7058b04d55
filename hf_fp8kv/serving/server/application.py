"""What is taken from transformers' own server: its handlers and its application.

Nothing in transformers is replaced. Its application is put together here as its command does it,
from its own parts, with another loader of models and another engine.
"""

import asyncio
import importlib
import inspect
import logging
from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from .errors import APIError
from .handlers import adapt
from .middleware import request_of
from .options import template_arguments
from .validation import CHAT, COMPLETIONS, GENERATES, RESPONSES

__all__ = ["application"]

logger = logging.getLogger(__name__)

# Long prompts that are made into tokens at the same time; more would take gigabytes.
_LONG_PROMPTS = 2
_FOLDER = "transformers.cli.serving"
_HANDLERS = {
    "chat_handler": ("chat_completion", "ChatCompletionHandler", CHAT),
    "completion_handler": ("completion", "CompletionHandler", COMPLETIONS),
    "response_handler": ("response", "ResponseHandler", RESPONSES),
    "transcription_handler": ("transcription", "TranscriptionHandler", None),
    "systemone_handler": ("systemone", "SystemOneHandler", None),
}
# What is the request's fault, as long as the engine does not have it.
_BLAMED = (ValueError, TypeError, LookupError, AttributeError)


def application(models: Any, state: Any, given: Mapping[str, Any]) -> Any:
    """Returns transformers' FastAPI application over a loader of models and an engine.

    Args:
        models: a ModelManager.
        state: a GenerationState.
        given: the options of the stock command.

    Raises:
        ConfigError: this transformers puts its application together in another way.
    """
    build = importlib.import_module(f"{_FOLDER}.server").build_server
    known: dict[str, Any] = {
        "model_manager": models,
        "generation_state": state,
        "enable_cors": given.get("enable_cors", False),
        "chat_template_kwargs": template_arguments(given),
        "decision_config": None,
    }
    turns = asyncio.Semaphore(_LONG_PROMPTS)
    for name, (module, kind, path) in _HANDLERS.items():
        if name in inspect.signature(build).parameters:
            found = getattr(importlib.import_module(f"{_FOLDER}.{module}"), kind)
            known[name] = found(**_fitting(found, known))
            if path is not None:
                adapt(known[name], path, turns)
    app = build(**_fitting(build, known))
    _tell_errors(app)
    return app


def known_fields() -> dict[str, frozenset[str]]:
    """Returns the fields that transformers' handlers accept, by path."""
    return {
        path: frozenset(
            getattr(
                importlib.import_module(f"{_FOLDER}.{module}"), kind
            )._valid_params_class.__mutable_keys__
        )
        for module, kind, path in _HANDLERS.values()
        if path is not None
    }


def _fitting(called: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keywords that a part of transformers' server takes."""
    parameters = inspect.signature(called).parameters
    needed = {name for name, p in parameters.items() if p.default is p.empty}
    if not needed <= known.keys():
        raise ConfigError(
            f"{called.__name__}: expected parameters that are known, got "
            f"{', '.join(sorted(needed - known.keys()))} too. Tested with transformers 5.17 and "
            "5.23: install one of them"
        )
    return {name: known[name] for name in parameters if name in known}


def _tell_errors(app: Any) -> None:
    """Every error of the application then has one form, and the blame is where it belongs."""
    from fastapi import HTTPException
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from jinja2 import TemplateError
    from starlette.exceptions import HTTPException as PlainHTTPException

    def answer(refusal: APIError) -> Any:
        return JSONResponse(refusal.body(), refusal.status, headers=refusal.headers)

    async def refused(_request: Any, error: Any) -> Any:
        return answer(error)

    async def http(_request: Any, error: Any) -> Any:
        headers = dict(error.headers or {})
        return answer(APIError(error.status_code, str(error.detail), headers=headers))

    async def invalid(_request: Any, error: Any) -> Any:
        return answer(APIError(422, str(error)))

    async def blamed(request: Any, error: Exception) -> Any:
        call = request_of(request.scope)
        if call is None or call.submitted or request.scope["path"] not in GENERATES:
            return await failed(request, error)
        logger.warning("a request could not be made into a prompt", exc_info=error)
        text = f"{type(error).__name__}: {error}"
        return answer(APIError(400, f"no prompt could be made of this request: {text:.300}"))

    async def failed(request: Any, error: Exception) -> Any:
        logger.error("%s %s", request.method, request.url.path, exc_info=error)
        return answer(APIError(500, "the server failed; its log says how"))

    app.add_exception_handler(APIError, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    handled: dict[type[Exception], Any] = {
        **dict.fromkeys((HTTPException, PlainHTTPException), http),
        **dict.fromkeys((*_BLAMED, TemplateError), blamed),
        **dict.fromkeys((RuntimeError, OSError, ArithmeticError, AssertionError), failed),
    }
    for kind, handler in handled.items():
        app.add_exception_handler(kind, handler)
