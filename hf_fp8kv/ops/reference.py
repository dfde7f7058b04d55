"""The specification of the three operations, in plain torch and float32, on any device.

Tests compare every other backend with this file, on the same bytes.
"""

import torch
from torch import Tensor

from ..errors import OutOfPagesError
from ..formats import AUTO, FORMATS
from ..formats.codec import decode, dynamic_scale, encode, search_scale
from ..formats.rotation import rotate
from .blocks import read_rows, split_places
from .pages import AttentionSpec, Pages, StoredSide
from .visibility import visible

# Tokens decoded at a time by `gather`.
CHUNK = 512
# Tokens encoded at a time: encoding needs temporary memory of many times their size.
WRITTEN_AT_A_TIME = 512


def write(pages: Pages, key: Tensor, value: Tensor, lengths: Tensor) -> None:
    """Store new tokens, with the arguments and errors of `ops.write`."""
    tokens = key.shape[2]
    number, slot, exists = locate(pages, lengths, tokens)
    if pages.table.is_cpu and not bool(exists.all()):
        raise_overrun(pages, lengths, tokens)
    for start in range(0, tokens, WRITTEN_AT_A_TIME):
        chunk = slice(start, start + WRITTEN_AT_A_TIME)
        k, k_scales = quantize(key[:, :, chunk], pages.k, search=True)
        v, v_scales = quantize(value[:, :, chunk], pages.v, search=False)
        for block, local, chosen in split_places(pages, number[:, chunk], exists[:, chunk]):
            parts, slots = pages.layout.split(block), slot[:, chunk][chosen]
            parts["k"][local, :, slots] = k.transpose(1, 2)[chosen].to(pages.k_dtype)
            parts["v"][local, :, :, slots] = v.transpose(1, 2)[chosen].to(pages.v_dtype)
            for i, scales in enumerate((k_scales, v_scales)):
                if scales is not None:
                    parts["token_scales"][local, :, slots, i] = scales.transpose(1, 2)[chosen]


def raise_overrun(pages: Pages, lengths: Tensor, tokens: int) -> None:
    """Raise OutOfPagesError for a write to positions without a page."""
    start = int(lengths.max()) - tokens
    raise OutOfPagesError(
        f"expected a page for each of {tokens} new tokens at position {start}, got a block table "
        f"of {pages.table.shape[1]} pages of {pages.page_size} tokens. Reserve pages first",
        needed=start + tokens,
        available=pages.table.shape[1] * pages.page_size,
    )


def locate(pages: Pages, lengths: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return page number, slot, and whether the page exists, of the new tokens, each `[B, T]`."""
    position = lengths[:, None].long() - tokens + torch.arange(tokens, device=lengths.device)
    column = position // pages.page_size
    inside = column < pages.table.shape[1]
    number = pages.table.long().gather(1, column.clamp(max=pages.table.shape[1] - 1))
    return number, position % pages.page_size, inside & (number >= 0)


def quantize(x: Tensor, stored: StoredSide, *, search: bool) -> tuple[Tensor, Tensor | None]:
    """Return the stored form of `x`, `[B, Hkv, T, D]`, and its dynamic scales or None.

    `search` selects the best dynamic scale within an octave (for K) instead of the smallest (for
    V).
    """
    if stored.format == AUTO:
        return x, None
    fmt = FORMATS[stored.format]
    x = x.float()
    if stored.center is not None:
        x = x - stored.center[:, :, None]
    if stored.rotated:
        x = rotate(x)
    if stored.static_scale is not None:
        return encode(x * stored.static_scale.reciprocal()[:, None], fmt), None
    scales = search_scale(x, fmt) if search else dynamic_scale(x, fmt)
    return encode(x * scales.float().reciprocal()[..., None], fmt), scales


def gather(
    pages: Pages,
    lengths: Tensor,
    side: str,
    start: int,
    stop: int,
    dtype: torch.dtype,
    ragged: bool,
) -> Tensor:
    """Return dense keys or values, with the arguments and result of `ops.gather`."""
    dim = (pages.k if side == "k" else pages.v).head_dim
    shape = (len(pages.table), pages.heads, stop - start, dim)
    out = torch.empty(shape, dtype=dtype, device=pages.table.device)
    step = max(CHUNK // pages.page_size, 1) * pages.page_size
    begin = start
    while begin < stop:
        end = min((begin // step + 1) * step, stop)
        out[:, :, begin - start : end - start] = read_dense(pages, side, begin, end)
        begin = end
    if ragged:
        position = torch.arange(start, stop, device=lengths.device)
        empty = position >= lengths[:, None]
        out.masked_fill_(empty[:, None, :, None], 0)
    return out


def read_dense(pages: Pages, side: str, start: int, stop: int) -> Tensor:
    """Return K or V, `[B, Hkv, stop - start, D]`, in float32, or in the stored dtype for "auto"."""
    size = pages.page_size
    first, last = start // size, -(-stop // size)
    # A freed page is outside the window. It is read as page 0, and the caller masks it.
    parts = pages.layout.split(read_rows(pages, first, last))
    shape = len(pages.table), last - first
    stored = pages.k if side == "k" else pages.v
    codes = parts[side].unflatten(0, shape)
    if side == "v":
        codes = codes.transpose(3, 4)
    inside = slice(start - first * size, stop - first * size)
    # [B, pages, Hkv, S, D] -> [B, Hkv, pages * S, D]
    tokens: Tensor = codes.transpose(1, 2).flatten(2, 3)[:, :, inside]
    if stored.format == AUTO:
        return tokens
    x = decode(tokens, FORMATS[stored.format])
    if stored.static_scale is not None:
        x *= stored.static_scale[:, None]
    else:
        scales = parts["token_scales"][..., "kv".index(side)].unflatten(0, shape)
        scales = scales.transpose(1, 2).flatten(2, 3)
        x *= scales[:, :, inside, None].float()
    if stored.rotated:
        x = rotate(x)
    if stored.center is not None:
        x += stored.center[:, :, None]
    return x


def attend(
    query: Tensor, pages: Pages, lengths: Tensor, start: int, stop: int, spec: AttentionSpec
) -> Tensor:
    """Compute softmax attention, with the arguments and result of `ops.attend`."""
    batch, q_heads, tokens, _ = query.shape
    k = gather(pages, lengths, "k", start, stop, torch.float32, ragged=True)
    v = gather(pages, lengths, "v", start, stop, torch.float32, ragged=True)
    if spec.latent:
        k, v = torch.cat([k, v], -1), k
    groups = q_heads // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    logits = query.float() @ k.transpose(2, 3) * spec.scaling
    if spec.softcap:
        logits = torch.tanh(logits / spec.softcap) * spec.softcap
    if spec.bias is not None:
        logits = logits + spec.bias.float()
    seen = visible(lengths, tokens, start, stop, spec.causal, spec.window)[:, None]
    if spec.mask is not None:
        seen = seen & spec.mask.bool()
    logits = logits.masked_fill(~seen, -torch.inf)
    if spec.sinks is not None:
        sink = spec.sinks.float().view(1, -1, 1, 1).expand(batch, -1, tokens, 1)
        weights = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    weights = weights.masked_fill(~seen.any(-1, keepdim=True), 0)
    # 0 * NaN is NaN, so values of hidden tokens are replaced: they may hold NaN.
    v = v.masked_fill(~seen.any(2)[..., None], 0)
    return (weights @ v).transpose(1, 2).to(query.dtype)
