"""Answer a prompt with the default cache and with 8-bit pages, and compare both runs."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pydoc_data.topics import topics
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import RenderableType
from rich.text import Text
from transformers import BatchEncoding, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_fp8kv.cache.cache import FP8PagedCache
from hf_fp8kv.calibration.divergence import compute_scores
from hf_fp8kv.card.caches import count_bytes
from hf_fp8kv.errors import ConfigError
from hf_fp8kv.modeling.model_support import CACHE, find_max_positions, with_cache
from hf_fp8kv.scales.kv_scales import warn_if_stale
from hf_fp8kv.utils.terminal import build_table, format_size
from hf_fp8kv.utils.text import suggest

_DEFAULT_PROMPT_TOKENS = 1200
_SCORED_TOKENS = 64  # last tokens of the prompt whose predictions are compared
_MIN_TIMED_STEPS = 32
_TOKEN_UNIT = 64  # the table shows the bytes of full pages


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


def encode_prompt(
    model: Any, tokenizer: Any, prompt: str | None, model_name: str, num_new: int, *, chat: bool
) -> tuple[BatchEncoding, str]:
    """Return the tokens of a prompt, in the model's chat template if `chat`, and its text.

    None means the start of a topic of Python's documentation, as far as the model's positions and
    `num_new` new tokens allow.
    """
    text = prompt
    max_tokens = None
    if prompt is None:
        text = topics["typesseq"]
        max_tokens = max(1, min(_DEFAULT_PROMPT_TOKENS, find_max_positions(model) - num_new))
    if not chat:
        encoding = tokenizer(text, return_tensors="pt", truncation=False)
    elif tokenizer.chat_template is None:
        raise ConfigError(f"--chat: expected a chat template, got none in {model_name}. Omit it")
    else:
        encoding = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
    if encoding["input_ids"].shape[1] == 0:
        raise ConfigError("prompt: expected at least one token, got an empty prompt")
    # Some tokenizers also return token_type_ids, which many models do not accept.
    inputs = {key: encoding[key][:, :max_tokens] for key in ("input_ids", "attention_mask")}
    num_tokens = inputs["input_ids"].shape[1]
    title = f"{num_tokens:,} tokens of Python's documentation" if prompt is None else prompt
    return BatchEncoding(inputs).to(model.device), title


def run_caches(
    model: Any,
    tokenizer: Any,
    inputs: Mapping[str, torch.Tensor],
    sampling: Mapping[str, Any],
    *,
    seed: int,
    memory_bytes: int,
    cache_options: Mapping[str, Any],
    attention: str,
    model_name: str,
) -> tuple[list[Run], float | None]:
    """Return the runs with the default cache and with pages, and the KL of their predictions.

    The run with the default cache uses the model's default attention. The run with pages uses
    `attention`.
    """
    # Names with "|" are the functions of transformers' engine, such as "paged|sdpa".
    attention_names = (
        "eager",
        *(name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in name),
    )
    if attention not in attention_names:
        raise ConfigError(
            f"--attn: expected one of {', '.join(attention_names)}, got {attention!r}."
            f"{suggest(attention, attention_names)}"
        )
    measure = partial(run_cache, model, tokenizer, inputs, sampling, seed, memory_bytes)
    stock_run, stock_logits = measure(partial(DynamicCache, config=model.config))
    try:
        model.set_attn_implementation(attention)
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"--attn: cannot use {attention} with {model_name}: {error}. Choose another attention"
        ) from error
    make_cache = partial(FP8PagedCache, model, **cache_options)
    paged_run, paged_logits = measure(make_cache, cache_options.get("scales"))
    kl = None
    if stock_logits.numel():
        # No next tokens are passed, because only the likelihood needs them.
        scores = compute_scores(stock_logits, paged_logits, inputs["input_ids"][:, :0])
        kl = scores.kl.mean().item()
    return [stock_run, paged_run], kl


def run_cache(
    model: Any,
    tokenizer: Any,
    inputs: Mapping[str, torch.Tensor],
    sampling: Mapping[str, Any],
    seed: int,
    memory_bytes: int,
    make_cache: Callable[[], Any],
    scales: object = None,
) -> tuple[Run, torch.Tensor]:
    """Generate with a new cache. Also return the logits of the last prompt tokens.

    `scales` is the option of an FP8 cache, only for its title.
    """
    timestamps: list[float] = []
    streamer = SimpleNamespace(
        put=lambda _ids: timestamps.append(time.perf_counter()), end=lambda: None
    )
    # Kernels are compiled at their first use, so run the model and two tokens before timing.
    ids = inputs["input_ids"]
    logits = _score_prompt(model, ids, make_cache())
    model.generate(
        ids[:, :1], **{CACHE: make_cache()}, max_new_tokens=2, min_new_tokens=2, do_sample=False
    )
    torch.manual_seed(seed)
    cache = make_cache()
    output = model.generate(**inputs, **sampling, **{CACHE: cache}, streamer=streamer)
    new_ids = output[0, ids.shape[1] :].tolist()
    timestamps = timestamps[-len(new_ids) :]
    num_steps = len(timestamps) - 1
    speed = num_steps / (timestamps[-1] - timestamps[0]) if num_steps >= _MIN_TIMED_STEPS else None
    if isinstance(cache, FP8PagedCache):
        warn_if_stale(model, cache.options.scales)
        footprint = cache.memory_footprint()
        page_size = cache.options.page_size
        num_tokens = footprint.tokens
        cache_bytes = footprint.used_bytes + footprint.other_bytes
        # The last page is partly filled, so count a token as its share of a full page.
        num_slots = -(-num_tokens // page_size) * page_size
        bytes_per_token = footprint.used_bytes / num_slots + footprint.other_bytes / num_tokens
        plans = list(footprint.layers_by_plan)
        plan_title = plans[0] if len(plans) == 1 else "plans by layer"
        cache_title = f"pages of {page_size}, {plan_title}"
        is_auto = all(side.is_auto for plan in cache.plan.values() for side in plan)
        scales_title = "none" if is_auto else str(scales or "dynamic")
    else:
        num_tokens = cache.get_seq_length()
        cache_bytes = count_bytes(cache)
        bytes_per_token = cache_bytes / num_tokens
        cache_title = f"DynamicCache {str(model.dtype).removeprefix('torch.')}"
        scales_title = "none"
    run = Run(
        cache_title=cache_title,
        scales_title=scales_title,
        token_ids=new_ids,
        text=tokenizer.decode(new_ids, skip_special_tokens=True),
        tokens_per_second=speed,
        attention=str(model.config._attn_implementation),
        cached_tokens=num_tokens,
        cache_bytes=cache_bytes,
        bytes_per_token=bytes_per_token,
        tokens_that_fit=int(memory_bytes / bytes_per_token),
    )
    return run, logits


def _score_prompt(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Return the logits of the last prompt tokens, which a second call reads."""
    num_scored = min(_SCORED_TOKENS, ids.shape[1] - 1)
    read_ids, scored_ids = ids.tensor_split([ids.shape[1] - num_scored], dim=1)
    with torch.no_grad():
        model(read_ids, **with_cache(model, cache))
        if not num_scored:
            return torch.empty(0)
        logits: torch.Tensor = model(scored_ids, **with_cache(model, cache)).logits
    return logits.float()


def compare_tokens(stock_run: Run, paged_run: Run) -> dict[str, int | None]:
    """Return the number of equal tokens, the number of positions, and the first difference.

    Positions count from 0 to the end of the longer answer, whose additional tokens differ.
    """
    matches = [
        stock_id == paged_id
        for stock_id, paged_id in zip_longest(stock_run.token_ids, paged_run.token_ids)
    ]
    first_difference = None if all(matches) else matches.index(False)
    return {"equal": sum(matches), "positions": len(matches), "first_difference": first_difference}


def make_comparison(
    model_name: str, prompt: str, runs: Sequence[Run], kl: float | None, memory_bytes: int
) -> list[RenderableType]:
    """Return the prompt, and a table with a column for each run. Tokens count from 1."""
    stock_run, paged_run = runs
    agreement = compare_tokens(stock_run, paged_run)
    index = agreement["first_difference"]
    difference = "" if index is None else f", first difference at token {index + 1}"
    ratio = f" ({paged_run.bytes_per_token / stock_run.bytes_per_token:.2f} x)"
    token_sizes = [format_size(run.bytes_per_token) for run in runs]
    num_tokens = -(-paged_run.cached_tokens // _TOKEN_UNIT) * _TOKEN_UNIT
    rows: dict[str, Sequence[str]] = {
        "per token": [token_sizes[0], token_sizes[1] + ratio],
        f"{num_tokens:,} tokens": [format_size(num_tokens * run.bytes_per_token) for run in runs],
        f"fit into {format_size(memory_bytes)}": [
            f"{run.tokens_that_fit:,} tokens" for run in runs
        ],
        "answer": [run.text for run in runs],
        "same tokens": ["", f"{agreement['equal']} of {agreement['positions']}{difference}"],
        "KL of predictions": ["", "-" if kl is None else f"{kl:.1e}"],
        "scales": [run.scales_title for run in runs],
        "attention": [run.attention for run in runs],
    }
    if all(run.tokens_per_second for run in runs):
        rows["tokens/s"] = [f"{run.tokens_per_second:.1f}" for run in runs]
    columns: dict[str, Any] = dict.fromkeys(("", *(run.cache_title for run in runs)), "left")
    table = build_table(columns, ((name, *row) for name, row in rows.items()), show_lines=True)
    return [Text.assemble((model_name, "bold"), ": ", prompt), table]
