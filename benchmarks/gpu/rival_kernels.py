"""Measure kernels of rivals: vLLM, SGLang, FlashInfer and FlashMLA, if they are installed.

Environment variables may name the files of vLLM's and SGLang's kernels (`rival_files`).
"""

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hf_fp8kv.formats import AUTO
from hf_fp8kv.ops import Pages, StoredSide

from .random_data import PAGE_SIZE, KVPair, compute_output_error, pack_pages
from .record import Record
from .rival_files import SGLANG, VLLM, load_rival
from .shapes import Case, RunSizes
from .stage import Stage

# vLLM splits each sequence into `NUM_SPLITS` parts, unless a batch has `MIN_GRID_SIZE` programs.
NUM_SPLITS = 16
MIN_GRID_SIZE = 128
# SGLang splits each sequence into 8 parts by default (`--triton-attention-num-kv-splits`).
SGLANG_SPLITS = (8, 32)
FLASHINFER_WORKSPACE_BYTES = 128 << 20
# Maximum relative error of kernels that round attention weights to 8 bits.
MAX_ROUNDING_ERROR = 0.1
# Standard deviation of random int8 codes.
INT8_STD = 32
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
# Function that attends to K and V of a layer, and returns the output, `[B, Hq, D]`.
Attend = Callable[[KVPair], torch.Tensor]


@dataclass(frozen=True)
class Inputs:
    """Random queries, and random pages of several layers that share a block table."""

    query: torch.Tensor  # `[B, Hq, D]`, bf16, or `[B, Hq, R + P]` for latents
    table: torch.Tensor  # pages of each sequence, `[B, M]`, int32
    lengths: torch.Tensor  # tokens of each sequence, `[B]`, int32
    # K and V of each layer, `[P, S, H, D]`, or latents with their RoPE parts, `[P, S, 1, R + P]`,
    # and a view of the RoPE parts.
    pools: list[KVPair]
    scales: KVPair | None  # scales of each token of K and V, `[P, S, H]`


@dataclass(frozen=True)
class Kernel:
    """A kernel of a rival, with one format of pages."""

    name: str
    dtype: torch.dtype
    make_attend: Callable[[Case, Inputs], Attend]
    has_token_scales: bool = False  # whether each token and head has a scale
    rounds_weights: bool = False  # whether attention weights are rounded to `dtype`
    reads_latents: bool = False


def measure(record: Record, sizes: RunSizes, _backend: str) -> None:
    """Add a row for each decode case and each format of pages, and for each case of latents."""
    kernels: list[Kernel] = []
    listers = {
        "vllm": _list_vllm, "sglang": _list_sglang, "flashinfer": _list_flashinfer,
        "flash_mla": _list_flash_mla,
    }  # fmt: skip
    for name, list_kernels in listers.items():
        try:
            kernels += list_kernels()
        except Exception as error:  # the import runs code of a rival
            record.skip(f"{name}: not installed: {type(error).__name__}: {error}")
    for case in (*sizes.decode_cases, *sizes.latent_cases):
        for kernel in kernels:
            if kernel.reads_latents == (case.heads.rope_dim > 0):
                _measure_kernel(record, case, kernel)


def _list_vllm() -> list[Kernel]:
    vllm = load_rival(VLLM)
    formats = [("e4m3", E4M3, "FP8_PER_TENSOR"), ("bf16", BF16, "NONE")]
    if "k_scale_cache" in inspect.signature(vllm.unified_attention).parameters:
        formats += [("e4m3 per token", E4M3, "FP8_PER_TOKEN_HEAD")]
        formats += [("int8 per token", torch.int8, "INT8_PER_TOKEN_HEAD")]
    return [
        Kernel(
            f"vllm triton {name}", dtype, functools.partial(_make_vllm_attend, vllm, quant_mode),
            has_token_scales="per token" in name,
        )
        for name, dtype, quant_mode in formats
    ]  # fmt: skip


def _list_sglang() -> list[Kernel]:
    sglang = load_rival(SGLANG)
    formats = {"e4m3": E4M3, "bf16": BF16}
    return [
        Kernel(
            f"sglang triton {name}, {num_splits} splits", formats[name],
            functools.partial(_make_sglang_attend, sglang, num_splits),
            rounds_weights=name == "e4m3",
        )
        for name, num_splits in itertools.product(formats, SGLANG_SPLITS)
    ]  # fmt: skip


def _list_flashinfer() -> list[Kernel]:
    attend = functools.partial(_make_flashinfer_attend, importlib.import_module("flashinfer"))
    return [Kernel("flashinfer e4m3", E4M3, attend), Kernel("flashinfer bf16", BF16, attend)]


def _list_flash_mla() -> list[Kernel]:
    attend = functools.partial(_make_flash_mla_attend, importlib.import_module("flash_mla"))
    return [Kernel("flash_mla bf16", BF16, attend, reads_latents=True)]


def _measure_kernel(record: Record, case: Case, kernel: Kernel) -> None:
    """Add a row for a kernel, whose output may differ from the reference only by rounding."""
    stage = record.stage
    heads = case.heads
    num_values = heads.query_dim if kernel.reads_latents else 2 * heads.num_kv_heads * heads.dim
    scale_bytes = 2 * heads.num_kv_heads * 4 if kernel.has_token_scales else 0
    num_bytes = case.tokens_read * (num_values * kernel.dtype.itemsize + scale_bytes)

    def measure_row() -> dict[str, Any]:
        inputs = _make_inputs(stage, case, kernel, stage.count_buffers(num_bytes))
        attend = kernel.make_attend(case, inputs)
        output = attend(inputs.pools[-1])[:, None]
        pages = _convert_pages(inputs, heads.dim)
        error = compute_output_error(output, inputs.query[:, :, None], pages, case)
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
    token_shape = (sum(page_counts), PAGE_SIZE, heads.num_kv_heads)
    draw = functools.partial(_draw_codes, stage, kernel.dtype)
    if kernel.reads_latents:
        latents = (draw(*token_shape, heads.query_dim) for _ in range(num_layers))
        pools = [(pool, pool[..., heads.dim :]) for pool in latents]
    else:
        pools = [draw(2, *token_shape, heads.dim).unbind() for _ in range(num_layers)]
    unit = 1 / INT8_STD if kernel.dtype == torch.int8 else 1.0
    k_scales, v_scales = ((torch.rand(token_shape, device=stage.device) + 0.5) * unit for _ in "kv")
    query = stage.randn(len(lengths), heads.num_query_heads, heads.query_dim)
    return Inputs(
        query, table.to(stage.device), lengths.to(stage.device), pools,
        scales=(k_scales, v_scales) if kernel.has_token_scales else None,
    )  # fmt: skip


def _draw_codes(stage: Stage, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return random values of a dtype. Integers have a standard deviation of `INT8_STD`."""
    codes = stage.randn(*shape)
    if dtype == torch.int8:
        codes = (codes * INT8_STD).round().clamp(-127, 127)
    return codes.to(dtype)


def _convert_pages(inputs: Inputs, dim: int) -> Pages:
    """Return the pages of the last layer in bf16, in the layout of the reference.

    `dim` is the size of a head of K, or of a latent.
    """
    k, v = (states.to(BF16) for states in inputs.pools[-1])
    if inputs.scales is not None:
        k_scales, v_scales = inputs.scales
        k = (k * k_scales[..., None]).to(BF16)
        v = (v * v_scales[..., None]).to(BF16)
    k_side, v_side = (StoredSide(None, None, AUTO, size) for size in (dim, v.shape[-1]))
    k_codes = k[..., :dim].transpose(1, 2)
    return pack_pages(k_side, k_codes, v_side, v.permute(0, 2, 3, 1), None, inputs.table)


def _make_vllm_attend(vllm: Any, quant_mode: str, case: Case, inputs: Inputs) -> Attend:
    heads = case.heads
    device = inputs.query.device
    max_sequences = max(MIN_GRID_SIZE // heads.num_kv_heads, 1)
    partial_sums = torch.empty(
        (max_sequences, heads.num_query_heads, NUM_SPLITS, heads.dim), device=device
    )
    partial_max, partial_exp_sums = (torch.empty_like(partial_sums[..., 0]) for _ in range(2))
    unit_scale = torch.ones(1, device=device)
    out = torch.empty_like(inputs.query)
    query_starts = torch.arange(len(case.lengths) + 1, dtype=torch.int32, device=device)
    k_scales, v_scales = inputs.scales or (None, None)
    arguments = {
        "q": inputs.query, "out": out, "cu_seqlens_q": query_starts, "max_seqlen_q": 1,
        "seqused_k": inputs.lengths, "max_seqlen_k": max(case.lengths),
        "softmax_scale": heads.dim**-0.5, "causal": True, "window_size": (-1, -1),
        "block_table": inputs.table, "softcap": 0, "q_descale": None, "k_descale": unit_scale,
        "v_descale": unit_scale, "seq_threshold_3D": max_sequences,
        "num_par_softmax_segments": NUM_SPLITS,
        "softmax_segm_output": partial_sums, "softmax_segm_max": partial_max,
        "softmax_segm_expsum": partial_exp_sums,
        "kv_quant_mode": vllm.KVQuantMode[quant_mode], "k_scale_cache": k_scales,
        "v_scale_cache": v_scales,
    }  # fmt: skip
    # Older versions of vLLM lack the last arguments, and choose the mode by the dtype.
    parameters = inspect.signature(vllm.unified_attention).parameters
    arguments = {name: value for name, value in arguments.items() if name in parameters}

    def attend(pool: KVPair) -> torch.Tensor:
        vllm.unified_attention(k=pool[0], v=pool[1], **arguments)
        return out

    return attend


def _make_sglang_attend(sglang: Any, num_splits: int, case: Case, inputs: Inputs) -> Attend:
    heads = case.heads
    device = inputs.query.device
    offsets = torch.arange(PAGE_SIZE, device=device)
    table_slots = (inputs.table[:, :, None] * PAGE_SIZE + offsets).flatten(1)
    # The slots of all tokens, and the start of each sequence in this list.
    slots = torch.cat(
        [row[:length] for row, length in zip(table_slots, case.lengths, strict=True)]
    ).int()
    starts = torch.nn.functional.pad(inputs.lengths.cumsum(0), (1, 0)).int()
    out = torch.empty_like(inputs.query)
    shape = (len(case.lengths), heads.num_query_heads, num_splits)
    partial_sums = torch.empty((*shape, heads.dim), device=device)
    partial_lse = torch.empty(shape, device=device)
    splits_by_sequence = torch.full(shape[:1], num_splits, dtype=torch.int32, device=device)

    def attend(pool: KVPair) -> torch.Tensor:
        k, v = (states.flatten(0, 1) for states in pool)
        sglang.decode_attention_fwd(  # scaling, and scales of K and V, come last
            inputs.query, k, v, out, starts, slots, partial_sums, partial_lse,
            splits_by_sequence, num_splits, heads.dim**-0.5, 1.0, 1.0,
        )  # fmt: skip
        return out

    return attend


def _make_flashinfer_attend(flashinfer: Any, case: Case, inputs: Inputs) -> Attend:
    heads = case.heads
    device = inputs.query.device
    workspace = torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    page_counts = [-(-length // PAGE_SIZE) for length in case.lengths]
    pages = torch.cat([row[:count] for row, count in zip(inputs.table, page_counts, strict=True)])
    starts = torch.tensor([0, *page_counts], device=device).cumsum(0).int()
    last_lengths = (inputs.lengths - 1) % PAGE_SIZE + 1
    wrapper.plan(
        starts, pages.int(), last_lengths.int(), heads.num_query_heads, heads.num_kv_heads,
        heads.dim, PAGE_SIZE, q_data_type=inputs.query.dtype,
        kv_data_type=inputs.pools[0][0].dtype, sm_scale=heads.dim**-0.5,
    )  # fmt: skip

    def attend(pool: KVPair) -> torch.Tensor:
        return wrapper.run(inputs.query, pool, k_scale=1.0, v_scale=1.0)

    return attend


def _make_flash_mla_attend(flash_mla: Any, case: Case, inputs: Inputs) -> Attend:
    scaling = case.make_attention_spec().scaling
    metadata, num_splits = flash_mla.get_mla_metadata(inputs.lengths, case.heads.num_query_heads, 1)

    def attend(pool: KVPair) -> torch.Tensor:
        out, _ = flash_mla.flash_mla_with_kvcache(
            inputs.query[:, None], pool[0], inputs.table, inputs.lengths, case.heads.dim, metadata,
            num_splits, scaling, causal=True,
        )  # fmt: skip
        return out[:, 0]

    return attend
