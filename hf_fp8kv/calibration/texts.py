"""Read the texts of a calibration, tokenize them, and split them into windows.

The windows are the same for any order of the texts, if all texts are read.
"""

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from transformers import PreTrainedModel

from ..errors import ConfigError
from ..modeling.model_support import find_max_positions
from ..utils.arguments import check_count
from ..utils.text import format_list, format_value

logger = logging.getLogger(__name__)

# A window of one token has no previous token to attend to.
_MIN_TOKENS = 2
# Lines longer than `max(max_length // 8, 32)` characters are cut, at a space if possible, so that
# texts can fill their windows.
_LINES_PER_WINDOW, _UNCUT_CHARACTERS = 8, 32
# Number of lines that are tokenized in one call, and of characters that are read at once.
_LINES_PER_CALL = 1024
_CHARACTERS_PER_READ = 1 << 16


def read_model_windows(
    model: PreTrainedModel, texts: Any, tokenizer: Any, *, max_length: int, **options: Any
) -> list[torch.Tensor]:
    """Return `read_windows` for a model, with its own tokenizer if `tokenizer` is None.

    Raises:
        ConfigError: As `read_windows`, or the model has no embedding for a token id.
    """
    name = getattr(model, "name_or_path", "")
    if tokenizer is None and name:
        from transformers import AutoTokenizer  # loads many modules

        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, ImportError) as error:
            # Token ids need no tokenizer. Other texts raise an error without one.
            logger.info("no tokenizer in %s: %s", name, error)
    max_length = min(max_length, find_max_positions(model))
    windows = read_windows(texts, tokenizer, max_length=max_length, **options)
    vocab_size = getattr(model.get_input_embeddings(), "num_embeddings", None)
    max_id = max(int(window.max()) for window in windows)
    if vocab_size is not None and max_id >= vocab_size:
        raise ConfigError(
            f"texts: expected token ids below {vocab_size}, the vocabulary of the model, got "
            f"{max_id}. Use the tokenizer of the model"
        )
    return windows


def read_windows(
    texts: Any,
    tokenizer: Any,
    *,
    max_tokens: int,
    max_length: int,
    text_column: str = "text",
    chat_template: bool | None = None,
) -> list[torch.Tensor]:
    """Return texts as windows of token ids, int32 `[T]` on the CPU, the longest first.

    A text is cut into consecutive windows of at most `max_length` tokens. A window of one token is
    left out. The tokenizer adds its special tokens once per text. Blank texts are skipped.

    Args:
        texts: The path of a `.txt` file (UTF-8) or of a `.jsonl` file, or an iterable such as a
            list or a `datasets` dataset. An item, or the JSON value of a line, is a text, a list of
            messages with `role` and `content`, token ids, or a row with such a value in
            `text_column` (or in `messages`, if `text_column` is "text"). A text file is cut into
            texts of about a window, at the ends of paragraphs.
        tokenizer: A tokenizer of transformers, or None if all items are token ids.
        max_tokens: Maximum number of tokens. Reading stops there.
        max_length: Maximum number of tokens in a window.
        text_column, chat_template: As in `calibrate`.

    Raises:
        ConfigError: The type of the texts is not supported, or no text has two tokens.
    """
    check_count("max_tokens", max_tokens, _MIN_TOKENS)
    check_count("max_length", max_length, _MIN_TOKENS)
    encoder = _Encoder(tokenizer, text_column, chat_template)
    windows: list[torch.Tensor] = []
    num_tokens_left = max_tokens
    for label, item in _iterate_items(texts, encoder, max_length):
        ids = encoder.encode(label, item)
        if ids is None:
            continue
        # A view would keep the complete text in memory.
        new_windows = [window.clone() for window in ids[:num_tokens_left].split(max_length)]
        windows += [window for window in new_windows if len(window) >= _MIN_TOKENS]
        num_tokens_left = max_tokens - sum(map(len, windows))
        if num_tokens_left < _MIN_TOKENS:
            break
    if not windows:
        raise ConfigError(
            f"texts: expected a text of at least {_MIN_TOKENS} tokens, got none. Check the file, "
            "or that the iterator was not read before"
        )
    return sorted(windows, key=lambda window: (-len(window), _to_bytes(window)))


class _Encoder:
    """Converts items to token ids, with the options of `read_windows`."""

    def __init__(self, tokenizer: Any, text_column: str, chat_template: bool | None) -> None:
        from transformers import PreTrainedTokenizerBase

        if not isinstance(tokenizer, PreTrainedTokenizerBase | None):
            raise ConfigError(
                f"tokenizer: expected a tokenizer of transformers, got {type(tokenizer).__name__}. "
                "Pass AutoTokenizer.from_pretrained(...), or the `tokenizer` of a processor"
            )
        if chat_template not in (None, True, False):
            raise ConfigError(
                f"chat_template: expected None, True or False, got {chat_template}. Set the text "
                "of a template as tokenizer.chat_template"
            )
        self._tokenizer: Any = tokenizer
        self._text_column = text_column
        self._chat_template = chat_template

    def encode(self, label: str, item: Any) -> torch.Tensor | None:
        """Return the token ids of an item, int32 `[N]` on the CPU, or None for a blank item."""
        if isinstance(item, Mapping):
            names = [self._text_column] + ["messages"] * (self._text_column == "text")
            column = next((name for name in names if name in item), None)
            if column is None:
                raise ConfigError(
                    f"{label}: expected a column {' or '.join(map(repr, names))}, got the columns "
                    f"{format_list(map(repr, item), 20)}. Name the column with text_column, and "
                    "pass a conversation as a list"
                )
            label = f"{label}, column {column!r}"
            item = item[column]
        is_blank = isinstance(item, str) and not item.strip()
        if is_blank or (isinstance(item, list | tuple) and not item):
            return None
        if isinstance(item, str) and self._chat_template:
            item = [{"role": "user", "content": item}]
        is_chat = isinstance(item, list | tuple) and isinstance(item[0], Mapping)
        if not is_chat and not isinstance(item, str):
            return self._check_ids(label, item)
        if self._tokenizer is None:
            raise ConfigError(
                f"{label}: expected token ids without a tokenizer, got text. Pass "
                "tokenizer=AutoTokenizer.from_pretrained(...)"
            )
        # A chat template contains the special tokens.
        text = self._render_chat(label, item) if is_chat else item
        (ids,) = self.tokenize(label, [text], special=not is_chat)
        return torch.tensor(ids, dtype=torch.int32, device="cpu")

    def tokenize(self, label: str, texts: list[str], *, special: bool) -> list[list[int]]:
        """Return the token ids of each text, with special tokens if `special`."""
        try:
            # Not verbose: a text may be longer than the model's context.
            ids = self._tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
        except (TypeError, UnicodeError) as error:
            text = next((t for t in texts if t.encode(errors="ignore").decode() != t), texts[0])
            raise ConfigError(
                f"{label}: expected text that UTF-8 can encode, got {ascii(text)[:120]}. Replace "
                "its characters: text.encode('utf-8', 'replace').decode()"
            ) from error
        return list(ids)

    def _render_chat(self, label: str, messages: Sequence[Any]) -> str:
        if self._chat_template is False:
            raise ConfigError(
                f"{label}: expected a text with chat_template=False, got a list of messages. Omit "
                "chat_template, or pass texts"
            )
        for message in messages:
            # Templates ignore messages with other keys.
            if not (isinstance(message, Mapping) and message.keys() >= {"role", "content"}):
                raise ConfigError(
                    f"{label}: expected messages with the keys 'role' and 'content', got "
                    f"{format_value(message)}. Rename its keys, or pass each text as one item"
                )
        try:
            return str(self._tokenizer.apply_chat_template([*messages], tokenize=False))
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise ConfigError(
                f"{label}: expected a conversation that fits the tokenizer's chat template, got "
                f"{type(error).__name__}: {error}. Change or leave out the messages, or set "
                "tokenizer.chat_template"
            ) from error

    def _check_ids(self, label: str, item: Any) -> torch.Tensor:
        try:
            ids = np.asarray(item.cpu() if isinstance(item, torch.Tensor) else item)
        except (TypeError, ValueError):  # lists of different lengths, or bfloat16
            ids = np.empty(0)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ConfigError(
                f"{label}: expected a text, a list of messages, or token ids as integers [N], got "
                f"{format_value(item)}. Pass the text, or the ids, of each text as one item, and "
                "leave out other items"
            )
        limit = 2**31 if self._tokenizer is None else len(self._tokenizer)
        if invalid_ids := ids[(ids < 0) | (ids >= limit)].tolist():
            raise ConfigError(
                f"{label}: expected token ids from 0 to {limit - 1}, got {invalid_ids[0]}. "
                "Tokenize with the model's tokenizer"
            )
        return torch.tensor(ids.tolist(), dtype=torch.int32, device="cpu")


def _iterate_items(texts: Any, encoder: _Encoder, max_length: int) -> Iterator[tuple[str, Any]]:
    """Yield a label of each item, for error messages, and the item."""
    if not isinstance(texts, str | os.PathLike):
        if isinstance(texts, Mapping) or not hasattr(texts, "__iter__"):
            raise ConfigError(
                f"texts: expected a file or a list of texts, got {format_value(texts)}. Pass a "
                "path, a list of str, or one split of a dataset"
            )
        yield from ((f"texts[{number}]", item) for number, item in enumerate(texts))
        return
    path = Path(os.fsdecode(texts))
    # A file or a pipe. Path would raise an error for a long name.
    if os.path.isdir(path) or not os.path.exists(path):
        raise ConfigError(
            f"texts: expected a file or a list of texts, got {format_value(str(path))}. Pass "
            "[text] for one text, or the path of an existing file"
        )
    if path.suffix.lower() == ".jsonl":
        for number, line in enumerate(_read_lines(path), 1):
            if not line.strip():
                continue
            label = f"{path}, line {number}"
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"{label}: expected one JSON value, got {type(error).__name__}: {error}. Write "
                    "each text as one line of JSON, or name the file .txt"
                ) from error
            yield label, value
    elif path.suffix.lower() == ".txt":
        yield from ((str(path), text) for text in _read_text_file(path, encoder, max_length))
    else:
        raise ConfigError(
            f"{path}: expected a .txt file, or a .jsonl file with a JSON value in each line, got "
            f"{path.suffix or 'no suffix'}. Rename it, or pass its texts as a list or a dataset"
        )


def _read_lines(path: Path, max_characters: int = -1) -> Iterator[str]:
    """Yield the lines of a file. A line of more than `max_characters` is yielded in parts."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from iter(lambda: file.readline(max_characters), "")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: expected UTF-8, got {error}. Save the file as UTF-8 text"
        ) from error


def _read_text_file(path: Path, encoder: _Encoder, max_length: int) -> Iterator[str]:
    """Yield a text file as consecutive texts, each of about a window.

    A text ends at a paragraph's end if it is then at least half full. Otherwise it ends at a
    line's end, or else after a space. Only white space around texts is lost.
    """
    sample_ids = encoder.encode(str(path), "a")
    max_tokens = max(max_length - (0 if sample_ids is None else len(sample_ids)), 1)
    max_characters = max(max_length // _LINES_PER_WINDOW, _UNCUT_CHARACTERS)
    line_parts = _cut_lines(_read_lines(path, _CHARACTERS_PER_READ), max_characters)
    buffer: list[tuple[str, int]] = []
    buffer_tokens = 0
    while batch := list(islice(line_parts, _LINES_PER_CALL)):
        parts = [part for part in batch if not part.isspace()]
        ids = iter(encoder.tokenize(str(path), parts, special=False) if parts else ())
        for part in batch:
            # A blank line counts as one token, so that a long run of blank lines is cut.
            num_tokens = 1 if part.isspace() else max(len(next(ids)), 1)
            while buffer and buffer_tokens + num_tokens > max_tokens:
                num_parts = _find_text_end(buffer, buffer_tokens)
                yield _join_parts(buffer[:num_parts])
                buffer = buffer[num_parts:]
                buffer_tokens = sum(n for _, n in buffer)
            buffer.append((part, num_tokens))
            buffer_tokens += num_tokens
    yield _join_parts(buffer)


def _cut_lines(lines: Iterable[str], max_characters: int) -> Iterator[str]:
    """Yield each line in parts of limited length, which are cut after a space if possible."""
    remainder = ""
    for line_part in lines:
        line = remainder + line_part
        start = 0
        while len(line) - start > max_characters:
            end = line.rfind(" ", start, start + max_characters) + 1 or start + max_characters
            yield line[start:end]
            start = end
        remainder = line[start:]
        if remainder.endswith("\n"):
            yield remainder
            remainder = ""
    if remainder:
        yield remainder


def _find_text_end(parts: Sequence[tuple[str, int]], num_tokens: int) -> int:
    """Return the number of parts up to the last end of a paragraph or line in the second half."""
    totals = accumulate(n for _, n in parts)
    possible_ends = [end for end, total in enumerate(totals, 1) if 2 * total >= num_tokens]
    for is_end in (str.isspace, lambda part: part.endswith("\n")):
        if ends := [end for end in possible_ends if is_end(parts[end - 1][0])]:
            return ends[-1]
    return len(parts)


def _join_parts(parts: Sequence[tuple[str, int]]) -> str:
    # The text includes the indent of its first line, but no line break before it.
    return "".join(part for part, _ in parts).strip("\n").rstrip()


def _to_bytes(window: torch.Tensor) -> bytes:
    return window.numpy().astype("<i4").tobytes()
