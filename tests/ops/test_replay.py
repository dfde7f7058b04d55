"""Tests that replayed launches equal direct launches. Kernels only record their arguments.

A call is recorded, then a call that differs in one argument is made, and then the first call again.
All of them must launch the same kernels, with the same arguments, as without replay.
"""

import functools
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from benchmarks.gpu.random_data import pack_pages
from hf_fp8kv import ops
from hf_fp8kv.ops import AttentionSpec, StoredSide

if ops.explain_backends()["triton"] is not None or torch.cuda.is_available():
    pytest.skip("replaces launches in Triton's interpreter", allow_module_level=True)

import triton
from triton import knobs
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from hf_fp8kv.ops.triton import backend, replay
from hf_fp8kv.ops.triton.target import Target, assuming, recording

Tensor = torch.Tensor
BATCH = 2
NUM_HEADS = 2
NUM_QUERY_HEADS = 8
DIM = 64
PAGE_SIZE = 16
NUM_PAGES = 9
SM_90 = Target.parse("sm_90")

# -- launches --------------------------------------------------------------------------------------


class Launches:
    """Launches, and the tensors that replays allocated."""

    def __init__(self) -> None:
        self.arguments: list[tuple[Any, ...]] = []
        self.allocated: list[Tensor] = []
        self.num_direct = 0  # number of launches that Triton would have made

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        """Record a launch as Triton would make it, and return a compiled kernel."""
        leaves = tree_flatten(args)[0]
        # Triton compiles a kernel for these properties.
        properties = [
            (leaf.dtype, leaf.data_ptr() % 16) if isinstance(leaf, Tensor) else type(leaf)
            for leaf in leaves
        ]
        function = kernel.__name__, properties, list(constants.items())
        self.arguments.append((
            *(*grid, 1, 1)[:3], 7, function, "metadata", None, None, None,
            *tree_map(lambda leaf: leaf.data_ptr() if isinstance(leaf, Tensor) else leaf, args),
            *(constants[param.name] for param in kernel.params[len(args) :]),
        ))  # fmt: skip
        self.num_direct += 1
        return SimpleNamespace(
            run=lambda *arguments: self.arguments.append(arguments), function=function,
            packed_metadata="metadata",
        )  # fmt: skip

    def take(self, allocated: list[Tensor], result: Tensor | None) -> tuple[Any, ...]:
        """Forget and return the launches, with names in place of the addresses of `allocated`."""
        names = {
            tensor.data_ptr(): f"memory {number}"
            for number, tensor in enumerate(allocated)
            if tensor.numel()
        }
        named_arguments = tree_map(
            lambda leaf: names.get(leaf, leaf) if type(leaf) is int else leaf, self.arguments
        )
        sizes = [
            (tensor.shape, tensor.stride(), tensor.dtype, tensor is result) for tensor in allocated
        ]
        self.arguments = []
        self.allocated = []
        self.num_direct = 0
        return named_arguments, sizes


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Record all launches instead of running kernels, as for sm_90."""
    recorded = Launches()
    empty_strided = torch.empty_strided

    def empty(*args: Any, **options: Any) -> Tensor:
        recorded.allocated.append(empty_strided(*args, **options))
        return recorded.allocated[-1]

    monkeypatch.setattr(
        InterpretedFunction, "run", lambda *args, **options: recorded.run(*args, **options)
    )
    params = property(
        functools.cache(lambda kernel: JITFunction(kernel.fn, **kernel.kwargs).params)
    )
    monkeypatch.setattr(InterpretedFunction, "params", params, raising=False)
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda _: 7))
    monkeypatch.setattr(triton.runtime, "driver", driver)
    monkeypatch.setattr(torch, "empty_strided", empty)
    monkeypatch.setattr(replay, "_CAN_REPLAY", True)
    forget_recordings()
    with assuming(SM_90):
        yield recorded
    forget_recordings()


def forget_recordings() -> None:
    for recordings in (*replay.recordings.values(), replay.NO_SHARED_TENSORS[0]):
        recordings.clear()


def check_call(operation: Any, args: Any, launches: Launches, call: Any = None) -> bool:
    """Compare a call with a direct call, and return whether it was replayed."""
    launches.take([], None)
    with recording() as recorded:  # without replay
        result = operation(*args)
    expected = launches.take(recorded.allocations, result)
    assert expected[0]
    result = (call or operation)(*args)
    is_replayed = not launches.num_direct
    assert launches.take(launches.allocated, result) == expected or not is_replayed
    return is_replayed


# -- arguments -------------------------------------------------------------------------------------

WriteArgs = namedtuple("WriteArgs", "pages key value lengths limit")
AttendArgs = namedtuple("AttendArgs", "query pages lengths start stop spec schedule")
ScheduleArgs = namedtuple("ScheduleArgs", "schedule lengths num_tokens window start num_heads")


def make_tokens(num_heads: int, num_tokens: int = 1) -> Tensor:
    return torch.zeros(BATCH, num_tokens, num_heads, DIM, dtype=torch.bfloat16).transpose(1, 2)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def make_zeros_like(x: Tensor, offset: int = 0) -> Tensor:
    """Return zeros like `x`, `offset` values past an address that is a multiple of 16 values."""
    size = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1
    memory = torch.zeros(size + offset + 16, dtype=x.dtype)
    first = -(memory.data_ptr() // x.element_size()) % 16 + offset
    moved = memory[first:].as_strided(x.shape, x.stride())
    vars(moved).update(vars(x))  # the blocks of pages
    return moved


def misalign(x: Tensor) -> Tensor:
    # Blocks contain 16-bit values, so they must stay aligned to 2 bytes.
    return make_zeros_like(x, 2 if x.dtype == torch.uint8 and x.ndim == 2 else 1)


def change_each_tensor(args: Any, change: Callable[[Tensor], Tensor]) -> Iterator[Any]:
    leaves, structure = tree_flatten(args)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            yield tree_unflatten([*leaves[:index], change(leaf), *leaves[index + 1 :]], structure)


# The pages have every optional tensor: a center, static scales and token scales.
PAGES = pack_pages(
    StoredSide(None, torch.zeros(NUM_HEADS, DIM), "fp8_e4m3", DIM),
    torch.zeros(NUM_PAGES, NUM_HEADS, PAGE_SIZE, DIM, dtype=torch.uint8),
    StoredSide(torch.ones(NUM_HEADS, DIM), None, "fp8_e4m3", DIM),
    torch.zeros(NUM_PAGES, NUM_HEADS, DIM, PAGE_SIZE, dtype=torch.uint8),
    torch.zeros(NUM_PAGES, NUM_HEADS, PAGE_SIZE, 2, dtype=torch.bfloat16),
    zeros(BATCH, 4),  # a block table with four pages in a row
)  # fmt: skip
LENGTHS = zeros(BATCH)
BOUNDS = zeros(BATCH, 4)
MASK = torch.zeros(BATCH, 1, 1, 48).byte()
SPEC = AttentionSpec(0.125, True, softcap=9.0, sinks=torch.zeros(NUM_QUERY_HEADS), mask=MASK,
                     bounds=zeros(BATCH, 2))  # fmt: skip
QUERY, KEY, VALUE = make_tokens(NUM_QUERY_HEADS), make_tokens(NUM_HEADS), make_tokens(NUM_HEADS)
CALLS = {
    "attend": AttendArgs(QUERY, PAGES, LENGTHS, 0, 48, SPEC, zeros(30, 4)),
    "write": WriteArgs(PAGES, KEY, VALUE, LENGTHS, 99),
    "fill_schedule": ScheduleArgs(zeros(30, 4), LENGTHS, 1, 0, 0, NUM_HEADS),
}
# Integers that a replay may change.
VARIABLE_INTEGERS: dict[str, list[dict[str, Any]]] = {
    "attend": [{"start": 5}, {"stop": 43}],
    "write": [{"limit": 7}, {"limit": None}],
    "fill_schedule": [{"start": 5}],
}
SPEC_CHANGES: list[dict[str, Any]] = [
    {"scaling": 0.2}, {"causal": False}, {"window": 24}, {"softcap": 8.0}, {"sinks": None},
    {"sinks": torch.zeros(NUM_QUERY_HEADS).half()}, {"mask": None, "bounds": None},
    {"mask": MASK.bool()}, {"mask": MASK[:1], "bounds": BOUNDS[:1, :2]}, {"bounds": None},
    {"bias": torch.zeros(BATCH, NUM_QUERY_HEADS, 1, 48)}, {"bounds": BOUNDS[:, :2]},
    {"bounds": BOUNDS[:, ::2]}, {"deterministic": True},
]  # fmt: skip
PAGE_FIELD_CHANGES: list[dict[str, Any]] = [
    {side: getattr(PAGES, side)._replace(format="fp8_e3m4") for side in "kv"},
    {"k": PAGES.k._replace(rotated=True)}, {"v": PAGES.v._replace(rotated=True)},
    {"k": PAGES.k._replace(center=None)}, {"v": PAGES.v._replace(static_scale=None)},
    {"k": PAGES.k._replace(static_scale=torch.ones(NUM_HEADS, DIM))}, {"table": PAGES.table[:, :3]},
    {"offsets": PAGES.offsets.flip(0)}, {"table": zeros(BATCH, 9)}, {"page_size": 8},
]  # fmt: skip
TOKEN_CHANGES: list[Callable[[Tensor], Tensor]] = [
    torch.Tensor.half,
    lambda x: x.repeat(1, 1, 1, 2)[..., :DIM],
    lambda x: x.repeat(1, 1, 1, 2)[..., ::2],
]
PAGES_CHANGES = [{"pages": PAGES._replace(**fields)} for fields in PAGE_FIELD_CHANGES]
CHANGES: dict[str, list[dict[str, Any]]] = {
    "attend": [
        *({"schedule": schedule} for schedule in (None, zeros(20, 4), zeros(5, 4))),
        {"query": make_tokens(NUM_QUERY_HEADS, 2)},
        {"query": make_tokens(2 * NUM_QUERY_HEADS), "spec": SPEC._replace(sinks=None)},
        {"query": QUERY[:1], "pages": PAGES._replace(table=PAGES.table[:1]),
         "lengths": LENGTHS[:1], "spec": AttentionSpec(0.125, True)},
        *({"query": change(QUERY)} for change in TOKEN_CHANGES),
        *({"spec": SPEC._replace(**fields)} for fields in SPEC_CHANGES), *PAGES_CHANGES,
    ],
    "write": [
        {"key": KEY, "value": KEY},
        *({"key": make_tokens(NUM_HEADS, n), "value": make_tokens(NUM_HEADS, n)} for n in (2, 40)),
        *({side: change(KEY)} for change in TOKEN_CHANGES for side in ("key", "value")),
        *PAGES_CHANGES,
    ],
    "fill_schedule": [{"num_tokens": 2}, {"num_tokens": 40}, {"window": 24}, {"num_heads": 1}],
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_after_a_recording_launches_the_same_kernels(name, launches):
    operation = getattr(backend, name)
    args = CALLS[name]
    replayable = [args, *change_each_tensor(args, make_zeros_like)]
    replayable += [args._replace(**fields) for fields in VARIABLE_INTEGERS[name]]
    not_replayable = [args._replace(**fields) for fields in CHANGES[name]]
    not_replayable += change_each_tensor(args, misalign)
    for number, changed in enumerate((*replayable, *not_replayable)):
        for first, second in ((args, changed), (changed, args)):
            forget_recordings()
            assert not check_call(operation, first, launches), number
            assert check_call(operation, second, launches) or number >= len(replayable), number
            check_call(operation, first, launches)


# Contexts that change the environment of a call, and whether Triton must make its launches.
CONTEXTS: list[tuple[Callable[[], AbstractContextManager[Any]], bool]] = [
    (lambda: assuming(Target.parse("sm_80")), False),
    (lambda: assuming(Target("cuda", 90, 16)), False),
    (lambda: assuming(replace(SM_90, parameters={"warps": 4})), False),
    (lambda: patch.object(knobs.runtime, "debug", not knobs.runtime.debug), True),
    (lambda: patch.object(knobs.runtime.launch_enter_hook, "calls", [print]), True),
    (lambda: recording(), True),
]


@pytest.mark.parametrize("name", CALLS)
def test_bound_calls_and_changed_environments_launch_the_same_kernels(name, launches):
    operation = getattr(backend, name)
    args = CALLS[name]
    bind = vars(operation)["bind"]
    assert bind(*args) is operation, "bound without a recording"
    operation(*args)
    bound = bind(*args)
    # A bound call keeps its pages.
    kept_fields = {"pages": args.pages} if "pages" in args._fields else {}
    changeable = args._replace(**dict.fromkeys(kept_fields))
    integers = [changeable._replace(**fields) for fields in VARIABLE_INTEGERS[name]]
    for changed in (*change_each_tensor(changeable, make_zeros_like), *integers):
        assert check_call(operation, changed._replace(**kept_fields), launches, bound)
    for changed in change_each_tensor(changeable, misalign):
        misaligned = changed._replace(**kept_fields)
        assert not check_call(operation, misaligned, launches, bound)
        assert bind(*misaligned) is operation
    for make_context, is_direct in CONTEXTS:
        with make_context():
            for call in (operation, bound):
                check_call(operation, args, launches, call)
                assert check_call(operation, args, launches, call) is not is_direct


class CudaTensor(Tensor):
    """A tensor that says that it is on a GPU."""

    device = torch.device("cuda", 0)


def test_a_replay_enters_the_device_of_its_tensors(launches):
    args = CALLS["fill_schedule"]
    operation = backend.fill_schedule
    on_gpu = args._replace(schedule=args.schedule.as_subclass(CudaTensor))
    with (
        patch("torch.cuda.device", side_effect=lambda _: nullcontext()) as enter,
        patch("torch.cuda.current_device", return_value=0) as current_device,
    ):
        operation(*on_gpu)
        for call in (operation, vars(operation)["bind"](*on_gpu)):
            for index in (0, 1, 0):
                current_device.return_value = index
                enter.reset_mock()
                call(*on_gpu)
                assert enter.call_count == index
    assert launches.num_direct == 1
