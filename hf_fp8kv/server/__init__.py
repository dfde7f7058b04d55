"""An OpenAI server of one model on the engine of `hf_fp8kv.serving`, to run or to mount.

    client ──> app ──> schemas ──> model ──> choices ──> engine ──> FP8 pages
               access, checked     prompts   one request continuous batching,
               limits  fields      of tokens an answer   sampling, structured
    client <── app <── answers, responses <── text <── tokens

Importing this package imports neither fastapi nor uvicorn; `application` does when it is called.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..serving.fp8_manager import require_enabled

if TYPE_CHECKING:
    from .app import Application


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

    The engine starts and stops with the lifespan; nothing is started here. One model can have one
    such application at a time.

    Args:
        model: a model that `hf_fp8kv.serving.enable` was called on.
        tokenizer: of the model, or a processor with one; its chat template is used.
        batching: a ContinuousBatchingConfig. None: transformers' own, on a CPU with 256 tokens of
            a step.
        served_name: what clients call the model. None: `model.name_or_path`.
        api_key: the clients' token. None: that of HF_FP8KV_API_KEY; without it whoever reaches the
            application may use it.
        max_waiting: requests that may wait; others get 429.
        max_body: bytes of the largest request.
        max_model_len: tokens of a prompt and its answer. None: the model's.
        seed: makes requests without a seed the same in each run that has them in the same order.
        chat_template_kwargs: filled into the chat template.
        cors: whether web pages of other origins may read answers.

    Raises:
        ConfigError: the model is not enabled or not a text model, an argument is invalid, or
            packages of the extra `serve` are not installed.
    """
    from .options import batching_config, require_server

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
        ServerConfig.parse(
            None,
            api_key,
            max_waiting=max_waiting,
            max_body=max_body,
            max_model_tokens=max_model_len,
            seed=seed,
            cors=cors,
        ),
        batching_config(model.device.type) if batching is None else batching,
    )
