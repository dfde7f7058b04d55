"""Scales with a different storage plan for each layer of a tiny model with GQA."""

import torch
from transformers import PreTrainedModel

from hf_fp8kv import StoragePlan
from hf_fp8kv.formats import FORMATS, LayerPlan, SidePlan
from hf_fp8kv.scales import KVScales, LayerScales
from hf_fp8kv.serving.engines.common import read_kv_sizes

# Plans of a layer that keeps keys, values or both in the dtype of the model.
PROTECTED_PLANS = {
    "K": LayerPlan.parse("model", "int8 rotated"),
    "V": LayerPlan.parse("fp8_e3m4", "model"),
    "K and V": LayerPlan.parse("model", "model"),
}

# The storage plans of consecutive layers, which repeat in longer models.
PLANS = (
    LayerPlan.parse("fp8_e2m5 rotated centered", "int8 rotated"),
    LayerPlan.parse("fp8_e4m3", "fp8_e2m5 rotated"),
    LayerPlan.parse("int8 rotated", "fp8_e3m4"),
)


def make_planned_scales(
    num_layers: int = 3, num_heads: int = 2, dim: int = 16,
    *, is_dynamic: bool = False, is_coarse: bool = False,
) -> KVScales:  # fmt: skip
    """Return static scales for values up to about 4, or dynamic scales, with `PLANS` in order.

    Static scales differ between heads, and between K and V. With `is_coarse`, they are so large
    that values use few codes, so another plan changes the tokens of a model.
    """
    generator = torch.Generator().manual_seed(5)

    def make_scale(max_value: float, side: SidePlan) -> torch.Tensor | None:
        head_factors = 1 + torch.rand(num_heads, 1, generator=generator)
        fmt = FORMATS[side.format]
        if is_coarse:
            return head_factors / 4 / (fmt.min_subnormal * fmt.scale_from_e4m3)
        return None if is_dynamic else max_value * head_factors / 448

    layer_scales = {}
    for index in range(num_layers):
        plan = PLANS[index % len(PLANS)]
        center = torch.randn(num_heads, dim, generator=generator) / 2 if plan.k.centered else None
        layer_scales[index] = LayerScales(
            make_scale(6.0, plan.k), make_scale(4.0, plan.v), center, plan=plan
        )
    scales_class = StoragePlan if is_dynamic else KVScales
    return scales_class(layer_scales, model_type="llama", origin="planned", weights_digest="ab" * 8)


def make_centered_scales(scale: float = 0.05, num_layers: int = 8) -> KVScales:
    """Return static scales with a center of K in each layer, for 2 heads of 16 channels."""
    centers = torch.randn(num_layers, 2, 16, generator=torch.Generator().manual_seed(7))
    constant = torch.tensor(scale)
    return KVScales(
        {index: LayerScales(constant, constant, center) for index, center in enumerate(centers)}
    )


def make_cache_keyword(scales: KVScales) -> dict[str, KVScales]:
    """Return scales as a keyword argument of a cache: `plan` for a StoragePlan, else `scales`."""
    return {"plan" if isinstance(scales, StoragePlan) else "scales": scales}


def make_planned_scales_for(model: PreTrainedModel, **options: bool) -> KVScales:
    config = model.config.get_text_config()
    return make_planned_scales(config.num_hidden_layers, *read_kv_sizes(config), **options)


def make_protected_plan_for(
    model: PreTrainedModel, sides: str = "K", index: int = 0
) -> StoragePlan:
    """Return the plan of `make_planned_scales_for`, with protected `sides` in the layer `index`."""
    layers = make_planned_scales_for(model, is_dynamic=True).layers
    return StoragePlan(layers | {index: LayerScales(None, None, plan=PROTECTED_PLANS[sides])})
