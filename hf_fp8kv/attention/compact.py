"""Compact masks: which tokens are padding, and where it begins and ends, in one tensor.

transformers hands one tensor to all layers of a kind, so what is computed once per step travels in
that: `[B, 1, 1, W]`, uint8. A row is a byte for each of N columns, 0 for padding, zeros up to a
multiple of 16, and a tail of four numbers, int32:

    the position of the first visible token, and one past that of the last hidden one
    how many columns are filled: the queries are the last of these
    0

A mask that begins after position 0 has one more number, so that the width tells: a layer with a
window may be given the mask of the whole text.
"""

import weakref
from typing import NamedTuple

import torch

from ..errors import ConfigError
from ..ops.visibility import mask_bounds

Tensor = torch.Tensor

# So that kernels find the tail at a multiple of it, whatever the number of columns.
_ALIGNED = 16
_TAIL = 16


class CompactMask(NamedTuple):
    """What a compact mask says of some columns.

    Attributes:
        seen: `[B, 1, 1, n]`, uint8, 0 is padding.
        bounds: `[B, 2]`, int32, the position of the first visible token, and one past that of the
            last hidden one. (Tokens that are not stored yet are not hidden.)
        filled: `[B]`, int32, columns that hold tokens.
    """

    seen: Tensor
    bounds: Tensor
    filled: Tensor


def is_compact(mask: Tensor | None) -> bool:
    """Return whether a mask is a compact one; others are bool or floating."""
    return mask is not None and mask.dtype == torch.uint8


def pack(present: Tensor, start: int, filled: int | Tensor) -> Tensor:
    """Return a compact mask `[B, 1, 1, W]`, uint8.

    Args:
        present: `[B, N]`, bool, False is padding; any value for columns that are not filled.
        start: position of the first column.
        filled: columns that hold tokens; a tensor `[]` on the device.
    """
    batch, columns = present.shape
    if isinstance(filled, torch.Tensor):
        column = torch.arange(columns, dtype=torch.int32, device=present.device)
        present = present | (column >= filled)
        last = filled.int().expand(batch)
    else:
        last = torch.full((batch,), filled, dtype=torch.int32, device=present.device)
    numbers = torch.stack([*mask_bounds(present, start).unbind(1), last], 1)
    numbers = torch.nn.functional.pad(numbers, (0, 1 if start == 0 else 2))
    seen = torch.nn.functional.pad(present.to(torch.uint8), (0, -columns % _ALIGNED))
    return torch.cat([seen, numbers.view(torch.uint8)], 1)[:, None, None]


# The last mask that was unpacked, for which columns, and what it said. Replaced as a whole.
_last: tuple["weakref.ref[Tensor]", int, int, CompactMask] | None = None


def unpack(mask: Tensor, start: int, stop: int) -> CompactMask:
    """Return what a compact mask says of the tokens at positions `start` to `stop - 1`.

    All layers of a step ask, most of them for the same.

    Raises:
        ConfigError: the mask was made for other tokens.
    """
    global _last
    if torch.compiler.is_compiling():
        return _unpack(mask, start, stop)
    last = _last
    if last is not None and last[0]() is mask and last[1:3] == (start, stop):
        return last[3]
    compact = _unpack(mask, start, stop)
    _last = weakref.ref(mask), start, stop, compact
    return compact


def _unpack(mask: Tensor, start: int, stop: int) -> CompactMask:
    width = mask.shape[3] if mask.shape[1:3] == (1, 1) and mask.ndim == 4 else 0
    columns = stop - start
    from_zero = width % _ALIGNED == 0
    tail = width - _TAIL - (0 if from_zero else 4)
    if tail < stop if from_zero else tail != columns + -columns % _ALIGNED:
        raise ConfigError(
            f"expected a mask that covers the tokens {start} to {stop - 1}, got one of about "
            f"{max(tail, 0)} tokens; pass a mask over the cached and the new tokens"
        )
    numbers = mask[:, 0, 0, tail : tail + _TAIL].view(torch.int32)
    filled = numbers[:, 2]
    if from_zero and start > 0:
        return CompactMask(mask[..., start:stop], numbers[:, :2], filled - start)
    return CompactMask(mask[..., :columns], numbers[:, :2], filled)
