"""Page pool: the bytes of one layer's pages. It does not know who holds which page."""

from typing import Any

import torch

from ..formats import AUTO, LayerPlan, SidePlan
from ..ops import Pages, StoredSide
from ..ops.page_layout import PageLayout, page_layout
from .block_table import BlockTable, Copies
from .blocks import Blocks, Numbers

# How values without channels are stored, whatever a plan says: some layers of latents have no
# positions.
_NOTHING = SidePlan(AUTO)


class PagePool:
    """One layer's stored keys and values.

    Made before the first token is known; `allocate` gives it shapes. Forks of a cache share it, and
    may have other plans for their pages: a byte is a byte.

    Attributes:
        dynamic: whether numbers that are not in the model's dtype have dynamic scales.
        key_dtype: dtype of a stored number of K, after `allocate`; `value_dtype`: of V.
        layout: where the bytes of a page are.
        memory: the pages that operations read; None before `allocate`.
    """

    layout: PageLayout

    def __init__(self, page_size: int, plan: LayerPlan, dynamic: bool) -> None:
        self.page_size, self.dynamic = page_size, dynamic
        self._is_auto = plan.k.is_auto, plan.v.is_auto
        self.memory: Blocks | None = None
        # It keeps blocks alive, and is dropped when they are replaced.
        self._record: Pages | None = None
        self._recorded: LayerPlan | None = None  # the plan of the record

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_record": None}

    @property
    def is_allocated(self) -> bool:
        """Whether there are pages, which may be 0."""
        return self.memory is not None

    @property
    def block(self) -> torch.Tensor:
        """The first block, `[n, bytes]`, uint8."""
        return self._pages.tensors[0]

    @property
    def _pages(self) -> Blocks:
        assert self.memory is not None
        return self.memory

    def record(
        self,
        plan: LayerPlan,
        table: torch.Tensor,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        k_center: torch.Tensor | None,
    ) -> Pages:
        """Return the pages as operations take them: the same record until a tensor is another one.

        `plan`: how they are stored; `table`: of the sequences. `StoredSide` has the static scales
        and the center.
        """
        is_compiling, memory = torch.compiler.is_compiling(), self.memory
        assert memory is not None
        if (
            not is_compiling
            and (known := self._record) is not None
            and plan is self._recorded
            and table is known.table
            and known.k.static_scale is k_scale
            and known.k.center is k_center
            and known.v.static_scale is v_scale
        ):
            return known
        v_plan = plan.v if self.v_dim else _NOTHING
        pages = Pages(
            StoredSide(k_scale, k_center, plan.k.format, self.k_dim, plan.k.rotated),
            StoredSide(v_scale, None, v_plan.format, self.v_dim, v_plan.rotated),
            memory.tensors[0], table, memory.offsets, self.heads, self.page_size, self.key_dtype,
            self.value_dtype, self._has_scales,
        )  # fmt: skip
        if not is_compiling:
            self._record, self._recorded = pages, plan
        return pages

    def allocate(
        self, key: torch.Tensor, value: torch.Tensor, pages: int, *, in_one: bool = False
    ) -> None:
        """Make `pages` zeroed pages for keys `[B, Hkv, T, Dk]` and values `[B, Hkv, T, Dv]`.

        Only shapes, dtypes and the device are read. `in_one`: in one block, see `Blocks`.
        """
        self._describe(key, value)
        self.memory = Blocks(self.layout.size, pages, self.device, in_one=in_one)

    def _describe(self, key: torch.Tensor, value: torch.Tensor) -> None:
        self.dtype, self.v_dtype, self.device = key.dtype, value.dtype, key.device
        self.heads, self.k_dim, self.v_dim = key.shape[1], key.shape[3], value.shape[3]
        k_is_auto, v_is_auto = self._is_auto
        v_is_auto |= not self.v_dim
        self.key_dtype = self.dtype if k_is_auto else torch.uint8
        self.value_dtype = self.v_dtype if v_is_auto else torch.uint8
        self._has_scales = self.dynamic and not (k_is_auto and v_is_auto)
        self.layout = page_layout(
            self.heads, self.page_size, self.k_dim, self.v_dim, self.key_dtype, self.value_dtype,
            self._has_scales,
        )  # fmt: skip

    def empty_tokens(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys `[B, Hkv, 0, Dk]` and values `[B, Hkv, 0, Dv]` like those of `allocate`."""
        key = torch.empty(batch, self.heads, 0, self.k_dim, dtype=self.dtype, device=self.device)
        return key, key.new_empty((batch, self.heads, 0, self.v_dim), dtype=self.v_dtype)

    @property
    def pages(self) -> int:
        """Pages that there is room for."""
        return 0 if self.memory is None else len(self.memory)

    def grow(self, pages: int) -> None:
        """Make room for `pages` pages; the content stays."""
        if pages > self.pages:
            self._pages.grow(pages)
            self._record = None

    def take_rows(self, pages: Numbers | torch.Tensor) -> torch.Tensor:
        """Return copies of pages, `[n, bytes]`; see `Blocks.take`."""
        return self._pages.take(pages)

    def put_rows(self, pages: Numbers | torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows as `take_rows` returns them to pages."""
        self._pages.put(pages, rows)

    def fill(self, rows: torch.Tensor) -> None:
        """Write all pages, `[P, bytes]`."""
        self._pages.fill(rows)

    def copy(self, copies: Copies) -> None:
        """Copy pages, given as `(sources, destinations)`; no page is both."""
        self._pages.copy(*copies)

    def written(self, table: BlockTable, start: int, stop: int) -> None:
        """Note that a table's tokens `start` to `stop - 1` are written: nothing, in one place."""

    def keep(self, pages: Numbers) -> None:
        """Keep only `pages`, ascending, as pages 0, 1, ...; those that do not exist are zero."""
        self._pages.keep(pages)
        self._record = None

    def free(self) -> None:
        """Free the bytes; `allocate` brings new ones."""
        self.memory = self._record = None

    def move(self, device: torch.device) -> None:
        """Move the bytes to `device`; `self.device` still names where the layer computes."""
        self._pages.move(device)
        self._record = None

    def memory_footprint(self) -> dict[str, int]:
        """Return bytes by kind, room for growth included: `pages`, `scales`, `tables`."""
        if (memory := self.memory) is None:
            return {}
        scales = 0
        if self._has_scales:
            parts = (self.layout.split(block)["token_scales"] for block in memory.tensors)
            scales = sum(part.nbytes for part in parts)
        pages = len(memory) * self.layout.size - scales
        return {"pages": pages, "scales": scales, "tables": memory.offsets.nbytes}
