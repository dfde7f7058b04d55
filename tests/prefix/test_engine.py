"""A store of prefixes with an engine: pages of prompts that outlive the engine."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_fp8kv import ConfigError, PrefixStore, enable, serving
from hf_fp8kv.prefix import engine as engine_module
from hf_fp8kv.prefix.file import Page, pack
from tests.helpers.serve_process import PAGE as SERVED_PAGE
from tests.helpers.serve_process import generate_answer, hosting, save_chat_model, text_in
from tests.helpers.serving_tools import PAGE, answer_to, managing
from tests.helpers.tiny_models import tiny

pytestmark = pytest.mark.text


def words(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 98, (count,), generator=generator).tolist()


def answers(
    folder: Path | None,
    texts: list[list[int]],
    *,
    seed: int = 0,
    pages: int = 64,
    new: int = 9,
    **keywords: Any,
) -> tuple[list[list[int]], Any, Any]:
    """Return the answers of a new engine, its final usage, and the usage of its store."""
    model, _ = tiny("gqa", seed, max_position_embeddings=512)
    store = None if folder is None else PrefixStore(folder)
    serving.enable(model, prefix_store=store, **keywords)
    with managing(model, pages=pages) as manager:
        # One by one, so that each text can reuse the pages of the previous texts.
        outputs = [answer_to(manager, text, new) for text in texts]
        usage = serving.usage(manager)
    serving.disable(model)
    return outputs, usage, None if store is None else store.usage()


def test_a_new_engine_finds_pages_of_a_previous_engine(tmp_path: Path) -> None:
    prefix = words(5 * PAGE + 3)
    texts = [prefix + words(7, seed=1), words(2 * PAGE, seed=9)]
    expected, _, _ = answers(None, texts)
    actual, usage, store_usage = answers(tmp_path, texts)
    assert actual == expected
    assert (usage.prefix_hits, store_usage.hits, store_usage.misses) == (0, 0, 2)
    extra = [prefix + words(11, seed=4), texts[1], prefix[: 3 * PAGE]]
    expected, _, _ = answers(None, extra)
    actual, usage, store_usage = answers(tmp_path, extra)
    assert actual == expected
    # The second text finds all pages except the last. The pages of the third text are in memory.
    assert (store_usage.hits, store_usage.tokens_found) == (2, 5 * PAGE + PAGE)
    assert (usage.prefix_hits, usage.prefix_tokens) == (3, 5 * PAGE + PAGE + 2 * PAGE)
    assert usage.store_tokens == store_usage.tokens_found
    assert usage.store_bytes_read == store_usage.bytes_read > 0


def test_full_pages_of_answers_are_stored(tmp_path: Path) -> None:
    text = words(2 * PAGE - 4)
    actual, _, _ = answers(tmp_path, [text])
    chat = text + actual[0] + words(PAGE, seed=3)
    expected, _, _ = answers(None, [chat])
    actual, _, store_usage = answers(tmp_path, [chat])
    assert actual == expected
    assert store_usage.tokens_found == 2 * PAGE


@pytest.mark.parametrize("other", [{"seed": 1}, {"dtype": "fp8"}, {"scales": 0.05}], ids=str)
def test_a_different_model_or_format_finds_no_pages(other: dict[str, Any], tmp_path: Path) -> None:
    text = words(4 * PAGE)
    answers(tmp_path, [text])
    expected, _, _ = answers(None, [text], **other)
    actual, _, store_usage = answers(tmp_path, [text], **other)
    assert actual == expected
    assert (store_usage.hits, store_usage.misses) == (0, 1)


def test_few_blocks_hold_texts_one_after_another(tmp_path: Path) -> None:
    """The blocks hold one text at a time, both when texts are stored and when they are found."""
    texts = [words(9 * PAGE, seed=number) for number in range(3)]
    expected, _, _ = answers(None, texts)
    for _ in range(3):
        actual, usage, _ = answers(tmp_path, texts, pages=12)
        assert actual == expected
        assert usage.pages_used <= 12
    for text in texts:
        assert answers(tmp_path, [text])[2].tokens_found == 8 * PAGE


@contextmanager
def engine(store: PrefixStore) -> Iterator[tuple[Callable[[list[int]], Any], Any]]:
    """Yield a function that generates and waits until the request is freed, and the cache."""
    model, _ = tiny("gqa", max_position_embeddings=512)
    serving.enable(model, prefix_store=store)
    with managing(model) as manager:

        def generate(text: list[int]) -> list[int]:
            answer = answer_to(manager, text, 9)
            end = time.monotonic() + 30  # the engine frees the blocks of a request after its answer
            while allocator_of(manager).block_table and time.monotonic() < end:
                time.sleep(0.01)
            return answer

        generate(words(3, seed=99))
        yield generate, manager.batch_processor.cache
    serving.disable(model)


def test_the_work_per_block_does_not_depend_on_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups: list[str] = []
    touched: list[str] = []
    hashed: list[int] = []
    has, touch, chain = PrefixStore.has, PrefixStore.touch, engine_module.chain_keys
    monkeypatch.setattr(PrefixStore, "has", lambda self, key: lookups.append(key) or has(self, key))
    monkeypatch.setattr(
        PrefixStore, "touch", lambda self, keys: touched.extend(keys) or touch(self, keys)
    )
    monkeypatch.setattr(
        engine_module, "chain_keys",
        lambda name, ids, *extra: hashed.append(len(ids)) or chain(name, ids, *extra),
    )  # fmt: skip
    outputs, _, _ = answers(tmp_path, [words(10 * PAGE + 3)], new=14 * PAGE)
    blocks = 24
    assert len(list(tmp_path.glob("*.safetensors"))) == blocks
    assert len(outputs[0]) == 14 * PAGE
    assert sum(hashed) <= (blocks + 1) * PAGE, "each token once, and the first missing block"
    assert len(touched) == blocks, "once per request"
    # Each block is looked up when it is new (twice if written), afterwards, and at the end.
    assert len(lookups) <= 4 * blocks


def test_a_frequent_prefix_outlives_later_texts(tmp_path: Path) -> None:
    """The engine finds the prefix in memory. Its files are not read, but count as used."""
    hot, cold = words(4 * PAGE + 2), words(4 * PAGE + 2, seed=5)
    store = PrefixStore(tmp_path)
    with engine(store) as (generate, _):
        generate(hot)
        generate(cold)
        generate(hot)
        store.flush()
        removed = max(tmp_path.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
        size = removed.stat().st_size
        removed.unlink()  # the first page of the frequent prefix, which was used last
        generate(hot)
        store.flush()
        assert removed.exists(), "stored again"
    assert not [*PrefixStore(tmp_path, max_bytes=5 * size).read(["x"], print)]
    assert answers(tmp_path, [hot])[2].tokens_found == 4 * PAGE
    assert answers(tmp_path, [cold])[2].tokens_found < 4 * PAGE


def test_a_request_is_lookups_once(tmp_path: Path) -> None:
    with engine(PrefixStore(tmp_path)) as (generate, cache):
        requested: list[str] = []
        find = cache.search_prefix_match
        cache.search_prefix_match = lambda name, ids: requested.append(name) or find(name, ids)
        generate(words(4 * PAGE))
        assert len(requested) == 1


def test_a_waiting_request_reads_no_pages(tmp_path: Path) -> None:
    """The engine looks up its prefix in each step, even if no block is free."""
    text = words(6 * PAGE + 3)
    answers(tmp_path, [text])
    store = PrefixStore(tmp_path)
    with engine(store) as (_, cache):
        (allocator,) = cache.cache_allocators.values()
        pool = allocator.pool
        while pool.num_free_sectors:
            pool.allocate_sector(allocator.index)
        free = pool.get_free_blocks(allocator.index, pool.count_free_blocks(allocator.index))
        before = store.counts()
        for _ in range(3):
            assert cache.search_prefix_match("waits", text) == 0
        assert store.counts() == before
        pool.free_blocks(allocator.index, free[:2])
        assert cache.search_prefix_match("waits", text) == 2 * PAGE
        assert store.counts()["tokens_found"] == before["tokens_found"] + 2 * PAGE
        pool.free_blocks(allocator.index, free[2:])
        cache.free_blocks("waits")
        # A text that is not stored counts as one miss, even if it is looked up often.
        for misses in (1, 2):
            for _ in range(3):
                assert cache.search_prefix_match("other", words(6 * PAGE, seed=8)) == 0
            assert store.counts()["misses"] == before["misses"] + misses
            cache.free_blocks("other")  # a finished request is forgotten


def test_the_engine_waits_while_blocks_are_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, the engine computes on a separate stream."""
    text = words(3 * PAGE + 3)
    answers(tmp_path, [text])
    with engine(PrefixStore(tmp_path)) as (_, cache):
        (allocator,) = cache.cache_allocators.values()
        before, held_at_waits = held(allocator), list[int]()
        monkeypatch.setattr(
            engine_module, "synchronize", lambda _: held_at_waits.append(held(allocator) - before)
        )
        assert cache.search_prefix_match("new", text) == 3 * PAGE
        assert held_at_waits == [0, 3]
        cache.free_blocks("new")


def test_cached_blocks_are_not_duplicated(tmp_path: Path) -> None:
    """A prefix was evicted, or a request must not use a prefix, because it needs logits."""
    text = words(6 * PAGE + 3)
    expected, _, _ = answers(tmp_path, [text])
    store = PrefixStore(tmp_path)
    with engine(store) as (generate, cache):
        assert generate(text) == expected[0]
        (allocator,) = cache.cache_allocators.values()
        ledger, pool = allocator.ledger, allocator.pool
        assert store.usage().hits == 1
        for is_searched in (True, False):
            # Evict the third block of the text, as the engine does with old blocks.
            blocks = [ledger.hash_to_block[x] for x in hashes_of(text)]
            del ledger.cached_blocks[blocks[2]]
            del ledger.hash_to_block[ledger.block_to_hash.pop(blocks[2])]
            pool.free_blocks(allocator.index, [blocks[2]])
            if not is_searched:
                cache.search_prefix_match = lambda *_: 0
            before = (store.usage().hits, held(allocator))
            assert generate(text) == expected[0]
            assert store.usage().hits == before[0] + is_searched
            assert held(allocator) == before[1] + 1 == len(ledger.cached_blocks)
            assert list(ledger.cached_blocks)[-6:][::-1] == [
                ledger.hash_to_block[x] for x in hashes_of(text)
            ]


def allocator_of(manager: Any) -> Any:
    (allocator,) = manager.batch_processor.cache.cache_allocators.values()
    return allocator


def hashes_of(text: list[int]) -> list[int]:
    """Return the hashes of a text's full blocks, as the engine computes them."""
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    hashes: list[int] = []
    for start in range(0, len(text) - PAGE + 1, PAGE):
        last = hashes[-1] if hashes else None
        hashes.append(cache_allocator.compute_block_hash(last, text[start : start + PAGE]))
    return hashes


def held(allocator: Any) -> int:
    """Return the number of blocks in use."""
    pool, index = allocator.pool, allocator.index
    sectors = pool.num_sectors - pool.num_free_sectors
    return int(sectors * pool.blocks_per_sector[index] - pool.count_free_blocks(index))


@pytest.mark.parametrize(
    ("name", "config", "store", "message"),
    [
        ("gqa", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
         PrefixStore, "dynamic"),
        ("sliding", {}, PrefixStore, "whole text"),
        ("gqa", {}, str, "PrefixStore"),
    ],
)  # fmt: skip
def test_unsupported_stores_are_refused(
    name: str, config: dict[str, Any], store: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    model, _ = tiny(name, **config)
    with pytest.raises(ConfigError, match=message):
        serving.enable(model, prefix_store=store(tmp_path), probe=False)


# Invalid pages in intact files. None stands for the page in a truncated file.
INVALID: tuple[Callable[[torch.Tensor], Page | None], ...] = (
    lambda _: None,
    lambda row: Page([row[:-1]], None),
    lambda row: Page([row], []),
    lambda _: Page([], None),
    lambda row: Page([row, row.clone()], None),
    lambda row: Page([row[None]], None),
    lambda row: Page([row.view(torch.int8)], None),
)


@pytest.mark.parametrize(
    "change",
    [*INVALID[:3], *(pytest.param(change, marks=pytest.mark.full) for change in INVALID[3:])],
    ids=range(len(INVALID)),
)
def test_invalid_files_are_recomputed(
    change: Callable[[torch.Tensor], Page | None], tmp_path: Path
) -> None:
    text = words(4 * PAGE)
    expected, _, _ = answers(tmp_path, [text])
    for path in tmp_path.glob("*.safetensors"):
        (page,) = PrefixStore(tmp_path).read([path.stem], lambda _: None)
        assert page is not None
        changed = change(page.rows[0])
        content = pack(path.stem, changed) if changed else path.read_bytes()[:-1]
        path.write_bytes(content)
    actual, _, store_usage = answers(tmp_path, [text])
    assert actual == expected
    assert store_usage.files_refused == 1
    assert answers(tmp_path, [text])[2].hits == 1


def test_two_servers_share_a_folder(tmp_path: Path) -> None:
    model, folder = save_chat_model(tmp_path / "model"), tmp_path / "store"
    question = "is this the same beginning for two servers, or is it another one for each of them?"
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 8, "temperature": 0}
    texts, store_tokens = [], []
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(hosting(model, "--prefix-store", str(folder))) for _ in range(2)
        ]
        for server in servers:
            texts.append(text_in(server.answer("/v1/chat/completions", model=model, **body)))
            store_tokens.append(server.metrics()["store_tokens_total"])
    assert texts[0] == texts[1] == generate_answer(model, question, 8)
    # "u:", the question, ";a:"
    assert store_tokens == [0, (len(question) + 5 - 1) // SERVED_PAGE * SERVED_PAGE]


@pytest.mark.parametrize("enable", [enable, serving.enable])
def test_enable_loads_the_backend(
    enable: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[str] = []
    monkeypatch.setattr(sys.modules[enable.__module__], "load_backend", prepared.append)
    model, _ = tiny("gqa")
    enable(model, prefix_store=PrefixStore(tmp_path), backend="torch")
    enable(model, backend="torch")
    assert prepared == ["torch"]
