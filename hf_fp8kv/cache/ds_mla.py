"""Latents in the layout `fp8_ds_mla` of vLLM and FlashMLA: a cache to tensors, and back.

A token is a row of bytes, 656 of them for latents of R = 512 and positions of P = 64 numbers:

    offset                 bytes      field
    0                      R          latent, float8 E4M3FN codes
    R                      R / 32     a scale for each 128 of them, float32: real = code * scale
    R + R / 32             2 * P      positions (RoPE), bfloat16, not scaled

Source: vLLM's documentation of `vllm.v1.attention.backends.mla.flashmla_sparse`, 0.11 (the layout),
and its `concat_and_cache_ds_mla_kernel` (a scale is the largest number of its 128, over 448).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .. import ops
from ..errors import ConfigError
from ..formats import FORMATS
from ..formats.codec import decode, encode
from ..ops import Pages
from ..ops.blocks import copy_side_by_side, write_back
from ..ops.reference import locate
from .cache import FP8PagedCache
from .layer import PagedLayerBase
from .paged_tensor import pages_of

_E4M3 = FORMATS["fp8_e4m3"]
# Numbers that share a scale.
_BLOCK = 128


def to_ds_mla(cache: FP8PagedCache) -> dict[int, Tensor]:
    """Return the tokens of each layer of latents: uint8 `[B, T, R + R / 32 + 2 * P]`.

    That is all that the layout has: not the keys of an indexer, nor the states of other layers.

    Latents stored as `fp8_e4m3` with dynamic scales, not rotated, keep their codes, and a block's
    scale is the token's. Others are rounded to E4M3 here, with the smallest scale of each block.

    Raises:
        ConfigError: a cache without tokens, or whose layers hold other things than latents of a
            multiple of 128 numbers, or a window.
    """
    layers = _find_layers(cache)
    return {index: _pack(layer) for index, layer in layers.items()}


def from_ds_mla(
    tokens: Mapping[int, Tensor],
    config: PreTrainedConfig,
    *,
    model_dtype: torch.dtype | None = None,
    **cache_keywords: Any,
) -> FP8PagedCache:
    """Return a cache that holds these tokens.

    Where a layer is stored as `fp8_e4m3` with dynamic scales, not rotated, a token whose scales are
    all the same bfloat16 number keeps its codes: what `to_ds_mla` wrote of such a layer is stored
    bit for bit. Everything else is rounded to the layer's format once more.

    Args:
        tokens: of each layer of latents, uint8 `[B, T, R + R / 32 + 2 * P]`.
        config: the model's.
        model_dtype: None: the config's, or bfloat16.
        cache_keywords: of `FP8PagedCache`.

    Raises:
        ConfigError: tokens of other layers or sizes, or a model with layers that hold more than
            latents, which the cache would be without.
    """
    cache = FP8PagedCache(config, **cache_keywords)
    decoder = config.get_text_config(decoder=True)
    layers = {layer.index: layer for layer in cache.paged_layers}
    _refuse_other_layers(cache)
    _check(tokens, layers, decoder)
    dtype = model_dtype or getattr(config, "dtype", None) or torch.bfloat16
    with torch.no_grad():
        for index, rows in tokens.items():
            codes, scales, positions = _split(rows, decoder.kv_lora_rank)
            blocks = decode(codes, _E4M3).unflatten(-1, (-1, _BLOCK)) * scales[..., None]
            latent = blocks.flatten(-2).to(dtype)
            cache.update(latent[:, None], positions.to(dtype)[:, None], index)
            if _keeps_codes(layers[index]):
                _restore_codes(layers[index], codes, scales)
    return cache


def _refuse_other_layers(cache: FP8PagedCache) -> None:
    """Raise ConfigError for a cache whose layers hold what the layout has not."""
    others = {
        index: type(layer).__name__
        for index, layer in enumerate(cache.layers)
        if not isinstance(layer, PagedLayerBase)
        or hasattr(layer, "indexer")
        or layer.sliding_window is not None
    }
    if others:
        raise ConfigError(
            "from_ds_mla expected a model whose layers hold latents of all tokens and nothing else "
            f"(no indexer, window, linear or skipped layers), got {others}; FP8PagedCache.save and "
            "load keep any cache"
        )


def _find_layers(cache: FP8PagedCache) -> dict[int, PagedLayerBase]:
    layers = {layer.index: layer for layer in cache.paged_layers}
    for layer in layers.values():
        if not layer.is_initialized or layer.host_length() == 0:
            raise ConfigError(
                f"to_ds_mla expected a cache with tokens, got none in layer {layer.index}; call "
                "the model with it first"
            )
        if layer.sliding_window is not None:
            raise ConfigError(
                f"to_ds_mla expected layers without a window, got {layer} in layer {layer.index}; "
                "the layout has all tokens: leave such a model's cache as it is, or save it"
            )
        heads, rank = layer.pool.heads, layer.pool.k_dim
        if heads != 1 or rank % _BLOCK or layer.pool.v_dim >= rank:
            raise ConfigError(
                f"to_ds_mla expected latents, [B, 1, T, a multiple of {_BLOCK}], and fewer "
                f"positions, got {heads} heads of {rank} and {layer.pool.v_dim} numbers in layer "
                f"{layer.index}; FP8PagedCache.save writes any cache"
            )
    if not layers:
        raise ConfigError("to_ds_mla expected layers of latents, got none; use the model's cache")
    return layers


def _pack(layer: PagedLayerBase) -> Tensor:
    stored = layer.stored()
    assert stored is not None
    key, _ = stored
    pages, length = pages_of(key), layer.host_length()
    span = (0, length, torch.float32, False, layer.backend)
    latent = ops.gather(pages, key.lengths, "k", *span)[:, 0]
    positions = ops.gather(pages, key.lengths, "v", *span)[:, 0].bfloat16()
    blocks = latent.unflatten(-1, (-1, _BLOCK))
    if _keeps_codes(layer):
        # A code times its scale is exact in float32, and so the quotient is the code's number.
        scales = _token_scales(pages, length)[..., None, None].expand(*blocks.shape[:-1], 1)
    else:
        least = torch.finfo(torch.float32).tiny
        scales = (blocks.abs().amax(-1, keepdim=True) / _E4M3.max).clamp(min=least)
    parts = encode(blocks / scales, _E4M3).flatten(-2), scales.squeeze(-1).contiguous(), positions
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)


def _keeps_codes(layer: PagedLayerBase) -> bool:
    """Return whether a layer's codes are those of the layout, with a scale for each token."""
    k = layer.storage.k
    is_dynamic = layer.k_static_scale is None
    return k.format == _E4M3.name and not k.rotated and not k.centered and is_dynamic


def _token_scales(pages: Pages, length: int) -> Tensor:
    """Return the scales of latents, `[B, T]`, float32."""
    if pages.addresses is not None:
        pages = copy_side_by_side(pages, 0, -(-length // pages.page_size))
    scales = pages.scales_of("k")
    assert scales is not None
    columns = -(-length // pages.page_size)
    rows = scales[pages.table[:, :columns].long(), 0]
    return rows.flatten(1)[:, :length].float()


def _split(rows: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes `[B, T, R]`, scales `[B, T, R / 128]`, float32, positions, bfloat16."""
    sizes = [rank, rank // _BLOCK * 4, rows.shape[-1] - rank - rank // _BLOCK * 4]
    codes, scales, positions = (part.contiguous() for part in rows.split(sizes, -1))
    return codes, scales.view(torch.float32), positions.view(torch.bfloat16)


def _restore_codes(layer: PagedLayerBase, codes: Tensor, scales: Tensor) -> None:
    """Put codes and scales in place of those that were made anew, where a token has one scale."""
    stored = layer.stored()
    assert stored is not None
    pages, lengths = pages_of(stored[0]), stored[0].lengths
    scale = scales[..., 0]
    same = (scales == scale[..., None]).all(-1) & (scale.bfloat16().float() == scale)
    count = -(-codes.shape[1] // pages.page_size)
    copies = pages if pages.addresses is None else copy_side_by_side(pages, 0, count)
    number, slot, _ = locate(copies, lengths, codes.shape[1])
    number, slot = number[same], slot[same]
    copies.k.codes[number, 0, slot] = codes[same]
    target = copies.scales_of("k")
    assert target is not None
    target[number, 0, slot] = scale[same].bfloat16()
    if copies is not pages:
        write_back(pages, 0, copies)


def _check(tokens: Mapping[int, Tensor], layers: Mapping[int, PagedLayerBase], config: Any) -> None:
    """Raise ConfigError for tokens that are not those of all layers of this config."""
    rank, positions = (getattr(config, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    if rank is None or positions is None or rank % _BLOCK:
        raise ConfigError(
            f"config: expected that of a model with latents of a multiple of {_BLOCK} numbers, got "
            f"kv_lora_rank={rank}; use FP8PagedCache.load for other caches"
        )
    if set(tokens) != set(layers):
        raise ConfigError(
            f"tokens: expected those of the layers {sorted(layers)}, got {sorted(tokens)}; use the "
            "config of the model that they come from"
        )
    width, shapes = rank + rank // 32 + 2 * positions, {rows.shape for rows in tokens.values()}
    first = next(iter(tokens.values()))
    wrong = any(rows.dtype != torch.uint8 for rows in tokens.values()) or len(shapes) > 1
    if wrong or first.ndim != 3 or first.shape[-1] != width or not first.shape[1]:
        raise ConfigError(
            f"tokens: expected uint8 [B, T, {width}], the same in all layers, got "
            f"{sorted(map(tuple, shapes))} of {first.dtype}; view pages as [tokens, {width}] first"
        )
