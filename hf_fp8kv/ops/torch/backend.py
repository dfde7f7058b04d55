"""The "torch" backend: attention over a few pages at a time, with an online softmax.

A chunk of about 512 tokens stays in a CPU's cache between decoding and the two products, so the
sequence is never dense as a whole. Bytes are decoded by table lookup (`index_select`), because
torch's own cast from float8 is many times slower on a CPU.
"""

import torch
from torch import Tensor

from ...formats import AUTO, FORMATS
from ...formats.codec import decode
from ...formats.rotation import rotate
from ..blocks import read_rows
from ..pages import AttentionSpec, Pages, StoredSide
from ..reference import gather, write
from ..visibility import first_visible, visible

__all__ = ["attend", "gather", "write"]

# Tokens of one chunk.
CHUNK = 512
# For few query rows over latents, which are wide: longer chunks mean fewer thread barriers.
LATENT_CHUNK, FEW_ROWS = 2048, 256


def attend(
    query: Tensor, pages: Pages, lengths: Tensor, start: int, stop: int, spec: AttentionSpec
) -> Tensor:
    """Compute softmax attention. The result equals `reference.attend` up to rounding."""
    batch, q_heads, tokens, _ = query.shape
    heads, size = pages.heads, pages.page_size
    values = pages.k if spec.latent else pages.v
    groups, v_dim = q_heads // heads, values.head_dim
    window, softcap, sinks, mask = spec.window, spec.softcap, spec.sinks, spec.mask
    rows = groups * tokens
    exact = query.float() * spec.scaling
    if spec.latent:
        exact, positional = exact.split([pages.k.head_dim, pages.v.head_dim], -1)
        positional = _prepare_query(positional, pages.v, heads)
    q = _prepare_query(exact, pages.k, heads)
    # softmax(x + a) = softmax(x), so the center's part of the logits only matters if they are
    # compared with something that lacks it: a softcap or sinks.
    offset = None
    if pages.k.center is not None and (softcap or sinks is not None):
        centers = pages.k.center.reshape(batch * heads, -1, 1)
        offset = _per_head(exact, heads).reshape(batch * heads, rows, -1) @ centers

    if lengths.is_cpu:
        # Only positions in [low, high) can be visible. Pages outside are not read.
        high = min(stop, int(lengths.max()))
        low = start
        if window:
            low = max(start, first_visible(int(lengths.min()) - tokens, window))
    else:
        low, high = start, stop
    m_i = q.new_full((batch * heads, rows, 1), -torch.inf)
    if sinks is not None:
        per_head = sinks.float().view(1, heads, groups, 1).expand(batch, -1, -1, tokens)
        m_i = per_head.reshape(batch * heads, rows, 1).clone()
    l_i = torch.ones_like(m_i) if sinks is not None else torch.zeros_like(m_i)
    out = q.new_zeros((batch * heads, rows, v_dim))

    step = max((LATENT_CHUNK if spec.latent and rows <= FEW_ROWS else CHUNK) // size, 1)
    for first in range(low // size, -(-high // size), step):
        last = min(first + step, -(-high // size))
        position = torch.arange(first * size, last * size, device=lengths.device)
        k, k_scales, v, v_scales = _read(pages, first, last)
        logits = q @ k.transpose(1, 2)
        if k_scales is not None:
            logits *= k_scales
        if spec.latent:
            extra = positional @ v
            logits += extra if v_scales is None else extra * v_scales
            v, v_scales = k.transpose(1, 2), k_scales
        if offset is not None:
            logits += offset
        if softcap:
            logits = torch.tanh(logits / softcap) * softcap
        shaped = logits.view(batch, heads, groups, tokens, -1)
        left, right = max(start - first * size, 0), min(stop - first * size, len(position))
        columns = slice(first * size + left - start, first * size + right - start)
        inner = shaped[..., left:right]
        if spec.bias is not None:
            part = spec.bias[..., columns].float()
            if part.shape[1] > 1:
                inner += part.view(len(part), heads, groups, *part.shape[2:])
            else:
                inner += part[:, :, None]
        seen = visible(lengths, tokens, first * size, last * size, spec.causal, window)
        if left or right < len(position):
            seen = seen & ((position >= start) & (position < stop))
        if mask is not None:
            part = mask[:, 0, :, columns].bool()
            part = torch.nn.functional.pad(part, (left, len(position) - right))
            seen = seen & part
        shaped.masked_fill_(~seen[:, None, None], -torch.inf)
        # Hidden tokens must not contribute, even if their bytes are NaN.
        hidden = ~seen.any(1)

        m_new = torch.maximum(m_i, logits.amax(-1, keepdim=True))
        # A row without visible tokens so far has m_new = -inf, and exp(-inf - -inf) would be NaN.
        safe = m_new.masked_fill(m_new == -torch.inf, 0)
        weights = (logits - safe).exp_()
        alpha = (m_i - safe).exp_()
        l_i = l_i * alpha + weights.sum(-1, keepdim=True)
        if v_scales is not None:
            v_scales.masked_fill_(hidden.repeat_interleave(heads, 0)[:, None], 0)
            weights *= v_scales
        out *= alpha
        # V of hidden tokens may hold anything, including NaN.
        if bool(hidden.any()):
            v = v.masked_fill(hidden.repeat_interleave(heads, 0)[:, None], 0)
        out += weights @ v.transpose(1, 2)
        m_i = m_new
    out = out / l_i.masked_fill(l_i == 0, 1)
    out = out.view(batch, heads, groups, tokens, v_dim)
    if values.static_scale is not None:
        out = out * values.static_scale[:, None, None]
    if values.rotated:
        out = rotate(out)
    out = out.permute(0, 3, 1, 2, 4).contiguous()
    return out.view(batch, tokens, q_heads, v_dim).to(query.dtype)


def _prepare_query(query: Tensor, stored: StoredSide, heads: int) -> Tensor:
    """Return queries `[B, Hq, T, D]` as factors of stored codes, `[B * Hkv, G * T, D]`."""
    q = _per_head(rotate(query) if stored.rotated else query, heads)
    if stored.static_scale is not None:
        q = q * stored.static_scale[:, None]
    return q.flatten(0, 1)


def _per_head(x: Tensor, heads: int) -> Tensor:
    """Reshape `x`, `[B, Hq, T, D]`, to `[B, Hkv, G * T, D]`."""
    batch, q_heads, tokens, dim = x.shape
    return x.reshape(batch, heads, q_heads // heads * tokens, dim)


def _read(
    pages: Pages, first: int, last: int
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Read logical pages `first` to `last - 1`.

    Returns:
        Unscaled K `[B * Hkv, n * S, Dk]`, scales of K, unscaled V `[B * Hkv, Dv, n * S]`, and
        scales of V. Dynamic scales are `[B * Hkv, 1, n * S]`. A side without them has None.
    """
    parts = pages.layout.split(read_rows(pages, first, last))
    batch, count = len(pages.table), last - first
    heads, size = pages.heads, pages.page_size

    def by_head(part: Tensor) -> Tensor:
        """Reorder `[B * n, Hkv, ...]` to `[B * Hkv * n, ...]`: a head's pages are adjacent."""
        rows: Tensor = part.unflatten(0, (batch, count)).transpose(1, 2).flatten(0, 2)
        return rows

    k_scales = v_scales = None
    if pages.k.is_dynamic or pages.v.is_dynamic:
        # K's scale is the lower half of a 32-bit word. The upper half of a float32 is a bfloat16.
        words = by_head(parts["token_scales"].view(torch.int32)).reshape(batch * heads, 1, -1)
        k_scales = (words << 16).view(torch.float32) if pages.k.is_dynamic else None
        v_scales = (words & -0x10000).view(torch.float32) if pages.v.is_dynamic else None

    def decoded(side: str, stored: StoredSide) -> Tensor:
        codes = by_head(parts[side])
        if stored.format == AUTO:
            return codes.float()
        return decode(codes, FORMATS[stored.format])

    v = decoded("v", pages.v).reshape(batch * heads, count, pages.v.head_dim, size)
    k = decoded("k", pages.k).reshape(batch * heads, count * size, -1)
    return k, k_scales, v.transpose(1, 2).flatten(2), v_scales
