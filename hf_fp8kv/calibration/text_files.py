"""Files of text and of JSON lines, read as a stream: a file may be larger than the memory.

At most a chunk, a piece or a line of JSON is held at a time.
"""

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath

from ..errors import ConfigError

_JSON_LINES = (".jsonl", ".json-lines", ".ndjson")
# Files that hold texts, but are not text: what to do with them instead.
_NOT_TEXT = {
    ".json": "json.load it and pass the list, or name it .jsonl if each line is a value",
    ".parquet": "pass Dataset.from_parquet(path), of the package datasets",
    ".arrow": "pass Dataset.from_file(path), of the package datasets",
}
_CHUNK_BYTES = 1 << 16
# A line of JSON is read whole; one longer than this is a file of another kind.
_LONGEST_LINE_BYTES = 1 << 26
# Lines are packed into windows; a longer one is cut at a space, so that windows come out full.
_SHORTEST_UNIT_CHARACTERS = 32


def is_json_lines(path: Path) -> bool:
    """Return whether a file is JSON lines, not text, by its name; raise ConfigError for neither."""
    suffix = PurePath(path.name.lower().removesuffix(".gz")).suffix
    if suffix in _NOT_TEXT:
        raise ConfigError(
            f"{path}: expected a text file or JSON lines (.jsonl), got {suffix}; "
            f"{_NOT_TEXT[suffix]}"
        )
    return suffix in _JSON_LINES


def read_json_lines(path: Path) -> Iterator[tuple[str, object]]:
    """Yield each line that is not blank: where it is, for messages, and its value."""
    with _open_text(path) as file:
        number = 0
        while line := file.readline(_LONGEST_LINE_BYTES + 1):
            number += 1
            where = f"{path}, line {number}"
            if len(line) > _LONGEST_LINE_BYTES:
                raise ConfigError(
                    f"{where}: expected at most {_LONGEST_LINE_BYTES >> 20} MiB, got more; write "
                    "one text a line"
                )
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise _not_utf8(where, error) from error
            if not text.strip():
                continue
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"{where}: expected one JSON value, got {type(error).__name__}: {error}; write "
                    "each text as one line of JSON, or name the file .txt if it is plain text"
                ) from error
            yield where, value


def split_text_file(
    path: Path, count: Callable[[Sequence[str]], Sequence[int]], room: int, line: int
) -> Iterator[str]:
    """Yield the file as texts that follow each other, each of about `room` tokens.

    A piece ends where a paragraph ends if it is then at least half full, else where a line ends,
    else after a space. Only the white space around pieces is lost. `count` returns the number of
    tokens of each of several strings; a `line` of more characters is taken apart.
    """
    held: list[tuple[str, int]] = []
    size = 0
    for units in _read_units(_read_chunks(path), max(line, _SHORTEST_UNIT_CHARACTERS)):
        # A blank line counts as one token: a file may be blank lines without an end.
        counts = iter(count([unit for unit in units if not unit.isspace()]))
        for unit in units:
            tokens = 1 if unit.isspace() else max(next(counts), 1)
            while held and size + tokens > room:
                end = _best_end(held, size)
                yield _join(held[:end])
                held = held[end:]
                size = sum(n for _, n in held)
            held.append((unit, tokens))
            size += tokens
    yield _join(held)


def _best_end(held: Sequence[tuple[str, int]], size: int) -> int:
    """Return how many units to take: to the last paragraph of the second half, or line."""
    line, before = None, size
    for end in range(len(held), 0, -1):
        if 2 * before < size:
            break
        unit, tokens = held[end - 1]
        if unit.isspace():
            return end
        if line is None and unit.endswith("\n"):
            line = end
        before -= tokens
    return line or len(held)


def _join(held: Sequence[tuple[str, int]]) -> str:
    # The indent of a first line is text, a line break before it is not.
    return "".join(unit for unit, _ in held).strip("\n").rstrip()


def _read_units(chunks: Iterator[str], longest: int) -> Iterator[list[str]]:
    """Yield for each chunk the lines that end in it; one longer than `longest` comes in parts."""
    tail = ""
    for chunk in chunks:
        *lines, tail = (tail + chunk).split("\n")
        units = [part for line in lines for part in _cut_line(line + "\n", longest)]
        # The end of the chunk is not the end of its line: its last part may still grow.
        *parts, tail = _cut_line(tail, longest)
        if units or parts:
            yield units + parts
    if tail:
        yield [tail]


def _cut_line(line: str, longest: int) -> list[str]:
    """Cut a line into parts of at most `longest` characters, after a space where there is one."""
    parts = []
    start = 0
    while len(line) - start > longest:
        end = line.rfind(" ", start, start + longest) + 1 or start + longest
        parts.append(line[start:end])
        start = end
    return [*parts, line[start:]]


def _read_chunks(path: Path) -> Iterator[str]:
    """Yield the text in chunks, every line break as a newline."""
    decoder = io.IncrementalNewlineDecoder(
        codecs.getincrementaldecoder("utf-8-sig")(), translate=True
    )
    newlines = 0
    with _open_text(path) as file:
        while True:
            chunk = file.read(_CHUNK_BYTES)
            try:
                yield decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                # What the decoder had kept of the chunk before is part of one character.
                newlines += error.object[: error.start].count(b"\n")
                raise _not_utf8(f"{path}, line {newlines + 1}", error) from error
            if not chunk:
                return
            newlines += chunk.count(b"\n")


@contextmanager
def _open_text(path: Path) -> Iterator[io.BufferedIOBase]:
    """Open the file, unpacked if it is gzip; what goes wrong in reading is a ConfigError."""
    packed = path.name.lower().endswith(".gz")
    try:
        with gzip.open(path) if packed else path.open("rb") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        expected = "a gzip file" if packed else "a file that can be read"
        raise ConfigError(
            f"{path}: expected {expected}, got {type(error).__name__}: {error}; it may be cut off, "
            "fetch or write it again"
        ) from error


def _not_utf8(where: str, error: UnicodeDecodeError) -> ConfigError:
    byte = error.object[error.start]
    utf16 = error.start == 0 and error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    got = "UTF-16" if utf16 else f"the byte 0x{byte:02x} ({error.reason})"
    return ConfigError(f"{where}: expected UTF-8, got {got}; save the file as UTF-8 text")
