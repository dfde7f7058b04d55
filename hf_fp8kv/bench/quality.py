"""Quality suite: KL and top-1 of a model's predictions against the unquantised cache."""

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
# The first ones of the topics of pydoc that are scored; then come the others, the longest first.
TEXTS = ("objects", "execmodel", "import", "customization")
DEFAULT = "the default"
CACHES: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    **{fmt.name: {"dtype": fmt.name} for fmt in DISTINCT},
    "fp8_e3m4, K centered": {"dtype": "fp8_e3m4", "center_keys": True},
    "fp8_e4m3, K centered": {"dtype": "fp8_e4m3", "center_keys": True},
    "K auto, V fp8_e4m3": {"dtype": "fp8_e4m3", "key_dtype": "auto"},
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
    """Return what 8 bits do to the model's predictions on texts of Python's manual, for JSON.

    Of each text, `prefill` tokens are not scored and the next `score` are, in calls of `chunk`. The
    model, a causal one, is left as it was; in float32 one sees the cache alone. `name` is what the
    result calls it. `progress` is called with what is measured next, and the share that is done.

    Returns:
        `suite`, `date`, `command`, `versions`, `hardware`, `settings`, and `rows`, each with
        `cache` and the fields of `Quality`.

    Raises:
        ConfigError: there are not that many texts of that many tokens.
    """
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
        **describe_run("quality", device=str(model.device)),
        "settings": describe_settings(
            model, name, topics, prefill=prefill, score=score, chunk=chunk
        ),
        "rows": [
            {"cache": cache, **asdict(Scores.concat(batch[cache] for batch in scores).quality)}
            for cache in caches
        ],
    }


def describe_settings(
    model: PreTrainedModel, name: str, topics: Iterable[str], **tokens: int
) -> dict[str, Any]:
    """Return the settings of a suite that scores topics, so many `tokens` of each."""
    dtype = str(model.dtype).removeprefix("torch.")
    return {
        "model": name, "dtype": dtype, "attention": "fp8_paged", "texts": list(topics), **tokens
    }  # fmt: skip


def format_table(result: dict[str, Any]) -> "RenderableType":
    """Return the rows of `run_quality_suite` as a table for a terminal."""
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
        title=f"{settings['model']}, {settings['dtype']}: against the unquantised cache",
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
    """Yield the topics that are long enough, and their first tokens, `[1, length]`, int64."""
    for name in names:
        ids = tokenizer(TOPICS[name], truncation=True, max_length=length, return_tensors="pt")
        if ids.input_ids.shape[1] == length:
            yield name, ids.input_ids


def _cache_makers(model: PreTrainedModel) -> dict[str, Callable[[], Any]]:
    """Return what makes each cache; transformers' own where this version and model have it."""
    caches: dict[str, Callable[[], Any]] = {
        name: partial(FP8PagedCache, model.config, **options) for name, options in CACHES.items()
    }
    stock = stock_cache(model)
    return caches if stock is None else caches | {STOCK: stock}


def stock_cache(model: PreTrainedModel) -> Callable[[], Any] | None:
    """Return what makes transformers' own FP8 cache; None where it cannot be made."""
    stock = partial(QuantizedCache, backend="fp8", config=model.config)
    try:
        stock()
    except ValueError:
        return None
    return stock
