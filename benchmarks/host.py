"""Host suite: what a processor does for a decode step on a GPU, measured without one.

A step of the growing cache, as `generate()` runs it eagerly: `update`, then the attention function
"fp8_paged" with the backend "triton", at shapes of an 8B model. Kernels are compiled for a GPU by
Triton, and started by a driver that starts nothing: its launcher takes the arguments and returns.
So Triton's launcher in C and the driver's call are not in these numbers, nor are the calls of
torch that ask for the device and stream in use; tensors are in the processor's memory, and torch's
allocator is that of the processor.

It is measured in a process of its own: Triton takes the driver for that of the GPU from then on.
"""

import functools
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import Cache, DynamicCache

from hf_fp8kv.bench.contenders import AttentionLayer, Heads, make_config
from hf_fp8kv.bench.reporting import build_table, format_number, format_target
from hf_fp8kv.utils.environment import describe_run, make_environment

if TYPE_CHECKING:
    from rich.console import RenderableType

GPU = "sm_90"
# Layers of the stacks: one has all costs of a step, of 32 each has its share of them.
LAYERS = (1, 32)
# Microseconds that a layer of the larger stack may take.
TARGET = 30.0
HEADS: Heads = (32, 8, 128)
TOKENS = 1000
# DynamicCache computes for real: numbers so small that little else than calls is left.
TINY: Heads = (4, 2, 16)
TINY_TOKENS = 64
# Steps of all layers in a turn: few, since a turn that no one else disturbs is looked for.
_CALLS = 32

# Functions that a step calls, by part. Each is called again and again with the arguments of a step,
# while those of the other parts return what they did in the step: so it is timed without them.
PARTS: dict[str, tuple[str, ...]] = {
    "handles": ("cache.layer.PagedLayerBase._handles",),
    "operations": ("ops.write", "ops.attend", "ops.write_and_attend"),
    "arguments of write": ("ops.triton.backend.write",),
    "arguments of attend": ("ops.triton.backend.attend",),
    "launch of write": ("ops.triton.write.launch",),
    "launches of attend": ("ops.triton.decode.launch",),
}


def run_host_suite(
    *, turns: int = 200, progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Measure decode steps with a driver that starts nothing, and return rows for JSON.

    A number is the least of `turns` turns: what a busy machine adds is no part of it.

    Returns:
        `suite`, `date`, `command`, `versions`, `hardware`, `settings`, and `rows`: `cache`,
        `layers`, `part`, `value`, microseconds per layer, and `target` or None.

    Raises:
        RuntimeError: Triton is not installed, or does not compile here.
    """
    (progress or (lambda _message: None))(f"decode steps, kernels compiled for {GPU}")
    command = [sys.executable, "-m", "benchmarks.host", str(turns)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=make_environment()
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(f"a process ended with {done.returncode}: {lines[-1] if lines else ''}")
    return {
        **describe_run("host"),
        "settings": {
            "gpu": GPU, "heads": list(HEADS), "tokens": TOKENS, "batch": 1, "turns": turns,
        },
        "rows": json.loads(done.stdout.splitlines()[-1]),
    }  # fmt: skip


def format_table(result: dict[str, Any]) -> "RenderableType":
    """Return the rows of `run_host_suite` as a table for a terminal."""
    settings, heads = result["settings"], result["settings"]["heads"]
    columns: dict[str, Literal["left", "right"]] = {
        "layers": "left", "cache": "left", "part": "left", "µs per layer": "right",
        "target": "right",
    }  # fmt: skip
    cells = [
        (
            str(row["layers"]), row["cache"], row["part"], format_number(row["value"]),
            format_target(row["target"]),
        )
        for row in result["rows"]
    ]  # fmt: skip
    return build_table(
        columns,
        cells,
        grouped=True,
        title=f"host time of a decode step: {heads[0]} query heads, {heads[1]} key/value heads, "
        f"head size {heads[2]}, {settings['tokens']} tokens",
        caption=f"{result['hardware']['cpu']}, least of {settings['turns']} turns, kernels "
        f"compiled for {settings['gpu']}; Triton's launcher in C and the driver's call are not in "
        f"it; {result['date']}",
    )


# -- the process that measures -------------------------------------------------------------------


def make_driver() -> SimpleNamespace:
    """Return a driver for Triton that takes launches and starts nothing."""
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", int(GPU.removeprefix("sm_")), 32)
    utils = SimpleNamespace(
        get_device_properties=lambda _device: {"max_shared_mem": 1 << 20},
        # Module, function, registers, spills, and the most threads of a program.
        load_binary=lambda *_: (object(), object(), 128, 0, 1024),
    )
    return SimpleNamespace(
        get_current_target=lambda: target,
        get_active_torch_device=lambda: torch.device("cpu"),
        get_current_device=lambda: 0,
        get_current_stream=lambda _device: 0,
        launcher_cls=lambda _src, _metadata: _start_nothing,
        utils=utils,
    )


def _start_nothing(*_: Any) -> None:
    pass


class Stack:
    """Layers of a model at a length, and the decode step of all of them."""

    def __init__(
        self, cache: Cache, attention: str, heads: Heads, tokens: int, layers: int
    ) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.cache, self.attention = cache, ALL_ATTENTION_FUNCTIONS[attention]
        queries, kv_heads, dim = heads
        self.modules = [AttentionLayer(queries // kv_heads, i).eval() for i in range(layers)]
        # The strides that a projection and RoPE leave.
        self.query = torch.randn(1, 1, queries, dim, dtype=torch.bfloat16).transpose(1, 2)
        self.key = torch.randn(1, kv_heads, 1, dim, dtype=torch.bfloat16)
        self.value = torch.randn(1, 1, kv_heads, dim, dtype=torch.bfloat16).transpose(1, 2)
        self.scaling = dim**-0.5
        self.steps = _CALLS // layers
        stored = torch.zeros(1, kv_heads, tokens, dim, dtype=torch.bfloat16)
        for i in range(layers):
            cache.update(stored, stored, i)

    def step(self) -> None:
        """Run a step."""
        for module in self.modules:
            keys, values = self.cache.update(self.key, self.value, module.layer_idx)
            attend(self.attention, module, self.query, keys, values, self.scaling)

    def measure(self) -> float:
        """Return the microseconds of this thread per layer and step, of a turn."""
        began = time.thread_time()
        for _ in range(self.steps):
            self.step()
        seconds = time.thread_time() - began
        self.cache.crop(-self.steps)
        return 1e6 * seconds / _CALLS


def attend(
    attention: Callable[..., Any],
    module: torch.nn.Module,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
) -> None:
    """Call an attention function as models do."""
    attention(module, query, keys, values, None, dropout=0.0, scaling=scaling, sliding_window=None)


def make_stack(layers: int) -> Stack:
    """Return layers of the paged cache that take themselves, and their pages, to be on the GPU."""
    from hf_fp8kv.cache.cache import FP8PagedCache

    cache = FP8PagedCache(make_config(HEADS, layers), backend="torch")
    # Room for a page more at once: growing is not measured.
    stack = Stack(cache, "fp8_paged", HEADS, TOKENS, layers)
    for layer in cache.paged_layers:
        layer.backend = "triton"
        layer.pool.lay_out(in_blocks=True)
    return stack


def _find_owner(name: str) -> tuple[Any, str]:
    """Return the module or class that a function of `PARTS` belongs to, and its name there."""
    path, _, attribute = name.rpartition(".")
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            owner = importlib.import_module(".".join(("hf_fp8kv", *parts[:end])))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[end:], owner), attribute
    raise AttributeError(name)


@contextmanager
def _replaced(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace functions by name inside the `with` block."""
    before = {name: getattr(*_find_owner(name)) for name in functions}
    for name, function in functions.items():
        setattr(*_find_owner(name), function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(*_find_owner(name), function)


# The arguments of a call, and what it returned.
_Call = tuple[tuple[Any, ...], dict[str, Any], Any]


def _record_step(stack: Stack) -> dict[str, list[_Call]]:
    """Run a step, and return the calls of each function of `PARTS`."""
    calls: dict[str, list[_Call]] = {}

    def record(name: str) -> Callable[..., Any]:
        function = getattr(*_find_owner(name))

        def recorded(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            calls[name].append((args, kwargs, result))
            return result

        calls[name] = []
        return recorded

    with _replaced({name: record(name) for names in PARTS.values() for name in names}):
        stack.step()
    return calls


def measure_parts(stack: Stack) -> dict[str, float]:
    """Return the microseconds per layer and step of each part, of a turn."""
    calls = _record_step(stack)
    stack.cache.crop(-1)
    constant = {
        name: functools.partial(_return, made[0][2]) for name, made in calls.items() if made
    }
    taken = {}
    for part, names in PARTS.items():
        timed = [(getattr(*_find_owner(name)), *call[:2]) for name in names for call in calls[name]]
        with _replaced({name: stub for name, stub in constant.items() if name not in names}):
            began = time.thread_time()
            for _ in range(stack.steps):
                for function, args, kwargs in timed:
                    function(*args, **kwargs)
            seconds = time.thread_time() - began
        taken[part] = 1e6 * seconds / _CALLS
    return taken


def _return(result: Any, *_: Any, **__: Any) -> Any:
    return result


@torch.no_grad()
def measure(turns: int) -> list[dict[str, Any]]:
    """Return the rows of the suite; only for a process of its own."""
    import triton

    from hf_fp8kv.ops.triton.target import Target, assuming

    torch.set_num_threads(1)
    triton.runtime.driver.set_active(make_driver())
    dynamic = DynamicCache(config=make_config(TINY, max(LAYERS)))
    stock = Stack(dynamic, "sdpa", TINY, TINY_TOKENS, max(LAYERS))
    rows = []
    with assuming(Target.parse(GPU)):
        stacks = {layers: make_stack(layers) for layers in LAYERS}
        for layers, stack in stacks.items():
            stack.step()  # kernels are compiled before the measurement
            stack.cache.crop(-1)
            whole = min(stack.measure() for _ in range(turns))
            parts = [measure_parts(stack) for _ in range(turns)]
            least = {part: min(each[part] for each in parts) for part in PARTS}
            least["rest"] = whole - sum(least.values())
            target = TARGET if layers == max(LAYERS) else None
            rows.append(_row(PAGED, layers, "all", whole, target))
            rows += [_row(PAGED, layers, part, value) for part, value in least.items()]
    taken = min(stock.measure() for _ in range(turns))
    return [*rows, _row(STOCK, max(LAYERS), "all", taken)]


PAGED, STOCK = "FP8PagedCache", "DynamicCache + sdpa, tiny"


def _row(
    cache: str, layers: int, part: str, value: float, target: float | None = None
) -> dict[str, Any]:
    return {"cache": cache, "layers": layers, "part": part, "value": value, "target": target}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(int(sys.argv[1]))) + "\n")
