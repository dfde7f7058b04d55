"""Measure kernels of vLLM, SGLang and FlashInfer, if they are installed.

Environment variables may name the files of vLLM's and SGLang's kernels (`rival_files`).
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_fp8kv.formats import AUTO
from hf_fp8kv.ops import Pages, StoredSide
from hf_fp8kv.ops.blocks import pack_pages

from .random_data import PAGE_SIZE, compute_output_error
from .record import Record
from .rival_files import SGLANG, VLLM, load_rival
from .shapes import Case, RunSizes
from .stage import Stage

# vLLM splits each sequence into `NUM_SPLITS` parts, unless a batch has `MIN_GRID_SIZE` programs.
NUM_SPLITS, MIN_GRID_SIZE = 16, 128
# SGLang splits each sequence into 8 parts by default (`--triton-attention-num-kv-splits`).
SGLANG_SPLITS = (8, 32)
FLASHINFER_WORKSPACE_BYTES = 128 << 20
# Maximum relative error of kernels that round attention weights to 8 bits.
MAX_ROUNDING_ERROR = 0.1
# Standard deviation of random int8 codes.
INT8_STD = 32
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
KVPair = tuple[torch.Tensor, torch.Tensor]
# Function that attends to K and V of a layer, and returns the output, `[B, Hq, D]`.
Attend = Callable[[KVPair], torch.Tensor]


@dataclass(frozen=True)
class Inputs:
    """Random queries, and random pages of several layers that share a block table."""

    query: torch.Tensor  # `[B, Hq, D]`, bf16
    table: torch.Tensor  # pages of each sequence, `[B, M]`, int32
    lengths: torch.Tensor  # tokens of each sequence, `[B]`, int32
    pools: list[KVPair]  # K and V of each layer, `[P, S, H, D]`
    scales: KVPair | None  # scales of each token of K and V, `[P, S, H]`


@dataclass(frozen=True)
class Kernel:
    """A kernel of a different project, with one format of pages."""

    name: str
    dtype: torch.dtype
    make_attend: Callable[[Case, Inputs], Attend]
    has_token_scales: bool = False  # whether each token and head has a scale
    rounds_weights: bool = False  # whether attention weights are rounded to `dtype`


def measure(record: Record, sizes: RunSizes, _backend: str) -> None:
    """Add a row for each decode case and each format of pages."""
    kernels: list[Kernel] = []
    for name, list_kernels in (
        ("vllm", _list_vllm), ("sglang", _list_sglang), ("flashinfer", _list_flashinfer),
    ):  # fmt: skip
        try:
            kernels += list_kernels()
        except Exception as error:  # the import runs code of a different project
            record.skip(f"{name}: not installed: {type(error).__name__}: {error}")
    for case in sizes.decode_cases:
        for kernel in kernels:
            _measure_kernel(record, case, kernel)


def _list_vllm() -> list[Kernel]:
    vllm = load_rival(VLLM)
    attend = functools.partial(_make_vllm_attend, vllm)
    kernels = [Kernel("vllm triton e4m3", E4M3, attend), Kernel("vllm triton bf16", BF16, attend)]
    if "k_scale_cache" in inspect.signature(vllm.unified_attention).parameters:
        for name, dtype in (("e4m3", E4M3), ("int8", torch.int8)):
            kernels.append(Kernel(f"vllm triton {name} per token", dtype, attend, True))
    return kernels


def _list_sglang() -> list[Kernel]:
    sglang = load_rival(SGLANG)
    return [
        Kernel(
            f"sglang triton {name}, {splits} splits", dtype,
            functools.partial(_make_sglang_attend, sglang, splits), rounds_weights=dtype == E4M3,
        )
        for name, dtype in (("e4m3", E4M3), ("bf16", BF16))
        for splits in SGLANG_SPLITS
    ]  # fmt: skip


def _list_flashinfer() -> list[Kernel]:
    attend = functools.partial(_make_flashinfer_attend, importlib.import_module("flashinfer"))
    return [Kernel("flashinfer e4m3", E4M3, attend), Kernel("flashinfer bf16", BF16, attend)]


def _measure_kernel(record: Record, case: Case, kernel: Kernel) -> None:
    """Add a row for a kernel, whose output may differ from the reference only by rounding."""
    stage, heads = record.stage, case.heads
    head_bytes = heads.dim * kernel.dtype.itemsize + 4 * kernel.has_token_scales
    num_bytes = case.tokens_read * 2 * heads.kv * head_bytes

    def measure_row() -> dict[str, Any]:
        inputs = _make_inputs(stage, case, kernel, stage.count_buffers(num_bytes))
        attend = kernel.make_attend(case, inputs)
        output = attend(inputs.pools[-1])
        query, pages = inputs.query[:, :, None], _convert_pages(inputs)
        error = compute_output_error(output[:, None], query, pages, case)
        if kernel.rounds_weights and error > MAX_ROUNDING_ERROR:
            raise ValueError(f"expected an error of at most {MAX_ROUNDING_ERROR}, got {error:.1e}")
        error_name = "error_of_rounding" if kernel.rounds_weights else "error"
        steps = [functools.partial(attend, pool) for pool in inputs.pools]
        return {**stage.time_steps(steps), error_name: error, "moved": num_bytes, **case.describe()}

    record.measure("other kernels", case, kernel.name, measure_row)


def _make_inputs(stage: Stage, case: Case, kernel: Kernel, num_layers: int) -> Inputs:
    heads = case.heads
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    page_counts = [-(-length // PAGE_SIZE) for length in case.lengths]
    tables = torch.randperm(sum(page_counts)).int().split(page_counts)
    table = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
    token_shape = (sum(page_counts), PAGE_SIZE, heads.kv)
    pools: list[KVPair] = []
    for _ in range(num_layers):
        k, v = (_draw_codes(stage, kernel.dtype, *token_shape, heads.dim) for _ in "kv")
        pools.append((k, v))
    unit = 1 / INT8_STD if kernel.dtype == torch.int8 else 1.0
    k, v = ((torch.rand(token_shape, device=stage.device) + 0.5) * unit for _ in "kv")
    query = stage.randn(len(lengths), heads.query, heads.dim)
    table, lengths = table.to(stage.device), lengths.to(stage.device)
    return Inputs(query, table, lengths, pools, (k, v) if kernel.has_token_scales else None)


def _draw_codes(stage: Stage, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return random values of a dtype. Integers have a standard deviation of `INT8_STD`."""
    values = stage.randn(*shape)
    if dtype == torch.int8:
        values = (values * INT8_STD).round().clamp(-127, 127)
    return values.to(dtype)


def _convert_pages(inputs: Inputs) -> Pages:
    """Return the pages of the last layer in bf16, in the layout of the reference."""
    k, v = (states.to(BF16) for states in inputs.pools[-1])
    if inputs.scales is not None:
        k_scales, v_scales = inputs.scales
        k, v = (k * k_scales[..., None]).to(BF16), (v * v_scales[..., None]).to(BF16)
    side = StoredSide(None, None, AUTO, v.shape[-1])
    return pack_pages(side, k.transpose(1, 2), side, v.permute(0, 2, 3, 1), None, inputs.table)


def _make_vllm_attend(vllm: Any, case: Case, inputs: Inputs) -> Attend:
    heads, device = case.heads, inputs.query.device
    max_sequences = max(MIN_GRID_SIZE // heads.kv, 1)
    partial_sums = torch.empty((max_sequences, heads.query, NUM_SPLITS, heads.dim), device=device)
    partial_max, partial_exp_sums = (torch.empty_like(partial_sums[..., 0]) for _ in range(2))
    unit_scale = torch.ones(1, device=device)
    out = torch.empty_like(inputs.query)
    query_starts = torch.arange(len(case.lengths) + 1, dtype=torch.int32, device=device)
    scales: Sequence[torch.Tensor | None] = (None, None)
    quant_mode = vllm.KVQuantMode.NONE
    if inputs.scales is not None:
        is_int8 = inputs.pools[0][0].dtype == torch.int8
        modes = vllm.KVQuantMode
        scales = inputs.scales
        quant_mode = modes.INT8_PER_TOKEN_HEAD if is_int8 else modes.FP8_PER_TOKEN_HEAD
    elif inputs.pools[0][0].dtype == E4M3:
        quant_mode = vllm.KVQuantMode.FP8_PER_TENSOR
    arguments = {
        "q": inputs.query, "out": out, "cu_seqlens_q": query_starts, "max_seqlen_q": 1,
        "seqused_k": inputs.lengths, "max_seqlen_k": max(case.lengths),
        "softmax_scale": heads.dim**-0.5, "causal": True, "window_size": (-1, -1),
        "block_table": inputs.table, "softcap": 0, "q_descale": None, "k_descale": unit_scale,
        "v_descale": unit_scale, "seq_threshold_3D": max_sequences,
        "num_par_softmax_segments": NUM_SPLITS,
        "softmax_segm_output": partial_sums, "softmax_segm_max": partial_max,
        "softmax_segm_expsum": partial_exp_sums,
        "kv_quant_mode": quant_mode, "k_scale_cache": scales[0], "v_scale_cache": scales[1],
    }  # fmt: skip
    # Older versions of vLLM lack the last arguments, and choose the mode by the dtype.
    parameters = inspect.signature(vllm.unified_attention).parameters
    arguments = {name: value for name, value in arguments.items() if name in parameters}

    def attend(pool: KVPair) -> torch.Tensor:
        vllm.unified_attention(k=pool[0], v=pool[1], **arguments)
        return out

    return attend


def _list_slots(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots of all tokens, int32, and the start of each sequence, `[B + 1]`, int32."""
    slots = inputs.table[:, :, None] * PAGE_SIZE
    slots = (slots + torch.arange(PAGE_SIZE, device=slots.device)).flatten(1)
    lengths = inputs.lengths.tolist()
    listed = [row[:length] for row, length in zip(slots, lengths, strict=True)]
    starts = torch.nn.functional.pad(inputs.lengths.cumsum(0), (1, 0))
    return torch.cat(listed).int(), starts.int()


def _make_sglang_attend(sglang: Any, splits: int, case: Case, inputs: Inputs) -> Attend:
    heads, device = case.heads, inputs.query.device
    slots, starts = _list_slots(inputs)
    out = torch.empty_like(inputs.query)
    shape = (len(case.lengths), heads.query, splits)
    partial_sums = torch.empty((*shape, heads.dim), device=device)
    partial_lse = torch.empty(shape, device=device)
    num_splits = torch.full(shape[:1], splits, dtype=torch.int32, device=device)

    def attend(pool: KVPair) -> torch.Tensor:
        k, v = (states.flatten(0, 1) for states in pool)
        sglang.decode_attention_fwd(
            inputs.query, k, v, out, starts, slots, partial_sums, partial_lse, num_splits, splits,
            heads.dim**-0.5, 1.0, 1.0,
        )  # fmt: skip
        return out

    return attend


def _make_flashinfer_attend(flashinfer: Any, case: Case, inputs: Inputs) -> Attend:
    heads, device = case.heads, inputs.query.device
    workspace = torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    page_counts = [-(-length // PAGE_SIZE) for length in case.lengths]
    pages = torch.cat([row[:n] for row, n in zip(inputs.table, page_counts, strict=True)])
    starts = torch.tensor([0, *page_counts], device=device).cumsum(0).int()
    last_lengths = (inputs.lengths - 1) % PAGE_SIZE + 1
    wrapper.plan(
        starts, pages.int(), last_lengths.int(), heads.query, heads.kv, heads.dim, PAGE_SIZE,
        q_data_type=inputs.query.dtype, kv_data_type=inputs.pools[0][0].dtype,
        sm_scale=heads.dim**-0.5,
    )  # fmt: skip

    def attend(pool: KVPair) -> torch.Tensor:
        out: torch.Tensor = wrapper.run(inputs.query, pool, k_scale=1.0, v_scale=1.0)
        return out

    return attend
