"""How far a cache moves a model's predictions: KL and top-1 against the unquantised cache."""

import datetime
import pydoc_data.topics
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, PreTrainedModel, QuantizedCache

from .cache import FP8PagedCache
from .environment import hardware, versions
from .errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["CACHES", "TEXTS", "Quality", "compare", "format_table", "run_quality_suite"]

# The first ones of the topics of pydoc that are scored; then come the others, the longest first.
TEXTS = ("objects", "execmodel", "import", "customization")
CACHES: dict[str, dict[str, Any]] = {
    "fp8_e4m3": {},
    "fp8_e3m4": {"dtype": "fp8_e3m4"},
    "fp8_e5m2": {"dtype": "fp8_e5m2"},
    "fp8_e4m3, K centred": {"center_keys": True},
    "K auto, V fp8_e4m3": {"key_dtype": "auto"},
    "fp8_e4m3, scale 1.0": {"scales": 1.0},
}
STOCK = "QuantizedCache fp8"
# Texts in one call of the model: what 4 need fits into 4 GB.
_BATCH = 4


@dataclass(frozen=True)
class Quality:
    """How far one cache is from the unquantised one, on the same text.

    Attributes:
        kl: mean KL divergence from the unquantised cache's next-token distribution, in nats.
        kl_max: the largest at one token.
        top1: share of tokens at which the most likely next token is the same.
        tokens: how many were scored.
    """

    kl: float
    kl_max: float
    top1: float
    tokens: int


def compare(
    model: PreTrainedModel,
    ids: torch.Tensor,
    caches: Mapping[str, Callable[[], Any]],
    *,
    prefill: int = 512,
    chunk: int = 32,
) -> dict[str, Quality]:
    """Scores a text under several caches, and under `DynamicCache`, which is the yardstick.

    The first `prefill` tokens are one call on an empty cache; the rest is scored `chunk` tokens at
    a call, each call reading what the cache stores.

    Args:
        model: a causal language model, in the attention implementation to measure.
        ids: `[B, N]`, the text, on the model's device; N is above `prefill`.
        caches: name -> a function that makes an empty cache.
        prefill: tokens of the first call, not scored.
        chunk: tokens of each later call.
    """
    if ids.ndim != 2 or ids.shape[1] <= prefill:
        raise ConfigError(
            f"ids: expected [B, N] with N > prefill={prefill}, got {tuple(ids.shape)}"
        )
    expected = _log_probabilities(model, ids, DynamicCache(config=model.config), prefill, chunk)
    found = {}
    for name, make in caches.items():
        got = _log_probabilities(model, ids, make(), prefill, chunk)
        kl = (expected.exp() * (expected - got)).sum(-1)
        same = (expected.argmax(-1) == got.argmax(-1)).double()
        found[name] = Quality(kl.mean().item(), kl.max().item(), same.mean().item(), kl.numel())
    return found


@torch.no_grad()
def _log_probabilities(
    model: PreTrainedModel, ids: torch.Tensor, cache: Any, prefill: int, chunk: int
) -> torch.Tensor:
    """`[B, N - prefill, vocabulary]`, float64: of the token after each scored one."""
    model(input_ids=ids[:, :prefill], past_key_values=cache, logits_to_keep=1)
    logits = [
        model(input_ids=part, past_key_values=cache).logits
        for part in ids[:, prefill:].split(chunk, dim=1)
    ]
    return torch.cat(logits, 1).double().log_softmax(-1)


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
    batches = ids.to(model.device).split(_BATCH)
    steps, done = len(batches) * (len(caches) + 1), 0

    def announced(cache: str, make: Callable[[], Any]) -> Callable[[], Any]:
        def start() -> Any:
            nonlocal done
            done += 1
            if progress is not None:
                progress(cache, done / steps)
            return make()

        return start

    before = model.config._attn_implementation
    model.set_attn_implementation("fp8_paged")
    found = []
    try:
        for batch in batches:
            if progress is not None:
                progress("the unquantised cache", done / steps)
            told = {cache: announced(cache, make) for cache, make in caches.items()}
            found.append(compare(model, batch, told, prefill=prefill, chunk=chunk))
            done += 1
    finally:
        model.set_attn_implementation(before)
    return {
        "suite": "quality",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": versions(),
        "hardware": hardware() | {"device": str(model.device)},
        "settings": {"model": name, "dtype": str(model.dtype).removeprefix("torch."),
                     "attention": "fp8_paged", "texts": topics, "prefill": prefill, "score": score,
                     "chunk": chunk},
        "rows": [
            {"cache": cache, **asdict(_together(batch[cache] for batch in found))}
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
    for column in ("mean KL", "largest KL", "same top-1", "tokens"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in result["rows"]:
        table.add_row(
            row["cache"], f"{row['kl']:.2e}", f"{row['kl_max']:.2e}", f"{row['top1']:.2%}",
            str(row["tokens"]),
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

    def stock() -> Any:
        return QuantizedCache(backend="fp8", config=model.config)

    caches = {name: paged(options) for name, options in CACHES.items()}
    try:
        stock()
    except ValueError:
        return caches
    return caches | {STOCK: stock}


def _together(parts: Iterable[Quality]) -> Quality:
    """The quality over all tokens of several texts."""
    found = list(parts)
    tokens = sum(part.tokens for part in found)
    return Quality(
        kl=sum(part.kl * part.tokens for part in found) / tokens,
        kl_max=max(part.kl_max for part in found),
        top1=sum(part.top1 * part.tokens for part in found) / tokens,
        tokens=tokens,
    )
