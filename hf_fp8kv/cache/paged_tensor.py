"""`PagedKV`: what `Cache.update` returns. It looks like dense K or V and carries the pages.

The attention function never receives the cache, so the pages have to travel on K and V themselves.
A `PagedKV` is a wrapper subclass: it has the shape, dtype and device of the dense tensor, and the
pages as inner tensors, so that `torch.compile` traces through it. `fp8_paged` takes the pages; any
other code that touches a handle gets the dense tensor, made on the spot by `ops.gather`.

A handle is a view of the pages as they are when it is read, not a snapshot.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from .. import ops
from ..errors import ConfigError
from ..ops import Pages
from ..utils.warn_once import warn_once

__all__ = ["PagedKV", "densify", "make_handle", "pages_of"]

logger = logging.getLogger(__name__)


_TENSORS = (*Pages._fields[:8], "lengths", "plan")
_CONSTANTS = (
    "k_format",
    "v_format",
    "side",
    "start",
    "stop",
    "dtype",
    "window",
    "ragged",
    "backend",
)


class PagedKV(torch.Tensor):
    """Stored keys or values that look like a dense `[B, Hkv, stop - start, D]` tensor.

    Made by `make_handle`, which says what each attribute is. They are plain attributes, each a
    tensor or a constant, because that is what `torch.compile` can read from a subclass.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None
    v_scales: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    k_center: torch.Tensor | None
    table: torch.Tensor
    lengths: torch.Tensor
    plan: torch.Tensor | None
    k_format: str
    v_format: str
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
        """Returns the numbers that the stored bytes stand for, contiguous."""
        return ops.gather(
            pages_of(self), self.lengths, self.side, self.start, self.stop, self.dtype,
            self.ragged, self.backend,
        )  # fmt: skip

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        present = [name for name in _TENSORS if getattr(self, name) is not None]
        return present, tuple(getattr(self, name) for name in _CONSTANTS)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: tuple[Any, ...], size: Any, stride: Any
    ) -> "PagedKV":
        return _wrap([inner.get(name) for name in _TENSORS], context)

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
    """Returns the pages behind a handle; both handles of a layer have the same."""
    return Pages(
        handle.k, handle.v, handle.k_scales, handle.v_scales, handle.k_scale, handle.v_scale,
        handle.k_center, handle.table, handle.k_format, handle.v_format,
    )  # fmt: skip


def _wrap(tensors: Sequence[torch.Tensor | None], constants: Sequence[Any]) -> PagedKV:
    attributes = dict(zip((*_TENSORS, *_CONSTANTS), (*tensors, *constants), strict=True))
    pool, table = attributes[attributes["side"]], attributes["table"]
    dim = pool.shape[3 if attributes["side"] == "k" else 2]
    shape = (table.shape[0], pool.shape[1], attributes["stop"] - attributes["start"], dim)
    handle = torch.Tensor._make_wrapper_subclass(
        PagedKV, shape, dtype=attributes.pop("dtype"), device=table.device
    )
    vars(handle).update(attributes)
    return handle


_MADE_DENSE = (
    "dense keys and values are made from the pages at each step, since a model or its attention "
    "asks for them; attn_implementation='fp8_paged' reads the pages where the model can "
    "(hf_fp8kv.check_model tells)"
)


def densify(x: Any) -> Any:
    """Returns the dense tensor for a handle, and anything else as it is."""
    return x.dense() if isinstance(x, PagedKV) else x


# Dynamo cannot trace `_make_wrapper_subclass`; AOTAutograd takes the subclass apart. (torch
# declares the decorator without types.)
@torch._dynamo.allow_in_graph  # type: ignore[untyped-decorator]
def make_handle(
    k: torch.Tensor,
    v: torch.Tensor,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    k_center: torch.Tensor | None,
    table: torch.Tensor,
    lengths: torch.Tensor,
    plan: torch.Tensor | None,
    k_format: str,
    v_format: str,
    side: str,
    start: int,
    stop: int,
    dtype: torch.dtype,
    window: int,
    ragged: bool,
    backend: str,
) -> PagedKV:
    """Returns a handle; flat arguments, since this call is a node of a traced graph.

    Args:
        k, v, k_scales, v_scales, k_scale, v_scale, k_center, table, k_format, v_format: as in
            `ops.Pages`.
        lengths: `[B]`, int32, tokens stored.
        plan: what `ops.make_plan` wrote for these lengths, or None.
        side: "k" or "v": what the handle looks like.
        start: position of the first token that it stands for.
        stop: one past the position of its last column.
        dtype: what the dense tensor is made in.
        window: the sliding window of the layer in tokens; 0: none.
        ragged: columns past the last stored token exist (the static form); they read as zero.
        backend: a key of `ops.BACKENDS`.
    """
    tensors = (k, v, k_scales, v_scales, k_scale, v_scale, k_center, table, lengths, plan)
    return _wrap(tensors, (k_format, v_format, side, start, stop, dtype, window, ragged, backend))
