"""Other kernels section: those of FlashInfer and vLLM for decoding, where they are there."""

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import latent_kernels
from .pools import PAGE_SIZE, check_dense
from .record import Record
from .shapes import Case, Sizes
from .timing import Step
from .vllm_file import VARIABLE, load_vllm_attention

# What vLLM itself takes: programs without parts from which on it does not split, and the parts.
VLLM_GRID, VLLM_PARTS = 128, 16
WORKSPACE = 2**27
E4M3 = torch.float8_e4m3fn
Pool = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Stored:
    """Random pages of several layers, which share a block table.

    Attributes:
        query: `[B, Hq, D]`.
        order: the pages of all sequences, one after the other; table: the same, `[B, M]`.
        counts: pages of each sequence.
        lengths: `[B]`, int32.
        pools: K and V of each layer, `[P, H, S, D]` or, in the layout NHD, `[P, S, H, D]`.
        scales: of the tokens of K and V of a layer, `[P, S, H]`, or None.
        size: bytes of a layer's K and V that are read.
    """

    query: torch.Tensor
    order: torch.Tensor
    table: torch.Tensor
    counts: list[int]
    lengths: torch.Tensor
    pools: list[Pool]
    scales: Pool | None
    size: int


def measure(record: Record, sizes: Sizes, _backend: str) -> None:
    """Add rows for each kernel that can be imported, in the cases that goals are about first."""
    found = _contenders(record)
    if importlib.util.find_spec("flashinfer") is not None:
        mla = latent_kernels.find(record, "flashinfer", "flashinfer.mla")
        for case in sizes.latents[: sizes.compared] if mla is not None else ():
            latent_kernels.measure_flashinfer(record, mla, case)
    others = [case for case in sizes.others if not (case.window or case.softcap)]
    for case in (*sizes.decode, *(case for case in others if case.tokens == 1)):
        for name, (make, dtype, layout, scaled) in found.items():
            work = functools.partial(_work, record, case, make, dtype, layout, scaled)
            record.measure("other kernels", case, name, work)


_Make = Callable[[Record, Case, _Stored], Callable[[Pool], torch.Tensor]]


def _contenders(record: Record) -> dict[str, tuple[_Make, torch.dtype, str, bool]]:
    """Return how to make a call of each kernel, what K and V are stored as, and the layout."""
    found: dict[str, tuple[_Make, torch.dtype, str, bool]] = {}
    try:
        vllm = load_vllm_attention()
    except Exception as error:  # it is other people's code
        record.skip(f"vLLM's Triton kernel: {type(error).__name__}: {error}")
        vllm = None
    if vllm is None:
        record.skip(f"vLLM is not installed, and {VARIABLE} names no file of it")
    else:
        make = functools.partial(_make_vllm, vllm)
        found["vllm triton e4m3"] = (make, E4M3, "NHD", False)
        if "k_scale_cache" in inspect.signature(vllm.unified_attention).parameters:
            found["vllm triton e4m3 per token"] = (make, E4M3, "NHD", True)
        found["vllm triton bf16"] = (make, torch.bfloat16, "NHD", False)
    if importlib.util.find_spec("flashinfer") is None:
        record.skip("FlashInfer is not installed")
        return found
    decode = importlib.import_module("flashinfer.decode")
    for suffix, dtype in ((" e4m3", E4M3), (" bf16", torch.bfloat16)):
        if hasattr(decode, "xqa_batch_decode_with_kv_cache"):
            found[f"flashinfer xqa{suffix}"] = (_make_xqa, dtype, "HND", False)
        else:
            record.skip("FlashInfer's XQA: this version does not have it")
        # Not its fastest one on sm_90 where K and V have 8 bits.
        found[f"flashinfer wrapper{suffix}"] = (_make_wrapper, dtype, "HND", False)
    return found


def _work(
    record: Record, case: Case, make: _Make, dtype: torch.dtype, layout: str, scaled: bool
) -> dict[str, Any]:
    stored = _store(record, case, dtype, layout, scaled)
    call = make(record, case, stored)
    steps: list[Step] = [functools.partial(call, pool) for pool in stored.pools]
    output = call(stored.pools[-1])
    numbers = stored.order[sum(stored.counts[:-1]) :].long()
    dense: list[torch.Tensor] = []
    for side, numbers_of in enumerate(stored.pools[-1]):
        pages = numbers_of[numbers].to(torch.bfloat16)
        if stored.scales is not None:
            pages = (pages * stored.scales[side][numbers][..., None]).to(torch.bfloat16)
        if layout == "NHD":
            pages = pages.transpose(1, 2)
        dense.append(pages.transpose(0, 1).flatten(1, 2)[None, :, : case.lengths[-1]])
    error = check_dense(output[-1:, :, None], stored.query[-1:, :, None], dense[0], dense[1], case)
    more = {"error": error, "moved": stored.size, **case.describe()}
    return {"timed": record.stage.time(steps), **more}


def _store(record: Record, case: Case, dtype: torch.dtype, layout: str, scaled: bool) -> _Stored:
    stage, heads = record.stage, case.heads
    counts = [-(-n // PAGE_SIZE) for n in case.lengths]
    order = torch.randperm(sum(counts)).int().to(stage.device)
    table = torch.nn.utils.rnn.pad_sequence(order.split(counts), batch_first=True)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=stage.device)
    shape = (len(order), heads.kv, PAGE_SIZE, heads.dim)
    if layout == "NHD":
        shape = (len(order), PAGE_SIZE, heads.kv, heads.dim)
    size = case.read * 2 * heads.kv * (heads.dim * dtype.itemsize + 4 * scaled)
    pools = [
        (stage.randn(*shape).to(dtype), stage.randn(*shape).to(dtype))
        for _ in range(stage.copies(size))
    ]
    k_scales, v_scales = (torch.rand(shape[:3], device=stage.device) + 0.5 for _ in range(2))
    query = stage.randn(len(counts), heads.query, heads.dim)
    scales = (k_scales, v_scales) if scaled else None
    return _Stored(query, order, table, counts, lengths, pools, scales, size)


def _make_xqa(record: Record, case: Case, stored: _Stored) -> Callable[[Pool], torch.Tensor]:
    decode = importlib.import_module("flashinfer.decode")
    # It counts in there which programs are done: zeros at the beginning.
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=record.stage.device)
    out = torch.empty_like(stored.query)

    def call(pool: Pool) -> torch.Tensor:
        decode.xqa_batch_decode_with_kv_cache(
            query=stored.query, kv_cache=pool, workspace_buffer=workspace,
            block_tables=stored.table, seq_lens=stored.lengths, max_seq_len=max(case.lengths),
            bmm1_scale=case.heads.dim**-0.5, bmm2_scale=1.0, out=out, kv_layout="HND",
        )  # fmt: skip
        return out

    return call


def _make_wrapper(record: Record, case: Case, stored: _Stored) -> Callable[[Pool], torch.Tensor]:
    flashinfer = importlib.import_module("flashinfer")
    heads, device = case.heads, record.stage.device
    starts = torch.tensor([0, *stored.counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    last = torch.tensor([(n - 1) % PAGE_SIZE + 1 for n in case.lengths], dtype=torch.int32)
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    wrapper.plan(
        starts.to(device), stored.order, last.to(device), heads.query, heads.kv, heads.dim,
        PAGE_SIZE, q_data_type=torch.bfloat16, kv_data_type=stored.pools[0][0].dtype,
    )  # fmt: skip
    return functools.partial(wrapper.run, stored.query)


def _make_vllm(
    vllm: Any, record: Record, case: Case, stored: _Stored
) -> Callable[[Pool], torch.Tensor]:
    stage, heads, batch = record.stage, case.heads, len(case.lengths)
    most = max(VLLM_GRID // heads.kv, 1)
    parts = torch.empty((most, heads.query, VLLM_PARTS, heads.dim), device=stage.device)
    top, total = (torch.empty_like(parts[..., 0]) for _ in range(2))
    one = torch.ones(1, device=stage.device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=stage.device)
    out = torch.empty_like(stored.query)
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
        "block_table": stored.table, "softcap": 0, "q_descale": None, "k_descale": one,
        "v_descale": one, "seq_threshold_3D": most, "num_par_softmax_segments": VLLM_PARTS,
        "softmax_segm_output": parts, "softmax_segm_max": top, "softmax_segm_expsum": total,
        "kv_quant_mode": mode, "k_scale_cache": scales[0], "v_scale_cache": scales[1],
    }  # fmt: skip
    # Older versions lack the last ones, and tell by the dtype.
    known = inspect.signature(vllm.unified_attention).parameters
    arguments = {name: value for name, value in arguments.items() if name in known}

    def call(pool: Pool) -> torch.Tensor:
        vllm.unified_attention(k=pool[0], v=pool[1], **arguments)
        return out

    return call
