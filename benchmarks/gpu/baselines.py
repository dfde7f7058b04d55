"""Measure baselines in the same cases: torch's attention to dense K and V in bf16."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import flex_attention

from .random_data import compute_dense_error, make_dense
from .record import Record
from .shapes import BF16, Case
from .stage import Stage, Step

# Seconds that FlexAttention needs to compile, including a margin.
COMPILE_SECONDS = 12
AttentionFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _list_backends(stage: Stage) -> dict[str, SDPBackend]:
    if not stage.is_gpu:
        return {"math": SDPBackend.MATH}
    return {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def attend_grouped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False
) -> torch.Tensor:
    """Attend with SDPA, with `enable_gqa` if K has fewer heads than the queries."""
    has_gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=has_gqa)


def _attend_folded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend with the query heads of a KV head as queries of a single head, which reads K once."""
    out = F.scaled_dot_product_attention(q.reshape(len(q), k.shape[1], -1, q.shape[3]), k, v)
    return out.reshape(q.shape)


def measure_decode(record: Record, section: str, case: Case, *, with_gqa: bool = True) -> None:
    """Add rows for one new token, with each backend of torch.

    Query heads that share K and V are folded into one head. `with_gqa` adds rows with `enable_gqa`.
    Sequences of different lengths are separate calls. The names of rows show the variant.
    """
    variants: dict[str, AttentionFunction] = {}
    if case.heads.query != case.heads.kv:
        variants[" folded"] = _attend_folded
    if with_gqa or not variants:
        variants[""] = attend_grouped
    ragged_suffix = ", a call for each" if case.is_ragged else ""
    for backend_name, backend in _list_backends(record.stage).items():
        for suffix, attention in variants.items():
            name = f"sdpa {backend_name}{suffix}{ragged_suffix}"
            _measure_sdpa(record, section, case, name, backend, attention)


def measure_flex(record: Record, section: str, case: Case) -> None:
    """Add a row for one new token with FlexAttention, or skip it if too little time is left."""
    if record.seconds_left() < COMPILE_SECONDS:
        record.skip(f"{section}, {case}, flex: no time left")
        return
    is_dry = record.stage.is_dry
    attend = flex_attention if is_dry else torch.compile(flex_attention, dynamic=False)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

    _measure_sdpa(record, section, case, "flex", None, attention)


def measure_extend(record: Record, case: Case) -> None:
    """Add rows for many new tokens, with each backend of torch."""
    causal_mask = causal_lower_right(case.new_tokens, case.lengths[0])
    causal_attention = functools.partial(attend_grouped, is_causal=True)

    def lower_right_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # torch's flash attention requires `enable_gqa` with this mask, but not with other masks.
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_mask, enable_gqa=True)

    for name, backend in _list_backends(record.stage).items():
        if case.new_tokens == case.lengths[0]:
            _measure_sdpa(record, "extend", case, f"sdpa {name}", backend, causal_attention)
        elif name != "cudnn":
            _measure_sdpa(record, "extend", case, f"sdpa {name}", backend, lower_right_attention)


def _measure_sdpa(
    record: Record, section: str, case: Case, name: str, backend: SDPBackend | None,
    attention: AttentionFunction,
) -> None:  # fmt: skip
    stage = record.stage
    heads = case.heads
    num_bytes = case.bytes_read(BF16)
    attend = functools.partial(_attend_all, backend, attention)
    if stage.is_compiling:  # a baseline has no kernels of this package
        return

    def measure_row() -> dict[str, Any]:
        kv_pairs = make_dense(stage, case, stage.count_buffers(int(num_bytes)))
        query = stage.randn(len(case.lengths), heads.query, case.new_tokens, heads.dim)
        queries = query.split(1) if case.is_ragged else (query,)
        output = attend(queries[-1:], kv_pairs[-1:])
        error = compute_dense_error(output, queries[-1], *kv_pairs[-1], case)
        steps: list[Step] = [
            functools.partial(attend, queries, kv_pairs[i : i + len(queries)])
            for i in range(0, len(kv_pairs), len(queries))
        ]
        return {**stage.time_steps(steps), "error": error, "moved": num_bytes, **case.describe()}

    record.measure(section, case, name, measure_row)


def _attend_all(
    backend: SDPBackend | None, attention: AttentionFunction, queries: Sequence[torch.Tensor],
    kv_pairs: Sequence[tuple[torch.Tensor, ...]],
) -> torch.Tensor:  # fmt: skip
    """Attend from each of the queries to its pair of K and V, and return the last output."""
    with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
        for query, (k, v) in zip(queries, kv_pairs, strict=True):
            output = attention(query, k, v)
    return output
