"""How far a cache moves a model's predictions: KL and top-1 against the unquantised cache."""

import inspect
import pydoc_data.topics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, QuantizedCache

from ..attention.enable import paged_attention
from ..cache.cache import FP8PagedCache
from ..errors import ConfigError
from ..utils.environment import circumstances

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "CACHES", "TEXTS", "UNQUANTISED", "Quality", "Scores", "compare", "format_table", "one_logit",
    "run_quality_suite", "stock_cache",
]  # fmt: skip

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
UNQUANTISED = "unquantised"
# Texts in one call of the model: what 4 need fits into 4 GB.
_BATCH = 4


@dataclass(frozen=True)
class Quality:
    """How far one cache is from the unquantised one, on the same text.

    Attributes:
        kl: mean KL divergence from the unquantised cache's next-token distribution, in nats.
        kl_max: the largest at one token.
        top1: share of tokens at which the most likely next token is the same.
        perplexity: of the text itself; NaN where no token of it is known to follow a scored one.
        tokens: how many were scored.
    """

    kl: float
    kl_max: float
    top1: float
    perplexity: float
    tokens: int


@dataclass(frozen=True)
class Scores:
    """The same for each scored token, float64 on the CPU.

    Attributes:
        kl: `[n]`.
        same: `[n]`: 1 where the most likely next token is the same, else 0.
        surprise: `[m]`: minus the log-probability of the next token of the text, where one is.
    """

    kl: torch.Tensor
    same: torch.Tensor
    surprise: torch.Tensor

    @property
    def quality(self) -> Quality:
        """What all tokens have in common."""
        return Quality(
            self.kl.mean().item(),
            self.kl.max().item(),
            self.same.mean().item(),
            self.surprise.mean().exp().item(),
            self.kl.numel(),
        )

    @classmethod
    def together(cls, parts: Iterable["Scores"]) -> "Scores":
        """The scores of several texts."""
        return cls(*map(torch.cat, zip(*map(_fields, parts), strict=True)))


def _fields(scores: Scores) -> tuple[torch.Tensor, ...]:
    return scores.kl, scores.same, scores.surprise


def compare(
    model: PreTrainedModel,
    ids: torch.Tensor,
    caches: Mapping[str, Callable[[], Any]],
    *,
    prefill: int = 512,
    chunk: int = 32,
    after: Callable[[str, int], None] | None = None,
) -> dict[str, Scores]:
    """Scores a text under several caches, and under `DynamicCache`, which is the yardstick.

    The first `prefill` tokens are one call on an empty cache; the rest is scored `chunk` tokens at
    a call, each call reading what the cache stores. The caches take turns, so that only the logits
    of one chunk are held at a time.

    Args:
        model: a language model, in the attention implementation to measure; an encoder-decoder
            reads the whole text in its encoder.
        ids: `[B, N]`, the text, on the model's device; N is above `prefill`.
        caches: name -> a function that makes an empty cache (for the decoder's own attention).
        prefill: tokens of the first call, not scored.
        chunk: tokens of each later call.
        after: called after each call of the model, with the name of the cache and the tokens.

    Returns:
        The scores under each name, and those of the yardstick under `UNQUANTISED`.
    """
    if ids.ndim != 2 or ids.shape[1] <= prefill:
        raise ConfigError(
            f"ids: expected [B, N] with N > prefill={prefill}, got {tuple(ids.shape)}"
        )
    made: dict[str, Any] = {UNQUANTISED: DynamicCache(config=model.config)}
    made |= {name: make() for name, make in caches.items()}
    inputs: dict[str, Any] = {}
    if model.config.is_encoder_decoder:
        with torch.no_grad():
            inputs["encoder_outputs"] = model.get_encoder()(input_ids=ids)
        made = {name: EncoderDecoderCache(cache, DynamicCache()) for name, cache in made.items()}
    found: dict[str, list[Scores]] = {name: [] for name in made}
    following = ids.roll(-1, dims=1)
    start = 0
    for part in (ids[:, :prefill], *ids[:, prefill:].split(chunk, dim=1)):
        stop = start + part.shape[1]
        expected: torch.Tensor | None = None
        for name, cache in made.items():
            logits = _logits(model, part, cache, inputs, scored=start > 0)
            if after is not None:
                after(name, part.numel())
            if start == 0:
                continue
            got = _float64(logits).log_softmax(-1)
            expected = got if expected is None else expected
            known = following[:, start : min(stop, ids.shape[1] - 1)]
            found[name].append(_scores(expected, got, known))
        start = stop
    return {name: Scores.together(parts) for name, parts in found.items()}


@torch.no_grad()
def _logits(
    model: PreTrainedModel, ids: torch.Tensor, cache: Any, inputs: dict[str, Any], *, scored: bool
) -> torch.Tensor:
    """`[B, T, vocabulary]`, of the token after each; one token's alone unless they are scored."""
    text = "decoder_input_ids" if inputs else "input_ids"
    fewer = {} if scored else one_logit(model)
    logits: torch.Tensor = model(
        **{text: ids}, **inputs, past_key_values=cache, use_cache=True, **fewer
    ).logits
    if scored and logits.shape[1] != ids.shape[1]:
        raise ConfigError(
            f"model: expected logits of {ids.shape[1]} tokens, got {logits.shape[1]} from "
            f"{type(model).__name__}; its predictions cannot be compared"
        )
    return logits


def _float64(x: torch.Tensor) -> torch.Tensor:
    return (x.cpu() if x.device.type == "mps" else x).double()  # which mps has not


def _scores(expected: torch.Tensor, got: torch.Tensor, known: torch.Tensor) -> Scores:
    """The scores of one chunk; `known` are the next tokens of the text, `[B, T or T - 1]`."""
    of_text = got[:, : known.shape[1]].gather(-1, known[..., None].to(got.device))
    share = expected.exp()
    # What cannot follow, with a logit of -inf, counts nothing.
    kl = torch.where(share > 0, share * (expected - got), 0.0).sum(-1)
    same = (expected.argmax(-1) == got.argmax(-1)).double()
    return Scores(kl.flatten().cpu(), same.flatten().cpu(), -of_text.flatten().cpu())


def one_logit(model: PreTrainedModel) -> dict[str, int]:
    """The argument that spares the logits of all tokens but the last, where the model takes it."""
    names = inspect.signature(type(model).forward).parameters
    return {"logits_to_keep": 1} if "logits_to_keep" in names else {}


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

    def after(cache: str, tokens: int) -> None:
        nonlocal done
        done += tokens
        if progress is not None:
            progress(cache, done / total)

    with paged_attention(model):
        found = [
            compare(model, batch, caches, prefill=prefill, chunk=chunk, after=after)
            for batch in ids.to(model.device).split(_BATCH)
        ]
    return {
        **circumstances("quality", device=str(model.device)),
        "settings": {"model": name, "dtype": str(model.dtype).removeprefix("torch."),
                     "attention": "fp8_paged", "texts": topics, "prefill": prefill, "score": score,
                     "chunk": chunk},
        "rows": [
            {"cache": cache, **asdict(Scores.together(batch[cache] for batch in found).quality)}
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
