"""Requirements of the server, and the configuration of its engine."""

import importlib.util
from typing import Any

from ..errors import ConfigError

# Tokens of a step on a CPU. With transformers' 8,192 all streams would pause for minutes while one
# prompt is read. Shorter steps read the weights more often, which costs little from some hundred
# tokens on.
CPU_STEP_TOKENS = 256
_PACKAGES = ("fastapi", "uvicorn", "pydantic", "llguidance", "prometheus_client")


def require_server() -> None:
    """Raise ConfigError unless the packages of the extra `serve` are installed."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"expected the packages {', '.join(_PACKAGES)}, got no {', '.join(missing)}: "
            "pip install 'hf-fp8kv[serve]'"
        )


def batching_config(device: str, **settings: Any) -> Any:
    """Return a ContinuousBatchingConfig with our defaults for a type of device, such as "cpu"."""
    from transformers import ContinuousBatchingConfig

    defaults = {"max_batch_tokens": CPU_STEP_TOKENS} if device == "cpu" else {}
    try:
        return ContinuousBatchingConfig(**defaults | settings)
    except (TypeError, ValueError) as error:
        names = ", ".join(f"--cb-{name.replace('_', '-')}" for name in settings)
        raise ConfigError(f"{names}: {error}") from error
