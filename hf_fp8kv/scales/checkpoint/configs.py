"""Read the layers, the heads and the declared KV cache from the configs of a checkpoint."""

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Literal

import torch

from ...errors import ScaleError
from ...utils.text import format_list, format_value

Config = dict[str, object]
Kind = Literal["none", "static", "dynamic", "unsupported"]
# A second config that may be next to config.json.
HF_QUANT_CONFIG = "hf_quant_config.json"
# Entries for the language model in a config of several models.
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
_LAYER_COUNTS = (
    "num_decoder_layers",
    "decoder_layers",
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
)
# Entries of models in which some layers have no attention. The entries do not list these layers.
_HYBRID_ENTRIES = ("hybrid_override_pattern", "attn_layer_indices", "attn_layer_period", "ssm_cfg")
_HEAD_COUNT_PATTERN = re.compile(r"heads$|^n_head|^multi_query_group_num$")
# Entries of a config for the quantization of weights and cache.
_QUANTIZATION_ENTRIES = ("quantization_config", "compression_config", "quantization")
# Entries for a KV cache in a quantization config, and in config.json.
_CACHE_ENTRIES = (
    "kv_cache_scheme",
    "kv_cache_quant_algo",
    "kv_cache_dtype",
    "static_kv_dtype",
    "static_attention_dtype",  # of AutoRound
)
# Entries of ModelOpt 0.48 for a cache of which only some layers are quantized: the layers' names
# and formats, and remarks. `kv_cache_quant_algo` has the common format of these layers.
_LAYERS_ENTRY = "kv_cache_quantized_layers"
LAYER_ENTRIES = (_LAYERS_ENTRY, "kv_cache_schema_version", "kv_cache_deployment_supported")
TGI_ENTRY = "kv_cache_torch_dtype"
_TOP_LEVEL_ENTRIES = (TGI_ENTRY, "kv_cache_dtype")
_STATIC_NAMES = ("static", "fp8", "fp8_e4m3", "fp8_e4m3fn", "float8_e4m3", "float8_e4m3fn")
_FNUZ_NAMES = ("fp8_e4m3fnuz", "float8_e4m3fnuz")
_DYNAMIC_NAMES = ("dynamic", "fp8_per_token_head")
_UNQUANTIZED_NAMES = ("", "auto", "none", "bf16", "fp16", "bfloat16", "float16", "float32")
_BEFORE_ROPE_REMARK = (
    "Quark measured the scales of K before RoPE, and before the norm of K if the model has one "
    "(kv_cache_post_rope). The scales may be too small for K, or far too large. Export with "
    "kv_cache_post_rope=True, or calibrate"
)


@dataclass(frozen=True)
class Declaration:
    """Declaration of the scales of a KV cache in a config.

    The kind "static" means FP8 scales in the checkpoint. "dynamic" means an FP8 cache without
    stored scales. "unsupported" means a number format, a strategy or a rotation that this package
    cannot read.
    """

    kind: Kind = "none"
    description: str = "nothing about a KV cache"  # the entry and its value, for messages
    dialect: str = ""  # format of the tensor names, a key of `SCALE_FORMATS` or "trtllm"
    is_fnuz: bool = False  # whether the scales are for E4M3FNUZ, twice the scales for E4M3FN
    remark: str = ""  # a sentence about an oddity of the scales
    # Rotations of K before scaling: the size of their blocks, and the modules that have them.
    rotations: tuple[tuple[int, str], ...] = ()
    # Names of the only quantized layers. Empty means all layers.
    quantized_layers: tuple[str, ...] = ()


def as_mapping(value: object) -> Mapping[str, object]:
    """Return a dict, convert an object of transformers or pydantic, or return an empty dict."""
    for method in ("to_dict", "model_dump"):
        convert = getattr(value, method, None)
        if callable(convert):
            value = convert()
    return value if isinstance(value, Mapping) else {}


def iterate_configs(config: object, path: str = "") -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield the path and the entries of a config, and of each nested text config."""
    entries = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    yield path, entries
    for name in _TEXT_CONFIGS:
        if (nested_config := entries.get(name)) is not None:
            yield from iterate_configs(nested_config, f"{path}{name}.")


def find_text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the innermost config of the language model."""
    nested_configs = (as_mapping(config.get(name)) for name in _TEXT_CONFIGS)
    nested_config = next(filter(None, nested_configs), None)
    return config if nested_config is None else find_text_config(nested_config)


def find_cached_layers(origin: str, config: Mapping[str, object]) -> Sequence[int] | None:
    """Return the layers with a KV cache according to a `config.json`, or None if unknown."""
    decoder_config = find_text_config(config)
    num_layers = 0
    for name in reversed(_LAYER_COUNTS):
        if (value := decoder_config.get(name)) is not None:
            if type(value) is not int:
                raise ScaleError(
                    f"{origin}: config.json: {name}: expected an integer, got "
                    f"{format_value(value)}. Fetch the config again"
                )
            num_layers = value
    if not 0 < num_layers < 1_000_000:
        return None
    num_shared = decoder_config.get("num_kv_shared_layers")
    layers = range(num_layers - num_shared if isinstance(num_shared, int) else num_layers)
    types = decoder_config.get("layer_types") or decoder_config.get("layers_block_type")
    if isinstance(types, list) and len(types) == num_layers:
        return [
            index
            for index in layers
            if "attention" in str(types[index]) and "linear" not in str(types[index])
        ]
    return None if any(name in decoder_config for name in _HYBRID_ENTRIES) else layers


def find_head_counts(config: Mapping[str, object]) -> set[int]:
    """Return every head count in a `config.json`."""
    return {
        value
        for name, value in find_text_config(config).items()
        if _HEAD_COUNT_PATTERN.search(name) and isinstance(value, int)
    }


def find_declaration(config: object, hf_quant_config: object = None) -> Declaration:
    """Return the declaration of KV scales in a config and in ModelOpt's second config."""
    configs = list(iterate_configs(config))
    declarations: list[Declaration] = []
    dialect = ""
    for entry_name in _QUANTIZATION_ENTRIES:
        for path, entries in configs:
            if quant_config := as_mapping(entries.get(entry_name)):
                own_dialect = find_dialect(entry_name, quant_config) or "autofp8"
                dialect = dialect or own_dialect
                declarations += [
                    replace(declaration, dialect=own_dialect)
                    for declaration in _parse_quant_config(path + entry_name, quant_config)
                ]
    if hf_quant_config is not None:
        dialect = dialect if dialect not in ("", "autofp8") else "modelopt"
        declarations += [
            replace(declaration, dialect="modelopt")
            for declaration in _parse_quant_config(HF_QUANT_CONFIG, as_mapping(hf_quant_config))
        ]
    dialect = dialect or "tgi"
    for entry_name in _TOP_LEVEL_ENTRIES:
        for path, entries in configs:
            declarations += [
                replace(declaration, dialect=dialect)
                for declaration in _parse_entry(path + entry_name, entries.get(entry_name))
            ]
    # The strongest kind comes first, and the first of several declarations of this kind applies.
    kinds = ("unsupported", "static", "dynamic")
    strongest_declaration = min(
        (each for each in declarations if each.kind in kinds),
        key=lambda each: kinds.index(each.kind),
        default=Declaration(dialect=dialect),
    )
    return replace(
        strongest_declaration,
        is_fnuz=any(each.is_fnuz for each in declarations),
        rotations=tuple(chain.from_iterable(each.rotations for each in declarations)),
        quantized_layers=tuple(chain.from_iterable(each.quantized_layers for each in declarations)),
    )


def describe_kv_scales(config: object) -> str | None:
    """Describe the static FP8 KV scales that a config or its dict declares, or return None."""
    declaration = find_declaration(config)
    return declaration.description if declaration.kind == "static" else None


def find_dialect(entry_name: str, quant_config: Mapping[str, object]) -> str:
    """Return the dialect of the tool that wrote a quantization config, or "" if it is unknown."""
    entry = quant_config.get("quant_method")
    method = str(getattr(entry, "value", entry) or "").lower()
    if method.startswith("modelopt"):
        return "modelopt"
    if method in ("compressed-tensors", "quark", "fp8"):
        return "autofp8" if method == "fp8" else method
    if entry_name == "compression_config" and not method:
        return "compressed-tensors"
    return "trtllm" if entry_name == "quantization" else ""


def _parse_quant_config(label: str, quant_config: Mapping[str, object]) -> Iterator[Declaration]:
    nested_config = as_mapping(quant_config.get("quantization"))
    for path, entries in (("quantization.", nested_config), ("", quant_config)):
        yield from _parse_layers(f"{label}.{path}{_LAYERS_ENTRY}", entries.get(_LAYERS_ENTRY))
    for entry_name in _CACHE_ENTRIES:
        for path, entries in (("quantization.", nested_config), ("", quant_config)):
            yield from _parse_entry(f"{label}.{path}{entry_name}", entries.get(entry_name))
    transforms = as_mapping(as_mapping(quant_config.get("transform_config")).get("config_groups"))
    for name, scheme in transforms.items():
        yield from _parse_transform(f"{label}.transform_config.{name}", as_mapping(scheme))
    for name, group in as_mapping(quant_config.get("config_groups")).items():
        if _targets_projections(group):  # older tools declared projections' outputs as the cache
            group_label = f"{label}.config_groups.{name}.output_activations (kv_cache)"
            yield from _parse_entry(group_label, as_mapping(group).get("output_activations"))
    # Quark's mode "fp8" also writes this list, but declares the cache as AutoFP8 does.
    projections = as_mapping(quant_config.get("export")).get("kv_cache_group")
    if projections and quant_config.get("quant_method") != "fp8":
        yield _parse_projections(f"{label}.export.kv_cache_group", projections, quant_config)


def _parse_layers(label: str, value: object) -> Iterator[Declaration]:
    """Yield the declaration of the quantized layers, if the entry lists any."""
    algorithms = {
        str(name): as_mapping(entry).get("quant_algo") for name, entry in as_mapping(value).items()
    }
    unsupported_layers = [
        f"{name} with {algorithm!r}" for name, algorithm in algorithms.items() if algorithm != "FP8"
    ]
    if unsupported_layers:
        yield Declaration("unsupported", f"{label}: {format_list(unsupported_layers)}")
    elif algorithms:
        yield Declaration(
            "static",
            f"{label}: {len(algorithms)} layers with FP8",
            quantized_layers=tuple(algorithms),
        )


def _parse_entry(label: str, value: object) -> Iterator[Declaration]:
    """Yield the declaration of an entry, a scheme or its name, if it declares anything."""
    value = getattr(value, "value", value)
    name = None
    if isinstance(value, str | torch.dtype):
        name = str(value).lower().removeprefix("torch.")
    if scheme := as_mapping(value):
        yield _parse_scheme(label, scheme)
    elif value is not None and value != {} and name not in _UNQUANTIZED_NAMES:
        kind: Kind = "dynamic" if name in _DYNAMIC_NAMES else "unsupported"
        kind = "static" if name in (*_STATIC_NAMES, *_FNUZ_NAMES) else kind
        yield Declaration(kind, f"{label} = {value!r}", is_fnuz=name in _FNUZ_NAMES)


def _parse_scheme(label: str, scheme: Mapping[str, object]) -> Declaration:
    def read(name: str, default: object = None) -> object:
        value = scheme.get(name, default)
        return getattr(value, "value", value)

    # Defaults are as in compressed-tensors.
    num_bits = read("num_bits", 8)
    number_type = read("type", "int")
    strategy = read("strategy")
    is_symmetric = read("symmetric", True)
    is_dynamic = read("dynamic", False)
    is_fp8 = (num_bits, number_type) == (8, "float")
    name = "" if is_fp8 else f" ({_name_format(num_bits, number_type, read('group_size'))})"
    description = (
        f"{label}: {num_bits}-bit {number_type}{name}, strategy {strategy or 'tensor'}, "
        f"{'symmetric' if is_symmetric else 'asymmetric'}, {'dynamic' if is_dynamic else 'static'}"
    )
    if not is_fp8 or not is_symmetric or strategy not in (None, "tensor", "attn_head"):
        return Declaration("unsupported", description)
    return Declaration("dynamic" if is_dynamic else "static", description)


def _name_format(num_bits: object, number_type: object, group_size: object) -> str:
    """Return the usual name of a number format, such as "INT8", "NVFP4" or "MXFP4"."""
    if (num_bits, number_type) == (4, "float") and group_size in (16, 32):
        return "NVFP4" if group_size == 16 else "MXFP4"
    return f"{'FP' if number_type == 'float' else str(number_type).upper()}{num_bits}"


def _parse_transform(label: str, scheme: Mapping[str, object]) -> Iterator[Declaration]:
    """Yield the rotation of K before its scales (R3 of SpinQuant), if the scheme has one."""
    entries = scheme.get("apply")
    mappings = [as_mapping(entry) for entry in entries] if isinstance(entries, list) else []
    locations = [mapping for mapping in mappings if mapping.get("location") == "k_cache"]
    if not locations:
        return
    method, head_dim, randomize = (scheme.get(name) for name in ("type", "head_dim", "randomize"))
    module_names: list[str] = []
    for location in locations:
        targets = location.get("targets")
        module_names += map(str, targets if isinstance(targets, list) else [targets])
    description = (
        f"{label}: K rotated by type {method!r}, head_dim {head_dim!r}, randomize {randomize!r}"
    )
    has_ignored = any(location.get("ignore") for location in locations)
    is_supported = method == "hadamard" and not randomize and not has_ignored
    if is_supported and type(head_dim) is int and module_names:
        yield Declaration(
            "none",
            description,
            rotations=tuple((head_dim, module_name) for module_name in module_names),
        )
    else:
        yield Declaration("unsupported", description)


def _targets_projections(group: object) -> bool:
    targets = as_mapping(group).get("targets")
    return isinstance(targets, list) and any(
        "k_proj" in str(target) or "v_proj" in str(target) for target in targets
    )


def _parse_projections(
    label: str, group: object, quant_config: Mapping[str, object]
) -> Declaration:
    """Return the declaration in Quark's list of projections, whose outputs are the cache."""
    patterns = group if isinstance(group, list) else [group]
    entries = {
        **as_mapping(quant_config.get("kv_cache_quant_config")),
        **as_mapping(quant_config.get("layer_quant_config")),
    }
    is_dynamic = False
    for pattern in map(str, patterns):
        # The name of an entry is the pattern itself, or a layer that matches the pattern.
        matching_entries = [
            entry for name, entry in entries.items() if fnmatchcase(str(name), pattern)
        ]
        for entry in matching_entries or [None]:
            output_config = as_mapping(as_mapping(entry).get("output_tensors"))
            dtype = output_config.get("dtype")
            scheme = output_config.get("qscheme")
            is_symmetric = output_config.get("symmetric") is not False
            if (dtype, scheme) != ("fp8_e4m3", "per_tensor") or not is_symmetric:
                notes = "" if is_symmetric else " (asymmetric)"
                if "fp4" in (dtype, output_config.get("mx_element_dtype")):
                    group_size = output_config.get("group_size") or output_config.get("block_size")
                    notes = f" ({_name_format(4, 'float', group_size)}){notes}"
                description = f"{label}: {pattern} with dtype {dtype!r} and qscheme {scheme!r}"
                return Declaration("unsupported", description + notes)
            is_dynamic = is_dynamic or bool(output_config.get("is_dynamic"))
    remark = "" if quant_config.get("kv_cache_post_rope") else _BEFORE_ROPE_REMARK
    kind: Kind = "dynamic" if is_dynamic else "static"
    return Declaration(kind, f"{label} = {patterns!r}", remark=remark)


def remove_declaration(
    origin: str, config: Config, modelopt_config: Config | None, format: str
) -> Config:
    """Return a `config.json` without its entries about scales. Entries about weights stay.

    Entries that `format` will replace also stay. Raise ScaleError if a remaining entry would be
    wrong with scales in this format, such as an entry in `modelopt_config`.
    """
    config = copy.deepcopy(config)
    is_same_format = find_declaration(config, modelopt_config).dialect == format
    for _, entries in iterate_configs(config):
        for entry_name in _QUANTIZATION_ENTRIES:
            quant_config = entries.get(entry_name)
            if not isinstance(quant_config, dict):
                continue
            pop_entries(quant_config, LAYER_ENTRIES)
            groups = quant_config.get("config_groups")
            for name, group in dict(as_mapping(groups)).items():
                if isinstance(group, dict) and _targets_projections(group):
                    group.pop("output_activations", None)
                    if not group.get("weights") and not group.get("input_activations"):
                        pop_entries(groups, (name,))
            if not is_same_format:
                pop_entries(quant_config, _CACHE_ENTRIES)
                pop_entries(quant_config.get("quantization"), _CACHE_ENTRIES)
                is_compressed = quant_config.get("quant_method") == "compressed-tensors"
                if is_compressed and not (groups or quant_config.get("sparsity_config")):
                    pop_entries(entries, (entry_name,))  # nothing is quantized
        if not is_same_format:
            pop_entries(entries, _TOP_LEVEL_ENTRIES)
    remaining = find_declaration(config, modelopt_config)
    if not is_same_format and remaining.kind != "none":
        raise ScaleError(
            f"{origin}: expected a checkpoint whose KV scales can be replaced in the format "
            f"{format!r}, got a declaration that remains: {remaining.description}. Choose "
            f"{remaining.dialect}"
        )
    return config


def pop_entries(config: object, names: Collection[str]) -> None:
    if isinstance(config, dict):
        for name in names:
            config.pop(name, None)
