"""Calculate the number of tokens that fit in transformers' engine, with FP8 and bf16 pages.

The engine's planner gets the memory of a GPU as a number. It needs no GPU and allocates nothing,
because the pages are on torch's "meta" device.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, ContinuousBatchingConfig, PreTrainedConfig
from transformers.generation.continuous_batching import cache as stock

from ..errors import ConfigError
from ..modeling.model_support import ATTENTION, caches_latents
from .config import ServingConfig
from .engines import make_cache_class, rebind_globals
from .engines.common import EngineCache, read_kv_sizes
from .probe import read_layer_windows

# Shapes of well-known models: the fields of their config.json that determine the bytes per token.
_FIELDS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "sliding_window",
)
_SHAPES: dict[str, tuple[str | int | None, ...]] = {
    "SmolLM2-135M": ("llama", 576, 30, 9, 3, 64, 49152),
    "Llama-3.2-1B": ("llama", 2048, 16, 32, 8, 64, 128256),
    "Qwen2.5-7B": ("qwen2", 3584, 28, 28, 4, None, 152064),
    "Llama-3.1-8B": ("llama", 4096, 32, 32, 8, 128, 128256),
    "Qwen3-8B": ("qwen3", 4096, 36, 32, 8, 128, 151936),
    "Gemma-2-9B": ("gemma2", 3584, 42, 16, 8, 256, 256000, 4096),
    "gpt-oss-20b": ("gpt_oss", 2880, 24, 64, 8, 64, 201088, 128),
    "Llama-3.1-70B": ("llama", 8192, 80, 64, 8, 128, 128256),
}
# The fields of each model by name. A missing head_dim or sliding_window is None or left out.
MODELS: dict[str, dict[str, Any]] = {
    name: dict(zip(_FIELDS, values, strict=False)) for name, values in _SHAPES.items()
}

# Attention functions of transformers' engine. flash copies fewer keys and values than sdpa.
STOCK_ATTENTION = {"bf16, flash": "flash_attention_2", "bf16, sdpa": "sdpa"}
FP8_OPTIONS: dict[str, dict[str, Any]] = {
    "fp8, static scales": {"scales": 1.0},
    "fp8, dynamic scales": {},
    "K 16 bit, V fp8": {"scales": 1.0, "key_dtype": "auto"},
    "int6, dynamic scales": {"plan": "int6 rotated"},
}
GIB = 2**30
MEMORY_SHARE = 0.9  # share of the free memory that pages may use, the engine's default on a GPU
PAGE_SIZE = 256  # tokens
# Maximum numbers of tokens and requests of a step, whose activations need memory.
MAX_BATCH_TOKENS = 8192
MAX_REQUESTS = 256


def plan_tokens(
    config: PreTrainedConfig,
    memory_bytes: int,
    serving_config: ServingConfig | None,
    *,
    attention: str = ATTENTION,
) -> int:
    """Return the number of tokens for which the engine's planner finds room in every layer.

    Args:
        config: Config of the model, or of its text part.
        memory_bytes: Bytes that are free once the model is loaded.
        serving_config: Config of FP8 pages. None means transformers' own cache, in bfloat16.
        attention: Name of the attention function, for which the planner reserves memory.

    Raises:
        ConfigError: The memory does not suffice for a single step.
    """
    cache_class = _make_planning_class(serving_config, int(memory_bytes * MEMORY_SHARE))
    config._attn_implementation_internal = attention
    batching_config = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_requests_per_batch=MAX_REQUESTS,
        max_blocks_per_request=0,
        max_memory_percent=MEMORY_SHARE,
        use_async_batching=False,
        use_cuda_graph=False,
    )
    one_process = SimpleNamespace(tp_size=1, tp_local_rank=0, are_kv_heads_tp_ed=lambda: False)
    try:
        planned_cache = cache_class(
            config=config,
            continuous_batching_config=batching_config,
            device=torch.device("meta"),
            distributed_helper=one_process,
            dtype=torch.bfloat16,
            model_supports_logits_to_keep=True,
        )
    except (MemoryError, ValueError) as error:
        raise ConfigError(
            f"memory: expected room for a step of {MAX_BATCH_TOKENS} tokens and for pages, got "
            f"{memory_bytes / GIB:.3g} GiB: {error}"
        ) from error
    return int(planned_cache.num_blocks) * PAGE_SIZE


def _make_planning_class(serving_config: ServingConfig | None, num_bytes: int) -> Any:
    """Return a cache class whose planner has `num_bytes` bytes of memory on every machine."""
    base_class: Any = stock.PagedAttentionCache
    make_base_handler: Callable[..., Any] = stock.PagedAttentionMemoryHandler
    if serving_config is not None:
        base_class = make_cache_class(serving_config)
        make_base_handler = base_class.make_memory_handler

    def make_handler(*args: Any, **options: Any) -> Any:
        handler = make_base_handler(*args, **options)
        handler.available_memory = num_bytes
        return handler

    if serving_config is not None:
        return type("PlanningCache", (base_class,), {"make_memory_handler": make_handler})
    init = rebind_globals(base_class.__init__, PagedAttentionMemoryHandler=make_handler)
    return type("PlanningCache", (base_class,), {"__init__": init})


def plan_capacity(
    models: Mapping[str, PreTrainedConfig], memory_gib: float
) -> list[dict[str, Any]]:
    """Return the number of tokens of each model that fit, by cache, as rows for JSON.

    Args:
        models: Configs by name.
        memory_gib: Memory in GiB that is free once the model is loaded.

    Returns:
        Rows with `model`, `cache`, `bytes_per_token`, `tokens`, and `ratio` to bf16 with flash.

    Raises:
        ConfigError: A model is not supported, or the memory does not suffice for a single step.
    """
    rows: list[dict[str, Any]] = []
    memory_bytes = int(memory_gib * GIB)
    for model_name, config in models.items():
        decoder = config.get_text_config()
        read_layer_windows(decoder)
        if config.is_encoder_decoder or caches_latents(decoder):
            raise ConfigError(
                f"model: expected a decoder whose engine caches keys and values, got {model_name} "
                f"with {'an encoder' if config.is_encoder_decoder else 'latents (MLA)'}. Use "
                "hf-fp8kv check, which counts bytes per token"
            )
        num_kv_heads, dim = read_kv_sizes(decoder)
        # K and V have two bytes per value in bfloat16.
        token_bytes = 2 * 2.0 * num_kv_heads * dim * decoder.num_hidden_layers
        sizes_by_cache = {
            cache: (token_bytes, plan_tokens(decoder, memory_bytes, None, attention=attention))
            for cache, attention in STOCK_ATTENTION.items()
        }
        _, stock_tokens = sizes_by_cache["bf16, flash"]
        for cache, options in FP8_OPTIONS.items():
            serving_config = ServingConfig.parse(backend="torch", **options)
            layout = EngineCache()
            layout.prepare(serving_config, decoder, PAGE_SIZE, torch.bfloat16, "cpu")
            page_bytes = sum(page_layout.bytes_per_page for page_layout in layout.page_layouts)
            sizes_by_cache[cache] = (
                page_bytes / PAGE_SIZE,
                plan_tokens(decoder, memory_bytes, serving_config),
            )
        rows += [
            {
                "model": model_name,
                "cache": cache,
                "bytes_per_token": size,
                "tokens": tokens,
                "ratio": tokens / stock_tokens,
            }
            for cache, (size, tokens) in sizes_by_cache.items()
        ]
    return rows


def get_config(name: str) -> PreTrainedConfig:
    """Return the config of the model `name`, a key of `MODELS`."""
    fields = {field: value for field, value in MODELS[name].items() if value is not None}
    return AutoConfig.for_model(fields.pop("model_type"), **fields)
