"""The global and shared memory of a launch, which check every access before it is made.

Global memory is the memory of the process. An access must lie in a tensor of the launch, and the
order in which programs run must not matter. No kernel has fences or atomics, so no program may
store or load a byte that a different program stores.

Shared memory is undefined before a store, and a thread may load the stores of other threads only
after a barrier. Asynchronous copies arrive at their wait. Until then no thread may access their
destinations.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
_FIRST = 1 << 12


class Fault(AssertionError):
    """A kernel does something whose behavior is undefined on a GPU."""


class _Everything:
    """All memory of the process, as an array for numpy."""

    def __init__(self, size: int) -> None:
        self.__array_interface__ = {
            "data": (_FIRST, False), "shape": (((1 << 47) - _FIRST) // size,),
            "typestr": np.dtype(f"u{size}").str, "version": 3,
        }  # fmt: skip


class GlobalMemory:
    """The tensors of a launch, and the programs that loaded and stored their bytes."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        spans = []
        for x in tensors:
            if x.numel():
                last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
                spans.append((x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()))
        merged: list[tuple[int, int]] = []
        for first, end in sorted(spans):
            if merged and first <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((first, end))
        self._firsts = np.array([0, *(first for first, _ in merged)])
        self._ends = np.array([0, *(end for _, end in merged)])
        self._views = {n: np.asarray(_Everything(n)) for n in (1, 2, 4, 8)}
        self._loads: dict[int, list[Ints]] = {}
        self._stores: list[Ints] = []
        self._kept = 0

    def load(self, addresses: Ints, size: int, count: int, programs: Ints) -> Array:
        """Return `[n, count]` values of `size` bytes from the addresses `[n]`."""
        self._check(addresses, size * count)
        self._loads.setdefault(size * count, []).append(programs << 48 | addresses)
        self._kept += len(addresses)
        if self._kept > 1 << 20:
            self._loads = {n: [np.unique(np.concatenate(x))] for n, x in self._loads.items()}
            self._kept = 0
        return self._views[size][self._index(addresses, size, count)]

    def store(self, addresses: Ints, values: Array, programs: Ints) -> None:
        """Store `[n, count]` values at the addresses `[n]`."""
        count, size = values.shape[1], values.itemsize
        self._check(addresses, size * count)
        self._views[size][self._index(addresses, size, count)] = values
        keys = (programs << 48 | addresses)[:, None] + np.arange(size * count)
        self._stores.append(keys.reshape(-1))

    def check_order(self) -> None:
        """Raise Fault if loads or stores depend on the order of programs."""
        if not self._stores:
            return
        keys = np.unique(np.concatenate(self._stores))
        addresses, programs = keys & (1 << 48) - 1, keys >> 48
        order = np.argsort(addresses, kind="stable")
        addresses, programs = addresses[order], programs[order]
        if (addresses[1:] == addresses[:-1]).any():
            raise Fault("two programs store the same byte")
        for size, loads in self._loads.items():
            keys = np.unique(np.concatenate(loads))
            begin, reader = keys & (1 << 48) - 1, keys >> 48
            first = np.searchsorted(addresses, begin)
            last = np.searchsorted(addresses, begin + size) - 1
            is_shared = last >= first
            for i in (first[is_shared], last[is_shared]):
                if (programs[i] != reader[is_shared]).any():
                    raise Fault("a program loads a byte that another program stores")

    def _index(self, addresses: Ints, size: int, count: int) -> Ints:
        return ((addresses - _FIRST) // size)[:, None] + np.arange(count)

    def _check(self, addresses: Ints, size: int) -> None:
        grains = np.searchsorted(self._firsts, addresses, side="right") - 1
        outside = addresses + size > self._ends[grains]
        if outside.any():
            raise Fault(f"{outside.sum()} of {len(addresses)} threads: outside of all tensors")
        if (addresses & size - 1).any():
            raise Fault(f"an address is not a multiple of {size} bytes")


# States of a grain of shared memory since the last barrier, for stores and for loads. A number from
# 1 on is a thread. `_SYNCED` and above is a warp whose threads have synchronized since, `_SEVERAL`
# and above a warp whose threads have not, and `_PRODUCT` a product that runs asynchronously. With a
# negative state the grain is undefined.
_CLEAN, _NEVER, _COPIED = 0, -1, -2
_SYNCED, _SEVERAL, _MANY, _PRODUCT = 1 << 16, 1 << 17, 1 << 20, 1 << 21


def _differ(x: Array, y: Array) -> bool:
    """Return whether bits differ, or for float32 values whether they differ by more than rounding.

    Threads round a total differently if a product is fused with the first sum of a butterfly.
    """
    unequal = x != y
    if x.itemsize == 4 and unequal.any():
        x, y = x.view(np.float32), y.view(np.float32)
        largest = np.abs(y[np.isfinite(y)]).max(initial=0)
        unequal &= ~(np.abs(x - y) <= 2.0**-16 * largest)
    return bool(unequal.any())


class SharedMemory:
    """Shared memory of programs that run together.

    Args:
        programs: Number of programs.
        threads: Threads of a program.
        size: Bytes of a program.
        grain: Bytes of the narrowest access.
    """

    def __init__(self, programs: int, threads: int, size: int, grain: int) -> None:
        self.size, self.grain, self.threads = -(-size // 16) * 16, grain, threads
        self.bytes = np.zeros((programs, self.size), np.uint8)
        self.writer = np.full((programs, self.size // grain), _NEVER, np.int32)
        self.reader = np.zeros_like(self.writer)
        # Whether stores are not yet visible to products that run asynchronously.
        self.hidden = np.zeros(self.writer.shape, bool)

    def load(self, lanes: Ints, addresses: Ints, size: int, count: int) -> Array:
        """Return `[n, count]` values of `size` bytes for the threads `lanes`, `[n]`."""
        grains, own, warp = self._locate(lanes, addresses, size * count)
        writer, reader = self.writer.reshape(-1), self.reader.reshape(-1)
        self._check_readable(writer[grains], own, warp)
        before = reader[grains]
        several = warp - _SYNCED + _SEVERAL
        warp_before = np.where(before < _SYNCED, _SEVERAL + (before - 1) // 32, before)
        new = np.where(warp_before == several, several, _MANY)
        new = np.where((before == _CLEAN) | (before == own) | (before == warp), own, new)
        reader[grains] = new
        lost = reader[grains] != new
        if lost.any():  # threads load the same place
            reader[grains[lost]] = _COPIED
            is_lost = reader[grains] == _COPIED
            several = np.broadcast_to(several, grains.shape)[is_lost]
            reader[grains[is_lost]] = several
            reader[grains[is_lost][reader[grains[is_lost]] != several]] = _MANY
            reader[grains[new == _MANY]] = _MANY
        return self._view(size)[self._index(lanes, addresses, size, count)]

    def store(self, lanes: Ints, addresses: Ints, values: Array) -> None:
        """Store `[n, count]` values of the threads `lanes`, `[n]`."""
        count, size = values.shape[1], values.itemsize
        grains, own, warp = self._locate(lanes, addresses, size * count)
        self._check_writable(grains, own, warp)
        view, index = self._view(size), self._index(lanes, addresses, size, count)
        writer = self.writer.reshape(-1)
        before = writer[grains]
        is_foreign = (before > 0) & (before != own) & (before != warp)
        if is_foreign.any() and _differ(view[index], values):
            raise Fault("a thread stores where another thread stored, without a barrier between")
        view[index] = values
        if _differ(view[index], values):
            raise Fault("two threads store different values in one place")
        writer[grains] = own
        self.hidden.reshape(-1)[grains] = True

    def begin_copy(self, lanes: Ints, addresses: Ints, size: int) -> None:
        """Block the destinations of asynchronous copies for all threads until the copies arrive."""
        grains, own, warp = self._locate(lanes, addresses, size)
        self._check_writable(grains, own, warp)
        writer = self.writer.reshape(-1)
        before = writer[grains]
        if ((before > 0) & (before != own) & (before != warp)).any():
            raise Fault("a copy over the store of a different thread, without a barrier between")
        writer[grains] = _COPIED

    def end_copy(self, lanes: Ints, addresses: Ints, values: Array) -> None:
        """Store the values of asynchronous copies, and unblock their destinations."""
        grains, own, _ = self._locate(lanes, addresses, values.shape[1])
        self._view(1)[self._index(lanes, addresses, 1, values.shape[1])] = values
        self.writer.reshape(-1)[grains] = own
        self.hidden.reshape(-1)[grains] = True

    def make_visible(self, programs: Array) -> None:
        """Make the stores of some programs visible to their asynchronous products."""
        self.hidden[programs] = False

    def begin_product(self, program: Ints, addresses: Ints, size: int) -> tuple[Array, Ints]:
        """Return values of `size` bytes that a product reads until its wait, and their grains.

        `program` and `addresses` have the same shape.
        """
        if (addresses + size > self.size).any():
            raise Fault("a product reads outside of shared memory")
        grains = (program * self.size + addresses) // self.grain
        if (self.writer.reshape(-1)[grains] != _CLEAN).any():
            raise Fault("a product reads a store, without a barrier between")
        if self.hidden.reshape(-1)[grains].any():
            raise Fault("a product reads a store, without a fence between")
        grains = np.unique(grains)
        self.reader.reshape(-1)[grains] = _PRODUCT
        return self._view(size)[(program * self.size + addresses) // size], grains

    def end_products(self, done: list[Ints], left: list[Ints]) -> None:
        """Allow stores to the grains that products read, after a barrier."""
        reader = self.reader.reshape(-1)
        for state, products in ((_MANY, done), (_PRODUCT, left)):
            for grains in products:
                reader[grains] = state

    def synchronize(self, programs: Any) -> None:
        """Synchronize all threads of some programs."""
        self.writer[programs] = np.minimum(self.writer[programs], _CLEAN)
        reader = self.reader[programs]
        self.reader[programs] = np.where(reader == _PRODUCT, reader, 0)

    def synchronize_warps(self, lanes: Ints) -> None:
        """Synchronize all threads of some warps."""
        for warp in np.unique(lanes // 32):
            program, first = divmod(int(warp) * 32, self.threads)
            for user in (self.writer[program], self.reader[program]):
                inside = (user > first) & (user <= first + 32) | (user == _SEVERAL + first // 32)
                user[inside] = _SYNCED + first // 32

    def keep(self, programs: Array) -> None:
        """Keep some programs, and remove all others."""
        self.bytes, self.writer, self.reader, self.hidden = (
            x[programs] for x in (self.bytes, self.writer, self.reader, self.hidden)
        )

    def _locate(self, lanes: Ints, addresses: Ints, size: int) -> tuple[Ints, Array, Array]:
        """Return the grains `[n, size / grain]`, and the states for a thread and for its warp."""
        if (addresses & size - 1).any():
            raise Fault(f"an address in shared memory is not a multiple of {size} bytes")
        if (addresses + size > self.size).any() or (addresses < 0).any():
            raise Fault("an address is outside of shared memory")
        program, thread = np.divmod(lanes, self.threads)
        first = (program * self.size + addresses) // self.grain
        grains = first[:, None] + np.arange(size // self.grain)
        return grains, (thread + 1)[:, None], (_SYNCED + thread // 32)[:, None]

    def _check_readable(self, writer: Array, own: Array, warp: Array) -> None:
        if ((writer != _CLEAN) & (writer != own) & (writer != warp)).any():
            if (writer == _COPIED).any():
                raise Fault("a load before an asynchronous copy arrives")
            if (writer == _NEVER).any():
                raise Fault("a load of shared memory that no thread stored")
            raise Fault("a load of the store of a different thread, without a barrier between")

    def _check_writable(self, grains: Ints, own: Array, warp: Array) -> None:
        reader = self.reader.reshape(-1)[grains]
        if ((reader != 0) & (reader != own) & (reader != warp)).any():
            raise Fault("a store to a place that another thread loaded, without a barrier between")
        if (self.writer.reshape(-1)[grains] == _COPIED).any():
            raise Fault("a store to the destination of an asynchronous copy")

    def _index(self, lanes: Ints, addresses: Ints, size: int, count: int) -> Ints:
        first = (lanes // self.threads * self.size + addresses) // size
        return first[:, None] + np.arange(count)

    def _view(self, size: int) -> Array:
        return self.bytes.reshape(-1).view(f"u{size}")
