"""The engine of transformers 5.18 and later: one tensor of bytes, and one allocator per layer kind.

A block has a page for each layer of a kind, one after another. Pages of different layers may differ
in size. Page `n` of a layer is in block `n` of the layer's kind. The size of a sector is the least
common multiple of the kinds' block sizes.
"""

from collections.abc import Callable
from fractions import Fraction
from itertools import islice
from typing import Any

import torch
from transformers.generation.continuous_batching import cache
from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens

from ...ops import Pages
from ...prefix.engine_blocks import BlockExchange, BlockHasher
from ..layout import plan_block_sizes, view_layers
from . import HASHING_METHODS, SALT_KEY, make_engine_error, rebind_globals
from .common import EngineCache, count_extra_values, read_kv_sizes

# The names in this module depend on the version of transformers, so mypy does not check them.
stock: Any = cache
# Blocks are evicted in portions of 1/32 of all blocks. One portion stays free.
_NUM_PORTIONS = 32


class Cache(EngineCache, stock.PagedAttentionCache):  # type: ignore[misc]
    """The engine's cache over FP8 pages."""

    scheduler: Callable[[], Any]  # returns the engine's scheduler, set before the first request

    def __init__(self, *, config: Any, device: Any, dtype: torch.dtype, **kwargs: Any) -> None:
        self.prefix_hits = 0
        self.prefix_tokens = 0
        # Called with a request's state, and the number of its tokens that are in the cache.
        self.on_prefix_match: Callable[[Any, int], None] = lambda _state, _num_tokens: None
        self.prepare(
            self.serving_config,
            config,
            kwargs["continuous_batching_config"].page_size,
            dtype,
            device,
        )
        self._hasher = BlockHasher(self.hash_key)
        layouts = {}
        for kind, indices in stock.group_layers_by_attn_type(config).items():
            layouts[kind] = [self.page_layouts[index] for index in indices]
        block_sizes = plan_block_sizes(layouts)
        # Bytes of a page of every layer, which are a block of each kind.
        self._page_bytes = sum(block_sizes.values())
        mean_size = Fraction(self._page_bytes, config.num_hidden_layers)
        allocator_types = {
            kind: _make_allocator_type(base, block_sizes.get(kind), mean_size, self._hasher)
            for kind, base in stock.ATTN_TYPE_TO_ALLOCATOR.items()
        }
        stock_init = rebind_globals(
            stock.PagedAttentionCache.__init__,
            ATTN_TYPE_TO_ALLOCATOR=allocator_types,
            FullAttentionCacheAllocator=allocator_types[stock.FULL_ATTENTION],
            PagedAttentionMemoryHandler=self.make_memory_handler,
        )
        stock_init(self, config=config, device=device, dtype=dtype, **kwargs)
        allocators = self.cache_allocators.values()
        self.windows = [getattr(allocator, "sliding_window", None) for allocator in allocators]
        self._window_indices = {
            index: allocator.index for index, allocator in self.layer_to_allocator.items()
        }
        pages: dict[int, Pages] = {}
        for kind, allocator in self.cache_allocators.items():
            kind_pages = view_layers(allocator._copy_view, layouts[kind])
            pages.update(zip(allocator.layer_indices, kind_pages, strict=True))
        self.add_layers(pages)
        self._exchange: BlockExchange | None = None
        prefix_store = self.serving_config.prefix_store
        if prefix_store is not None and self.use_prefix_sharing:
            (allocator,) = self.cache_allocators.values()
            self._exchange = BlockExchange(prefix_store, self.identity, allocator, self._hasher)

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Return the number of prompt tokens in the cache, like the engine. Count the hits."""
        state = self.scheduler().waiting_requests.get(request_id)
        self._hasher.salt = _read_salt(state)
        if self._exchange is not None:
            self._exchange.load(request_id, prompt_ids)
        num_tokens = int(super().search_prefix_match(request_id, prompt_ids))
        if num_tokens > 0:
            self.prefix_hits += 1
        self.prefix_tokens += num_tokens
        if state is not None:
            self.on_prefix_match(state, num_tokens)
        return num_tokens

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        """Register a request's full blocks, like the engine, and write them to the prefix store."""
        self._hasher.salt = _read_salt(state)
        super().mark_complete_blocks(state, complete_blocks)
        if self._exchange is not None and complete_blocks:
            self._exchange.save(state.request_id, state.initial_tokens + state.generated_tokens)

    def free_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        """Free a request's blocks, like the engine, after the store has marked them as used.

        Also let waiting requests start when no other request runs. An engine that evicted a running
        request starts no request until a request finishes. If all running requests failed or were
        canceled, the waiting requests would never start (transformers 5.18 to 5.24).
        """
        if self._exchange is not None:
            self._exchange.save(request_id, [], is_last=True)
        super().free_blocks(request_id, *args, **kwargs)
        scheduler = self.scheduler()
        if not scheduler.active_requests.keys() - {request_id}:
            scheduler.block_new_requests = False

    def make_memory_handler(self, **kwargs: Any) -> Any:
        return _MemoryHandler(**kwargs)

    def compute_max_request_tokens(self) -> int:
        """Return the maximum number of tokens of one request. 0 means that no token fits.

        A request that outgrows all pages stops the engine, so it must be refused in advance. If all
        layers have windows there is no maximum, and the result is 2**31 - 1.
        """
        max_tokens = infer_max_single_request_tokens(self)
        window = self.read_cache_limit
        return 2**31 - 1 if window is not None and max_tokens >= window else int(max_tokens)

    def extend_read_and_write_indices(
        self,
        request_id: str,
        past_length: int,
        query_length: int,
        read_index: list[list[int]] | None,
        write_index: list[list[int]],
    ) -> None:
        """Record a request of the next step, without filling in the engine's indices.

        The engine makes a new `write_index` for each step, and calls this for requests in order.
        """
        tables = [allocator.block_table[request_id] for allocator in self.cache_allocators.values()]
        self.record(write_index, past_length, query_length, tables)

    def evict_cached_blocks(self) -> bool:
        """Evict the least recently used prefixes until waiting requests fit.

        The engine's own method evicts all prefixes. Return whether any block was evicted.
        """
        has_evicted = False
        for allocator in self.cache_allocators.values():
            ledger = allocator.ledger
            portion_size = -(-allocator.num_blocks // _NUM_PORTIONS)
            while ledger.cached_blocks and not (has_evicted and self._has_free_pages()):
                blocks = list(islice(ledger.cached_blocks, portion_size))
                for block in blocks:
                    del ledger.cached_blocks[block]
                    del ledger.hash_to_block[ledger.block_to_hash.pop(block)]
                self.pool.free_blocks(allocator.index, blocks)
                self.pool.try_to_free_sectors()
                has_evicted = True
        return has_evicted

    def _has_free_pages(self) -> bool:
        """Return whether all starved requests fit, and one portion of the pages is free."""
        scheduler = self.scheduler()
        needed_blocks = []
        for state, num_tokens in scheduler.starved_requests:
            needed_blocks.append(
                {
                    name: allocator.needs_new_blocks(
                        state.request_id, state.current_len(), num_tokens
                    )
                    for name, allocator in self.cache_allocators.items()
                }
            )
        min_free = min(scheduler.safety_margin + 1 / _NUM_PORTIONS, 1.0)
        requests_fit = self.count_storable_requests(needed_blocks) == len(needed_blocks)
        return requests_fit and bool(self.compute_free_capacity() >= min_free)

    def measure_memory(self, lengths: dict[str, int]) -> tuple[int, int, int, int]:
        """Return planned bytes, used bytes, bytes of a page of all layers, and stored tokens.

        `lengths` is the number of stored tokens of each live request, by request id.
        """
        total_bytes = self.num_sectors * self.bytes_per_sector
        free_bytes = int(self.compute_free_capacity(relative=False))
        allocators = self.cache_allocators
        allocator = allocators.get(stock.FULL_ATTENTION) or next(iter(allocators.values()))
        # Tokens are counted by block, because requests share blocks. The lists are copied, because
        # the engine's thread may change the originals.
        block_tokens = dict.fromkeys(list(allocator.ledger.cached_blocks), self.page_size)
        for request_id, blocks in list(allocator.block_table.items()):
            remaining = min(lengths.get(request_id, 0), getattr(allocator, "sliding_window", 2**62))
            for block in list(blocks):
                num_tokens = min(remaining, self.page_size)
                block_tokens[block] = max(block_tokens.get(block, 0), num_tokens)
                remaining -= num_tokens
        used_bytes = total_bytes - free_bytes
        return total_bytes, used_bytes, self._page_bytes, sum(block_tokens.values())


def _read_salt(state: Any) -> str:
    """Return the `cache_salt` of a request's state, or "" without a salt or a state."""
    return "" if state is None else str(state.logit_processor_kwargs.get(SALT_KEY, ""))


def _make_allocator_type(
    base: Any, block_size: int | None, mean_page_size: Fraction, hasher: BlockHasher
) -> type:
    """Return a subclass of one of the engine's allocators, with our pages and our hash of blocks.

    The engine's hash has 64 bits and no key, so prompts with equal hashes can be computed.
    """
    members: dict[str, Any] = {"block_size": block_size, "mean_page_size": mean_page_size}
    for name in HASHING_METHODS:
        members[name] = rebind_globals(getattr(base, name), compute_block_hash=hasher)
    return type(f"Paged{base.__name__}", (_FP8Allocator, base), members)


class _FP8Allocator:
    """The methods of an allocator that depend on the size and the location of a block.

    The engine's blocks have one page here, because the pages of layers may differ in size.
    """

    block_size: int  # bytes
    mean_page_size: Fraction  # bytes of a page, the mean of all layers of the model
    block_table: dict[str, list[int]]

    @classmethod
    def get_bytes_per_page(cls, *args: Any, **kwargs: Any) -> Fraction:
        """Return the mean size of a page, which the engine multiplies by the number of layers."""
        return cls.mean_page_size

    def _before_cache_tensor_init(self, **kwargs: Any) -> None:
        stock_allocator: Any = super()
        stock_allocator._before_cache_tensor_init(**kwargs)
        self.pages_per_block = 1
        self.bytes_per_page = self.bytes_per_block = self.block_size

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: torch.Tensor, pool: Any
    ) -> None:
        self.bytes_per_sector = bytes_per_sector
        # Blocks as rows of bytes, which the engine copies when it forks or offloads requests.
        self._copy_view = cache_tensor.view(-1, self.block_size)
        allocator: Any = self
        allocator._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)

    def free_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        """Free a request's blocks, the last first, because blocks are found by their prefix."""
        if request_id in self.block_table:
            self.block_table[request_id].reverse()
        stock_allocator: Any = super()
        stock_allocator.free_blocks(request_id, *args, **kwargs)

    def fill_block_table(
        self, request_id: str, past_length: int, query_length: int, block_table: torch.Tensor
    ) -> None:
        """Write the block numbers of a request to its row of the engine's block table."""
        blocks = torch.tensor(self.block_table[request_id], dtype=block_table.dtype, device="cpu")
        block_table[: len(blocks)].copy_(blocks, non_blocking=True)


class _MemoryHandler(stock.PagedAttentionMemoryHandler):  # type: ignore[misc]
    """Plans memory for attention that reads pages in place, without masks and copies of pages."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("num_attention_masks", "kv_heads_at_peak", "io_multiplier", "num_groups"):
            if not hasattr(self, name):
                raise make_engine_error(f"plans its memory without {name}")
        self.num_attention_masks = 0
        self.kv_heads_at_peak = -(-count_extra_values(self.config) // read_kv_sizes(self.config)[1])

    @property
    def bytes_per_cache_token(self) -> int:
        """Bytes per token of the read index, which the engine allocates although it stays empty."""
        return int(self.io_multiplier * self.num_groups * torch.int64.itemsize)
