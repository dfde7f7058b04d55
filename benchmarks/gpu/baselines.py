"""Measure baselines in the cases of the GPU benchmark: torch's attention to dense bf16 K and V."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from .random_data import compute_dense_error, make_dense
from .record import Record
from .shapes import BF16, Case
from .stage import Stage, Step

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


def measure_decode(record: Record, case: Case, *, with_gqa: bool) -> None:
    """Add rows for one new token, with each backend of torch.

    Query heads that share K and V are folded into one head. `with_gqa` adds rows with `enable_gqa`.
    """
    for name, backend in _list_backends(record.stage).items():
        _measure_sdpa(record, "decode", case, f"sdpa {name} folded", backend, _attend_folded)
        if with_gqa:
            _measure_sdpa(record, "decode", case, f"sdpa {name}", backend, attend_grouped)


def measure_extend(record: Record, case: Case) -> None:
    """Add rows for many new tokens, with each backend of torch."""
    causal_mask = causal_lower_right(case.num_new_tokens, case.lengths[0])
    causal_attention = functools.partial(attend_grouped, is_causal=True)

    def attend_lower_right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # torch's flash attention requires `enable_gqa` with this mask, but not with other masks.
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_mask, enable_gqa=True)

    for name, backend in _list_backends(record.stage).items():
        if case.num_new_tokens == case.lengths[0]:
            _measure_sdpa(record, "extend", case, f"sdpa {name}", backend, causal_attention)
        elif name != "cudnn":
            _measure_sdpa(record, "extend", case, f"sdpa {name}", backend, attend_lower_right)


def _measure_sdpa(
    record: Record, section: str, case: Case, name: str, backend: SDPBackend,
    attention: AttentionFunction,
) -> None:  # fmt: skip
    stage = record.stage
    num_bytes = case.count_bytes_read(BF16)
    if stage.is_compiling:  # a baseline has no kernels of this package
        return

    def attend(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return attention(query, k, v)

    def measure_row() -> dict[str, Any]:
        kv_pairs = make_dense(stage, case, stage.count_buffers(int(num_bytes)))
        query = stage.randn(
            len(case.lengths), case.heads.num_query_heads, case.num_new_tokens, case.heads.dim
        )
        steps: list[Step] = [functools.partial(attend, query, k, v) for k, v in kv_pairs]
        error = compute_dense_error(attend(query, *kv_pairs[-1]), query, *kv_pairs[-1], case)
        return {**stage.time_steps(steps), "error": error, "moved": num_bytes, **case.describe()}

    record.measure(section, case, name, measure_row)
