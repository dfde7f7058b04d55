"""What stands before transformers' application: access, limits, counts, and clients that go away.

Nothing reaches the application that is not one of its ways to generate, a list of models, or its
own documentation; a request to generate reaches it whole and checked.
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from .config import ServerConfig
from .engine import Engine
from .errors import APIError
from .metrics import prometheus
from .model import SingleModelManager
from .requests import RequestTracker, ServerRequest
from .validation import GENERATES, OWN_FIELDS, characters, check_body, parse_body

__all__ = ["Middleware"]

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_LOAD = "/load_model"
CLIENT_GONE = 499


class Middleware:
    """An ASGI application around transformers' own.

    Args:
        app: transformers' application.
        engine: what it generates with.
        model: the one model.
        calls: the server's requests.
        settings: its limits.
        fields: what a body may have besides OWN_FIELDS, by path.
        cors: whether pages of other origins may read answers.
    """

    def __init__(
        self,
        app: Any,
        engine: Engine,
        model: SingleModelManager,
        calls: RequestTracker,
        settings: ServerConfig,
        *,
        fields: Mapping[str, frozenset[str]],
        cors: bool,
    ) -> None:
        self.app, self.engine, self.model = app, engine, model
        self.calls, self.settings, self.cors = calls, settings, cors
        self.stopping, self._fields = False, fields
        self._key = None if settings.api_key is None else _digest(settings.api_key.encode())
        self._template_names = model.template_names()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = _Answer(send, cors=self.cors)
        path = scope["path"]
        generates = scope["method"] == "POST" and path in GENERATES
        try:
            await self._answer(scope, receive, answer)
        except APIError as refusal:
            await answer.refuse(refusal)
        except _ClientGone:
            answer.status = CLIENT_GONE
        except Exception:
            logger.exception("%s %s", scope["method"], path)
            await answer.refuse(APIError(500, "the server failed; its log says how"))
        finally:
            if generates:
                self.calls.statuses[answer.status] += 1

    async def _answer(self, scope: Scope, receive: Receive, answer: "_Answer") -> None:
        method, path = scope["method"], scope["path"]
        headers = {name.lower(): value for name, value in scope["headers"]}
        if path == "/health" and method in ("GET", "HEAD"):
            await answer.json(*self._health())
            return
        if not (method == "OPTIONS" and self.cors):  # a browser asks without its token
            self._check_access(headers)
        if path == "/metrics" and method in ("GET", "HEAD"):
            text = prometheus(self.engine, self.calls).encode()
            await answer.whole(200, b"text/plain; version=0.0.4; charset=utf-8", text)
        elif method != "POST":
            await self.app(scope, receive, answer)
        elif path in GENERATES:
            self._check_open()
            body = parse_body(await self._read(headers, receive))
            name = self.model.checked_name(body.get("model"))
            body = check_body(path, body, self._fields[path], self._template_names)
            self._check_length(body)
            body["model"] = self.model.force_model
            self._check_open()
            await self._generate(body, name, scope, receive, answer)
        elif path == _LOAD:
            body = parse_body(await self._read(headers, receive))
            self.model.checked_name(body.get("model"))
            body = {"model": self.model.force_model}
            replay = _Replay(json.dumps(body).encode())
            await self.app(_with_body(scope, replay.content), replay, answer)
        else:
            raise APIError(404, f"{path}: expected one of {', '.join(GENERATES)}")

    # -- whether it may pass ----------------------------------------------------------------------

    def _check_access(self, headers: dict[bytes, bytes]) -> None:
        if self._key is None:
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        # Digests: as long for every token, so that the time says nothing about it.
        same = hmac.compare_digest(_digest(given.strip()), self._key)
        if not same or scheme.lower() != b"bearer":
            raise APIError(
                401,
                "expected a token for access in the header `Authorization: Bearer ...`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def _check_open(self) -> None:
        again = {"retry-after": "5"}
        if self.stopping:
            raise APIError(503, "the server is stopping", code="stopping",
                          headers={**again, "connection": "close"})  # fmt: skip
        if not self.engine.is_alive():
            why = self.engine.why_dead() or "it ended"
            raise APIError(503, f"the engine does not run: {why}", code="engine_dead")
        waiting = self.engine.waiting()
        if waiting >= self.settings.max_waiting:
            raise APIError(
                429,
                f"expected fewer than {self.settings.max_waiting} waiting requests, got {waiting}; "
                "try again later",
                code="too_many_requests",
                headers=again,
            )

    def _check_length(self, body: dict[str, Any]) -> None:
        """Refuses text that is too long by far, before anybody counts its tokens."""
        most, length = self.engine.room * self.model.longest_token, characters(body)
        if length > most:
            raise APIError(
                400,
                f"expected at most {self.engine.room} tokens, got {length} characters, and no "
                f"token has more than {self.model.longest_token}; send less",
                code="context_length_exceeded",
            )

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """Returns the body of a request."""
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            raise APIError(
                415, f"content-type: expected application/json, got {kind.decode('latin-1')!r}"
            )
        most = self.settings.max_body
        too_large = APIError(
            413,
            f"expected a body of at most {most} bytes, got a larger one",
            code="too_large",
        )
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > most:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.settings.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientGone
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise APIError(
                408,
                f"expected a body within {self.settings.body_seconds:g} s",
                headers={"connection": "close"},
            ) from None

    # -- answers ----------------------------------------------------------------------------------

    def _health(self) -> tuple[int, dict[str, Any]]:
        """Returns the status and the answer, which has transformers' form and a little more."""
        if self.stopping:
            return 503, {"status": "unhealthy", "reason": "stopping"}
        if not self.engine.is_alive():
            return 503, {"status": "unhealthy", "reason": "cb_worker_dead"}
        counts = {"active": self.engine.active(), "waiting": self.engine.waiting()}
        return 200, {"status": "ok", **{f"requests_{name}": n for name, n in counts.items()}}

    async def _generate(
        self,
        body: dict[str, Any],
        name: str,
        scope: Scope,
        receive: Receive,
        answer: "_Answer",
    ) -> None:
        """Has the application answer; when the client goes away first, that ends too."""
        with self.calls.track(body, name) as call:
            theirs = {field: value for field, value in body.items() if field not in OWN_FIELDS}
            replay = _Replay(json.dumps(theirs).encode())
            scope = _with_body(scope, replay.content)
            scope["state"] = {**scope.get("state", {}), "hf_fp8kv_call": call}
            work = asyncio.ensure_future(self.app(scope, replay, answer))
            gone = asyncio.ensure_future(_until_gone(receive))
            try:
                await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
                # A client that has its last token may leave before the last, empty part is sent.
                if not work.done() and not answer.complete and not call.over:
                    replay.gone.set()
                    raise _ClientGone
                await work
            finally:
                gone.cancel()
                if not work.done():
                    work.cancel()
                    with contextlib.suppress(asyncio.CancelledError, Exception):
                        await work

    def end_all(self) -> None:
        """Ends all answers that are under way."""
        error = APIError(503, "the server is stopping", code="stopping")
        for call in list(self.calls.running):
            call.fail(error)


class _ClientGone(Exception):
    pass


class _Answer:
    """The way to the client.

    Attributes:
        started: the client has been told the status.
        complete: it has been told all.
        status: what it was told.
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

    async def refuse(self, refusal: APIError) -> None:
        """Sends it, unless another answer has begun."""
        if self.started:
            return
        for message in refusal.messages():
            if self._cors and "headers" in message:
                message["headers"].append((b"access-control-allow-origin", b"*"))
            await self(message)

    async def json(self, status: int, content: dict[str, Any]) -> None:
        await self.whole(status, b"application/json", json.dumps(content).encode())

    async def whole(self, status: int, kind: bytes, content: bytes) -> None:
        headers = [(b"content-type", kind), (b"content-length", str(len(content)).encode())]
        await self({"type": "http.response.start", "status": status, "headers": headers})
        await self({"type": "http.response.body", "body": content})


class _Replay:
    """Hands the application a body, and then tells it when the client has gone."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.gone = asyncio.Event()
        self._sent = False

    async def __call__(self) -> Message:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self.content, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}


def _with_body(scope: Scope, content: bytes) -> Scope:
    """Returns the scope of the same request with another body."""
    dropped = (b"content-length", b"transfer-encoding", b"content-type", b"content-encoding")
    headers = [pair for pair in scope["headers"] if pair[0].lower() not in dropped]
    headers += [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
    ]
    return {**scope, "headers": headers}


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def request_of(scope: Scope) -> ServerRequest | None:
    """Returns the request to generate that a scope is of."""
    found: ServerRequest | None = scope.get("state", {}).get("hf_fp8kv_call")
    return found
