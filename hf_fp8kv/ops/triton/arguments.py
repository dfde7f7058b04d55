"""Arguments that kernels share: pointers, numbers and constants of one call."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton.language as tl

from ...formats import AUTO
from ...formats.rotation import rotation_block, rotation_factor
from ..pages import AttentionSpec, Pages, StoredSide
from ..visibility import mask_bounds
from . import softmax
from .codec import MOVED, Codec, codec_for, widened
from .target import Target, next_power_of_2, target_of
from .tuning import LaunchConfig, Workload

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class SidePointers(NamedTuple):
    """What kernels read one side of pages by; in a kernel, pointers.

    Attributes:
        offsets: of the pages, see `Pages`.
        codes: of the first page.
        static_scale, center: as in `StoredSide`.
    """

    offsets: torch.Tensor
    codes: torch.Tensor
    static_scale: torch.Tensor | None
    center: torch.Tensor | None


def pointers_to(pages: Pages, name: str) -> SidePointers:
    """Return what kernels take of "k" or "v"."""
    side, codes = (pages.k, pages.k_codes) if name == "k" else (pages.v, pages.v_codes)
    return SidePointers(pages.offsets, codes, side.static_scale, side.center)


class AttentionTensors(NamedTuple):
    """What attention reads; in a kernel, pointers.

    Attributes:
        query: `[B, Hq, T, Dk]`, of latents `[B, Hq, T, Dk + Dv]`, floating, its last axis without
            gaps.
        k, v, token_scales: the pages.
        table: `[B, M]`, int32: the pages of each sequence.
        lengths: `[B]`, int32: stored tokens.
        mask: of a kind that `Features.mask` names, its last axis without gaps, or None.
        bounds: `[B, 2]`, int32, where a compact mask hides, or None.
        bias: `[1 | B, 1 | Hq, 1 | T, N]`, floating, its last axis without gaps, or None.
        sinks: `[Hq]`, floating, or None.
    """

    query: torch.Tensor
    k: SidePointers
    v: SidePointers
    token_scales: torch.Tensor | None
    table: torch.Tensor
    lengths: torch.Tensor
    mask: torch.Tensor | None
    bounds: torch.Tensor | None
    bias: torch.Tensor | None
    sinks: torch.Tensor | None


class Factors(NamedTuple):
    """What logits and output are multiplied by; floats in a kernel too.

    Attributes:
        k_scaling: of products of queries and K's codes: `scaling` times the factors of K's codec
            and rotation, of which kernels only make the sums.
        scaling: of products of queries and keys.
        softcap: 0: none.
        v_scaling: of products of queries and V's codes, where these are keys.
        out: of the output: the factors of the values' codec and rotation.
    """

    k_scaling: float
    scaling: float
    softcap: float
    v_scaling: float
    out: float


# Compared by identity, since a launch looks its kernel up by its constants: `shape_of` and the
# others below make one for each set of values.
@dataclass(frozen=True, eq=False)
class Side:
    """One side of pages, as kernels are compiled for it.

    Attributes:
        dim: The head size.
        width: The head size, padded to what a product takes: a power of two, at least 16.
        block: Channels that a rotation mixes, or 1.
    """

    dim: int
    width: int
    block: int


@dataclass(frozen=True, eq=False)
class Shape:
    """Sizes that attention is compiled for; `out` is the side that the values are."""

    heads: int  # KV heads
    groups: int  # query heads per KV head
    page_size: int
    k: Side
    v: Side
    out: Side


@dataclass(frozen=True, eq=False)
class Features:
    """What kernels are compiled to do.

    Attributes:
        causal, windowed, softcapped: as in `ops.attend`.
        mask: NO_MASK, COMPACT, COMPLETE or ADDITIVE.
        centered: the center's share of the logits is added.
        k_dynamic, v_dynamic: whether a token's K, and V, has a scale of its own.
        latent: K holds latents, which are values too, and V their positions.
        precision: of products of float32, as `tl.dot` calls it.
    """

    causal: bool
    windowed: bool
    softcapped: bool
    mask: int
    centered: bool
    k_dynamic: bool
    v_dynamic: bool
    latent: bool
    precision: str


@dataclass(frozen=True, eq=False)
class Constants:
    """What an attention kernel is compiled for: its only constexpr parameter, `CALL`.

    Attributes:
        shape: Sizes.
        features: What is computed.
        k_codec: How codes of K become operands of a product.
        v_codec: The same for V.
        config: Launch parameters.
    """

    shape: Shape
    features: Features
    k_codec: Codec
    v_codec: Codec
    config: LaunchConfig


_side_of = functools.cache(Side)
shape_of = functools.cache(Shape)
features_of = functools.cache(Features)
_constants_of = functools.cache(Constants)


@dataclass(frozen=True)
class AttentionArgs:
    """One call of attention, as kernels take it.

    `start`, `stop` and `window` are those of `ops.attend`; strides are of batch, head and token
    (`mask_strides` of a compact mask: its batch's, its bounds', 0); shape, features and codecs are
    constexpr.
    """

    tensors: AttentionTensors
    factors: Factors
    start: int
    stop: int
    window: int
    query_strides: tuple[int, int, int]
    mask_strides: tuple[int, int, int]
    bias_strides: tuple[int, int, int]
    shape: Shape
    features: Features
    k_codec: Codec
    v_codec: Codec
    target: Target

    @property
    def values(self) -> SidePointers:
        """The side that the values are."""
        return self.tensors.k if self.features.latent else self.tensors.v

    @property
    def tokens(self) -> int:
        """Query tokens."""
        return self.tensors.query.shape[2]

    @property
    def rows(self) -> int:
        """Query rows per KV head: its query heads times query tokens."""
        return self.shape.groups * self.tokens

    @property
    def workload(self) -> Workload:
        """What the launch parameters depend on."""
        shape, tensors = self.shape, self.tensors
        widths = (shape.k.width, shape.v.width)
        return Workload(
            width=max(widths),
            rows=self.rows,
            exact=tl.float32 in (self.k_codec.operand, self.v_codec.operand),
            # Positions beside a latent are few.
            wide=any(side.codes.element_size() > 1 for side in (tensors.k, self.values)),
            biased=tensors.bias is not None or self.features.mask == softmax.ADDITIVE.value,
            complete=self.features.mask == softmax.COMPLETE.value,
            rotated=max(shape.k.block, shape.v.block) > 1,
            latent=self.features.latent,
            moved=self.k_codec.how >= MOVED.value,
        )

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides that kernels are not specialized for, in the kernels' order."""
        return (self.tensors.table.stride(0), *self.mask_strides, *self.bias_strides)

    def options(self, config: LaunchConfig) -> dict[str, object]:
        """Return the constexpr parameter of a kernel, and the options of Triton."""
        codecs = self.k_codec, self.v_codec
        call = _constants_of(self.shape, self.features, *codecs, config)
        return {"CALL": call, **config.options()}


def side_for(stored: StoredSide) -> Side:
    """Return the sizes that kernels are compiled for. Equal sides are the same object."""
    dim = stored.head_dim
    width = max(16, next_power_of_2(dim))
    return _side_of(dim, width, rotation_block(dim) if stored.rotated else 1)


def _codec(side: StoredSide, held: torch.dtype, target: Target, exact: bool) -> Codec:
    stored = _TYPES.get(held, tl.float16)
    exact = exact or held == torch.float32
    codec = codec_for(side.format, target, stored, exact, keep_nan=side.static_scale is not None)
    return widened(codec) if side.format != AUTO and held.is_floating_point else codec


def _broadcast(extra: torch.Tensor | None) -> tuple[torch.Tensor | None, tuple[int, int, int]]:
    """Return a mask or bias with its last axis without gaps, and its strides, 0 if repeated."""
    if extra is None:
        return None, (0, 0, 0)
    if extra.stride(3) != 1 and extra.shape[3] > 1:
        extra = extra.contiguous()
    if extra.dtype == torch.bool:
        extra = extra.view(torch.uint8)
    b, h, t = (extra.stride(i) if extra.shape[i] > 1 else 0 for i in range(3))
    return extra, (b, h, t)


def _mask_kind(mask: torch.Tensor | None) -> int:
    kind = softmax.NO_MASK
    if mask is not None and mask.is_floating_point():
        kind = softmax.ADDITIVE
    elif mask is not None:
        kind = softmax.COMPACT if mask.shape[1:3] == (1, 1) else softmax.COMPLETE
    return int(kind.value)


def prepare(
    query: torch.Tensor,
    pages: Pages,
    lengths: torch.Tensor,
    start: int,
    stop: int,
    spec: AttentionSpec,
) -> AttentionArgs:
    """Return a call as kernels take it; the arguments are those of `reference.attend`."""
    target = target_of(query.device)
    if query.stride(3) != 1:
        query = query.contiguous()
    exact = query.dtype == torch.float32
    k_codec = _codec(pages.k, pages.k_dtype, target, exact)
    v_codec = _codec(pages.v, pages.v_dtype, target, exact)
    # The center's share of the logits counts only beside what does not contain it.
    centered = pages.k.center is not None and (spec.softcap != 0 or spec.sinks is not None)
    k, v = pointers_to(pages, "k"), pointers_to(pages, "v")
    if not centered:
        k = k._replace(center=None)
    scales = pages.token_scales if pages.k.is_dynamic or pages.v.is_dynamic else None
    kind = _mask_kind(spec.mask)
    mask, mask_strides = _broadcast(spec.mask)
    bounds = None
    if mask is not None and kind == softmax.COMPACT.value:
        bounds = spec.bounds
        if bounds is None:
            bounds = mask_bounds(mask[:, 0, 0] != 0, start)
        mask_strides = (mask_strides[0], bounds.stride(0) if len(bounds) > 1 else 0, 0)
    bias, bias_strides = _broadcast(spec.bias)
    k_side, v_side = side_for(pages.k), side_for(pages.v)
    values, values_codec = (k_side, k_codec) if spec.latent else (v_side, v_codec)
    groups = query.shape[1] // pages.heads
    shape = shape_of(pages.heads, groups, pages.page_size, k_side, v_side, values)
    # Of float32 operands: as exact as float32 on tensor cores, in three products. Their parts of
    # large heads do not fit into shared memory.
    precise = "tf32x3" if target.is_nvidia and max(shape.k.width, shape.v.width) <= 256 else "ieee"
    features = features_of(
        spec.causal, spec.window > 0, spec.softcap != 0, kind, centered, pages.k.is_dynamic,
        pages.v.is_dynamic, spec.latent, precise,
    )  # fmt: skip
    return AttentionArgs(
        tensors=AttentionTensors(
            query, k, v, scales, pages.table, lengths, mask, bounds, bias, spec.sinks
        ),
        factors=Factors(
            spec.scaling * k_codec.factor * rotation_factor(k_side.block),
            spec.scaling,
            spec.softcap,
            spec.scaling * v_codec.factor * rotation_factor(v_side.block),
            values_codec.factor * rotation_factor(values.block),
        ),
        start=start,
        stop=stop,
        window=spec.window,
        query_strides=(query.stride(0), query.stride(1), query.stride(2)),
        mask_strides=mask_strides,
        bias_strides=bias_strides,
        shape=shape,
        features=features,
        k_codec=k_codec,
        v_codec=v_codec,
        target=target,
    )
