"""Calibrate static scales: the largest magnitude on texts, times a margin, divided by 448.

A scale per head of a layer without a center is then chosen among the 16 scales of an octave, by the
cost of rounding errors for attention. With a center this increases the KL of E3M4.

K and V are scaled as they are stored, after the center and the rotation of a plan. RoPE rotates K
with the position, so a sample of the texts is also read at far positions.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from ..attention.switching import eval_mode
from ..cache.cache import FP8PagedCache
from ..cache.options import CacheOptions
from ..cache.plans import Plan, parse_plan
from ..errors import ConfigError
from ..formats import FORMATS, STATIC_DTYPE, LayerPlan, SidePlan
from ..formats.codec import SEARCH_STEPS, compute_rounding_error
from ..formats.rotation import rotate
from ..modeling.model_support import caches_latents, find_base_model, without_replacement_note
from ..scales.kv_scales import KVScales, StoragePlan
from ..scales.layer_scales import Granularity, LayerScales
from ..utils.arguments import check_count
from ..utils.digests import digest_decoder
from ..utils.text import format_list, format_value
from .observe import center_and_rotate, find_paged_layers, make_nonfinite_error, observe
from .plan_choice import E4M3_PLAN, read_states, sample_windows
from .queries import LayerStates
from .texts import read_model_windows

logger = logging.getLogger(__name__)

_MAX_SAMPLE_TOKENS = 128  # maximum number of tokens of a window that is read at far positions
_MAX_MARGIN = 16.0
# The axes of `[Hkv, D]` that share a scale.
_AXES: dict[Granularity, tuple[int, ...]] = {"tensor": (0, 1), "head": (1,), "channel": ()}
# The largest magnitudes of K and V of a layer, each `[Hkv, D]`, float32, on the CPU.
_LayerAmax = tuple[Tensor, Tensor]


@without_replacement_note
def calibrate(
    model: PreTrainedModel,
    texts: Any,
    *,
    tokenizer: Any = None,
    granularity: Granularity = "head",
    center: bool = True,
    plan: Plan | str | os.PathLike[str] | None = None,
    margin: float = 1.0,
    max_tokens: int = 2**18,
    max_length: int = 1024,
    batch_size: int = 1,
    text_column: str = "text",
    chat_template: bool | None = None,
    progress: bool = True,
) -> KVScales:
    """Calibrate static scales of a model on texts.

    The model reads the texts, and K (after RoPE) and V are observed where they would be stored. A
    scale is the largest observed magnitude times `margin`, divided by 448, the largest value of
    E4M3. A scale per head without a center is up to twice as large, if this costs attention less.
    Caches convert scales for other formats. The result does not depend on the order of the texts,
    unless reading stops at `max_tokens`. Texts are checked before the model runs.

    Args:
        model: A language model, on any device or devices.
        texts: The path of a `.txt` or `.jsonl` file, or an iterable (a list, a `datasets` dataset)
            of texts, conversations or token ids (see `read_windows`).
        tokenizer: The tokenizer of the model. None loads the tokenizer from the model's path.
        granularity: One scale per layer and side ("tensor"), per KV head ("head"), or per head
            and channel ("channel"). Rotated values have one scale per head instead of per channel.
        center: Whether to subtract the mean of K over the texts from K. Only files in the format
            "hf_fp8kv" store it. Latents (MLA), and K of models with RoPE that take no
            `position_ids`, only get a center from a plan. With a plan, True leaves the choice to
            the plan.
        plan: The storage plan that caches will use, as the argument of a cache, such as
            `choose_plan(model, texts)`. Its centers are kept, and missing centers are computed.
            None leaves the format to the cache, without rotation.
        margin: Multiplier of the largest magnitude, from 1 to 16. 1.1 leaves 10 % of headroom for
            other texts.
        max_tokens: Maximum number of tokens that are read.
        max_length: Maximum number of tokens in a window.
        batch_size: Number of windows in a call.
        text_column: The column of a row that has the text.
        chat_template: None renders conversations with the tokenizer's chat template. True also
            renders plain texts, as a user's turn. False refuses conversations.
        progress: Whether to show a progress bar with tokens per second on stderr.

    Raises:
        ConfigError: An argument, a text, or the model cannot be used.
    """
    model = find_base_model(model)
    layer_indices = find_paged_layers(model)
    _check_options(granularity, center, margin)
    check_count("batch_size", batch_size)
    layer_plans, centers = _parse_plan(model, plan, center=center)
    windows = read_model_windows(
        model,
        texts,
        tokenizer,
        max_tokens=max_tokens,
        max_length=max_length,
        text_column=text_column,
        chat_template=chat_template,
    )
    num_tokens = sum(map(len, windows))
    with (
        eval_mode(model),
        tqdm(total=num_tokens, disable=not progress, unit="tok", unit_scale=True) as bar,
    ):
        states_by_layer, may_transform_k = read_states(
            model,
            layer_indices,
            [window[:_MAX_SAMPLE_TOKENS] for window in sample_windows(windows)],
        )
        is_latent = caches_latents(model.config.get_text_config(decoder=True))
        may_center = center and plan is None and may_transform_k and not is_latent
        for index, layer_states in states_by_layer.items():
            needs_center = layer_plans[index].k.centered if layer_plans else may_center
            if needs_center and index not in centers and layer_states:
                centers[index] = torch.cat([k.float() for k, *_ in layer_states]).mean(0).cpu()
        # Without a plan, K and V may have any format, and are not rotated.
        used_plans = layer_plans or dict.fromkeys(layer_indices, E4M3_PLAN)
        layer_amax: dict[int, _LayerAmax] = {}

        def observe_layer(index: int, k: Tensor, v: Tensor) -> None:
            amax = _compute_amax(index, k, v, used_plans[index], centers.get(index))
            if (old_amax := layer_amax.get(index)) is not None:
                amax = torch.maximum(old_amax[0], amax[0]), torch.maximum(old_amax[1], amax[1])
            layer_amax[index] = amax

        for index, layer_states in states_by_layer.items():
            for k, v, _ in layer_states:
                observe_layer(index, k, v)
        for start in range(0, len(windows), batch_size):
            batch = windows[start : start + batch_size]
            observe(model, batch, layer_indices, observe_layer)
            bar.update(sum(map(len, batch)))
    if missing_layers := sorted(layer_indices - layer_amax.keys()):
        logger.warning(
            "layers %s stored nothing while the model read the texts, and have no scales. A cache "
            "with these scales needs skip_layers=%s",
            format_list(missing_layers),
            missing_layers,
        )
    if granularity == "channel" and not may_transform_k:
        logger.warning(
            "K has a scale for each head, not for each channel, because a channel may leave its "
            "range at far positions, at which %s cannot be run",
            type(model).__name__,
        )
    source = f"calibrated on {num_tokens} tokens"
    # A rotation mixes the channels of a head, so they share a scale.
    mixed_granularity: Granularity = "head" if granularity == "channel" else granularity
    layer_scales = {}
    for index, (k_amax, v_amax) in sorted(layer_amax.items()):
        k_plan, v_plan = used_plans[index]
        has_mixed_k = k_plan.rotated or not may_transform_k
        k_scale = compute_scale(k_amax * margin, mixed_granularity if has_mixed_k else granularity)
        v_scale = compute_scale(
            v_amax * margin, mixed_granularity if v_plan.rotated else granularity
        )
        layer_states = states_by_layer[index]
        has_queries = all(queries is not None for *_, queries in layer_states)
        if granularity == "head" and index not in centers and has_queries:
            k_scale = search_head_scales("k", k_scale, layer_states, k_plan)
            v_scale = search_head_scales("v", v_scale, layer_states, v_plan)
        layer_scales[index] = LayerScales(
            k_scale, v_scale, centers.get(index), source, layer_plans.get(index)
        )
    return KVScales(
        layer_scales,
        model_type=model.config.model_type,
        origin=source,
        weights_digest=digest_decoder(model),
    )


def compute_scale(amax: Tensor, granularity: Granularity) -> Tensor:
    """Return the smallest scale with which nothing saturates, in the unit of E4M3.

    `amax` is `[Hkv, D]`, the largest magnitudes. The result is `[]`, `[Hkv, 1]` or `[Hkv, D]`.
    """
    if axes := _AXES[granularity]:
        amax = amax.amax(axes, keepdim=True)
    # Any scale can store zeros, so zeros get the largest magnitude, or 1.
    max_amax = amax.max()
    amax = torch.where(amax > 0, amax, torch.where(max_amax > 0, max_amax, 1.0))
    scale = amax / FORMATS[STATIC_DTYPE].max
    return scale.reshape(()) if granularity == "tensor" else scale


def search_head_scales(
    side: str, min_scale: Tensor, layer_states: Sequence[LayerStates], plan: SidePlan
) -> Tensor:
    """Return the scale of each head of K or V that costs least, `[Hkv, 1]`, in the unit of E4M3.

    The scales of the octave from `min_scale` on are tried. `layer_states` have queries.
    """
    if plan.is_auto:
        return min_scale
    fmt = FORMATS[plan.format]
    scales = [min_scale * 2.0 ** (step / SEARCH_STEPS) for step in range(SEARCH_STEPS)]
    costs = torch.zeros(SEARCH_STEPS, len(min_scale), device="cpu")
    for k, v, queries in layer_states:
        assert queries is not None
        states = center_and_rotate(k if side == "k" else v, None, rotated=plan.rotated)
        # Rotated queries and errors have the same products. Rotation changes no cost of V.
        q = rotate(queries.q) if plan.rotated and side == "k" else queries.q
        transformed_queries = replace(queries, q=q)
        for cost, scale in zip(costs, scales, strict=True):
            format_scale = (scale * fmt.scale_from_e4m3).to(states.device)
            error = compute_rounding_error(states, format_scale, fmt)
            cost += transformed_queries.compute_cost(side, error).cpu()
    steps = costs.argmin(0)  # the first of several equal costs
    return torch.stack(scales)[steps, torch.arange(len(min_scale), device="cpu")]


def _check_options(granularity: object, center: object, margin: object) -> None:
    if granularity not in get_args(Granularity):
        raise ConfigError(
            f"granularity: expected one of {', '.join(get_args(Granularity))}, got {granularity!r}"
        )
    if not isinstance(center, bool):
        raise ConfigError(f"center: expected True or False, got {center!r}")
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
    if not is_number or not 1.0 <= margin <= _MAX_MARGIN:  # type: ignore[operator]
        raise ConfigError(
            f"margin: expected a factor from 1 to {_MAX_MARGIN:g}, got {format_value(margin)}. "
            "With less than 1, observed values would saturate"
        )


def _parse_plan(
    model: PreTrainedModel, plan: Any, *, center: bool
) -> tuple[dict[int, LayerPlan], dict[int, Tensor]]:
    """Return the plans of all layers, or {} without a plan, and the centers that the plan has."""
    parsed_plan = parse_plan(plan)
    centers: dict[int, Tensor] = {}
    if parsed_plan is None:
        return {}, centers
    if isinstance(parsed_plan, StoragePlan):
        centers = {
            index: layer.k_center
            for index, layer in parsed_plan.layers.items()
            if layer.k_center is not None
        }
        parsed_plan = parsed_plan.plan or {}
    options = CacheOptions(plan=parsed_plan, scales=None)
    layer_plans = FP8PagedCache.from_options(model.config, options, ()).plan
    if not center and any(layer_plan.k.centered for layer_plan in layer_plans.values()):
        raise ConfigError("center: expected True for a plan with centers, got False. Omit center")
    return layer_plans, centers


def _compute_amax(
    index: int, k: Tensor, v: Tensor, plan: LayerPlan, center: Tensor | None
) -> _LayerAmax:
    """Return the largest magnitudes of the values that a layer scales.

    Raises:
        ConfigError: K or V has NaN or infinity, or the layer has no V.
    """
    if not v.shape[-1]:
        raise ConfigError(
            f"layer {index}: expected keys and values, got latents without a RoPE part, so there "
            "is no V. Use dynamic scales (scales=None), which work for every layer"
        )
    k_amax = center_and_rotate(k, center, rotated=plan.k.rotated).abs().amax(0).cpu()
    v_amax = center_and_rotate(v, None, rotated=plan.v.rotated).abs().amax(0).cpu()
    for side, amax in (("K", k_amax), ("V", v_amax)):
        if not torch.isfinite(amax).all():
            raise make_nonfinite_error(index, side)
    return k_amax, v_amax
