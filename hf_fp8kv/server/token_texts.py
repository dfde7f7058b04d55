"""The texts and bytes of single tokens, and their offsets in a text.

A character may have several tokens, whose own texts would be U+FFFD. Their bytes come from the
tokenizer's decoder, which is byte-level (GPT-2), has tokens of single bytes (SentencePiece), or
has only tokens of complete characters (WordPiece, Unigram).
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from .answer_text import AnswerDecoder


class TokenTexts:
    """The texts and bytes of single tokens, as the tokenizer decodes them.

    `is_first` means that no token of the same text precedes the token, which may remove a space.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenize = tokenizer
        self._tokenizer = tokenizer.backend_tokenizer
        self._prefix_ids = tokenizer("a", add_special_tokens=False)["input_ids"]
        added_tokens = self._tokenizer.get_added_tokens_decoder().items()
        self.special_tokens = frozenset(
            token_id for token_id, added_token in added_tokens if added_token.special
        )
        decoder = self._tokenizer.decoder
        self._decoder_state = b"" if decoder is None else decoder.__getstate__()  # JSON
        self._byte_alphabet = {character: byte for byte, character in bytes_to_unicode().items()}
        self.get_bytes = functools.cache(self._compute_bytes)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, including special tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def find_offsets(self, prompt: str | list[int], add_special_tokens: bool) -> list[int]:
        """Return the index of the first character of each token of a prompt."""
        offsets: list[int] = []
        end = 0
        if isinstance(prompt, str):
            options = {"return_offsets_mapping": True, "add_special_tokens": add_special_tokens}
            for start, token_end in self._tokenize(prompt, **options)["offset_mapping"]:
                # A token that the tokenizer adds has no characters. A span may begin after a space.
                offsets.append(min(start, end) if start < token_end else end)
                end = max(end, token_end)
            return offsets
        decoder = AnswerDecoder(self._tokenizer, skips_special=False)
        decoder.add_tokens(prompt)
        decoder.finish()
        for token, token_end in zip(prompt, decoder.text_ends[1:], strict=True):
            offsets.append(self.find_offset(token, end, token_end))
            end = token_end
        return offsets

    def find_offset(self, token: int, old_end: int, end: int) -> int:
        """Return the index of a token's first character in a text that grows to `end` characters.

        Before the text grows, tokens that are parts of a character have the character's index.
        """
        token_bytes = self.get_bytes(token, old_end == 0)
        if end == old_end or not is_complete(token_bytes):
            return old_end
        return max(end - len(token_bytes.decode()), old_end)

    def get_text(self, token: int, is_first: bool) -> str:
        """Return the text of a token, such as `bytes:\\xf0\\x9f` for a part of a character."""
        token_bytes = self.get_bytes(token, is_first)
        text = token_bytes.decode(errors="backslashreplace")
        return text if is_complete(token_bytes) else f"bytes:{text}"

    def _compute_bytes(self, token: int, is_first: bool) -> bytes:
        """Return the bytes of a token. A part of a character is not valid UTF-8."""
        prefix = [] if is_first else self._prefix_ids
        text = self.decode([*prefix, token])[len(self.decode(prefix)) :]
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text.encode()
        spelling = self._tokenizer.id_to_token(token)
        match = re.fullmatch("<0x([0-9A-Fa-f]{2})>", spelling)
        if match and b'"ByteFallback"' in self._decoder_state:
            return bytes.fromhex(match[1])
        if b'"ByteLevel"' in self._decoder_state and self._byte_alphabet.keys() >= set(spelling):
            return bytes(self._byte_alphabet[character] for character in spelling)
        return text.encode()


def is_complete(data: bytes) -> bool:
    """Return whether bytes consist of complete characters."""
    return data.decode(errors="ignore").encode() == data
