"""Measure tokens per second of `generate()` on a random model with each cache.

The prompt is not computed. Random keys and values fill the cache instead, because the work and the
time of a decode step do not depend on them.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

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
from hf_fp8kv.cache.cache import FP8PagedCache
from hf_fp8kv.card.caches import count_bytes
from hf_fp8kv.utils.timing import take_turns

from ..shared import compute_quartiles
from .random_data import PAGE_SIZE
from .record import Record, Row
from .shapes import RunSizes, format_tokens
from .stage import Stage

# Free positions of a static cache after the last new token. generate() may take an extra step.
SPARE_POSITIONS = 8
SECTION = "end to end"
# Names of contenders.
FLASH = "DynamicCache flash eager"
PAGED, PAGED_AUTO = "FP8PagedCache compiled", "FP8PagedCache auto compiled"
STOCK_OFFLOADED = "DynamicCache offloaded"
# transformers checks the end of sequences one step late if this function returns True.
STOP_CHECK = "transformers.generation.utils.DeferredStopCheck.is_supported"


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
    Contender(PAGED, "fp8_paged", FP8PagedCache, is_compiled=True),
    # SDPA with transformers' mask requires K and V for each query head, so they are repeated.
    Contender("StaticCache (repeats K and V) compiled", "sdpa", StaticCache, is_compiled=True),
]
# All caches of a case are in memory together, and the memory of a GPU has no room for these too.
OTHER_CONTENDERS = [
    Contender(PAGED_AUTO, "fp8_paged", FP8PagedCache, AUTO_OPTIONS, is_compiled=True),
    Contender("FP8PagedCache auto eager", "fp8_paged", FP8PagedCache, AUTO_OPTIONS),
    Contender("DynamicCache flash-attn eager", "flash_attention_2", DynamicCache),
    Contender("QuantizedCache fp8 eager", "sdpa", QuantizedCache, {"backend": "fp8"}),
]
# Caches with layers in host memory. "half" keeps half of the pages on the device.
OFFLOADED_CONTENDERS = [
    Contender("FP8PagedCache offloaded", "fp8_paged", FP8PagedCache, {"offloading": True}),
    Contender("FP8PagedCache half offloaded", "fp8_paged", FP8PagedCache, {"offloading": "half"}),
    Contender("FP8PagedCache auto offloaded", "fp8_paged", FP8PagedCache,
              AUTO_OPTIONS | {"offloading": True}),
    Contender(STOCK_OFFLOADED, "sdpa", DynamicCache, {"offloading": True}),
]  # fmt: skip


def measure(record: Record, sizes: RunSizes, backend: str) -> None:
    """Add a row for each contender, batch size and context length, and rows for first calls.

    Compilation takes most of the time, so the most important cases and contenders come first.
    """
    model = make_model(sizes, record)
    shapes = sizes.generate_shapes
    _measure_first_calls(record, model, sizes, backend)
    main_contenders = [
        contender for contender in CONTENDERS if sizes.with_compiled or not contender.is_compiled
    ]
    other_contenders = OTHER_CONTENDERS if sizes.with_compiled else []
    order = (
        (main_contenders, shapes[:2]), (other_contenders, shapes[:1]),
        (main_contenders, shapes[2:]), (other_contenders, shapes[1:]),
    )  # fmt: skip
    for contenders, cases in order:
        _measure_contenders(record, SECTION, model, sizes, backend, contenders, cases)


def measure_offloaded(record: Record, sizes: RunSizes, backend: str) -> None:
    """Add a row for each contender with layers in host memory, and each context length.

    Copies over the bus take most of the time of such a step, so a few tokens suffice.
    """
    short_sizes = replace(sizes, num_rounds=1, round_tokens=4)
    _measure_contenders(
        record, "offloaded", make_model(sizes, record), short_sizes, backend, OFFLOADED_CONTENDERS,
        sizes.offloaded_shapes,
    )  # fmt: skip


def _measure_contenders(
    record: Record, section: str, model: Any, sizes: RunSizes, backend: str,
    contenders: list[Contender], shapes: tuple[tuple[int, int], ...],
) -> None:  # fmt: skip
    """Add a row for each contender. In each case they alternate, so that all have equal load."""
    for batch, context in shapes:
        _drop_graphs(model)
        runs: list[tuple[Row, Run]] = []
        for contender in contenders:
            if reason := _find_skip_reason(record.stage, contender, model.config):
                record.skip(f"{section}, {contender.name}: {reason}")
                continue
            run = Run(record.stage, model, contender, sizes, backend, batch, context)
            row = record.measure(
                section, f"{batch} x {format_tokens(context)}", contender.name, run.begin
            )
            if row is not None:
                runs.append((row, run))
        for index in range(sizes.num_rounds):
            for row, run in runs:
                if "failed" in row or (index and record.compute_seconds_left() <= 0):
                    continue
                try:
                    row.update(run.measure_round())
                except Exception as error:
                    row["failed"] = f"{type(error).__name__}: {error}"[:300]
                record.save()
    _drop_graphs(model)


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

        def generate() -> None:
            model.generate(ids, past_key_values=make_cache(), **options)

        # The first two calls compile kernels. `take_turns` does not return the time of the first.
        seconds = take_turns({"call": generate}, 6, str(stage.device))["call"][1:]
        return {"first_ms": 1e3 * statistics.median(seconds), "peak_bytes": stage.read_peak_bytes()}

    case = f"first token after {format_tokens(sizes.prompt_tokens)}"
    contenders: tuple[tuple[str, str, Callable[[], Cache]], ...] = (
        ("FP8PagedCache eager", "fp8_paged", paged),
        ("FP8PagedCache e4m3 eager", "fp8_paged", functools.partial(paged, dtype="fp8_e4m3")),
        ("DynamicCache eager", "sdpa", DynamicCache),
    )
    for name, attention, make_cache in contenders:
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


def make_model(sizes: RunSizes, record: Record) -> Any:
    record.report("making a random model")
    hidden_size = sizes.heads.num_query_heads * sizes.heads.dim
    config = LlamaConfig(
        num_hidden_layers=sizes.num_layers, hidden_size=hidden_size,
        intermediate_size=7 * hidden_size // 2, num_attention_heads=sizes.heads.num_query_heads,
        num_key_value_heads=sizes.heads.num_kv_heads, head_dim=sizes.heads.dim,
        vocab_size=sizes.vocab_size, max_position_embeddings=2**17,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    with record.stage.device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


class _TokenTimer(LogitsProcessor):
    """Records the time and the logits of each token, and returns the logits unchanged.

    The first time is the start.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.timestamps: list[Any] = [stage.record_time()]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.timestamps.append(self.stage.record_time())
        self.scores = scores
        return scores

    def list_step_seconds(self) -> list[float]:
        """Return the seconds between each token and the previous token."""
        self.stage.synchronize()
        intervals = itertools.pairwise(self.timestamps)
        if self.stage.is_gpu:
            return [start.elapsed_time(end) / 1e3 for start, end in intervals]
        return [end - start for start, end in intervals]


class Run:
    """The calls of `generate()` of a contender in one case. Each call continues the last one."""

    def __init__(
        self, stage: Stage, model: Any, contender: Contender, sizes: RunSizes, backend: str,
        batch: int, context: int,
    ) -> None:  # fmt: skip
        self.stage = stage
        self.model = model
        self.contender = contender
        self.sizes = sizes
        self.ids = torch.randint(1, sizes.vocab_size, (batch, context + 1), device=stage.device)
        self.options = dict(contender.options)
        if contender.cache_class is FP8PagedCache:
            self.options["backend"] = backend
        if self.options.get("offloading") == "half":
            self.options["offloading"] = batch * math.ceil(context / PAGE_SIZE) // 2
        if contender.is_compiled:
            calls_per_round = 2 if contender.cache_class is FP8PagedCache else 1
            num_calls = 1 + calls_per_round * sizes.num_rounds
            num_positions = num_calls * sizes.round_tokens + SPARE_POSITIONS
            self.options["max_cache_len"] = context + num_positions
        # The median seconds of a step in each round, also with a late stop check.
        self.step_seconds: list[float] = []
        self.late_step_seconds: list[float] = []

    def begin(self) -> dict[str, Any]:
        """Fill the cache, run the first call, which compiles, and return fields of the row.

        Full speed begins after the last slow step of the first half of the call.
        """
        self.stage.reset_peak()
        old_bytes = self.stage.read_peak_bytes() or 0
        self.cache = self.contender.cache_class(config=self.model.config, **self.options)
        batch, num_tokens = self.ids.shape
        heads = self.sizes.heads
        shape = (batch, heads.num_kv_heads, num_tokens - 1, heads.dim)
        for index in range(self.sizes.num_layers):
            self.cache.update(self.stage.randn(*shape), self.stage.randn(*shape), index)
        step_seconds = self._generate()
        typical_seconds = statistics.median(step_seconds)
        early_seconds = step_seconds[: len(step_seconds) // 2]
        # A step is slow if it takes a quarter longer than the median step.
        slow_steps = [
            step
            for step, seconds in enumerate(early_seconds, 1)
            if seconds > 1.25 * typical_seconds
        ]
        # The memory of the other contenders of the case does not count. On a CPU the result is 0.
        own_bytes = (self.stage.read_peak_bytes() or 0) - old_bytes
        weight_bytes = sum(weight.nbytes for weight in self.model.parameters())
        return {
            "first_ms": 1e3 * step_seconds[0],
            "full_speed_s": sum(step_seconds[: max(slow_steps, default=1)]),
            "cache_bytes": count_bytes(self.cache), "beside_bytes": own_bytes or None,
            "peak_bytes": own_bytes + weight_bytes if own_bytes else None,
        }  # fmt: skip

    def measure_round(self) -> dict[str, Any]:
        """Run a further call, and return fields of the row for all rounds so far.

        With graphs, a second call checks the end of sequences one step late.
        """
        self.step_seconds.append(statistics.median(self._generate()[1:]))
        median, low, high = compute_quartiles(self.step_seconds)
        batch = len(self.ids)
        fields = {
            "tokens_per_s": batch / median, "low_per_s": batch / (high or median),
            "high_per_s": batch / (low or median), "step_ms": 1e3 * median,
            "rounds": len(self.step_seconds),
        }  # fmt: skip
        replays_graphs = self.contender.is_compiled or self.contender.is_captured
        if self.stage.is_gpu and replays_graphs and isinstance(self.cache, FP8PagedCache):
            # Without a window, a cache can remove tokens that it has not recorded.
            record_past = mock.patch.object(FP8PagedCache, "activate_past_recording")
            with record_past, mock.patch(STOP_CHECK, return_value=True):
                self.late_step_seconds.append(statistics.median(self._generate()[1:]))
            fields["late_per_s"] = batch / statistics.median(self.late_step_seconds)
        return fields

    def _generate(self) -> list[float]:
        """Generate the tokens of a round, and return the seconds until each token."""
        contender = self.contender
        timer = _TokenTimer(self.stage)
        self.model.set_attn_implementation(contender.attention)
        if contender.is_captured:
            enable(self.model, capture=True)
        # The contender `FLASH` must use torch's flash attention, and no other kernel of SDPA.
        is_flash = contender.name == FLASH and self.stage.is_gpu and not self.stage.is_dry
        sdpa_context = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if is_flash else nullcontext()
        try:
            with torch.no_grad(), sdpa_context:
                self.ids = self.model.generate(
                    input_ids=self.ids, attention_mask=torch.ones_like(self.ids),
                    past_key_values=self.cache, do_sample=False, pad_token_id=0,
                    logits_processor=LogitsProcessorList([timer]),
                    max_new_tokens=self.sizes.round_tokens,
                    **_make_compile_options(contender, self.stage),
                )  # fmt: skip
        finally:
            disable(self.model)
        if not bool(timer.scores.isfinite().all()):
            raise RuntimeError("expected finite logits, got NaN or infinity")
        return timer.list_step_seconds()


def _make_compile_options(contender: Contender, stage: Stage) -> dict[str, Any]:
    if not contender.is_captured and not contender.is_compiled:
        return {"disable_compile": True}
    if contender.is_captured or stage.is_gpu:  # by default, generate() compiles for CUDA graphs
        return {}
    config = CompileConfig(fullgraph=False, dynamic=False, backend="aot_eager", mode=None)  # type: ignore[arg-type]
    config._compile_all_devices = True  # type: ignore[assignment]
    return {"compile_config": config}


def _drop_graphs(model: Any) -> None:
    """Drop compiled code and its graphs, which use memory and belong to a single cache."""
    vars(model).pop("_compiled_call", None)
    torch._dynamo.reset()
