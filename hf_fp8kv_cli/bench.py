"""`hf-fp8kv bench`, which compares speed and memory with transformers' own caches."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from .arguments import SIZE, Device, Json, parse_output_path
from .shared import choose_device, make_console, show_progress

if TYPE_CHECKING:
    from hf_fp8kv.bench.contenders import Setup

app = typer.Typer(
    help="Measure FP8PagedCache and transformers' own caches on this machine.", no_args_is_help=True
)
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="A folder or a Hub id. Only its config is read. Default: the shape of Llama-3.1-8B.",
    ),
]
Out = Annotated[
    str | None,
    typer.Option(metavar="PATH", parser=parse_output_path, help="Also write JSON to this file."),
]


@app.command()
def speed(
    model: ModelOption = None, device: Device = "auto", out: Out = None, as_json: Json = False
) -> None:
    """Time decode steps, first calls and chunks of prompts of one layer."""
    from hf_fp8kv.bench.speed import format_table, measure_speed

    setup, _ = _make_setup(model, device)
    with show_progress() as progress:
        result = measure_speed(setup, progress=progress)
    output_result(result, format_table, out, as_json=as_json)


@app.command()
def memory(
    model: ModelOption = None,
    device: Device = "auto",
    memory: Annotated[
        Any, typer.Option(help="GPU memory left for the cache: 7GiB, 500MB, ...", **SIZE)
    ] = "40GiB",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Show bytes per token, the memory growth of processes, and the tokens that fit on a GPU."""
    from hf_fp8kv.bench.memory import format_table, measure_memory

    setup, config = _make_setup(model, device)
    with show_progress() as progress:
        result = measure_memory(
            setup,
            models=None if config is None else {str(model): config},
            memory_gib=memory / 2**30,
            progress=progress,
        )
    output_result(result, format_table, out, as_json=as_json)


def output_result(
    result: dict[str, Any],
    format_table: Callable[[dict[str, Any]], RenderableType],
    out: str | None,
    *,
    as_json: bool = False,
) -> None:
    """Write a result to the file `out` as JSON, and print it as tables or as JSON."""
    if out is not None:
        Path(out).write_text(json.dumps(result, indent=2) + "\n")
    if as_json:
        print(json.dumps(result))
        return
    make_console(piped_width=140).print(format_table(result))


def _make_setup(model: str | None, device: str) -> "tuple[Setup, Any]":
    """Return the setup of the layer to measure, and the model's config or None."""
    from hf_fp8kv.bench.contenders import Heads, Setup
    from hf_fp8kv.modeling.layer_specs import read_config
    from hf_fp8kv.serving.engines.common import read_kv_sizes

    device = choose_device(device)
    if model is None:
        return Setup(device=device), None
    config = read_config(model)
    decoder = config.get_text_config()
    return Setup(Heads(decoder.num_attention_heads, *read_kv_sizes(decoder)), device=device), config
