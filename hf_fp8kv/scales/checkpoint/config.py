"""Configs of a checkpoint: its language model, layers and heads."""

import re
from collections.abc import Iterator, Mapping, Sequence

from ...errors import ScaleError
from ...utils.text import format_value

Config = dict[str, object]
# A second config that may lie beside config.json.
HF_QUANT_CONFIG = "hf_quant_config.json"
# Where a config of several models keeps that of the language model.
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
_LAYER_COUNTS = (
    "num_decoder_layers", "decoder_layers", "num_hidden_layers", "n_layer", "n_layers",
    "num_layers",
)  # fmt: skip
# Entries of models in which not every layer has attention, and that do not say which.
_HYBRID = ("hybrid_override_pattern", "attn_layer_indices", "attn_layer_period", "ssm_cfg")
_HEADS = re.compile(r"heads$|^n_head|^multi_query_group_num$")


def get_entry(config: object, name: str) -> object:
    """Return an entry of a dict, or an attribute of transformers' config; None without it."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def as_mapping(value: object) -> Mapping[str, object]:
    """Return a dict, also of an object of transformers or pydantic; anything else is empty."""
    for method in ("to_dict", "model_dump"):
        convert = getattr(value, method, None)
        if callable(convert):
            value = convert()
    return value if isinstance(value, Mapping) else {}


def nested_configs(config: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield a config and the configs of the language model inside of it, each with its path."""
    yield path, config
    for name in _TEXT_CONFIGS:
        inner = get_entry(config, name)
        if inner is not None:
            yield from nested_configs(inner, f"{path}{name}.")


def text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the innermost config of the language model."""
    inner = next((m for m in (as_mapping(config.get(n)) for n in _TEXT_CONFIGS) if m), None)
    return config if inner is None else text_config(inner)


def check_layer_counts(where: object, config: Mapping[str, object]) -> None:
    """Raise ScaleError for a `config.json` whose number of layers is no integer."""
    for name, count in text_config(config).items():
        if name in _LAYER_COUNTS and count is not None and type(count) is not int:
            raise ScaleError(
                f"{where}: {name}: expected an integer, got {format_value(count)}; transformers "
                "refuses it too, fetch the config again"
            )


def layers_with_cache(config: Mapping[str, object]) -> Sequence[int] | None:
    """Return the layers that own a KV cache by a `config.json`; None when it does not say."""
    text = text_config(config)
    count = next((text[n] for n in _LAYER_COUNTS if isinstance(text.get(n), int)), None)
    if not isinstance(count, int) or not 0 < count < 1_000_000:
        return None
    shared = text.get("num_kv_shared_layers")
    owners = range(count - shared if isinstance(shared, int) else count)
    types = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(types, list) and len(types) == count:
        return [i for i in owners if "attention" in str(types[i]) and "linear" not in str(types[i])]
    return None if any(name in text for name in _HYBRID) else owners


def head_counts(config: Mapping[str, object]) -> set[int]:
    """Return every number of heads that a `config.json` names."""
    text = text_config(config)
    return {n for name, n in text.items() if _HEADS.search(name) and isinstance(n, int)}
