"""The engine of transformers 5.18 and later: one tensor of bytes, and an allocator per kind.

Its units: a page belongs to one layer, a block has a page for each layer of a kind, and the bytes
of a sector are the least common multiple of the kinds' blocks. All pages have the same size here,
whichever kind they belong to, so page `n` is the same bytes for every kind. A block starts at a
multiple of the number of its layers.
"""

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from transformers.generation.continuous_batching import cache
from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens

from ...ops import Pages
from ...prefix.engine import StoredBlocks
from ..layout import EnginePages, from_page
from . import rebind_globals, unsupported_engine
from .common import EngineCache, peak_elements, sizes

# Its names depend on the version of transformers.
stock: Any = cache
# One portion of all blocks is evicted at a time, and one portion stays free.
_PORTIONS = 32


class Cache(EngineCache, stock.PagedAttentionCache):  # type: ignore[misc]
    """The engine's cache over FP8 pages."""

    def __init__(self, *, config: Any, device: Any, dtype: torch.dtype, **given: Any) -> None:
        chosen, page_size = self.chosen, given["continuous_batching_config"].page_size
        self.prefix_hits = self.prefix_tokens = 0
        self.scheduler: Callable[[], Any] = lambda: None  # returns the engine's, if it has one
        self.prepare(chosen, config, page_size, dtype, device)
        allocators = {
            kind: type(
                f"Paged{allocator.__name__}", (_FP8Pages, allocator), {"layout": self.page_layout}
            )
            for kind, allocator in stock.ATTN_TYPE_TO_ALLOCATOR.items()
        }
        init = rebind_globals(
            stock.PagedAttentionCache.__init__,
            ATTN_TYPE_TO_ALLOCATOR=allocators,
            FullAttentionCacheAllocator=allocators[stock.FULL_ATTENTION],
            PagedAttentionMemoryHandler=self.make_memory_handler,
        )
        init(self, config=config, device=device, dtype=dtype, **given)
        self.windows = [
            getattr(allocator, "sliding_window", None)
            for allocator in self.cache_allocators.values()
        ]
        self._kind_of = {n: one.index for n, one in self.layer_to_allocator.items()}
        self.add_layers(
            {
                layer: from_page(one.fp8_pages, one.layer_indices.index(layer))
                for layer, one in self.layer_to_allocator.items()
            }
        )
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)  # a separate stream zeroes the pages
        self._stored: StoredBlocks | None = None
        if chosen.store is not None and self.use_prefix_sharing:
            (allocator,) = self.cache_allocators.values()
            self._stored = StoredBlocks(chosen.store, self.identity, allocator)

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Count and return the tokens of a prompt that are in the cache, as the engine does."""
        if self._stored is not None:
            self._stored.fetch(request_id, prompt_ids)
        tokens = int(super().search_prefix_match(request_id, prompt_ids))
        self.prefix_hits += tokens > 0
        self.prefix_tokens += tokens
        return tokens

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        """Register a request's full blocks, as the engine does, and write them to the store."""
        super().mark_complete_blocks(state, complete_blocks)
        if self._stored is not None and complete_blocks:
            self._stored.write(state.request_id, state.initial_tokens + state.generated_tokens)

    def free_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        """Free a request's blocks, as the engine does, after the store has marked them as used.

        Also let waiting requests start when no other request runs. An engine that took pages from a
        running request starts no request until one finishes. If all running requests are cancelled
        or fail, none finishes, and the waiting ones would never start (transformers 5.18 to 5.24).
        """
        if self._stored is not None:
            self._stored.write(request_id, [], is_last=True)
        super().free_blocks(request_id, *args, **kwargs)
        scheduler = self.scheduler()
        if scheduler is not None and not scheduler.active_requests.keys() - {request_id}:
            scheduler.block_new_requests = False

    def make_memory_handler(self, **planned: Any) -> Any:
        return _MemoryHandler(**planned)

    def max_request_tokens(self) -> int:
        """Return the maximum number of tokens of one request. 0 means not even one.

        A request that outgrows all pages stops the engine, so it must be refused in advance. If all
        layers have windows there is no maximum, and a very large number is returned.
        """
        tokens, window = infer_max_single_request_tokens(self), self.read_cache_limit
        return 2**31 - 1 if window is not None and tokens >= window else int(tokens)

    def extend_read_and_write_indices(
        self,
        request_id: str,
        past_length: int,
        query_length: int,
        read_index: list[list[int]] | None,
        write_index: list[list[int]],
    ) -> None:
        """Record a request of the next step, without filling in the engine's indices.

        The engine makes a new list for each step, and calls this for its requests in order.
        """
        pages = [
            [block * allocator.pages_per_block for block in allocator.block_table[request_id]]
            for allocator in self.cache_allocators.values()
        ]
        self.record(write_index, past_length, query_length, pages)

    def evict_cached_blocks(self) -> bool:
        """Evict prefixes until requests have room, the least recently used first.

        The engine's own method evicts all of them. Return whether any block was evicted.
        """
        evicted = False
        for allocator in self.cache_allocators.values():
            ledger = allocator.ledger
            portion = -(-allocator.num_blocks // _PORTIONS)
            while ledger.cached_blocks and not (evicted and self._has_room()):
                blocks = list(islice(ledger.cached_blocks, portion))
                for block in blocks:
                    del ledger.cached_blocks[block]
                    del ledger.hash_to_block[ledger.block_to_hash.pop(block)]
                self.pool.free_blocks(allocator.index, blocks)
                self.pool.try_to_free_sectors()
                evicted = True
        return evicted

    def _has_room(self) -> bool:
        """Return whether starved requests fit, and a portion of the pages is free after that."""
        scheduler = self.scheduler()
        needed = [
            {
                name: allocator.needs_new_blocks(state.request_id, state.current_len(), tokens)
                for name, allocator in self.cache_allocators.items()
            }
            for state, tokens in scheduler.starved_requests
        ]
        least = min(scheduler.safety_margin + 1 / _PORTIONS, 1.0)
        enough = self.count_storable_requests(needed) == len(needed)
        return enough and bool(self.compute_free_capacity() >= least)

    def memory_usage(self, lengths: dict[str, int]) -> tuple[int, int, int, int]:
        """Return bytes planned, bytes allocated, bytes of a page of all layers, and tokens held.

        `lengths` has the number of stored tokens of each live request.
        """
        total = self.num_sectors * self.bytes_per_sector
        free = int(self.compute_free_capacity(relative=False))
        page = self.page_layout.bytes_per_page * self.config.num_hidden_layers
        kinds = self.cache_allocators
        allocator = kinds.get(stock.FULL_ATTENTION) or next(iter(kinds.values()))
        size = self.page_layout.slots
        # By block, since requests share blocks. The engine's thread may change the originals of
        # these copies.
        tokens = dict.fromkeys(list(allocator.ledger.cached_blocks), size)
        for request, blocks in list(allocator.block_table.items()):
            left = min(lengths.get(request, 0), getattr(allocator, "sliding_window", 2**62))
            for block in list(blocks):
                tokens[block] = max(tokens.get(block, 0), min(left, size))
                left = max(left - size, 0)
        return total, total - free, page, sum(tokens.values())


class _FP8Pages:
    """The part of an allocator that depends on the size of a page and the place of its bytes."""

    layout: EnginePages
    fp8_pages: Pages
    pages_per_block: int
    block_table: dict[str, list[int]]

    @classmethod
    def get_bytes_per_page(cls, *args: Any, **kwargs: Any) -> int:
        """Return the bytes of a page of one layer."""
        return cls.layout.bytes_per_page

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: torch.Tensor, pool: Any
    ) -> None:
        """Use the pages in `cache_tensor`."""
        self.bytes_per_sector = bytes_per_sector
        self.fp8_pages = self.layout.carve(cache_tensor)
        # Blocks as rows of bytes, which an engine copies when it forks or offloads requests.
        block = self.fp8_pages.block
        self._copy_view = block.view(len(block) // self.pages_per_block, -1)
        allocator: Any = self
        allocator._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)

    def free_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        """Free a request's blocks, the last first: no block can be found without the first ones."""
        if request_id in self.block_table:
            self.block_table[request_id].reverse()
        engine: Any = super()
        engine.free_blocks(request_id, *args, **kwargs)

    def fill_block_table(
        self, request_id: str, past_length: int, query_length: int, block_table: torch.Tensor
    ) -> None:
        """Write the request's row of the engine's table for attention: the numbers of its pages."""
        blocks = torch.tensor(self.block_table[request_id], dtype=block_table.dtype, device="cpu")
        block_table[: len(blocks)].copy_(blocks * self.pages_per_block, non_blocking=True)


class _MemoryHandler(stock.PagedAttentionMemoryHandler):  # type: ignore[misc]
    """Plans for attention that reads pages in place, without masks and without copies of pages."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("num_attention_masks", "kv_heads_at_peak", "io_multiplier", "num_groups"):
            if not hasattr(self, name):
                raise unsupported_engine(f"plans its memory without {name}")
        self.num_attention_masks = 0
        self.kv_heads_at_peak = -(-peak_elements(self.config) // sizes(self.config)[1])

    @property
    def bytes_per_cache_token(self) -> int:
        """Bytes of the index of read tokens, which the engine allocates although it stays empty."""
        return int(self.io_multiplier * self.num_groups * torch.int64.itemsize)
