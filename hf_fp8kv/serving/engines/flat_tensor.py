"""The engine of newer versions: one tensor of bytes for all layers, and allocators per kind.

Its units: a page is one layer's, a block is a page of each layer of a kind, a sector is the least
common multiple of the kinds' blocks. All pages have the same size here, whichever kind they belong
to, so that page `n` is the same bytes for every kind; a block starts at a multiple of its layers.
"""

from typing import Any

import torch
from transformers.generation.continuous_batching import cache

from ..config import ServingConfig
from ..layout import BlockRows, PageLayout, Stored
from ..step import LayerKind, peak_elements
from . import rebind_globals, unsupported_engine
from .common import EngineCache, sizes, tokens_in

__all__ = ["make"]

# What it has depends on the version of transformers.
stock: Any = cache


def make(settings: ServingConfig) -> type:
    """Returns a PagedAttentionCache class whose pages are as the settings say."""

    class Cache(FlatTensorCache):
        chosen = settings

    return Cache


class FlatTensorCache(EngineCache, stock.PagedAttentionCache):  # type: ignore[misc]
    """The engine's cache over pages of ours."""

    chosen: ServingConfig

    @staticmethod
    def has_block_table_steps(config: Any) -> bool:
        """Whether an engine of this model can hand a step as a block table."""
        kinds = stock.group_layers_by_attn_type(config)
        return all(stock.ATTN_TYPE_TO_ALLOCATOR[kind].supports_block_table for kind in kinds)

    def __init__(
        self,
        config: Any,
        continuous_batching_config: Any,
        device: torch.device | str,
        distributed_helper: Any,
        dtype: torch.dtype = torch.float16,
        **more: Any,
    ) -> None:
        helper, settings = distributed_helper, self.chosen
        heads, dim = sizes(config)
        if helper.tp_size > 1 and helper.are_kv_heads_tp_ed():
            settings = settings.for_ranks(helper.tp_local_rank, helper.tp_size)
            # An uneven number is refused by the engine itself, before it allocates anything.
            heads = max(heads // helper.tp_size, 1)
        page_size = continuous_batching_config.page_size
        self.page_layout = PageLayout.of(settings.options, heads, dim, page_size, dtype)
        self._prepare(settings, config.num_hidden_layers, heads, dim, device)
        allocators = {
            kind: type(
                f"Paged{allocator.__name__}", (_OurPages, allocator), {"layout": self.page_layout}
            )
            for kind, allocator in stock.ATTN_TYPE_TO_ALLOCATOR.items()
        }
        make = rebind_globals(
            stock.PagedAttentionCache.__init__,
            ATTN_TYPE_TO_ALLOCATOR=allocators,
            FullAttentionCacheAllocator=allocators[stock.FULL_ATTENTION],
            PagedAttentionMemoryHandler=self.make_memory_handler,
        )
        make(self, config, continuous_batching_config, device, distributed_helper, dtype, **more)
        self.kinds = [
            LayerKind(getattr(allocator, "sliding_window", None), page_size)
            for allocator in self.cache_allocators.values()
        ]
        self._stored = {
            layer: allocator.stored.from_page(place)
            for allocator in self.cache_allocators.values()
            for place, layer in enumerate(allocator.layer_indices)
        }
        self._settle()

    def make_memory_handler(self, **planned: Any) -> Any:
        """Return what plans the engine's memory."""
        return _MemoryHandler(**planned)

    def fits_alone(self, tokens: int) -> bool:
        """Whether one request may hold so many tokens, with all pages to itself."""
        needed = sum(a.needs_new_sectors("", 0, tokens) for a in self.cache_allocators.values())
        return bool(needed <= self.num_sectors)

    def kind_of(self, layer: int) -> int:
        """The index into `kinds` of a layer."""
        return int(self.layer_to_allocator[layer].index)

    def stored(self, layer: int) -> Stored:
        """The pages of a layer: the page of a block is the block's first, and the layer's place."""
        found: Stored = self._stored[layer]
        return found

    def extend_read_and_write_indices(
        self,
        request_id: str,
        past_length: int,
        query_length: int,
        read_index: list[list[int]] | None,
        write_index: list[list[int]],
    ) -> None:
        """Keeps the block tables of one request of the next step, and gives the engine no indices.

        The engine makes a new list for each step, and asks for its requests in order.
        """
        pages = [
            [block * allocator.pages_per_block for block in allocator.block_table[request_id]]
            for allocator in self.cache_allocators.values()
        ]
        self.record(write_index, past_length, query_length, pages)

    def held(self, lengths: dict[str, int]) -> tuple[int, int, int, int]:
        """Returns bytes planned, bytes taken, bytes of a page of all layers, and tokens held."""
        total = self.num_sectors * self.bytes_per_sector
        free = int(self.compute_free_capacity(relative=False))
        page = self.page_layout.bytes_per_page * self.config.num_hidden_layers
        kinds = self.cache_allocators
        allocator = kinds.get(stock.FULL_ATTENTION) or next(iter(kinds.values()))
        size = self.page_layout.slots
        tokens = tokens_in(allocator, list(allocator.ledger.cached_blocks), lengths, size)
        return total, total - free, page, tokens


class _OurPages:
    """What is ours in an allocator: the size of a page, and where its bytes are."""

    layout: PageLayout
    stored: Stored
    pages_per_block: int
    block_table: dict[str, list[int]]

    @classmethod
    def get_bytes_per_page(cls, *args: Any, **kwargs: Any) -> int:
        """Bytes of a page of one layer."""
        return cls.layout.bytes_per_page

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: torch.Tensor, pool: Any
    ) -> None:
        """The allocator's pages are then in `cache_tensor`."""
        self.bytes_per_sector = bytes_per_sector
        self.stored = self.layout.carve(cache_tensor)
        self._copy_view = BlockRows(self.stored, self.pages_per_block)
        after: Any = self
        after._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)

    def fill_block_table(
        self, request_id: str, past_length: int, query_length: int, block_table: torch.Tensor
    ) -> None:
        """The request's row of the table that the engine hands to attention: pages of ours."""
        blocks = torch.tensor(self.block_table[request_id], dtype=block_table.dtype)
        block_table[: len(blocks)].copy_(blocks * self.pages_per_block, non_blocking=True)


class _MemoryHandler(stock.PagedAttentionMemoryHandler):  # type: ignore[misc]
    """Plans for attention that reads pages in place: no masks, and no copy of what is read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("num_attention_masks", "kv_heads_at_peak", "io_multiplier", "num_groups"):
            if not hasattr(self, name):
                raise unsupported_engine(f"plans its memory without {name}")
        heads, dim = sizes(self.config)
        self.num_attention_masks = 0
        beside = peak_elements(self.config.hidden_size, self.config.num_attention_heads, heads, dim)
        self.kv_heads_at_peak = -(-beside // dim)

    @property
    def bytes_per_cache_token(self) -> int:
        """The engine's index of what is read, which it allocates even though it stays empty."""
        return int(self.io_multiplier * self.num_groups * torch.int64.itemsize)
