"""ASGI messages: an answer on its way to the client, and a body that is handed on."""

import asyncio

from starlette.types import Message, Receive, Scope, Send

_BODY_HEADERS = (b"content-length", b"transfer-encoding", b"content-type", b"content-encoding")


def route_path(scope: Scope) -> str:
    """Return the path of a request inside this application, which may be mounted at another."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


class TrackedSend:
    """A `send` that notes the status of the answer, and how much of it has been sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = self.complete = False
        self.status = 500

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started, self.status = True, message["status"]
        elif not message.get("more_body", False):
            self.complete = True
        await self._send(message)


class Replay:
    """The `receive` of a request with another body, and its `scope`; its client does not leave."""

    def __init__(self, scope: Scope, content: bytes) -> None:
        self._content = content
        headers = [pair for pair in scope["headers"] if pair[0].lower() not in _BODY_HEADERS]
        length = str(len(self._content)).encode()
        headers += [(b"content-type", b"application/json"), (b"content-length", length)]
        self.scope: Scope = {**scope, "headers": headers}
        self._sent = False

    async def __call__(self) -> Message:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._content, "more_body": False}
        await asyncio.Event().wait()  # whoever waits is cancelled when the client has gone
        raise AssertionError


async def wait_until_gone(receive: Receive) -> None:
    """Wait until the client closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
