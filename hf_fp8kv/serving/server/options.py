"""The options of transformers' own server: which are taken over, and what becomes of them."""

import json
from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError

__all__ = ["HERE", "batching_config", "check_options", "loading", "require", "template_arguments"]

# Options of the stock command that this one has itself, or has no use for.
HERE = ("force_model", "host", "port", "non_blocking")
_LOADING = ("device", "dtype", "trust_remote_code", "quantization", "model_timeout")
_USED = frozenset({
    *_LOADING, "continuous_batching", "attn_implementation", "compile", "reasoning",
    "chat_template_kwargs", "decision_config", "enable_cors", "log_level", "default_seed",
})  # fmt: skip


def require() -> None:
    """Raises ConfigError unless transformers can serve here."""
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise ConfigError(
            "expected fastapi, uvicorn, pydantic and openai, got an environment without: "
            "pip install 'hf-fp8kv[serve]'"
        )


def check_options(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raises ConfigError for options that would do nothing, or something else.

    Args:
        given: all options of the stock command, by parameter.
        defaults: their values when they are not given.
    """
    from transformers.utils import logging as transformers_logging

    if given.get("attn_implementation") not in (None, "fp8_paged"):
        raise ConfigError(
            "--attn-implementation: expected fp8_paged, which reads the pages, got "
            f"{given['attn_implementation']!r}; leave it out"
        )
    if given.get("decision_config") is not None:
        raise ConfigError("--decision-config: this server serves one model of text; leave it out")
    template_arguments(given)
    levels = transformers_logging.log_levels
    if str(given.get("log_level", "warning")).lower() not in levels:
        raise ConfigError(
            f"--log-level: expected one of {', '.join(levels)}, got {given['log_level']!r}"
        )
    seed = given.get("default_seed")
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise ConfigError(f"--default-seed: expected a number of 64 bits, got {seed}")
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if name.startswith("cb_") and number and value <= 0:
            raise ConfigError(f"{option}: expected a number above 0, got {value}")
        if name == "cb_max_memory_percent" and number and value > 1:
            raise ConfigError(f"{option}: expected a share above 0 and at most 1, got {value}")
        known = name in _USED or name in HERE or name.startswith("cb_")
        if not known and value != defaults[name]:
            raise ConfigError(
                f"{option}: this transformers knows it, hf-fp8kv serve does not; leave it out"
            )


def loading(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keywords of transformers' ModelManager."""
    return {name: given[name] for name in _LOADING if name in given}


def batching_config(given: Mapping[str, Any]) -> Any:
    """Returns the ContinuousBatchingConfig of the options --cb-*; None: without any."""
    from transformers import ContinuousBatchingConfig

    chosen = {
        name.removeprefix("cb_"): value
        for name, value in given.items()
        if name.startswith("cb_") and value is not None
    }
    try:
        return ContinuousBatchingConfig(**chosen) if chosen else None
    except (TypeError, ValueError) as error:
        options = ", ".join(f"--cb-{name.replace('_', '-')}" for name in chosen)
        raise ConfigError(f"{options}: {error}") from error


def template_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what --chat-template-kwargs and --reasoning fill into the model's template."""
    text = given.get("chat_template_kwargs")
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"--chat-template-kwargs: expected a JSON object, got {text!r}")
    reasoning = str(getattr(given.get("reasoning"), "value", given.get("reasoning")))
    if reasoning in ("on", "off"):
        found["enable_thinking"] = reasoning == "on"
    return found
