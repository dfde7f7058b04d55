"""Kernels of others that attend to latents: FlashMLA, and FlashInfer's for MLA."""

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hf_fp8kv.formats import AUTO
from hf_fp8kv.ops import Pages, StoredSide

from .goals import LATENT
from .pools import PAGE_SIZE, check
from .record import Record
from .shapes import Case
from .timing import Step

E4M3 = torch.float8_e4m3fn
WORKSPACE = 2**27
Pair = tuple[torch.Tensor, torch.Tensor]
# What attends to a layer's pages, and returns `[B, H, R]`.
Call = Callable[[Pair], torch.Tensor]


@dataclass(frozen=True)
class _Stored:
    """Random pages of several layers, which share a block table.

    Attributes:
        query: `[B, H, R + P]`, bf16.
        order: the pages of all sequences, one after the other; table: the same, `[B, M]`.
        counts: `[B]`, pages of each sequence; lengths: its tokens; int32.
        pools: latents `[P, S, R]` and positions `[P, S, P]` of each layer; `joined`: parts of one
            tensor.
    """

    query: torch.Tensor
    order: torch.Tensor
    table: torch.Tensor
    counts: torch.Tensor
    lengths: torch.Tensor
    pools: list[Pair]


def find(record: Record, package: str, name: str) -> Any:
    """Return a module of a package that others made, or None, and note why."""
    if importlib.util.find_spec(package) is None:
        record.skip(f"{package} is not installed")
        return None
    try:
        return importlib.import_module(name)
    except Exception as error:  # it is other people's code
        record.skip(f"{name}: {type(error).__name__}: {error}")
        return None


def measure_flash_mla(record: Record, flash_mla: Any, case: Case) -> None:
    """Add a row for FlashMLA's decoding of dense bf16 latents."""
    make = functools.partial(_make_flash_mla, flash_mla)
    work = functools.partial(_work, record, case, make, torch.bfloat16, joined=True)
    record.measure(LATENT, case, "flash_mla bf16 kernel", work)


def measure_flashinfer(record: Record, mla: Any, case: Case) -> None:
    """Add a row for each dtype that FlashInfer's wrapper for MLA takes; it may compile first."""
    plan = mla.BatchMLAPagedAttentionWrapper.plan
    names = {"bf16": torch.bfloat16}
    if "scale_mode" in inspect.signature(plan).parameters:
        names["e4m3"] = E4M3
    for name, dtype in names.items():
        make = functools.partial(_make_flashinfer, mla)
        work = functools.partial(_work, record, case, make, dtype, joined=False)
        record.measure(LATENT, case, f"flashinfer mla {name} kernel", work)


def _work(
    record: Record, case: Case, make: Callable[..., Call], dtype: torch.dtype, *, joined: bool
) -> dict[str, Any]:
    stage, heads = record.stage, case.heads
    size = case.read * heads.query_dim * dtype.itemsize
    stored = _store(record, case, dtype, stage.copies(size), joined)
    call = make(case, stored)
    steps: list[Step] = [functools.partial(call, pool) for pool in stored.pools]
    output = call(stored.pools[-1])
    latents, positions = (x[:, None].to(torch.bfloat16) for x in stored.pools[-1])
    k = StoredSide(latents, None, None, AUTO, heads.dim)
    v = StoredSide(positions.transpose(2, 3), None, None, AUTO, heads.positions)
    error = check(output[:, None], stored.query[:, :, None], Pages(k, v, None, stored.table), case)
    return {"timed": stage.time(steps), "error": error, "moved": size, **case.describe()}


def _store(record: Record, case: Case, dtype: torch.dtype, layers: int, joined: bool) -> _Stored:
    stage, heads = record.stage, case.heads
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    counts = -(-lengths // PAGE_SIZE)
    order = torch.randperm(int(counts.sum())).int()
    table = torch.nn.utils.rnn.pad_sequence(order.split(counts.tolist()), batch_first=True)
    pools = []
    for _ in range(layers):
        both = stage.randn(len(order), PAGE_SIZE, heads.query_dim).to(dtype)
        latents, positions = both.split([heads.dim, heads.positions], -1)
        if not joined:
            latents, positions = latents.contiguous(), positions.contiguous()
        pools.append((latents, positions))
    query = stage.randn(len(lengths), heads.query, heads.query_dim)
    order, table, counts, lengths = (x.to(stage.device) for x in (order, table, counts, lengths))
    return _Stored(query, order, table, counts, lengths, pools)


def _make_flash_mla(flash_mla: Any, case: Case, stored: _Stored) -> Call:
    heads = case.heads
    attend = flash_mla.flash_mla_with_kvcache
    # Newer versions make it in the first call, and take no arguments here.
    metadata, splits = flash_mla.get_mla_metadata(stored.lengths, heads.query, 1)
    # A fork has the dense kernels of sm_90 behind a switch.
    known = inspect.signature(attend).parameters
    more = {"use_legacy": True} if "use_legacy" in known else {}

    def call(pool: Pair) -> torch.Tensor:
        page, slot, _ = pool[0].stride()
        shape = (len(pool[0]), PAGE_SIZE, 1, heads.query_dim)
        joined = pool[0].as_strided(shape, (page, slot, slot, 1))
        out, _ = attend(
            stored.query[:, None], joined, stored.table, stored.lengths, heads.dim, metadata,
            splits, softmax_scale=heads.query_dim**-0.5, causal=False, **more,
        )  # fmt: skip
        return out[:, 0]  # type: ignore[no-any-return]

    return call


def _make_flashinfer(mla: Any, case: Case, stored: _Stored) -> Call:
    heads, device = case.heads, stored.query.device
    dtype = stored.pools[0][0].dtype
    wrapper = mla.BatchMLAPagedAttentionWrapper(
        torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    )
    batch = len(case.lengths)
    ends = stored.counts.cumsum(0, dtype=torch.int32)
    eight = dtype == E4M3
    wrapper.plan(
        qo_indptr=torch.arange(batch + 1, dtype=torch.int32, device=device),
        kv_indptr=torch.nn.functional.pad(ends, (1, 0)), kv_indices=stored.order,
        kv_len_arr=stored.lengths, num_heads=heads.query, head_dim_ckv=heads.dim,
        head_dim_kpe=heads.positions, page_size=PAGE_SIZE, causal=False,
        sm_scale=heads.query_dim**-0.5, q_data_type=torch.bfloat16, kv_data_type=dtype,
        **({"scale_mode": "kv-per-tensor"} if eight else {}),
    )  # fmt: skip
    q_latent, q_position = (
        x.contiguous() for x in stored.query.split([heads.dim, heads.positions], -1)
    )
    scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if eight else {}

    def call(pool: Pair) -> torch.Tensor:
        latents, positions = pool
        return wrapper.run(  # type: ignore[no-any-return]
            q_nope=q_latent, q_pe=q_position, ckv_cache=latents, kpe_cache=positions, **scales
        )

    return call
