"""Kernels of other projects, if they are installed: FlashInfer, vLLM and FlashMLA."""

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_fp8kv.formats import AUTO
from hf_fp8kv.ops import Pages, StoredSide

from .goals import LATENT
from .pools import PAGE_SIZE, check
from .record import Record
from .shapes import Case, Sizes
from .stage import Stage
from .vllm_file import VLLM_ATTENTION, load_vllm_attention

# vLLM splits sequences into this number of parts, unless it has this number of programs without.
VLLM_PARTS, VLLM_GRID = 16, 128
WORKSPACE = 2**27
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
Pair = tuple[torch.Tensor, torch.Tensor]
# Attends to the pages of a layer, and returns `[B, Hq, D]`.
Call = Callable[[Pair], torch.Tensor]


@dataclass(frozen=True)
class Stored:
    """Random pages of several layers, which share a block table."""

    query: torch.Tensor  # `[B, Hq, Dq]`, bf16
    order: torch.Tensor  # pages of all sequences, int32
    table: torch.Tensor  # the same, `[B, M]`
    counts: torch.Tensor  # pages of each sequence, `[B]`, int32
    lengths: torch.Tensor  # tokens of each sequence, `[B]`, int32
    pools: list[Pair]  # K and V of each layer, in the kernel's layout
    scales: Pair | None  # of each token of K and V, `[P, S, H]`


@dataclass(frozen=True)
class Kernel:
    """A kernel, and the form of its pages.

    The layout is "HND", "NHD", "latent" (`[P, S, R]` and `[P, S, P]`), or "joined" for latents and
    positions in one tensor.
    """

    name: str
    make: Callable[[Case, Stored], Call]  # prepares the call
    dtype: torch.dtype
    layout: str
    scaled: bool = False  # whether each token and head has a scale


def measure(record: Record, sizes: Sizes, _backend: str) -> None:
    """Add rows for each kernel that can be imported. The cases of goals come first."""
    kernels = _find_vllm(record)
    if find(record, "flashinfer") is not None:
        if (mla := find(record, "flashinfer.mla")) is not None:
            for case in sizes.latents[: sizes.compared]:
                for kernel in _flashinfer_mla(mla):
                    measure_kernel(record, LATENT, case, kernel)
        kernels += _find_flashinfer(record)
    plain = [case for case in sizes.others if not (case.window or case.softcap)]
    for case in (*sizes.decode, *(case for case in plain if case.tokens == 1)):
        for kernel in kernels:
            measure_kernel(record, "other kernels", case, kernel)


def measure_kernel(record: Record, section: str, case: Case, kernel: Kernel) -> None:
    """Add a row for a kernel, checked on the values that its pages store."""
    stage, heads = record.stage, case.heads
    size = case.read * kernel.dtype.itemsize * heads.query_dim
    if not heads.positions:
        size = case.read * 2 * heads.kv * (heads.dim * kernel.dtype.itemsize + 4 * kernel.scaled)

    def work() -> dict[str, Any]:
        stored = _store(stage, case, kernel, stage.copies(size))
        call = kernel.make(case, stored)
        output = call(stored.pools[-1])
        pages = _as_pages(case, kernel, stored)
        error = check(output[:, None], stored.query[:, :, None], pages, case)
        steps = [functools.partial(call, pool) for pool in stored.pools]
        return {**stage.time(steps), "error": error, "moved": size, **case.describe()}

    record.measure(section, case, kernel.name, work)


def _store(stage: Stage, case: Case, kernel: Kernel, layers: int) -> Stored:
    heads, layout = case.heads, kernel.layout
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    counts = -(-lengths // PAGE_SIZE)
    order = torch.randperm(int(counts.sum())).int()
    table = torch.nn.utils.rnn.pad_sequence(order.split(counts.tolist()), batch_first=True)
    token = (PAGE_SIZE, heads.kv) if layout == "NHD" else (heads.kv, PAGE_SIZE)
    pools: list[Pair] = []
    for _ in range(layers):
        if not heads.positions:
            k, v = (stage.randn(len(order), *token, heads.dim).to(kernel.dtype) for _ in "kv")
        else:
            both = stage.randn(len(order), PAGE_SIZE, heads.query_dim).to(kernel.dtype)
            k, v = both.split([heads.dim, heads.positions], -1)
            if layout == "latent":
                k, v = k.contiguous(), v.contiguous()
        pools.append((k, v))
    k, v = (torch.rand((len(order), *token), device=stage.device) + 0.5 for _ in "kv")
    query = stage.randn(len(lengths), heads.query, heads.query_dim)
    order, table, counts, lengths = (x.to(stage.device) for x in (order, table, counts, lengths))
    return Stored(query, order, table, counts, lengths, pools, (k, v) if kernel.scaled else None)


def _as_pages(case: Case, kernel: Kernel, stored: Stored) -> Pages:
    """Return the pages of the last layer in bf16, in the layout of the reference."""
    k, v = (side.to(BF16) for side in stored.pools[-1])
    if stored.scales is not None:
        k, v = ((x * s[..., None]).to(BF16) for x, s in zip((k, v), stored.scales, strict=True))
    if case.heads.positions:
        k, v = k[:, None], v[:, None]
    elif kernel.layout == "NHD":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    sides = (StoredSide(x, None, None, AUTO, d.shape[-1]) for x, d in ((k, k), (v.mT, v)))
    return Pages(*sides, None, stored.table)


# -- finding -------------------------------------------------------------------------------------


def find(record: Record, name: str, load: Callable[[str], Any] = importlib.import_module) -> Any:
    """Return a module of another project. Return None, and note why, if it cannot be imported."""
    try:
        return load(name)
    except Exception as error:  # code of other projects
        record.skip(f"{name}: {type(error).__name__}: {error}")
        return None


def _find_vllm(record: Record) -> list[Kernel]:
    vllm = find(record, VLLM_ATTENTION, load_vllm_attention)
    if vllm is None:
        return []
    make = functools.partial(_make_vllm, vllm)
    kernels = [Kernel("vllm triton e4m3", make, E4M3, "NHD")]
    if "k_scale_cache" in inspect.signature(vllm.unified_attention).parameters:
        kernels.append(Kernel("vllm triton e4m3 per token", make, E4M3, "NHD", scaled=True))
    return [*kernels, Kernel("vllm triton bf16", make, BF16, "NHD")]


def _find_flashinfer(record: Record) -> list[Kernel]:
    decode, kernels = find(record, "flashinfer.decode"), []
    xqa = getattr(decode, "xqa_batch_decode_with_kv_cache", None)
    if xqa is None:
        record.skip("FlashInfer's XQA: this version does not have it")
    for name, dtype in (("e4m3", E4M3), ("bf16", BF16)):
        if xqa is not None:
            make = functools.partial(_make_xqa, xqa)
            kernels.append(Kernel(f"flashinfer xqa {name}", make, dtype, "HND"))
        # On sm_90 with 8 bits, this is not FlashInfer's fastest kernel.
        kernels.append(Kernel(f"flashinfer wrapper {name}", _make_wrapper, dtype, "HND"))
    return kernels


def _flashinfer_mla(mla: Any) -> list[Kernel]:
    plan = inspect.signature(mla.BatchMLAPagedAttentionWrapper.plan).parameters
    make = functools.partial(_make_flashinfer_mla, mla)
    dtypes = {"bf16": BF16, "e4m3": E4M3} if "scale_mode" in plan else {"bf16": BF16}
    return [
        Kernel(f"flashinfer mla {name} kernel", make, dtype, "latent")
        for name, dtype in dtypes.items()
    ]


def flash_mla(module: Any) -> Kernel:
    """Return FlashMLA's kernel for decoding over dense bf16 latents."""
    make = functools.partial(_make_flash_mla, module)
    return Kernel("flash_mla bf16 kernel", make, BF16, "joined")


# -- calls ---------------------------------------------------------------------------------------


def _workspace(stored: Stored) -> torch.Tensor:
    # XQA counts finished programs in it, from zero.
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=stored.query.device)


def _make_xqa(xqa: Callable[..., Any], case: Case, stored: Stored) -> Call:
    workspace, out = _workspace(stored), torch.empty_like(stored.query)

    def call(pool: Pair) -> torch.Tensor:
        xqa(
            query=stored.query, kv_cache=pool, workspace_buffer=workspace,
            block_tables=stored.table, seq_lens=stored.lengths, max_seq_len=max(case.lengths),
            bmm1_scale=case.heads.dim**-0.5, bmm2_scale=1.0, out=out, kv_layout="HND",
        )  # fmt: skip
        return out

    return call


def _make_wrapper(case: Case, stored: Stored) -> Call:
    flashinfer: Any = importlib.import_module("flashinfer")
    heads = case.heads
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(stored), "HND", use_tensor_cores=True
    )
    wrapper.plan(
        _starts(stored.counts), stored.order, (stored.lengths - 1) % PAGE_SIZE + 1, heads.query,
        heads.kv, heads.dim, PAGE_SIZE, q_data_type=BF16, kv_data_type=stored.pools[0][0].dtype,
    )  # fmt: skip
    return functools.partial(wrapper.run, stored.query)


def _starts(counts: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


def _make_flashinfer_mla(mla: Any, case: Case, stored: Stored) -> Call:
    heads, batch = case.heads, len(case.lengths)
    wrapper = mla.BatchMLAPagedAttentionWrapper(_workspace(stored))
    is_8_bit = stored.pools[0][0].dtype == E4M3
    wrapper.plan(
        qo_indptr=torch.arange(batch + 1, dtype=torch.int32, device=stored.query.device),
        kv_indptr=_starts(stored.counts), kv_indices=stored.order, kv_len_arr=stored.lengths,
        num_heads=heads.query, head_dim_ckv=heads.dim, head_dim_kpe=heads.positions,
        page_size=PAGE_SIZE, causal=False, sm_scale=heads.query_dim**-0.5, q_data_type=BF16,
        kv_data_type=stored.pools[0][0].dtype,
        **({"scale_mode": "kv-per-tensor"} if is_8_bit else {}),
    )  # fmt: skip
    parts = stored.query.split([heads.dim, heads.positions], -1)
    latent, position = (part.contiguous() for part in parts)
    scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if is_8_bit else {}
    return lambda pool: wrapper.run(
        q_nope=latent, q_pe=position, ckv_cache=pool[0], kpe_cache=pool[1], **scales
    )


def _make_flash_mla(module: Any, case: Case, stored: Stored) -> Call:
    heads, kernel = case.heads, module.flash_mla_with_kvcache
    # Newer versions compute the metadata in the first call, and take no arguments here.
    metadata, splits = module.get_mla_metadata(stored.lengths, heads.query, 1)
    # In a fork, a switch selects the dense kernels of sm_90.
    has_switch = "use_legacy" in inspect.signature(kernel).parameters

    def call(pool: Pair) -> torch.Tensor:
        page, slot, _ = pool[0].stride()
        shape = (len(pool[0]), PAGE_SIZE, 1, heads.query_dim)
        joined = pool[0].as_strided(shape, (page, slot, slot, 1))
        out: torch.Tensor = kernel(
            stored.query[:, None], joined, stored.table, stored.lengths, heads.dim, metadata,
            splits, softmax_scale=heads.query_dim**-0.5, causal=False,
            **({"use_legacy": True} if has_switch else {}),
        )[0]  # fmt: skip
        return out[:, 0]

    return call


def _make_vllm(vllm: Any, case: Case, stored: Stored) -> Call:
    heads, device = case.heads, stored.query.device
    most = max(VLLM_GRID // heads.kv, 1)
    parts = torch.empty((most, heads.query, VLLM_PARTS, heads.dim), device=device)
    top, total = (torch.empty_like(parts[..., 0]) for _ in range(2))
    one, out = torch.ones(1, device=device), torch.empty_like(stored.query)
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
        "block_table": stored.table, "softcap": 0, "q_descale": None, "k_descale": one,
        "v_descale": one, "seq_threshold_3D": most, "num_par_softmax_segments": VLLM_PARTS,
        "softmax_segm_output": parts, "softmax_segm_max": top, "softmax_segm_expsum": total,
        "kv_quant_mode": mode, "k_scale_cache": scales[0], "v_scale_cache": scales[1],
    }  # fmt: skip
    # Older versions lack the last arguments, and choose by the dtype.
    known = inspect.signature(vllm.unified_attention).parameters
    arguments = {name: value for name, value in arguments.items() if name in known}

    def call(pool: Pair) -> torch.Tensor:
        vllm.unified_attention(k=pool[0], v=pool[1], **arguments)
        return out

    return call
