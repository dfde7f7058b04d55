"""Formats by kinds of scales, centered or not: how far each moves a model's predictions."""

import pydoc_data.topics
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, get_args

import torch
from transformers import PreTrainedModel

from ..attention.switching import paged_attention
from ..cache.cache import FP8PagedCache
from ..cache.serialization import _tensors_of
from ..calibration import stages
from ..calibration.choose import Choice
from ..calibration.corpus import Corpus, read_corpus
from ..calibration.divergence import Scores, compare_caches
from ..calibration.job import Job, Options, batches_of
from ..calibration.observe import Parts, paged_layers
from ..calibration.state import State
from ..errors import ConfigError
from ..formats import FORMATS
from ..scales.kv_scales import KVScales
from ..scales.layer_scales import Granularity, LayerScales
from ..utils.environment import describe_run
from .quality import STOCK, TEXTS, stock_cache

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "AMAX",
    "CONSTANT",
    "DYNAMIC",
    "MEASURED",
    "STATIC",
    "format_table",
    "run_accuracy_suite",
]

MEASURED = ("fp8_e4m3", "fp8_e3m4", "fp8_e5m2")
CONSTANT, DYNAMIC = "constant 1.0", "dynamic"
# What other tools write: nothing is chosen. For the first format only.
AMAX = "amax / 448 per head"
STATIC: dict[str, Granularity] = {f"static per {kind}": kind for kind in get_args(Granularity)}

_FINEST = next(name for name, kind in STATIC.items() if kind == "channel")
# Two topics with the same paragraph of so many characters are one text to the calibration.
_PARAGRAPH = 80

# By format and kind of scales: the scales of each layer.
_Choices = Mapping[tuple[str, str], Mapping[int, Choice]]


@dataclass(frozen=True)
class _Row:
    """What a row is about, and what makes its cache."""

    format: str
    scales: str
    centered: bool
    make: Callable[[], Any]

    @property
    def name(self) -> str:
        return f"{self.format}, {self.scales}{', K centered' if self.centered else ''}"


def run_accuracy_suite(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    name: str = "",
    texts: int = 8,
    prefill: int = 512,
    score: int = 256,
    chunk: int = 128,
    calibrated: int = 2**15,
    progress: Callable[[str, float], None] | None = None,
) -> dict[str, Any]:
    """Returns what formats, scales and centers do to a model's predictions, for JSON.

    The texts are topics of Python's manual. Static scales are calibrated for each format and
    granularity, on topics that share no paragraph with those that are scored. In rows with a
    center, every layer has one.

    Args:
        model: a causal language model, float32 to see the cache alone; left as it was.
        tokenizer: the model's.
        name: what to call the model in the result.
        texts: how many topics of `pydoc_data.topics` to score.
        prefill: tokens of each text that are not scored.
        score: tokens of each text that are, after the others.
        chunk: of which so many are one call of the model.
        calibrated: tokens to calibrate on, at most.
        progress: called with what is measured next, and the share that is done.

    Returns:
        `suite`, `date`, `command`, `versions`, `hardware`, `settings`, and `rows`, each with
        `format`, `scales`, `centered`, the fields of `Quality`, `kl_error` (the standard error of
        the mean KL over the texts; None for a single one), `kl_by_text`, and `bytes_per_token` (of
        the layers that are stored in 8 bits, for a model in bf16, at the end of a text).

    Raises:
        ConfigError: there are not that many texts of that many tokens, or the model cannot use the
            cache.
    """
    length = prefill + score
    scored, others = _topics(tokenizer, texts, length)
    layers = paged_layers(model)
    corpus = read_corpus(
        list(others.values()), tokenizer, max_tokens=calibrated, max_length=length, held_out=0
    )
    last = _last_rows(model)
    caches = 2 * sum(len(_kinds(fmt)) for fmt in MEASURED) + len(last)
    total, done = corpus.tokens + texts * length * (caches + 1), 0

    def tell(what: str, tokens: int) -> None:
        nonlocal done
        before, done = done, done + tokens
        # One line a percent where lines are printed.
        percent = 100 * done // total
        if progress is not None and percent > 100 * before // total:
            progress(f"{percent} %: {what}", done / total)

    def told(stage: str, tokens: int, again: bool) -> None:
        # What is read once more, to choose, is little, and not in the total.
        tell("calibrating", tokens if stage == "text" else 0)

    ranges, choices = _calibrate(Job(model, layers, State(None, ""), told), corpus)
    rows = [*_rows(model, choices), *last]
    makers = {row.name: row.make for row in rows}
    found: list[dict[str, Scores]] = []

    def on_call(cache: str, tokens: int) -> None:
        tell(f"text {len(found) + 1} of {texts}", tokens)

    with paged_attention(model):
        for ids in scored.values():
            ids = ids.to(model.device)
            found.append(
                compare_caches(model, ids, makers, prefill=prefill, chunk=chunk, on_call=on_call)
            )
    per_channel = (choice.k.shape[-1] > 1 for choice in choices[MEASURED[0], _FINEST].values())
    return {
        **describe_run("accuracy", device=str(model.device)),
        "settings": {
            "model": name, "dtype": str(model.dtype).removeprefix("torch."),
            "attention": "fp8_paged", "texts": list(scored), "prefill": prefill, "score": score,
            "chunk": chunk, "calibrated_tokens": corpus.tokens,
            "calibrated_on": list(others)[: corpus.texts],
            # False: it is not known what RoPE rotates, and K has a scale for each head instead.
            "k_per_channel": all(per_channel),
            "unquantised_bytes_per_token": sum(2 * sum(_sizes(part)) for part in ranges.values()),
        },
        "rows": [
            {
                "format": row.format, "scales": row.scales, "centered": row.centered,
                **_scores([scores[row.name] for scores in found]),
                "bytes_per_token": _bytes_per_token(row.make(), ranges, length),
            }
            for row in rows
        ],
    }  # fmt: skip


def format_table(result: dict[str, Any]) -> "RenderableType":
    """Returns the rows of `run_accuracy_suite` as a table for a terminal."""
    from rich.table import Table

    settings = result["settings"]
    table = Table(
        title=f"{settings['model']}, {settings['dtype']}: against the unquantised cache",
        caption=f"{len(settings['texts'])} texts, {settings['score']} tokens each after "
        f"{settings['prefill']}, ± the standard error over texts; static scales from "
        f"{settings['calibrated_tokens']} tokens of others; {result['hardware']['cpu']}, "
        f"{result['date']}",
    )
    for column in ("format", "scales", "K"):
        table.add_column(column)
    for column in ("mean KL, 1e-3", "largest KL", "same top-1", "bytes per token"):
        table.add_column(column, justify="right", no_wrap=True)
    previous = None
    for row in result["rows"]:
        if row["format"] != previous:
            table.add_section()
        previous = row["format"]
        error = "" if row["kl_error"] is None else f" ± {1e3 * row['kl_error']:.2f}"
        table.add_row(
            row["format"], row["scales"], "centered" if row["centered"] else "",
            f"{1e3 * row['kl']:.2f}{error}", f"{row['kl_max']:.2e}", f"{row['top1']:.2%}",
            f"{row['bytes_per_token']:.0f}",
        )  # fmt: skip
    return table


def _topics(
    tokenizer: Any, count: int, length: int
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The first tokens of the topics to score, `[1, length]`, and the texts to calibrate on.

    No topic shares a paragraph with one that is scored. Those of the quality suite are scored
    first, then the shortest ones that are long enough, which leaves the most for the calibration.
    """
    topics: dict[str, str] = pydoc_data.topics.topics
    paragraphs = {name: _paragraphs(text) for name, text in topics.items()}
    rest = sorted(topics.keys() - set(TEXTS), key=lambda name: (len(topics[name]), name))
    scored: dict[str, torch.Tensor] = {}
    seen: set[str] = set()
    for name in (*TEXTS, *rest):
        if len(scored) == count:
            break
        if paragraphs[name] & seen:
            continue
        ids = tokenizer(topics[name], truncation=True, max_length=length, return_tensors="pt")
        if ids.input_ids.shape[1] == length:
            scored[name] = ids.input_ids
            seen |= paragraphs[name]
    others = {
        name: text
        for name, text in sorted(topics.items())
        if name not in scored and not paragraphs[name] & seen
    }
    if len(scored) < count or not others:
        raise ConfigError(
            f"texts: expected at most {len(scored) - (not others)}, got {count}: no other topic "
            f"has {length} tokens and a text of its own"
        )
    return scored, others


def _paragraphs(text: str) -> set[str]:
    parts = (" ".join(part.split()) for part in text.split("\n\n"))
    return {part for part in parts if len(part) >= _PARAGRAPH}


def _calibrate(job: Job, corpus: Corpus) -> tuple[dict[int, Parts], _Choices]:
    """The ranges of K and V, and scales for each format and granularity."""
    partners = stages.pairs(job, corpus.windows[0])
    ranges = stages.observed(job, "text", batches_of(corpus.windows, 1), partners)
    choices = {}
    for fmt, (name, kind) in product(MEASURED, STATIC.items()):
        options = Options(kind, FORMATS[fmt], margin=1.0, center=True)
        # A state keeps the first choice that it is asked for.
        fresh = replace(job, state=State(None, ""))
        choices[fmt, name] = stages.chosen(fresh, corpus.windows, ranges, partners, options)
    choices[MEASURED[0], AMAX] = {index: _smallest(parts) for index, parts in ranges.items()}
    return ranges, choices


def _smallest(parts: Parts) -> Choice:
    """The smallest scales per head that nothing saturates under."""
    mean = (parts["k_sum"] / parts["count"]).float()

    def scale(side: str, shift: torch.Tensor | float = 0.0) -> torch.Tensor:
        high, low = parts[f"{side}_max"] - shift, parts[f"{side}_min"] - shift
        amax = torch.maximum(high.abs(), low.abs()).amax(1, keepdim=True).cpu()
        return amax.clamp(min=torch.finfo(amax.dtype).tiny) / FORMATS["fp8_e4m3"].max

    return Choice(scale("k"), scale("v"), scale("k", mean), mean.cpu())


def _kinds(fmt: str) -> tuple[str, ...]:
    """The kinds of scales to measure a format with."""
    amax = (AMAX,) if fmt == MEASURED[0] else ()
    return (CONSTANT, *amax, *STATIC, DYNAMIC)


def _rows(model: PreTrainedModel, choices: _Choices) -> list[_Row]:
    """Every format, with every kind of scales, without a center and with one."""
    rows = []
    for fmt in MEASURED:
        for scales, centered in product(_kinds(fmt), (False, True)):
            options: dict[str, Any] = {"dtype": fmt}
            if (fmt, scales) in choices:
                options["scales"] = _static(choices[fmt, scales], centered)
            else:
                options["scales"] = 1.0 if scales == CONSTANT else None
                options["center_keys"] = centered
            make = partial(FP8PagedCache, model.config, **options)
            rows.append(_Row(fmt, scales, centered, make))
    return rows


def _static(layers: Mapping[int, Choice], centered: bool) -> KVScales:
    def made(choice: Choice) -> LayerScales:
        if not centered:
            return LayerScales(choice.k, choice.v, source="calibrated")
        assert choice.k_centered is not None
        return LayerScales(choice.k_centered, choice.v, choice.k_center, "calibrated")

    return KVScales({index: made(choice) for index, choice in layers.items()}, origin="calibrated")


def _last_rows(model: PreTrainedModel) -> list[_Row]:
    """K as it is, and the cache of transformers where this version and model have it."""
    paged = partial(FP8PagedCache, model.config, dtype="fp8_e4m3", key_dtype="auto")
    rows = [_Row("K auto, V fp8_e4m3", DYNAMIC, False, paged)]
    stock = stock_cache(model)
    if stock is None:
        return rows
    return [*rows, _Row(STOCK, "of the first call, per tensor", False, stock)]


def _scores(by_text: Sequence[Scores]) -> dict[str, Any]:
    """The fields of a row that say how good it is."""
    means = [scores.quality.kl for scores in by_text]
    error = statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else None
    return {
        **asdict(Scores.concat(by_text).quality),
        "kl_error": error,
        "kl_by_text": means,
    }


def _sizes(part: Parts) -> tuple[int, int]:
    """Numbers of K and of V of a token in one layer."""
    return part["k_max"].numel(), part["v_max"].numel()


def _bytes_per_token(cache: Any, ranges: Mapping[int, Parts], tokens: int) -> float:
    """What a token takes in a new cache that is given `tokens` of a bf16 model."""
    for index, part in ranges.items():
        k, v = (
            torch.ones((1, len(x), tokens, x.shape[1]), dtype=torch.bfloat16)
            for x in (part["k_max"], part["v_max"])
        )
        cache.update(k, v, index)
    if isinstance(cache, FP8PagedCache):
        page = cache.options.page_size
        # The last page is partly filled: what a token takes is its share of a full one.
        return cache.memory_footprint()["used"] / (-(-tokens // page) * page)
    stored = [t for layer in cache.layers for t in _tensors_of(vars(layer))]
    return sum(t.numel() * t.element_size() for t in stored) / tokens
