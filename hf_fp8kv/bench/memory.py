"""Measure the bytes of a token, the growth of a process, and the tokens that fit on a GPU."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import psutil
import torch
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..attention.fp8_paged import fp8_paged_attention
from ..utils.environment import describe_run
from ..utils.terminal import build_table
from . import capacity
from .contenders import E4M3, INT6, PAGED, Attention, Heads, Setup, store_and_attend
from .reporting import build_rows_table, make_row

if TYPE_CHECKING:
    from rich.console import RenderableType

_NUM_LAYERS = 8  # number of layers of the cache in a separate process


def measure_memory(
    setup: Setup | None = None,
    *,
    models: Mapping[str, PreTrainedConfig] | None = None,
    memory_gib: float = 40.0,
    num_tokens: int = 8192,
    measures_growth: bool = True,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure the bytes per token, the growth of processes, and the capacity.

    Args:
        setup: Shape of the layer, backend and device. None means Llama-3.1-8B on a CPU.
        models: Configs by name, for the capacity. None means well-known models.
        memory_gib: GPU memory in GiB that is left after loading the model, for the capacity.
        num_tokens: Number of tokens in the caches whose bytes are counted or measured.
        measures_growth: Whether to measure the growth of separate processes that fill a cache.
        progress: Function that is called with a message before each measurement.

    Returns:
        The entries of `describe_run`, `settings`, `rows` of `make_row`, and `capacity`, the rows of
        `plan_capacity`.
    """
    setup = setup or Setup()
    progress = progress or (lambda _message: None)
    run = describe_run("memory", device=setup.device)
    progress("bytes per token")
    rows = count_bytes_per_token(setup, num_tokens)
    if measures_growth:
        progress("growth of processes")
        rows += measure_processes(setup, num_tokens)
    configs = models or {name: capacity.get_config(name) for name in capacity.MODELS}
    return {
        **run,
        "settings": {
            "heads": list(setup.heads),
            "tokens": num_tokens,
            "memory_gib": memory_gib,
            "percent": capacity.MEMORY_SHARE,
            "page_size": capacity.PAGE_SIZE,
            "max_batch_tokens": capacity.MAX_BATCH_TOKENS,
            "max_requests": capacity.MAX_REQUESTS,
        },
        "rows": rows,
        "capacity": capacity.plan_capacity(configs, memory_gib, progress),
    }


def format_table(result: dict[str, Any]) -> "RenderableType":
    """Return the result of `measure_memory` as tables for a terminal."""
    from rich.console import Group

    settings = result["settings"]
    device = result["hardware"]["device"]
    heads = Heads(*settings["heads"])
    bytes_table = build_rows_table(
        result["rows"],
        title=f"{heads.kv} KV heads, head size {heads.dim}, bf16",
        caption=f"bytes per token and layer, process growth with {_NUM_LAYERS} layers on {device}",
    )
    text_columns = ("model", "cache")
    number_columns = ("KiB / token", "tokens", "x")
    capacity_table = build_table(
        {**dict.fromkeys(text_columns, "left"), **dict.fromkeys(number_columns, "right")},
        (
            (
                row["model"],
                row["cache"],
                f"{row['bytes_per_token'] / 1024:.1f}",
                f"{row['tokens']:,}",
                f"{row['ratio']:.2f}",
            )
            for row in result["capacity"]
        ),
        grouped=True,
        title=f"Tokens that fit into {settings['memory_gib']:g} GiB left after loading the model",
        caption=f"calculated by the planner of transformers {result['versions']['transformers']}: "
        f"{settings['percent']:.0%} of the memory, steps of {settings['max_batch_tokens']} tokens, "
        f"{result['date'][:10]}",
    )
    return Group(bytes_table, capacity_table)


def count_bytes_per_token(setup: Setup, num_tokens: int) -> list[dict[str, Any]]:
    """Return rows of bytes per token and layer, of caches with `num_tokens` tokens."""
    bf16_bytes = 4 * setup.heads.kv * setup.heads.dim
    rows = [make_row("bytes per token", "DynamicCache", [bf16_bytes], "B", context=num_tokens)]
    ratio_rows = []
    for name in PAGED:
        cache = setup.fill(setup.make_paged_cache(name), num_tokens)
        token_bytes = cache.memory_footprint().total_bytes / num_tokens
        rows.append(make_row("bytes per token", name, [token_bytes], "B", context=num_tokens))
        ratio_rows.append(make_row("bytes per token, ratio", name, [token_bytes / bf16_bytes], "×",
                                   context=num_tokens, baseline="DynamicCache"))  # fmt: skip
    return rows + ratio_rows


def measure_processes(setup: Setup, num_tokens: int) -> list[dict[str, Any]]:
    """Return rows with the growth of separate processes that store `_NUM_LAYERS` layers.

    Raises:
        RuntimeError: A process failed.
    """
    rows = []
    growth_mib = {}
    for name in ("DynamicCache", E4M3, INT6):
        task = json.dumps({"name": name, "num_tokens": num_tokens, "setup": asdict(setup)})
        script = f"import sys; from {__name__} import _report_growth; _report_growth(sys.argv[1])"
        process = subprocess.run(
            [sys.executable, "-c", script, task],
            env=make_environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode:
            raise RuntimeError(f"the process that measures {name} ended with:\n{process.stderr}")
        growth_mib[name] = float(process.stdout.split()[-1]) / 2**20
        rows.append(make_row("process grows", name, [growth_mib[name]], "MiB", context=num_tokens))
    stock_mib = growth_mib.pop("DynamicCache")
    return rows + [
        make_row(
            "process grows, ratio",
            name,
            [mib / stock_mib],
            "×",
            context=num_tokens,
            baseline="DynamicCache",
        )
        for name, mib in growth_mib.items()
    ]


def make_environment() -> dict[str, str]:
    """Return the environment of a process whose memory is measured.

    By default, glibc keeps freed blocks of up to 32 MiB in the process.
    """
    return {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}


def _report_growth(task: str) -> None:
    """Print the bytes by which this process grows while it fills a cache and runs a step."""
    options = json.loads(task)
    setup = Setup(Heads(*options["setup"].pop("heads")), **options["setup"])
    module, (query, key, value) = setup.make_layer(), setup.draw_inputs(1)

    def fill_and_attend(num_tokens: int) -> Cache:
        cache: Cache = DynamicCache()
        attention: Attention = sdpa_attention_forward
        if options["name"] in PAGED:
            cache = setup.make_paged_cache(options["name"], _NUM_LAYERS)
            attention = fp8_paged_attention
        for index in range(_NUM_LAYERS):
            setup.fill(cache, num_tokens, index)
            store_and_attend(module, query, key, value, cache, attention, index)
        return cache

    with torch.inference_mode():
        fill_and_attend(64)  # loads code and starts threads before the measurement
        bytes_before = _count_allocated_bytes(setup.device)
        cache = fill_and_attend(options["num_tokens"])
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
