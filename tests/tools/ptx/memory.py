"""Models of global and shared memory, which check each access of a launch before it happens.

Global memory is the memory of the process. An access must lie in a tensor of the launch, and the
result must not depend on the order in which programs run. No kernel has fences or atomics, so no
program may store or load a byte that another program stores.

Shared memory is undefined before a store, and a thread may load the stores of other threads only
after a barrier. An asynchronous copy completes at its wait. Until then no thread may access its
destination.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
_FIRST_ADDRESS = 1 << 12


class Fault(AssertionError):
    """Raised if a kernel has undefined behavior on a GPU."""


class _ProcessMemory:
    """The memory of the process as an array of `size`-byte integers, for numpy."""

    def __init__(self, size: int) -> None:
        self.__array_interface__ = {
            "data": (_FIRST_ADDRESS, False), "shape": (((1 << 47) - _FIRST_ADDRESS) // size,),
            "typestr": np.dtype(f"u{size}").str, "version": 3,
        }  # fmt: skip


class GlobalMemory:
    """The tensors of a launch, and the programs that loaded and stored their bytes."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        spans = []
        for tensor in tensors:
            if tensor.numel():
                num_elements = 1 + sum(
                    (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
                )
                start = tensor.data_ptr()
                spans.append((start, start + num_elements * tensor.element_size()))
        self._starts, self._stops = np.array(spans).reshape(-1, 2).T[:, :, None]
        self._views = {n: np.asarray(_ProcessMemory(n)) for n in (1, 2, 4, 8)}
        self._loads: dict[int, list[Ints]] = {}  # program << 48 | address, by bytes of a load
        self._stores: list[Ints] = []
        self._num_loads = 0

    def load(self, addresses: Ints, size: int, count: int, programs: Ints) -> Array:
        """Return `[n, count]` values of `size` bytes from the addresses `[n]`."""
        self._check_access(addresses, size * count)
        self._loads.setdefault(size * count, []).append(programs << 48 | addresses)
        self._num_loads += len(addresses)
        if self._num_loads > 1 << 20:
            self._loads = {
                num_bytes: [np.unique(np.concatenate(keys))]
                for num_bytes, keys in self._loads.items()
            }
            self._num_loads = 0
        return self._views[size][self._find_indices(addresses, size, count)]

    def store(self, addresses: Ints, values: Array, programs: Ints) -> None:
        """Store `[n, count]` values at the addresses `[n]`."""
        count, size = values.shape[1], values.itemsize
        self._check_access(addresses, size * count)
        self._views[size][self._find_indices(addresses, size, count)] = values
        keys = (programs << 48 | addresses)[:, None] + np.arange(size * count)
        self._stores.append(keys.reshape(-1))

    def check_order(self) -> None:
        """Raise Fault if loads or stores depend on the order of programs."""
        if not self._stores:
            return
        store_keys = np.unique(np.concatenate(self._stores))
        addresses, programs = store_keys & (1 << 48) - 1, store_keys >> 48
        order = np.argsort(addresses, kind="stable")
        addresses, programs = addresses[order], programs[order]
        if (addresses[1:] == addresses[:-1]).any():
            raise Fault("two programs store the same byte")
        for size, loads in self._loads.items():
            load_keys = np.unique(np.concatenate(loads))
            load_starts, loading_programs = load_keys & (1 << 48) - 1, load_keys >> 48
            first_stores = np.searchsorted(addresses, load_starts)
            last_stores = np.searchsorted(addresses, load_starts + size) - 1
            has_stores = last_stores >= first_stores
            for stores in (first_stores[has_stores], last_stores[has_stores]):
                if (programs[stores] != loading_programs[has_stores]).any():
                    raise Fault("a program loads a byte that another program stores")

    def _find_indices(self, addresses: Ints, size: int, count: int) -> Ints:
        return ((addresses - _FIRST_ADDRESS) // size)[:, None] + np.arange(count)

    def _check_access(self, addresses: Ints, size: int) -> None:
        is_inside = (self._starts <= addresses) & (addresses + size <= self._stops)
        is_outside = ~is_inside.any(0)
        if is_outside.any():
            threads_text = f"{is_outside.sum()} of {len(addresses)} threads"
            raise Fault(f"{threads_text} access memory outside all tensors")
        if (addresses & size - 1).any():
            raise Fault(f"an address is not a multiple of {size} bytes")


# A grain is a unit of shared memory, as wide as the narrowest access. It has a state for stores (S)
# and a state for loads (L) since the last barrier. A state from 1 to `_SYNCED` is 1 + the index of
# a thread in its program. A grain is undefined if the state for stores is negative.
_CLEAN = 0  # S, L: no access
_UNSTORED = -1  # S: no thread has stored to the grain
_COPYING = -2  # S: an asynchronous copy to the grain has not completed
_SYNCED = 1 << 16  # S, L: + index of a warp that accessed the grain and then synchronized
_ONE_WARP = 1 << 17  # L: + index of a warp with several threads that loaded since a barrier
_SEVERAL_WARPS = 1 << 20  # L: threads of several warps, or a finished product
_PRODUCT = 1 << 21  # L: an asynchronous matrix product
_CONTESTED = -3  # L, only within `load`: the states of several threads overwrote each other


def _any_differ(x: Array, y: Array) -> bool:
    """Return whether any bits differ. 4-byte values, read as float32, may differ by rounding.

    In a butterfly reduction, threads round differently if a product is fused with the first sum.
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
        num_programs: Number of programs.
        threads_per_program: Number of threads of a program.
        size: Bytes of shared memory of a program.
        grain: Bytes of the narrowest access.
    """

    def __init__(self, num_programs: int, threads_per_program: int, size: int, grain: int) -> None:
        self.size = -(-size // 16) * 16
        self.grain = grain
        self.threads_per_program = threads_per_program
        self.bytes = np.zeros((num_programs, self.size), np.uint8)
        self.store_states = np.full((num_programs, self.size // grain), _UNSTORED, np.int32)
        self.load_states = np.zeros_like(self.store_states)
        # Whether the last store to a grain is hidden from asynchronous products until a fence.
        self.is_hidden = np.zeros(self.store_states.shape, bool)

    def load(self, threads: Ints, addresses: Ints, size: int, count: int) -> Array:
        """Return `[n, count]` values of `size` bytes for the threads `[n]`."""
        grains, thread_state, synced_state = self._locate(threads, addresses, size * count)
        store_states = self.store_states.reshape(-1)
        load_states = self.load_states.reshape(-1)
        self._check_readable(store_states[grains], thread_state, synced_state)
        old_states = load_states[grains]
        warp_state = synced_state - _SYNCED + _ONE_WARP
        old_warps = np.where(old_states < _SYNCED, _ONE_WARP + (old_states - 1) // 32, old_states)
        new_states = np.where(old_warps == warp_state, warp_state, _SEVERAL_WARPS)
        new_states = np.where(
            (old_states == _CLEAN) | (old_states == thread_state) | (old_states == synced_state),
            thread_state,
            new_states,
        )
        load_states[grains] = new_states
        was_overwritten = load_states[grains] != new_states
        if was_overwritten.any():  # several threads load the same grain
            load_states[grains[was_overwritten]] = _CONTESTED
            is_contested = load_states[grains] == _CONTESTED
            warp_state = np.broadcast_to(warp_state, grains.shape)[is_contested]
            contested = grains[is_contested]
            load_states[contested] = warp_state
            load_states[contested[load_states[contested] != warp_state]] = _SEVERAL_WARPS
            load_states[grains[new_states == _SEVERAL_WARPS]] = _SEVERAL_WARPS
        return self._view_as(size)[self._find_indices(threads, addresses, size, count)]

    def store(self, threads: Ints, addresses: Ints, values: Array) -> None:
        """Store `[n, count]` values of the threads `[n]`."""
        count, size = values.shape[1], values.itemsize
        grains, thread_state, synced_state = self._locate(threads, addresses, size * count)
        self._check_writable(grains, thread_state, synced_state)
        view = self._view_as(size)
        indices = self._find_indices(threads, addresses, size, count)
        store_states = self.store_states.reshape(-1)
        old_states = store_states[grains]
        is_foreign = (old_states > 0) & (old_states != thread_state) & (old_states != synced_state)
        if is_foreign.any() and _any_differ(view[indices], values):
            raise Fault("a thread overwrites another thread's store without a barrier")
        view[indices] = values
        if _any_differ(view[indices], values):
            raise Fault("two threads store different values at one address")
        store_states[grains] = thread_state
        self.is_hidden.reshape(-1)[grains] = True

    def begin_copy(self, threads: Ints, addresses: Ints, size: int) -> None:
        """Block the destinations of asynchronous copies until the copies complete."""
        grains, thread_state, synced_state = self._locate(threads, addresses, size)
        self._check_writable(grains, thread_state, synced_state)
        store_states = self.store_states.reshape(-1)
        old_states = store_states[grains]
        if ((old_states > 0) & (old_states != thread_state) & (old_states != synced_state)).any():
            raise Fault("a copy overwrites another thread's store without a barrier")
        store_states[grains] = _COPYING

    def end_copy(self, threads: Ints, addresses: Ints, values: Array) -> None:
        """Store the values of asynchronous copies, and unblock their destinations."""
        grains, thread_state, _ = self._locate(threads, addresses, values.shape[1])
        self._view_as(1)[self._find_indices(threads, addresses, 1, values.shape[1])] = values
        self.store_states.reshape(-1)[grains] = thread_state
        self.is_hidden.reshape(-1)[grains] = True

    def make_visible(self, programs: Array) -> None:
        """Make the stores of some programs visible to their asynchronous products."""
        self.is_hidden[programs] = False

    def begin_product(self, programs: Ints, addresses: Ints, size: int) -> tuple[Array, Ints]:
        """Return values of `size` bytes that a product reads until its wait, and their grains.

        `programs` and `addresses` have the same shape.
        """
        if (addresses + size > self.size).any():
            raise Fault("a product reads outside shared memory")
        grains = (programs * self.size + addresses) // self.grain
        if (self.store_states.reshape(-1)[grains] != _CLEAN).any():
            raise Fault("a product reads a stored value without a barrier")
        if self.is_hidden.reshape(-1)[grains].any():
            raise Fault("a product reads a stored value without a fence")
        grains = np.unique(grains)
        self.load_states.reshape(-1)[grains] = _PRODUCT
        return self._view_as(size)[(programs * self.size + addresses) // size], grains

    def end_products(self, finished: list[Ints], unfinished: list[Ints]) -> None:
        """Release the grains that finished products read. A store still needs a barrier."""
        load_states = self.load_states.reshape(-1)
        for state, products in ((_SEVERAL_WARPS, finished), (_PRODUCT, unfinished)):
            for grains in products:
                load_states[grains] = state

    def synchronize(self, programs: Any) -> None:
        self.store_states[programs] = np.minimum(self.store_states[programs], _CLEAN)
        load_states = self.load_states[programs]
        self.load_states[programs] = np.where(load_states == _PRODUCT, load_states, _CLEAN)

    def synchronize_warps(self, threads: Ints) -> None:
        for warp in np.unique(threads // 32):
            program, first_thread = divmod(int(warp) * 32, self.threads_per_program)
            for states in (self.store_states[program], self.load_states[program]):
                is_inside = (states > first_thread) & (states <= first_thread + 32) | (
                    states == _ONE_WARP + first_thread // 32
                )
                states[is_inside] = _SYNCED + first_thread // 32

    def _locate(self, threads: Ints, addresses: Ints, size: int) -> tuple[Ints, Array, Array]:
        """Return the grains `[n, size / grain]`, and two states.

        The first is the state of a grain that the thread accessed, the second is its state after
        the thread's warp synchronized.
        """
        if (addresses & size - 1).any():
            raise Fault(f"an address in shared memory is not a multiple of {size} bytes")
        if (addresses + size > self.size).any() or (addresses < 0).any():
            raise Fault("an address is outside shared memory")
        program, thread = np.divmod(threads, self.threads_per_program)
        first_grain = (program * self.size + addresses) // self.grain
        grains = first_grain[:, None] + np.arange(size // self.grain)
        return grains, (thread + 1)[:, None], (_SYNCED + thread // 32)[:, None]

    def _check_readable(self, states: Array, thread_state: Array, synced_state: Array) -> None:
        if ((states != _CLEAN) & (states != thread_state) & (states != synced_state)).any():
            if (states == _COPYING).any():
                raise Fault("a thread loads before an asynchronous copy completes")
            if (states == _UNSTORED).any():
                raise Fault("a thread loads shared memory to which no thread has stored")
            raise Fault("a thread loads another thread's store without a barrier")

    def _check_writable(self, grains: Ints, thread_state: Array, synced_state: Array) -> None:
        states = self.load_states.reshape(-1)[grains]
        if ((states != _CLEAN) & (states != thread_state) & (states != synced_state)).any():
            raise Fault("a thread stores where another thread loaded, without a barrier")
        if (self.store_states.reshape(-1)[grains] == _COPYING).any():
            raise Fault("a thread stores to the destination of an asynchronous copy")

    def _find_indices(self, threads: Ints, addresses: Ints, size: int, count: int) -> Ints:
        first_index = (threads // self.threads_per_program * self.size + addresses) // size
        return first_index[:, None] + np.arange(count)

    def _view_as(self, size: int) -> Array:
        return self.bytes.reshape(-1).view(f"u{size}")
