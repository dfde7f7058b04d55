"""Quirks of model types that their configs do not show.

The sweep over architectures (docs/architectures.md) detects new model types with such quirks,
because "fp8_paged" then differs from their attention.
"""

from typing import Any

from ..modeling.model_support import config_field, uses_interface

# Moshi's mask has no window: only a cache hides tokens, after the first call. The modules of
# Pegasus-X's decoder have is_causal=False. The rest of these model types index the mask by query,
# or combine it with a second mask.
NEEDS_MASK = frozenset(
    {"moshi", "pegasus_x", "qwen4_exp", "qwen4_exp_text", "t5gemma2", "t5gemma2_decoder"}
)
# Model types that add the mask to the scores themselves.
ADDS_MASK = frozenset({"nllb-moe", "deepseek_v4", "git", "bigbird_pegasus"})
# Config fields of models whose attention does not receive the cached K (MLA), or selects keys.
_MASK_FIELDS = ("kv_lora_rank", "index_topk", "index_n_heads")


def adds_mask(config: Any) -> bool:
    """Return whether a model adds the mask to its scores with any attention implementation."""
    config_class: type = type(config)
    return not uses_interface(config_class) or config_field(config, "model_type") in ADDS_MASK


def needs_mask(config: Any) -> bool:
    """Return whether a model needs a mask even if causality and a window would suffice."""
    values = [config_field(config, name) for name in _MASK_FIELDS]
    return config_field(config, "model_type") in NEEDS_MASK or any(x is not None for x in values)
