"""Page pool: the bytes of one layer's pages. It does not know who holds which page."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..formats import AUTO, LayerPlan, SidePlan
from ..ops import Pages, StoredSide
from ..ops.blocks import locate_pages, put_pages, take_pages
from ..ops.page_layout import PageLayout, page_layout
from .block_table import BlockTable, Copies
from .page_allocator import Ints

# Bytes of a block, at most, if a page is not larger: what a pool asks memory for at a time.
BLOCK_BYTES = 16 << 20
# How values without channels are stored, whatever a plan says: some layers of latents have no
# positions.
_NOTHING = SidePlan(AUTO)


class PagePool:
    """One layer's stored keys and values, in blocks of pages.

    Made before the first token is known; `allocate` gives it shapes. Forks of a cache share it, and
    may have other plans for their pages: a byte is a byte.

    Attributes:
        k_is_auto: whether K is stored in the model's dtype, and not in bytes.
        v_is_auto: the same of V.
        layout: where the bytes of a page are.
        in_one: whether all pages stay in one block, as compiled code needs them.
        pinned: whether blocks are in pinned memory of the host.
    """

    layout: PageLayout
    pinned = False

    def __init__(
        self, page_size: int, *, k_is_auto: bool = False, v_is_auto: bool = False, dynamic: bool
    ) -> None:
        self.page_size, self.dynamic = page_size, dynamic
        self.k_is_auto, self.v_is_auto = k_is_auto, v_is_auto
        self._stores_v_as_is = v_is_auto
        self.is_allocated = self.in_one = False
        self._record: Pages | None = None
        self._recorded: LayerPlan | None = None  # the plan of the record
        self._memory: tuple[list[torch.Tensor], torch.Tensor | None] = ([], None)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_memory": (self._memory[0], None), "_record": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if blocks := self._memory[0]:
            self._use(blocks)  # copied blocks lie elsewhere

    @property
    def block(self) -> torch.Tensor:
        """The first block, `[n, bytes]`, uint8."""
        return self._memory[0][0]

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
        is_compiling, (blocks, offsets) = torch.compiler.is_compiling(), self._memory
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
        assert offsets is not None
        v_plan = plan.v if self.v_dim else _NOTHING
        pages = Pages(
            StoredSide(k_scale, k_center, plan.k.format, self.k_dim, plan.k.rotated),
            StoredSide(v_scale, None, v_plan.format, self.v_dim, v_plan.rotated),
            blocks[0], table, offsets, self.heads, self.page_size, self.key_dtype,
            self.value_dtype, self._has_scales,
        )  # fmt: skip
        if not is_compiling:
            self._record, self._recorded = pages, plan
        return pages

    def allocate(
        self, key: torch.Tensor, value: torch.Tensor, pages: int, *, in_one: bool = False
    ) -> None:
        """Make `pages` zeroed pages for keys `[B, Hkv, T, Dk]` and values `[B, Hkv, T, Dv]`.

        Only shapes, dtypes and the device are read. `in_one`: in one block, else in blocks of at
        most `BLOCK_BYTES`.
        """
        self._describe(key, value, in_one)
        self._use(self._new_blocks(pages, self.device))
        self.is_allocated = True

    def _describe(self, key: torch.Tensor, value: torch.Tensor, in_one: bool) -> None:
        self.dtype, self.v_dtype, self.device = key.dtype, value.dtype, key.device
        self.heads, self.k_dim, self.v_dim = key.shape[1], key.shape[3], value.shape[3]
        self.v_is_auto = self._stores_v_as_is or not self.v_dim
        self.in_one = in_one
        self.layout = page_layout(
            self.heads, self.page_size, self.k_dim, self.v_dim, self.key_dtype, self.value_dtype,
            self._has_scales,
        )  # fmt: skip

    @property
    def _has_scales(self) -> bool:
        return self.dynamic and not (self.k_is_auto and self.v_is_auto)

    def _new_blocks(self, pages: int, device: torch.device) -> list[torch.Tensor]:
        # A pool without pages has one block without pages, for its shapes.
        sizes = [pages] if self.in_one or not pages else self._cut(pages)
        return [
            zeros((size, self.layout.size), torch.uint8, device, pinned=self.pinned)
            for size in sizes
        ]

    def _cut(self, pages: int) -> list[int]:
        """Return the sizes of parts of `pages` pages that have at most `BLOCK_BYTES`."""
        most = max(1, BLOCK_BYTES // self.layout.size)
        return [min(most, pages - start) for start in range(0, pages, most)]

    def _use(self, blocks: list[torch.Tensor]) -> None:
        # At once.
        self._memory, self._record = (blocks, locate_pages(blocks)), None

    def empty_tokens(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys `[B, Hkv, 0, Dk]` and values `[B, Hkv, 0, Dv]` like those of `allocate`."""
        key = torch.empty(batch, self.heads, 0, self.k_dim, dtype=self.dtype, device=self.device)
        return key, key.new_empty((batch, self.heads, 0, self.v_dim), dtype=self.v_dtype)

    @property
    def key_dtype(self) -> torch.dtype:
        """Dtype of a stored number of K."""
        return self.dtype if self.k_is_auto else torch.uint8

    @property
    def value_dtype(self) -> torch.dtype:
        """Dtype of a stored number of V."""
        return self.v_dtype if self.v_is_auto else torch.uint8

    @property
    def pages(self) -> int:
        """Pages that there is room for."""
        offsets = self._memory[1]
        return 0 if offsets is None else len(offsets)

    def take_rows(self, pages: npt.NDArray[np.integer] | torch.Tensor) -> torch.Tensor:
        """Return copies of pages, `[n, bytes]`; a tensor of numbers only if there is one block."""
        return take_pages(self._memory[0], pages)

    def put_rows(self, pages: npt.NDArray[np.integer] | torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows as `take_rows` returns them to pages."""
        put_pages(self._memory[0], pages, rows)

    def fill(self, rows: torch.Tensor) -> None:
        """Write all pages, `[P, bytes]`."""
        blocks = self._memory[0]
        for block, part in zip(blocks, rows.split([*map(len, blocks)]), strict=True):
            block.copy_(part)

    def grow(self, pages: int) -> None:
        """Make room for `pages` pages; the content stays, new pages are zero.

        Another block is added, and no byte moves, unless all pages are in one.
        """
        if pages <= self.pages:
            return
        if self.in_one:
            self._keep(pages, np.arange(self.pages))
            return
        blocks = [block for block in self._memory[0] if len(block)]
        device = self.block.device
        self._use([*blocks, *self._new_blocks(pages - self.pages, device)])

    def _empty_twin(self) -> "PagePool":
        return PagePool(
            self.page_size, k_is_auto=self.k_is_auto, v_is_auto=self.v_is_auto,
            dynamic=self.dynamic,
        )  # fmt: skip

    def copy(self, copies: Copies) -> None:
        """Copy pages, given as `(sources, destinations)`; no page is both."""
        start = 0
        for size in self._cut(len(copies[0])):
            sources, destinations = (numbers[start : start + size] for numbers in copies)
            self.put_rows(destinations, self.take_rows(sources))
            start += size

    @property
    def on_device(self) -> "PagePool":
        """The pool whose blocks operations read: this one."""
        return self

    def written(self, table: BlockTable, start: int, stop: int) -> None:
        """Note that a table's tokens `start` to `stop - 1` are written: nothing, in one place."""

    def receive(self, source: "PagePool", pages: npt.NDArray[np.integer], *, waits: bool) -> None:
        """Copy `pages`, ascending, from where `source`, perhaps elsewhere, has the same numbers.

        `waits`: whether they are there on return.
        """
        mine, theirs = self._memory[0], source._memory[0]
        starts = [np.cumsum([0, *map(len, blocks)]) for blocks in (mine, theirs)]
        begins = np.bincount(np.concatenate(starts)) > 0
        ends = (np.diff(pages) != 1) | begins[pages[1:]]
        for run in np.split(pages, np.flatnonzero(ends) + 1):
            i, j = (np.searchsorted(first, run[0], side="right") - 1 for first in starts)
            to, of = run[0] - starts[0][i], run[0] - starts[1][j]
            new, old = mine[i][to : to + len(run)], theirs[j][of : of + len(run)]
            new.copy_(old, non_blocking=not waits)

    def keep(self, pages: Ints) -> None:
        """Keep only `pages`, ascending, as pages 0, 1, ...; those that do not exist are zero."""
        self._keep(len(pages), pages[pages < self.pages])

    def _keep(self, pages: int, kept: npt.NDArray[np.integer]) -> None:
        """Have `pages` pages, of which the first are those that `kept` names, in new blocks.

        The old blocks stay until the new ones are filled, so an exception changes nothing.
        """
        old = self._memory[0]
        ends = np.cumsum([len(block) for block in old])
        whole = [
            block for block, end in zip(old, ends, strict=True)
            if np.isin(np.arange(end - len(block), end), kept).all()
        ]  # fmt: skip
        if not self.in_one and sum(map(len, whole)) == len(kept) == pages:
            self._use(whole)  # no byte moves
            return
        new, start = self._new_blocks(pages, self.block.device), 0
        for size in self._cut(len(kept)):
            some = np.arange(start, start + size)
            put_pages(new, some, take_pages(old, kept[some]))
            start += size
        self._use(new)

    def free(self) -> None:
        """Give the bytes back; `allocate` brings new ones."""
        self.is_allocated = False
        self._memory, self._record = ([], None), None

    def move(self, device: torch.device) -> None:
        """Move the bytes to `device`; `self.device` still names where the layer computes."""
        if self.block.device != device:
            # Towards the CPU torch would return before the bytes are there.
            waits = device.type == "cpu"
            self._use([block.to(device, non_blocking=not waits) for block in self._memory[0]])

    def pin(self) -> None:
        """Move blocks to pinned memory."""
        self.pinned = True
        self._use([block.pin_memory() for block in self._memory[0]])

    def bytes_per_page(self) -> int:
        """Return the bytes of one page: K, V and dynamic scales."""
        return self.layout.size

    def memory_footprint(self) -> dict[str, int]:
        """Return bytes by kind, room for growth included: `pages`, `scales`, `tables`."""
        blocks = self._memory[0] if self._has_scales else ()
        scales = sum(self.layout.split(block)["token_scales"].nbytes for block in blocks)
        offsets = self._memory[1]
        return {
            "pages": self.pages * self.layout.size - scales, "scales": scales,
            "tables": 0 if offsets is None else offsets.nbytes,
        }  # fmt: skip


def zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, pinned: bool = False
) -> torch.Tensor:
    """Return zeros that may be written in inference mode and outside of it alike."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)
