"""A plugin of pytest: kernels run as Triton compiles them for sm_90, on the CPU, by ttsem.

`python -m pytest -p tests.helpers.ir tests/ops`, see `make kernels-ir`. Every launch is compiled to
Triton's intermediate code, which ttsem executes; an access outside of a tensor, and a number that
depends on which program came first, fail the test at the kernel's line. PyTorch and the tests
believe that there is a GPU.

Added to what ttsem 0.1.0 knows are codec.py's PTX, and the order that a counter gives: what a
program did before it counted (an atomic update that releases) is seen by a program that counts
later (and acquires). Threads of a program are not told apart: a barrier that is missing before the
count is not noticed.
"""

import collections
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ttsem.ops
from triton.compiler import ASTSource
from ttsem import harness, mlir, pidraces, sanitize, values
from ttsem.interp import Interp
from ttsem.ir_types import Op

from tests.helpers import ptx

COUNTS: collections.Counter[str] = collections.Counter()
_session = ExitStack()
_compiled: dict[str, str] = {}
# Parts of tests' names.
_LEFT_OUT = {
    "gigabytes": "ttsem copies all memory of a launch, several times",
    "test_a_compiled_step": "torch.compile needs a real GPU",
    "architectures[latent": "transformers' experts need a real GPU",
    "architectures[sinks": "transformers' experts need a real GPU",
}
_find_race = pidraces.find_race
_run_known_assembly = ttsem.ops.OPS["tt.elementwise_inline_asm"]
_to_integer = ttsem.ops.OPS["arith.fptosi"]


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before conftest.py asks whether there is a GPU."""
    mlir.enable_generic_printing()
    pidraces.find_race = find_race
    ttsem.ops.OPS["tt.elementwise_inline_asm"] = run_assembly
    ttsem.ops.OPS["arith.fptosi"] = to_integer
    harness._compile_asm = compile_once
    _session.enter_context(sanitize.session(90, "<pytest>", **_HOOKS))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what asks for more than kernels."""
    for item in items:
        for part, reason in _LEFT_OUT.items():
            if part in item.name:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Iterator[None]:
    """A GPU of few processors, so that grids are small; also inside of custom operations."""
    from hf_fp8kv.ops.triton import decode
    from hf_fp8kv.ops.triton.target import Target, assuming

    # Nothing is compiled as far as machine code, whose registers could be counted.
    decode.compiled_size = lambda *_, **__: None
    with assuming(Target("cuda", 90, 4)):
        return (yield)


def pytest_unconfigure() -> None:
    _session.close()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # of pytest-xdist
        session.config.workeroutput["launches"] = dict(COUNTS)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    COUNTS.update(getattr(node, "workeroutput", {}).get("launches", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    always = dict.fromkeys(("launches", "race", "oob_read", "oob_write", "poison", "not judged"), 0)
    always |= {"not searched for races": 0}
    found = ", ".join(f"{name}: {count}" for name, count in (always | COUNTS).items())
    terminalreporter.write_line(f"ttsem: {found}")


def _stop(why: Exception) -> None:
    COUNTS[why.fault.kind if isinstance(why, sanitize.KernelFault) else "not judged"] += 1


def _count(what: str) -> None:
    COUNTS[what] += 1


_HOOKS = {
    "on_stop": _stop,
    "on_launch": lambda _: _count("launches"),
    "on_unchecked": lambda: _count("not searched for races"),
}


def compile_once(fn: Any, args: Any, kwargs: Any, target: Any) -> dict[str, str]:
    """Return what is executed of a kernel's code; ttsem would compile to the end, and then drop it.

    `hf-fp8kv check --kernels` does that.
    """
    options, signature, constants, attributes = harness._specialize(fn, args, kwargs, target)
    source = ASTSource(fn, signature, constants, attributes)
    key = f"{source.hash()} {options}"
    if key not in _compiled:
        record = SimpleNamespace(fn=fn, args=args, kwargs=kwargs)
        _compiled[key] = harness._stage_text(record, "ttir", target)
    return {"ttir": _compiled[key]}


def run_assembly(interp: Interp, op: Op, args: list[Any]) -> list[Any]:
    """Return what codec.py's assembly makes of codes; other assembly is left to ttsem."""
    text = str(op.attrs["asm_string"]).replace("\\0A", "\n")
    if "prmt.b32 low" not in text:
        return _run_known_assembly(interp, op, args)
    codes = np.ascontiguousarray(args[0]).view(np.uint8).reshape(-1, 4).astype(np.int64)
    words = (codes << np.array([0, 8, 16, 24])).sum(1)
    halves = np.stack(ptx.evaluate(text, words), 1).astype(np.uint16)
    return [halves.view(np.float16).reshape(np.shape(args[0]))]


def to_integer(interp: Interp, op: Op, args: list[Any]) -> list[Any]:
    """Return integers, and refuse numbers that they do not hold: LLVM leaves the result open."""
    x = values.to_float(args[0], op.operand_types[0])
    limit = 2.0 ** (op.result_types[0].scalar.width - 1)
    if not ((x >= -limit) & (x < limit)).all():
        raise values.Poison("a float that the integer does not hold")
    return _to_integer(interp, op, args)


def find_race(log: list[Any] | None) -> pidraces.PidRace | None:
    """Return a pair of accesses whose order nothing fixes, or None; `log` is ttsem's."""
    if _find_race(log) is None:
        return None
    assert log is not None
    # Programs run one after the other: an agent's position is that of its first access.
    position: dict[Any, int] = {}
    count: dict[Any, tuple[int, int]] = {}  # when a program counted, and where
    for i, (agent, kind, op, addresses, *_) in enumerate(log):
        position.setdefault(agent, i)
        is_count = "sem = 4" in op and "scope = 2" not in op  # acq_rel, of more than one program
        if kind == "a" and is_count and len(addresses) == 1:
            # A second one is an access like any other.
            count.setdefault(agent, (i, int(addresses[0])))
    is_after = [e[0] in count and i > count[e[0]][0] for i, e in enumerate(log)]
    before = [e for e, after in zip(log, is_after, strict=True) if not after]
    after = [e for e, after in zip(log, is_after, strict=True) if after]

    def ordered(first: Any, second: Any) -> bool:
        same = first in count and count[first][1] == count[second][1]
        return same and position[first] < position[second]

    views = [before, after]
    for agent in {e[0] for e in after}:
        own = [e for e in after if e[0] == agent]
        views.append([*(e for e in before if not ordered(e[0], agent)), *own])
    return next((race for race in map(_find_race, views) if race is not None), None)
