"""Choose the storage plan of a model: for each layer, the formats of least cost for attention.

The model reads the same tokens at several positions, and the costs at all positions are added.
docs/architecture.md has the reasons ("A plan is chosen once for a model").
"""

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..attention.switching import eval_mode
from ..cache.plans import parse_plan
from ..errors import ConfigError
from ..formats import ADAPTIVE, AUTO, DEFAULT_DTYPE, FORMATS, LayerPlan, SidePlan
from ..formats.codec import compute_dynamic_errors, compute_rounding_error, search_scale
from ..formats.rotation import rotate
from ..modeling.model_support import accepts_argument, caches_latents, find_base_model
from ..scales.kv_scales import StoragePlan
from ..scales.layer_scales import LayerScales
from ..utils.digests import digest_decoder
from .choose import center_and_rotate, pick_candidate
from .observe import Batch, find_paged_layers, nan_error
from .protection import protect_layers
from .queries import Queries, observe_queries
from .rope import find_max_positions, has_rope
from .stages import sample_windows
from .texts import read_model_corpus

logger = logging.getLogger(__name__)

_MAX_WINDOW_TOKENS = 128  # maximum number of tokens of a window
_FIRST_POSITIONS = (0, 1024, 4096, 16384)  # first positions of a window, if the model has them
# Maximum ratio of a format's cost to the fallback's cost in each head. Costs are computed with the
# smallest scales. A cache searches for the scales of K with the least error, which reduce the cost
# of E3M4 by a quarter for Gaussian values, and by two thirds if two channels are 50 times larger.
# If the ratio of K is above a third in a head, costs are computed again with the scales of a cache.
_MAX_COST_RATIO, _CERTAIN_COST_RATIO, _MAX_SEARCHED_COST_RATIO = 1 / 2, 1 / 3, 3 / 4
_FALLBACK = SidePlan(DEFAULT_DTYPE)
_ROTATED_PLANS = SidePlan("fp8_e2m5", rotated=True), SidePlan("int8", rotated=True)
_PLAN_ATTRIBUTE = "_hf_fp8kv_plan"  # name of the model's attribute that holds its plan

# K and V of a layer, `[N, Hkv, D]`, in one window at one position, and a sample of its queries.
_LayerStates = tuple[Tensor, Tensor, Queries | None]


def choose_plan(
    model: PreTrainedModel, texts: Any = None, *, tokenizer: Any = None, text_column: str = "text",
    chat_template: bool | None = None, max_extra_bytes: float = 0.04,
) -> StoragePlan:  # fmt: skip
    """Choose the storage plan of a model: the format, rotation and center of each layer.

    The model reads several hundred random tokens, or several thousand of `texts`. If its
    predictions then lose much by a prompt that is stored before it is read, K and V of the layers
    that cause this keep the model's dtype. The plan's `protection` has the losses and the layers.
    The plan is for this model in any cache, engine or process. The same weights give the same plan
    on one machine.

    Args:
        model: A language model in one process, on any device or devices.
        texts: As in `calibrate`. A sample of their windows is read. None means a fixed sequence of
            random token ids.
        tokenizer, text_column, chat_template: As in `calibrate`, for `texts`.
        max_extra_bytes: Maximum share of bytes that layers in the model's dtype add to a cache of
            4,096 tokens of 16 bits. 0 keeps all layers in 8 bits.

    Raises:
        ConfigError: An argument, a text, or the model cannot be used.
    """
    if isinstance(max_extra_bytes, bool) or not 0 <= max_extra_bytes <= 1:
        raise ConfigError(
            f"max_extra_bytes: expected a share from 0 to 1, got {max_extra_bytes!r}. Leave it out "
            "for 0.04"
        )
    model = find_base_model(model)
    layers = find_paged_layers(model)
    vocab_size = getattr(model.get_input_embeddings(), "num_embeddings", 1)
    generator = torch.Generator("cpu").manual_seed(0)
    length = min(_MAX_WINDOW_TOKENS, find_max_positions(model))
    random_window = torch.randint(vocab_size, (length,), generator=generator, device="cpu")
    windows = [random_window]
    if texts is not None:
        corpus = read_model_corpus(
            model, texts, tokenizer, max_tokens=2**18, max_length=_MAX_WINDOW_TOKENS, held_out=0,
            text_column=text_column, chat_template=chat_template,
        )  # fmt: skip
        windows = sample_windows(corpus.windows)
    num_tokens = sum(map(len, windows))
    if texts is not None and num_tokens < _MAX_WINDOW_TOKENS:
        logger.warning(
            "texts: the plan is chosen on %d tokens, fewer than the %d random tokens that are used "
            "without texts. Pass more texts, or None", num_tokens, _MAX_WINDOW_TOKENS,
        )  # fmt: skip
    with eval_mode(model):
        states_by_call, num_positions = _read_states(model, layers, windows)
    is_latent = caches_latents(model.config.get_text_config(decoder=True))
    may_transform_k = num_positions > 1 or not has_rope(model)
    source = f"chosen on {num_tokens} {'random tokens' if texts is None else 'tokens of text'}"
    layer_scales, k_costs = {}, {}
    for index in sorted(layers):
        center, layer_plan = None, LayerPlan(_FALLBACK, SidePlan(AUTO) if is_latent else _FALLBACK)
        k_costs[index] = 0.0  # unknown
        all_states = [states.pop(index) for states in states_by_call if index in states]
        if all_states and all(queries is not None for *_, queries in all_states):
            center, layer_plan, k_costs[index] = _choose_layer_plan(
                index, all_states, may_transform_k, is_latent
            )
        layer_scales[index] = LayerScales(None, None, center, source, layer_plan)
    plan = StoragePlan(
        layer_scales, model_type=model.config.model_type, origin=source,
        weights_digest=digest_decoder(model),
    )  # fmt: skip
    return protect_layers(model, plan, random_window, k_costs, max_extra_bytes)


def resolve_plan(model: PreTrainedModel, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords to pass to a cache of this model, with a plan instead of "adaptive".

    dtype="adaptive" chooses the plan on random tokens. The model keeps this plan until its weights
    change. A plan in a file is read.

    Raises:
        ConfigError: `plan` is given with dtype="adaptive", or `choose_plan` or `parse_plan` fails.
    """
    plan = keywords.get("plan")
    if keywords.get("dtype") != ADAPTIVE:
        return {**keywords, "plan": parse_plan(plan)}
    if plan is not None:
        raise ConfigError(
            f"plan: expected None with dtype={ADAPTIVE!r}, got {plan!r}. Pass one of them"
        )
    model_plan: StoragePlan | None = vars(model).get(_PLAN_ATTRIBUTE)
    if model_plan is None or model_plan.made_for(model) is False:
        model_plan = vars(model)[_PLAN_ATTRIBUTE] = choose_plan(model)
    return {**keywords, "dtype": None, "plan": model_plan}


def _read_states(
    model: PreTrainedModel, layers: frozenset[int], windows: Sequence[Tensor]
) -> tuple[list[dict[int, _LayerStates]], int]:
    """Return the states of layers for each window and position, and the number of positions."""
    first_positions: list[int | None] = [None]
    if accepts_argument(type(model), "position_ids") and not model.config.is_encoder_decoder:
        max_first_position = find_max_positions(model) - max(map(len, windows))
        first_positions += [x for x in _FIRST_POSITIONS[1:] if x <= max_first_position]
    states_by_call: list[dict[int, _LayerStates]] = []

    def add_states(index: int, k: Tensor, v: Tensor, queries: Queries | None) -> None:
        states_by_call[-1][index] = k, v, queries

    for window in windows:
        for first_position in first_positions:
            states_by_call.append({})
            try:
                observe_queries(model, Batch((window,), first_position), layers, add_states)
            except ConfigError as error:
                if first_position is None:
                    raise
                logger.warning("positions from %d are not tried: %s", first_position, error)
                first_positions = first_positions[: first_positions.index(first_position)]
                states_by_call.pop()
                break
    return states_by_call, len(first_positions)


def _choose_layer_plan(
    index: int, all_states: Sequence[_LayerStates], may_transform_k: bool, is_latent: bool
) -> tuple[Tensor | None, LayerPlan, float]:
    """Return the center of K on the CPU or None, the plan of least cost, and the cost of its K."""
    plans = [_FALLBACK, *_ROTATED_PLANS]
    centered_plans = [] if is_latent else [replace(plan, centered=True) for plan in plans]
    k_plans = [*centered_plans, *plans] if may_transform_k else [_FALLBACK]
    v_plans = [] if is_latent else plans
    num_k_plans = len(k_plans)
    formats = tuple(FORMATS[plan.format] for plan in (*k_plans, *v_plans))
    center = torch.cat([k for k, *_ in all_states]).mean(0, dtype=torch.float32)
    costs = []
    for _, group in groupby(all_states, lambda states: len(states[0])):
        k, v, queries = zip(*group, strict=True)
        keys = _transform_states(torch.stack(k).float(), center, k_plans)
        values = keys[:0] if is_latent else _transform_states(torch.stack(v).float(), None, v_plans)
        if keys.shape[1:] == values.shape[1:]:
            errors = compute_dynamic_errors(torch.cat([keys, values]), formats)
            k_errors, v_errors = errors[:num_k_plans], errors[num_k_plans:]
        else:
            k_errors = compute_dynamic_errors(keys, formats[:num_k_plans])
            v_errors = compute_dynamic_errors(values, formats[num_k_plans:])
        q, weights = torch.stack([x.q for x in queries]), torch.stack([x.weights for x in queries])
        # Rotated queries and rotated errors have the same products. Rotation changes no cost of V.
        q = torch.stack([q, q @ _make_hadamard(q.shape[-1], q.device)])
        sample = Queries(q[[int(plan.rotated) for plan in k_plans]], weights)
        k_cost = sample.compute_cost("k", k_errors, "head")
        v_cost = sample.compute_cost("v", v_errors, "head")
        costs.append(torch.cat([k_cost, v_cost]).sum((1, 3)))
    total_costs = torch.stack(costs).sum(0).tolist()  # once, because it waits for a GPU
    if not all(map(math.isfinite, chain(*total_costs))):
        raise nan_error(index, "K and V")
    k_costs, v_costs = total_costs[:num_k_plans], total_costs[num_k_plans:]
    k_index = pick_candidate(k_costs, _MAX_COST_RATIO)
    if pick_candidate([k_costs[0], k_costs[k_index]], _CERTAIN_COST_RATIO) == 0 < k_index:
        searched_costs = _search_k_costs(all_states, center, [k_plans[0], k_plans[k_index]])
        k_index *= pick_candidate(searched_costs, _MAX_SEARCHED_COST_RATIO)
    if k_index == 0:  # a center may cost more than no center
        plain_index = k_plans.index(_FALLBACK)
        k_index = plain_index * pick_candidate([k_costs[0], k_costs[plain_index]], 1.0)
    k_plan = k_plans[k_index]
    v_plan = SidePlan(AUTO) if is_latent else v_plans[pick_candidate(v_costs, _MAX_COST_RATIO)]
    used_center = center.cpu() if k_plan.centered else None
    return used_center, LayerPlan(k_plan, v_plan), sum(k_costs[k_index])


def _search_k_costs(
    all_states: Sequence[_LayerStates], center: Tensor, plans: Sequence[SidePlan]
) -> list[list[float]]:
    """Return the cost of K by plan and head, with the scales of a cache."""
    costs = [torch.zeros(len(center), device="cpu") for _ in plans]
    for k, _, queries in all_states:
        assert queries is not None
        for cost, plan in zip(costs, plans, strict=True):
            x = center_and_rotate(k, center if plan.centered else None, rotated=plan.rotated)
            fmt = FORMATS[plan.format]
            error = compute_rounding_error(x, search_scale(x, fmt).float()[..., None], fmt)
            q = rotate(queries.q) if plan.rotated else queries.q
            cost += replace(queries, q=q).compute_cost("k", error, "head")[:, 0].cpu()
    return [cost.tolist() for cost in costs]


def _transform_states(x: Tensor, center: Tensor | None, plans: Sequence[SidePlan]) -> Tensor:
    """Return the values that each plan scales, `[plans, R, N, Hkv, D]`. `x` is K or V."""
    if len(plans) == 1:
        return x[None]
    variants = x[None] if center is None else torch.stack([x, x - center])
    variants = torch.cat([variants, variants @ _make_hadamard(x.shape[-1], x.device)])
    return variants[[plan.centered + len(variants) // 2 * plan.rotated for plan in plans]]


@functools.cache
def _make_hadamard(dim: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return rotate(torch.eye(dim, device=device))
