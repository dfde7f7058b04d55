"""Time the hot loops of one step and layer.

`compare.py` runs this file with different versions of the package, so it uses public names only.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_fp8kv import FP8PagedCache


@dataclass(frozen=True)
class Loop:
    """A timed loop: the cache, its stored tokens, and the calls of each step."""

    options: dict[str, Any]  # of FP8PagedCache. The default format differs between versions
    has_attention: bool  # whether attention follows the update
    num_tokens: int = 64  # stored tokens
    # Query heads, key/value heads, head size. With small sizes, host time dominates.
    heads: tuple[int, int, int] = (4, 2, 16)
    num_layers: int = 4
    num_steps: int = 48  # decode steps in a measurement
    # Action before each step: "fork" the cache and decode in the fork, "crop" the last token, or
    # "prefill" an empty cache.
    action: str = ""


_LONG_CONTEXT: dict[str, Any] = {
    "num_tokens": 4096, "heads": (32, 8, 128), "num_layers": 1, "num_steps": 8,
}  # fmt: skip
LOOPS = {
    "host, update": Loop({"dtype": "fp8"}, False),
    "host, update + attention": Loop({"dtype": "fp8"}, True),
    "4k tokens, update": Loop({"dtype": "fp8"}, False, **_LONG_CONTEXT),
    "4k tokens, update + attention": Loop({"dtype": "fp8"}, True, **_LONG_CONTEXT),
    "4k tokens, update + attention, static": Loop({"scales": 0.01}, True, **_LONG_CONTEXT),
    "4k tokens, update + attention, e3m4": Loop({"dtype": "fp8_e3m4"}, True, **_LONG_CONTEXT),
    "4k tokens, fork + update": Loop({"dtype": "fp8_e3m4"}, False, action="fork", **_LONG_CONTEXT),
    "4k tokens, crop + update": Loop({"dtype": "fp8_e3m4"}, False, action="crop", **_LONG_CONTEXT),
    "4k tokens, prefill": Loop({"dtype": "fp8_e3m4"}, False, action="prefill", **_LONG_CONTEXT),
}


def make_loops(backend: str = "auto", prefix: str = "") -> dict[str, Callable[[], float]]:
    """Return functions by name. Each runs a loop, and returns microseconds per layer and step."""
    return {
        name: _make_loop(loop, backend) for name, loop in LOOPS.items() if name.startswith(prefix)
    }


def _make_loop(loop: Loop, backend: str) -> Callable[[], float]:
    num_query_heads, num_kv_heads, dim = loop.heads
    config = LlamaConfig(
        num_hidden_layers=loop.num_layers, num_attention_heads=num_query_heads,
        num_key_value_heads=num_kv_heads, head_dim=dim, hidden_size=num_query_heads * dim,
        vocab_size=8, intermediate_size=8,
    )  # fmt: skip
    cache = FP8PagedCache(config, backend=backend, **loop.options)
    attend = ALL_ATTENTION_FUNCTIONS["fp8_paged"]
    modules: list[Any] = [torch.nn.Module() for _ in range(loop.num_layers)]
    query = torch.randn(1, num_query_heads, 1, dim, dtype=torch.bfloat16)
    key = torch.randn(1, num_kv_heads, 1, dim, dtype=torch.bfloat16)
    history = torch.randn(1, num_kv_heads, loop.num_tokens, dim, dtype=torch.bfloat16)
    for index, module in enumerate(modules):
        module.is_causal = True
        module.layer_idx = index
        module.num_key_value_groups = num_query_heads // num_kv_heads
        cache.update(history, history, index)

    @torch.inference_mode()
    def run_loop() -> float:
        start = time.perf_counter()
        for _ in range(loop.num_steps):
            step_cache = cache
            states = key
            if loop.action == "fork":
                step_cache = cache.fork()
            elif loop.action == "crop":
                cache.crop(-1)
            elif loop.action == "prefill":
                cache.reset()
                states = history
            for index, module in enumerate(modules):
                keys, values = step_cache.update(states, states, index)
                if loop.has_attention:
                    attend(module, query, keys, values, None, scaling=dim**-0.5)
        seconds = time.perf_counter() - start
        if not loop.action:
            cache.crop(-loop.num_steps)
        return 1e6 * seconds / loop.num_steps / loop.num_layers

    run_loop()  # loads code and starts threads before the measurement
    return run_loop


def main(backend: str = "auto", prefix: str = "") -> None:
    """Write the names of the loops as JSON, and the µs of each loop whose name is then read.

    Standard output must be unbuffered (`python -u`).
    """
    loops = make_loops(backend, prefix)
    sys.stdout.write(json.dumps(list(loops)) + "\n")
    for line in sys.stdin:
        sys.stdout.write(f"{loops[line.strip()]()}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
