"""`hf-fp8kv generate`, which answers a prompt with the default cache and with 8-bit pages."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

from . import arguments
from .shared import DEMO_NAME, load_model_and_tokenizer, make_console, print_note


def generate(
    ctx: typer.Context,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="Text to continue or answer. Pass - to read it from stdin. Default: up to 1,200 "
            "tokens of Python's documentation."
        ),
    ] = None,
    model: arguments.Model = None,
    kv_cache_dtype: arguments.CacheDtype = None,
    key_dtype: arguments.KeyDtype = None,
    value_dtype: arguments.ValueDtype = None,
    plan: arguments.Plan = None,
    bits: arguments.Bits = None,
    scales: arguments.StaticScales = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 48,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens per page.")] = 64,
    backend: arguments.Backend = "auto",
    attn: Annotated[
        str,
        typer.Option(
            help="Attention of the run with pages: fp8_paged, sdpa, eager, ...",
            autocompletion=arguments.suggest(("fp8_paged", "sdpa", "eager", "flex_attention")),
        ),
    ] = "fp8_paged",
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Apply the model's chat template.")
    ] = False,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 selects greedy decoding.")] = 0.0,
    seed: Annotated[
        int,
        typer.Option(min=-(2**63), max=2**63 - 1, help="Random seed for a temperature above 0."),
    ] = 0,
    device: arguments.Device = "auto",
    memory: Annotated[
        Any, typer.Option(help="Memory to fill with tokens: 8GiB, 500MB, ...", **arguments.SIZE)
    ] = "8GiB",
    as_json: arguments.Json = False,
) -> None:
    """Answer a prompt with the default cache and with 8-bit pages, side by side."""
    cache_options = arguments.collect_cache_options(ctx) | {"page_size": page_size}
    # A value of None overrides the checkpoint's recommendation for sampling.
    sampling = {
        "max_new_tokens": max_new_tokens,
        "do_sample": temperature > 0,
        "temperature": temperature or None,
        "top_p": None,
        "top_k": None,
    }
    from hf_fp8kv.errors import ConfigError

    try:
        if prompt == "-":
            prompt = sys.stdin.read().strip()
        (prompt or "").encode()  # fails for bytes that Python replaced in stdin or in an argument
    except UnicodeError as error:
        raise ConfigError(f"prompt: expected text in UTF-8, got other bytes: {error}") from error
    _compare(
        prompt,
        model,
        device,
        cache_options,
        sampling,
        attention=attn,
        chat=chat,
        seed=seed,
        memory_bytes=memory,
        as_json=as_json,
    )


def demo(device: arguments.Device = "auto", as_json: arguments.Json = False) -> None:
    """Show memory, predictions and answers of a small model with both caches, in a minute."""
    _compare(
        None,
        None,
        device,
        cache_options={},
        sampling={"max_new_tokens": 24, "do_sample": False},
        as_json=as_json,
    )
    print_note("In your script: hf_fp8kv.enable(model). Quality of your model: hf-fp8kv card MODEL")


def _compare(
    prompt: str | None,
    name: str | None,
    device: str,
    cache_options: Mapping[str, Any],
    sampling: Mapping[str, Any],
    *,
    attention: str = "fp8_paged",
    chat: bool = False,
    seed: int = 0,
    memory_bytes: int = 8 * 2**30,
    as_json: bool = False,
) -> None:
    """Run a model with both caches, and print the comparison.

    A prompt of None means the default prompt, a name of None the demo model.
    """
    from hf_fp8kv import FP8PagedCache

    from . import comparison

    if cache_options.get("dtype") != arguments.ADAPTIVE:
        # Raise for invalid options before the model is loaded. `bits` is left out, because only the
        # model shows whether it is valid.
        FP8PagedCache(**{**cache_options, "bits": None})
    model_name = name or DEMO_NAME
    model, tokenizer = load_model_and_tokenizer(name, device)
    inputs, text = comparison.encode_prompt(
        model, tokenizer, prompt, model_name, sampling["max_new_tokens"], chat=chat
    )
    runs, kl = comparison.run_caches(
        model,
        tokenizer,
        inputs,
        sampling,
        seed=seed,
        memory_bytes=memory_bytes,
        cache_options=cache_options,
        attention=attention,
        model_name=model_name,
    )
    if as_json:
        output = {
            "prompt": text,
            "model": model_name,
            "options": cache_options,
            "memory_bytes": memory_bytes,
            "agreement": comparison.compare_tokens(*runs) | {"kl": kl},
            "runs": [asdict(run) for run in runs],
        }
        print(json.dumps(output))
    else:
        make_console().print(
            *comparison.make_comparison(model_name, text, runs, kl, memory_bytes), sep="\n"
        )
