"""The layout of an engine's pages, and views of its memory as pages."""

from dataclasses import dataclass

import torch

from ..cache.options import CacheOptions, check_supported_page_size
from ..errors import ConfigError
from ..formats import LayerPlan
from ..ops import Pages, StoredSide
from ..ops.blocks import locate_pages
from ..ops.page_layout import make_page_layout


def skip_pages(pages: Pages, num_skipped: int) -> Pages:
    """Return `pages` without the first `num_skipped` pages. Page `n` was page `n + num_skipped`."""
    num_kept = len(pages.offsets) - num_skipped
    return pages._replace(block=pages.block[num_skipped:], offsets=pages.offsets[:num_kept])


@dataclass(frozen=True)
class EngineLayout:
    """The layout of an engine's pages.

    A page holds `page_size` tokens of a layer, for all KV heads of this process. Layers may have
    different 8-bit plans, because pages of all 8-bit plans have the same number of bytes.
    """

    num_heads: int  # Hkv
    head_dim: int  # D, of K and of V
    page_size: int  # tokens per page, S
    plan: LayerPlan  # the plan of layer 0. The same sides (K, V) are "auto" in every layer
    dtype: torch.dtype  # the dtype of the model, in which "auto" sides are stored
    is_dynamic: bool  # whether at least one layer has a scale per token and head

    @classmethod
    def from_options(
        cls, options: CacheOptions, num_layers: int, num_heads: int, head_dim: int, page_size: int,
        dtype: torch.dtype,
    ) -> "EngineLayout":  # fmt: skip
        """Return the layout for the options of a cache, and the sizes of a model and an engine.

        Raises:
            ConfigError: The layers need pages of different sizes, or `page_size` is not supported.
        """
        advice = "Set ContinuousBatchingConfig(page_size=...), or block_size"
        check_supported_page_size(page_size, "the engine's page size", advice)
        plans = [options.layer_plan(index) for index in range(num_layers)]
        for index, plan in enumerate(plans):
            if [side.is_auto for side in plan] != [side.is_auto for side in plans[0]]:
                raise ConfigError(
                    "plan: expected the same sides (K, V) in 'model' for all layers, because an "
                    f"engine's pages have one size, got {plans[0]} for layer 0 and {plan} for "
                    f"layer {index}. Store all layers in 8 bits"
                )
        return cls(num_heads, head_dim, page_size, plans[0], dtype, options.has_dynamic_scales)

    @property
    def bytes_per_page(self) -> int:
        """Size of a page in bytes, including its dynamic scales."""
        sizes = self.num_heads, self.page_size, self.head_dim, self.head_dim
        return make_page_layout(*sizes, *self._dtypes, self._has_scales).size

    @property
    def _dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        k, v = (self.dtype if side.is_auto else torch.uint8 for side in self.plan)
        return k, v

    @property
    def _has_scales(self) -> bool:
        return self.is_dynamic and not all(side.is_auto for side in self.plan)

    def check_shapes(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Raise ConfigError for K or V, `[1, Hkv, N, D]`, that do not fit the pages."""
        expected = (1, self.num_heads, self.head_dim)
        for name, tensor in (("keys", key), ("values", value)):
            batch, num_heads, _, head_dim = tensor.shape
            if (batch, num_heads, head_dim) != expected:
                raise ConfigError(
                    f"expected {name} [1, {self.num_heads}, N, {self.head_dim}], for which the "
                    f"engine's pages were made, got {tuple(tensor.shape)}. This model cannot run "
                    "with continuous batching. Use generate() with FP8PagedCache"
                )

    def view_memory(self, memory: torch.Tensor) -> Pages:
        """Return the pages in contiguous `memory`, `[bytes]`, uint8, without a block table."""
        size = self.bytes_per_page
        return self.view_block(memory[: len(memory) // size * size].view(-1, size))

    def view_block(self, block: torch.Tensor) -> Pages:
        """Return the pages of a block `[n, bytes]`, without a block table.

        Raises:
            ConfigError: Pages do not begin at multiples of 16 bytes, as the kernels' loads require.
        """
        address, page_stride = block.data_ptr(), block.stride(0)
        if address % 16 or page_stride % 16:
            raise ConfigError(
                f"expected pages that begin at multiples of 16 bytes, got a page at {address} and "
                f"the next page {page_stride} bytes after it"
            )
        table = torch.empty((0, 0), dtype=torch.int32, device=block.device)
        k, v = (StoredSide(None, None, x.format, self.head_dim, x.rotated) for x in self.plan)
        return Pages(
            k, v, block, table, locate_pages([block]), self.num_heads, self.page_size,
            *self._dtypes, self._has_scales,
        )  # fmt: skip
