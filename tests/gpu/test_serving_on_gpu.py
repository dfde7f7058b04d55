"""Tests of continuous batching on a GPU: tokens, streams, graphs, offloading and memory.

Without a GPU, `make test-all` runs most of these tests on tiny shapes in Triton's interpreter, to
test the tests themselves.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from hf_fp8kv import serving
from tests.gpu.gpu_tools import DEVICE, MARKS, ON_GPU, make_llama, needs_gpu
from tests.helpers import serving_tools
from tests.helpers.serving_tools import (
    draw_head_scales,
    generate_batch,
    generate_each,
    record_offloads,
)
from tests.helpers.tiny_models import build_variant

pytestmark = MARKS
# Factor of all lengths. The interpreter can only compute a few tokens.
LENGTH_FACTOR = 9 if ON_GPU else 1
# "auto" would choose another backend on a CPU.
TRITON = {"backend": "triton"}


@pytest.fixture(autouse=True)
def _limit_new_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(serving_tools, "NEW_TOKENS", 3)


def make_tiny(name: str, **config: Any) -> Any:
    return build_variant(name, attn_implementation="fp8_paged", **config)[0].to(DEVICE)


MODEL_MAKERS = {
    "llama": make_llama,
    "mistral": functools.partial(make_tiny, "mistral", sliding_window=20 * LENGTH_FACTOR),
    "gemma2": functools.partial(
        make_tiny, "gemma2", sliding_window=8 * LENGTH_FACTOR, query_pre_attn_scalar=1
    ),
    "gpt_oss": functools.partial(make_tiny, "gpt_oss", sliding_window=9 * LENGTH_FACTOR),
}


def make_prompts() -> list[list[int]]:
    """Return five prompts. The last two begin with the same pages."""
    # 5 is the first seed with which no token of any model and cache kind is nearly tied.
    generator = torch.Generator().manual_seed(5)

    def draw(num_tokens: int) -> list[int]:
        return torch.randint(3, 99, (num_tokens,), generator=generator).tolist()

    prefix = draw(32 * LENGTH_FACTOR)
    prompts = [prefix + draw(3), prefix + draw(1)]
    return [draw(3), draw(17 * LENGTH_FACTOR), draw(13 * LENGTH_FACTOR), *prompts]


def run_prompts(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    return generate_batch(
        model, prompts, **{"num_pages": 32 * LENGTH_FACTOR, "max_batch_tokens": 4096, **options}
    )


@functools.cache
def make_reference(name: str = "llama") -> tuple[Any, dict[str, Any], list[list[int]]]:
    """Return a model, options of a cache with static scales, and the answers of generate()."""
    model = MODEL_MAKERS[name]()
    cache_options = {"scales": draw_head_scales(model), **TRITON}
    return model, cache_options, generate_each(model, make_prompts(), **cache_options)


@contextlib.contextmanager
def enable_pages(model: Any, **cache_options: Any) -> Iterator[None]:
    serving.enable(model, **cache_options)
    try:
        yield
    finally:
        serving.disable(model)


# -- the same tokens -------------------------------------------------------------------------------

CACHE_KINDS: dict[str, dict[str, Any]] = {
    "static": {},
    "dynamic": {"dtype": "fp8_e4m3"},
    "e5m2": {"dtype": "fp8_e5m2"},
    "unquantized": {"dtype": "auto"},
}
# Whole prompts, prompts in chunks next to decoding requests, and steps that are prepared while a
# different step runs.
BATCHING_OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"max_batch_tokens": 16 * LENGTH_FACTOR},
    "async": {"use_async_batching": True},
    "async chunks": {"max_batch_tokens": 100, "use_async_batching": True},
}


@pytest.mark.parametrize("option_name", BATCHING_OPTIONS)
@pytest.mark.parametrize("cache_kind", CACHE_KINDS)
@pytest.mark.parametrize("name", MODEL_MAKERS)
def test_batches_give_the_tokens_of_generate(name: str, cache_kind: str, option_name: str) -> None:
    """The cases are prefill, decoding, and both, with full attention, rings, softcap and sinks."""
    if "async" in option_name and (cache_kind != "static" or not ON_GPU):
        pytest.skip("only a GPU prepares steps in advance, in the same way for every cache kind")
    if not ON_GPU and name != "llama" and (cache_kind != "static" or option_name == "whole"):
        pytest.skip("the interpreter needs minutes, and test_serving.py tests the CPU")
    model = MODEL_MAKERS[name]()
    cache_options = {**TRITON, **CACHE_KINDS[cache_kind]}
    if cache_kind == "static":
        model, cache_options, expected = make_reference(name)
    else:
        expected = generate_each(model, make_prompts(), **cache_options)
    if cache_kind == "static" and ON_GPU:
        assert expected != generate_each(model, make_prompts(), dtype="auto"), "FP8 has no effect"
    with enable_pages(model, **cache_options):
        assert run_prompts(model, make_prompts(), **BATCHING_OPTIONS[option_name]) == expected


# -- engines on a GPU ------------------------------------------------------------------------------


def count_calls(cls: Any, name: str) -> Any:
    """Return a context in which a mock counts the calls of a method, and forwards them."""
    return mock.patch.object(cls, name, autospec=True, side_effect=getattr(cls, name))


@needs_gpu
@pytest.mark.parametrize("async_options", [{}, {"use_async_batching": True}], ids=["", "async"])
@pytest.mark.parametrize("cache_kind", ["static", "dynamic"])
def test_decoding_steps_use_graphs(cache_kind: str, async_options: dict[str, bool]) -> None:
    """Graphs are captured for 1, 2, 4 and 5 requests, and replayed while requests start and end."""
    model, cache_options, expected = make_reference()
    if cache_kind == "dynamic":
        cache_options = TRITON
        expected = generate_each(model, make_prompts(), **cache_options)
    graph = torch.cuda.CUDAGraph
    for max_batch_tokens in (4096, 100):
        with (
            enable_pages(model, **cache_options),
            count_calls(graph, "capture_begin") as capture_calls,
            count_calls(graph, "replay") as replay_calls,
        ):
            assert expected == run_prompts(
                model, make_prompts(), max_batch_tokens=max_batch_tokens, use_cuda_graph=True,
                **async_options,
            )  # fmt: skip
        # A few graphs are captured for each of two sets of inputs, and not one for each step.
        assert 0 < capture_calls.call_count <= 8
        assert replay_calls.call_count > serving_tools.NEW_TOKENS / 2


@pytest.mark.parametrize("cache_kind", ["static", "e5m2"] if ON_GPU else ["static"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_offloaded_requests_resume(
    name: str, cache_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ON_GPU:
        if name == "gemma2":
            pytest.skip("the interpreter needs minutes")
        monkeypatch.setattr(serving_tools, "NEW_TOKENS", 10)
    offloads = record_offloads(monkeypatch)
    model = MODEL_MAKERS[name]()
    cache_options = (
        {"scales": draw_head_scales(model)} if cache_kind == "static" else {"dtype": "fp8_e5m2"}
    )
    prompts = [prompt[:30] for prompt in make_prompts() if len(prompt) > 12]
    expected = generate_each(model, prompts, **TRITON, **cache_options)
    # The pages have room for all prompts together, but not for the answers.
    num_pages = sum(-(-len(prompt) // 8) for prompt in prompts) + 3
    with enable_pages(model, **TRITON, **cache_options):
        actual = run_prompts(
            model, prompts, page_size=8, num_pages=num_pages, max_batch_tokens=256,
            cpu_offload_space=0.01, allow_block_sharing=False,
        )  # fmt: skip
    assert actual == expected
    assert any(offloads)


@needs_gpu
def test_memory_stays_within_the_plan() -> None:
    """Pages use a fifth of the free memory, and steps have the largest size."""
    model = make_llama()
    serving.enable(model, scales=draw_head_scales(model, center=True), **TRITON)
    generator = torch.Generator().manual_seed(0)
    lengths = (3000, 2200, 1500, 1100, 900, 700, 500, 300)
    prompts = [torch.randint(3, 99, (length,), generator=generator).tolist() for length in lengths]
    # The first call allocates workspaces, which the engine does not plan.
    model(torch.ones((1, 8), dtype=torch.long, device=DEVICE), use_cache=False)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    allocated_bytes = torch.cuda.memory_allocated()
    # Other processes may allocate or free memory of the GPU while the engine plans.
    free_bytes = [torch.cuda.mem_get_info()[0]]
    torch.cuda.reset_peak_memory_stats()
    run_prompts(
        model, prompts, num_pages=None, page_size=256, max_batch_tokens=8192, max_memory_percent=0.2
    )
    used_bytes = torch.cuda.max_memory_allocated() - allocated_bytes
    torch.cuda.empty_cache()
    free_bytes.append(torch.cuda.mem_get_info()[0])
    assert used_bytes <= 0.2 * max(free_bytes) + 2**26
    assert used_bytes > 0.9 * 0.2 * min(free_bytes), "the pages use less than allowed"
