"""Compile operands of instructions to functions that read a `Machine`."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .machine import Machine
from .memory import Array, Fault
from .operations import TYPES
from .parse import Program

# Types of registers by their width in bits.
STORED = {1: TYPES["pred"], 8: TYPES["b8"], 16: TYPES["b16"], 32: TYPES["b32"], 64: TYPES["b64"]}
_FLOAT = re.compile(r"0([fd])([0-9A-Fa-f]+)")


def read_as(operand: Any, kind: np.dtype[Any], program: Program) -> Callable[[Machine], Array]:
    """Return a function that returns an operand, as values of a type."""
    width = 1 if kind == TYPES["pred"] else 8 * kind.itemsize
    if operand in program.registers or operand[0] == "%":
        stored = STORED[program.registers.get(operand, 32)]
        if stored == kind:
            return lambda machine: _get(machine, operand)
        if stored.itemsize == kind.itemsize:
            return lambda machine: _get(machine, operand).view(kind)
        # Operations take the lower bits of a register.
        narrow = STORED[width]
        return lambda machine: _get(machine, operand).astype(narrow).view(kind)
    if match := _FLOAT.fullmatch(operand):
        size = 4 if match[1] == "f" else 8
        value = np.array([[int(match[2], 16)]], f"u{size}")
        value = value.view(f"f{size}").astype(kind) if kind.kind == "f" else value
    else:
        symbol = program.symbols.get(operand)
        number = int(operand.rstrip("U"), 0) if symbol is None else symbol
        value = np.array([[number & (1 << width) - 1]], f"u{kind.itemsize}")
        value = value != 0 if width == 1 else value.view(kind)
    return lambda _: value


def _get(machine: Machine, name: str) -> Array:
    value = machine.registers.get(name)
    if value is None:
        if name in machine.unfinished:
            raise Fault(f"register {name} is read before a wait ends its product")
        value = machine.make_garbage(name)
    return value


def names_of(operand: Any) -> tuple[str, ...]:
    """Return the registers of a vector, or a tuple of one register."""
    return operand if isinstance(operand, tuple) else (operand,)


def address(operand: str, program: Program) -> Callable[[Machine], Array]:
    """Return a function that returns the addresses of an operand such as "[%r1+4]", int64."""
    base, _, offset = operand.strip("[] ").partition("+")
    base, distance = base.strip(), int(offset.strip() or "0", 0)
    read = read_as(base, STORED[program.registers.get(base, 32)], program)
    return lambda machine: read(machine).astype(np.int64) + distance
