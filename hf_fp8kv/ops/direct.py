"""The operations as they are called where nothing of torch has to see them, and by its dispatcher.

Arguments and errors are those of registration.py.
"""

import torch
from torch import Tensor

from ..errors import OutOfPagesError
from .backends import load_backend, load_triton
from .pages import AttentionSpec, Pages
from .sizes import check_sizes


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
    check_limit(lengths, key.shape[2], limit)
    if backend == "triton":
        load_triton().write(pages, key, value, lengths, limit)
    else:
        load_backend(backend).write(pages, key, value, lengths)


def check_limit(lengths: Tensor, tokens: int, limit: int | None) -> None:
    """Raise OutOfPagesError if new tokens pass the limit, where that is known without waiting."""
    if limit is not None and lengths.is_cpu and (most := int(lengths.max())) > limit:
        raise OutOfPagesError.of_tokens(limit, most - tokens, tokens)


def attend(
    query: Tensor,
    pages: Pages,
    lengths: Tensor,
    start: int,
    stop: int,
    spec: AttentionSpec,
    plan: Tensor | None,
    backend: str,
) -> Tensor:
    """Return attention over stored tokens."""
    check_sizes(pages, lengths, start, stop, query, spec)
    if backend == "triton":
        return load_triton().attend(query, pages, lengths, start, stop, spec, plan)
    return load_backend(backend).attend(query, pages, lengths, start, stop, spec)
