"""Memory of the CPU suite: bytes per token by construction, and how much processes grow."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..attention.fp8_paged import fp8_paged_attention
from .contenders import (
    E4M3,
    PAGED,
    Attention,
    AttentionLayer,
    Heads,
    attend_step,
    fill,
    make_paged,
    make_row,
    random_states,
)

# Ratios of bytes at head size 128 that dynamic and static scales must not pass.
BYTES = (0.54, 0.52)


def measure_bytes(heads: Heads, backend: str) -> list[dict[str, Any]]:
    """Return rows of bytes per token and layer by construction, at 8192 tokens."""
    tokens = 8192
    plain = 4 * heads[1] * heads[2]
    rows = [make_row("bytes per token", "DynamicCache", [plain], "B", context=tokens)]
    ratios = []
    for name, options in PAGED.items():
        cache = fill(make_paged(heads, backend, name), tokens, heads)
        total = cache.memory_footprint()["total"] / tokens
        rows.append(make_row("bytes per token", name, [total], "B", context=tokens))
        ratio = functools.partial(make_row, "ratio", name, [total / plain], "×", context=tokens)
        ratios.append(ratio(against="DynamicCache, bytes", target=BYTES["scales" in options]))
    return rows + ratios


def measure_processes(tokens: int, heads: Heads, backend: str) -> list[dict[str, Any]]:
    """Return rows of how much a process of its own grows that stores 8 layers."""
    rows, grown = [], {}
    for name in ("DynamicCache", E4M3):
        task = json.dumps({"name": name, "tokens": tokens, "heads": heads, "backend": backend})
        script = f"import sys; from {__name__} import _grow; _grow(sys.argv[1])"
        run = subprocess.run(
            [sys.executable, "-c", script, task],
            env=make_environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            raise RuntimeError(f"the process that measures {name} ended with:\n{run.stderr}")
        grown[name] = float(run.stdout.split()[-1])
        rows.append(make_row("process grows", name, [grown[name] / 2**20], "MiB", context=tokens))
    rows.append(make_row(
        "ratio", E4M3, [grown[E4M3] / grown["DynamicCache"]], "×", context=tokens,
        against="DynamicCache, process", target=BYTES[0] if tokens >= 8192 else None,
    ))  # fmt: skip
    return rows


def make_environment() -> dict[str, str]:
    """Return the environment of a process whose memory is measured.

    glibc keeps freed memory of up to 32 MiB a piece, unless it is told where the limit is.
    """
    return {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}


def _grow(task: str, layers: int = 8) -> None:
    """Write by how many bytes this process grew while it filled a cache and took a step."""
    given = json.loads(task)
    heads: Heads = tuple(given["heads"])
    module = AttentionLayer(heads[0] // heads[1])
    query, key = random_states(heads[0], 1, heads[2]), random_states(heads[1], 1, heads[2])

    def use(tokens: int) -> Cache:
        cache: Cache = DynamicCache()
        attention: Attention = sdpa_attention_forward
        if given["name"] in PAGED:
            cache = make_paged(heads, given["backend"], given["name"], layers)
            attention = fp8_paged_attention
        for layer in range(layers):
            fill(cache, tokens, heads, layer)
            attend_step(module, query, key, key, cache, attention, layer)
        return cache

    with torch.inference_mode():
        use(64)  # compiled code and threads are there before the measurement
        before = resident_bytes()
        cache = use(given["tokens"])
        sys.stdout.write(f"{resident_bytes() - before}\n")
        del cache


def resident_bytes() -> int:
    """Return the bytes of memory that this process holds."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import psutil  # accelerate brings it

    return int(psutil.Process().memory_info().rss)
