"""Tests for a GPU: graphs, compiled steps, synchronization, and races.

Without a GPU, `make test-all` runs most of these tests on tiny shapes in Triton's interpreter, to
test the tests themselves.
"""

import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import LogitsProcessor, LogitsProcessorList

from benchmarks.gpu.attention import attend, make_query, make_schedule
from benchmarks.gpu.cached import CacheSteps
from benchmarks.gpu.random_data import (
    compute_error,
    compute_output_error,
    make_layer_pages,
    poison_memory,
)
from benchmarks.gpu.record import TOLERANCE
from benchmarks.gpu.shapes import BF16, E3M4, E4M3, PAGE_FORMATS, TINY, Case, Heads, PageFormat
from benchmarks.gpu.stage import Stage
from benchmarks.layers import AttentionLayer, make_config
from hf_fp8kv import FP8PagedCache
from hf_fp8kv.attention.fp8_paged import fp8_paged_attention
from hf_fp8kv.cache.paged_tensor import get_pages
from tests.cache.test_compile import make_config as make_compile_config
from tests.gpu.gpu_tools import (
    DEVICE,
    MARKS,
    NUM_PROMPT_TOKENS,
    ON_GPU,
    forbid_synchronization,
    make_medium_model,
    needs_gpu,
)
from tests.helpers.planned import make_centered_scales
from tests.helpers.tiny_models import build_variant

pytestmark = [*MARKS, pytest.mark.usefixtures("fresh_compiler")]
# Heads of a usual size, and tiny heads for the interpreter.
HEADS = Heads(32, 8, 128) if ON_GPU else TINY.heads
[STATIC] = (fmt for fmt in PAGE_FORMATS if fmt.name == "e4m3 static")
STAGE = Stage(DEVICE, is_dry=not ON_GPU)


# -- generation ----------------------------------------------------------------------------------


# The padding fills whole pages and a part of a page.
NUM_PADDING = NUM_PROMPT_TOKENS // 2


def make_model(name: str, **config: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    if name == "medium":
        return make_medium_model(NUM_PADDING)
    model, inputs = build_variant(name, attn_implementation="fp8_paged", **config)
    return model.to(DEVICE), {name: tensor.to(DEVICE) for name, tensor in inputs.items()}


CACHE_OPTIONS: dict[str, dict[str, Any]] = {
    "dynamic scales": {},
    "static scales": {"scales": make_centered_scales(0.02)},
    "e3m4, stored": {"dtype": "fp8_e3m4", "prefill": "stored"},
}


def generate(model: Any, inputs: dict[str, Any], cache: Any, **options: Any) -> torch.Tensor:
    options = {"max_new_tokens": 40 if ON_GPU else 4, **options}
    return model.generate(
        **inputs, past_key_values=cache, do_sample=False, pad_token_id=0, eos_token_id=None,
        **options,
    )  # fmt: skip


LOGITS_OPTIONS = {"output_logits": True, "return_dict_in_generate": True}


class ForcedTokens(LogitsProcessor):
    """Makes generate() choose given tokens `[B, T]`, which include the prompt."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1]
        next_token = self.tokens[:, length : length + 1]
        return torch.full_like(scores, -torch.inf).scatter(1, next_token, 0.0)


def make_cache(
    model: Any, inputs: dict[str, Any], *, preallocated: bool = False, **options: Any
) -> FP8PagedCache:
    length_options = {"max_cache_len": inputs["input_ids"].shape[1] + 60} if preallocated else {}
    return FP8PagedCache(
        model.config, page_size=16, **{"backend": "triton", **length_options, **options}
    )


@pytest.mark.parametrize("cache_kind", ["growing", "preallocated", "compiled"])
@pytest.mark.parametrize("cache_options", CACHE_OPTIONS.values(), ids=CACHE_OPTIONS.keys())
@pytest.mark.parametrize(
    "name", ["medium", "gqa", "sliding_and_full", "softcap", "sinks", "latent"]
)
def test_tokens_match_the_reference(name, cache_options, cache_kind):
    has_all_formats = name == "gqa" or (name == "medium" and cache_kind != "compiled")
    if cache_options and not has_all_formats:
        pytest.skip("few models test all formats, because formats do not depend on the model")
    if not ON_GPU and (name != "gqa" or (cache_options and cache_kind != "growing")):
        pytest.skip("few models run in the interpreter: test_kernels_generate.py runs others")
    model, inputs = make_model(name)
    reference_cache = make_cache(model, inputs, backend="reference", **cache_options)
    reference_output = generate(model, inputs, reference_cache, **LOGITS_OPTIONS)
    expected = reference_output.sequences
    cache = make_cache(model, inputs, preallocated=cache_kind != "growing", **cache_options)
    options: dict[str, Any] = {"disable_compile": cache_kind != "compiled"}
    if cache_kind == "compiled" and not ON_GPU:  # on a GPU, generate() compiles by default
        options["compile_config"] = make_compile_config()
    if name == "medium" and "prefill" in cache_options:
        # The prompt attends to codes, which rounding in float32 may change in each layer. Between
        # two backends of a CPU, this changes the logits by 2e-4. A wrong page in one layer changes
        # them by 1e-2, and a doubled scale of its values by 0.3.
        options |= {"logits_processor": LogitsProcessorList([ForcedTokens(expected)])}
        output = generate(model, inputs, cache, **options, **LOGITS_OPTIONS)
        assert max(map(compute_error, output.logits, reference_output.logits)) < 1e-3
        return
    assert torch.equal(generate(model, inputs, cache, **options), expected)
    if cache_kind == "compiled":
        assert counters["stats"]["unique_graphs"] == 1, "a step was compiled again"
        assert not counters["inductor"]["cudagraph_skips"], "a step was not one CUDA graph"
        cache.reset()
        assert torch.equal(generate(model, inputs, cache, **options), expected)
        assert counters["stats"]["unique_graphs"] == 1, "a reset cache was compiled again"


# -- layers in host memory -----------------------------------------------------------------------


def fill_cache(num_layers: int, batch: int, num_tokens: int, **options: Any) -> FP8PagedCache:
    """Return a cache with random K and V, which are the same in every call with the same sizes."""
    config = make_config((HEADS.num_query_heads, HEADS.num_kv_heads, HEADS.dim), num_layers)
    config._attn_implementation = "fp8_paged"
    cache = FP8PagedCache(config, backend="triton", **options)
    torch.manual_seed(0)
    for index in range(num_layers):
        key, value = (STAGE.randn(batch, HEADS.num_kv_heads, num_tokens, HEADS.dim) for _ in "kv")
        cache.update(key, value, index)
    return cache


def run_steps(cache: FP8PagedCache, num_layers: int, num_steps: int) -> Iterator[torch.Tensor]:
    """Yield the attention output of each layer in each step, while other tensors use memory."""
    torch.manual_seed(1)
    for _ in range(num_steps):
        for index in range(num_layers):
            key, value = (STAGE.randn(1, HEADS.num_kv_heads, 1, HEADS.dim) for _ in "kv")
            query = STAGE.randn(1, HEADS.num_query_heads, 1, HEADS.dim)
            handles = cache.update(key, value, index)
            module = AttentionLayer(HEADS.num_query_heads // HEADS.num_kv_heads, index)
            output, _ = fp8_paged_attention(module, query, *handles, None)
            del handles
            # This tensor reuses the memory of a layer that has left the device.
            torch.full((1 << 22 if ON_GPU else 1,), float("nan"), device=DEVICE)
            yield output


def test_copies_and_kernels_do_not_race():
    """Layers of 64 MiB or more are copied. Late copies or early writes would change the outputs."""
    num_layers, num_tokens, num_steps = (6, 40_000, 12) if ON_GPU else (3, 130, 2)
    options = {"dtype": "fp8_e4m3"}
    resident_cache = fill_cache(num_layers, 1, num_tokens, **options)
    expected = list(run_steps(resident_cache, num_layers, num_steps))
    for offloading in (True, num_tokens // 128):
        cache = fill_cache(num_layers, 1, num_tokens, **options, offloading=offloading)
        for index, output in enumerate(run_steps(cache, num_layers, num_steps)):
            assert torch.equal(output, expected[index]), (offloading, divmod(index, num_layers))
        footprint = cache.memory_footprint()
        assert footprint.fetched_bytes > footprint.returned_bytes > 0


@needs_gpu
def test_offloading_uses_the_memory_of_two_layers():
    """The bound also holds while Python is ahead of the device."""
    num_layers = 8
    num_tokens = 40_000
    layer_bytes = fill_cache(1, 1, num_tokens, dtype="fp8_e4m3").memory_footprint().total_bytes
    gc.collect()
    initial_bytes = torch.cuda.memory_allocated()  # allocated by other tests
    cache = fill_cache(num_layers, 1, num_tokens, dtype="fp8_e4m3", offloading=True)
    for _ in run_steps(cache, num_layers, 1):
        pass
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.memory_allocated() - initial_bytes < 2.2 * layer_bytes
    for _ in run_steps(cache, num_layers, 3):
        pass
    # In addition to the pages, a step uses its queries and 16 MiB.
    assert torch.cuda.max_memory_allocated() - initial_bytes < 2.2 * layer_bytes + 2**26


@needs_gpu
def test_a_step_with_offloaded_layers_does_not_synchronize():
    cache = fill_cache(4, 1, 5000, dtype="fp8_e4m3", offloading=True)
    steps = run_steps(cache, 4, 4)
    for _ in range(2 * 4):
        next(steps)
    with forbid_synchronization():
        outputs = list(steps)
    assert all(bool(output.isfinite().all()) for output in outputs)


# -- one layer -----------------------------------------------------------------------------------


def make_layer_step(cache: FP8PagedCache) -> Callable[[], torch.Tensor]:
    """Return a decode step of one layer, with constant random input."""
    torch.manual_seed(2)
    query, key, value = (
        STAGE.randn(2, num_heads, 1, HEADS.dim)
        for num_heads in (HEADS.num_query_heads, HEADS.num_kv_heads, HEADS.num_kv_heads)
    )
    module = AttentionLayer(HEADS.num_query_heads // HEADS.num_kv_heads)

    def step() -> torch.Tensor:
        keys, values = cache.update(key, value, 0)
        return fp8_paged_attention(module, query, keys, values, None)[0]

    return step


@pytest.mark.parametrize("options", [{}, {"scales": 0.02}, {"dtype": "auto"}], ids=str)
@pytest.mark.parametrize("preallocated", [False, True], ids=["growing", "preallocated"])
def test_a_decode_step_does_not_synchronize(preallocated, options):
    """The steps stay within a page, because a growing cache waits once for each new page."""
    length_options = {"max_cache_len": 200} if preallocated else {}
    step = make_layer_step(fill_cache(1, 2, 70, **options, **length_options))
    step()
    with forbid_synchronization():
        for _ in range(3):
            output = step()
    assert bool(output.isfinite().all())


@needs_gpu
@pytest.mark.parametrize("preallocated", [False, True], ids=["growing", "preallocated"])
def test_no_step_compiles_a_kernel_again(preallocated, monkeypatch):
    """Triton by default compiles a kernel again for a length of 1 or a multiple of 16.

    The sequences have more than one page, so that the first step runs the kernels that split them.
    """
    from triton import knobs

    events: list[Any] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **event: events.append(event))
    # No other test has compiled kernels for pages of this size.
    page_size = 32 if preallocated else 128
    length_options = {"max_cache_len": 500} if preallocated else {}
    step = make_layer_step(fill_cache(1, 2, 150, page_size=page_size, **length_options))
    for _ in range(3):
        step()
    num_compiled = len(events)
    assert num_compiled, "no kernel was compiled"
    for _ in range(300):
        step()
    assert len(events) == num_compiled


class AttentionCall(NamedTuple):
    """Functions that fill a schedule, attend to scattered pages, and compute the error."""

    fill_schedule: Callable[[], object]
    attend: Callable[[], torch.Tensor]
    compute_error: Callable[[torch.Tensor], float]


def prepare_attention(fmt: PageFormat, case: Case) -> AttentionCall:
    [pages] = make_layer_pages(STAGE, fmt, case, 1, 16)
    query = make_query(STAGE, case)
    fill_schedule, schedule, lengths = make_schedule(STAGE, case, "triton")
    return AttentionCall(
        fill_schedule,
        functools.partial(attend, query, pages, lengths, case, schedule, "triton"),
        lambda output: compute_output_error(output, query, pages, case),
    )


@pytest.mark.parametrize("fmt", [E4M3, STATIC, E3M4, BF16], ids=lambda fmt: fmt.name)
def test_repeated_calls_are_bitwise_equal(fmt):
    """A race would change the result of sequences that are split into many parts."""
    lengths, num_repeats = ((9000, 33, 4097), 200) if ON_GPU else ((300, 33), 2)
    case = Case(lengths, HEADS, label="repeats")
    with torch.no_grad():
        call = prepare_attention(fmt, case)
        with poison_memory():
            first_output = call.attend()
        assert call.compute_error(first_output) < TOLERANCE
        for index in range(num_repeats):
            call.fill_schedule()
            for is_reused in (False, True):
                assert torch.equal(call.attend(), first_output), f"repeat {index}, {is_reused=}"


FEW_HEADS, MANY_HEADS = Heads(16, 1, 512, 64), Heads(128, 1, 512, 64)


def shrink_case(case: Case) -> Case:
    """Return a case that is small enough for the interpreter, unless there is a GPU."""
    if ON_GPU:
        return case
    is_latent = case.heads.rope_dim > 0
    num_tokens = min(case.num_new_tokens, 20)
    heads = Heads(case.heads.num_query_heads // 8, 1, 32, 16) if is_latent else TINY.heads
    lengths = tuple(
        length if length < 200 and is_latent else 1 + length // 40 + num_tokens
        for length in case.lengths
    )
    return replace(
        case, lengths=lengths, heads=heads, num_new_tokens=num_tokens, window=min(case.window, 20)
    )


DENSE_CASES = [
    Case((20000, 1, 64, 777), HEADS, label="ragged"),
    Case((5000, 4096), HEADS, window=1024, label="window"),
    Case((5000, 100), HEADS, softcap=20.0, label="softcap"),
    Case((5000, 100), HEADS, num_new_tokens=4, label="several tokens"),
    Case((5000,), HEADS, num_new_tokens=700, label="many tokens"),
    Case((3000,), Heads(8, 8, 64), label="no groups"),
    Case((3000,), Heads(16, 2, 256), label="large heads"),
    Case((3000,), Heads(16, 2, 80), label="odd heads"),
]
LATENT_CASES = [
    Case((20000, 1, 777), FEW_HEADS, label="16 heads"),
    Case((63, 64, 65, 128, 129), FEW_HEADS, label="ends of pages"),
    Case((33, 64, 5000), MANY_HEADS, label="128 heads"),
    Case((5000, 65), FEW_HEADS, num_new_tokens=4, label="several tokens"),
    Case((3000, 833), FEW_HEADS, num_new_tokens=300, label="many tokens"),
    Case((1500,), MANY_HEADS, num_new_tokens=130, label="many tokens, 128 heads"),
    Case((5000, 4096), FEW_HEADS, window=1024, label="window"),
]
# Each format runs every case of its group, because each pair is a separate kernel.
FORMAT_CASES = [
    *((fmt, case) for fmt in (E4M3, STATIC, BF16) for case in DENSE_CASES),
    *((fmt, case) for fmt in (E3M4, E4M3, BF16) for case in LATENT_CASES),
]


@pytest.mark.parametrize(
    ("fmt", "case"), FORMAT_CASES,
    ids=[
        f"{fmt.name}-{'latent ' if case in LATENT_CASES else ''}{case}"
        for fmt, case in FORMAT_CASES
    ],
)  # fmt: skip
def test_attention_over_scattered_pages_matches_the_reference(fmt, case):
    call = prepare_attention(fmt, shrink_case(case))
    with torch.no_grad(), poison_memory():
        output = call.attend()
    assert call.compute_error(output) < TOLERANCE


@pytest.mark.parametrize("preallocated", [True, False], ids=["preallocated", "growing"])
@pytest.mark.parametrize(
    "case",
    [
        Case((5000,) * 3, HEADS, label="one token"),
        Case((700,) * 50, HEADS, label="50 sequences"),
        Case((130,) * 98, HEADS, label="98 sequences"),
        Case((30000, 30000), HEADS, label="a mask at size", padding=(0, 7500)),
        Case((3000,), HEADS, num_new_tokens=8, label="32 rows"),
        Case((3000,), Heads(16, 2, 128), num_new_tokens=3, label="24 rows"),
        Case((3000,), HEADS, num_new_tokens=16, label="64 rows"),
        Case((3000,) * 2, HEADS, 16, label="64 rows, padded", padding=(0, 750)),
        Case((3000,) * 2, HEADS, 300, label="many tokens, padded", padding=(0, 750)),
        Case((3000,) * 2, Heads(8, 8, 128), label="no groups, padded", padding=(0, 750)),
    ],
    ids=str,
)
@pytest.mark.parametrize("fmt", [E4M3, E3M4, BF16], ids=lambda fmt: fmt.name)
def test_attention_in_a_step_of_generate_matches_the_reference(fmt, case, preallocated):
    """As in the benchmark, a step reads a filled cache with transformers' mask."""
    if not ON_GPU:
        if not preallocated and fmt != E3M4:
            pytest.skip("a growing cache has the same masks with every format")
        num_tokens = min(case.num_new_tokens, 20)
        lengths = tuple(1 + length // 100 + num_tokens for length in case.lengths[:3])
        padding = tuple(num_padding // 100 for num_padding in case.padding[:3])
        case = replace(
            case, lengths=lengths, num_new_tokens=num_tokens, padding=padding, heads=TINY.heads
        )
    with torch.no_grad(), poison_memory():
        steps = CacheSteps(STAGE, fmt, case, 2, "triton", preallocated=preallocated)
        for index in range(2):
            output = steps.step(index)
    assert compute_output_error(output, steps.query, get_pages(steps.key), case) < TOLERANCE


@needs_gpu
@pytest.mark.parametrize(
    ("num_new_tokens", "length", "max_bytes"),
    [(1, 60_000, 2**23), (600, 60_000, 2**28), (600, 150_000, 2**27)],
)
def test_attention_memory_is_bounded(num_new_tokens, length, max_bytes):
    """Cases are a step, a prompt whose codes are converted first, and a prompt with too many codes.

    A split sequence needs memory for partial sums. K and V of 60,000 tokens in bf16 take 246 MB.
    """
    case = Case((length,), HEADS, num_new_tokens=num_new_tokens, label="memory")
    attend_once = prepare_attention(E4M3, case).attend
    attend_once()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    initial_bytes = torch.cuda.memory_allocated()
    output = attend_once()
    assert torch.cuda.max_memory_allocated() - initial_bytes < output.nbytes + max_bytes


@needs_gpu
@pytest.mark.parametrize("options", [{}, {"scales": 0.02}], ids=["dynamic", "static"])
def test_a_replayed_graph_uses_the_current_lengths(options):
    """One captured step is replayed over several pages and schedules."""
    num_stored = 60
    num_replays = 1500
    options = {**options, "max_cache_len": num_stored + num_replays + 10}
    cache, eager_cache = (fill_cache(1, 2, num_stored, **options) for _ in range(2))
    step, expected_step = make_layer_step(cache), make_layer_step(eager_cache)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    # A preallocated cache keeps its tensors, so that the graph continues from the prompt.
    cache.crop(-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    for index in range(num_replays):
        graph.replay()
        expected = expected_step()
        if index % 50 == 0 or index == num_replays - 1:
            assert torch.equal(output, expected), f"replay {index}"
    length = num_stored + num_replays
    assert int(cache.get_seq_length()) == int(eager_cache.get_seq_length()) == length


@pytest.mark.parametrize("offloading", [True, 1] if ON_GPU else [1])
@pytest.mark.parametrize("cache_options", CACHE_OPTIONS.values(), ids=CACHE_OPTIONS.keys())
@pytest.mark.parametrize("name", ["medium", "sliding_and_full", "latent"])
def test_offloaded_layers_give_the_same_tokens(name, cache_options, offloading):
    if (name != "medium" and cache_options) or ((name != "medium" or cache_options) and not ON_GPU):
        pytest.skip("formats do not depend on the model, and test_offloading.py tests the CPU")
    model, inputs = make_deep_model(name)
    all_options: list[dict[str, int]] = [{}]
    if name == "medium" and not cache_options and ON_GPU:
        all_options += [{"num_beams": 2}, {"prefill_chunk_size": 7}]
    for options in all_options:
        expected = generate(model, inputs, make_cache(model, inputs, **cache_options), **options)
        cache = make_cache(model, inputs, **cache_options, offloading=offloading)
        assert torch.equal(generate(model, inputs, cache, **options), expected), options
        assert cache.memory_footprint().fetched_bytes > 0


def make_deep_model(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a model with more than two layers, and a padded prompt of two rows."""
    if name == "medium" and ON_GPU:
        return make_medium_model(NUM_PADDING)
    types = {"layer_types": ["sliding_attention", "full_attention"] * 2}
    layers = types if name == "sliding_and_full" else {}
    return make_model("gqa" if name == "medium" else name, num_hidden_layers=4, **layers)
