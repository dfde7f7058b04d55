"""The "torch" backend: attention over a few pages at a time, with an online softmax.

A chunk of about 512 tokens stays in a CPU's cache between decoding and the two products. The whole
sequence is never dense. Bytes are decoded by table lookup (`index_select`), because
torch's own cast from float8 is many times slower on a CPU.
"""

import torch
from torch import Tensor

from ...formats import AUTO
from ...formats.rotation import rotate
from ..pages import AttentionSpec, Pages
from ..reference import gather, read_dense, write
from ..visibility import find_first_visible, find_visible

__all__ = ["attend", "gather", "write"]

# Number of tokens of a chunk, before it is rounded down to whole pages.
CHUNK_TOKENS = 512
# Number of tokens of a chunk of latents, for at most MAX_LATENT_ROWS query rows. In larger chunks,
# threads wait less often.
LATENT_CHUNK_TOKENS = 2048
MAX_LATENT_ROWS = 256


def attend(
    query: Tensor,
    pages: Pages,
    lengths: Tensor,
    start: int,
    stop: int,
    spec: AttentionSpec,
    _schedule: None = None,
) -> Tensor:
    """Compute softmax attention. The result equals `reference.attend` up to rounding."""
    batch, num_query_heads, num_tokens, _ = query.shape
    num_heads = pages.num_heads
    k, v = pages.k, pages.v
    value_side = k if spec.latent else v
    group_size = num_query_heads // num_heads
    num_rows = group_size * num_tokens
    scaled_query = (query.float() * spec.scaling).reshape(batch, num_heads, num_rows, -1)
    # The center adds the same value to every logit of a row, which softmax ignores. It matters only
    # with a softcap or sinks.
    center_logits = None
    if k.center is not None and k.format != AUTO and (spec.softcap or spec.sinks is not None):
        center_logits = scaled_query @ k.center[..., None]
    # Keys and values stay rotated. The queries and the output are rotated instead.
    dims = [k.head_dim, v.head_dim] if spec.latent else [k.head_dim]
    query_parts = zip(scaled_query.split(dims, -1), (k, v), strict=False)
    q = torch.cat(
        [rotate(part) if stored_side.rotated else part for part, stored_side in query_parts], -1
    )
    raw_pages = pages._replace(
        k=k._replace(center=None, rotated=False), v=v._replace(rotated=False)
    )

    visible_start, visible_stop = start, stop
    if lengths.is_cpu:
        # No position before `visible_start` or from `visible_stop` on is visible or read.
        visible_stop = min(stop, int(lengths.max()))
        if spec.window:
            first_visible = find_first_visible(int(lengths.min()) - num_tokens, spec.window)
            visible_start = max(start, first_visible)
    row_max = q.new_full((batch, num_heads, num_rows, 1), -torch.inf)
    row_sum = torch.zeros_like(row_max)
    if spec.sinks is not None:
        sinks = spec.sinks.float().view(1, num_heads, group_size, 1)
        row_max = sinks.expand(batch, -1, -1, num_tokens).reshape(row_max.shape)
        row_sum = torch.ones_like(row_max)
    out = q.new_zeros((batch, num_heads, num_rows, value_side.head_dim))

    num_chunk_tokens = (
        LATENT_CHUNK_TOKENS if spec.latent and num_rows <= MAX_LATENT_ROWS else CHUNK_TOKENS
    )
    chunk_size = max(num_chunk_tokens // pages.page_size, 1) * pages.page_size
    # Chunks begin at multiples of their size, and so with a page, except the first chunk.
    aligned_starts = range(visible_start // chunk_size * chunk_size, visible_stop, chunk_size)
    if visible_start >= visible_stop:
        aligned_starts = range(0)  # no position is visible
    for aligned_start in aligned_starts:
        chunk_start = max(aligned_start, visible_start)
        chunk_stop = min(aligned_start + chunk_size, visible_stop)
        columns = slice(chunk_start - start, chunk_stop - start)
        keys, values = (
            read_dense(raw_pages, side, chunk_start, chunk_stop).float() for side in "kv"
        )
        if spec.latent:
            keys, values = torch.cat([keys, values], -1), keys
        logits = q @ keys.transpose(2, 3)
        if center_logits is not None:
            logits += center_logits
        if spec.softcap:
            logits = torch.tanh(logits / spec.softcap) * spec.softcap
        grouped_logits = logits.view(batch, num_heads, group_size, num_tokens, -1)
        if spec.bias is not None:
            bias = spec.bias[..., columns].float()
            head_axes = (num_heads, group_size) if bias.shape[1] > 1 else (1, 1)
            grouped_logits += bias.unflatten(1, head_axes)
        is_visible = find_visible(
            lengths, num_tokens, chunk_start, chunk_stop, spec.causal, spec.window
        )
        if spec.mask is not None:
            is_visible = is_visible & spec.mask[:, 0, :, columns].bool()
        grouped_logits.masked_fill_(~is_visible[:, None, None], -torch.inf)
        # Hidden tokens must not contribute, even if their bytes are NaN.
        is_hidden = ~is_visible.any(1)
        if bool(is_hidden.any()):
            values.masked_fill_(is_hidden[:, None, :, None], 0)

        new_max = torch.maximum(row_max, logits.amax(-1, keepdim=True))
        # A row without visible tokens so far has new_max = -inf, and exp(-inf - -inf) would be NaN.
        finite_max = new_max.masked_fill(new_max == -torch.inf, 0)
        weights = (logits - finite_max).exp_()
        rescaling = (row_max - finite_max).exp_()
        row_sum = row_sum * rescaling + weights.sum(-1, keepdim=True)
        out *= rescaling
        out += weights @ values
        row_max = new_max
    out /= row_sum.masked_fill(row_sum == 0, 1)
    if value_side.rotated:
        out = rotate(out)
    out = out.view(batch, num_heads, group_size, num_tokens, -1).permute(0, 3, 1, 2, 4).contiguous()
    return out.view(batch, num_tokens, num_query_heads, -1).to(query.dtype)
