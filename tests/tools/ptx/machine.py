"""Execute the programs of a launch together. The threads at the lowest instruction run next."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .memory import Array, Fault, GlobalMemory, Ints, SharedMemory
from .operations import TYPES
from .parse import Program

# Maximum number of threads that are executed together.
MAX_THREADS = 1 << 13
# The threads that execute an instruction, `[programs, threads]`. None means all threads.
Mask = Any
Step = Callable[["Machine", Mask], None]
_GARBAGE = 0xDEADBEEFDEADBEEF  # a large number in each type


class Copy(NamedTuple):
    """An asynchronous copy: threads, their groups, destinations, and bytes `[n, size]`."""

    threads: Ints
    groups: Array
    addresses: Ints
    values: Array


class Product(NamedTuple):
    """A product that runs asynchronously: its group, registers, and the grains that it reads."""

    group: int
    names: tuple[str, ...]
    grains: Ints


class Machine:
    """Some programs of a launch.

    Args:
        program: The kernel.
        steps: Result of `compile_program` for the kernel.
        parameters: 64 bits of each parameter.
        grid: Programs of the launch, on three axes.
        numbers: Numbers of the programs to execute.
        memory: Global memory.
        shared: Bytes of shared memory of a program.
    """

    def __init__(
        self, program: Program, steps: Sequence[Any], parameters: Array,
        grid: Sequence[int], numbers: Ints, memory: GlobalMemory, shared: int,
    ) -> None:  # fmt: skip
        self.program, self.steps, self.parameters, self.memory = program, steps, parameters, memory
        threads = program.threads
        self.shape = len(numbers), threads
        self.numbers = numbers
        self.registers: dict[str, Array] = {}
        x, y, z = numbers % grid[0], numbers // grid[0] % grid[1], numbers // (grid[0] * grid[1])
        axes = dict(zip(("%ctaid.x", "%ctaid.y", "%ctaid.z"), (x, y, z), strict=True))
        sizes = dict(zip(("%nctaid.x", "%nctaid.y", "%nctaid.z"), grid, strict=True))
        for name, axis in axes.items():
            self.registers[name] = axis[:, None].astype(np.uint32)
        for name, size in {**sizes, "%tid.y": 0, "%tid.z": 0, "%ntid.x": threads}.items():
            self.registers[name] = np.full((1, 1), size, np.uint32)
        self.registers["%tid.x"] = np.arange(threads, dtype=np.uint32)[None]
        self.registers["%laneid"] = self.registers["%tid.x"] % 32
        self.shared = SharedMemory(len(numbers), threads, shared, _find_grain(program))
        self.groups = np.zeros(self.shape, np.int32)  # number of closed groups of copies
        self.copies: list[Copy] = []
        # Results of unfinished products by register, the products, and the number of closed groups.
        self.unfinished: dict[str, Array] = {}
        self.products: list[Product] = []
        self.product_groups = 0
        self.live = np.ones(self.shape, bool)
        self.waiting: dict[int, Array] = {}
        self.count = 0

    def run(self) -> None:
        """Execute all threads to their end."""
        self.waiting = {0: self.live.copy()}
        try:
            with np.errstate(all="ignore"):
                while self.waiting:
                    pc = min(self.waiting)
                    threads = self.waiting.pop(pc)
                    self._run_threads(pc, min(self.waiting, default=len(self.steps)), threads)
        except Fault as fault:
            fault.add_note(f"{self.program.name}, {self.program.code[self.pc].text}")
            raise
        if self.copies:
            raise Fault(f"{self.program.name}: a program ends before its copies arrive")

    def _run_threads(self, pc: int, until: int, threads: Array) -> None:
        """Execute threads until instruction `until`, or to an instruction where they diverge."""
        active = None if threads.all() else threads
        registers, steps = self.registers, self.steps
        while pc < until:
            self.pc = pc
            guard, negated, target, step = steps[pc]
            here = active
            if guard:
                holds = ~registers[guard] if negated else registers[guard]
                if not holds.all():
                    here = holds & threads
                    if not here.any():
                        pc += 1
                        continue
                    here = None if here.all() else here
            self.count += 1
            if step is not None:
                step(self, here)
                pc += 1
                continue
            branching = threads if here is active else threads if here is None else here
            other_threads = threads & ~branching
            if target < 0:
                self._end(branching, pc + 1, other_threads)
                return
            if not other_threads.any():
                pc = target
                continue
            self._wait(target, branching)
            self._wait(pc + 1, other_threads)
            return
        self._wait(pc, threads)

    def _wait(self, pc: int, threads: Array) -> None:
        self.waiting[pc] = self.waiting[pc] | threads if pc in self.waiting else threads

    def _end(self, ended_threads: Array, pc: int, other_threads: Array) -> None:
        """End threads. Programs without threads are removed, which shortens the arrays."""
        if other_threads.any():
            self._wait(pc, other_threads)
        self.live &= ~ended_threads
        is_live = self.live.any(1)
        if is_live.all() or not is_live.any():
            return
        assert not self.products, "a program ends before products of other programs"
        count = self.shape[0]
        self.shape = int(is_live.sum()), self.shape[1]
        select_live = lambda x: x[is_live] if len(x) == count else x  # noqa: E731
        self.registers = {name: select_live(x) for name, x in self.registers.items()}
        self.waiting = {pc: x[is_live] for pc, x in self.waiting.items()}
        self.live, self.groups = self.live[is_live], self.groups[is_live]
        self.numbers = self.numbers[is_live]
        self.shared.select_programs(is_live)
        new_index = np.cumsum(is_live) - 1
        for i, copy in enumerate(self.copies):
            program, thread = np.divmod(copy.threads, self.shape[1])
            if not is_live[program].all():
                raise Fault("a program ends before its copies arrive")
            self.copies[i] = copy._replace(threads=new_index[program] * self.shape[1] + thread)

    # -- effects of instructions -------------------------------------------------------------------

    def put(self, name: str, value: Array, mask: Mask) -> None:
        """Overwrite a register of some threads."""
        if mask is not None:
            old = self.registers.get(name)
            value = np.where(mask, value, self.make_garbage(name) if old is None else old)
        self.registers[name] = value

    def make_garbage(self, name: str) -> Array:
        """Return values for an unset register. Compilers do not store results of such values."""
        width = self.program.registers[name]
        garbage = np.array([[_GARBAGE & (1 << width) - 1]], np.uint64)
        return garbage.astype("?" if width == 1 else f"u{width // 8}")

    def threads(self, mask: Mask) -> Ints:
        """Return the indices of the threads of a mask."""
        size = self.shape[0] * self.shape[1]
        return np.arange(size) if mask is None else np.flatnonzero(mask)

    def pick(self, x: Array, threads: Ints) -> Array:
        """Return the elements of the threads `threads`."""
        return np.broadcast_to(x, self.shape).reshape(-1)[threads]

    def spread(self, name: str, values: Array, threads: Ints, mask: Mask) -> None:
        """Overwrite a register of the threads `threads`."""
        if mask is None:
            self.put(name, values.reshape(self.shape), None)
            return
        full = np.zeros(self.shape, values.dtype)
        full.reshape(-1)[threads] = values
        self.put(name, full, mask)

    def programs(self, mask: Mask) -> Array:
        """Return whether each program is in a mask. All or none of its threads must be in it."""
        threads = np.broadcast_to(True if mask is None else mask, self.shape)
        if (threads.any(1) != threads.all(1)).any():
            raise Fault("some threads of a program do not arrive")
        return threads[:, 0]

    def warps(self, mask: Mask) -> Ints:
        """Return the numbers of the warps of a mask, whose threads must all be in it."""
        count = self.shape[0] * self.shape[1] // 32
        if mask is None:
            return np.arange(count)
        threads = np.broadcast_to(mask, self.shape).reshape(count, 32)
        if (threads.any(1) != threads.all(1)).any():
            raise Fault("some threads of a warp do not arrive")
        return np.flatnonzero(threads[:, 0])

    def by_warps(self, x: Array, warps: Ints) -> Array:
        """Return a register of some warps, `[warps, 32]`."""
        return np.broadcast_to(x, self.shape).reshape(-1, 32)[warps]

    def put_by_warps(self, name: str, values: Array, warps: Ints, mask: Mask) -> None:
        """Overwrite a register of some warps, `[warps, 32]`."""
        threads = (warps[:, None] * 32 + np.arange(32)).reshape(-1)
        self.spread(name, np.ascontiguousarray(values).reshape(-1), threads, mask)

    def programs_of(self, threads: Ints) -> Ints:
        """Return the number in the launch of each thread's program."""
        return self.numbers[threads // self.shape[1]]


def _find_grain(program: Program) -> int:
    """Return the bytes of the narrowest access to shared memory."""
    sizes = [4]
    for instruction in program.code:
        if instruction.opcode[0] in ("ld", "st") and "shared" in instruction.opcode:
            sizes.append(TYPES[instruction.opcode[-1]].itemsize)
    return min(sizes)


def execute(
    program: Program, steps: Sequence[Any], arguments: Sequence[int], grid: Sequence[int],
    memory: GlobalMemory, shared: int,
) -> int:  # fmt: skip
    """Run a launch, and return the number of executed instructions.

    Args:
        program: The kernel.
        steps: Result of `compile_program` for the kernel.
        arguments: The bits of its parameters, in order.
        grid: Programs on three axes.
        memory: The tensors.
        shared: Bytes of shared memory of a program.
    """
    assert len(arguments) == program.parameters, "expected an argument for each parameter"
    parameters = np.array(arguments, np.uint64)
    numbers = np.arange(grid[0] * grid[1] * grid[2])
    count = 0
    for batch in _batched(numbers, max(1, MAX_THREADS // program.threads)):
        machine = Machine(program, steps, parameters, grid, batch, memory, shared)
        machine.run()
        count += machine.count
    memory.check_order()
    return count


def _batched(numbers: Ints, size: int) -> list[Ints]:
    return [numbers[i : i + size] for i in range(0, len(numbers), size)]
