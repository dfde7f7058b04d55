"""ASGI messages: an answer on its way to the client, and a body that is handed on."""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .errors import APIError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_BODY_HEADERS = (b"content-length", b"transfer-encoding", b"content-type", b"content-encoding")


class Response:
    """The answer to one request; an application calls it as its `send`.

    Attributes:
        started: the status has been sent.
        complete: everything has been sent.
        status: of the answer.
    """

    def __init__(self, send: Send, *, cors: bool) -> None:
        self._send, self._cors = send, cors
        self.started = self.complete = False
        self.status = 500

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started, self.status = True, message["status"]
        elif not message.get("more_body", False):
            self.complete = True
        await self._send(message)

    async def send_error(self, error: APIError) -> None:
        """Send an error, unless another answer has begun."""
        if not self.started:
            headers, content = error.encode()
            if self._cors:
                headers.append((b"access-control-allow-origin", b"*"))
            await self._send_whole(error.status, headers, content)

    async def send_json(self, status: int, content: dict[str, Any]) -> None:
        """Send an object."""
        await self.send(status, b"application/json", json.dumps(content).encode())

    async def send(self, status: int, kind: bytes, content: bytes) -> None:
        """Send bytes of a content type."""
        length = str(len(content)).encode()
        headers = [(b"content-type", kind), (b"content-length", length)]
        await self._send_whole(status, headers, content)

    async def _send_whole(
        self, status: int, headers: list[tuple[bytes, bytes]], content: bytes
    ) -> None:
        await self({"type": "http.response.start", "status": status, "headers": headers})
        await self({"type": "http.response.body", "body": content})


class Replay:
    """Hands an application a body, and later that the client has gone."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.content = json.dumps(body).encode()
        self.gone = asyncio.Event()
        self._sent = False

    async def __call__(self) -> Message:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self.content, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}


def replace_body(scope: Scope, content: bytes) -> Scope:
    """Return the scope of the same request with another body, of JSON."""
    headers = [pair for pair in scope["headers"] if pair[0].lower() not in _BODY_HEADERS]
    length = str(len(content)).encode()
    headers += [(b"content-type", b"application/json"), (b"content-length", length)]
    return {**scope, "headers": headers}


async def wait_until_gone(receive: Receive) -> None:
    """Wait until the client closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
