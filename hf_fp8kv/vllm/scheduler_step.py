"""Convert a step of vLLM's scheduler to operations of `serving.step`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from ..ops.blocks import upload
from ..serving.step import AttendBatch, LayerWork, group_by_length, make_batch, make_decode_work

_Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class _Row:
    """A row of a step: a request whose `num_new` new tokens begin at `first_token`."""

    index: int
    num_new: int
    first_token: int


@dataclass
class StepMetadata:
    """The operations of a step, which vLLM passes to each layer. vLLM adds attributes to it."""

    make_work: Callable[[], LayerWork]

    @cached_property
    def work(self) -> LayerWork:
        """The operations for all layers of a group, made by the first layer that reads them."""
        return self.make_work()


def make_masked_decode_work(
    lengths: torch.Tensor, table: torch.Tensor, slot_mapping: torch.Tensor, page_size: int
) -> LayerWork:
    """Return the operations of a step with one token per request, computed on the device.

    The arguments are as in `plan_step`. A CUDA graph captures this computation, and replays it with
    the current values of vLLM's tensors. A row without a slot (padding, or a dummy run) stores
    nothing and attends to nothing, because its block table may still belong to another request.
    """
    lacks_slot = slot_mapping[: len(lengths)] < 0
    table = table.masked_fill(lacks_slot[:, None], -1)
    return make_decode_work(table, lengths.masked_fill(lacks_slot, 0), page_size)


def is_decoding(starts: _Ints) -> bool:
    """Return whether each request has one token, except for padding after the requests."""
    return bool((np.diff(starts)[: int(starts[-1])] == 1).all())


def plan_step(
    starts: _Ints,
    lengths: torch.Tensor,
    table: torch.Tensor,
    slot_mapping: torch.Tensor,
    page_size: int,
    max_length: int,
) -> LayerWork:
    """Return the operations of a step, for all layers of a group.

    The host reads no tensor of the device. Only `starts` and `max_length` are on the host.

    Args:
        starts: First token of each request in the step, `[R + 1]` (query start locations).
        lengths: Number of stored tokens of each request, including this step's, `[R]`, int32
            (sequence lengths).
        table: Block table, `[R, M]`, int32.
        slot_mapping: `page * page_size + slot` of each token, `[N]`. Tokens with a negative value
            are not stored.
        page_size: Tokens per page.
        max_length: An upper bound on `lengths`, on the host.
    """
    num_tokens = int(starts[-1])
    slot_mapping = slot_mapping[:num_tokens]
    page_indices = torch.div(slot_mapping, page_size, rounding_mode="floor").to(torch.int32)
    slot_ends = (slot_mapping % page_size + 1).to(torch.int32)
    written_tokens = None
    if slot_mapping.is_cpu and bool((slot_mapping < 0).any()):
        written_tokens = (slot_mapping >= 0).nonzero()[:, 0]
        page_indices = page_indices[written_tokens]
        slot_ends = slot_ends[written_tokens]
    counts = np.diff(starts)
    indices = np.flatnonzero(counts).tolist()
    rows = [_Row(index, int(counts[index]), int(starts[index])) for index in indices]
    max_length = min(max_length, table.shape[1] * page_size)
    groups = group_by_length(rows)
    batches = [_plan_batch(group, num_tokens, lengths, table, max_length) for group in groups]
    return LayerWork(written_tokens, page_indices[:, None], slot_ends, batches, [], num_tokens)


def _plan_batch(
    requests: list[_Row],
    num_tokens: int,
    lengths: torch.Tensor,
    table: torch.Tensor,
    max_length: int,
) -> AttendBatch:
    """Return the operation for requests with a similar number of new tokens."""
    indices = np.array([row.index for row in requests], np.int64)
    if len(indices) < len(lengths) or (np.diff(indices) != 1).any():
        device_indices = upload(indices, lengths.device)
        lengths = lengths.index_select(0, device_indices)
        table = table.index_select(0, device_indices)
    return make_batch(requests, num_tokens, table, lengths, max_length)
