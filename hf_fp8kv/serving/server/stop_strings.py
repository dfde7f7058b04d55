"""Texts that end an answer, which transformers' engine for continuous batching does not know."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["StoppingQueue", "first_stop", "wanted_stops"]


def wanted_stops(body: dict[str, Any]) -> tuple[str, ...]:
    """Returns the texts that a request wants to end at."""
    given = body.get("stop") or ()
    return (given,) if isinstance(given, str) else tuple(given)


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Returns where the first of the texts begins; None: none is there."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return min(found, default=None)


class StoppingQueue(asyncio.Queue[Any]):
    """Takes an answer's texts and hands them on up to a stop; None is its end.

    A text that may be the beginning of a stop is kept until it is known what follows.

    Args:
        stops: the texts.
        stopped: called when one was found.
    """

    def __init__(self, stops: Sequence[str], stopped: Callable[[], None]) -> None:
        super().__init__()
        self._stops, self._stopped = stops, stopped
        self._kept, self._over = "", False

    def put_nowait(self, item: Any) -> None:
        """Takes a text, None at the end, or anything else, which is handed on as it is."""
        if self._over:
            return
        if not isinstance(item, str):
            self._over = item is None
            self._hand_on(len(self._kept))
            super().put_nowait(item)
            return
        self._kept += item
        at = first_stop(self._kept, self._stops)
        if at is None:
            self._hand_on(len(self._kept) - self._open_end())
            return
        self._hand_on(at)
        self._over = True
        super().put_nowait(None)
        self._stopped()

    def _open_end(self) -> int:
        """Returns how many of the last characters may begin a stop."""
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(self._kept)), 0, -1):
            if any(stop.startswith(self._kept[-length:]) for stop in self._stops):
                return length
        return 0

    def _hand_on(self, length: int) -> None:
        if length:
            super().put_nowait(self._kept[:length])
        self._kept = self._kept[length:]
