"""Tests of Ctrl-C at any line, of failed allocations and files, and of refused calls.

Later prompts must get correct answers.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import hf_fp8kv
from hf_fp8kv import ConfigError, FP8PagedCache, PrefixStore, enable
from tests.helpers.assertions import assert_same
from tests.helpers.faults import (
    FILE_FUNCTIONS,
    MEMORY_ERRORS,
    MEMORY_FUNCTIONS,
    Faults,
    make_disk_error,
)
from tests.helpers.margins import require_wide_margins
from tests.helpers.tiny_models import build_variant
from tests.paging.test_block_table import check_cache_tables

# Python reports an exception in `__del__` as a warning and continues.
pytestmark = [
    pytest.mark.text,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PACKAGE = str(Path(hf_fp8kv.__file__).parent)
GREEDY = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0, "suppress_tokens": [0]}
PAGE_SIZE = 8
Point = tuple[str, int, int]


def is_in_del(frame: Any) -> bool:
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def run_traced(call: Callable[[], Any], point: Point | None = None) -> Counter[tuple[str, int]]:
    """Run `call`, interrupt it at `point`, and count the runs of each line of the package."""
    counts: Counter[tuple[str, int]] = Counter()

    def on_line(frame: Any, event: str, _argument: Any) -> Any:
        if event == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            counts[line] += 1
            if point == (*line, counts[line]) and not is_in_del(frame):
                sys.settrace(None)
                raise KeyboardInterrupt
        return on_line

    def on_call(frame: Any, _event: str, _argument: Any) -> Any:
        return on_line if frame.f_code.co_filename.startswith(PACKAGE) else None

    old_trace = sys.gettrace()  # the trace function of a coverage tool
    sys.settrace(on_call)
    try:
        call()
    except KeyboardInterrupt:
        assert point is not None
    finally:
        sys.settrace(old_trace)
    return counts


class Chat:
    def __init__(self, name: str, folder: Path, **keywords: Any) -> None:
        self.model, _ = build_variant(name, max_position_embeddings=512)
        self.keywords = {"page_size": PAGE_SIZE, "prefill": "stored", **keywords}
        enable(self.model, **self.keywords)
        generator = torch.Generator().manual_seed(3)
        first_ids, second_ids, third_ids = torch.randint(2, 98, (3, 1, 200), generator=generator)
        self.first_prompt = first_ids[:, :90]
        # This prompt shares 21 tokens with the first prompt.
        self.next_prompt = torch.cat([first_ids[:, :21], second_ids[:, :30]], 1)
        # These prompts are longer than the cached text, and share 0 and 33 tokens with it.
        shared_prompt = torch.cat([first_ids[:, :33], third_ids[:, :90]], 1)
        self.later_prompts = third_ids[:, :110], shared_prompt
        self.answers = [
            self.generate(self.make_cache(), ids, logits_processor=require_wide_margins(1e-5))
            for ids in self.later_prompts
        ]
        self.folder = folder
        # A crop frees most pages and renumbers the remaining pages. Windows allow only short crops.
        self.crop_length = -86 if name == "gqa" else -3

    def make_cache(self) -> FP8PagedCache:
        return FP8PagedCache(self.model.config, **self.keywords)

    def generate(self, cache: FP8PagedCache, ids: torch.Tensor, **keywords: Any) -> torch.Tensor:
        return self.model.generate(ids, past_key_values=cache, **GREEDY, **keywords)

    def fill_cache(self) -> FP8PagedCache:
        cache = self.make_cache()
        self.generate(cache, self.first_prompt)
        return cache

    def load_store(self) -> FP8PagedCache:
        """Return a new cache and set a prefix store that contains the pages of the first prompt."""
        self.prefix_store = prefix_store = PrefixStore(self.folder)
        enable(self.model, prefix_store=prefix_store, **self.keywords)
        if not any(self.folder.glob("*.safetensors")):
            self.generate(self.make_cache(), self.first_prompt)
            prefix_store.flush()
            return self.load_store()
        return self.make_cache()

    def check_answers(self, cache: FP8PagedCache, point: Any) -> None:
        """Assert correct answers to later prompts. The cache is reset if it raises ConfigError."""
        for ids, expected in zip(self.later_prompts, self.answers, strict=True):
            try:
                answer = self.generate(cache, ids)
            except ConfigError:
                cache.reset()
                answer = self.generate(cache, ids)
            assert_same(answer, expected, point)


# A function that makes a cache, and a call of the cache.
CALLS: dict[str, tuple[Callable[[Chat], FP8PagedCache], Callable[[Chat, FP8PagedCache], Any]]] = {
    "first prompt": (Chat.make_cache, lambda chat, cache: chat.generate(cache, chat.first_prompt)),
    "next prompt": (Chat.fill_cache, lambda chat, cache: chat.generate(cache, chat.next_prompt)),
    "beams": (
        Chat.fill_cache,
        lambda chat, cache: chat.generate(cache, chat.next_prompt, num_beams=2),
    ),
    "crop": (Chat.fill_cache, lambda chat, cache: cache.crop(chat.crop_length)),
    "reset": (Chat.fill_cache, lambda chat, cache: cache.reset()),
    "restore": (Chat.load_store, lambda chat, cache: chat.generate(cache, chat.first_prompt)),
}
CACHE_OPTIONS: dict[str, dict[str, Any]] = {
    "growing": {}, "offloaded": {"offloading": True}, "preallocated": {"max_cache_len": 160}
}  # fmt: skip
CASES = [
    *(("gqa", "growing", call) for call in CALLS),
    ("sliding_and_full", "growing", "next prompt"),
    ("sliding_and_full", "offloaded", "next prompt"),
    ("gqa", "preallocated", "next prompt"),
]
SLOW_CALLS = ("first prompt", "beams", "restore")
# A case interrupts a sample of lines at their first run. The full tier interrupts every fifteenth
# line, at its first run and, in fast calls, also at its last run. Cases share most lines, so each
# case begins at a different line.
STRIDE = 15


@pytest.mark.parametrize(
    ("name", "kind", "call", "sample_size", "first_index"),
    [
        *((*case, 20, 0) for case in CASES[1:7:2]),
        *(
            pytest.param(*case, 0, 2 * number % STRIDE, marks=pytest.mark.full)
            for number, case in enumerate(CASES)
        ),
    ],
)
def test_an_interrupt_at_any_line_leaves_a_usable_cache(
    name: str, kind: str, call: str, sample_size: int, first_index: int, tmp_path: Path
) -> None:
    chat = Chat(name, tmp_path, **CACHE_OPTIONS[kind])
    make_cache, run_call = CALLS[call]
    cache = make_cache(chat)
    cache.fork()  # as in the loop below, because a fork makes the next write check for shared pages
    counts = run_traced(partial(run_call, chat, cache))
    points: list[Point] = []
    for line, num_runs in sorted(counts.items()):
        points.append((*line, 1))
        if num_runs > 1 and not sample_size and call not in SLOW_CALLS:
            points.append((*line, num_runs))
    stride = len(points) // sample_size if sample_size else STRIDE
    for point in points[first_index::stride]:
        cache = make_cache(chat)
        fork = cache.fork()
        run_traced(partial(run_call, chat, cache), point)
        chat.check_answers(cache, point)
        if fork.get_seq_length():
            chat.check_answers(fork, ("a fork", *point))


def write_store(chat: Chat, cache: FP8PagedCache) -> None:
    chat.generate(cache, chat.next_prompt)
    chat.prefix_store.flush()


def check_store(chat: Chat, place: Any) -> None:
    """Assert that no partial file is left, and that a new store counts the correct total."""
    assert not list(chat.folder.glob(".*.part")), place
    store = PrefixStore(chat.folder)
    enable(chat.model, prefix_store=store, **chat.keywords)
    for ids, expected in zip(chat.later_prompts, chat.answers, strict=True):
        assert_same(chat.generate(chat.make_cache(), ids), expected, place)
    usage = store.usage()
    assert usage.files_refused == 0, place
    assert usage.bytes == int((chat.folder / ".prefix_store.lock").read_text()), place


# Calls during which each allocation, or each operation on a file, fails once.
FAULTY_CALLS = {
    **CALLS,
    "write": (Chat.load_store, write_store),
    "select": (Chat.fill_cache, lambda _, cache: cache.batch_select_indices(torch.tensor([0, 0]))),
    "fork": (Chat.fill_cache, lambda _, cache: cache.fork()),
}
FAULT_CASES = [
    ("gqa", "growing", "crop", MEMORY_FUNCTIONS), ("gqa", "growing", "restore", FILE_FUNCTIONS),
    ("gqa", "growing", "write", FILE_FUNCTIONS),
    ("gqa", "preallocated", "select", MEMORY_FUNCTIONS),
    ("sliding_and_full", "offloaded", "next prompt", MEMORY_FUNCTIONS),
    ("gqa", "preallocated", "fork", MEMORY_FUNCTIONS),
    ("gqa", "growing", "restore", MEMORY_FUNCTIONS), ("gqa", "growing", "write", MEMORY_FUNCTIONS),
    *(
        (*case, MEMORY_FUNCTIONS)
        for case in itertools.product(
            ("gqa", "sliding_and_full"), CACHE_OPTIONS, ("first prompt", "next prompt", "beams")
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind", "call", "failing_functions", "sample_size"),
    [
        *((*case, 4) for case in FAULT_CASES[:6]),
        *(pytest.param(*case, 20, marks=pytest.mark.full) for case in FAULT_CASES),
    ],
)
def test_a_failed_allocation_or_file_operation_leaves_a_usable_cache(
    name: str,
    kind: str,
    call: str,
    failing_functions: frozenset[str],
    sample_size: int,
    tmp_path: Path,
) -> None:
    chat = Chat(name, tmp_path, **CACHE_OPTIONS[kind])
    make_cache, run_call = FAULTY_CALLS[call]
    errors = (make_disk_error,) if failing_functions is FILE_FUNCTIONS else MEMORY_ERRORS
    faults = Faults(failing_functions, errors[0])

    def make_caches() -> list[FP8PagedCache]:
        """Return a cache and, except before a crop, a fork, which would keep pages from moving."""
        cache = make_cache(chat)
        return [cache] if call == "crop" else [cache, cache.fork()]

    caches = make_caches()
    faults.run(partial(run_call, chat, caches[0]))
    places = sorted(set(faults.places))
    assert places
    stride = max(len(places) // sample_size, 1)
    for place, make_error in zip(places[::stride], itertools.cycle(errors), strict=False):
        for path in filter(Path.is_file, tmp_path.glob("*")):
            path.unlink()
        caches = make_caches()
        faults.make_error = make_error
        faults.run(partial(run_call, chat, caches[0]), place)
        for cache in caches:
            chat.check_answers(cache, place)
        check_cache_tables(caches)
        if make_cache is Chat.load_store:
            chat.prefix_store.flush()
            check_store(chat, place)


def make_equal_caches(model: Any, ids: torch.Tensor, **options: Any) -> list[FP8PagedCache]:
    """Return two caches that contain a prompt, which may be empty."""
    options = {"dtype": "model", "prefill": "stored", "page_size": 8, **options}
    caches = [FP8PagedCache(model.config, **options) for _ in range(2)]
    for cache in caches:
        if ids.numel():
            model(ids, past_key_values=cache)
    return caches


@pytest.mark.parametrize("num_stored", [0, 20])
@pytest.mark.parametrize("name", ["llama", "sliding_and_full"])
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 64}], ids=["growing", "preallocated"])
@torch.no_grad()
def test_a_call_that_ended_between_two_layers_is_removed_or_refused(
    options, name, num_stored, tmp_path
):
    """Layer 0 has stored its tokens, but layer 1 has not. Transformers' caches report no error."""
    model, _ = build_variant(name, attn_implementation="fp8_paged")
    ids = torch.arange(60)[None] + 4
    next_ids = ids[:, num_stored : num_stored + 3]
    cache, new_cache = make_equal_caches(model, ids[:, :num_stored], **options)
    interrupt = mock.Mock(side_effect=KeyboardInterrupt)
    uses = [lambda: model(ids[:, 40:], past_key_values=cache)]
    if num_stored:  # before that, layers without tokens may be layers that store none
        uses += [lambda: cache.crop(-5), cache.fork, lambda: cache.save(tmp_path / "cache")]
        uses += [lambda: cache.batch_select_indices(torch.tensor([0]))]
    for use in uses[::-1]:
        is_step = use is uses[0]
        num_interruptions = 2 if is_step else 1
        hook = model.model.layers[1].self_attn.register_forward_pre_hook(interrupt)
        for _ in range(num_interruptions):
            with pytest.raises(KeyboardInterrupt):
                model(next_ids, past_key_values=cache)
        hook.remove()
        if is_step:  # errors between the interruption and the use hide nothing
            with pytest.raises(ConfigError, match="which the cache holds"):
                model(next_ids.repeat(2, 1), past_key_values=cache)
        with pytest.raises(ConfigError, match=r"interrupted (a change|the last call)"):
            use()
        # The call after the interruptions has moved the window.
        if options or (is_step and num_stored and name == "sliding_and_full"):
            cache.reset()
            if num_stored:
                model(ids[:, :num_stored], past_key_values=cache)
        assert {int(layer.get_seq_length()) for layer in cache.layers} == {num_stored}
    cache.fork()
    logits = model(ids[:, num_stored:], past_key_values=cache).logits
    assert torch.equal(logits, model(ids[:, num_stored:], past_key_values=new_cache).logits)


@pytest.mark.parametrize("num_stored", [0, 20])
def test_a_call_that_attention_refuses_changes_nothing(num_stored):
    model, _ = build_variant("llama", attn_implementation="fp8_paged")
    ids = torch.arange(60)[None] + 4
    with torch.no_grad():
        cache, new_cache = make_equal_caches(model, ids[:, :num_stored])
    with pytest.raises(ConfigError, match=r"model.eval\(\)"):
        model.train()(ids[:, num_stored:], past_key_values=cache)
    assert cache.get_seq_length() == num_stored
    model.eval()
    with torch.no_grad():
        logits = model(ids[:, num_stored:], past_key_values=cache).logits
        assert torch.equal(logits, model(ids[:, num_stored:], past_key_values=new_cache).logits)
