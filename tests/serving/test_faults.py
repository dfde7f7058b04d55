"""Tests in which each allocation, or each operation on a file, fails once while an engine runs.

Afterwards the engine has ended with that error, or all its answers are correct. The engine can
start again, no page is lost, and no partial file is left.
"""

import gc
import linecache
import logging
import weakref
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_fp8kv import PrefixStore, serving
from tests.helpers.faults import (
    FILE_FUNCTIONS,
    MEMORY_ERRORS,
    MEMORY_FUNCTIONS,
    Faults,
    Place,
    make_disk_error,
)
from tests.helpers.serving_tools import (
    PAGE_SIZE,
    generate_each,
    make_batching_config,
    make_greedy_config,
    request_answer,
    run_manager,
)
from tests.helpers.tiny_models import build_variant

# Python reports an exception in a thread, or in `__del__`, as a warning and continues.
pytestmark = [
    pytest.mark.text,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

NUM_NEW = 2  # new tokens of an answer
NUM_PAGES = 10
MODEL_OPTIONS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mistral": {"sliding_window": 20},  # prompts wrap the ring of a window
}
FAULT_MESSAGES = ("injected", "No space left on device")


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    """Disable the log, whose records would keep the engine's memory through its tracebacks."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def make_ids(factor: int, modulus: int, num_tokens: int) -> list[int]:
    """Return token ids from 3 on that repeat only after `modulus` tokens."""
    return [factor * position % modulus + 3 for position in range(1, num_tokens + 1)]


class Engines:
    """A model with its engines, a prefix store that they share, and the expected answers."""

    def __init__(self, name: str, folder: Path | None) -> None:
        self.model, _ = build_variant(name, max_position_embeddings=512, **MODEL_OPTIONS[name])
        self.folder = folder
        first_ids, second_ids = (make_ids(seed, 89, 59) for seed in (7, 31))
        # These prompts share pages, and need more pages than the engine has.
        self.prompts = [
            first_ids,
            first_ids[:40] + second_ids[:9],
            second_ids,
            first_ids[:18],
            second_ids[:33] + first_ids[:5],
        ]
        # This prompt and its answer need all pages.
        self.longest_prompt = make_ids(5, 83, NUM_PAGES * PAGE_SIZE - NUM_NEW)
        self.model.set_attn_implementation("fp8_paged")
        long_answers = generate_each(self.model, [*self.prompts, self.longest_prompt])
        *self.answers, self.longest_answer = [answer[:NUM_NEW] for answer in long_answers]
        self.model.set_attn_implementation("sdpa")
        self.enable()

    def enable(self) -> None:
        self.store = None if self.folder is None else PrefixStore(self.folder)
        serving.enable(self.model, prefix_store=self.store, probe=False)

    def make_manager(self) -> Any:
        manager = self.model.init_continuous_batching(
            make_greedy_config(), make_batching_config(num_pages=NUM_PAGES, max_batch_tokens=64)
        )
        manager.warmup()
        return manager

    def request(self, manager: Any) -> None:
        self.outputs: dict[str, Any] = {}
        self.request_ids = manager.add_requests(self.prompts, max_new_tokens=NUM_NEW)
        while len(self.outputs) < len(self.request_ids):
            output = manager.get_result(timeout=30)
            if output is None:  # the engine has ended
                break
            if output.is_finished():
                self.outputs[output.request_id] = output

    def run(self) -> None:
        """Make a manager, answer all prompts, write the store's pages, and stop the manager."""
        self.manager = None
        self.manager = manager = self.make_manager()
        manager.start()
        try:
            self.request(manager)
        finally:
            manager.stop(block=True, keep_for_next_session=True)
            if self.store is not None:
                self.store.flush()

    def check_outputs(self, manager: Any, place: Any, *, has_failed: bool) -> None:
        """Assert that the engine has ended with the fault, or that its answers are correct."""
        error = manager.background_thread_status.fatal_error
        assert error is None or (has_failed and str(error).endswith(FAULT_MESSAGES)), (place, error)
        for answer, request_id in zip(self.answers, self.request_ids, strict=True):
            # A request has no output if it was refused, or finished by a step that failed.
            output = self.outputs.get(request_id)
            if output is None or output.error is not None:
                assert error is not None, place
                assert output is None or output.error == str(error), place
            else:
                assert list(output.generated_tokens) == answer, place

    def check_fault(self, faults: Faults, place: Place, *, may_write: bool) -> None:
        """Let a call of a running engine fail at `place`, and check this and a new engine."""
        if may_write:
            for path in filter(Path.is_file, self.folder.glob("*")):
                path.unlink()
        self.enable()
        error = faults.run(self.run, place)
        if self.manager is None:
            assert error is type(faults.make_error()), place
            self.manager = self.make_manager()
        else:
            self.check_outputs(self.manager, place, has_failed=faults.has_failed)
        assert self.model.config._attn_implementation == "sdpa", place
        manager = self.manager
        self.manager = None
        memory = weakref.ref(manager.batch_processor.cache)
        with run_manager(manager):
            self.request(manager)
            self.check_outputs(manager, place, has_failed=False)
            answer = request_answer(manager, self.longest_prompt, NUM_NEW)
            assert answer == self.longest_answer, place
        if self.folder is not None:
            self.store.flush()
            assert not list(self.folder.glob(".*.part")), place
        self.model.destroy_cached_continuous_batching_manager()
        del manager
        gc.collect()
        assert memory() is None, place


# The model, whether there is a store and whether it has pages, and the calls that fail.
CASES = {
    "no store": ("gqa", "", MEMORY_FUNCTIONS),
    "writes": ("gqa", "empty store", MEMORY_FUNCTIONS),
    "a window": ("mistral", "", MEMORY_FUNCTIONS),
    "written files": ("gqa", "empty store", FILE_FUNCTIONS),
    "reads": ("gqa", "filled store", MEMORY_FUNCTIONS),
    "read files": ("gqa", "filled store", FILE_FUNCTIONS),
}


def check_faults(
    case: tuple[str, str, frozenset[str]], folder: Path, text: str = "", *, stride: int = 1
) -> int:
    """Let calls fail in each line of the package that contains `text`. Return the number of lines.

    At most four calls of every `stride`-th line fail.
    """
    model_name, store_kind, function_names = case
    engines = Engines(model_name, folder if store_kind else None)
    is_empty = store_kind == "empty store"
    errors = (make_disk_error,) if function_names is FILE_FUNCTIONS else MEMORY_ERRORS[:2]
    faults = Faults(function_names, errors[0])
    num_runs = 1 if is_empty else 2  # the second run reads the pages of the first run
    for _ in range(num_runs):
        engines.enable()
        faults.run(engines.run)
    places_by_line = defaultdict[tuple[str, int], list[Place]](list)
    for place in faults.places:
        places_by_line[place[:2]].append(place)
    source_lines = [key for key in places_by_line if text in linecache.getline(*key)][::stride]
    assert source_lines
    for number, key in enumerate(source_lines):
        faults.make_error = errors[number % len(errors)]
        places = places_by_line[key]
        for place in places[:: len(places) // 4 + 1]:
            engines.check_fault(faults, place, may_write=is_empty)
    serving.disable(engines.model)
    return len(source_lines)


def test_a_block_of_a_store_is_not_lost_if_its_copy_fails(tmp_path: Path) -> None:
    assert check_faults(CASES["reads"], tmp_path, ".copy_(page.rows[0])") == 1


# The full tier fails more calls.
@pytest.mark.parametrize(
    ("name", "stride"),
    [
        ("no store", 12), ("writes", 12),
        *(pytest.param(name, 3, marks=pytest.mark.full) for name in CASES),
    ],
)  # fmt: skip
def test_failed_allocations_and_files_end_the_engine_or_nothing(
    name: str, stride: int, tmp_path: Path
) -> None:
    assert check_faults(CASES[name], tmp_path, stride=stride)
