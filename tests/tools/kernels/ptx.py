"""The PTX of ops/triton/codec.py, evaluated on the CPU."""

from typing import Any


def evaluate(text: str, codes: Any) -> list[Any]:
    """Return the bit patterns of the four float16 values that a packed move makes of four codes.

    `codes` is the register with the four codes: an int, or an int64 array of registers.
    """
    names = {"$2": codes}
    for line in text.replace("\n", "").strip("{}").split(";"):
        operation, _, operands = line.strip().partition(" ")
        if operation in ("", ".reg"):
            continue
        target, *sources = (part.strip() for part in operands.split(","))
        x = [names[s] if s in names else int(s, 0) for s in sources]
        names[target] = _OPERATIONS[operation.split(".")[0]](*x) & 0xFFFFFFFF
    return [(names[f"${i}"] >> at) & 0xFFFF for i in (0, 1) for at in (0, 16)]


def _permute(a: Any, b: Any, selector: int) -> Any:
    source = [(x >> at) & 0xFF for x in (a, b) for at in (0, 8, 16, 24)]
    result = 0
    for i in range(4):
        chosen = (selector >> 4 * i) & 0xF
        byte = source[chosen & 7]
        result |= (0xFF * (byte >> 7) if chosen & 8 else byte) << 8 * i
    return result


_OPERATIONS = {
    "prmt": _permute,
    "shl": lambda a, b: a << b,
    "and": lambda a, b: a & b,
    "add": lambda a, b: a + b,
    "not": lambda a: ~a,
    "lop3": lambda a, b, c, table: {0xEA: (a & b) | c}[table],
}
