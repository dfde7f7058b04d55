"""The specification of the three operations: plain torch in float32, on any device.

Every other backend is compared with this file, on the same bytes.
"""

import torch

from ..errors import OutOfPagesError
from ..formats import AUTO, FORMATS
from ..formats.codec import decode, dynamic_scale, encode, search_scale
from .pages import Pages

__all__ = ["attend", "gather", "locate", "quantize", "visible", "write"]

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
    k, k_scales = quantize(key, pages.k_format, pages.k_scale, pages.k_center, search=True)
    v, v_scales = quantize(value, pages.v_format, pages.v_scale, None, search=False)
    if pages.k.is_cpu:
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

    pages.k[place[0], :, place[1]] = tokens_first(k)
    pages.v[place[0], :, :, place[1]] = tokens_first(v)
    if k_scales is not None and pages.k_scales is not None:
        pages.k_scales[place[0], :, place[1]] = tokens_first(k_scales)
    if v_scales is not None and pages.v_scales is not None:
        pages.v_scales[place[0], :, place[1]] = tokens_first(v_scales)


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
    if pages.k.is_cpu and not bool(locate(pages, lengths, tokens)[2].all()):
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
    x: torch.Tensor,
    name: str,
    scale: torch.Tensor | None,
    center: torch.Tensor | None,
    *,
    search: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns what is stored for `x`, and its dynamic scales if it has any.

    Args:
        x: `[B, Hkv, T, D]`.
        name: the format.
        scale: `[Hkv, D]`, float32, static; None: dynamic.
        center: `[B, Hkv, D]`, float32, or None.
        search: whether a dynamic scale is the best of an octave (K) or the smallest (V).

    Returns:
        Codes `[B, Hkv, T, D]`, uint8 (or `x` itself for "auto"), and `[B, Hkv, T]`, bfloat16, or
        None.
    """
    if name == AUTO:
        return x, None
    fmt = FORMATS[name]
    x = x.float()
    if center is not None:
        x = x - center[:, :, None]
    if scale is not None:
        return encode(x * scale.reciprocal()[:, None], fmt), None
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
    pool = pages.k if side == "k" else pages.v
    heads, dim = pool.shape[1], pool.shape[3 if side == "k" else 2]
    out = pool.new_empty((len(pages.table), heads, stop - start, dim), dtype=dtype)
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
    if side == "k":
        stored, name, static, dynamic = (
            pages.k[number],
            pages.k_format,
            pages.k_scale,
            pages.k_scales,
        )
    else:
        stored, name, static, dynamic = (
            pages.v[number],
            pages.v_format,
            pages.v_scale,
            pages.v_scales,
        )
        stored = stored.transpose(3, 4)
    # [B, pages, Hkv, S, D] -> [B, Hkv, pages * S, D]
    tokens = stored.transpose(1, 2).flatten(2, 3)[:, :, start - first * size : stop - first * size]
    if name == AUTO:
        return tokens
    x = decode(tokens, FORMATS[name])
    if static is not None:
        x = x * static[:, None]
    elif dynamic is not None:
        scales = dynamic[number].transpose(1, 2).flatten(2, 3)
        x = x * scales[:, :, start - first * size : stop - first * size, None].float()
    if side == "k" and pages.k_center is not None:
        x = x + pages.k_center[:, :, None]
    return x


def visible(
    lengths: torch.Tensor, tokens: int, start: int, stop: int, causal: bool, window: int
) -> torch.Tensor:
    """Returns which stored position each query may see: `[B, T, stop - start]`, bool.

    The queries are the last `tokens` of what is stored: query `t` is at `lengths[b] - T + t`.
    """
    position = torch.arange(start, stop, device=lengths.device)
    query = (lengths[:, None] - tokens + torch.arange(tokens, device=lengths.device))[..., None]
    seen = (position < lengths[:, None])[:, None].expand(-1, tokens, -1)
    if causal:
        seen = seen & (position <= query)
    if window:
        seen = seen & (position > query - window)
    return seen


def attend(
    query: torch.Tensor,
    pages: Pages,
    lengths: torch.Tensor,
    start: int,
    stop: int,
    *,
    scaling: float,
    causal: bool,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns softmax attention over stored positions `start` to `stop - 1`.

    Args:
        query: `[B, Hq, T, Dk]`; `Hq` is a multiple of `Hkv`. Query `t` is the token at position
            `lengths[b] - T + t`.
        pages: the stored keys and values.
        lengths: `[B]`, int32, tokens stored, this call's among them.
        start: the first position that a column of `mask` and `bias` stands for.
        stop: one past the last.
        scaling: what `q k` is multiplied by.
        causal: whether a query sees only positions up to its own.
        window: a query at position p sees `p - window + 1` to `p`; 0: no window.
        softcap: logits become `softcap * tanh(logits / softcap)`; 0: no softcap.
        sinks: `[Hq]`, one more logit per head that takes part in the sum and carries no value.
        mask: `[B, 1, 1 | T, stop - start]` uint8 or bool, nonzero means visible; or floating,
            `[1 | B, 1 | Hq, 1 | T, stop - start]`, added to the logits; or None.
        bias: the same shapes as a floating mask, added to the logits; or None.

    Returns:
        `[B, T, Hq, Dv]`, of the query's dtype. A query that sees nothing gives zero.
    """
    batch, q_heads, tokens, _ = query.shape
    k = gather(pages, lengths, "k", start, stop, torch.float32, ragged=True)
    v = gather(pages, lengths, "v", start, stop, torch.float32, ragged=True)
    groups = q_heads // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    logits = query.float() @ k.transpose(2, 3) * scaling
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    if bias is not None:
        logits = logits + bias.float()
    seen = visible(lengths, tokens, start, stop, causal, window)[:, None]
    if mask is not None and mask.is_floating_point():
        logits = logits + mask.float()
    elif mask is not None:
        seen = seen & mask.bool()
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1).expand(batch, -1, tokens, 1)
        weights = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    weights = weights.masked_fill(~seen.any(-1, keepdim=True), 0)
    # 0 * NaN is NaN: a token that no query sees must not count even if it holds NaN.
    v = v.masked_fill(~seen.any(2)[..., None], 0)
    return (weights @ v).transpose(1, 2).to(query.dtype)
