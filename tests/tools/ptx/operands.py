"""Compile operands of instructions into functions that read a `Machine`."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .machine import Machine
from .memory import Array, Fault
from .operations import TYPES
from .parse import Program

# Types of registers, by their width in bits.
REG_TYPES = {1: TYPES["pred"], 8: TYPES["b8"], 16: TYPES["b16"], 32: TYPES["b32"], 64: TYPES["b64"]}
_FLOAT = re.compile(r"0([fd])([0-9A-Fa-f]+)")


def make_reader(operand: Any, dtype: np.dtype[Any], program: Program) -> Callable[[Machine], Array]:
    """Return a function that returns an operand of a `Machine`, as values of type `dtype`."""
    width = 1 if dtype == TYPES["pred"] else 8 * dtype.itemsize
    if operand in program.register_widths or operand[0] == "%":
        reg_type = REG_TYPES[program.register_widths.get(operand, 32)]
        if reg_type == dtype:
            return lambda machine: _read_register(machine, operand)
        if reg_type.itemsize == dtype.itemsize:
            return lambda machine: _read_register(machine, operand).view(dtype)
        # Operations use the lower bits of a wider register.
        part_type = REG_TYPES[width]
        return lambda machine: _read_register(machine, operand).astype(part_type).view(dtype)
    if match := _FLOAT.fullmatch(operand):
        size = 4 if match[1] == "f" else 8
        value = np.array([[int(match[2], 16)]], f"u{size}")
        value = value.view(f"f{size}").astype(dtype) if dtype.kind == "f" else value
    else:
        symbol = program.symbols.get(operand)
        number = int(operand.rstrip("U"), 0) if symbol is None else symbol
        value = np.array([[number & (1 << width) - 1]], f"u{dtype.itemsize}")
        value = value != 0 if width == 1 else value.view(dtype)
    return lambda _: value


def _read_register(machine: Machine, name: str) -> Array:
    value = machine.registers.get(name)
    if value is None:
        if name in machine.unfinished_results:
            raise Fault(f"register {name} is read before a wait for its product")
        value = machine.make_garbage(name)
    return value


def list_registers(operand: Any) -> tuple[str, ...]:
    """Return the names of a vector's registers, or the only name of a scalar operand."""
    return operand if isinstance(operand, tuple) else (operand,)


def make_address_reader(operand: str, program: Program) -> Callable[[Machine], Array]:
    """Return a function that returns the int64 addresses of an operand such as "[%r1+4]"."""
    base, _, offset = operand.strip("[] ").partition("+")
    base = base.strip()
    displacement = int(offset.strip() or "0", 0)
    read = make_reader(base, REG_TYPES[program.register_widths.get(base, 32)], program)
    return lambda machine: read(machine).astype(np.int64) + displacement
