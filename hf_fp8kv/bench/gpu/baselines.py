"""Baselines on the same shapes: torch's own attention on dense bf16, and FlashInfer."""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from .pools import PAGE_SIZE, check_dense, make_dense
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


def measure_decode(record: Record, section: str, case: Case) -> None:
    """Add rows for one new token: each backend of torch, and FlashInfer where there is one."""
    forms: dict[str, Attention] = {"": _attend_grouped}
    if case.heads.query != case.heads.kv:
        forms[" folded"] = _attend_folded
    for name, backend in _backends(record.stage).items():
        for suffix, form in forms.items():
            _measure_sdpa(record, section, case, f"sdpa {name}{suffix}", backend, form)
    _measure_flashinfer(record, section, case)


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
    record: Record, section: str, case: Case, name: str, backend: SDPBackend, form: Attention
) -> None:
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
            if form is _attend_folded or heads.query == heads.kv or case.is_ragged:
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

    record.measure(section, case, name, work, size=layers * size * 1.1 + 2**31)


def _attend_all(
    backend: SDPBackend, form: Attention, queries: Sequence[torch.Tensor], pairs: Sequence[Pair]
) -> torch.Tensor:
    """Attend from each of the queries, and return the last output."""
    with sdpa_kernel(backend):
        for query, pair in zip(queries, pairs, strict=True):
            output = form(query, *pair)
    return output


# -- FlashInfer ----------------------------------------------------------------------------------


def _measure_flashinfer(record: Record, section: str, case: Case) -> None:
    if importlib.util.find_spec("flashinfer") is None:
        if "FlashInfer is not installed" not in record.skipped:
            record.skip("FlashInfer is not installed")
        return
    for name, dtype in (("bf16", torch.bfloat16), ("e4m3", torch.float8_e4m3fn)):
        work = functools.partial(_run_flashinfer, record, case, dtype)
        record.measure(section, case, f"flashinfer {name}", work)


def _run_flashinfer(record: Record, case: Case, dtype: torch.dtype) -> dict[str, Any]:
    flashinfer = importlib.import_module("flashinfer")

    stage, heads, device = record.stage, case.heads, record.stage.device
    counts = [-(-n // PAGE_SIZE) for n in case.lengths]
    total = sum(counts)
    size = case.read * 2 * heads.kv * heads.dim * dtype.itemsize
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    order = torch.randperm(total).int()
    last = torch.tensor([(n - 1) % PAGE_SIZE + 1 for n in case.lengths], dtype=torch.int32)
    workspace = torch.zeros(2**27, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    wrapper.plan(
        starts.to(device), order.to(device), last.to(device), heads.query, heads.kv, heads.dim,
        PAGE_SIZE, q_data_type=torch.bfloat16, kv_data_type=dtype,
    )  # fmt: skip
    query = stage.randn(len(case.lengths), heads.query, heads.dim)
    shape = (total, heads.kv, PAGE_SIZE, heads.dim)
    pools = [
        tuple(stage.randn(*shape).to(dtype) for _ in range(2)) for _ in range(stage.copies(size))
    ]
    steps = [functools.partial(wrapper.run, query, pool) for pool in pools]
    output = steps[-1]()
    numbers = order[starts[-2] : starts[-1]].to(device).long()
    k, v = (
        pool[numbers].to(torch.bfloat16).transpose(0, 1).flatten(1, 2)[None, :, : case.lengths[-1]]
        for pool in pools[-1]
    )
    error = check_dense(output[-1:, :, None], query[-1:, :, None], k, v, case)
    return {"timed": stage.time(steps), "error": error, "moved": size, **case.describe()}
