"""Calls of the Triton backend with and without recordings: both must start the same.

    python -m tests.helpers.replays 300 0

makes so many random calls, from a seed. Each is made once as it comes, and so perhaps by a
recording, and once the long way; what reaches the launcher is compared. Before that, calls that
differ from a recorded one in one thing (replay_changes.py). Triton chooses kernels as on a GPU, but
what would be compiled is a number. The last line counts the calls of each operation that were made
by a recording. Only for a process of its own, without the interpreter.
"""

import itertools
import json
import random
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler
from triton.runtime import jit

from hf_fp8kv.formats import FORMATS
from hf_fp8kv.ops.pages import AttentionSpec, Pages, StoredSide
from hf_fp8kv.ops.triton import backend, replay, tuning
from hf_fp8kv.ops.triton.target import Target, assuming
from tests.helpers.blocks import in_blocks

# What the launcher was given since it was last looked at.
started: list[tuple[Any, ...]] = []
# The hook that it was to call, and what with.
entered: list[tuple[Any, Any]] = []
_numbers = itertools.count()


def _compile(src: Any, **_: Any) -> SimpleNamespace:
    """Stand in for Triton's compiler: a kernel is what it was asked to compile, and a number."""

    def run(*launch: Any) -> None:
        *grid, stream, function, metadata, data, enter, _exit = launch[:9]
        entered.append((enter, data))
        started.append((*grid, stream, function, metadata, _addresses(launch[9:])))

    return SimpleNamespace(
        run=run, function=f"{src.fn.__name__} {next(_numbers)}", packed_metadata="metadata",
        launch_metadata=lambda *_: None,
    )  # fmt: skip


def _addresses(x: Any) -> Any:
    """Return arguments as the launcher reads them: a tensor is its address."""
    if isinstance(x, torch.Tensor):
        return x.data_ptr()
    return tuple(map(_addresses, x)) if isinstance(x, tuple) else x


class Draw(random.Random):
    """Random choices from a seed, of which one is another one."""

    def __init__(self, seed: int, changed: int, instead: random.Random) -> None:
        super().__init__(seed)
        self.left, self.instead = changed, instead

    def choice(self, options: Any) -> Any:
        chosen = super().choice(options)
        self.left -= 1
        return self.instead.choice(options) if self.left == -1 else chosen


_RARELY = (False, False, False, True)


class Made(TorchDispatchMode):
    """Keep every tensor that a call allocates."""

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


def _named(x: Any, known: dict[int, str], made: list[torch.Tensor]) -> Any:
    """Return arguments with names for addresses, since those that a call allocates differ."""
    if isinstance(x, tuple):
        return tuple(_named(element, known, made) for element in x)
    if isinstance(x, int) and not isinstance(x, bool):
        for i, tensor in enumerate(made):
            if 0 <= x - tensor.data_ptr() < tensor.nbytes:
                return f"allocated {i} + {x - tensor.data_ptr()}"
        return known.get(x, x)
    return x


def view(draw: random.Random, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a tensor of some strides."""
    b, h, t, d = shape
    kind = draw.choice(["dense", "transposed", "fused"])
    if kind == "dense":
        return torch.zeros(shape, dtype=dtype)
    if kind == "transposed":
        return torch.zeros(b, t, h, d, dtype=dtype).transpose(1, 2)
    return torch.zeros(b, t, h, 3 * d, dtype=dtype)[..., d : 2 * d].transpose(1, 2)


def make_pages(draw: random.Random, batch: int) -> Pages:
    """Return pages of some kind."""
    heads, dims, size = (
        draw.choice([1, 2]),
        draw.choice([(64, 64), (64, 32)]),
        draw.choice([16, 64]),
    )
    count, columns = draw.choice([3, 8, 40]), draw.choice([1, 2, 16, 17])
    formats = draw.choice([("fp8_e4m3", "fp8_e4m3"), ("fp8_e3m4", "auto"), ("auto", "auto")])
    center = torch.zeros(batch, heads, dims[0]) if draw.choice(_RARELY) else None
    sides = []
    for fmt, dim, shape in zip(formats, dims, ((size, dims[0]), (dims[1], size)), strict=True):
        assert fmt == "auto" or fmt in FORMATS
        dtype = torch.bfloat16 if fmt == "auto" else torch.uint8
        static = torch.ones(heads, dim) if fmt != "auto" and draw.choice(_RARELY) else None
        codes = torch.zeros(count, heads, *shape, dtype=dtype)
        sides.append(StoredSide(codes, static, center, fmt, dim))
        center = None
    scales = torch.zeros(count, heads, size, 2, dtype=torch.bfloat16)
    rows = torch.zeros(batch, columns + draw.choice([0, 3]), dtype=torch.int32)
    pages = Pages(*sides, scales, rows[:, :columns])
    return in_blocks(pages) if draw.choice(_RARELY) else pages


def make_write(draw: random.Random) -> tuple[Any, ...]:
    """Return arguments of `backend.write`."""
    batch, tokens = draw.choice([1, 2, 16]), draw.choice([1, 1, 1, 2, 16, 40])
    pages = make_pages(draw, batch)
    dtype = draw.choice([torch.bfloat16, torch.float16])
    heads, (k_dim, v_dim) = pages.heads, (pages.k.head_dim, pages.v.head_dim)
    key = view(draw, batch, heads, tokens, k_dim, dtype=dtype)
    value = view(draw, batch, heads, tokens, v_dim, dtype=dtype)
    lengths = torch.zeros(batch, dtype=torch.int32)
    return pages, key, value, lengths, draw.choice([None, 1, 16, 1000])


def make_attend(draw: random.Random) -> tuple[Any, ...]:
    """Return arguments of `backend.attend`."""
    batch, tokens = draw.choice([1, 2]), draw.choice([1, 1, 1, 2, 20])
    pages = make_pages(draw, batch)
    latent = pages.heads == 1 and pages.k.center is None and draw.choice([False, True])
    dim = pages.k.head_dim + (pages.v.head_dim if latent else 0)
    query = view(draw, batch, 4 * pages.heads, tokens, dim)
    start = draw.choice([0, 0, 16, 33])
    stop = start + draw.choice([1, 16, 200, 1001])
    mask = bounds = None
    if draw.choice(_RARELY):
        columns = torch.zeros(draw.choice([1, batch]), 1, 1, stop, dtype=torch.uint8)
        mask = columns[..., start:].to(draw.choice([torch.uint8, torch.bool]))
        if not draw.choice(_RARELY):
            bounds = torch.zeros(len(mask), draw.choice([2, 2, 4]), dtype=torch.int32)[:, :2]
    spec = AttentionSpec(
        scaling=draw.choice([0.125, 0.1]), causal=draw.choice([True, True, False]),
        window=draw.choice([0, 0, 24]), softcap=draw.choice([0.0, 0.0, 30.0]),
        sinks=torch.zeros(4 * pages.heads) if draw.choice(_RARELY) else None, mask=mask,
        bias=torch.zeros(1, 1, 1, stop - start) if draw.choice(_RARELY) else None,
        bounds=bounds, latent=latent,
    )  # fmt: skip
    plan = None
    if not draw.choice(_RARELY):
        length = draw.choice([None, None, 50])
        rows = backend.plan_rows(query.device, batch, pages.heads, length)
        plan = torch.zeros(rows, 4, dtype=torch.int32)
    lengths = torch.zeros(batch, dtype=torch.int32)
    new = None
    if draw.choice([False, True]):
        dims = pages.k.head_dim, pages.v.head_dim
        new = tuple(view(draw, batch, pages.heads, tokens, dim) for dim in dims)
    return query, pages, lengths, start, stop, spec, plan, new


def call(operation: Any, args: tuple[Any, ...]) -> list[Any]:
    """Return what a call starts, and what it returns, with names in place of addresses."""
    known: dict[int, str] = {}

    def name(x: Any, path: str) -> None:
        if isinstance(x, torch.Tensor):
            known.setdefault(x.data_ptr(), path)
            vars(x).pop("described", None)  # the room that goes with a plan is allocated anew
        elif isinstance(x, tuple):
            for i, element in enumerate(x):
                name(element, f"{path}.{i}")

    name(args, "")
    started.clear()
    with Made() as made:
        result = operation(*args)
    told = [_named(launch, known, made.tensors) for launch in started]
    sizes = [(x.shape, x.dtype) for x in made.tensors]
    if result is None:
        return [*told, sizes]
    return [*told, sizes, _named(result.data_ptr(), known, made.tensors), result.shape]


def pretend() -> "itertools.count[int]":
    """Have Triton take itself to be on a GPU, and count the launches that go through it."""
    target = GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_active_torch_device=lambda: torch.device("cpu"),
            get_current_device=lambda: 0,
            get_current_stream=lambda _device: 7,
        )
    )
    compiler.compile = sys.modules["triton.compiler"].compile = _compile
    by_jit = itertools.count()
    run = jit.JITFunction.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        next(by_jit)
        return run(self, *args, **kwargs)

    jit.JITFunction.run = counted
    return by_jit


def compare(
    operation: Any, args: tuple[Any, ...], by_jit: "itertools.count[int]", what: str
) -> bool:
    """Raise AssertionError if a call differs from the long way; return whether it was repeated."""
    replay._REPLAYS = False
    expected = call(operation, args)
    replay._REPLAYS = True
    before = next(by_jit)
    got = call(operation, args)
    assert got == expected, f"{what}:\n{got}\n{expected}"
    return next(by_jit) == before + 1


def main(count: int, seed: int) -> None:
    """Make the calls, and raise AssertionError at the first that differs."""
    by_jit = pretend()
    draw = random.Random(seed)
    replayed = {"write": 0, "attend": 0, "make_plan": 0}
    with assuming(Target.parse("sm_90")):
        for i in range(count):
            name = draw.choice(["write", "attend"])
            with tuning.override(stages=2) if draw.random() < 0.1 else nullcontext():
                # Few kinds, one of latents: the first call is recorded, and others that are alike.
                kind = Draw(draw.randrange(4, 8), draw.randrange(40), draw)
                args = (make_write if name == "write" else make_attend)(kind)
                args = make_step(draw, name, args)
                operation = getattr(backend, name)
                if compare(operation, args, by_jit, f"call {i}, {name}"):
                    replayed[name] += 1
                    last = operation, args
                if name == "attend" and args[6] is not None:
                    query, pages, lengths, start, _, spec, plan, _ = args
                    planned = plan, lengths, query.shape[2], spec.window, start, pages.heads
                    replayed["make_plan"] += compare(
                        backend.make_plan, planned, by_jit, f"plan {i}"
                    )
        check_hooks(*last)
    sys.stdout.write(json.dumps(replayed) + "\n")


def check_hooks(operation: Any, args: tuple[Any, ...]) -> None:
    """Raise AssertionError if a hook is not told of launches as Triton makes them."""
    told: list[Any] = []
    add, remove = (getattr(knobs.runtime.launch_enter_hook, x) for x in ("add", "remove"))
    for hooks in (1, 0):
        (add if hooks else remove)(told.append)
        started.clear()
        entered.clear()
        operation(*args)
        enter_hooks = [hook for hook, _ in entered]
        assert len(enter_hooks) == len(started) > 0
        assert all((hook is not None) == bool(hooks) for hook in enter_hooks), hooks


def move(draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same strides, mostly at a multiple of 16 bytes."""
    begin = draw.choice([0, 0, 0, 8, 1])
    reach = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1
    return torch.zeros(reach + begin, dtype=x.dtype)[begin:].as_strided(x.shape, x.stride())


def make_step(draw: random.Random, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments of the same call for another step: of a longer table, and further on."""
    columns = draw.choice([1, 5, 16])
    if name == "write":
        pages, key, value, lengths, limit = args
        key, value = move(draw, key), move(draw, value)
        if key.stride() == value.stride() and draw.random() < 0.2:
            value = key
        limit = draw.choice([limit, None, 1, 16, 999])
    else:
        query, pages, lengths, start, stop, spec, plan, new = args
        query = move(draw, query)
        new = new and tuple(move(draw, x) for x in new)
        if spec.mask is None and spec.bias is None:
            start, stop = draw.choice([(start, stop), (0, 1), (16, 48), (0, 4097)])
    table = torch.zeros(len(pages.table), columns + 1, dtype=torch.int32)[:, :columns]
    pages = pages._replace(table=draw.choice([pages.table, table]))
    if name == "write":
        return pages, key, value, lengths, limit
    return query, pages, lengths, start, stop, spec, plan, new


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
