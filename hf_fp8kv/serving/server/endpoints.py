"""Paths that clients of other servers ask for, and transformers' application does not have."""

import importlib.metadata
from typing import Any

from .checks import are_tokens
from .engine import Engine
from .errors import APIError
from .messages import check_messages
from .model import SingleModelManager

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
_MODEL = "/v1/models/"
_PACKAGES = ("hf-fp8kv", "transformers", "torch")
_FIELDS = {
    TOKENIZE: {"model", "prompt", "messages", "add_special_tokens", "add_generation_prompt"},
    DETOKENIZE: {"model", "tokens"},
}


def describe(path: str, model: SingleModelManager, engine: Engine) -> dict[str, Any] | None:
    """Return the answer to GET /version or /v1/models/NAME; None for any other path.

    Raises APIError for another model.
    """
    if path == "/version":
        versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
        return {"version": versions["hf-fp8kv"], **versions}
    if not path.startswith(_MODEL):
        return None
    name = model.check_name(path.removeprefix(_MODEL))
    (found,) = model.list_models()
    return {**found, "id": name, "max_model_len": engine.max_tokens}


def convert(
    path: str, body: dict[str, Any], model: SingleModelManager, engine: Engine
) -> dict[str, Any]:
    """Return the answer to POST /tokenize or /detokenize, as vLLM's server has them.

    Raises:
        APIError: A field is unknown or invalid.
    """
    if unknown := sorted(body.keys() - _FIELDS[path]):
        raise APIError(400, f"{unknown[0]:.100}: not a field of {path}; leave it out")
    if path == DETOKENIZE:
        tokens: Any = body.get("tokens")
        most, vocabulary = engine.max_tokens, engine.vocabulary
        if not are_tokens(tokens) or len(tokens) > most or max(tokens, default=0) >= vocabulary:
            expected = f"a list of at most {most} integers from 0 to {vocabulary - 1}"
            raise APIError(400, f"tokens: expected {expected}", param="tokens")
        return {"prompt": model.tokenizer.decode(tokens)}
    found = _tokenize(body, model.tokenizer)
    return {"tokens": found, "count": len(found), "max_model_len": engine.max_tokens}


def _tokenize(body: dict[str, Any], tokenizer: Any) -> list[int]:
    prompt, messages = body.get("prompt"), body.get("messages")
    if (prompt is None) == (messages is None):
        raise APIError(400, "prompt, messages: expected one of them")
    if prompt is not None and not isinstance(prompt, str):
        raise APIError(400, "prompt: expected text", param="prompt")
    if messages is None:
        special = bool(body.get("add_special_tokens", True))
        return list(tokenizer(prompt, add_special_tokens=special)["input_ids"])
    check_messages(body)
    generation = bool(body.get("add_generation_prompt", True))
    try:
        found = tokenizer.apply_chat_template(
            messages, add_generation_prompt=generation, return_dict=True
        )
    except Exception as error:  # a template is a program, which may refuse anything
        text = f"{type(error).__name__}: {error}"
        raise APIError(400, f"cannot make a prompt of these messages: {text:.300}") from error
    return list(found["input_ids"])
