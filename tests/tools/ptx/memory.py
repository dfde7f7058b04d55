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

    def load(self, places: Ints, size: int, count: int, programs: Ints) -> Array:
        """Return `[n, count]` values of `size` bytes from the addresses `[n]`."""
        self._check(places, size * count)
        self._loads.setdefault(size * count, []).append(programs << 48 | places)
        self._kept += len(places)
        if self._kept > 1 << 20:
            self._loads = {n: [np.unique(np.concatenate(x))] for n, x in self._loads.items()}
            self._kept = 0
        return self._views[size][self._index(places, size, count)]

    def store(self, places: Ints, values: Array, programs: Ints) -> None:
        """Store `[n, count]` values at the addresses `[n]`."""
        count, size = values.shape[1], values.itemsize
        self._check(places, size * count)
        self._views[size][self._index(places, size, count)] = values
        keys = (programs << 48 | places)[:, None] + np.arange(size * count)
        self._stores.append(keys.reshape(-1))

    def check_order(self) -> None:
        """Raise Fault if loads or stores depend on the order of programs."""
        if not self._stores:
            return
        keys = np.unique(np.concatenate(self._stores))
        places, programs = keys & (1 << 48) - 1, keys >> 48
        order = np.argsort(places, kind="stable")
        places, programs = places[order], programs[order]
        if (places[1:] == places[:-1]).any():
            raise Fault("two programs store the same byte")
        for size, loads in self._loads.items():
            keys = np.unique(np.concatenate(loads))
            begin, reader = keys & (1 << 48) - 1, keys >> 48
            first = np.searchsorted(places, begin)
            last = np.searchsorted(places, begin + size) - 1
            met = last >= first
            for i in (first[met], last[met]):
                if (programs[i] != reader[met]).any():
                    raise Fault("a program loads a byte that another program stores")

    def _index(self, places: Ints, size: int, count: int) -> Ints:
        return ((places - _FIRST) // size)[:, None] + np.arange(count)

    def _check(self, places: Ints, size: int) -> None:
        at = np.searchsorted(self._firsts, places, side="right") - 1
        outside = places + size > self._ends[at]
        if outside.any():
            raise Fault(f"{outside.sum()} of {len(places)} threads: outside of all tensors")
        if (places & size - 1).any():
            raise Fault(f"an address is not a multiple of {size} bytes")


# States of a place in shared memory since the last barrier, for stores and for loads. A number from
# 1 on is a thread. `_MET` and above is a warp whose threads have synchronized since, `_SEVERAL` and
# above a warp whose threads have not, and `_PRODUCT` a product that runs asynchronously. With a
# negative state the place is undefined.
_CLEAN, _NEVER, _COPIED = 0, -1, -2
_MET, _SEVERAL, _MANY, _PRODUCT = 1 << 16, 1 << 17, 1 << 20, 1 << 21


def _differ(x: Array, y: Array) -> bool:
    """Return whether bits differ, or for float32 values whether they differ by more than rounding.

    If a product is fused with the first sum of a butterfly, threads round the total differently.
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

    def load(self, lanes: Ints, places: Ints, size: int, count: int) -> Array:
        """Return `[n, count]` values of `size` bytes for the threads `lanes`, `[n]`."""
        at, me, warp = self._locate(lanes, places, size * count)
        writer, reader = self.writer.reshape(-1), self.reader.reshape(-1)
        self._check_numbers(writer[at], me, warp)
        before = reader[at]
        several = warp - _MET + _SEVERAL
        warp_before = np.where(before < _MET, _SEVERAL + (before - 1) // 32, before)
        new = np.where(warp_before == several, several, _MANY)
        new = np.where((before == _CLEAN) | (before == me) | (before == warp), me, new)
        reader[at] = new
        lost = reader[at] != new
        if lost.any():  # threads load the same place
            reader[at[lost]] = _COPIED
            alike = reader[at] == _COPIED
            several = np.broadcast_to(several, at.shape)[alike]
            reader[at[alike]] = several
            reader[at[alike][reader[at[alike]] != several]] = _MANY
            reader[at[new == _MANY]] = _MANY
        return self._view(size)[self._index(lanes, places, size, count)]

    def store(self, lanes: Ints, places: Ints, values: Array) -> None:
        """Store `[n, count]` values of the threads `lanes`, `[n]`."""
        count, size = values.shape[1], values.itemsize
        at, me, warp = self._locate(lanes, places, size * count)
        self._check_free(at, me, warp)
        view, index = self._view(size), self._index(lanes, places, size, count)
        writer = self.writer.reshape(-1)
        before = writer[at]
        foreign = (before > 0) & (before != me) & (before != warp)
        if foreign.any() and _differ(view[index], values):
            raise Fault("a thread stores where another thread stored, without a barrier between")
        view[index] = values
        if _differ(view[index], values):
            raise Fault("two threads store different values in one place")
        writer[at] = me
        self.hidden.reshape(-1)[at] = True

    def begin_copy(self, lanes: Ints, places: Ints, size: int) -> None:
        """Block the destinations of asynchronous copies for all threads until the copies arrive."""
        at, me, warp = self._locate(lanes, places, size)
        self._check_free(at, me, warp)
        writer = self.writer.reshape(-1)
        before = writer[at]
        if ((before > 0) & (before != me) & (before != warp)).any():
            raise Fault("a copy over the store of a different thread, without a barrier between")
        writer[at] = _COPIED

    def end_copy(self, lanes: Ints, places: Ints, values: Array) -> None:
        """Store the values of asynchronous copies, and unblock their destinations."""
        at, me, _ = self._locate(lanes, places, values.shape[1])
        self._view(1)[self._index(lanes, places, 1, values.shape[1])] = values
        self.writer.reshape(-1)[at] = me
        self.hidden.reshape(-1)[at] = True

    def show(self, programs: Array) -> None:
        """Make the stores of some programs visible to their asynchronous products."""
        self.hidden[programs] = False

    def begin_product(self, program: Ints, places: Ints, size: int) -> tuple[Array, Ints]:
        """Return values of `size` bytes that a product reads until its wait, and their places.

        `program` and `places` are arrays of one shape.
        """
        if (places + size > self.size).any():
            raise Fault("a product reads outside of shared memory")
        at = (program * self.size + places) // self.grain
        if (self.writer.reshape(-1)[at] != _CLEAN).any():
            raise Fault("a product reads a store, without a barrier between")
        if self.hidden.reshape(-1)[at].any():
            raise Fault("a product reads a store, without a fence between")
        at = np.unique(at)
        self.reader.reshape(-1)[at] = _PRODUCT
        return self._view(size)[(program * self.size + places) // size], at

    def end_products(self, done: list[Ints], left: list[Ints]) -> None:
        """Allow stores to the places that products read, after a barrier."""
        reader = self.reader.reshape(-1)
        for state, of_products in ((_MANY, done), (_PRODUCT, left)):
            for at in of_products:
                reader[at] = state

    def meet(self, programs: Any) -> None:
        """Synchronize all threads of some programs."""
        self.writer[programs] = np.minimum(self.writer[programs], _CLEAN)
        reader = self.reader[programs]
        self.reader[programs] = np.where(reader == _PRODUCT, reader, 0)

    def meet_in_warps(self, lanes: Ints) -> None:
        """Synchronize all threads of some warps."""
        for warp in np.unique(lanes // 32):
            program, first = divmod(int(warp) * 32, self.threads)
            for who in (self.writer[program], self.reader[program]):
                inside = (who > first) & (who <= first + 32) | (who == _SEVERAL + first // 32)
                who[inside] = _MET + first // 32

    def keep(self, programs: Array) -> None:
        """Keep some programs, and remove all others."""
        self.bytes, self.writer, self.reader, self.hidden = (
            x[programs] for x in (self.bytes, self.writer, self.reader, self.hidden)
        )

    def _locate(self, lanes: Ints, places: Ints, size: int) -> tuple[Ints, Array, Array]:
        """Return the grains `[n, size / grain]`, and the states for a thread and for its warp."""
        if (places & size - 1).any():
            raise Fault(f"an address in shared memory is not a multiple of {size} bytes")
        if (places + size > self.size).any() or (places < 0).any():
            raise Fault("an address is outside of shared memory")
        program, thread = np.divmod(lanes, self.threads)
        first = (program * self.size + places) // self.grain
        at = first[:, None] + np.arange(size // self.grain)
        return at, (thread + 1)[:, None], (_MET + thread // 32)[:, None]

    def _check_numbers(self, writer: Array, me: Array, warp: Array) -> None:
        if ((writer != _CLEAN) & (writer != me) & (writer != warp)).any():
            if (writer == _COPIED).any():
                raise Fault("a load before an asynchronous copy arrives")
            if (writer == _NEVER).any():
                raise Fault("a load of shared memory that no thread stored")
            raise Fault("a load of the store of a different thread, without a barrier between")

    def _check_free(self, at: Ints, me: Array, warp: Array) -> None:
        reader = self.reader.reshape(-1)[at]
        if ((reader != 0) & (reader != me) & (reader != warp)).any():
            raise Fault("a store to a place that another thread loaded, without a barrier between")
        if (self.writer.reshape(-1)[at] == _COPIED).any():
            raise Fault("a store to the destination of an asynchronous copy")

    def _index(self, lanes: Ints, places: Ints, size: int, count: int) -> Ints:
        first = (lanes // self.threads * self.size + places) // size
        return first[:, None] + np.arange(count)

    def _view(self, size: int) -> Array:
        return self.bytes.reshape(-1).view(f"u{size}")
