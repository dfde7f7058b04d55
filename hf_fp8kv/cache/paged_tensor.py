"""`PagedKV`: what `Cache.update` returns. It looks like dense K or V and carries the pages.

The attention function never receives the cache, so the pages have to travel on K and V themselves.
A `PagedKV` is a wrapper subclass: it has the shape, dtype and device of the dense tensor, and the
pages as inner tensors, so that `torch.compile` traces through it. `fp8_paged` takes the pages; any
other code that touches a handle gets the dense tensor, made on the spot by `ops.gather`.

A handle is a view of the pages as they are when it is read, not a snapshot.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from .. import ops
from ..errors import ConfigError
from ..ops import Pages
from ..ops.flattening import PAGE_FIELDS, flatten, unflatten
from ..utils.warn_once import warn_once

logger = logging.getLogger(__name__)


# What a handle carries besides its dtype: the fields of its pages, and these.
_OWN_FIELDS = ("lengths", "plan", "side", "start", "stop", "window", "ragged", "backend")
_FIELDS = (*PAGE_FIELDS, *_OWN_FIELDS)


class PagedKV(torch.Tensor):
    """Stored keys or values that look like a dense `[B, Hkv, stop - start, D]` tensor.

    Made by `make_handle`, which says what each attribute is; those of the pages are called as in
    `PAGE_FIELDS`. All are plain attributes, tensors and constants, because that is what
    `torch.compile` can read from a subclass.
    """

    k_codes: torch.Tensor
    k_center: torch.Tensor | None
    lengths: torch.Tensor
    plan: torch.Tensor | None
    side: str
    start: int
    stop: int
    window: int
    ragged: bool
    backend: str

    # `.shape` and `.dtype` then cost what they cost on any tensor. (torch declares these methods
    # without types, so mypy sees overrides that differ.)
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def dense(self) -> torch.Tensor:
        """Return the numbers that the stored bytes stand for, contiguous."""
        return ops.gather(
            pages_of(self), self.lengths, self.side, self.start, self.stop, self.dtype,
            self.ragged, self.backend,
        )  # fmt: skip

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        attributes = {name: getattr(self, name) for name in _FIELDS}
        tensors = [name for name, x in attributes.items() if isinstance(x, torch.Tensor)]
        constants = tuple((name, x) for name, x in attributes.items() if name not in tensors)
        return tensors, (constants, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: tuple[Any, ...], size: Any, stride: Any
    ) -> "PagedKV":
        constants, dtype = context
        return _wrap(inner | dict(constants), dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], PagedKV):
            raise ConfigError(
                f"expected to read stored keys or values, got {func}, which writes into them; "
                "write into a copy: .clone() makes a dense one"
            )
        warn_once(logger, _MADE_DENSE)
        return func(*tree_map(densify, args), **tree_map(densify, kwargs or {}))

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"PagedKV({self.side}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.dense()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)


def pages_of(handle: PagedKV) -> Pages:
    """Return the pages behind a handle; both handles of a layer have the same."""
    if not torch.compiler.is_compiling() and (pages := vars(handle).get("pages")) is not None:
        return pages  # type: ignore[no-any-return]
    return unflatten(tuple([getattr(handle, name) for name in PAGE_FIELDS]))


def _wrap(attributes: dict[str, Any], dtype: torch.dtype) -> PagedKV:
    """Return a handle with these attributes, `_FIELDS`; the dictionary becomes its own."""
    table, tokens = attributes["table"], attributes["stop"] - attributes["start"]
    heads, dim = attributes["k_codes"].shape[1], attributes[f"{attributes['side']}_head_dim"]
    handle = torch.Tensor._make_wrapper_subclass(
        PagedKV, (table.shape[0], heads, tokens, dim), dtype=dtype, device=table.device
    )
    handle.__dict__ = attributes
    return handle


_MADE_DENSE = (
    "dense keys and values are made from the pages at each step, since a model or its attention "
    "asks for them; attn_implementation='fp8_paged' reads the pages where the model can "
    "(hf_fp8kv.check_model tells)"
)


def densify(x: Any) -> Any:
    """Return the dense tensor for a handle, and anything else as it is."""
    return x.dense() if isinstance(x, PagedKV) else x


# Dynamo cannot trace `_make_wrapper_subclass`; AOTAutograd takes the subclass apart. (torch
# declares the decorator without types.)
@torch._dynamo.allow_in_graph  # type: ignore[untyped-decorator]
def make_handle(
    pages: Pages,
    lengths: torch.Tensor,
    plan: torch.Tensor | None,
    side: str,
    dtype: torch.dtype,
    start: int,
    stop: int,
    window: int,
    ragged: bool,
    backend: str,
) -> PagedKV:
    """Return a handle.

    Args:
        lengths: `[B]`, int32, tokens stored.
        plan: what `ops.make_plan` wrote for these lengths, or None.
        side: "k" or "v": what the handle looks like.
        dtype: what the dense tensor is made in.
        start: position of the first token that it stands for.
        stop: one past the position of its last column.
        window: the sliding window of the layer in tokens; 0: none.
        ragged: columns past the last stored token exist (`max_cache_len`); they read as zero.
        backend: a key of `ops.BACKENDS`.
    """
    own = (lengths, plan, side, start, stop, window, ragged, backend)
    return _wrap(dict(zip(_FIELDS, (*flatten(pages), *own), strict=True)), dtype)


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
    """Return the handles that `make_handle` makes of K and of V, in less time.

    Not for compiled regions: the pages are an attribute too, as they are. `dtypes` are of K and of
    V; the others are those of `make_handle`.
    """
    known = vars(pages)
    if "attributes" not in known:
        known["attributes"] = dict(zip(PAGE_FIELDS, flatten(pages), strict=True))
    attributes = {
        **known["attributes"], "pages": pages, "lengths": lengths, "plan": plan, "side": "k",
        "start": start, "stop": stop, "window": window, "ragged": ragged, "backend": backend,
    }  # fmt: skip
    return _wrap(attributes, dtypes[0]), _wrap({**attributes, "side": "v"}, dtypes[1])
