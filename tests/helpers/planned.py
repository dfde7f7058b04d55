"""Scales that say how each layer is stored, for a tiny model with GQA: every layer another plan."""

import torch
from transformers import PreTrainedModel

from hf_fp8kv.formats import FORMATS, LayerPlan, SidePlan
from hf_fp8kv.scales import KVScales, LayerScales

# Static scales of E4M3 for numbers up to about 4; V has others than K.
PLANS = (
    LayerPlan.parse("fp8_e2m5 rotated centered", "int8 rotated"),
    LayerPlan.parse("fp8_e4m3", "fp8_e2m5 rotated"),
    LayerPlan.parse("int8 rotated", "fp8_e3m4"),
)


def planned_scales(
    layers: int = 3,
    heads: int = 2,
    dim: int = 16,
    *,
    is_dynamic: bool = False,
    coarse: bool = False,
) -> KVScales:
    """Scales per head, or of each token, with the plans above in turn.

    `coarse`: codes are so few that another plan is seen in a model's tokens.
    """
    chance = torch.Generator().manual_seed(5)

    def scale(largest: float, side: SidePlan) -> torch.Tensor | None:
        spread, fmt = 1 + torch.rand(heads, 1, generator=chance), FORMATS[side.format]
        if coarse:
            return spread / 4 / (fmt.min_subnormal * fmt.scale_from_e4m3)
        return None if is_dynamic else largest * spread / 448

    made = {}
    for index in range(layers):
        plan = PLANS[index % len(PLANS)]
        center = torch.randn(heads, dim, generator=chance) / 2 if plan.k.centered else None
        made[index] = LayerScales(scale(6.0, plan.k), scale(4.0, plan.v), center, plan=plan)
    return KVScales(made, model_type="llama", origin="planned", fingerprint={0: "ab" * 8})


def planned_for(model: PreTrainedModel, **keywords: bool) -> KVScales:
    """The same of a model."""
    config = model.config.get_text_config()
    heads = config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return planned_scales(config.num_hidden_layers, heads, dim, **keywords)
