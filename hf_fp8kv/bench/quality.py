"""`hf-fp8kv bench quality`: a model's predictions with FP8 pages and with its 16-bit cache."""

import pydoc_data.topics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, QuantizedCache

from ..attention.switching import paged_attention
from ..cache.cache import FP8PagedCache
from ..calibration.divergence import Scores, compare_caches
from ..errors import ConfigError
from ..formats import DISTINCT
from ..utils.environment import describe_run
from .reporting import build_table

if TYPE_CHECKING:
    from rich.console import RenderableType

TOPICS: dict[str, str] = pydoc_data.topics.topics
# The topics of pydoc that are scored first; the longest other topics follow.
TEXTS = ("objects", "execmodel", "import", "customization")
DEFAULT = "the default"
CACHES: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    **{fmt.name: {"dtype": fmt.name} for fmt in DISTINCT},
    "fp8_e4m3, K centered": {"plan": "fp8_e4m3 centered"},
    "K auto, V fp8_e4m3": {"dtype": "fp8_e4m3", "key_dtype": "auto"},
    "fp8_e4m3, scale 1.0": {"scales": 1.0},
}
STOCK = "QuantizedCache fp8"
# Texts in one call of the model: four of them fit into 4 GB.
_BATCH = 4


def measure_quality(
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
    """Score a model's predictions on texts of Python's manual under each cache, for JSON.

    Args:
        model: A causal model, which is left unchanged. In float32 only the cache adds error.
        tokenizer: The model's tokenizer.
        name: Name of the model in the result.
        texts: Number of texts.
        prefill: Number of tokens of each text before the scored tokens.
        score: Number of scored tokens of each text.
        chunk: Number of scored tokens in a call of the model.
        progress: Function that is called with the cache and the share that is done.

    Returns:
        The entries of `describe_run`, `settings`, and `rows` with the fields of `QualityRow`.

    Raises:
        ConfigError: Python's manual has fewer texts of this length.
    """
    run = describe_run("quality", device=str(model.device))
    topics, ids = _select_texts(tokenizer, texts, prefill + score)
    caches = _cache_makers(model)
    total, done = ids.numel() * (len(caches) + 1), 0

    def on_call(cache: str, tokens: int) -> None:
        nonlocal done
        done += tokens
        if progress is not None:
            progress(cache, done / total)

    with paged_attention(model):
        scores = [
            compare_caches(model, batch, caches, prefill=prefill, chunk=chunk, on_call=on_call)
            for batch in ids.to(model.device).split(_BATCH)
        ]
    return {
        **run,
        "settings": describe_settings(
            model, name, topics, prefill=prefill, score=score, chunk=chunk
        ),
        "rows": [
            asdict(Scores.concat(batch[cache] for batch in scores).summarize(cache))
            for cache in caches
        ],
    }


def describe_settings(
    model: PreTrainedModel, name: str, topics: Iterable[str], **tokens: int
) -> dict[str, Any]:
    """Return the settings of a benchmark that scores `tokens` of each topic."""
    dtype = str(model.dtype).removeprefix("torch.")
    return {
        "model": name, "dtype": dtype, "attention": "fp8_paged", "texts": list(topics), **tokens
    }  # fmt: skip


def format_table(result: dict[str, Any]) -> "RenderableType":
    """Return the result of `measure_quality` as a table for a terminal."""
    settings = result["settings"]
    numbers = ("mean KL", "largest KL", "same top-1", "perplexity", "tokens")
    return build_table(
        {"cache": "left", **dict.fromkeys(numbers, "right")},
        (
            (
                row["cache"], f"{row['kl']:.2e}", f"{row['kl_max']:.2e}", f"{row['top1']:.2%}",
                f"{row['perplexity']:.2f}", str(row["tokens"]),
            )
            for row in result["rows"]
        ),
        title=f"{settings['model']}, {settings['dtype']}: against the unquantized cache",
        caption=f"{len(settings['texts'])} texts, {settings['score']} tokens each after "
        f"{settings['prefill']}; {result['hardware']['cpu']}, {result['date']}",
    )  # fmt: skip


def _select_texts(tokenizer: Any, count: int, length: int) -> tuple[list[str], torch.Tensor]:
    """Return the names of the topics, and their first tokens, `[count, length]`, int64."""
    others = sorted(TOPICS.keys() - set(TEXTS), key=lambda name: (-len(TOPICS[name]), name))
    tokens = dict(islice(first_tokens(tokenizer, (*TEXTS, *others), length), count))
    if len(tokens) < count:
        raise ConfigError(
            f"texts: expected at most {len(tokens)}, got {count}: no other topic has {length} "
            "tokens"
        )
    return list(tokens), torch.cat(list(tokens.values()))


def first_tokens(
    tokenizer: Any, names: Iterable[str], length: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the topics of at least `length` tokens, and their first tokens, `[1, length]`."""
    for name in names:
        ids = tokenizer(TOPICS[name], truncation=True, max_length=length, return_tensors="pt")
        if ids.input_ids.shape[1] == length:
            yield name, ids.input_ids


def _cache_makers(model: PreTrainedModel) -> dict[str, Callable[[], Any]]:
    """Return constructors of all caches, with transformers' FP8 cache if it supports the model."""
    caches: dict[str, Callable[[], Any]] = {
        name: partial(FP8PagedCache, model.config, **options) for name, options in CACHES.items()
    }
    stock = stock_cache(model)
    return caches if stock is None else caches | {STOCK: stock}


def stock_cache(model: PreTrainedModel) -> Callable[[], Any] | None:
    """Return the constructor of transformers' FP8 cache; None if it does not support the model."""
    stock = partial(QuantizedCache, backend="fp8", config=model.config)
    try:
        stock()
    except ValueError:
        return None
    return stock
