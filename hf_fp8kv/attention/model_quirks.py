"""Quirks of model types that their configs do not show.

The sweep over architectures (docs/architectures.md) finds new model types with such quirks: with
"fp8_paged", their outputs differ.
"""

from typing import Any

from ..modeling.model_support import get_field, uses_interface

# Model types that need a mask even where causality and a window would suffice for other models.
# Moshi's mask ignores the window, which only its cache applies, after the first call. The modules
# of Pegasus-X's decoder have is_causal=False. The other types index the mask by query, or combine
# it with a second mask.
MODELS_NEEDING_MASK = frozenset(
    {"moshi", "pegasus_x", "qwen4_exp", "qwen4_exp_text", "t5gemma2", "t5gemma2_decoder"}
)
# Model types whose code adds the mask to the logits.
MODELS_ADDING_MASK = frozenset({"nllb-moe", "deepseek_v4", "git", "bigbird_pegasus"})
# Models with one of these config fields also need a mask, because their attention does not receive
# the cached K (MLA), or selects keys (sparse attention).
_FIELDS_NEEDING_MASK = ("kv_lora_rank", "index_topk", "index_n_heads")


def adds_mask(config: Any) -> bool:
    """Return whether the model's own code adds the mask, whatever its attention implementation."""
    model_type = get_field(config, "model_type")
    return not uses_interface(type(config)) or model_type in MODELS_ADDING_MASK


def needs_mask(config: Any) -> bool:
    """Return whether a model needs a mask where others need only causality and a window."""
    has_field = any(get_field(config, name) is not None for name in _FIELDS_NEEDING_MASK)
    return has_field or get_field(config, "model_type") in MODELS_NEEDING_MASK
