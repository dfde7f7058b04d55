"""Page pool: the bytes of one layer's pages. It does not know who holds which page."""

from math import prod

import numpy as np
import numpy.typing as npt
import torch

from ..formats import AUTO, LayerPlan, SidePlan
from ..ops import Pages, StoredSide
from ..ops.blocks import address_pages, put_pages, take_pages, upload
from ..ops.page_bytes import PageBytes, page_bytes
from .block_table import BlockTable, Copies
from .page_allocator import Ints

# Bytes of a block, at most, if a page is not larger: what a pool asks memory for at a time.
BLOCK_BYTES = 16 << 20
_NAMES = ("k", "v", "token_scales")
# How values without channels are stored, whatever a plan says: some layers of latents have no
# positions.
_NOTHING = SidePlan(AUTO)


class PagePool:
    """One layer's stored keys and values.

    Made before the first token is known; `allocate` gives it shapes. Forks of a cache share it, and
    may have other plans for their pages: a byte is a byte.

    Attributes:
        k_is_auto: whether K is stored in the model's dtype, and not in bytes.
        v_is_auto: the same of V.
        k: `[P, Hkv, S, Dk]`, uint8, or the model's dtype for "auto".
        v: `[P, Hkv, Dv, S]`: V is stored transposed, since no GPU loads 8-bit data transposed.
        token_scales: `[P, Hkv, S, 2]`, bfloat16, of K and of V, when a side's scales are dynamic;
            else None. The half of a side without dynamic scales is unused.
        addresses: where each page is if the pages lie in blocks, see `ops.blocks`; the three above
            are then parts of the first block. None: they have all pages, one after the other.
        pinned: whether blocks are in pinned memory of the host.
    """

    k: torch.Tensor
    v: torch.Tensor
    pinned = False

    def __init__(
        self, page_size: int, *, k_is_auto: bool = False, v_is_auto: bool = False, dynamic: bool
    ) -> None:
        self.page_size, self.dynamic = page_size, dynamic
        self.k_is_auto, self.v_is_auto = k_is_auto, v_is_auto
        self.is_allocated = self.in_blocks = False
        self._record: Pages | None = None
        self._recorded: LayerPlan | None = None  # the plan of the record
        self._forget()

    def record(
        self,
        plan: LayerPlan,
        table: torch.Tensor,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        k_center: torch.Tensor | None,
    ) -> Pages:
        """Return the pages as operations take them: the same record until a tensor is another one.

        `plan`: how they are stored; `table`: of the sequences; static scales and center: those of
        `StoredSide`.
        """
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and (known := self._record) is not None:
            k, v, token_scales, old_table, addresses = known
            if (
                plan is self._recorded
                and table is old_table
                and k.codes is self.k
                and k.static_scale is k_scale
                and k.center is k_center
                and v.codes is self.v
                and v.static_scale is v_scale
                and token_scales is self.token_scales
                and addresses is self.addresses
            ):
                return known
        k = StoredSide(self.k, k_scale, k_center, plan.k.format, self.k_dim, plan.k.rotated)
        v_plan = plan.v if self.v_dim else _NOTHING
        v = StoredSide(self.v, v_scale, None, v_plan.format, self.v_dim, v_plan.rotated)
        pages = Pages(k, v, self.token_scales, table, self.addresses)
        if not is_compiling:
            self._record, self._recorded = pages, plan
        return pages

    def _forget(self) -> None:
        self._record = None
        self.token_scales: torch.Tensor | None = None
        self.addresses: torch.Tensor | None = None
        self._blocks: list[torch.Tensor] = []

    def allocate(
        self, key: torch.Tensor, value: torch.Tensor, pages: int, *, in_blocks: bool = False
    ) -> None:
        """Make `pages` zeroed pages for keys `[B, Hkv, T, Dk]` and values `[B, Hkv, T, Dv]`.

        Only shapes, dtypes and the device are read. `in_blocks`: the pool can then grow without
        moving what it holds.
        """
        self._describe(key, value, in_blocks)
        if in_blocks:
            self._append(pages, self.device)
        else:
            heads, slots = self.heads, self.page_size
            self.k = zeros((pages, heads, slots, self.k_dim), self.key_dtype, self.device)
            self.v = zeros((pages, heads, self.v_dim, slots), self.value_dtype, self.device)
            if self._has_scales:
                self.token_scales = zeros((pages, heads, slots, 2), torch.bfloat16, self.device)
        self.is_allocated = True

    def _describe(self, key: torch.Tensor, value: torch.Tensor, in_blocks: bool) -> None:
        self.dtype, self.v_dtype, self.device = key.dtype, value.dtype, key.device
        self.heads, self.k_dim, self.v_dim = key.shape[1], key.shape[3], value.shape[3]
        self.v_is_auto = self.v_is_auto or not self.v_dim
        self.in_blocks = in_blocks

    @property
    def _has_scales(self) -> bool:
        return self.dynamic and not (self.k_is_auto and self.v_is_auto)

    @property
    def _layout(self) -> PageBytes:
        return page_bytes(
            self.heads, self.page_size, self.k_dim, self.v_dim, self.key_dtype, self.value_dtype,
            self._has_scales,
        )  # fmt: skip

    def _append(self, pages: int, device: torch.device) -> None:
        """Append blocks of so many pages in all."""
        # A pool without pages has one block without pages, for its shapes.
        blocks = [block for block in self._blocks if len(block)]
        for size in self._block_sizes(pages):
            blocks.append(zeros((size, self._layout.size), torch.uint8, device, pinned=self.pinned))
        self._use(blocks or [zeros((0, self._layout.size), torch.uint8, device)])

    def _block_sizes(self, pages: int) -> list[int]:
        """Return the pages of each block that `pages` new pages are in."""
        most = max(1, BLOCK_BYTES // self._layout.size)
        return [min(most, pages - start) for start in range(0, pages, most)]

    def _use(self, blocks: list[torch.Tensor]) -> None:
        parts = self._layout.split(blocks[0])
        vars(self).update(parts, _blocks=blocks, addresses=address_pages(blocks))  # at once

    def empty_tokens(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys `[B, Hkv, 0, Dk]` and values `[B, Hkv, 0, Dv]` like those of `allocate`."""
        key = torch.empty(batch, self.heads, 0, self.k_dim, dtype=self.dtype, device=self.device)
        return key, key.new_empty((batch, self.heads, 0, self.v_dim), dtype=self.v_dtype)

    @property
    def key_dtype(self) -> torch.dtype:
        """What a stored number of K is held in."""
        return self.dtype if self.k_is_auto else torch.uint8

    @property
    def value_dtype(self) -> torch.dtype:
        """What a stored number of V is held in."""
        return self.v_dtype if self.v_is_auto else torch.uint8

    @property
    def pages(self) -> int:
        """Pages that there is room for."""
        if not self.is_allocated:
            return 0
        pages = self.k if self.addresses is None else self.addresses
        return pages.shape[0]

    def parts(self) -> list[dict[str, torch.Tensor]]:
        """Return every tensor by name, for each block; each has the pages as its first axis."""
        if self.in_blocks:
            return [self._layout.split(block) for block in self._blocks]
        tensors = {name: getattr(self, name, None) for name in _NAMES}
        return [{name: tensor for name, tensor in tensors.items() if tensor is not None}]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor of a pool by name that is not in blocks."""
        assert not self.in_blocks, "the pages are in several tensors"
        return self.parts()[0]

    def take(self, pages: npt.NDArray[np.integer]) -> dict[str, torch.Tensor]:
        """Return copies of pages, by the name of the tensor."""
        if self.in_blocks:
            return self._layout.split(take_pages(self._blocks, pages))
        index = upload(pages.astype(np.int64), self.k.device)
        return {name: tensor[index] for name, tensor in self.tensors().items()}

    def put(self, start: int, tensors: dict[str, torch.Tensor]) -> None:
        """Write pages from `start` on; the keys are some of those that `take` returns."""
        for part in self.parts():
            size = len(part["k"])
            for name, source in tensors.items():
                inside = source[max(-start, 0) : max(size - start, 0)]
                first = max(start, 0)
                part[name][first : first + len(inside)] = inside
            start -= size

    def grow(self, pages: int) -> None:
        """Make room for `pages` pages; the content stays, new pages are zero.

        In blocks no byte moves.
        """
        if pages <= self.pages:
            return
        if self.in_blocks:
            self._append(pages - self.pages, self._blocks[0].device)
            return
        self._record = None
        # One after the other: at most one exists twice at a time. K last: `pages` is read from it.
        kept = self.pages
        for name, old in reversed(self.tensors().items()):
            new = zeros((pages, *old.shape[1:]), old.dtype, old.device)
            new[:kept] = old[:kept]
            setattr(self, name, new)
            del old

    def like(self, pages: int) -> "PagePool":
        """Return a pool of `pages` zeroed pages of the same kind."""
        pool = self._empty_twin()
        pool.allocate(*self.empty_tokens(1), pages, in_blocks=self.in_blocks)
        return pool

    def scratch(self, pages: int) -> "PagePool":
        """Return a pool of `pages` zeroed pages of the same kind that operations read."""
        return self.like(pages)

    def _empty_twin(self) -> "PagePool":
        return PagePool(
            self.page_size, k_is_auto=self.k_is_auto, v_is_auto=self.v_is_auto,
            dynamic=self.dynamic,
        )  # fmt: skip

    def copy(self, copies: Copies, source: "PagePool | None" = None) -> None:
        """Copy pages, given as `(sources, destinations)`, within the pool or from `source`.

        No page is both.
        """
        origin = (source or self).with_pages(copies[0])
        if self.in_blocks:
            start = 0
            for size in self._block_sizes(len(copies[0])):
                sources, destinations = (numbers[start : start + size] for numbers in copies)
                put_pages(self._blocks, destinations, take_pages(origin._blocks, sources))
                start += size
            return
        index = [upload(numbers.astype(np.int64), self.k.device) for numbers in copies]
        tensors = origin.tensors()
        for name, tensor in self.tensors().items():
            tensor[index[1]] = tensors[name][index[0]]

    def with_pages(self, pages: Ints) -> "PagePool":
        """Return a pool that has `pages` where operations read them: this one."""
        return self

    def written(self, table: BlockTable, start: int, stop: int) -> None:
        """Note that a table's tokens `start` to `stop - 1` are written: nothing, in one place."""

    def receive(self, source: "PagePool", pages: npt.NDArray[np.integer], *, waits: bool) -> None:
        """Copy `pages`, ascending, from where `source`, perhaps elsewhere, has the same numbers.

        `waits`: whether they are there on return.
        """
        mine, theirs = self._rows(), source._rows()
        starts = [
            np.cumsum([0, *(len(rows[0]) for rows in all_rows)]) for all_rows in (mine, theirs)
        ]
        begins = np.bincount(np.concatenate(starts)) > 0
        ends = (np.diff(pages) != 1) | begins[pages[1:]]
        for run in np.split(pages, np.flatnonzero(ends) + 1):
            i, j = (np.searchsorted(first, run[0], side="right") - 1 for first in starts)
            to, of = run[0] - starts[0][i], run[0] - starts[1][j]
            for new, old in zip(mine[i], theirs[j], strict=True):
                new[to : to + len(run)].copy_(old[of : of + len(run)], non_blocking=not waits)

    def _rows(self) -> list[list[torch.Tensor]]:
        """Return for each part of the pages the tensors that have them as their first axis."""
        if self.in_blocks:
            return [[block] for block in self._blocks]
        return [list(self.tensors().values())]

    def keep(self, pages: Ints) -> None:
        """Keep only `pages`, ascending, as pages 0, 1, ...; those that do not exist are zero."""
        self._replace(len(pages), pages[pages < self.pages], in_blocks=self.in_blocks)

    def _replace(self, pages: int, kept: npt.NDArray[np.integer], *, in_blocks: bool) -> None:
        """Have `pages` pages, of which the first are those that `kept` names, in new tensors.

        The old tensors stay until the new ones are filled, so an exception changes nothing.
        """
        self._record = None
        new = PagePool._empty_twin(self)
        key, value = (tokens.to(self.k.device) for tokens in self.empty_tokens(1))
        new.pinned = self.pinned
        new.allocate(key, value, pages, in_blocks=in_blocks)
        start = 0
        for size in self._block_sizes(len(kept)):
            new.put(start, self.take(kept[start : start + size]))
            start += size
        vars(self).update(vars(new), device=self.device)

    def free(self) -> None:
        """Give the bytes back; `allocate` brings new ones."""
        self.is_allocated = False
        for name in self.parts()[0]:
            delattr(self, name)
        self._forget()

    def zero(self) -> None:
        """Set every page to zero, at the same address."""
        for part in self.parts():
            for tensor in part.values():
                tensor.zero_()

    def move(self, device: torch.device) -> None:
        """Move the bytes to `device`; `self.device` still names where the layer computes."""
        self._record = None
        # Towards the CPU torch would return before the bytes are there.
        waits = device.type == "cpu"
        if not self.in_blocks:
            tensors = self.tensors().items()
            vars(self).update({n: x.to(device, non_blocking=not waits) for n, x in tensors})
        elif self._blocks[0].device != device:
            self._use([block.to(device, non_blocking=not waits) for block in self._blocks])

    def pin(self) -> None:
        """Move blocks to pinned memory."""
        self.pinned = True
        self._use([block.pin_memory() for block in self._blocks])

    def lay_out(self, *, in_blocks: bool) -> None:
        """Bring the pages into blocks, or out of them, where they are."""
        if not self.is_allocated or in_blocks == self.in_blocks:
            return
        self._replace(self.pages, np.arange(self.pages), in_blocks=in_blocks)

    def bytes_per_page(self) -> int:
        """Return the bytes of one page: K, V and dynamic scales."""
        if self.in_blocks:
            return self._layout.size
        return sum(prod(shape) * dtype.itemsize for _, shape, dtype, _ in self._layout.parts)

    def memory_footprint(self) -> dict[str, int]:
        """Return bytes by kind, room for growth included: `pages`, `scales`, `tables`."""
        scales = 0 if self.token_scales is None else self.pages * self.token_scales[:1].nbytes
        addresses = 0 if self.addresses is None else self.addresses.nbytes
        pages = self.pages * self.bytes_per_page() - scales
        return {"pages": pages, "scales": scales, "tables": addresses}


def zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, pinned: bool = False
) -> torch.Tensor:
    """Return zeros that may be written in inference mode and outside of it alike."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)
