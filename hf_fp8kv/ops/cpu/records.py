"""Arguments of the C++ kernels: the structs of kernels.cpp.

Each function `list_*_fields` returns the fields of a nested struct, or the fields that a derived
struct adds. `WRITE`, `GATHER` and `ATTEND` describe all fields of a call by format characters: "q"
for integers and addresses, "d" for float64.
"""

import functools
import math
import struct

import numpy as np
import torch
from torch import Tensor

from ...formats import AUTO, CODE_DTYPES, FORMATS
from ...formats.codec import decode
from ...formats.rotation import compute_rotation_block
from ..pages import Pages

CODES, BF16, F16, F32 = range(4)  # kinds of stored values
KINDS = {
    **dict.fromkeys(CODE_DTYPES.values(), CODES),
    torch.bfloat16: BF16,
    torch.float16: F16,
    torch.float32: F32,
}
# Values of the 256 codes of each format, divided by a factor. Kernels read this memory.
_code_values: dict[str, Tensor] = {}
_TABLE = "7q"
_STORED = "9q"
_STRIDED = "5q"
_DECODING = "5qd"
_ENCODING = "8qd"
WRITE = struct.Struct("3qd" + _TABLE + 2 * (_STORED + _STRIDED + _ENCODING))
GATHER = struct.Struct("7q" + _TABLE + _STORED + _DECODING + "2q")
ATTEND = struct.Struct(
    "8q2d" + _TABLE + 2 * (_STORED + _DECODING) + "q" + _STORED + _DECODING + _STRIDED + "q"
    + 2 * _STRIDED + "11q"
)  # fmt: skip


def list_table_fields(pages: Pages, lengths: Tensor) -> tuple[int, ...]:
    """Return the fields of the struct `Table`."""
    rows = pages.table
    return (
        pages.page_size,
        rows.data_ptr(),
        4 * rows.stride(0),
        rows.shape[1],
        lengths.data_ptr(),
        pages.block.data_ptr(),
        pages.offsets.data_ptr(),
    )


def list_side_fields(pages: Pages, side: str, center: Tensor | None) -> tuple[int, ...]:
    """Return the fields of the struct `StoredSide` of the side "k" or "v".

    `codes_offset` is the offset of the side's codes in a head of a page, in bytes. `scales_offset`
    is the offset of its first dynamic scale, or 0. Dynamic scales are four bytes apart.
    `head_size` is the size of a head in a page, in bytes. `bits` is the size of a stored value.
    `rotation` is the number of channels that are rotated together, or 0.
    """
    stored_side, dtype = (pages.k, pages.k_dtype) if side == "k" else (pages.v, pages.v_dtype)
    layout = pages.layout
    scales_offset = 0
    if stored_side.is_dynamic:
        scales_offset = layout.offsets["token_scales"] + (2 if side == "v" else 0)
    return (
        layout.offsets[side],
        KINDS[dtype],
        8 * dtype.itemsize if stored_side.format == AUTO else FORMATS[stored_side.format].bits,
        stored_side.head_dim,
        scales_offset,
        layout.head_bytes,
        get_address(stored_side.static_scale),
        get_address(None if stored_side.format == AUTO else center),
        compute_rotation_block(stored_side.head_dim) if stored_side.rotated else 0,
    )


def get_address(tensor: Tensor | None) -> int:
    """Return the address of a tensor, or 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def list_strided_fields(tensor: Tensor) -> tuple[int, ...]:
    """Return the fields of the struct `Strided` of a tensor `[b, h, t, any]`, strides in bytes."""
    size = tensor.element_size()
    b, h, t, _ = tensor.stride()
    return tensor.data_ptr(), KINDS[tensor.dtype], b * size, h * size, t * size


def list_broadcast_fields(tensor: Tensor | None) -> tuple[int, ...]:
    """Return the fields of the struct `Strided` of a mask or bias `[1 | B, 1 | Hq, 1 | T, N]`."""
    if tensor is None:
        return 0, F32, 0, 0, 0
    address, kind, *strides = list_strided_fields(tensor)
    broadcast_strides = [
        stride if size > 1 else 0 for stride, size in zip(strides, tensor.shape[:3], strict=True)
    ]
    return address, kind, *broadcast_strides


def make_rows_contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if its last axis is not contiguous."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] < 2 else tensor.contiguous()


@functools.cache
def list_decoding_fields(name: str) -> tuple[float, ...]:
    """Return the fields that the struct `Side` adds to `StoredSide`.

    Shifting and masking the bits of a code gives a float16 (10 bits of mantissa, bias 15) that
    lacks a factor. This does not hold for NaN and infinity, which are the codes that equal
    `nan_code` under `nan_mask`. Packed codes are unpacked to integers that lack a factor.
    """
    if name == AUTO:
        return 0, 0, 0, 0, 0, 1.0
    fmt = FORMATS[name]
    codes = torch.arange(256, dtype=torch.uint8, device="cpu")
    factor = 2.0 ** (15 - fmt.bias)
    values = decode(codes, fmt) / factor
    if fmt.bits < 8:
        factor = fmt.min_subnormal * 2.0 ** (fmt.bits - 8)
        values = codes.view(torch.int8).float().where(codes != fmt.nan_code, math.nan)
    values = _code_values.setdefault(name, values)  # threads may compute it concurrently
    shift = 2 + fmt.bits - fmt.mantissa_bits
    if fmt.inf_code is not None:
        nan_mask = nan_code = fmt.inf_code
    else:
        nan_mask = 0xFF if fmt.has_unsigned_zero else 0x7F
        nan_code = fmt.nan_code
    return values.data_ptr(), shift, 0x7F << shift | 0x8000, nan_mask, nan_code, factor


@functools.cache
def list_encoding_fields(name: str) -> tuple[float, ...]:
    """Return the fields that the struct `NewSide` adds to `StoredSide`, after `in`.

    The field `error_exponent` is log2 of `Format.error_unit`.
    """
    if name == AUTO:
        return 0, 0, 0, 0, 0, 0, 0, 0, 1.0
    fmt = FORMATS[name]
    subnormal_step = int(np.float32(fmt.min_subnormal * 2.0**23).view(np.int32))
    return (
        23 - fmt.mantissa_bits,
        (127 - fmt.bias) << fmt.mantissa_bits,  # the difference of the biases
        (128 - fmt.bias) << 23,  # the smallest normal value
        subnormal_step,
        fmt.max_code >> 8 - fmt.bits,
        fmt.nan_code,
        int(not fmt.has_unsigned_zero),
        int(math.log2(fmt.error_unit)),
        fmt.max,
    )
