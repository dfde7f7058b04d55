"""`hf-fp8kv generate`: a prompt answered from the usual cache and from FP8 pages."""

import json
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from .shared import DEMO, load, show
from .side_by_side import Asker, agreement, comparison
from .values import (
    CacheDtype,
    Device,
    Json,
    KeyDtype,
    Model,
    StaticScales,
    ValueDtype,
    attentions,
    backends,
    completing,
    parse_dtype,
    parse_memory,
    parse_scales,
)

__all__ = ["generate"]


def generate(
    prompt: Annotated[
        str, typer.Argument(help="The text to continue or to answer; - reads it from stdin.")
    ] = "London is the capital of",
    model: Model = None,
    kv_cache_dtype: CacheDtype = "fp8",
    key_dtype: KeyDtype = None,
    value_dtype: ValueDtype = None,
    scales: StaticScales = None,
    center_keys: Annotated[
        bool | None,
        typer.Option("--center-keys/--no-center-keys", help="Store K minus a frozen center."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 48,
    page_size: Annotated[int, typer.Option(min=1, help="In tokens.")] = 64,
    backend: Annotated[
        str,
        typer.Option(help="auto, torch, numba or triton.", autocompletion=completing(backends)),
    ] = "auto",
    attn: Annotated[
        str,
        typer.Option(
            help="The attention that reads the pages: fp8_paged, sdpa, eager, ...",
            autocompletion=completing(attentions),
        ),
    ] = "fp8_paged",
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Apply the model's chat template.")
    ] = False,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the most likely token.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Counts when the temperature is above 0.")] = 0,
    device: Device = "auto",
    memory: Annotated[
        str, typer.Option(help="Tell how many tokens fit into this: 8GiB, 500MB, ...")
    ] = "8GiB",
    as_json: Json = False,
) -> None:
    """Answer a prompt from the usual cache and from FP8 pages, side by side."""
    room = parse_memory(memory)
    options: dict[str, Any] = {
        "dtype": parse_dtype(kv_cache_dtype, "--kv-cache-dtype"),
        "key_dtype": key_dtype and parse_dtype(key_dtype, "--key-dtype"),
        "value_dtype": value_dtype and parse_dtype(value_dtype, "--value-dtype"),
        "scales": parse_scales(scales),
        "center_keys": center_keys,
        "page_size": page_size,
        "backend": backend,
    }
    text = sys.stdin.read().strip() if prompt == "-" else prompt
    asker = Asker(
        model or DEMO,
        *load(model, device),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
    )
    inputs = asker.encode(text, chat)
    runs = [asker.dense(inputs, room), asker.paged(inputs, room, attn, options)]
    if as_json:
        facts = {"prompt": text, "model": asker.name, "options": options, "memory_bytes": room}
        answers = {"agreement": agreement(*runs), "runs": [asdict(run) for run in runs]}
        print(json.dumps(facts | answers))
    else:
        show(comparison(asker.name, text, runs, memory))
