"""Measure the bytes of caches with sliding windows after a prompt, and the peak while storing it.

The layers have the shapes of real models and hold random values. No model runs. Each model is
measured in a separate process, so memory is returned to the system between models.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoConfig, Cache, DynamicCache, PreTrainedConfig, StaticCache

from hf_fp8kv.cache.cache import FP8PagedCache
from hf_fp8kv.card.caches import count_bytes
from hf_fp8kv.modeling.model_support import ATTENTION

from .shared import Result, main, run_process

# The config fields that determine how many tokens each layer stores, and their size.
MODELS: dict[str, dict[str, Any]] = {
    "Gemma 3 270M": {
        "model_type": "gemma3_text", "num_hidden_layers": 18, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
}  # fmt: skip
PROMPT_LENGTHS = (1024, 4096, 16384, 32768)
# For each prefill mode, the options of FP8PagedCache and the number of calls that store a prompt.
PREFILL_MODES: dict[str, tuple[dict[str, Any], int]] = {
    "one call": ({}, 1),
    "one call, stored": ({"prefill": "stored"}, 1),
    "chunks": ({}, 4),
}
MAX_CHUNK_SIZE = 1024


def measure_windows(
    *,
    models: Sequence[str] = tuple(MODELS),
    prompt_lengths: Sequence[int] = PROMPT_LENGTHS,
    backend: str = "auto",
    progress: Callable[[str], None],
) -> Result:
    """Measure the memory of prompts in caches with sliding-window and full-attention layers.

    Args:
        models: Keys of `MODELS`.
        prompt_lengths: Numbers of tokens of the prompts.
        backend: Backend of FP8PagedCache.
        progress: Function that is called with the name of each measurement.

    Returns:
        `rows` with `model`, `cache` ("growing" or "preallocated"), `prompt` (a key of
        `PREFILL_MODES`) and `tokens`. `held` is the number of bytes after the prompt, and `peak`
        the growth of the process in bytes (None if Linux does not report it). `stock_held` and
        `stock_peak` are for transformers' cache. `ratio` is `held / stock_held`.

    Raises:
        RuntimeError: The process that measures a model failed.
    """
    rows: list[Result] = []
    # By default, glibc keeps freed blocks of up to 32 MiB in the process.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    for name in models:
        progress(name)
        rows += run_process(
            "benchmarks.memory:_measure_model", [name, prompt_lengths, backend], environment
        )
    return {"rows": rows}


def make_config(name: str) -> PreTrainedConfig:
    return AutoConfig.for_model(**MODELS[name], attn_implementation=ATTENTION)


@torch.inference_mode()
def _measure_model(task: tuple[str, Sequence[int], str]) -> list[Result]:
    name, prompt_lengths, backend = task
    list(measure_prompts(name, 64, backend))  # compiles kernels before measuring
    return [row for length in prompt_lengths for row in measure_prompts(name, length, backend)]


def measure_prompts(model_name: str, length: int, backend: str) -> Iterator[dict[str, Any]]:
    """Measure a model with prompts of `length` tokens in this process, and yield the rows."""
    config: Any = make_config(model_name)
    shape = (1, config.num_key_value_heads, length, config.head_dim)
    key, value = (torch.randn(shape, dtype=torch.bfloat16) for _ in range(2))
    for kind, capacity in (("growing", None), ("preallocated", length)):
        for mode, (options, num_calls) in PREFILL_MODES.items():
            chunk_size = length if num_calls == 1 else min(-(-length // num_calls), MAX_CHUNK_SIZE)
            sizes: dict[str, Any] = {"max_cache_len": capacity} if capacity else {}
            stock_class = StaticCache if capacity else DynamicCache
            make_paged = partial(FP8PagedCache, backend=backend, **options, **sizes)
            (held, peak), (stock_held, stock_peak) = (
                _store_prompt(make_cache(config=config), key, value, chunk_size)
                for make_cache in (make_paged, partial(stock_class, **sizes))
            )
            yield {
                "model": model_name, "cache": kind, "prompt": mode, "tokens": length,
                "held": held, "peak": peak, "stock_held": stock_held, "stock_peak": stock_peak,
                "ratio": held / stock_held,
            }  # fmt: skip


def _store_prompt(
    cache: Cache, key: torch.Tensor, value: torch.Tensor, chunk_size: int
) -> tuple[int, int | None]:
    """Store a prompt in all layers. Return the bytes of the cache, and the growth of the peak."""
    bytes_before = _reset_peak()
    for start in range(0, key.shape[2], chunk_size):
        chunk_slice = slice(start, start + chunk_size)
        for index in range(len(cache.layers)):
            cache.update(key[:, :, chunk_slice], value[:, :, chunk_slice], index)
    # Linux updates its counters late, so the peak after a small prompt may seem below the start.
    peak_growth = None if bytes_before is None else max(_read_peak() - bytes_before, 0)
    return count_bytes(cache), peak_growth


def _reset_peak() -> int | None:
    """Reset the process's peak, and return the resident bytes, or None if /proc has no peak."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return int(psutil.Process().memory_info().rss)
    except OSError:
        return None


def _read_peak() -> int:
    """Return the largest number of resident bytes since `_reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    # Linux counts in KiB.
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main(__doc__, measure_windows, {"--backend": {"help": "auto (default), torch, cpu or triton."}})
