"""The specification of the three operations, in plain torch and float32, on any device.

Tests compare every other backend with this file, on the same bytes.
"""

import torch
from torch import Tensor

from ..errors import OutOfPagesError
from ..formats import AUTO, FORMATS
from ..formats.codec import compute_dynamic_scale, decode, encode, search_scale
from ..formats.rotation import rotate
from .blocks import group_by_block, read_rows
from .page_layout import pack_codes, unpack_codes
from .pages import AttentionSpec, Pages, StoredSide
from .visibility import find_visible

# Maximum number of tokens that `gather` decodes at a time, unless a page is larger.
MAX_GATHER_TOKENS = 512
# Maximum number of tokens that `write` encodes at a time. Encoding needs many times the memory of
# its input.
MAX_WRITE_TOKENS = 512


def write(
    pages: Pages, key: Tensor, value: Tensor, lengths: Tensor, _limit: int | None = None
) -> None:
    """Store new tokens, with the arguments and errors of `ops.write`."""
    num_tokens = key.shape[2]
    page_numbers, slots, exists = locate_tokens(pages, lengths, num_tokens)
    if pages.table.is_cpu and not bool(exists.all()):
        raise_overrun(pages, lengths, num_tokens)
    for start in range(0, num_tokens, MAX_WRITE_TOKENS):
        chunk = slice(start, start + MAX_WRITE_TOKENS)
        k, k_scales = quantize(key[:, :, chunk], pages.k, search=True)
        v, v_scales = quantize(value[:, :, chunk], pages.v, search=False)
        k, v = pack_codes(k, pages.k_dtype), pack_codes(v, pages.v_dtype)
        for block, rows, tokens in group_by_block(pages, page_numbers[:, chunk], exists[:, chunk]):
            regions = pages.layout.split(block)
            block_slots = slots[:, chunk][tokens]
            k_codes, v_codes = regions["k"], regions["v"]
            k_codes[rows, :, block_slots] = k.transpose(1, 2)[tokens].to(k_codes.dtype)
            v_codes[rows, :, :, block_slots] = v.transpose(1, 2)[tokens].to(v_codes.dtype)
            for side, scales in enumerate((k_scales, v_scales)):
                if scales is not None:
                    token_scales = scales.transpose(1, 2)[tokens]
                    regions["token_scales"][rows, :, block_slots, side] = token_scales


def raise_overrun(pages: Pages, lengths: Tensor, num_tokens: int) -> None:
    """Raise OutOfPagesError for a write to positions without a page."""
    start = int(lengths.max()) - num_tokens
    raise OutOfPagesError(
        f"expected a page for each of {num_tokens} new tokens at position {start}, got a block "
        f"table of {pages.table.shape[1]} pages of {pages.page_size} tokens. Reserve pages first",
        needed=start + num_tokens,
        available=pages.table.shape[1] * pages.page_size,
    )


def locate_tokens(pages: Pages, lengths: Tensor, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the page number and slot of each token, and whether its page exists, each `[B, T]`."""
    position = lengths[:, None].long() + torch.arange(-num_tokens, 0, device=lengths.device)
    column = position // pages.page_size
    in_table = column < pages.table.shape[1]
    page_number = pages.table.long().gather(1, column.clamp(max=pages.table.shape[1] - 1))
    return page_number, position % pages.page_size, in_table & (page_number >= 0)


def quantize(x: Tensor, stored_side: StoredSide, *, search: bool) -> tuple[Tensor, Tensor | None]:
    """Return the codes of `x`, `[B, Hkv, T, D]`, and its dynamic scales, `[B, Hkv, T]`, or None.

    `search` selects the best dynamic scale within an octave (for K) instead of the smallest (for
    V).
    """
    if stored_side.format == AUTO:
        return x, None
    fmt = FORMATS[stored_side.format]
    x = x.float()
    if stored_side.center is not None:
        x = x - stored_side.center[:, None]
    if stored_side.rotated:
        x = rotate(x)
    if stored_side.static_scale is not None:
        return encode(x * stored_side.static_scale.reciprocal()[:, None], fmt), None
    scales = search_scale(x, fmt) if search else compute_dynamic_scale(x, fmt)
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
    shape = (len(pages.table), pages.num_heads, stop - start, dim)
    out = torch.empty(shape, dtype=dtype, device=pages.table.device)
    step = max(MAX_GATHER_TOKENS // pages.page_size, 1) * pages.page_size
    for aligned_start in range(start // step * step, stop, step):
        chunk_start = max(aligned_start, start)
        chunk_stop = min(aligned_start + step, stop)
        out[:, :, chunk_start - start : chunk_stop - start] = read_dense(
            pages, side, chunk_start, chunk_stop
        )
    if ragged:
        position = torch.arange(start, stop, device=lengths.device)
        is_empty = position >= lengths[:, None]
        out.masked_fill_(is_empty[:, None, :, None], 0)
    return out


def read_dense(pages: Pages, side: str, start: int, stop: int) -> Tensor:
    """Return K or V, `[B, Hkv, stop - start, D]`, in float32, or in the stored dtype for "auto"."""
    page_size = pages.page_size
    page_start = start // page_size
    page_stop = -(-stop // page_size)
    # A freed page is outside the window. It is read as page 0, and the caller masks it.
    regions = pages.layout.split(read_rows(pages, page_start, page_stop))
    shape = len(pages.table), page_stop - page_start
    stored_side, dtype = (pages.k, pages.k_dtype) if side == "k" else (pages.v, pages.v_dtype)
    codes: Tensor = regions[side].unflatten(0, shape)
    if side == "v":
        codes = codes.transpose(3, 4)
    span = slice(start - page_start * page_size, stop - page_start * page_size)
    # [B, pages, Hkv, S, D] -> [B, Hkv, pages * S, D]
    codes = codes.transpose(1, 2).flatten(2, 3)[:, :, span]
    if stored_side.format == AUTO:
        return codes
    x = decode(unpack_codes(codes, dtype), FORMATS[stored_side.format])
    if stored_side.static_scale is not None:
        x *= stored_side.static_scale[:, None]
    else:
        scales = regions["token_scales"][..., 0 if side == "k" else 1].unflatten(0, shape)
        scales = scales.transpose(1, 2).flatten(2, 3)
        x *= scales[:, :, span, None].float()
    if stored_side.rotated:
        x = rotate(x)
    if stored_side.center is not None:
        x += stored_side.center[:, None]
    return x


def attend(
    query: Tensor,
    pages: Pages,
    lengths: Tensor,
    start: int,
    stop: int,
    spec: AttentionSpec,
    _schedule: None = None,
) -> Tensor:
    """Compute softmax attention, with the arguments and result of `ops.attend`."""
    batch, num_query_heads, num_tokens, _ = query.shape
    k = gather(pages, lengths, "k", start, stop, torch.float32, ragged=True)
    v = gather(pages, lengths, "v", start, stop, torch.float32, ragged=True)
    if spec.latent:
        k, v = torch.cat([k, v], -1), k
    group_size = num_query_heads // k.shape[1]
    k = k.repeat_interleave(group_size, 1)
    v = v.repeat_interleave(group_size, 1)
    logits = query.float() @ k.transpose(2, 3) * spec.scaling
    if spec.softcap:
        logits = torch.tanh(logits / spec.softcap) * spec.softcap
    if spec.bias is not None:
        logits = logits + spec.bias.float()
    is_visible = find_visible(lengths, num_tokens, start, stop, spec.causal, spec.window)[:, None]
    if spec.mask is not None:
        is_visible = is_visible & spec.mask.bool()
    logits = logits.masked_fill(~is_visible, -torch.inf)
    if spec.sinks is not None:
        sink = spec.sinks.float().view(1, -1, 1, 1).expand(batch, -1, num_tokens, 1)
        weights = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    weights = weights.masked_fill(~is_visible.any(-1, keepdim=True), 0)
    # Hidden tokens may have the value NaN, and 0 * NaN is NaN, so their values become zeros.
    v = v.masked_fill(~is_visible.any(2)[..., None], 0)
    return (weights @ v).transpose(1, 2).to(query.dtype)
