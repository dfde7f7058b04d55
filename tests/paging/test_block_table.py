"""Tests of block tables, allocators, groups and pools: a state machine, and direct tests.

The model of the state machine has no page indices. A sequence is a list of tokens, and pages are
objects. The model counts the sequences that refer to a page.
"""

import contextlib
import copy
import itertools
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_fp8kv.errors import ConfigError, OutOfPagesError
from hf_fp8kv.formats import LayerPlan, SidePlan
from hf_fp8kv.paging.block_table import BlockTable
from hf_fp8kv.paging.layer_group import LayerGroup
from hf_fp8kv.paging.lengths import HostLength
from hf_fp8kv.paging.page_allocator import NO_PAGE, PageAllocator, PageBudget
from hf_fp8kv.paging.page_pool import PagePool
from tests.paging.test_page_pool import read_pages

CPU = torch.device("cpu")
NUM_HEADS = 2
K_DIM = 3
V_DIM = 2
LAYER_FORMATS = {"full": ("fp8_e4m3", "auto"), "sliding": ("fp8_e5m2",)}
PLAN = LayerPlan(SidePlan("fp8"), SidePlan("fp8"))


def make_marks(tokens: np.ndarray) -> dict[str, torch.Tensor]:
    """Return marks, unique integers for each token, for every tensor of a pool, `[B, T, ...]`."""
    ids = torch.from_numpy(tokens)[..., None, None]
    k = ids * 16 + torch.arange(NUM_HEADS * K_DIM).view(NUM_HEADS, K_DIM)
    v = ids * 16 + 8 + torch.arange(NUM_HEADS * V_DIM).view(NUM_HEADS, V_DIM)
    heads = torch.arange(NUM_HEADS) * 3
    return {"k": k, "v": v, "token_scales": ids + torch.stack([heads, heads + 1], -1)}


def convert_mark(name: str, mark: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return marks in the dtype of a tensor. Byte tensors have low and high bytes alternately."""
    if dtype == torch.uint8:
        shift = torch.arange(mark.shape[-1]) % 2 * 8
        return (mark >> shift).to(torch.uint8)
    # bfloat16 represents integers up to 256.
    return (mark % 251 if "scales" in name else mark).to(dtype)


def write_tokens(pool: PagePool, rows: np.ndarray, start: int, tokens: np.ndarray) -> None:
    """Write `tokens[b, t]` to position `start + t` of sequence `b`, in every tensor."""
    pages, slots = locate_tokens(rows, start, tokens.shape[1], pool.page_size)
    all_pages = pool.memory.take(np.arange(len(pool.memory)))
    for _, by_slot, marks in pair_with_marks(pool.layout.split(all_pages), tokens):
        by_slot[pages, slots] = marks
    pool.memory.put(np.arange(len(all_pages)), all_pages)


def pair_with_marks(
    tensors: dict[str, torch.Tensor], tokens: np.ndarray
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield each tensor's name, the tensor as `[pages, slots, ...]`, and the marks of `tokens`."""
    for name, mark in make_marks(tokens).items():
        if name in tensors:
            tensor = tensors[name]
            by_slot = tensor.movedim(3 if name == "v" else 2, 1)
            yield name, by_slot, convert_mark(name, mark, tensor.dtype)


def assert_holds(pool: PagePool, rows: np.ndarray, start: int, tokens: np.ndarray) -> None:
    """Assert that `tokens[b, t]` is at position `start + t` of sequence `b`, in every tensor."""
    pages, slots = locate_tokens(rows, start, tokens.shape[1], pool.page_size)
    for name, by_slot, marks in pair_with_marks(read_pages(pool), tokens):
        wrong_entries = (by_slot[pages, slots] != marks).flatten(2).any(-1).nonzero().tolist()
        assert not wrong_entries, (
            f"{name}: (sequence, token - {start}) {wrong_entries[:5]} hold different values"
        )


def locate_tokens(
    rows: np.ndarray, start: int, num_tokens: int, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the page and the slot of each position, both `[B, T]`."""
    positions = np.arange(start, start + num_tokens)
    pages = rows[:, positions // page_size]
    assert (pages >= 0).all(), "a token is in no page"
    slots = np.broadcast_to(positions % page_size, pages.shape)
    return torch.from_numpy(pages).long(), torch.from_numpy(slots.copy()).long()


# -- the model of the state machine --------------------------------------------------------------


class ModelPage:
    """A page, compared by identity."""


class ModelTable:
    """A block table as a list of dicts, which map logical indices to the pages of a sequence."""

    def __init__(self, page_size: int, window: int | None) -> None:
        self.page_size, self.window = page_size, window
        self.pages: list[dict[int, ModelPage]] = []
        self.first_page = 0
        self.record_past = False

    def first_visible(self, length: int) -> int:
        return 0 if self.window is None else max(0, length + 1 - self.window)

    def first_kept_page(self, length: int) -> int:
        """Return the first page that the next token attends to, or that contains the last token."""
        return min(self.first_visible(length), length - 1) // self.page_size

    def apply_window(self, length: int) -> None:
        if self.window is not None and length:
            self.first_page = max(self.first_page, self.first_kept_page(length))
            for pages in self.pages:
                for index in [i for i in pages if i < self.first_page]:
                    del pages[index]

    def truncate(self, length: int) -> None:
        for pages in self.pages:
            for index in [i for i in pages if i * self.page_size >= length]:
                del pages[index]

    def clear(self) -> None:
        self.pages, self.first_page = [], 0

    def is_long(self, start: int, stop: int) -> bool:
        """Return whether a call from `start` to `stop` needs more pages than a window has."""
        if self.window is None or self.record_past:
            return False
        max_pages = (self.window + self.page_size - 2) // self.page_size + 1
        return -(-stop // self.page_size) - self.first_visible(start) // self.page_size > max_pages

    def reserve(self, start: int, stop: int, batch: int, other_models: list["ModelTable"]) -> int:
        """Assign unshared pages to all written positions, and return the number of new pages."""
        self.pages = self.pages or [{} for _ in range(batch)]
        reference_counts = Counter(list_page_ids(other_models))
        num_new = 0
        for index in range(start // self.page_size, -(-stop // self.page_size)):
            for row in self.pages:
                page = row.get(index)
                if page is not None:
                    if reference_counts[id(page)] == 1:
                        continue
                    reference_counts[id(page)] -= 1
                row[index] = ModelPage()
                num_new += 1
        return num_new

    def copy(self) -> "ModelTable":
        table = copy.copy(self)
        table.pages = [dict(row) for row in self.pages]
        return table


def list_page_ids(models: Iterable[ModelTable]) -> Iterator[int]:
    return (id(page) for model in models for row in model.pages for page in row.values())


def check_tables(*tables: BlockTable) -> None:
    """Assert that all tables that share an allocator agree with its counts."""
    allocator = tables[0].allocator
    references = np.zeros(allocator.capacity, np.int64)
    for table in tables:
        used_pages = table.used_rows()
        assert (used_pages >= 0).all(), f"a page in use has no number: {used_pages}"
        assert (table.rows[:, : table.first_page] == NO_PAGE).all(), "a freed page is listed"
        np.add.at(references, used_pages.ravel(), 1)
    assert allocator.num_held == np.count_nonzero(references)
    wrong_pages = np.flatnonzero(references != allocator.reference_counts)
    assert not len(wrong_pages), (
        f"pages {wrong_pages.tolist()} are listed {references[wrong_pages].tolist()} times and "
        f"counted {allocator.reference_counts[wrong_pages].tolist()} times"
    )
    free_pages = np.flatnonzero(references == 0)
    assert sorted(allocator._free) == free_pages.tolist(), (
        f"{len(free_pages)} pages are in no table, and {allocator.num_free} are listed as free"
    )


def fork_group(group: LayerGroup) -> LayerGroup:
    """Return a fork of a group, with layers over the same pools."""
    fork = group.fork()
    for pool, length in zip(group.pools, group.lengths, strict=True):
        fork.lengths[fork.add(pool)] = length
    return fork


def select_rows(table: BlockTable, sequences: list[int]) -> None:
    table.replace_rows(table.rows[sequences], table.first_page)


def check_crop(group: LayerGroup, num_tokens: int) -> None:
    HostLength(group, 0).check_crop(num_tokens, group.length)


class ModeledCache:
    """The groups of a cache, which share a budget, with their models.

    Layers write one after another, as in a cache.
    """

    def __init__(self, groups: dict[str, LayerGroup], models: dict[str, ModelTable]) -> None:
        self.groups, self.models = groups, models
        self.sequences: list[list[int]] = []
        for group in groups.values():
            group.siblings = [weakref.ref(sibling) for sibling in groups.values()]

    @property
    def length(self) -> int:
        return len(self.sequences[0]) if self.sequences else 0

    def fork(self) -> "ModeledCache":
        other = ModeledCache(
            {name: fork_group(group) for name, group in self.groups.items()},
            {name: model.copy() for name, model in self.models.items()},
        )
        other.sequences = [list(tokens) for tokens in self.sequences]
        return other

    def get_state(self) -> object:
        """Return the state that a refused call must not change."""
        tables = [group.table for group in self.groups.values()]
        states = [(x.first_page, x.num_columns, x.used_rows().tolist()) for x in tables]
        return states, [list(group.lengths) for group in self.groups.values()]


def catch_error(call: Callable[[], None], error_class: type[Exception]) -> tuple[str, dict] | None:
    """Return the message and attributes of the error of `call`, or None without an error.

    Unlike pytest.raises, this keeps no frame, so it does not keep tables alive.
    """
    try:
        call()
    except error_class as error:
        return str(error), dict(vars(error))
    return None


class PagesMachine(RuleBasedStateMachine):
    """Several forks of a cache, each independently written, cropped, reordered and dropped."""

    @initialize(
        page_size=st.sampled_from([2, 4, 8]),
        max_pages=st.sampled_from([None, None, 12, 30]),
        window=st.sampled_from([1, 3, 8, 9]),
    )
    def start(self, page_size: int, max_pages: int | None, window: int) -> None:
        self.budget = PageBudget(page_size, max_pages)
        self.page_size = page_size
        groups, models = {}, {}
        for name, group_window in (("full", None), ("sliding", window)):
            groups[name] = LayerGroup(self.budget, group_window)
            models[name] = ModelTable(page_size, group_window)
            for fmt in LAYER_FORMATS[name]:
                groups[name].add(PagePool(page_size, LayerPlan(SidePlan(fmt), SidePlan(fmt)), True))
        self.caches = [ModeledCache(groups, models)]
        self.next_id = 1

    def pick_cache(self, data: st.DataObject) -> ModeledCache:
        return self.caches[data.draw(st.integers(0, len(self.caches) - 1), label="cache")]

    def predict_write(
        self, cache: ModeledCache, num_tokens: int, batch: int, *, is_undone: bool = False
    ) -> tuple[dict[str, ModelTable], int]:
        """Return the tables after `num_tokens` more tokens, and the number of new pages.

        Nothing is changed. With `is_undone`, long calls do not yet free pages before the window.
        """
        new_models, num_new, start, stop = {}, 0, cache.length, cache.length + num_tokens
        for name, model in cache.models.items():
            new_model = new_models[name] = model.copy()
            first, is_long = start, new_model.is_long(start, stop)
            if is_long:
                first = max(start, new_model.first_kept_page(stop) * self.page_size)
            elif not new_model.record_past:
                new_model.apply_window(start)
            other_models = [other.models[name] for other in self.caches if other is not cache]
            num_new += new_model.reserve(first, stop, batch, [*other_models, new_model])
            if is_long and not is_undone:
                new_model.apply_window(stop)
        return new_models, num_new

    def list_tables(self) -> dict[PageAllocator, list[BlockTable]]:
        """Return the tables of each allocator."""
        tables: dict[PageAllocator, list[BlockTable]] = {}
        for cache in self.caches:
            for group in cache.groups.values():
                tables.setdefault(group.table.allocator, []).append(group.table)
        return tables

    def count_settled_pages(self, cache: ModeledCache, num_tokens: int) -> int:
        """Return the number of pages in use after a step of `cache` has freed unneeded pages."""
        models = []
        for any_cache in self.caches:
            for model in any_cache.models.values():
                new_model, stop = model.copy(), cache.length + num_tokens
                if any_cache is cache and not new_model.record_past:
                    is_long = new_model.is_long(cache.length, stop)
                    new_model.apply_window(stop if is_long else cache.length)
                models.append(new_model)
        return len({*list_page_ids(models)})

    @rule(data=st.data(), num_tokens=st.integers(1, 20), batch=st.integers(1, 3))
    def write_tokens(self, data: st.DataObject, num_tokens: int, batch: int) -> None:
        cache = self.pick_cache(data)
        batch = len(cache.sequences) or batch
        start, stop = cache.length, cache.length + num_tokens
        new_models, num_needed = self.predict_write(cache, num_tokens, batch)
        if self.budget.max_pages is not None:
            num_available = self.budget.max_pages - self.count_settled_pages(cache, num_tokens)
            if num_needed > num_available:
                self.check_refused_write(cache, start, stop, batch, num_needed - num_available)
                return
        first_id, self.next_id = self.next_id, self.next_id + num_tokens * batch
        ids = np.arange(first_id, self.next_id).reshape(batch, num_tokens)
        for group in cache.groups.values():
            for member in range(len(group.pools)):
                self.write_layer(cache, group, member, ids)
        for group in cache.groups.values():
            group.finish_step()
        cache.models = new_models
        cache.sequences = cache.sequences or [[] for _ in range(batch)]
        for sequence, new_tokens in zip(cache.sequences, ids.tolist(), strict=True):
            sequence += new_tokens

    def write_layer(
        self, cache: ModeledCache, group: LayerGroup, member: int, ids: np.ndarray
    ) -> None:
        """Store the tokens of one call in the way in which a layer stores them."""
        start, stop = cache.length, cache.length + ids.shape[1]
        positions = group.reserve(start, stop, len(ids))
        pool, capacity = group.pools[member], group.capacity
        states = [torch.zeros(1, NUM_HEADS, 1, dim) for dim in (K_DIM, V_DIM)]
        if not pool.is_allocated:
            # The first layer of each group has its pages in blocks.
            pool.allocate(*states, capacity, single_block=member > 0)
        listed_pages, long_write = positions.locate(CPU)[0], positions.long_write
        pool.memory.grow(capacity)
        if long_write is None:
            write_tokens(pool, listed_pages.numpy(), start, ids)
        else:
            # A layer does the same with scratch pages instead of a second pool.
            old_pages, kept_pages = long_write.old_pages, long_write.kept_pages
            num_pages = old_pages.shape[1] + -(-ids.shape[1] // self.page_size)
            scratch = copy.deepcopy(pool)
            scratch.allocate(*states, len(ids) * num_pages)
            rows = np.arange(len(ids) * num_pages, dtype=np.int32).reshape(len(ids), num_pages)
            old_rows = rows[:, : old_pages.shape[1]]
            scratch.memory.put(old_rows.ravel(), pool.memory.take(old_pages.ravel()))
            table = np.full((len(ids), listed_pages.shape[1]), -1, np.int32)
            columns = table[:, long_write.first_page :]
            columns[:] = rows[:, : columns.shape[1]]
            write_tokens(scratch, table, start, ids)
            old_ids = np.array(cache.sequences or [[]] * len(ids), np.int64)[:, positions.first :]
            assert_holds(scratch, table, positions.first, np.concatenate([old_ids, ids], axis=1))
            kept_scratch = table[:, long_write.first_kept_page :]
            pool.memory.put(kept_pages.ravel(), scratch.memory.take(kept_scratch.ravel()))
        group.lengths[member] = stop

    @rule(data=st.data(), num_tokens=st.integers(1, 20), batch=st.integers(1, 3))
    def write_and_undo(self, data: st.DataObject, num_tokens: int, batch: int) -> None:
        """Undo a step that some layers have stored."""
        cache = self.pick_cache(data)
        batch = len(cache.sequences) or batch
        if self.budget.max_pages is not None:
            return
        groups = cache.groups.values()
        layers = [(group, member) for group in groups for member in range(len(group.pools))]
        written_layers = layers[: data.draw(st.integers(1, len(layers)), label="layers")]
        cache.models, _ = self.predict_write(cache, num_tokens, batch, is_undone=True)
        for group, member in written_layers:
            self.write_layer(cache, group, member, np.zeros((batch, num_tokens), np.int64))
        for group, member in written_layers:
            group.lengths[member] -= num_tokens
        for group in cache.groups.values():
            group.drop_unused_pages()
        for model in cache.models.values():
            # A page that was copied because a fork shares it stays a copy.
            model.truncate(cache.length)
            if not cache.length:
                model.clear()

    def check_refused_write(
        self, cache: ModeledCache, start: int, stop: int, batch: int, num_missing: int
    ) -> None:
        lengths = [list(group.lengths) for group in cache.groups.values()]
        full_group = cache.groups["full"]
        error = catch_error(lambda: full_group.reserve(start, stop, batch), OutOfPagesError)
        assert error is not None
        _, counts = error
        # Pages before the window count as available, or reduce the needed pages.
        assert counts["needed"] - counts["available"] == num_missing
        assert [list(group.lengths) for group in cache.groups.values()] == lengths
        # Pages before the window may be freed, but not pages that a query attends to.
        for name, model in cache.models.items():
            if cache.groups[name].table.first_page != model.first_page:
                model.apply_window(cache.length)

    @rule(data=st.data(), num_tokens=st.integers(0, 12))
    def crop(self, data: st.DataObject, num_tokens: int) -> None:
        cache = self.pick_cache(data)
        length = max(cache.length - num_tokens, 0)
        sliding = cache.models["sliding"]
        first_token = sliding.first_page * self.page_size
        is_lost = sliding.first_kept_page(length) < sliding.first_page
        is_refused = bool(num_tokens and length and is_lost)
        state = cache.get_state()
        full_error, sliding_error = (
            catch_error(lambda group=group: check_crop(group, num_tokens), ConfigError)
            for group in cache.groups.values()
        )
        assert full_error is None
        assert (sliding_error is not None) == is_refused
        assert not is_refused or f"token {first_token} on" in sliding_error[0]
        assert cache.get_state() == state
        if is_refused:
            return
        for group in cache.groups.values():
            group.crop(num_tokens)
        self.crop_models(cache, length)

    def crop_models(self, cache: ModeledCache, length: int) -> None:
        """Keep the first `length` tokens in the models of a cache."""
        for sequence in cache.sequences:
            del sequence[length:]
        for model in cache.models.values():
            model.truncate(length)
            model.apply_window(length)
            if not length:
                model.clear()
        if not length:
            cache.sequences = []

    @rule(data=st.data())
    def select_rows(self, data: st.DataObject) -> None:
        cache = self.pick_cache(data)
        if not cache.sequences:
            return
        index = st.integers(0, len(cache.sequences) - 1)
        indices = data.draw(st.lists(index, min_size=1, max_size=4), label="sequences")
        for name, group in cache.groups.items():
            select_rows(group.table, indices)
            cache.models[name].pages = [dict(cache.models[name].pages[i]) for i in indices]
        cache.sequences = [list(cache.sequences[i]) for i in indices]

    @precondition(lambda self: len(self.caches) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        num_held = self.budget.num_held
        self.caches.append(self.pick_cache(data).fork())
        assert self.budget.num_held == num_held

    @precondition(lambda self: len(self.caches) > 1)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        # Groups and tables are freed with the cache, because nothing else refers to them.
        self.caches.remove(self.pick_cache(data))

    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        cache = self.pick_cache(data)
        for group in cache.groups.values():
            group.clear()
        self.crop_models(cache, 0)

    @rule(data=st.data(), is_on=st.booleans())
    def record_past(self, data: st.DataObject, is_on: bool) -> None:
        cache = self.pick_cache(data)
        cache.groups["sliding"].record_past = cache.models["sliding"].record_past = is_on

    @invariant()
    def tables_and_counts_agree(self) -> None:
        for tables in self.list_tables().values():
            check_tables(*tables)
        for cache in self.caches:
            for group in cache.groups.values():
                assert group.length <= group.table.num_columns * self.page_size

    @invariant()
    def held_pages_match_the_model(self) -> None:
        models = [model for cache in self.caches for model in cache.models.values()]
        assert self.budget.num_held == len({*list_page_ids(models)})
        assert self.budget.num_held == sum(allocator.num_held for allocator in self.list_tables())
        if self.budget.max_pages is not None:
            assert self.budget.num_held <= self.budget.max_pages
            assert all(x.capacity <= self.budget.max_pages for x in self.list_tables())

    @invariant()
    def all_forks_hold_the_written_tokens(self) -> None:
        for cache in self.caches:
            tokens = np.array(cache.sequences)
            for name, group in cache.groups.items():
                model = cache.models[name]
                assert group.table.batch == len(cache.sequences)
                assert group.lengths == [cache.length] * len(group.pools)
                if not cache.length:
                    continue
                start = model.first_page * self.page_size
                assert group.table.first_page == model.first_page
                assert start <= model.first_visible(cache.length)
                rows = group.table.copy_to_device(CPU).numpy()
                assert np.array_equal(rows[:, model.first_page :], group.table.used_rows())
                for pool in group.pools:
                    assert_holds(pool, rows, start, tokens[:, start:])

    @rule(data=st.data())
    def start_again(self, data: st.DataObject) -> None:
        """Delete all caches except one, and clear it. No page is in use then."""
        self.caches = [self.pick_cache(data)]
        self.clear(data)
        assert self.budget.num_held == 0
        for allocator in self.list_tables():
            assert allocator.num_held == 0
            assert not allocator.reference_counts.any()
            assert allocator.num_free == allocator.capacity


TestPagesMachine = PagesMachine.TestCase


# -- direct tests --------------------------------------------------------------------------------


def make_table(page_size: int = 4) -> BlockTable:
    return BlockTable(PageAllocator(PageBudget(page_size)))


def make_written_table(num_tokens: int, batch: int = 1, page_size: int = 4) -> BlockTable:
    """Return a table with pages for `num_tokens` tokens."""
    table = make_table(page_size)
    table.reserve(0, num_tokens, batch)
    return table


@pytest.mark.parametrize(
    ("token", "first"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (12, 3), (99, 3)]
)
def test_free_before_keeps_all_pages_from_a_token_on(token, first):
    table = make_written_table(12, batch=2)
    table.free_before(token)
    assert (table.first_page, table.num_columns) == (first, 3)
    assert table.allocator.num_held == 2 * (3 - first)
    table.free_from(3)
    assert (table.first_page, table.allocator.num_held) == (first, 0 if first else 2)
    check_tables(table)


def test_full_pages_are_shared_and_partial_pages_are_copied():
    for length, num_copied in ((8, 0), (7, 2)):
        table = make_written_table(length, batch=2)
        fork, sources = table.fork(), list[int]()

        def fail(pages: tuple[np.ndarray, np.ndarray], sources: list[int] = sources) -> None:
            sources.extend(pages[0])
            if len(pages[0]):
                raise MemoryError

        num_held = table.allocator.num_held
        with contextlib.suppress(MemoryError):
            table.reserve(length, 9, 2, fail)
        assert len(sources) == num_copied
        assert table.allocator.num_held == num_held + (2 if not num_copied else 0), (
            "a failed call kept pages"
        )
        check_tables(table, fork)


OPERATIONS = {
    "reserve": lambda table: table.reserve(6, 11, 2),
    "free_from": lambda table: table.free_from(2),
    "free_before": lambda table: table.free_before(4),
    "select": lambda table: select_rows(table, [1, 1, 0]),
    "clear": lambda table: table.clear(),
    "fork": lambda table: table.fork(),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
def test_a_fork_may_be_freed_during_any_operation(operation):
    # The garbage collector may run at any time. Here it runs before the n-th line of Python code.
    for line in itertools.count(1):
        table = make_written_table(6, batch=2)
        garbage = [table.fork()]
        output = _interrupt_call(lambda table=table: operation(table), line, garbage.clear)
        if garbage:
            break
        check_tables(table, *([output] if isinstance(output, BlockTable) else []))
        assert table.allocator.budget.num_held == table.allocator.num_held, f"line {line}"
    assert line > 5


def _interrupt_call(call: Callable[[], object], line: int, interrupt: Callable[[], None]) -> object:
    """Return the result of `call`. Run `interrupt` before line number `line`, if there is one."""
    num_lines = 0

    def trace(frame: object, event: str, argument: object) -> object:
        nonlocal num_lines
        num_lines += event == "line"
        if event == "line" and num_lines == line:
            interrupt()
        return trace

    old_trace = sys.gettrace()
    sys.settrace(trace)
    try:
        return call()
    finally:
        sys.settrace(old_trace)


@pytest.mark.full
def test_a_table_alive_at_the_end_of_the_process_prints_nothing():
    code = (
        "from tests.paging.test_block_table import make_written_table\n"
        "table = make_written_table(9, 2)\ntable.self = table\n"
    )
    command = [sys.executable, "-c", code]
    assert not subprocess.run(command, capture_output=True, text=True, check=True).stderr


# -- growth --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page_size", "batch"), [(16, 1), (64, 3)])
def test_pools_grow_in_steps_with_little_waste(page_size, batch):
    for num_tokens in (1, 1024, 16_000):
        num_pages = -(-num_tokens // page_size)
        max_capacity = max(num_pages * 33 // 32, 64 // page_size)
        table = make_written_table(num_tokens, page_size=page_size)
        assert table.allocator.capacity <= max_capacity
    table = make_table(page_size)
    capacity, num_copied = 0, 0
    # Each token calls `reserve`, but only the first token of a page can need a page.
    for length in range(1, 40_000, page_size):
        table.reserve(length - 1, length, batch)
        new_capacity = table.allocator.capacity
        num_tokens = batch * (table.num_columns * page_size)
        if new_capacity != capacity:
            # A growing pool is moved at most once per 64 tokens.
            assert (new_capacity - capacity) * page_size >= 64
            num_copied += capacity
            capacity = new_capacity
        assert new_capacity * page_size <= max(1.04 * num_tokens, num_tokens + 64), (
            f"at {num_tokens} tokens"
        )
    # Each page is moved about 32 times at most.
    assert num_copied <= 36 * capacity
    # Freed pages are used before new pages are added.
    table.free_from(4)
    table.reserve(4, 39_000, batch)
    assert table.allocator.capacity == capacity
    table.clear()
    assert not len(table.compact())
    assert (table.allocator.capacity, table.allocator.num_free) == (0, 0)


# -- budgets -------------------------------------------------------------------------------------


# -- groups --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_pages", "stop"), [(4, 12), (5, 20)], ids=["stored", "passing"])
def test_a_refused_step_keeps_pages_before_the_window_for_a_crop(max_pages, stop):
    budget = PageBudget(4, max_pages)
    full_group, sliding_group = LayerGroup(budget), LayerGroup(budget, 5)
    for group in (full_group, sliding_group):
        group.siblings = [weakref.ref(sibling) for sibling in (full_group, sliding_group)]
        group.add(PagePool(4, PLAN, True))
    for old_length, length in ((0, 7), (7, 8)):
        for group in (full_group, sliding_group):
            group.reserve(old_length, length, 1)
            group.lengths[0] = length
    with pytest.raises(OutOfPagesError):
        sliding_group.reserve(8, stop, 1)
    table, full_table = sliding_group.table, full_group.table
    assert (table.first_page, table.num_columns, full_table.num_columns) == (0, 2, 2)
    check_crop(sliding_group, 1)
    # The page of the first four tokens, which the step frees, counts as available.
    budget.max_pages = 5
    sliding_group.reserve(8, 12, 1)
    assert (table.first_page, table.num_columns, full_table.num_columns) == (1, 3, 3)


def test_copies_for_a_device_are_created_once_per_change():
    group = LayerGroup(PageBudget(4))
    length = HostLength(group, group.add(PagePool(4, PLAN, True)))

    def run_step(num_tokens):
        positions = length.reserve(num_tokens, 2, CPU, "torch", is_allocated=True)
        tensors, same_tensors = (positions.locate(CPU) for _ in "kv")
        assert all(x is y for x, y in zip(tensors, same_tensors, strict=True))
        length.record(positions)
        return tensors

    table, lengths = run_step(6)
    assert (lengths.tolist(), lengths.dtype, table.dtype) == ([6, 6], torch.int32, torch.int32)
    assert run_step(2)[0] is table, "the table changed without a new page"
    new_table, new_lengths = run_step(1)
    assert new_table is not table
    assert new_lengths.tolist() == [9, 9]
    assert table.tolist() == [[0, 1], [2, 3]], "tables of earlier calls do not change"
    select_rows(group.table, [0, 1, 1])
    assert length.find_stored().locate(CPU)[1].tolist() == [9, 9, 9]
