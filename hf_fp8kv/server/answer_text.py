"""Decoding of an answer's tokens to its parts: text, reasoning and tool calls."""

import contextlib
import json
import logging
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers.cli.serving.utils import ReasoningText, ToolCall, response_events_to_chunks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AnswerPart:
    """A part of an answer: text, reasoning or a call."""

    num_tokens: int  # number of the answer's tokens that begin before the end of this part
    text: str = ""
    reasoning: str = ""
    call: tuple[str, str] | None = None  # name of a tool, and arguments as JSON
    call_index: int = 0  # number of calls before this call


class AnswerDecoder:
    """Decodes the tokens of one answer to parts.

    Text that may begin a stop string is held until later tokens show whether the string follows.
    The answer ends before the first stop string, and `is_stopped` is then True.

    Args:
        tokenizer: A Tokenizer of the package tokenizers.
        stop_strings: Strings that end the answer, after more than `min_tokens` tokens.
        end_tokens: Tokens that end the answer. They are left out of its text.
        parser: A ResponseParser of transformers, which finds reasoning and calls in the text.
        forced_tool: Name of the tool whose arguments are the text. "" means that the text is a list
            of calls. None means that no call is forced.
        skips_special: Whether the text omits special tokens. A parser reads them.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop_strings: Sequence[str] = (),
        end_tokens: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        parser: Any = None,
        forced_tool: str | None = None,
        skips_special: bool = True,
    ) -> None:
        self.stop_strings = stop_strings
        self._min_tokens = min_tokens
        self.end_tokens = end_tokens
        self._forced_tool = forced_tool
        self._parser = parser if forced_tool is None else None
        self._tokenizer = tokenizer
        self._skips_special = skips_special and self._parser is None
        self._stream = DecodeStream([], skip_special_tokens=self._skips_special)
        self._undecoded: list[int] = []  # tokens whose text has not been returned
        self._held_text = ""
        self.is_stopped = False
        self.num_tokens = 0
        self.num_calls = 0
        self._num_released_characters = 0
        self._num_released_tokens = 0  # number of tokens that begin in the text that was returned
        self.text_ends = [0]  # lengths of the text after the first 0, 1, 2, ... tokens
        self._initial_parts = (
            [] if self._parser is None else self._make_parts(self._parser.initial_events)
        )

    def add_tokens(self, tokens: Iterable[int]) -> list[AnswerPart]:
        """Return the parts that new tokens complete."""
        parts = self._initial_parts
        self._initial_parts = []
        for token in tokens:
            if self.is_stopped:
                break
            self.num_tokens += 1
            text = "" if token in self.end_tokens else self._decode(token)
            self.text_ends.append(self.text_ends[-1] + len(text))
            parts += self._add_text(text)
        return parts

    def finish(self) -> list[AnswerPart]:
        """Return the remaining parts, after the last token."""
        parts = list(self._initial_parts)
        if not self.is_stopped:
            last_text = self._decode_remaining()
            self.text_ends[-1] += len(last_text)
            parts += self._add_text(last_text)
            parts += self._release_text(len(self._held_text))
        if self._forced_tool is not None:
            parts += self._read_calls(self._forced_tool)
        elif self._parser is not None:
            try:
                parts += self._make_parts(self._parser.finalize()[1])
            except (ValueError, RuntimeError) as error:
                logger.warning("the end of an answer is not a complete message: %s", error)
        return parts

    @property
    def num_kept_tokens(self) -> int:
        """The number of tokens, except for the tokens of the stop string that ended the answer."""
        return self._num_released_tokens if self.is_stopped else self.num_tokens

    def _decode(self, token: int) -> str:
        """Return the text that a token completes."""
        self._undecoded.append(token)
        try:
            text: str | None = self._stream.step(self._tokenizer, token)
        except Exception:  # the stream fails if later tokens change the text of invalid UTF-8
            text = self._decode_remaining()
            self._stream = DecodeStream([token], skip_special_tokens=self._skips_special)
        if text is not None:
            self._undecoded.clear()
        return text or ""

    def _decode_remaining(self) -> str:
        return str(self._tokenizer.decode(self._undecoded, skip_special_tokens=self._skips_special))

    def _add_text(self, text: str) -> list[AnswerPart]:
        self._held_text += text
        found_strings = [stop for stop in self.stop_strings if stop in self._held_text]
        if not found_strings or self.num_tokens <= self._min_tokens:
            return self._release_text(len(self._held_text) - self._count_held_characters())
        first_start = min(map(self._held_text.find, found_strings))
        self._held_text = self._held_text[:first_start]
        self.is_stopped = True
        return self._release_text(first_start)

    def _count_held_characters(self) -> int:
        """Return the number of characters at the end that may begin a stop string."""
        max_prefix_length = max(map(len, self.stop_strings), default=1) - 1
        for length in range(min(max_prefix_length, len(self._held_text)), 0, -1):
            if any(stop.startswith(self._held_text[-length:]) for stop in self.stop_strings):
                return length
        return 0

    def _release_text(self, length: int) -> list[AnswerPart]:
        if not length or self._forced_tool is not None:  # `finish` reads a forced call
            return []
        text = self._held_text[:length]
        self._held_text = self._held_text[length:]
        self._num_released_characters += length
        self._num_released_tokens = bisect_left(self.text_ends, self._num_released_characters)
        if self._parser is not None:
            return self._make_parts(self._parser.feed(text))
        return [AnswerPart(self._num_released_tokens, text)]

    def _make_parts(self, events: Iterable[dict[str, Any]]) -> list[AnswerPart]:
        parts = []
        for chunk in response_events_to_chunks(list(events)):
            fields: dict[str, Any] = {"text": chunk}
            if isinstance(chunk, ToolCall):
                fields = {"call": (chunk.name, chunk.arguments), "call_index": self.num_calls}
                self.num_calls += 1
            elif isinstance(chunk, ReasoningText):
                fields = {"reasoning": str(chunk)}
            parts.append(AnswerPart(self._num_released_tokens, **fields))
        return parts

    def _read_calls(self, tool: str) -> list[AnswerPart]:
        """Return the complete calls in the text, which may be truncated.

        If the text is only the beginning of the first call, or a stop string ended it, return it as
        text.
        """
        text = self._held_text
        calls: list[AnswerPart] = []
        if tool and not self.is_stopped:
            calls.append(AnswerPart(self.num_tokens, call=(tool, text)))
        position = len("[")
        decode = json.JSONDecoder().raw_decode
        with contextlib.suppress(ValueError):
            while not tool and position < len(text):
                start = position
                call, position = decode(text, start)
                # The grammar fixes the text before the parameters, whose numbers stay as they are.
                prefix = f'{{"name": {json.dumps(call["name"])}, "parameters": '
                arguments = text[start + len(prefix) : position - len("}")]
                calls.append(
                    AnswerPart(
                        self.num_tokens, call=(call["name"], arguments), call_index=len(calls)
                    )
                )
                position += len(", ")
        self.num_calls = len(calls)
        if text and not calls:
            return [AnswerPart(self.num_tokens, text)]
        return calls
