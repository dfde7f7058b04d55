"""`calibrate`, which computes static scales on texts, and `measure`, which checks scales."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, get_args

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..attention.switching import eval_mode
from ..cache.cache import FP8PagedCache
from ..cache.options import CacheOptions
from ..cache.plans import Plan, parse_plan
from ..errors import ConfigError
from ..formats import AUTO, FORMATS, STATIC_DTYPE, parse_dtype
from ..modeling.model_support import caches_latents, find_base_model
from ..scales.kv_scales import KVScales, StoragePlan, resolve_scales, warn_if_stale
from ..scales.layer_scales import Granularity
from ..scales.report import CalibrationReport
from ..utils.arguments import check_count
from ..utils.digests import digest_decoder
from ..utils.text import format_list, format_value
from . import choose, scoring, stages
from .observe import TensorDict, find_paged_layers, make_batches
from .queries import observe_queries
from .reporting import make_report
from .rope import FarPositions, Partners, get_last_position, has_rope, measure_partners
from .stages import CalibrationOptions, Job
from .texts import read_model_corpus

logger = logging.getLogger(__name__)

# Number of tokens of the windows in which `measure` scores predictions.
_SCORED_TOKENS = 4096


def calibrate(
    model: PreTrainedModel,
    texts: Any,
    *,
    tokenizer: Any = None,
    granularity: Granularity = "head",
    center: bool = True,
    dtype: str | torch.dtype | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    margin: float = 1.0,
    max_tokens: int = 2**18,
    max_length: int = 1024,
    max_position: int | None = None,
    batch_size: int = 1,
    text_column: str = "text",
    chat_template: bool | None = None,
    held_out: int = 4096,
    progress: bool = True,
) -> KVScales:
    """Calibrate static scales of a model on texts. The `report` of the result shows their quality.

    The model reads the texts, and K (after RoPE) and V are observed where they would be stored. A
    scale covers the largest observed magnitude (see `calibration.choose`). The result does not
    depend on the order of the texts, unless reading stops at `max_tokens`. Texts are checked before
    the model runs.

    Args:
        model: A language model, on any device or devices.
        texts: The path of a `.txt` or `.jsonl` file, or an iterable (a list, a `datasets` dataset)
            of texts, conversations or token ids (see `read_corpus`).
        tokenizer: The tokenizer of the model. None loads the tokenizer from the model's path.
        granularity: One scale per layer and side ("tensor"), per KV head ("head"), or per head
            and channel ("channel"). For dynamic scales, see `choose_plan`.
        center: Whether to try subtracting the mean of K. A layer keeps the center if it helps. Only
            files in the format "hf_fp8kv" store it. Latents (MLA) get one only from an explicit
            plan.
        dtype: The format to choose scales for. Any format can use them. None means "fp8_e4m3".
        plan: The 8-bit storage plan. "measured" chooses the format, rotation and center of least
            cost. Any plan of a cache is accepted, and its centers are calibrated with the scales.
            The scales then only fit caches with this plan, and other servers cannot use them. None
            leaves the format to the cache, without rotation.
        margin: Multiplier of the largest magnitude. 1.1 leaves 10 % of headroom for other texts.
        max_tokens: Maximum number of tokens that are read.
        max_length: Maximum number of tokens in a window.
        max_position: Last position at which centers are tested. The report lists far positions
            separately. Pass the longest context that you will use. None means
            8 * max_length, or the number of positions of the model if that is less.
        batch_size: Number of windows in a call.
        text_column: The column of a row that has the text.
        chat_template: None renders conversations with the tokenizer's chat template. True also
            renders plain texts, as a user's turn. False rejects conversations.
        held_out: Number of tokens that are used only for the report. 0 disables the quality report.
        progress: Whether to show a progress bar with tokens per second on stderr.

    Raises:
        ConfigError: An argument, a text, or the model cannot be used.
    """
    model = find_base_model(model)
    layers = find_paged_layers(model)
    options = _make_options(model, granularity, center, dtype, margin, plan)
    check_count("batch_size", batch_size)
    max_position = get_last_position(model, max_length, max_position)
    corpus = read_model_corpus(
        model, texts, tokenizer, max_tokens=max_tokens, max_length=max_length, held_out=held_out,
        text_column=text_column, chat_template=chat_template,
    )  # fmt: skip
    windows = corpus.windows
    run = _run_model(model, layers, options, progress, windows, batch_size, max_position)
    with run as (job, ranges, partners, positions):
        _warn_of_incomplete_layers(job, ranges, partners)
        positions, near_sums, far_sums = _collect_samples(job, windows, partners, positions)
        may_rotate = bool(positions.skip_reason) and has_rope(model)
        candidates = {
            index: choose.list_candidates(
                index, layer_ranges, partners[index], options, near_sums.get(index),
                far_sums.get(index), may_rotate=may_rotate,
            )
            for index, layer_ranges in ranges.items()
        }  # fmt: skip
        scaled_candidates = choose.make_scales(job, windows, candidates)
        source, digest = f"calibrated on {corpus.num_tokens} tokens", digest_decoder(model)
        fallback, best_scales = (
            KVScales(x, model_type=model.config.model_type, origin=source, weights_digest=digest)
            for x in choose.choose_scales(job, windows, positions, scaled_candidates, source)
        )
        scales, note = scoring.select_scales(job, windows, fallback, best_scales, positions)
        unseen = corpus.held_out_windows
        counts = {"num_texts": corpus.num_texts, "num_tokens": corpus.num_tokens}
        report = make_report(job, scales, ranges, note, unseen, unseen, positions, **counts)
    return replace(scales, report=report)


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
    """Measure the quality of scales for a model on texts, as in the report of `calibrate`.

    Args:
        model, texts, tokenizer, max_tokens, max_length, max_position: As in `calibrate`.
        text_column, chat_template, progress: As in `calibrate`.
        scales: Scales from any source, or a path, a folder or a repository of the Hub.
        dtype: The format of the stored values. None means "fp8_e4m3", or the plan of the scales.

    Raises:
        ConfigError: As in `calibrate`.
        ScaleError: The scales belong to a different model.
    """
    model = find_base_model(model)
    layers = find_paged_layers(model)
    options = _make_options(model, "head", False, dtype, 1.0, None)
    max_position = get_last_position(model, max_length, max_position)
    if not isinstance(loaded_scales := resolve_scales(scales), KVScales):
        raise ConfigError(
            f"scales: expected KVScales, a path or a repository id, got {scales!r}. "
            "For a constant scale in each layer, pass KVScales.uniform(num_layers)"
        )
    warn_if_stale(model, loaded_scales)
    cache_dtype = dtype if loaded_scales.plan is not None else options.fmt.name
    # Raises an error if the scales do not fit, for example if layers are missing.
    FP8PagedCache(model.config, dtype=cache_dtype, **scoring.make_scales_kwargs(loaded_scales))
    corpus = read_model_corpus(
        model, texts, tokenizer, max_tokens=max_tokens, max_length=max_length, held_out=0,
        text_column=text_column, chat_template=chat_template,
    )  # fmt: skip
    windows, scored_windows = corpus.windows, scoring.take_windows(corpus.windows, _SCORED_TOKENS)
    run = _run_model(model, layers, options, progress, windows, 1, max_position)
    with run as (job, ranges, _, positions):
        note = "Centers were not tried, because the scales were given."
        return make_report(job, loaded_scales, ranges, note, windows, scored_windows, positions)


def _make_options(
    model: PreTrainedModel, granularity: object, center: object, dtype: Any, margin: object,
    plan: Any,
) -> CalibrationOptions:  # fmt: skip
    if granularity not in get_args(Granularity):
        raise ConfigError(
            f"granularity: expected one of {', '.join(get_args(Granularity))}, got {granularity!r}"
        )
    if not isinstance(center, bool):
        raise ConfigError(f"center: expected True or False, got {center!r}")
    if plan is not None and dtype is not None:
        raise ConfigError(
            f"dtype: expected None, because a plan has the format of each layer, got {dtype!r}. "
            "Omit dtype, or pass a plan such as LayerPlan.parse('fp8_e3m4', 'fp8_e3m4')"
        )
    layer_plans: Any = plan
    if plan is not None and plan != "measured":
        parsed: Any = parse_plan(plan)
        parsed = parsed.plan if isinstance(parsed, StoragePlan) else parsed
        options = CacheOptions(plan=parsed, scales=None)
        layer_plans = FP8PagedCache.from_options(model.config, options, ()).plan
        if not center and any(layer_plan.k.centered for layer_plan in layer_plans.values()):
            raise ConfigError(
                "center: expected True for a plan with centers, got False. Omit center"
            )
    name = parse_dtype(STATIC_DTYPE if dtype is None else dtype)
    if name == AUTO:
        raise ConfigError(f"dtype: expected an 8-bit format, got {dtype!r}, which needs no scales")
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
    if not is_number or not 1.0 <= margin <= 16.0:  # type: ignore[operator]
        raise ConfigError(
            f"margin: expected a factor from 1 to 16, got {format_value(margin)}. With less than "
            "1, observed values would saturate"
        )
    is_latent = caches_latents(model.config.get_text_config(decoder=True))
    fmt, center = FORMATS[name], center and not is_latent
    return CalibrationOptions(granularity, fmt, float(margin), center, layer_plans, is_latent)  # type: ignore[arg-type]


def _collect_samples(
    job: Job, windows: Sequence[torch.Tensor], partners: Mapping[int, Partners],
    positions: FarPositions,
) -> tuple[FarPositions, dict[int, TensorDict], dict[int, TensorDict]]:  # fmt: skip
    """Return the far positions, with a reason if they fail, and the sums for `find_centers`."""
    if not job.options.center and job.options.plan is None:
        return positions, {}, {}
    batches = make_batches(stages.sample_windows(windows), 1)
    near_sums = stages.collect_ranges(job, "sample", batches, partners, observe_queries)
    batches = stages.sample_far_windows(windows, positions)
    try:
        far_sums = stages.collect_ranges(job, "far sample", batches, partners, observe_queries)
    except ConfigError as error:
        logger.warning("positions up to %d are not tried: %s", positions.last_position, error)
        reason = f"the model cannot be run there: {error}"
        return replace(positions, skip_reason=reason), near_sums, {}
    return positions, near_sums, far_sums


def _warn_of_incomplete_layers(
    job: Job, ranges: Mapping[int, TensorDict], partners: Mapping[int, Partners]
) -> None:
    missing_layers = sorted(job.layers - set(ranges))
    if missing_layers:
        logger.warning(
            "layers %s stored nothing while the model read the texts, and have no scales. A cache "
            "with these scales needs skip_layers=%s", format_list(missing_layers), missing_layers,
        )  # fmt: skip
    unpaired_layers = sorted(index for index, layer in partners.items() if layer.k is None)
    if unpaired_layers and job.options.granularity == "channel":
        logger.warning(
            "layers %s: K has a scale for each head, not for each channel, because the channels "
            "that are rotated together are unknown: the model takes no position_ids",
            format_list(unpaired_layers),
        )


@contextmanager
def _run_model(
    model: PreTrainedModel, layers: frozenset[int], options: CalibrationOptions, progress: bool,
    windows: Sequence[torch.Tensor], batch_size: int, max_position: int,
) -> Iterator[tuple[Job, dict[int, TensorDict], dict[int, Partners], FarPositions]]:  # fmt: skip
    """Read the windows in eval mode. Yield the job, ranges, partners and far positions."""
    with eval_mode(model), tqdm(disable=not progress, unit="tok", unit_scale=True) as progress_bar:
        job = Job(model, layers, options, progress_bar)
        partners = measure_partners(model, windows[0], layers)
        ranges = stages.collect_ranges(job, "text", make_batches(windows, batch_size), partners)
        reason = (
            "is an encoder-decoder" if model.config.is_encoder_decoder else "takes no position_ids"
        )
        failure = f"{type(model).__name__} cannot be run at other positions: it {reason}"
        has_partners = any(layer.k is not None for layer in partners.values())
        yield job, ranges, partners, FarPositions(max_position, "" if has_partners else failure)
        progress_bar.set_description("done")
