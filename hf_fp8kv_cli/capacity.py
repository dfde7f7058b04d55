"""`hf-fp8kv capacity`, which calculates how many tokens fit on a GPU."""

import json
from typing import Annotated, Any

import typer

from .arguments import SIZE, Json
from .shared import make_console


def capacity(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A folder or a Hub id, of which only the config is read, or one of eight models "
            "such as Llama-3.1-8B. Default: these eight."
        ),
    ] = None,
    memory: Annotated[
        Any, typer.Option(help="GPU memory left for the cache: 7GiB, 500MB, ...", **SIZE)
    ] = "40GiB",
    as_json: Json = False,
) -> None:
    """Calculate the tokens that fit on a GPU in 16, 8 and 6 bits. Needs no GPU."""
    from hf_fp8kv.modeling.layer_specs import read_config
    from hf_fp8kv.serving.capacity import MODELS, get_config, plan_capacity
    from hf_fp8kv.utils.environment import list_versions
    from hf_fp8kv.utils.files import check_model_name
    from hf_fp8kv.utils.terminal import build_table

    configs = {name: get_config(name) for name in MODELS if model in (None, name)}
    if model is not None and not configs:
        check_model_name(model)
        configs[model] = read_config(model)
    memory_gib = memory / 2**30
    rows = plan_capacity(configs, memory_gib)
    if as_json:
        print(json.dumps({"versions": list_versions(), "memory_gib": memory_gib, "rows": rows}))
        return
    cells = (
        (
            row["model"],
            row["cache"],
            f"{row['bytes_per_token'] / 1024:.1f}",
            f"{row['tokens']:,}",
            f"{row['ratio']:.2f}",
        )
        for row in rows
    )
    table = build_table(
        {
            **dict.fromkeys(("model", "cache"), "left"),
            **dict.fromkeys(("KiB / token", "tokens", "x"), "right"),
        },
        cells,
        grouped=True,
        title=f"Tokens that fit into {memory_gib:g} GiB left after loading the model",
        caption="calculated by the planner of transformers' continuous batching",
    )
    make_console(piped_width=140).print(table)
