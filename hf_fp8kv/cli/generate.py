"""`hf-fp8kv generate`: a prompt answered with the default cache and with FP8 pages."""

import json
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ..cache.cache import FP8PagedCache
from ..formats import ADAPTIVE
from .arguments import (
    SIZE,
    Backend,
    CacheDtype,
    Device,
    Json,
    KeyDtype,
    Model,
    Plan,
    StaticScales,
    ValueDtype,
    offer,
)
from .shared import DEMO, load_model, print_parts
from .side_by_side import Comparison, compare_tokens, comparison_table

ATTENTIONS = ("fp8_paged", "sdpa", "eager", "flex_attention")


def generate(
    prompt: Annotated[
        str, typer.Argument(help="The text to continue or answer; - reads it from stdin.")
    ] = "London is the capital of",
    model: Model = None,
    kv_cache_dtype: CacheDtype = None,
    key_dtype: KeyDtype = None,
    value_dtype: ValueDtype = None,
    plan: Plan = None,
    scales: StaticScales = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 48,
    page_size: Annotated[int, typer.Option(min=1, help="In tokens.")] = 64,
    backend: Backend = "auto",
    attn: Annotated[
        str,
        typer.Option(
            help="The attention for the FP8 run: fp8_paged, sdpa, eager, ...",
            autocompletion=offer(ATTENTIONS),
        ),
    ] = "fp8_paged",
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Apply the model's chat template.")
    ] = False,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0: always the most likely token.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Random seed, for a temperature above 0.")] = 0,
    device: Device = "auto",
    memory: Annotated[
        Any,
        typer.Option(
            help="Show how many tokens fit into this much memory: 8GiB, 500MB, ...", **SIZE
        ),
    ] = "8GiB",
    as_json: Json = False,
) -> None:
    """Answer a prompt with the default cache and with FP8 pages, side by side."""
    options: dict[str, Any] = {
        "dtype": kv_cache_dtype,
        "key_dtype": key_dtype,
        "value_dtype": value_dtype,
        "plan": plan,
        "scales": scales,
        "page_size": page_size,
        "backend": backend,
    }
    if kv_cache_dtype != ADAPTIVE:
        FP8PagedCache(**options)  # raises for wrong options before minutes are spent
    text = sys.stdin.read().strip() if prompt == "-" else prompt
    loaded, tokenizer = load_model(model, device)
    # None overrides what the checkpoint recommends for sampling.
    sampling = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0,
                "temperature": temperature or None, "top_p": None, "top_k": None}  # fmt: skip
    compared = Comparison(model or DEMO, loaded, tokenizer, text, chat, sampling, seed, memory)
    runs = [compared.run_dense(), compared.run_paged(attn, options)]
    if as_json:
        facts = {"prompt": text, "model": compared.name, "options": options, "memory_bytes": memory}
        answers = {"agreement": compare_tokens(*runs), "runs": [asdict(run) for run in runs]}
        print(json.dumps(facts | answers))
    else:
        print_parts(comparison_table(compared.name, text, runs, memory))
