"""Operations go by torch's dispatcher where something of torch has to see them, and else not."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hf_fp8kv import ops
from hf_fp8kv.ops import AttentionSpec, Pages, StoredSide, registration
from tests.helpers.assertions import assert_same
from tests.helpers.counting import BytesWritten


class Subclass(torch.Tensor):
    """As FakeTensor and DTensor are."""


def call(make: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> torch.Tensor:
    """A token stored and attended to, by each operation; `make` makes what is given."""
    codes = torch.zeros(2, 1, 16, 16)
    side = StoredSide(codes, None, None, "auto", 16)
    table = torch.tensor([[1]], dtype=torch.int32)
    pages = Pages(side, side._replace(codes=codes.clone()), None, table)
    one = torch.tensor([1], dtype=torch.int32)
    x = make(torch.arange(16.0).view(1, 1, 1, 16))
    spec = AttentionSpec(0.25, True)
    ops.write(pages, x, x, one, "torch")
    attended = ops.attend(x, pages, one, 0, 1, spec, backend="torch")
    stored = ops.write_and_attend(x, 2 * x, 3 * x, pages, one, 0, 1, spec, backend="torch")
    return torch.cat([attended, stored])


def by_tracing() -> torch.Tensor:
    found = []
    torch.jit.trace(
        lambda x: found.append(call(lambda y: y + x)) or x, torch.zeros(1), check_trace=False
    )
    return found[0]


OBSERVED: dict[str, Callable[[], Any]] = {
    "gradients": lambda: call(),
    "a mode": lambda: _under(BytesWritten(), call),
    "a profiler": lambda: _under(profile(activities=[ProfilerActivity.CPU]), call),
    "a subclass": lambda: call(lambda x: x.as_subclass(Subclass)),
    "a transform": lambda: torch.func.vmap(lambda _: (call(), torch.zeros(()))[1])(torch.zeros(1)),
    "tracing": by_tracing,
}


def _under(context: AbstractContextManager[Any], function: Callable[[], Any]) -> Any:
    with context:
        return function()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("observer", ["none", *OBSERVED])
def test_observers_see_operations(observer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for name in ("_WRITE_BY_HOST", "_ATTEND_BY_HOST", "_WRITE_AND_ATTEND_BY_HOST"):
        operation = getattr(registration, name)

        def watched(*args: Any, name: str = name, operation: Any = operation) -> Any:
            seen.append(name)
            return operation(*args)

        monkeypatch.setattr(registration, name, watched)
    with nullcontext() if observer == "gradients" else torch.no_grad():
        got = call() if observer == "none" else OBSERVED[observer]()
    assert len(seen) == (0 if observer == "none" else 3), seen
    if got.ndim > 1:
        row = torch.arange(16.0)
        assert_same(torch.Tensor(got)[0].flatten(), row, "attention")
        assert_same(torch.Tensor(got)[1].flatten(), 3 * row, "after a write")


def test_a_compiled_call_has_the_operations_in_its_graph() -> None:
    graphs = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        assert_same(torch.compile(call, backend=backend, fullgraph=True)(), call())
    called = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert sum("hf_fp8kv" in target for target in called) == 3, called
