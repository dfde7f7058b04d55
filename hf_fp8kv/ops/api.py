"""The operations on stored pages, for direct calls and for torch's dispatcher.

Dispatch takes longer than all other host work of a decode step. Operations only go through the
dispatcher if something observes them: torch's compilers, modes, transforms and profilers, fake and
meta tensors, tensor subclasses, or autograd.
"""

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ..errors import ConfigError, OutOfPagesError
from .backends import DETERMINISTIC_BACKENDS, DEVICE_CHECK_BACKENDS, SCHEDULE_BACKENDS, load_backend
from .pages import PAGE_FIELDS, AttentionSpec, Pages, StoredSide, flatten, unflatten
from .sizes import check_sizes

# Backend for fake and meta tensors. It checks sizes, and returns tensors without values.
_FAKE = "fake"
# Maximum number of query tokens per launch in `_attend_per_token`. Each launch makes a schedule.
_MAX_SEPARATE_TOKENS = 256


# A `torch.library.custom_op` would take six times as long to dispatch.
_LIBRARY = torch.library.Library("hf_fp8kv", "DEF")
# Functions of the operations for the dispatcher, by the dispatcher's names of the operations.
FUNCTIONS: dict[str, Callable[..., Any]] = {}
_Operation = TypeVar("_Operation", bound=Callable[..., Any])
_SIDE_TYPES = typing.get_type_hints(StoredSide).values()
_PAGE_HINTS = typing.get_type_hints(Pages)
# Types of the schema's arguments for the fields of the named tuples, in the order of `flatten`.
_RECORD_TYPES: dict[str, dict[str, Any]] = {
    "spec": typing.get_type_hints(AttentionSpec),
    "pages": dict(
        zip(
            PAGE_FIELDS,
            [*_SIDE_TYPES, *_SIDE_TYPES, *(_PAGE_HINTS[field] for field in Pages._fields[2:])],
            strict=True,
        )
    ),
}


def _register_operation(function: _Operation) -> _Operation:
    """Register an operation, and return a function that calls it, through the dispatcher if needed.

    The schema has each field of the named tuples as an argument. Operations whose backend does not
    check on the device read values on the host, which a CUDA graph cannot capture. torch requires a
    tag for such an operation, so it is registered twice.
    """
    name = function.__name__
    hints = typing.get_type_hints(function)
    result_type = hints.pop("return")
    argument_names = list(hints)
    observed_index = list(hints.values()).index(Tensor)
    parameters = inspect.signature(function).parameters.values()
    defaults = {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.default is not parameter.empty
    }
    plain_names = [field for field in argument_names if field not in _RECORD_TYPES]
    record_names = [record for record in _RECORD_TYPES if record in hints]
    types: dict[str, Any] = {field: hints[field] for field in plain_names}
    for record in record_names:
        types |= _RECORD_TYPES[record]

    def run(*args: Any, **overrides: Any) -> Any:
        arguments = dict(zip(plain_names, args, strict=False))
        if record_names:
            arguments["pages"] = unflatten(args[-len(PAGE_FIELDS) :])
        if "spec" in hints:
            arguments["spec"] = AttentionSpec(*args[len(plain_names) : -len(PAGE_FIELDS)])
        return function(**arguments | overrides)

    mutates = result_type is type(None)
    vars(run)["__signature__"] = inspect.Signature(
        [
            inspect.Parameter(field, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=type_)
            for field, type_ in types.items()
        ],
        return_annotation=None if mutates else result_type,
    )
    mutated_names = {"block", "schedule"} & types.keys() if mutates else ()
    schema = torch.library.infer_schema(run, mutates_args=mutated_names)
    for full_name, tags in ((name, ()), (f"{name}_by_host", torch.Tag.cudagraph_unsafe)):
        _LIBRARY.define(full_name + schema, tags=tags)
        _LIBRARY.impl(full_name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(
            f"hf_fp8kv::{full_name}", functools.partial(run, backend=_FAKE), lib=_LIBRARY
        )
        FUNCTIONS[full_name] = run
    device_op = getattr(torch.ops.hf_fp8kv, name).default
    host_op = getattr(torch.ops.hf_fp8kv, f"{name}_by_host").default

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_observed(args[observed_index]):
            return function(*args, **kwargs)
        arguments = defaults | dict(zip(argument_names, args, strict=False)) | kwargs
        flat_arguments = [arguments[field] for field in plain_names]
        for record in record_names:
            flat_arguments += flatten(arguments[record]) if record == "pages" else arguments[record]
        operation = device_op if arguments["backend"] in DEVICE_CHECK_BACKENDS else host_op
        return operation(*flat_arguments)

    return cast(_Operation, call)


@_register_operation
def write(
    pages: Pages,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    backend: str,
    limit: int | None = None,
) -> None:
    """Store new tokens. Token `t` of sequence `b` is stored at position `lengths[b] - T + t`.

    Args:
        pages: Pages to write. Codes and dynamic scales are overwritten.
        key: Keys, `[B, Hkv, T, Dk]`, any floating dtype, any strides.
        value: Values, `[B, Hkv, T, Dv]`, any floating dtype, any strides.
        lengths: Number of stored tokens, including the new tokens, `[B]`, int32.
        backend: One of `BACKENDS`, as returned by `choose_backend`.
        limit: Maximum number of tokens in a sequence. None means the capacity of its pages.

    Raises:
        OutOfPagesError: A token has no page or exceeds the limit. In this case nothing is stored.
            The "triton" backend never raises this error and skips such tokens.
    """
    check_sizes(pages, lengths, new_tokens=(key, value))
    if backend == _FAKE:
        return
    _check_limit(lengths, key.shape[2], limit)
    load_backend(backend).write(pages, key, value, lengths, limit)


@_register_operation
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
        pages: Pages to read.
        lengths: Number of stored tokens, `[B]`, int32.
        side: "k" or "v".
        start: First position.
        stop: Last position plus one.
        dtype: Dtype of the result.
        ragged: Whether some positions may be at or after `lengths[b]`. They are zero in the result.
        backend: One of `BACKENDS`.

    Returns:
        The dense tensor, `[B, Hkv, stop - start, D]`, contiguous. Positions in freed pages have
        arbitrary values.
    """
    if side not in ("k", "v"):
        raise ConfigError(f"side: expected 'k' or 'v', got {side!r}")
    check_sizes(pages, lengths, start, stop)
    if backend == _FAKE:
        dim = (pages.k if side == "k" else pages.v).head_dim
        shape = len(pages.table), pages.num_heads, stop - start, dim
        return lengths.new_empty(shape, dtype=dtype)
    return load_backend(backend).gather(  # type: ignore[no-any-return]
        pages, lengths, side, start, stop, dtype, ragged
    )


@_register_operation
def attend(
    query: Tensor,
    pages: Pages,
    lengths: Tensor,
    start: int,
    stop: int,
    spec: AttentionSpec,
    *,
    schedule: Tensor | None = None,
    backend: str,
) -> Tensor:
    """Compute softmax attention over stored positions `start` to `stop - 1`.

    Args:
        query: Queries, `[B, Hq, T, Dk]`, floating. `Hq` is a multiple of `Hkv`. Query `t` is at
            position `lengths[b] - T + t`.
        pages: The stored keys and values.
        lengths: Number of stored tokens, including the query tokens, `[B]`, int32.
        start: First position, which is the first column of `spec.mask` and `spec.bias`.
        stop: Last position plus one.
        spec: Scaling, causality, window, softcap, sinks, mask and bias.
        schedule: Schedule that `fill_schedule` wrote for these lengths, number of query tokens,
            window and start. None means that a backend makes a schedule if it needs one.
        backend: One of `BACKENDS`.

    Returns:
        The attention output, `[B, T, Hq, Dv]`, or `[B, T, Hq, Dk]` for latents, in the query's
        dtype. The output of a query without visible tokens is zero.
    """
    check_sizes(pages, lengths, start, stop, query, spec)
    if backend == _FAKE:
        batch, num_query_heads, num_tokens, _ = query.shape
        dim = (pages.k if spec.latent else pages.v).head_dim
        return query.new_empty((batch, num_tokens, num_query_heads, dim))
    mask = spec.mask
    if mask is not None and mask.is_floating_point():
        bias = mask if spec.bias is None else spec.bias.float() + mask
        spec = spec._replace(mask=None, bias=bias)
    if spec.deterministic and backend not in DETERMINISTIC_BACKENDS:
        return _attend_per_token(query, lengths, start, stop, backend, spec, pages)
    return load_backend(backend).attend(  # type: ignore[no-any-return]
        query, pages, lengths, start, stop, spec, schedule
    )


@_register_operation
def advance(lengths: Tensor, num_tokens: int, limit: int, backend: str) -> Tensor:
    """Return `lengths + num_tokens`, the lengths for a `write` of `num_tokens` tokens.

    Compiled code raises the errors of `write` here, because it may use the result before the write.
    """
    new_lengths = lengths + num_tokens
    if backend != _FAKE:
        _check_limit(new_lengths, num_tokens, limit)
    return new_lengths


def create_schedule(
    lengths: Tensor,
    num_tokens: int,
    window: int,
    start: int,
    num_heads: int,
    backend: str,
    length: int | None = None,
    num_query_rows: int = 1,
) -> Tensor | None:
    """Allocate a schedule, and call `fill_schedule`. Return None for a backend without schedules.

    Args:
        length: Number of tokens to read per sequence, if it is the same for all. If splitting would
            not be faster, the schedule then has no room for splits, and no kernel merges parts.
            None means that lengths differ.
        num_query_rows: Query heads per KV head times query tokens. With more rows a GPU runs fewer
            programs at once, and `attend` does not use a schedule with too many parts.
    """
    if backend not in SCHEDULE_BACKENDS:
        return None
    num_rows: int = load_backend(backend).count_schedule_rows(
        lengths.device, len(lengths), num_heads, length, num_query_rows
    )
    schedule = torch.empty((num_rows, 4), dtype=torch.int32, device=lengths.device)
    fill_schedule(schedule, lengths, num_tokens, window, start, num_heads, backend)
    return schedule


@_register_operation
def fill_schedule(
    schedule: Tensor,
    lengths: Tensor,
    num_tokens: int,
    window: int,
    start: int,
    num_heads: int,
    backend: str,
) -> None:
    """Assign tokens to programs for all layers of a step, on the device.

    Args:
        schedule: Schedule to overwrite, a result of `create_schedule` for these sequences and
            heads.
        lengths: Number of stored tokens, including this step's tokens, `[B]`, int32.
        num_tokens: Number of query tokens of this step, T.
        window: As in `AttentionSpec`.
        start: As in `attend`.
        num_heads: Number of KV heads.
        backend: "triton", the only backend with schedules.
    """
    if backend != _FAKE:
        load_backend(backend).fill_schedule(schedule, lengths, num_tokens, window, start, num_heads)


def bind(name: str, backend: str, *args: Any) -> Callable[..., Any]:
    """Return a function for calls of an operation that only differ from this call in values.

    `args` are checked arguments of the backend's operation. The function checks nothing, so the
    shapes, strides, dtypes, devices and pages of a call must equal `args`.
    """
    operation: Callable[..., Any] = getattr(load_backend(backend), name)
    bind_operation = getattr(operation, "bind", None)
    return operation if bind_operation is None else bind_operation(*args)


# Reading these once saves a fifth of the time of `is_observed`, which each layer calls twice.
_is_grad_enabled = torch.is_grad_enabled
_count_dispatch_modes = torch._C._len_torch_dispatch_stack
_get_functorch_level = torch._C._functorch.peek_interpreter_stack
_get_trace = torch._C._get_tracing_state
_profiler = torch.autograd.profiler


def is_observed(tensor: Tensor) -> bool:
    """Return whether something observes an operation on a tensor, which needs the dispatcher."""
    return bool(
        torch.compiler.is_dynamo_compiling()
        or _is_grad_enabled()
        or type(tensor) is not Tensor
        or tensor.is_meta
        or _count_dispatch_modes()
        or _get_functorch_level() is not None
        or _get_trace() is not None
        or _profiler._is_profiler_enabled
    )


def _attend_per_token(
    query: Tensor,
    lengths: Tensor,
    start: int,
    stop: int,
    backend: str,
    spec: AttentionSpec,
    pages: Pages,
) -> Tensor:
    """Compute attention with each query token as a separate sequence.

    The result of a token then only depends on the tokens it attends to. A "triton" program reads a
    single sequence, and the schedule does not split it. The shapes of "torch"'s products depend on
    the call, so it computes one sequence at a time, without later tokens.
    """
    batch, num_query_heads, num_tokens, dim = query.shape
    token_queries = query.transpose(1, 2).reshape(-1, num_query_heads, 1, dim)
    sequences = torch.arange(len(token_queries), device=lengths.device) // num_tokens
    offsets = torch.arange(1 - num_tokens, 1, dtype=lengths.dtype, device=lengths.device)
    token_lengths = (lengths[:, None] + offsets).flatten()

    def select_tokens(tensor: Tensor | None, chunk: slice, num_columns: int) -> Tensor | None:
        if tensor is None:
            return None
        token_rows = tensor.expand(batch, -1, num_tokens, -1).transpose(1, 2).flatten(0, 1)
        return token_rows[chunk, :, None, :num_columns]

    outputs = []
    host_lengths = None if backend in DEVICE_CHECK_BACKENDS else token_lengths.tolist()
    chunk_size = _MAX_SEPARATE_TOKENS if host_lengths is None else 1
    for chunk_start in range(0, len(token_queries), chunk_size):
        chunk = slice(chunk_start, chunk_start + chunk_size)
        chunk_stop = stop
        if host_lengths is not None:
            chunk_stop = min(stop, max(start + 1, host_lengths[chunk_start]))
        num_pages = -(-chunk_stop // pages.page_size)
        chunk_pages = pages._replace(table=pages.table[sequences[chunk], :num_pages])
        mask = select_tokens(spec.mask, chunk, chunk_stop - start)
        bias = select_tokens(spec.bias, chunk, chunk_stop - start)
        output = load_backend(backend).attend(
            token_queries[chunk],
            chunk_pages,
            token_lengths[chunk],
            start,
            chunk_stop,
            spec._replace(mask=mask, bias=bias, bounds=None),
        )
        outputs.append(output)
    return torch.cat(outputs).view(batch, num_tokens, num_query_heads, -1)


def _check_limit(lengths: Tensor, num_tokens: int, limit: int | None) -> None:
    """Raise OutOfPagesError if new tokens exceed the limit. Lengths on a GPU are not checked."""
    if limit is not None and lengths.is_cpu and (stop := int(lengths.max())) > limit:
        raise OutOfPagesError.for_tokens(limit, stop - num_tokens, num_tokens)
