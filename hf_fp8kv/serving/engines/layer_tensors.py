"""The engine of transformers 5.17: a pair of tensors per layer of a group, one manager of blocks.

Its units: layers of one kind make groups, all with the same number of layers. A block is a page of
each layer of a group, and any group can have it. So there are as many pages in a block as layers in
a group, and the page of a block is the block's first, and the layer's place in its group.
"""

from typing import Any

import torch
from transformers.generation.continuous_batching import cache

from ..layout import BlockRows, LayerPages, PageLayout
from ..step import LayerKind
from . import rebind_globals, unsupported_engine
from .common import EngineCache, count_tokens, peak_elements, sizes

# What it has depends on the version of transformers; type checkers look at a newer one.
stock: Any = cache


class Cache(EngineCache, stock.PagedAttentionCache):  # type: ignore[misc]
    """The engine's cache over pages of ours."""

    def __init__(
        self,
        config: Any,
        continuous_batching_config: Any,
        device: torch.device | str,
        distributed_helper: Any,
        tp_plan: dict[str, Any],
        dtype: torch.dtype = torch.float16,
    ) -> None:
        def handler(**planned: Any) -> Any:
            # By now the engine has decided how many heads this process has; no memory is taken yet.
            self._prepare_rank(distributed_helper, dtype)
            return self.make_memory_handler(**{**planned, "dtype": dtype})

        init = rebind_globals(
            stock.PagedAttentionCache.__init__, PagedAttentionMemoryHandler=handler
        )
        # What it allocates is at most as large as what it planned, and is freed at once.
        init(
            self, config, continuous_batching_config, device, distributed_helper, tp_plan,
            dtype=torch.uint8,
        )  # fmt: skip
        self._pages_per_block = len(self.key_cache)
        self._allocate()
        self.kinds = [
            LayerKind(getattr(group, "sliding_window", None), self.block_size)
            for group in self.group_cache_managers
        ]
        self._wait_for_pages()

    @staticmethod
    def check(model: Any, chosen: Any) -> None:
        EngineCache.check(model, chosen)
        if chosen.store is not None:
            raise unsupported_engine("has no blocks that a prefix_store could fill")

    def make_memory_handler(self, **planned: Any) -> Any:
        return _MemoryHandler(self.page_layout, **planned)

    def fits_alone(self, tokens: int) -> bool:
        blocks = -(-tokens // self.block_size)
        return bool(self.blocks_needed(blocks, 0) <= self.num_blocks)

    def _prepare_rank(self, helper: Any, dtype: torch.dtype) -> None:
        chosen, heads = self.chosen, self.num_key_value_heads
        if heads != sizes(self.config)[0]:
            chosen = chosen.for_rank(helper.tp_local_rank, helper.tp_size)
        self._prepare(chosen, self.config, heads, self.block_size, dtype, self.device)

    def _allocate(self) -> None:
        """Replace the engine's tensors by one tensor of bytes for all pages."""
        self.key_cache.clear()
        self.value_cache.clear()
        size = self.num_blocks * self._pages_per_block * self.page_layout.bytes_per_page
        memory = torch.zeros(size, dtype=torch.uint8, device=self.device)
        self._pages = self.page_layout.carve(memory)
        self._rows = BlockRows(self._pages, self._pages_per_block)
        # What offloads requests to the CPU copies one K and one V `[blocks, slots, heads, dim]`,
        # and cannot be told to copy anything else: to it they are the two halves of a block's
        # bytes. Nothing else looks at these three.
        half = self._rows.width // 2
        self.key_cache.append(_Half(self._rows.columns(0, half)))
        self.value_cache.append(_Half(self._rows.columns(half, 2 * half)))
        self.head_dim = half // (self.block_size * self.num_key_value_heads)

    def kind_index(self, layer: int) -> int:
        return int(self.layer_index_to_group_indices[layer][0])

    def layer_pages(self, layer: int) -> LayerPages:
        """Return the pages of a layer: that of a block is its first, and the layer's place."""
        return self._pages.from_page(self.layer_index_to_group_indices[layer][1])

    def _request_pages(self, request_id: str) -> list[list[int]]:
        return [
            [block * self._pages_per_block for block in group.block_table[request_id]]
            for group in self.group_cache_managers
        ]

    def copy_cache(self, list_source_blocks: list[int], list_forked_blocks: list[int]) -> None:
        """Copy blocks, when a request is forked."""
        source, target = (
            torch.tensor(blocks, device=self._rows.device)
            for blocks in (list_source_blocks, list_forked_blocks)
        )
        self._rows.index_copy_(0, target, self._rows.index_select(0, source))

    def memory_usage(self, lengths: dict[str, int]) -> tuple[int, int, int, int]:
        page = self.page_layout.bytes_per_page
        block = page * self._pages_per_block
        blocks = self._block_manager
        taken = self.num_blocks - len(blocks._uninit_block_ids)
        groups = self.group_cache_managers
        group = next((g for g in groups if not hasattr(g, "sliding_window")), groups[0])
        # Kept for reuse, of this group: each is full.
        kept = [
            number
            for number in list(blocks._init_block_ids)
            if getattr(blocks._id_to_block.get(number), "group_id", None) == group._index
        ]
        tokens = count_tokens(group, kept, lengths, int(self.block_size))
        return self.num_blocks * block, taken * block, page * self.config.num_hidden_layers, tokens


class _Half:
    """Half of the bytes of every block, with what the engine's offloading asks of a tensor."""

    def __init__(self, rows: BlockRows) -> None:
        self._rows = rows
        self._shape: tuple[int, ...] = (rows.width,)

    def view(self, _blocks: int, *shape: int) -> "_Half":
        """Return the same bytes, with blocks of this shape."""
        half = _Half(self._rows)
        half._shape = shape
        return half

    def index_select(self, dim: int, index: torch.Tensor) -> torch.Tensor:
        """Return a copy of blocks, `[n, *shape]`, uint8."""
        return self._rows.index_select(dim, index).view(-1, *self._shape)

    def index_copy_(self, dim: int, index: torch.Tensor, blocks: torch.Tensor) -> "_Half":
        """Copy `blocks`, `[n, *shape]`, uint8, to the blocks `index`."""
        self._rows.index_copy_(dim, index, blocks.reshape(len(blocks), -1))
        return self


class _MemoryHandler(stock.PagedAttentionMemoryHandler):  # type: ignore[misc]
    """Plans for attention that reads pages in place: no masks, and no copy of what is read."""

    def __init__(self, layout: PageLayout, **planned: Any) -> None:
        super().__init__(**planned)
        for name in ("num_attention_masks", "page_size", "group_size", "cache_dtype"):
            if not hasattr(self, name):
                raise unsupported_engine(f"plans its memory without {name}")
        self._layout = layout
        self.num_attention_masks = 0

    @property
    def activation_peak(self) -> dict[str, tuple[int, ...]]:
        """Bytes per batch token (and per cache token: none) at each peak."""
        peaks = dict(super().activation_peak)
        if "attention" not in peaks:
            raise unsupported_engine("plans its memory without a peak for attention")
        extra = peak_elements(self.config) * self.activation_dtype.itemsize
        peaks["attention"] = (peaks["attention"][0] + extra, 0, 0, 0)
        return peaks

    def _equation_coefficients(self, peak_deltas: tuple[int, ...]) -> tuple[int, ...]:
        batch, token, *rest = super()._equation_coefficients(peak_deltas)
        # Per cache token: the bytes of our pages, in the place of the engine's keys and values.
        token -= 2 * self.group_size * self.page_size * self.cache_dtype.itemsize
        token += self.group_size * self._layout.bytes_per_page // self._layout.slots
        return (batch, token, *rest)
