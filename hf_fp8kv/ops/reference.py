"""The specification of the three operations: plain torch in float32, on any device.

Every other backend is compared with this file, on the same bytes.
"""

import torch

from ..errors import OutOfPagesError
from ..formats import AUTO, FORMATS
from ..formats.codec import decode, dynamic_scale, encode, search_scale
from .pages import AttentionSpec, Pages, StoredSide
from .visibility import visible

# Tokens that are decoded at a time when a dense copy is asked for.
CHUNK = 512
# Tokens that are encoded at a time: what that needs besides is many times their size.
WRITTEN_AT_A_TIME = 512


def write(pages: Pages, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor) -> None:
    """Token `t` of sequence `b` is then stored at position `lengths[b] + t`.

    Args:
        pages: where to.
        key: `[B, Hkv, T, Dk]`, any floating dtype, any strides.
        value: `[B, Hkv, T, Dv]`.
        lengths: `[B]`, int32, tokens before this call.

    Raises:
        OutOfPagesError: on CPU, when a position has no page; nothing was written. On other devices
            such a token is not written.
    """
    if key.shape[2] > WRITTEN_AT_A_TIME:
        locate_all(pages, lengths, key.shape[2])
        for at in range(0, key.shape[2], WRITTEN_AT_A_TIME):
            part = slice(at, at + WRITTEN_AT_A_TIME)
            write(pages, key[:, :, part], value[:, :, part], lengths + at)
        return
    number, slot, exists = locate(pages, lengths, key.shape[2])
    k, k_scales = quantize(key, pages.k, search=True)
    v, v_scales = quantize(value, pages.v, search=False)
    if pages.table.is_cpu:
        if not bool(exists.all()):
            raise_overrun(pages, lengths, key.shape[2])
        place = (number, slot)
        chosen: tuple[torch.Tensor, ...] | None = None
    else:
        chosen = exists.nonzero(as_tuple=True)
        place = (number[chosen], slot[chosen])

    def tokens_first(x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(1, 2)
        return x if chosen is None else x[chosen]

    pages.k.codes[place[0], :, place[1]] = tokens_first(k)
    pages.v.codes[place[0], :, :, place[1]] = tokens_first(v)
    for stored, scales in ((pages.k, k_scales), (pages.v, v_scales)):
        if scales is not None and stored.token_scales is not None:
            stored.token_scales[place[0], :, place[1]] = tokens_first(scales)


def raise_overrun(pages: Pages, lengths: torch.Tensor, tokens: int) -> None:
    """Raises OutOfPagesError for a write to positions that have no page."""
    most = int(lengths.max())
    raise OutOfPagesError(
        f"expected a page for each of {tokens} new tokens at position {most}, got a block table of "
        f"{pages.table.shape[1]} pages of {pages.page_size} tokens; reserve pages first",
        needed=most + tokens,
        available=pages.table.shape[1] * pages.page_size,
    )


def locate_all(pages: Pages, lengths: torch.Tensor, tokens: int) -> None:
    """Raises OutOfPagesError, on CPU, unless every one of `tokens` new tokens has a page."""
    if pages.table.is_cpu and not bool(locate(pages, lengths, tokens)[2].all()):
        raise_overrun(pages, lengths, tokens)


def locate(
    pages: Pages, lengths: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns page number, slot, and whether there is a page, of `tokens` new tokens: `[B, T]`."""
    position = lengths[:, None].long() + torch.arange(tokens, device=lengths.device)
    column = position // pages.page_size
    inside = column < pages.table.shape[1]
    number = pages.table.long().gather(1, column.clamp(max=pages.table.shape[1] - 1))
    return number, position % pages.page_size, inside & (number >= 0)


def quantize(
    x: torch.Tensor, stored: StoredSide, *, search: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what is stored for `x`, and its dynamic scales if it has any.

    Args:
        x: `[B, Hkv, T, D]`.
        stored: whose format, static scale and center to use.
        search: whether a dynamic scale is the best of an octave (K) or the smallest (V).

    Returns:
        Codes `[B, Hkv, T, D]`, uint8 (or `x` itself for "auto"), and `[B, Hkv, T]`, bfloat16, or
        None.
    """
    if stored.format == AUTO:
        return x, None
    fmt = FORMATS[stored.format]
    x = x.float()
    if stored.center is not None:
        x = x - stored.center[:, :, None]
    if stored.static_scale is not None:
        return encode(x * stored.static_scale.reciprocal()[:, None], fmt), None
    scales = search_scale(x, fmt) if search else dynamic_scale(x, fmt)
    return encode(x * scales.float().reciprocal()[..., None], fmt), scales


def gather(
    pages: Pages,
    lengths: torch.Tensor,
    side: str,
    start: int,
    stop: int,
    dtype: torch.dtype,
    ragged: bool,
) -> torch.Tensor:
    """Returns the dense keys or values of positions `start` to `stop - 1`.

    Args:
        pages: where from.
        lengths: `[B]`, int32, tokens stored.
        side: "k" or "v".
        start: first position.
        stop: one past the last position.
        dtype: of the result.
        ragged: whether positions from `lengths[b]` on occur; they are zero in the result.

    Returns:
        `[B, Hkv, stop - start, D]`, contiguous.
    """
    dim = (pages.k if side == "k" else pages.v).head_dim
    shape = (len(pages.table), pages.heads, stop - start, dim)
    out = torch.empty(shape, dtype=dtype, device=pages.table.device)
    step = max(CHUNK // pages.page_size, 1) * pages.page_size
    at = start
    while at < stop:
        end = min((at // step + 1) * step, stop)
        out[:, :, at - start : end - start] = _dense(pages, side, at, end)
        at = end
    if ragged:
        position = torch.arange(start, stop, device=lengths.device)
        empty = position >= lengths[:, None]
        out.masked_fill_(empty[:, None, :, None], 0)
    return out


def _dense(pages: Pages, side: str, start: int, stop: int) -> torch.Tensor:
    """Positions `start` to `stop - 1` of K or V: `[B, Hkv, stop - start, D]`, fp32 or stored."""
    size = pages.page_size
    first, last = start // size, -(-stop // size)
    # A released page is behind the window: it is read as page 0 and masked by who asked.
    number = pages.table[:, first:last].clamp(min=0).long()
    stored = pages.k if side == "k" else pages.v
    codes = stored.codes[number] if side == "k" else stored.codes[number].transpose(3, 4)
    inside = slice(start - first * size, stop - first * size)
    # [B, pages, Hkv, S, D] -> [B, Hkv, pages * S, D]
    tokens = codes.transpose(1, 2).flatten(2, 3)[:, :, inside]
    if stored.format == AUTO:
        return tokens
    x = decode(tokens, FORMATS[stored.format])
    if stored.static_scale is not None:
        x = x * stored.static_scale[:, None]
    elif stored.token_scales is not None:
        scales = stored.token_scales[number].transpose(1, 2).flatten(2, 3)
        x = x * scales[:, :, inside, None].float()
    if stored.center is not None:
        x = x + stored.center[:, :, None]
    return x


def attend(
    query: torch.Tensor,
    pages: Pages,
    lengths: torch.Tensor,
    start: int,
    stop: int,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Return softmax attention over stored positions `start` to `stop - 1`.

    Args:
        query: `[B, Hq, T, Dk]`; `Hq` is a multiple of `Hkv`. Query `t` is the token at position
            `lengths[b] - T + t`.
        pages: the stored keys and values.
        lengths: `[B]`, int32, tokens stored, this call's among them.
        start: the first position that a column of the mask and the bias stands for.
        stop: one past the last.
        spec: which attention.

    Returns:
        `[B, T, Hq, Dv]`, of the query's dtype. A query that sees nothing gives zero.
    """
    batch, q_heads, tokens, _ = query.shape
    k = gather(pages, lengths, "k", start, stop, torch.float32, ragged=True)
    v = gather(pages, lengths, "v", start, stop, torch.float32, ragged=True)
    groups = q_heads // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    logits = query.float() @ k.transpose(2, 3) * spec.scaling
    if spec.softcap:
        logits = torch.tanh(logits / spec.softcap) * spec.softcap
    if spec.bias is not None:
        logits = logits + spec.bias.float()
    seen = visible(lengths, tokens, start, stop, spec.causal, spec.window)[:, None]
    if spec.mask is not None and spec.mask.is_floating_point():
        logits = logits + spec.mask.float()
    elif spec.mask is not None:
        seen = seen & spec.mask.bool()
    logits = logits.masked_fill(~seen, -torch.inf)
    if spec.sinks is not None:
        sink = spec.sinks.float().view(1, -1, 1, 1).expand(batch, -1, tokens, 1)
        weights = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    weights = weights.masked_fill(~seen.any(-1, keepdim=True), 0)
    # 0 * NaN is NaN: a token that no query sees must not count even if it holds NaN.
    v = v.masked_fill(~seen.any(2)[..., None], 0)
    return (weights @ v).transpose(1, 2).to(query.dtype)
