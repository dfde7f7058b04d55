"""Parse the PTX that Triton's compiler writes."""

import re
from collections import ChainMap
from collections.abc import Mapping
from typing import Any, NamedTuple

# Bits of a register of each class.
WIDTHS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64}


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        opcode: Its parts, such as ("add", "s32").
        operands: Registers, numbers and symbols as they are written, vectors as tuples.
        guard: The register of a predicate, or "".
        negated: Whether the instruction is executed by threads whose predicate is false.
        text: The line of the kernel's source, and the instruction.
    """

    opcode: tuple[str, ...]
    operands: tuple[Any, ...]
    guard: str
    negated: bool
    text: str


class Program(NamedTuple):
    """A kernel.

    Attributes:
        name: Its name.
        parameters: Number of its parameters.
        threads: Threads of a program.
        code: Instructions.
        labels: The index of the instruction after each label.
        symbols: Addresses of parameters, which lie 8 bytes apart here, and of shared memory.
        registers: The width of each register in bits.
    """

    name: str
    parameters: int
    threads: int
    code: list[Instruction]
    labels: dict[str, int]
    symbols: dict[str, int]
    registers: dict[str, int]


_HEAD = re.compile(r"\.visible \.entry (\w+)\((.*?)\)(.*?)\{", re.DOTALL)
_PARAMETER = re.compile(r"\.param [^,]*?(\w+)\s*(?:,|$)")
_STATEMENT = re.compile(
    r"\s*(?://\s*(?P<line>\w+\.py:\d+)[^\n]*|//[^\n]*|(?P<label>[\w$]+):(?!:)|(?P<scope>[{}])"
    r"|(?P<directive>\.(?:loc|file|pragma)\b[^\n/]*)"
    r"|\.reg\s+\.(?P<kind>\w+)\s+(?P<names>[^;]+);|(?P<text>[@a-z][^;]*);|;)"
)
_RANGE = re.compile(r"(.*)<(\d+)>")
_TEXT = re.compile(r"(?:@(!?)([%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^\s,|{}\[\]]+")


def parse(text: str) -> Program:
    """Return the kernel of a module."""
    head = _HEAD.search(text)
    assert head is not None, "expected a kernel"
    threads = re.search(r"\.reqntid (\d+)", head[3])
    assert threads is not None, "expected a number of threads"
    parameters = _PARAMETER.findall(head[2].strip())
    symbols = {"global_smem": 0, **{name: 8 * i for i, name in enumerate(parameters)}}
    registers: dict[str, int] = {}
    # Blocks of assembly have registers of the same names.
    scopes: ChainMap[str, str] = ChainMap()
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    line, at, count = "", head.end(), 0
    while True:
        match = _STATEMENT.match(text, at)
        assert match is not None, f"expected a statement, got {text[at : at + 80]!r}"
        at = match.end()
        if match["line"]:
            line = match["line"]
        elif match["label"]:
            labels[match["label"]] = len(code)
        elif match["scope"] == "{":
            scopes = scopes.new_child()
        elif match["scope"] and len(scopes.maps) == 1:
            break
        elif match["scope"]:
            scopes = scopes.parents
        elif match["kind"]:
            for declared in match["names"].split(","):
                count += 1
                many = _RANGE.fullmatch(declared.strip())
                names = (
                    [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [declared.strip()]
                )
                for name in names:
                    unique = name if name.startswith("%") else f"{name}#{count}"
                    if unique != name:
                        scopes[name] = unique
                    registers[unique] = WIDTHS[match["kind"]]
        elif match["text"]:
            code.append(_parse_instruction(match["text"], scopes, line))
    return Program(head[1], len(parameters), int(threads[1]), code, labels, symbols, registers)


def _parse_instruction(text: str, names: Mapping[str, str], line: str) -> Instruction:
    match = _TEXT.fullmatch(text)
    assert match is not None, f"expected an instruction, got {text!r}"
    negated, guard, opcode, operands_text = match.groups()
    operands: list[str | tuple[str, ...]] = []
    for part in _OPERAND.findall(operands_text):
        if part[0] == "{":
            inner = (x.strip() for x in part[1:-1].split(","))
            operands.append(tuple(names.get(x, x) for x in inner))
        else:
            operands.append(names.get(part, part))
    flat = " ".join(text.split())
    return Instruction(
        tuple(opcode.split(".")), tuple(operands), names.get(guard or "", guard or ""),
        bool(negated), f"{line}: {flat}",
    )  # fmt: skip
