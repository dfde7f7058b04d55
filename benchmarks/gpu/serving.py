"""Measure transformers' continuous batching, with stock 16-bit pages and with FP8 pages.

All requests start together, with prompts of different lengths and answers of the same length. Each
engine has enough pages for all requests, so no request waits and peak memory is comparable.
"""

import functools
import inspect
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.utils.import_utils import is_flash_attn_2_available

from hf_fp8kv import serving
from hf_fp8kv.bench.capacity import GIB, MEMORY_SHARE, plan_tokens
from hf_fp8kv.serving.config import ServingConfig
from hf_fp8kv.serving.probe import read_layer_windows

from .end_to_end import make_model
from .record import Record
from .shapes import RunSizes, ServingLoad

# Free memory for the planner, in GiB.
PLANNED_GIB = 40
# K and V of a random model have magnitudes of about 1, so the exact scale hardly matters.
SCALE = 0.02
# Time that an engine may run past the end of the section, and time that it gets to stop.
MAX_DELAY_SECONDS, STOP_SECONDS = 10, 10


@dataclass(frozen=True)
class _Engine:
    """An engine of transformers and its options."""

    name: str
    fp8_options: dict[str, Any] | None = None  # for `serving.enable`, None for stock pages
    attention: str = "sdpa"  # attention implementation of stock pages
    batching_options: dict[str, Any] = field(default_factory=dict)  # ContinuousBatchingConfig


def _list_engines(record: Record, config: Any, backend: str) -> Iterator[_Engine]:
    # transformers may switch to FlashAttention, which has a separate row, when it captures graphs.
    parameters = inspect.signature(ContinuousBatchingConfig).parameters
    can_switch = "auto_switch_to_flash" in parameters
    no_switch_options = {"auto_switch_to_flash": False} if can_switch else {}
    dynamic_options: dict[str, Any] = {"backend": backend}
    static_options = dynamic_options | {"scales": SCALE}
    yield _Engine("fp8 static", static_options)
    yield _Engine("bf16 sdpa", None, "sdpa" if can_switch else "paged|sdpa", no_switch_options)
    yield _Engine("fp8 dynamic", dynamic_options)
    if is_flash_attn_2_available():
        yield _Engine("bf16 flash", None, "flash_attention_2")
    else:
        record.skip("bf16 flash: flash-attn is not installed")
    is_on_gpu = record.stage.device.type == "cuda"
    if is_on_gpu and backend == "triton" and not any(read_layer_windows(config)):
        yield _Engine("fp8 static, graphs", static_options, "sdpa", {"use_cuda_graph": True})
        yield _Engine("fp8 dynamic, graphs", dynamic_options, "sdpa", {"use_cuda_graph": True})
    else:
        record.skip("CUDA graphs over FP8 pages: they require a GPU, triton and full attention")
    if is_on_gpu:
        yield _Engine("fp8 static, async", static_options, "sdpa", {"use_async_batching": True})


def measure(record: Record, sizes: RunSizes, backend: str) -> None:
    """Add a row for each engine with each number of requests."""
    load = sizes.serving
    model = make_model(load, record)
    engines = list(_list_engines(record, model.config.get_text_config(), backend))
    for num_requests in load.request_counts:
        prompts = make_prompts(load, num_requests)
        for engine in engines:
            measure_row = functools.partial(_measure_engine, record, model, engine, load, prompts)
            record.measure("serving", f"{num_requests} requests", engine.name, measure_row)


def make_prompts(load: ServingLoad, num_prompts: int) -> list[list[int]]:
    """Return `num_prompts` random prompts, with evenly spaced lengths in random order."""
    generator = torch.Generator().manual_seed(0)
    shortest, longest = load.prompt_lengths
    order = torch.randperm(num_prompts, generator=generator)
    lengths = torch.linspace(shortest, longest, num_prompts).int()[order]
    return [
        torch.randint(1, load.vocab_size, (int(n),), generator=generator).tolist() for n in lengths
    ]


def _measure_engine(
    record: Record, model: Any, engine: _Engine, load: ServingLoad, prompts: list[list[int]]
) -> dict[str, Any]:
    stage = record.stage
    model.set_attn_implementation(engine.attention)
    if engine.fp8_options is not None:
        serving.enable(model, **engine.fp8_options)
    num_pages = sum(-(-(len(prompt) + load.new_tokens) // load.page_size) + 1 for prompt in prompts)
    config = ContinuousBatchingConfig(
        page_size=load.page_size, num_blocks=num_pages, max_batch_tokens=load.max_batch_tokens,
        max_requests_per_batch=len(prompts), allow_block_sharing=False,
        max_memory_percent=MEMORY_SHARE, **engine.batching_options,
    )  # fmt: skip
    if config.use_cuda_graph:
        longest = load.prompt_lengths[1] + load.new_tokens
        config.max_blocks_per_request = -(-longest // load.page_size) + 1
    try:
        stage.reset_peak()
        seconds = _time_requests(record, model, config, load, prompts)
        return {
            "tokens_per_s": len(prompts) * load.new_tokens / seconds, "seconds": seconds,
            "prompt_tokens": sum(map(len, prompts)), "new_tokens": len(prompts) * load.new_tokens,
            "batch": len(prompts), "peak_bytes": stage.peak_bytes(),
            "planned_tokens": _plan_engine_tokens(model, engine),
        }  # fmt: skip
    finally:
        serving.disable(model)
        model.set_attn_implementation("sdpa")
        if stage.is_gpu:
            stage.free_memory()


def _time_requests(
    record: Record, model: Any, config: Any, load: ServingLoad, prompts: list[list[int]]
) -> float:
    """Return the seconds from the first request to the last answer."""
    generation_config = GenerationConfig(
        max_new_tokens=load.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    with model.continuous_batching_context_manager(
        generation_config=generation_config, continuous_batching_config=config, timeout=STOP_SECONDS
    ) as manager:
        # Short requests, of the same number as the timed requests, compile the kernels.
        warmup_prompts = [prompt[: load.prompt_lengths[0]] for prompt in prompts]
        _wait_for_answers(record, manager, warmup_prompts, load.warmup_tokens)
        start = time.perf_counter()
        _wait_for_answers(record, manager, prompts, load.new_tokens)
        record.stage.synchronize()
        return time.perf_counter() - start


def _wait_for_answers(
    record: Record, manager: Any, prompts: list[list[int]], new_tokens: int
) -> None:
    """Wait for all answers. Raise RuntimeError if a request or the engine fails or is too late."""
    manager.add_requests(prompts, max_new_tokens=new_tokens)
    num_pending = len(prompts)
    while num_pending:
        answer = manager.get_result(timeout=1)
        if answer is None:
            is_late = record.seconds_left() < -MAX_DELAY_SECONDS
            if is_late or not manager.is_running():
                manager.stop(block=True, timeout=STOP_SECONDS, hard_stop=True)
                raise RuntimeError("time limit exceeded" if is_late else "the engine stopped")
            continue
        if answer.error is not None:
            raise RuntimeError(answer.error)
        if answer.is_finished():
            num_pending -= 1
            num_tokens = len(answer.generated_tokens)
            if num_tokens != new_tokens:
                raise RuntimeError(f"expected {new_tokens} tokens, got {num_tokens}")


def _plan_engine_tokens(model: Any, engine: _Engine) -> int:
    """Return the number of tokens that the engine's planner fits into `PLANNED_GIB` GiB."""
    config = deepcopy(model.config.get_text_config())
    if engine.fp8_options is not None:
        serving_config = ServingConfig.parse(**engine.fp8_options | {"backend": "torch"})
        return plan_tokens(config, PLANNED_GIB * GIB, serving_config)
    attention = engine.attention.removeprefix("paged|")
    return plan_tokens(config, PLANNED_GIB * GIB, None, attention=attention)
