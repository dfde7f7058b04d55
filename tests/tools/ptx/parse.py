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
        opcode: Parts of the opcode, such as ("add", "s32").
        operands: Registers, numbers and symbols as they are written. Vectors are tuples.
        guard: Name of the register with the predicate, or "" if every thread executes it.
        is_negated: Whether the threads whose predicate is false execute the instruction.
        text: Line of the kernel's source, and the instruction.
    """

    opcode: tuple[str, ...]
    operands: tuple[Any, ...]
    guard: str
    is_negated: bool
    text: str


class Program(NamedTuple):
    """A kernel.

    Attributes:
        name: Name of the kernel.
        num_parameters: Number of parameters.
        num_threads: Number of threads of a program.
        code: Instructions of the kernel.
        labels: Index of the instruction after each label.
        symbols: Addresses of parameters, which lie 8 bytes apart here, and of shared memory.
        registers: Width of each register in bits.
    """

    name: str
    num_parameters: int
    num_threads: int
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
    """Parse the kernel of a PTX module."""
    head = _HEAD.search(text)
    assert head is not None, "expected a kernel"
    threads = re.search(r"\.reqntid (\d+)", head[3])
    assert threads is not None, "expected a number of threads"
    parameters = _PARAMETER.findall(head[2].strip())
    symbols = {"global_smem": 0, **{name: 8 * i for i, name in enumerate(parameters)}}
    registers: dict[str, int] = {}
    # Blocks of inline assembly may declare registers of the same names.
    scopes: ChainMap[str, str] = ChainMap()
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    source_line, position, num_declarations = "", head.end(), 0
    while True:
        match = _STATEMENT.match(text, position)
        assert match is not None, f"expected a statement, got {text[position : position + 80]!r}"
        position = match.end()
        if match["line"]:
            source_line = match["line"]
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
                num_declarations += 1
                span = _RANGE.fullmatch(declared.strip())
                names = (
                    [f"{span[1]}{i}" for i in range(int(span[2]))] if span else [declared.strip()]
                )
                for name in names:
                    unique = name if name.startswith("%") else f"{name}#{num_declarations}"
                    if unique != name:
                        scopes[name] = unique
                    registers[unique] = WIDTHS[match["kind"]]
        elif match["text"]:
            code.append(_parse_instruction(match["text"], scopes, source_line))
    return Program(head[1], len(parameters), int(threads[1]), code, labels, symbols, registers)


def _parse_instruction(text: str, scopes: Mapping[str, str], source_line: str) -> Instruction:
    match = _TEXT.fullmatch(text)
    assert match is not None, f"expected an instruction, got {text!r}"
    negation, guard, opcode, operands_text = match.groups()
    operands: list[str | tuple[str, ...]] = []
    for part in _OPERAND.findall(operands_text):
        if part[0] == "{":
            registers = (x.strip() for x in part[1:-1].split(","))
            operands.append(tuple(scopes.get(x, x) for x in registers))
        else:
            operands.append(scopes.get(part, part))
    one_line = " ".join(text.split())
    return Instruction(
        tuple(opcode.split(".")), tuple(operands), scopes.get(guard or "", guard or ""),
        bool(negation), f"{source_line}: {one_line}",
    )  # fmt: skip
