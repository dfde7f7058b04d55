"""`hf-fp8kv serve`, which serves one model from FP8 pages with OpenAI's interface."""

import json
import logging
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from . import arguments
from .shared import handle_log, print_note


def parse_json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"expected a JSON object, got {text!r}")
    return value


def serve(
    ctx: typer.Context,
    model: arguments.ModelArgument = None,
    kv_cache_dtype: arguments.CacheDtype = None,
    key_dtype: arguments.KeyDtype = None,
    value_dtype: arguments.ValueDtype = None,
    plan: arguments.Plan = None,
    bits: arguments.Bits = None,
    scales: arguments.StaticScales = None,
    backend: arguments.Backend = "auto",
    host: Annotated[
        str,
        typer.Option(help="Address to listen on. Other machines can reach it only with a token."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 selects a free port.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="API key of the clients. HF_FP8KV_API_KEY is safer: other users see arguments.",
            show_default=False,
        ),
    ] = None,
    max_body: Annotated[
        Any, typer.Option(help="Maximum size of a request.", **arguments.SIZE)
    ] = "4MiB",
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Maximum waiting requests. Others fail with status 429.")
    ] = 128,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the model for clients. Default: the model's name.")
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="A Jinja file instead of the model's chat template."
        ),
    ] = None,
    chat_template_kwargs: Annotated[
        Any, typer.Option(metavar="JSON", parser=parse_json, help="Arguments of the chat template.")
    ] = None,
    reasoning: Annotated[
        str,
        typer.Option(
            help="on or off: `enable_thinking` of the chat template. auto: the template's default.",
            **arguments.make_choice(("auto", "on", "off")),
        ),
    ] = "auto",
    max_model_len: Annotated[
        int | None,
        typer.Option(min=2, help="Maximum tokens of prompt and answer. Default: the model's."),
    ] = None,
    device: arguments.Device = "auto",
    dtype: arguments.ModelDtype = "auto",
    quantization: Annotated[
        str | None, typer.Option(help="Format of the weights: bnb-4bit or bnb-8bit.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code in the model's folder.")
    ] = False,
    continuous_batching: Annotated[
        bool, typer.Option("--continuous-batching", help="Always on.", hidden=True)
    ] = True,
    cb_num_blocks: Annotated[
        int | None,
        typer.Option(min=1, help="Number of pages. Default: all that fit into free memory."),
    ] = None,
    cb_block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens per page. Default: transformers' value.")
    ] = None,
    cb_max_batch_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens per step. Default: 256 on a CPU, else transformers' value."
        ),
    ] = None,
    cb_max_memory_percent: Annotated[
        float | None, typer.Option(min=1e-3, max=1, help="Fraction of the free memory for pages.")
    ] = None,
    cb_use_cuda_graph: Annotated[
        bool | None, typer.Option(help="Capture steps without prompts as CUDA graphs.")
    ] = None,
    deterministic: Annotated[
        bool, typer.Option(help="Make answers independent of other requests, in slower steps.")
    ] = False,
    default_seed: Annotated[
        int | None,
        typer.Option(min=-(2**63), max=2**63 - 1, help="A seed for requests without a seed."),
    ] = None,
    prefix_store: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, help="Folder for the pages of prompts, which later servers reuse."
        ),
    ] = None,
    prefix_store_size: Annotated[
        Any, typer.Option(help="Maximum size of the prefix store.", **arguments.SIZE)
    ] = "16GiB",
    client_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds after which an inactive client is dropped.")
    ] = 60.0,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds for running requests after SIGTERM.")
    ] = 30.0,
    metrics_interval: Annotated[
        float, typer.Option(min=0, help="Seconds between logged metrics. 0 means no log.")
    ] = 10.0,
    ignore_unknown_fields: Annotated[
        bool, typer.Option("--ignore-unknown-fields", help="Log unknown fields instead of a 400.")
    ] = False,
    enable_cors: Annotated[
        bool, typer.Option("--enable-cors", help="Let web pages of other origins read answers.")
    ] = False,
    log_level: Annotated[
        str,
        typer.Option(
            help="Level of transformers' log.",
            **arguments.make_choice(
                arguments.LOG_LEVELS, {level.upper(): level for level in arguments.LOG_LEVELS}
            ),
        ),
    ] = "warning",
) -> None:
    """Serve a model from FP8 pages, with OpenAI's interface and options of `transformers serve`.

    POST /v1/chat/completions, /v1/completions, /v1/responses. GET /v1/models, /health, /metrics.
    """
    from hf_fp8kv.server import require_server

    require_server()
    from transformers import ContinuousBatchingConfig
    from transformers.utils.logging import log_levels, set_verbosity

    from hf_fp8kv import ConfigError, PrefixStore, demo_model_path, serving
    from hf_fp8kv.cache.plans import parse_plan
    from hf_fp8kv.server.app import Application
    from hf_fp8kv.server.model import ServedModel
    from hf_fp8kv.server.run import load_model, run
    from hf_fp8kv.server.server_config import ServerConfig, bind_socket
    from hf_fp8kv.utils.files import convert_read_errors

    cache_options = arguments.collect_cache_options(ctx) | {
        "plan": parse_plan(plan),  # read before the model is loaded
        "deterministic": deterministic,
        "prefix_store": prefix_store and PrefixStore(prefix_store, max_bytes=prefix_store_size),
    }
    config = ServerConfig(
        host=host,
        api_key=api_key,
        max_body_bytes=max_body,
        max_waiting=max_waiting,
        grace_seconds=grace,
        stop_seconds=1.0,
        client_seconds=client_timeout,
        log_seconds=metrics_interval,
        max_model_tokens=max_model_len,
        seed=default_seed,
        ignore_unknown_fields=ignore_unknown_fields,
        enable_cors=enable_cors,
    )
    batching_options: dict[str, Any] = {
        "num_blocks": cb_num_blocks,
        "page_size": cb_block_size,
        "max_batch_tokens": cb_max_batch_tokens,
        "max_memory_percent": cb_max_memory_percent,
        "use_cuda_graph": cb_use_cuda_graph,
    }
    batching = ContinuousBatchingConfig(
        **{name: value for name, value in batching_options.items() if value is not None}
    )
    template_text = None
    if chat_template is not None:
        with convert_read_errors(chat_template, "a template in UTF-8", ConfigError):
            template_text = chat_template.read_text("utf-8")
    thinking = {} if reasoning == "auto" else {"enable_thinking": reasoning == "on"}
    set_verbosity(log_levels[log_level])
    name = model or str(demo_model_path())
    log_handler = logging.StreamHandler()
    log_handler.setLevel(logging.INFO)
    # Lines of the library's log look like lines of the server.
    log_handler.setFormatter(logging.Formatter("%(levelname)s:     %(message)s"))
    with handle_log(log_handler), closing(bind_socket(host, port)) as listener:
        loaded_model, processor = load_model(
            name,
            device=device,
            dtype=dtype,
            quantization=quantization,
            trust_remote_code=trust_remote_code,
        )
        served_model = ServedModel(
            serving.enable(loaded_model, **cache_options),
            processor,
            name,
            served_name=served_model_name,
            template=template_text,
            template_arguments={**(chat_template_kwargs or {}), **thinking},
        )
        app = Application(served_model, config, batching)
        run(app, listener, lambda address: print_note(f"hf-fp8kv: serving {name} at {address}"))
