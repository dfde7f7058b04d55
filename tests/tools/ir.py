"""A pytest plugin that runs kernels as Triton compiles them for sm_90, on the CPU, with ttsem.

`python -m pytest -p tests.tools.ir tests/ops`, see `make kernels-ir`. Every launch is compiled to
Triton's intermediate code, and ttsem executes that. An access outside a tensor, or a value that
depends on the order of programs, fails the test at the kernel's line. PyTorch and the tests behave
as if there were a GPU.

A launch is executed from the code that several compiler passes leave, each time on the same initial
memory, and all must leave the same bytes. Only products of float32 may be rounded differently,
because a pass splits them into three TF32 products. By default the passes are the last one of TTIR
and the last one of TTGIR, where layouts are chosen, loops are pipelined, copies are asynchronous
and shared memory is allocated. For some tests it is each pass that changes the code (`--stages
all`: for all tests). After that Triton generates LLVM code, which nothing here executes.

The plugin adds codec.py's PTX to ttsem 0.1.0.
"""

import collections
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import ttsem.ops
from torch.utils._pytree import tree_leaves
from triton._C.libtriton import ir as triton_ir
from triton.backends.nvidia import compiler
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from ttsem import harness, interp2, minimize, mlir, sanitize, values
from ttsem.interp import Interp
from ttsem.ir_types import Op

from tests.tools.kernels import ptx

ARCH = 90
COUNTS: collections.Counter[str] = collections.Counter()
_session = ExitStack()
_every_pass = False  # whether a test is executed from the code of every pass
_compiled: dict[str, list[tuple[str, str]]] = {}
_stages: list[tuple[str, str]] = []  # of the current compilation
# Parts of the names of tests to skip.
_LEFT_OUT = {
    "gigabytes": "ttsem copies all memory of a launch, several times",
    "-blocks]": "ttsem copies the tensors of a launch, and addresses name the originals",
    "page_size=6,": "the same: these pages are in blocks",
    "test_a_compiled_step": "torch.compile needs a real GPU",
    "test_requests_take": "continuous batching asks a real GPU for its memory",
    "architectures[latent": "transformers' experts need a real GPU",
    "architectures[sinks": "transformers' experts need a real GPU",
}
# Tests that are executed from every pass: each form of each kernel.
FROM_EVERY_PASS = {
    "test_16_bits_are_within_twice_pytorch_s_error[fp8_e4m3 dynamic bfloat16-decode]",
    "test_16_bits_are_within_twice_pytorch_s_error[fp8_e3m4 dynamic float16-extend]",
    "test_16_bits_are_within_twice_pytorch_s_error[fp8_e4m3 static bfloat16-decode]",
    "test_16_bits_are_within_twice_pytorch_s_error[auto bf16-decode]",
    "test_any_split_gives_the_same_answer[5-last]",
    "test_every_format_and_kind_of_scale[fp8_e3m4-centered-decode]",
    "test_every_format_and_kind_of_scale[fp8_e4m3-dynamic-tiles that pages cut]",
    "test_gathering_behind_a_window[k]",
    "test_gathering_behind_a_window[v]",
    "test_tokens_stored_by_the_launch_that_reads_them[rotated-last]",
}
_run_known_assembly = ttsem.ops.OPS["tt.elementwise_inline_asm"]
_to_integer = ttsem.ops.OPS["arith.fptosi"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stages", choices=("some", "all"), default="some")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Install the hooks before conftest.py looks for a GPU."""
    mlir.enable_generic_printing()
    ttsem.ops.OPS["tt.elementwise_inline_asm"] = run_assembly
    ttsem.ops.OPS["arith.fptosi"] = to_integer
    mlir.parse = functools.lru_cache(64)(mlir.parse)
    _session.enter_context(sanitize.session(ARCH, "<pytest>", **_HOOKS))
    run = JITFunction.run
    JITFunction.run = lambda *args, **kwargs: run_stages(run, *args, **kwargs)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need more than kernels."""
    for item in items:
        for part, reason in _LEFT_OUT.items():
            if part in item.name:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_setup(item: pytest.Item) -> None:
    global _every_pass
    _every_pass = item.name in FROM_EVERY_PASS or item.config.getoption("--stages") == "all"
    COUNTS["tests from every pass"] += _every_pass


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Iterator[None]:
    """Assume a GPU with four multiprocessors, so that grids are small. This reaches custom ops."""
    from hf_fp8kv.ops.triton import replay
    from hf_fp8kv.ops.triton.target import Target, assuming

    # Every launch goes through Triton, where it is intercepted.
    replay._REPLAYS = False
    torch.Tensor.pin_memory = lambda tensor: tensor
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


_HOOKS = {"on_stop": _stop, "on_unchecked": lambda: _count("not searched for races")}


class _BeforeLLVM(Exception):
    """End a compilation."""


class _PassManager:
    """Run passes one at a time, and keep the module that each pass leaves."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.passes: list[tuple[str, Callable[[Any], None]]] = []

    def enable_debug(self) -> bool:
        return False

    def run(self, module: Any, name: str) -> None:
        names = [pass_name for pass_name, _ in self.passes]
        for (pass_name, add), following in zip(self.passes, [*names[1:], None], strict=True):
            if pass_name == "to_llvmir":
                raise _BeforeLLVM
            manager = triton_ir.pass_manager(self.context)
            add(manager)
            manager.run(module, name)
            if _every_pass or following in (None, "to_llvmir"):
                _stages.append((f"{name}, {pass_name}", str(module)))


class _Recorder:
    """Stand in for a module of Triton's compiler that adds passes."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if isinstance(found, ModuleType):
            return _Recorder(found)
        if name == "pass_manager":
            return _PassManager
        if not name.startswith("add_"):
            return found

        def add(manager: _PassManager, *args: Any) -> None:
            manager.passes.append((name[4:], lambda real: found(real, *args)))

        return add


def compile_stages(fn: Any, args: Any, kwargs: Any) -> list[tuple[str, str]]:
    """Return the passes of a launch's compilation, and the module that each pass leaves."""
    target = harness.target_for("cpu", ARCH)
    options, signature, constants, attributes = harness._specialize(fn, args, kwargs, target)
    key = f"{ASTSource(fn, signature, constants, attributes).hash()} {options} {_every_pass}"
    if key not in _compiled:
        _stages.clear()
        with pytest.MonkeyPatch.context() as patched:
            for name in ("ir", "passes", "nvidia"):
                patched.setattr(compiler, name, _Recorder(getattr(compiler, name)))
            record = SimpleNamespace(fn=fn, args=args, kwargs=kwargs, fn_name=fn.__name__)
            with suppress(_BeforeLLVM):
                harness._stage_text(record, "llir", target)
        _compiled[key] = _changed(_stages) if _every_pass else [_stages[0], _stages[-1]]
        for stage in _compiled[key]:
            check_layouts(*stage)
    return _compiled[key]


def _changed(stages: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the stages that differ from the previous stage."""
    bare = [None, *(minimize.strip_locs(text) for _, text in stages)]
    return [stage for i, stage in enumerate(stages) if bare[i] != bare[i + 1]]


def check_layouts(name: str, text: str) -> None:
    """Raise if a thread does not hold its part of a tensor according to the layout."""
    violations, gaps, checked = interp2.check_module(mlir.parse(text), *interp2.launch_config(text))
    if violations:
        raise AssertionError(f"{name}: {violations[0]}") from violations[0]
    COUNTS["layouts"] += sum(checked.values())
    COUNTS["layouts not judged"] += len(gaps)


def run_stages(run: Callable[..., None], fn: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a launch from each of its stages on its initial memory. All must leave equal values."""
    if kwargs["warmup"]:
        return run(fn, *args, **kwargs)
    options = {name: x for name, x in kwargs.items() if name not in ("grid", "warmup")}
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    whole = {x.untyped_storage().data_ptr(): x for x in tensors}
    memory = [x.new_empty(0).set_(x.untyped_storage()) for x in whole.values()]
    begin = [x.clone() for x in memory]
    results: list[list[torch.Tensor]] = []
    COUNTS["launches"] += 1
    stages = compile_stages(fn, args, options)
    for name, text in stages:
        for now, then in zip(memory, begin, strict=True):
            now.copy_(then)
        harness._compile_asm = lambda *_, text=text: {"ttir": text}
        COUNTS["executed"] += 1
        try:
            run(fn, *args, **kwargs)
        except Exception as error:
            error.add_note(f"executed from {name}")
            raise
        results.append([x.clone() for x in memory])
        # "tf32x3": a pass splits a product into three.
        rounded = "inputPrecision = 1 " in stages[0][1]
        same = all(are_same(*pair, rounded) for pair in zip(results[0], results[-1], strict=True))
        assert same, f"{fn.__name__}: {name} leaves other numbers than {stages[0][0]}"
    return None


def are_same(first: torch.Tensor, last: torch.Tensor, rounded: bool) -> bool:
    """Return whether two tensors have the same bytes, or differ by rounding only."""
    if rounded and first.dtype == torch.float32:
        # Relative to the largest value, because a value may be a sum of larger ones.
        largest = max(first[first.isfinite()].abs().tolist(), default=0.0)
        return torch.allclose(first, last, rtol=0.0, atol=1e-5 * largest, equal_nan=True)
    return torch.equal(first.view(torch.uint8), last.view(torch.uint8))


def run_assembly(interp: Interp, op: Op, args: list[Any]) -> list[Any]:
    """Return the values that codec.py's assembly makes of codes. ttsem runs other assembly."""
    text = str(op.attrs["asm_string"]).replace("\\0A", "\n")
    if not text.strip('"'):
        return [args[0]]
    if "prmt.b32 low" not in text:
        return _run_known_assembly(interp, op, args)
    codes = np.ascontiguousarray(args[0]).view(np.uint8).reshape(-1, 4).astype(np.int64)
    words = (codes << np.array([0, 8, 16, 24])).sum(1)
    halves = np.stack(ptx.evaluate(text, words), 1).astype(np.uint16)
    return [halves.view(np.float16).reshape(np.shape(args[0]))]


def to_integer(interp: Interp, op: Op, args: list[Any]) -> list[Any]:
    """Return integers. Refuse values out of their range, for which LLVM defines no result."""
    x = values.to_float(args[0], op.operand_types[0])
    limit = 2.0 ** (op.result_types[0].scalar.width - 1)
    if not ((x >= -limit) & (x < limit)).all():
        raise values.Poison("a float that the integer does not hold")
    return _to_integer(interp, op, args)
