"""`hf-fp8kv bench`, which compares speed and memory with transformers' own caches."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from ..modeling.layer_specs import read_config
from .arguments import Device, parse_output_path
from .shared import make_console, show_progress

if TYPE_CHECKING:
    from ..bench.contenders import Setup

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
JsonPath = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="PATH",
        parser=parse_output_path,
        help="Write the result to this file as JSON. Pass - to print JSON instead of tables.",
    ),
]


@app.command()
def speed(model: ModelOption = None, device: Device = "auto", json_path: JsonPath = None) -> None:
    """Time decode steps, first calls and chunks of prompts of one layer."""
    from ..bench.speed import format_table, measure_speed

    setup, _ = _make_setup(model, device)
    with show_progress() as progress:
        result = measure_speed(setup, progress=progress)
    show_result(result, format_table, json_path)


@app.command()
def memory(
    model: ModelOption = None,
    device: Device = "auto",
    memory_gib: Annotated[
        float, typer.Option(min=0.001, max=10_000, help="GPU memory left for the cache, in GiB.")
    ] = 40.0,
    json_path: JsonPath = None,
) -> None:
    """Show bytes per token, the memory growth of processes, and the tokens that fit on a GPU."""
    from ..bench.memory import format_table, measure_memory

    setup, config = _make_setup(model, device)
    models = None if config is None else {str(model): config}
    with show_progress() as progress:
        result = measure_memory(setup, models=models, memory_gib=memory_gib, progress=progress)
    show_result(result, format_table, json_path)


def show_result(
    result: dict[str, Any],
    format_table: Callable[[dict[str, Any]], RenderableType],
    json_path: str | None,
) -> None:
    """Print a result as tables, or as JSON if the path is "-". Write JSON to any other path."""
    if json_path == "-":
        print(json.dumps(result))
        return
    if json_path is not None:
        Path(json_path).write_text(json.dumps(result, indent=2) + "\n")
    make_console(piped_width=140).print(format_table(result))


def _make_setup(model: str | None, device: str) -> "tuple[Setup, Any]":
    """Return the setup of the layer to measure, and the model's config or None."""
    from ..bench.contenders import Heads, Setup
    from ..serving.engines.common import read_kv_sizes

    if model is None:
        return Setup(device=device), None
    config = read_config(model)
    decoder = config.get_text_config()
    return Setup(Heads(decoder.num_attention_heads, *read_kv_sizes(decoder)), device=device), config
