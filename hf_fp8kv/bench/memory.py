"""Measure the bytes of a token, the growth of a process, and the tokens that fit in a GPU."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import psutil
import torch
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..attention.fp8_paged import fp8_paged_attention
from ..utils.environment import describe_run
from .capacity import BATCH_TOKENS, MEMORY_SHARE, MODELS, PAGE_SIZE, REQUESTS, plan_capacity, shape
from .contenders import E4M3, PAGED, Attention, AttentionLayer, Setup, attend_step
from .reporting import build_rows_table, build_table, make_row

if TYPE_CHECKING:
    from rich.console import RenderableType

_NUM_LAYERS = 8  # number of layers of the cache in a separate process


def measure_memory(
    setup: Setup | None = None,
    *,
    models: Mapping[str, PreTrainedConfig] | None = None,
    memory_gib: float = 40.0,
    tokens: int = 8192,
    grow: bool = True,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Count bytes, measure processes, calculate capacities, and return a result for JSON.

    Args:
        setup: Shape of the layer, backend and device. None means the shape of an 8B model on a CPU.
        models: Configs by name, for the capacity. None means well-known models.
        memory_gib: Memory next to the model in GiB, for the capacity.
        tokens: Number of tokens in the caches whose bytes are counted or measured.
        grow: Whether to measure the growth of separate processes that store `tokens` tokens.
        progress: Function that is called with the name of the next measurement.

    Returns:
        The entries of `describe_run`, `settings`, `rows` of `make_row`, and `capacity`, the rows of
        `plan_capacity`.
    """
    setup, report = setup or Setup(), progress or (lambda _message: None)
    run = describe_run("memory", device=setup.device)
    report("bytes per token")
    rows = count_bytes_per_token(setup, tokens)
    if grow:
        report("growth of processes")
        rows += measure_processes(setup, tokens)
    configs = models or {name: shape(name) for name in MODELS}
    return {
        **run,
        "settings": {"heads": list(setup.heads), "tokens": tokens, "memory_gib": memory_gib,
                     "percent": MEMORY_SHARE, "page_size": PAGE_SIZE,
                     "max_batch_tokens": BATCH_TOKENS, "max_requests": REQUESTS},
        "rows": rows,
        "capacity": plan_capacity(configs, memory_gib, report),
    }  # fmt: skip


def format_table(result: dict[str, Any]) -> "RenderableType":
    """Return the result of `measure_memory` as tables for a terminal."""
    from rich.console import Group

    settings, heads = result["settings"], result["settings"]["heads"]
    device = result["hardware"]["device"]
    bytes_table = build_rows_table(
        result["rows"],
        title=f"{heads[1]} key/value heads, head size {heads[2]}, bf16",
        caption=f"bytes per token and layer, process growth with {_NUM_LAYERS} layers on {device}",
    )
    text_columns, number_columns = ("model", "cache"), ("KiB / token", "tokens", "x")
    capacity_table = build_table(
        {**dict.fromkeys(text_columns, "left"), **dict.fromkeys(number_columns, "right")},
        (
            (
                row["model"], row["cache"], f"{row['bytes_per_token'] / 1024:.1f}",
                f"{row['tokens']:,}", f"{row['ratio']:.2f}",
            )
            for row in result["capacity"]
        ),
        grouped=True,
        title=f"Tokens that fit into {settings['memory_gib']:g} GiB next to the model",
        caption=f"calculated by the planner of transformers {result['versions']['transformers']}: "
        f"{settings['percent']:.0%} of the memory, steps of {settings['max_batch_tokens']} tokens, "
        f"{result['date'][:10]}",
    )  # fmt: skip
    return Group(bytes_table, capacity_table)


def count_bytes_per_token(setup: Setup, tokens: int) -> list[dict[str, Any]]:
    """Return rows of bytes per token and layer, with `tokens` stored."""
    bf16_bytes = 4 * setup.heads[1] * setup.heads[2]
    rows = [make_row("bytes per token", "DynamicCache", [bf16_bytes], "B", context=tokens)]
    ratios = []
    for name in PAGED:
        cache = setup.fill(setup.make_paged(name), tokens)
        size = cache.memory_footprint().total_bytes / tokens
        rows.append(make_row("bytes per token", name, [size], "B", context=tokens))
        ratios.append(make_row("bytes per token, ratio", name, [size / bf16_bytes], "×",
                               context=tokens, baseline="DynamicCache"))  # fmt: skip
    return rows + ratios


def measure_processes(setup: Setup, tokens: int) -> list[dict[str, Any]]:
    """Return rows with the growth of separate processes that store `_NUM_LAYERS` layers.

    Raises:
        RuntimeError: A process failed.
    """
    rows, growth = [], {}
    for name in ("DynamicCache", E4M3):
        task = json.dumps({"name": name, "tokens": tokens, "setup": vars(setup)})
        script = f"import sys; from {__name__} import _report_growth; _report_growth(sys.argv[1])"
        run = subprocess.run(
            [sys.executable, "-c", script, task],
            env=make_environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            raise RuntimeError(f"the process that measures {name} ended with:\n{run.stderr}")
        growth[name] = float(run.stdout.split()[-1])
        rows.append(make_row("process grows", name, [growth[name] / 2**20], "MiB", context=tokens))
    ratio = growth[E4M3] / growth["DynamicCache"]
    return [*rows, make_row("process grows, ratio", E4M3, [ratio], "×", context=tokens,
                            baseline="DynamicCache")]  # fmt: skip


def make_environment() -> dict[str, str]:
    """Return the environment of a process whose memory is measured.

    glibc keeps freed blocks of up to 32 MiB unless the environment sets the limit.
    """
    return {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}


def _report_growth(task: str) -> None:
    """Print the bytes by which this process grows while it fills a cache and runs a step."""
    options = json.loads(task)
    setup = Setup(tuple(options["setup"].pop("heads")), **options["setup"])
    query, key = setup.queries(1), setup.states(1)
    module: AttentionLayer = setup.module

    def fill_and_attend(tokens: int) -> Cache:
        cache: Cache = DynamicCache()
        attention: Attention = sdpa_attention_forward
        if options["name"] in PAGED:
            cache = setup.make_paged(options["name"], _NUM_LAYERS)
            attention = fp8_paged_attention
        for layer in range(_NUM_LAYERS):
            setup.fill(cache, tokens, layer)
            attend_step(module, query, key, key, cache, attention, layer)
        return cache

    with torch.inference_mode():
        fill_and_attend(64)  # loads code and starts threads before the measurement
        bytes_before = _count_allocated_bytes(setup.device)
        cache = fill_and_attend(options["tokens"])
        sys.stdout.write(f"{_count_allocated_bytes(setup.device) - bytes_before}\n")
        del cache


def _count_allocated_bytes(device: str) -> int:
    """Return the resident bytes of this process, or on a GPU the bytes of its tensors."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return count_resident_bytes()


def count_resident_bytes() -> int:
    """Return the resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)
