"""`DecodeRecord`: what the decode steps of a layer have in common.

Nearly all host time of a decode step is spent on checks and lookups whose results are the same in
each step. `repeat` leaves them out if the new token of each sequence looks like the one before
(shapes, strides, dtypes, device) and goes into the same pages. Anything else takes the long path,
`FP8PagedLayer.update`, which then makes a new record.

A record is an attribute of the `Pages`, so it is dropped with them. It does not refer to them.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import ops
from ..ops import api
from ..paging.offloading import OffloadBlocks
from .paged_tensor import PagedKV

if TYPE_CHECKING:
    from .layer import FP8PagedLayer
    from .layer_store import LayerStore


class DecodeRecord:
    """A decode step of one layer.

    Attributes:
        layout: Result of `describe_tokens`.
        write: `ops.write` for tokens of this layout and the pages of the record.
        num_rows: Number of query rows per KV head.
        attributes: Attributes of the handle on K. Those that differ between steps are replaced.
        attention: The call of the attention function that read the handles, or None.
    """

    def __init__(
        self, key: Tensor, value: Tensor, num_rows: int, handles: tuple[PagedKV, PagedKV]
    ) -> None:
        pages, lengths, self.backend = handles[0].pages, handles[0].lengths, handles[0].backend
        self.layout, self.num_rows = describe_tokens(key, value), num_rows
        self.write: Callable[..., None] = ops.bind(
            "write", self.backend, pages, key, value, lengths, None
        )
        self.attributes = {**vars(handles[0]), "pages": None}
        self.dtypes, self.dims = [x.dtype for x in handles], [x.shape[3] for x in handles]
        self.attention: Any = None


def describe_tokens(key: Tensor, value: Tensor) -> tuple[Any, ...]:
    """Return everything about new tokens that a step depends on, except their values."""
    return (
        key.shape, key.stride(), key.dtype, key.device, type(value), value.shape, value.stride(),
        value.dtype, value.device,
    )  # fmt: skip


def repeat(layer: "FP8PagedLayer", key: Tensor, value: Tensor) -> tuple[PagedKV, PagedKV] | None:
    """Store one token per sequence as in the recorded step, or return None for the long path.

    Raises the errors of `LayerGroup.reserve`.
    """
    store = layer.store
    blocks, group, member = store.pool.blocks, store.group, store.length.member
    if (cached := blocks.cached_pages) is None or (record := cached[1].record) is None:
        return None
    if layer.assigned or record.layout != describe_tokens(key, value) or api.is_observed(key):
        return None
    pages, start, device = cached[1], group.lengths[member], key.device
    positions = group.reserve(start, start + 1, key.shape[0])
    table, lengths = positions.locate(device)
    if table is not pages.table or blocks.cached_pages is not cached:
        return None
    plan = positions.get_work_plan(device, pages.num_heads, record.num_rows, record.backend)
    record.write(pages, key, value, lengths)
    group.lengths[member] = start + 1
    size = (*key.shape[:2], positions.stop - positions.first)
    k = record.attributes.copy()
    k["pages"], k["lengths"], k["plan"] = pages, lengths, plan
    k["start"], k["stop"] = positions.first, positions.stop
    v = k.copy()
    v["side"] = "v"
    return (
        PagedKV.wrap(k, (*size, record.dims[0]), record.dtypes[0], device),
        PagedKV.wrap(v, (*size, record.dims[1]), record.dtypes[1], device),
    )


def make_record(
    store: "LayerStore", key: Tensor, value: Tensor, handles: tuple[PagedKV, PagedKV]
) -> None:
    """Record a decode step of a growing layer on its pages, unless something is unusual."""
    pages, is_offloaded = handles[0].pages, isinstance(store.pool.memory, OffloadBlocks)
    if pages is not None and not is_offloaded and api.can_skip_dispatcher(key):
        pages.record = DecodeRecord(key, value, store.count_query_rows(1), handles)
