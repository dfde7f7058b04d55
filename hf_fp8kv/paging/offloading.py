"""Keep the pages of layers in host memory, and copy them to the device when a layer runs.

Host memory has a copy of each page. A layer's pages are fetched to the device for its call, and the
next layer's pages are fetched while this layer computes. Only pages that a call has written are
copied back. If the device is the CPU, both copies are in ordinary memory.
"""

import weakref

import numpy as np
import torch

from ..ops.blocks import IntArray
from .memory_blocks import Blocks
from .page_allocator import PageBudget

_HOST = torch.device("cpu")


class OffloadBudget(PageBudget):
    """A budget for offloaded pages, shared by a cache and its forks.

    Attributes:
        max_device_pages: Maximum number of pages per layer on the device. None means all pages of
            two layers: the layer that computes and the next layer.
        layers: The blocks of every layer of a cache and its forks.
        streams: CUDA stream for the copies, by device.
    """

    def __init__(
        self, page_size: int, max_pages: int | None = None, max_device_pages: int | None = None
    ) -> None:
        super().__init__(page_size, max_pages)
        self.max_device_pages = max_device_pages
        self.layers: weakref.WeakSet[OffloadedLayer] = weakref.WeakSet()
        self.streams: dict[torch.device, torch.cuda.Stream] = {}

    def get_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the stream for the copies of a device. None means that the host copies."""
        if device.type != "cuda":
            return None
        return self.streams.get(device) or self.streams.setdefault(
            device, torch.cuda.Stream(device)
        )

    def fetch_layers(
        self,
        layer: "OffloadedLayer",
        pages: IntArray,
        next_layer: "OffloadedLayer",
        next_pages: IntArray,
    ) -> None:
        """Fetch `pages` of a layer to the device, and start to fetch pages of the next layer.

        Layers compute in a fixed cyclic order, so the layer that has just computed is needed last
        and is evicted first. (The least recently used layer is needed next. If the device had room
        for all layers except one, evicting that layer would move every layer in every step.)
        """
        self._evict_until_fit(layer, layer)
        if self.max_device_pages is None:
            for other_layer in self._find_resident_layers() - {layer}:
                other_layer.write_back()  # it is evicted soon, so copy while this layer computes
        layer.fetch(pages)
        layer.wait()
        # The computing layer is always on the device. The next layer is fetched only if both fit.
        if len(next_layer.find_missing(next_pages)) and self._can_hold({layer, next_layer}):
            self._evict_until_fit(layer, next_layer)
            next_layer.fetch(next_pages)

    def _find_resident_layers(self) -> "set[OffloadedLayer]":
        return {layer for layer in self.layers if layer.device_blocks.is_allocated}

    def _evict_until_fit(self, current: "OffloadedLayer", incoming: "OffloadedLayer") -> None:
        """Evict other layers until the pages of `incoming` fit."""
        num_layers = max(layer.index for layer in self.layers) + 1
        candidates = self._find_resident_layers() - {current, incoming}
        sorted_candidates = sorted(
            candidates, key=lambda layer: (layer.index - current.index - 1) % num_layers
        )
        while sorted_candidates and not self._can_hold(self._find_resident_layers() | {incoming}):
            sorted_candidates.pop().evict()

    def _can_hold(self, layers: "set[OffloadedLayer]") -> bool:
        if self.max_device_pages is None:
            return len(layers) <= 2
        num_layers = len({layer.index for layer in self.layers})
        return sum(map(len, layers)) <= self.max_device_pages * num_layers


class OffloadedLayer:
    """The pages of one layer in host memory, and copies of some pages on the device.

    In a pool, this class replaces `Blocks`, whose interface it has.

    A copy waits for all earlier work of the current stream (`_start_copy`). The current stream
    waits for the copies before it uses or frees pages on the device (`wait`), and the host before
    it uses pages in host memory (`_finish_copies`). torch keeps pinned memory until its copies end.

    Attributes:
        index: Index of the layer in the model.
        device_blocks: Pages on the device. Allocated only while the device holds pages.
        host_blocks: Pages in host memory. Allocated when the first page is copied to the host.
        is_allocated: Whether `allocate` was called, possibly with 0 pages.
    """

    page_bytes: int
    device: torch.device

    def __init__(self, budget: OffloadBudget, index: int) -> None:
        self.budget = budget
        self.index = index
        self.device_blocks = Blocks()
        self.host_blocks = Blocks()
        # Event after the last copy of these pages, in either direction, if it may be running.
        self._copy_event: torch.cuda.Event | None = None
        self.free()
        budget.layers.add(self)

    def __del__(self) -> None:
        # A copy may be in progress, and the layer may compute on another stream than this
        # thread. torch must not allocate this memory again before the copy ends.
        if self._copy_event is not None:
            for block in self.device_blocks.tensors:
                stream = self.budget.get_stream(block.device)
                assert stream is not None
                block.record_stream(stream)

    def __len__(self) -> int:
        return len(self._on_device)

    def allocate(
        self,
        page_bytes: int,
        num_pages: int,
        device: torch.device,
        *,
        is_single_block: bool = False,
    ) -> None:
        """Create `num_pages` pages of `page_bytes` bytes. Memory is allocated at first use."""
        self.page_bytes = page_bytes
        self.device = device
        self.is_allocated = True
        self.grow(num_pages)

    def free(self) -> None:
        """Free the memory. `allocate` may be called again."""
        self._finish_copies()
        self.is_allocated = False
        self.device_blocks.free()
        self.host_blocks.free()
        # Whether the device, or host memory, has an up-to-date copy of each page.
        self._on_device = self._on_host = np.zeros(0, bool)

    def grow(self, num_pages: int) -> None:
        """Make room for `num_pages` pages."""
        if (num_added := num_pages - len(self)) <= 0:
            return
        if self.device_blocks.is_allocated:
            self.device_blocks.grow(num_pages)  # moves no page
        # Growing may fail, so flags are added last, in one assignment that no interrupt separates.
        old_flags = (self._on_device, self._on_host)
        self._on_device, self._on_host = (np.pad(flags, (0, num_added)) for flags in old_flags)

    # -- copies between the device and the host ----------------------------------------------

    def find_missing(self, pages: IntArray) -> IntArray:
        """Return the pages among `pages` that are only in host memory."""
        return pages[self._on_host[pages] & ~self._on_device[pages]]  # type: ignore[no-any-return]

    def fetch(self, pages: IntArray) -> None:
        """Start to copy missing pages among `pages`, ascending, from the host to the device."""
        if not self.device_blocks.is_allocated:
            self.device_blocks.allocate(self.page_bytes, len(self), self.device)
        missing_pages = self.find_missing(pages)
        if len(missing_pages):
            self._start_copy(self.host_blocks, self.device_blocks, missing_pages)
            self.budget.fetched_bytes += len(missing_pages) * self.page_bytes
        self._on_device[pages] = True

    def write_back(self) -> None:
        """Start to copy the pages that were written on the device to host memory."""
        if not self.host_blocks.is_allocated:
            self.host_blocks.allocate(
                self.page_bytes, len(self), _HOST, is_pinned=self.device.type == "cuda"
            )
        self.host_blocks.grow(len(self))
        written_pages = np.flatnonzero(self._on_device & ~self._on_host)
        if len(written_pages):
            self._start_copy(self.device_blocks, self.host_blocks, written_pages)
            self.budget.returned_bytes += len(written_pages) * self.page_bytes
            self._on_host[written_pages] = True

    def evict(self) -> None:
        """Copy the written pages to host memory, and free the memory on the device."""
        if self.device_blocks.is_allocated:
            self.write_back()
            self.wait()
            self._on_device[:] = False
            self.device_blocks.free()

    def mark_written(self, pages: IntArray) -> None:
        """Record that `pages` are written on the device, so the copies on the host are outdated."""
        self._on_device[pages] = True
        self._on_host[pages] = False

    def wait(self) -> None:
        """Make later work on the device wait for the copies."""
        if self._copy_event is not None:
            torch.cuda.current_stream(self._copy_event.device).wait_event(self._copy_event)

    def _start_copy(self, source: Blocks, target: Blocks, pages: IntArray) -> None:
        device = self.device_blocks.tensors[0].device
        stream = self.budget.get_stream(device)
        if stream is None:
            target.copy_from(source, pages, blocking=True)
            return
        # The copies run after earlier work on the device, and concurrently with later work.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            try:
                target.copy_from(source, pages, blocking=False)
            finally:  # after an exception, some copies may be in progress
                self._copy_event = stream.record_event()

    def _finish_copies(self) -> None:
        if self._copy_event is not None:
            self._copy_event.synchronize()
            self._copy_event = None

    def _sync_host_blocks(self) -> Blocks:
        """Copy written pages to host memory, wait for all copies, and return `host_blocks`."""
        self.write_back()
        self._finish_copies()
        return self.host_blocks

    # -- the interface of `Blocks` -----------------------------------------------------------

    def take(self, pages: IntArray | torch.Tensor) -> torch.Tensor:
        """Return copies of pages in host memory, `[n, bytes]`."""
        return self._sync_host_blocks().take(pages)

    def put(self, pages: IntArray | torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows to pages on the device if the layer has pages there, otherwise on the host."""
        assert not isinstance(pages, torch.Tensor)
        if self.device_blocks.is_allocated:
            self.wait()
            self.device_blocks.put(pages, rows)
            self.mark_written(pages)
        else:
            self._sync_host_blocks().put(pages, rows.to(_HOST))
            self._on_host[pages] = True

    def copy(self, sources: IntArray, targets: IntArray) -> None:
        """Copy pages. No page may be both a source and a target."""
        if self.device_blocks.is_allocated:
            self.fetch(np.unique(sources))
            self.wait()
            self.device_blocks.copy(sources, targets)
            self.mark_written(targets)
        else:
            self._sync_host_blocks().copy(sources, targets)
            self._on_host[targets] = self._on_host[sources]

    def keep_pages(self, pages: IntArray) -> None:
        """Keep only `pages`, ascending, and renumber them from 0, like `Blocks.keep_pages`."""
        self.evict()
        self._sync_host_blocks().keep_pages(pages)
        # Set both in one assignment, so that no interrupt comes in between.
        self._on_host, self._on_device = np.ones(len(pages), bool), np.zeros(len(pages), bool)

    def move(self, device: torch.device) -> None:
        """Copy all pages to host memory, for any `device`. They are fetched for the next call."""
        self.evict()
        blocks = self._sync_host_blocks()
        if self.device.type == "cuda":
            blocks.pin()
