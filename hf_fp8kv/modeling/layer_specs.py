"""Read a config, and find the layers that it describes and that `skip_layers` names."""

import os
from collections.abc import Collection
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch.utils._pytree import tree_map, tree_map_only
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, StaticCache

from ..errors import ConfigError

# Model types whose code changes the number of KV heads in some layers.
_TYPES_CHANGING_HEADS = ("mimo_v2_flash",)


def build_stock_layers(
    config: PreTrainedConfig, max_cache_len: int | None
) -> tuple[list[Any], list[int | None]]:
    """Return the layers that transformers would create, and the window of each layer or None."""
    layers = list(DynamicCache(config=config).layers)
    # Windows are read from dynamic layers, because a static layer clips its window to the cache.
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    if max_cache_len is None:
        return layers, windows
    return list(StaticCache(config=config, max_cache_len=max_cache_len).layers), windows


def release_states(layer: Any) -> None:
    """Remove the tokens of a layer of transformers, and all tensors with an axis for sequences."""
    layer.reset()
    states = tree_map_only(
        torch.Tensor, lambda tensor: tensor if tensor.ndim < 3 else None, vars(layer)
    )
    # A flag, or a dictionary of flags.
    flags = {name: flag for name, flag in states.items() if name.endswith("initialized")}
    vars(layer).update(states | tree_map(lambda _: False, flags))


def reuses_kv(config: PreTrainedConfig, index: int) -> bool:
    """Return whether a layer reads K and V of another layer, and stores only indexer keys."""
    modes = getattr(config, "kv_sharing_modes", None)
    return modes is not None and modes[index] == "reuse_but_indexer"


def find_kv_sizes(config: PreTrainedConfig, index: int) -> tuple[int, int, int] | None:
    """Return the KV heads, and the sizes of keys and values, of a layer of the whole model.

    None means that the config does not determine them, as for latents, or for models that are not
    part of transformers.
    """
    if getattr(config, "is_heterogeneous", False):
        config = config.per_layer_config[index]
    settings = vars(config)
    kv_fields = [name for name in settings if name.endswith(("key_value_heads", "kv_lora_rank"))]
    is_builtin = type(config).__module__.startswith("transformers.")
    if (
        not is_builtin
        or kv_fields != ["num_key_value_heads"]
        or config.model_type in _TYPES_CHANGING_HEADS
    ):
        return None
    head_dim = settings.get("head_dim") or config.hidden_size // config.num_attention_heads
    return settings["num_key_value_heads"], head_dim, settings.get("v_head_dim") or head_dim


def find_skipped_layers(
    skip_layers: Collection[int | str], config: PreTrainedConfig, layers: list[Any]
) -> set[int]:
    """Return the indices of the layers that `skip_layers` names. Raise ConfigError if unknown."""
    layer_types = getattr(config, "layer_types", None) or [
        "sliding_attention" if getattr(layer, "is_sliding", False) else "full_attention"
        for layer in layers
    ]
    indices: set[int] = set()
    is_single = isinstance(skip_layers, str) or not isinstance(skip_layers, Collection)
    selectors = (skip_layers,) if is_single else skip_layers
    for selector in selectors:
        if type(selector) is int and -len(layers) <= selector < len(layers):
            indices.add(selector % len(layers))
        elif isinstance(selector, str) and selector in layer_types:
            indices.update(
                index
                for index, layer_type in enumerate(layer_types[: len(layers)])
                if layer_type == selector
            )
        else:
            raise ConfigError(
                f"skip_layers: expected indices from {-len(layers)} to {len(layers) - 1} or layer "
                f"types among {sorted(set(layer_types))}, got {selector!r}"
            )
    return indices


def read_config(repo_or_dir: str | os.PathLike[str], **options: Any) -> PreTrainedConfig:
    """Read a config with `AutoConfig` and its `options`. Raise ConfigError if that fails."""
    from transformers import AutoConfig

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(os.fspath(repo_or_dir), **options)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise ConfigError(
            f"expected a config.json that transformers can read in {os.fspath(repo_or_dir)!r}, got "
            f"{type(error).__name__}: {error}. Fix it, or pass config=model.config"
        ) from error
    return config
