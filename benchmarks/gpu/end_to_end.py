"""Measure tokens per second of `generate()` on a random model with each cache.

The prompt is not computed. Random keys and values fill the cache instead, because neither the work
nor the time of a decode step depends on them.
"""

import functools
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
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

from hf_fp8kv.bench.reporting import count_bytes
from hf_fp8kv.cache.cache import FP8PagedCache

from .goals import AUTO, FLASH, PAGED
from .record import Record
from .shapes import ModelShape, Sizes, format_tokens
from .stage import Stage

# Positions of a static cache after the last new token, because generate() may take an extra step.
SPARE = 8
SECTION = "end to end"
STOCK_OFFLOADED = "DynamicCache offloaded"
# Name, attention implementation, class, and options. generate() compiles the step of caches whose
# name ends in "compiled".
Contender = tuple[str, str, type[Cache], dict[str, Any]]
CACHES: list[Contender] = [
    (FLASH, "sdpa", DynamicCache, {}),
    ("FP8PagedCache eager", "fp8_paged", FP8PagedCache, {}),
    ("FP8PagedCache auto eager", "fp8_paged", FP8PagedCache, {"dtype": "auto"}),
    ("DynamicCache flash-attn eager", "flash_attention_2", DynamicCache, {}),
    ("QuantizedCache fp8 eager", "sdpa", QuantizedCache, {"backend": "fp8"}),
    (PAGED, "fp8_paged", FP8PagedCache, {}),
    (AUTO, "fp8_paged", FP8PagedCache, {"dtype": "auto"}),
    # SDPA with transformers' mask needs a head of K and V for each query head.
    ("StaticCache (repeats K and V) compiled", "sdpa", StaticCache, {}),
]
OFFLOADED: list[Contender] = [
    ("FP8PagedCache offloaded", "fp8_paged", FP8PagedCache, {"offloading": True}),
    ("FP8PagedCache half offloaded", "fp8_paged", FP8PagedCache, {"offloading": "half"}),
    (
        "FP8PagedCache auto offloaded", "fp8_paged", FP8PagedCache,
        {"offloading": True, "dtype": "auto"},
    ),
    (STOCK_OFFLOADED, "sdpa", DynamicCache, {"offloading": True}),
]  # fmt: skip


def measure(record: Record, sizes: Sizes, backend: str) -> None:
    """Add a row for each batch and context and each cache, and rows for first calls.

    Compiling takes most of the time, so eager caches come first.
    """
    model, first, remaining = _make_model(record, sizes), sizes.generate[:2], sizes.generate[2:]
    eager = [cache for cache in CACHES if not cache[0].endswith(" compiled")]
    compiled = [cache for cache in CACHES if cache not in eager]
    for shapes in (first, remaining):
        _measure(record, SECTION, model, sizes, backend, eager, shapes)
        if shapes is first:
            _measure_first_calls(record, model, sizes, backend)
        _measure(record, SECTION, model, sizes, backend, compiled[:-1], shapes)
    _measure(record, SECTION, model, sizes, backend, compiled[-1:], sizes.generate)


def measure_offloaded(record: Record, sizes: Sizes, backend: str) -> None:
    """Add a row for each context and each cache with layers in host memory.

    Copies over the bus take most of the time of such a step, so a few tokens suffice.
    """
    few = replace(sizes, tokens=(4, 4), warm=(2, 2))
    model = _make_model(record, sizes)
    _measure(record, "offloaded", model, few, backend, OFFLOADED, sizes.offloaded)


def _make_model(record: Record, sizes: Sizes) -> Any:
    record.report("making a random model")
    return make_model(sizes, record.stage)


def _measure(
    record: Record, section: str, model: Any, sizes: Sizes, backend: str, caches: list[Contender],
    shapes: tuple[tuple[int, int], ...],
) -> None:  # fmt: skip
    for batch, context in shapes:
        for name, attention, kind, keywords in caches:
            if reason := _why_not(record.stage, name, attention, kind, model.config):
                record.skip(f"{section}, {name}: {reason}")
                continue
            options = dict(keywords)
            if kind is FP8PagedCache:
                options["backend"] = backend
            if options.get("offloading") == "half":
                options["offloading"] = -(-context // 64) * batch // 2
            if name.endswith(" compiled"):
                options["max_cache_len"] = context + sizes.tokens[1] + sizes.warm[1] + SPARE
            make = functools.partial(kind, config=model.config, **options)
            case = f"{batch} x {format_tokens(context)}"
            work = functools.partial(
                _work, record.stage, model, name, attention, make, sizes, batch, context
            )
            record.measure(section, case, name, work)


def _measure_first_calls(record: Record, model: Any, sizes: Sizes, backend: str) -> None:
    """Add rows for a prompt and its first token, with an empty cache."""
    stage, paged = record.stage, functools.partial(FP8PagedCache, model.config, backend=backend)
    ids = torch.randint(1, sizes.vocabulary, (1, sizes.prompt), device=stage.device)
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 1,
        "pad_token_id": 0, "disable_compile": True,
    }  # fmt: skip

    def work(make: Callable[[], Cache], attention: str) -> dict[str, Any]:
        model.set_attn_implementation(attention)
        stage.reset_peak()
        seconds = []
        for _ in range(7):
            began = time.perf_counter()
            model.generate(ids, past_key_values=make(), **options)
            stage.wait()
            seconds.append(time.perf_counter() - began)
        # The first two calls compile kernels.
        first_ms = 1e3 * statistics.median(seconds[2:])
        return {"first_ms": first_ms, "peak_bytes": stage.peak_bytes()}

    for name, attention, make in (
        ("FP8PagedCache eager", "fp8_paged", paged),
        ("FP8PagedCache e4m3 eager", "fp8_paged", functools.partial(paged, dtype="fp8_e4m3")),
        ("DynamicCache eager", "sdpa", DynamicCache),
    ):
        case = f"first token after {format_tokens(sizes.prompt)}"
        record.measure(SECTION, case, name, functools.partial(work, make, attention))


def _why_not(stage: Stage, name: str, attention: str, kind: type[Cache], config: Any) -> str:
    """Return the reason reason a cache cannot run here, or ""."""
    if attention == "flash_attention_2" and not is_flash_attn_2_available():
        return "flash-attn is not installed"
    if name == STOCK_OFFLOADED and not stage.is_gpu:
        return "requires a CUDA device"
    if kind is QuantizedCache:
        try:
            QuantizedCache(backend="fp8", config=config)
        except (ImportError, ValueError) as error:
            return str(error)
    return ""


def make_model(shape: ModelShape, stage: Stage) -> Any:
    """Return a random Llama in bfloat16, on the device of `stage`."""
    config = LlamaConfig(
        num_hidden_layers=shape.layers, hidden_size=shape.hidden,
        intermediate_size=7 * shape.hidden // 2, num_attention_heads=shape.heads.query,
        num_key_value_heads=shape.heads.kv, head_dim=shape.heads.dim,
        vocab_size=shape.vocabulary, max_position_embeddings=2**17,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    with stage.device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


class _Marks(LogitsProcessor):
    """Records the time of each token, and returns the logits unchanged."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.marks: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.marks.append(self.stage.mark())
        self.scores = scores
        return scores

    def steps(self) -> list[float]:
        """Return the seconds from each token to the next."""
        self.stage.wait()
        pairs = zip(self.marks, self.marks[1:], strict=False)
        if self.stage.is_gpu:
            return [a.elapsed_time(b) / 1e3 for a, b in pairs]
        return [b - a for a, b in pairs]


def _work(
    stage: Stage, model: Any, name: str, attention: str, make: Callable[[], Cache], sizes: Sizes,
    batch: int, context: int,
) -> dict[str, Any]:  # fmt: skip
    compiled = name.endswith(" compiled")
    tokens, warm = sizes.tokens[compiled], sizes.warm[compiled]
    _forget_graphs(model)
    model.set_attn_implementation(attention)
    # The row `FLASH` is for torch's flash attention only.
    only_flash = name == FLASH and stage.is_gpu and not stage.dry
    backend = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if only_flash else nullcontext()
    try:
        cache = make()
        shape = (batch, sizes.heads.kv, context, sizes.heads.dim)
        for layer in range(sizes.layers):
            cache.update(stage.randn(*shape), stage.randn(*shape), layer)
        ids = torch.randint(1, sizes.vocabulary, (batch, context + 1), device=stage.device)
        marks = _Marks(stage)
        stage.reset_peak()
        began = time.perf_counter()
        with torch.no_grad(), backend:
            model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache,
                do_sample=False, pad_token_id=0, logits_processor=LogitsProcessorList([marks]),
                max_new_tokens=warm + tokens, **_compiling(compiled, stage),
            )  # fmt: skip
        steps = marks.steps()
        total = time.perf_counter() - began
    finally:
        _forget_graphs(model)
    if not bool(marks.scores.isfinite().all()):
        raise RuntimeError("expected finite logits")
    timed, peak = sorted(steps[warm - 1 :]), stage.peak_bytes()
    weights = sum(weight.nbytes for weight in model.parameters())
    return {
        "tokens_per_s": batch / statistics.median(timed), "slowest_ms": 1e3 * timed[-1],
        "step_ms": 1e3 * statistics.median(timed), "tokens": len(timed), "generate_s": total,
        "first_s": sum(steps[: warm - 1]), "cache_bytes": count_bytes(cache), "peak_bytes": peak,
        "beside_bytes": None if peak is None else peak - weights,
    }  # fmt: skip


def _compiling(compiled: bool, stage: Stage) -> dict[str, Any]:
    if not compiled or stage.is_gpu:  # generate() compiles with mode="reduce-overhead" by default
        return {} if compiled else {"disable_compile": True}
    config = CompileConfig(fullgraph=False, dynamic=False, backend="aot_eager", mode=None)  # type: ignore[arg-type]
    config._compile_all_devices = True  # type: ignore[assignment]
    return {"compile_config": config}


def _forget_graphs(model: Any) -> None:
    """Drop compiled code and its graphs, which hold memory and belong to one cache."""
    vars(model).pop("_compiled_call", None)
    torch._dynamo.reset()
