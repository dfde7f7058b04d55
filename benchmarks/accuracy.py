"""Predictions of a model by format, kind of scales and center of K."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from typing import Any, get_args

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_fp8kv.attention.switching import paged_attention
from hf_fp8kv.bench.quality import (
    DEFAULT,
    STOCK,
    TEXTS,
    TOPICS,
    describe_settings,
    first_tokens,
    stock_cache,
)
from hf_fp8kv.bench.reporting import count_bytes
from hf_fp8kv.cache.cache import FP8PagedCache
from hf_fp8kv.calibration import choose
from hf_fp8kv.calibration.divergence import compare_caches
from hf_fp8kv.calibration.observe import TensorDict, make_batches, paged_layers
from hf_fp8kv.calibration.rope import measure_partners
from hf_fp8kv.calibration.stages import CalibrationOptions, Job, collect_ranges
from hf_fp8kv.calibration.texts import Corpus, read_corpus
from hf_fp8kv.errors import ConfigError
from hf_fp8kv.formats import DISTINCT, FORMATS
from hf_fp8kv.scales.kv_scales import KVScales
from hf_fp8kv.scales.layer_scales import Granularity, LayerScales
from hf_fp8kv.utils.environment import describe_run

from .shared import MODEL, main, report_percents, summarize_texts, with_model
from .shared import TEXTS as TEXTS_OPTION

MEASURED = tuple(fmt.name for fmt in DISTINCT)
CONSTANT, DYNAMIC = "constant 1.0", "dynamic"
# The scales that other tools write, without a choice. For the first format only.
AMAX = "amax / 448 per head"
STATIC: dict[str, Granularity] = {
    f"static per {kind}": kind for kind in get_args(Granularity) if kind != "token"
}

_FINEST = next(name for name, kind in STATIC.items() if kind == "channel")
# Topics that share a paragraph of at least this many characters count as the same text.
_PARAGRAPH = 80

# The scales of each layer without a center and with one, by format and kind of scales.
_Choices = Mapping[tuple[str, str], tuple[dict[int, LayerScales], dict[int, LayerScales]]]


@dataclass(frozen=True)
class _Row:
    """A row: its format and scales, and the constructor of its cache."""

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
    """Score a model's predictions under formats, scales and centers, for JSON.

    The texts are topics of Python's manual. Static scales are calibrated for each format and
    granularity, on topics that share no paragraph with the scored topics. In rows with a center,
    every layer has a center.

    The arguments are those of `measure_quality`, and `calibrated`, the maximum number of tokens to
    calibrate on.

    Returns:
        The entries of `describe_run`, `settings`, and `rows` with `format`, `scales`, `centered`,
        the fields of `summarize_texts`, and `bytes_per_token` (of the layers that are stored in 8
        bits, for a model in bf16, at the end of a text).

    Raises:
        ConfigError: The manual has too few texts of this length, or the model cannot use the cache.
    """
    run = describe_run("accuracy", device=str(model.device))
    length = prefill + score
    scored, others = split_topics(tokenizer, texts, length)
    layers = paged_layers(model)
    corpus = read_corpus(
        list(others.values()), tokenizer, max_tokens=calibrated, max_length=length, held_out=0
    )
    calls = 1 + 2 * sum(len(_scale_kinds(fmt)) for fmt in MEASURED) + len(_last_rows(model))
    report = report_percents(progress, corpus.tokens + texts * length * calls)

    def on_call(text: int, cache: str, tokens: int) -> None:
        report(f"text {text} of {texts}", tokens)

    options = CalibrationOptions("head", FORMATS[MEASURED[0]], margin=1.0, center=True)
    ranges, choices = _calibrate(Job(model, layers, options, tqdm(disable=True)), corpus)
    report("calibrating", corpus.tokens)
    rows = [*_make_rows(model, choices), *_last_rows(model)]
    makers = {row.name: row.make for row in rows}
    with paged_attention(model):
        by_text = [
            compare_caches(
                model, ids.to(model.device), makers, prefill=prefill, chunk=chunk,
                on_call=partial(on_call, number),
            )
            for number, ids in enumerate(scored.values(), 1)
        ]  # fmt: skip
    per_channel = (
        layer.k is not None and layer.k.shape[-1] > 1
        for layer in choices[MEASURED[0], _FINEST][0].values()
    )
    return {
        **run,
        "settings": {
            **describe_settings(model, name, scored, prefill=prefill, score=score, chunk=chunk),
            "calibrated_tokens": corpus.tokens,
            "calibrated_on": list(others)[: corpus.texts],
            # False if the channels that RoPE rotates are not known: K has a scale per head then.
            "k_per_channel": all(per_channel),
            "unquantised_bytes_per_token": 2
            * sum(part[side].numel() for part in ranges.values() for side in ("k_max", "v_max")),
        },
        "rows": [
            {
                "format": row.format,
                "scales": row.scales,
                "centered": row.centered,
                **summarize_texts([scores[row.name] for scores in by_text]),
                "bytes_per_token": _bytes_per_token(row.make(), ranges, length),
            }
            for row in rows
        ],
    }


def split_topics(
    tokenizer: Any, count: int, length: int
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the first tokens of the topics to score, `[1, length]`, and texts to calibrate on.

    No topic shares a paragraph with a scored topic. The topics of `hf-fp8kv bench quality` are
    scored first, then the shortest topics of at least `length` tokens, which leaves the most text
    for the calibration.
    """
    paragraphs = {name: _find_paragraphs(text) for name, text in TOPICS.items()}
    shortest = sorted(TOPICS.keys() - set(TEXTS), key=lambda name: (len(TOPICS[name]), name))
    scored: dict[str, torch.Tensor] = {}
    used: set[str] = set()
    # `used` grows while the names are read.
    names = (name for name in (*TEXTS, *shortest) if not paragraphs[name] & used)
    for name, ids in islice(first_tokens(tokenizer, names, length), count):
        scored[name] = ids
        used |= paragraphs[name]
    left = (name for name in TOPICS.keys() - scored if not paragraphs[name] & used)
    others = {name: TOPICS[name] for name in sorted(left)}
    if len(scored) < count or not others:
        raise ConfigError(
            f"texts: expected at most {len(scored) - (not others)}, got {count}: no other topic "
            f"has {length} tokens and a separate text"
        )
    return scored, others


def _find_paragraphs(text: str) -> set[str]:
    parts = (" ".join(part.split()) for part in text.split("\n\n"))
    return {part for part in parts if len(part) >= _PARAGRAPH}


def _calibrate(job: Job, corpus: Corpus) -> tuple[dict[int, TensorDict], _Choices]:
    """Return the ranges of K and V, and scales for each format and granularity."""
    partners = measure_partners(job.model, corpus.windows[0], job.layers)
    ranges = collect_ranges(job, "text", make_batches(corpus.windows, 1), partners)
    choices = {}
    for fmt, (name, kind) in product(MEASURED, STATIC.items()):
        options = replace(job.options, granularity=kind, fmt=FORMATS[fmt])
        tried = {
            index: choose.list_candidates(
                index, of_layer, partners[index], options, None, None, may_turn=False
            )
            for index, of_layer in ranges.items()
        }
        made = choose.make_scales(replace(job, options=options), corpus.windows, tried)
        plain, centered = (
            {i: choose.join_sides(options, of["k"][which], of["v"][0]) for i, of in made.items()}
            for which in (0, -1)
        )
        choices[fmt, name] = plain, centered
    plain, centered = (
        {index: _smallest_scales(of_layer, centered) for index, of_layer in ranges.items()}
        for centered in (False, True)
    )
    choices[MEASURED[0], AMAX] = plain, centered
    return ranges, choices


def _smallest_scales(ranges: TensorDict, centered: bool) -> LayerScales:
    """Return the smallest scales per head that saturate no value."""
    mean = (ranges["k_sum"] / ranges["count"]).float()

    def scale(side: str, shift: torch.Tensor | float = 0.0) -> torch.Tensor:
        high, low = ranges[f"{side}_max"] - shift, ranges[f"{side}_min"] - shift
        amax = torch.maximum(high.abs(), low.abs()).amax(1, keepdim=True).cpu()
        return amax.clamp(min=torch.finfo(amax.dtype).tiny) / FORMATS["fp8_e4m3"].max

    if centered:
        return LayerScales(scale("k", mean), scale("v"), mean.cpu())
    return LayerScales(scale("k"), scale("v"))


def _scale_kinds(fmt: str) -> tuple[str, ...]:
    """Return the kinds of scales to measure a format with."""
    amax = (AMAX,) if fmt == MEASURED[0] else ()
    return (CONSTANT, *amax, *STATIC, DYNAMIC)


def _make_rows(model: PreTrainedModel, choices: _Choices) -> list[_Row]:
    """Return a row for every format and kind of scales, without a center and with one."""
    rows = []
    for fmt in MEASURED:
        for scales, centered in product(_scale_kinds(fmt), (False, True)):
            options: dict[str, Any] = {"dtype": fmt}
            if (fmt, scales) in choices:
                layers = choices[fmt, scales][centered]
                options["scales"] = KVScales(layers, origin="calibrated")
            else:
                plan = f"{fmt} centered" if centered else fmt
                options = {"plan": plan, "scales": 1.0 if scales == CONSTANT else None}
            make = partial(FP8PagedCache, model.config, **options)
            rows.append(_Row(fmt, scales, centered, make))
    return rows


def _last_rows(model: PreTrainedModel) -> list[_Row]:
    """Return the rows of unquantised K, the default, and transformers' FP8 cache if it exists."""
    paged = partial(FP8PagedCache, model.config, dtype="fp8_e4m3", key_dtype="auto")
    default = partial(FP8PagedCache, model.config)
    rows = [
        _Row("K auto, V fp8_e4m3", DYNAMIC, False, paged),
        _Row(DEFAULT, DYNAMIC, False, default),
    ]
    if stock := stock_cache(model):
        rows.append(_Row(STOCK, "of the first call, per tensor", False, stock))
    return rows


def _bytes_per_token(cache: Any, ranges: Mapping[int, TensorDict], tokens: int) -> float:
    """Return the bytes of a token in a new cache with `tokens` of a bf16 model."""
    for index, part in ranges.items():
        k, v = (
            torch.ones((1, len(x), tokens, x.shape[1]), dtype=torch.bfloat16)
            for x in (part["k_max"], part["v_max"])
        )
        cache.update(k, v, index)
    if isinstance(cache, FP8PagedCache):
        page = cache.options.page_size
        # The last page is partly filled: count a token's share of a full page.
        return float(cache.memory_footprint().used_bytes) / (-(-tokens // page) * page)
    return count_bytes(cache) / tokens


if __name__ == "__main__":
    main(__doc__, with_model(run_accuracy_suite), {**MODEL, **TEXTS_OPTION})
