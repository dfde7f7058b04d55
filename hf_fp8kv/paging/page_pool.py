"""The bytes of one layer's pages, independent of the block tables that refer to them."""

import torch

from ..formats import LayerPlan
from ..ops.page_layout import PageLayout, make_page_layout
from .memory_blocks import Blocks
from .offloading import OffloadedLayer


class PagePool:
    """The stored keys and values of one layer.

    A pool is created before the first token, and `allocate` sets its shapes. Forks of a cache share
    the pool, and may read the same bytes under different plans.

    Attributes:
        has_scales: Whether pages store a scale for each token and head. Pages with static scales,
            or only with sides in the model's dtype, store none. `allocate` sets this and the
            attributes up to `device`.
        k_dtype, v_dtype: Dtypes of K and V in the model.
        stored_k_dtype, stored_v_dtype: Dtypes of K and V in pages (`SidePlan.find_dtype`).
        layout: Layout of a page.
        device: Device on which the layer computes.
        memory: The pages.
        blocks: The pages that operations read: all pages, or with offloading those on the device.
    """

    layout: PageLayout

    def __init__(
        self,
        page_size: int,
        plan: LayerPlan,
        has_dynamic_scales: bool,
        memory: OffloadedLayer | None = None,
    ) -> None:
        self.page_size = page_size
        self._has_dynamic_scales = has_dynamic_scales
        self._plan = plan
        self.blocks = Blocks() if memory is None else memory.device_blocks
        self.memory: Blocks | OffloadedLayer = self.blocks if memory is None else memory

    @property
    def is_allocated(self) -> bool:
        """Whether `allocate` was called, possibly with 0 pages."""
        return self.memory.is_allocated

    def allocate(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        num_pages: int,
        *,
        is_single_block: bool = False,
    ) -> None:
        """Allocate zeroed pages for keys `[B, Hkv, T, Dk]` and values `[B, Hkv, T, Dv]`.

        Only shapes, dtypes and the device are read. `is_single_block` is as in `Blocks.allocate`.
        """
        self.k_dtype = key.dtype
        self.v_dtype = value.dtype
        self.device = key.device
        self.num_heads = key.shape[1]
        self.k_dim = key.shape[3]
        self.v_dim = value.shape[3]
        k, v = self._plan
        v_is_auto = v.is_auto or not self.v_dim
        self.stored_k_dtype = k.find_dtype(self.k_dtype)
        self.stored_v_dtype = self.v_dtype if v_is_auto else v.find_dtype(self.v_dtype)
        self.has_scales = self._has_dynamic_scales and not (k.is_auto and v_is_auto)
        self.layout = make_page_layout(
            self.num_heads,
            self.page_size,
            self.k_dim,
            self.v_dim,
            self.stored_k_dtype,
            self.stored_v_dtype,
            self.has_scales,
        )
        self.memory.allocate(
            self.layout.size, num_pages, self.device, is_single_block=is_single_block
        )

    def make_empty_kv(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return empty keys `[B, Hkv, 0, Dk]` and values `[B, Hkv, 0, Dv]` as for `allocate`."""
        shape = (batch, self.num_heads, 0)
        key = torch.empty(*shape, self.k_dim, dtype=self.k_dtype, device=self.device)
        return key, key.new_empty((*shape, self.v_dim), dtype=self.v_dtype)

    def memory_footprint(self) -> dict[str, int]:
        """Return the bytes of `pages`, `scales`, offset `tables` and `host` pages, used or not."""
        page_bytes = self.layout.size
        scaled_blocks = self.blocks.tensors if self.has_scales else []
        scales_bytes = sum(
            self.layout.split(block)["token_scales"].nbytes for block in scaled_blocks
        )
        num_host_pages = (
            len(self.memory.host_blocks) if isinstance(self.memory, OffloadedLayer) else 0
        )
        return {
            "pages": len(self.blocks) * page_bytes - scales_bytes,
            "scales": scales_bytes,
            "tables": self.blocks.offsets.nbytes,
            "host": num_host_pages * page_bytes,
        }
