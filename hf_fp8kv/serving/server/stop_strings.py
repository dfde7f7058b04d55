"""Stop strings, which transformers' engine for continuous batching does not know."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


def request_stops(body: dict[str, Any]) -> tuple[str, ...]:
    """Return the stop strings of a request."""
    stop = body.get("stop") or ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Return where the first stop string begins; None: the text has none."""
    starts = [start for stop in stops if (start := text.find(stop)) >= 0]
    return min(starts, default=None)


class StopFinder:
    """Tells when the text of a growing list of tokens has a stop string; decodes each token once.

    `tokenizer` is one of the package tokenizers. Without stop strings nothing is decoded.
    """

    def __init__(self, stops: Sequence[str], tokenizer: Any) -> None:
        self._stops, self._tokenizer = stops, tokenizer
        self._kept = max(map(len, stops), default=1) - 1  # characters that a stop may begin with
        self._stream = DecodeStream([], skip_special_tokens=True)
        self._tail, self._seen = "", 0

    def has_stop(self, tokens: Sequence[int]) -> bool:
        """Return whether what is new in `tokens` completes a stop string."""
        if not self._stops:
            return False
        new = [self._stream.step(self._tokenizer, token) for token in tokens[self._seen :]]
        self._seen = len(tokens)
        text = self._tail + "".join(part for part in new if part is not None)
        self._tail = text[max(len(text) - self._kept, 0) :]
        return find_stop(text, self._stops) is not None


class StoppingQueue(asyncio.Queue[Any]):
    """A queue of an answer's texts that ends at a stop string; None is its end.

    A text that may be the beginning of a stop string is kept until it is known what follows.
    """

    def __init__(self, stops: Sequence[str], on_stop: Callable[[], None]) -> None:
        super().__init__()
        self._stops, self._on_stop = stops, on_stop
        self._kept, self._ended = "", False

    def put_nowait(self, item: Any) -> None:
        """Put a text, None at the end, or anything else, which is passed on as it is."""
        if self._ended:
            return
        if not isinstance(item, str):
            self._ended = item is None
            self._release(len(self._kept))
            super().put_nowait(item)
            return
        self._kept += item
        stop = find_stop(self._kept, self._stops)
        if stop is None:
            self._release(len(self._kept) - self._pending())
            return
        self._release(stop)
        self._ended = True
        super().put_nowait(None)
        self._on_stop()

    def _pending(self) -> int:
        """Return how many of the last characters may begin a stop string."""
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(self._kept)), 0, -1):
            if any(stop.startswith(self._kept[-length:]) for stop in self._stops):
                return length
        return 0

    def _release(self, length: int) -> None:
        if length:
            super().put_nowait(self._kept[:length])
        self._kept = self._kept[length:]
