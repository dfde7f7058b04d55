"""An OpenAI server of one model on the engine of `hf_fp8kv.serving`, to run or to mount.

    client ──> app ──> schemas ──> model ──> choices ──> engine ──> FP8 pages
               access, checked     prompts   one request continuous batching,
               limits  fields      of tokens an answer   sampling, structured
    client <── app <── answers, responses <── text <── tokens

Importing this package does not import fastapi or uvicorn. A call of `application` does.
"""

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import ContinuousBatchingConfig

from ..errors import ConfigError
from ..serving.fp8_manager import require_enabled

if TYPE_CHECKING:
    from .app import Application

_PACKAGES = ("fastapi", "uvicorn", "pydantic", "llguidance", "prometheus_client")


def application(
    model: Any,
    tokenizer: Any,
    *,
    batching: Any = None,
    served_name: str | None = None,
    api_key: str | None = None,
    max_waiting: int = 128,
    max_body: int = 4 * 2**20,
    max_model_len: int | None = None,
    seed: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    cors: bool = False,
) -> "Application":
    """Return the server of one model as an ASGI application, to run or to mount.

    ```python
    serving.enable(model, scales="scales")
    llm = application(model, tokenizer)
    app = FastAPI(lifespan=llm.lifespan)  # Starlette has no events for what is mounted
    app.mount("/llm", llm)  # POST /llm/v1/chat/completions
    ```

    The engine starts and stops with the lifespan, not in this call. A model can have one such
    application at a time.

    Args:
        model: A model that `hf_fp8kv.serving.enable` was called on.
        tokenizer: Its tokenizer, or a processor with one. Its chat template is used.
        batching: A ContinuousBatchingConfig. On a CPU its steps have 256 tokens by default.
        served_name: The model's name for clients. None means `model.name_or_path`.
        api_key: The clients' token. None means the value of HF_FP8KV_API_KEY. Without a token,
            everyone who reaches the application may use it.
        max_waiting: Maximum number of requests that wait. Others get 429.
        max_body: Size of the largest request, in bytes.
        max_model_len: Maximum number of tokens of a prompt and its answer. None means the model's.
        seed: Makes the answers to requests without a seed the same in each run that has these
            requests in the same order.
        chat_template_kwargs: Arguments of the chat template.
        cors: Whether web pages of other origins may read answers.

    Raises:
        ConfigError: The model is not enabled or not a text model, an argument is invalid, or
            packages of the extra `serve` are not installed.
    """
    require_server()
    from .app import Application
    from .config import ServerConfig
    from .model import ServedModel

    require_enabled(model)
    own_name = str(getattr(model, "name_or_path", "") or type(model).__name__)
    return Application(
        ServedModel(
            model, tokenizer, own_name, served_name=served_name, arguments=chat_template_kwargs
        ),
        ServerConfig(
            api_key=api_key,
            max_waiting=max_waiting,
            max_body=max_body,
            max_model_tokens=max_model_len,
            seed=seed,
            cors=cors,
        ),
        batching or ContinuousBatchingConfig(),
    )


def require_server() -> None:
    """Raise ConfigError unless the packages of the extra `serve` are installed."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"expected the packages {', '.join(_PACKAGES)}, got no {', '.join(missing)}: "
            "pip install 'hf-fp8kv[serve]'"
        )


def batching_config(**settings: Any) -> Any:
    """Return a ContinuousBatchingConfig for options of the command line. Raises ConfigError."""
    try:
        return ContinuousBatchingConfig(**settings)
    except (TypeError, ValueError) as error:
        names = ", ".join(f"--cb-{name.replace('_', '-')}" for name in settings)
        raise ConfigError(f"{names}: {error}") from error
