"""A graph for CPUs, which records operations as calls of torch's dispatcher, and repeats them.

A CUDA graph repeats kernels at the same addresses. This graph calls each operation again with the
same tensors, and copies the results into the tensors that the first call returned.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_fp8kv.attention import capture
from hf_fp8kv.attention.capture import CapturedStep


class RecordedGraph(TorchDispatchMode):
    """A graph for CPUs, with the methods that captured steps call.

    Attributes:
        calls: Each operation with its arguments, its keyword arguments and its result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def capture(self, run: Callable[[], Any]) -> Any:
        with self:
            return run()

    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            leaves = tree_leaves(func(*args, **kwargs))
            for old, new in zip(tree_leaves(result), leaves, strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    # An expanded axis has a single element in memory.
                    index = tuple(slice(None if stride else 1) for stride in old.stride())
                    old[index].copy_(new[index])


class _HostReads(TorchFunctionMode):
    """A mode that calls `report` when a method reads the memory of a tensor.

    On a GPU these methods copy the tensor to the host, which is an operation.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()
        self.report = report

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy", "__array__", "__dlpack__", "data_ptr"):
            self.report(f"Tensor.{name} reads a value on the host")
        return func(*args, **(kwargs or {}))


class CpuStepDescription(capture.StepDescription):
    """A description that also reports reads of memory that are not operations on a CPU."""

    def __enter__(self) -> "CpuStepDescription":
        self.host_reads = _HostReads(self.report)
        self.host_reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.host_reads.__exit__(*error)


@contextmanager
def recorded_graphs(graph: Callable[[], Any] = RecordedGraph) -> Iterator[list[CapturedStep]]:
    """Capture steps on CPUs with `graph` in this context. Yield the list of the created steps."""
    steps: list[CapturedStep] = []
    with pytest.MonkeyPatch.context() as patch:

        def record(step: CapturedStep, *args: Any) -> None:
            make_step(step, *args)
            steps.append(step)

        make_step = CapturedStep.__init__
        patch.setitem(capture.GRAPHS, "cpu", graph)
        patch.setattr(capture, "StepDescription", CpuStepDescription)
        patch.setattr(CapturedStep, "__init__", record)
        yield steps
