"""Tests of one step of vLLM's scheduler on pages in blocks of bytes, without vLLM.

The backend "triton" runs in Triton's interpreter, with the calls that vLLM would make on a GPU.
"""

import itertools
from unittest import mock

import numpy as np
import pytest
import torch

from hf_fp8kv.formats import FORMATS, LayerPlan, SidePlan
from hf_fp8kv.formats.codec import decode
from hf_fp8kv.ops import AttentionSpec, StoredSide, dense_prompts, reference
from hf_fp8kv.serving import attend
from hf_fp8kv.serving.attend import StoredLayer
from hf_fp8kv.serving.config import LayerStorage
from hf_fp8kv.serving.layout import EngineLayout
from hf_fp8kv.vllm.dtypes import DTYPES
from hf_fp8kv.vllm.scheduler_step import is_decoding, make_masked_decode_work, plan_step
from hf_fp8kv.vllm.storage import view_pages
from tests.helpers.grids import pairwise

NUM_HEADS = 2  # KV heads
GROUP_SIZE = 3  # query heads per KV head
HEAD_DIM = 32
NUM_QUERY_HEADS = GROUP_SIZE * NUM_HEADS
BLOCK_SIZE = 16  # tokens
NUM_BLOCKS = 40
SCALE_BYTES = 4  # of a token and head
NUM_REQUESTS = 5
DTYPE_NAMES = {"dynamic": "hf_fp8kv_e3m4", "static": "hf_fp8kv_e4m3_static"}


def make_pool(dtype, *, gap=0):
    """Return memory full of NaN codes, and vLLM's view of it, with `gap` bytes between blocks."""
    slot_bytes = 2 * HEAD_DIM + (SCALE_BYTES if dtype.is_dynamic else 0)
    block_bytes = NUM_HEADS * BLOCK_SIZE * slot_bytes
    memory = torch.full((NUM_BLOCKS, block_bytes + gap), 0xFF, dtype=torch.uint8)
    return memory, memory[:, :block_bytes].unflatten(1, (NUM_HEADS, BLOCK_SIZE, slot_bytes))


class Layer:
    """A layer that stores tokens in a pool of blocks, and attends to them."""

    def __init__(self, kind, backend, *, gap=0, window=0, softcap=0.0, sinks=None):
        dtype = DTYPES[DTYPE_NAMES[kind]]
        self.storage = make_storage(dtype, centered=kind == "static")
        self.memory, kv_cache = make_pool(dtype, gap=gap)
        self.layout = EngineLayout(
            NUM_HEADS, HEAD_DIM, BLOCK_SIZE, self.storage.plan, torch.float32, dtype.is_dynamic
        )
        pages = view_pages(kv_cache, self.layout)
        self.stored_layer = StoredLayer(pages, self.storage, self.layout, backend)
        self.spec = AttentionSpec(HEAD_DIM**-0.5, True, window, softcap, sinks)

    def attend(self, query, key, value, work):
        output = torch.full((1, *query.shape), torch.nan, dtype=query.dtype)
        inputs = (states.transpose(0, 1)[None] for states in (query, key, value))
        self.stored_layer.attend(*inputs, work, self.spec, output)
        return output[0]

    def attend_in_bfloat16(self, query, key, value, work):
        return self.attend(query.bfloat16(), key.bfloat16(), value.bfloat16(), work).float()


def make_storage(dtype, *, centered):
    """Return storage whose static scales differ between K, V and heads."""
    generator = torch.Generator().manual_seed(4)
    k = SidePlan(dtype.format, centered=centered)
    scales = [None, None]
    if not dtype.is_dynamic:
        smallest_scales = torch.tensor([0.01, 0.03]).view(2, 1, 1)
        noise = 0.01 * torch.rand((2, NUM_HEADS, 1), generator=generator)
        scales = (smallest_scales + noise).repeat(1, 1, HEAD_DIM).unbind()
    center = torch.randn((NUM_HEADS, HEAD_DIM), generator=generator) if centered else None
    return LayerStorage(LayerPlan(k, SidePlan(dtype.format)), *scales, center)


class Requests:
    """Requests with random tokens, in blocks of a pool. Each step adds tokens to each request."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        blocks = torch.randperm(NUM_BLOCKS - 1, generator=self.generator).add(1)
        self.table = torch.zeros((NUM_REQUESTS, 8), dtype=torch.int32)
        self.table[:, :-1] = blocks[: NUM_REQUESTS * 7].view(NUM_REQUESTS, 7)
        self.keys = [self._draw_tokens(0)] * NUM_REQUESTS
        self.values = [self._draw_tokens(0)] * NUM_REQUESTS

    def _draw_tokens(self, num_tokens):
        return torch.randn((num_tokens, NUM_HEADS, HEAD_DIM), generator=self.generator)

    def find_slots(self, index, start, stop):
        positions = torch.arange(start, stop)
        blocks = self.table[index][positions // BLOCK_SIZE].long()
        return blocks * BLOCK_SIZE + positions % BLOCK_SIZE

    def run_step(self, counts, attend):
        """Add tokens, call `attend` on them, and return the queries, starts and output."""
        old_lengths = [len(keys) for keys in self.keys]
        new_keys = [self._draw_tokens(count) for count in counts]
        new_values = [self._draw_tokens(count) for count in counts]
        self.keys = [torch.cat(pair) for pair in zip(self.keys, new_keys, strict=True)]
        self.values = [torch.cat(pair) for pair in zip(self.values, new_values, strict=True)]
        query = torch.randn((sum(counts), NUM_QUERY_HEADS, HEAD_DIM), generator=self.generator)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        lengths = torch.tensor([len(keys) for keys in self.keys], dtype=torch.int32)
        slots = [
            self.find_slots(index, old_length, len(self.keys[index]))
            for index, old_length in enumerate(old_lengths)
        ]
        max_length = int(lengths.max())
        work = plan_step(starts, lengths, self.table, torch.cat(slots), BLOCK_SIZE, max_length)
        return query, starts, attend(query, torch.cat(new_keys), torch.cat(new_values), work)


def quantize_and_decode(tokens, plan, scale, center, *, search):
    """Return K or V, `[N, Hkv, D]`, as attention reads it from pages, `[1, Hq, N, D]`."""
    side = StoredSide(scale, center, plan.format, HEAD_DIM)
    codes, scales = reference.quantize(tokens.transpose(0, 1)[None], side, search=search)
    token_scales = scale[:, None] if scales is None else scales.float()[..., None]
    states = decode(codes, FORMATS[plan.format]) * token_scales
    if center is not None:
        states = states + center[:, None]
    return states.repeat_interleave(GROUP_SIZE, 1)


def compute_expected(requests, index, query, layer):
    storage, spec = layer.storage, layer.spec
    k = quantize_and_decode(
        requests.keys[index], storage.plan.k, storage.k_scale, storage.center, search=True
    )
    v = quantize_and_decode(
        requests.values[index], storage.plan.v, storage.v_scale, None, search=False
    )
    q = query.transpose(0, 1)[None]
    logits = q @ k.transpose(2, 3) * spec.scaling
    if spec.softcap:
        logits = torch.tanh(logits / spec.softcap) * spec.softcap
    num_tokens, num_queries = k.shape[2], q.shape[2]
    query_positions = torch.arange(num_tokens - num_queries, num_tokens)[:, None]
    positions = torch.arange(num_tokens)
    is_visible = positions <= query_positions
    if spec.window:
        is_visible &= positions > query_positions - spec.window
    logits = logits.masked_fill(~is_visible, -torch.inf)
    sinks = torch.full((NUM_QUERY_HEADS,), -torch.inf) if spec.sinks is None else spec.sinks
    sinks = sinks.view(1, -1, 1, 1).expand(1, -1, num_queries, 1)
    weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
    return (weights @ v)[0].transpose(0, 1)


# Numbers of new tokens of each request in each step.
STEPS = ((3, 37, 16, 1, 63), (1, 1, 20, 0, 2), (1, 1, 1, 1, 1), (9, 1, 1, 1, 1))
ATTENTION_OPTIONS = {
    "plain": {},
    "window": {"window": 21},
    "softcap and sinks": {"softcap": 2.0, "sinks": torch.linspace(-1, 1, NUM_QUERY_HEADS)},
}


# The interpreter is slow, so "triton" runs each attention only once, and always with gaps, because
# its kernels locate pages by address with and without gaps.
@pytest.mark.parametrize(
    ("backend", "gap", "kind", "attention"),
    [
        *pairwise(["torch", "cpu"], [0, 512], list(DTYPE_NAMES), list(ATTENTION_OPTIONS)),
        ("triton", 512, "dynamic", "plain"), ("triton", 512, "static", "window"),
        ("triton", 512, "dynamic", "softcap and sinks"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("interpreted")
def test_a_step_matches_the_reference(backend, gap, kind, attention):
    layer = Layer(kind, backend, gap=gap, **ATTENTION_OPTIONS[attention])
    requests = Requests(seed=6)
    # The interpreter is slow, so "triton" runs without the last step.
    for counts in STEPS[:3] if backend == "triton" else STEPS:
        query, starts, output = requests.run_step(counts, layer.attend)
        for index, (start, stop) in enumerate(itertools.pairwise(starts)):
            if start < stop:
                expected = compute_expected(requests, index, query[start:stop], layer)
                torch.testing.assert_close(output[start:stop], expected, rtol=2e-4, atol=2e-4)
    assert (layer.memory[:, layer.memory.shape[1] - gap :] == 0xFF).all()
    max_blocks = -(-max(map(len, requests.keys)) // BLOCK_SIZE)
    is_unused = torch.ones(NUM_BLOCKS, dtype=torch.bool)
    is_unused[requests.table[:, :max_blocks].flatten().long()] = False
    assert (layer.memory[is_unused] == 0xFF).all()


@pytest.mark.parametrize("kind", DTYPE_NAMES)
@pytest.mark.usefixtures("interpreted")
def test_a_replayed_step_uses_the_current_requests(kind):
    # The same tensors describe different requests in each step, as in replays of a CUDA graph.
    #
    # In the first two steps, one row has no slot. Its block table belongs to a waiting request.
    layer = Layer(kind, "triton")
    requests = Requests(seed=8)
    requests.run_step((17, 16, 31, 5, 9), layer.attend)
    lengths = torch.empty(3, dtype=torch.int32)
    table = torch.empty((3, 8), dtype=torch.int32)
    slots = torch.empty(3, dtype=torch.int64)
    steps = [((0, 1, 2), 1), ((3, 0, 4), 2), ((1, 2, 3), None)]
    for indices, row_without_slot in steps:
        old_memory = layer.memory.clone()
        query = torch.randn((3, NUM_QUERY_HEADS, HEAD_DIM), generator=requests.generator)
        key, value = torch.randn((2, 3, NUM_HEADS, HEAD_DIM), generator=requests.generator)
        for row, index in enumerate(indices):
            length = len(requests.keys[index])
            lengths[row] = length + 1
            table[row] = requests.table[index]
            slots[row] = -1
            if row != row_without_slot:
                slots[row] = requests.find_slots(index, length, length + 1)
                requests.keys[index] = torch.cat([requests.keys[index], key[[row]]])
                requests.values[index] = torch.cat([requests.values[index], value[[row]]])
        work = make_masked_decode_work(lengths, table, slots, BLOCK_SIZE)
        output = layer.attend(query, key, value, work)
        for row, index in enumerate(indices):
            if row == row_without_slot:
                blocks = requests.table[index].long()
                assert torch.equal(layer.memory[blocks], old_memory[blocks])
                assert not output[row].any()
                continue
            expected = compute_expected(requests, index, query[[row]], layer)
            torch.testing.assert_close(output[[row]], expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("starts", "expected"),
    [([0, 1, 2], True), ([0, 1, 2, 2], True), ([0, 0, 1], False), ([0, 2, 2], False), ([0], True)],
)
def test_only_decode_steps_can_be_captured(starts, expected):
    assert is_decoding(np.array(starts, np.int32)) is expected


def test_tokens_without_a_slot_are_not_stored():
    lengths = torch.tensor([2], dtype=torch.int32)
    table = torch.tensor([[3]], dtype=torch.int32)
    slots = torch.tensor([3 * BLOCK_SIZE, -1])
    work = plan_step(np.array([0, 2], np.int32), lengths, table, slots, BLOCK_SIZE, 2)
    assert work.written_tokens.tolist() == [0]
    assert work.table.tolist() == [[3]]
    assert work.slot_ends.tolist() == [1]


@torch.no_grad()
def test_whole_prompts_are_read_densely_on_an_h100(monkeypatch):
    # Pages are read for prompts that are padded to a longer prompt or that continue.
    monkeypatch.setattr(dense_prompts, "_MIN_TOKENS", 18)
    attend_densely = mock.Mock(side_effect=attend.attend_densely)
    monkeypatch.setattr(attend, "attend_densely", attend_densely)
    outputs = []
    # The first run continues its prompts in a second step. The second run pads a prompt.
    runs = [[[20, 20, 0, 0, 0], [20, 20, 0, 0, 0]], [[0, 0, 0, 21, 19]]]
    for capability in (None, (9, 0)):
        monkeypatch.setattr(dense_prompts, "_read_capability", mock.Mock(return_value=capability))
        for steps in runs:
            layer = Layer("dynamic", "torch")
            requests = Requests(seed=6)
            for counts in steps:
                _, _, output = requests.run_step(counts, layer.attend_in_bfloat16)
                outputs.append(output)
    assert [len(call.args[0]) for call in attend_densely.call_args_list] == [2]
    for expected, actual in zip(outputs[:3], outputs[3:], strict=True):
        # Stored values are rounded to bfloat16, by at most 2 ** -9 each.
        assert (actual - expected).norm() <= 2**-8 * expected.norm()
