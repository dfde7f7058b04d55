"""An OpenAI server of one model on the engine of `hf_fp8kv.serving`, to run or to mount.

    client ──> app ────> schemas ──> model ────> choices ─────> engine ──> FP8 pages
               access,   validated   prompts     one request    continuous batching,
               limits    fields      of tokens   per answer     sampling, grammars
    client <── app <──── completions, responses <── text <───── tokens

Importing this package does not import starlette or uvicorn. `make_application` imports them.
"""

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import ContinuousBatchingConfig

from ..errors import ConfigError
from ..modeling.model_support import find_base_model
from ..serving.fp8_manager import require_enabled

if TYPE_CHECKING:
    from .app import Application

_REQUIRED_PACKAGES = ("starlette", "uvicorn", "pydantic", "llguidance", "prometheus_client")


def make_application(
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
    ignore_unknown_fields: bool = False,
    enable_cors: bool = False,
) -> "Application":
    """Return the server of one model as an ASGI application, to run or to mount.

    ```python
    serving.enable(model, scales="scales")
    llm = make_application(model, tokenizer)
    app = FastAPI(lifespan=llm.lifespan)  # mounted applications get no lifespan events
    app.mount("/llm", llm)  # POST /llm/v1/chat/completions
    ```

    The engine starts and stops with the lifespan, not in this call. A model can have only one
    application at a time.

    Args:
        model: A model on which `hf_fp8kv.serving.enable` was called.
        tokenizer: The model's tokenizer with its chat template, or a processor that contains it.
        batching: A ContinuousBatchingConfig. On a CPU, a step has at most 256 tokens by default.
        served_name: The model's name for clients. None means `model.name_or_path`.
        api_key: Key that clients must send. None means the value of HF_FP8KV_API_KEY. If neither
            is set, clients need no key.
        max_waiting: Maximum number of waiting requests. Further requests get status 429.
        max_body: Maximum size of a request's body in bytes.
        max_model_len: Maximum number of tokens of a prompt and its answer. None means the model's
            limit.
        seed: Seed of the requests that have no seed. With it, every run of the server that receives
            the same requests in the same order gives the same answers.
        chat_template_kwargs: Additional arguments of the chat template.
        ignore_unknown_fields: Whether requests may have fields that the server does not know. It
            logs their names. Without it, such a request gets status 400.
        enable_cors: Whether web pages of other origins may read responses.

    Raises:
        ConfigError: The model is not enabled or not a text model, an argument is invalid, or
            packages of the extra `serve` are not installed.
    """
    require_server()
    from .app import Application
    from .model import ServedModel
    from .server_config import ServerConfig

    require_enabled(model)
    model = find_base_model(model)
    name = str(getattr(model, "name_or_path", "") or type(model).__name__)
    return Application(
        ServedModel(
            model, tokenizer, name, served_name=served_name, template_arguments=chat_template_kwargs
        ),
        ServerConfig(
            api_key=api_key,
            max_waiting=max_waiting,
            max_body_bytes=max_body,
            max_model_tokens=max_model_len,
            seed=seed,
            ignore_unknown_fields=ignore_unknown_fields,
            enable_cors=enable_cors,
        ),
        batching or ContinuousBatchingConfig(),
    )


def require_server() -> None:
    """Raise ConfigError unless the packages of the extra `serve` are installed."""
    missing = [name for name in _REQUIRED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"expected the packages {', '.join(_REQUIRED_PACKAGES)}, got no {', '.join(missing)}. "
            "Install them with pip install 'hf-fp8kv[serve]'"
        )
