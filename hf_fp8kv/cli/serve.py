"""`hf-fp8kv serve`: an OpenAI server of one model over FP8 pages."""

import logging
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ..cache.plans import parse_plan
from ..errors import ConfigError
from ..prefix.store import PrefixStore
from ..utils.demo_model import demo_model_path
from . import arguments
from .shared import handle_log, print_note


class Serve(TyperCommand):
    """The command below, with the options of `transformers serve` beside its own."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return our parameters, then transformers' own; only when the command is used."""
        own = super().get_params(ctx)
        taken = {name for param in own for name in param.opts}
        return [*own, *(p for p in self.stock_parameters if not taken & set(p.opts))]

    def invoke(self, ctx: Any) -> Any:
        """Run the command, with transformers' options in `ctx.obj`."""
        names = [param.name for param in self.stock_parameters]
        ctx.obj = {name: ctx.params.pop(name) for name in names if name in ctx.params}
        source = ctx.get_parameter_source("continuous_batching")
        given = source is not None and source.name == "COMMANDLINE"
        if given and not ctx.obj["continuous_batching"]:
            raise ConfigError("--no-continuous-batching: not supported; leave it out")
        return super().invoke(ctx)

    @cached_property
    def stock_parameters(self) -> list[Any]:
        """The parameters of `transformers serve` without those that are ours."""
        from ..server.options import OWN_OPTIONS, require_server

        require_server()
        from transformers.cli.serve import Serve as Stock

        app = typer.Typer(add_completion=False)
        app.command()(Stock)
        params = typer.main.get_command(app).params
        return [param for param in params if param.name not in OWN_OPTIONS]


def serve(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="A folder or a Hub id. Default: the demo model.")
    ] = None,
    kv_cache_dtype: arguments.CacheDtype = None,
    key_dtype: arguments.KeyDtype = None,
    value_dtype: arguments.ValueDtype = None,
    plan: arguments.Plan = None,
    scales: arguments.StaticScales = None,
    backend: arguments.Backend = "auto",
    host: Annotated[
        str, typer.Option(help="Where to listen; beyond this machine only with a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="The clients' token. Better in HF_FP8KV_API_KEY: others can see arguments.",
            show_default=False,
        ),
    ] = None,
    max_body: Annotated[Any, typer.Option(help="The largest request.", **arguments.SIZE)] = "4MiB",
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Requests that may wait; others get 429.")
    ] = 128,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model. Default: its own name.")
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="A Jinja file instead of the model's chat template."
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of a prompt and its answer. Default: the model's."),
    ] = None,
    deterministic: Annotated[
        bool, typer.Option(help="Answers do not depend on other requests; takes longer.")
    ] = False,
    prefix_store: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, help="A folder for pages of prompts, which outlive the server."
        ),
    ] = None,
    prefix_store_size: Annotated[
        Any, typer.Option(help="The most that the folder may take.", **arguments.SIZE)
    ] = "16GiB",
    client_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that a client may neither send nor read.")
    ] = 60.0,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds for running requests after SIGTERM.")
    ] = 30.0,
    metrics_interval: Annotated[
        float, typer.Option(min=0, help="Seconds between lines in the log; 0: none.")
    ] = 10.0,
) -> None:
    """Serve a model from FP8 pages, with OpenAI's interface and `transformers serve`'s options.

    POST /v1/chat/completions, /v1/completions, /v1/responses; GET /v1/models, /health, /metrics,
    /version; POST /tokenize, /detokenize.
    """
    options: dict[str, Any] = ctx.obj
    pages = arguments.page_options(ctx) | {
        "plan": parse_plan(plan),  # read before the model is loaded
        "deterministic": deterministic,
        "prefix_store": prefix_store and PrefixStore(prefix_store, max_bytes=prefix_store_size),
    }
    from ..server.config import ServerConfig
    from ..server.options import check_options

    command: Any = ctx.command
    check_options(options, {param.name: param.default for param in command.stock_parameters})
    config = ServerConfig.parse(
        host,
        api_key,
        max_body=max_body,
        max_waiting=max_waiting,
        grace=grace,
        client_seconds=client_timeout,
        metrics_interval=metrics_interval,
        max_model_tokens=max_model_len,
    )
    name = model or str(demo_model_path())
    from ..server.run import serve as run

    handler = logging.StreamHandler()
    handler.setLevel(logging.INFO)
    # The form of the server's lines.
    handler.setFormatter(logging.Formatter("%(levelname)s:     %(message)s"))
    with handle_log(handler):
        run(
            name,
            host=host,
            port=port,
            config=config,
            pages=pages,
            options=options,
            on_ready=lambda address: print_note(f"hf-fp8kv: serving {name} at {address}"),
            served_name=served_model_name,
            template=None if chat_template is None else chat_template.read_text("utf-8"),
        )
