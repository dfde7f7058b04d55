"""The arguments that the kernels of attention share, in their order."""

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from ..pages import AttentionSpec, Pages, StoredSide
from . import attention
from .codec import Codec, codec_for
from .target import Target, next_power_of_2, target_of

__all__ = ["Call", "prepare"]

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True)
class Call:
    """One call of attention, as kernels take it.

    Attributes:
        tensors: query, pools, scales, center, table, lengths, mask, bias, sinks: positional.
        numbers: those after the kernel's own tensors: positional.
        constants: constexpr parameters that do not depend on how the launch is cut.
        target: the GPU.
        rows: query rows per KV head: its query heads times query tokens.
        width: the larger head size, padded to a power of two.
        exact: products are of float32.
        wide: a side is stored in 16 bits or more.
        padded: a head size is not a power of two.
        bias: something is added to logits, one number for each.
    """

    tensors: tuple[torch.Tensor | None, ...]
    numbers: tuple[Any, ...]
    constants: dict[str, Any]
    target: Target
    rows: int
    width: int
    exact: bool
    wide: bool
    padded: bool
    bias: bool


def _padded(size: int) -> int:
    """What a dot product takes: a power of two, at least 16."""
    return max(16, next_power_of_2(size))


def _codec(side: StoredSide, target: Target, exact: bool) -> Codec:
    stored = _TYPES.get(side.codes.dtype, tl.float16)
    exact = exact or side.codes.dtype == torch.float32
    keep_nan = side.static_scale is not None
    return codec_for(side.format, target, stored, exact, keep_nan=keep_nan)


def _broadcast(extra: torch.Tensor | None) -> tuple[torch.Tensor | None, tuple[int, int, int]]:
    """A mask or bias with its last axis without gaps, and its strides, 0 where it is repeated."""
    if extra is None:
        return None, (0, 0, 0)
    if extra.stride(3) != 1 and extra.shape[3] > 1:
        extra = extra.contiguous()
    if extra.dtype == torch.bool:
        extra = extra.view(torch.uint8)
    b, h, t = (extra.stride(i) if extra.shape[i] > 1 else 0 for i in range(3))
    return extra, (b, h, t)


def prepare(
    query: torch.Tensor,
    pages: Pages,
    lengths: torch.Tensor,
    start: int,
    stop: int,
    spec: AttentionSpec,
) -> Call:
    """Returns the call; the arguments are those of `reference.attend`."""
    target = target_of(query.device)
    heads, tokens = pages.heads, query.shape[2]
    groups = query.shape[1] // heads
    if query.stride(3) != 1:
        query = query.contiguous()
    exact = query.dtype == torch.float32
    k, v = _codec(pages.k, target, exact), _codec(pages.v, target, exact)
    mask, softcap = spec.mask, spec.softcap
    kind = attention.NO_MASK
    if mask is not None and mask.is_floating_point():
        kind = attention.ADDITIVE
    elif mask is not None:
        kind = attention.COMPACT if mask.shape[1:3] == (1, 1) else attention.COMPLETE
    mask, mask_strides = _broadcast(mask)
    bias, bias_strides = _broadcast(spec.bias)
    # The center's share of the logits counts only beside what does not contain it.
    centered = pages.k.center is not None and (softcap != 0 or spec.sinks is not None)
    dims = (pages.k.head_dim, pages.v.head_dim)
    width = _padded(max(dims))
    return Call(
        tensors=(
            query, pages.k.codes, pages.v.codes, pages.k.token_scales, pages.v.token_scales,
            pages.k.static_scale, pages.k.center if centered else None, pages.table, lengths,
            mask, bias, spec.sinks, pages.v.static_scale,
        ),
        numbers=(
            tokens, start, stop, spec.window, spec.scaling * k.factor, spec.scaling, softcap,
            v.factor,
            *query.stride()[:3], pages.table.stride(0), *mask_strides, *bias_strides,
        ),
        constants={
            "HEADS": heads, "GROUPS": groups, "DK": dims[0], "DV": dims[1],
            "PAGE": pages.page_size, "WIDE_K": _padded(dims[0]), "WIDE_V": _padded(dims[1]),
            "K_HOW": k.how, "K_SHIFT": k.shift, "K_NAN": k.nan, "K_OPERAND": k.operand,
            "V_HOW": v.how, "V_SHIFT": v.shift, "V_NAN": v.nan, "V_OPERAND": v.operand,
            "CAUSAL": spec.causal, "WINDOWED": spec.window > 0, "SOFTCAP": softcap != 0,
            "MASK": kind.value, "CENTER": centered,
            # Of float32 operands: as exact as float32 on tensor cores, in three products. Their
            # parts of large heads do not fit into shared memory.
            "PRECISION": "tf32x3" if target.is_nvidia and width <= 256 else "ieee",
        },
        target=target,
        rows=groups * tokens,
        width=width,
        exact=tl.float32 in (k.operand, v.operand),
        wide=pages.k.codes.element_size() > 1 or pages.v.codes.element_size() > 1,
        padded=(_padded(dims[0]), _padded(dims[1])) != dims,
        bias=bias is not None or kind == attention.ADDITIVE,
    )  # fmt: skip
