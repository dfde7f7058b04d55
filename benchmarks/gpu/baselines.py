"""Measure the baselines on the same shapes: torch's attention on dense bf16."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import flex_attention

from .pools import check_dense, make_dense
from .record import Record
from .shapes import BF16, Case
from .stage import Stage, Step

# Seconds that FlexAttention needs to compile, with a margin.
COMPILE_SECONDS = 12
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _backends(stage: Stage) -> dict[str, SDPBackend]:
    if not stage.is_gpu:
        return {"math": SDPBackend.MATH}
    return {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def attend_grouped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False
) -> torch.Tensor:
    """Attend with SDPA, with `enable_gqa` if K has fewer heads than the queries."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=grouped)


def _attend_folded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend with the query heads of a KV head as its queries, so that K is read once."""
    out = F.scaled_dot_product_attention(q.reshape(len(q), k.shape[1], -1, q.shape[3]), k, v)
    return out.reshape(q.shape)


def measure_decode(record: Record, section: str, case: Case, *, grouped: bool = True) -> None:
    """Add rows for one new token, with each backend of torch.

    Without `grouped`, heads that share K and V are only folded. With different lengths, each
    sequence is a separate call. The names of rows show the form.
    """
    forms: dict[str, Attention] = {}
    if case.heads.query != case.heads.kv:
        forms[" folded"] = _attend_folded
    if grouped or not forms:
        forms[""] = attend_grouped
    note = ", a call for each" if case.is_ragged else ""
    for name, backend in _backends(record.stage).items():
        for suffix, form in forms.items():
            _measure_sdpa(record, section, case, f"sdpa {name}{suffix}{note}", backend, form)


def measure_flex(record: Record, section: str, case: Case) -> None:
    """Add a row for one new token with FlexAttention, if there is time to compile it."""
    if record.seconds_left() < COMPILE_SECONDS:
        record.skip(f"{section}, {case}, flex: no time left")
        return
    dry = record.stage.dry
    attend = flex_attention if dry else torch.compile(flex_attention, dynamic=False)

    def form(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

    _measure_sdpa(record, section, case, "flex", None, form)


def measure_extend(record: Record, case: Case) -> None:
    """Add rows for many new tokens, with each backend of torch."""
    causal = causal_lower_right(case.tokens, case.lengths[0])
    square = functools.partial(attend_grouped, is_causal=True)

    def lower_right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # Torch's flash attention requires `enable_gqa` with this mask only.
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal, enable_gqa=True)

    for name, backend in _backends(record.stage).items():
        if case.tokens == case.lengths[0]:
            _measure_sdpa(record, "extend", case, f"sdpa {name}", backend, square)
        elif name != "cudnn":
            _measure_sdpa(record, "extend", case, f"sdpa {name}", backend, lower_right)


def _measure_sdpa(
    record: Record, section: str, case: Case, name: str, backend: SDPBackend | None, form: Attention
) -> None:
    stage, heads, size = record.stage, case.heads, case.bytes_read(BF16)
    attend = functools.partial(_attend_all, backend, form)
    if stage.compiling:  # no kernel of this package
        return

    def work() -> dict[str, Any]:
        pairs = make_dense(stage, case, stage.copies(int(size)))
        query = stage.randn(len(case.lengths), heads.query, case.tokens, heads.dim)
        queries = query.split(1) if case.is_ragged else (query,)
        output = attend(queries[-1:], pairs[-1:])
        error = check_dense(output, queries[-1], *pairs[-1], case)
        steps: list[Step] = [
            functools.partial(attend, queries, pairs[i : i + len(queries)])
            for i in range(0, len(pairs), len(queries))
        ]
        return {**stage.time(steps), "error": error, "moved": size, **case.describe()}

    record.measure(section, case, name, work)


def _attend_all(
    backend: SDPBackend | None, form: Attention, queries: Sequence[torch.Tensor],
    pairs: Sequence[tuple[torch.Tensor, ...]],
) -> torch.Tensor:  # fmt: skip
    """Attend from each of the queries, and return the last output."""
    with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
        for query, (k, v) in zip(queries, pairs, strict=True):
            output = form(query, k, v)
    return output
