"""Ctrl-C at any line of the package. The cache then gives correct answers to other prompts."""

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_fp8kv
from hf_fp8kv import ConfigError, FP8PagedCache, PrefixStore, enable
from tests.helpers.assertions import assert_same
from tests.helpers.margins import wide_margins
from tests.helpers.tiny_models import tiny

# Python ignores an exception in `__del__` and continues.
pytestmark = [
    pytest.mark.text,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PACKAGE = str(Path(hf_fp8kv.__file__).parent)
GREEDY = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0, "suppress_tokens": [0]}
PAGE = 8
Point = tuple[str, int, int]


def is_in_del(frame: Any) -> bool:
    """Return whether Python ignores an exception that is raised in this frame."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def trace(call: Callable[[], Any], point: Point | None = None) -> Counter[tuple[str, int]]:
    """Count the runs of each line of the package in `call`, and interrupt it at `point`."""
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

    before = sys.gettrace()  # the trace function of a coverage tool
    sys.settrace(on_call)
    try:
        call()
    except KeyboardInterrupt:
        assert point is not None
    finally:
        sys.settrace(before)
    return counts


class Chat:
    """A model, and prompts with their answers from new caches."""

    def __init__(self, name: str, folder: Path, **keywords: Any) -> None:
        self.model, _ = tiny(name, max_position_embeddings=512)
        self.keywords = {"page_size": PAGE, "prefill": "stored", **keywords}
        enable(self.model, **self.keywords)
        generator = torch.Generator().manual_seed(3)
        first, second, third = torch.randint(2, 98, (3, 1, 200), generator=generator)
        self.first_prompt = first[:, :90]
        # It shares 21 tokens with the first prompt.
        self.next_prompt = torch.cat([first[:, :21], second[:, :30]], 1)
        # Longer than the contents of a cache, with 0 and 33 tokens in common.
        self.later_prompts = third[:, :110], torch.cat([first[:, :33], third[:, :90]], 1)
        self.answers = [
            self.generate(self.new_cache(), ids, logits_processor=wide_margins(1e-5))
            for ids in self.later_prompts
        ]
        self.folder = folder
        # Most of the pages, so that the rest is renumbered, or as many as the window allows.
        self.tokens_to_remove = -86 if name == "gqa" else -3

    def new_cache(self) -> FP8PagedCache:
        return FP8PagedCache(self.model.config, **self.keywords)

    def generate(self, cache: FP8PagedCache, ids: torch.Tensor, **keywords: Any) -> torch.Tensor:
        answer: torch.Tensor = self.model.generate(ids, past_key_values=cache, **GREEDY, **keywords)
        return answer

    def filled(self) -> FP8PagedCache:
        cache = self.new_cache()
        self.generate(cache, self.first_prompt)
        return cache

    def stored(self) -> FP8PagedCache:
        """Return a new cache with a store that holds the pages of the first prompt."""
        store = PrefixStore(self.folder)
        enable(self.model, prefix_store=store, **self.keywords)
        if not any(self.folder.glob("*.safetensors")):
            self.generate(self.new_cache(), self.first_prompt)
            store.flush()
            return self.stored()
        return self.new_cache()

    def check(self, cache: FP8PagedCache, point: Any) -> None:
        """Assert that the cache answers other prompts correctly, or raises a ConfigError first."""
        for ids, expected in zip(self.later_prompts, self.answers, strict=True):
            try:
                answer = self.generate(cache, ids)
            except ConfigError:
                cache.reset()
                answer = self.generate(cache, ids)
            assert_same(answer, expected, point)


Begin = Callable[[Chat], FP8PagedCache]
CALLS: dict[str, tuple[Begin, Callable[[Chat, FP8PagedCache], Any]]] = {
    "first prompt": (Chat.new_cache, lambda chat, cache: chat.generate(cache, chat.first_prompt)),
    "next prompt": (Chat.filled, lambda chat, cache: chat.generate(cache, chat.next_prompt)),
    "beams": (Chat.filled, lambda chat, cache: chat.generate(cache, chat.next_prompt, num_beams=2)),
    "crop": (Chat.filled, lambda chat, cache: cache.crop(chat.tokens_to_remove)),
    "reset": (Chat.filled, lambda chat, cache: cache.reset()),
    "restore": (Chat.stored, lambda chat, cache: chat.generate(cache, chat.first_prompt)),
}
FORMS: dict[str, dict[str, Any]] = {
    "growing": {}, "offloaded": {"offloading": True}, "preallocated": {"max_cache_len": 160}
}  # fmt: skip
GRID = [
    *(("gqa", "growing", call) for call in CALLS), ("sliding_and_full", "growing", "next prompt")
]  # fmt: skip
FULL_GRID = [
    *GRID, ("sliding_and_full", "offloaded", "next prompt"), ("gqa", "preallocated", "next prompt")
]  # fmt: skip
SLOW = ("first prompt", "beams", "restore")
# A sample of lines at their first run, or every fifth line, in fast calls also at its last run.
# The cases share most lines, so each starts at a different line.
STRIDE = 5
TIERS = [(*where, 20, 0) for where in GRID]
TIERS += [
    pytest.param(*where, 0, i % STRIDE, marks=pytest.mark.full) for i, where in enumerate(FULL_GRID)
]


@pytest.mark.parametrize(("name", "form", "call", "sample", "begins"), TIERS)
def test_an_interrupt_at_any_line_leaves_a_usable_cache(
    name: str, form: str, call: str, sample: int, begins: int, tmp_path: Path
) -> None:
    chat = Chat(name, tmp_path, **FORMS[form])
    begin, run = CALLS[call]
    cache = begin(chat)
    cache.fork()  # as in the loop: the next write checks again which pages are shared
    counts = trace(partial(run, chat, cache))
    points = [
        (*line, run_index)
        for line, last_run in sorted(counts.items())
        for run_index in {1, 1 if sample or call in SLOW else last_run}
    ]
    for point in points[begins :: len(points) // sample if sample else STRIDE]:
        cache = begin(chat)
        fork = cache.fork()
        trace(partial(run, chat, cache), point)
        chat.check(cache, point)
        if fork.get_seq_length():
            chat.check(fork, ("a fork", *point))


@pytest.mark.parametrize("last", [1, 2])
def test_a_crop_without_memory_leaves_a_usable_cache(
    last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crop raises before it allocates a tensor of the first or the second layer."""
    chat = Chat("gqa", tmp_path)
    cache, stock, calls = chat.filled(), torch.zeros, []

    def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == last:
            raise MemoryError
        return stock(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(MemoryError):
        cache.crop(chat.tokens_to_remove)
    short = chat.first_prompt[:, :20]  # fewer pages than the layers had
    assert_same(chat.generate(cache, short), chat.generate(chat.new_cache(), short))
    chat.check(cache, last)
