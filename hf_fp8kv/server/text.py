"""From the tokens of an answer to its parts: text, thoughts and tool calls."""

import contextlib
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers.cli.serving.utils import ReasoningText, ToolCall, response_events_to_chunks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """A part of an answer. `tokens` is the number of tokens of the answer so far."""

    tokens: int
    text: str = ""
    thought: str = ""
    call: tuple[str, str] | None = None  # name and arguments, as JSON


class AnswerText:
    """The parts of one answer, as its tokens come.

    Text that may be the beginning of a stop string is kept until later tokens decide it. The answer
    ends at a stop string, and `stopped` is then true. `tokenizer` comes from the package
    tokenizers.

    Args:
        stops: Strings that end the answer, after more than `min_tokens` tokens.
        hidden: Tokens that end the answer and are not in its text.
        parser: Finds thoughts and calls in the text. A ResponseParser of transformers.
        forced: Name of the tool that the text is the arguments of. An empty name means that the
            text is a list of calls. None means neither.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        stops: Sequence[str] = (),
        hidden: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        parser: Any = None,
        forced: str | None = None,
    ) -> None:
        self.stops, self._hidden, self._min_tokens = stops, hidden, min_tokens
        self._forced, self._parser = forced, None if forced is not None else parser
        self._tokenizer, self._skip = tokenizer, self._parser is None
        self._stream = DecodeStream([], skip_special_tokens=self._skip)
        self._open: list[int] = []  # tokens whose text has not been returned
        self._kept = ""
        self.tokens, self.stopped, self.calls = 0, False, 0
        self._first = [] if self._parser is None else self._parts(self._parser.initial_events)

    def put(self, tokens: Iterable[int]) -> list[Part]:
        """Return the parts that new tokens complete."""
        parts, self._first = self._first, []
        for token in tokens:
            if self.stopped:
                break
            self.tokens += 1
            if token not in self._hidden:
                parts += self._add(self._decode(token))
        return parts

    def end(self) -> list[Part]:
        """Return the remaining parts, after the last token."""
        parts = [*self._first]
        if not self.stopped:
            parts += self._add(self._decode_open())
            parts += self._release(len(self._kept))
        if self._forced is not None:
            parts += self._read_calls(self._forced)
        elif self._parser is not None:
            try:
                parts += self._parts(self._parser.finalize()[1])
            except (ValueError, RuntimeError) as error:
                logger.warning("the end of an answer is not a complete message: %s", error)
        return parts

    def _decode(self, token: int) -> str:
        """Return the text that a token completes."""
        self._open.append(token)
        try:
            text: str | None = self._stream.step(self._tokenizer, token)
        except Exception:  # bytes that are not UTF-8, whose text changes with the next tokens
            text = self._decode_open()
            self._stream = DecodeStream([token], skip_special_tokens=self._skip)
        if text is not None:
            self._open.clear()
        return text or ""

    def _decode_open(self) -> str:
        return str(self._tokenizer.decode(self._open, skip_special_tokens=self._skip))

    def _add(self, text: str) -> list[Part]:
        self._kept += text
        starts = [start for stop in self.stops if (start := self._kept.find(stop)) >= 0]
        if not starts or self.tokens <= self._min_tokens:
            return self._release(len(self._kept) - self._pending())
        self._kept, self.stopped = self._kept[: min(starts)], True
        return self._release(min(starts))

    def _pending(self) -> int:
        """Return the number of last characters that may begin a stop string."""
        longest = max(map(len, self.stops), default=1) - 1
        for length in range(min(longest, len(self._kept)), 0, -1):
            if any(stop.startswith(self._kept[-length:]) for stop in self.stops):
                return length
        return 0

    def _release(self, length: int) -> list[Part]:
        if not length or self._forced is not None:  # a forced call is read at its end
            return []
        text, self._kept = self._kept[:length], self._kept[length:]
        if self._parser is not None:
            return self._parts(self._parser.feed(text))
        return [Part(self.tokens, text)]

    def _parts(self, events: Iterable[dict[str, Any]]) -> list[Part]:
        parts = []
        for item in response_events_to_chunks(list(events)):
            if isinstance(item, ToolCall):
                self.calls += 1
                parts.append(Part(self.tokens, call=(item.name, item.arguments)))
            elif isinstance(item, ReasoningText):
                parts.append(Part(self.tokens, thought=str(item)))
            else:
                parts.append(Part(self.tokens, item))
        return parts

    def _read_calls(self, name: str) -> list[Part]:
        """Return the calls. If the text was truncated, return the complete calls.

        If the text is only the beginning of the first call, return it as text.
        """
        text = self._kept
        calls = [Part(self.tokens, call=(name, text))] if name else []
        at, decode = 1, json.JSONDecoder().raw_decode  # after "["
        with contextlib.suppress(ValueError):
            while not name and at < len(text):
                call, at = decode(text, at)
                arguments = json.dumps(call["parameters"])
                calls.append(Part(self.tokens, call=(call["name"], arguments)))
                at += len(", ")
        self.calls = len(calls)
        return calls or ([Part(self.tokens, text)] if text else [])
