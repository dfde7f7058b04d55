"""Calibration of static scales on texts, and measurement of given ones."""

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedModel

from ..attention.switching import eval_mode
from ..cache.cache import FP8PagedCache
from ..cache.plans import parse_plan
from ..errors import ConfigError
from ..formats import AUTO, FORMATS, STATIC_DTYPE, LayerPlan, parse_dtype
from ..modeling.identity import describe_model
from ..modeling.model_support import caches_latents
from ..scales.kv_scales import KVScales, StoragePlan, resolve, warn_if_stale
from ..scales.layer_scales import Granularity
from ..scales.report import CalibrationReport
from ..utils.digests import digest_of, fingerprint_weights, is_whole, sample
from ..utils.environment import version
from ..utils.text import format_list, format_value
from . import plans, scoring, stages
from .choose import CalibrationOptions
from .corpus import Corpus, read_corpus
from .observe import TensorDict, make_batches, paged_layers
from .pairs import Partners
from .positions import Beyond, check_count, find_reach, limit_length, turns_keys
from .reporting import CACHES, make_report
from .state import Job, State

logger = logging.getLogger(__name__)

# Texts that `measure` scores, in tokens.
_SCORED = 4096


def calibrate(
    model: PreTrainedModel,
    texts: Any,
    *,
    tokenizer: Any = None,
    granularity: Granularity = "head",
    center: bool = True,
    dtype: str | torch.dtype | None = None,
    plan: Literal["measured"] | LayerPlan | Mapping[int, LayerPlan] | None = None,
    margin: float = 1.0,
    max_tokens: int = 2**18,
    max_length: int = 1024,
    max_position: int | None = None,
    batch_size: int = 1,
    text_column: str = "text",
    chat_template: bool | None = None,
    held_out: int = 4096,
    state: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> KVScales:
    """Make static scales for a model on texts; `.report` of the result says how good they are.

    The model reads the texts, and K (after RoPE) and V are looked at where they would be stored.
    A scale covers the largest magnitude seen, see `calibration.choose`. The result does not depend
    on the order of the texts (unless reading stops at `max_tokens`), nor on interruptions.

    Args:
        model: a language model, on any device or devices.
        texts: a text file, a file of JSON lines, or an iterable (a list, a `datasets` dataset) of
            texts, conversations or token ids; see `read_corpus`.
        tokenizer: the model's; None: loaded from where the model came from.
        granularity: a scale for each layer and side ("tensor"), each KV head ("head"), or each head
            and channel ("channel"). For dynamic scales see `choose_plan`.
        center: also try to store K minus its mean, and do so where it helps. Only the format
            "hf_fp8kv" can hold a center. Latents (MLA) get none, unless a plan by hand says so.
        dtype: the format that scales are chosen for; they can be used for any. None: "fp8_e4m3".
        plan: how each layer is stored, in 8 bits: "measured": in the format, with the rotation and
            the center that cost least; or a plan by hand, of all layers or of each. The scales say
            so to the cache, and are for nothing else: no server but ours can use them. None: in
            whichever format a cache is given, without rotation.
        margin: times the largest magnitude; 1.1 leaves a tenth for what the texts did not have.
        max_tokens: reading stops there.
        max_length: tokens of the longest piece that the model reads at a time.
        max_position: centers are also tried on pieces that are moved to other positions, up to
            this one, and the report has a part of its own for these; None: 8 * max_length, or as
            many as the model has. Ask for as many as you will use.
        batch_size: pieces that it reads at a time.
        text_column: the column of a row that holds the text.
        chat_template: None: conversations go through the tokenizer's chat template; True: plain
            texts too, as a user's turn; False: conversations are an error.
        held_out: tokens that no scale is made on, for the report; 0: no report on quality.
        state: a file that lets a calibration that was killed go on. It is left behind, so that
            nothing is lost before the scales are saved: delete it then.
        progress: draw a bar with tokens per second on stderr.

    Raises:
        ConfigError: an argument, a text, or the model cannot be used.
    """
    layers = paged_layers(model)
    options = _options(granularity, center, dtype, margin, plan, layers)
    if caches_latents(model.config.get_text_config(decoder=True)):
        options = replace(options, latent=True, center=False)
    check_count("batch_size", batch_size)
    beyond = Beyond(find_reach(model, max_length, max_position))
    corpus = read_model_corpus(
        model, texts, tokenizer, max_tokens=max_tokens, max_length=max_length, held_out=held_out,
        text_column=text_column, chat_template=chat_template,
    )  # fmt: skip
    asked: Any = options.plan
    if isinstance(asked, Mapping):
        asked = {index: str(of_layer) for index, of_layer in asked.items()}
    facts = (granularity, center, options.fmt.name, margin, batch_size, beyond.reach, asked)
    path = None if state is None else Path(state)
    state_file = State(path, "" if path is None else _identity(model, corpus, facts))
    batches = make_batches(corpus.windows, batch_size)
    total = corpus.tokens + scoring.estimate_other_tokens(corpus, CACHES, options, beyond)
    with _run_in_eval_mode(model, layers, options, state_file, total, progress) as job:
        partners = stages.find_partners(job, corpus.windows[0])
        ranges = stages.collect_ranges(job, batches, partners)
        _warn_of_gaps(job, ranges, partners)
        beyond = _find_beyond(model, beyond, partners)
        beyond, near, far = _collect_samples(job, corpus.windows, partners, beyond)
        may_turn = bool(beyond.untried) and turns_keys(model)
        candidates = {
            index: plans.list_candidates(
                index, of, partners[index], options, near.get(index), far.get(index),
                may_turn=may_turn,
            )
            for index, of in ranges.items()
        }  # fmt: skip
        far_sample = stages.sample_far(corpus.windows, beyond) if far else []
        made = plans.make_scales(job, corpus.windows, candidates)
        source, fingerprint = f"calibrated on {corpus.tokens} tokens", fingerprint_weights(model)
        safe, best = (
            KVScales(
                {i: replace(layer, source=source) for i, layer in layers.items()},
                model_type=model.config.model_type, origin=source, fingerprint=fingerprint,
            )
            for layers in plans.choose_scales(job, corpus.windows, far_sample, made)
        )  # fmt: skip
        scales, centers = scoring.check_plans(job, corpus.windows, safe, best, beyond)
        counts = {"texts": corpus.texts, "tokens": corpus.tokens}
        held = corpus.held_out
        report = make_report(job, scales, ranges, centers, held, held, beyond, **counts)
    return scales.with_report(report)


def measure(
    model: PreTrainedModel,
    scales: KVScales | str | os.PathLike[str],
    texts: Any,
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    max_tokens: int = 16384,
    max_length: int = 1024,
    max_position: int | None = None,
    text_column: str = "text",
    chat_template: bool | None = None,
    progress: bool = True,
) -> CalibrationReport:
    """Measure how good the scales are for the model on the texts: what `calibrate` reports.

    Args:
        model, texts, tokenizer, max_tokens, max_length, max_position: as in `calibrate`.
        text_column, chat_template, progress: the same.
        scales: from any source; also a path, a folder or a repository of the Hub.
        dtype: the format to store in. None: "fp8_e4m3", or as the scales say.

    Raises:
        ConfigError: as `calibrate`. ScaleError: the scales are not of this model.
    """
    layers = paged_layers(model)
    options = _options("head", False, dtype, 1.0, None, layers)
    beyond = Beyond(find_reach(model, max_length, max_position))
    resolved = resolve(scales)
    if not isinstance(resolved, KVScales):
        raise ConfigError(
            f"scales: expected KVScales, a path or a repository id, got {scales!r}; "
            "KVScales.uniform(num_layers) has a constant for each layer"
        )
    scales = resolved
    warn_if_stale(model, scales)
    stored = dtype if scales.plan is not None else options.fmt.name
    FP8PagedCache(model.config, dtype=stored, **scoring.keyword(scales))  # layers that are missing
    corpus = read_model_corpus(
        model, texts, tokenizer, max_tokens=max_tokens, max_length=max_length, held_out=0,
        text_column=text_column, chat_template=chat_template,
    )  # fmt: skip
    scored = scoring.first_windows(corpus.windows, _SCORED)
    both = sum(map(len, (*scored, *scoring.far_windows(scored))))
    total = 2 * corpus.tokens + (1 + CACHES) * both
    with _run_in_eval_mode(model, layers, options, State(None, ""), total, progress) as job:
        partners = stages.find_partners(job, corpus.windows[0])
        ranges = stages.collect_ranges(job, make_batches(corpus.windows, 1), partners)
        beyond = _find_beyond(model, beyond, partners)
        centers = "Centers were not tried: the scales were given."
        return make_report(job, scales, ranges, centers, corpus.windows, scored, beyond)


def _options(
    granularity: object, center: object, dtype: Any, margin: object, plan: object,
    layers: Collection[int],
) -> CalibrationOptions:  # fmt: skip
    if granularity not in get_args(Granularity):
        raise ConfigError(
            f"granularity: expected one of {', '.join(get_args(Granularity))}, got {granularity!r}"
        )
    if not isinstance(center, bool):
        raise ConfigError(f"center: expected True or False, got {center!r}")
    if plan is not None and dtype is not None:
        raise ConfigError(
            f"dtype: expected None, since the plan says how each layer is stored, got {dtype!r}; "
            "leave it out, or pass plan=LayerPlan.parse('fp8_e3m4', 'fp8_e3m4') and such"
        )
    chosen: Any = plan
    if plan is not None and plan != "measured":
        given = parse_plan(plan)
        if isinstance(given, StoragePlan):
            given = given.plan
        chosen = dict.fromkeys(sorted(layers), given) if isinstance(given, LayerPlan) else given
        for wrong, found, repair in (
            (set(layers) - set(chosen), "none for layers", "add them"),
            (set(chosen) - set(layers), "some for others", "leave these out"),
        ):
            if wrong:
                raise ConfigError(
                    f"plan: expected one for every paged layer, got {found} "
                    f"{format_list(sorted(wrong))}; {repair}"
                )
        if not center and any(of_layer.k.centered for of_layer in chosen.values()):
            raise ConfigError(
                "center: expected True for a plan with centers, got False; leave it out"
            )
    name = parse_dtype(STATIC_DTYPE if dtype is None else dtype)
    if name == AUTO:
        raise ConfigError(f"dtype: expected an 8-bit format, got {dtype!r}, which needs no scales")
    number = isinstance(margin, int | float) and not isinstance(margin, bool)
    if not number or not 1.0 <= margin <= 16.0:  # type: ignore[operator]
        raise ConfigError(
            f"margin: expected a factor from 1 to 16, got {format_value(margin)}; less than 1 "
            "would saturate what was seen"
        )
    return CalibrationOptions(granularity, FORMATS[name], float(margin), center, chosen)  # type: ignore[arg-type]


def _load_tokenizer(model: PreTrainedModel, tokenizer: Any) -> Any:
    name = getattr(model, "name_or_path", "")
    if tokenizer is not None or not name:
        return tokenizer
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, ImportError) as error:
        # Token ids need none; for anything else, the corpus asks for one.
        logger.info("no tokenizer in %s: %s", name, error)
        return None


def _identity(model: PreTrainedModel, corpus: Corpus, facts: tuple[object, ...]) -> str:
    """Return a digest of everything that the scales depend on, with samples of the weights."""
    here = [weight for weight in model.parameters() if is_whole(weight)]
    # Weights on disk are only known by their origin.
    origin = model.name_or_path if len(here) < len([*model.parameters()]) else ""
    facts += (version("hf-fp8kv"), version("torch"), describe_model(model), origin, corpus.digest)
    return digest_of(facts, [(weight.shape, sample(weight)) for weight in here])


def read_model_corpus(
    model: PreTrainedModel, texts: Any, tokenizer: Any, *, max_length: int, **options: Any
) -> Corpus:
    """Read the texts; raise ConfigError for token ids that the model has no embedding for."""
    length = limit_length(model, max_length)
    corpus = read_corpus(texts, _load_tokenizer(model, tokenizer), max_length=length, **options)
    known = getattr(model.get_input_embeddings(), "num_embeddings", None)
    largest = max(int(window.max()) for window in (*corpus.windows, *corpus.held_out))
    if known is not None and largest >= known:
        raise ConfigError(
            f"texts: expected token ids below {known}, which the model knows, got {largest}; use "
            "the tokenizer of this very model"
        )
    return corpus


def _find_beyond(
    model: PreTrainedModel, beyond: Beyond, partners: Mapping[int, Partners]
) -> Beyond:
    """Return the positions at which the model can be run."""
    if any(of.k is not None for of in partners.values()):
        return beyond
    kind = type(model).__name__
    what = "is an encoder-decoder" if model.config.is_encoder_decoder else "takes no position_ids"
    return replace(beyond, untried=f"{kind} cannot be run at other positions: it {what}")


def _collect_samples(
    job: Job, windows: Sequence[torch.Tensor], partners: Mapping[int, Partners], beyond: Beyond
) -> tuple[Beyond, dict[int, TensorDict], dict[int, TensorDict]]:
    """Return the ranges near and far for `find_centers`; far ones only where they are known."""
    if not job.options.center and job.options.plan is None:
        return beyond, {}, {}
    near = stages.collect_sample(job, stages.sample_near(windows), partners, "sample")
    batches = stages.sample_far(windows, beyond)
    try:
        far = stages.collect_sample(job, batches, partners, "far sample")
    except ConfigError as error:
        logger.warning("positions up to %d are not tried: %s", beyond.reach, error)
        return replace(beyond, untried=f"the model cannot be run at others: {error}"), near, {}
    return beyond, near, far


def _warn_of_gaps(
    job: Job, ranges: Mapping[int, TensorDict], partners: Mapping[int, Partners]
) -> None:
    missing = sorted(job.layers - set(ranges))
    if missing:
        logger.warning(
            "layers %s stored nothing while the model read the texts, and have no scales; a cache "
            "with these scales needs skip_layers=%s",
            format_list(missing),
            missing,
        )
    unknown = sorted(index for index, of in partners.items() if of.k is None)
    if unknown and job.options.granularity == "channel":
        logger.warning(
            "layers %s: K has a scale for each head, not for each channel, since it is not known "
            "which channels are rotated together: the model takes no position_ids",
            format_list(unknown),
        )


@contextmanager
def _run_in_eval_mode(
    model: PreTrainedModel, layers: frozenset[int], options: CalibrationOptions, state: State,
    total: int, progress: bool,
) -> Iterator[Job]:  # fmt: skip
    """Put the model in eval mode and draw a bar inside the context."""
    bar_options = {"unit": "tok", "unit_scale": True, "dynamic_ncols": True}
    with eval_mode(model), tqdm(total=total, disable=not progress, **bar_options) as bar:

        def on_progress(stage: str, tokens: int, resumed: bool) -> None:
            bar.set_description(stage, refresh=False)
            if resumed and not bar.disable:  # not part of the speed
                bar.initial += tokens
            bar.update(tokens)

        yield Job(model, layers, options, state, on_progress)
        # What was not needed after all.
        bar.total = bar.n
        bar.set_description("done")
