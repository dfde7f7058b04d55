"""Offloading: pages of layers that are not computing lie in host memory.

A layer's pages have their home there. They are brought to the device for the layer's call, the next
layer's while this one computes, and only those that a call has written go back. On a CPU both are
ordinary memory, and the copies are the same.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ..formats import LayerPlan
from .block_table import BlockTable, Copies
from .blocks import Blocks, Numbers
from .page_allocator import PageBudget
from .page_pool import PagePool

_HOST = torch.device("cpu")


class OffloadBudget(PageBudget):
    """A budget of pages of which only some lie on the device; shared by a cache and its forks.

    Attributes:
        max_device_pages: how many pages of every layer the device has room for; None: those of
            two layers, the one that computes and the next one.
        indices: the numbers of the model's layers that have a pool.
    """

    def __init__(
        self, page_size: int, max_pages: int | None = None, max_device_pages: int | None = None
    ) -> None:
        super().__init__(page_size, max_pages)
        self.max_device_pages = max_device_pages
        self.indices: set[int] = set()
        self._here: weakref.WeakSet[OffloadedPool] = weakref.WeakSet()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._uses = 0

    def use(
        self, pool: "OffloadedPool", pages: Numbers, following: "OffloadedPool", its_pages: Numbers
    ) -> None:
        """Bring `pages` of a layer to the device, and start to bring those of the following one.

        Layers compute in a circle, so what leaves first is what is needed last, which is the layer
        that has just computed. (The least recently used one is that which comes next: with room
        for all layers but one, every layer would move at every step.)
        """
        self._uses += 1
        pool.used_at = self._uses
        self._make_room(pool, pool)
        if self.max_device_pages is None:
            for other in self._here:
                if other is not pool:
                    other.store()  # it leaves soon, and the copies pass while this one computes
        pool.fetch(pages)
        pool.wait()
        # Whoever computes is on the device in any case, what comes next only where both fit.
        if len(following.missing(its_pages)) and self._fits({pool, following}):
            self._make_room(pool, following)
            following.fetch(its_pages)

    def _make_room(self, current: "OffloadedPool", wanted: "OffloadedPool") -> None:
        """Send pages of other layers to the host until those of `wanted` fit."""
        size = max(self.indices) + 1
        others = [pool for pool in self._here if pool is not current and pool is not wanted]
        others.sort(key=lambda p: ((p.index - current.index) % size or size, -p.used_at))
        while others and not self._fits({*self._here, wanted}):
            others.pop().evict()

    def _fits(self, pools: "set[OffloadedPool]") -> bool:
        if self.max_device_pages is None:
            return len(pools) <= 2
        return sum(pool.pages for pool in pools) <= self.max_device_pages * len(self.indices)

    def note_place(self, pool: "OffloadedPool") -> None:
        """Note whether a pool has memory on the device."""
        (self._here.add if pool.memory is not None else self._here.discard)(pool)

    @contextmanager
    def copying(self, device: torch.device) -> Iterator[torch.cuda.Stream | None]:
        """Start copies after all that was started on `device`, beside what will be."""
        if device.type != "cuda":
            yield None
            return
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield stream


class OffloadedPool(PagePool):
    """One layer's pages in host memory, and those of them that are on the device.

    Attributes:
        index: the layer's number in the model.
        memory: the pages on the device; None while the layer is away.
        home: the pages in host memory, as far as any was stored there.
        used_at: when the layer last computed, in calls of `OffloadBudget.use`.
    """

    def __init__(
        self, page_size: int, plan: LayerPlan, dynamic: bool, budget: OffloadBudget, index: int
    ) -> None:
        super().__init__(page_size, plan, dynamic)
        self.budget, self.index, self.used_at = budget, index, 0
        budget.indices.add(index)
        self._is_allocated = False
        self._reset()

    def _reset(self) -> None:
        self.memory = None
        self.home: Blocks | None = None
        # Of each page, whether the copy there is what was written last.
        self._on_device = np.zeros(0, bool)
        self._on_host = np.zeros(0, bool)
        # The last copy of these pages, in either direction, if it may still be under way.
        self._copied: torch.cuda.Event | None = None

    @property
    def is_allocated(self) -> bool:
        """Whether shapes are known."""
        return self._is_allocated

    def allocate(
        self, key: torch.Tensor, value: torch.Tensor, pages: int, *, in_one: bool = False
    ) -> None:
        """Make `pages` pages of these shapes; memory for them is taken when they are used."""
        self._describe(key, value)
        self._is_allocated = True
        self.grow(pages)

    @property
    def pages(self) -> int:
        """Pages that there are, wherever they lie."""
        return len(self._on_device)

    def grow(self, pages: int) -> None:
        """Make room for `pages` pages; the content stays."""
        if pages <= self.pages:
            return
        if self.memory is not None:
            self.wait()
            self.memory.grow(pages)
            self._record = None
        # Last, since the lines above may fail, and at once.
        flags, more = (self._on_device, self._on_host), np.zeros(pages - self.pages, bool)
        self._on_device, self._on_host = (np.concatenate([old, more]) for old in flags)

    # -- between the tiers -------------------------------------------------------------------

    def missing(self, pages: Numbers) -> Numbers:
        """Return those of `pages` that are in host memory alone."""
        missing: Numbers = pages[self._on_host[pages] & ~self._on_device[pages]]
        return missing

    def fetch(self, pages: Numbers) -> Blocks:
        """Start to bring those of `pages` (ascending) to the device that are not there."""
        if (here := self.memory) is None:
            here = self.memory = Blocks(self.layout.size, self.pages, self.device)
            self.budget.note_place(self)
        missing = self.missing(pages)
        if len(missing):
            assert self.home is not None
            self._copy_over(self.home, here, missing)
            self.budget.fetched += len(missing) * self.layout.size
        self._on_device[pages] = True
        return here

    def store(self) -> Blocks:
        """Start to bring home what was written on the device; return the pages there."""
        if (home := self.home) is None:
            pinned = self.device.type == "cuda"
            home = self.home = Blocks(self.layout.size, self.pages, _HOST, pinned=pinned)
        home.grow(self.pages)
        written = np.flatnonzero(self._on_device & ~self._on_host)
        if len(written):
            assert self.memory is not None
            self._copy_over(self.memory, home, written)
            self.budget.returned += len(written) * self.layout.size
            self._on_host[written] = True
        return home

    def evict(self) -> None:
        """Bring home what was written, and free the memory on the device."""
        if self.memory is not None:
            self.store()
            self.wait()
            self._on_device[:] = False
            self.memory = self._record = None
            self.budget.note_place(self)

    def written(self, table: BlockTable, start: int, stop: int) -> None:
        """Note that the pages of these tokens, which are on the device, are written there."""
        self._note_written(table.pages_of(start, stop))

    def _note_written(self, pages: Numbers) -> None:
        self._on_device[pages] = True
        self._on_host[pages] = False

    def wait(self) -> None:
        """Have what is started on the device from now on wait for the copies."""
        if self._copied is not None:
            torch.cuda.current_stream(self._copied.device).wait_event(self._copied)

    def _copy_over(self, source: Blocks, target: Blocks, pages: Numbers) -> None:
        away = target if source is self.home else source
        with self.budget.copying(away.tensors[0].device) as stream:
            target.receive(source, pages, waits=stream is None)
            if stream is not None:
                self._copied = stream.record_event()

    def _at_home(self) -> Blocks:
        """Return the pages in host memory, with what was written, once they may be touched."""
        home = self.store()
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        return home

    # -- what other pools do -----------------------------------------------------------------

    def fill(self, rows: torch.Tensor) -> None:
        """Write all pages, `[P, bytes]`, in host memory."""
        self.evict()
        self._at_home().fill(rows)
        self._on_host[:] = True

    def take_rows(self, pages: Numbers | torch.Tensor) -> torch.Tensor:
        """Return copies of pages in host memory, `[n, bytes]`."""
        return self._at_home().take(pages)

    def put_rows(self, pages: Numbers | torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows to pages on the device, where the layer computes."""
        assert not isinstance(pages, torch.Tensor)
        self.fetch(pages[:0]).put(pages, rows)
        self._note_written(pages)

    def copy(self, copies: Copies) -> None:
        """Copy pages `(sources, destinations)` where they are."""
        sources, destinations = copies
        if self.memory is not None:
            self.fetch(np.unique(sources))
            self.wait()
            self.memory.copy(*copies)
            self._note_written(destinations)
        else:
            self._at_home().copy(*copies)
            self._on_host[destinations] = self._on_host[sources]

    def keep(self, pages: Numbers) -> None:
        """Keep only `pages`, ascending, as pages 0, 1, ...; those that do not exist are zero."""
        self.evict()
        self._at_home().keep(pages)
        self._on_host, self._on_device = np.ones(len(pages), bool), np.zeros(len(pages), bool)

    def free(self) -> None:
        """Free the bytes; `allocate` brings new ones."""
        self.wait()
        if self._copied is not None:
            self._copied.synchronize()
        self._reset()
        self._record, self._is_allocated = None, False
        self.budget.note_place(self)

    def move(self, device: torch.device) -> None:
        """Bring all pages home, whatever `device`: they come back when the layer computes."""
        self.evict()
        home = self._at_home()
        if self.device.type == "cuda":
            home.pin()

    def memory_footprint(self) -> dict[str, int]:
        """Return bytes by kind: those on the device as `PagePool` does, and `host`."""
        home = 0 if self.home is None else len(self.home)
        return {**super().memory_footprint(), "host": home * self.layout.size}
