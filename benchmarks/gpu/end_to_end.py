"""End-to-end section: tokens per second of `generate()` on a random model, with each cache.

The text before the new tokens is not computed: random keys and values are written into the cache.
What a decode step does, and how long it takes, does not depend on them.
"""

import functools
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    Cache,
    CompileConfig,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
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
from .timing import Stage

SECTION = "end to end"
# Positions of a static cache past the last new token: generate() may take a step too many.
SPARE = 8


@dataclass(frozen=True)
class _Contender:
    """A cache, and how it is used."""

    attention: str  # of the model
    compiled: bool  # whether generate() compiles the decode step
    make: Callable[[Any, int], Cache]  # for a config and so many tokens
    bytes_per_number: float  # of K and V, to see whether it fits


OFFLOADED = "offloaded"
STOCK_OFFLOADED = "DynamicCache offloaded"
QUANTIZED = "QuantizedCache fp8 eager"
FLASH_ATTN = "DynamicCache flash-attn eager"


def _contenders(backend: str) -> dict[str, _Contender]:
    """Return what is compared: eager ones first, since compiling takes most of the time."""
    paged = functools.partial(FP8PagedCache, backend=backend)

    def eager(attention: str, make: Callable[[Any], Cache], size: float) -> _Contender:
        return _Contender(attention, False, lambda config, _tokens: make(config), size)

    return {
        FLASH: eager("sdpa", lambda c: DynamicCache(config=c), 2),
        "FP8PagedCache eager": eager("fp8_paged", paged, 1.1),
        "FP8PagedCache auto eager": eager("fp8_paged", lambda c: paged(c, dtype="auto"), 2.1),
        FLASH_ATTN: eager("flash_attention_2", lambda c: DynamicCache(config=c), 2),
        QUANTIZED: eager("sdpa", lambda c: QuantizedCache(backend="fp8", config=c), 1.02),
        PAGED: _Contender("fp8_paged", True, lambda c, n: paged(c, max_cache_len=n), 1.02),
        AUTO: _Contender(
            "fp8_paged", True, lambda c, n: paged(c, dtype="auto", max_cache_len=n), 2
        ),
        # transformers' mask makes SDPA take K and V with as many heads as the query has.
        "StaticCache (repeats K and V) compiled": _Contender(
            "sdpa", True, lambda c, n: StaticCache(config=c, max_cache_len=n), 2
        ),
    }


def measure(record: Record, sizes: Sizes, backend: str) -> None:
    """Add a row for each batch and context and each cache."""
    record.report("making a random model")
    model = make_model(sizes, record.stage)
    took: dict[bool, float] = {}
    contenders = _contenders(backend)
    try:
        QuantizedCache(backend="fp8", config=model.config)
    except (ImportError, ValueError) as error:
        record.skip(f"QuantizedCache fp8: {error}")
        del contenders[QUANTIZED]
    if not is_flash_attn_2_available():
        record.skip("DynamicCache with flash-attn: it is not installed")
        del contenders[FLASH_ATTN]
    for batch, context in sizes.generate:
        case = f"{batch} x {format_tokens(context)}"
        for name, contender in contenders.items():
            # What it took last time; without a graph, a new shape is not slower to begin. The
            # first case has the goals: nobody is left out there.
            is_first = (batch, context) == sizes.generate[0]
            expected = 0.0 if is_first else took.get(contender.compiled, 0.0)
            stored = 2 * sizes.layers * sizes.heads.kv * sizes.heads.dim * batch * context
            size = stored * (contender.bytes_per_number + 2 / sizes.layers)
            began = time.perf_counter()
            work = functools.partial(
                _work, record.stage, model, name, contender, sizes, batch, context
            )
            if record.measure(SECTION, case, name, work, seconds=expected, size=size + 2**32):
                took[contender.compiled] = time.perf_counter() - began


def measure_offloaded(record: Record, sizes: Sizes, backend: str) -> None:
    """Add a row for each context and each cache whose layers lie in host memory.

    What such a step takes is above all what the bus takes: a few tokens tell.
    """
    record.report("making a random model")
    model = make_model(sizes, record.stage)
    weights = sum(weight.nbytes for weight in model.parameters())
    few = replace(sizes, tokens=(4, 4), warm=(2, 2))
    for batch, context in sizes.offloaded:
        case = f"{batch} x {format_tokens(context)}"
        pages = -(-context // 64) * batch // 2
        for name, contender in _offloaded(backend, pages, sizes.layers).items():
            if name == STOCK_OFFLOADED and not record.stage.is_gpu:
                record.skip(f"{case}, {name}: it takes a CUDA device")
                continue

            def work(
                name: str = name, contender: _Contender = contender,
                batch: int = batch, context: int = context,
            ) -> dict[str, Any]:  # fmt: skip
                row = _work(record.stage, model, name, contender, few, batch, context)
                peak = row["peak_bytes"]
                return {**row, "beside_bytes": None if peak is None else peak - weights}

            stored = 2 * sizes.layers * sizes.heads.kv * sizes.heads.dim * batch * context
            record.measure(
                OFFLOADED, case, name, work, size=stored * contender.bytes_per_number + 2**32
            )


def _offloaded(backend: str, pages: int, layers: int) -> dict[str, _Contender]:
    """Return caches in host memory; `pages`: of half of the text. Bytes are those on the device."""
    paged = functools.partial(FP8PagedCache, backend=backend)
    few = 4 / layers
    return {
        "FP8PagedCache offloaded": _Contender(
            "fp8_paged", False, lambda c, _: paged(c, offloading=True), few
        ),
        "FP8PagedCache half offloaded": _Contender(
            "fp8_paged", False, lambda c, _: paged(c, max_device_pages=pages), 0.6
        ),
        "FP8PagedCache auto offloaded": _Contender(
            "fp8_paged", False, lambda c, _: paged(c, dtype="auto", offloading=True), 2 * few
        ),
        STOCK_OFFLOADED: _Contender(
            "sdpa", False, lambda c, _: DynamicCache(config=c, offloading=True), 4 * few
        ),
    }


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
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        # On the device from the beginning: random numbers are made there at once.
        with torch.device(stage.device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


class _Marks(LogitsProcessor):
    """Note the time of each token; changes nothing."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.marks: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.stage.is_gpu:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            self.marks.append(mark)
        else:
            self.marks.append(time.perf_counter())
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
    stage: Stage,
    model: Any,
    name: str,
    contender: _Contender,
    sizes: Sizes,
    batch: int,
    context: int,
) -> dict[str, Any]:
    tokens, warm = sizes.tokens[contender.compiled], sizes.warm[contender.compiled]
    _forget_graphs(model)
    model.set_attn_implementation(contender.attention)
    try:
        with torch.no_grad():
            cache = contender.make(model.config, context + tokens + warm + SPARE)
            shape = (batch, sizes.heads.kv, context, sizes.heads.dim)
            for layer in range(sizes.layers):
                cache.update(stage.randn(*shape), stage.randn(*shape), layer)
            ids = torch.randint(1, sizes.vocabulary, (batch, context + 1), device=stage.device)
            stage.reset_peak()
            options = {"max_new_tokens": warm + tokens, **_compiling(contender.compiled, stage)}
            # By this name it is torch's flash attention, and no other, that must run.
            only_flash = name == FLASH and stage.is_gpu and not stage.dry
            flash = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if only_flash else nullcontext()
            return _generate(stage, model, ids, warm, cache, flash, options)
    finally:
        _forget_graphs(model)


def _generate(
    stage: Stage,
    model: Any,
    ids: torch.Tensor,
    warm: int,
    cache: Cache,
    flash: AbstractContextManager[None],
    options: dict[str, Any],
) -> dict[str, Any]:
    marks = _Marks(stage)
    began = time.perf_counter()
    with flash:
        model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache,
            do_sample=False, pad_token_id=0, logits_processor=LogitsProcessorList([marks]),
            **options,
        )  # fmt: skip
    steps = marks.steps()
    total = time.perf_counter() - began
    if not bool(marks.scores.isfinite().all()):
        raise RuntimeError("expected finite logits")
    timed = sorted(steps[warm - 1 :])
    middle = statistics.median(timed)
    return {
        "tokens_per_s": len(ids) / middle, "step_ms": 1e3 * middle, "slowest_ms": 1e3 * timed[-1],
        "tokens": len(timed), "generate_s": total, "first_s": sum(steps[: warm - 1]),
        "peak_bytes": stage.peak_bytes(), "cache_bytes": count_bytes(cache),
    }  # fmt: skip


def _compiling(compiled: bool, stage: Stage) -> dict[str, Any]:
    if not compiled:
        return {"disable_compile": True}
    if stage.is_gpu:
        return {}  # generate() compiles by itself, with mode="reduce-overhead"
    config = CompileConfig(fullgraph=False, dynamic=False, backend="aot_eager", mode=None)  # type: ignore[arg-type]
    config._compile_all_devices = True  # type: ignore[assignment]
    return {"compile_config": config}


def _forget_graphs(model: Any) -> None:
    """Drop compiled code and its graphs, which hold memory and belong to one cache."""
    vars(model).pop("_compiled_call", None)
    torch._dynamo.reset()
