"""The options of `transformers serve`: which are supported, and what they set."""

import importlib.util
import json
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..modeling.model_support import ATTENTION

# Tokens of a step on a CPU. transformers' 8,192 there stop all streams for minutes while one prompt
# is read; the weights are read more often for it, which costs little from some hundred tokens on.
CPU_STEP_TOKENS = 256
# Options of the stock command that ours has itself, or does not need.
OWN_OPTIONS = ("force_model", "host", "port", "non_blocking")
# Keywords of transformers' ModelManager.
LOADING_OPTIONS = ("device", "dtype", "trust_remote_code", "quantization", "model_timeout")
_USED = frozenset({
    *LOADING_OPTIONS, "continuous_batching", "attn_implementation", "reasoning",
    "chat_template_kwargs", "decision_config", "enable_cors", "log_level", "default_seed",
})  # fmt: skip


_PACKAGES = ("fastapi", "uvicorn", "pydantic", "llguidance", "prometheus_client")


def require_server() -> None:
    """Raise ConfigError unless the packages of the extra `serve` are installed."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"expected the packages {', '.join(_PACKAGES)}, got no {', '.join(missing)}: "
            "pip install 'hf-fp8kv[serve]'"
        )


def check_options(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise ConfigError for options of the stock command that would do nothing, or not the same."""
    from transformers.utils import logging as transformers_logging

    if options.get("attn_implementation") not in (None, ATTENTION):
        raise ConfigError(
            "--attn-implementation: expected fp8_paged, which reads the pages, got "
            f"{options['attn_implementation']!r}; leave it out"
        )
    if options.get("decision_config") is not None:
        raise ConfigError("--decision-config: this server serves one text model; leave it out")
    template_arguments(options)
    levels = transformers_logging.log_levels
    if str(options.get("log_level", "warning")).lower() not in levels:
        raise ConfigError(
            f"--log-level: expected one of {', '.join(levels)}, got {options['log_level']!r}"
        )
    seed = options.get("default_seed")
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise ConfigError(f"--default-seed: expected a 64-bit integer, got {seed}")
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if name.startswith("cb_") and number and value <= 0:
            raise ConfigError(f"{option}: expected a number above 0, got {value}")
        if name == "cb_max_memory_percent" and number and value > 1:
            raise ConfigError(f"{option}: expected a share above 0 and at most 1, got {value}")
        known = name in _USED or name in OWN_OPTIONS or name.startswith("cb_")
        if not known and value != defaults[name]:
            raise ConfigError(f"{option}: not supported by hf-fp8kv serve; leave it out")


def batching_config(options: Mapping[str, Any], device: str) -> Any:
    """Return the ContinuousBatchingConfig of the options --cb-*, with defaults for a device.

    `device` is its type, such as "cpu".
    """
    from transformers import ContinuousBatchingConfig

    chosen: dict[str, Any] = {"max_batch_tokens": CPU_STEP_TOKENS} if device == "cpu" else {}
    chosen |= {
        name.removeprefix("cb_"): value
        for name, value in options.items()
        if name.startswith("cb_") and value is not None
    }
    if "block_size" in chosen:  # transformers' option has the old name
        chosen["page_size"] = chosen.pop("block_size")
    try:
        return ContinuousBatchingConfig(**chosen)
    except (TypeError, ValueError) as error:
        names = ", ".join(f"--cb-{name.replace('_', '-')}" for name in chosen)
        raise ConfigError(f"{names}: {error}") from error


def template_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what --chat-template-kwargs and --reasoning fill into the model's template."""
    text = options.get("chat_template_kwargs")
    try:
        arguments = json.loads(text) if text else {}
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ConfigError(f"--chat-template-kwargs: expected a JSON object, got {text!r}")
    reasoning = str(getattr(options.get("reasoning"), "value", options.get("reasoning")))
    if reasoning in ("on", "off"):
        arguments["enable_thinking"] = reasoning == "on"
    return arguments
