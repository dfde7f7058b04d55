"""Pages of layers that do not compute lie in host memory: the same tokens, and no byte twice.

On a CPU both tiers are ordinary memory, and every copy between them is made. What left the device
reads as NaN here, and so does a page of the host that was written on the device since.
"""

import contextlib
import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from hf_fp8kv import ConfigError, FP8PagedCache, OutOfPagesError, PrefixStore, enable
from hf_fp8kv.attention.fp8_paged import fp8_paged_attention
from hf_fp8kv.bench.contenders import AttentionLayer
from hf_fp8kv.paging import page_pool
from hf_fp8kv.paging.block_table import BlockTable
from hf_fp8kv.paging.offloading import OffloadBudget, OffloadedPool
from hf_fp8kv.paging.page_pool import PagePool
from tests.helpers.assertions import assert_same
from tests.helpers.standin import triton_standin
from tests.helpers.tiny_models import causal_config, tiny

pytestmark = pytest.mark.text

LAYERS, HEADS, DIM, PAGE = 6, 2, 16, 8
GREEDY = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
EXACT = {"scales": 1.0, "page_size": PAGE}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "chunks": {"prefill_chunk_size": 5},
    "drafts": {"prompt_lookup_num_tokens": 3},
}


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """NaN in every format of 8 bits and in floats: 0xFF (E3M4 and others: 0x80) is no number."""
    evict, written = OffloadedPool.evict, OffloadedPool._note_written

    def poisoned(pool: PagePool, pages: Any = slice(None)) -> None:
        for part in pool.parts():
            for name in part:
                for page in range(len(part[name])) if isinstance(pages, slice) else pages:
                    if page < len(part[name]):
                        part[name][page].view(torch.uint8).fill_(0xFF)

    def evict_all(self: OffloadedPool) -> None:
        self.store()
        # Layers that share the keys of another one still read what they were given.
        if self.device_pool.is_allocated and "kv_sharing" not in request.node.name:
            poisoned(self.device_pool)
        evict(self)

    def write_over(self: OffloadedPool, pages: Any) -> None:
        written(self, pages)
        if self.host_pool.is_allocated and not self.in_blocks:
            poisoned(self.host_pool, pages)

    monkeypatch.setattr(OffloadedPool, "evict", evict_all)
    monkeypatch.setattr(OffloadedPool, "_note_written", write_over)


# Two layers with a window before each without one.
MIXED = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
# The last two read what the two before stored.
TURNS = {
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.0] * LAYERS,
}


def config(name: str = "llama", **fields: Any) -> Any:
    mixed = MIXED if name == "gemma3_text" else {}
    return causal_config(name, **{"num_hidden_layers": LAYERS, **mixed, **fields})


def feed(caches: list[Any], count: int, seed: int = 0, batch: int = 2) -> None:
    """Give all caches the same tokens, and compare what attention would read."""
    for index in range(LAYERS):
        generator = torch.Generator().manual_seed(100 * seed + index)
        k, v = torch.randn(2, batch, HEADS, count, DIM, generator=generator)
        shown = [cache.update(k, 2 * v, index) for cache in caches]
        for cache, both in zip(caches, shown, strict=True):
            assert [type(x) for x in both] == [type(x) for x in shown[0]]
            for side, got, expected in zip("KV", both, shown[0], strict=True):
                assert_same(got.clone(), expected.clone(), f"layer {index}, {side}")
            check(cache)


def assert_holds(caches: list[Any]) -> None:
    """All caches hold the same."""
    for index in range(LAYERS):
        for side in ("keys", "values"):
            found = [getattr(cache.layers[index], side).dense() for cache in caches]
            for got in found:
                assert_same(got, found[0], f"layer {index}, {side}")


def check(cache: FP8PagedCache) -> None:
    """No more is on the device than there may be."""
    budget = cache.budget
    if isinstance(budget, OffloadBudget):
        pools = {id(layer.pool): layer.pool for layer in cache.paged_layers}.values()
        here = [pool.device_pool.pages for pool in pools if pool.device_pool.is_allocated]
        if budget.max_device_pages is None:
            assert len(here) <= 2
        else:
            most = budget.max_device_pages * len(cache.paged_layers)
            assert sum(here) <= most or len(here) == 1


def both(name: str = "llama", **keywords: Any) -> list[FP8PagedCache]:
    """A cache, and the same with its pages in host memory."""
    keywords = {"page_size": PAGE, **keywords}
    fields = config(name)
    return [FP8PagedCache(fields, **keywords, **where) for where in ({}, {"offloading": True})]


def moved(cache: FP8PagedCache) -> tuple[int, int]:
    sizes = cache.memory_footprint()
    return sizes["fetched"], sizes["returned"]


# -- the same tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gqa", "sliding", "sliding_and_full", "latent", "kv_sharing"])
@pytest.mark.parametrize(
    ("dtype", "attention"), [("auto", "own"), ("auto", "fp8_paged"), (None, "fp8_paged")]
)
def test_the_same_tokens(name: str, dtype: str | None, attention: str) -> None:
    kinds = {"sliding_and_full": MIXED, "kv_sharing": TURNS}.get(name, {})
    model, inputs = tiny(name, num_hidden_layers=LAYERS, **kinds)
    if attention != "own":
        model.set_attn_implementation(attention)
    for what, keywords in CALLS.items():
        row = {k: v[1:] for k, v in inputs.items()} if what == "drafts" else inputs
        stayed = FP8PagedCache(model.config, page_size=PAGE, dtype=dtype)
        expected = model.generate(**row, past_key_values=stayed, **GREEDY, **keywords)
        held = max(stayed.budget.held // 4, 1)
        for where in ({"offloading": True}, {"max_device_pages": held}):
            cache = FP8PagedCache(model.config, page_size=PAGE, dtype=dtype, **where)
            got = model.generate(**row, past_key_values=cache, **GREEDY, **keywords)
            assert_same(got, expected, (what, where))
            assert cache.memory_footprint()["fetched"] > 0
            check(cache)
            for group in cache.groups.values():
                group.table.check()


@pytest.mark.parametrize("name", ["position_bias", "speech"])
@pytest.mark.parametrize("dtype", ["auto", None])
def test_encoder_decoders(name: str, dtype: str | None) -> None:
    """The keys of cross-attention are written once, and read from the layers at each step."""
    number = "num_hidden_layers" if name == "position_bias" else "decoder_layers"
    model, inputs = tiny(name, **{"num_decoder_layers": 4, number: 4})
    model.set_attn_implementation("fp8_paged")
    for keywords in ({}, {"num_beams": 2}):
        expected = None
        for where in ({}, {"offloading": True}, {"max_device_pages": 1}):
            caches = [
                FP8PagedCache(model.config, dtype=dtype, page_size=PAGE, **where) for _ in range(2)
            ]
            pair = EncoderDecoderCache(*caches)
            got = model.generate(**inputs, past_key_values=pair, **GREEDY, **keywords)
            expected = got if expected is None else expected
            assert_same(got, expected, (keywords, where))
            for cache in caches:
                assert bool(min(moved(cache))) == bool(where)
                check(cache)
            sizes = caches[1].memory_footprint()
            assert sizes["returned"] <= sizes["host"], "it is written once, and then read"


def test_generate_asks_for_an_offloaded_cache() -> None:
    model, inputs = tiny("gqa", num_hidden_layers=4)
    options = {**GREEDY, "return_dict_in_generate": True}
    asked = {"cache_implementation": "offloaded", **options}
    enable(model, page_size=PAGE, dtype="auto")
    expected = model.generate(**inputs, **options)
    out = model.generate(**inputs, **asked)
    assert_same(out.sequences, expected.sequences)
    assert isinstance(out.past_key_values, FP8PagedCache)
    assert min(moved(out.past_key_values)) > 0
    assert moved(expected.past_key_values) == (0, 0)
    model.generation_config.cache_implementation = "offloaded"
    assert min(moved(model.generate(**inputs, **options).past_key_values)) > 0
    assert model.generation_config.cache_implementation == "offloaded"
    enable(model, max_cache_len=64)
    with pytest.raises(ConfigError, match="offloading: expected a cache that grows"):
        model.generate(**inputs, **asked)


@pytest.mark.parametrize("where", [{"offloading": True}, {"max_device_pages": 2}], ids=str)
def test_a_prefix_comes_from_a_store_and_goes_there(where: dict[str, Any], tmp_path: Path) -> None:
    model, inputs = tiny("sliding_and_full", num_hidden_layers=LAYERS, **MIXED)
    ids = inputs["input_ids"][1:].repeat(1, 4)
    options = {**GREEDY, "return_dict_in_generate": True}
    enable(model, page_size=PAGE, prefill="stored")
    expected = model.generate(ids, **options).sequences
    for hits in range(2):
        store = PrefixStore(tmp_path, max_bytes=1 << 30)
        enable(model, page_size=PAGE, prefix_store=store, **where)
        out = model.generate(ids, **options)
        assert_same(out.sequences, expected)
        assert out.past_key_values.restored == hits * (ids.shape[1] - 1) // PAGE * PAGE
        assert min(moved(out.past_key_values)) > 0


@pytest.mark.parametrize("attention", ["own", "fp8_paged"])
def test_a_draft_model_may_be_offloaded_too(attention: str) -> None:
    model, inputs = tiny("gqa", num_hidden_layers=4)
    draft, _ = tiny("gqa", num_hidden_layers=2)
    row = {name: tensor[1:] for name, tensor in inputs.items()}
    if attention != "own":
        model.set_attn_implementation(attention)
    expected = None
    for where in ({}, {"offloading": True}, {"max_device_pages": 1}):
        enable(draft, page_size=PAGE, dtype="auto", **where)
        cache = FP8PagedCache(model.config, page_size=PAGE, prefill="stored", **where)
        got = model.generate(**row, past_key_values=cache, assistant_model=draft, **GREEDY)
        expected = got if expected is None else expected
        assert_same(got, expected, where)


# -- what is stored ------------------------------------------------------------------------------

FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "static": {"scales": 0.02},
    "one side": {"key_dtype": "auto", "value_dtype": "fp8_e5m2"},
    "auto": {"dtype": "auto", "prefill": "stored"},
}


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pages", [None, 1, 7])
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_every_operation(
    name: str, form: str, pages: int | None, backend: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Against the same cache without a second tier; "triton" has blocks, and writes late."""
    if backend == "triton":
        triton_standin(monkeypatch)
        monkeypatch.setattr(page_pool, "BLOCK_BYTES", 3000)
    where = {"offloading": True} if pages is None else {"max_device_pages": pages}
    fields, keywords = config(name), {"page_size": PAGE, **FORMS[form]}
    stayed = FP8PagedCache(
        fields, backend="reference" if backend == "triton" else backend, **keywords
    )
    cache = FP8PagedCache(fields, backend=backend, **keywords, **where)
    pair = [stayed, cache]
    for one in pair:
        one.activate_past_recording()
    for step, count in enumerate((21, 1, 1, 9, 1)):
        feed(pair, count, step)
    forks = [one.fork() for one in pair]
    feed(pair, 3, 5)
    feed(forks, 1, 6)
    feed(pair, 1, 7)
    assert_holds(forks)
    for one in pair:
        one.reorder_cache(torch.tensor([1, 1]))
    feed(pair, 2, 8)
    for one in pair:
        one.crop(-4)
    feed(pair, 1, 9)
    del forks
    for one in pair:
        one.batch_repeat_interleave(2)
    feed(pair, 1, 10, batch=4)
    for one in pair:
        one.batch_select_indices(torch.tensor([2, 0]))
    feed(pair, 1, 11)
    loaded = FP8PagedCache.load(cache.save(tmp_path / "cache.safetensors"))
    twins = [stayed, loaded, pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)]
    for twin in twins[1:]:
        assert isinstance(twin.budget, OffloadBudget)
        assert twin.budget.max_device_pages == pages
    feed([copy.deepcopy(stayed), *twins[1:]], 5, 12)
    del twins, twin, loaded
    for one in pair:
        one.crop(-30 if name == "llama" else -1)
    feed(pair, 1, 13)
    for layer in cache.paged_layers:
        layer.offload()
        assert not layer.pool.device_pool.is_allocated
        layer.prefetch()
    assert_holds(pair)
    for one in pair:
        one.reset()
    assert cache.memory_footprint()["total"] == stayed.memory_footprint()["total"] < 100
    feed(pair, 4, 14, batch=3)
    assert_holds(pair)


def test_what_waits_is_stored_before_its_layer_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that no attention came for: of a first call that decides, and of steps after it."""
    triton_standin(monkeypatch)
    for where in ({"offloading": True}, {"max_device_pages": 1}):
        fields = config("gemma3_text")
        pair = [
            FP8PagedCache(fields, backend="reference", page_size=PAGE),
            FP8PagedCache(fields, backend="triton", page_size=PAGE, **where),
        ]
        for step, count in enumerate((40, 1, 1, 3, 1)):
            for index in range(LAYERS):
                generator = torch.Generator().manual_seed(100 * step + index)
                k, v = torch.randn(2, 2, HEADS, count, DIM, generator=generator)
                for one in pair:
                    one.update(k, v, index)
        assert_holds(pair)


def test_bytes_go_back_after_a_crop() -> None:
    pair = both()
    feed(pair, 300)
    before = pair[1].memory_footprint()
    for one in pair:
        one.crop(-280)
    after = pair[1].memory_footprint()
    assert after["host"] < before["host"] / 4
    assert after["pages"] == 0, "they come back when their layer computes"
    assert_holds(pair)
    feed(pair, 1, 1)


def test_long_calls_pass_through_a_window() -> None:
    pair = both("mistral", prefill="stored")
    for step, count in enumerate((40, 1, 33, 1, 1, 25, 7)):
        feed(pair, count, step)
        forks = [one.fork() for one in pair]
        feed(forks, 17, 50 + step)


def test_the_old_window_of_the_next_layer_comes_too() -> None:
    """In a long call, whose tokens get pages under other numbers."""
    one = FP8PagedCache(config("mistral"), offloading=True, page_size=PAGE)
    feed([one], 21)
    for layer in one.paged_layers:
        held = layer.group.held_pages(layer.member)
        assert (len(held), len(layer.pool.missing(held))) == (4, 0)  # two of each sequence
        one.update(*torch.randn(2, 2, HEADS, 30, DIM), layer.index)


def test_a_refused_step_leaves_no_trace() -> None:
    pair = both(max_pages=6)
    feed(pair, 21)
    for one in pair:
        for index in range(LAYERS):
            with pytest.raises(OutOfPagesError):
                one.update(*torch.randn(2, 2, HEADS, 9, DIM), index)
    feed(pair, 3, 1)
    assert_holds(pair)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("where", [{}, {"offloading": True}, {"max_device_pages": 9}], ids=str)
def test_memory_that_does_not_suffice(
    name: str, where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of what a step does before its first layer has stored anything."""
    calls: list[int] = []
    pair = [FP8PagedCache(config(name), page_size=PAGE, **x) for x in ({}, where)]
    for one in pair:
        one.activate_past_recording()
    feed(pair, 21)
    pools = (PagePool, OffloadedPool) if where else (PagePool,)
    methods = [(x, name) for x in pools for name in ("copy", "grow", "receive") if name in vars(x)]
    for kind, method in methods:
        for number in range(1, 5):
            forks = [one.fork() for one in pair]  # so that pages are copied
            stock = getattr(kind, method)
            calls.clear()

            def fail(*args: Any, stock: Any = stock, at: int = number, **kwargs: Any) -> Any:
                calls.append(1)
                if len(calls) == at:
                    raise MemoryError
                return stock(*args, **kwargs)

            with monkeypatch.context() as patched, contextlib.suppress(MemoryError):
                patched.setattr(kind, method, fail)
                pair[1].update(*torch.randn(2, 2, HEADS, 5, DIM), 0)
            pair[1].layers[0].crop(pair[0].get_seq_length() - pair[1].get_seq_length())
            for window, group in pair[1].groups.items():
                group.table.check(forks[1].groups[window].table)
            assert_holds(forks)
            feed(pair, 3, number)
            assert_holds(pair)
            assert_holds(forks)


@pytest.mark.parametrize("where", [{}, {"offloading": True}], ids=str)
def test_pages_that_cannot_be_renumbered(
    where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers would then have other numbers than the others: nothing is held any more."""
    cache, other = (FP8PagedCache(config("gemma3_text"), page_size=PAGE, **where) for _ in "ab")
    calls: list[int] = []
    keep = PagePool.keep

    def fail(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        keep(*args)

    feed([cache], 40 * PAGE)
    with monkeypatch.context() as patched:
        patched.setattr(PagePool, "keep", fail)
        with pytest.raises(MemoryError):
            cache.layers[2].group.crop(39 * PAGE)
    for group in cache.groups.values():
        assert not group.length
        group.table.check()
    for count, seed in ((7 * PAGE + 3, 1), (2, 2)):
        feed([cache, other], count, seed)
    assert_holds([cache, other])


def test_tokens_are_assigned() -> None:
    pair = both()
    feed(pair, 21)
    for one in pair:
        for layer in one.paged_layers:
            k, v = layer.keys.dense(), layer.values.dense()
            layer.keys, layer.values = k[:, :, ::2], v[:, :, ::2]
    feed(pair, 1, 1)
    assert_holds(pair)


def test_layers_of_transformers_between_them_stay() -> None:
    fields = config("gemma3_text")
    skipped = {"skip_layers": ["sliding_attention"], "page_size": PAGE}
    pair = [FP8PagedCache(fields, **skipped), FP8PagedCache(fields, **skipped, offloading=True)]
    for step, count in enumerate((21, 1, 1)):
        feed(pair, count, step)
    # One layer alone has nothing to make room for.
    one = FP8PagedCache(config(), offloading=True, skip_layers=range(1, LAYERS), page_size=PAGE)
    for step in range(3):
        feed([one], 9, step)
    assert moved(one)[0] == 0


# -- what crosses --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("pages", [None, 1, 4])
def test_a_stored_byte_crosses_once_in_a_step(name: str, pages: int | None) -> None:
    """Full attention: what is stored. With a window: that alone. Back: pages that were written."""
    where = {"offloading": True} if pages is None else {"max_device_pages": pages}
    window = {} if name == "llama" else {"sliding_window": 16}
    cache = FP8PagedCache(config(name, **window), **EXACT, **where)
    feed([cache], 100)
    feed([cache], 1, 1)
    start, bound, back = moved(cache), 0, 0
    for step in range(2, 20):
        length = cache.get_seq_length()
        feed([cache], 1, step)
        for layer in cache.paged_layers:
            # The first layer's pages come at the end of the step before.
            tokens = length + (layer.index == 0)
            first = 0 if layer.sliding_window is None else tokens - layer.sliding_window + 1
            held = -(-tokens // PAGE) - first // PAGE
            bound += held * 2 * layer.pool.bytes_per_page()
            back += 2 * layer.pool.bytes_per_page()
        fetched, returned = (now - old for now, old in zip(moved(cache), start, strict=True))
        if pages is None:
            assert (fetched, returned) == (bound, back)
        else:
            # What comes early in a step is the next one's, what goes late that of the one before.
            assert 0 < fetched <= bound * step / (step - 1)
            assert 0 < returned <= back * step / (step - 1)


@pytest.mark.parametrize(("room", "crossing"), [(6, 0), (5, 6), (4, 12), (3, 18), (2, 24), (1, 24)])
def test_what_fits_stays(room: int, crossing: int) -> None:
    """In four steps of six layers: with room for five, six layers go over instead of 24."""
    held = 2 * 17  # pages of two sequences
    cache = FP8PagedCache(config(), max_device_pages=-(-held * room // LAYERS), **EXACT)
    cache.groups[None].table.allocator.exact = True
    for step, count in enumerate((129, 1, 1, 1)):
        feed([cache], count, step)
    before, pool = moved(cache), cache.layers[0].pool
    for step in range(4, 8):
        feed([cache], 1, step)
    assert pool.pages == held
    assert moved(cache)[0] - before[0] == crossing * held * pool.bytes_per_page()
    if not crossing:
        assert moved(cache) == (0, 0)
        assert cache.memory_footprint()["host"] == 0


@pytest.mark.parametrize(("pages", "both_fit"), [(None, True), (11, True), (10, False)])
def test_the_next_layer_comes_while_one_computes(pages: int | None, both_fit: bool) -> None:
    where = {"offloading": True} if pages is None else {"max_device_pages": pages}
    cache = FP8PagedCache(config(), **EXACT, **where)
    cache.groups[None].table.allocator.exact = True
    feed([cache], 124)
    feed([cache], 1, 1)
    for layer in cache.paged_layers:
        held = layer.group.held_pages(layer.member)
        assert len(held) == 32
        assert len(layer.pool.missing(held)) == (0 if both_fit else 32)
        cache.update(*torch.randn(2, 2, HEADS, 1, DIM), layer.index)


def test_sizes_of_both_tiers() -> None:
    stayed, cache = both(scales=1.0)
    for one in (stayed, cache):
        feed([one], 61)
    sizes, expected = cache.memory_footprint(), stayed.memory_footprint()
    page = cache.layers[0].pool.bytes_per_page()
    assert sizes["used"] == expected["used"] == LAYERS * 16 * page
    assert expected["host"] == expected["fetched"] == expected["returned"] == 0
    # The last two layers are on the device, the last one alone is nowhere else.
    assert sizes["pages"] == 2 * 16 * page
    assert sizes["host"] == (LAYERS - 1) * 16 * page
    assert sizes["returned"] == (LAYERS - 1) * 16 * page
    parts = ("pages", "scales", "tables", "host", "other")
    assert sizes["total"] == sum(sizes[name] for name in parts)


def test_memory_is_free_before_the_next_layer_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is done with a layer's pages keeps them: writes that waited, records, tables."""
    triton_standin(monkeypatch)
    cache = FP8PagedCache(config("gemma3_text"), offloading=True, backend="triton", page_size=PAGE)
    feed([cache], 21)
    fetch = OffloadedPool.fetch
    taken: list[weakref.ref[torch.Tensor]] = []

    def watched(self: OffloadedPool, pages: Any) -> None:
        comes = not self.device_pool.is_allocated
        assert not comes or sum(block() is not None for block in taken) < 2
        fetch(self, pages)
        if comes:
            taken.extend(weakref.ref(block) for block in self.device_pool._blocks[:1])

    for layer in cache.paged_layers:
        layer.offload()
    monkeypatch.setattr(OffloadedPool, "fetch", watched)
    modules = [AttentionLayer(2, index) for index in range(LAYERS)]
    for _ in range(3):
        for index, module in enumerate(modules):
            keys, values = cache.update(*torch.randn(2, 2, HEADS, 1, DIM), index)
            fp8_paged_attention(module, torch.randn(2, 2 * HEADS, 1, DIM), keys, values, None)
            del keys, values
    assert len(taken) == 3 * LAYERS + 1


def test_a_cache_in_one_place_does_no_work_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    pages_of = BlockTable.pages_of
    monkeypatch.setattr(BlockTable, "pages_of", lambda *args: found.append(1) or pages_of(*args))
    pair = both()
    feed(pair[:1], 21)
    feed(pair[:1], 1, 1)
    assert not found
    feed(pair[1:], 21)
    assert found


def test_no_layer_waits_for_the_garbage_collector() -> None:
    cache = FP8PagedCache(config(), offloading=True, page_size=PAGE)
    feed([cache], 21)
    fork = cache.fork()
    feed([fork], 1, 1)
    pools = [weakref.ref(layer.pool) for layer in cache.paged_layers]
    gc.disable()
    try:
        del cache, fork
        assert not any(pool() for pool in pools)
    finally:
        gc.enable()


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"offloading": True, "max_cache_len": 64}, "offloading: expected a cache that grows"),
        ({"max_device_pages": 4, "max_cache_len": 64}, "offloading: expected a cache that grows"),
        ({"offloading": "sliding"}, "offloading: expected True or False, got 'sliding'"),
        ({"max_device_pages": 0}, "max_device_pages: expected a whole number above 0, got 0"),
        ({"max_device_pages": 2.5}, "max_device_pages: expected a whole number above 0"),
    ],
)
def test_what_is_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FP8PagedCache(config(), **keywords)


def test_other_caches_are_transformers_own() -> None:
    """Asked for a static cache in host memory, transformers makes its own."""
    model, inputs = tiny("gqa")
    enable(model)
    with pytest.MonkeyPatch.context() as patch:
        made: list[str] = []
        patch.setattr(
            type(model), "_prepare_static_cache",
            lambda self, cache_implementation, **_: made.append(cache_implementation)
            or DynamicCache(config=self.config),
        )  # fmt: skip
        model.generate(**inputs, cache_implementation="offloaded_static", **GREEDY)
    assert made == ["offloaded_static"]
