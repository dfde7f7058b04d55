"""The texts and bytes of single tokens, and their places in a text.

A character may have several tokens, whose own texts would be U+FFFD. Their bytes come from the
tokenizer's decoder, which is byte-level (GPT-2), has tokens of single bytes (SentencePiece), or
knows only texts (WordPiece, Unigram).
"""

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel


class TokenTexts:
    """The texts and bytes of single tokens, as the tokenizer decodes them.

    `is_first` means that no token of the same text precedes the token, which may remove a space.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._prefix_ids = tokenizer("a", add_special_tokens=False)["input_ids"]
        added_tokens = self._tokenizer.get_added_tokens_decoder().items()
        self.special_tokens = frozenset(token_id for token_id, x in added_tokens if x.special)
        decoder = self._tokenizer.decoder
        state = json.loads(decoder.__getstate__()) if decoder is not None else {}
        self._decoder_types = frozenset(_find_types(state))
        self._byte_alphabet = _make_byte_alphabet()
        self._bytes: dict[tuple[int, bool], bytes] = {}

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, including special tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def get_bytes(self, token: int, is_first: bool) -> bytes:
        """Return the bytes of a token. A part of a character is not valid UTF-8."""
        if (token, is_first) not in self._bytes:
            self._bytes[token, is_first] = self._compute_bytes(token, is_first)
        return self._bytes[token, is_first]

    def get_text(self, token: int, is_first: bool) -> str:
        """Return the text of a token. For a part of a character it is like `bytes:\\xf0\\x9f`."""
        data = self.get_bytes(token, is_first)
        text = data.decode(errors="backslashreplace")
        return text if is_complete(data) else f"bytes:{text}"

    def _compute_bytes(self, token: int, is_first: bool) -> bytes:
        prefix = [] if is_first else self._prefix_ids
        text = self.decode([*prefix, token])[len(self.decode(prefix)) :]
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text.encode()
        spelling, alphabet = self._tokenizer.id_to_token(token), self._byte_alphabet
        match = re.fullmatch("<0x([0-9A-Fa-f]{2})>", spelling)
        if match and "ByteFallback" in self._decoder_types:
            return bytes.fromhex(match[1])
        if "ByteLevel" in self._decoder_types and alphabet.keys() >= set(spelling):
            return bytes(alphabet[character] for character in spelling)
        return text.encode()


def is_complete(data: bytes) -> bool:
    """Return whether bytes consist of complete characters."""
    return data.decode(errors="ignore").encode() == data


def _find_types(decoder_state: dict[str, Any]) -> Iterator[str]:
    """Yield the types of a decoder of the package tokenizers, and of the decoders in it."""
    yield decoder_state.get("type", "")
    for state in decoder_state.get("decoders", ()):
        yield from _find_types(state)


def _make_byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in the spellings of byte-level tokens.

    Printable characters of Latin-1 are their own bytes. The characters from 256 on are the
    remaining bytes.
    """
    codes = sorted(map(ord, ByteLevel.alphabet()))
    remaining_bytes = sorted(set(range(256)).difference(codes))
    return {chr(code): code if code < 256 else remaining_bytes[code - 256] for code in codes}


class TextPlace:
    """The place of the next token in a text, which is decoded from the bytes of its tokens."""

    def __init__(self) -> None:
        self.is_first = True  # whether no token of the text precedes the next token
        self.offset = 0  # number of complete characters before the next token
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def advance(self, data: bytes | None) -> int:
        """Add a token, and return the index of the character that its first byte belongs to.

        None means that the token is not in the text.
        """
        self.is_first = self.is_first and data is None
        if not data:
            return self.offset
        new_text = self._decoder.decode(data[:1])
        incomplete_bytes, _ = self._decoder.getstate()
        index = self.offset + len(new_text) - (0 if incomplete_bytes else 1)
        self.offset += len(new_text + self._decoder.decode(data[1:]))
        return index

    def set_offset(self, offset: int) -> None:
        """Continue at the beginning of a character."""
        self.offset = offset
        self._decoder.reset()
