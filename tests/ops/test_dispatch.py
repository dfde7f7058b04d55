"""Tests of how an operation reaches its backend.

Operations use torch's dispatcher only under a dispatch mode, profiler, trace, transform or
compiler, for tensor subclasses and meta tensors, or with gradients. The last two tests are of the
"triton" backend: a schedule keeps no memory, and a failing C compiler gives a clear error.
"""

import subprocess
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.random_data import pack_pages
from hf_fp8kv import ConfigError, ops
from hf_fp8kv.errors import BackendError
from hf_fp8kv.ops import AttentionSpec, Pages, StoredSide
from hf_fp8kv.ops.triton.target import launch
from tests.helpers.assertions import assert_same


class TensorSubclass(torch.Tensor):
    """A subclass of Tensor, like FakeTensor and DTensor."""


def make_pages(table: torch.Tensor, num_pages: int, num_heads: int = 1) -> Pages:
    """Return pages of 16 tokens, in float32."""
    side = StoredSide(None, None, "auto", 16)
    zeros = torch.zeros((num_pages, num_heads, 16, 16), device=table.device)
    return pack_pages(side, zeros, side, zeros, None, table)


# The pages are made once, because a trace or a compiled graph would contain their operations.
SHARED_PAGES = make_pages(torch.tensor([[1]], dtype=torch.int32), 2)


def call_operations(convert: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> torch.Tensor:
    """Store a token and attend to it. `convert` is applied to the inputs."""
    lengths = torch.tensor([1], dtype=torch.int32)
    x = convert(torch.arange(16.0).view(1, 1, 1, 16))
    spec = AttentionSpec(0.25, True)
    ops.write(SHARED_PAGES, x, x, lengths, "torch")
    return ops.attend(x, SHARED_PAGES, lengths, 0, 1, spec, backend="torch")


class NameRecorder(TorchDispatchMode):
    """Records the names of this package's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if "hf_fp8kv" in str(function):
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def observe_by_mode(names: list[str]) -> Any:
    with NameRecorder() as mode:
        result = call_operations()
    names += mode.names
    return result


def observe_by_profiler(names: list[str]) -> Any:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        result = call_operations()
    names += [event.name for event in profiler.events()]
    return result


def observe_by_tracing(names: list[str]) -> Any:
    traced = torch.jit.trace(
        lambda offset: call_operations(lambda x: x + offset), torch.zeros(1), check_trace=False
    )
    names += [node.kind() for node in traced.graph.nodes()]
    return traced(torch.zeros(1))


def observe_by_compiling(names: list[str]) -> Any:
    def backend(graph: Any, _inputs: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    return torch.compile(call_operations, backend=backend, fullgraph=True)()


def observe_by_transform(_names: list[str]) -> Any:
    return torch.func.vmap(lambda _: call_operations())(torch.zeros(1))


# Ways to observe a call, with the number of observed operations (0 if only the result counts).
OBSERVERS: dict[str, tuple[Callable[[list[str]], Any], int]] = {
    "mode": (observe_by_mode, 2), "profiler": (observe_by_profiler, 2),
    "tracing": (observe_by_tracing, 2), "compiling": (observe_by_compiling, 2),
    "transform": (observe_by_transform, 0),
    "subclass": (lambda _: call_operations(lambda x: x.as_subclass(TensorSubclass)), 0),
    "nothing": (lambda _: call_operations(), 0),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("grad_enabled", [False, True])
def test_observers_receive_operations(observer: str, grad_enabled: bool) -> None:
    observe, num_operations = OBSERVERS[observer]
    names: list[str] = []
    with torch.set_grad_enabled(grad_enabled):
        result = observe(names)
    assert len([name for name in names if "hf_fp8kv" in name]) == num_operations, names
    assert_same(torch.Tensor(result).flatten(), torch.arange(16.0))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_calls_check_sizes() -> None:
    """Other sizes cause a single recompilation. Wrong sizes cause an error during compilation."""
    table = torch.arange(4, dtype=torch.int32)[None]

    def attend(query: torch.Tensor, stop: int, mask: torch.Tensor) -> torch.Tensor:
        pages = make_pages(table.to(query.device), 4)
        lengths = torch.full((1,), stop, dtype=torch.int32, device=query.device)
        spec = AttentionSpec(0.25, True, mask=mask)
        return ops.attend(query, pages, lengths, 0, stop, spec, backend="torch")

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for stop in (5, 9, 16, 17, 40, 64):
        arguments = torch.randn(1, 2, 1, 16), stop, torch.zeros(1, 1, 1, stop)
        assert_same(compiled(*arguments), attend(*arguments))
    assert counters["stats"]["unique_graphs"] == 2
    wrong_calls = (
        ("query", (1, 2, 1, 8), 30, (1, 1, 1, 30)),
        ("mask", (1, 2, 1, 16), 33, (1, 1, 1, 32)),
        # The four pages have room for 64 tokens.
        ("positions", (1, 2, 1, 16), 65, (1, 1, 1, 65)),
    )
    for wrong_argument, query_shape, stop, mask_shape in wrong_calls:
        error = f"{wrong_argument}: expected"
        with pytest.raises(Exception, match=error):
            compiled(torch.zeros(query_shape), stop, torch.zeros(mask_shape))
        with torch.device("meta"), pytest.raises(ConfigError, match=error):
            attend(torch.zeros(query_shape), stop, torch.zeros(mask_shape))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.skipif(
    ops.explain_backends()["triton"] is not None, reason=str(ops.explain_backends()["triton"])
)
@pytest.mark.parametrize("grad_enabled", [False, True])
def test_a_schedule_keeps_no_memory_of_an_operation(grad_enabled: bool) -> None:
    """In the CUDA graphs of torch.compile, an operation's memory must not outlive a call.

    A schedule lives longer than a call, so no attribute of it may hold the call's partial sums.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pages = make_pages(torch.zeros(1, 1, dtype=torch.int32, device=device), 2, num_heads=2)
    x = torch.zeros(1, 2, 1, 16, device=device)
    lengths = torch.ones(1, dtype=torch.int32, device=device)
    schedule = ops.create_schedule(lengths, 1, 0, 0, 2, "triton")
    with torch.set_grad_enabled(grad_enabled):
        ops.attend(
            x, pages, lengths, 0, 1, AttentionSpec(1.0, True), schedule=schedule, backend="triton"
        )
    assert not vars(schedule)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("Failed to find C compiler. Please specify"), BackendError),
        (subprocess.CalledProcessError(1, ["gcc", "main.c"]), BackendError),
        (RuntimeError("CUDA error: an illegal memory access"), RuntimeError),
    ],
    ids=["no compiler", "no headers", "a different error"],
)  # fmt: skip
def test_a_failing_compiler_is_reported(error, expected):
    """Triton builds a launcher in C at the first call of a kernel."""
    kernel = mock.MagicMock()
    kernel.__getitem__.return_value = mock.Mock(side_effect=error)
    with pytest.raises(expected) as caught:
        launch(kernel, (1,), torch.zeros(1))
    assert caught.type is expected
    assert ("backend='torch'" in str(caught.value)) == (expected is BackendError)
