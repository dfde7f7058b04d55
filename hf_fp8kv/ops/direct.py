"""The operations as they are called where nothing of torch has to see them, and by its dispatcher.

Arguments and errors are those of registration.py.
"""

import torch
from torch import Tensor

from ..errors import OutOfPagesError
from . import reference
from .backends import load_backend, load_triton
from .pages import AttentionSpec, Pages
from .sizes import check_sizes
from .triton.target import target_of


def is_unobserved(x: Tensor) -> bool:
    """Return whether nothing would see an operation on `x`, so that its backend may be called.

    The dispatcher takes longer than all that a decode step needs besides. It is for compilers,
    modes and transforms of torch, tensors without values, subclasses, gradients and profilers.
    """
    return not (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or type(x) is not Tensor
        or x.is_meta
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch.autograd.profiler._is_profiler_enabled
    )


def write(
    pages: Pages, key: Tensor, value: Tensor, lengths: Tensor, limit: int | None, backend: str
) -> None:
    """Store new tokens."""
    check_sizes(pages, lengths, new=(key, value))
    _write(pages, key, value, lengths, limit, backend)


def _write(
    pages: Pages, key: Tensor, value: Tensor, lengths: Tensor, limit: int | None, backend: str
) -> None:
    if backend != "triton":
        check_limit(lengths, key.shape[2], limit)
        load_backend(backend).write(pages, key, value, lengths)
        return
    if _is_interpreted(lengths):
        _check_interpreted(pages, lengths, key.shape[2], limit)
    load_triton().write(pages, key, value, lengths, limit)


def check_limit(lengths: Tensor, tokens: int, limit: int | None) -> None:
    """Raise OutOfPagesError if new tokens pass the limit, where that is known without waiting."""
    if limit is not None and lengths.is_cpu and (most := int(lengths.max())) > limit:
        raise OutOfPagesError.of_tokens(limit, most - tokens, tokens)


def _is_interpreted(lengths: Tensor) -> bool:
    return lengths.is_cpu and target_of(lengths.device).interpreted


def _check_interpreted(pages: Pages, lengths: Tensor, tokens: int, limit: int | None) -> None:
    """Refuse, in the interpreter, what the other backends refuse."""
    check_limit(lengths, tokens, limit)
    reference.locate_all(pages, lengths, tokens)


def attend(
    query: Tensor,
    pages: Pages,
    lengths: Tensor,
    start: int,
    stop: int,
    spec: AttentionSpec,
    plan: Tensor | None,
    backend: str,
    new: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Store `new` keys and values, if there are any, and return attention over all of them."""
    check_sizes(pages, lengths, start, stop, query, spec, new)
    if backend == "triton":
        if new is not None and _is_interpreted(lengths):
            # Nothing is stored for a row of no sequence, of length 0.
            tokens = query.shape[2]
            _check_interpreted(pages, lengths.clamp(min=tokens), tokens, stop)
        return load_triton().attend(query, pages, lengths, start, stop, spec, plan, new)
    if new is not None:
        _write(pages, *new, lengths, stop, backend)
    return load_backend(backend).attend(query, pages, lengths, start, stop, spec)
