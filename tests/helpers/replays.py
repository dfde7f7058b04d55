"""Check that replayed calls of the Triton backend launch the same kernels as direct calls.

Each check records a call, runs a call that differs in one argument, and repeats the first call. All
launches must have the same arguments as the launches of direct calls, without replay. Bound calls
(`ops.bind`) are compared in the same way. Triton
specializes kernels as on a GPU, but the fake compiler returns only a name. This module patches
Triton globally, so it must run in a separate process without Triton's interpreter.
"""

import itertools
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler
from triton.runtime import jit

from hf_fp8kv.ops.blocks import pack_pages
from hf_fp8kv.ops.pages import AttentionSpec, Pages, StoredSide
from hf_fp8kv.ops.triton import backend, replay
from hf_fp8kv.ops.triton.target import Target, assuming, recording

BATCH, HEADS, QUERY_HEADS, DIM = 2, 2, 8, 64
# Slots of a page, pages of a pool, and pages in a row of the block table.
PAGE_SIZE, NUM_PAGES, NUM_COLUMNS = 16, 9, 4
# The arguments of launches since the last comparison, and whether each launch had a hook.
launches: list[tuple[Any, ...]] = []
had_hooks: list[bool] = []
_kernel_numbers, _jit_calls = itertools.count(), itertools.count()


def _fake_compile(src: Any, **_: Any) -> SimpleNamespace:
    """Return a kernel that has a name and a number, and that records its launches."""

    def run_kernel(*arguments: Any) -> None:
        *grid, stream, function, metadata, _data, enter, _exit = arguments[:9]
        had_hooks.append(enter is not None)
        addresses = map_tensors(arguments[9:], torch.Tensor.data_ptr)
        launches.append((*grid, stream, function, metadata, addresses))

    return SimpleNamespace(
        run=run_kernel, function=f"{src.fn.__name__} {next(_kernel_numbers)}",
        packed_metadata="metadata", launch_metadata=lambda *_: None,
    )  # fmt: skip


def set_fake_gpu() -> None:
    """Make Triton target a fake GPU, and record its launches in `launches`."""
    target = GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_active_torch_device=lambda: torch.device("cpu"),
            get_current_device=lambda: 0,
            get_current_stream=lambda _device: 7,
        )
    )
    compiler.compile = sys.modules["triton.compiler"].compile = _fake_compile
    stock_run = jit.JITFunction.run
    jit.JITFunction.run = lambda *args, **kwargs: (next(_jit_calls), stock_run(*args, **kwargs))[1]


class AllocationRecorder(TorchDispatchMode):
    """Keeps every tensor that torch allocates in its context."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not function._schema.returns[0].alias_info:
            self.tensors.append(result)
        return result


def map_tensors(args: Any, change: Callable[[torch.Tensor], Any], index: int | None = None) -> Any:
    """Return the arguments with `change` applied to tensor `index`. None means all tensors."""
    leaves, tree_spec = tree_flatten(args)
    indices = itertools.count()
    new_leaves = [
        change(x) if isinstance(x, torch.Tensor) and index in (None, next(indices)) else x
        for x in leaves
    ]
    return tree_unflatten(new_leaves, tree_spec)


def trace_call(operation: Any, args: tuple[Any, ...]) -> list[Any]:
    """Return the launches, allocations and result of a call, with names in place of addresses."""
    names_by_address: dict[int, str] = {}

    def add_name(x: torch.Tensor) -> torch.Tensor:
        names_by_address.setdefault(x.data_ptr(), f"tensor {len(names_by_address)}")
        return x

    def replace_address(x: Any) -> Any:
        if isinstance(x, int) and not isinstance(x, bool):
            for i, tensor in enumerate(allocated.tensors):
                if 0 <= x - tensor.data_ptr() < tensor.nbytes:
                    return f"allocated {i} + {x - tensor.data_ptr()}"
            return names_by_address.get(x, x)
        return x

    map_tensors(args, add_name)
    launches.clear()
    with AllocationRecorder() as allocated:
        result = operation(*args)
    sizes = [(x.shape, x.dtype) for x in allocated.tensors]
    output = None if result is None else (replace_address(result.data_ptr()), result.shape)
    return [*tree_map(replace_address, launches), sizes, output]


def compare_with_replay(operation: Any, args: tuple[Any, ...], label: str) -> bool:
    """Compare a call with and without replay, and return whether it was replayed.

    Raises:
        AssertionError: The launches, the allocations or the result differ from a direct call.
    """
    replay._CAN_REPLAY = False
    expected = trace_call(operation, args)
    replay._CAN_REPLAY = True
    old_count = next(_jit_calls)
    actual = trace_call(operation, args)
    assert actual == expected, f"{label}:\n{actual}\n{expected}"
    return next(_jit_calls) == old_count + 1  # the call did not run Triton's own launch code


class CudaTensor(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    device = torch.device("cuda", 0)


def compare_bound_calls(operation: Any, args: Any, label: str) -> None:
    """Compare calls of a bound operation with direct calls, and check the way that they take.

    Raises:
        AssertionError: The launches, the allocations or the result differ, or a call that differs
            in more than values is not an ordinary call.
    """
    bind, pages = vars(operation)["bind"], getattr(args, "pages", None)
    other_args = args._replace(pages=None) if pages else args

    def compare(changed: Any, change: str, expected_way: str) -> None:
        changed = changed._replace(pages=pages) if pages else changed
        replay._CAN_REPLAY = False
        expected = trace_call(operation, changed)
        replay._CAN_REPLAY = True
        old_count = next(_jit_calls)
        with patch.object(replay, "describe_tensors", wraps=replay.describe_tensors) as describe:
            actual = trace_call(bound, changed)
        uses_triton = next(_jit_calls) != old_count + 1
        way = "described" if describe.called else "direct" if uses_triton else "bound"
        assert actual == expected, f"{label}, bound, {change}:\n{actual}\n{expected}"
        assert way == expected_way, f"{label}, bound, {change}: {way}"

    for recordings in replay.recordings.values():
        recordings.clear()
    replay.NO_SHARED_TENSORS.recordings.clear()
    assert bind(*args) is operation, "bound without a recording"
    operation(*args)
    bound = bind(*args)
    assert bound is not operation
    counter = itertools.count()
    map_tensors(other_args, lambda _: next(counter))
    for i in range(next(counter)):
        misaligned_args = map_tensors(other_args, make_misaligned, i)
        compare(map_tensors(other_args, make_strided, i), f"tensor {i}", "bound")
        compare(misaligned_args, f"tensor {i}, not aligned", "described")
        misaligned_args = misaligned_args._replace(pages=pages) if pages else misaligned_args
        assert bind(*misaligned_args) is operation
    for name, values in BOUND_INTEGERS[type(args)].items():
        for value in values:
            compare(other_args._replace(**{name: value}), f"{name}={value}", "bound")
    for i, context in enumerate(CONTEXTS):
        with context():
            way = "direct" if knobs.runtime.debug else "described"
            compare(other_args, f"context {i}", way)
    compare(other_args, "as before", "bound")
    with assuming(Target.parse("gfx942")):
        operation(*args)
        assert bind(*args) is operation
    with recording(dry_run=True) as recorded:
        launches.clear()
        bound(*args)
        assert recorded.launches
        assert not launches
    hook = knobs.runtime.launch_enter_hook
    for edit_hook in (hook.add, hook.remove):
        edit_hook(print)
        had_hooks.clear()
        bound(*args)
        assert set(had_hooks) == {edit_hook.__name__ == "add"}


def compare_devices(operation: Any, args: Any) -> None:
    """Check that a bound call enters the device of its first tensor, unless it is the current one.

    Raises:
        AssertionError: A call does not enter it, or enters it without need.
    """
    entered: list[torch.device] = []
    on_gpu = args._replace(schedule=args.schedule.as_subclass(CudaTensor))

    def enter(device: torch.device) -> AbstractContextManager[None]:
        entered.append(device)
        return nullcontext()

    with patch("torch.cuda.device", enter), patch("torch.cuda.current_device") as current_device:
        current_device.return_value = 0
        operation(*on_gpu)
        bound = vars(operation)["bind"](*on_gpu)
        assert bound is not operation
        for index in (0, 1, 0):
            current_device.return_value = index
            entered.clear()
            launches.clear()
            bound(*on_gpu)
            assert len(launches) == 1
            assert entered == [CudaTensor.device] * index


def make_tokens(num_heads: int, num_tokens: int = 1) -> torch.Tensor:
    return torch.zeros(BATCH, num_tokens, num_heads, DIM, dtype=torch.bfloat16).transpose(1, 2)


def make_schedule_rows(num_rows: int) -> torch.Tensor:
    return torch.zeros(num_rows, 4, dtype=torch.int32)


def make_pages() -> Pages:
    """Return pages that have every optional tensor: a center, static scales and token scales."""
    k = torch.zeros(NUM_PAGES, HEADS, PAGE_SIZE, DIM, dtype=torch.uint8)
    v = torch.zeros(NUM_PAGES, HEADS, DIM, PAGE_SIZE, dtype=torch.uint8)
    scales = torch.zeros(NUM_PAGES, HEADS, PAGE_SIZE, 2, dtype=torch.bfloat16)
    sides = (
        StoredSide(None, torch.zeros(HEADS, DIM), "fp8_e4m3", DIM), k,
        StoredSide(torch.ones(HEADS, DIM), None, "fp8_e4m3", DIM), v,
    )  # fmt: skip
    return pack_pages(*sides, scales, torch.zeros(BATCH, NUM_COLUMNS, dtype=torch.int32))


WriteArgs = namedtuple("WriteArgs", "pages key value lengths limit")
AttendArgs = namedtuple("AttendArgs", "query pages lengths start stop spec schedule")
ScheduleArgs = namedtuple("ScheduleArgs", "schedule lengths tokens window start heads")


def make_strided(x: torch.Tensor, offset: int = 0, stride_factor: int = 1) -> torch.Tensor:
    """Return zeros shaped like `x` with larger strides, `offset` values past an aligned address."""
    strides = [stride_factor * stride for stride in x.stride()]
    size = sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True)) + 1
    memory = torch.zeros(size + offset + 16, dtype=x.dtype)
    misalignment = memory.data_ptr() // x.element_size() % 16
    zeros = memory[(16 - misalignment) % 16 + offset :].as_strided(
        x.shape, x.stride() if stride_factor == 1 else strides
    )
    vars(zeros).update({key: value for key, value in vars(x).items() if key == "blocks"})
    return zeros


def make_misaligned(x: torch.Tensor) -> torch.Tensor:
    # Blocks contain 16-bit values, so they must stay aligned to 2 bytes.
    return make_strided(x, 2 if x.dtype == torch.uint8 and x.ndim == 2 else 1)


def vary_arguments(args: Any) -> Iterator[tuple[str, Any]]:
    """Yield a description and arguments that differ from `args` in one respect."""
    yield "new addresses", map_tensors(args, make_strided)
    counter = itertools.count()
    map_tensors(args, lambda _: next(counter))
    for i in range(next(counter)):
        yield f"tensor {i}, new address", map_tensors(args, make_strided, i)
        yield f"tensor {i}, not aligned", map_tensors(args, make_misaligned, i)
    # Vary fields, and the dtypes and strides of queries, keys and values.
    for name, values in FIELD_VALUES[type(args)].items():
        for i, field_value in enumerate(values):
            yield f"{name}, value {i}", args._replace(**{name: field_value})
    for name in {"query", "key", "value"} & set(args._fields):
        for i, change in enumerate(TOKEN_CHANGES):
            changed = map_tensors(getattr(args, name), change)
            yield f"{name}, change {i}", args._replace(**{name: changed})
    if "pages" in args._fields:
        for i, change in enumerate(PAGE_CHANGES):
            yield f"pages {i}", args._replace(pages=change(args.pages))
    shared_tokens = make_tokens(HEADS)
    if isinstance(args, WriteArgs):
        yield "key and value share memory", args._replace(key=shared_tokens, value=shared_tokens)
        for num_tokens in (2, 40):
            key, value = make_tokens(HEADS, num_tokens), make_tokens(HEADS, num_tokens)
            yield f"{num_tokens} tokens", args._replace(key=key, value=value)
    if isinstance(args, AttendArgs):
        yield "two tokens", args._replace(query=make_tokens(QUERY_HEADS, 2))
        for i, values in enumerate(SPEC_CHANGES):
            yield f"spec {i}", args._replace(spec=args.spec._replace(**values))
        wide_spec = args.spec._replace(sinks=torch.zeros(2 * QUERY_HEADS))
        yield "more query heads", args._replace(query=make_tokens(2 * QUERY_HEADS), spec=wide_spec)
        yield "one sequence", args._replace(
            query=args.query[:1], pages=args.pages._replace(table=args.pages.table[:1]),
            lengths=args.lengths[:1], schedule=make_schedule_rows(30),
        )  # fmt: skip


def make_mask(batch: int = BATCH, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(batch, 1, 1, 48, dtype=dtype)


def make_bounds(batch: int = BATCH, columns: int = 2, step: int = 1) -> torch.Tensor:
    return torch.zeros(batch, columns, dtype=torch.int32)[:, : 2 * step : step]


SPEC_CHANGES: list[dict[str, Any]] = [
    {"scaling": 0.2}, {"causal": False}, {"window": 24}, {"softcap": 8.0}, {"sinks": None},
    {"sinks": torch.zeros(QUERY_HEADS, dtype=torch.bfloat16)}, {"mask": None, "bounds": None},
    {"mask": make_mask(dtype=torch.bool)}, {"mask": make_mask(1), "bounds": make_bounds(1)},
    {"bias": torch.zeros(BATCH, QUERY_HEADS, 1, 48)}, {"bounds": None},
    {"bounds": make_bounds(columns=4)}, {"bounds": make_bounds(columns=4, step=2)},
    {"bias": torch.zeros(1, 1, 1, 48)},
]  # fmt: skip
TOKEN_CHANGES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    torch.Tensor.half,
    lambda x: make_strided(x, stride_factor=2),
    lambda x: x.repeat(1, 1, 1, 2)[..., :DIM],
]
PAGE_CHANGES: list[Callable[[Pages], Pages]] = [
    lambda p: p._replace(k=p.k._replace(format="fp8_e3m4"), v=p.v._replace(format="fp8_e3m4")),
    lambda p: p._replace(k=p.k._replace(rotated=True)),
    lambda p: p._replace(v=p.v._replace(rotated=True)),
    lambda p: p._replace(k=p.k._replace(center=None)),
    lambda p: p._replace(k=p.k._replace(static_scale=torch.ones(HEADS, DIM))),
    lambda p: p._replace(v=p.v._replace(static_scale=None)),
    lambda p: p._replace(offsets=p.offsets.flip(0)),
    lambda p: p._replace(table=p.table[:, :3]),
    lambda p: p._replace(table=torch.zeros(BATCH, 9, dtype=torch.int32)),
    lambda p: p._replace(page_size=8),
]
FIELD_VALUES: dict[type, dict[str, list[Any]]] = {
    WriteArgs: {"limit": [7, None]},
    AttendArgs: {
        "start": [5], "stop": [43],
        "schedule": [None, make_schedule_rows(20), make_schedule_rows(5)],
    },
    ScheduleArgs: {"tokens": [2, 40], "window": [24], "start": [5], "heads": [1]},
}  # fmt: skip
# Values of integers that a bound call may change.
BOUND_INTEGERS: dict[type, dict[str, list[Any]]] = {
    WriteArgs: {"limit": [7, None]},
    AttendArgs: {"start": [5], "stop": [43]},
    ScheduleArgs: {"start": [5]},
}
# Contexts that change the environment of a call.
CONTEXTS: list[Callable[[], AbstractContextManager[Any]]] = [
    lambda: assuming(Target.parse("sm_80")),
    lambda: assuming(Target("cuda", 90, 16)),
    lambda: assuming(replace(Target.parse("sm_90"), parameters={"warps": 4})),
    lambda: assuming(replace(Target.parse("sm_90"), parameters={"tile": 32})),
    lambda: patch.object(knobs.runtime, "debug", not knobs.runtime.debug),
]


def check_after_recording(
    operation: Any, first: Any, second: Any, label: str, context: Any = nullcontext
) -> None:
    """Remove all recordings, and compare three calls: first, second in `context`, and first again.

    Raises:
        AssertionError: A replayed call differs from a direct call.
    """
    for recordings in replay.recordings.values():
        recordings.clear()
    replay.NO_SHARED_TENSORS.recordings.clear()
    compare_with_replay(operation, first, f"before {label}")
    with context():
        compare_with_replay(operation, second, f"with {label}")
    compare_with_replay(operation, first, f"after {label}")


def compare_calls() -> dict[str, int]:
    """Compare each call with and without replay. Return the number of comparisons per operation.

    Raises:
        AssertionError: A replayed call differs from a direct call.
    """
    set_fake_gpu()
    spec = AttentionSpec(0.125, True, softcap=9.0, sinks=torch.zeros(QUERY_HEADS), mask=make_mask(),
                         bounds=make_bounds())  # fmt: skip
    lengths = torch.zeros(BATCH, dtype=torch.int32)
    new_tokens = (make_tokens(HEADS), make_tokens(HEADS))
    comparisons: dict[str, int] = {}
    rows = backend.count_schedule_rows(torch.device("cpu"), BATCH, HEADS)
    calls = {
        "attend": AttendArgs(
            make_tokens(QUERY_HEADS), make_pages(), lengths, 0, 48, spec, make_schedule_rows(rows)
        ),
        "write": WriteArgs(make_pages(), *new_tokens, lengths, 99),
        "fill_schedule": ScheduleArgs(make_schedule_rows(rows), lengths, 1, 0, 0, HEADS),
    }
    with assuming(Target.parse("sm_90")):
        for name, args in calls.items():
            operation = getattr(backend, name)
            comparison_numbers = itertools.count()
            compare_with_replay(operation, args, name)
            relocated_args = map_tensors(args, make_strided)
            assert compare_with_replay(operation, relocated_args, name), "not replayed"
            for label, changed_args in vary_arguments(args):
                check_after_recording(
                    operation, args, changed_args, f"{name}, {label} {next(comparison_numbers)}"
                )
                check_after_recording(operation, changed_args, args, f"{name}, {label}, reversed")
            for context in CONTEXTS:
                check_after_recording(
                    operation, args, args, f"{name}, context {next(comparison_numbers)}", context
                )
            compare_bound_calls(operation, args, name)
            # With a launch hook, Triton must perform the launch so that it calls the hook.
            hook = knobs.runtime.launch_enter_hook
            for edit_hook in (hook.add, hook.remove):
                edit_hook(print)
                had_hooks.clear()
                operation(*args)
                assert set(had_hooks) == {edit_hook.__name__ == "add"}
            comparisons[name] = next(comparison_numbers)
        compare_devices(backend.fill_schedule, calls["fill_schedule"])
    return comparisons
