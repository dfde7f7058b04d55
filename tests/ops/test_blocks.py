"""Pages in blocks of memory: every backend finds them by their addresses, and nothing else."""

import dataclasses
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from hf_fp8kv import ops
from hf_fp8kv.errors import OutOfPagesError
from hf_fp8kv.formats import AUTO
from hf_fp8kv.ops import reference
from hf_fp8kv.ops.blocks import address_pages, put_pages, take_pages, upload
from hf_fp8kv.ops.page_bytes import page_bytes
from tests.helpers.assertions import assert_same, assert_same_pool
from tests.helpers.blocks import in_blocks, in_one_tensor
from tests.ops.test_ops import Case, attend, bound, errors, map_pages, poisoned, prepare

pytestmark = pytest.mark.usefixtures("interpreted", "poisoned_outputs")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TRITON = pytest.param(
    "triton",
    marks=pytest.mark.skipif(
        ops.available_backends()["triton"] is not None,
        reason=str(ops.available_backends()["triton"]),
    ),
)
BACKENDS = ["reference", "torch", TRITON]
CASES = [
    Case("dynamic, all of the last page", lengths=(192, 193, 191), page_size=64),
    Case("many blocks", lengths=(300, 77), tokens=2),
    Case("E3M4, center, softcap", key="fp8_e3m4", value="fp8_e3m4", center=True, softcap=9.0,
         lengths=(100,), page_size=64),
    Case("static, odd head sizes", dynamic=False, value="fp8_e5m2", k_dim=24, v_dim=40,
         lengths=(130, 90), page_size=64, q_heads=2),
    Case("auto", key=AUTO, value=AUTO, lengths=(70, 130), page_size=64),
    Case("K auto", key=AUTO, lengths=(70, 130), page_size=32),
    Case("V auto, pages of 8", value=AUTO, lengths=(50, 33), page_size=8, tokens=5),
    Case("window", window=40, lengths=(200, 170), page_size=64, tokens=3),
    Case("padding, prompt", lengths=(150, 90), tokens=60, padding=70, page_size=64, q_heads=2),
    Case("rotated", rotated=True, key="fp8_e2m5", value="int8", center=True, lengths=(70, 130),
         page_size=64),
]  # fmt: skip


def where(backend: str) -> torch.device:
    return DEVICE if backend == "triton" else torch.device("cpu")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_over_blocks(case, backend):
    """What is in no page of a sequence is NaN."""
    pages, query, kwargs = prepare(case)
    expected = attend(case, pages, query, "reference", **kwargs)
    device = where(backend)
    spec = ops.AttentionSpec(
        **{name: x.to(device) if torch.is_tensor(x) else x for name, x in kwargs.items()}
    )
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    found = ops.attend(
        query.to(device), in_blocks(pages, device=device), lengths, case.start, case.stop, spec,
        backend=backend,
    ).cpu()  # fmt: skip
    assert errors(found, expected).max() <= bound(case)


# Grid: how a page is laid out depends on the case, which of its bytes are written on the tokens.
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("case", "tokens"), list(zip(CASES[:7], (1, 70, 3, 70, 1, 3, 70), strict=True)), ids=str
)
def test_writing_to_blocks_touches_no_other_byte(case, tokens, backend):
    case = dataclasses.replace(case, lengths=tuple(n + tokens for n in case.lengths))
    right = poisoned(case)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    key = torch.randn(len(lengths), case.heads, tokens, case.k_dim)
    value = 3 * torch.randn(len(lengths), case.heads, tokens, case.v_dim)
    device = where(backend)
    pages = in_blocks(right, device=device)
    ops.write(pages, key.to(device), value.to(device), lengths.to(device), backend)
    reference.write(right, key, value, lengths)
    assert_same_pool(map_pages(torch.Tensor.cpu, in_one_tensor(pages)), right)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES[1::2], ids=str)
def test_gathering_from_blocks(case, backend):
    pages, _, _ = prepare(case)
    device = where(backend)
    scattered = in_blocks(pages, device=device)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    for side in ("k", "v"):
        for start, stop in ((0, case.stop), (case.stop // 2, case.stop // 2 + 3)):
            right = reference.gather(pages, lengths, side, start, stop, torch.float32, True)
            found = ops.gather(
                scattered, lengths.to(device), side, start, stop, torch.float32, True, backend
            )
            torch.testing.assert_close(found.cpu(), right, rtol=0, atol=0, equal_nan=True)


def test_a_token_without_a_page_is_refused_before_anything_is_written():
    case = CASES[0]
    pages = in_blocks(poisoned(case))
    before = in_one_tensor(pages)
    key = torch.randn(len(case.lengths), case.heads, 70, case.k_dim)
    lengths = torch.tensor(case.lengths, dtype=torch.int32) + 198
    with pytest.raises(OutOfPagesError, match="reserve pages"):
        ops.write(pages, key, key, lengths, "torch")
    assert_same_pool(in_one_tensor(pages), before)


def test_whoever_has_the_addresses_keeps_the_blocks():
    blocks = [torch.zeros(2, 64, dtype=torch.uint8) for _ in range(3)]
    gone = [weakref.ref(block.untyped_storage()) for block in blocks]
    addresses = address_pages(blocks)
    assert addresses.tolist() == [b.data_ptr() + 64 * i for b in blocks for i in range(2)]
    del blocks
    gc.disable()
    try:
        assert all(ref() is not None for ref in gone)
        del addresses
        assert not any(ref() for ref in gone), "without waiting for the garbage collector"
    finally:
        gc.enable()


def test_pages_by_number():
    blocks = [torch.randint(0, 256, (n, 16)).byte() for n in (3, 1, 4)]
    rows = torch.cat(blocks)
    numbers = np.array([7, 0, 3, 3, 2, 4])
    assert_same(take_pages(blocks, numbers), rows[numbers])
    new = torch.randint(0, 256, (3, 16)).byte()
    rows[[5, 2, 3]] = new
    put_pages(blocks, np.array([5, 2, 3]), new)
    assert_same(torch.cat(blocks), rows)


@pytest.mark.parametrize("sizes", [(2, 16, 5, 3), (8, 64, 128, 128), (1, 8, 1, 1)])
def test_parts_of_a_page_do_not_overlap_and_are_aligned(sizes):
    layout = page_bytes(*sizes, torch.uint8, torch.bfloat16, True)
    block = torch.zeros(3, layout.size, dtype=torch.uint8)
    for name, part in layout.split(block).items():
        assert layout.first_byte(name) % 16 == 0
        part.view(torch.uint8).add_(1)
        assert part.data_ptr() == block.data_ptr() + layout.first_byte(name)
    assert block.max() == 1, "a byte is in two parts"
    heads, slots, k_dim, v_dim = sizes
    assert block.sum() == 3 * heads * slots * (k_dim + 2 * v_dim + 4)
    assert layout.size % 16 == 0


def test_numbers_go_to_a_gpu_from_pinned_memory(monkeypatch):
    """From other memory a copy waits for all that was started before."""
    calls: list[Any] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        calls.append("pinned")
        return tensor

    def to(tensor: torch.Tensor, device: torch.device, **options: Any) -> torch.Tensor:
        calls.append((device, options))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    cuda = torch.device("cuda", 0)
    upload(np.arange(3), cuda)
    assert calls == ["pinned", (cuda, {"non_blocking": True})]
