"""From the tokens of an answer to its text: stop strings, hidden tokens, and the parts of a stream.

transformers' engine for continuous batching knows tokens only.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers.cli.serving.utils import response_events_to_chunks

from .requests import ServerRequest

logger = logging.getLogger(__name__)


def request_stops(body: dict[str, Any]) -> tuple[str, ...]:
    """Return the stop strings of a request."""
    stop = body.get("stop") or ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Return where the first stop string begins; None: the text has none."""
    starts = [start for stop in stops if (start := text.find(stop)) >= 0]
    return min(starts, default=None)


class TokenDecoder:
    """Turns tokens into text one by one; `tokenizer` is one of the package tokenizers."""

    def __init__(self, tokenizer: Any, *, skip_special: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._stream = DecodeStream([], skip_special_tokens=skip_special)
        self._open: list[int] = []  # tokens whose text has not been returned

    def step(self, token: int) -> str | None:
        """Return the text that a token completes; None: a character is incomplete."""
        self._open.append(token)
        try:
            text: str | None = self._stream.step(self._tokenizer, token)
        except Exception:  # of bytes that are no UTF-8 the text changes with what follows
            text = self._tokenizer.decode(self._open, skip_special_tokens=self._skip)
            self._stream = DecodeStream([token], skip_special_tokens=self._skip)
        if text is not None:
            self._open.clear()
        return text


class StopFinder:
    """Finds where the text of a growing list of tokens has a stop string; decodes each token once.

    `tokenizer` is one of the package tokenizers. Without stop strings nothing is decoded. What the
    first tokens, `after` in number, complete is no stop.
    """

    def __init__(
        self, stops: Sequence[str], tokenizer: Any, *, skip_special: bool = True, after: int = 0
    ) -> None:
        self._stops, self._after = stops, after
        self._longest = max(map(len, stops), default=0)
        self._decoder = TokenDecoder(tokenizer, skip_special=skip_special)
        self.text, self._seen = "", 0

    def find(self, tokens: Sequence[int]) -> int | None:
        """Return where in `text` a stop string begins that what is new in `tokens` completes."""
        if not self._stops:
            return None
        for token in tokens[self._seen :]:
            self._seen += 1
            part = self._decoder.step(token)
            if part is None:
                continue
            start = max(len(self.text) - self._longest + 1, 0)
            self.text += part
            if self._seen > self._after:
                found = find_stop(self.text[start:], self._stops)
                if found is not None:
                    return start + found
        return None


class AnswerStream:
    """The text of a streamed answer, part by part, in the handlers' `queue`; None is its end.

    It stands for transformers' CBStreamer: handlers use `total_tokens` and `cancel`. `tokenizer` is
    one of the package tokenizers; `parser`, or None, finds the calls of tools and the thoughts in a
    text. Text that may be the beginning of a stop string is kept until it is known what follows;
    at one, the answer ends and `on_stop` is called.
    """

    def __init__(
        self, request: ServerRequest, tokenizer: Any, queue: asyncio.Queue[Any],
        stops: Sequence[str], parser: Any, on_stop: Callable[[], None],
    ) -> None:  # fmt: skip
        self._request, self._queue = request, queue
        self._stops, self._parser, self._on_stop = stops, parser, on_stop
        self._decoder = TokenDecoder(tokenizer, skip_special=parser is None)
        self._seen, self._kept, self._ended = 0, "", False
        self.total_tokens = 0
        if parser is not None and request.tool_call is None:
            self._put(response_events_to_chunks(parser.initial_events))

    def put(self, output: Any) -> None:
        """Take what is new in an output of the engine."""
        new = output.generated_tokens[self._seen :]
        self._seen += len(new)
        if self._request.scores_only:
            return
        for token in new:
            if self._ended:
                return
            self.total_tokens += 1
            last = output.is_finished() and self.total_tokens == self._seen
            if last and token in self._request.stop_tokens:
                continue
            text = self._decoder.step(token)
            if text is not None:
                self._add(text)

    def end(self) -> None:
        """Take the end of the answer."""
        if self._ended:
            return
        self._ended = True
        self._release(len(self._kept))
        if self._request.tool_call is not None:
            self._put(self._request.tool_call.read())
        elif self._parser is not None:
            try:
                _, events = self._parser.finalize()
                self._put(response_events_to_chunks(events))
            except (ValueError, RuntimeError) as error:
                logger.warning("the end of an answer is no whole part of a message: %s", error)
        self._queue.put_nowait(None)

    def cancel(self) -> None:
        """Have the engine drop the request."""
        self._request.close()

    def _add(self, text: str) -> None:
        self._kept += text
        stop = None
        if self.total_tokens > self._request.min_tokens:
            stop = find_stop(self._kept, self._stops)
        if stop is None:
            self._release(len(self._kept) - self._pending())
            return
        self._kept = self._kept[:stop]
        self.end()
        self._on_stop()

    def _pending(self) -> int:
        """Return how many of the last characters may begin a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(self._kept)), 0, -1):
            if any(stop.startswith(self._kept[-length:]) for stop in self._stops):
                return length
        return 0

    def _release(self, length: int) -> None:
        text, self._kept = self._kept[:length], self._kept[length:]
        if not text:
            return
        if self._request.tool_call is not None:
            self._request.tool_call.text += text
        elif self._parser is not None:
            self._put(response_events_to_chunks(self._parser.feed(text)))
        else:
            self._put([text])

    def _put(self, items: Sequence[Any]) -> None:
        for item in items:
            self._request.part_tokens.append(self.total_tokens)
            self._queue.put_nowait(item)
