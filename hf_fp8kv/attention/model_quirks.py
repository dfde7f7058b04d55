"""Model quirks: what model types do that their config does not say.

A new model type that does any of this differs from its own attention in the sweep over
architectures (docs/architectures.md).
"""

from typing import Any

from ..modeling.model_support import config_field, uses_interface

# They do not tell the attention function about their window. (Moshi's mask has none either: only a
# cache hides tokens, after the first call.)
WINDOW_UNSAID = frozenset({"doge", "phimoe", "qwen2_moe", "paligemma", "blt", "moshi"})
# They index the mask by query, or join it with another.
INDEXES_MASK = frozenset({"qwen4_exp", "qwen4_exp_text", "t5gemma2", "t5gemma2_decoder"})
# Their decoder's modules say is_causal=False, and rely on the mask.
CAUSAL_UNSAID = frozenset({"pegasus_x"})
# They add the mask to their scores themselves.
ADDS_MASK = frozenset({"nllb-moe", "deepseek_v4", "git", "bigbird_pegasus"})
# Config fields of models whose attention does not see the cache's K (MLA), or chooses keys.
_NEEDS_COMPLETE = ("kv_lora_rank", "index_topk", "index_n_heads")


def adds_mask(config: Any) -> bool:
    """Return whether a model adds the mask to its scores, whatever attention it is told to use."""
    config_class: type = type(config)
    return not uses_interface(config_class) or _model_type(config) in ADDS_MASK


def needs_complete_mask(config: Any) -> bool:
    """Return whether a model cannot use a compact mask."""
    if _model_type(config) in WINDOW_UNSAID | INDEXES_MASK:
        return True
    return any(config_field(config, name) is not None for name in _NEEDS_COMPLETE)


def relies_on_mask(config: Any) -> bool:
    """Return whether a model's modules take a missing mask for "every token is visible"."""
    return _model_type(config) in CAUSAL_UNSAID


def _model_type(config: Any) -> str:
    return getattr(config, "model_type", "")
