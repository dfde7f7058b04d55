"""List the calls for which kernels are compiled: every format, and selected shapes and features.

`call_variant` makes the call that a cache would make, with small tensors on the CPU.
"""

import importlib
from collections.abc import Collection
from dataclasses import dataclass

import torch

from benchmarks.gpu.random_data import pack_pages
from hf_fp8kv.formats import AUTO, FORMATS
from hf_fp8kv.ops import AttentionSpec, Pages, StoredSide

NUM_KV_HEADS = 8
BATCH = 3
LENGTH = 2001  # in tokens per sequence


@dataclass(frozen=True)
class Variant:
    """A call whose kernels are compiled.

    Attributes:
        operation: "decode", "extend", "write" or "gather".
        k, v: Storage formats of K and V.
        static: Whether the scales are static.
        dims: Head sizes of K and V.
        queries_per_head: Number of query heads per KV head.
        num_tokens: Number of new tokens per sequence.
        page_size: Number of slots (tokens) per page.
        dtype: Dtype of the query, or of new keys and values.
        extras: "window", "softcap", "sinks", "mask", "bias", "center" or "rotated".
            "complete" is a mask with a row per query token. "latent" means that K of one head holds
            latents, and V their RoPE part. "k" or "v" is the side to gather. "float32" is the dtype
            of new keys, while new values have `dtype`.
        is_main: Whether the variant must be fast.
    """

    operation: str
    k: str = "fp8_e4m3"
    v: str = "fp8_e4m3"
    static: bool = False
    dims: tuple[int, int] = (128, 128)
    queries_per_head: int = 4
    num_tokens: int = 1
    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    extras: tuple[str, ...] = ()
    is_main: bool = False

    @property
    def name(self) -> str:
        """The name in tables, made of all fields that differ from their defaults."""
        parts = [
            self.operation, *([self.k] if self.k == self.v else [f"{self.k} and", self.v]),
            "static" if self.static else "", "D" + "/".join(map(str, dict.fromkeys(self.dims))),
            "" if self.queries_per_head == 4 else f"groups {self.queries_per_head}",
            "" if self.num_tokens == 1 else f"T{self.num_tokens}",
            "" if self.page_size == 64 else f"page {self.page_size}",
            "" if self.dtype == torch.bfloat16 else str(self.dtype).removeprefix("torch."),
            *self.extras,
        ]  # fmt: skip
        return " ".join(part.removeprefix("fp8_") for part in parts if part)

    @property
    def num_kv_heads(self) -> int:
        return 1 if "latent" in self.extras else NUM_KV_HEADS

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V of one head, without scales."""
        itemsizes = (self.dtype.itemsize if name == AUTO else 1 for name in (self.k, self.v))
        return sum(size * dim for size, dim in zip(itemsizes, self.dims, strict=True))


def list_variants(variant_names: Collection[str] = ()) -> list[Variant]:
    """Return the variants to compile for every target, or only the variants with these names."""
    formats = [{"k": name, "v": name} for name in FORMATS]
    # No hardware converts these formats, so their bits are shifted on every GPU.
    shifted_formats = [
        {"k": fmt.name, "v": fmt.name} for fmt in FORMATS.values() if fmt.torch_dtype is None
    ]
    auto = {"k": AUTO, "v": AUTO}
    static = {"static": True}
    e2m5, int8 = ({"k": name, "v": name} for name in ("fp8_e2m5", "int8"))
    rotation = {**e2m5, "extras": ("rotated",)}
    all_features = {"extras": ("window", "softcap", "sinks", "mask", "center")}
    full_mask = {"extras": ("complete",)}
    main_calls = [
        *formats, *({**fmt, **static} for fmt in formats if FORMATS[fmt["k"]].bits == 8), auto,
        {"dims": (64, 64)}, {"page_size": 128}, {"queries_per_head": 8}, {"queries_per_head": 1},
        {"extras": ("window",)},
        rotation, {**rotation, **int8, **static},
    ]  # fmt: skip
    # Models with latents have 16 to 128 heads, and a RoPE part in 16 bits.
    mla = {"dims": (512, 64), "queries_per_head": 16, "v": AUTO, "extras": ("latent",)}
    mla_calls = [
        mla, {**mla, "k": "fp8_e3m4"}, {**mla, "k": AUTO},
        {**mla, "k": "int8", "static": True}, {**mla, "queries_per_head": 128},
        {**mla, "k": "fp8_e2m5", "extras": ("latent", "rotated")},
        {**mla, "queries_per_head": 128, "k": "fp8_e3m4"},
    ]  # fmt: skip
    other_calls = [
        {"dims": (96, 96)}, {"dims": (256, 256)}, {"k": AUTO}, {"page_size": 16}, all_features,
        {"extras": ("mask",)}, {"extras": ("bias",)}, {"dtype": torch.float32},
        {"dims": (192, 128)}, *({"queries_per_head": 8, "num_tokens": n} for n in (4, 8)),
        {"num_tokens": 5},
        *({"queries_per_head": n, "num_tokens": 4, **full_mask} for n in (4, 8)),
        {**rotation, "dims": (256, 256)}, {**rotation, "queries_per_head": 8, "num_tokens": 8},
        *mla_calls,
        {**mla, "v": "fp8_e4m3", "num_tokens": 4, "extras": ("latent", "window", "sinks", "mask")},
        {**mla, "extras": ("latent", "complete"), "num_tokens": 2},
        {**mla, "extras": ("latent", "bias", "softcap")},
        {**mla, "dims": (256, 64), "page_size": 16},
    ]  # fmt: skip
    extend_calls = [
        {}, static, {"k": "fp8_e5m2", "v": "fp8_e5m2"}, *shifted_formats, auto, {"dims": (64, 64)},
        {"v": AUTO}, {"k": AUTO, "v": "int8"},
        {"dims": (256, 256)}, all_features, {"dtype": torch.float32}, full_mask,
        {**full_mask, "dims": (256, 256)}, rotation, {**rotation, "dims": (256, 256)},
    ]  # fmt: skip
    write_calls = [
        *formats, {**static, "extras": ("center",)}, auto,
        {**e2m5, "extras": ("rotated", "center")}, {"extras": ("float32",)},
    ]  # fmt: skip
    gather_calls = [
        {**call, "extras": (side, *call.get("extras", ()))}
        for call in ({}, static, *shifted_formats, rotation) for side in "kv"
    ]  # fmt: skip
    variants = [
        *(Variant("decode", **call, is_main=True) for call in main_calls),
        *(Variant("decode", **call) for call in other_calls),
        *(Variant("extend", **call, num_tokens=1024) for call in (*extend_calls, *mla_calls)),
        # Calls with a window do not run the kernel that widens codes.
        *(Variant("extend", **fmt, num_tokens=1024, extras=("window",)) for fmt in formats),
        # Sequences are split as in decoding if there are too few programs for a GPU.
        *(Variant("extend", **call, num_tokens=128) for call in ({}, all_features, full_mask)),
        *(Variant("write", **call, num_tokens=n) for call in write_calls for n in (1, 128)),
        *(Variant("gather", **call) for call in gather_calls),
    ]  # fmt: skip
    return [variant for variant in variants if not variant_names or variant.name in variant_names]


def call_variant(variant: Variant) -> None:
    """Call the operation of a variant with the arguments that a cache would pass."""
    kernels = importlib.import_module(f"hf_fp8kv.ops.triton.{variant.operation}")
    pages = _make_pages(variant)
    lengths = torch.full((BATCH,), LENGTH, dtype=torch.int32)
    if variant.operation == "gather":
        kernels.gather(pages, lengths, variant.extras[0], 0, LENGTH, variant.dtype, True)
    elif variant.operation == "write":
        kernels.write(pages, *_make_new_tokens(variant), lengths)
    else:
        is_latent = "latent" in variant.extras
        is_complete = "complete" in variant.extras
        num_query_heads = variant.num_kv_heads * variant.queries_per_head
        query_dim = sum(variant.dims) if is_latent else variant.dims[0]
        query = torch.zeros(
            BATCH, variant.num_tokens, num_query_heads, query_dim, dtype=variant.dtype
        )
        features = {
            "window": 512,
            "softcap": 30.0,
            "sinks": torch.zeros(num_query_heads, dtype=variant.dtype),
            "mask": torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.uint8),
            "bias": torch.zeros(
                1, num_query_heads, variant.num_tokens, LENGTH, dtype=variant.dtype
            ),
        }
        options = {name: feature for name, feature in features.items() if name in variant.extras}
        if is_complete:
            options["mask"] = torch.ones(BATCH, 1, variant.num_tokens, LENGTH, dtype=torch.bool)
        scale = variant.dims[0] ** -0.5
        spec = AttentionSpec(scale, causal=not is_complete, latent=is_latent, **options)
        kernels.attend(query.transpose(1, 2), pages, lengths, 0, LENGTH, spec)


def _make_new_tokens(variant: Variant) -> tuple[torch.Tensor, ...]:
    """Return keys and values with the strides of a projection: a token's heads are contiguous."""
    shape = (BATCH, variant.num_tokens, variant.num_kv_heads)
    key_dtype = torch.float32 if "float32" in variant.extras else variant.dtype
    return tuple(
        torch.zeros(*shape, dim, dtype=dtype).transpose(1, 2)
        for dim, dtype in zip(variant.dims, (key_dtype, variant.dtype), strict=True)
    )


def _make_pages(variant: Variant) -> Pages:
    page_size = variant.page_size
    k_dim, v_dim = variant.dims
    pages_per_sequence = -(-LENGTH // page_size) + variant.num_tokens

    def make_side(name: str, dim: int) -> StoredSide:
        scales = torch.ones(variant.num_kv_heads, dim) if name != AUTO and variant.static else None
        return StoredSide(scales, None, name, dim, "rotated" in variant.extras)

    def make_codes(name: str, *shape: int) -> torch.Tensor:
        dtype = variant.dtype if name == AUTO else torch.uint8
        return torch.zeros((2, variant.num_kv_heads, *shape), dtype=dtype)

    k, v = make_side(variant.k, k_dim), make_side(variant.v, v_dim)
    if "center" in variant.extras:
        k = k._replace(center=torch.zeros(variant.num_kv_heads, k_dim))
    scales = None
    if k.is_dynamic or v.is_dynamic:
        scales = torch.ones(2, variant.num_kv_heads, page_size, 2, dtype=torch.bfloat16)
    return pack_pages(
        k, make_codes(variant.k, page_size, k_dim), v, make_codes(variant.v, v_dim, page_size),
        scales, torch.zeros((BATCH, pages_per_sequence), dtype=torch.int32),
    )  # fmt: skip
