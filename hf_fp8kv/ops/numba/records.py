"""Arguments of kernels: one record a call, of groups of numbers.

A group is declared by its fields' names and filled by the function beside it, in the same order.
"""

import functools
import itertools
import math
import struct

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...formats import AUTO, FORMATS
from ...formats.rotation import rotation_block
from ..pages import Pages
from .memory import BF16, F16, F32, FP8

KINDS = {torch.uint8: FP8, torch.bfloat16: BF16, torch.float16: F16, torch.float32: F32}


class Record:
    """The type of a kernel's argument: it then has one signature, and costs little to call."""

    def __init__(self, *groups: tuple[str, str]) -> None:
        """Declare the fields: of each group a prefix, and names; ":f8" makes a float64 of int64."""
        fields = []
        for prefix, names in groups:
            for field in names.split():
                name, _, kind = field.partition(":")
                fields.append((prefix + name, kind or "i8"))
        self.dtype = np.dtype(fields)
        # Of sixty numbers `numpy.array` makes a record in three times the time.
        codes = "".join("d" if kind == "f8" else "q" for _, kind in fields)
        self._pack = struct.Struct(codes).pack

    def fill(self, *groups: tuple[float, ...]) -> npt.NDArray[np.void]:
        """Return an array of one record, which kernels may change; all groups in their order."""
        packed = bytearray(self._pack(*itertools.chain.from_iterable(groups)))
        return np.frombuffer(packed, self.dtype)

    def no_work(self) -> npt.NDArray[np.void]:
        """Return an array of one record of zeros, for which a kernel does nothing."""
        return self.fill((0,) * len(self.dtype.names or ()))


TABLE = "slots table table_b table_columns lengths block offsets"


def table(pages: Pages, lengths: Tensor) -> tuple[int, ...]:
    """Return the group `TABLE`."""
    rows = pages.table
    return (
        pages.page_size, rows.data_ptr(), 4 * rows.stride(0), rows.shape[1], lengths.data_ptr(),
        pages.block.data_ptr(), pages.offsets.data_ptr(),
    )  # fmt: skip


STORED = "codes kind dim token_scales static_scale center rotation"


def stored(pages: Pages, name: str, center: Tensor | None) -> tuple[int, ...]:
    """Return the group `STORED` of "k" or "v".

    `codes` is where a page has the side's codes, and `token_scales` the first of its dynamic
    scales, in bytes from the page's address; 0 without, and the others follow every four bytes.
    `rotation`: the numbers that are rotated together; 0: they are not.
    """
    side, dtype = (pages.k, pages.k_dtype) if name == "k" else (pages.v, pages.v_dtype)
    layout, scales = pages.layout, 0
    if side.is_dynamic:
        scales = layout.first["token_scales"] + (2 if name == "v" else 0)
    return (
        layout.first[name], KINDS[dtype], side.head_dim, scales,
        address(side.static_scale), address(center),
        rotation_block(side.head_dim) if side.rotated else 0,
    )  # fmt: skip


def address(tensor: Tensor | None) -> int:
    """Return where a tensor is; 0: there is none."""
    return 0 if tensor is None else tensor.data_ptr()


STRIDED = "data dtype b h t"


def strided(x: Tensor) -> tuple[int, ...]:
    """Return the group `STRIDED` of a tensor `[b, h, t, any]`; strides are in bytes."""
    size = x.element_size()
    b, h, t, _ = x.stride()
    return x.data_ptr(), KINDS[x.dtype], b * size, h * size, t * size


def broadcast(x: Tensor | None) -> tuple[int, ...]:
    """Return the group `STRIDED` of a mask or bias `[1 | B, 1 | Hq, 1 | T, N]`."""
    if x is None:
        return 0, F32, 0, 0, 0
    data, dtype, b, h, t = strided(x)
    batch, heads, tokens, _ = x.shape
    return data, dtype, b if batch > 1 else 0, h if heads > 1 else 0, t if tokens > 1 else 0


def no_gaps(x: Tensor) -> Tensor:
    """Return the tensor, or a copy whose last axis has no gaps."""
    return x if x.stride(-1) == 1 or x.shape[-1] < 2 else x.contiguous()


def readable_floats(x: Tensor) -> Tensor:
    """Return the tensor, or float32 where kernels do not read its dtype."""
    return x if x.dtype in KINDS else x.float()


DECODING = "shift mask nan_mask nan_code factor:f8"


@functools.cache
def decoding(name: str) -> tuple[float, ...]:
    """Return the group `DECODING`: four numbers of `load_codes`, and the factor that then lacks."""
    if name == AUTO:
        return 0, 0, 0, 0, 1.0
    fmt = FORMATS[name]
    # float16 has 10 bits of mantissa and the bias 15.
    shift = 10 - fmt.mantissa_bits
    if fmt.unsigned_zero:
        nan_mask, nan_code = 0xFF, fmt.nan_code
    elif fmt.inf_code is None:
        nan_mask, nan_code = 0x7F, fmt.nan_code
    else:
        nan_mask, nan_code = 0, 1  # never: these bits are a NaN in float16 too
    return shift, 0x7F << shift | 0x8000, nan_mask, nan_code, 2.0 ** (15 - fmt.bias)


ENCODING = "drop rebias min_normal step max_code nan_code sign_zero sign_nan unit max:f8"


@functools.cache
def encoding(name: str) -> tuple[float, ...]:
    """Return the group `ENCODING`.

    That is eight numbers of `encode`, the power of two that `Format.error_unit` is, and the largest
    number.
    """
    if name == AUTO:
        return 0, 0, 0, 0, 0, 0, 0, 0, 0, 1.0
    fmt = FORMATS[name]
    step = int(np.float32(fmt.min_subnormal * 2.0**23).view(np.int32))
    sign = int(not fmt.unsigned_zero)
    rebias = (127 - fmt.bias) << fmt.mantissa_bits
    min_normal = (128 - fmt.bias) << 23
    return (
        23 - fmt.mantissa_bits, rebias, min_normal, step, fmt.max_code, fmt.nan_code, sign, sign,
        int(math.log2(fmt.error_unit)), fmt.max,
    )  # fmt: skip
