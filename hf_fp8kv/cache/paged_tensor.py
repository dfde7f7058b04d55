"""`PagedKV`: what `Cache.update` returns. It looks like dense K or V and carries the pages.

The attention function never receives the cache, so the pages have to travel on K and V themselves.
A `PagedKV` is a wrapper subclass: it has the shape, dtype and device of the dense tensor, and the
pages as inner tensors, so that `torch.compile` traces through it. `fp8_paged` takes the pages; any
other code that touches a handle gets the dense tensor, made on the spot by `ops.gather`.

A handle is a view of the pages as they are when it is read, not a snapshot.
"""

import logging
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map

from .. import ops
from ..errors import ConfigError
from ..ops import Pages
from ..ops.pages import PAGE_FIELDS, flatten, unflatten
from ..utils.warn_once import warn_once

logger = logging.getLogger(__name__)


class StandIn(torch.Tensor):
    """A tensor that is made when code uses it as a tensor.

    Until then it carries its `FIELDS`. They are plain attributes, tensors and constants, because
    that is what `torch.compile` can read from a subclass.
    """

    FIELDS: ClassVar[tuple[str, ...]]

    # `.shape` and `.dtype` then cost what they cost on any tensor. (torch declares these methods
    # without types, so mypy sees overrides that differ.)
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def wrap(cls, attributes: dict[str, Any], size: Any, dtype: Any, device: Any) -> Any:
        """Return a wrapper with these attributes; the dictionary becomes its own."""
        wrapper = torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        wrapper.__dict__ = attributes
        return wrapper

    def dense(self) -> torch.Tensor:
        """Return the tensor that this one looks like."""
        raise NotImplementedError

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        attributes = {name: getattr(self, name) for name in self.FIELDS}
        tensors = [name for name, x in attributes.items() if isinstance(x, torch.Tensor)]
        constants = tuple((name, x) for name, x in attributes.items() if name not in tensors)
        return tensors, (constants, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: tuple[Any, ...], size: Any, stride: Any
    ) -> Any:
        (constants, dtype), device = context, next(iter(inner.values())).device
        return cls.wrap(inner | dict(constants), size, dtype, device)

    def _stable_hash_for_caching(self) -> str:
        tensors, context = self.__tensor_flatten__()
        held = [vars(self)[name] for name in tensors]
        inner = [(x.shape, x.stride(), x.dtype, x.device) for x in held]
        return f"{self!r} {context} {inner}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], StandIn):
            raise ConfigError(
                f"expected to read {args[0]}, got {func}, which writes into it; write into a copy: "
                ".clone() makes a dense one"
            )
        return func(*tree_map(densify, args), **tree_map(densify, kwargs or {}))

    def __setitem__(self, index: Any, value: Any) -> None:
        self.fill_(0)  # refused, where a write into a view would be lost

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.dense()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)


class PagedKV(StandIn):
    """Stored keys or values that look like a dense `[B, Hkv, stop - start, D]` tensor.

    Made by `make_handles`, which says what each attribute is; those of the pages are called as in
    `PAGE_FIELDS`.
    """

    FIELDS = (
        *PAGE_FIELDS, "lengths", "plan", "side", "start", "stop", "window", "ragged", "backend",
    )  # fmt: skip
    block: torch.Tensor
    k_center: torch.Tensor | None
    lengths: torch.Tensor
    plan: torch.Tensor | None
    side: str
    start: int
    stop: int
    window: int
    ragged: bool
    backend: str
    pages: Pages | None = None  # as a whole, where no compiler took the handle apart

    def dense(self) -> torch.Tensor:
        """Return the numbers that the stored bytes stand for, contiguous."""
        return ops.gather(
            pages_of(self), self.lengths, self.side, self.start, self.stop, self.dtype,
            self.ragged, self.backend,
        )  # fmt: skip

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        warn_once(logger, _MADE_DENSE)
        return super().__torch_dispatch__(func, types, args, kwargs)


def pages_of(handle: PagedKV) -> Pages:
    """Return the pages behind a handle; both handles of a layer have the same."""
    if not torch.compiler.is_compiling() and handle.pages is not None:
        return handle.pages
    return unflatten([getattr(handle, name) for name in PAGE_FIELDS])


_MADE_DENSE = (
    "dense keys and values are made from the pages at each step, since a model or its attention "
    "asks for them; attn_implementation='fp8_paged' reads the pages where the model can "
    "(hf_fp8kv.check_model tells)"
)


def densify(x: Any) -> Any:
    """Return the tensor that `x` stands for, and anything else as it is."""
    return x.dense() if isinstance(x, StandIn) else x


def make_handles(
    pages: Pages,
    lengths: torch.Tensor,
    plan: torch.Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    start: int,
    stop: int,
    window: int,
    ragged: bool,
    backend: str,
) -> tuple[PagedKV, PagedKV]:
    """Return handles that look like K and like V.

    Args:
        lengths: `[B]`, int32, tokens stored.
        plan: what `ops.make_plan` wrote for these lengths, or None.
        dtypes: what dense K and V are made in.
        start: position of the first token that they stand for.
        stop: one past the position of their last column.
        window: the sliding window of the layer in tokens; 0: none.
        ragged: columns past the last stored token exist (`max_cache_len`); they read as zero.
        backend: one of `ops.BACKENDS`.
    """
    if pages.attributes is None:
        pages.attributes = dict(zip(PAGE_FIELDS, flatten(pages), strict=True))
    attributes = {
        **pages.attributes, "pages": pages, "lengths": lengths, "plan": plan, "side": "k",
        "start": start, "stop": stop, "window": window, "ragged": ragged, "backend": backend,
    }  # fmt: skip
    batch, device = pages.table.shape[0], pages.table.device
    size = (batch, pages.heads, stop - start)
    return (
        PagedKV.wrap(attributes, (*size, pages.k.head_dim), dtypes[0], device),
        PagedKV.wrap({**attributes, "side": "v"}, (*size, pages.v.head_dim), dtypes[1], device),
    )


# Dynamo cannot trace `_make_wrapper_subclass`; AOTAutograd takes the subclass apart.
torch._dynamo.allow_in_graph(make_handles)
