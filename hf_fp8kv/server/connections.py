"""Limits on connections: their number, and how long a client may neither send nor read."""

import asyncio
import math
from typing import Any

import h11
import psutil
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import APIError

_BACKLOG = 128
# Descriptors for files that are opened while the server runs.
_SPARE = 32


def max_connections() -> int | None:
    """Return the number of connections that fit the free descriptors. None means no limit.

    Without a descriptor for a new connection, Python's event loop logs an error over and over.
    """
    limit = _descriptors()
    if limit is None:
        return None
    used: int = psutil.Process().num_fds()
    return max(limit - used - backlog() - _SPARE, 1)


def backlog() -> int:
    """Return how many connections may wait. The event loop accepts all of them at once."""
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
    """Return the class of a connection, of which at most `maximum` may be open.

    h11 limits the bytes of a request's first line and headers. These bytes may take `head_seconds`,
    and so may bytes between requests, such as the rest of a rejected body. A client may pause for
    `client_seconds` before it reads more of its answer.
    """
    period = min(head_seconds, client_seconds) / 8
    full = APIError(
        503,
        "too many open connections; try again later",
        code="too_many_connections",
        headers={"connection": "close", "retry-after": "5"},
    ).response()
    head = h11.Response(status_code=503, headers=full.raw_headers, reason=b"Service Unavailable")

    class Connection(H11Protocol):
        _timer: asyncio.TimerHandle | None = None
        _seen: object = None
        _since = 0.0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if maximum is not None and len(self.connections) > maximum:
                events = (head, h11.Data(data=bytes(full.body)), h11.EndOfMessage())
                transport.write(b"".join(self.conn.send(event) or b"" for event in events))
                transport.close()
            self._check_idle()

        def connection_lost(self, error: Exception | None) -> None:
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(error)

        def _check_idle(self) -> None:
            """End the connection if nothing has changed for too long, or check again later."""
            idle = self.cycle is None or self.cycle.response_complete
            unread = self.transport.get_write_buffer_size()
            seen, now = (self.cycle, idle, unread), self.loop.time()
            if seen != self._seen:
                self._seen, self._since = seen, now
            # Nothing more is written then, so only the client's reading changes the unread bytes.
            if unread and (idle or self.flow.write_paused):
                limit = client_seconds
            else:
                limit = head_seconds if idle else math.inf
            if now - self._since >= limit:
                self.transport.abort()
            else:
                self._timer = self.loop.call_later(period, self._check_idle)

    return Connection
