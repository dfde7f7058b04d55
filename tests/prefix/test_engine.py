"""Tests of a prefix store with an engine: stored pages of prompts outlive the engine."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers.generation.continuous_batching.cache_allocators import cache_allocator

from hf_fp8kv import ConfigError, PrefixStore, serving
from hf_fp8kv.formats import LayerPlan
from hf_fp8kv.prefix import engine_blocks as engine_module
from hf_fp8kv.prefix.file import StoredPage, serialize_page
from tests.helpers.planned import PROTECTED_PLANS
from tests.helpers.serve_process import PAGE_SIZE as SERVED_PAGE_SIZE
from tests.helpers.serve_process import HostedServer, generate_paged, read_answer, save_chat_model
from tests.helpers.serving_tools import PAGE_SIZE, open_manager, request_answer
from tests.helpers.tiny_models import build_variant

pytestmark = pytest.mark.text


def make_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 98, (num_tokens,), generator=generator).tolist()


class EngineRun(NamedTuple):
    answers: list[list[int]]
    usage: Any
    store_usage: Any


def run_prompts(
    folder: Path | None, prompts: list[list[int]], *, seed: int = 0, num_pages: int = 64,
    num_new: int = 9, salt: str | None = None, **keywords: Any,
) -> EngineRun:  # fmt: skip
    model, _ = build_variant("gqa", seed, max_position_embeddings=512)
    store = None if folder is None else PrefixStore(folder)
    serving.enable(model, prefix_store=store, **keywords)
    with open_manager(model, num_pages=num_pages) as manager:
        # Each prompt is answered before the next, which can then reuse the pages.
        answers = [request_answer(manager, prompt, num_new, cache_salt=salt) for prompt in prompts]
        usage = serving.read_usage(manager)
    serving.disable(model)
    return EngineRun(answers, usage, None if store is None else store.usage())


def run_and_compare(folder: Path, prompts: list[list[int]], **options: Any) -> EngineRun:
    """Run a new engine with a store. Assert that an engine without a store answers the same."""
    engine_run = run_prompts(folder, prompts, **options)
    assert engine_run.answers == run_prompts(None, prompts, **options).answers
    return engine_run


def test_a_new_engine_finds_pages_of_a_previous_engine(tmp_path: Path) -> None:
    prefix = make_prompt(5 * PAGE_SIZE + 3)
    prompts = [prefix + make_prompt(7, seed=1), make_prompt(2 * PAGE_SIZE, seed=9)]
    _, usage, store_usage = run_and_compare(tmp_path, prompts)
    assert (usage.prefix_hits, store_usage.hits, store_usage.misses) == (0, 0, 2)
    next_prompts = [prefix + make_prompt(11, seed=4), prompts[1], prefix[: 3 * PAGE_SIZE]]
    _, usage, store_usage = run_and_compare(tmp_path, next_prompts)
    # The store has the second prompt except its last page, and memory has the pages of the third.
    assert (store_usage.hits, store_usage.tokens_found) == (2, (5 + 1) * PAGE_SIZE)
    assert (usage.prefix_hits, usage.prefix_tokens) == (3, (5 + 1 + 2) * PAGE_SIZE)
    assert usage.store_tokens == store_usage.tokens_found
    assert usage.store_bytes_read == store_usage.bytes_read > 0


def test_pages_of_different_sizes_are_stored_in_one_block(tmp_path: Path) -> None:
    """Layer 0 keeps K in the dtype of the model. With V in this dtype, blocks are different."""
    for sides in ("K", "V"):
        plan = {0: PROTECTED_PLANS[sides], 1: LayerPlan.parse("int8 rotated", "int8")}
        for num_found in (0, 4 * PAGE_SIZE):
            engine_run = run_and_compare(tmp_path, [make_prompt(4 * PAGE_SIZE + 1)], plan=plan)
            assert engine_run.store_usage.tokens_found == num_found


def test_full_pages_of_answers_are_stored(tmp_path: Path) -> None:
    prompt = make_prompt(2 * PAGE_SIZE - 4)
    (answer,) = run_prompts(tmp_path, [prompt]).answers
    next_prompts = [prompt + answer + make_prompt(PAGE_SIZE, seed=3)]
    assert run_and_compare(tmp_path, next_prompts).store_usage.tokens_found == 2 * PAGE_SIZE


@pytest.mark.parametrize("options", [{"seed": 1}, {"scales": 0.05}], ids=str)
def test_a_different_model_or_format_finds_no_pages(options: dict, tmp_path: Path) -> None:
    prompt = make_prompt(4 * PAGE_SIZE)
    run_prompts(tmp_path, [prompt])
    store_usage = run_and_compare(tmp_path, [prompt], **options).store_usage
    assert (store_usage.hits, store_usage.misses) == (0, 1)


def test_a_store_keeps_the_pages_of_salts_apart(tmp_path: Path) -> None:
    prompt = make_prompt(4 * PAGE_SIZE)
    for num_hits in (0, 1):
        for salt in (None, "a", "b"):
            store_usage = run_and_compare(tmp_path, [prompt], salt=salt).store_usage
            assert store_usage.tokens_found == num_hits * 3 * PAGE_SIZE


def test_prompts_with_equal_hashes_are_read_from_their_own_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cache_allocator, "compute_block_hash", lambda parent, tokens: (parent or 0) + 1
    )
    prompts = [make_prompt(3 * PAGE_SIZE, seed=seed) for seed in range(3)]
    expected = [run_prompts(None, [prompt]).answers[0] for prompt in prompts]
    for _ in range(2):
        assert run_prompts(tmp_path, prompts).answers == expected


def test_a_small_pool_serves_prompts_one_after_another(tmp_path: Path) -> None:
    prompts = [make_prompt(9 * PAGE_SIZE, seed=seed) for seed in range(3)]
    for _ in range(2):
        assert run_and_compare(tmp_path, prompts, num_pages=12).usage.pages_used <= 12
    for prompt in prompts:
        assert run_prompts(tmp_path, [prompt]).store_usage.tokens_found == 8 * PAGE_SIZE


def test_the_engine_waits_while_blocks_are_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, blocks are filled on another stream than the engine's steps."""
    prompt = make_prompt(3 * PAGE_SIZE + 3)
    run_prompts(tmp_path, [prompt])
    model, _ = build_variant("gqa", max_position_embeddings=512)
    serving.enable(model, prefix_store=PrefixStore(tmp_path))
    with open_manager(model) as manager:
        request_answer(manager, make_prompt(3, seed=99), 9)
        cache = manager.batch_processor.cache
        (allocator,) = cache.cache_allocators.values()
        while allocator.block_table:  # blocks of a request are freed after its answer
            time.sleep(0.01)
        num_used = count_used_blocks(allocator)
        num_filled: list[int] = []

        def record_blocks(_: Any) -> None:
            num_filled.append(count_used_blocks(allocator) - num_used)

        monkeypatch.setattr(engine_module, "synchronize", record_blocks)
        assert cache.search_prefix_match("new", prompt) == 3 * PAGE_SIZE
        assert num_filled == [0, 3]
        cache.free_blocks("new")
    serving.disable(model)


def count_used_blocks(allocator: Any) -> int:
    pool, index = allocator.pool, allocator.index
    num_sectors = pool.num_sectors - pool.num_free_sectors
    return int(num_sectors * pool.blocks_per_sector[index] - pool.count_free_blocks(index))


@pytest.mark.parametrize(
    ("name", "store", "message"),
    [("sliding", PrefixStore, "attend to all tokens"), ("gqa", str, "PrefixStore")],
)
def test_unsupported_stores_are_refused(
    name: str, store: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    model, _ = build_variant(name)
    with pytest.raises(ConfigError, match=message):
        serving.enable(model, prefix_store=store(tmp_path), probe=False)


@pytest.mark.parametrize(
    "make_page",
    [
        None,  # a truncated file
        lambda row: StoredPage([row[:-1]], None),
        lambda row: StoredPage([row], []),
        lambda row: StoredPage([row, row.clone()], None),
    ],
)
def test_invalid_files_are_recomputed(
    make_page: Callable[[torch.Tensor], StoredPage] | None, tmp_path: Path
) -> None:
    prompt = make_prompt(4 * PAGE_SIZE)
    run_prompts(tmp_path, [prompt])
    for path in tmp_path.glob("*.safetensors"):
        contents = path.read_bytes()[:-1]
        if make_page is not None:
            (page,) = PrefixStore(tmp_path).read([path.stem], lambda _: None)
            contents = serialize_page(path.stem, make_page(page.rows[0]))
        path.write_bytes(contents)
    assert run_and_compare(tmp_path, [prompt]).store_usage.files_refused == 1
    assert run_prompts(tmp_path, [prompt]).store_usage.hits == 1


def test_two_servers_share_a_folder(tmp_path: Path) -> None:
    model = save_chat_model(tmp_path / "model")
    question = "is this the same beginning for two servers, or is it another one for each of them?"
    answers = []
    store_tokens = []
    options = (model, "--prefix-store", str(tmp_path / "store"))
    with HostedServer(*options) as first_server, HostedServer(*options) as second_server:
        for server in (first_server, second_server):
            response = server.answer(
                "/v1/chat/completions", model=model, max_tokens=8, temperature=0,
                messages=[{"role": "user", "content": question}],
            )  # fmt: skip
            answers.append(read_answer(response))
            store_tokens.append(server.metrics()["store_tokens_total"])
    assert answers[0] == answers[1] == generate_paged(model, question, 8)
    # The prompt is "u:", the question and ";a:". Its last token is always computed.
    assert store_tokens == [0, (len(question) + 5 - 1) // SERVED_PAGE_SIZE * SERVED_PAGE_SIZE]
