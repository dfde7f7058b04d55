"""Execute the programs of a launch together. The threads at the lowest instruction run next."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .memory import Array, Fault, GlobalMemory, Ints, SharedMemory
from .operations import TYPES
from .parse import Program

# Maximum number of threads that are executed together.
MAX_THREADS = 1 << 13
# Whether each thread executes an instruction, `[programs, threads]`. None means all threads.
Mask = Any
Step = Callable[["Machine", Mask], None]


class CompiledInstruction(NamedTuple):
    """An instruction: its guard and whether it is negated, a branch's target, and its function.

    Branches and ends have no function. The target of an end is -1.
    """

    guard: str
    is_negated: bool
    target: int
    step: Step | None


_GARBAGE = 0xDEADBEEFDEADBEEF  # the bits of an unset register, a large number in each type


class Copy(NamedTuple):
    """Asynchronous copies: threads, their groups, destinations, and bytes `[n, size]`."""

    threads: Ints
    groups: Array
    addresses: Ints
    values: Array


class Product(NamedTuple):
    """An asynchronous matrix product: its group, registers, and the grains that it reads."""

    group: int
    names: tuple[str, ...]
    grains: Ints


class Machine:
    """The state of some programs of a launch.

    Args:
        program: The kernel.
        code: Result of `compile_program` for the kernel.
        parameters: Value of each parameter, as 64 bits.
        grid: Number of programs of the launch on each of three axes.
        program_ids: Indices of the programs to execute.
        memory: Global memory.
        shared_size: Bytes of shared memory of a program.
    """

    def __init__(
        self, program: Program, code: Sequence[CompiledInstruction], parameters: Array,
        grid: Sequence[int], program_ids: Ints, memory: GlobalMemory, shared_size: int,
    ) -> None:  # fmt: skip
        self.program = program
        self.code = code
        self.parameters = parameters
        self.memory = memory
        num_threads = program.num_threads
        self.shape = len(program_ids), num_threads
        self.program_ids = program_ids
        self.registers: dict[str, Array] = {}
        yz, x = np.divmod(program_ids, grid[0])
        z, y = np.divmod(yz, grid[1])
        for name, index, size in zip("xyz", (x, y, z), grid, strict=True):
            self.registers[f"%ctaid.{name}"] = index[:, None].astype(np.uint32)
            self.registers[f"%nctaid.{name}"] = np.full((1, 1), size, np.uint32)
        for name, size in (("%tid.y", 0), ("%tid.z", 0), ("%ntid.x", num_threads)):
            self.registers[name] = np.full((1, 1), size, np.uint32)
        self.registers["%tid.x"] = np.arange(num_threads, dtype=np.uint32)[None]
        self.registers["%laneid"] = self.registers["%tid.x"] % 32
        self.shared = SharedMemory(*self.shape, shared_size, _find_grain(program))
        self.copy_groups = np.zeros(self.shape, np.int32)  # number of committed groups of copies
        self.copies: list[Copy] = []
        # Results of unfinished products by register, the products, and the number of their groups.
        self.unfinished_results: dict[str, Array] = {}
        self.products: list[Product] = []
        self.num_product_groups = 0
        self.pc_masks: dict[int, Array] = {}  # masks of threads by their next instruction

    def run(self) -> None:
        self.pc_masks = {0: np.ones(self.shape, bool)}
        try:
            with np.errstate(all="ignore"):
                while self.pc_masks:
                    pc = min(self.pc_masks)
                    threads = self.pc_masks.pop(pc)
                    self._run_threads(pc, min(self.pc_masks, default=len(self.code)), threads)
        except Fault as fault:
            fault.add_note(f"{self.program.name}, {self.program.instructions[self.pc].text}")
            raise
        if self.copies:
            raise Fault(f"{self.program.name}: a program ends before its copies complete")

    def _run_threads(self, pc: int, stop: int, threads: Array) -> None:
        """Execute threads up to instruction `stop`, or to an instruction where they diverge."""
        mask = None if threads.all() else threads
        registers, code = self.registers, self.code
        while pc < stop:
            self.pc = pc
            guard, is_negated, target, step = code[pc]
            step_mask = mask
            if guard:
                predicate = ~registers[guard] if is_negated else registers[guard]
                if not predicate.all():
                    step_mask = predicate & threads
                    if not step_mask.any():
                        pc += 1
                        continue
                    step_mask = None if step_mask.all() else step_mask
            if step is not None:
                step(self, step_mask)
                pc += 1
                continue
            branching_threads = threads if step_mask is None or step_mask is mask else step_mask
            other_threads = threads & ~branching_threads
            if target < 0:
                if other_threads.any():
                    self._wait_at(pc + 1, other_threads)
                return
            if not other_threads.any():
                pc = target
                continue
            self._wait_at(target, branching_threads)
            self._wait_at(pc + 1, other_threads)
            return
        self._wait_at(pc, threads)

    def _wait_at(self, pc: int, threads: Array) -> None:
        self.pc_masks[pc] = self.pc_masks[pc] | threads if pc in self.pc_masks else threads

    # -- effects of instructions -------------------------------------------------------------------

    def set_register(self, name: str, value: Array, mask: Mask) -> None:
        if mask is not None:
            old_value = self.registers.get(name)
            old_value = self.make_garbage(name) if old_value is None else old_value
            value = np.where(mask, value, old_value)
        self.registers[name] = value

    def make_garbage(self, name: str) -> Array:
        """Return an arbitrary value for an unset register. A correct result cannot depend on it."""
        width = self.program.register_widths[name]
        garbage = np.array([[_GARBAGE & (1 << width) - 1]], np.uint64)
        return garbage.astype("?" if width == 1 else f"u{width // 8}")

    def list_threads(self, mask: Mask) -> Ints:
        return np.arange(math.prod(self.shape)) if mask is None else np.flatnonzero(mask)

    def gather(self, x: Array, threads: Ints) -> Array:
        """Return the elements of `x` that belong to `threads`."""
        return np.broadcast_to(x, self.shape).reshape(-1)[threads]

    def scatter(self, name: str, values: Array, threads: Ints, mask: Mask) -> None:
        """Set a register of `threads`, which are the threads in `mask`."""
        if mask is None:
            self.set_register(name, values.reshape(self.shape), None)
            return
        all_values = np.zeros(self.shape, values.dtype)
        all_values.reshape(-1)[threads] = values
        self.set_register(name, all_values, mask)

    def select_programs(self, mask: Mask) -> Array:
        """Return whether each program is in a mask, which must have all or none of its threads."""
        threads = np.broadcast_to(True if mask is None else mask, self.shape)
        if (threads.any(1) != threads.all(1)).any():
            raise Fault("some threads of a program do not arrive")
        return threads[:, 0]

    def list_warps(self, mask: Mask) -> Ints:
        """Return the indices of the warps in a mask, which must contain all of their threads."""
        if mask is None:
            return np.arange(math.prod(self.shape) // 32)
        threads = np.broadcast_to(mask, self.shape).reshape(-1, 32)
        if (threads.any(1) != threads.all(1)).any():
            raise Fault("some threads of a warp do not arrive")
        return np.flatnonzero(threads[:, 0])

    def select_warps(self, x: Array, warps: Ints) -> Array:
        """Return the values of a register in some warps, `[warps, 32]`."""
        return np.broadcast_to(x, self.shape).reshape(-1, 32)[warps]

    def set_warps(self, name: str, values: Array, warps: Ints, mask: Mask) -> None:
        """Set a register of some warps to values `[warps, 32]`."""
        threads = (warps[:, None] * 32 + np.arange(32)).reshape(-1)
        self.scatter(name, np.ascontiguousarray(values).reshape(-1), threads, mask)

    def find_program_ids(self, threads: Ints) -> Ints:
        return self.program_ids[threads // self.shape[1]]


def _find_grain(program: Program) -> int:
    """Return the bytes of the narrowest access to shared memory, at most 4."""
    sizes = [4]
    for instruction in program.instructions:
        if instruction.opcode[0] in ("ld", "st") and "shared" in instruction.opcode:
            sizes.append(TYPES[instruction.opcode[-1]].itemsize)
    return min(sizes)


def execute(
    program: Program, code: Sequence[CompiledInstruction], arguments: Sequence[int],
    grid: Sequence[int], memory: GlobalMemory, shared_size: int,
) -> None:  # fmt: skip
    """Run a launch.

    Args:
        program: The kernel.
        code: Result of `compile_program` for the kernel.
        arguments: Bits of each parameter of the kernel, in order.
        grid: Number of programs on each of three axes.
        memory: The tensors of the launch.
        shared_size: Bytes of shared memory of a program.
    """
    assert len(arguments) == program.num_parameters, "expected an argument for each parameter"
    parameters = np.array(arguments, np.uint64)
    program_ids = np.arange(grid[0] * grid[1] * grid[2])
    num_programs = max(1, MAX_THREADS // program.num_threads)
    for start in range(0, len(program_ids), num_programs):
        batch = program_ids[start : start + num_programs]
        Machine(program, code, parameters, grid, batch, memory, shared_size).run()
    memory.check_order()
