"""Measure tokens per second of `generate()` on a random model with each cache.

The prompt is not computed. Random keys and values fill the cache instead, because the work and the
time of a decode step do not depend on them.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AutoModelForCausalLM,
    Cache,
    CompileConfig,
    DynamicCache,
    LlamaConfig,
    LogitsProcessor,
    LogitsProcessorList,
    QuantizedCache,
    StaticCache,
)
from transformers.utils.import_utils import is_flash_attn_2_available

from hf_fp8kv import disable, enable
from hf_fp8kv.bench.reporting import count_bytes
from hf_fp8kv.cache.cache import FP8PagedCache

from .goals import FLASH, PAGED, PAGED_AUTO
from .random_data import PAGE_SIZE
from .record import Record
from .shapes import ModelShape, RunSizes, format_tokens
from .stage import Stage

# Free positions of a static cache after the last new token. generate() may take an extra step.
SPARE_POSITIONS = 8
SECTION = "end to end"
STOCK_OFFLOADED = "DynamicCache offloaded"


@dataclass(frozen=True)
class Contender:
    """A cache class with its options, and the attention implementation of its decode steps."""

    name: str
    attention: str
    cache_class: type[Cache]
    options: dict[str, Any] = field(default_factory=dict)
    is_compiled: bool = False  # whether generate() compiles the decode step
    is_captured: bool = False  # whether generate() captures the decode step in a CUDA graph


AUTO_OPTIONS = {"dtype": "auto"}
CONTENDERS = [
    Contender(FLASH, "sdpa", DynamicCache),
    Contender("FP8PagedCache eager", "fp8_paged", FP8PagedCache),
    Contender("FP8PagedCache captured", "fp8_paged", FP8PagedCache, is_captured=True),
    Contender("FP8PagedCache auto eager", "fp8_paged", FP8PagedCache, AUTO_OPTIONS),
    Contender("DynamicCache flash-attn eager", "flash_attention_2", DynamicCache),
    Contender("QuantizedCache fp8 eager", "sdpa", QuantizedCache, {"backend": "fp8"}),
    Contender(PAGED, "fp8_paged", FP8PagedCache, is_compiled=True),
    Contender(PAGED_AUTO, "fp8_paged", FP8PagedCache, AUTO_OPTIONS, is_compiled=True),
    # SDPA with transformers' mask requires K and V for each query head, so they are repeated.
    Contender("StaticCache (repeats K and V) compiled", "sdpa", StaticCache, is_compiled=True),
]
# Caches with layers in host memory. "half" keeps half of the pages on the device.
OFFLOADED_OPTIONS = {"offloading": True}
AUTO_OFFLOADED_OPTIONS = AUTO_OPTIONS | OFFLOADED_OPTIONS
OFFLOADED_CONTENDERS = [
    Contender("FP8PagedCache offloaded", "fp8_paged", FP8PagedCache, OFFLOADED_OPTIONS),
    Contender("FP8PagedCache half offloaded", "fp8_paged", FP8PagedCache, {"offloading": "half"}),
    Contender("FP8PagedCache auto offloaded", "fp8_paged", FP8PagedCache, AUTO_OFFLOADED_OPTIONS),
    Contender(STOCK_OFFLOADED, "sdpa", DynamicCache, OFFLOADED_OPTIONS),
]


def measure(record: Record, sizes: RunSizes, backend: str) -> None:
    """Add a row for each contender, batch size and context length, and rows for first calls.

    Compilation takes most of the time, so eager contenders come first.
    """
    model = make_model(sizes, record)
    early_shapes = sizes.generate_shapes[:2]
    eager_contenders = [x for x in CONTENDERS if not x.is_compiled]
    compiled_contenders = [x for x in CONTENDERS if x.is_compiled]
    # The last contender compiles the longest.
    fast_contenders, slow_contenders = compiled_contenders[:-1], compiled_contenders[-1:]
    for shapes in (early_shapes, sizes.generate_shapes[2:]):
        _measure_contenders(record, SECTION, model, sizes, backend, eager_contenders, shapes)
        if shapes is early_shapes:
            _measure_first_calls(record, model, sizes, backend)
        _measure_contenders(record, SECTION, model, sizes, backend, fast_contenders, shapes)
    all_shapes = sizes.generate_shapes
    _measure_contenders(record, SECTION, model, sizes, backend, slow_contenders, all_shapes)


def measure_offloaded(record: Record, sizes: RunSizes, backend: str) -> None:
    """Add a row for each contender with layers in host memory, and each context length.

    Copies over the bus take most of the time of such a step, so a few tokens suffice.
    """
    short_sizes = replace(sizes, timed_tokens=(4, 4), warmup_tokens=(2, 2))
    model = make_model(sizes, record)
    contenders, shapes = OFFLOADED_CONTENDERS, sizes.offloaded_shapes
    _measure_contenders(record, "offloaded", model, short_sizes, backend, contenders, shapes)


def _measure_contenders(
    record: Record, section: str, model: Any, sizes: RunSizes, backend: str,
    contenders: list[Contender], shapes: tuple[tuple[int, int], ...],
) -> None:  # fmt: skip
    for batch, context in shapes:
        for contender in contenders:
            if reason := _find_skip_reason(record.stage, contender, model.config):
                record.skip(f"{section}, {contender.name}: {reason}")
                continue
            options = dict(contender.options)
            if contender.cache_class is FP8PagedCache:
                options["backend"] = backend
            if options.get("offloading") == "half":
                num_pages = -(-context // PAGE_SIZE) * batch
                options["offloading"] = num_pages // 2
            if contender.is_compiled:
                new_tokens = sizes.timed_tokens[1] + sizes.warmup_tokens[1]
                options["max_cache_len"] = context + new_tokens + SPARE_POSITIONS
            make_cache = functools.partial(contender.cache_class, config=model.config, **options)
            measure_row = functools.partial(
                _measure_cache, record.stage, model, contender, make_cache, sizes, batch, context
            )
            case = f"{batch} x {format_tokens(context)}"
            record.measure(section, case, contender.name, measure_row)


def _measure_first_calls(record: Record, model: Any, sizes: RunSizes, backend: str) -> None:
    """Add rows for a prompt and its first token, with an empty cache."""
    stage = record.stage
    paged = functools.partial(FP8PagedCache, model.config, backend=backend)
    ids = torch.randint(1, sizes.vocab_size, (1, sizes.prompt_tokens), device=stage.device)
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 1,
        "pad_token_id": 0, "disable_compile": True,
    }  # fmt: skip

    def measure_row(make_cache: Callable[[], Cache], attention: str) -> dict[str, Any]:
        model.set_attn_implementation(attention)
        stage.reset_peak()
        seconds = []
        for _ in range(7):
            start = time.perf_counter()
            model.generate(ids, past_key_values=make_cache(), **options)
            stage.synchronize()
            seconds.append(time.perf_counter() - start)
        # The first two calls compile kernels.
        first_ms = 1e3 * statistics.median(seconds[2:])
        return {"first_ms": first_ms, "peak_bytes": stage.peak_bytes()}

    for name, attention, make_cache in (
        ("FP8PagedCache eager", "fp8_paged", paged),
        ("FP8PagedCache e4m3 eager", "fp8_paged", functools.partial(paged, dtype="fp8_e4m3")),
        ("DynamicCache eager", "sdpa", DynamicCache),
    ):
        case = f"first token after {format_tokens(sizes.prompt_tokens)}"
        record.measure(SECTION, case, name, functools.partial(measure_row, make_cache, attention))


def _find_skip_reason(stage: Stage, contender: Contender, config: Any) -> str:
    """Return the reason why a cache cannot run here, or an empty string."""
    if contender.attention == "flash_attention_2" and not is_flash_attn_2_available():
        return "flash-attn is not installed"
    if contender.name == STOCK_OFFLOADED and not stage.is_gpu:
        return "requires a CUDA device"
    if contender.cache_class is QuantizedCache:
        try:
            QuantizedCache(backend="fp8", config=config)
        except (ImportError, ValueError) as error:
            return str(error)
    return ""


def make_model(shape: ModelShape, record: Record) -> Any:
    """Return a random Llama model in bfloat16, on the device under test."""
    record.report("making a random model")
    config = LlamaConfig(
        num_hidden_layers=shape.num_layers, hidden_size=shape.hidden_size,
        intermediate_size=7 * shape.hidden_size // 2, num_attention_heads=shape.heads.query,
        num_key_value_heads=shape.heads.kv, head_dim=shape.heads.dim,
        vocab_size=shape.vocab_size, max_position_embeddings=2**17,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    with record.stage.device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


class _TokenTimer(LogitsProcessor):
    """Records the time and the logits of each token, and returns the logits unchanged."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.timestamps: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.timestamps.append(self.stage.record_time())
        self.scores = scores
        return scores

    def step_times(self) -> list[float]:
        """Return the time from each token to the next token, in seconds."""
        self.stage.synchronize()
        intervals = itertools.pairwise(self.timestamps)
        if self.stage.is_gpu:
            return [start.elapsed_time(end) / 1e3 for start, end in intervals]
        return [end - start for start, end in intervals]


def _measure_cache(
    stage: Stage, model: Any, contender: Contender, make_cache: Callable[[], Cache],
    sizes: RunSizes, batch: int, context: int,
) -> dict[str, Any]:  # fmt: skip
    is_compiled = contender.is_compiled or contender.is_captured
    # Each pair of `RunSizes` is for eager steps, then for compiled steps.
    timed_tokens = sizes.timed_tokens[is_compiled]
    warmup_tokens = sizes.warmup_tokens[is_compiled]
    _drop_graphs(model)
    model.set_attn_implementation(contender.attention)
    if contender.is_captured:
        enable(model, capture=True)
    # The contender `FLASH` must use torch's flash attention, and no other kernel of SDPA.
    is_flash = contender.name == FLASH and stage.is_gpu and not stage.is_dry
    sdpa_context = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if is_flash else nullcontext()
    try:
        cache = make_cache()
        shape = (batch, sizes.heads.kv, context, sizes.heads.dim)
        for layer in range(sizes.num_layers):
            cache.update(stage.randn(*shape), stage.randn(*shape), layer)
        ids = torch.randint(1, sizes.vocab_size, (batch, context + 1), device=stage.device)
        timer = _TokenTimer(stage)
        stage.reset_peak()
        start = time.perf_counter()
        with torch.no_grad(), sdpa_context:
            model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache,
                do_sample=False, pad_token_id=0, logits_processor=LogitsProcessorList([timer]),
                max_new_tokens=warmup_tokens + timed_tokens,
                **({} if contender.is_captured else _make_compile_options(is_compiled, stage)),
            )  # fmt: skip
        all_times = timer.step_times()
        seconds = time.perf_counter() - start
    finally:
        _drop_graphs(model)
        disable(model)
    if not bool(timer.scores.isfinite().all()):
        raise RuntimeError("expected finite logits, got NaN or infinity")
    step_times = sorted(all_times[warmup_tokens - 1 :])
    peak_bytes = stage.peak_bytes()
    weight_bytes = sum(weight.nbytes for weight in model.parameters())
    return {
        "tokens_per_s": batch / statistics.median(step_times), "slowest_ms": 1e3 * step_times[-1],
        "step_ms": 1e3 * statistics.median(step_times), "tokens": len(step_times),
        "generate_s": seconds, "first_s": sum(all_times[: warmup_tokens - 1]),
        "cache_bytes": count_bytes(cache), "peak_bytes": peak_bytes,
        "beside_bytes": None if peak_bytes is None else peak_bytes - weight_bytes,
    }  # fmt: skip


def _make_compile_options(is_compiled: bool, stage: Stage) -> dict[str, Any]:
    if not is_compiled:
        return {"disable_compile": True}
    if stage.is_gpu:  # generate() compiles with mode="reduce-overhead" by default
        return {}
    config = CompileConfig(fullgraph=False, dynamic=False, backend="aot_eager", mode=None)  # type: ignore[arg-type]
    config._compile_all_devices = True  # type: ignore[assignment]
    return {"compile_config": config}


def _drop_graphs(model: Any) -> None:
    """Drop compiled code and its graphs, which use memory and belong to a single cache."""
    vars(model).pop("_compiled_call", None)
    torch._dynamo.reset()
