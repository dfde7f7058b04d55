"""Tests of offloading: idle layers keep pages in host memory, tokens are equal, copies are few.

On a CPU, device and host memory are the same, but the cache copies pages as it does on a GPU. New
memory contains NaN in these tests, so a page that was not copied back changes the tokens.
"""

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hf_fp8kv import ConfigError, FP8PagedCache, enable
from hf_fp8kv.paging.memory_blocks import Blocks
from hf_fp8kv.paging.offloading import OffloadBudget, OffloadedLayer
from tests.cache.public import attend
from tests.helpers.assertions import assert_same
from tests.helpers.standin import replace_triton
from tests.helpers.tiny_models import build_variant, make_causal_config

pytestmark = [pytest.mark.text, pytest.mark.usefixtures("poisoned_outputs")]

NUM_LAYERS = 4
NUM_HEADS = 2
HEAD_DIM = 16
PAGE_SIZE = 8
GREEDY = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
EXACT = {"scales": 1.0, "page_size": PAGE_SIZE}
# Bytes of a page with static scales.
PAGE_BYTES = PAGE_SIZE * NUM_HEADS * 2 * HEAD_DIM
OPTIONS: list[dict[str, Any]] = [{"offloading": True}, {"offloading": 2}]
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "chunks": {"prefill_chunk_size": 5},
    "drafts": {"prompt_lookup_num_tokens": 3},
}


# Two layers with a window precede the layer without a window. A third such layer follows it.
MIXED = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
}
# The last two layers read the keys and values of the first two layers.
SHARED = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.0] * NUM_LAYERS,
}


def make_config(name: str = "llama", **fields: Any) -> Any:
    mixed = MIXED if name == "gemma3_text" else {}
    return make_causal_config(name, **{"num_hidden_layers": NUM_LAYERS, **mixed, **fields})


def add_tokens(caches: list[Any], num_tokens: int, batch: int = 2) -> None:
    for index in range(len(caches[0].layers)):
        k, v = torch.randn(2, batch, NUM_HEADS, num_tokens, HEAD_DIM)
        outputs = [cache.update(k, 2 * v, index) for cache in caches]
        for cache, output in zip(caches, outputs, strict=True):
            assert [type(tensor) for tensor in output] == [type(tensor) for tensor in outputs[0]]
            for side, actual, expected in zip("KV", output, outputs[0], strict=True):
                assert_same(actual.clone(), expected.clone(), f"layer {index}, {side}")
            check_layers_on_device(cache)


def assert_holds(caches: list[Any]) -> None:
    for index in range(len(caches[0].layers)):
        for side in ("keys", "values"):
            dense = [getattr(cache.layers[index], side).dense() for cache in caches]
            for actual in dense:
                assert_same(actual, dense[0], f"layer {index}, {side}")


def check_layers_on_device(cache: FP8PagedCache) -> None:
    if cache.options.offloading is True:
        sizes = [layer.memory_footprint() for layer in cache.paged_layers]
        assert len([size for size in sizes if size.get("pages")]) <= 2


def make_caches(name: str = "llama", **keywords: Any) -> list[FP8PagedCache]:
    """Return a cache with all pages on the device, and an offloaded cache with equal options."""
    keywords = {"page_size": PAGE_SIZE, **keywords}
    config = make_config(name)
    return [FP8PagedCache(config, **keywords, **options) for options in ({}, {"offloading": True})]


def call_method(caches: list[FP8PagedCache], method: str, *arguments: Any) -> None:
    for cache in caches:
        getattr(cache, method)(*arguments)


def count_copied_bytes(cache: FP8PagedCache) -> tuple[int, int]:
    """Return the number of bytes fetched to the device and returned to host memory."""
    sizes = cache.memory_footprint()
    return sizes.fetched_bytes, sizes.returned_bytes


@pytest.mark.parametrize(
    ("name", "calls", "dtype", "attention", "offloading"),
    [
        ("gqa", "drafts", "auto", "stock", OPTIONS[0]),
        ("sliding", "chunks", None, "fp8_paged", OPTIONS[1]),
        ("sliding_and_full", "beams", None, "fp8_paged", OPTIONS[0]),
        ("latent", "greedy", "auto", "fp8_paged", OPTIONS[0]),
        ("kv_sharing", "beams", "auto", "fp8_paged", OPTIONS[1]),
    ],
    ids=str,
)
def test_offloading_does_not_change_the_tokens(
    name: str, calls: str, dtype: str | None, attention: str, offloading: dict[str, Any]
) -> None:
    fields = {"sliding_and_full": MIXED, "kv_sharing": SHARED}.get(name, {})
    model, inputs = build_variant(name, num_hidden_layers=NUM_LAYERS, **fields)
    if attention != "stock":
        model.set_attn_implementation(attention)
    keywords = {**GREEDY, **CALLS[calls]}
    prompt = {name: tensor[1:] for name, tensor in inputs.items()} if calls == "drafts" else inputs
    resident_cache, cache = (
        FP8PagedCache(model.config, page_size=PAGE_SIZE, dtype=dtype, **options)
        for options in ({}, offloading)
    )
    expected = model.generate(**prompt, past_key_values=resident_cache, **keywords)
    assert_same(model.generate(**prompt, past_key_values=cache, **keywords), expected)
    assert cache.memory_footprint().fetched_bytes > 0
    check_layers_on_device(cache)


def test_the_cache_implementation_offloaded_selects_offloading() -> None:
    model, inputs = build_variant("gqa", num_hidden_layers=4)
    options = {**inputs, **GREEDY, "return_dict_in_generate": True}
    enable(model, page_size=PAGE_SIZE, dtype="auto")
    expected = model.generate(**options)
    assert count_copied_bytes(expected.past_key_values) == (0, 0)
    for keywords in ({"cache_implementation": "offloaded"}, {}):
        output = model.generate(**options, **keywords)
        assert_same(output.sequences, expected.sequences)
        assert min(count_copied_bytes(output.past_key_values)) > 0
        model.generation_config.cache_implementation = "offloaded"
    enable(model, max_cache_len=64)
    with pytest.raises(ConfigError, match="offloading: expected a cache that grows"):
        model.generate(**options)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text"])
def test_each_stored_byte_is_copied_once_per_step(name: str) -> None:
    """A step fetches the stored tokens or the window, and returns the pages that it wrote."""
    window = {} if name == "llama" else {"sliding_window": 16}
    cache = FP8PagedCache(make_config(name, **window), **EXACT, offloading=True)
    add_tokens([cache], 100)
    add_tokens([cache], 1)
    expected_fetched, expected_returned = count_copied_bytes(cache)
    for _ in range(18):
        length = cache.get_seq_length()
        add_tokens([cache], 1)
        for layer in cache.paged_layers:
            # The pages of the first layer are fetched at the end of the previous step.
            num_tokens = length + (layer.index == 0)
            first_token = (
                0 if layer.sliding_window is None else num_tokens - layer.sliding_window + 1
            )
            num_window_pages = -(-num_tokens // PAGE_SIZE) - first_token // PAGE_SIZE
            expected_fetched += num_window_pages * 2 * PAGE_BYTES
            expected_returned += 2 * PAGE_BYTES
        assert count_copied_bytes(cache) == (expected_fetched, expected_returned)


def test_the_footprint_counts_pages_on_the_device_and_on_the_host() -> None:
    cache = FP8PagedCache(make_config(), **EXACT, offloading=True)
    add_tokens([cache], 61)
    sizes = cache.memory_footprint()
    assert sizes.used_bytes == NUM_LAYERS * 16 * PAGE_BYTES
    # The last two layers are on the device. Only the last layer is not in host memory.
    assert sizes.pages_bytes == 2 * 16 * PAGE_BYTES
    assert sizes.host_bytes == sizes.returned_bytes == (NUM_LAYERS - 1) * 16 * PAGE_BYTES
    kinds = ("pages", "scales", "tables", "host", "other")
    assert sizes.total_bytes == sum(getattr(sizes, f"{kind}_bytes") for kind in kinds)


@pytest.mark.usefixtures("no_garbage_collection")
def test_memory_is_freed_without_the_garbage_collector() -> None:
    cache = FP8PagedCache(make_config(), offloading=True, page_size=PAGE_SIZE)
    add_tokens([cache], 21)
    fork = cache.fork()
    add_tokens([fork], 1)
    keys = fork.layers[NUM_LAYERS - 1].keys
    storage = weakref.ref(keys.block.untyped_storage())
    del cache, fork, keys
    assert storage() is None


class DelayedStream:
    """A stream of copies on the CPU. A copy runs when something waits for it, or at the end.

    A copy is an error if its pages on the device were freed before it ran, because torch would
    have given their memory to other tensors. `record_stream` keeps the pages, and a copy keeps
    pages in host memory, as with CUDA.
    """

    def __init__(self) -> None:
        self.copies: list[Callable[[], None]] = []
        self.kept_tensors: list[torch.Tensor] = []
        self.num_done = 0
        self._has_waited = False  # for the current stream, since the previous event

    def wait_stream(self, _stream: Any) -> None:
        self._has_waited = True

    def add_copy(self, target: Blocks, source: Blocks, pages: Any, host: Blocks) -> None:
        assert self._has_waited, "the copy would not wait for earlier work"
        self.kept_tensors += host.tensors
        target_references = [weakref.ref(tensor) for tensor in target.tensors]
        source_references = [weakref.ref(tensor) for tensor in source.tensors]
        self.copies.append(
            lambda: _copy_from(
                _restore(target_references), _restore(source_references), pages, blocking=True
            )
        )

    def record_event(self) -> Any:
        self._has_waited = False
        num_copies = len(self.copies)
        return SimpleNamespace(device=None, synchronize=lambda: self.run_until(num_copies))

    def run_until(self, num_copies: int) -> None:
        while self.num_done < num_copies:
            self.copies[self.num_done]()
            self.num_done += 1


def _restore(references: list[weakref.ref[torch.Tensor]]) -> Blocks:
    tensors = [reference() for reference in references]
    assert None not in tensors, "the pages were freed before their copy"
    blocks = Blocks()
    blocks._set_blocks(tensors)
    return blocks


_copy_from = Blocks.copy_from
_start_copy = OffloadedLayer._start_copy


@pytest.fixture
def delayed_stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[DelayedStream]:
    """The stream of all copies. The current stream executes operations at once."""
    stream = DelayedStream()
    current = SimpleNamespace(wait_event=lambda event: event.synchronize())

    def start_copy(layer: OffloadedLayer, source: Blocks, target: Blocks, pages: Any) -> None:
        add_copy = functools.partial(stream.add_copy, host=layer.host_blocks)
        with monkeypatch.context() as patch:
            patch.setattr(Blocks, "copy_from", lambda *args, blocking: add_copy(*args))
            _start_copy(layer, source, target, pages)

    monkeypatch.setattr(OffloadedLayer, "_start_copy", start_copy)
    monkeypatch.setattr(OffloadBudget, "get_stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    keep = stream.kept_tensors.append
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, _: keep(tensor))
    yield stream
    gc.collect()
    stream.run_until(len(stream.copies))


@pytest.mark.usefixtures("delayed_stream")
def test_late_copies_do_not_change_stored_pages() -> None:
    """Crops, forks, long calls and assignments move pages while copies are pending."""
    caches = make_caches("gemma3_text")
    add_tokens(caches, 21)
    add_tokens(caches, 40)
    forks = [cache.fork() for cache in caches]
    add_tokens(forks, 3)
    add_tokens(caches, 1)
    call_method(caches, "crop", -2)
    add_tokens(caches, 1)
    call_method(caches, "batch_select_indices", torch.tensor([1]))
    add_tokens(caches, 9, batch=1)
    assert_holds(caches)
    assert_holds(forks)


def test_pages_on_the_device_are_written_after_their_copies(delayed_stream: DelayedStream) -> None:
    blocks, pages = fetch_delayed()
    blocks.put(pages, torch.full((2, 16), 5, dtype=torch.uint8))
    delayed_stream.run_until(len(delayed_stream.copies))
    assert (blocks.take(pages) == 5).all()


def test_a_deleted_layer_keeps_its_memory_until_its_copies_end(
    delayed_stream: DelayedStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that deletes a layer may have another current stream."""
    blocks, _ = fetch_delayed()
    other_stream = SimpleNamespace(wait_event=lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: other_stream)
    del blocks
    delayed_stream.run_until(len(delayed_stream.copies))


def test_an_interrupted_copy_is_waited_for(
    delayed_stream: DelayedStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        add_copy(*args, **kwargs)
        raise KeyboardInterrupt

    add_copy = delayed_stream.add_copy
    monkeypatch.setattr(delayed_stream, "add_copy", interrupt)
    blocks = OffloadedLayer(OffloadBudget(PAGE_SIZE), 0)
    with pytest.raises(KeyboardInterrupt):
        fetch_delayed(blocks)
    blocks.free()
    assert delayed_stream.num_done == len(delayed_stream.copies) > 0


def fetch_delayed(blocks: OffloadedLayer | None = None) -> tuple[OffloadedLayer, Any]:
    """Return two pages of a layer whose copy to the device is pending, and their numbers."""
    if blocks is None:
        blocks = OffloadedLayer(OffloadBudget(PAGE_SIZE), 0)
    pages = np.arange(2)
    blocks.allocate(16, 2, torch.device("cpu"))
    blocks.put(pages, torch.full((2, 16), 3, dtype=torch.uint8))
    blocks.evict()
    blocks.fetch(pages)
    return blocks, pages


def test_layers_of_transformers_stay_on_the_device() -> None:
    config = make_config("gemma3_text")
    skipped: dict[str, Any] = {"skip_layers": ["sliding_attention"], "page_size": PAGE_SIZE}
    caches = [FP8PagedCache(config, **skipped), FP8PagedCache(config, **skipped, offloading=True)]
    for num_tokens in (21, 1, 1):
        add_tokens(caches, num_tokens)
    assert count_copied_bytes(caches[1])[0] == 0, "a single layer never evicts pages"


@pytest.mark.usefixtures("delayed_stream")
@pytest.mark.parametrize(
    ("calls", "offloading"), [("greedy", OPTIONS[0]), ("beams", OPTIONS[1])], ids=str
)
def test_late_copies_do_not_change_the_tokens(calls: str, offloading: dict[str, Any]) -> None:
    """The next layer is fetched, and pages are returned, while a layer computes."""
    model, inputs = build_variant(
        "sliding_and_full", num_hidden_layers=NUM_LAYERS, **MIXED, attn_implementation="fp8_paged"
    )
    keywords = {**GREEDY, **CALLS[calls]}
    expected = model.generate(
        **inputs, past_key_values=FP8PagedCache(model.config, page_size=PAGE_SIZE), **keywords
    )
    cache = FP8PagedCache(model.config, page_size=PAGE_SIZE, **offloading)
    assert_same(model.generate(**inputs, past_key_values=cache, **keywords), expected)
    assert min(count_copied_bytes(cache)) > 0


def test_memory_is_freed_before_the_next_layer_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delayed writes, recorded launches and tables keep no pages of a layer on the device."""
    replace_triton(monkeypatch)
    _, cache = make_caches("gemma3_text", backend="triton")
    add_tokens([cache], 21)
    storages: list[weakref.ref[Any]] = []
    for _ in range(3):
        for index in range(NUM_LAYERS):
            keys, values = cache.update(*torch.randn(2, 2, NUM_HEADS, 1, HEAD_DIM), index)
            attend(torch.randn(2, 2 * NUM_HEADS, 1, HEAD_DIM), keys, values, 0.2)
            assert not any(storage() for storage in storages[:-1])
            storages.append(weakref.ref(keys.block.untyped_storage()))
            del keys, values
