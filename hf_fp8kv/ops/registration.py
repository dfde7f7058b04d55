"""The operations on stored pages, as torch's dispatcher knows them.

write, gather, attend, make_plan, ...  what callers use: flatten their arguments
run_write, run_gather, ...             what the dispatcher calls: put them together again, and
                                       hand them to the backend
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from . import direct
from .backends import load_backend, load_triton
from .flattening import Leaf, flatten, schema_of, unflatten, unflatten_spec
from .pages import AttentionSpec, Pages
from .sizes import check_sizes


def write(
    pages: Pages,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    backend: str,
    limit: int | None = None,
) -> None:
    """Store new tokens: token `t` of sequence `b` at position `lengths[b] - T + t`.

    Args:
        pages: where to. Codes and dynamic scales are overwritten.
        key: `[B, Hkv, T, Dk]`, any floating dtype, any strides.
        value: `[B, Hkv, T, Dv]`, the same.
        lengths: `[B]`, int32, tokens stored, this call's among them.
        backend: a key of `BACKENDS`, as `choose_backend` returns it.
        limit: the most tokens that a sequence may hold; None: as many as it has pages for.

    Raises:
        OutOfPagesError: on a CPU, when a token has no page or would pass the limit; nothing is
            stored. On other devices such tokens are not stored, and nothing is raised.
    """
    if direct.is_unobserved(key):
        direct.write(pages, key, value, lengths, limit, backend)
        return
    op = _WRITE if backend == "triton" else _WRITE_BY_HOST
    op(key, value, lengths, -1 if limit is None else limit, backend, *flatten(pages))


def gather(
    pages: Pages,
    lengths: Tensor,
    side: str,
    start: int,
    stop: int,
    dtype: torch.dtype,
    ragged: bool,
    backend: str,
) -> Tensor:
    """Return the dense keys or values of positions `start` to `stop - 1`.

    Args:
        pages: where from.
        lengths: `[B]`, int32, tokens stored.
        side: "k" or "v".
        start: first position.
        stop: one past the last position.
        dtype: of the result.
        ragged: whether positions from `lengths[b]` on occur; they are zero in the result.
        backend: a key of `BACKENDS`.

    Returns:
        `[B, Hkv, stop - start, D]`, contiguous. Positions of released pages hold anything.
    """
    op = _GATHER if backend == "triton" else _GATHER_BY_HOST
    return op(lengths, side, start, stop, dtype, ragged, backend, *flatten(pages))


def attend(
    query: Tensor,
    pages: Pages,
    lengths: Tensor,
    start: int,
    stop: int,
    spec: AttentionSpec,
    *,
    plan: Tensor | None = None,
    backend: str,
) -> Tensor:
    """Return softmax attention over stored positions `start` to `stop - 1`.

    Args:
        query: `[B, Hq, T, Dk]`, floating; `Hq` is a multiple of `Hkv`. Query `t` is the token at
            position `lengths[b] - T + t`.
        pages: the stored keys and values.
        lengths: `[B]`, int32, tokens stored, this call's among them.
        start: the first position that a column of `spec.mask` and `spec.bias` stands for.
        stop: one past the last.
        spec: scaling, causality, window, softcap, sinks, mask and bias.
        plan: what `make_plan` wrote for these lengths, number of query tokens, window and start;
            None: it is made here, if the backend needs one.
        backend: a key of `BACKENDS`.

    Returns:
        `[B, T, Hq, Dv]`, of the query's dtype; of latents (`spec.latent`), see `AttentionSpec`. A
        query that sees nothing gives zero.
    """
    if direct.is_unobserved(query):
        return direct.attend(query, pages, lengths, start, stop, spec, plan, backend)
    op = _ATTEND if backend == "triton" else _ATTEND_BY_HOST
    return op(query, lengths, start, stop, plan, backend, *spec, *flatten(pages))


def advance(lengths: Tensor, tokens: int, limit: int, backend: str) -> Tensor:
    """Return `lengths + tokens`, what `write` is given for a call of `tokens`.

    Raises what `write` does. In compiled code already here, since what is computed from the result
    may be put before the write.
    """
    if backend == "triton" or not torch.compiler.is_compiling():
        return lengths + tokens
    return _ADVANCE_BY_HOST(lengths, tokens, limit)


def plan_rows(
    backend: str,
    device: torch.device,
    batch: int,
    heads: int,
    length: int | None = None,
    rows: int = 1,
) -> int | None:
    """Return how many rows a plan has for `batch` sequences and `heads` KV heads.

    `length`: what each sequence has to read, if it is known and the same for all; where splitting
    does not pay then, the plan has no room for it, and nothing is started to merge parts. `rows`:
    query heads per KV head, times query tokens: with more of them a GPU holds fewer programs at
    once, and a plan for too many is not used. None as the result: the backend works without plans.
    """
    if backend != "triton":
        return None
    return load_triton().plan_rows(device, batch, heads, length, rows)


def make_plan(
    plan: Tensor, lengths: Tensor, tokens: int, window: int, start: int, heads: int, backend: str
) -> None:
    """Decide on the device which program reads which tokens, for all layers of a step.

    Args:
        plan: int32, `[plan_rows(...), 4]`; overwritten.
        lengths: `[B]`, int32, tokens stored, this step's among them.
        tokens: query tokens of this step, T.
        window: as in `AttentionSpec`.
        start: as in `attend`.
        heads: KV heads, as in `plan_rows`.
        backend: one that has plans: "triton".
    """
    make = run_plan if direct.is_unobserved(lengths) else _PLAN
    make(plan, lengths, tokens, window, start, heads, backend)


# -- what the dispatcher calls -------------------------------------------------------------------


def run_write(
    key: Tensor, value: Tensor, lengths: Tensor, limit: int, backend: str, *leaves: Leaf
) -> None:
    """Write to the pages that `leaves` are; a limit below 0 is none."""
    direct.write(unflatten(leaves), key, value, lengths, None if limit < 0 else limit, backend)


def run_advance(lengths: Tensor, tokens: int, limit: int) -> Tensor:
    """Add, and look at the sum."""
    after = lengths + tokens
    direct.check_limit(after, tokens, limit)
    return after


def run_gather(
    lengths: Tensor, side: str, start: int, stop: int, dtype: torch.dtype, ragged: bool,
    backend: str, *leaves: Leaf,
) -> Tensor:  # fmt: skip
    """Gather from the pages that `leaves` are."""
    pages = unflatten(leaves)
    check_sizes(pages, lengths, start, stop)
    return load_backend(backend).gather(pages, lengths, side, start, stop, dtype, ragged)


def run_attend(
    query: Tensor, lengths: Tensor, start: int, stop: int, plan: Tensor | None, backend: str,
    *leaves: Leaf,
) -> Tensor:  # fmt: skip
    """Attend as the spec says that the leaves begin with, to the pages that follow it."""
    spec, pages = unflatten_spec(leaves)
    return direct.attend(query, pages, lengths, start, stop, spec, _forgetful(plan), backend)


def _forgetful(plan: Tensor | None) -> Tensor | None:
    """Return the plan as a tensor of its own: what is kept with it goes after the call.

    The CUDA graphs of torch.compile refuse memory that outlives a call and is no result of it.
    """
    return None if plan is None else plan.detach()


def run_plan(
    plan: Tensor, lengths: Tensor, tokens: int, window: int, start: int, heads: int, backend: str
) -> None:
    """Make a plan; only "triton" has them."""
    load_triton().make_plan(plan, lengths, tokens, window, start, heads)


# -- shapes, for the compiler --------------------------------------------------------------------


def _gather_shape(
    lengths: Tensor, side: str, start: int, stop: int, dtype: torch.dtype, ragged: bool,
    backend: str, *leaves: Leaf,
) -> Tensor:  # fmt: skip
    pages = unflatten(leaves)
    check_sizes(pages, lengths, start, stop)
    dim = (pages.k if side == "k" else pages.v).head_dim
    return lengths.new_empty((len(pages.table), pages.heads, stop - start, dim), dtype=dtype)


def _attend_shape(
    query: Tensor, lengths: Tensor, start: int, stop: int, plan: Tensor | None, backend: str,
    *leaves: Leaf,
) -> Tensor:  # fmt: skip
    spec, pages = unflatten_spec(leaves)
    check_sizes(pages, lengths, start, stop, query, spec)
    batch, heads, tokens, _dim = query.shape
    dim = (pages.k if spec.latent else pages.v).head_dim
    return query.new_empty((batch, tokens, heads, dim))


def _check_write(
    key: Tensor, value: Tensor, lengths: Tensor, limit: int, backend: str, *leaves: Leaf
) -> None:
    check_sizes(unflatten(leaves), lengths, new=(key, value))


def _advance_shape(lengths: Tensor, tokens: int, limit: int) -> Tensor:
    return torch.empty_like(lengths)


def _nothing(*_: object) -> None:
    pass


# -- registration --------------------------------------------------------------------------------

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
# A library rather than `torch.library.custom_op`: its dispatch costs a sixth, and these run once
# per layer and token.
_LIBRARY = torch.library.Library("hf_fp8kv", "DEF")
_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)


def _register(
    name: str,
    run: Callable[_Arguments, _Result],
    schema: str,
    shape: Callable[..., _Result],
    *,
    by_host: bool = False,
) -> Callable[_Arguments, _Result]:
    """Return the operation `name`, which calls `run`; `shape` makes its empty result.

    `by_host`: whether it looks at values on the host, as all backends but "triton" do: a CUDA
    graph cannot hold that, and torch asks for it to be said of an operation.
    """
    tags = (_UNSAFE,) if by_host and _UNSAFE is not None else ()
    _LIBRARY.define(name + schema, tags=tags)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hf_fp8kv::{name}", shape, lib=_LIBRARY)
    operation: Callable[_Arguments, _Result] = getattr(torch.ops.hf_fp8kv, name).default
    return operation


_PAGES = schema_of(Pages)
_WRITE_SCHEMA = (
    "(Tensor key, Tensor value, Tensor lengths, int limit, str backend, "
    f"{schema_of(Pages, written=True)}) -> ()"
)
_GATHER_SCHEMA = (
    "(Tensor lengths, str side, SymInt start, SymInt stop, ScalarType dtype, bool ragged, "
    f"str backend, {_PAGES}) -> Tensor"
)
_ATTEND_SCHEMA = (
    "(Tensor query, Tensor lengths, SymInt start, SymInt stop, Tensor? plan, str backend, "
    f"{schema_of(AttentionSpec)}, {_PAGES}) -> Tensor"
)
_PLAN_SCHEMA = (
    "(Tensor(a!) plan, Tensor lengths, SymInt tokens, int window, SymInt start, int heads, "
    "str backend) -> ()"
)
_WRITE = _register("write", run_write, _WRITE_SCHEMA, _check_write)
_WRITE_BY_HOST = _register("write_by_host", run_write, _WRITE_SCHEMA, _check_write, by_host=True)
_ADVANCE_BY_HOST = _register(
    "advance_by_host", run_advance, "(Tensor lengths, SymInt tokens, int limit) -> Tensor",
    _advance_shape, by_host=True,
)  # fmt: skip
_GATHER = _register("gather", run_gather, _GATHER_SCHEMA, _gather_shape)
_GATHER_BY_HOST = _register(
    "gather_by_host", run_gather, _GATHER_SCHEMA, _gather_shape, by_host=True
)
_ATTEND = _register("attend", run_attend, _ATTEND_SCHEMA, _attend_shape)
_ATTEND_BY_HOST = _register(
    "attend_by_host", run_attend, _ATTEND_SCHEMA, _attend_shape, by_host=True
)
_PLAN = _register("plan", run_plan, _PLAN_SCHEMA, _nothing)
