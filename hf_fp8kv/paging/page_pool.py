"""Page pool: the bytes of one layer's pages. It does not know who holds which page."""

import torch

from ..formats import LayerPlan
from ..ops.page_layout import PageLayout, page_layout
from .blocks import Blocks
from .offloading import Tiers


class PagePool:
    """One layer's stored keys and values.

    Made before the first token is known; `allocate` gives it shapes. Forks of a cache share it, and
    may have other plans for their pages: a byte is a byte.

    Attributes:
        has_scales: whether pages have room for dynamic scales, after `allocate`: numbers that are
            not in the model's dtype have them, if scales are dynamic.
        key_dtype: dtype of a stored number of K, after `allocate`; `value_dtype`: of V.
        layout: where the bytes of a page are.
        device: where the layer computes, after `allocate`.
        memory: the pages.
        blocks: the pages that operations read: all pages, or the device's pages of `Tiers`.
    """

    layout: PageLayout

    def __init__(
        self, page_size: int, plan: LayerPlan, dynamic: bool, tiers: Tiers | None = None
    ) -> None:
        self.page_size, self._dynamic = page_size, dynamic
        self._is_auto = plan.k.is_auto, plan.v.is_auto
        self.blocks = Blocks() if tiers is None else tiers.here
        self.memory: Blocks | Tiers = self.blocks if tiers is None else tiers

    @property
    def is_allocated(self) -> bool:
        """Whether shapes are known, and there are pages, which may be 0."""
        return self.memory.is_allocated

    def allocate(
        self, key: torch.Tensor, value: torch.Tensor, pages: int, *, in_one: bool = False
    ) -> None:
        """Make `pages` zeroed pages for keys `[B, Hkv, T, Dk]` and values `[B, Hkv, T, Dv]`.

        Only shapes, dtypes and the device are read. `in_one`: in one block, see `Blocks`.
        """
        self.dtype, self.v_dtype, self.device = key.dtype, value.dtype, key.device
        self.heads, self.k_dim, self.v_dim = key.shape[1], key.shape[3], value.shape[3]
        k_is_auto, v_is_auto = self._is_auto
        v_is_auto |= not self.v_dim
        self.key_dtype = self.dtype if k_is_auto else torch.uint8
        self.value_dtype = self.v_dtype if v_is_auto else torch.uint8
        self.has_scales = self._dynamic and not (k_is_auto and v_is_auto)
        self.layout = page_layout(
            self.heads, self.page_size, self.k_dim, self.v_dim, self.key_dtype, self.value_dtype,
            self.has_scales,
        )  # fmt: skip
        self.memory.allocate(self.layout.size, pages, self.device, in_one=in_one)

    def empty_tokens(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys `[B, Hkv, 0, Dk]` and values `[B, Hkv, 0, Dv]` like those of `allocate`."""
        key = torch.empty(batch, self.heads, 0, self.k_dim, dtype=self.dtype, device=self.device)
        return key, key.new_empty((batch, self.heads, 0, self.v_dim), dtype=self.v_dtype)

    def memory_footprint(self) -> dict[str, int]:
        """Return bytes by kind, room for growth included: `pages`, `scales`, `tables`, `host`."""
        scales, blocks, memory = 0, self.blocks, self.memory
        if self.has_scales:
            parts = (self.layout.split(block)["token_scales"] for block in blocks.tensors)
            scales = sum(part.nbytes for part in parts)
        pages = len(blocks) * self.layout.size - scales
        host = len(memory.home) * self.layout.size if isinstance(memory, Tiers) else 0
        return {"pages": pages, "scales": scales, "tables": blocks.offsets.nbytes, "host": host}
