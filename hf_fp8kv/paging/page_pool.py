"""The bytes of one layer's pages, independent of the block tables that refer to them."""

import torch

from ..formats import LayerPlan
from ..ops.page_layout import PageLayout, make_page_layout
from .blocks import Blocks
from .offloading import OffloadBlocks


class PagePool:
    """The stored keys and values of one layer.

    A pool is created before the first token, and `allocate` sets its shapes. Forks of a cache share
    the pool, and may read the same bytes under different plans.

    Attributes:
        has_scales: Whether pages have dynamic scales, which 8-bit values need unless scales are
            static. Set by `allocate`.
        key_dtype, value_dtype: Dtypes of stored K and V: uint8, or the model's. Set by `allocate`.
        layout: Layout of a page. Set by `allocate`.
        device: Device on which the layer computes. Set by `allocate`.
        memory: The pages.
        blocks: The pages that operations read: all pages, or with offloading those on the device.
    """

    layout: PageLayout

    def __init__(
        self, page_size: int, plan: LayerPlan, dynamic_scales: bool,
        memory: OffloadBlocks | None = None,
    ) -> None:  # fmt: skip
        self.page_size, self._dynamic_scales = page_size, dynamic_scales
        self._is_auto = plan.k.is_auto, plan.v.is_auto
        self.blocks = Blocks() if memory is None else memory.device_blocks
        self.memory: Blocks | OffloadBlocks = self.blocks if memory is None else memory

    @property
    def is_allocated(self) -> bool:
        """Whether `allocate` was called, possibly with 0 pages."""
        return self.memory.is_allocated

    def allocate(
        self, key: torch.Tensor, value: torch.Tensor, num_pages: int, *, single_block: bool = False
    ) -> None:
        """Allocate zeroed pages for keys `[B, Hkv, T, Dk]` and values `[B, Hkv, T, Dv]`.

        Only shapes, dtypes and the device are read. `single_block` is as in `Blocks.allocate`.
        """
        self.dtype, self.v_dtype, self.device = key.dtype, value.dtype, key.device
        self.heads, self.k_dim, self.v_dim = key.shape[1], key.shape[3], value.shape[3]
        k_is_auto, v_is_auto = self._is_auto
        v_is_auto |= not self.v_dim
        self.key_dtype = self.dtype if k_is_auto else torch.uint8
        self.value_dtype = self.v_dtype if v_is_auto else torch.uint8
        self.has_scales = self._dynamic_scales and not (k_is_auto and v_is_auto)
        self.layout = make_page_layout(
            self.heads, self.page_size, self.k_dim, self.v_dim, self.key_dtype, self.value_dtype,
            self.has_scales,
        )  # fmt: skip
        self.memory.allocate(self.layout.size, num_pages, self.device, single_block=single_block)

    def empty_tokens(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return empty keys `[B, Hkv, 0, Dk]` and values `[B, Hkv, 0, Dv]` as for `allocate`."""
        key = torch.empty(batch, self.heads, 0, self.k_dim, dtype=self.dtype, device=self.device)
        return key, key.new_empty((batch, self.heads, 0, self.v_dim), dtype=self.v_dtype)

    def memory_footprint(self) -> dict[str, int]:
        """Return the bytes of `pages`, `scales`, offset `tables` and `host` pages, used or not."""
        blocks, memory, size = self.blocks, self.memory, self.layout.size
        parts_by_block = [self.layout.split(block) for block in blocks.tensors]
        scales = sum(parts["token_scales"].nbytes for parts in parts_by_block if self.has_scales)
        pages = len(blocks) * size - scales
        host = len(memory.host_blocks) * size if isinstance(memory, OffloadBlocks) else 0
        return {"pages": pages, "scales": scales, "tables": blocks.offsets.nbytes, "host": host}
