"""Token ids of one item of the texts: a text, a conversation, a row of a data set, or ids."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ..errors import ConfigError
from ..utils.text import format_list, format_value

_CONVERSATIONS = ("messages", "conversations")
# The names that ShareGPT's data sets give to who speaks.
_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant", "model": "assistant", "tool": "tool", "observation": "tool",
}  # fmt: skip
# So much of a long text is tokenised at first, per token that there is room for.
_CHARACTERS_PER_TOKEN = 16
# How far the end of a cut text may change the tokens before it.
_SETTLED = 64
_INT32_LIMIT = 1 << 31
# The dtypes of token ids, of torch or of NumPy.
_INTEGER = re.compile(r"(torch\.)?u?int(8|16|32|64)")


class TextTokenizer:
    """Turn items into token ids; the options are those of `read_corpus`."""

    def __init__(self, tokenizer: Any, *, text_column: str, chat_template: bool | None) -> None:
        if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
            has = "; pass its tokenizer attribute" if hasattr(tokenizer, "tokenizer") else ""
            raise ConfigError(
                f"tokenizer: expected a tokenizer of transformers, got {type(tokenizer).__name__}"
                f"{has or '; pass AutoTokenizer.from_pretrained(...)'}"
            )
        if chat_template not in (None, True, False):
            raise ConfigError(
                f"chat_template: expected None, True or False, got {format_value(chat_template)}; "
                "set the text of a template as tokenizer.chat_template"
            )
        if not isinstance(text_column, str):
            raise ConfigError(
                f"text_column: expected the name of a column, got {format_value(text_column)}; "
                "pass a str"
            )
        self._tokenizer = tokenizer
        self._text_column = text_column
        self._chat_template = chat_template
        if chat_template:
            self._require_template("chat_template=True")

    def encode(self, where: str, item: object, room: int) -> torch.Tensor | None:
        """Return the item's token ids, int32 `[N]` on the CPU; None if it is blank.

        Errors call it `where`. Of a text with more than `room` tokens the rest may be missing.
        """
        if isinstance(item, Mapping):
            where, item = self._select_column(where, item)
        if isinstance(item, str):
            if not item or item.isspace():
                return None
            if self._chat_template:
                return self._encode_conversation(where, [{"role": "user", "content": item}], room)
            return self._encode_text(where, item, room, special=True)
        if isinstance(item, torch.Tensor | np.ndarray):
            return self._check_ids(where, item)
        if isinstance(item, list | tuple):
            if not item:
                return None
            if isinstance(item[0], Mapping):
                return self._encode_conversation(where, self._normalize_messages(where, item), room)
            if all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in item):
                return self._check_ids(where, item)
        raise ConfigError(
            f"{where}: expected a text, a list of messages, or token ids, got {_describe(item)}; "
            f"{_suggest(item)}"
        )

    def count_tokens(self, where: str, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text, without special ones."""
        if not texts:
            return []
        tokenizer = self._require_tokenizer(where)
        tokens = tokenizer(list(texts), add_special_tokens=False, verbose=False)
        return [len(ids) for ids in tokens["input_ids"]]

    def count_overhead(self, where: str) -> int:
        """Return how many tokens a text gets that are not its own, at most."""
        ids = self.encode(where, "a", 1 << 20)
        return 0 if ids is None else len(ids)

    def _encode_text(self, where: str, text: str, room: int, *, special: bool) -> torch.Tensor:
        tokenizer = self._require_tokenizer(where)
        if not text.isascii():
            _check_characters(where, text)
        length = _CHARACTERS_PER_TOKEN * (room + _SETTLED)
        while True:
            # verbose=False: that a text is longer than the model's context is no concern here.
            ids = tokenizer(text[:length], add_special_tokens=special, verbose=False)["input_ids"]
            if length >= len(text):
                return torch.tensor(ids, dtype=torch.int32, device="cpu")
            if len(ids) >= room + _SETTLED:
                return torch.tensor(ids[:room], dtype=torch.int32, device="cpu")
            length *= 2

    def _encode_conversation(self, where: str, messages: list[Any], room: int) -> torch.Tensor:
        tokenizer = self._require_template(where)
        try:
            text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise ConfigError(
                f"{where}: expected a conversation that the tokenizer's chat template takes, got "
                f"{type(error).__name__}: {error}; change the messages, or leave them out"
            ) from error
        # The template writes the special tokens itself.
        return self._encode_text(where, text, room, special=False)

    def _normalize_messages(self, where: str, items: Sequence[object]) -> list[dict[str, object]]:
        """Return the messages with the names that templates read."""
        if self._chat_template is False:
            raise ConfigError(
                f"{where}: expected a text, since chat_template=False, got a list of messages; "
                "leave chat_template out, or pass the texts"
            )
        return [_normalize(f"{where}, message {n}", item) for n, item in enumerate(items, 1)]

    def _select_column(self, where: str, row: Mapping[Any, object]) -> tuple[str, object]:
        """Return the column of the row that is read: where it is, and what it holds."""
        # Who names a column means that one.
        names = (self._text_column, *(_CONVERSATIONS if self._text_column == "text" else ()))
        for name in names:
            if name in row:
                return f"{where}, column {name!r}", row[name]
        if "role" in row or "from" in row:
            hint = "a conversation is a list of messages: pass [messages] for one"
        else:
            hint = "name the column with text_column"
        raise ConfigError(
            f"{where}: expected a column {' or '.join(map(repr, names))}, got the columns "
            f"{format_list(map(repr, row), 20)}; {hint}"
        )

    def _check_ids(self, where: str, item: Any) -> torch.Tensor:
        """Return a copy of token ids that were given."""
        if isinstance(item, list | tuple):
            ids = [int(i) for i in item]
        elif item.ndim != 1 or not _INTEGER.fullmatch(str(item.dtype)):
            raise ConfigError(
                f"{where}: expected token ids as integers of the shape [N], got {item.dtype} of "
                f"the shape {list(item.shape)}; pass the ids of each text as one item"
            )
        else:
            ids = item.tolist()
        limit = _INT32_LIMIT if self._tokenizer is None else len(self._tokenizer)
        wrong = next((i for i in ids if not 0 <= i < limit), None)
        if wrong is not None:
            raise ConfigError(
                f"{where}: expected token ids from 0 to {limit - 1}, got {format_value(wrong)}; "
                "tokenise with the model's tokenizer"
            )
        return torch.tensor(ids, dtype=torch.int32, device="cpu")

    def _require_tokenizer(self, where: str) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise ConfigError(
                f"{where}: expected token ids, since there is no tokenizer, got text; pass "
                "tokenizer=AutoTokenizer.from_pretrained(...)"
            )
        return self._tokenizer

    def _require_template(self, where: str) -> PreTrainedTokenizerBase:
        tokenizer = self._require_tokenizer(where)
        if not tokenizer.chat_template:
            raise ConfigError(
                f"{where}: expected a tokenizer with a chat template, got one without; pass plain "
                "texts, or set tokenizer.chat_template"
            )
        return tokenizer


def _normalize(where: str, message: object) -> dict[str, object]:
    if isinstance(message, Mapping):
        sender, value = message.get("from"), message.get("value")
        if isinstance(message.get("role"), str) and "content" in message:
            return dict(message)
        if isinstance(sender, str) and isinstance(value, str):
            if sender in _ROLES:
                return {"role": _ROLES[sender], "content": value}
            raise ConfigError(
                f"{where}: expected 'from' to be one of {', '.join(_ROLES)}, got "
                f"{format_value(sender)}; rename it"
            )
    got = format_value(dict(message)) if isinstance(message, Mapping) else _describe(message)
    raise ConfigError(
        f"{where}: expected {{'role': ..., 'content': ...}} or {{'from': ..., 'value': ...}}, got "
        f"{got}; rename its keys, or pass the texts one by one"
    )


def _check_characters(where: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where}: expected text that UTF-8 can hold, got {text[error.start]!a} at character "
            f"{error.start}; replace it: text.encode('utf-8', 'replace').decode()"
        ) from error


def _describe(item: object) -> str:
    if isinstance(item, list | tuple):
        kinds = sorted({type(i).__name__ for i in item})
        return f"a list of {' and '.join(kinds[:3])}"
    return "None" if item is None else type(item).__name__


def _suggest(item: object) -> str:
    if item is None:
        return "leave out rows without a text"
    if isinstance(item, bytes):
        return "decode it"
    if isinstance(item, int | np.integer):
        return "pass [ids] for the token ids of one text"
    return "pass each text as one item"
