"""`hf-fp8kv generate`, which answers a prompt with the default cache and with FP8 pages."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from rich.console import RenderableType
from rich.text import Text
from transformers import BatchEncoding, DynamicCache

from ..bench.reporting import build_table, count_bytes
from ..cache.cache import FP8PagedCache
from ..errors import ConfigError
from ..formats import ADAPTIVE
from ..modeling.model_support import CACHE
from ..scales.kv_scales import warn_if_stale
from ..utils.terminal import format_size
from . import arguments
from .shared import DEMO_NAME, load_model, make_console


def generate(
    ctx: typer.Context,
    prompt: Annotated[
        str, typer.Argument(help="Text to continue or answer. Pass - to read it from stdin.")
    ] = "London is the capital of",
    model: arguments.Model = None,
    kv_cache_dtype: arguments.CacheDtype = None,
    key_dtype: arguments.KeyDtype = None,
    value_dtype: arguments.ValueDtype = None,
    plan: arguments.Plan = None,
    scales: arguments.StaticScales = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 48,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens per page.")] = 64,
    backend: arguments.Backend = "auto",
    attn: Annotated[
        str,
        typer.Option(
            help="Attention of the FP8 run: fp8_paged, sdpa, eager, ...",
            autocompletion=arguments.suggest(("fp8_paged", "sdpa", "eager", "flex_attention")),
        ),
    ] = "fp8_paged",
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Apply the model's chat template.")
    ] = False,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 selects greedy decoding.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Random seed for a temperature above 0.")] = 0,
    device: arguments.Device = "auto",
    memory: Annotated[
        Any, typer.Option(help="Memory to fill with tokens: 8GiB, 500MB, ...", **arguments.SIZE)
    ] = "8GiB",
    as_json: arguments.Json = False,
) -> None:
    """Answer a prompt with the default cache and with FP8 pages, side by side."""
    page_options = arguments.collect_page_options(ctx) | {"page_size": page_size}
    if kv_cache_dtype != ADAPTIVE:
        FP8PagedCache(**page_options)  # raises for invalid options before the model is loaded
    text = sys.stdin.read().strip() if prompt == "-" else prompt
    model_name = model or DEMO_NAME
    loaded_model, tokenizer = load_model(model, device)
    inputs = encode_prompt(tokenizer, text, model_name, chat=chat).to(loaded_model.device)
    # A value of None overrides the checkpoint's recommendation for sampling.
    options = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0,
               "temperature": temperature or None, "top_p": None, "top_k": None}  # fmt: skip
    measure = partial(run_cache, loaded_model, tokenizer, inputs, options, seed, memory)
    # The first run uses the model's default attention.
    runs = [measure(partial(DynamicCache, config=loaded_model.config))]
    try:
        loaded_model.set_attn_implementation(attn)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"cannot use --attn {attn} with {model_name}: {error}") from error
    runs.append(measure(partial(FP8PagedCache, loaded_model, **page_options), scales))
    if as_json:
        settings = {"model": model_name, "options": page_options, "memory_bytes": memory}
        answers = {"agreement": compare_tokens(*runs), "runs": [asdict(run) for run in runs]}
        print(json.dumps({"prompt": text, **settings, **answers}))
    else:
        make_console().print(*make_comparison(model_name, text, runs, memory), sep="\n")


@dataclass(frozen=True)
class Run:
    """An answer, the speed of its tokens, and the size of the cache in bytes."""

    cache_title: str
    scales_title: str
    attention: str
    text: str
    token_ids: list[int]
    tokens_per_second: float | None  # after the first token
    cached_tokens: int
    cache_bytes: int
    bytes_per_token: float
    tokens_that_fit: int


def encode_prompt(tokenizer: Any, prompt: str, model_name: str, *, chat: bool) -> BatchEncoding:
    """Return the tokens of a prompt, in the model's chat template if `chat`."""
    if not chat:
        encoding = tokenizer(prompt, return_tensors="pt")
    elif tokenizer.chat_template is None:
        raise ConfigError(f"--chat: expected a chat template, got none in {model_name}. Omit it")
    else:
        encoding = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True, return_tensors="pt", return_dict=True,
        )  # fmt: skip
    if encoding["input_ids"].shape[1] == 0:
        raise ConfigError("expected a prompt of at least one token, got an empty prompt")
    # Some tokenizers also return token_type_ids, which many models do not accept.
    return BatchEncoding({key: encoding[key] for key in ("input_ids", "attention_mask")})


def run_cache(
    model: Any, tokenizer: Any, inputs: Mapping[str, torch.Tensor], options: Mapping[str, Any],
    seed: int, memory_bytes: int, make_cache: Callable[[], Any], scales: object = None,
) -> Run:  # fmt: skip
    """Generate with a new cache. `scales` is the option of an FP8 cache, only for its title."""
    timestamps: list[float] = []
    streamer = SimpleNamespace(
        put=lambda _ids: timestamps.append(time.perf_counter()), end=lambda: None
    )
    # Generate two tokens before timing, because kernels are compiled at their first use.
    warm_up = {CACHE: make_cache(), "max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False}
    model.generate(**inputs, **warm_up)
    torch.manual_seed(seed)
    cache = make_cache()
    output = model.generate(**inputs, **options, **{CACHE: cache}, streamer=streamer)
    ids = output[0, inputs["input_ids"].shape[1] :].tolist()
    timestamps = timestamps[-len(ids) :]
    num_steps = len(timestamps) - 1
    speed = num_steps / (timestamps[-1] - timestamps[0]) if num_steps > 0 else None
    if isinstance(cache, FP8PagedCache):
        warn_if_stale(model, cache.options.scales)
        footprint, page_size = cache.memory_footprint(), cache.options.page_size
        num_tokens, cache_bytes = footprint.tokens, footprint.used_bytes + footprint.other_bytes
        # The last page is partly filled, so count a token as its share of a full page.
        num_slots = -(-num_tokens // page_size) * page_size
        token_bytes = footprint.used_bytes / num_slots + footprint.other_bytes / num_tokens
        plans = [*footprint.layers_by_plan]
        cache_title = f"pages of {page_size}, {plans[0] if len(plans) == 1 else 'plans by layer'}"
        is_auto = all(side.is_auto for plan in cache.plan.values() for side in plan)
        scales_title = "none" if is_auto else str(scales or "dynamic")
    else:
        num_tokens, cache_bytes = cache.get_seq_length(), count_bytes(cache)
        token_bytes = cache_bytes / num_tokens
        cache_title = f"DynamicCache {str(model.dtype).removeprefix('torch.')}"
        scales_title = "none"
    return Run(
        cache_title=cache_title, scales_title=scales_title, token_ids=ids,
        text=tokenizer.decode(ids, skip_special_tokens=True), tokens_per_second=speed,
        attention=str(model.config._attn_implementation), cached_tokens=num_tokens,
        cache_bytes=cache_bytes, bytes_per_token=token_bytes,
        tokens_that_fit=int(memory_bytes / token_bytes),
    )  # fmt: skip


def compare_tokens(dense_run: Run, paged_run: Run) -> dict[str, int | None]:
    """Return the number of equal tokens, the number of positions, and the first difference.

    Positions count from 0 to the end of the longer answer, whose additional tokens differ.
    """
    matches = [a == b for a, b in zip_longest(dense_run.token_ids, paged_run.token_ids)]
    index = None if all(matches) else matches.index(False)
    return {"equal": sum(matches), "positions": len(matches), "first_difference": index}


def make_comparison(
    model_name: str, prompt: str, runs: Sequence[Run], memory_bytes: int
) -> list[RenderableType]:
    """Return the prompt, and a table with a column for each run. Tokens count from 1."""
    dense_run, paged_run = runs
    agreement = compare_tokens(dense_run, paged_run)
    index = agreement["first_difference"]
    difference = "" if index is None else f", first difference at token {index + 1}"
    ratio = f" ({paged_run.bytes_per_token / dense_run.bytes_per_token:.2f} x)"
    token_sizes = [format_size(run.bytes_per_token) for run in runs]
    rows: dict[str, Sequence[str]] = {
        "answer": [run.text for run in runs],
        "same tokens": ["", f"{agreement['equal']} of {agreement['positions']}{difference}"],
        "scales": [run.scales_title for run in runs],
        "attention": [run.attention for run in runs],
        "cache": [f"{format_size(x.cache_bytes)} for {x.cached_tokens} tokens" for x in runs],
        "per token": [token_sizes[0], token_sizes[1] + ratio],
        f"fit into {format_size(memory_bytes)}": [f"{x.tokens_that_fit:,} tokens" for x in runs],
        "tokens/s": [f"{x.tokens_per_second:.1f}" if x.tokens_per_second else "-" for x in runs],
    }
    columns: dict[str, Any] = dict.fromkeys(("", *(run.cache_title for run in runs)), "left")
    table = build_table(columns, ((name, *row) for name, row in rows.items()), show_lines=True)
    return [Text.assemble((model_name, "bold"), ": ", prompt), table]
