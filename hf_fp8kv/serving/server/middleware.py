"""The middleware around transformers' application: access, limits, counts, and vanished clients.

Only the application's ways to generate, its list of models and its own documentation can be
reached; a request to generate reaches it whole and checked.
"""

import asyncio
import contextlib
import copy
import hashlib
import hmac
import json
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from .answers import format_event
from .asgi import Replay, TrackedSend, route_path, wait_until_gone
from .config import KEY_VARIABLE, ServerConfig
from .endpoints import DETOKENIZE, TOKENIZE, convert, describe
from .engine import Engine
from .errors import INTERNAL, STOPPING, APIError
from .fan_out import OnBegin, answer_all, split_body
from .fields import read_rules, take_fields
from .grammars import Grammars, Guide
from .logits import TokenRules
from .metrics import Metrics
from .model import SingleModelManager
from .requests import RequestTracker, ServerRequest
from .structured_output import FORMAT_FIELDS
from .validation import (
    COMPLETIONS,
    GENERATES,
    check_body,
    count_characters,
    parse_body,
    split_prompts,
)  # fmt: skip

logger = logging.getLogger(__name__)

_LOAD = "/load_model"
_CLIENT_GONE = 499
_LONG = 100_000  # bytes
# The bytes of all bodies are limited to a multiple of the largest body. The first bytes of each are
# not counted, since a connection buffers them anyway, and short requests should always go through.
_BODIES, _BUFFER = 16, 65_536
_RETRY = {"retry-after": "5"}


class Middleware:
    """An ASGI application around transformers' own, `app`."""

    def __init__(
        self,
        app: Any,
        engine: Engine,
        model: SingleModelManager,
        tracker: RequestTracker,
        config: ServerConfig,
        metrics: Metrics,
        *,
        fields: Mapping[str, frozenset[str]],  # of a body by path, besides OWN_FIELDS
        cors: bool,  # whether pages of other origins may read answers
    ) -> None:
        self.app, self.engine, self.model = app, engine, model
        self.tracker, self.config, self.metrics, self.cors = tracker, config, metrics, cors
        self.stopping, self._fields = False, fields
        self._key = None if config.api_key is None else _digest(config.api_key.encode())
        self._template_names = model.template_names()
        self._grammars = engine.grammars(model.tokenizer)
        self._held = 0  # bytes of bodies, see `_BODIES`
        # One thread checks long bodies: each takes many times its own memory, and the allocator
        # keeps that for each thread. The paths that do not generate have a second thread.
        self._threads = {generates: ThreadPoolExecutor(1, "bodies") for generates in (True, False)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        tracked = TrackedSend(send)
        method, path = scope["method"], route_path(scope)
        try:
            await self._answer(scope, receive, tracked)
        except _ClientGoneError:
            tracked.status = _CLIENT_GONE
        except Exception as error:
            if isinstance(error, RecursionError):
                error = APIError(400, "nested too deeply")
            if not isinstance(error, APIError):
                logger.exception("%s %s", method, path)
            if not tracked.started:
                answer = error if isinstance(error, APIError) else APIError(500, INTERNAL)
                response = answer.response()
                if self.cors:
                    response.headers["access-control-allow-origin"] = "*"
                await response(scope, receive, tracked)
        finally:
            if method == "POST" and path in GENERATES:
                self.tracker.statuses[tracked.status] += 1

    async def _answer(self, scope: Scope, receive: Receive, send: TrackedSend) -> None:
        method, path = scope["method"], route_path(scope)
        headers = {name.lower(): value for name, value in scope["headers"]}
        host = headers.get(b"host", b"localhost").decode("latin-1")
        if not self.config.accepts_host(host):
            expected = "a name of this machine, such as localhost, without an access token"
            message = f"host: expected {expected}, got {host!r:.100}; set {KEY_VARIABLE} for others"
            raise APIError(421, message, code="wrong_host")
        if path == "/health" and method in ("GET", "HEAD"):
            await self._health()(scope, receive, send)
            return
        if not (method == "OPTIONS" and self.cors):  # a browser asks without its token
            self._check_access(headers)
        if path == "/metrics" and method in ("GET", "HEAD"):
            text = self.metrics.format()
            response = Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
            await response(scope, receive, send)
        elif method == "GET" and (found := describe(path, self.model, self.engine)) is not None:
            await JSONResponse(found)(scope, receive, send)
        elif method != "POST":
            await self.app(scope, receive, send)
        elif path not in (*GENERATES, TOKENIZE, DETOKENIZE, _LOAD):
            raise APIError(404, f"{path}: expected one of {', '.join(GENERATES)}")
        else:
            if path in GENERATES:
                self._check_capacity()
            with contextlib.ExitStack() as held:
                raw = self._read(headers, receive, held)
                body, name = await self._check_in_turn(path, await raw)
                if isinstance(body, Response):
                    await body(scope, receive, send)
                else:
                    self._check_capacity()
                    await self._generate(body, name, scope, receive, send)

    # -- checks -----------------------------------------------------------------------------------

    def _check_access(self, headers: dict[bytes, bytes]) -> None:
        if self._key is None:
            return
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        # Digests have one length, so that the time says nothing about the token.
        equal = hmac.compare_digest(_digest(token.strip()), self._key)
        if not equal or scheme.lower() != b"bearer":
            raise APIError(
                401,
                "expected an access token in the header `Authorization: Bearer ...`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def _check_running(self) -> None:
        if self.stopping:
            headers = {**_RETRY, "connection": "close"}
            raise APIError(503, STOPPING, code="stopping", headers=headers)
        if not self.engine.is_alive():
            reason = self.engine.why_dead() or "it ended"
            raise APIError(503, f"the engine is not running: {reason}", code="engine_dead")

    def _check_capacity(self) -> None:
        self._check_running()
        waiting, limit = self.engine.waiting(), self.config.max_waiting
        if waiting >= limit:
            raise APIError(
                429,
                f"expected fewer than {limit} waiting requests, got {waiting}; try again later",
                code="too_many_requests",
                headers=_RETRY,
            )

    async def _check_in_turn(
        self, path: str, raw: bytearray
    ) -> tuple[dict[str, Any] | Response, str]:
        """Call `_check`. One thread checks all long bodies."""
        long, generates = len(raw) > _LONG, path in GENERATES
        if generates and not long:
            return self._check(path, raw)
        thread, loop = self._threads[generates] if long else None, asyncio.get_running_loop()
        return await loop.run_in_executor(thread, self._check, path, raw)

    def _check(self, path: str, raw: bytearray) -> tuple[dict[str, Any] | Response, str]:
        """Return the body to generate from, or another path's answer, and the model's name."""
        body = parse_body(raw)
        name = self.model.check_name(body.get("model"))
        if path == _LOAD:
            event = format_event({"status": "ready", "model": name, "cached": True})
            return Response(event, media_type="text/event-stream"), name
        if path not in GENERATES:
            return JSONResponse(convert(path, body, self.model, self.engine)), name
        body = check_body(path, body, self._fields[path], self._template_names)
        self.model.check_tools(body)
        self._check_length(path, body)
        return body | {"model": self.model.force_model}, name

    def _check_length(self, path: str, body: dict[str, Any]) -> None:
        """Reject text that cannot fit, before its tokens are counted."""
        shared = {name: body[name] for name in body.keys() - FORMAT_FIELDS - {"prompt"}}
        prompts = split_prompts(body["prompt"]) if path == COMPLETIONS else [""]
        longest = max(len(prompt) if isinstance(prompt, str) else 0 for prompt in prompts)
        tokens, length = self.engine.max_tokens, count_characters(shared) + longest
        if length > tokens * self.model.longest_token:
            raise APIError(
                400,
                f"expected at most {tokens} tokens, got {length} characters, and no token has more "
                f"than {self.model.longest_token}; send less",
                code="context_length_exceeded",
            )

    async def _read(
        self, headers: dict[bytes, bytes], receive: Receive, held: contextlib.ExitStack
    ) -> bytearray:
        """Return the body of a request, whose bytes are counted until `held` ends."""
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            raise APIError(
                415, f"content-type: expected application/json, got {kind.decode('latin-1')!r}"
            )
        limit = self.config.max_body
        seconds = min(self.config.body_seconds, self.config.client_seconds)
        too_large = APIError(413, f"expected a body of at most {limit} bytes", code="too_large")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > limit:
            raise too_large
        content, counted, most = bytearray(), 0, _BODIES * limit

        def release() -> None:
            self._held -= counted

        held.callback(release)
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientGoneError
                    content += message.get("body", b"")
                    if len(content) > limit:
                        raise too_large
                    release()
                    counted = max(len(content) - _BUFFER, 0)
                    self._held += counted
                    if counted and self._held > most:
                        text = f"expected at most {most} bytes of all requests; try again later"
                        raise APIError(429, text, code="too_many_bytes", headers=_RETRY)
                    if not message.get("more_body", False):
                        return content
        except TimeoutError:
            text = f"expected a body within {seconds:g} s"
            raise APIError(408, text, headers={"connection": "close"}) from None

    # -- answers ----------------------------------------------------------------------------------

    def _health(self) -> JSONResponse:
        """Return transformers' fields, counts, and what is wrong."""
        try:
            self._check_running()
        except APIError as error:
            reason = "stopping" if self.stopping else "cb_worker_dead"
            content = {"status": "unhealthy", "reason": reason, **error.body()}
            return JSONResponse(content, error.status)
        active, waiting = self.engine.active(), self.engine.waiting()
        return JSONResponse(
            {"status": "ok", "requests_active": active, "requests_waiting": waiting}
        )

    async def _generate(
        self, body: dict[str, Any], name: str, scope: Scope, receive: Receive, send: TrackedSend
    ) -> None:
        """Have the application answer, until the client goes away."""
        path, count = route_path(scope), body.get("n", 1)
        bodies = split_body(path, body)
        running: list[ServerRequest] = []
        shared = _Shared(body, self._grammars, self.engine, self.model.tokenizer)
        last: list[Any] = [None, b""]  # Answers to one prompt have the same body.

        async def answer(part: dict[str, Any], send: Send, on_begin: OnBegin) -> None:
            with self.tracker.track(part, name) as request:
                running.append(request)
                on_begin(request)
                request.guide, request.rules = await shared.take()
                stock = take_fields(request, self.engine)
                if stock != last[0]:
                    last[:] = stock, json.dumps(stock).encode()
                replay = Replay(scope, last[1])
                await self.app(replay.scope, replay, send)

        if len(bodies) == 1:
            work = asyncio.ensure_future(answer(bodies[0], send, lambda _: None))
        else:
            work = asyncio.ensure_future(answer_all(bodies, count, answer, send))
        gone = asyncio.ensure_future(wait_until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            # A client that has its last token may leave before the last, empty part is sent.
            done = all(request.done for request in running) and len(running) == len(bodies)
            if not work.done() and not send.complete and not done:
                raise _ClientGoneError
            await work
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await work

    def end_all(self) -> None:
        """End all answers that are being generated."""
        for request in list(self.tracker.running):
            request.fail(APIError(503, STOPPING, code="stopping"))


class _Shared:
    """What all answers of one body need, made when the first one begins."""

    def __init__(
        self, body: dict[str, Any], grammars: Grammars, engine: Engine, tokenizer: Any
    ) -> None:
        self._body, self._grammars = body, grammars
        self._engine, self._tokenizer = engine, tokenizer
        self._lock = asyncio.Lock()
        self._made: tuple[Guide | None, TokenRules] | None = None

    async def take(self) -> tuple[Guide | None, TokenRules]:
        """Return the guide and the rules of one answer; it changes both. Raises APIError."""
        async with self._lock:
            await asyncio.sleep(0)  # requests of others go in between
            if self._made is None:
                guide = await self._grammars.compile(self._body)
                read = partial(read_rules, self._body, self._engine, self._tokenizer)
                # Words have to be tokenized.
                rules = await asyncio.to_thread(read) if "bad_words" in self._body else read()
                self._made = guide, rules
        return copy.deepcopy(self._made)


class _ClientGoneError(Exception):
    pass


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
