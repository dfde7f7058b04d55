"""Baselines on the same shapes: torch's own attention on dense bf16."""

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
from .timing import Stage, Step

Pair = tuple[torch.Tensor, torch.Tensor]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _backends(stage: Stage) -> dict[str, SDPBackend]:
    if not stage.is_gpu:
        return {"math": SDPBackend.MATH}
    return {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def _attend_grouped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False
) -> torch.Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=grouped)


def _attend_folded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend from one new token with a KV head's query heads as its queries: K is read once."""
    out = F.scaled_dot_product_attention(q.reshape(len(q), k.shape[1], -1, q.shape[3]), k, v)
    return out.reshape(q.shape)


def measure_decode(record: Record, section: str, case: Case, *, compiles: bool = False) -> None:
    """Add rows for one new token: each backend of torch; `compiles`: also what is compiled first.

    Where lengths differ they are called once for each sequence, and their names say so.
    """
    forms: dict[str, Attention] = {"": _attend_grouped}
    if case.heads.query != case.heads.kv:
        forms[" folded"] = _attend_folded
    each = ", a call for each" if case.is_ragged else ""
    for name, backend in _backends(record.stage).items():
        for suffix, form in forms.items():
            _measure_sdpa(record, section, case, f"sdpa {name}{suffix}{each}", backend, form)
    if compiles and not case.is_ragged:
        _measure_sdpa(record, section, case, "flex", None, _make_flex(record.stage), seconds=10)


def _make_flex(stage: Stage) -> Attention:
    """Return torch's FlexAttention, which is compiled; not in a dry run."""
    attend = flex_attention if stage.dry else torch.compile(flex_attention, dynamic=False)

    def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

    return flex


def measure_extend(record: Record, case: Case) -> None:
    """Add rows for many new tokens: each backend of torch."""
    causal = causal_lower_right(case.tokens, case.lengths[0])

    square = functools.partial(_attend_grouped, is_causal=True)

    def lower_right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # torch asks for equally many heads only here; its flash attention itself does not.
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal, enable_gqa=True)

    for name, backend in _backends(record.stage).items():
        if case.tokens == case.lengths[0]:
            _measure_sdpa(record, "extend", case, f"sdpa {name}", backend, square)
        elif name != "cudnn":
            _measure_sdpa(record, "extend", case, f"sdpa {name}", backend, lower_right)


def _measure_sdpa(
    record: Record, section: str, case: Case, name: str, backend: SDPBackend | None,
    form: Attention, seconds: float = 0.0,
) -> None:  # fmt: skip
    stage, size = record.stage, case.moved(BF16)
    layers = stage.copies(int(size))

    def work() -> dict[str, Any]:
        pairs = make_dense(stage, case, layers)
        heads = case.heads
        query = stage.randn(len(case.lengths), heads.query, case.tokens, heads.dim)
        queries = query.split(1) if case.is_ragged else (query,)
        note = {}
        try:
            output = _attend_all(backend, form, queries[-1:], pairs[-1:])
        except RuntimeError:
            # A backend that does not take fewer KV heads gets each as often as it is needed.
            if (
                form is _attend_folded
                or backend is None
                or heads.query == heads.kv
                or case.is_ragged
            ):
                raise
            groups = heads.query // heads.kv
            pairs = [
                (k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)) for k, v in pairs
            ]
            output = _attend_all(backend, form, queries[-1:], pairs[-1:])
            note["note"] = "KV heads repeated"
        expanded = pairs[-1][0].shape[1] != heads.kv
        stored = [x[:, :: heads.query // heads.kv] if expanded else x for x in pairs[-1]]
        error = check_dense(output, queries[-1], stored[0], stored[1], case)
        steps: list[Step] = [
            functools.partial(_attend_all, backend, form, queries, pairs[i : i + len(queries)])
            for i in range(0, len(pairs), len(queries))
        ]
        timed = stage.time(steps)
        return {"timed": timed, "error": error, "moved": size, **case.describe(), **note}

    need = layers * size * 1.1 + 2**31
    record.measure(section, case, name, work, seconds=seconds, size=need)


def _attend_all(
    backend: SDPBackend | None,
    form: Attention,
    queries: Sequence[torch.Tensor],
    pairs: Sequence[Pair],
) -> torch.Tensor:
    """Attend from each of the queries, and return the last output."""
    with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
        for query, pair in zip(queries, pairs, strict=True):
            output = form(query, *pair)
    return output
