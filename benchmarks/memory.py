"""Memory suite: bytes of models with sliding windows after a prompt, and at most during it.

The layers are those of real models, and hold random numbers; no model runs. One process measures
all of it, whose memory goes back to the system as soon as it is free.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, Cache, DynamicCache, PreTrainedConfig, StaticCache

from hf_fp8kv.bench.cpu_memory import make_environment, resident_bytes
from hf_fp8kv.bench.reporting import build_table, count_bytes
from hf_fp8kv.cache.cache import FP8PagedCache
from hf_fp8kv.modeling.model_support import ATTENTION
from hf_fp8kv.utils.environment import describe_run

if TYPE_CHECKING:
    from rich.console import RenderableType

# From their config.json: what decides which tokens a layer keeps, and how large they are.
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
TOKENS = (1024, 4096, 16384, 32768)
# How a prompt comes: options of FP8PagedCache, and calls.
PROMPTS: dict[str, tuple[dict[str, Any], int]] = {
    "one call": ({}, 1),
    "one call, stored": ({"prefill": "stored"}, 1),
    "chunks": ({}, 4),
}
LARGEST_CHUNK = 1024
# The share of bfloat16 that the cache must not pass.
TARGET = 0.56


def run_memory_suite(
    *,
    models: tuple[str, ...] = tuple(MODELS),
    tokens: tuple[int, ...] = TOKENS,
    backend: str = "auto",
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure the bytes of prompts in windows and full layers; return a JSON-able dict.

    Args:
        models: some of `MODELS`.
        tokens: lengths of the prompts.
        backend: of FP8PagedCache.
        progress: called with the name of each thing measured.

    Returns:
        `suite`, `date`, `command`, `versions`, `hardware`, `settings`, and `rows`, each with
        `model`, `form`, `prompt`, `tokens`, the bytes `held` after the prompt and `peak`, what the
        process grew at most during it (None: not known here), the same of transformers' cache as
        `stock_held` and `stock_peak`, and `ratio`, of what is held.

    Raises:
        RuntimeError: the process that measures ended early.
    """
    task = json.dumps({"models": models, "tokens": tokens, "backend": backend})
    command = [sys.executable, "-c", f"from {__name__} import _measure; _measure()", task]
    rows = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=make_environment()
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            rows.append(json.loads(line))
            if progress is not None:
                progress(f"{rows[-1]['model']}, {rows[-1]['tokens']:,} tokens")
    if process.returncode:
        raise RuntimeError(f"the process that measures memory ended with {process.returncode}")
    return {**describe_run("memory"), "settings": json.loads(task), "rows": rows}


def format_table(result: dict[str, Any]) -> "RenderableType":
    """Return the rows of `run_memory_suite` as a table for a terminal."""
    left, right = ("model", "form", "prompt"), ("tokens", "MiB", "bf16", "x", "peak", "bf16 peak")
    return build_table(
        {**dict.fromkeys(left, "left"), **dict.fromkeys(right, "right")},
        (
            (
                row["model"], row["form"], row["prompt"], f"{row['tokens']:,}",
                _mebibytes(row["held"]), _mebibytes(row["stock_held"]), f"{row['ratio']:.3f}",
                _mebibytes(row["peak"]), _mebibytes(row["stock_peak"]),
            )
            for row in result["rows"]
        ),
        grouped=True,
        title="Bytes after a prompt, and at most during it, beside DynamicCache and StaticCache",
        caption=f"at most {TARGET} of bf16; transformers {result['versions']['transformers']}. "
        f"{result['date'][:10]}",
    )  # fmt: skip


def _mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.1f}"


def make_config(name: str) -> PreTrainedConfig:
    """Return the config of one of `MODELS`."""
    fields = dict(MODELS[name])
    return AutoConfig.for_model(fields.pop("model_type"), attn_implementation=ATTENTION, **fields)


def _measure() -> None:
    """Print a row for each case of the task, which is the last argument of the process."""
    task = json.loads(sys.argv[-1])
    with torch.inference_mode():
        for name in task["models"]:
            config = make_config(name)
            # Code that is compiled now is not measured later.
            for warm_up in _rows(name, config, 64, task["backend"]):
                del warm_up
            for tokens in task["tokens"]:
                for row in _rows(name, config, tokens, task["backend"]):
                    sys.stdout.write(json.dumps(row) + "\n")
                    sys.stdout.flush()


def _rows(
    name: str, config: PreTrainedConfig, tokens: int, backend: str
) -> Iterator[dict[str, Any]]:
    shape = (1, config.num_key_value_heads, tokens, config.head_dim)
    key, value = (torch.randn(shape, dtype=torch.bfloat16) for _ in range(2))
    for form, room in (("dynamic", None), ("preallocated", tokens)):
        for prompt, (options, calls) in PROMPTS.items():
            chunk = tokens if calls == 1 else min(-(-tokens // calls), LARGEST_CHUNK)
            ours = FP8PagedCache(config, max_cache_len=room, backend=backend, **options)
            held, peak = _feed(ours, key, value, chunk)
            del ours
            stock: Cache = DynamicCache(config=config)
            if room is not None:
                stock = StaticCache(config=config, max_cache_len=room)
            stock_held, stock_peak = _feed(stock, key, value, chunk)
            del stock
            yield {
                "model": name, "form": form, "prompt": prompt, "tokens": tokens, "held": held,
                "peak": peak, "stock_held": stock_held, "stock_peak": stock_peak,
                "ratio": held / stock_held,
            }  # fmt: skip


def _feed(
    cache: Cache, key: torch.Tensor, value: torch.Tensor, chunk: int
) -> tuple[int, int | None]:
    """Store a prompt in every layer; return the bytes held after it and at most during it."""
    before = _reset_peak()
    for start in range(0, key.shape[2], chunk):
        part = slice(start, start + chunk)
        for layer in range(len(cache.layers)):
            cache.update(key[:, :, part], value[:, :, part], layer)
    # The kernel counts in steps: a small prompt may seem to take less than nothing.
    peak = None if before is None else max(_read_peak() - before, 0)
    return count_bytes(cache), peak


def _reset_peak() -> int | None:
    """Let the peak of this process begin anew; return what it holds, None where it is not known."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return resident_bytes()
    except OSError:
        return None


def _read_peak() -> int:
    """Return the most bytes that this process has held, as Linux counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kibibytes = next(line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(kibibytes) * 1024
