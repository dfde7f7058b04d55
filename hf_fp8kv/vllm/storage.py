"""Read the storage of each layer from vLLM's options, and view vLLM's blocks as its pages.

Scales or a plan are options of vLLM's configuration. Unlike environment variables, it reaches every
process on every machine:

    --additional-config '{"hf_fp8kv": {"plan": "path/or/hub-id"}}'

vLLM clears, copies, offloads and sends blocks as contiguous bytes, and groups of layers share one
pool. K, V and scales of a page must therefore be in the same block.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..cache.options import CacheOptions
from ..errors import ConfigError, ScaleError
from ..modeling.tensor_parallel import TensorParallel
from ..ops import Pages
from ..scales.kv_scales import KVScales, resolve_scales
from ..serving.config import ServingConfig
from ..serving.layout import EngineLayout
from .dtypes import DTYPES

_KEY = "hf_fp8kv"
# The types of each option, and the rule in error messages.
_OPTION_TYPES: dict[str, tuple[Any, str]] = {
    "scales": (str | float | int | None, "a path, a repository id or a number"),
    "plan": (str | None, "a path, a repository id or text"),
    "backend": (str, "a name"),
}


def check_scales(options: CacheOptions, num_layers: int, model_types: Sequence[str]) -> None:
    """Raise ScaleError for scales that do not belong to the model. Layers may still be missing.

    Args:
        options: Options with the scales.
        num_layers: Number of layers of the model.
        model_types: transformers' model types of the model and of its text part.
    """
    scales = options.scales
    if not isinstance(scales, KVScales):
        return
    if extra_layers := [index for index in scales.layers if index >= num_layers]:
        raise ScaleError(
            f"scales ({scales.origin}): expected only the model's layers, 0 to "
            f"{num_layers - 1}, also got {extra_layers}. Use the scales of the served model"
        )
    if scales.model_type is not None and model_types and scales.model_type not in model_types:
        raise ScaleError(
            f"scales ({scales.origin}): expected scales of a {model_types[0]!r} model, got "
            f"{scales.model_type!r}. Use the scales of the served model"
        )


def make_layout(
    options: CacheOptions,
    index: int,
    num_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
) -> EngineLayout:
    """Return the layout of a layer's pages. `dtype` is the dtype of the model."""
    return EngineLayout(
        num_heads,
        head_dim,
        page_size,
        plan=options.get_layer_plan(index),
        dtype=dtype,
        is_dynamic=options.has_dynamic_scales,
    )


def count_slot_bytes(options: CacheOptions, index: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the number of bytes of a token and KV head of a layer."""
    page_size = 16  # pages of any size have the same number of bytes per token
    return make_layout(options, index, 1, head_dim, page_size, dtype).bytes_per_page // page_size


def read_options(
    dtype_name: str,
    additional_config: object,
    checkpoint: str,
    tp_rank: int,
    tp_size: int,
    revision: str | None = None,
    engine: str = "",
) -> CacheOptions:
    """Return the options of a model's pages in one tensor-parallel rank.

    Args:
        dtype_name: Value of `--kv-cache-dtype`, a key of `DTYPES`.
        additional_config: vLLM's `--additional-config`, a dict.
        checkpoint: Folder or repository of the model. It has the static scales if none are given.
        tp_rank, tp_size: Rank of this process, and number of processes, in tensor parallelism.
        revision: Revision of the checkpoint, if it is a repository.
        engine: Unique id of the engine. Files are read once per engine.

    Raises:
        ConfigError, ScaleError: An option is invalid, or conflicts with another option.
    """
    passed_options = (
        additional_config.get(_KEY, {}) if isinstance(additional_config, Mapping) else {}
    )
    if not isinstance(passed_options, Mapping) or passed_options.keys() - _OPTION_TYPES.keys():
        raise ConfigError(
            f"--additional-config {_KEY}: expected a dict of {', '.join(_OPTION_TYPES)}, got "
            f"{passed_options!r}. Omit other entries"
        )
    for name, option in passed_options.items():
        types, rule = _OPTION_TYPES[name]
        if not isinstance(option, types):
            raise ConfigError(
                f"--additional-config {_KEY}: {name}: expected {rule}, got {option!r}. "
                f"Omit {name}, or pass {rule}"
            )
    tensor_parallel = TensorParallel(tp_rank, tp_size)
    return _load_options(
        dtype_name, checkpoint, tensor_parallel, revision, engine, **passed_options
    )


@functools.lru_cache(maxsize=8, typed=True)
def _load_options(
    dtype_name: str,
    checkpoint: str,
    tensor_parallel: TensorParallel,
    revision: str | None,
    engine: str,
    *,
    scales: str | float | None = None,
    plan: str | None = None,
    backend: str = "auto",
) -> CacheOptions:
    """Return the options, which are cached for each `engine`."""
    cache_dtype = DTYPES[dtype_name]
    loaded_scales: KVScales | str | float | None = scales
    if scales is None and plan is None and not cache_dtype.is_dynamic:
        loaded_scales = resolve_scales(
            checkpoint,
            tp_rank=tensor_parallel.rank,
            tp_size=tensor_parallel.size,
            revision=revision,
        )
    options = ServingConfig.parse(
        scales=loaded_scales,
        plan=plan,
        dtype=cache_dtype.format,
        backend=backend,
        tensor_parallel=tensor_parallel,
    ).options
    if options.has_dynamic_scales != cache_dtype.is_dynamic:
        matching_name = (
            f"{dtype_name}_static" if cache_dtype.is_dynamic else dtype_name.removesuffix("_static")
        )
        expected = "a scale for each token and head" if cache_dtype.is_dynamic else "static scales"
        raise ConfigError(
            f"--kv-cache-dtype {dtype_name}: expected {expected}, got {options.scales!r}. Use "
            f"{matching_name} for these scales"
        )
    return options


def view_pages(kv_cache: torch.Tensor, layout: EngineLayout) -> Pages:
    """View one layer's part of vLLM's pool as pages.

    `kv_cache` is vLLM's view of this part, `[P, Hkv, S, C]`. Its elements are bytes, and C is the
    number of bytes of a token and head. Each block must be contiguous, and may end with unused
    bytes.

    Raises:
        ConfigError: The blocks have gaps, or are smaller than pages.
    """
    block_bytes = kv_cache[:1].numel()
    if layout.bytes_per_page > block_bytes or not kv_cache[:1].is_contiguous():
        raise ConfigError(
            f"expected blocks of at least {layout.bytes_per_page} bytes without gaps, got "
            f"{block_bytes} bytes with the strides {kv_cache.stride()}. Unset VLLM_KV_CACHE_LAYOUT"
        )
    shape = (len(kv_cache), block_bytes)
    strides = (kv_cache.stride(0), 1)
    return layout.view_pages(kv_cache.view(torch.uint8).as_strided(shape, strides))
