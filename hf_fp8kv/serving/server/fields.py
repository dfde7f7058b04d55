"""Fields of requests that the server answers itself: what they ask for, and a body without them.

transformers' handlers read messages, prompts, lengths and sampling; the rest is worked out here,
where the request is known, and in the engine.
"""

from collections.abc import Mapping
from typing import Any

from .engine import Engine
from .errors import APIError
from .logits import Logprobs, TokenRules
from .requests import ServerRequest
from .tool_calls import ForcedCall, forced_tool

_RULES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")
_NEED_HOST = "{field}: this server has none, since {why}; leave it out"
# Fields that transformers' handlers read.
_HANDED = (
    "model", "messages", "prompt", "input", "instructions", "tools", "chat_template_kwargs",
    "generation_config", "temperature", "top_p", "max_tokens", "max_completion_tokens",
    "max_output_tokens", "stream",
)  # fmt: skip
# Stands for a prompt of tokens in the body that the handlers get: they want some text.
_TOKENS = "tokens"


def take_fields(request: ServerRequest, engine: Engine) -> dict[str, Any]:
    """Note in a request what its body asks for, and return what transformers' handlers read of it.

    Raises APIError: a field asks for what this engine or model does not have.
    """
    body, fixed_steps = request.body, engine.fixed_steps
    request.logprobs = _read_logprobs(body)
    asked = {"logprobs": request.logprobs, "penalties, biases, bad_words": request.rules}
    for field, value in asked.items():
        if value and fixed_steps is not None:
            text = _NEED_HOST.format(field=field, why=fixed_steps)
            raise APIError(400, text, code="unsupported_parameter")
    name = forced_tool(body)
    request.tool_call = None if name is None else ForcedCall(name)
    left = {name: body[name] for name in _HANDED if name in body}
    if isinstance(body.get("prompt"), list):
        request.prompt_tokens, left["prompt"] = body["prompt"], _TOKENS
    if body.get("max_tokens") == 0:  # an engine makes one at least
        request.scores_only, left["max_tokens"] = True, 1
    return left


def read_rules(body: Mapping[str, Any], engine: Engine, tokenizer: Any) -> TokenRules:
    """Return the rules that a body asks for, or the model's own. Raises APIError: no such token."""
    given = {name: body[name] for name in _RULES if name in body}
    default = getattr(engine.model.generation_config, "repetition_penalty", None)
    if default and engine.fixed_steps is None and "generation_config" not in body:
        given.setdefault("repetition_penalty", default)
    vocabulary = engine.vocabulary
    bias = {int(token): float(value) for token, value in body.get("logit_bias", {}).items()}
    for field, tokens in (("logit_bias", bias), ("stop_token_ids", body.get("stop_token_ids", ()))):
        if any(token >= vocabulary for token in tokens):
            expected = f"tokens below {vocabulary}"
            text = f"{field}: expected {expected}, got {max(tokens)}"
            raise APIError(400, text, param=field)
    words = {
        tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        for word in body.get("bad_words", ())
        for text in (word, f" {word.lstrip()}")  # at a beginning, and after another word
    }
    words.discard(())
    return TokenRules(**given, logit_bias=bias, bad_words=tuple(sorted(words)))


def _read_logprobs(body: Mapping[str, Any]) -> Logprobs | None:
    """Return what is wanted: `logprobs` is a number for completions, true or false for chats."""
    given = body.get("logprobs", False)
    top = given if type(given) is int else body.get("top_logprobs", 0) if given else None
    prompt = body.get("prompt_logprobs", top if body.get("echo") else None)
    return None if top is None and prompt is None else Logprobs(top, prompt)
