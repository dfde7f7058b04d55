"""Measure vLLM's Triton kernel, if vLLM is installed or `VARIABLE` names the kernel's file."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_fp8kv.formats import AUTO
from hf_fp8kv.ops import Pages, StoredSide
from hf_fp8kv.ops.blocks import pack_pages

from .pools import PAGE_SIZE, check
from .record import Record
from .shapes import Case, Sizes
from .stage import Stage
from .vllm_file import VLLM_ATTENTION, load_vllm_attention

# vLLM splits each sequence into this number of parts, unless a batch has this number of programs.
VLLM_PARTS, VLLM_GRID = 16, 128
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
Pair = tuple[torch.Tensor, torch.Tensor]
# Attends to the pages of a layer, and returns `[B, Hq, D]`.
Call = Callable[[Pair], torch.Tensor]


@dataclass(frozen=True)
class Stored:
    """Random pages of several layers `[P, S, H, D]`, which share a block table."""

    query: torch.Tensor  # `[B, Hq, D]`, bf16
    table: torch.Tensor  # pages of each sequence, `[B, M]`, int32
    lengths: torch.Tensor  # tokens of each sequence, `[B]`, int32
    pools: list[Pair]  # K and V of each layer
    scales: Pair | None  # of each token of K and V, `[P, S, H]`


@dataclass(frozen=True)
class Kernel:
    """vLLM's kernel with one format of pages."""

    name: str
    dtype: torch.dtype
    scaled: bool = False  # whether each token and head has a scale


def measure(record: Record, sizes: Sizes, _backend: str) -> None:
    """Add a row for each decode case and format of pages."""
    try:
        vllm = load_vllm_attention(VLLM_ATTENTION)
    except Exception as error:  # code of another project
        record.skip(f"{VLLM_ATTENTION}: {type(error).__name__}: {error}")
        return
    kernels = [Kernel("vllm triton e4m3", E4M3), Kernel("vllm triton bf16", BF16)]
    if "k_scale_cache" in inspect.signature(vllm.unified_attention).parameters:
        kernels.append(Kernel("vllm triton e4m3 per token", E4M3, scaled=True))
    plain = [case for case in sizes.others if not (case.window or case.softcap)]
    for case in (*sizes.decode, *(case for case in plain if case.tokens == 1)):
        for kernel in kernels:
            _measure_kernel(record, vllm, case, kernel)


def _measure_kernel(record: Record, vllm: Any, case: Case, kernel: Kernel) -> None:
    """Add a row, whose result is checked on the stored values."""
    stage, heads = record.stage, case.heads
    size = case.read * 2 * heads.kv * (heads.dim * kernel.dtype.itemsize + 4 * kernel.scaled)

    def work() -> dict[str, Any]:
        stored = _store(stage, case, kernel, stage.copies(size))
        call = _make_call(vllm, case, stored)
        output = call(stored.pools[-1])
        error = check(output[:, None], stored.query[:, :, None], _as_pages(stored), case)
        steps = [functools.partial(call, pool) for pool in stored.pools]
        return {**stage.time(steps), "error": error, "moved": size, **case.describe()}

    record.measure("other kernels", case, kernel.name, work)


def _store(stage: Stage, case: Case, kernel: Kernel, layers: int) -> Stored:
    heads, lengths = case.heads, torch.tensor(case.lengths, dtype=torch.int32)
    counts = -(-lengths // PAGE_SIZE)
    order = torch.randperm(int(counts.sum())).int()
    table = torch.nn.utils.rnn.pad_sequence(order.split(counts.tolist()), batch_first=True)
    token = (len(order), PAGE_SIZE, heads.kv)
    pools: list[Pair] = []
    for _ in range(layers):
        k, v = (stage.randn(*token, heads.dim).to(kernel.dtype) for _ in "kv")
        pools.append((k, v))
    k, v = (torch.rand(token, device=stage.device) + 0.5 for _ in "kv")
    query = stage.randn(len(lengths), heads.query, heads.dim)
    table, lengths = (x.to(stage.device) for x in (table, lengths))
    return Stored(query, table, lengths, pools, (k, v) if kernel.scaled else None)


def _as_pages(stored: Stored) -> Pages:
    """Return the pages of the last layer in bf16, in the layout of the reference."""
    k, v = (side.to(BF16) for side in stored.pools[-1])
    if stored.scales is not None:
        k, v = ((x * s[..., None]).to(BF16) for x, s in zip((k, v), stored.scales, strict=True))
    sides = (k.transpose(1, 2), v.permute(0, 2, 3, 1))
    side = StoredSide(None, None, AUTO, v.shape[-1])
    return pack_pages(side, sides[0], side, sides[1], None, stored.table)


def _make_call(vllm: Any, case: Case, stored: Stored) -> Call:
    heads, device = case.heads, stored.query.device
    max_sequences = max(VLLM_GRID // heads.kv, 1)
    parts = torch.empty((max_sequences, heads.query, VLLM_PARTS, heads.dim), device=device)
    top, total = (torch.empty_like(parts[..., 0]) for _ in range(2))
    unit_scale, out = torch.ones(1, device=device), torch.empty_like(stored.query)
    starts = torch.arange(len(case.lengths) + 1, dtype=torch.int32, device=device)
    scales: Sequence[torch.Tensor | None] = (None, None)
    mode = vllm.KVQuantMode.NONE
    if stored.scales is not None:
        scales, mode = stored.scales, vllm.KVQuantMode.FP8_PER_TOKEN_HEAD
    elif stored.pools[0][0].dtype == E4M3:
        mode = vllm.KVQuantMode.FP8_PER_TENSOR
    arguments = {
        "q": stored.query, "out": out, "cu_seqlens_q": starts, "max_seqlen_q": 1,
        "seqused_k": stored.lengths, "max_seqlen_k": max(case.lengths),
        "softmax_scale": heads.dim**-0.5, "causal": True, "window_size": (-1, -1),
        "block_table": stored.table, "softcap": 0, "q_descale": None, "k_descale": unit_scale,
        "v_descale": unit_scale, "seq_threshold_3D": max_sequences,
        "num_par_softmax_segments": VLLM_PARTS,
        "softmax_segm_output": parts, "softmax_segm_max": top, "softmax_segm_expsum": total,
        "kv_quant_mode": mode, "k_scale_cache": scales[0], "v_scale_cache": scales[1],
    }  # fmt: skip
    # Older versions lack the last arguments, and choose by the dtype.
    parameters = inspect.signature(vllm.unified_attention).parameters
    arguments = {name: value for name, value in arguments.items() if name in parameters}

    def call(pool: Pair) -> torch.Tensor:
        vllm.unified_attention(k=pool[0], v=pool[1], **arguments)
        return out

    return call
