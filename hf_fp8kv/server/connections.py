"""Limits on connections: their number, and how long a client may neither send nor read."""

import asyncio
import math
from typing import Any

import psutil
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import APIError

_BACKLOG = 128
# Descriptors for files that are opened while the server runs.
_SPARE = 32


def max_connections() -> int | None:
    """Return how many connections fit the descriptors that are left now; None: any number.

    Without one to accept a connection with, Python's event loop logs the error over and over.
    """
    limit = _descriptors()
    if limit is None:
        return None
    used: int = psutil.Process().num_fds()
    return max(limit - used - backlog() - _SPARE, 1)


def backlog() -> int:
    """Return how many connections may wait to be accepted; the event loop accepts all at once."""
    return max(min(_BACKLOG, (_descriptors() or 8 * _BACKLOG) // 8), 1)


def _descriptors() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def limit_connections(
    maximum: int | None, head_seconds: float, client_seconds: float
) -> type[asyncio.Protocol]:
    """Return the class of a connection, of which `maximum` may be open.

    h11 limits the bytes of a request's first line and headers. They may take `head_seconds`, like
    bytes between requests, such as the remainder of a body that was rejected. A client that should
    read may stop for `client_seconds`.
    """
    period = min(head_seconds, client_seconds) / 8
    full = APIError(
        503,
        "too many open connections; try again later",
        code="too_many_connections",
        headers={"connection": "close", "retry-after": "5"},
    ).http_response()

    class Connection(H11Protocol):
        _timer: asyncio.TimerHandle | None = None
        _seen: object = None
        _since = 0.0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if maximum is not None and len(self.connections) > maximum:
                transport.write(full)
                transport.close()
            self._look()

        def connection_lost(self, error: Exception | None) -> None:
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(error)

        def _look(self) -> None:
            """End the connection if nothing has changed for too long, or look again later."""
            idle = self.cycle is None or self.cycle.response_complete
            unread = self.transport.get_write_buffer_size()
            seen, now = (self.cycle, idle, unread), self.loop.time()
            if seen != self._seen:
                self._seen, self._since = seen, now
            # Nothing is written to such a connection, so what is unread changes only by reading.
            if unread and (idle or self.flow.write_paused):
                limit = client_seconds
            else:
                limit = head_seconds if idle else math.inf
            if now - self._since >= limit:
                self.transport.abort()
            else:
                self._timer = self.loop.call_later(period, self._look)

    return Connection
