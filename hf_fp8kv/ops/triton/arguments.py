"""Arguments that kernels share: the pointers, scalars and constants of one call."""

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ...errors import ConfigError
from ...formats import AUTO
from ...formats.rotation import compute_rotation_block, compute_rotation_factor
from ..page_layout import count_elements
from ..pages import AttentionSpec, Pages, StoredSide
from ..visibility import find_mask_bounds
from .codec import Codec, choose_codec, make_decoded_codec
from .softmax import COMPACT, COMPLETE, NO_MASK
from .target import Target, get_target, next_power_of_2
from .tuning import MIN_PACKED_TILE, LaunchConfig, Workload

_TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class SidePointers(NamedTuple):
    """Tensors of one side of pages. In a kernel they are pointers.

    Attributes:
        offsets: Offsets of the pages, see `Pages`.
        codes: Codes of the first page.
        static_scale, center: As in `StoredSide`.
    """

    offsets: Tensor
    codes: Tensor
    static_scale: Tensor | None
    center: Tensor | None


def make_pointers(pages: Pages, side: str) -> SidePointers:
    """Return the tensors of side "k" or "v"."""
    stored_side = pages.k if side == "k" else pages.v
    return SidePointers(
        pages.offsets, pages.regions[side], stored_side.static_scale, stored_side.center
    )


class AttentionTensors(NamedTuple):
    """Tensors that attention reads. In a kernel they are pointers.

    Attributes:
        query: Queries, `[B, Hq, T, Dk]`, or `[B, Hq, T, Dk + Dv]` for latents, floating, contiguous
            in the last axis.
        k, v, token_scales: The pages.
        table: Page numbers of each sequence, `[B, M]`, int32.
        lengths: Number of stored tokens, `[B]`, int32.
        mask: Mask of the kind `Constants.mask`, contiguous in the last axis, or None.
        bounds: Bounds of a compact mask (`find_mask_bounds`), `[B, 2]`, int32, or None.
        bias: Bias, `[1 | B, 1 | Hq, 1 | T, N]`, floating, contiguous in the last axis, or None.
        sinks: Attention sinks, `[Hq]`, floating, or None.
    """

    query: Tensor
    k: SidePointers
    v: SidePointers
    token_scales: Tensor | None
    table: Tensor
    lengths: Tensor
    mask: Tensor | None
    bounds: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None


class Factors(NamedTuple):
    """Factors of logits and output. They are also floats in a kernel.

    Attributes:
        k_scaling: Factor of products of queries and K's codes: `scaling` times the factors of K's
            codec and rotation. Kernels only compute the sums of a rotation.
        scaling: Factor of products of queries and keys, as in `AttentionSpec`.
        softcap: As in `AttentionSpec`. 0 means no softcap.
        v_scaling: Factor of products of queries and V's codes, if these are keys (with latents).
        out: Factor of the output: the factors of the values' codec and rotation.
    """

    k_scaling: float
    scaling: float
    softcap: float
    v_scaling: float
    out: float


# Compared by identity, because each launch looks up its kernel by its constants. The caches below
# create a single object for each set of values.
@dataclass(frozen=True, eq=False)
class SideSizes:
    """Sizes of K or V that kernels are compiled for.

    Attributes:
        dim: The head size.
        width: The head size padded for `tl.dot`: a power of two, at least 16.
        rotation_size: Number of channels that a rotation mixes, or 1 without rotation.
        head_bytes: Size of a head in a page, in bytes.
        stored_size: Number of elements that store a vector (`count_elements`).
    """

    dim: int
    width: int
    rotation_size: int
    head_bytes: int
    stored_size: int


@dataclass(frozen=True, eq=False)
class Constants:
    """The only constexpr parameter of an attention kernel, `CALL`.

    Attributes:
        num_heads: Number of KV heads.
        group_size: Number of query heads per KV head.
        page_size: Slots (tokens) per page.
        k, v, out: Sizes of K, of V, and of the values. For latents the values are K.
        k_codec, v_codec: Codecs that convert codes to operands of a product.
        causal, windowed, softcapped: Whether attention is causal, has a window, has a softcap.
        mask: NO_MASK, COMPACT or COMPLETE.
        centered: Whether the center's part of the logits is added.
        k_dynamic, v_dynamic: Whether K and V have dynamic scales.
        latent: Whether K holds latents, which are also the values, and V their RoPE parts.
        precision: `input_precision` of `tl.dot` for float32 operands.
        config: Launch parameters, or None for kernels that do not depend on them.
    """

    num_heads: int
    group_size: int
    page_size: int
    k: SideSizes
    v: SideSizes
    out: SideSizes
    k_codec: Codec
    v_codec: Codec
    causal: bool
    windowed: bool
    softcapped: bool
    mask: int
    centered: bool
    k_dynamic: bool
    v_dynamic: bool
    latent: bool
    precision: str
    config: LaunchConfig | None = None


_make_unique_sizes = functools.cache(SideSizes)
_make_unique_constants = functools.cache(Constants)


@functools.cache
def _add_config(constants: Constants, config: LaunchConfig) -> Constants:
    return replace(constants, config=config)


class AttentionArgs(NamedTuple):
    """The arguments of one call of attention.

    Attributes:
        tensors, factors, constants: Pointers, floats and constants of the kernel.
        start, stop, window: As in `ops.attend`.
        query_strides: Strides of batch, head and token.
        strides: Strides that kernels are not specialized for, in the order of their parameters:
            table (batch), mask (batch, head, token) and bias (batch, head, token). For a compact
            mask the three are its batch stride, the batch stride of its bounds, and 0.
        target: The GPU.
        workload: Properties of the call that launch parameters depend on.
    """

    tensors: AttentionTensors
    factors: Factors
    start: int
    stop: int
    window: int
    query_strides: tuple[int, int, int]
    strides: tuple[int, ...]
    constants: Constants
    target: Target
    workload: Workload

    def make_options(self, config: LaunchConfig) -> dict[str, object]:
        """Return the constexpr parameter of a kernel, and Triton's options."""
        return {"CALL": _add_config(self.constants, config), **config.make_options()}


def make_side_sizes(pages: Pages, side: str, min_width: int = 16) -> SideSizes:
    """Return the sizes of side "k" or "v", padded to at least `min_width`.

    Equal sizes give the same object.

    Raises:
        ConfigError: Codes are packed, and the head size is not a power of two of at least
            `min_width` and `MIN_PACKED_TILE`.
    """
    stored_side, dtype = (pages.k, pages.k_dtype) if side == "k" else (pages.v, pages.v_dtype)
    dim = stored_side.head_dim
    width = max(min_width, next_power_of_2(dim))
    stored_size = count_elements(dim, dtype)
    if stored_size < dim and (width != dim or dim < MIN_PACKED_TILE):
        raise ConfigError(
            f"head size: expected a power of two of at least {max(min_width, MIN_PACKED_TILE)} for "
            f"{stored_side.format} on a GPU, got {dim}. Choose an 8-bit format"
        )
    rotation_size = compute_rotation_block(dim) if stored_side.rotated else 1
    return _make_unique_sizes(dim, width, rotation_size, pages.layout.head_bytes, stored_size)


def _choose_side_codec(
    stored_side: StoredSide, dtype: torch.dtype, target: Target, is_float32: bool
) -> Codec:
    auto_dtype = _TRITON_DTYPES.get(dtype, tl.float16)
    is_float32 = is_float32 or dtype == torch.float32
    keeps_nan = stored_side.static_scale is not None
    codec = choose_codec(stored_side.format, target, auto_dtype, is_float32, keeps_nan)
    is_decoded = stored_side.format != AUTO and dtype.is_floating_point
    return make_decoded_codec(codec) if is_decoded else codec


def _prepare_broadcast(tensor: Tensor | None) -> tuple[Tensor | None, tuple[int, int, int]]:
    """Return a mask or bias, contiguous in its last axis, and its strides, 0 for broadcast axes."""
    if tensor is None:
        return None, (0, 0, 0)
    if tensor.stride(3) != 1 and tensor.shape[3] > 1:
        tensor = tensor.contiguous()
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.uint8)
    b, h, t = (tensor.stride(axis) if tensor.shape[axis] > 1 else 0 for axis in range(3))
    return tensor, (b, h, t)


def prepare_arguments(
    query: Tensor, pages: Pages, lengths: Tensor, start: int, stop: int, spec: AttentionSpec
) -> AttentionArgs:
    """Return the arguments of kernels for a call with the arguments of `reference.attend`."""
    target = get_target(query.device)
    if query.stride(3) != 1:
        query = query.contiguous()
    is_float32 = query.dtype == torch.float32
    k_codec = _choose_side_codec(pages.k, pages.k_dtype, target, is_float32)
    v_codec = _choose_side_codec(pages.v, pages.v_dtype, target, is_float32)
    # The center's part of the logits only matters next to a term that lacks it: a softcap or sinks.
    centered = pages.k.center is not None and (spec.softcap != 0 or spec.sinks is not None)
    k, v = make_pointers(pages, "k"), make_pointers(pages, "v")
    if not centered:
        k = k._replace(center=None)
    mask, mask_strides = _prepare_broadcast(spec.mask)
    mask_kind = NO_MASK.value
    bounds = None
    if mask is not None:
        assert not mask.is_floating_point(), "a mask to add is a bias"
        mask_kind = COMPLETE.value
        if mask.shape[2] == 1:
            mask_kind = COMPACT.value
            bounds = spec.bounds
            if bounds is None:
                bounds = find_mask_bounds(mask[:, 0, 0] != 0, start)
            mask_strides = (mask_strides[0], bounds.stride(0) if len(bounds) > 1 else 0, 0)
    bias, bias_strides = _prepare_broadcast(spec.bias)
    # Products of latents are computed by quarters of the channels, and `tl.dot` needs at least 16.
    k_sizes = make_side_sizes(pages, "k", 64 if spec.latent else 16)
    v_sizes = make_side_sizes(pages, "v")
    value_sizes, value_codec = (k_sizes, k_codec) if spec.latent else (v_sizes, v_codec)
    width = max(k_sizes.width, v_sizes.width)
    group_size = query.shape[1] // pages.num_heads
    # For float32 operands, three products on tensor cores are as exact as float32. The operands of
    # large heads, split for these products, do not fit into shared memory.
    precision = "tf32x3" if target.is_nvidia and width <= 256 else "ieee"
    constants = _make_unique_constants(
        num_heads=pages.num_heads,
        group_size=group_size,
        page_size=pages.page_size,
        k=k_sizes,
        v=v_sizes,
        out=value_sizes,
        k_codec=k_codec,
        v_codec=v_codec,
        causal=spec.causal,
        windowed=spec.window > 0,
        softcapped=spec.softcap != 0,
        mask=mask_kind,
        centered=centered,
        k_dynamic=pages.k.is_dynamic,
        v_dynamic=pages.v.is_dynamic,
        latent=spec.latent,
        precision=precision,
    )
    # The RoPE part of a key is much smaller than its latent, so its dtype is ignored.
    stored_dtypes = (pages.k_dtype, pages.k_dtype if spec.latent else pages.v_dtype)
    workload = Workload(
        width=width,
        rows=group_size * query.shape[2],
        has_float32_operands=tl.float32 in (k_codec.operand_dtype, v_codec.operand_dtype),
        has_16_bit_side=any(dtype.itemsize > 1 for dtype in stored_dtypes),
        has_bias=bias is not None,
        has_query_masks=mask_kind == COMPLETE.value,
        is_latent=spec.latent,
        is_packed=min(k_codec.bits, v_codec.bits) < 8,
    )
    has_token_scales = pages.k.is_dynamic or pages.v.is_dynamic
    tensors = AttentionTensors(
        query=query,
        k=k,
        v=v,
        token_scales=pages.regions["token_scales"] if has_token_scales else None,
        table=pages.table,
        lengths=lengths,
        mask=mask,
        bounds=bounds,
        bias=bias,
        sinks=spec.sinks,
    )
    factors = Factors(
        k_scaling=spec.scaling * k_codec.factor * compute_rotation_factor(k_sizes.rotation_size),
        scaling=spec.scaling,
        softcap=spec.softcap,
        v_scaling=spec.scaling * v_codec.factor * compute_rotation_factor(v_sizes.rotation_size),
        out=value_codec.factor * compute_rotation_factor(value_sizes.rotation_size),
    )
    return AttentionArgs(
        tensors=tensors,
        factors=factors,
        start=start,
        stop=stop,
        window=spec.window,
        query_strides=(query.stride(0), query.stride(1), query.stride(2)),
        strides=(pages.table.stride(0), *mask_strides, *bias_strides),
        constants=constants,
        target=target,
        workload=workload,
    )
