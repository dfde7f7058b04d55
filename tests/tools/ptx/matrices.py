"""Compile matrix instructions of one or four warps, whose threads hold elements of matrices."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .machine import Machine, Mask, Product, Step
from .memory import Array, Fault, Ints
from .operands import REG_TYPES, list_registers, make_address_reader, make_reader
from .operations import from_bfloat16
from .parse import Instruction, Program


def _make_ldmatrix(instruction: Instruction, program: Program) -> Step:
    dst, src = instruction.operands
    names = list_registers(dst)
    read_addresses = make_address_reader(src, program)
    num_matrices = len(names)
    is_transposed = "trans" in instruction.opcode

    def load(machine: Machine, mask: Mask) -> None:
        warps = machine.list_warps(mask)
        addresses = machine.select_warps(read_addresses(machine), warps)[:, : 8 * num_matrices]
        threads = warps[:, None] * 32 + np.arange(8 * num_matrices)
        rows = machine.shared.load(threads.reshape(-1), addresses.reshape(-1), 4, 4)
        if is_transposed:
            halves = rows.view(np.uint16).reshape(len(warps), num_matrices, 8, 8)
            rows = np.ascontiguousarray(halves.transpose(0, 1, 3, 2)).view(np.uint32)
        words = rows.reshape(len(warps), num_matrices, 32)
        for i, name in enumerate(names):
            machine.set_warps(name, words[:, i], warps, mask)

    return load


def _make_stmatrix(instruction: Instruction, program: Program) -> Step:
    dst, src = instruction.operands
    names = list_registers(src)
    read_addresses = make_address_reader(dst, program)
    num_matrices = len(names)
    readers = [make_reader(name, REG_TYPES[32], program) for name in names]
    is_transposed = "trans" in instruction.opcode

    def store(machine: Machine, mask: Mask) -> None:
        warps = machine.list_warps(mask)
        addresses = machine.select_warps(read_addresses(machine), warps)[:, : 8 * num_matrices]
        threads = warps[:, None] * 32 + np.arange(8 * num_matrices)
        words = np.stack([machine.select_warps(read(machine), warps) for read in readers], 1)
        if is_transposed:
            halves = words.view(np.uint16).reshape(len(warps), num_matrices, 8, 8)
            words = np.ascontiguousarray(halves.transpose(0, 1, 3, 2)).view(np.uint32)
        machine.shared.store(threads.reshape(-1), addresses.reshape(-1), words.reshape(-1, 4))

    return store


_TO_FLOAT32 = {
    "f16": lambda x: x.view(np.float16).astype(np.float32),
    "bf16": lambda x: from_bfloat16(x.view(np.uint16)),
    # Tensor cores ignore the lower bits.
    "tf32": lambda x: (x & np.uint32(0xFFFFE000)).view(np.float32),
}


def _make_mma(instruction: Instruction, program: Program) -> Step:
    """Compile a matrix product by one warp, whose threads hold elements of the matrices.

    Four threads hold a row of A or a column of B. Products are exact. Their sums are rounded to
    float32, in a different order than on tensor cores.
    """
    dst, a, b, c = (list_registers(operand) for operand in instruction.operands)
    shape = instruction.opcode[3]
    dtype = instruction.opcode[7]
    depth = {"m16n8k16": 16, "m16n8k8": 8}[shape]
    assert instruction.opcode[4:6] == ("row", "col"), instruction.text
    readers = [[make_reader(name, REG_TYPES[32], program) for name in names] for names in (a, b, c)]
    convert = _TO_FLOAT32[dtype]
    values_per_word = 1 if dtype == "tf32" else 2

    def multiply(machine: Machine, mask: Mask) -> None:
        warps = machine.list_warps(mask)
        a_words, b_words, c_words = (_read_words(machine, operand, warps) for operand in readers)
        a_matrix = _gather_rows(convert(a_words), depth)
        # The axes after the warps are column, row, half of the rows, and value of a word.
        columns = convert(b_words).reshape(len(warps), 8, 4, 2, values_per_word)
        b_matrix = columns.transpose(0, 3, 2, 4, 1).reshape(len(warps), depth, 8)
        sums = _distribute(a_matrix @ b_matrix) + c_words.view(np.float32)
        for i, name in enumerate(dst):
            machine.set_warps(name, sums[:, :, i].view(np.uint32), warps, mask)

    return multiply


def _read_words(machine: Machine, readers: list[Any], warps: Ints) -> Array:
    """Return the values of several registers of some warps, `[warps, 32, registers]`."""
    return np.stack([machine.select_warps(read(machine), warps) for read in readers], 2)


def _gather_rows(values: Array, depth: int) -> Array:
    """Return A, `[warps, 16, depth]`, from the values of threads, `[warps, 32, values]`.

    The first two words of a thread belong to rows 8 apart, and the next two to the second half of
    the columns.
    """
    # The axes after the warps are row, column, half of the columns, half of the rows, and element.
    values = values.reshape(len(values), 8, 4, 2, 2, -1)
    return values.transpose(0, 4, 1, 3, 2, 5).reshape(len(values), 16, depth)


def _distribute(product: Array) -> Array:
    """Return the threads' values, `[warps, 32, values]`, of a product `[warps, 16, columns]`."""
    num_warps, _, num_columns = product.shape
    # The axes after the warps are half of the rows, row, eight columns, pair, and element.
    values = product.reshape(num_warps, 2, 8, num_columns // 8, 4, 2)
    return np.ascontiguousarray(values.transpose(0, 2, 4, 3, 1, 5)).reshape(num_warps, 32, -1)


def _make_wgmma(instruction: Instruction, program: Program) -> Step:
    """Compile an instruction of asynchronous products.

    It is the product of four warps, with B and perhaps A in shared memory, or fence, commit_group
    or wait_group.
    """
    if instruction.opcode[1] == "fence":
        return lambda machine, mask: None
    if instruction.opcode[1] == "commit_group":

        def commit(machine: Machine, _: Mask) -> None:
            machine.num_product_groups += 1

        return commit
    if instruction.opcode[1] == "wait_group":
        (num_left,) = instruction.operands
        return lambda machine, _: _wait_for_products(machine, int(num_left))
    sizes = re.fullmatch(r"m64n(\d+)k(\d+)", instruction.opcode[4])
    assert sizes is not None, instruction.text
    num_columns, depth = map(int, sizes.groups())
    dtype = instruction.opcode[6]
    dst, a, b, *flags = instruction.operands
    dst = list_registers(dst)
    is_a_in_registers = isinstance(a, tuple)
    num_bits = 32 if is_a_in_registers else 64
    readers = [make_reader(name, REG_TYPES[num_bits], program) for name in list_registers(a)]
    read_b = make_reader(b, REG_TYPES[64], program)
    read_accumulates = make_reader(flags[0], REG_TYPES[1], program)
    are_transposed = [flag == "1" for flag in flags[3:]]
    convert = _TO_FLOAT32[dtype]
    value_size = 4 if dtype == "tf32" else 2

    def load(
        machine: Machine, descriptors: Array, warp_groups: Ints, num_rows: int, is_transposed: bool
    ) -> Any:
        addresses = _find_addresses(
            descriptors, num_rows, depth, value_size, is_transposed=is_transposed
        )
        programs = (warp_groups * 128 // machine.shape[1])[:, None, None]
        programs = np.broadcast_to(programs, addresses.shape)
        values, grains = machine.shared.begin_product(programs, addresses, value_size)
        return convert(values if value_size == 4 else values.view(np.uint16)), grains

    def multiply(machine: Machine, mask: Mask) -> None:
        warps = machine.list_warps(mask)
        warp_groups = warps[::4] // 4
        if (warps.reshape(-1, 4) != warp_groups[:, None] * 4 + np.arange(4)).any():
            raise Fault("some of the four warps of a group do not arrive")
        if is_a_in_registers:
            a_matrices = _gather_rows(convert(_read_words(machine, readers, warps)), depth)
            a_grains = []
        else:
            descriptors = machine.select_warps(readers[0](machine), warps)[::4, 0]
            a_matrices, grains = load(machine, descriptors, warp_groups, 64, are_transposed[0])
            a_matrices = a_matrices.reshape(-1, 16, depth)
            a_grains = [grains]
        descriptors = machine.select_warps(read_b(machine), warps)[::4, 0]
        is_b_transposed = bool(are_transposed) and are_transposed[-1]
        columns, grains = load(machine, descriptors, warp_groups, num_columns, is_b_transposed)
        product = _distribute(a_matrices @ np.repeat(columns.transpose(0, 2, 1), 4, 0))
        accumulates = machine.select_warps(read_accumulates(machine), warps)
        for i, name in enumerate(dst):
            result = machine.unfinished_results.pop(name, None)
            if result is not None:
                machine.registers[name] = result
            values = product[:, :, i]
            if accumulates.any():
                old_values = machine.select_warps(machine.registers[name], warps).view(np.float32)
                values = np.where(accumulates, values + old_values, values)
            machine.set_warps(name, values.view(np.uint32), warps, mask)
            machine.unfinished_results[name] = machine.registers.pop(name)
        grains = np.concatenate([grains, *a_grains])
        machine.products.append(Product(machine.num_product_groups, dst, grains))

    return multiply


def _find_addresses(
    descriptors: Array, num_rows: int, depth: int, size: int, *, is_transposed: bool
) -> Ints:
    """Return the addresses in shared memory, `[n, num_rows, depth]`, of matrices.

    In PTX's layouts, 32, 64 or 128 bytes lie along the depth, or along the rows if transposed.
    """
    fields = descriptors.astype(np.int64)[:, None, None]
    start, leading, stride = ((fields >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    modes = np.unique(fields >> 62 & 3)
    assert len(modes) == 1, "expected one layout"
    assert modes[0], "expected a layout with swizzling"
    width = {1: 128, 2: 64, 3: 32}[int(modes[0])]
    row, column = np.arange(num_rows)[:, None], np.arange(depth)[None]
    if is_transposed:
        offset = column // 8 * stride + column % 8 * width + row % (width // size) * size
        addresses = start + row // (width // size) * leading + offset
    else:
        addresses = start + row // 8 * stride + row % 8 * width + column * size
    return addresses ^ (addresses >> 7 & width // 16 - 1) << 4


def _wait_for_products(machine: Machine, num_unfinished: int) -> None:
    num_finished = machine.num_product_groups - num_unfinished
    finished = [product for product in machine.products if product.group < num_finished]
    machine.products = [product for product in machine.products if product.group >= num_finished]
    unfinished_names = {name for product in machine.products for name in product.names}
    for name in [name for name in machine.unfinished_results if name not in unfinished_names]:
        machine.registers[name] = machine.unfinished_results.pop(name)
    machine.shared.end_products(
        [product.grains for product in finished], [product.grains for product in machine.products]
    )


MATRICES: dict[str, Callable[[Instruction, Program], Step]] = {
    "ldmatrix": _make_ldmatrix, "stmatrix": _make_stmatrix, "mma": _make_mma, "wgmma": _make_wgmma,
}  # fmt: skip
