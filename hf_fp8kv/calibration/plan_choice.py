"""Choose the storage plan of a model: for each layer, the formats of least cost for attention.

The model reads the same tokens at several positions, and the costs at all positions are added.
docs/architecture.md has the reasons ("A plan is chosen once for a model").
"""

import logging
import math
import numbers
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import constants
from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves_with_path
from transformers import PreTrainedModel

from ..attention.switching import eval_mode
from ..cache.cache import FP8PagedCache
from ..cache.plans import Plan, parse_plan
from ..errors import ConfigError
from ..formats import ADAPTIVE, AUTO, DEFAULT_DTYPE, FORMATS, STATIC_DTYPE, LayerPlan, SidePlan
from ..formats.codec import compute_dynamic_scale, compute_rounding_error, search_scale
from ..formats.rotation import rotate
from ..modeling.identity import sample_model
from ..modeling.methods import ModelAttribute
from ..modeling.model_support import (
    accepts_argument,
    caches_latents,
    find_base_model,
    find_max_positions,
    get_field,
    has_rope,
    without_replacement_note,
)
from ..prefix.store import PrefixStore
from ..scales.kv_scales import StoragePlan
from ..scales.layer_scales import LayerScales
from ..utils.digests import compute_digest, digest_decoder
from .observe import center_and_rotate, find_input_device, find_paged_layers, make_nonfinite_error
from .plan_files import make_plan_path, read_plan, share_plan, write_plan
from .protection import MAX_BITS, MAX_KL, MAX_TRIES, MIN_BITS, protect_layers, widen_layers
from .queries import LayerStates, observe_queries
from .texts import read_model_windows

logger = logging.getLogger(__name__)

# Raise this number with every change after which the same weights may get another plan: of the
# tokens, positions, candidates, costs or protection. Plans in files have an older number then.
_CHOOSER_VERSION = 1
_MAX_WINDOW_TOKENS = 128  # maximum number of tokens of a window
_MAX_WINDOWS = 8  # maximum number of windows of texts that are read
_FIRST_POSITIONS = (0, 1024, 4096, 16384)  # first positions of a window, if the model has them
# Maximum ratio of a format's cost to the fallback's cost in each head, with the smallest scales.
_MAX_COST_RATIO = 1 / 2
# If the ratio of K is larger in a head, costs are computed again with the scales of a cache.
_RECHECK_COST_RATIO = 1 / 3
# Maximum ratio of K with these scales, which a cache searches for. They reduce the cost of E3M4 by
# a quarter for Gaussian values, and by two thirds if two channels are 50 times larger.
_MAX_SEARCHED_COST_RATIO = 3 / 4
_EPSILON = 1e-30  # smallest cost, so that no ratio of costs divides by zero
_FALLBACK = SidePlan(DEFAULT_DTYPE)
# Formats of K and V of six bits per value.
_NARROW_FORMATS = (("int6", "int6"), ("int8", "int4"))
# The plan with which six bits are compared.
E4M3_PLAN = LayerPlan(SidePlan(STATIC_DTYPE), SidePlan(STATIC_DTYPE))
_ROTATED_PLANS = SidePlan("fp8_e2m5", rotated=True), SidePlan("int8", rotated=True)
# Maximum share of bytes that layers in the model's dtype add to a cache, unless the caller sets it.
_MAX_EXTRA_BYTES = 0.04
# Maximum number of parameters times tokens that a CPU computes to choose the default plan. With two
# threads of a Xeon, Qwen2.5 0.5B (630 million parameters, float32, 8 passes) takes 9 seconds.
_MAX_CPU_PRODUCTS = 7e11
# Names of config fields with ids of special, image, audio and video tokens.
_SPECIAL_ID_FIELD = re.compile(r"(?:token|[be]o[sia]|pad|unk|mask)_(?:ids?|idx|index|indices)")
# Arguments that define how a cache stores K and V.
_STORAGE_ARGUMENTS = ("dtype", "key_dtype", "value_dtype", "plan", "scales")
# The choices for a model, and the plan of `freeze_plan`, by their bits.
_CHOICES = ModelAttribute[dict[float, "_PlanChoice"]]("_hf_fp8kv_plan_choice")
_FROZEN_PLAN = ModelAttribute[dict[float, "Plan | None"]]("_hf_fp8kv_frozen_plan")
# A choice changes the attention of its model for a while, so only one thread chooses at a time.
_choice_lock = threading.RLock()


class PassLimits(NamedTuple):
    """Numbers of passes over a window in which a plan is chosen."""

    num_positions: int = len(_FIRST_POSITIONS)  # maximum number of first positions
    max_tries: int = MAX_TRIES  # maximum number of protected sides that are tried


class _PlanChoice(NamedTuple):
    """The plan of a model without arguments about storage, or None if none can be chosen."""

    key: str  # digest of everything that the choice depends on
    plan: StoragePlan | None


@without_replacement_note
def choose_plan(
    model: PreTrainedModel,
    texts: Any = None,
    *,
    bits: float = MAX_BITS,
    tokenizer: Any = None,
    text_column: str = "text",
    chat_template: bool | None = None,
    max_extra_bytes: float = _MAX_EXTRA_BYTES,
) -> StoragePlan:
    """Choose the storage plan of a model: the format, rotation and center of each layer.

    The model reads 128 random tokens, or at most eight windows of 128 tokens of `texts`, each at up
    to four positions. If its predictions then lose much by a prompt that is stored before it is
    read, K and V of the layers that cause this keep the model's dtype. The plan's `protection` has
    the losses and the layers. The plan is for this model in any cache, engine or process. The same
    weights give the same plan on one machine.

    Caches of a model without an argument about storage use this plan. On a CPU, they choose it with
    fewer passes if parameters times the tokens of all passes exceed 7e11, or use fp8_e3m4 instead.
    This function and dtype="adaptive" have no such limit.

    Args:
        model: A language model in one process, on any device or devices.
        texts: As in `calibrate`. A sample of their windows is read. None means a fixed sequence of
            random token ids.
        bits: Maximum average bits of a value, from 6 to 8. Below 8, K and V of a layer are stored
            in int6, or in int8 and int4. With more than 6, layers with the largest errors get 8
            bits. A layer with more than 2.5 times the squared error of E4M3 in a head always gets
            8 bits.
        tokenizer, text_column, chat_template: As in `calibrate`, for `texts`.
        max_extra_bytes: Maximum share of bytes that layers in the model's dtype add to a cache of
            4,096 tokens of 16 bits. 0 keeps all layers in 8 bits. Below 8 bits, layers in 8 bits
            may add these bytes to 6 bits, if `bits` does not allow more.

    Raises:
        ConfigError: An argument, a text, or the model cannot be used, or `bits` are too few.
    """
    check_bits(bits)
    if isinstance(max_extra_bytes, bool) or not 0 <= max_extra_bytes <= 1:
        raise ConfigError(
            f"max_extra_bytes: expected a share from 0 to 1, got {max_extra_bytes!r}. Leave it out "
            "for 0.04"
        )
    model = find_base_model(model)
    if texts is None:
        return _choose(model, None, PassLimits(), max_extra_bytes, bits)
    find_paged_layers(model)  # raises an error before the texts are read
    windows = sample_windows(
        read_model_windows(
            model,
            texts,
            tokenizer,
            max_tokens=2**18,
            max_length=_MAX_WINDOW_TOKENS,
            text_column=text_column,
            chat_template=chat_template,
        )
    )
    num_tokens = sum(map(len, windows))
    if num_tokens < _MAX_WINDOW_TOKENS:
        logger.warning(
            "texts: the plan is chosen on %d tokens, fewer than the %d random tokens that are used "
            "without texts. Pass more texts, or None",
            num_tokens,
            _MAX_WINDOW_TOKENS,
        )
    return _choose(model, windows, PassLimits(), max_extra_bytes, bits)


def resolve_plan(
    model: PreTrainedModel, keywords: Mapping[str, Any], prefix_store: PrefixStore | None = None
) -> dict[str, Any]:
    """Return the keywords to pass to a cache of this model, with its plan.

    If any keyword defines the storage, the model does not run. A plan in a file is read. Otherwise
    the plan is, in this order: the plan of `freeze_plan`, the plan in the folder of `prefix_store`,
    the model's own plan. A model keeps its plan, in an attribute and in a file in `HF_HOME`, until
    weights, adapters, config, dtype or type of device change. If no plan can be chosen, a warning
    is logged once, and the storage is fp8_e3m4.

    Args:
        model: The model.
        keywords: Keywords of `FP8PagedCache`. dtype="adaptive" is the name of the default. With it,
            and with fewer than 8 bits, an error is raised if no plan can be chosen. `bits` of None
            means the bits of `freeze_plan`, or 8.
        prefix_store: Store of the cache. Its folder keeps the first plan for each model, so that
            later processes find pages.

    Raises:
        ConfigError: A keyword defines the storage, in addition to dtype="adaptive" or fewer bits,
            the bits are invalid, or `parse_plan` fails.
        Exception: Any error of the model, with dtype="adaptive" or fewer bits.
    """
    keywords = dict(keywords)
    bits = keywords.pop("bits", None)
    if bits is not None:
        check_bits(bits)
    is_adaptive = isinstance(keywords.get("dtype"), str) and keywords["dtype"] == ADAPTIVE
    if is_adaptive:
        del keywords["dtype"]  # the name of the default, which does not define the storage
    storage_names = [name for name in _STORAGE_ARGUMENTS if keywords.get(name) is not None]
    has_fewer_bits = bits is not None and bits < MAX_BITS
    must_choose = is_adaptive or has_fewer_bits
    if must_choose and storage_names:
        request = f"bits={bits}" if has_fewer_bits else f"dtype={ADAPTIVE!r}"
        raise ConfigError(
            f"{storage_names[0]}: expected None with {request}, got "
            f"{keywords[storage_names[0]]!r}. Pass only {request}, or only {storage_names[0]}"
        )
    if storage_names:
        return {**keywords, "plan": parse_plan(keywords.get("plan"))}
    is_split = getattr(keywords.get("tensor_parallel"), "size", 1) > 1
    frozen_plans: dict[float, Plan | None] = _FROZEN_PLAN.get(model) or {}
    if bits is None:
        bits = next(iter(frozen_plans), MAX_BITS)
    plan = frozen_plans.get(bits)
    if plan is None and (must_choose or bits not in frozen_plans):
        with _choice_lock:
            plan = _find_plan(model, prefix_store, bits, is_split=is_split, must_choose=must_choose)
    elif isinstance(plan, StoragePlan) and prefix_store is not None:
        # Later processes read the file. If it has another plan, the model keeps this plan.
        share_plan(_make_shared_path(model, prefix_store, bits), plan, prefix_store)
    return {**keywords, "dtype": DEFAULT_DTYPE if plan is None else None, "plan": plan}


def freeze_plan(model: PreTrainedModel, plan: Plan | None, bits: float = MAX_BITS) -> None:
    """Let `resolve_plan` return this plan for these bits, until `unfreeze_plan`.

    The plan stays even after weights change. None means fp8_e3m4 without a plan.
    """
    _FROZEN_PLAN.set(model, {bits: plan})


def unfreeze_plan(model: PreTrainedModel) -> None:
    """Undo `freeze_plan`, if it was called. A choice that failed can then be made again."""
    _FROZEN_PLAN.remove(model)
    if choices := _CHOICES.get(model):
        _CHOICES.set(
            model, {bits: choice for bits, choice in choices.items() if choice.plan is not None}
        )


def choose_passes(num_parameters: int, num_tokens: int, num_positions: int) -> PassLimits | None:
    """Return the passes in which a CPU may choose a plan, or None if even the fewest are too many.

    A pass computes `num_parameters` parameters times `num_tokens` tokens. Each position is a pass.
    Two more passes, and a pass for each try, protect layers. Tries are reduced first, and then
    positions, to two.

    Args:
        num_parameters: Number of parameters on the CPU.
        num_tokens: Number of tokens in a window.
        num_positions: Number of first positions that the model has.
    """
    num_passes = int(_MAX_CPU_PRODUCTS // max(num_parameters * num_tokens, 1))
    max_tries = min(num_passes - num_positions - 2, MAX_TRIES)
    if max_tries > 0:
        return PassLimits(max_tries=max_tries)
    if num_passes < min(num_positions, 2):
        return None
    return PassLimits(min(num_positions, num_passes), 0)


def check_bits(bits: object) -> None:
    """Raise ConfigError unless `bits` are an average that `choose_plan` accepts."""
    if (
        isinstance(bits, bool)
        or not isinstance(bits, numbers.Real)
        or not MIN_BITS <= float(bits) <= MAX_BITS
    ):
        raise ConfigError(
            f"bits: expected a number from 6 to 8, got {bits!r}. Leave it out for 8 bits"
        )


def _find_plan(
    model: PreTrainedModel,
    store: PrefixStore | None,
    bits: float,
    *,
    is_split: bool,
    must_choose: bool,
) -> StoragePlan | None:
    """Return the plan of `resolve_plan`, or None with a warning after an error.

    With `must_choose`, errors are raised, and passes are not limited. `is_split` is whether the
    caller splits the model over processes.
    """
    choices = _CHOICES.get(model) or {}
    choice = choices.get(bits, _PlanChoice("unknown", None))
    key = ""
    shared_path = None
    try:
        if store is not None:
            shared_path = _make_shared_path(model, store, bits)
            if (plan := read_plan(shared_path)) is not None:
                return plan
        passes = PassLimits() if must_choose else _choose_cpu_passes(model)
        is_split = not must_choose and (is_split or _is_split(model))
        facts = (_compute_key(model, bits), find_input_device(model).type, is_split)
        key = compute_digest(facts, passes)
        requested_key = compute_digest(facts, PassLimits())  # a plan of dtype="adaptive" is kept
        if choice.key not in (key, requested_key) or (must_choose and choice.plan is None):
            if is_split:
                raise ConfigError("the model is split over processes")
            if passes is None:
                raise ConfigError("a CPU would take too long for a model of this size")
            path = make_plan_path(Path(constants.HF_HOME) / "hf_fp8kv", key, model)
            plan = read_plan(path)
            if plan is None:
                plan = _choose(model, None, passes, _MAX_EXTRA_BYTES, bits)
                write_plan(path, plan)
            choice = _PlanChoice(key, plan)
    except Exception as error:
        if must_choose:
            raise
        if choice.key != key:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            logger.warning(
                "%s is stored as %s without a plan (%s). Pass plan=hf_fp8kv.choose_plan(model), or "
                "a saved plan",
                type(model).__name__,
                DEFAULT_DTYPE,
                reason,
            )
        choice = _PlanChoice(key, None)
    _CHOICES.set(model, {**choices, bits: choice})
    if store is None or choice.plan is None:
        return choice.plan
    return share_plan(shared_path, choice.plan, store)


def _compute_key(model: PreTrainedModel, bits: float) -> str:
    """Return a digest of the model, and of everything else that its plan depends on."""
    return compute_digest(
        sample_model(model),
        (type(model).__qualname__, _CHOOSER_VERSION, _MAX_EXTRA_BYTES, float(bits)),
    )


def _make_shared_path(model: PreTrainedModel, store: PrefixStore, bits: float) -> Path | None:
    """Return the file of the model's plan in a store's folder, for all types of devices."""
    return make_plan_path(store.path, _compute_key(model, bits), model)


def _choose_cpu_passes(model: PreTrainedModel) -> PassLimits | None:
    """Return the passes of a default plan. Only parameters on the CPU or on a disk are counted."""
    num_parameters = sum(
        parameter.numel()
        for parameter in model.parameters()
        if parameter.device.type in ("cpu", "meta")
    )
    num_tokens = len(_draw_window(model))
    return choose_passes(num_parameters, num_tokens, len(_list_first_positions(model, num_tokens)))


def _is_split(model: PreTrainedModel) -> bool:
    """Return whether several processes have parts of the model."""
    mesh = getattr(model, "_device_mesh", None)  # of tensor parallelism in transformers
    # Attributes of DTensor, and of DeepSpeed's parameters in ZeRO-3, which have no elements.
    return (mesh is not None and mesh.size() > 1) or any(
        hasattr(parameter, "placements") or hasattr(parameter, "ds_tensor")
        for parameter in model.parameters()
    )


def _draw_window(model: PreTrainedModel) -> Tensor:
    """Return fixed random token ids, `[N]`, int64, on the CPU, of ordinary tokens.

    A model with images may have a larger embedding than its text has tokens.
    """
    config = model.config.get_text_config(decoder=True)
    num_embeddings = getattr(model.get_input_embeddings(), "num_embeddings", None)
    sizes = (num_embeddings, get_field(config, "vocab_size"))
    vocab_size = min((size for size in sizes if isinstance(size, int) and size > 0), default=1)
    generator = torch.Generator("cpu").manual_seed(0)
    num_tokens = min(_MAX_WINDOW_TOKENS, find_max_positions(model))
    ids = torch.randint(vocab_size, (num_tokens,), generator=generator, device="cpu")
    generation_config = getattr(model, "generation_config", None)
    configs = [each.to_dict() for each in (model.config, generation_config) if each is not None]
    is_special = torch.zeros(vocab_size, dtype=torch.bool, device="cpu")
    for path, value in tree_leaves_with_path(configs):
        is_id = type(value) is int and 0 <= value < vocab_size
        if is_id and _SPECIAL_ID_FIELD.search(keystr(path)):
            is_special[value] = True
    ordinary_ids = (~is_special).nonzero()[:, 0]
    if not len(ordinary_ids):
        return ids
    return torch.where(is_special[ids], ordinary_ids[ids % len(ordinary_ids)], ids)


def _choose(
    model: PreTrainedModel,
    windows: Sequence[Tensor] | None,
    passes: PassLimits,
    max_extra_bytes: float,
    bits: float,
) -> StoragePlan:
    """Return the plan of a model for windows of texts, or for random tokens.

    The state of the model and of random generators is restored, even after an error.
    """
    layer_indices = find_paged_layers(model)
    random_window = _draw_window(model)
    kind = "tokens of text" if windows else "random tokens"
    windows = windows or [random_window]
    source = f"chosen on {sum(map(len, windows))} {kind}"
    is_latent = caches_latents(model.config.get_text_config(decoder=True))
    with _isolated(model):
        with eval_mode(model):
            states_by_layer, may_transform_k = read_states(
                model, layer_indices, windows, passes.num_positions
            )
        layer_scales = {}
        k_costs = {}
        narrow_scales = {}
        errors = {}
        cache = FP8PagedCache(model.config, scales=1.0, backend="torch")  # for shapes of layers
        for index in sorted(layer_indices):
            center = None
            layer_plan = LayerPlan(_FALLBACK, SidePlan(AUTO) if is_latent else _FALLBACK)
            k_costs[index] = 0.0  # unknown
            all_states = states_by_layer.pop(index)
            is_visible = all_states and all(queries is not None for *_, queries in all_states)
            if is_visible:
                center, layer_plan, k_costs[index] = _choose_layer_plan(
                    index, all_states, may_transform_k, is_latent
                )
            layer_scales[index] = LayerScales(None, None, center, source, layer_plan)
            if bits < MAX_BITS:
                if is_latent or not is_visible:
                    raise ConfigError(
                        f"bits: expected 8, because layer {index} stores latents or hides its "
                        f"queries, got {bits}. Leave it out"
                    )
                k, v, _ = all_states[0]
                cache.update(k[:1].transpose(0, 1)[None], v[:1].transpose(0, 1)[None], index)
                narrow_plan, errors[index] = _choose_narrow_plan(all_states, center, layer_plan.k)
                narrow_scales[index] = replace(layer_scales[index], plan=narrow_plan)
        plan = StoragePlan(
            layer_scales,
            model_type=model.config.model_type,
            origin=source,
            weights_digest=digest_decoder(model),
        )
        if bits < MAX_BITS:
            six_bit_plan = replace(plan, layers=narrow_scales)
            plan = widen_layers(six_bit_plan, plan, cache, errors, bits, max_extra_bytes)
            return _record_losses(model, plan, six_bit_plan, random_window, errors, bits)
        if not passes.max_tries:
            return plan
        return protect_layers(
            model, plan, random_window, k_costs, max_extra_bytes, passes.max_tries
        )


@contextmanager
def _isolated(model: PreTrainedModel) -> Iterator[None]:
    """Run the model in this block without compiling it. Restore random generators after it."""
    gpus = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    with torch.inference_mode(False), torch.random.fork_rng(gpus), ExitStack() as stack:
        # Compiling a model takes longer than the passes. Only an imported module has compiled code.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _list_first_positions(model: PreTrainedModel, num_tokens: int) -> list[int | None]:
    """Return the first positions of windows of `num_tokens` tokens. None is the model's default."""
    first_positions: list[int | None] = [None]
    if accepts_argument(type(model), "position_ids") and not model.config.is_encoder_decoder:
        first_positions += [
            position
            for position in _FIRST_POSITIONS[1:]
            if position + num_tokens <= find_max_positions(model)
        ]
    return first_positions


def sample_windows(windows: Sequence[Tensor]) -> list[Tensor]:
    """Return windows at even distances in a list sorted by length, at most `_MAX_WINDOWS`."""
    return list(windows[:: max(1, len(windows) // _MAX_WINDOWS)][:_MAX_WINDOWS])


def read_states(
    model: PreTrainedModel,
    layer_indices: frozenset[int],
    windows: Sequence[Tensor],
    max_positions: int = len(_FIRST_POSITIONS),
) -> tuple[dict[int, list[LayerStates]], bool]:
    """Return the states of each layer in all calls, and whether K may be transformed.

    A window is read at up to `max_positions` first positions that the model has. RoPE rotates K
    with the position, so K of a single position does not show its center and outliers.
    """
    first_positions = _list_first_positions(model, max(map(len, windows)))[:max_positions]
    states_by_layer: dict[int, list[LayerStates]] = {index: [] for index in sorted(layer_indices)}
    for window in windows:
        for first_position in first_positions:
            try:
                call_states = observe_queries(model, window, layer_indices, first_position)
            except ConfigError as error:
                if first_position is None:
                    raise
                logger.warning("positions from %d are not tried: %s", first_position, error)
                first_positions = first_positions[: first_positions.index(first_position)]
                break
            for index, states in call_states.items():
                states_by_layer[index].append(states)
    return states_by_layer, len(first_positions) > 1 or not has_rope(model)


def _choose_layer_plan(
    index: int, all_states: Sequence[LayerStates], may_transform_k: bool, is_latent: bool
) -> tuple[Tensor | None, LayerPlan, float]:
    """Return the center of K on the CPU or None, the plan of least cost, and the cost of its K."""
    plans = [_FALLBACK, *_ROTATED_PLANS]
    centered_plans = [] if is_latent else [replace(plan, centered=True) for plan in plans]
    k_plans = [*centered_plans, *plans] if may_transform_k else [_FALLBACK]
    v_plans = [] if is_latent else plans
    center = torch.cat([k for k, *_ in all_states]).mean(0, dtype=torch.float32)
    k_costs = _compute_costs("k", all_states, center, k_plans).tolist()
    v_costs = _compute_costs("v", all_states, None, v_plans).tolist()
    if not all(map(math.isfinite, chain(*k_costs, *v_costs))):
        raise make_nonfinite_error(index, "K and V")
    k_index = _pick_candidate(k_costs, _MAX_COST_RATIO)
    if k_index > 0 and not _is_good(k_costs[k_index], k_costs[0], _RECHECK_COST_RATIO):
        searched_costs = _compute_costs(
            "k", all_states, center, [k_plans[0], k_plans[k_index]], searched=True
        )
        if _pick_candidate(searched_costs.tolist(), _MAX_SEARCHED_COST_RATIO) == 0:
            k_index = 0
    if k_index == 0:  # a center may cost more than no center
        plain_index = k_plans.index(_FALLBACK)
        if _pick_candidate([k_costs[0], k_costs[plain_index]], 1.0) == 1:
            k_index = plain_index
    k_plan = k_plans[k_index]
    v_plan = SidePlan(AUTO) if is_latent else v_plans[_pick_candidate(v_costs, _MAX_COST_RATIO)]
    used_center = center.cpu() if k_plan.centered else None
    return used_center, LayerPlan(k_plan, v_plan), sum(k_costs[k_index])


def _choose_narrow_plan(
    all_states: Sequence[LayerStates], center: Tensor | None, k_plan: SidePlan
) -> tuple[LayerPlan, Tensor]:
    """Return the plan of six bits of least error, and the `errors` of `widen_layers`.

    The center is used if `k_plan`, the plan of K in eight bits, has it.
    """
    plans = [
        LayerPlan(replace(k_plan, format=k_format, rotated=True), SidePlan(v_format, rotated=True))
        for k_format, v_format in _NARROW_FORMATS
    ]
    candidates = [*plans, E4M3_PLAN]
    k_plans = [plan.k for plan in candidates]
    k_costs = _compute_costs("k", all_states, center, k_plans, searched=True, of_output=True)
    v_costs = _compute_costs("v", all_states, None, [plan.v for plan in candidates])
    costs = torch.stack([k_costs, v_costs], dim=1).cpu().clamp(_EPSILON)  # [plans, 2, Hkv]
    best_index = min(range(len(plans)), key=lambda index: costs[index].sum())
    output_squares = torch.stack(
        [queries.compute_cost("v", v.float()) for _, v, queries in all_states if queries]
    )
    relative_costs = costs[best_index] / output_squares.sum(0).cpu().clamp(_EPSILON)
    e4m3_ratio = costs[best_index].sum(0, keepdim=True) / costs[candidates.index(E4M3_PLAN)].sum(0)
    return plans[best_index], torch.cat([relative_costs, e4m3_ratio])


def _record_losses(
    model: PreTrainedModel,
    plan: StoragePlan,
    narrow_plan: StoragePlan,
    window: Tensor,
    errors: Mapping[int, Tensor],
    bits: float,
) -> StoragePlan:
    """Return the plan with its KL and its largest expected error. Log a warning if the KL is large.

    Sides with other formats than in `narrow_plan` are expected to have no error.
    """
    plan = protect_layers(model, plan, window, {}, 0.0)  # only measures the KL
    e4m3_layers = {
        index: replace(layer, plan=E4M3_PLAN, k_center=None) for index, layer in plan.layers.items()
    }
    e4m3_plan = protect_layers(model, replace(plan, layers=e4m3_layers), window, {}, 0.0)
    kl = plan.protection.kl if plan.protection else 0.0
    e4m3_kl = e4m3_plan.protection.kl if e4m3_plan.protection else 0.0
    if kl > max(MAX_KL, e4m3_kl):
        logger.warning(
            "bits=%s: the KL after a stored prompt is %.1e, larger than in E4M3 (%.1e). Pass more "
            "bits, or leave it out for 8",
            bits,
            kl,
            e4m3_kl,
        )
    squared_errors = {}
    for index, layer_errors in errors.items():
        sides = zip(
            plan.layers[index].plan or (), narrow_plan.layers[index].plan or (), strict=True
        )
        is_narrow = torch.tensor([side == narrow_side for side, narrow_side in sides])
        # The third row compares the errors of K and V with E4M3.
        squared_errors[index] = layer_errors[:2][is_narrow].sum(0).max()
    worst_index = max(squared_errors, key=lambda index: squared_errors[index])
    return replace(
        plan,
        origin=f"{plan.origin}, largest expected error of attention "
        f"{squared_errors[worst_index].sqrt():.1%} in layer {worst_index}",
    )


def _pick_candidate(costs: Sequence[Sequence[float]], max_ratio: float) -> int:
    """Return the index of the good candidate of least cost, or 0 if no candidate is good.

    `costs` is `[candidates][heads]`. A candidate is good if its cost in every head is at most
    `max_ratio` times the cost of the first candidate.
    """
    good_indices = [
        index for index, head_costs in enumerate(costs) if _is_good(head_costs, costs[0], max_ratio)
    ]
    return min(good_indices, key=lambda index: sum(costs[index]), default=0)


def _is_good(costs: Sequence[float], fallback_costs: Sequence[float], max_ratio: float) -> bool:
    return all(
        cost <= max_ratio * fallback_cost
        for cost, fallback_cost in zip(costs, fallback_costs, strict=True)
    )


def _compute_costs(
    side: str,
    all_states: Sequence[LayerStates],
    center: Tensor | None,
    plans: Sequence[SidePlan],
    *,
    searched: bool = False,
    of_output: bool = False,
) -> Tensor:
    """Return the cost of each plan of K or V by head, `[plans, Hkv]`.

    With `searched`, scales are searched, as a cache does for K. With `of_output`, the cost of K is
    the squared error of the output, as the cost of V always is.
    """
    first_k = all_states[0][0]
    costs = torch.zeros(len(plans), first_k.shape[1], device=first_k.device)
    find_scale = search_scale if searched else compute_dynamic_scale
    for k, v, queries in all_states:
        assert queries is not None
        states = k if side == "k" else v
        for cost, plan in zip(costs, plans, strict=True):
            used_center = center if plan.centered else None
            scaled_states = center_and_rotate(states, used_center, rotated=plan.rotated)
            fmt = FORMATS[plan.format]
            scale = find_scale(scaled_states, fmt).float()
            error = compute_rounding_error(scaled_states, scale[..., None], fmt)
            error = rotate(error) if plan.rotated else error  # rotation is its own inverse
            cost += queries.compute_cost(side, error, v.float() if of_output else None)
    return costs
