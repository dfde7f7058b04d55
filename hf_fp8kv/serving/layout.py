"""The layout of an engine's pages, and views of its memory as pages."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import ConfigError
from ..formats import LayerPlan
from ..ops import Pages, StoredSide
from ..ops.blocks import locate_pages
from ..ops.page_layout import make_page_layout


@dataclass(frozen=True)
class EngineLayout:
    """The layout of one layer's pages in an engine.

    A page holds `page_size` tokens of a layer, for all KV heads of this process.
    """

    num_heads: int  # Hkv
    head_dim: int  # D, of K and of V
    page_size: int  # tokens per page, S
    plan: LayerPlan  # the plan of the layer
    dtype: torch.dtype  # the dtype of the model, in which "auto" sides are stored
    is_dynamic: bool  # whether at least one layer has a scale per token and head

    @property
    def bytes_per_page(self) -> int:
        """Size of a page in bytes, including its dynamic scales."""
        return make_page_layout(
            self.num_heads,
            self.page_size,
            self.head_dim,
            self.head_dim,
            *self._dtypes,
            self._has_token_scales,
        ).size

    @property
    def _dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        return self.plan.k.find_dtype(self.dtype), self.plan.v.find_dtype(self.dtype)

    @property
    def _has_token_scales(self) -> bool:
        return self.is_dynamic and not all(side.is_auto for side in self.plan)

    def check_shapes(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Raise ConfigError for K or V, `[1, Hkv, N, D]`, that do not fit the pages."""
        expected = (1, self.num_heads, self.head_dim)
        for name, tensor in (("keys", key), ("values", value)):
            batch_size, num_heads, _, head_dim = tensor.shape
            if (batch_size, num_heads, head_dim) != expected:
                raise ConfigError(
                    f"expected {name} [1, {self.num_heads}, N, {self.head_dim}], for which the "
                    f"engine's pages were made, got {tuple(tensor.shape)}. This model cannot run "
                    "with continuous batching. Use generate() with FP8PagedCache"
                )

    def view_pages(self, page_rows: torch.Tensor) -> Pages:
        """Return the pages in the rows of `page_rows`, `[n, bytes]`, without a block table.

        Raises:
            ConfigError: Pages do not begin at multiples of 16 bytes, as the kernels' loads require.
        """
        address = page_rows.data_ptr()
        page_stride = page_rows.stride(0)
        if address % 16 or page_stride % 16:
            raise ConfigError(
                f"expected pages that begin at multiples of 16 bytes, got a page at {address} and "
                f"the next page {page_stride} bytes after it"
            )
        table = torch.empty((0, 0), dtype=torch.int32, device=page_rows.device)
        k, v = (
            StoredSide(None, None, side.format, self.head_dim, side.rotated) for side in self.plan
        )
        return Pages(
            k,
            v,
            page_rows,
            table,
            locate_pages([page_rows]),
            self.num_heads,
            self.page_size,
            *self._dtypes,
            has_scales=self._has_token_scales,
        )


def view_layers(blocks: torch.Tensor, layouts: Sequence[EngineLayout]) -> list[Pages]:
    """Return the pages of layers whose pages follow each other in each block, `[n, bytes]`.

    Page `n` of every layer is in block `n`. A block may end with unused bytes.
    """
    sizes = [layout.bytes_per_page for layout in layouts]
    layer_blocks = blocks[:, : sum(sizes)].split(sizes, dim=1)
    return [layout.view_pages(block) for layout, block in zip(layouts, layer_blocks, strict=True)]


def plan_block_sizes(layouts: Mapping[str, Sequence[EngineLayout]]) -> dict[str, int]:
    """Return the size of a block in bytes, for each kind of layers with these layouts.

    The size of an engine's sector is the least common multiple of these sizes. It would be huge for
    arbitrary sizes, so blocks may end with unused bytes. Two sectors always stay empty, and
    each kind leaves half a sector free on average. The cost of large sectors is therefore compared
    with the unused bytes, for memory of about 2,000 blocks.
    """
    min_sizes = {
        kind: sum(layout.bytes_per_page for layout in layers) for kind, layers in layouts.items()
    }

    def compute_block_sizes(num_largest: int) -> dict[str, int]:
        sector_size = num_largest * max(min_sizes.values())
        block_counts = {kind: sector_size // size for kind, size in min_sizes.items()}
        sector_size += -sector_size % (128 * math.lcm(*block_counts.values()))
        return {kind: sector_size // num_blocks for kind, num_blocks in block_counts.items()}

    def compute_cost(num_largest: int) -> float:
        # About four sectors of `num_largest` blocks stay free in a memory of 2,048 blocks.
        return sum(compute_block_sizes(num_largest).values()) * (1 + num_largest / 512)

    return compute_block_sizes(min(range(1, 65), key=compute_cost))
