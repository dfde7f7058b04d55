"""Read the texts of a calibration, tokenize them, and split them into windows.

The windows are the same for any order of the texts, if all texts are read.
"""

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

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
# Number of characters of a text file that are read for each token. English has four per token.
_CHARACTERS_PER_TOKEN = 16
_MAX_READ_CHARACTERS = 1 << 16  # maximum number of characters of a call of `read`


def read_model_windows(
    model: PreTrainedModel, texts: Any, tokenizer: Any, *, max_length: int, **options: Any
) -> list[torch.Tensor]:
    """Return `read_windows` for a model, with its own tokenizer if `tokenizer` is None.

    Raises:
        ConfigError: As `read_windows`, or the model has no embedding for a token id.
    """
    model_name = getattr(model, "name_or_path", "")
    if tokenizer is None and model_name:
        from transformers import AutoTokenizer  # loads many modules

        try:
            tokenizer = AutoTokenizer.from_pretrained(model_name)
        except (OSError, ValueError, ImportError) as error:
            # Token ids need no tokenizer. Other texts raise an error without one.
            logger.info("no tokenizer in %s: %s", model_name, error)
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
            `text_column` (or in `messages`, if `text_column` is "text"). A `.txt` file is one text,
            of which at most 16 characters are read for each of `max_tokens`.
        tokenizer: A tokenizer of transformers, or None if all items are token ids.
        max_tokens: Maximum number of tokens. Reading stops there.
        max_length: Maximum number of tokens in a window.
        text_column, chat_template: As in `calibrate`.

    Raises:
        ConfigError: The type of the texts is not supported, or no text has two tokens.
    """
    from transformers import PreTrainedTokenizerBase

    check_count("max_tokens", max_tokens, _MIN_TOKENS)
    check_count("max_length", max_length, _MIN_TOKENS)
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
    windows: list[torch.Tensor] = []
    num_tokens_left = max_tokens
    for label, item in _iterate_items(texts, max_tokens * _CHARACTERS_PER_TOKEN):
        ids = _encode(label, item, tokenizer, text_column, chat_template)
        if ids is None:
            continue
        # A view would keep the complete text in memory.
        windows += [
            window.clone()
            for window in ids[:num_tokens_left].split(max_length)
            if len(window) >= _MIN_TOKENS
        ]
        num_tokens_left = max_tokens - sum(map(len, windows))
        if num_tokens_left < _MIN_TOKENS:
            break
    if not windows:
        raise ConfigError(
            f"texts: expected a text of at least {_MIN_TOKENS} tokens, got none. Check the file, "
            "or that the iterator was not read before"
        )
    # Windows of one length are sorted by their bytes, in the same order on every machine.
    return sorted(
        windows, key=lambda window: (-len(window), window.numpy().astype("<i4").tobytes())
    )


def _encode(
    label: str, item: Any, tokenizer: Any, text_column: str, chat_template: bool | None
) -> torch.Tensor | None:
    """Return the token ids of an item, int32 `[N]` on the CPU, or None for a blank item."""
    if isinstance(item, Mapping):
        columns = ("text", "messages") if text_column == "text" else (text_column,)
        column = next((name for name in columns if name in item), None)
        if column is None:
            raise ConfigError(
                f"{label}: expected a column {' or '.join(map(repr, columns))}, got the "
                f"columns {format_list(map(repr, item), 20)}. Name the column with "
                "text_column, and pass a conversation as a list"
            )
        label = f"{label}, column {column!r}"
        item = item[column]
    is_blank = isinstance(item, str) and not item.strip()
    if is_blank or (isinstance(item, list | tuple) and not item):
        return None
    if isinstance(item, str) and chat_template:
        item = [{"role": "user", "content": item}]
    is_chat = isinstance(item, list | tuple) and isinstance(item[0], Mapping)
    if not is_chat and not isinstance(item, str):
        return _check_ids(label, item, tokenizer)
    if tokenizer is None:
        raise ConfigError(
            f"{label}: expected token ids without a tokenizer, got text. Pass "
            "tokenizer=AutoTokenizer.from_pretrained(...)"
        )
    if is_chat and chat_template is False:
        raise ConfigError(
            f"{label}: expected a text with chat_template=False, got a list of messages. Omit "
            "chat_template, or pass texts"
        )
    # A chat template contains the special tokens.
    text = _render_chat(label, item, tokenizer) if is_chat else item
    try:
        # Not verbose: a text may be longer than the model's context.
        encoding = tokenizer(text, add_special_tokens=not is_chat, verbose=False)
    except (TypeError, UnicodeError) as error:
        raise ConfigError(
            f"{label}: expected text that UTF-8 can encode, got {ascii(text)[:120]}. Replace "
            "its characters: text.encode('utf-8', 'replace').decode()"
        ) from error
    return torch.tensor(encoding["input_ids"], dtype=torch.int32, device="cpu")


def _render_chat(label: str, messages: Sequence[Any], tokenizer: Any) -> str:
    for message in messages:
        # Templates ignore messages with other keys.
        if not (isinstance(message, Mapping) and message.keys() >= {"role", "content"}):
            raise ConfigError(
                f"{label}: expected messages with the keys 'role' and 'content', got "
                f"{format_value(message)}. Rename its keys, or pass each text as one item"
            )
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False))
    except (TemplateError, TypeError, ValueError, LookupError) as error:
        raise ConfigError(
            f"{label}: expected a conversation that fits the tokenizer's chat template, got "
            f"{type(error).__name__}: {error}. Change or leave out the messages, or set "
            "tokenizer.chat_template"
        ) from error


def _check_ids(label: str, item: Any, tokenizer: Any) -> torch.Tensor:
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
    limit = 2**31 if tokenizer is None else len(tokenizer)
    if invalid_ids := ids[(ids < 0) | (ids >= limit)].tolist():
        raise ConfigError(
            f"{label}: expected token ids from 0 to {limit - 1}, got {invalid_ids[0]}. "
            "Tokenize with the model's tokenizer"
        )
    return torch.tensor(ids.tolist(), dtype=torch.int32, device="cpu")


def _iterate_items(texts: Any, max_characters: int) -> Iterator[tuple[str, Any]]:
    """Yield a label of each item, for error messages, and the item.

    A text file is one item, of which at most `max_characters` are read.
    """
    if not isinstance(texts, str | os.PathLike):
        if isinstance(texts, Mapping) or not hasattr(texts, "__iter__"):
            raise ConfigError(
                f"texts: expected a file or a list of texts, got {format_value(texts)}. Pass a "
                "path, a list of str, or one split of a dataset"
            )
        yield from ((f"texts[{index}]", item) for index, item in enumerate(texts))
        return
    path = Path(os.fsdecode(texts))
    # A file or a pipe. Path would raise an error for a long name.
    if os.path.isdir(path) or not os.path.exists(path):
        raise ConfigError(
            f"texts: expected a file or a list of texts, got {format_value(str(path))}. Pass "
            "[text] for one text, or the path of an existing file"
        )
    suffix = path.suffix.lower()
    if suffix not in (".txt", ".jsonl"):
        raise ConfigError(
            f"{path}: expected a .txt file, or a .jsonl file with a JSON value in each line, got "
            f"{path.suffix or 'no suffix'}. Rename it, or pass its texts as a list or a dataset"
        )
    try:
        with path.open(encoding="utf-8-sig") as file:
            if suffix == ".txt":
                yield str(path), _read_start(file, max_characters)
            else:
                yield from _read_json_lines(path, file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: expected UTF-8, got {error}. Save the file as UTF-8 text"
        ) from error


def _read_start(file: TextIO, max_characters: int) -> str:
    """Return the first characters of a file. `read` would allocate memory for all of them."""
    parts = []
    while max_characters and (part := file.read(min(max_characters, _MAX_READ_CHARACTERS))):
        parts.append(part)
        max_characters -= len(part)
    return "".join(parts)


def _read_json_lines(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for line_number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        label = f"{path}, line {line_number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{label}: expected one JSON value, got {type(error).__name__}: {error}. Write "
                "each text as one line of JSON, or name the file .txt"
            ) from error
        yield label, value
