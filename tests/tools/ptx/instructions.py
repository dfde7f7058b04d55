"""Compile PTX instructions into functions that change the state of a `Machine`."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from .machine import CompiledInstruction, Copy, Machine, Mask, Step
from .matrices import MATRICES
from .memory import Fault
from .operands import REG_TYPES, list_registers, make_address_reader, make_reader
from .operations import TYPES, Operation, find_operation
from .parse import Instruction, Program


def compile_program(program: Program) -> list[CompiledInstruction]:
    code = []
    for instruction in program.instructions:
        name = instruction.opcode[0]
        target = -1
        step = None
        if name == "bra":
            (label,) = instruction.operands
            target = program.labels[label]
        elif name not in ("ret", "exit"):
            step = _compile(instruction, program)
        code.append(CompiledInstruction(instruction.guard, instruction.is_negated, target, step))
    return code


def _compile(instruction: Instruction, program: Program) -> Step:
    opcode, operands = instruction.opcode, instruction.operands
    operation = find_operation(opcode)
    has_vectors = any(isinstance(operand, tuple) for operand in operands)
    if operation is not None and not has_vectors:
        return _make_operation(operation, operands, program)
    make_step = _STEP_MAKERS.get(opcode[0])
    if make_step is None:
        raise NotImplementedError(f"tests/tools/ptx does not support {instruction.text}")
    return make_step(instruction, program)


def _make_operation(operation: Operation, operands: Any, program: Program) -> Step:
    dst, *sources = operands
    compute, types, result = operation
    readers = [
        make_reader(source, dtype, program) for source, dtype in zip(sources, types, strict=True)
    ]
    reg_type = REG_TYPES[program.register_widths[dst]]
    # A narrow result is sign-extended if it is signed, and zero-extended otherwise.
    extended_type = reg_type if result.kind != "i" else np.dtype(f"i{reg_type.itemsize}")

    def operate(machine: Machine, mask: Mask) -> None:
        value = compute(*[read(machine) for read in readers])
        if value.dtype.itemsize != reg_type.itemsize:
            value = value.astype(extended_type)
        machine.set_register(dst, value.view(reg_type), mask)

    return operate


def _make_move(instruction: Instruction, program: Program) -> Step:
    """Compile a move that packs several registers into one, or unpacks one register."""
    dst, src = (list_registers(operand) for operand in instruction.operands)
    dtype = TYPES[instruction.opcode[-1]]
    part_type = REG_TYPES[8 * dtype.itemsize // max(len(dst), len(src))]
    readers = [make_reader(name, dtype if len(src) == 1 else part_type, program) for name in src]

    def move(machine: Machine, mask: Mask) -> None:
        num_bits = 8 * part_type.itemsize
        parts = [
            read(machine).astype(dtype) << dtype.type(num_bits * i)
            for i, read in enumerate(readers)
        ]
        packed = functools.reduce(np.bitwise_or, parts)
        for i, name in enumerate(dst):
            if name != "_":
                value_type = dtype if len(dst) == 1 else part_type
                value = (packed >> dtype.type(num_bits * i)).astype(value_type)
                machine.set_register(name, value, mask)

    return move


def _make_load(instruction: Instruction, program: Program) -> Step:
    dst, src = instruction.operands
    names = list_registers(dst)
    dtype = TYPES[instruction.opcode[-1]]
    types = [REG_TYPES[program.register_widths[name]] for name in names]
    if "param" in instruction.opcode:
        read_address = make_address_reader(src, program)

        def load_parameter(machine: Machine, mask: Mask) -> None:
            value = machine.parameters.view(dtype)[read_address(machine) // dtype.itemsize]
            machine.set_register(names[0], value.astype(types[0]), mask)

        return load_parameter
    read_addresses = make_address_reader(src, program)
    is_global = "global" in instruction.opcode
    assert is_global or "shared" in instruction.opcode, instruction.text

    def load(machine: Machine, mask: Mask) -> None:
        threads = machine.list_threads(mask)
        addresses = machine.gather(read_addresses(machine), threads)
        if is_global:
            programs = machine.find_program_ids(threads)
            values = machine.memory.load(addresses, dtype.itemsize, len(names), programs)
        else:
            values = machine.shared.load(threads, addresses, dtype.itemsize, len(names))
        for i, name in enumerate(names):
            machine.scatter(name, values[:, i].view(dtype).astype(types[i]), threads, mask)

    return load


def _make_store(instruction: Instruction, program: Program) -> Step:
    dst, src = instruction.operands
    dtype = TYPES[instruction.opcode[-1]]
    read_addresses = make_address_reader(dst, program)
    readers = [make_reader(name, dtype, program) for name in list_registers(src)]
    is_global = "global" in instruction.opcode
    assert is_global or "shared" in instruction.opcode, instruction.text

    def store(machine: Machine, mask: Mask) -> None:
        threads = machine.list_threads(mask)
        addresses = machine.gather(read_addresses(machine), threads)
        values = np.stack([machine.gather(read(machine), threads) for read in readers], 1)
        if is_global:
            machine.memory.store(addresses, values, machine.find_program_ids(threads))
        else:
            machine.shared.store(threads, addresses, values)

    return store


def _make_copy(instruction: Instruction, program: Program) -> Step:
    """Compile asynchronous copies, and the instructions that commit or wait for their groups."""
    if instruction.opcode[2] == "commit_group":

        def commit(machine: Machine, mask: Mask) -> None:
            machine.copy_groups = machine.copy_groups + (1 if mask is None else mask)

        return commit
    if instruction.opcode[2] == "wait_group":
        (num_left,) = instruction.operands
        return lambda machine, mask: _wait_for_copies(machine, mask, int(num_left))
    dst, src, size, *optional_size = instruction.operands
    readers = [make_address_reader(operand, program) for operand in (dst, src)]
    copy_size = int(size, 0)
    read_size = make_reader(optional_size[0] if optional_size else size, REG_TYPES[32], program)

    def copy(machine: Machine, mask: Mask) -> None:
        threads = machine.list_threads(mask)
        addresses, sources = (machine.gather(read(machine), threads) for read in readers)
        sizes = machine.gather(read_size(machine), threads)
        if (sizes > copy_size).any():
            raise Fault("a copy has more bytes than its destination")
        values = np.zeros((len(threads), copy_size), np.uint8)
        for n in np.unique(sizes[sizes > 0]):
            selected = sizes == n
            unit = 1 if n % 4 else 4
            if n == copy_size and copy_size < 16:
                unit = copy_size  # NumPy has no integers of 16 bytes
            programs = machine.find_program_ids(threads[selected])
            loaded = machine.memory.load(sources[selected], unit, int(n) // unit, programs)
            values[selected, :n] = loaded.view(np.uint8)
        machine.shared.begin_copy(threads, addresses, copy_size)
        groups = machine.copy_groups.reshape(-1)[threads]
        machine.copies.append(Copy(threads, groups, addresses, values))

    return copy


def _wait_for_copies(machine: Machine, mask: Mask, num_left: int) -> None:
    num_committed = machine.copy_groups.reshape(-1)
    remaining_copies = []
    for copy in machine.copies:
        is_done = copy.groups < num_committed[copy.threads] - num_left
        if mask is not None:
            is_done &= np.broadcast_to(mask, machine.shape).reshape(-1)[copy.threads]
        threads, groups, addresses, values = copy
        if is_done.any():
            machine.shared.end_copy(threads[is_done], addresses[is_done], values[is_done])
        if not is_done.all():
            remaining_copies.append(
                Copy(threads[~is_done], groups[~is_done], addresses[~is_done], values[~is_done])
            )
    machine.copies = remaining_copies


def _make_barrier(instruction: Instruction, _: Program) -> Step:
    if "warp" in instruction.opcode:

        def synchronize_warps(machine: Machine, mask: Mask) -> None:
            machine.list_warps(mask)
            machine.shared.synchronize_warps(machine.list_threads(mask))

        return synchronize_warps
    assert instruction.operands == ("0",), instruction.text

    def synchronize(machine: Machine, mask: Mask) -> None:
        machine.shared.synchronize(machine.select_programs(mask))

    return synchronize


def _make_shuffle(instruction: Instruction, program: Program) -> Step:
    dst, src, offset, clamp, members = instruction.operands
    mode = instruction.opcode[2]
    assert members == "-1", instruction.text
    assert clamp in ("31", "0"), instruction.text
    assert clamp == ("0" if mode == "up" else "31"), instruction.text
    read, read_offset = (make_reader(operand, REG_TYPES[32], program) for operand in (src, offset))

    def shuffle(machine: Machine, mask: Mask) -> None:
        warps = machine.list_warps(mask)
        values = machine.select_warps(read(machine), warps)
        offsets = machine.select_warps(read_offset(machine), warps).astype(np.int64)
        lanes = np.arange(32)
        if mode == "bfly":
            source_lanes = lanes ^ offsets
        elif mode == "idx":
            source_lanes = offsets & 31
        else:
            source_lanes = np.where(lanes - offsets < 0, lanes, lanes - offsets)
        machine.set_warps(dst, np.take_along_axis(values, source_lanes, 1), warps, mask)

    return shuffle


def _make_reduction(instruction: Instruction, program: Program) -> Step:
    dst, src, members = instruction.operands
    assert instruction.opcode[2] in ("max", "min", "add"), instruction.text
    reduce = {"max": np.max, "min": np.min, "add": np.sum}[instruction.opcode[2]]
    dtype = TYPES[instruction.opcode[3]]
    read = make_reader(src, dtype, program)
    read_members = make_reader(members, REG_TYPES[32], program)

    def reduce_warps(machine: Machine, mask: Mask) -> None:
        warps = machine.list_warps(mask)
        if (machine.select_warps(read_members(machine), warps) != 0xFFFFFFFF).any():
            raise Fault("redux: expected all threads of a warp as members")
        values = reduce(machine.select_warps(read(machine), warps), axis=1, keepdims=True)
        values = np.broadcast_to(values.astype(dtype), (len(warps), 32))
        machine.set_warps(dst, np.ascontiguousarray(values).view(np.uint32), warps, mask)

    return reduce_warps


def _make_fence(instruction: Instruction, _: Program) -> Step:
    """Compile a fence that makes stores to shared memory visible to asynchronous products."""
    assert instruction.opcode[1:3] == ("proxy", "async"), instruction.text
    return lambda machine, mask: machine.shared.make_visible(machine.select_programs(mask))


_STEP_MAKERS: dict[str, Callable[[Instruction, Program], Step]] = {
    "mov": _make_move, "ld": _make_load, "st": _make_store, "cp": _make_copy, "bar": _make_barrier,
    "shfl": _make_shuffle, "redux": _make_reduction, "fence": _make_fence, **MATRICES,
}  # fmt: skip
