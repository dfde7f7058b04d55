"""`PagedKV`: the result of `Cache.update`, which looks like dense K or V and refers to the pages.

The attention function does not receive the cache, so K and V refer to the pages. A `PagedKV` is a
wrapper subclass with the shape, dtype and device of the dense tensor. Its inner tensors are the
pages, so `torch.compile` can trace it. `fp8_paged` reads the pages. Any other operation on a handle
gets the dense tensor from `ops.gather`.

A handle reads the current contents of the pages. It is not a snapshot.
"""

from typing import Any, ClassVar, Self

import torch
from torch.utils._pytree import tree_map

from .. import ops
from ..errors import ConfigError
from ..ops import Pages
from ..ops.pages import PAGE_FIELDS, flatten, unflatten
from ..utils.warn_once import warn_once


class LazyTensor(torch.Tensor):
    """A tensor whose values are computed when an operation uses it.

    The attributes in `FIELDS` determine the values. They are tensors and constants, because
    `torch.compile` can only read such attributes of a subclass.
    """

    FIELDS: ClassVar[tuple[str, ...]]
    WARNING: ClassVar[str] = ""  # logged before the first operation

    # With this line, reading `.shape` and `.dtype` is as cheap as on any tensor. (torch declares
    # these methods without types, so mypy reports incompatible overrides.)
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def wrap(cls, attributes: dict[str, Any], shape: Any, dtype: Any, device: Any) -> Self:
        """Return a wrapper with these attributes. The dictionary is not copied."""
        wrapper: Self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        wrapper.__dict__ = attributes
        return wrapper

    def dense(self) -> torch.Tensor:
        """Compute the dense tensor."""
        raise NotImplementedError

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        attributes = {name: getattr(self, name) for name in self.FIELDS}
        inner_names = [name for name in self.FIELDS if isinstance(attributes[name], torch.Tensor)]
        constants = tuple(
            (name, attributes[name]) for name in self.FIELDS if name not in inner_names
        )
        return inner_names, (constants, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, tensors: dict[str, torch.Tensor], context: tuple[Any, ...], size: Any, stride: Any
    ) -> Any:
        constants, dtype = context
        first_tensor = next(iter(tensors.values()))
        return cls.wrap(tensors | dict(constants), size, dtype, first_tensor.device)

    def _stable_hash_for_caching(self) -> str:
        inner_names, context = self.__tensor_flatten__()
        tensors = [vars(self)[name] for name in inner_names]
        layouts = [
            (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors
        ]
        return f"{self!r} {context} {layouts}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if cls.WARNING:
            warn_once(cls.WARNING)
        if func._schema.is_mutable and args and isinstance(args[0], LazyTensor):
            raise ConfigError(
                f"expected to read {args[0]}, got {func}, which writes into it. Write into a dense "
                "copy, which .clone() makes"
            )
        return func(*tree_map(densify, args), **tree_map(densify, kwargs or {}))

    # torch reads the memory of the dense tensor in these methods without calling an operation.
    # `numpy` returns a read-only array, because a write into it would be lost.
    def numpy(self, *, force: bool = False) -> Any:
        array = self.dense().numpy(force=force)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, *, copy: bool | None = None) -> Any:
        array = self.numpy() if dtype is None else self.numpy().astype(dtype)
        return array.copy() if copy else array

    def tolist(self) -> Any:
        return self.dense().tolist()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.dense().__dlpack__(**kwargs)

    def _refuse_address(self) -> Any:
        """Raise ConfigError, because a handle has no values in memory. torch returns 0."""
        raise ConfigError(
            f"expected an operation that reads {self}, got a call that needs its address. Pass a "
            "dense copy, which .clone() makes"
        )

    # `untyped_storage` stays, because torch.compile compares the storages of tensors.
    data_ptr = share_memory_ = _refuse_address

    def __setitem__(self, index: Any, value: Any) -> None:
        self.fill_(0)  # raises ConfigError, because a write to a view would be lost

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.dense()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)


class PagedKV(LazyTensor):
    """Handle on stored keys or values, which looks like a dense tensor `[B, Hkv, stop - start, D]`.

    `make_handles` creates handles, and documents the attributes. Attributes of the pages have the
    names in `PAGE_FIELDS`.
    """

    FIELDS = (
        *PAGE_FIELDS, "lengths", "schedule", "side", "start", "stop", "window", "is_ragged",
        "backend",
    )  # fmt: skip
    WARNING = (
        "the model or its attention uses dense keys and values, which are decoded from the pages "
        "in each step. Set attn_implementation='fp8_paged', which reads the pages if the model "
        "supports it (hf_fp8kv.check_model checks this)"
    )
    block: torch.Tensor
    k_center: torch.Tensor | None
    lengths: torch.Tensor
    schedule: torch.Tensor | None
    side: str
    start: int
    stop: int
    window: int
    is_ragged: bool
    backend: str
    pages: Pages | None = None  # set unless a compiler has flattened the handle

    def dense(self) -> torch.Tensor:
        """Decode the stored bytes to a contiguous tensor."""
        return ops.gather(
            get_pages(self),
            self.lengths,
            self.side,
            self.start,
            self.stop,
            self.dtype,
            self.is_ragged,
            self.backend,
        )


def get_pages(handle: PagedKV) -> Pages:
    """Return the pages of a handle. Both handles of a layer have the same pages."""
    if not torch.compiler.is_compiling() and handle.pages is not None:
        return handle.pages
    return unflatten([getattr(handle, name) for name in PAGE_FIELDS])


def densify(x: Any) -> Any:
    """Return the dense tensor of a `LazyTensor`, and any other object unchanged."""
    return x.dense() if isinstance(x, LazyTensor) else x


def make_handles(
    pages: Pages,
    lengths: torch.Tensor,
    schedule: torch.Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    start: int,
    stop: int,
    window: int,
    is_ragged: bool,
    backend: str,
) -> tuple[PagedKV, PagedKV]:
    """Return handles on stored K and V.

    Args:
        pages: The stored keys and values.
        lengths: Number of stored tokens, `[B]`, int32.
        schedule: Schedule that `ops.fill_schedule` wrote for these lengths, or None.
        dtypes: Dtypes of dense K and V.
        start: Position of the first column.
        stop: Position of the last column plus one.
        window: Size of the layer's sliding window, in tokens. 0 means no window.
        is_ragged: Whether there are columns past the last stored token, which are zero, as with
            `max_cache_len`.
        backend: One of `ops.BACKENDS`.
    """
    if pages.attributes is None:
        # All names are present, because a dictionary that must grow takes twice as long to copy.
        # The pages do not refer to themselves, so their memory is freed without a collection.
        fields = dict(zip(PAGE_FIELDS, flatten(pages), strict=True))
        pages.attributes = {"pages": None, **dict.fromkeys(PagedKV.FIELDS), **fields}
    attributes = {
        **pages.attributes,
        "pages": pages,
        "lengths": lengths,
        "schedule": schedule,
        "side": "k",
        "start": start,
        "stop": stop,
        "window": window,
        "is_ragged": is_ragged,
        "backend": backend,
    }
    device = pages.table.device
    shape = (pages.table.shape[0], pages.num_heads, stop - start)
    # This is `PagedKV.wrap` without a call.
    make = torch.Tensor._make_wrapper_subclass
    keys = make(PagedKV, (*shape, pages.k.head_dim), dtype=dtypes[0], device=device)
    keys.__dict__ = attributes
    values = make(PagedKV, (*shape, pages.v.head_dim), dtype=dtypes[1], device=device)
    values.__dict__ = {**attributes, "side": "v"}
    return keys, values


# Dynamo cannot trace `_make_wrapper_subclass`. AOTAutograd flattens the subclass.
torch._dynamo.allow_in_graph(make_handles)
