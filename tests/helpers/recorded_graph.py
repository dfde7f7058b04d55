"""A graph for CPUs: it records operations as calls of torch's dispatcher, and repeats them.

A CUDA graph repeats kernels at the same addresses. This one calls each operation again with the
same tensors, and copies the results into the tensors of the first time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_fp8kv.attention import capture


class RecordedGraph(TorchDispatchMode):
    """See the module.

    Attributes:
        calls: Each operation with its arguments and its result.
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
                    # An expanded tensor has one element in memory for many.
                    index = tuple(slice(None if x else 1) for x in old.stride())
                    old[index].copy_(new[index])


@contextmanager
def recorded_graphs(graph: Callable[[], capture.Graph] = RecordedGraph) -> Iterator[None]:
    """Let CPUs have graphs in this context."""
    capture.GRAPHS["cpu"] = graph
    try:
        yield
    finally:
        del capture.GRAPHS["cpu"]
