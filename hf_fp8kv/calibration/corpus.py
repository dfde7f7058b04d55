"""Corpus: the texts that a calibration reads, tokenised, cut into windows, and split in two.

Both parts are the same for any order of the texts, as long as all of them are read.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from ..utils.digests import digest_of
from ..utils.text import format_list, format_value
from .text_files import is_json_lines, read_json_lines, split_text_file
from .text_tokens import TextTokenizer

# A window of one token has nothing to attend to.
_SHORTEST = 2
# Lines longer than this share of a window are taken apart where a text file is packed.
_UNITS_PER_WINDOW = 8


# Tensors have no truth value for `==` of two corpora to return: compare their digests.
@dataclass(frozen=True, eq=False)
class Corpus:
    """What a calibration reads, and what is kept out of it to check its result."""

    windows: tuple[torch.Tensor, ...]  # int32 [T] on the CPU, the longest first
    held_out: tuple[torch.Tensor, ...]  # for the quality report; none is the same as a window
    texts: int  # how many were read, without blank ones
    tokens: int  # in the windows
    complete: bool  # False: reading stopped at max_tokens, whether or not there was more

    @property
    def digest(self) -> str:
        """SHA-256 of the windows of both parts, in hexadecimal."""
        return digest_of(self.windows, self.held_out)


def read_corpus(
    texts: object, tokenizer: Any, *, max_tokens: int, max_length: int, held_out: int,
    text_column: str = "text", chat_template: bool | None = None,
) -> Corpus:  # fmt: skip
    """Return the texts as windows of at most `max_length` tokens, in an order of their own.

    A text is cut into windows that follow each other; a window of one token is left out. The
    tokenizer adds its special tokens once per text. Blank texts are skipped.

    What is held out: about `held_out` tokens, at most twice as many, and at most a quarter of all.
    Texts are ranked, those with the longest window first and equals by the hash of their content.
    Down the list, each text is held out that still fits, with all of its windows, until
    `held_out` tokens are. Of a text that is too long to be held out at all, such as the only one,
    single windows are taken in the same way. A window that also occurs in another text is never
    held out with one of them. Where nothing fits, it is one window: the first within a quarter of
    all tokens, else the smallest one. It is none if all windows are the same, or there is one.

    Args:
        texts: a file of JSON lines (`.jsonl`, `.json-lines`, `.ndjson`) or of UTF-8 text, each also
            as `.gz`; or an iterable. A JSON line, or an item, is a text, a list of messages
            (`role` and `content`, or `from` and `value`), a mapping that has one of these in
            `text_column` (or `messages`, or `conversations`, while `text_column` is "text"), or
            token ids. A text file becomes texts of about a window, cut where paragraphs end.
        tokenizer: the model's; None if all items are token ids.
        max_tokens: of both parts. The last window is cut to make the number exact; where that
            would leave a window of one token, it is one less.
        max_length, held_out, text_column, chat_template: as in `calibrate`.

    Raises:
        ConfigError: the texts are none of these, or there are no two tokens in any of them.
    """
    _check_number("max_tokens", max_tokens, _SHORTEST)
    _check_number("max_length", max_length, _SHORTEST)
    _check_number("held_out", held_out, 0)
    encoder = TextTokenizer(tokenizer, text_column=text_column, chat_template=chat_template)
    windows_by_text: list[tuple[torch.Tensor, ...]] = []
    tokens = 0
    for where, item in _iterate(texts, encoder, max_length):
        ids = encoder.encode(where, item, max_tokens - tokens)
        if ids is None:
            continue
        windows = _split(ids[: max_tokens - tokens], max_length)
        windows_by_text.append(windows)
        tokens += sum(map(len, windows))
        if max_tokens - tokens < _SHORTEST:
            break
    if not tokens:
        name = os.fsdecode(texts) if isinstance(texts, str | os.PathLike) else "texts"
        short = len(windows_by_text)
        got = f"{short} of one token" if short else "none that is not blank"
        raise ConfigError(
            f"{name}: expected a text of at least {_SHORTEST} tokens, got {got}; check the "
            "file, or that the iterator has not been read before"
        )
    apart = _choose_held_out(windows_by_text, held_out)
    # A copy of its own does not keep the whole text in memory.
    ordered = [w.clone() for w in sorted(chain(*windows_by_text), key=_rank)]
    kept = tuple(w for w in ordered if _content(w) not in apart)
    return Corpus(
        windows=kept,
        held_out=tuple(w for w in ordered if _content(w) in apart),
        texts=len(windows_by_text),
        tokens=sum(map(len, kept)),
        complete=max_tokens - tokens >= _SHORTEST,
    )


def _iterate(
    texts: object, encoder: TextTokenizer, max_length: int
) -> Iterator[tuple[str, object]]:
    """Yield the items, and what errors call them."""
    if isinstance(texts, str | os.PathLike):
        path = _check_path(texts)
        if is_json_lines(path):
            yield from read_json_lines(path)
            return
        name = str(path)
        room = max(max_length - encoder.count_overhead(name), 1)
        line = max_length // _UNITS_PER_WINDOW
        for piece in split_text_file(
            path, lambda units: encoder.count_tokens(name, units), room, line
        ):
            yield name, piece
        return
    if isinstance(texts, Mapping):
        raise ConfigError(
            f"texts: expected a file or a list of texts, got a mapping of "
            f"{format_list(map(repr, texts))}; pass one of its values, such as a split"
        )
    if isinstance(texts, torch.Tensor) and texts.ndim < 2:
        raise ConfigError(
            f"texts: expected a file or a list of texts, got a tensor of the shape "
            f"{list(texts.shape)}; pass [ids] for the token ids of one text"
        )
    try:
        # Not isinstance(Iterable): a data set of torch has only __getitem__.
        items = iter(texts) if not isinstance(texts, bytes | bytearray) else None  # type: ignore[call-overload]
    except TypeError:
        items = None
    if items is None:
        raise ConfigError(
            f"texts: expected a file or a list of texts, got {type(texts).__name__}; pass a path, "
            "or a list of str"
        )
    yield from ((f"texts[{number}]", item) for number, item in enumerate(items))


def _check_path(texts: str | os.PathLike[Any]) -> Path:
    path = Path(os.fsdecode(texts))
    expected = "expected a file or a list of texts"
    # Not Path.exists, which raises for a name that is too long; a pipe is a file as well.
    if os.path.isdir(path):
        raise ConfigError(f"{path}: {expected}, got a folder; name one of its files")
    if os.path.exists(path):
        return path
    if isinstance(texts, str):
        raise ConfigError(
            f"texts: {expected}, got {format_value(texts)}; pass [text] for one text, or the path "
            "of a file that exists"
        )
    raise ConfigError(f"{path}: {expected}, got no such file; check the path")


def _check_number(name: str, value: object, lowest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ConfigError(
            f"{name}: expected a whole number of tokens, {lowest} or more, got "
            f"{format_value(value)}; pass an int"
        )


def _split(ids: torch.Tensor, max_length: int) -> tuple[torch.Tensor, ...]:
    return tuple(window for window in ids.split(max_length) if len(window) >= _SHORTEST)


def _content(window: torch.Tensor) -> bytes:
    return window.numpy().astype("<i4").tobytes()


def _rank(window: torch.Tensor) -> tuple[int, bytes]:
    """Rank windows by length, the longest first, and equals by content."""
    return -len(window), _content(window)


def _choose_held_out(windows_by_text: Sequence[Sequence[torch.Tensor]], wanted: int) -> set[bytes]:
    """Return the contents of the windows to hold out; all copies of a window are on one side."""
    texts = [tuple(map(_content, windows)) for windows in windows_by_text if windows]
    copies = Counter(content for text in texts for content in text)
    if not wanted or len(copies) < 2:
        return set()
    size = {content: len(content) // 4 * n for content, n in copies.items()}
    distinct = set(texts)
    owners = Counter(content for text in distinct for content in set(text))
    groups = [own for text in distinct if (own := {c for c in text if owners[c] == 1})]
    quarter = sum(size.values()) // 4
    limit = min(2 * wanted, quarter)
    chosen: set[bytes] = set()
    held = 0
    for group in sorted(groups, key=_group_rank):
        whole = sum(size[c] for c in group) <= limit
        for unit in [group] if whole else [{c} for c in sorted(group, key=_hash_rank)]:
            tokens = sum(size[c] for c in unit)
            if held < wanted and held + tokens <= limit:
                chosen |= unit
                held += tokens
    if chosen:
        return chosen
    ranked = sorted(size, key=_hash_rank)
    first = next((c for c in ranked if size[c] <= quarter), None)
    return {first or min(ranked, key=size.__getitem__)}


def _group_rank(group: Iterable[bytes]) -> tuple[int, bytes]:
    """Rank groups by the longest window, then by a hash of all of them."""
    ordered = sorted(group)
    return -max(map(len, ordered)), hashlib.sha256(b"".join(ordered)).digest()


def _hash_rank(content: bytes) -> tuple[int, bytes]:
    return -len(content), hashlib.sha256(content).digest()
