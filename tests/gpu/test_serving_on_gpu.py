"""Continuous batching on a GPU: the same tokens, streams, graphs, offloading and memory.

Without a GPU, `make test-all` runs most of these tests on tiny shapes in Triton's interpreter, so
that the tests themselves are tested.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import CompileConfig

from hf_fp8kv import ConfigError, FP8PagedCache, ops, serving
from hf_fp8kv.formats import LayerPlan
from hf_fp8kv.ops import Pages
from hf_fp8kv.serving.attend import attend_layer
from hf_fp8kv.serving.config import LayerStorage
from hf_fp8kv.serving.layout import EnginePages, from_page
from hf_fp8kv.serving.step import EngineStep
from tests.gpu.common import DEVICE, MARKS, ON_GPU, only_gpu, random_llama, waiting_is_an_error
from tests.helpers import serving_tools
from tests.helpers.serving_tools import (
    answer_to,
    answers_to,
    batched,
    batching,
    forked,
    greedy,
    head_scales,
    managing,
    note_offloads,
    one_by_one,
    running,
)
from tests.helpers.tiny_models import tiny

if ops.available_backends()["triton"] is not None:
    pytest.skip(str(ops.available_backends()["triton"]), allow_module_level=True)

pytestmark = MARKS
# Factor of all lengths. The interpreter only computes few tokens.
LONGER = 9 if ON_GPU else 1
PAGES = 32 * LONGER
# On a CPU, "auto" would choose a different backend.
TRITON = {"backend": "triton"}


@pytest.fixture(autouse=True)
def _fewer_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(serving_tools, "NEW", 3)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def another(name: str, **config: Any) -> Any:
    return tiny(name, attn_implementation="fp8_paged", **config)[0].to(DEVICE)


MODELS = {
    "llama": random_llama,
    "mistral": functools.partial(another, "mistral", sliding_window=20 * LONGER),
    "gemma2": functools.partial(
        another, "gemma2", sliding_window=8 * LONGER, query_pre_attn_scalar=1
    ),
    "gpt_oss": functools.partial(another, "gpt_oss", sliding_window=9 * LONGER),
}


def texts(*, few: bool = False) -> list[list[int]]:
    """Return prompts, the last two of which share whole pages at the start."""
    # This is the first seed for which the tokens of all models and kinds have wide margins.
    numbers = torch.Generator().manual_seed(5)

    def some(count: int) -> list[int]:
        return torch.randint(3, 99, (count,), generator=numbers).tolist()

    shared = some(32 * LONGER)
    ends = [shared + some(3), shared + some(1)]
    return ends if few else [some(3), some(17 * LONGER), some(13 * LONGER), *ends]


def run(model: Any, prompts: list[list[int]], **more: Any) -> list[list[int]]:
    return batched(model, prompts, **{"pages": PAGES, "max_batch_tokens": 4096, **more})


@functools.cache
def case(name: str = "llama") -> tuple[Any, dict[str, Any], list[list[int]]]:
    """Return a model, keywords with static scales, and the tokens of generate() with them."""
    model = MODELS[name]()
    keywords = {"scales": head_scales(model), **TRITON}
    return model, keywords, one_by_one(model, texts(), **keywords)


@contextlib.contextmanager
def enabled(model: Any, **keywords: Any) -> Iterator[None]:
    serving.enable(model, **keywords)
    try:
        yield
    finally:
        serving.disable(model)


@pytest.fixture
def served() -> Iterator[tuple[Any, list[list[int]]]]:
    """The model with FP8 pages and static scales, and its answers to `texts()`."""
    model, keywords, wanted = case()
    with enabled(model, **keywords):
        yield model, wanted


# -- the same tokens -------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "static": {},
    "dynamic": {"dtype": "fp8_e4m3"},
    "e5m2": {"dtype": "fp8_e5m2"},
    "unquantized": {"dtype": "auto"},
}


# Whole prompts, prompts in parts beside requests that decode, and steps that are prepared while
# another step runs.
FORMS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"max_batch_tokens": 16 * LONGER},
    "async": {"use_async_batching": True},
    "async chunks": {"max_batch_tokens": 100, "use_async_batching": True},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_generate(name: str, kind: str, form: str) -> None:
    """Prefill, decoding and both at once; full attention, rings, softcap, sinks; float32."""
    if "async" in form and (kind != "static" or not ON_GPU):
        pytest.skip("a GPU prepares steps, of any kind in the same way")
    if not ON_GPU and name != "llama" and (kind != "static" or form == "whole"):
        pytest.skip("the interpreter takes minutes; test_serving.py has them on the CPU")
    model = MODELS[name]()
    keywords = {**TRITON, **KINDS[kind]}
    if kind == "static":
        model, keywords, wanted = case(name)
    else:
        wanted = one_by_one(model, texts(), **keywords)
    if kind == "static" and ON_GPU:
        assert wanted != one_by_one(model, texts(), dtype="auto"), "FP8 does not show"
    with enabled(model, **keywords):
        assert run(model, texts(), **FORMS[form]) == wanted


@pytest.mark.parametrize("center", [False, True], ids=["", "centered"])
def test_bfloat16_differs_only_where_two_tokens_are_as_good(center: bool) -> None:
    """Products of other shapes round differently, so that a token may lose by a rounding error."""
    model = random_llama(torch.bfloat16)
    keywords = {"scales": head_scales(model, center=center), **TRITON}
    prompts = texts(few=not ON_GPU)
    with enabled(model, **keywords):
        found = run(model, prompts)
    model.set_attn_implementation("fp8_paged")
    for prompt, new in zip(prompts, found, strict=True):
        cache = FP8PagedCache(model.config, prefill="stored", **keywords)
        ids = torch.tensor([prompt + new], device=DEVICE)
        with torch.no_grad():
            logits = model(ids, past_key_values=cache).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        # Rounding to 8 bits, through some layers; a wrong page is worth a standard deviation.
        assert ((logits.amax(1) - chosen) <= 8 * 2**-8 * logits.std(1)).float().mean() > 0.9
        assert ((logits.amax(1) - chosen) <= 0.5 * logits.std(1)).all()


def test_prefixes_are_found(served: Any) -> None:
    model, wanted = served
    with managing(model, pages=PAGES) as manager:
        found = [answer_to(manager, text) for text in texts()[-2:]]
        used = serving.usage(manager)
    assert found == wanted[-2:]
    assert used is not None
    assert (used.prefix_hits, used.prefix_tokens) == (1, 32 * LONGER)


def test_forks(served: Any) -> None:
    model, _ = served
    prompts = serving_tools.prompts()[: 4 if ON_GPU else 2]
    wanted = one_by_one(model, prompts, scales=head_scales(model), **TRITON)
    assert forked(model, prompts, 3) == [tokens for tokens in wanted for _ in range(3)]


# -- engines on a GPU ------------------------------------------------------------------------------


def counted(kind: Any, name: str) -> Any:
    """Return a context in which a mock counts the calls of a method, and makes them."""
    method = getattr(kind, name)
    return mock.patch.object(kind, name, autospec=True, side_effect=method)


@only_gpu
@pytest.mark.parametrize("together", [{}, {"use_async_batching": True}], ids=["", "async"])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_graphs_of_decoding_steps(kind: str, together: dict[str, bool]) -> None:
    """Captured for 1, 2, 4 and 5 requests, and replayed while requests begin and end."""
    model, keywords, wanted = case()
    if kind == "dynamic":
        keywords = TRITON
        wanted = one_by_one(model, texts(), **keywords)
    graph = torch.cuda.CUDAGraph
    for chunk in (4096, 100):
        options = {"max_batch_tokens": chunk, "use_cuda_graph": True, **together}
        with (
            enabled(model, **keywords),
            counted(graph, "capture_begin") as captured,
            counted(graph, "replay") as replayed,
        ):
            assert run(model, texts(), **options) == wanted, chunk
        # A few sizes, for each of two sets of inputs: not one for each step.
        assert 0 < captured.call_count <= 8
        assert replayed.call_count > serving_tools.NEW / 2


@only_gpu
def test_graphs_that_cannot_be_are_refused() -> None:
    models = [MODELS["mistral"]()]
    for model in models:
        serving.enable(model, **TRITON)
        with pytest.raises(ConfigError, match="use_cuda_graph"):
            model.init_continuous_batching(greedy(), batching(use_cuda_graph=True))


def test_rows_of_no_request(served: Any) -> None:
    """Steps by block table with padding, as in graphs: rows without a request change no token."""
    model, wanted = served
    # Shared pages of a common start would be written twice.
    config = batching(pages=PAGES, allow_block_sharing=False)
    manager = model.init_continuous_batching(greedy(), config)
    manager.continuous_batching_config.max_blocks_per_request = 4 * LONGER
    manager.warmup()
    manager.batch_processor.model_runner.pad_inputs = True
    with running(manager):
        # 3 and 5 requests make rows for 4 and 8.
        assert answers_to(manager, texts()) == wanted


@pytest.mark.parametrize("kind", ["static", "e5m2"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_requests_go_to_the_cpu_and_come_back(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ON_GPU:
        if name == "gemma2":
            pytest.skip("the interpreter takes minutes")
        monkeypatch.setattr(serving_tools, "NEW", 10)
    gone = note_offloads(monkeypatch)
    model = MODELS[name]()
    keywords = {"scales": head_scales(model)} if kind == "static" else {"dtype": "fp8_e5m2"}
    prompts = [text[:30] for text in texts() if len(text) > 12]
    wanted = one_by_one(model, prompts, **TRITON, **keywords)
    # Pages of 8 tokens have room for all prompts together, but not for the answers.
    pages = sum(-(-len(text) // 8) for text in prompts) + 3
    with enabled(model, **TRITON, **keywords):
        found = run(
            model, prompts, page_size=8, pages=pages, max_batch_tokens=256, cpu_offload_space=0.01,
            allow_block_sharing=False,
        )  # fmt: skip
    assert found == wanted
    assert any(gone)


@pytest.mark.parametrize("form", ["config", pytest.param("level", marks=only_gpu)])
def test_a_compiled_model(served: Any, form: str) -> None:
    model, wanted = served
    backend = {"mode": "default"} if ON_GPU else {"backend": "eager", "mode": None}
    options = {"varlen_compile_config": CompileConfig(fullgraph=False, dynamic=True, **backend)}
    if form == "level":
        options = {"default_compile_level": 1}
    few = slice(None) if ON_GPU else slice(2)
    assert run(model, texts()[few], **options) == wanted[few]


@only_gpu
def test_memory_stays_within_the_plan() -> None:
    """Pages for a fifth of the free memory, and steps of the largest size."""
    model = random_llama()
    serving.enable(model, scales=head_scales(model, center=True), **TRITON)
    numbers = torch.Generator().manual_seed(0)
    lengths = (3000, 2200, 1500, 1100, 900, 700, 500, 300)
    prompts = [torch.randint(3, 99, (n,), generator=numbers).tolist() for n in lengths]
    model(torch.ones((1, 8), dtype=torch.long, device=DEVICE), use_cache=False)  # workspaces
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    # Other processes may take or free memory of the GPU while the engine plans.
    free = [torch.cuda.mem_get_info()[0]]
    torch.cuda.reset_peak_memory_stats()
    run(model, prompts, pages=None, page_size=256, max_batch_tokens=8192, max_memory_percent=0.2)
    taken = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    free.append(torch.cuda.mem_get_info()[0])
    assert taken <= 0.2 * max(free) + 2**26
    assert taken > 0.9 * 0.2 * min(free), "the pages take less than allowed"


# -- one layer of one step -------------------------------------------------------------------------

HEADS, QUERIES, DIM, SLOTS = (8, 32, 128, 64) if ON_GPU else (2, 4, 16, 8)
# Stored and new tokens of three prompts, and then of two decoding requests and a chunk.
FIRST = tuple((0, n * LONGER) for n in (33, 20, 40))
THEN = ((33 * LONGER, 1), (20 * LONGER, 1), (40 * LONGER, 30))


def layer(
    stored: Pages,
    form: EnginePages,
    window: int | None,
    first: int = 0,
    backend: str = "triton",
    device: torch.device = DEVICE,
) -> list[torch.Tensor]:
    """Return the attention of two steps of three requests, whose pages begin at `first`."""
    numbers = torch.Generator().manual_seed(0)
    count = -(-(window or 80 * LONGER) // SLOTS) + 1
    found = []
    for requests in (FIRST, THEN):
        step = EngineStep([window], SLOTS)
        for number, (past, tokens) in enumerate(requests):
            start = first + number * count
            step.add(past, tokens, [list(range(start, start + count))])
        query, key, value = (
            torch.randn(1, heads, step.count, DIM, generator=numbers).to(device, form.dtype)
            for heads in (QUERIES, HEADS, HEADS)
        )
        with waiting_is_an_error(), torch.no_grad():
            found.append(
                attend_layer(
                    query, key, value, step.work(0, device), stored,
                    LayerStorage(form.plan, None, None, None), form, backend,
                    scaling=DIM**-0.5,
                )
            )  # fmt: skip
    return found


FORM = EnginePages(HEADS, DIM, SLOTS, LayerPlan.parse("fp8", "fp8"), torch.float32, dynamic=True)


def pages(count: int, device: torch.device = DEVICE) -> Pages:
    memory = torch.zeros(count * FORM.bytes_per_page, dtype=torch.uint8, device=device)
    return FORM.carve(memory)


@pytest.mark.parametrize("window", [None, 25 * LONGER], ids=["full", "ring"])
def test_a_step_does_not_wait_and_reaches_far_pages(window: int | None) -> None:
    """Lists of requests are copied while the GPU works. Pages lie past 2 ** 31 bytes of a pool."""
    room = 3 * (-(-80 * LONGER // SLOTS) + 1)
    far = 2**31 // (HEADS * SLOTS * DIM) + 5 if ON_GPU else 7
    near = layer(pages(room), FORM, window)
    many = pages(far + room)
    for place in (0, 1):  # a layer's pages begin at its place in a block
        found = layer(from_page(many, place), FORM, window, far - 1)
        for got, expected in zip(found, near, strict=True):
            assert torch.equal(got, expected)
    if ON_GPU:
        assert many.block.numel() > 2**31
    assert not many.block[: far - 1].any(), "a page outside the requests was written"
    # The same without Triton, on the CPU.
    cpu = torch.device("cpu")
    wanted = layer(pages(room, cpu), FORM, window, backend="torch", device=cpu)
    for got, expected in zip(near, wanted, strict=True):
        assert (got.cpu() - expected).norm() < 1e-3 * expected.norm()
