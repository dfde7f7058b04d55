"""What a checkpoint's configs say: how the KV cache is quantised, its layers and its heads."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

import torch

__all__ = [
    "Declaration",
    "as_mapping",
    "attention_layers",
    "declaration",
    "head_counts",
    "nested_configs",
    "text_config",
]


@dataclass(frozen=True)
class Declaration:
    """What a config says of the scales of its KV cache.

    Attributes:
        kind: "none": nothing; "static": FP8 scales in the checkpoint; "dynamic": FP8, and no
            scales in the checkpoint; "refused": scales of another kind than FP8.
        what: the entry and its value, for messages.
        dialect: which tool's names to expect.
        fnuz: the scales are made for E4M3FNUZ: twice those for E4M3FN.
    """

    kind: Literal["none", "static", "dynamic", "refused"] = "none"
    what: str = "nothing about a KV cache"
    dialect: str = "tgi"
    fnuz: bool = False


_STATIC_WORDS = ("static", "fp8", "fp8_e4m3", "fp8_e4m3fn", "float8_e4m3", "float8_e4m3fn")
_FNUZ_WORDS = ("fp8_e4m3fnuz", "float8_e4m3fnuz")
_PLAIN_WORDS = ("", "auto", "none", "bf16", "fp16", "bfloat16", "float16", "float32")
# Where a config of several models keeps that of the language model.
_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")


def declaration(config: object, hf_quant_config: object = None) -> Declaration:
    """What a config, and ModelOpt's second config beside it, say of static KV scales.

    Args:
        config: transformers' config, or the dict of a `config.json`.
        hf_quant_config: the dict of a `hf_quant_config.json`, or None.
    """
    owners = [("", config), *nested_configs("", config)]
    found: list[Declaration] = []
    dialect = None
    for entry in ("quantization_config", "compression_config", "quantization"):
        for prefix, owner in owners:
            block = as_mapping(_get(owner, entry))
            if block:
                block_dialect = _dialect(entry, block)
                dialect = dialect or block_dialect
                found += _of_block(prefix + entry, block, block_dialect)
    if hf_quant_config is not None:
        dialect = dialect if dialect not in (None, "autofp8") else "modelopt"
        found += _of_block("hf_quant_config.json", as_mapping(hf_quant_config), "modelopt")
    for entry in ("kv_cache_torch_dtype", "kv_cache_dtype"):
        for prefix, owner in owners:
            found += _judged(prefix + entry, _get(owner, entry), dialect or "tgi")
    fnuz = any(one.fnuz for one in found)
    for kind in ("refused", "static", "dynamic"):
        for one in found:
            if one.kind == kind:
                return replace(one, fnuz=fnuz)
    return Declaration(dialect=dialect or "tgi")


def _of_block(where: str, block: Mapping[str, object], dialect: str) -> list[Declaration]:
    inner = as_mapping(block.get("quantization"))
    found = []
    for entry in ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_dtype"):
        for prefix, owner in (("quantization.", inner), ("", block)):
            found += _judged(f"{where}.{prefix}{entry}", owner.get(entry), dialect)
    for name, group in as_mapping(block.get("config_groups")).items():
        found += _of_outputs(f"{where}.config_groups.{name}", as_mapping(group), dialect)
    group = as_mapping(block.get("export")).get("kv_cache_group")
    if group:
        found.append(_of_quark(f"{where}.export.kv_cache_group", block, group, dialect))
    return found


def _of_outputs(where: str, group: Mapping[str, object], dialect: str) -> list[Declaration]:
    """Before there was a `kv_cache_scheme`, the cache was the output of named projections."""
    targets = group.get("targets")
    if not isinstance(targets, list) or not any(
        "k_proj" in t or "v_proj" in t for t in map(str, targets)
    ):
        return []
    return _judged(
        f"{where}.output_activations (kv_cache)", group.get("output_activations"), dialect
    )


def _judged(where: str, value: object, dialect: str) -> list[Declaration]:
    """What one entry declares: a scheme, or a word for one; an empty list for nothing."""
    value = getattr(value, "value", value)
    scheme = as_mapping(value)
    if scheme:
        return [_of_scheme(where, scheme, dialect)]
    what = f"{where} = {value!r}"
    if value is None or value == {}:
        return []
    word = str(value).lower().removeprefix("torch.")
    if not isinstance(value, str | torch.dtype):
        return [Declaration("refused", what, dialect)]
    if word in _PLAIN_WORDS:
        return []
    if word in _STATIC_WORDS:
        return [Declaration("static", what, dialect)]
    if word in _FNUZ_WORDS:
        return [Declaration("static", what, dialect, fnuz=True)]
    return [Declaration("dynamic" if word == "dynamic" else "refused", what, dialect)]


def _of_scheme(where: str, scheme: Mapping[str, object], dialect: str) -> Declaration:
    def entry(name: str, default: object = None) -> object:
        value = scheme.get(name, default)
        return getattr(value, "value", value)

    # The defaults are those of compressed-tensors.
    bits, number, strategy = entry("num_bits", 8), entry("type", "int"), entry("strategy")
    symmetric, dynamic = entry("symmetric", True), entry("dynamic", False)
    kind: Literal["static", "dynamic", "refused"] = "dynamic" if dynamic else "static"
    if (bits, number) != (8, "float") or not symmetric:
        kind = "refused"
    if strategy not in (None, "tensor", "attn_head"):
        kind = "refused"
    what = (
        f"{where}: {bits}-bit {number}, strategy {strategy or 'tensor'}, "
        f"{'symmetric' if symmetric else 'asymmetric'}, {'dynamic' if dynamic else 'static'}"
    )
    return Declaration(kind, what, dialect)


def _of_quark(where: str, block: Mapping[str, object], group: object, dialect: str) -> Declaration:
    """Quark lists the projections whose outputs are the cache; each must say how it is stored."""
    patterns = group if isinstance(group, list) else [group]
    entries = {
        **as_mapping(block.get("kv_cache_quant_config")),
        **as_mapping(block.get("layer_quant_config")),
    }
    dynamic = False
    for pattern in map(str, patterns):
        # The pattern itself is an entry, or the layers that it stands for are.
        named = [entry for name, entry in entries.items() if fnmatchcase(str(name), pattern)]
        for entry in named or [None]:
            output = as_mapping(as_mapping(entry).get("output_tensors"))
            dtype, scheme = output.get("dtype"), output.get("qscheme")
            if (dtype, scheme) != ("fp8_e4m3", "per_tensor") or output.get("symmetric") is False:
                what = f"{where}: {pattern} with dtype {dtype!r} and qscheme {scheme!r}"
                what += " (asymmetric)" if output.get("symmetric") is False else ""
                return Declaration("refused", what, dialect)
            dynamic = dynamic or bool(output.get("is_dynamic"))
    what = f"{where} = {patterns!r}"
    return Declaration("dynamic" if dynamic else "static", what, dialect)


def _dialect(entry: str, block: Mapping[str, object]) -> str:
    method = block.get("quant_method")
    method = str(getattr(method, "value", method) or "").lower()
    if method == "compressed-tensors" or entry == "compression_config":
        return "compressed-tensors"
    if method.startswith("modelopt"):
        return "modelopt"
    if method == "quark":
        return "quark"
    return "trtllm" if entry == "quantization" else "autofp8"


def nested_configs(prefix: str, config: object) -> Iterator[tuple[str, object]]:
    """The configs of the language model inside of a config, each with its path."""
    for name in _CONFIGS:
        owner = _get(config, name)
        if owner is not None:
            yield f"{prefix}{name}.", owner
            yield from nested_configs(f"{prefix}{name}.", owner)


def _get(config: object, name: str) -> object:
    if isinstance(config, Mapping):
        return config.get(name)
    return getattr(config, name, None)


def as_mapping(value: object) -> Mapping[str, object]:
    """A dict, or what an object of transformers or pydantic turns into."""
    for method in ("to_dict", "model_dump"):
        turn = getattr(value, method, None)
        if callable(turn):
            value = turn()
    return value if isinstance(value, Mapping) else {}


def text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """The innermost config of the language model."""
    inner = next((m for m in (as_mapping(config.get(n)) for n in _CONFIGS) if m), None)
    return config if inner is None else text_config(inner)


def attention_layers(config: Mapping[str, object]) -> Sequence[int] | None:
    """The layers that own a KV cache by a `config.json`; None when it does not say."""
    text = text_config(config)
    names = ("num_decoder_layers", "decoder_layers", "num_hidden_layers", "n_layer", "n_layers")
    count = next((text[n] for n in (*names, "num_layers") if isinstance(text.get(n), int)), None)
    if not isinstance(count, int) or not 0 < count < 1_000_000:
        return None
    shared = text.get("num_kv_shared_layers")
    owned = range(count - shared if isinstance(shared, int) else count)
    types = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(types, list) and len(types) == count:
        return [i for i in owned if "attention" in str(types[i]) and "linear" not in str(types[i])]
    hybrid = ("hybrid_override_pattern", "attn_layer_indices", "attn_layer_period", "ssm_cfg")
    return None if any(name in text for name in hybrid) else owned


def head_counts(config: Mapping[str, object]) -> set[int]:
    """Every number of heads that a `config.json` names."""
    text = text_config(config)
    names = re.compile(r"heads$|^n_head|^multi_query_group_num$")
    return {n for name, n in text.items() if names.search(name) and isinstance(n, int)}
