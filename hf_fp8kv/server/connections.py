"""Limits on connections: their number, and the time for which a client may be idle."""

import asyncio
import math
from typing import Any

import h11
import psutil
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import APIError

_MAX_BACKLOG = 128
# Number of file descriptors that are reserved for files opened while the server runs.
_NUM_SPARE_DESCRIPTORS = 32


def compute_connection_limits() -> tuple[int | None, int]:
    """Return the maximum numbers of open connections, and of connections in the backlog.

    The first is the number for which file descriptors are free. None means no limit. If a new
    connection gets no descriptor, Python's event loop logs errors continuously. All connections in
    the backlog are accepted at once, so they get at most an eighth of the file descriptors.
    """
    try:
        import resource
    except ImportError:  # Windows
        return None, _MAX_BACKLOG
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return None, _MAX_BACKLOG
    backlog_size = max(min(_MAX_BACKLOG, limit // 8), 1)
    num_used: int = psutil.Process().num_fds()
    return max(limit - num_used - backlog_size - _NUM_SPARE_DESCRIPTORS, 1), backlog_size


def make_connection_class(
    max_open_connections: int | None, header_seconds: float, client_seconds: float
) -> type[asyncio.Protocol]:
    """Return a class of connections, of which at most `max_open_connections` may be open at a time.

    h11 limits the bytes of a request's first line and headers. A client may take `header_seconds`
    to send these bytes, or bytes between requests, for example the rest of a refused body. A
    client may pause for `client_seconds` before it reads more of its response.
    """
    check_interval = min(header_seconds, client_seconds) / 8
    refusal = APIError(
        503,
        "too many open connections. Try again later",
        code="too_many_connections",
        headers={"connection": "close", "retry-after": "5"},
    ).to_response()
    head = h11.Response(status_code=503, headers=refusal.raw_headers, reason=b"Service Unavailable")

    class Connection(H11Protocol):
        _timer: asyncio.TimerHandle | None = None
        _last_state: object = None
        _changed_at = 0.0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if max_open_connections is not None and len(self.connections) > max_open_connections:
                events = (head, h11.Data(data=bytes(refusal.body)), h11.EndOfMessage())
                transport.write(b"".join(self.conn.send(event) or b"" for event in events))
                transport.close()
            self._check_idle()

        def connection_lost(self, error: Exception | None) -> None:
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(error)

        def send_400_response(self, msg: str) -> None:
            """Refuse bytes that are not HTTP, and discard the application's own response.

            uvicorn would let both respond, until the loop has closed the connection.
            """
            if self.cycle is not None and not self.cycle.response_complete:
                self.cycle.disconnected = True
                self.cycle.message_event.set()
                if self.cycle.response_started:
                    self.transport.close()
                    return
            super().send_400_response(msg)

        def _check_idle(self) -> None:
            """Abort the connection if it is idle for too long. Otherwise check again later."""
            is_idle = self.cycle is None or self.cycle.response_complete
            unread_bytes = self.transport.get_write_buffer_size()
            state = (self.cycle, is_idle, unread_bytes)
            now = self.loop.time()
            if state != self._last_state:
                self._last_state = state
                self._changed_at = now
            # If the server writes nothing, only the client's reads change `unread_bytes`.
            if unread_bytes and (is_idle or self.flow.write_paused):
                timeout = client_seconds
            else:
                timeout = header_seconds if is_idle else math.inf
            if now - self._changed_at >= timeout:
                self.transport.abort()
            else:
                self._timer = self.loop.call_later(check_interval, self._check_idle)

    return Connection
