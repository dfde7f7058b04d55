"""Tests of block tables, allocators and groups. tests/cache/test_machine.py tests whole caches."""

import contextlib
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable
from unittest import mock

import numpy as np
import pytest
import torch

from hf_fp8kv import FP8PagedCache
from hf_fp8kv.errors import OutOfPagesError
from hf_fp8kv.formats import LayerPlan, SidePlan
from hf_fp8kv.paging.block_table import BlockTable
from hf_fp8kv.paging.layer_group import LayerGroup
from hf_fp8kv.paging.page_allocator import NO_PAGE, PageAllocator, PageBudget
from hf_fp8kv.paging.page_pool import PagePool

CPU = torch.device("cpu")


def check_tables(*tables: BlockTable) -> None:
    """Assert that all tables that share an allocator agree with its counts."""
    allocator = tables[0].allocator
    references = np.zeros(allocator.capacity, np.int64)
    for table in tables:
        used_pages = table.get_used_rows()
        assert (used_pages >= 0).all(), f"a page in use has no number: {used_pages}"
        assert (table.rows[:, : table.first_page] == NO_PAGE).all(), "a freed page is listed"
        np.add.at(references, used_pages.ravel(), 1)
    assert allocator.num_held == np.count_nonzero(references)
    assert allocator.reference_counts.tolist() == references.tolist(), "a page is lost, or shared"
    assert sorted(allocator._free) == np.flatnonzero(references == 0).tolist()


def check_cache_tables(caches: Iterable[FP8PagedCache]) -> None:
    """Check the tables of caches. `caches` must contain all forks of its caches."""
    tables = []
    for cache in caches:
        tables += [group.table for group in cache.groups.values()]
    for allocator in {table.allocator for table in tables}:
        check_tables(*(table for table in tables if table.allocator is allocator))


def make_table(page_size: int = 4) -> BlockTable:
    return BlockTable(PageAllocator(PageBudget(page_size)))


def make_written_table(num_tokens: int, batch: int = 1, page_size: int = 4) -> BlockTable:
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


@pytest.mark.parametrize(("length", "num_copied"), [(8, 0), (7, 2)])
def test_full_pages_are_shared_and_partial_pages_are_copied(length, num_copied):
    table = make_written_table(length, batch=2)
    fork = table.fork()
    num_held = table.allocator.num_held
    copy_pages = mock.Mock(side_effect=MemoryError if num_copied else None)
    with contextlib.suppress(MemoryError):
        table.reserve(length, 9, 2, copy_pages)
    calls = [call.args[0] for call in copy_pages.call_args_list]
    assert sum(len(sources) for sources, _ in calls) == num_copied
    # A failed call keeps no pages.
    assert table.allocator.num_held == num_held + (0 if num_copied else 2)
    check_tables(table, fork)


OPERATIONS = {
    "reserve": lambda table: table.reserve(6, 11, 2),
    "free_from": lambda table: table.free_from(2),
    "free_before": lambda table: table.free_before(4),
    "select": lambda table: table.replace_rows(table.rows[[1, 1, 0]], table.first_page),
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
        tables = [table, output] if isinstance(output, BlockTable) else [table]
        check_tables(*tables)
        assert table.allocator.budget.num_held == table.allocator.num_held, f"line {line}"
    assert line > 5


def _interrupt_call(call: Callable[[], object], line: int, interrupt: Callable[[], None]) -> object:
    """Return the result of `call`. Run `interrupt` before its line number `line`, if it exists."""
    num_lines = 0

    def trace(frame: object, event: str, argument: object) -> object:
        nonlocal num_lines
        if event == "line":
            num_lines += 1
            if num_lines == line:
                interrupt()
        return trace

    old_trace = sys.gettrace()
    sys.settrace(trace)
    try:
        return call()
    finally:
        sys.settrace(old_trace)


@pytest.mark.parametrize(("page_size", "batch"), [(16, 1), (64, 3)])
def test_pools_grow_in_steps_with_little_waste(page_size, batch):
    table = make_table(page_size)
    capacity = 0
    num_copied = 0
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
        assert new_capacity * page_size <= max(1.04 * num_tokens, num_tokens + 64), num_tokens
    # Each page is moved about 32 times at most.
    assert num_copied <= 36 * capacity
    # Freed pages are used before new pages are added.
    table.free_from(4)
    table.reserve(4, 39_000, batch)
    assert table.allocator.capacity == capacity
    table.clear()
    assert not len(table.compact())
    assert (table.allocator.capacity, table.allocator.num_free) == (0, 0)


@pytest.mark.parametrize(("max_pages", "stop"), [(4, 12), (5, 20)], ids=["stored", "passing"])
def test_a_refused_step_keeps_pages_before_the_window_for_a_crop(max_pages, stop):
    budget = PageBudget(4, max_pages)
    full_group, sliding_group = LayerGroup(budget), LayerGroup(budget, 5)
    for group in (full_group, sliding_group):
        group.siblings = [weakref.ref(sibling) for sibling in (full_group, sliding_group)]
        group.add(PagePool(4, LayerPlan(SidePlan("fp8"), SidePlan("fp8")), True))
    for old_length, length in ((0, 7), (7, 8)):
        for group in (full_group, sliding_group):
            group.reserve(old_length, length, 1)
            group.lengths[0] = length
    with pytest.raises(OutOfPagesError):
        sliding_group.reserve(8, stop, 1)
    table, full_table = sliding_group.table, full_group.table
    assert (table.first_page, table.num_columns, full_table.num_columns) == (0, 2, 2)
    sliding_group.check_crop(0, 1, sliding_group.length)
    # The page of the first four tokens, which the step frees, counts as available.
    budget.max_pages = 5
    sliding_group.reserve(8, 12, 1)
    assert (table.first_page, table.num_columns, full_table.num_columns) == (1, 3, 3)
