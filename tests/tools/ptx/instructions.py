"""Compile PTX instructions to functions that change the state of a `Machine`."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from .machine import Copy, Machine, Mask, Step
from .matrices import MATRICES
from .memory import Fault
from .operands import STORED, address, names_of, read_as
from .operations import TYPES, Operation, find_operation
from .parse import Instruction, Program


def compile_program(program: Program) -> list[tuple[str, bool, int, Step | None]]:
    """Return the guard, whether it is negated, the target and the function of each instruction.

    A branch has a target and no function. The target of an end is below zero.
    """
    steps = []
    for instruction in program.code:
        name, target, step = instruction.opcode[0], -1, None
        if name == "bra":
            (label,) = instruction.operands
            target = program.labels[label]
        elif name not in ("ret", "exit"):
            step = _compile(instruction, program)
        steps.append((instruction.guard, instruction.negated, target, step))
    return steps


def _compile(instruction: Instruction, program: Program) -> Step:
    opcode, operands = instruction.opcode, instruction.operands
    operation = find_operation(opcode)
    vectors = any(isinstance(x, tuple) for x in operands)
    if operation is not None and not vectors:
        return _compile_operation(operation, operands, program)
    make = _MAKERS.get(opcode[0])
    if make is None:
        raise NotImplementedError(f"an instruction that tests/tools/ptx lacks: {instruction.text}")
    return make(instruction, program)


def _compile_operation(operation: Operation, operands: Any, program: Program) -> Step:
    to, *sources = operands
    compute, kinds, result = operation
    reads = [read_as(x, kind, program) for x, kind in zip(sources, kinds, strict=True)]
    stored = STORED[program.registers[to]]
    # A narrow result is extended, with its sign if it is signed.
    wide = stored if result.kind != "i" else np.dtype(f"i{stored.itemsize}")

    def run(machine: Machine, mask: Mask) -> None:
        value = compute(*[read(machine) for read in reads])
        if value.dtype.itemsize != stored.itemsize:
            value = value.astype(wide)
        machine.put(to, value.view(stored), mask)

    return run


def _make_move(instruction: Instruction, program: Program) -> Step:
    """Compile a move that packs several registers into one, or unpacks one register."""
    to, source = (names_of(x) for x in instruction.operands)
    kind = TYPES[instruction.opcode[-1]]
    part = STORED[8 * kind.itemsize // max(len(to), len(source))]
    reads = [read_as(x, kind if len(source) == 1 else part, program) for x in source]

    def move(machine: Machine, mask: Mask) -> None:
        bits = 8 * part.itemsize
        parts = [read(machine).astype(kind) << kind.type(bits * i) for i, read in enumerate(reads)]
        whole = functools.reduce(np.bitwise_or, parts)
        for i, name in enumerate(to):
            if name != "_":
                stored = kind if len(to) == 1 else part
                machine.put(name, (whole >> kind.type(bits * i)).astype(stored), mask)

    return move


def _make_load(instruction: Instruction, program: Program) -> Step:
    names, source = names_of(instruction.operands[0]), instruction.operands[1]
    kind = TYPES[instruction.opcode[-1]]
    stored = [STORED[program.registers[name]] for name in names]
    if "param" in instruction.opcode:
        read = address(source, program)

        def load_parameter(machine: Machine, mask: Mask) -> None:
            value = machine.parameters.view(kind)[read(machine) // kind.itemsize]
            machine.put(names[0], value.astype(stored[0]), mask)

        return load_parameter
    place = address(source, program)
    is_global = "global" in instruction.opcode
    assert is_global or "shared" in instruction.opcode, instruction.text

    def load(machine: Machine, mask: Mask) -> None:
        threads = machine.threads(mask)
        addresses = machine.pick(place(machine), threads)
        if is_global:
            programs = machine.programs_of(threads)
            values = machine.memory.load(addresses, kind.itemsize, len(names), programs)
        else:
            values = machine.shared.load(threads, addresses, kind.itemsize, len(names))
        for i, name in enumerate(names):
            machine.spread(name, values[:, i].view(kind).astype(stored[i]), threads, mask)

    return load


def _make_store(instruction: Instruction, program: Program) -> Step:
    to, source = instruction.operands
    kind = TYPES[instruction.opcode[-1]]
    place = address(to, program)
    reads = [read_as(x, kind, program) for x in names_of(source)]
    is_global = "global" in instruction.opcode
    assert is_global or "shared" in instruction.opcode, instruction.text

    def store(machine: Machine, mask: Mask) -> None:
        threads = machine.threads(mask)
        addresses = machine.pick(place(machine), threads)
        values = np.stack([machine.pick(read(machine), threads) for read in reads], 1)
        if is_global:
            machine.memory.store(addresses, values, machine.programs_of(threads))
        else:
            machine.shared.store(threads, addresses, values)

    return store


def _make_copy(instruction: Instruction, program: Program) -> Step:
    """Compile asynchronous copies, and the instructions that commit or wait for their groups."""
    if instruction.opcode[2] == "commit_group":

        def commit(machine: Machine, mask: Mask) -> None:
            machine.groups = machine.groups + (1 if mask is None else mask)

        return commit
    if instruction.opcode[2] == "wait_group":
        (num_left,) = instruction.operands
        return lambda machine, mask: _wait_for_copies(machine, mask, int(num_left))
    to, source, size, *optional = instruction.operands
    places = [address(x, program) for x in (to, source)]
    whole = int(size, 0)
    read_size = read_as(optional[0] if optional else size, STORED[32], program)

    def copy(machine: Machine, mask: Mask) -> None:
        threads = machine.threads(mask)
        addresses, sources = (machine.pick(place(machine), threads) for place in places)
        sizes = machine.pick(read_size(machine), threads)
        if (sizes > whole).any():
            raise Fault("a copy of more bytes than its destination has")
        values = np.zeros((len(threads), whole), np.uint8)
        for n in np.unique(sizes[sizes > 0]):
            selected = sizes == n
            count, unit = (1, whole) if n == whole and whole < 16 else (int(n) // 4, 4)
            if count * unit != n:
                count, unit = int(n), 1
            loaded = machine.memory.load(
                sources[selected], unit, count, machine.programs_of(threads[selected])
            )
            values[selected, :n] = loaded.view(np.uint8)
        machine.shared.begin_copy(threads, addresses, whole)
        groups = machine.groups.reshape(-1)[threads]
        machine.copies.append(Copy(threads, groups, addresses, values))

    return copy


def _wait_for_copies(machine: Machine, mask: Mask, num_left: int) -> None:
    """Complete the copies of all groups except the last `left` groups."""
    closed = machine.groups.reshape(-1)
    remaining = []
    for copy in machine.copies:
        is_done = copy.groups < closed[copy.threads] - num_left
        if mask is not None:
            is_done &= np.broadcast_to(mask, machine.shape).reshape(-1)[copy.threads]
        threads, groups, addresses, values = copy
        if is_done.any():
            machine.shared.end_copy(threads[is_done], addresses[is_done], values[is_done])
        if not is_done.all():
            remaining.append(
                Copy(threads[~is_done], groups[~is_done], addresses[~is_done], values[~is_done])
            )
    machine.copies = remaining


def _make_barrier(instruction: Instruction, _: Program) -> Step:
    if "warp" in instruction.opcode:

        def synchronize_warps(machine: Machine, mask: Mask) -> None:
            machine.warps(mask)
            machine.shared.synchronize_warps(machine.threads(mask))

        return synchronize_warps
    assert instruction.operands == ("0",), instruction.text

    def synchronize(machine: Machine, mask: Mask) -> None:
        machine.shared.synchronize(machine.programs(mask))

    return synchronize


def _make_shuffle(instruction: Instruction, program: Program) -> Step:
    to, source, by, clamp, members = instruction.operands
    mode = instruction.opcode[2]
    assert members == "-1", instruction.text
    assert clamp in ("31", "0"), instruction.text
    assert clamp == ("0" if mode == "up" else "31"), instruction.text
    read, read_by = (read_as(x, STORED[32], program) for x in (source, by))

    def shuffle(machine: Machine, mask: Mask) -> None:
        warps = machine.warps(mask)
        values = machine.by_warps(read(machine), warps)
        distance = machine.by_warps(read_by(machine), warps).astype(np.int64)
        lane = np.arange(32)
        if mode == "bfly":
            other = lane ^ distance
        elif mode == "idx":
            other = distance & 31
        else:
            other = np.where(lane - distance < 0, lane, lane - distance)
        machine.put_by_warps(to, np.take_along_axis(values, other, 1), warps, mask)

    return shuffle


def _make_reduction(instruction: Instruction, program: Program) -> Step:
    to, source, members = instruction.operands
    assert instruction.opcode[2] in ("max", "min", "add"), instruction.text
    reduce = {"max": np.max, "min": np.min, "add": np.sum}[instruction.opcode[2]]
    kind = TYPES[instruction.opcode[3]]
    read, read_members = read_as(source, kind, program), read_as(members, STORED[32], program)

    def run(machine: Machine, mask: Mask) -> None:
        warps = machine.warps(mask)
        if (machine.by_warps(read_members(machine), warps) != 0xFFFFFFFF).any():
            raise Fault("redux: expected all threads of a warp as members")
        values = reduce(machine.by_warps(read(machine), warps), axis=1, keepdims=True)
        values = np.broadcast_to(values.astype(kind), (len(warps), 32))
        machine.put_by_warps(to, np.ascontiguousarray(values).view(np.uint32), warps, mask)

    return run


def _make_fence(instruction: Instruction, _: Program) -> Step:
    """Make stores to shared memory visible to products that run asynchronously."""
    assert instruction.opcode[1:3] == ("proxy", "async"), instruction.text
    return lambda machine, mask: machine.shared.make_visible(machine.programs(mask))


_MAKERS: dict[str, Callable[[Instruction, Program], Step]] = {
    "mov": _make_move, "ld": _make_load, "st": _make_store, "cp": _make_copy, "bar": _make_barrier,
    "shfl": _make_shuffle, "redux": _make_reduction, "fence": _make_fence, **MATRICES,
}  # fmt: skip
