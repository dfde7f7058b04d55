"""Measure transformers' continuous batching, with its 16-bit pages and with FP8 pages.

All requests start together, with prompts of different lengths and answers of the same length. Each
engine has enough pages for all requests, so no request waits and the memory can be compared.
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
from hf_fp8kv.bench.capacity import GIB, PERCENT, planned_tokens
from hf_fp8kv.serving.config import ServingConfig
from hf_fp8kv.serving.probe import check_kinds

from .end_to_end import make_model
from .record import Record
from .shapes import ServingLoad, Sizes

# Free memory for the planner, in GiB.
PLANNED_GIB = 40
# K and V of a random model are about 1, so the scale hardly matters.
SCALE = 0.02
# Maximum delay of an engine after the end of the section, and time to stop it, in seconds.
MAX_DELAY = STOP_SECONDS = 10


@dataclass(frozen=True)
class _Engine:
    """An engine and its configuration."""

    name: str
    fp8_options: dict[str, Any] | None = None  # of `serving.enable`, None for 16-bit pages
    attention: str = "sdpa"  # with 16-bit pages
    batching: dict[str, Any] = field(default_factory=dict)  # of a ContinuousBatchingConfig


def _list_engines(record: Record, config: Any, backend: str) -> Iterator[_Engine]:
    # With graphs, transformers may switch to flash-attn, which has a separate row.
    options = inspect.signature(ContinuousBatchingConfig).parameters
    lacks_switch = "auto_switch_to_flash" not in options
    no_switch = {} if lacks_switch else {"auto_switch_to_flash": False}
    dynamic: dict[str, Any] = {"backend": backend}
    static = dynamic | {"scales": SCALE}
    yield _Engine("fp8 static", static)
    yield _Engine("bf16 sdpa", None, "paged|sdpa" if lacks_switch else "sdpa", no_switch)
    yield _Engine("fp8 dynamic", dynamic)
    if is_flash_attn_2_available():
        yield _Engine("bf16 flash", None, "flash_attention_2")
    else:
        record.skip("bf16 flash: flash-attn is not installed")
    on_gpu = record.stage.device.type == "cuda"
    if on_gpu and backend == "triton" and not any(check_kinds(config)):
        yield _Engine("fp8 static, graphs", static, batching={"use_cuda_graph": True})
        yield _Engine("fp8 dynamic, graphs", dynamic, batching={"use_cuda_graph": True})
    else:
        record.skip("graphs over FP8 pages: they require a GPU, triton and a supported model")
    if on_gpu:
        yield _Engine("fp8 static, async", static, batching={"use_async_batching": True})


def measure(record: Record, sizes: Sizes, backend: str) -> None:
    """Add a row for each number of requests and each engine."""
    load = sizes.serving
    model = make_model(load, record.stage)
    engines = list(_list_engines(record, model.config.get_text_config(), backend))
    for requests in load.requests:
        prompts = make_prompts(load, requests)
        for engine in engines:
            work = functools.partial(_measure_engine, record, model, engine, load, prompts)
            record.measure("serving", f"{requests} requests", engine.name, work)


def make_prompts(load: ServingLoad, requests: int) -> list[list[int]]:
    """Return random prompts, with evenly spread lengths in random order."""
    generator = torch.Generator().manual_seed(0)
    low, high = load.prompts
    order = torch.randperm(requests, generator=generator)
    lengths = torch.linspace(low, high, requests).int()[order]
    return [
        torch.randint(1, load.vocabulary, (int(n),), generator=generator).tolist() for n in lengths
    ]


def _measure_engine(
    record: Record, model: Any, engine: _Engine, load: ServingLoad, prompts: list[list[int]]
) -> dict[str, Any]:
    stage = record.stage
    model.set_attn_implementation(engine.attention)
    if engine.fp8_options is not None:
        serving.enable(model, **engine.fp8_options)
    pages = sum(-(-(len(prompt) + load.answer_tokens) // load.page_size) + 1 for prompt in prompts)
    config = ContinuousBatchingConfig(
        page_size=load.page_size, num_blocks=pages, max_batch_tokens=load.batch_tokens,
        max_requests_per_batch=len(prompts), allow_block_sharing=False, max_memory_percent=PERCENT,
        **engine.batching,
    )  # fmt: skip
    if config.use_cuda_graph:
        longest = load.prompts[1] + load.answer_tokens
        config.max_blocks_per_request = -(-longest // load.page_size) + 1
    try:
        stage.reset_peak()
        seconds = _run(record, model, config, load, prompts)
        new_tokens = len(prompts) * load.answer_tokens
        return {
            "tokens_per_s": new_tokens / seconds, "seconds": seconds,
            "prompt_tokens": sum(map(len, prompts)), "new_tokens": new_tokens,
            "batch": len(prompts), "peak_bytes": stage.peak_bytes(),
            "planned_tokens": _plan_tokens(model, engine),
        }  # fmt: skip
    finally:
        serving.disable(model)
        model.set_attn_implementation("sdpa")
        if stage.is_gpu:
            stage.clean()


def _run(
    record: Record, model: Any, config: Any, load: ServingLoad, prompts: list[list[int]]
) -> float:
    """Return the seconds from the first request to the last answer."""
    generation = GenerationConfig(
        max_new_tokens=load.answer_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, timeout=STOP_SECONDS
    ) as manager:
        # The same number of short requests compiles the kernels.
        warmup_prompts = [prompt[: load.prompts[0]] for prompt in prompts]
        _wait_for_answers(record, manager, warmup_prompts, load.warmup_tokens)
        began = time.perf_counter()
        _wait_for_answers(record, manager, prompts, load.answer_tokens)
        record.stage.wait()
        return time.perf_counter() - began


def _wait_for_answers(
    record: Record, manager: Any, prompts: list[list[int]], new_tokens: int
) -> None:
    """Wait for all answers. Raise RuntimeError if one fails, the engine stops, or time runs out."""
    manager.add_requests(prompts, max_new_tokens=new_tokens)
    pending = len(prompts)
    while pending:
        result = manager.get_result(timeout=1)
        if result is None:
            is_late = record.seconds_left() < -MAX_DELAY
            if is_late or not manager.is_running():
                manager.stop(block=True, timeout=STOP_SECONDS, hard_stop=True)
                raise RuntimeError("no time left" if is_late else "the engine stopped")
            continue
        if result.error is not None:
            raise RuntimeError(result.error)
        if result.is_finished():
            pending -= 1
            if (count := len(result.generated_tokens)) != new_tokens:
                raise RuntimeError(f"expected {new_tokens} tokens, got {count}")


def _plan_tokens(model: Any, engine: _Engine) -> int:
    """Return the capacity in tokens that the engine's planner finds."""
    config = deepcopy(model.config.get_text_config())
    if engine.fp8_options is not None:
        settings = ServingConfig.parse(**engine.fp8_options | {"backend": "torch"})
        return planned_tokens(config, PLANNED_GIB * GIB, settings)
    attention = engine.attention.removeprefix("paged|")
    return planned_tokens(config, PLANNED_GIB * GIB, None, attention=attention)
