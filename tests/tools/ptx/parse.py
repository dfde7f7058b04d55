"""Parse the PTX that Triton's compiler writes."""

import re
from collections import ChainMap
from collections.abc import Mapping
from typing import Any, NamedTuple

# Width of a register of each type, in bits.
REGISTER_WIDTHS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64}


class Instruction(NamedTuple):
    """A parsed instruction.

    Attributes:
        opcode: The opcode, split at its dots, such as ("add", "s32").
        operands: Registers, numbers and symbols as they are written. Vectors are tuples.
        guard: Name of the register with the predicate, or "" if all threads execute it.
        is_negated: Whether the guard is negated, so that a thread executes it if the predicate is
            false.
        text: Source line and text of the instruction, for messages.
    """

    opcode: tuple[str, ...]
    operands: tuple[Any, ...]
    guard: str
    is_negated: bool
    text: str


class Program(NamedTuple):
    """A parsed kernel.

    Attributes:
        num_threads: Number of threads per program (CTA).
        labels: Index of the instruction after each label.
        symbols: Addresses of parameters, which lie 8 bytes apart here, and of shared memory.
        register_widths: Width of each register, in bits.
    """

    name: str
    num_parameters: int
    num_threads: int
    instructions: list[Instruction]
    labels: dict[str, int]
    symbols: dict[str, int]
    register_widths: dict[str, int]


_HEADER = re.compile(r"\.visible \.entry (\w+)\((.*?)\)(.*?)\{", re.DOTALL)
_PARAMETER = re.compile(r"\.param [^,]*?(\w+)\s*(?:,|$)")
_STATEMENT = re.compile(
    r"\s*(?://\s*(?P<line>\w+\.py:\d+)[^\n]*|//[^\n]*|(?P<label>[\w$]+):(?!:)|(?P<scope>[{}])"
    r"|(?P<directive>\.(?:loc|file|pragma)\b[^\n/]*)"
    r"|\.reg\s+\.(?P<kind>\w+)\s+(?P<names>[^;]+);|(?P<instruction>[@a-z][^;]*);|;)"
)
_RANGE = re.compile(r"(.*)<(\d+)>")
_INSTRUCTION = re.compile(r"(?:@(!?)([%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^\s,|{}\[\]]+")


def parse(text: str) -> Program:
    header = _HEADER.search(text)
    assert header is not None, "expected a kernel"
    num_threads = re.search(r"\.reqntid (\d+)", header[3])
    assert num_threads is not None, "expected a number of threads"
    parameters = _PARAMETER.findall(header[2].strip())
    symbols = {"global_smem": 0, **{name: 8 * i for i, name in enumerate(parameters)}}
    register_widths: dict[str, int] = {}
    # Several blocks of inline assembly may declare registers with the same names.
    scopes: ChainMap[str, str] = ChainMap()
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    source_line = ""
    position = header.end()
    num_declarations = 0
    while True:
        match = _STATEMENT.match(text, position)
        assert match is not None, f"expected a statement, got {text[position : position + 80]!r}"
        position = match.end()
        if match["line"]:
            source_line = match["line"]
        elif match["label"]:
            labels[match["label"]] = len(instructions)
        elif match["scope"] == "{":
            scopes = scopes.new_child()
        elif match["scope"] and len(scopes.maps) == 1:
            break
        elif match["scope"]:
            scopes = scopes.parents
        elif match["kind"]:
            for declared in map(str.strip, match["names"].split(",")):
                num_declarations += 1
                register_names = [declared]
                if name_range := _RANGE.fullmatch(declared):
                    register_names = [f"{name_range[1]}{i}" for i in range(int(name_range[2]))]
                for name in register_names:
                    unique_name = name if name.startswith("%") else f"{name}#{num_declarations}"
                    if unique_name != name:
                        scopes[name] = unique_name
                    register_widths[unique_name] = REGISTER_WIDTHS[match["kind"]]
        elif match["instruction"]:
            instructions.append(_parse_instruction(match["instruction"], scopes, source_line))
    return Program(
        header[1], len(parameters), int(num_threads[1]), instructions, labels, symbols,
        register_widths,
    )  # fmt: skip


def _parse_instruction(text: str, scopes: Mapping[str, str], source_line: str) -> Instruction:
    match = _INSTRUCTION.fullmatch(text)
    assert match is not None, f"expected an instruction, got {text!r}"
    negation, guard, opcode, operands_text = match.groups()
    operands: list[str | tuple[str, ...]] = []
    for operand in _OPERAND.findall(operands_text):
        if operand[0] == "{":
            registers = (register.strip() for register in operand[1:-1].split(","))
            operands.append(tuple(scopes.get(register, register) for register in registers))
        else:
            operands.append(scopes.get(operand, operand))
    one_line = " ".join(text.split())
    return Instruction(
        tuple(opcode.split(".")), tuple(operands), scopes.get(guard or "", guard or ""),
        bool(negation), f"{source_line}: {one_line}",
    )  # fmt: skip
