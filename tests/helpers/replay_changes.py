"""Calls of the Triton backend that differ from a recorded one in one thing: see replays.py.

    python -m tests.helpers.replay_changes

writes how many changes there are. Only for a process of its own, without the interpreter.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from triton import knobs

from hf_fp8kv.ops.pages import AttentionSpec, Pages, StoredSide
from hf_fp8kv.ops.triton import backend, replay, tuning
from hf_fp8kv.ops.triton.target import Target, assuming
from tests.helpers.blocks import in_blocks, in_one_tensor
from tests.helpers.replays import compare, pretend

BATCH, HEADS, QUERIES, DIM, SLOTS, COUNT, COLUMNS = 2, 2, 8, 64, 16, 9, 4
Args = tuple[Any, ...]
# Makes arguments of a call of those of another.
Change = Callable[[Args], Args]


def _tokens(heads: int, count: int = 1) -> torch.Tensor:
    return torch.zeros(BATCH, count, heads, DIM, dtype=torch.bfloat16).transpose(1, 2)


def make_pages() -> Pages:
    """Return pages in blocks, with every kind of tensor."""
    k = torch.zeros(COUNT, HEADS, SLOTS, DIM, dtype=torch.uint8)
    v = torch.zeros(COUNT, HEADS, DIM, SLOTS, dtype=torch.uint8)
    scales = torch.zeros(COUNT, HEADS, SLOTS, 2, dtype=torch.bfloat16)
    table = torch.zeros(BATCH, COLUMNS, dtype=torch.int32)
    center = torch.zeros(BATCH, HEADS, DIM)
    sides = (
        StoredSide(k, None, center, "fp8_e4m3", DIM),
        StoredSide(v, torch.ones(HEADS, DIM), None, "fp8_e4m3", DIM),
    )
    return in_blocks(Pages(*sides, scales, table))


def make_write() -> Args:
    """Return arguments of `backend.write`."""
    lengths = torch.zeros(BATCH, dtype=torch.int32)
    return make_pages(), _tokens(HEADS), _tokens(HEADS), lengths, 99


def make_attend() -> Args:
    """Return arguments of `backend.attend`."""
    mask = torch.zeros(BATCH, 1, 1, 48, dtype=torch.uint8)
    bounds = torch.zeros(BATCH, 2, dtype=torch.int32)
    sinks = torch.zeros(QUERIES)
    spec = AttentionSpec(0.125, True, softcap=9.0, sinks=sinks, mask=mask, bounds=bounds)
    lengths, new = torch.zeros(BATCH, dtype=torch.int32), (_tokens(HEADS), _tokens(HEADS))
    return _tokens(QUERIES), make_pages(), lengths, 0, 48, spec, make_plan(), new


def make_plan(rows: int | None = None) -> torch.Tensor:
    """Return a plan of as many rows as the GPU has places for, or of so many."""
    rows = rows or backend.plan_rows(torch.device("cpu"), BATCH, HEADS)
    return torch.zeros(rows, 4, dtype=torch.int32)


def map_tensors(args: Any, change: Callable[[torch.Tensor], torch.Tensor], at: int = -1) -> Any:
    """Return arguments with the tensor number `at` changed; -1: all of them."""
    left = [at]

    def visit(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            left[0] -= 1
            return change(x) if at < 0 or left[0] == -1 else x
        if isinstance(x, tuple):
            parts = [visit(element) for element in x]
            return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
        return x

    return visit(args)


def count_tensors(args: Args) -> int:
    """Return how many tensors there are in arguments."""
    found: list[torch.Tensor] = []
    map_tensors(args, lambda x: found.append(x) or x)
    return len(found)


def copied(x: torch.Tensor, begin: int = 0, stretch: int = 1) -> torch.Tensor:
    """Return a copy with the strides of `x`, times `stretch`, that begins `begin` numbers later."""
    strides = [stretch * stride for stride in x.stride()]
    reach = sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True)) + 1
    memory = torch.zeros(reach + begin + 16, dtype=x.dtype)
    first = memory.data_ptr() // x.element_size() % 16
    copy = memory[(16 - first) % 16 + begin :].as_strided(x.shape, strides)
    vars(copy).update({name: kept for name, kept in vars(x).items() if name == "blocks"})
    return copy


def _with_spec(**values: Any) -> Change:
    return lambda args: (*args[:5], args[5]._replace(**values), *args[6:])


def _with_pages(at: int, change: Callable[[Pages], Pages]) -> Change:
    return lambda args: (*args[:at], change(args[at]), *args[at + 1 :])


def _with(**places: Any) -> Change:
    """Change arguments by their place, called `_3` for the third."""
    by_place = {int(name[1:]): value for name, value in places.items()}
    return lambda args: tuple(by_place.get(i, x) for i, x in enumerate(args))


def _sides(**values: Any) -> Callable[[Pages], Pages]:
    return lambda pages: pages._replace(k=pages.k._replace(**values), v=pages.v._replace(**values))


def page_changes(at: int) -> dict[str, Change]:
    """Return changes of the pages, which are argument `at`."""
    changes: dict[str, Callable[[Pages], Pages]] = {
        "formats": _sides(format="fp8_e3m4"),
        "rotated": _sides(rotated=True),
        "rotated values": lambda p: p._replace(v=p.v._replace(rotated=True)),
        "no center": lambda p: p._replace(k=p.k._replace(center=None)),
        "a static scale": lambda p: p._replace(k=p.k._replace(static_scale=torch.ones(HEADS, DIM))),
        "dynamic scales": lambda p: p._replace(v=p.v._replace(static_scale=None)),
        "no blocks": in_one_tensor,
        "columns": lambda p: p._replace(table=p.table[:, :3]),
        "a wider table": lambda p: p._replace(table=torch.zeros(BATCH, 9, dtype=torch.int32)),
        "pages of 8": lambda p: p._replace(
            k=p.k._replace(codes=p.k.codes[:, :, :8]), v=p.v._replace(codes=p.v.codes[..., :8])
        ),
    }
    return {f"pages, {name}": _with_pages(at, change) for name, change in changes.items()}


def attend_changes() -> dict[str, Change]:
    """Return changes of a call of `attend`."""
    one = _tokens(HEADS)
    return {
        "scaling": _with_spec(scaling=0.2),
        "not causal": _with_spec(causal=False),
        "window": _with_spec(window=24),
        "softcap": _with_spec(softcap=8.0),
        "no sinks": _with_spec(sinks=None),
        "sinks of 16 bits": _with_spec(sinks=torch.zeros(QUERIES, dtype=torch.bfloat16)),
        "no mask": _with_spec(mask=None, bounds=None),
        "bool": _with_spec(mask=torch.zeros(BATCH, 1, 1, 48, dtype=torch.bool)),
        "a mask for all": _with_spec(
            mask=torch.zeros(1, 1, 1, 48, dtype=torch.uint8),
            bounds=torch.zeros(1, 2, dtype=torch.int32),
        ),
        "a complete mask": _with_spec(mask=torch.zeros(BATCH, 1, 1, 48)),
        "no bounds": _with_spec(bounds=None),
        "wider bounds": _with_spec(bounds=torch.zeros(BATCH, 4, dtype=torch.int32)[:, :2]),
        "bounds with gaps": _with_spec(bounds=torch.zeros(BATCH, 4, dtype=torch.int32)[:, ::2]),
        "a bias": _with_spec(bias=torch.zeros(1, 1, 1, 48)),
        "start": _with(_3=5),
        "stop": _with(_4=43),
        "no plan": _with(_6=None),
        "a plan for fewer parts": _with(_6=make_plan(20)),
        "a plan without splits": _with(_6=make_plan(BATCH + BATCH + 1)),
        "nothing new": _with(_7=None),
        "two tokens": _with(
            _0=_tokens(QUERIES, 2), _7=(_tokens(HEADS, 2), _tokens(HEADS, 2))
        ),
        "more query heads": lambda args: (
            _tokens(2 * QUERIES), *args[1:5], args[5]._replace(sinks=torch.zeros(2 * QUERIES)),
            *args[6:],
        ),
        "K and V at one address": _with(_7=(one, one)),
        "one sequence": lambda args: (
            args[0][:1], args[1]._replace(table=args[1].table[:1]), args[2][:1], *args[3:6],
            make_plan(30), tuple(x[:1] for x in args[7]),
        ),
    }  # fmt: skip


def write_changes() -> dict[str, Change]:
    """Return changes of a call of `write`."""
    one = _tokens(HEADS)
    return {
        "limit": _with(_4=7),
        "no limit": _with(_4=None),
        "two tokens": _with(_1=_tokens(HEADS, 2), _2=_tokens(HEADS, 2)),
        "many tokens": _with(_1=_tokens(HEADS, 40), _2=_tokens(HEADS, 40)),
        "K and V at one address": _with(_1=one, _2=one),
    }


# Changes of what is around a call.
CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "another GPU": lambda: assuming(Target.parse("sm_80")),
    "another size of it": lambda: assuming(Target("cuda", 90, 16)),
    "warps": lambda: tuning.override(warps=4),
    "tile": lambda: tuning.override(tile=32),
    "debug": lambda: _Setting("debug"),
}


class _Setting:
    """Triton's setting `name`, inside the `with` block."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.before = getattr(knobs.runtime, self.name)
        setattr(knobs.runtime, self.name, not self.before)

    def __exit__(self, *_: object) -> None:
        setattr(knobs.runtime, self.name, self.before)


def all_changes(args: Args, own: dict[str, Change], pages: int) -> Iterator[tuple[str, Args]]:
    """Yield arguments that differ from `args` in one thing, and in what."""
    yield "other addresses", map_tensors(args, copied)
    for i in range(count_tensors(args)):
        yield f"tensor {i}, another address", map_tensors(args, copied, i)
        yield f"tensor {i}, not aligned", map_tensors(args, lambda x: copied(x, 1), i)
    for name, change in {**page_changes(pages), **own}.items():
        yield name, change(args)
    for i, x in enumerate(args):
        # Queries, keys and values: alone, or a pair.
        if (isinstance(x, torch.Tensor) and x.ndim == 4) or type(x) is tuple:
            for what, change in TOKEN_CHANGES.items():
                changed = map_tensors(x, change)
                yield f"argument {i}, {what}", (*args[:i], changed, *args[i + 1 :])


TOKEN_CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float16": torch.Tensor.half,
    "with gaps": lambda x: copied(x, stretch=2),
    "a part of wider ones": lambda x: x.repeat(1, 1, 1, 2)[..., :DIM],
}


def check(
    name: str, first: Args, second: Args, what: str, by_jit: Any, around: Any = nullcontext
) -> None:
    """Raise AssertionError if one of two calls differs where the other was recorded before."""
    operation = getattr(backend, name)
    replay._recordings.clear()
    compare(operation, first, by_jit, f"{name} before {what}")
    with around():
        compare(operation, second, by_jit, f"{name} with {what}")
    compare(operation, first, by_jit, f"{name} after {what}")


def main() -> None:
    """Make each call after the other, both ways; raise AssertionError if one differs."""
    by_jit, seen = pretend(), 0
    cases = {
        "attend": (make_attend(), attend_changes(), 1),
        "write": (make_write(), write_changes(), 0),
    }
    with assuming(Target.parse("sm_90")):
        for name, (args, own, pages) in cases.items():
            operation = getattr(backend, name)
            compare(operation, args, by_jit, name)
            assert compare(operation, map_tensors(args, copied), by_jit, name), "not repeated"
            for what, changed in all_changes(args, own, pages):
                check(name, args, changed, what, by_jit)
                check(name, changed, args, f"all but {what}", by_jit)
                seen += 1
            for what, around in CONTEXTS.items():
                check(name, args, args, what, by_jit, around)
                seen += 1
    sys.stdout.write(f"{seen}\n")


if __name__ == "__main__":
    main()
