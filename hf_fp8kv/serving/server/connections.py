"""Connections on which nothing comes, and more of them than there are file descriptors for."""

import asyncio
import os
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

__all__ = ["backlog", "connection", "most_connections"]

_BACKLOG = 128
# Descriptors for files that are opened while the server runs.
_SPARE = 32
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n"
    b"retry-after: 5\r\n\r\n"
)


def most_connections() -> int | None:
    """Returns how many connections fit the descriptors that are left now; None: any number.

    Without one to accept a connection with, Python's event loop logs the error over and over.
    """
    limit = _descriptors()
    if limit is None:
        return None
    try:
        used = len(os.listdir("/dev/fd"))
    except OSError:
        used = 64
    return max(limit - used - backlog() - _SPARE, 1)


def backlog() -> int:
    """Returns how many connections may wait to be accepted; the event loop accepts all at once."""
    return max(min(_BACKLOG, (_descriptors() or 8 * _BACKLOG) // 8), 1)


def _descriptors() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def connection(most: int | None, seconds: float) -> type[asyncio.Protocol]:
    """Returns uvicorn's class of a connection, with limits.

    Args:
        most: open connections; one more is told 503. None: any number.
        seconds: for a request's first line and headers, and between requests for what is no
            request, such as the rest of a body that was refused.
    """

    class Connection(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if most is not None and len(self.connections) > most:
                transport.write(_FULL)
                transport.close()
                return
            self._expect_request()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._expect_request()

        def connection_lost(self, error: Exception | None) -> None:
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(error)

        def _expect_request(self) -> None:
            if self._timer is None and self._idle():
                self._timer = self.loop.call_later(seconds, self._late, self.cycle)

        def _late(self, last: Any) -> None:
            self._timer = None
            if self.cycle is last and self._idle():
                self.transport.abort()
            else:
                self._expect_request()

        def _idle(self) -> bool:
            return self.cycle is None or bool(self.cycle.response_complete)

    return Connection
