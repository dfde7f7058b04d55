"""A state machine over caches of every kind of storage, compared with dense tensors.

A cache grows, is preallocated, or keeps most pages in host memory. Some of its layers may have a
window. Each step changes one of several forks, and then all forks must hold the tokens that the
model of the machine, one dense tensor per layer, holds.
"""

import copy
import pickle
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_fp8kv import ConfigError, FP8PagedCache, OutOfPagesError
from hf_fp8kv.cache.paged_tensor import densify
from hf_fp8kv.paging import memory_blocks
from tests.helpers.assertions import assert_same
from tests.helpers.standin import replace_triton
from tests.helpers.tiny_models import make_causal_config

# New memory contains NaN, so that a page that was not copied changes the tokens.
pytestmark = [pytest.mark.text, pytest.mark.usefixtures("poisoned_outputs")]

NUM_LAYERS = 3
NUM_HEADS = 2
HEAD_DIM = 16
MAX_LEN = 120
MAX_PAGES = 40
STORAGE: dict[str, dict[str, Any]] = {
    "growing": {},
    "budget": {"max_pages": MAX_PAGES},
    "preallocated": {"max_cache_len": MAX_LEN},
    "offloaded": {"offloading": True},
    "partly offloaded": {"offloading": 3},
}
# Formats that represent the values, multiples of 1/2 up to 4, exactly.
FORMATS: list[dict[str, Any]] = [
    {"dtype": "auto"},
    {"dtype": "fp8_e4m3", "scales": 1.0},
    {"key_dtype": "auto", "value_dtype": "fp8_e3m4", "scales": 0.5},
]
LAYER_TYPES = {
    "full": ["full_attention"] * NUM_LAYERS,
    "sliding": ["sliding_attention"] * NUM_LAYERS,
    "mixed": ["sliding_attention", "full_attention", "sliding_attention"],
}


class Branch:
    """A cache and its model.

    Attributes:
        cache: The cache.
        keys: Dense K of each layer, `[B, H, T, D]`, or None for an empty cache. V is -K.
        records_past: Whether pages that have left the window are kept.
        keeps_all: Whether the pages of all tokens are kept, so that any crop is possible.
    """

    def __init__(self, cache: FP8PagedCache) -> None:
        self.cache = cache
        self.keys: list[torch.Tensor] | None = None
        self.records_past = self.keeps_all = False

    @property
    def lengths(self) -> list[int]:
        return [0] * NUM_LAYERS if self.keys is None else [x.shape[2] for x in self.keys]

    @property
    def batch(self) -> int | None:
        return None if self.keys is None else self.keys[0].shape[0]

    def select(self, rows: list[int]) -> None:
        if self.keys is not None:
            self.keys = [x[rows] for x in self.keys]


class CacheMachine(RuleBasedStateMachine):
    """Several forks of a cache that grows, each independently changed and dropped."""

    kinds = tuple(kind for kind in STORAGE if kind != "preallocated")

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.folder = tempfile.TemporaryDirectory()

    def teardown(self) -> None:
        self.patch.undo()
        self.folder.cleanup()

    @initialize(
        data=st.data(), layers=st.sampled_from([*LAYER_TYPES]),
        window=st.sampled_from([1, 2, 7, 8, 9, 10, 20]), storage=st.sampled_from(FORMATS),
        prefill=st.sampled_from(["exact", "stored"]), backend=st.sampled_from(["auto", "triton"]),
    )  # fmt: skip
    def start(
        self, data: st.DataObject, layers: str, window: int, storage: dict[str, Any], prefill: str,
        backend: str,
    ) -> None:  # fmt: skip
        self.kind = kind = data.draw(st.sampled_from(self.kinds), label="kind")
        self.window = None if layers == "full" else window
        if backend == "triton":
            # The stand-in reads blocks of one or two pages.
            replace_triton(self.patch)
            self.patch.setattr(memory_blocks, "BLOCK_BYTES", 3000)
        config = make_causal_config(
            "gemma3_text", num_hidden_layers=NUM_LAYERS, layer_types=LAYER_TYPES[layers],
            sliding_window=window,
        )  # fmt: skip
        cache = FP8PagedCache(
            config, page_size=8, prefill=prefill, backend=backend, **storage, **STORAGE[kind]
        )
        self.branches = [Branch(cache)]
        self.generator = torch.Generator().manual_seed(0)

    def pick(self, data: st.DataObject) -> Branch:
        return data.draw(st.sampled_from(self.branches), label="branch")

    def make_keys(self, batch: int, num_tokens: int) -> torch.Tensor:
        shape = batch, NUM_HEADS, num_tokens, HEAD_DIM
        return torch.randint(-8, 9, shape, generator=self.generator) / 2

    def update(self, branch: Branch, layer: int, k: torch.Tensor) -> None:
        """Store keys of a layer, and check the keys and values that attention gets."""
        assert branch.keys is not None
        key, value = branch.cache.update(k, -k, layer)
        branch.keys[layer] = keys = torch.cat([branch.keys[layer], k], 2)
        length, num_tokens = keys.shape[2], k.shape[2]
        is_sliding = branch.cache.layers[layer].is_sliding
        first = max(length - num_tokens - self.window + 1, 0) if is_sliding else 0
        actual_k, actual_v = densify(key), densify(value)
        # Columns end at `MAX_LEN` in a preallocated cache, and at the end of a long call.
        has_unused = self.kind == "preallocated" and actual_k.shape[2] == MAX_LEN
        stop = length if has_unused else actual_k.shape[2]
        for actual, expected in ((actual_k, keys), (actual_v, -keys)):
            span = slice(stop - (length - first), stop)
            assert_same(actual[:, :, span], expected[:, :, first:], f"layer {layer}")

    @rule(data=st.data(), num_tokens=st.integers(1, 30), batch=st.integers(1, 3))
    def step(self, data: st.DataObject, num_tokens: int, batch: int) -> None:
        branch = self.pick(data)
        num_tokens = min(num_tokens, MAX_LEN - max(branch.lengths))
        if not num_tokens:
            return
        was_empty = branch.keys is None
        batch = branch.batch or batch
        if branch.keys is None:
            branch.keys = [self.make_keys(batch, 0) for _ in range(NUM_LAYERS)]
        k = self.make_keys(batch, num_tokens)
        for layer in range(NUM_LAYERS):
            try:
                self.update(branch, layer, k + layer / 2)
            except OutOfPagesError:
                assert self.kind == "budget"
                assert layer == 0, "a step fits in all layers or in none"
                branch.keys = None if was_empty else branch.keys
                return

    @precondition(lambda self: self.kind == "preallocated" or self.window is None)
    @precondition(lambda self: self.kind != "budget")
    @rule(
        data=st.data(),
        calls=st.lists(st.tuples(st.integers(0, NUM_LAYERS - 1), st.integers(1, 4)), max_size=5),
    )
    def step_in_any_order(self, data: st.DataObject, calls: list[tuple[int, int]]) -> None:
        """Layers may be called in any order, more than once or not at all, as by an early exit."""
        branch = self.pick(data)
        if branch.keys is None or max(branch.lengths) + 20 > MAX_LEN:
            return
        for layer, num_tokens in calls:
            self.update(branch, layer, self.make_keys(branch.batch or 1, num_tokens))

    @rule(data=st.data(), layer=st.integers(0, NUM_LAYERS - 1))
    def refuse(self, data: st.DataObject, layer: int) -> None:
        branch = self.pick(data)
        if branch.keys is not None:
            k = self.make_keys(branch.batch or 1, 2)
            with pytest.raises(ConfigError):
                branch.cache.update(k[..., 1:], k, layer)

    @rule(data=st.data(), num_tokens=st.integers(0, 12))
    def crop(self, data: st.DataObject, num_tokens: int) -> None:
        branch = self.pick(data)
        try:
            branch.cache.crop(-num_tokens)
        except ConfigError:  # tests/paging/test_block_table.py tests which crops are refused
            assert self.window is not None
            assert not branch.keeps_all
            assert max(branch.lengths) >= self.window
            return
        except OutOfPagesError:  # a shared page must be copied before it is written
            assert self.kind == "budget"
            return
        if branch.keys is not None:
            branch.keys = [x[:, :, : max(x.shape[2] - num_tokens, 0)] for x in branch.keys]
            branch.keys = branch.keys if any(branch.lengths) else None
        # A crop of a growing cache frees the pages before the window.
        branch.keeps_all = branch.records_past and (
            branch.keys is None or (branch.keeps_all and self.kind == "preallocated")
        )

    @rule(data=st.data(), method=st.sampled_from(["reorder", "select", "mask", "repeat"]))
    def change_sequences(self, data: st.DataObject, method: str) -> None:
        branch = self.pick(data)
        if branch.batch is None:
            return
        index = st.integers(0, branch.batch - 1)
        size = branch.batch if method == "reorder" else None
        rows = data.draw(st.lists(index, min_size=size or 1, max_size=size or 3), label="rows")
        is_kept = torch.zeros(branch.batch, dtype=torch.bool)
        is_kept[rows] = True
        changes = {
            "reorder": (branch.cache.reorder_cache, torch.tensor(rows), rows),
            "select": (branch.cache.batch_select_indices, torch.tensor(rows), rows),
            "mask": (branch.cache.batch_select_indices, is_kept, sorted({*rows})),
            "repeat": (
                branch.cache.batch_repeat_interleave, 2, [i // 2 for i in range(2 * branch.batch)]
            ),
        }  # fmt: skip
        change, argument, new_rows = changes[method]
        if len(new_rows) > 4:
            return
        try:
            change(argument)
        except OutOfPagesError:
            assert self.kind == "budget"
            return
        branch.select(new_rows)

    @precondition(lambda self: len(self.branches) < 3)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        fork = copy.copy(self.pick(data))
        fork.cache = fork.cache.fork()
        fork.keys = fork.keys and [*fork.keys]
        self.branches.append(fork)

    @rule(data=st.data(), method=st.sampled_from(["pickle", "deepcopy", "file"]))
    def replace_by_a_copy(self, data: st.DataObject, method: str) -> None:
        branch = self.pick(data)
        path = Path(self.folder.name) / "cache.safetensors"
        used_bytes = branch.cache.memory_footprint().used_bytes
        branch.cache = {
            "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
            "deepcopy": copy.deepcopy,
            "file": lambda cache: FP8PagedCache.load(cache.save(path)),
        }[method](branch.cache)
        # Copies of a preallocated cache have separate pages for each sequence.
        if self.kind != "preallocated":
            assert branch.cache.memory_footprint().used_bytes == used_bytes, "pages are shared"

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        for layer in self.pick(data).cache.paged_layers:
            layer.offload()
            layer.prefetch()

    @precondition(lambda self: len(self.branches) > 1)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.branches.remove(self.pick(data))

    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        branch = self.pick(data)
        branch.cache.reset()
        branch.keys, branch.keeps_all = None, branch.records_past

    @rule(data=st.data())
    def record_past(self, data: st.DataObject) -> None:
        branch = self.pick(data)
        try:
            branch.cache.activate_past_recording()
        except ConfigError:
            assert len({*branch.lengths}) > 1
            return
        branch.keeps_all |= branch.keys is None
        branch.records_past = True

    @invariant()
    def all_branches_hold_their_tokens(self) -> None:
        for branch in self.branches:
            cache = branch.cache
            assert [int(layer.get_seq_length()) for layer in cache.layers] == branch.lengths
            assert cache.host_length() == max(branch.lengths)
            for layer, keys in zip(cache.layers, branch.keys or [], strict=False):
                self.check_layer(layer, keys)

    def check_layer(self, layer: Any, keys: torch.Tensor) -> None:
        """Assert that a layer holds the tokens that the next token attends to."""
        length = keys.shape[2]
        if not length:
            return
        first = max(length - self.window + 1, 0) if layer.is_sliding else 0
        for handle, expected in ((layer.keys, keys), (layer.values, -keys)):
            span = slice(first - handle.start, length - handle.start)
            assert_same(handle.dense()[:, :, span], expected[:, :, first:], layer.index)

    @invariant()
    def sizes_match_the_model(self) -> None:
        for branch in self.branches:
            cache = branch.cache
            for index, length in enumerate(branch.lengths if self.kind != "preallocated" else ()):
                is_sliding = cache.layers[index].is_sliding
                start = max(length - self.window + 1, 0) if is_sliding else 0
                # A request of the cache for a mask would announce a step of a model.
                assert cache.layers[index].get_mask_sizes(3) == (length + 3 - start, start)
            sizes = [layer.store.memory_footprint() for layer in cache.layers]
            assert self.kind != "offloaded" or len([x for x in sizes if x.get("pages")]) <= 2
            if not any(branch.lengths) and self.kind != "preallocated":
                assert cache.memory_footprint().used_bytes == 0
            if self.kind == "budget":
                assert cache.budget.num_held <= cache.budget.max_pages == MAX_PAGES


class PreallocatedMachine(CacheMachine):
    """Forks of a preallocated cache, whose windows are rings. The first fork stays preallocated."""

    kinds = ("preallocated",)


TestCacheMachine = CacheMachine.TestCase
TestPreallocatedMachine = PreallocatedMachine.TestCase
