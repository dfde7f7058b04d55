"""A state machine over caches of every kind of storage, compared with dense tensors.

A cache grows, is preallocated, or keeps most pages in host memory. Some of its layers may have a
window. Each step changes one of several forks, and then all forks must hold the same tokens as
the reference, one dense tensor per layer. No page may be lost.
"""

import contextlib
import copy
import pickle
import tempfile
from pathlib import Path
from typing import Any

import hypothesis
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
from tests.paging.test_block_table import check_cache_tables

# New memory contains NaN, so that a page that was not copied changes the tokens.
pytestmark = [pytest.mark.text, pytest.mark.usefixtures("poisoned_outputs")]

NUM_LAYERS = 3
NUM_HEADS = 2
HEAD_DIM = 16
PAGE_SIZE = 8
MAX_LEN = 120
MAX_PAGES = 40
KIND_OPTIONS: dict[str, dict[str, Any]] = {
    "growing": {},
    "budget": {"max_pages": MAX_PAGES},
    "preallocated": {"max_cache_len": MAX_LEN},
    "preallocated budget": {"max_cache_len": MAX_LEN, "max_pages": MAX_PAGES},
    "offloaded": {"offloading": True},
    "partly offloaded": {"offloading": 3},
}
# Formats that represent the values, multiples of 1/2 up to 4, exactly.
FORMATS: list[dict[str, Any]] = [
    {"dtype": "auto"},
    {"dtype": "fp8_e4m3", "scales": 1.0},
    {"key_dtype": "auto", "value_dtype": "fp8_e3m4", "scales": 0.5},
    {"dtype": "int6", "scales": 0.5},
]
LAYER_TYPES = {
    "full": ["full_attention"] * NUM_LAYERS,
    "sliding": ["sliding_attention"] * NUM_LAYERS,
    "mixed": ["sliding_attention", "full_attention", "sliding_attention"],
}


class Branch:
    """A cache and its reference.

    Attributes:
        cache: The cache.
        keys: Dense K of each layer, `[B, H, T, D]`, or None for an empty cache. V is -K.
        records_past: Whether pages that have left the window are kept.
        keeps_all: Whether the pages of all tokens are kept, so that any crop is possible.
        is_partial: Whether the last calls were not a step of all layers.
    """

    def __init__(self, cache: FP8PagedCache) -> None:
        self.cache = cache
        self.keys: list[torch.Tensor] | None = None
        self.records_past = self.keeps_all = self.is_partial = False

    @property
    def lengths(self) -> list[int]:
        return [0] * NUM_LAYERS if self.keys is None else [k.shape[2] for k in self.keys]

    @property
    def batch(self) -> int | None:
        return None if self.keys is None else self.keys[0].shape[0]

    def select(self, rows: list[int]) -> None:
        if self.keys is not None:
            self.keys = [k[rows] for k in self.keys]


class CacheMachine(RuleBasedStateMachine):
    """Several forks of a cache that grows, each independently changed and dropped."""

    kinds: tuple[str, ...] = ("growing", "budget")

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.folder = tempfile.TemporaryDirectory()

    def teardown(self) -> None:
        self.patch.undo()
        self.folder.cleanup()

    @initialize(
        data=st.data(), layers=st.sampled_from(list(LAYER_TYPES)),
        window=st.sampled_from([1, 2, 7, 8, 9, 10, 20]), format_options=st.sampled_from(FORMATS),
        prefill=st.sampled_from(["exact", "stored"]), backend=st.sampled_from(["auto", "triton"]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    )  # fmt: skip
    def start(
        self, data: st.DataObject, layers: str, window: int, format_options: dict[str, Any],
        prefill: str, backend: str, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.kind = kind = data.draw(st.sampled_from(self.kinds), label="kind")
        self.has_budget = "max_pages" in KIND_OPTIONS[kind]
        self.is_preallocated = "max_cache_len" in KIND_OPTIONS[kind]
        self.dtype = dtype
        self.window = None if layers == "full" else window
        if backend == "triton":
            # The stand-in reads blocks of one or two pages.
            replace_triton(self.patch)
            self.patch.setattr(memory_blocks, "BLOCK_BYTES", 3000)
        config = make_causal_config(
            "gemma3_text", num_hidden_layers=NUM_LAYERS, layer_types=LAYER_TYPES[layers],
            sliding_window=window,
        )  # fmt: skip
        options = {
            **format_options,
            **KIND_OPTIONS[kind],
            "page_size": PAGE_SIZE,
            "prefill": prefill,
        }
        self.branches = [Branch(FP8PagedCache(config, backend=backend, **options))]
        self.generator = torch.Generator().manual_seed(0)

    def pick(self, data: st.DataObject) -> Branch:
        # Hypothesis keeps drawn objects, and a dropped cache must be freed, so an index is drawn.
        return self.branches[data.draw(st.integers(0, len(self.branches) - 1), label="branch")]

    def make_keys(self, batch: int, num_tokens: int) -> torch.Tensor:
        shape = batch, NUM_HEADS, num_tokens, HEAD_DIM
        return (torch.randint(-8, 9, shape, generator=self.generator) / 2).to(self.dtype)

    def update(self, branch: Branch, index: int, k: torch.Tensor) -> None:
        """Store keys of a layer, and check the keys and values that attention gets."""
        key, value = branch.cache.update(k, -k, index)
        branch.keys[index] = keys = torch.cat([branch.keys[index], k], 2)
        length = keys.shape[2]
        is_sliding = branch.cache.layers[index].is_sliding
        first = max(length - k.shape[2] - self.window + 1, 0) if is_sliding else 0
        actual_k, actual_v = densify(key), densify(value)
        # Columns end at `MAX_LEN` in a preallocated cache, and at the end of a long call.
        has_unused = self.is_preallocated and actual_k.shape[2] == MAX_LEN
        stop = length if has_unused else actual_k.shape[2]
        for actual, expected in ((actual_k, keys), (actual_v, -keys)):
            span = slice(stop - (length - first), stop)
            assert_same(actual[:, :, span], expected[:, :, first:], f"layer {index}")

    def check_window_pages(self, branch: Branch, num_tokens: int) -> None:
        """Assert that pages that left the window before the last `num_tokens` tokens are free."""
        if self.window is not None and not self.is_preallocated:
            table = branch.cache.groups[self.window].table
            num_slots = (table.num_columns - table.first_page) * PAGE_SIZE
            assert num_slots <= self.window + num_tokens + 2 * PAGE_SIZE

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
        budget = branch.cache.budget
        # A step needs new pages, and copies of shared pages that it writes to.
        stop_page = -(-(max(branch.lengths) + num_tokens) // PAGE_SIZE)
        max_new = (stop_page - min(branch.lengths) // PAGE_SIZE) * batch * len(branch.cache.groups)
        num_held = budget.num_held
        for index in range(NUM_LAYERS):
            try:
                self.update(branch, index, k + index / 2)
            except OutOfPagesError:
                assert self.has_budget
                assert index == 0, "a step fits in all layers or in none"
                assert self.is_preallocated or num_held + max_new > MAX_PAGES
                branch.keys = None if was_empty else branch.keys
                return
        branch.is_partial = False
        assert self.is_preallocated or budget.num_held <= num_held + max_new
        if not branch.records_past:
            self.check_window_pages(branch, num_tokens)

    @precondition(
        lambda self: self.is_preallocated or (self.window is None and not self.has_budget)
    )
    @rule(
        data=st.data(),
        calls=st.lists(st.tuples(st.integers(0, NUM_LAYERS - 1), st.integers(1, 9)), max_size=3),
    )
    def step_in_any_order(self, data: st.DataObject, calls: list[tuple[int, int]]) -> None:
        """Layers may be called in any order, several times, or not at all after an early exit."""
        branch = self.pick(data)
        if branch.keys is None or max(branch.lengths) + 27 > MAX_LEN:
            return
        branch.is_partial = True
        for index, num_tokens in calls:
            self.update(branch, index, self.make_keys(branch.batch or 1, num_tokens))

    @rule(
        data=st.data(),
        refusing_index=st.integers(0, NUM_LAYERS - 1),
        num_tokens=st.sampled_from([1, 2, 30]),
    )
    def refuse(self, data: st.DataObject, refusing_index: int, num_tokens: int) -> None:
        """A layer refuses a step that the layers before it have stored."""
        branch = self.pick(data)
        if branch.keys is None or max(branch.lengths) + num_tokens > MAX_LEN or branch.is_partial:
            return
        old_keys = list(branch.keys)
        k = self.make_keys(branch.batch or 1, num_tokens)
        for index in range(refusing_index):
            try:
                self.update(branch, index, k)
            except OutOfPagesError:
                assert self.has_budget
                return
        with pytest.raises(ConfigError):
            branch.cache.update(k[..., 1:], k, refusing_index)
        if self.is_preallocated:  # earlier layers keep the tokens, as in transformers' caches
            branch.is_partial = refusing_index > 0
        else:
            branch.keys = old_keys

    @precondition(lambda self: not self.is_preallocated and self.window is None)
    @precondition(lambda self: not self.has_budget)
    @rule(data=st.data(), num_kept=st.integers(1, 30))
    def keep_some_tokens(self, data: st.DataObject, num_kept: int) -> None:
        """Libraries that drop tokens assign the remaining keys and values of each layer."""
        branch = self.pick(data)
        if branch.keys is None or not min(branch.lengths):
            return
        for index, keys in enumerate(branch.keys):
            kept = torch.randperm(keys.shape[2], generator=self.generator)[:num_kept]
            layer = branch.cache.layers[index]
            layer.keys = layer.keys[:, :, kept]
            layer.values = layer.values[:, :, kept]
            branch.keys[index] = keys[:, :, kept]
        branch.is_partial = True

    @rule(data=st.data(), num_tokens=st.integers(0, 25))
    def crop(self, data: st.DataObject, num_tokens: int) -> None:
        branch = self.pick(data)
        try:
            branch.cache.crop(-num_tokens)
        except ConfigError:  # tests/cache/test_windows.py tests which crops of rings are refused
            assert self.window is not None
            assert not branch.keeps_all
            assert max(branch.lengths) >= self.window
            if not self.is_preallocated:
                length = max(branch.lengths) - num_tokens
                first_token = branch.cache.groups[self.window].table.first_page * PAGE_SIZE
                assert first_token > min(max(length - self.window + 1, 0), length - 1)
            return
        except OutOfPagesError:  # a shared page must be copied before it is written
            assert self.has_budget
            return
        self.check_window_pages(branch, 0)
        if branch.keys is not None:
            branch.keys = [k[:, :, : max(k.shape[2] - num_tokens, 0)] for k in branch.keys]
            branch.keys = branch.keys if any(branch.lengths) else None
        # A crop of a growing cache frees the pages before the window.
        branch.keeps_all = branch.records_past and (
            branch.keys is None or (branch.keeps_all and self.is_preallocated)
        )

    @rule(data=st.data(), method=st.sampled_from(["reorder", "select", "mask", "repeat"]))
    def change_sequences(self, data: st.DataObject, method: str) -> None:
        branch = self.pick(data)
        if branch.batch is None:
            return
        row = st.integers(0, branch.batch - 1)
        size = branch.batch if method == "reorder" else None
        rows = data.draw(st.lists(row, min_size=size or 1, max_size=size or 3), label="rows")
        is_kept = torch.zeros(branch.batch, dtype=torch.bool)
        is_kept[rows] = True
        changes = {
            "reorder": (branch.cache.reorder_cache, torch.tensor(rows), rows),
            "select": (branch.cache.batch_select_indices, torch.tensor(rows), rows),
            "mask": (branch.cache.batch_select_indices, is_kept, sorted(set(rows))),
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
            assert self.has_budget
            return
        branch.select(new_rows)

    @precondition(lambda self: len(self.branches) < 3)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        fork = copy.copy(self.pick(data))
        num_held = fork.cache.budget.num_held
        try:
            fork.cache = fork.cache.fork()
        except OutOfPagesError:  # sequences of preallocated copies share no pages
            assert self.is_preallocated
            return
        assert self.is_preallocated or fork.cache.budget.num_held == num_held
        fork.keys = fork.keys and list(fork.keys)
        self.branches.append(fork)

    @rule(data=st.data(), method=st.sampled_from(["pickle", "deepcopy", "file"]))
    def replace_by_a_copy(self, data: st.DataObject, method: str) -> None:
        branch = self.pick(data)
        path = Path(self.folder.name) / "cache.safetensors"
        used_bytes = branch.cache.memory_footprint().used_bytes
        copies = {
            "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
            "deepcopy": copy.deepcopy,
            "file": lambda cache: FP8PagedCache.load(cache.save(path)),
        }
        try:
            branch.cache = copies[method](branch.cache)
        except OutOfPagesError:
            assert self.is_preallocated
            return
        # Copies of a preallocated cache have separate pages for each sequence.
        if not self.is_preallocated:
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

    @rule(data=st.data(), num_layers=st.integers(0, NUM_LAYERS - 1))
    def reset(self, data: st.DataObject, num_layers: int) -> None:
        """A reset also ends a call that some layers have stored."""
        branch = self.pick(data)
        k = self.make_keys(branch.batch or 1, 20)
        if max(branch.lengths) + 20 <= MAX_LEN:
            with contextlib.suppress(OutOfPagesError):
                for index in range(num_layers):
                    branch.cache.update(k, k, index)
        branch.cache.reset()
        branch.keys = None
        branch.keeps_all = branch.records_past

    @rule(data=st.data())
    def record_past(self, data: st.DataObject) -> None:
        branch = self.pick(data)
        try:
            branch.cache.activate_past_recording()
        except ConfigError:
            assert len(set(branch.lengths)) > 1
            return
        except OutOfPagesError:  # a ring becomes as long as the cache
            assert self.is_preallocated
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
            for layer, length in zip(cache.layers, branch.lengths, strict=True):
                start = max(length - self.window + 1, 0) if layer.is_sliding else 0
                if not self.is_preallocated:
                    # `cache.get_mask_sizes` would begin a step of the model.
                    assert layer.get_mask_sizes(3) == (length + 3 - start, start)
            sizes = [layer.memory_footprint() for layer in cache.layers]
            num_on_device = len([size for size in sizes if size.get("pages")])
            assert self.kind != "offloaded" or num_on_device <= 2
            if not any(branch.lengths) and not self.is_preallocated:
                assert cache.memory_footprint().used_bytes == 0
            if self.has_budget:
                assert cache.budget.num_held <= cache.budget.max_pages == MAX_PAGES

    @invariant()
    def each_page_is_free_or_in_a_table(self) -> None:
        check_cache_tables([branch.cache for branch in self.branches])


class OffloadedMachine(CacheMachine):
    kinds = ("offloaded", "partly offloaded")


class PreallocatedMachine(CacheMachine):
    """Forks of a preallocated cache, whose windows are rings. The first fork stays preallocated."""

    kinds = ("preallocated", "preallocated budget")


TestCacheMachine = CacheMachine.TestCase
TestOffloadedMachine = OffloadedMachine.TestCase
TestPreallocatedMachine = PreallocatedMachine.TestCase
# The machines stand for many single tests, and an example takes 50 ms.
TestCacheMachine.settings = TestOffloadedMachine.settings = TestPreallocatedMachine.settings = (
    hypothesis.settings(max_examples=2 * hypothesis.settings.default.max_examples)
)
