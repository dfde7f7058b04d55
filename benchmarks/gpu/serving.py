"""Measure transformers' continuous batching, with its own pages and with FP8 pages.

All requests start together, with prompts of different lengths and answers of the same length. Each
engine has pages for all requests, so that no request waits and the memory can be compared.
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
from hf_fp8kv.serving.probe import layer_windows

from .end_to_end import make_model
from .record import Record
from .shapes import Served, Sizes

# Free memory for the planner, in GiB.
PLANNED_GIB = 40
# K and V of a random model are about 1, so the scale hardly matters.
SCALE = 0.02
# Maximum delay of an engine after the end of the section, in seconds.
MAX_DELAY = 10


@dataclass(frozen=True)
class _Engine:
    """An engine and its configuration."""

    name: str
    fp8: dict[str, Any] | None = None  # for `serving.enable`, None for transformers' own pages
    attention: str = "sdpa"  # of transformers' own pages
    settings: dict[str, Any] = field(default_factory=dict)  # of a ContinuousBatchingConfig


def _engines(record: Record, config: Any, backend: str) -> Iterator[_Engine]:
    # transformers' engine may switch to flash-attn with graphs, which has a separate row.
    older = "auto_switch_to_flash" not in inspect.signature(ContinuousBatchingConfig).parameters
    stay = {} if older else {"auto_switch_to_flash": False}
    dynamic: dict[str, Any] = {"backend": backend}
    static = dynamic | {"scales": SCALE}
    yield _Engine("fp8 static", static)
    yield _Engine("bf16 sdpa", None, "paged|sdpa" if older else "sdpa", stay)
    yield _Engine("fp8 dynamic", dynamic)
    if is_flash_attn_2_available():
        yield _Engine("bf16 flash", None, "flash_attention_2")
    else:
        record.skip("bf16 flash: flash-attn is not installed")
    on_gpu = record.stage.device.type == "cuda"
    if on_gpu and backend == "triton" and not any(layer_windows(config)):
        yield _Engine("fp8 static, graphs", static, settings={"use_cuda_graph": True})
        yield _Engine("fp8 dynamic, graphs", dynamic, settings={"use_cuda_graph": True})
    else:
        record.skip("graphs of steps over FP8 pages: they require a GPU")
    if on_gpu:
        yield _Engine("fp8 static, async", static, settings={"use_async_batching": True})


def measure(record: Record, sizes: Sizes, backend: str) -> None:
    """Add a row for each number of requests and each engine."""
    served = sizes.served
    model = make_model(served, record.stage)
    engines = list(_engines(record, model.config.get_text_config(), backend))
    for requests in served.requests:
        prompts = make_prompts(served, requests)
        for engine in engines:
            work = functools.partial(_work, record, model, engine, served, prompts)
            record.measure("serving", f"{requests} requests", engine.name, work)


def make_prompts(served: Served, requests: int) -> list[list[int]]:
    """Return random prompts, with evenly spread lengths in random order."""
    chance = torch.Generator().manual_seed(0)
    low, high = served.prompts
    lengths = torch.linspace(low, high, requests).int()[torch.randperm(requests, generator=chance)]
    return [
        torch.randint(1, served.vocabulary, (int(n),), generator=chance).tolist() for n in lengths
    ]


def _work(
    record: Record, model: Any, engine: _Engine, served: Served, prompts: list[list[int]]
) -> dict[str, Any]:
    stage = record.stage
    model.set_attn_implementation(engine.attention)
    if engine.fp8 is not None:
        serving.enable(model, **engine.fp8)
    pages = sum(-(-(len(prompt) + served.new) // served.page_size) + 1 for prompt in prompts)
    config = ContinuousBatchingConfig(
        page_size=served.page_size, num_blocks=pages, max_batch_tokens=served.batch_tokens,
        max_requests_per_batch=len(prompts), allow_block_sharing=False, max_memory_percent=PERCENT,
        **engine.settings,
    )  # fmt: skip
    if config.use_cuda_graph:
        longest = served.prompts[1] + served.new
        config.max_blocks_per_request = -(-longest // served.page_size) + 1
    try:
        stage.reset_peak()
        seconds = _run(record, model, config, served, prompts)
        return {
            "tokens_per_s": len(prompts) * served.new / seconds, "seconds": seconds,
            "prompt_tokens": sum(map(len, prompts)), "new_tokens": len(prompts) * served.new,
            "batch": len(prompts), "peak_bytes": stage.peak_bytes(),
            "planned_tokens": _plan_tokens(model, engine),
        }  # fmt: skip
    finally:
        serving.disable(model)
        model.set_attn_implementation("sdpa")
        if stage.is_gpu:
            stage.clean()


def _run(
    record: Record, model: Any, config: Any, served: Served, prompts: list[list[int]]
) -> float:
    """Return the seconds from the first request to the last answer."""
    generation = GenerationConfig(
        max_new_tokens=served.new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, timeout=10
    ) as manager:
        # The same number of short requests compiles the kernels.
        first = [prompt[: served.prompts[0]] for prompt in prompts]
        _wait_for_answers(record, manager, first, served.warm)
        began = time.perf_counter()
        _wait_for_answers(record, manager, prompts, served.new)
        record.stage.wait()
        return time.perf_counter() - began


def _wait_for_answers(record: Record, manager: Any, prompts: list[list[int]], new: int) -> None:
    """Wait for all answers. Raise RuntimeError if a request fails or the time is up."""
    manager.add_requests(prompts, max_new_tokens=new)
    missing = len(prompts)
    while missing:
        out = manager.get_result(timeout=1)
        if out is None:
            late = record.seconds_left() < -MAX_DELAY
            if late or not manager.is_running():
                manager.stop(block=True, timeout=10, hard_stop=True)
                raise RuntimeError("no time left" if late else "the engine stopped")
            continue
        if out.error is not None:
            raise RuntimeError(out.error)
        if out.is_finished():
            missing -= 1
            if len(out.generated_tokens) != new:
                raise RuntimeError(f"expected {new} tokens, got {len(out.generated_tokens)}")


def _plan_tokens(model: Any, engine: _Engine) -> int:
    """Return the capacity in tokens that the engine's planner finds."""
    config = deepcopy(model.config.get_text_config())
    if engine.fp8 is not None:
        settings = ServingConfig.parse(**engine.fp8 | {"backend": "torch"})
        return planned_tokens(config, PLANNED_GIB * GIB, settings)
    attention = engine.attention.removeprefix("paged|")
    return planned_tokens(config, PLANNED_GIB * GIB, None, attention=attention)
