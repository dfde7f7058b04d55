"""The section on latents of the benchmark for GPUs: what is wrong gets no time."""

import functools
import importlib.machinery
import sys
import types

import pytest
import torch

from benchmarks.gpu import cached, goals, latent, latent_kernels, other_kernels
from benchmarks.gpu.pools import check
from benchmarks.gpu.record import Record
from benchmarks.gpu.shapes import BF16, FULL, KINDS, TINY, Case, Heads
from benchmarks.gpu.timing import Stage
from hf_fp8kv import ops
from hf_fp8kv.cache.paged_tensor import pages_of
from hf_fp8kv.ops import reference
from tests.helpers.wrong_results import five_percent_more, one_not_written

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
E4M3, E3M4 = (next(kind for kind in KINDS if kind.name == name) for name in ("e4m3", "e3m4"))
[CASE] = TINY.latents
STEPS = {"e3m4", "e4m3", "bf16 pages"}
KERNELS = {f"{name} kernel" for name in STEPS}
TORCH = {goals.STOCK, goals.ABSORBED}


@pytest.fixture
def record() -> Record:
    return Record(Stage("cpu", dry=True), progress=lambda _message: None)


def measured(record: Record) -> set[str]:
    """Measure all of the section; return what failed."""
    with torch.no_grad():
        latent.measure(record, TINY, "torch")
    assert {row["name"] for row in record.rows} == STEPS | KERNELS | TORCH
    return {row["name"] for row in record.rows if "failed" in row}


def test_every_contender_is_checked_and_measured(record):
    assert not measured(record), record.rows
    assert all(0 <= row["error"] < 0.01 and row["us"] > 0 for row in record.rows)
    assert "flash_mla is not installed" in record.skipped
    weights = 2 * 4 * 256 * 32
    moved = {row["name"]: row["moved"] for row in record.rows}
    # Codes, a word of scales and positions of 16 bits.
    assert moved["e3m4"] == 140 * (32 + 4 + 32) + weights
    assert moved["e3m4 kernel"] == moved["e3m4"] - weights
    assert moved[goals.STOCK] == moved[goals.ABSORBED] == moved["bf16 pages"] == 140 * 96 + weights


@pytest.mark.parametrize(
    ("name", "fails"),
    [
        ("fp8_paged_attention", STEPS),
        ("sdpa_attention_forward", {goals.STOCK}),
        ("_absorb", {goals.ABSORBED}),
    ],
)
def test_a_wrong_step_fails(record, monkeypatch, name, fails):
    monkeypatch.setattr(latent, name, five_percent_more(getattr(latent, name)))
    assert measured(record) == fails


def _without_the_last_page(right):
    def wrong(query, pages, lengths, *args, **kwargs):
        return right(query, pages, (lengths - 6).clamp(min=1), *args, **kwargs)

    return wrong


def _without_positions(right):
    def wrong(query, pages, *args, **kwargs):
        return right(
            query, pages._replace(v=pages.v._replace(codes=pages.v.codes * 0)), *args, **kwargs
        )

    return wrong


def write_first(query, key, value, pages, lengths, *args, plan, backend):
    ops.write(pages, key, value, lengths, backend)
    return ops.attend(query, pages, lengths, *args, plan=plan, backend=backend)


@pytest.mark.parametrize("broken", [_without_the_last_page, _without_positions, one_not_written])
def test_a_wrong_kernel_fails(record, monkeypatch, broken):
    monkeypatch.setattr(ops, "attend", broken(ops.attend))
    monkeypatch.setattr(ops, "write_and_attend", write_first)
    assert measured(record) == STEPS | KERNELS


def test_expanded_latents_are_no_result(record, monkeypatch):
    """Right, but not what is measured."""
    monkeypatch.setattr(latent.latent, "install", lambda *_args: None)
    assert measured(record) == STEPS
    assert "got expanded ones" in record.rows[0]["failed"]


def test_cases_of_goals_come_first():
    names = [str(case) for case in FULL.latents]
    wanted = {f"{heads} heads, {batch} x 16k" for heads in goals.EXPANDED for batch in (1, 16)}
    assert set(names[:4]) == wanted
    assert len(set(names)) == 12
    for case in FULL.latents:
        assert {n // 1024 for n in case.lengths} <= {4, 16, 32}
        # 512 codes, two scales, 64 positions of 16 bits.
        assert case.moved(E3M4) == case.read * 644
        assert case.moved(BF16) == case.read * 1152
        assert case.flops == case.read * case.heads.query * 2 * (576 + 512)


@pytest.mark.parametrize("heads", [16, 48, 128])
def test_each_of_many_heads_may_be_looked_at(monkeypatch, heads):
    """A mistake in any head is found by the parts that look at it; they are of 16 heads."""
    case = Case((40,), Heads(heads, 1, 32, 16))
    stage = Stage("cpu", dry=True)
    [pages] = latent.decode.pages_for(stage, E4M3, case, 1, 2)
    query = stage.randn(1, 1, heads, 48).transpose(1, 2)
    lengths = torch.tensor([40], dtype=torch.int32)
    right = reference.attend(query, pages, lengths, 0, 40, case.attention_spec())
    assert check(right, query, pages, case) == 0
    for head in (0, heads - 1):
        wrong = right.clone()
        wrong[:, :, head] *= 1.2
        assert check(wrong, query, pages, case) > 0.01


def test_pages_in_several_blocks_are_checked():
    """As the cache of a GPU has them once it has grown."""
    case, stage = Case((130,), TINY.heads), Stage("cpu", dry=True)
    filled = cached.fill(stage, E4M3, case, 1, "torch", preallocated=False)
    pool = filled.cache.paged_layers[0].pool
    pool.lay_out(in_blocks=True)
    pool.grow(pool.pages + 2)
    assert len(pool._blocks) > 1
    states = [stage.randn(1, TINY.heads.kv, 64, TINY.heads.dim) for _ in range(2)]
    for _ in range(3):
        handles = filled.cache.update(*states, 0)
    case = Case((129 + 3 * 64,), TINY.heads)
    pages = pages_of(handles[0])
    assert int(pages.table.max()) >= len(pool._blocks[0])
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    spec = case.attention_spec()
    output = reference.attend(filled.states[0], pages, lengths, 0, case.lengths[0], spec)
    assert check(output, filled.states[0], pages, case) < 1e-6


# -- kernels of others ---------------------------------------------------------------------------


def attend_by_table(query, latents, positions, table, lengths, scaling):
    """Attend from `[B, H, R + P]` to `[P, S, R]` and `[P, S, P]` by a block table; in float32."""
    out = torch.empty_like(query[..., : latents.shape[-1]])
    for b, length in enumerate(lengths.tolist()):
        dense = [x[table[b].long()].float().flatten(0, 1)[:length] for x in (latents, positions)]
        logits = query[b].float() @ torch.cat(dense, -1).T * scaling
        out[b] = logits.softmax(-1) @ dense[0]
    return out


class Metadata:
    """FlashMLA's, which newer versions fill in the first call."""


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
    softmax_scale=None, causal=False,
):  # fmt: skip
    assert isinstance(tile_scheduler_metadata, Metadata)
    assert num_splits is None
    assert not causal
    assert k_cache.shape[1:] == (64, 1, q.shape[-1])
    assert k_cache.is_contiguous()
    latents, positions = k_cache[:, :, 0].split([head_dim_v, q.shape[-1] - head_dim_v], -1)
    table = (block_table, cache_seqlens, softmax_scale)
    return attend_by_table(q[:, 0], latents, positions, *table)[:, None], None


def with_switch(*args, use_legacy=False, **kwargs):
    """Attend as a fork does, whose dense kernels are behind a switch."""
    assert use_legacy
    return flash_mla_with_kvcache(*args, **kwargs)


class Wrapper:
    """FlashInfer's, as far as it is used."""

    def __init__(self, workspace):
        assert workspace.dtype == torch.uint8

    def plan(
        self, *, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv,
        head_dim_kpe, page_size, causal, sm_scale, q_data_type, kv_data_type, scale_mode="default",
    ):  # fmt: skip
        assert qo_indptr.tolist() == list(range(len(kv_len_arr) + 1))
        assert (scale_mode == "kv-per-tensor") == (kv_data_type != q_data_type)
        assert (num_heads, head_dim_ckv, head_dim_kpe, causal) == (4, 32, 16, False)
        counts = kv_indptr.diff()
        assert counts.tolist() == [-(-n // page_size) for n in kv_len_arr.tolist()]
        parts = kv_indices.split(counts.tolist())
        self.table = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        self.lengths, self.scaling = kv_len_arr, sm_scale

    def run(self, *, q_nope, q_pe, ckv_cache, kpe_cache, ckv_scale=None, kpe_scale=None):
        assert (ckv_scale, kpe_scale) == ((None,) * 2 if q_pe.dtype == kpe_cache.dtype else (1, 1))
        query = torch.cat([q_nope, q_pe], -1)
        return attend_by_table(query, ckv_cache, kpe_cache, self.table, self.lengths, self.scaling)


def install(monkeypatch, **modules):
    for name, content in modules.items():
        module = types.ModuleType(name.replace("__", "."))
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(latent_kernels, "WORKSPACE", 64)


@pytest.mark.parametrize("attend", [flash_mla_with_kvcache, with_switch])
@pytest.mark.parametrize("wrong", [False, True])
def test_flash_mla_where_there_is_one(record, monkeypatch, attend, wrong):
    wrapped = functools.wraps(attend)(five_percent_more(attend))
    content = {
        "flash_mla_with_kvcache": wrapped if wrong else attend,
        "get_mla_metadata": lambda lengths, rows, heads: (Metadata(), None),
    }
    install(monkeypatch, flash_mla=content)
    flash_mla = latent_kernels.find(record, "flash_mla", "flash_mla")
    latent_kernels.measure_flash_mla(record, flash_mla, CASE)
    [row] = record.rows
    assert ("failed" in row) == wrong, row
    assert row["moved"] == 140 * 96


def test_flashinfer_s_mla_where_there_is_one(record, monkeypatch):
    install(
        monkeypatch, flashinfer={"__path__": []}, flashinfer__decode={},
        flashinfer__mla={"BatchMLAPagedAttentionWrapper": Wrapper},
    )  # fmt: skip
    sizes = latent.replace(TINY, decode=(), others=())
    other_kernels.measure(record, sizes, "torch")
    assert {row["name"]: "failed" in row for row in record.rows} == {
        "flashinfer mla bf16 kernel": False, "flashinfer mla e4m3 kernel": False,
    }  # fmt: skip
    assert {row["case"] for row in record.rows} == {str(CASE)}
    wrong = five_percent_more(attend_by_table)
    monkeypatch.setitem(globals(), "attend_by_table", wrong)
    other = Case((70, 40), CASE.heads, label="other")
    mla = sys.modules["flashinfer.mla"]
    latent_kernels.measure_flashinfer(record, mla, other)
    assert all("failed" in row for row in record.rows if row["case"] == "other")


def test_a_package_that_cannot_be_imported_is_named(record, monkeypatch):
    install(monkeypatch, flashinfer={})
    assert latent_kernels.find(record, "flashinfer", "flashinfer.mla") is None
    assert "flashinfer.mla: ModuleNotFoundError" in record.skipped[0]
