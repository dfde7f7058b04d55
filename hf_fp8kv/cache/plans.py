"""Plans that a cache may choose among, from what a user said of formats, rotation and centers.

The first plan of a side is safe on any model. It is taken where nothing is measured: the error of
rotated numbers depends on how far K moves from its center, which outliers that turn with the
position do, so rotation is never assumed where a float format can do without.
"""

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..formats import AUTO, DEFAULT_DTYPE, LayerPlan, SidePlan

# Formats without the range that outliers need: it is rotation that makes them precise.
NARROW = ("fp8_e2m5", "int8")
_HOW = "LayerPlan.parse('fp8_e2m5 rotated', 'int8') makes one of text"


def side_plans(
    format: str | None, rotate: bool | None, centers: tuple[bool, ...], *, measures: bool
) -> tuple[SidePlan, ...]:
    """Return the plans of one side, the safe one first, and only that unless `measures`.

    Args:
        format: a key of `FORMATS`, "auto", or None: any.
        rotate: as a user said it; None: where it is measured to help.
        centers: whether there is a center; of several, the first is the safe one.
    """
    if format == AUTO:
        return (SidePlan(AUTO),)
    if format is None:
        kinds = [(DEFAULT_DTYPE, bool(rotate))]
        kinds += [(name, rotate is not False) for name in NARROW]
    elif format in NARROW and rotate is None:
        kinds = [(format, True), (format, False)]
    else:
        kinds = [(format, bool(rotate))]
    plans = tuple(
        SidePlan(name, rotated, centered) for centered in centers for name, rotated in kinds
    )
    return plans if measures else plans[:1]


def check_plan(
    plan: object, others: Mapping[str, Any]
) -> Mapping[int, LayerPlan] | LayerPlan | None:
    """Return the plan of all layers, or of each; raise ConfigError for anything else.

    `others` are the arguments that a plan says, too, as the user gave them.
    """
    if plan is None:
        return None
    if said := [name for name, value in others.items() if value is not None]:
        raise ConfigError(
            f"plan: expected it alone, since it says how every layer is stored, got {said[0]}="
            f"{others[said[0]]!r} too; leave that out, or change the plan"
        )
    if isinstance(plan, LayerPlan):
        layers: dict[Any, Any] = {0: plan}
    elif isinstance(plan, Mapping) and plan:
        layers = dict(plan)
    else:
        raise ConfigError(
            f"plan: expected a LayerPlan, or one for each layer's number, got {plan!r}; {_HOW}"
        )
    for index, layer in layers.items():
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise ConfigError(
                f"plan: expected layers' numbers from 0, got {index!r}; name layers as `plan` of a "
                "cache does"
            )
        if not isinstance(layer, LayerPlan):
            raise ConfigError(
                f"plan: expected a LayerPlan for layer {index}, got {layer!r}; {_HOW}"
            )
        layer.check()
        if layer.v.centered:
            raise ConfigError(
                f"plan: expected V without a center, which only K can have, got {layer} for layer "
                f"{index}; leave 'centered' out of V's plan"
            )
    return plan if isinstance(plan, LayerPlan) else layers
