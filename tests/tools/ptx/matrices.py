"""Compile the instructions of one or four warps on matrices distributed over their threads."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .machine import Machine, Mask, Product, Step
from .memory import Array, Fault, Ints
from .operands import STORED, address, names_of, read_as
from .operations import from_bfloat16
from .parse import Instruction, Program


def _make_matrix_load(instruction: Instruction, program: Program) -> Step:
    names, source = names_of(instruction.operands[0]), instruction.operands[1]
    place, count = address(source, program), len(names)
    is_transposed = "trans" in instruction.opcode

    def load(machine: Machine, mask: Mask) -> None:
        warps = machine.warps(mask)
        addresses = machine.by_warps(place(machine), warps)[:, : 8 * count]
        threads = warps[:, None] * 32 + np.arange(8 * count)
        rows = machine.shared.load(threads.reshape(-1), addresses.reshape(-1), 4, 4)
        if is_transposed:
            halves = rows.view(np.uint16).reshape(len(warps), count, 8, 8)
            rows = np.ascontiguousarray(halves.transpose(0, 1, 3, 2)).view(np.uint32)
        words = rows.reshape(len(warps), count, 32)
        for i, name in enumerate(names):
            machine.put_by_warps(name, words[:, i], warps, mask)

    return load


def _make_matrix_store(instruction: Instruction, program: Program) -> Step:
    to, names = instruction.operands[0], names_of(instruction.operands[1])
    place, count = address(to, program), len(names)
    reads = [read_as(name, STORED[32], program) for name in names]
    is_transposed = "trans" in instruction.opcode

    def store(machine: Machine, mask: Mask) -> None:
        warps = machine.warps(mask)
        addresses = machine.by_warps(place(machine), warps)[:, : 8 * count]
        threads = warps[:, None] * 32 + np.arange(8 * count)
        words = np.stack([machine.by_warps(read(machine), warps) for read in reads], 1)
        if is_transposed:
            halves = words.view(np.uint16).reshape(len(warps), count, 8, 8)
            words = np.ascontiguousarray(halves.transpose(0, 1, 3, 2)).view(np.uint32)
        machine.shared.store(threads.reshape(-1), addresses.reshape(-1), words.reshape(-1, 4))

    return store


_TO_NUMBERS = {
    "f16": lambda x: x.view(np.float16).astype(np.float32),
    "bf16": lambda x: from_bfloat16(x.view(np.uint16)),
    # Tensor cores ignore the lower bits.
    "tf32": lambda x: (x & np.uint32(0xFFFFE000)).view(np.float32),
}


def _make_product(instruction: Instruction, program: Program) -> Step:
    """Compile a product of matrices by a warp, whose threads hold parts of the matrices.

    Four threads hold a row of A or a column of B. Products are exact. Their sums are rounded to
    float32, in a different order than on tensor cores.
    """
    to, a, b, c = (names_of(x) for x in instruction.operands)
    shape, kind = instruction.opcode[3], instruction.opcode[7]
    depth = {"m16n8k16": 16, "m16n8k8": 8}[shape]
    assert instruction.opcode[4:6] == ("row", "col"), instruction.text
    reads = [[read_as(x, STORED[32], program) for x in names] for names in (a, b, c)]
    convert, elements = _TO_NUMBERS[kind], 1 if kind == "tf32" else 2

    def multiply(machine: Machine, mask: Mask) -> None:
        warps = machine.warps(mask)
        words = [
            np.stack([machine.by_warps(read(machine), warps) for read in group], 2)
            for group in reads
        ]  # [warps, 32, words]
        x = _rows(convert(words[0]), depth)
        y = convert(words[1]).reshape(len(warps), 8, 4, 2, elements)  # column, row, half
        product = x @ y.transpose(0, 3, 2, 4, 1).reshape(len(warps), depth, 8)
        total = _of_threads(product) + words[2].view(np.float32)
        for i, name in enumerate(to):
            machine.put_by_warps(name, total[:, :, i].view(np.uint32), warps, mask)

    return multiply


def _rows(numbers: Array, depth: int) -> Array:
    """Return A, `[warps, 16, depth]`, from the values of threads, `[warps, 32, values]`.

    The first words belong to rows 8 apart, and the next words to the second half of the columns.
    """
    count = len(numbers)
    parts = numbers.reshape(count, 8, 4, 2, 2, -1)  # row, column, half of columns, of rows, element
    return parts.transpose(0, 4, 1, 3, 2, 5).reshape(count, 16, depth)


def _of_threads(product: Array) -> Array:
    """Return a product `[warps, 16, columns]` as the values of threads, `[warps, 32, values]`."""
    count, _, columns = product.shape
    parts = product.reshape(count, 2, 8, columns // 8, 4, 2)  # half, row, eight columns, two, one
    return np.ascontiguousarray(parts.transpose(0, 2, 4, 3, 1, 5)).reshape(count, 32, -1)


def _make_group_product(instruction: Instruction, program: Program) -> Step:
    """Compile a product by four warps, with B and perhaps A in shared memory, until a wait."""
    if instruction.opcode[1] == "fence":
        return lambda machine, mask: None
    if instruction.opcode[1] == "commit_group":

        def commit(machine: Machine, _: Mask) -> None:
            machine.product_groups += 1

        return commit
    if instruction.opcode[1] == "wait_group":
        (last,) = instruction.operands
        return lambda machine, _: _wait_for_products(machine, int(last))
    sizes = re.fullmatch(r"m64n(\d+)k(\d+)", instruction.opcode[4])
    assert sizes is not None, instruction.text
    columns, depth = int(sizes[1]), int(sizes[2])
    kind = instruction.opcode[6]
    to, a, b, *flags = instruction.operands
    to = names_of(to)
    held = isinstance(a, tuple)
    reads = [read_as(x, STORED[32 if held else 64], program) for x in names_of(a)]
    read_b, read_sum = read_as(b, STORED[64], program), read_as(flags[0], STORED[1], program)
    is_transposed = [x == "1" for x in flags[3:]]
    convert, size = _TO_NUMBERS[kind], 4 if kind == "tf32" else 2

    def stored(machine: Machine, descriptors: Array, groups: Ints, rows: int, turn: bool) -> Any:
        addresses = _find_addresses(descriptors, rows, depth, size, turn)
        owner = groups * 128 // machine.shape[1]
        owner = np.broadcast_to(owner[:, None, None], addresses.shape)
        values, at = machine.shared.begin_product(owner, addresses, size)
        return convert(values if size == 4 else values.view(np.uint16)), at

    def multiply(machine: Machine, mask: Mask) -> None:
        warps = machine.warps(mask)
        groups = warps[::4] // 4
        if (warps.reshape(-1, 4) != groups[:, None] * 4 + np.arange(4)).any():
            raise Fault("some of four warps do not arrive")
        if held:
            words = np.stack([machine.by_warps(read(machine), warps) for read in reads], 2)
            x, used = _rows(convert(words), depth), []
        else:
            descriptors = machine.by_warps(reads[0](machine), warps)[::4, 0]
            x, grains = stored(machine, descriptors, groups, 64, is_transposed[0])
            x, used = x.reshape(-1, 16, depth), [grains]
        descriptors = machine.by_warps(read_b(machine), warps)[::4, 0]
        y, grains = stored(
            machine, descriptors, groups, columns, is_transposed[-1] if is_transposed else False
        )
        product = _of_threads(x @ np.repeat(y.transpose(0, 2, 1), 4, 0))
        adds = machine.by_warps(read_sum(machine), warps)
        for i, name in enumerate(to):
            before = machine.unfinished.pop(name, None)
            if before is not None:
                machine.registers[name] = before
            number = product[:, :, i]
            if adds.any():
                old = machine.by_warps(machine.registers[name], warps).view(np.float32)
                number = np.where(adds, number + old, number)
            machine.put_by_warps(name, number.view(np.uint32), warps, mask)
            machine.unfinished[name] = machine.registers.pop(name)
        grains = np.concatenate([grains, *used])
        machine.products.append(Product(machine.product_groups, to, grains))

    return multiply


def _find_addresses(
    descriptors: Array, rows: int, depth: int, size: int, is_transposed: bool
) -> Ints:
    """Return addresses in shared memory, `[n, rows, depth]`, of matrices with these descriptors.

    In PTX's layouts a row of 32, 64 or 128 bytes is along the depth, or along the rows if `turned`.
    """
    fields = descriptors.astype(np.int64)[:, None, None]
    start, leading, stride = ((fields >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    modes = np.unique(fields >> 62 & 3)
    assert len(modes) == 1, "expected one layout"
    assert modes[0], "expected a layout with swizzling"
    width = {1: 128, 2: 64, 3: 32}[int(modes[0])]
    row, step = np.arange(rows)[:, None], np.arange(depth)[None]
    if is_transposed:
        inside = step // 8 * stride + step % 8 * width + row % (width // size) * size
        addresses = start + row // (width // size) * leading + inside
    else:
        addresses = start + row // 8 * stride + row % 8 * width + step * size
    return addresses ^ (addresses >> 7 & width // 16 - 1) << 4


def _wait_for_products(machine: Machine, num_unfinished: int) -> None:
    """End the products of all groups except the last `last` groups."""
    finished = [x for x in machine.products if x.group < machine.product_groups - num_unfinished]
    machine.products = [
        x for x in machine.products if x.group >= machine.product_groups - num_unfinished
    ]
    unfinished_names = {name for product in machine.products for name in product.names}
    for name in [name for name in machine.unfinished if name not in unfinished_names]:
        machine.registers[name] = machine.unfinished.pop(name)
    machine.shared.end_products([x.grains for x in finished], [x.grains for x in machine.products])


MATRICES: dict[str, Callable[[Instruction, Program], Step]] = {
    "ldmatrix": _make_matrix_load, "stmatrix": _make_matrix_store, "mma": _make_product,
    "wgmma": _make_group_product,
}  # fmt: skip
