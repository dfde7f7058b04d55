"""Readers of static KV scales: JSON and safetensors, never a pickle.

What the dialects have in common is code, and what sets them apart is a row of `ROWS`: how the
tensors are called, which side they give, and under which config they mean what they say. A writer
reads the same rows the other way (`Row.name`).

A reader ends in scales that were checked, or in a `ScaleError` that says what was looked for.
"""

import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import torch
from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    SafetensorsParsingError,
)
from safetensors import SafetensorError, safe_open

from .errors import ScaleError
from .scales import (
    OWN_FILE,
    OWN_VERSION,
    KVScales,
    LayerScales,
    check_ranks,
    checked_constant,
    scalar,
    shortened,
)

__all__ = ["ROWS", "Declaration", "Request", "Row", "declaration", "read_checkpoint", "read_file"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

JSON_FILE = "kv_cache_scales.json"
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".npz", ".npy")
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Request:
    """What the caller wants of a file; the arguments of `KVScales.from_file`."""

    tp_rank: int = 0
    tp_size: int = 1
    strict: bool = True
    num_layers: int | None = None
    model_type: str | None = None

    def __post_init__(self) -> None:
        check_ranks(self.tp_rank, self.tp_size)
        if self.num_layers is not None and self.num_layers < 1:
            raise ScaleError(f"num_layers: expected at least 1, got {self.num_layers}")


# A tensor belongs to the language model when every part of its path is one of these: a tower for
# images or audio has the same layer numbers, and an encoder or a draft head has none of our cache.
_LAYER = (
    r"(?:(?:(?:model|language_model|llm|thinker|transformer|decoder|text_model|gpt_neox|backbone)\.)*"
    r"(?:layers|h)|(?:model\.)?transformer\.blocks)\.(?P<layer>[0-9]{1,9})\."
)
_ATTENTION = r"(?:self_attn|self_attention|attention|attn|mixer)\.(?:(?:mla_attn|attn)\.)*"


@dataclass(frozen=True)
class Row:
    """One dialect's name for a scale.

    Attributes:
        format: what `KVScales.format` then says.
        tail: a regex for what follows the attention module; its group `side` is k, v or kv.
        name: the same for a writer: what follows the layer, with a place for `{side}`.
        rank: of two rows that match in one layer, the lower rank is used.
        dialects: the dialects of a config under which the row is valid; empty: all.
        declared: the name is common to other numbers, so only a config that declares static FP8
            scales makes it valid.
    """

    format: str
    tail: str
    name: str
    rank: int
    dialects: tuple[str, ...] = ()
    declared: bool = False
    pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", re.compile(_LAYER + _ATTENTION + self.tail))


_PAIR, _SHARED = r"(?P<side>[kv])_scale", r"(?P<side>kv)_scale"
_PROJECTION = r"(?P<side>[kv])_proj\.(?P=side)_scale"
_OUTPUT = r"(?P<side>[kv])_proj\.output_scale"

ROWS = (
    Row("compressed-tensors", _PAIR, "self_attn.{side}_scale", 0, ("compressed-tensors",)),
    Row("autofp8", _PAIR, "self_attn.{side}_scale", 0, ("autofp8",)),
    Row("quark", _PAIR, "self_attn.{side}_scale", 0, ("quark",)),
    Row("modelopt", _PAIR, "self_attn.{side}_scale", 0, ("modelopt",)),
    Row("tgi", _PAIR, "self_attn.{side}_scale", 0),
    Row("modelopt", _PROJECTION, "self_attn.{side}_proj.{side}_scale", 1),
    Row("modelopt", r"qk(?:qk)?v_proj\.(?P<side>[kv])_scale", "self_attn.qkv_proj.{side}_scale", 1),
    Row("autofp8", r"(?P<side>[kv])_cache\.scale", "self_attn.{side}_cache.scale", 2),
    Row("quark", _OUTPUT, "self_attn.{side}_proj.output_scale", 3, ("quark",), True),
    Row("autofp8", _OUTPUT, "self_attn.{side}_proj.output_scale", 3, ("autofp8",), True),
    Row(
        "compressed-tensors",
        _OUTPUT,
        "self_attn.{side}_proj.output_scale",
        3,
        ("compressed-tensors",),
        True,
    ),
    Row("autofp8", _SHARED, "self_attn.kv_scale", 4, ("autofp8",)),
    Row("tgi", _SHARED, "self_attn.kv_scale", 4),
    Row(
        "trtllm",
        r"(?P<side>[kv])_cache_scaling_factor",
        "attention.{side}_cache_scaling_factor",
        5,
        declared=True,
    ),
    Row(
        "trtllm",
        r"(?P<side>kv)_cache_scaling_factor",
        "attention.kv_cache_scaling_factor",
        6,
        declared=True,
    ),
)

# Names that say that the scales beside them are not those of an FP8 cache.
_FOREIGN = tuple(
    (re.compile(_LAYER + _ATTENTION + tail), what)
    for tail, what in (
        (r"[kv]_global_scale", "an NVFP4 cache"),
        (r"[kv]_proj\.[kv]_bias", "an affine NVFP4 cache"),
        (r"(?:[kv]_proj\.)?kv_cache_(?:scale|offset)", "an INT8 cache"),
    )
)
_ZERO_POINT = re.compile(
    _LAYER + _ATTENTION + r"(?:(?:k|v|kv)_zero_point|[kv]_proj\.(?:output|k|v)_zero_point)"
)
# What somebody may have meant as a scale of K or V, for the messages.
_LIKELY = re.compile(
    r"(?:^|[._])(?:k|v|kv|key|value|qkv|qkqkv)(?:_cache|_proj)?[._]"
    r"(?![\w.]*(?:weight|input|bias|norm|zero_point))[\w.]*(?:scales?|scaling_factor|amax)$"
)


@dataclass(frozen=True)
class _Hit:
    """A tensor that a row takes."""

    row: Row
    layer: int
    side: str
    name: str


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
_CONFIGS = ("text_config", "llm_config")


def declaration(config: object, hf_quant_config: object = None) -> Declaration:
    """What a config, and ModelOpt's second config beside it, say of static KV scales.

    Args:
        config: transformers' config, or the dict of a `config.json`.
        hf_quant_config: the dict of a `hf_quant_config.json`, or None.
    """
    nested = [(f"{name}.", _get(config, name)) for name in _CONFIGS]
    owners = [("", config), *[(name, owner) for name, owner in nested if owner is not None]]
    found: list[Declaration] = []
    dialect = None
    for entry in ("quantization_config", "compression_config", "quantization"):
        for prefix, owner in owners:
            block = _as_mapping(_get(owner, entry))
            if block:
                block_dialect = _dialect(entry, block)
                dialect = dialect or block_dialect
                found += _of_block(prefix + entry, block, block_dialect)
    if hf_quant_config is not None:
        dialect = dialect if dialect not in (None, "autofp8") else "modelopt"
        found += _of_block("hf_quant_config.json", _as_mapping(hf_quant_config), "modelopt")
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
    inner = _as_mapping(block.get("quantization"))
    found = []
    for entry in ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_dtype"):
        for prefix, owner in (("quantization.", inner), ("", block)):
            found += _judged(f"{where}.{prefix}{entry}", owner.get(entry), dialect)
    group = _as_mapping(block.get("export")).get("kv_cache_group")
    if group:
        found.append(_of_quark(f"{where}.export.kv_cache_group", block, group, dialect))
    return found


def _judged(where: str, value: object, dialect: str) -> list[Declaration]:
    """What one entry declares: a scheme, or a word for one; an empty list for nothing."""
    value = getattr(value, "value", value)
    scheme = _as_mapping(value)
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
    by_layer = _as_mapping(block.get("layer_quant_config"))
    by_cache = _as_mapping(block.get("kv_cache_quant_config"))
    dynamic = False
    for pattern in patterns:
        entry = _as_mapping(by_layer.get(str(pattern)) or by_cache.get(str(pattern)))
        output = _as_mapping(entry.get("output_tensors"))
        dtype, scheme = output.get("dtype"), output.get("qscheme")
        if (dtype, scheme) != ("fp8_e4m3", "per_tensor"):
            what = f"{where}: {pattern} with dtype {dtype!r} and qscheme {scheme!r}"
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


def _get(config: object, name: str) -> object:
    if isinstance(config, Mapping):
        return config.get(name)
    return getattr(config, name, None)


def _as_mapping(value: object) -> Mapping[str, object]:
    """A dict, or what an object of transformers or pydantic turns into."""
    for method in ("to_dict", "model_dump"):
        turn = getattr(value, method, None)
        if callable(turn):
            value = turn()
    return value if isinstance(value, Mapping) else {}


def _attention_layers(config: Mapping[str, object]) -> Sequence[int] | None:
    """The layers that own a KV cache by a `config.json`; None when it does not say."""
    text = next((m for m in (_as_mapping(config.get(n)) for n in _CONFIGS) if m), config)
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


def _head_counts(config: Mapping[str, object]) -> set[int]:
    """Every number of heads that a `config.json` names."""
    text = next((m for m in (_as_mapping(config.get(n)) for n in _CONFIGS) if m), config)
    names = re.compile(r"heads$|^n_head|^multi_query_group_num$")
    return {n for name, n in text.items() if names.search(name) and isinstance(n, int)}


@contextmanager
def _wrapped(path: Path | str, expected: str) -> Iterator[None]:
    """Turns the errors of the libraries that read a file into ours."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        if isinstance(error, ScaleError):
            raise
        raise ScaleError(
            f"{path}: expected {expected}, got {type(error).__name__}: {error}; "
            "the file may be cut off, fetch or write it again"
        ) from error


def _read_json(path: Path, *, unique: bool = True) -> dict[str, object]:
    """A JSON object; with `unique`, a key that is there twice is an error."""

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(items)
        if unique and len(result) < len(items):
            names = [name for name, _ in items]
            twice = next(name for name in names if names.count(name) > 1)
            raise ScaleError(f"{path}: expected every key once, got {twice!r} twice; delete one")
        return result

    with _wrapped(path, "a JSON file"):
        data = json.loads(path.read_bytes().decode("utf-8-sig"), object_pairs_hook=pairs)
    if not isinstance(data, dict):
        raise ScaleError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


def _header(path: Path) -> tuple[list[str], dict[str, str]]:
    """The names of a safetensors file's tensors, and its metadata."""
    with _wrapped(path, "a safetensors file"), safe_open(path, "pt") as file:
        return list(file.keys()), dict(file.metadata() or {})


def _load(path: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Scales as float32: `[]`, or `[heads, 1]` for those per head."""
    loaded = {}
    with _wrapped(path, "a safetensors file"), safe_open(path, "pt") as file:
        there = set(file.keys())
        for name in names:
            if name not in there:
                raise ScaleError(
                    f"{path}: expected the tensor {name}, which the index places here, got none; "
                    "fetch the file again"
                )
            view = file.get_slice(name)
            dtype, shape = view.get_dtype(), list(view.get_shape())
            if dtype not in _FLOATS:
                raise ScaleError(
                    f"{path}: {name}: expected one of {', '.join(_FLOATS)}, got {dtype}; "
                    "these are not scales of an FP8 cache"
                )
            single, per_head = all(n == 1 for n in shape), shape[1:] in ([1], [1, 1])
            if not (single or (per_head and shape[0] > 0)):
                raise ScaleError(
                    f"{path}: {name}: expected one number, or the shape [heads, 1, 1], got {shape}"
                )
            tensor = file.get_tensor(name).float()
            loaded[name] = tensor.reshape(()) if single else tensor.reshape(-1, 1)
    return loaded


def read_file(path: Path, want: Request) -> KVScales:
    """The scales of one file, whichever kind it is."""
    if path.suffix.lower() in _PICKLES:
        raise ScaleError(
            f"{path}: expected .json or .safetensors, got {path.suffix}; pickles are never "
            "loaded, convert the file to safetensors"
        )
    if not os.path.isfile(path):
        advice = "use from_pretrained" if os.path.isdir(path) else "check the path"
        raise ScaleError(f"{path}: expected a file, found none; {advice}")
    if path.suffix == ".json":
        data = _read_json(path)
        if "weight_map" in data:
            return _read_beside(path, _weight_map(path), want)
        return _read_vllm_json(path, data, want, {})
    if path.suffix != ".safetensors":
        raise ScaleError(f"{path}: expected .json or .safetensors, got {path.suffix!r}")
    names, metadata = _header(path)
    if "hf_fp8kv" in metadata:
        return _read_own(path, names, metadata["hf_fp8kv"], want)
    return _read_beside(path, dict.fromkeys(names, path.name), want)


def _read_beside(path: Path, files: dict[str, str], want: Request) -> KVScales:
    """The scales of one file of a checkpoint, or of its index, with the config beside it."""
    folder = _Local(path.parent)
    return _read_tensors(folder, files, want, *_declared(folder))


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor names and the files that hold them, from a safetensors index."""
    files = _read_json(path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ScaleError(f"{path}: expected a weight_map with tensors, got {files!r}")
    for file in files.values():
        # A file of another folder is not part of the checkpoint.
        if not isinstance(file, str) or Path(file).name != file:
            raise ScaleError(f"{path}: expected file names in weight_map, got {file!r}")
    return files


_OWN_NAME = re.compile(r"layers\.([0-9]{1,9})\.(k_scale|v_scale|k_center)")


def _read_own(path: Path, names: list[str], about: str, want: Request) -> KVScales:
    with _wrapped(path, "JSON in the metadata entry 'hf_fp8kv'"):
        header = _as_mapping(json.loads(about))
    if header.get("version") != OWN_VERSION or header.get("dtype") != "float8_e4m3fn":
        raise ScaleError(
            f"{path}: expected version {OWN_VERSION} and float8_e4m3fn, got "
            f"{header.get('version')!r} and {header.get('dtype')!r}; update hf_fp8kv"
        )
    parts: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    with _wrapped(path, "a safetensors file"), safe_open(path, "pt") as file:
        for name in names:
            match = _OWN_NAME.fullmatch(name)
            if match is None or file.get_slice(name).get_dtype() != "F32":
                raise ScaleError(
                    f"{path}: expected layers.N.k_scale, v_scale and k_center in F32, got {name}"
                )
            parts[int(match[1])][match[2]] = file.get_tensor(name)
    if header.get("layers") != sorted(parts):
        raise ScaleError(
            f"{path}: expected the layers of its metadata, {header.get('layers')}, got "
            f"{shortened(sorted(parts))}; write the file again"
        )
    layers = {}
    for index, part in parts.items():
        if not {"k_scale", "v_scale"} <= set(part):
            raise ScaleError(f"{path}: layer {index}: expected k_scale and v_scale, got one")
        source = f"{path}: layers.{index}"
        layers[index] = LayerScales(part["k_scale"], part["v_scale"], part.get("k_center"), source)
    model_type = header.get("model_type")
    model_type = model_type if isinstance(model_type, str) else None
    _check_model_type(path, model_type, want.model_type, want)
    expected = range(want.num_layers) if want.num_layers else sorted(layers)
    layers = _complete(layers, expected, want, str(path))
    return KVScales(layers, "hf_fp8kv", model_type, str(path))


def _read_vllm_json(
    path: Path, data: Mapping[str, object], want: Request, config: Mapping[str, object]
) -> KVScales:
    """The format of vLLM's `quantization_param_path`: one number a layer, for K and V alike."""
    cache = data.get("kv_cache")
    if not isinstance(cache, dict):
        raise ScaleError(
            f"{path}: expected an object 'kv_cache' with 'dtype' and 'scaling_factor', got "
            f"{shortened(data) or 'nothing'}; this is not a kv_cache_scales.json"
        )
    if cache.get("dtype") != "float8_e4m3fn":
        raise ScaleError(
            f"{path}: kv_cache.dtype: expected 'float8_e4m3fn', got {cache.get('dtype')!r}; "
            "scales of another format cannot be used"
        )
    model_type = data.get("model_type")
    if not isinstance(model_type, str | None) or ("model_type" not in data and want.strict):
        raise ScaleError(
            f"{path}: model_type: expected a string or null, got {model_type!r}; add it, or pass "
            "strict=False"
        )
    wanted_type = want.model_type or config.get("model_type")
    _check_model_type(path, model_type, wanted_type, want)
    ranks = _ranks(path, cache.get("scaling_factor"))
    layers = {
        layer: LayerScales(scalar(s), scalar(s), source=f"{path}: layer {layer}")
        for layer, s in _of_ranks(path, ranks, want).items()
    }
    expected = _expected(layers, config, want)
    # Its readers refuse a file with another number of layers, too many as well as too few.
    extra = [layer for layer in layers if layer not in expected]
    if extra and want.strict:
        raise ScaleError(
            f"{path}: expected {len(expected)} layers, got also layers {shortened(extra)}; use "
            "the scales of this very model, or pass strict=False"
        )
    layers = _complete(layers, expected, want, str(path))
    return KVScales(layers, "vllm-json", model_type, str(path))


def _ranks(path: Path, factors: object) -> dict[int, dict[int, float]]:
    """The numbers of every rank, each of them checked; "rank0" is an old spelling of "0"."""
    if not isinstance(factors, dict) or not factors:
        raise ScaleError(
            f"{path}: kv_cache.scaling_factor: expected an object of ranks, got {factors!r}"
        )
    ranks: dict[int, dict[int, float]] = {}
    for rank_key, entries in factors.items():
        rank = _index(path, rank_key, r"(?:rank)?([0-9]{1,9})", "a rank", ranks)
        if not isinstance(entries, dict) or not entries:
            raise ScaleError(f"{path}: rank {rank}: expected an object of layers, got {entries!r}")
        ranks[rank] = {}
        for layer_key, value in entries.items():
            layer = _index(path, layer_key, r"([0-9]{1,9})", "a layer", ranks[rank])
            what = f"{path}: rank {rank}, layer {layer}"
            if isinstance(value, str):
                with _wrapped(what, "a number"):
                    value = float(value)
            ranks[rank][layer] = checked_constant(value, what)
    if sorted(ranks) != list(range(len(ranks))):
        raise ScaleError(
            f"{path}: expected the ranks 0 to {len(ranks) - 1}, got {shortened(sorted(ranks))}; "
            "a rank is missing"
        )
    for rank, entry in ranks.items():
        if set(entry) != set(ranks[0]):
            raise ScaleError(
                f"{path}: expected the same layers for every rank, got {len(ranks[0])} layers for "
                f"rank 0 and {len(entry)} for rank {rank}"
            )
    return ranks


def _index(path: Path, key: str, pattern: str, what: str, seen: Collection[int]) -> int:
    match = re.fullmatch(pattern, key)
    if match is None:
        raise ScaleError(f"{path}: expected {what} such as '0' as the key, got {key!r}")
    if int(match[1]) in seen:
        raise ScaleError(f"{path}: expected {what} {match[1]} once, got it twice; delete one")
    return int(match[1])


def _of_ranks(path: Path, ranks: dict[int, dict[int, float]], want: Request) -> dict[int, float]:
    """This rank's scales, or in one process the largest over the ranks: nothing overflows."""
    if want.tp_size == len(ranks):
        return ranks[want.tp_rank]
    if want.tp_size > 1 and want.strict:
        raise ScaleError(
            f"{path}: expected the scales of {want.tp_size} ranks, got {len(ranks)}; pass "
            "strict=False to use the largest of all ranks"
        )
    if any(entry != ranks[0] for entry in ranks.values()):
        logger.warning("%s: the scales of its %d ranks differ: the largest one is used of each "
                       "layer", path, len(ranks))  # fmt: skip
    return {layer: max(entry[layer] for entry in ranks.values()) for layer in ranks[0]}


class _Folder(Protocol):
    """A checkpoint's files, here or on the Hub."""

    @property
    def origin(self) -> str: ...

    def path(self, name: str) -> Path | None:
        """The file, fetched when it is far; None when there is none."""

    def header(self, name: str) -> list[str] | None:
        """The names of a safetensors file's tensors; None when there is no such file."""

    def others(self, suffix: str) -> list[str]:
        """The names of the files that are known without fetching them and end so."""


@dataclass(frozen=True)
class _Local:
    root: Path

    @property
    def origin(self) -> str:
        return str(self.root)

    def path(self, name: str) -> Path | None:
        path = self.root / name
        return path if path.is_file() else None

    def header(self, name: str) -> list[str] | None:
        path = self.path(name)
        return None if path is None else _header(path)[0]

    def others(self, suffix: str) -> list[str]:
        return sorted(path.name for path in self.root.glob(f"*{suffix}"))


@dataclass
class _Hub:
    """A repository. Only small files, and those that hold scales, are ever fetched."""

    repo: str
    revision: str | None
    token: str | bool | None
    cache_dir: str | Path | None
    local_files_only: bool
    force_download: bool
    subfolder: str | None
    # Why only cached files are read, once a request has failed: others may exist all the same.
    trouble: str = ""
    found: dict[str, Path | None] = field(default_factory=dict)

    @property
    def offline(self) -> bool:
        return self.local_files_only or constants.HF_HUB_OFFLINE or bool(self.trouble)

    @property
    def origin(self) -> str:
        return f"{self.repo} ({self.trouble})" if self.trouble else self.repo

    def path(self, name: str) -> Path | None:
        def fetch() -> Path:
            return Path(
                hf_hub_download(
                    self.repo,
                    name,
                    subfolder=self.subfolder,
                    revision=self.revision,
                    token=self.token,
                    cache_dir=self.cache_dir,
                    local_files_only=self.offline,
                    force_download=self.force_download and not self.offline,
                )
            )

        if name not in self.found:
            self.found[name] = self._asked(fetch)
        return self.found[name]

    def header(self, name: str) -> list[str] | None:
        file = f"{self.subfolder}/{name}" if self.subfolder else name

        def fetch() -> list[str]:
            here = try_to_load_from_cache(self.repo, file, self.cache_dir, self.revision)
            if isinstance(here, str) and not self.force_download:
                return _header(Path(here))[0]
            if self.offline:
                raise EntryNotFoundError(f"{file} is not cached")
            # A request of some kilobytes instead of the whole file.
            found = HfApi().parse_safetensors_file_metadata(
                self.repo, file, revision=self.revision, token=self.token
            )
            return list(found.tensors)

        return self._asked(fetch)

    def others(self, suffix: str) -> list[str]:
        return []

    def _asked(self, fetch: Callable[[], T]) -> T | None:
        try:
            return fetch()
        except EntryNotFoundError as error:
            if isinstance(error, LocalEntryNotFoundError) and not self.trouble:
                self.trouble = "offline: cached files only" if self.offline else "Hub out of reach"
            return None
        except _HUB_ERRORS as error:
            if isinstance(error, ScaleError):
                raise
            raise ScaleError(
                f"{self.repo}: expected a repository that can be read, got "
                f"{type(error).__name__}: {error}; check the name, the revision and the token"
            ) from error


# The base of HfHubHTTPError is the base of whatever HTTP library the Hub's client uses.
_HUB_ERRORS: tuple[type[Exception], ...] = (
    *HfHubHTTPError.__bases__,
    OSError,
    ValueError,
    NotASafetensorsRepoError,
    SafetensorsParsingError,
)


def read_checkpoint(
    name: str,
    want: Request,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    subfolder: str | None = None,
) -> KVScales:
    """The scales of a local folder or of a repository of the Hub."""
    if name and os.path.isfile(name):
        return read_file(Path(name), want)
    if name and os.path.isdir(name):
        return _read_folder(_Local(Path(name) / (subfolder or "")), want)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?", name):
        raise ScaleError(
            f"{name!r}: expected a folder, a file or a repository id, found none; check the path"
        )
    if Path(name).suffix.lower() in _PICKLES:
        return read_file(Path(name), want)
    cache = None if cache_dir is None else Path(cache_dir)
    hub = _Hub(name, revision, token, cache, local_files_only, force_download, subfolder)
    return _read_folder(hub, want)


def _read_folder(folder: _Folder, want: Request) -> KVScales:
    """Our own file, else the tensors of the checkpoint, else the JSON beside them."""
    own = folder.path(OWN_FILE)
    if own is not None:
        return read_file(own, want)
    files = _tensor_files(folder)
    declared, config = _declared(folder)
    hits, _ = _matched(files, declared)
    if hits and folder.path("config.json") is None and want.strict:
        raise ScaleError(
            f"{folder.origin}: expected a config.json beside the checkpoint, found none: it "
            "says whether the scales are of FP8; add it, or pass strict=False"
        )
    beside = None if hits else folder.path(JSON_FILE)
    if beside is not None:
        logger.info("%s: no scales among its tensors, reading %s", folder.origin, JSON_FILE)
        return _read_vllm_json(beside, _read_json(beside), want, config)
    return _read_tensors(folder, files, want, declared, config)


def _tensor_files(folder: _Folder) -> dict[str, str]:
    """Tensor names and their files; the order of preference is that of transformers."""
    names = folder.header("model.safetensors")
    if names is not None:
        return dict.fromkeys(names, "model.safetensors")
    indices = ["model.safetensors.index.json", *folder.others(".safetensors.index.json")]
    for index in indices:
        path = folder.path(index)
        if path is not None:
            return _weight_map(path)
    shards = folder.others(".safetensors")
    # The same weights in another layout, beside the ordinary ones.
    ordinary = [name for name in shards if not name.startswith("consolidated")]
    files: dict[str, str] = {}
    for shard in ordinary or shards:
        for name in folder.header(shard) or ():
            if name in files and _LIKELY.search(name):
                raise ScaleError(
                    f"{folder.origin}: expected {name} in one file, got it in {files[name]} and "
                    f"{shard}; name one of them with from_file"
                )
            files[name] = shard
    return files


def _declared(folder: _Folder) -> tuple[Declaration, dict[str, object]]:
    """What the configs declare, and the main config (empty when there is none)."""
    path, second = folder.path("config.json"), folder.path("hf_quant_config.json")
    config = {} if path is None else _read_json(path, unique=False)
    about = None if second is None else _read_json(second, unique=False)
    return declaration(config, about), config


def _read_tensors(
    folder: _Folder,
    files: dict[str, str],
    want: Request,
    declared: Declaration,
    config: dict[str, object],
) -> KVScales:
    """The scales among a checkpoint's tensors, whose names and files are given."""
    hits, unknown = _matched(files, declared)
    if not hits:
        raise _nothing(folder, files, declared)
    _check_declared(folder, declared, bool(config))
    _check_foreign(folder, files)
    values = _values(folder, files, hits, 0.5 if declared.fnuz else 1.0)
    layers = _assembled(folder, files, hits, values)
    heads = _head_counts(config)
    for index, layer in layers.items():
        for side in (layer.k, layer.v):
            if side.ndim and heads and side.shape[0] not in heads:
                raise ScaleError(
                    f"{layer.source}: expected one scale, or one for each of the heads that "
                    f"config.json names ({sorted(heads)}), got {side.shape[0]} in layer {index}"
                )
    if all(bool((s == 1).all()) for layer in layers.values() for s in (layer.k, layer.v)):
        logger.warning(
            "%s: every KV scale is exactly 1.0, as tools write it without calibration",
            folder.origin,
        )
    ours = [name for name in unknown if re.match(_LAYER, name)]
    if ours:
        logger.warning("%s: not used, though they look like scales: %s", folder.origin,
                       shortened(ours))  # fmt: skip
    model_type = config.get("model_type")
    model_type = model_type if isinstance(model_type, str) else None
    _check_model_type(folder.origin, model_type, want.model_type, want)
    layers = _complete(layers, _expected(layers, config, want), want, folder.origin)
    return KVScales(layers, hits[0].row.format, model_type, folder.origin)


def _matched(names: Iterable[str], declared: Declaration) -> tuple[list[_Hit], list[str]]:
    """The tensors that a row takes, best rank first, and those that only look like scales."""
    hits, unknown = [], []
    for name in names:
        for row in ROWS:
            if row.dialects and declared.dialect not in row.dialects:
                continue
            # An INT8 cache has these names too: it is taken here, and refused with its reason.
            if row.declared and declared.kind == "none":
                continue
            match = row.pattern.fullmatch(name)
            if match is not None:
                hits.append(_Hit(row, int(match["layer"]), match["side"], name))
                break
        else:
            if _LIKELY.search(name):
                unknown.append(name)
    return sorted(hits, key=lambda hit: (hit.row.rank, hit.layer, hit.name)), unknown


def _check_declared(folder: _Folder, declared: Declaration, has_config: bool) -> None:
    if declared.kind == "refused":
        raise ScaleError(
            f"{folder.origin}: expected scales of an FP8 cache (static, symmetric, per tensor or "
            f"per head), got {declared.what}; use scales=None, which is dynamic"
        )
    if declared.kind == "dynamic":
        raise ScaleError(
            f"{folder.origin}: expected no scales in the checkpoint, as its config declares "
            f"{declared.what}, got some; use scales=None, which is dynamic, or correct the config"
        )
    if declared.kind == "none":
        logger.warning(
            "%s: %s; its KV scales are taken to be of float8_e4m3fn",
            folder.origin,
            "the config declares no KV cache" if has_config else "no config.json",
        )


def _check_foreign(folder: _Folder, files: dict[str, str]) -> None:
    """Refuses what belongs to INT8 and NVFP4 caches, and zero points other than zero."""
    for name in files:
        for pattern, what in _FOREIGN:
            if pattern.fullmatch(name):
                raise ScaleError(
                    f"{folder.origin}: expected scales of an FP8 cache, got {name}, of {what}; "
                    "use scales=None, which is dynamic"
                )
    points = [name for name in files if _ZERO_POINT.fullmatch(name)]
    for file, names in _by_file(points, files).items():
        path = _present(folder, file)
        with _wrapped(path, "a safetensors file"), safe_open(path, "pt") as opened:
            for name in names:
                if bool(opened.get_tensor(name).float().ne(0).any()):
                    raise ScaleError(
                        f"{path}: {name}: expected a zero point of 0, got another; asymmetric "
                        "scales cannot be used"
                    )


def _values(
    folder: _Folder, files: dict[str, str], hits: list[_Hit], factor: float
) -> dict[str, torch.Tensor]:
    """The scales by the names of their tensors, in the unit of E4M3FN."""
    values = {}
    for file, names in _by_file([hit.name for hit in hits], files).items():
        for name, value in _load(_present(folder, file), names).items():
            values[name] = value * factor
    return values


def _by_file(names: Iterable[str], files: dict[str, str]) -> dict[str, list[str]]:
    grouped = defaultdict(list)
    for name in names:
        grouped[files[name]].append(name)
    return grouped


def _present(folder: _Folder, file: str) -> Path:
    path = folder.path(file)
    if path is None:
        raise ScaleError(
            f"{folder.origin}: expected the file {file}, which holds scales by the index, found "
            "none; fetch it"
        )
    return path


def _assembled(
    folder: _Folder, files: dict[str, str], hits: list[_Hit], values: dict[str, torch.Tensor]
) -> dict[int, LayerScales]:
    """One pair for each layer, by the rank of the rows; oddities are logged once a file."""
    by_layer: dict[int, list[_Hit]] = defaultdict(list)
    for hit in hits:
        by_layer[hit.layer].append(hit)
    oddities: dict[str, list[int]] = defaultdict(list)
    layers = {}
    for index, found in by_layer.items():
        _check_ties(folder, found, values)
        k_hit, v_hit = _chosen(found)
        if k_hit is None or v_hit is None:
            only = "K" if v_hit is None else "V"
            oddities[f"only {only} has a scale, which is used for both sides"].append(index)
        first = k_hit or v_hit
        assert first is not None, "a layer is only listed with a hit"
        k_hit, v_hit = k_hit or first, v_hit or first
        k, v = values[k_hit.name], values[v_hit.name]
        shared = next((hit for hit in found if hit.side == "kv"), None)
        if shared is not None and shared not in (k_hit, v_hit):
            largest = max(k.max().item(), v.max().item())
            if values[shared.name].max().item() != largest:
                oddities["kv_scale is not the larger one of the pair, which is used"].append(index)
        names = ", ".join(dict.fromkeys((k_hit.name, v_hit.name)))
        layers[index] = LayerScales(k, v, source=f"{folder.origin}/{files[k_hit.name]}: {names}")
    for oddity, indices in oddities.items():
        logger.warning("%s: %s (layers %s)", folder.origin, oddity, shortened(indices))
    return layers


def _chosen(found: list[_Hit]) -> tuple[_Hit | None, _Hit | None]:
    """The tensors for K and V: the first rank with both, else the best of each side."""

    def best(side: str, rank: int | None = None) -> _Hit | None:
        return next(
            (h for h in found if side in h.side and (rank is None or h.row.rank == rank)), None
        )

    for rank in sorted({hit.row.rank for hit in found}):
        k, v = best("k", rank), best("v", rank)
        if k is not None and v is not None:
            return k, v
    return best("k"), best("v")


def _check_ties(folder: _Folder, found: list[_Hit], values: dict[str, torch.Tensor]) -> None:
    """Two names for one scale must agree: nothing says which one is meant."""
    first: dict[tuple[int, str], _Hit] = {}
    for hit in found:
        other = first.setdefault((hit.row.rank, hit.side), hit)
        if other is not hit and not torch.equal(values[hit.name], values[other.name]):
            raise ScaleError(
                f"{folder.origin}: expected one scale for {hit.side.upper()} of layer "
                f"{hit.layer}, got {other.name} and {hit.name}, which differ; delete one"
            )


def _expected(found: Collection[int], config: Mapping[str, object], want: Request) -> Sequence[int]:
    """The layers that should have scales; without a config, all up to the last one found."""
    if want.num_layers is not None:
        return range(want.num_layers)
    if not config:
        return range(max(found) + 1)
    owned = _attention_layers(config)
    return sorted(found) if owned is None else owned


def _complete(
    layers: dict[int, LayerScales], expected: Sequence[int], want: Request, origin: str
) -> dict[int, LayerScales]:
    """The layers that the model has; those that it lacks are dropped, such as of a draft head."""
    last = expected[-1] if expected else -1
    extra = [index for index in layers if index > last]
    if extra:
        logger.info("%s: left out the layers %s, past the last one", origin, shortened(extra))
    kept = {index: layer for index, layer in layers.items() if index <= last}
    missing = shortened(index for index in expected if index not in kept)
    if not kept or (missing and want.strict):
        raise ScaleError(
            f"{origin}: expected scales for {len(expected)} layers, got {len(kept)}: missing "
            f"{missing}; use the scales of this very model, or pass strict=False to use those "
            "that are there"
        )
    if missing:
        logger.warning("%s: layers without scales: %s", origin, missing)
    return kept


def _check_model_type(origin: object, found: str | None, wanted: object, want: Request) -> None:
    if found is None or wanted is None or found == wanted:
        return
    message = f"{origin}: expected scales of a {wanted!r} model, got {found!r}"
    if want.strict:
        raise ScaleError(f"{message}; use the scales of this very model, or pass strict=False")
    logger.warning("%s", message)


def _nothing(folder: _Folder, files: Iterable[str], declared: Declaration) -> ScaleError:
    """The error for a checkpoint without scales: what was looked for, and what looks like it."""
    names = dict.fromkeys(row.name.format(side="{k,v}") for row in ROWS)
    likely = shortened(name for name in files if _LIKELY.search(name))
    found = f"got only {likely}, which no reader takes" if likely else "got none"
    pickles = [n for suffix in _PICKLES for n in folder.others(suffix)]
    if pickles:
        found += f" (pickles are never loaded: {shortened(pickles)})"
    return ScaleError(
        f"{folder.origin}: expected {OWN_FILE}, {JSON_FILE}, or scale tensors such as "
        f"{', '.join(names)} under the layers of the language model, {found}; the config declares "
        f"{declared.what}; use scales=None, which is dynamic, or calibrate"
    )
