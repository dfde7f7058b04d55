"""List the calls for which kernels are compiled: every format, and selected shapes and features.

A variant is called as a cache calls it, on small tensors on the CPU (see check.py).
"""

import importlib
from collections.abc import Collection
from dataclasses import dataclass

import torch

from hf_fp8kv.formats import AUTO, FORMATS
from hf_fp8kv.ops import AttentionSpec, Pages, StoredSide
from hf_fp8kv.ops.blocks import pack_pages

HEADS, BATCH, LENGTH = 8, 3, 2001


@dataclass(frozen=True)
class Variant:
    """One call to compile for.

    Attributes:
        operation: "decode", "extend", "write" or "gather".
        k, v: Formats.
        static: Whether the scales are static.
        dims: Head sizes of K and V.
        groups: Query heads per KV head.
        tokens: New tokens.
        page: Slots of a page.
        dtype: Dtype of the query, or of new keys and values.
        extras: "window", "softcap", "sinks", "mask", "bias", "center" or "rotated".
            "complete" is a mask per query token. "latent" means one head whose K holds latents, and
            V their positions. "k" or "v" is the side to gather. "float32" means keys in float32
            next to values of a different dtype.
        main: Whether the variant must be fast.
    """

    operation: str
    k: str = "fp8_e4m3"
    v: str = "fp8_e4m3"
    static: bool = False
    dims: tuple[int, int] = (128, 128)
    groups: int = 4
    tokens: int = 1
    page: int = 64
    dtype: torch.dtype = torch.bfloat16
    extras: tuple[str, ...] = ()
    main: bool = False

    @property
    def name(self) -> str:
        """Name in a table."""
        parts = [
            self.operation, *([self.k] if self.k == self.v else [f"{self.k} and", self.v]),
            "static" if self.static else "", "D" + "/".join(map(str, dict.fromkeys(self.dims))),
            "" if self.groups == 4 else f"groups {self.groups}",
            "" if self.tokens == 1 else f"T{self.tokens}",
            "" if self.page == 64 else f"page {self.page}",
            "" if self.dtype == torch.bfloat16 else str(self.dtype).removeprefix("torch."),
            *self.extras,
        ]  # fmt: skip
        return " ".join(part.removeprefix("fp8_") for part in parts if part)

    @property
    def heads(self) -> int:
        """KV heads."""
        return 1 if "latent" in self.extras else HEADS

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V of one head, without scales."""
        width = (self.dtype.itemsize if name == AUTO else 1 for name in (self.k, self.v))
        return sum(w * d for w, d in zip(width, self.dims, strict=True))


def list_variants(names: Collection[str] = ()) -> list[Variant]:
    """Return the variants to compile for every target, or those with one of `names`."""
    formats = [{"k": name, "v": name} for name in FORMATS]
    # No hardware converts these formats, so their bits are shifted on every GPU.
    shifted_formats = [
        {"k": fmt.name, "v": fmt.name} for fmt in FORMATS.values() if fmt.torch_dtype is None
    ]
    auto, static = {"k": AUTO, "v": AUTO}, {"static": True}
    e2m5, int8 = ({"k": name, "v": name} for name in ("fp8_e2m5", "int8"))
    rotated = {**e2m5, "extras": ("rotated",)}
    everything = {"extras": ("window", "softcap", "sinks", "mask", "center")}
    complete = {"extras": ("complete",)}
    main_calls = [
        *formats, *({**fmt, **static} for fmt in formats), auto, {"dims": (64, 64)},
        {"page": 128}, {"groups": 8}, {"groups": 1}, {"extras": ("window",)},
        rotated, {**rotated, **int8, **static},
    ]  # fmt: skip
    # Models with latents have 16 to 128 heads, and a RoPE part in 16 bits.
    latent = {"dims": (512, 64), "groups": 16, "v": AUTO, "extras": ("latent",)}
    latents = [
        latent, {**latent, "k": "fp8_e3m4"}, {**latent, "k": AUTO},
        {**latent, "k": "int8", "static": True}, {**latent, "groups": 128},
        {**latent, "k": "fp8_e2m5", "extras": ("latent", "rotated")},
        {**latent, "groups": 128, "k": "fp8_e3m4"},
    ]  # fmt: skip
    other_calls = [
        {"dims": (96, 96)}, {"dims": (256, 256)}, {"k": AUTO}, {"page": 16}, {"extras": ("mask",)},
        everything, {"extras": ("bias",)}, {"dtype": torch.float32}, {"dims": (192, 128)},
        {"groups": 8, "tokens": 4}, {"groups": 8, "tokens": 8}, {"tokens": 5},
        *({"groups": g, "tokens": 4, **complete} for g in (4, 8)),
        {**rotated, "dims": (256, 256)}, {**rotated, "groups": 8, "tokens": 8}, *latents,
        {**latent, "v": "fp8_e4m3", "tokens": 4, "extras": ("latent", "window", "sinks", "mask")},
        {**latent, "extras": ("latent", "complete"), "tokens": 2},
        {**latent, "extras": ("latent", "bias", "softcap")},
        {**latent, "dims": (256, 64), "page": 16},
    ]  # fmt: skip
    extends = [
        {}, static, {"k": "fp8_e5m2", "v": "fp8_e5m2"}, *shifted_formats, auto, {"dims": (64, 64)},
        {"dims": (256, 256)}, everything, {"dtype": torch.float32}, complete,
        {**complete, "dims": (256, 256)}, rotated, {**rotated, "dims": (256, 256)},
    ]  # fmt: skip
    writes = [
        *formats, {**static, "extras": ("center",)}, auto,
        {**e2m5, "extras": ("rotated", "center")}, {"extras": ("float32",)},
    ]  # fmt: skip
    variants = [
        *(Variant("decode", **main, main=True) for main in main_calls),
        *(Variant("decode", **other) for other in other_calls),
        *(Variant("extend", **extend, tokens=1024) for extend in (*extends, *latents)),
        # Within a window, codes are not widened.
        *(Variant("extend", **fmt, tokens=1024, extras=("window",)) for fmt in formats),
        # Sequences are split as in decoding if there are too few programs for a GPU.
        *(Variant("extend", **extend, tokens=128) for extend in ({}, everything, complete)),
        *(Variant("write", **write, tokens=tokens) for write in writes for tokens in (1, 128)),
        *(Variant("gather", **{**gather, "extras": (side, *gather.get("extras", ()))})
          for gather in ({}, static, *shifted_formats, rotated) for side in "kv"),
    ]  # fmt: skip
    return [variant for variant in variants if not names or variant.name in names]


def call_variant(variant: Variant) -> None:
    """Call the operation of `variant` as the cache calls it."""
    kernels = importlib.import_module(f"hf_fp8kv.ops.triton.{variant.operation}")
    pages = _pages(variant)
    lengths = torch.full((BATCH,), LENGTH, dtype=torch.int32)
    if variant.operation == "gather":
        side = variant.extras[0]
        kernels.gather(pages, lengths, side, 0, LENGTH, variant.dtype, True)
    elif variant.operation == "write":
        kernels.write(pages, *_new_tokens(variant), lengths)
    else:
        latent, complete = "latent" in variant.extras, "complete" in variant.extras
        q_heads = variant.heads * variant.groups
        q_dim = sum(variant.dims) if latent else variant.dims[0]
        query = torch.zeros(BATCH, variant.tokens, q_heads, q_dim, dtype=variant.dtype)
        extras = {
            "window": 512,
            "softcap": 30.0,
            "sinks": torch.zeros(q_heads, dtype=variant.dtype),
            "mask": torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.uint8),
            "bias": torch.zeros(1, q_heads, variant.tokens, LENGTH, dtype=variant.dtype),
        }
        options = {name: x for name, x in extras.items() if name in variant.extras}
        if complete:
            options["mask"] = torch.ones(BATCH, 1, variant.tokens, LENGTH, dtype=torch.bool)
        spec = AttentionSpec(variant.dims[0] ** -0.5, causal=not complete, latent=latent, **options)
        kernels.attend(query.transpose(1, 2), pages, lengths, 0, LENGTH, spec)


def _new_tokens(variant: Variant) -> tuple[torch.Tensor, ...]:
    """Return keys and values with the strides of a projection: a token's heads are contiguous."""
    shape = (BATCH, variant.tokens, variant.heads)
    key_dtype = torch.float32 if "float32" in variant.extras else variant.dtype
    return tuple(
        torch.zeros(*shape, dim, dtype=dtype).transpose(1, 2)
        for dim, dtype in zip(variant.dims, (key_dtype, variant.dtype), strict=True)
    )


def _pages(variant: Variant) -> Pages:
    count = -(-LENGTH // variant.page) + variant.tokens
    dim_k, dim_v = variant.dims

    def side(name: str, dim: int) -> StoredSide:
        static = torch.ones(variant.heads, dim) if name != AUTO and variant.static else None
        return StoredSide(static, None, name, dim, "rotated" in variant.extras)

    def codes(name: str, *shape: int) -> torch.Tensor:
        dtype = variant.dtype if name == AUTO else torch.uint8
        return torch.zeros((2, variant.heads, *shape), dtype=dtype)

    k, v = side(variant.k, dim_k), side(variant.v, dim_v)
    if "center" in variant.extras:
        k = k._replace(center=torch.zeros(BATCH, variant.heads, dim_k))
    scales = None
    if k.is_dynamic or v.is_dynamic:
        scales = torch.ones(2, variant.heads, variant.page, 2, dtype=torch.bfloat16)
    return pack_pages(
        k, codes(variant.k, variant.page, dim_k), v, codes(variant.v, dim_v, variant.page), scales,
        torch.zeros((BATCH, count), dtype=torch.int32),
    )  # fmt: skip
