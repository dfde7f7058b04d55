"""Limits on connections: their number, and how long one may stay silent."""

import asyncio
import os
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

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
    try:
        used = len(os.listdir("/dev/fd"))
    except OSError:
        used = 64
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


def limit_connections(maximum: int | None, seconds: float) -> type[asyncio.Protocol]:
    """Return uvicorn's class of a connection, of which `maximum` may be open.

    A request's first line and headers may take `seconds`; so may what comes between requests, such
    as the remainder of a body that was rejected.
    """
    full = APIError(
        503,
        "too many open connections; try again later",
        code="too_many_connections",
        headers={"connection": "close", "retry-after": "5"},
    ).http_response()

    class Connection(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if maximum is not None and len(self.connections) > maximum:
                transport.write(full)
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
            if self._timer is None and self._is_idle():
                self._timer = self.loop.call_later(seconds, self._on_timeout, self.cycle)

        def _on_timeout(self, cycle: Any) -> None:
            self._timer = None
            if self.cycle is cycle and self._is_idle():
                self.transport.abort()
            else:
                self._expect_request()

        def _is_idle(self) -> bool:
            return self.cycle is None or bool(self.cycle.response_complete)

    return Connection
