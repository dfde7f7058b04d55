"""Read long texts of five kinds from files that come with Python.

Nothing is downloaded. Code is the source of the standard library. Manual pages are `pydoc_data`.
Prose is the running text in the library's docstrings, which is technical English. Tool JSON
describes the library's functions as the tools of a model. A chat asks about functions one by one,
in the model's chat template, and the answers are docstrings. The same version of Python and the
same tokenizer give the same texts. No paragraph of prose or of the manual, and no docstring, occurs
twice.
"""

import ast
import functools
import itertools
import json
import pydoc_data.topics
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..calibration.texts import read_windows
from ..errors import ConfigError

_MIN_MODULE_BYTES = 16_000  # minimum size of a module that is read as code
_MIN_PARAGRAPH_CHARACTERS = 200  # minimum number of characters of a paragraph of running text
_MIN_LETTER_SHARE = 0.97  # minimum share of letters in a paragraph of running text
_CHARACTERS_PER_TOKEN = 3  # characters that are tokenized first for each requested token
_EXCLUDED = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages"}
# JSON types of arguments by the type of their default. All other types become strings.
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number"}
_QUESTIONS = ("What does {} do?", "And {}?", "How do I use {}?", "Explain {}, please.")


@dataclass(frozen=True)
class _Definition:
    """A module, class or function of the standard library that has a docstring."""

    name: str  # full name, with the module
    doc: str
    # Name of each argument of a function, and the JSON type of its default. The type is None if the
    # argument has no default. The tuple is None for a module or class.
    arguments: tuple[tuple[str, str | None], ...] | None


def read_texts(tokenizer: Any, kind: str, num_texts: int, num_tokens: int) -> list[torch.Tensor]:
    """Return the first `num_texts` texts of a kind, `[1, num_tokens]` each, int64.

    Raises:
        ConfigError: The kind has fewer texts of this many tokens, or Python has no sources.
    """
    passages = KINDS[kind]()  # strings, or questions with answers for a chat
    texts: list[torch.Tensor] = []
    while len(texts) < num_texts:
        ids = _read_text(tokenizer, passages, num_tokens)
        if ids is None:
            raise ConfigError(
                f"num_texts: expected at most {len(texts)} texts of {num_tokens} tokens of the "
                f"kind {kind!r}, got {num_texts}. Choose fewer or shorter texts"
            )
        texts.append(ids)
    return texts


def _read_text(tokenizer: Any, passages: Iterator[Any], num_tokens: int) -> torch.Tensor | None:
    """Return the tokens of the next passages, `[1, num_tokens]`, or None if they are too few."""
    text_passages: list[Any] = []
    min_characters = _CHARACTERS_PER_TOKEN * num_tokens
    num_characters = 0
    for passage in passages:
        text_passages.append(passage)
        num_characters += sum(map(len, passage))
        if num_characters < min_characters:
            continue
        text = _join_passages(text_passages, tokenizer)
        ids = read_windows([text], tokenizer, max_tokens=num_tokens, max_length=num_tokens)[0]
        if len(ids) == num_tokens:
            return ids[None].long()
        min_characters = num_characters + _CHARACTERS_PER_TOKEN * num_tokens // 4
    return None


def _join_passages(passages: list[Any], tokenizer: Any) -> str | list[dict[str, str]]:
    """Return one text, or the messages of a chat if the tokenizer has a chat template."""
    if isinstance(passages[0], str):
        return "\n".join(passages)
    if not tokenizer.chat_template:
        return "\n".join(f"User: {prompt}\n\nAssistant: {answer}\n" for prompt, answer in passages)
    messages = []
    for prompt, answer in passages:
        messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return messages


def _read_prose() -> Iterator[str]:
    """Yield paragraphs of running text from the docstrings of the standard library."""
    yielded: set[str] = set()
    for definition in _walk_library():
        for block in re.split(r"\n\s*\n", definition.doc):
            paragraph = " ".join(block.split())
            num_letters = sum(character.isalpha() or character in " ,.'" for character in paragraph)
            if (
                len(paragraph) >= _MIN_PARAGRAPH_CHARACTERS
                and num_letters >= _MIN_LETTER_SHARE * len(paragraph)
                and paragraph[0].isupper()
                and paragraph.endswith(".")
                and paragraph not in yielded
            ):
                yielded.add(paragraph)
                yield paragraph + "\n"


def _read_code() -> Iterator[str]:
    for path in _find_modules():
        if not path.name.startswith("_") and path.stat().st_size >= _MIN_MODULE_BYTES:
            yield path.read_text(encoding="utf-8", errors="replace")


def _read_manual() -> Iterator[str]:
    """Yield the topics of Python's manual, the longest first, each paragraph once."""
    topics: dict[str, str] = pydoc_data.topics.topics
    yielded: set[str] = set()
    for name in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        paragraphs = [text for text in topics[name].split("\n\n") if text not in yielded]
        yielded.update(paragraphs)
        yield "\n\n".join(paragraphs) + "\n"


def _read_tools() -> Iterator[str]:
    """Yield functions as JSON, in the format of a model's tools."""
    for function in _find_functions():
        arguments = function.arguments or ()
        properties = {name: {"type": json_type or "string"} for name, json_type in arguments}
        required = [name for name, json_type in arguments if json_type is None]
        declaration = {
            "name": function.name,
            "description": function.doc.split("\n\n")[0],
            "parameters": {"type": "object", "properties": properties, "required": required},
        }
        yield json.dumps({"type": "function", "function": declaration})


def _read_chat() -> Iterator[tuple[str, str]]:
    for index, function in enumerate(_find_functions()):
        call = f"{function.name}({', '.join(name for name, _ in function.arguments or ())})"
        yield _QUESTIONS[index % len(_QUESTIONS)].format(call), function.doc


KINDS: dict[str, Callable[[], Iterator[Any]]] = {
    "code": _read_code,
    "prose": _read_prose,
    "manual": _read_manual,
    "tool JSON": _read_tools,
    "chat": _read_chat,
}


@functools.cache
def _find_modules() -> tuple[Path, ...]:
    """Return the sources of the standard library, two folders deep, in a fixed order.

    Raises:
        ConfigError: Python has no sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = [*sorted(root.glob("*.py")), *sorted(root.glob("*/*.py"))]
    modules = [path for path in paths if not _EXCLUDED & set(path.relative_to(root).parts)]
    if not modules:
        raise ConfigError(
            f"texts: expected the sources of Python's standard library in {root}, got none. Use an "
            "interpreter that has them"
        )
    return tuple(modules)


def _walk_library() -> Iterator[_Definition]:
    root = Path(sysconfig.get_path("stdlib"))
    return itertools.chain.from_iterable(_parse_module(path, root) for path in _find_modules())


@functools.cache
def _parse_module(path: Path, root: Path) -> tuple[_Definition, ...]:
    """Return the documented definitions of a module. They need less memory than its syntax tree."""
    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    definitions = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            doc = ast.get_docstring(node)
            suffix = "" if isinstance(node, ast.Module) else f".{node.name}"
            arguments = None
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                arguments = tuple(_list_arguments(node.args))
            if doc:
                definitions.append(_Definition(name + suffix, doc, arguments))
    return tuple(definitions)


def _find_functions() -> Iterator[_Definition]:
    """Yield the library's functions that have a long enough docstring, each docstring once."""
    yielded: set[str] = set()
    for function in _walk_library():
        is_long_enough = len(function.doc) >= _MIN_PARAGRAPH_CHARACTERS // 2
        if function.arguments is not None and is_long_enough and function.doc not in yielded:
            yielded.add(function.doc)
            yield function


def _list_arguments(arguments: ast.arguments) -> Iterator[tuple[str, str | None]]:
    """Yield the name of each argument, and the JSON type of its default or None."""
    all_arguments = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    defaults: list[Any] = [*arguments.defaults, *arguments.kw_defaults]
    # The first positional arguments may lack a default. They have no entry in `defaults`.
    defaults = [None] * (len(all_arguments) - len(defaults)) + defaults
    for argument, default in zip(all_arguments, defaults, strict=True):
        if argument.arg not in ("self", "cls"):
            value = getattr(default, "value", None)
            yield argument.arg, None if default is None else _JSON_TYPES.get(type(value), "string")
