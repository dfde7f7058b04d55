"""Quality suite: KL and top-1 of a model's predictions against the unquantised cache."""

import pydoc_data.topics
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, QuantizedCache

from ..attention.switching import paged_attention
from ..cache.cache import FP8PagedCache
from ..calibration.divergence import Scores, compare_caches
from ..errors import ConfigError
from ..utils.environment import describe_run

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["CACHES", "STOCK", "TEXTS", "format_table", "run_quality_suite", "stock_cache"]

# The first ones of the topics of pydoc that are scored; then come the others, the longest first.
TEXTS = ("objects", "execmodel", "import", "customization")
CACHES: dict[str, dict[str, Any]] = {
    "fp8_e4m3": {},
    "fp8_e3m4": {"dtype": "fp8_e3m4"},
    "fp8_e5m2": {"dtype": "fp8_e5m2"},
    "fp8_e4m3, K centered": {"center_keys": True},
    "K auto, V fp8_e4m3": {"key_dtype": "auto"},
    "fp8_e4m3, scale 1.0": {"scales": 1.0},
}
STOCK = "QuantizedCache fp8"
# Texts in one call of the model: what 4 need fits into 4 GB.
_BATCH = 4


def run_quality_suite(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    name: str = "",
    texts: int = len(TEXTS),
    prefill: int = 512,
    score: int = 128,
    chunk: int = 32,
    progress: Callable[[str, float], None] | None = None,
) -> dict[str, Any]:
    """Returns what 8 bits do to the model's predictions on texts of Python's manual, for JSON.

    Args:
        model: a causal language model, float32 to see the cache alone; left as it was.
        tokenizer: the model's.
        name: what to call the model in the result.
        texts: how many topics of `pydoc_data.topics` to score.
        prefill: tokens of each text that are not scored.
        score: tokens of each text that are, after the others.
        chunk: of which so many are one call of the model.
        progress: called with what is measured next, and the share that is done.

    Returns:
        `suite`, `date`, `command`, `versions`, `hardware`, `settings`, and `rows`, each with
        `cache` and the fields of `Quality`.

    Raises:
        ConfigError: there are not that many texts of that many tokens.
    """
    topics, ids = _texts(tokenizer, texts, prefill + score)
    caches = _caches(model)
    total, done = ids.numel() * (len(caches) + 1), 0

    def on_call(cache: str, tokens: int) -> None:
        nonlocal done
        done += tokens
        if progress is not None:
            progress(cache, done / total)

    with paged_attention(model):
        found = [
            compare_caches(model, batch, caches, prefill=prefill, chunk=chunk, on_call=on_call)
            for batch in ids.to(model.device).split(_BATCH)
        ]
    return {
        **describe_run("quality", device=str(model.device)),
        "settings": {"model": name, "dtype": str(model.dtype).removeprefix("torch."),
                     "attention": "fp8_paged", "texts": topics, "prefill": prefill, "score": score,
                     "chunk": chunk},
        "rows": [
            {"cache": cache, **asdict(Scores.concat(batch[cache] for batch in found).quality)}
            for cache in caches
        ],
    }  # fmt: skip


def format_table(result: dict[str, Any]) -> "RenderableType":
    """Returns the rows of `run_quality_suite` as a table for a terminal."""
    from rich.table import Table

    settings = result["settings"]
    table = Table(
        title=f"{settings['model']}, {settings['dtype']}: against the unquantised cache",
        caption=f"{len(settings['texts'])} texts, {settings['score']} tokens each after "
        f"{settings['prefill']}; {result['hardware']['cpu']}, {result['date']}",
    )
    table.add_column("cache")
    for column in ("mean KL", "largest KL", "same top-1", "perplexity", "tokens"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in result["rows"]:
        table.add_row(
            row["cache"], f"{row['kl']:.2e}", f"{row['kl_max']:.2e}", f"{row['top1']:.2%}",
            f"{row['perplexity']:.2f}", str(row["tokens"]),
        )  # fmt: skip
    return table


def _texts(tokenizer: Any, count: int, length: int) -> tuple[list[str], torch.Tensor]:
    """The names of the topics, and their tokens, `[B, length]`."""
    topics: dict[str, str] = pydoc_data.topics.topics
    others = sorted(topics.keys() - set(TEXTS), key=lambda name: (-len(topics[name]), name))
    found: dict[str, torch.Tensor] = {}
    for name in (*TEXTS, *others):
        if len(found) == count:
            break
        ids = tokenizer(topics[name], truncation=True, max_length=length, return_tensors="pt")
        if ids.input_ids.shape[1] == length:
            found[name] = ids.input_ids
    if len(found) < count:
        raise ConfigError(
            f"texts: expected at most {len(found)}, got {count}: no other topic has {length} tokens"
        )
    return list(found), torch.cat(list(found.values()))


def _caches(model: PreTrainedModel) -> dict[str, Callable[[], Any]]:
    """Functions that make the caches; that of transformers where this version and model have it."""

    def paged(options: dict[str, Any]) -> Callable[[], Any]:
        return lambda: FP8PagedCache(model.config, **options)

    stock = stock_cache(model)
    caches = {name: paged(options) for name, options in CACHES.items()}
    return caches if stock is None else caches | {STOCK: stock}


def stock_cache(model: PreTrainedModel) -> Callable[[], Any] | None:
    """Makes transformers' own FP8 cache; None where this version or model has none."""
    stock = partial(QuantizedCache, backend="fp8", config=model.config)
    try:
        stock()
    except ValueError:
        return None
    return stock
