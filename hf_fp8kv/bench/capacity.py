"""Capacity suite: the tokens that transformers' own engine plans for, with FP8 pages and bf16.

The engine's planner is given the memory of a GPU as a number. Nothing is allocated, and no GPU is
needed: the pages are made on torch's "meta" device, which has shapes and no memory.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, ContinuousBatchingConfig, PreTrainedConfig
from transformers.generation.continuous_batching import cache as stock

from ..errors import ConfigError
from ..modeling.model_support import ATTENTION
from ..serving.config import ServingConfig
from ..serving.engines import cache_class, rebind_globals
from ..serving.engines.common import sizes
from ..utils.environment import describe_run
from .reporting import build_table

if TYPE_CHECKING:
    from rich.console import RenderableType

# Shapes of well-known models, from their config.json: what decides how large a token is.
_FIELDS = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "sliding_window",
)  # fmt: skip
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
MODELS: dict[str, dict[str, Any]] = {
    name: {k: v for k, v in zip(_FIELDS, values, strict=False) if v is not None}
    for name, values in _SHAPES.items()
}

# What transformers' engine does with each; flash reads keys and values in fewer copies than sdpa.
STOCK = {"bf16, flash": "flash_attention_2", "bf16, sdpa": "sdpa"}
OURS: dict[str, dict[str, Any]] = {
    "fp8, static scales": {"scales": 1.0},
    "fp8, dynamic scales": {},
    "K 16 bit, V fp8": {"scales": 1.0, "key_dtype": "auto"},
}
GIB = 2**30
PERCENT = 0.9  # of the free memory; the engine's default on a GPU
PAGE = 256
# What a step may have at most; it pays for their activations.
BATCH_TOKENS, REQUESTS = 8192, 256


class _Alone:
    """An engine's view of one process."""

    tp_size = 1
    tp_local_rank = 0

    def are_kv_heads_tp_ed(self) -> bool:
        return False


def batching_config(page_size: int, **settings: Any) -> ContinuousBatchingConfig:
    """Return a configuration of the engine; the name of a page's size depends on its version."""
    fields = inspect.signature(ContinuousBatchingConfig).parameters
    settings["page_size" if "page_size" in fields else "block_size"] = page_size
    return ContinuousBatchingConfig(**settings)


def planned_tokens(
    config: PreTrainedConfig,
    memory: int,
    settings: ServingConfig | None,
    *,
    attention: str = ATTENTION,
) -> int:
    """Return how many tokens the engine's planner makes room for, in layers of every kind.

    Args:
        config: of the model; of its text part, if it has several.
        memory: bytes that are free once the model is loaded.
        settings: FP8 pages; None: transformers' own cache, in bfloat16.
        attention: that the planner reckons with.

    Raises:
        ConfigError: not even one step fits.
    """
    cache = _planning_class(settings, int(memory * PERCENT))
    config._attn_implementation_internal = attention
    batching = batching_config(
        PAGE, max_batch_tokens=BATCH_TOKENS, max_requests_per_batch=REQUESTS,
        max_blocks_per_request=0, max_memory_percent=PERCENT, use_async_batching=False,
        use_cuda_graph=False,
    )  # fmt: skip
    by_version = {"tp_plan": {}, "model_supports_logits_to_keep": True}
    accepted = inspect.signature(stock.PagedAttentionCache.__init__).parameters
    try:
        planned = cache(
            config=config,
            continuous_batching_config=batching,
            device=torch.device("meta"),
            distributed_helper=_Alone(),
            dtype=torch.bfloat16,
            **{name: value for name, value in by_version.items() if name in accepted},
        )
    except (MemoryError, ValueError) as error:
        raise ConfigError(
            f"memory: expected room for a step of {BATCH_TOKENS} tokens and for pages, got "
            f"{memory / GIB:.3g} GiB: {error}"
        ) from error
    # transformers 5.17 counts blocks of a group of layers, later versions those of all layers.
    return int(planned.num_blocks) // getattr(planned, "num_groups", 1) * PAGE


def _planning_class(settings: ServingConfig | None, available: int) -> Any:
    """Return a class of cache whose planner has so many bytes, whatever this machine has."""

    def fix_memory(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_handler(*args: Any, **planned: Any) -> Any:
            handler = make(*args, **planned)
            # An attribute in newer versions of transformers; 5.17 asks when it plans.
            handler.available_memory = available
            handler.get_available_memory = lambda: available
            return handler

        return make_handler

    if settings is not None:
        ours = cache_class(settings)
        make = fix_memory(ours.make_memory_handler)
        return type("PlanningCache", (ours,), {"make_memory_handler": make})
    engine, make = stock.PagedAttentionCache, fix_memory(stock.PagedAttentionMemoryHandler)
    init = rebind_globals(engine.__init__, PagedAttentionMemoryHandler=make)
    return type("PlanningCache", (engine,), {"__init__": init})


def run_capacity_suite(
    *,
    config: PreTrainedConfig | None = None,
    name: str = "model",
    memory_gib: float = 40.0,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Return how many tokens fit, ready for JSON.

    Of one model, which has a name and a config, or of `MODELS`; `memory_gib` are free once the
    model is loaded. `progress` is called with what is planned next.

    Returns:
        `suite`, `date`, `command`, `versions`, `hardware`, `settings`, and `rows`, each with
        `model`, `cache`, `bytes_per_token`, `tokens`, and `ratio` against bf16 with flash.
    """
    shapes = {name: config} if config is not None else {n: shape(n) for n in MODELS}
    rows: list[dict[str, Any]] = []
    memory = int(memory_gib * GIB)
    for model, shape_config in shapes.items():
        if progress is not None:
            progress(model)
        text = shape_config.get_text_config()
        heads, dim = sizes(text)
        plain = 4.0 * heads * dim * text.num_hidden_layers
        planned = {
            cache: (plain, planned_tokens(text, memory, None, attention=attention))
            for cache, attention in STOCK.items()
        }
        _, base = planned["bf16, flash"]
        for cache, keywords in OURS.items():
            settings = ServingConfig.parse(backend="torch", **keywords)
            each = cache_class(settings).bytes_per_token(text, settings, torch.bfloat16)
            planned[cache] = each, planned_tokens(text, memory, settings)
        rows += [
            {
                "model": model,
                "cache": cache,
                "bytes_per_token": each,
                "tokens": tokens,
                "ratio": tokens / base,
            }
            for cache, (each, tokens) in planned.items()
        ]
    return {
        **describe_run("capacity"),
        "settings": {"memory_gib": memory_gib, "percent": PERCENT, "page_size": PAGE,
                     "max_batch_tokens": BATCH_TOKENS, "max_requests": REQUESTS},
        "rows": rows,
    }  # fmt: skip


def shape(name: str) -> PreTrainedConfig:
    """Return the config of one of `MODELS`."""
    fields = dict(MODELS[name])
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def format_table(result: dict[str, Any]) -> "RenderableType":
    """Return the rows of `run_capacity_suite` as a table for a terminal."""
    settings = result["settings"]
    left, right = ("model", "cache"), ("KiB / token", "tokens", "x")
    return build_table(
        {**dict.fromkeys(left, "left"), **dict.fromkeys(right, "right")},
        (
            (
                row["model"],
                row["cache"],
                f"{row['bytes_per_token'] / 1024:.1f}",
                f"{row['tokens']:,}",
                f"{row['ratio']:.2f}",
            )
            for row in result["rows"]
        ),
        grouped=True,
        title=f"Tokens that fit into {settings['memory_gib']:g} GiB beside the model",
        caption=f"transformers {result['versions']['transformers']}: its engine's own plan, "
        f"{settings['percent']:.0%} of the memory, steps of {settings['max_batch_tokens']} tokens; "
        f"calculated, not run. {result['date'][:10]}",
    )
