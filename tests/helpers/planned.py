"""Scales that say how each layer is stored, for a tiny model with GQA: every layer another plan."""

import torch

from hf_fp8kv.formats import LayerPlan
from hf_fp8kv.scales import KVScales, LayerScales

# Static scales of E4M3 for numbers up to about 4; V has others than K.
PLANS = (
    LayerPlan.parse("fp8_e2m5 rotated centered", "int8 rotated"),
    LayerPlan.parse("fp8_e4m3", "fp8_e2m5 rotated"),
    LayerPlan.parse("int8 rotated", "fp8_e3m4"),
)


def planned_scales(
    layers: int = 3, heads: int = 2, dim: int = 16, *, is_dynamic: bool = False
) -> KVScales:
    """Scales per head, or of each token, with the plans above in turn."""
    chance = torch.Generator().manual_seed(5)

    def scale(largest: float) -> torch.Tensor | None:
        spread = 1 + torch.rand(heads, 1, generator=chance)
        return None if is_dynamic else largest * spread / 448

    made = {}
    for index in range(layers):
        plan = PLANS[index % len(PLANS)]
        center = torch.randn(heads, dim, generator=chance) / 2 if plan.k.centered else None
        made[index] = LayerScales(scale(6.0), scale(4.0), center, plan=plan)
    return KVScales(made, model_type="llama", origin="planned", fingerprint={0: "ab" * 8})
