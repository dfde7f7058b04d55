"""Configs of a checkpoint: its layers and heads, and the KV cache that they declare."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

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

# Words for a KV cache, and the entries of a quantization config that hold one.
CACHE_ENTRIES = (
    "kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_dtype",
    "static_kv_dtype", "static_attention_dtype",  # of AutoRound
)  # fmt: skip
_STATIC = ("static", "fp8", "fp8_e4m3", "fp8_e4m3fn", "float8_e4m3", "float8_e4m3fn")
_FNUZ = ("fp8_e4m3fnuz", "float8_e4m3fnuz")
_DYNAMIC = ("dynamic", "fp8_per_token_head")
_UNQUANTIZED = ("", "auto", "none", "bf16", "fp16", "bfloat16", "float16", "float32")


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


def nested_configs(prefix: str, config: object) -> Iterator[tuple[str, object]]:
    """Yield the configs of the language model inside of a config, each with its path."""
    for name in _TEXT_CONFIGS:
        inner = get_entry(config, name)
        if inner is not None:
            yield f"{prefix}{name}.", inner
            yield from nested_configs(f"{prefix}{name}.", inner)


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


@dataclass(frozen=True)
class Declaration:
    """What a config says of the scales of its KV cache.

    "static" are FP8 scales in the checkpoint, "dynamic" is FP8 without any, and "refused" are
    scales of another kind than FP8.
    """

    kind: Literal["none", "static", "dynamic", "refused"] = "none"
    what: str = "nothing about a KV cache"  # the entry and its value, for messages
    dialect: str = ""  # the format whose tensor names to expect
    fnuz: bool = False  # the scales are made for E4M3FNUZ: twice those for E4M3FN
    remark: str = ""  # what is odd about the scales, for people
    rotated: int = 0  # the head size of the rotation that K's scales are made for; 0: none


def parse_entry(where: str, value: object) -> list[Declaration]:
    """Return what one entry declares, a scheme or a word for one; an empty list for nothing."""
    value = getattr(value, "value", value)
    scheme = as_mapping(value)
    if scheme:
        return [_parse_scheme(where, scheme)]
    if value is None or value == {}:
        return []
    what = f"{where} = {value!r}"
    if not isinstance(value, str | torch.dtype):
        return [Declaration("refused", what)]
    word = str(value).lower().removeprefix("torch.")
    if word in _UNQUANTIZED:
        return []
    if word in _STATIC or word in _FNUZ:
        return [Declaration("static", what, fnuz=word in _FNUZ)]
    return [Declaration("dynamic" if word in _DYNAMIC else "refused", what)]


def name_format(bits: object, number: object, group_size: object = None) -> str:
    """Return what a format of numbers is usually called: "INT8", "NVFP4", "MXFP4"."""
    if (bits, number) == (4, "float") and group_size in (16, 32):
        return "NVFP4" if group_size == 16 else "MXFP4"
    return f"{'FP' if number == 'float' else str(number).upper()}{bits}"


def _parse_scheme(where: str, scheme: Mapping[str, object]) -> Declaration:
    def entry(name: str, default: object = None) -> object:
        value = scheme.get(name, default)
        return getattr(value, "value", value)

    # The defaults are those of compressed-tensors.
    bits, number, strategy = entry("num_bits", 8), entry("type", "int"), entry("strategy")
    symmetric, dynamic = entry("symmetric", True), entry("dynamic", False)
    fp8 = (bits, number) == (8, "float")
    name = "" if fp8 else f" ({name_format(bits, number, entry('group_size'))})"
    what = (
        f"{where}: {bits}-bit {number}{name}, "
        f"strategy {strategy or 'tensor'}, "
        f"{'symmetric' if symmetric else 'asymmetric'}, {'dynamic' if dynamic else 'static'}"
    )
    supported = strategy in (None, "tensor", "attn_head")
    if not fp8 or not symmetric or not supported:
        return Declaration("refused", what)
    return Declaration("dynamic" if dynamic else "static", what)
