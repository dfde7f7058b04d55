"""Offloading: pages of layers that are not computing are in host memory.

Host memory has a copy of each page. A layer's pages are fetched to the device for its call, and the
next layer's pages are fetched while this layer computes. Only pages that a call has written are
copied back. On a CPU both tiers are ordinary memory, with the same copies.
"""

import weakref

import numpy as np
import torch

from ..ops.blocks import Ints
from .blocks import Blocks
from .page_allocator import PageBudget

_HOST = torch.device("cpu")


class OffloadBudget(PageBudget):
    """A budget for offloaded pages, shared by a cache and its forks.

    Attributes:
        max_device_pages: Number of pages per layer that the device has room for. None means room
            for two layers: the one that computes and the next one.
        layers: The pages of each layer, of a cache and its forks.
        streams: Stream for the copies, by device.
    """

    def __init__(
        self, page_size: int, max_pages: int | None = None, max_device_pages: int | None = None
    ) -> None:
        super().__init__(page_size, max_pages)
        self.max_device_pages = max_device_pages
        self.layers: weakref.WeakSet[Tiers] = weakref.WeakSet()
        self.streams: dict[torch.device, torch.cuda.Stream] = {}

    def use(self, layer: "Tiers", pages: Ints, following: "Tiers", its_pages: Ints) -> None:
        """Fetch `pages` of a layer to the device, and start to fetch pages of the following layer.

        Layers compute in a fixed cyclic order, so the layer that has just computed is needed last
        and is evicted first. (The least recently used layer is needed next. If the device had room
        for all layers except one, evicting that layer would move every layer in every step.)
        """
        self._make_room(layer, layer)
        if self.max_device_pages is None:
            for other in self._here() - {layer}:
                other.store()  # it is evicted soon, so copy while this layer computes
        layer.fetch(pages)
        layer.wait()
        # The computing layer is always on the device, the following layer only if both fit.
        if len(following.missing(its_pages)) and self._fits({layer, following}):
            self._make_room(layer, following)
            following.fetch(its_pages)

    def _here(self) -> "set[Tiers]":
        return {layer for layer in self.layers if layer.here.is_allocated}

    def _make_room(self, current: "Tiers", incoming: "Tiers") -> None:
        """Evict other layers until the pages of `incoming` fit."""
        size, others = max(x.index for x in self.layers) + 1, self._here() - {current, incoming}
        candidates = sorted(others, key=lambda x: (x.index - current.index) % size or size)
        while candidates and not self._fits(self._here() | {incoming}):
            candidates.pop().evict()

    def _fits(self, layers: "set[Tiers]") -> bool:
        if self.max_device_pages is None:
            return len(layers) <= 2
        count = len({layer.index for layer in self.layers})
        return sum(map(len, layers)) <= self.max_device_pages * count


class Tiers:
    """The pages of one layer in host memory, and their copies on the device.

    The class has the interface of `Blocks`, which it replaces in a pool.

    Attributes:
        index: Index of the layer in the model.
        here: Pages on the device, only allocated while some are there.
        home: Pages in host memory, allocated when the first page is stored there.
        is_allocated: Whether `allocate` was called, possibly with 0 pages.
    """

    size: int
    device: torch.device

    def __init__(self, budget: OffloadBudget, index: int) -> None:
        self.budget, self.index = budget, index
        self.here, self.home = Blocks(), Blocks()
        # The last copy of these pages, in either direction, if it may not have finished.
        self._copied: torch.cuda.Event | None = None
        self.free()
        budget.layers.add(self)

    def __del__(self) -> None:
        # A copy into this memory may be in progress when torch allocates it again.
        self.wait()

    def __len__(self) -> int:
        return len(self._on_device)

    def allocate(
        self, size: int, pages: int, device: torch.device, *, single_block: bool = False
    ) -> None:
        """Create `pages` pages of `size` bytes. Memory is allocated when they are used."""
        self.size, self.device, self.is_allocated = size, device, True
        self.grow(pages)

    def free(self) -> None:
        """Free the memory. `allocate` may be called again."""
        self._finish_copies()
        self.is_allocated = False
        self.here.free()
        self.home.free()
        # Whether the copy of each page in that memory is up to date.
        self._on_device = self._on_host = np.zeros(0, bool)

    def grow(self, pages: int) -> None:
        """Make room for `pages` pages."""
        if pages <= len(self):
            return
        if self.here.is_allocated:
            self.wait()
            self.here.grow(pages)
        # Last, because the lines above may fail, and in one assignment.
        flags, added = (self._on_device, self._on_host), np.zeros(pages - len(self), bool)
        self._on_device, self._on_host = (np.concatenate([old, added]) for old in flags)

    # -- between the tiers -------------------------------------------------------------------

    def missing(self, pages: Ints) -> Ints:
        """Return the pages among `pages` that are only in host memory."""
        missing: Ints = pages[self._on_host[pages] & ~self._on_device[pages]]
        return missing

    def fetch(self, pages: Ints) -> None:
        """Start to copy missing pages among `pages`, ascending, to the device."""
        if not self.here.is_allocated:
            self.here.allocate(self.size, len(self), self.device)
        missing = self.missing(pages)
        if len(missing):
            self._copy_over(self.home, self.here, missing)
            self.budget.fetched += len(missing) * self.size
        self._on_device[pages] = True

    def store(self) -> None:
        """Start to copy pages that were written on the device to host memory."""
        if not self.home.is_allocated:
            self.home.allocate(self.size, len(self), _HOST, pinned=self.device.type == "cuda")
        self.home.grow(len(self))
        written = np.flatnonzero(self._on_device & ~self._on_host)
        if len(written):
            self._copy_over(self.here, self.home, written)
            self.budget.returned += len(written) * self.size
            self._on_host[written] = True

    def evict(self) -> None:
        """Copy written pages to host memory, and free the memory on the device."""
        if self.here.is_allocated:
            self.store()
            self.wait()
            self._on_device[:] = False
            self.here.free()

    def written(self, pages: Ints) -> None:
        """Record that these pages are written on the device."""
        self._on_device[pages] = True
        self._on_host[pages] = False

    def wait(self) -> None:
        """Make work that is started on the device from now on wait for the copies."""
        if self._copied is not None:
            torch.cuda.current_stream(self._copied.device).wait_event(self._copied)

    def _copy_over(self, source: Blocks, target: Blocks, pages: Ints) -> None:
        device, streams = self.here.tensors[0].device, self.budget.streams
        if device.type != "cuda":
            target.copy_from(source, pages, blocking=True)
            return
        # The copies run after earlier work on the device, and concurrently with later work.
        stream = streams.get(device) or streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_from(source, pages, blocking=False)
            self._copied = stream.record_event()

    def _finish_copies(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def _at_home(self) -> Blocks:
        """Return the pages in host memory after all copies to it have finished."""
        self.store()
        self._finish_copies()
        return self.home

    # -- the interface of `Blocks` -----------------------------------------------------------

    def take(self, pages: Ints | torch.Tensor) -> torch.Tensor:
        """Return copies of pages in host memory, `[n, bytes]`."""
        return self._at_home().take(pages)

    def put(self, pages: Ints | torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows to pages on the device if the layer is there, otherwise in host memory."""
        assert not isinstance(pages, torch.Tensor)
        if self.here.is_allocated:
            self.here.put(pages, rows)
            self.written(pages)
        else:
            self._at_home().put(pages, rows.to(_HOST))
            self._on_host[pages] = True

    def copy(self, sources: Ints, destinations: Ints) -> None:
        """Copy pages. No page may be both a source and a destination."""
        if self.here.is_allocated:
            self.fetch(np.unique(sources))
            self.wait()
            self.here.copy(sources, destinations)
            self.written(destinations)
        else:
            self._at_home().copy(sources, destinations)
            self._on_host[destinations] = self._on_host[sources]

    def keep(self, pages: Ints) -> None:
        """Keep only `pages`, ascending, and renumber them from 0, as `Blocks.keep`."""
        self.evict()
        self._at_home().keep(pages)
        self._on_host, self._on_device = np.ones(len(pages), bool), np.zeros(len(pages), bool)

    def move(self, device: torch.device) -> None:
        """Copy all pages to host memory, for any `device`. They return when the layer computes."""
        self.evict()
        home = self._at_home()
        if self.device.type == "cuda":
            home.pin()
