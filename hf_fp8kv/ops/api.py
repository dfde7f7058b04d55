"""The operations on stored pages, for callers and for torch's dispatcher.

The dispatcher takes longer than all that a decode step needs besides. It is used only where
something observes operations: compilers, modes, transforms and profilers of torch, tensors without
values, subclasses, and gradients.
"""

import inspect
import itertools
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, OutOfPagesError
from .backends import load_backend
from .pages import PAGE_FIELDS, AttentionSpec, Pages, flatten, unflatten
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
        pages: Where to. Codes and dynamic scales are overwritten.
        key: `[B, Hkv, T, Dk]`, any floating dtype, any strides.
        value: `[B, Hkv, T, Dv]`, the same.
        lengths: `[B]`, int32, tokens stored, this call's included.
        backend: One of `BACKENDS`, as `choose_backend` returns it.
        limit: Most tokens of a sequence, by default as many as its pages hold.

    Raises:
        OutOfPagesError: A token has no page or would pass the limit. Nothing is stored. "triton"
            raises nothing, and does not store such tokens.
    """
    run = _write if is_unobserved(key) else _observed("write", backend)
    run(key, value, lengths, limit, backend, pages)


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
        pages: Where from.
        lengths: `[B]`, int32, tokens stored.
        side: "k" or "v".
        start: First position.
        stop: One past the last position.
        dtype: Dtype of the result.
        ragged: Whether positions from `lengths[b]` on occur. They are zero in the result.
        backend: One of `BACKENDS`.

    Returns:
        `[B, Hkv, stop - start, D]`, contiguous. Positions of released pages hold anything.
    """
    run = _gather if is_unobserved(lengths) else _observed("gather", backend)
    dense: Tensor = run(lengths, side, start, stop, dtype, ragged, backend, pages)
    return dense


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
        query: `[B, Hq, T, Dk]`, floating. `Hq` is a multiple of `Hkv`. Query `t` is the token at
            position `lengths[b] - T + t`.
        pages: The stored keys and values.
        lengths: `[B]`, int32, tokens stored, this call's included.
        start: Position of the first column of `spec.mask` and `spec.bias`.
        stop: One past the last position.
        spec: Scaling, causality, window, softcap, sinks, mask and bias.
        plan: What `make_plan` wrote for these lengths, number of query tokens, window and start.
            Without one, a backend that needs it makes it.
        backend: One of `BACKENDS`.

    Returns:
        `[B, T, Hq, Dv]`, of the query's dtype. `AttentionSpec` describes the result for latents.
        A query that sees nothing gives zero.
    """
    run = _attend if is_unobserved(query) else _observed("attend", backend)
    attended: Tensor = run(query, lengths, start, stop, plan, backend, spec, pages)
    return attended


def advance(lengths: Tensor, tokens: int, limit: int, backend: str) -> Tensor:
    """Return `lengths + tokens`, the lengths of a `write` of `tokens`.

    Compiled code raises here what `write` raises, because it may compute from the result before
    the write.
    """
    if backend == "triton" or not torch.compiler.is_compiling():
        return lengths + tokens
    after: Tensor = _observed("advance", backend)(lengths, tokens, limit, backend)
    return after


def plan_rows(
    backend: str,
    device: torch.device,
    batch: int,
    heads: int,
    length: int | None = None,
    rows: int = 1,
) -> int | None:
    """Return the rows of a plan for `batch` sequences and `heads` KV heads.

    Args:
        backend: One of `BACKENDS`.
        device: Device of the pages.
        batch: Number of sequences.
        heads: KV heads.
        length: Tokens that each sequence has to read, if all read the same. Where splitting would
            not pay, the plan has no room for it, and no kernel merges parts.
        rows: Query heads per KV head, times query tokens. With more rows a GPU holds fewer
            programs at once, and `attend` does not use a plan with too many parts.

    Returns:
        None for a backend without plans.
    """
    if backend != "triton":
        return None
    count: int = load_backend(backend).plan_rows(device, batch, heads, length, rows)
    return count


def make_plan(
    plan: Tensor, lengths: Tensor, tokens: int, window: int, start: int, heads: int, backend: str
) -> None:
    """Decide on the device which program reads which tokens, for all layers of a step.

    Args:
        plan: int32, `[plan_rows(...), 4]`, overwritten.
        lengths: `[B]`, int32, tokens stored, this step's included.
        tokens: Query tokens of this step, T.
        window: As in `AttentionSpec`.
        start: As in `attend`.
        heads: KV heads, as in `plan_rows`.
        backend: "triton", the only one with plans.
    """
    run = _plan if is_unobserved(lengths) else _observed("plan", backend)
    run(plan, lengths, tokens, window, start, heads, backend)


def is_unobserved(x: Tensor) -> bool:
    """Return whether an operation on `x` may call its backend without the dispatcher."""
    return not (
        torch.compiler.is_dynamo_compiling()
        or torch.is_grad_enabled()
        or type(x) is not Tensor
        or x.is_meta
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch.autograd.profiler._is_profiler_enabled
    )


# Sequences of a launch, at most, where query tokens are sequences: a plan is made for all at once.
_MOST_APART = 256

# -- operations: the backend and then records come last -------------------------------------------

# Stands for a backend where tensors have no values: sizes are compared, and results are empty.
_FAKE = "fake"


def _write(
    key: Tensor, value: Tensor, lengths: Tensor, limit: int | None, backend: str, pages: Pages
) -> None:
    check_sizes(pages, lengths, new=(key, value))
    if backend == _FAKE:
        return
    _check_limit(lengths, key.shape[2], limit)
    # Only "triton" does not know whether lengths pass the limit.
    of_device = (limit,) if backend == "triton" else ()
    load_backend(backend).write(pages, key, value, lengths, *of_device)


def _gather(
    lengths: Tensor, side: str, start: int, stop: int, dtype: torch.dtype, ragged: bool,
    backend: str, pages: Pages,
) -> Tensor:  # fmt: skip
    if side not in ("k", "v"):
        raise ConfigError(f"side: expected 'k' or 'v', got {side!r}")
    check_sizes(pages, lengths, start, stop)
    if backend == _FAKE:
        dim = (pages.k if side == "k" else pages.v).head_dim
        return lengths.new_empty((len(pages.table), pages.heads, stop - start, dim), dtype=dtype)
    stored = pages, lengths, side, start, stop, dtype, ragged
    dense: Tensor = load_backend(backend).gather(*stored)
    return dense


def _attend(
    query: Tensor, lengths: Tensor, start: int, stop: int, plan: Tensor | None, backend: str,
    spec: AttentionSpec, pages: Pages,
) -> Tensor:  # fmt: skip
    check_sizes(pages, lengths, start, stop, query, spec)
    if backend == _FAKE:
        batch, heads, tokens, _ = query.shape
        dim = (pages.k if spec.latent else pages.v).head_dim
        return query.new_empty((batch, tokens, heads, dim))
    mask, bias = spec.mask, spec.bias
    if mask is not None and mask.is_floating_point():
        spec = spec._replace(mask=None, bias=mask if bias is None else bias.float() + mask)
    if spec.deterministic and backend != "cpu":
        return _attend_apart(query, lengths, start, stop, backend, spec, pages)
    of_device = (plan,) if backend == "triton" else ()
    run = load_backend(backend).attend
    attended: Tensor = run(query, pages, lengths, start, stop, spec, *of_device)
    return attended


def _attend_apart(
    query: Tensor, lengths: Tensor, start: int, stop: int, backend: str, spec: AttentionSpec,
    pages: Pages,
) -> Tensor:  # fmt: skip
    """Attend with each query token as a sequence: a result then depends on what the token sees.

    A program of "triton" knows of one sequence, which no plan splits. "torch" has products whose
    shapes are those of a call, so it gets one sequence at a time, without what comes after it.
    """
    batch, heads, tokens, dim = query.shape
    rows = query.transpose(1, 2).reshape(-1, heads, 1, dim)
    steps = torch.arange(1 - tokens, 1, dtype=lengths.dtype, device=lengths.device)
    seen = (lengths[:, None] + steps).flatten()

    def apart(x: Tensor | None, place: slice, end: int) -> Tensor | None:
        if x is None:
            return None
        each = x.expand(batch, -1, tokens, -1).transpose(1, 2).flatten(0, 1)
        return each[place, :, None, : end - start]

    results, ends = [], None if backend == "triton" else seen.tolist()
    most = 1 if ends is not None else _MOST_APART
    for first in range(0, len(rows), most):
        place, end = slice(first, first + most), stop
        if ends is not None:
            end = min(stop, max(start + 1, ends[first]))
        sequences = torch.arange(first, min(first + most, len(rows)), device=lengths.device)
        sequences //= tokens
        center, columns = pages.k.center, -(-end // pages.page_size)
        own = pages._replace(
            k=pages.k._replace(center=None if center is None else center[sequences]),
            table=pages.table[sequences, :columns],
        )
        each = spec._replace(
            mask=apart(spec.mask, place, end), bias=apart(spec.bias, place, end), bounds=None
        )
        results.append(
            load_backend(backend).attend(rows[place], own, seen[place], start, end, each)
        )
    return torch.cat(results).view(batch, tokens, heads, -1)


def _plan(
    plan: Tensor, lengths: Tensor, tokens: int, window: int, start: int,
    heads: int, backend: str,
) -> None:  # fmt: skip
    if backend != _FAKE:
        load_backend(backend).make_plan(plan, lengths, tokens, window, start, heads)


def _advance(lengths: Tensor, tokens: int, limit: int, backend: str) -> Tensor:
    after = lengths + tokens
    if backend != _FAKE:
        _check_limit(after, tokens, limit)
    return after


def _check_limit(lengths: Tensor, tokens: int, limit: int | None) -> None:
    """Raise OutOfPagesError if new tokens pass the limit, where that is known without waiting."""
    if limit is not None and lengths.is_cpu and (most := int(lengths.max())) > limit:
        raise OutOfPagesError.of_tokens(limit, most - tokens, tokens)


# -- registration --------------------------------------------------------------------------------

# A library rather than `torch.library.custom_op`, whose dispatch takes six times as long.
_LIBRARY = torch.library.Library("hf_fp8kv", "DEF")
_BY_HOST = tuple(filter(None, [getattr(torch.Tag, "cudagraph_unsafe", None)]))
# By the name in the dispatcher, the function of each operation, and a call of it by the dispatcher.
RUN: dict[str, Callable[..., Any]] = {}
_CALLS: dict[str, Callable[..., Any]] = {}


def _observed(name: str, backend: str) -> Callable[..., Any]:
    """Return a call by the dispatcher.

    All backends but "triton" read values on the host. A CUDA graph cannot hold that, and torch
    wants such an operation to have a tag.
    """
    return _CALLS[name if backend == "triton" else f"{name}_by_host"]


def _register(name: str, function: Callable[..., Any], tags: tuple[torch.Tag, ...]) -> None:
    *hints, (_, result) = typing.get_type_hints(function).items()
    count = sum(not hasattr(kind, "_fields") for _, kind in hints)
    kinds = dict(leaf for hint in hints for leaf in _leaves(*hint))

    def run(*args: Any) -> Any:
        return function(*args[:count], *_join(args[count:]))

    def fake(*args: Any) -> Any:
        return function(*args[: count - 1], _FAKE, *_join(args[count:]))

    def call(*args: Any) -> Any:
        fields = [flatten(x) if isinstance(x, Pages) else x for x in args[count:]]
        return operation(*args[:count], *itertools.chain(*fields))

    parameters = [
        inspect.Parameter(leaf, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
        for leaf, kind in kinds.items()
    ]
    writes = result is type(None)
    signature = inspect.Signature(parameters, return_annotation=None if writes else result)
    vars(run)["__signature__"] = signature
    written = {"block", "plan"} & kinds.keys() if writes else ()
    schema = torch.library.infer_schema(run, mutates_args=written)
    _LIBRARY.define(name + schema, tags=tags)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hf_fp8kv::{name}", fake, lib=_LIBRARY)
    operation = getattr(torch.ops.hf_fp8kv, name).default
    RUN[name], _CALLS[name] = run, call


def _join(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Return the records that end the arguments: none, pages, or a spec and pages."""
    count = len(leaves) - len(PAGE_FIELDS)
    spec = [AttentionSpec(*leaves[:count])] if count > 0 else []
    return (*spec, unflatten(leaves[count:])) if leaves else ()


def _leaves(name: str, kind: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and type of each argument of a schema: `k_format` for `format` of `k`."""
    if not hasattr(kind, "_fields"):
        yield prefix + name, kind
        return
    hints = typing.get_type_hints(kind)
    inner = "" if kind in (Pages, AttentionSpec) else f"{prefix}{name}_"
    for field in kind._fields:
        yield from _leaves(field, hints[field], inner)


for _function in (_write, _gather, _attend, _plan, _advance):
    _name = _function.__name__[1:]
    _register(_name, _function, ())
    _register(f"{_name}_by_host", _function, _BY_HOST)
