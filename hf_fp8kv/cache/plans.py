"""Parse the argument `plan` of a cache: a plan, its description, or a file."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..errors import ConfigError
from ..formats import ALIASES, AUTO, FORMATS, LayerPlan, SidePlan
from ..scales.kv_scales import KVScales, StoragePlan

Plan = StoragePlan | LayerPlan | Mapping[int, LayerPlan]
# Set to `calibration.plan_choice.resolve_plan` when the package is imported, because that module
# imports this package.
resolve_plan: Callable[[PreTrainedModel, Mapping[str, Any]], dict[str, Any]]


def parse_plan(plan: object) -> Plan | None:
    """Return the storage plan of all layers, or of each layer, for the argument `plan`.

    Args:
        plan: None, a `StoragePlan`, a `LayerPlan`, a mapping from layers to `LayerPlan`, a
            description of both sides (only K then has a center), or a pair of descriptions. A path,
            or a string that names a folder, a file or a repository, is read as a saved
            `StoragePlan`.

    Raises:
        ConfigError: The argument has a different type, or describes no valid plan.
        ScaleError: The file cannot be read, or has no plan.
    """
    if plan is None or isinstance(plan, StoragePlan):
        return plan
    if isinstance(plan, KVScales):
        raise ConfigError(f"plan: expected a plan, got {plan!r}. Pass static scales as `scales`")
    if isinstance(plan, os.PathLike) or (isinstance(plan, str) and _is_location(plan)):
        return StoragePlan.load(plan)
    if isinstance(plan, str):
        formats = (*ALIASES, *FORMATS)
        first_word = (plan.split() or [""])[0]
        if first_word not in (AUTO, *formats):
            raise ConfigError(
                f"plan: expected the path of a saved plan, or text that begins with one of "
                f"{', '.join(formats)}, got {plan!r}. Check the path. Plans are made by "
                "hf_fp8kv.choose_plan(model), and by enable(model, dtype='adaptive')"
            )
        side = SidePlan.parse(plan)
        plan = LayerPlan(side, replace(side, centered=False))
    elif isinstance(plan, list | tuple) and len(plan) == 2 and not isinstance(plan, LayerPlan):
        plan = LayerPlan.parse(*plan)
    if isinstance(plan, LayerPlan):
        layer_plans: dict[object, object] = {0: plan}
    elif isinstance(plan, Mapping) and plan:
        layer_plans = dict(plan)
    else:
        raise ConfigError(
            "plan: expected a StoragePlan, a LayerPlan, a LayerPlan for each layer, or text, got "
            f"{plan!r}. Pass, for example, plan=('int8 rotated', 'fp8_e2m5 rotated')"
        )
    for index, layer_plan in layer_plans.items():
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise ConfigError(
                f"plan: expected indices of layers from 0 on, got {index!r}. Use the keys of a "
                "cache's `plan`"
            )
        if LayerPlan.check(layer_plan, f"plan of layer {index}").v.centered:
            raise ConfigError(
                f"plan: expected V without a center, which only K can have, got {layer_plan} for "
                f"layer {index}. Leave 'centered' out of V's plan"
            )
    return plan if isinstance(plan, LayerPlan) else dict(plan)


def _is_location(text: str) -> bool:
    return "/" in text or Path(text).suffix in (".json", ".safetensors") or Path(text).exists()
