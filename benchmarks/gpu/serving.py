"""Serving section: transformers' continuous batching as it is, and over FP8 pages.

All requests come at once, with prompts of mixed lengths, and all get equally many new tokens. Each
contender has pages for all of them, so that none waits and memory can be compared.
"""

import functools
import inspect
import time
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.utils.import_utils import is_flash_attn_2_available

from hf_fp8kv import serving
from hf_fp8kv.bench.capacity import GIB, PERCENT, batching_config, planned_tokens
from hf_fp8kv.serving.config import ServingConfig
from hf_fp8kv.serving.engines import cache_class

from .end_to_end import make_model
from .record import Record
from .shapes import Served, Sizes

SECTION = "serving"
# Free memory that the planner is asked about, in GiB.
PLANNED = 40
# Any: a random model's K and V are about 1.
SCALE = 0.02
# Seconds that a contender may take past the section's end.
LATE = 10


@dataclass(frozen=True)
class _Contender:
    """An engine and its configuration."""

    attention: str | None  # of transformers' own engine; None: FP8 pages
    fp8: dict[str, Any]  # for `serving.enable`
    settings: dict[str, Any]  # of a ContinuousBatchingConfig


def _contenders(record: Record, config: Any, backend: str) -> dict[str, _Contender]:
    # Also the others run with what the engine itself chooses for them: flash with graphs.
    older = "auto_switch_to_flash" not in inspect.signature(ContinuousBatchingConfig).parameters
    stay = {} if older else {"auto_switch_to_flash": False}
    dynamic: dict[str, Any] = {"backend": backend}
    static = dynamic | {"scales": SCALE}
    contenders = {
        "fp8 static": _Contender(None, static, {}),
        "bf16 sdpa": _Contender("paged|sdpa" if older else "sdpa", {}, stay),
        "fp8 dynamic": _Contender(None, dynamic, {}),
    }
    if is_flash_attn_2_available():
        contenders["bf16 flash"] = _Contender("flash_attention_2", {}, {})
    else:
        record.skip("bf16 flash: flash-attn is not installed")
    graphs = {"use_cuda_graph": True}
    kind = cache_class(ServingConfig.parse(**static))
    on_gpu = record.stage.device.type == "cuda"
    if on_gpu and backend == "triton" and kind.has_block_table_steps(config):
        contenders["fp8 static, graphs"] = _Contender(None, static, graphs)
        contenders["fp8 dynamic, graphs"] = _Contender(None, dynamic, graphs)
    else:
        record.skip("graphs of steps over FP8 pages: need a GPU and transformers 5.18 or later")
    if on_gpu:
        contenders["fp8 static, async"] = _Contender(None, static, {"use_async_batching": True})
    return contenders


def measure(record: Record, sizes: Sizes, backend: str) -> None:
    """Add a row for each number of requests and each engine."""
    served = sizes.served
    record.report("making a random model")
    model = make_model(served, record.stage)
    contenders = _contenders(record, model.config.get_text_config(), backend)
    took: dict[str, float] = {}
    for requests in served.requests:
        case = f"{requests} requests"
        prompts = _make_prompts(served, requests)
        tokens = sum(map(len, prompts)) + requests * served.new
        numbers = 2 * served.layers * served.heads.kv * served.heads.dim
        for name, contender in contenders.items():
            # Twice as many requests or fewer need no more steps of decoding, which take the time.
            expected = took.get(name, 0.0)
            # In bfloat16, and the masks that SDPA wants beside it.
            size = 3.0 * numbers * tokens + 2**34
            began = time.perf_counter()
            work = functools.partial(_work, record, model, contender, served, prompts)
            if record.measure(SECTION, case, name, work, seconds=expected, size=size):
                took[name] = time.perf_counter() - began


def _make_prompts(served: Served, requests: int) -> list[list[int]]:
    """Return random prompts, whose lengths are spread evenly and come in no order."""
    numbers = torch.Generator().manual_seed(0)
    low, high = served.prompts
    lengths = torch.linspace(low, high, requests).int()[torch.randperm(requests, generator=numbers)]
    return [
        torch.randint(1, served.vocabulary, (int(n),), generator=numbers).tolist() for n in lengths
    ]


def _work(
    record: Record, model: Any, contender: _Contender, served: Served, prompts: list[list[int]]
) -> dict[str, Any]:
    stage = record.stage
    model.set_attn_implementation(contender.attention or "sdpa")
    if contender.attention is None:
        serving.enable(model, **contender.fp8)
    pages = sum(-(-(len(prompt) + served.new) // served.page_size) + 1 for prompt in prompts)
    config = batching_config(
        served.page_size, num_blocks=pages, max_batch_tokens=served.batch_tokens,
        max_requests_per_batch=len(prompts), allow_block_sharing=False, max_memory_percent=PERCENT,
        **contender.settings,
    )  # fmt: skip
    if config.use_cuda_graph:
        longest = served.prompts[1] + served.new
        config.max_blocks_per_request = -(-longest // served.page_size) + 1
    try:
        stage.reset_peak()
        seconds = _run(record, model, config, served, prompts)
        return {
            "tokens_per_s": len(prompts) * served.new / seconds,
            "seconds": seconds,
            "prompt_tokens": sum(map(len, prompts)),
            "new_tokens": len(prompts) * served.new,
            "batch": len(prompts),
            "peak_bytes": stage.peak_bytes(),
            "planned_tokens": _plan_tokens(model, contender),
        }
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
        # As many requests as then, short ones: kernels are compiled for them.
        first = [prompt[: served.prompts[0]] for prompt in prompts]
        _wait_for_answers(record, manager, first, served.warm)
        began = time.perf_counter()
        _wait_for_answers(record, manager, prompts, served.new)
        record.stage.wait()
        return time.perf_counter() - began


def _wait_for_answers(record: Record, manager: Any, prompts: list[list[int]], new: int) -> None:
    """Wait for all answers. Raises RuntimeError if one fails, or if there is no time left."""
    manager.add_requests(prompts, max_new_tokens=new)
    missing = len(prompts)
    while missing:
        out = manager.get_result(timeout=1)
        if out is None:
            late = record.seconds_left() < -LATE
            if late or not manager.is_running():
                manager.stop(block=True, timeout=10, hard_stop=True)
                raise RuntimeError("no time left" if late else "the engine ended by itself")
            continue
        if out.error is not None:
            raise RuntimeError(out.error)
        if out.is_finished():
            missing -= 1
            if len(out.generated_tokens) != new:
                raise RuntimeError(f"expected {new} tokens, got {len(out.generated_tokens)}")


def _plan_tokens(model: Any, contender: _Contender) -> int:
    """Return the tokens that the engine's own planner makes room for."""
    config = deepcopy(model.config.get_text_config())
    if contender.attention is None:
        settings = ServingConfig.parse(**contender.fp8 | {"backend": "torch"})
        return planned_tokens(config, PLANNED * GIB, settings)
    attention = contender.attention.removeprefix("paged|")
    return planned_tokens(config, PLANNED * GIB, None, attention=attention)
