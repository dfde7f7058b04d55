"""Offloading: pages of layers that are not computing lie in host memory.

A layer's pages have their home there. They are brought to the device for the layer's call, the next
layer's while this one computes, and only those that a call has written go back. On a CPU both are
ordinary memory, and the copies are the same.
"""

import weakref

import numpy as np
import torch

from ..ops.blocks import Ints as Numbers
from .blocks import Blocks
from .page_allocator import PageBudget

_HOST = torch.device("cpu")


class OffloadBudget(PageBudget):
    """A budget of pages of which only some lie on the device; shared by a cache and its forks.

    Attributes:
        max_device_pages: how many pages of every layer the device has room for; None: those of
            two layers, the one that computes and the next one.
        layers: the pages of each layer, of a cache and its forks.
        streams: of the copies, for each device.
    """

    def __init__(
        self, page_size: int, max_pages: int | None = None, max_device_pages: int | None = None
    ) -> None:
        super().__init__(page_size, max_pages)
        self.max_device_pages = max_device_pages
        self.layers: weakref.WeakSet[Tiers] = weakref.WeakSet()
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self._uses = 0

    def use(self, layer: "Tiers", pages: Numbers, following: "Tiers", its_pages: Numbers) -> None:
        """Bring `pages` of a layer to the device, and start to bring those of the following one.

        Layers compute in a circle, so what leaves first is what is needed last, which is the layer
        that has just computed. (The least recently used one is that which comes next: with room
        for all layers but one, every layer would move at every step.)
        """
        self._uses += 1
        layer.used_at = self._uses
        self._make_room(layer, layer)
        if self.max_device_pages is None:
            for other in self._here():
                if other is not layer:
                    other.store()  # it leaves soon, and the copies pass while this one computes
        layer.fetch(pages)
        layer.wait()
        # Whoever computes is on the device in any case, what comes next only where both fit.
        if len(following.missing(its_pages)) and self._fits({layer, following}):
            self._make_room(layer, following)
            following.fetch(its_pages)

    def _here(self) -> "set[Tiers]":
        """Return the layers that have memory on the device."""
        return {layer for layer in self.layers if layer.here.is_allocated}

    def _make_room(self, current: "Tiers", wanted: "Tiers") -> None:
        """Send pages of other layers to the host until those of `wanted` fit."""
        size = max(layer.index for layer in self.layers) + 1
        others = list(self._here() - {current, wanted})
        others.sort(key=lambda x: ((x.index - current.index) % size or size, -x.used_at))
        while others and not self._fits(self._here() | {wanted}):
            others.pop().evict()

    def _fits(self, layers: "set[Tiers]") -> bool:
        if self.max_device_pages is None:
            return len(layers) <= 2
        count = len({layer.index for layer in self.layers})
        return sum(map(len, layers)) <= self.max_device_pages * count


class Tiers:
    """One layer's pages in host memory, and those of them that are on the device.

    They stand in the place of the `Blocks` of a pool, and do the same, wherever the pages are.

    Attributes:
        index: the layer's number in the model.
        here: the pages on the device; not allocated while the layer is away.
        home: the pages in host memory; not allocated before any is stored there.
        is_allocated: whether there are pages, which may be 0.
        used_at: when the layer last computed, in calls of `OffloadBudget.use`.
    """

    size: int
    device: torch.device

    def __init__(self, budget: OffloadBudget, index: int) -> None:
        self.budget, self.index, self.used_at = budget, index, 0
        self.here, self.home = Blocks(), Blocks()
        # The last copy of these pages, in either direction, if it may still be under way.
        self._copied: torch.cuda.Event | None = None
        self.free()
        budget.layers.add(self)

    def __len__(self) -> int:
        return len(self._on_device)

    def allocate(
        self, size: int, pages: int, device: torch.device, *, in_one: bool = False
    ) -> None:
        """Have `pages` pages of `size` bytes; memory for them is taken when they are used."""
        self.size, self.device, self.is_allocated = size, device, True
        self.grow(pages)

    def free(self) -> None:
        """Free the bytes; `allocate` brings new ones."""
        self._finish_copies()
        self.is_allocated = False
        self.here.free()
        self.home.free()
        # Whether the copy of each page there holds the last write.
        self._on_device = self._on_host = np.zeros(0, bool)

    def grow(self, pages: int) -> None:
        """Make room for `pages` pages; the content stays."""
        if pages <= len(self):
            return
        if self.here.is_allocated:
            self.wait()
            self.here.grow(pages)
        # Last, since the lines above may fail, and at once.
        flags, more = (self._on_device, self._on_host), np.zeros(pages - len(self), bool)
        self._on_device, self._on_host = (np.concatenate([old, more]) for old in flags)

    # -- between the tiers -------------------------------------------------------------------

    def missing(self, pages: Numbers) -> Numbers:
        """Return those of `pages` that are in host memory alone."""
        missing: Numbers = pages[self._on_host[pages] & ~self._on_device[pages]]
        return missing

    def fetch(self, pages: Numbers) -> None:
        """Start to bring those of `pages` (ascending) to the device that are not there."""
        if not self.here.is_allocated:
            self.here.allocate(self.size, len(self), self.device)
        missing = self.missing(pages)
        if len(missing):
            self._copy_over(self.home, self.here, missing)
            self.budget.fetched += len(missing) * self.size
        self._on_device[pages] = True

    def store(self) -> None:
        """Start to bring home what was written on the device."""
        if not self.home.is_allocated:
            self.home.allocate(self.size, len(self), _HOST, pinned=self.device.type == "cuda")
        self.home.grow(len(self))
        written = np.flatnonzero(self._on_device & ~self._on_host)
        if len(written):
            self._copy_over(self.here, self.home, written)
            self.budget.returned += len(written) * self.size
            self._on_host[written] = True

    def evict(self) -> None:
        """Bring home what was written, and free the memory on the device."""
        if self.here.is_allocated:
            self.store()
            self.wait()
            self._on_device[:] = False
            self.here.free()

    def written(self, pages: Numbers) -> None:
        """Note that these pages are written on the device, where they are."""
        self._on_device[pages] = True
        self._on_host[pages] = False

    def wait(self) -> None:
        """Have what is started on the device from now on wait for the copies."""
        if self._copied is not None:
            torch.cuda.current_stream(self._copied.device).wait_event(self._copied)

    def _copy_over(self, source: Blocks, target: Blocks, pages: Numbers) -> None:
        device, streams = self.here.tensors[0].device, self.budget.streams
        if device.type != "cuda":
            target.receive(source, pages, waits=True)
            return
        # After all that was started on the device, next to what will be.
        stream = streams.get(device) or streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.receive(source, pages, waits=False)
            self._copied = stream.record_event()

    def _finish_copies(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def _at_home(self) -> Blocks:
        """Return the pages in host memory, with what was written, once they may be touched."""
        self.store()
        self._finish_copies()
        return self.home

    # -- what blocks do ----------------------------------------------------------------------

    def take(self, pages: Numbers | torch.Tensor) -> torch.Tensor:
        """Return copies of pages in host memory, `[n, bytes]`."""
        return self._at_home().take(pages)

    def put(self, pages: Numbers | torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows to pages where they are."""
        assert not isinstance(pages, torch.Tensor)
        if self.here.is_allocated:
            self.here.put(pages, rows)
            self.written(pages)
        else:
            self._at_home().put(pages, rows.to(_HOST))
            self._on_host[pages] = True

    def copy(self, sources: Numbers, destinations: Numbers) -> None:
        """Copy pages where they are; none is both a source and a destination."""
        if self.here.is_allocated:
            self.fetch(np.unique(sources))
            self.wait()
            self.here.copy(sources, destinations)
            self.written(destinations)
        else:
            self._at_home().copy(sources, destinations)
            self._on_host[destinations] = self._on_host[sources]

    def keep(self, pages: Numbers) -> None:
        """Keep only `pages`, ascending, as pages 0, 1, ...; those that do not exist are zero."""
        self.evict()
        self._at_home().keep(pages)
        self._on_host, self._on_device = np.ones(len(pages), bool), np.zeros(len(pages), bool)

    def move(self, device: torch.device) -> None:
        """Bring all pages home, whatever `device`: they come back when the layer computes."""
        self.evict()
        home = self._at_home()
        if self.device.type == "cuda":
            home.pin()
