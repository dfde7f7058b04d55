"""The server as an ASGI application, to run or to mount: access, limits and paths."""

import asyncio
import contextlib
import hashlib
import hmac
import importlib.metadata
import logging
import threading
import traceback
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from ..errors import FP8KVError
from . import schemas
from .answers import Answers, Parts, TokenTexts, format_event
from .choices import Choice, ChoiceMaker, RunningRequest
from .config import KEY_VARIABLE, ServerConfig
from .engine import Engine
from .errors import INTERNAL, STOPPING, APIError
from .metrics import Metrics
from .model import ServedModel
from .responses import ResponseAnswer

logger = logging.getLogger(__name__)

_KINDS: dict[str, type[schemas.Request]] = {
    "/v1/chat/completions": schemas.ChatRequest,
    "/v1/completions": schemas.CompletionRequest,
    "/v1/responses": schemas.ResponseRequest,
}
_PACKAGES = ("hf-fp8kv", "transformers", "torch")
_NOT_STARTED = (
    "the engine was not started: the application in which this one is mounted must start it, with "
    "FastAPI(lifespan=application.lifespan), or inside `async with application.lifespan():`"
)
_CLIENT_GONE = 499
_LONG = 100_000  # bytes of a body, and characters of a prompt
# The bytes of all bodies are limited to a multiple of the largest body. The first bytes of each
# body are not counted: a connection buffers them anyway, and short requests are always accepted.
_BODIES, _BUFFER = 16, 65_536
_RETRY = {"retry-after": "5"}
# Keys of a request's scope: an ExitStack, which is closed when the request has its answer, and a
# timeout, which ends the request when its client leaves.
_ENDING, _LEAVING = "hf_fp8kv.ending", "hf_fp8kv.leaving"


class Application:
    """An ASGI application for one model, whose engine runs from `start` to `stop`.

    A server starts and stops it by the events of ASGI's lifespan. Starlette and FastAPI do not pass
    these events on to a mounted application, so they must get `lifespan`.

    Args:
        served: The model.
        config: Access and limits.
        batching: A ContinuousBatchingConfig.
    """

    def __init__(self, served: ServedModel, config: ServerConfig, batching: Any) -> None:
        self.served, self.config, self._batching = served, config, batching
        self.engine: Engine | None = None  # while it is started
        self.stopping = False
        self._key = None if config.api_key is None else _digest(config.api_key.encode())
        self._lock = threading.Lock()
        self._held = 0  # bytes of bodies, see `_BODIES`
        self._texts = TokenTexts(served.tokenizer)
        # These limit the memory for long requests of many clients: parsing takes many times the
        # memory of a body, and making tokens takes gigabytes.
        self._bodies = ThreadPoolExecutor(1, "hf_fp8kv bodies")
        self._prompts = ThreadPoolExecutor(2, "hf_fp8kv prompts")
        self._api = self._build()
        self._asgi: Any = self._guard
        if config.cors:
            self._asgi = CORSMiddleware(
                self._guard, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"]
            )

    # -- the engine ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine, and return when it takes requests. Do nothing if it is started.

        Raises:
            ConfigError: The engine has no pages, or cannot run the model like this.
        """
        with self._lock:
            if self.engine is not None:
                return
            metrics, longest = Metrics(self.served.names[-1]), self.config.max_model_tokens
            engine = Engine(self.served.model, self._batching, metrics, longest)
            metrics.engine, self.metrics = engine, metrics
            self._maker = ChoiceMaker(self.served, engine, self.config.seed)
            self.stopping, self.engine = False, engine

    def stop(self) -> None:
        """Stop the engine. Running requests fail. Do nothing if it is not started."""
        with self._lock:
            if self.engine is not None:
                self.stopping = True
                self.engine.stop()
                self.engine = None

    @property
    def failure(self) -> str | None:
        """Why it does not answer requests. None means that it does."""
        if self.engine is None:
            return "the engine was not started"
        return None if self.engine.is_alive() else self.engine.failure or "it ended"

    def end_all(self) -> None:
        """End all unfinished answers."""
        for running in list(self.metrics.unfinished):
            running.fail(APIError(503, STOPPING, code="stopping"))

    @contextlib.asynccontextmanager
    async def lifespan(self, _parent: Any = None) -> AsyncIterator[None]:
        """Run the engine within the block: `FastAPI(lifespan=application.lifespan)`.

        Raises:
            ConfigError: See `start`.
        """
        await asyncio.to_thread(self.start)
        try:
            yield
        finally:
            await asyncio.to_thread(self.stop)

    async def _answer_lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await asyncio.to_thread(self.start)
        except Exception as error:
            text = str(error) if isinstance(error, FP8KVError) else traceback.format_exc()
            await send({"type": "lifespan.startup.failed", "message": text})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await asyncio.to_thread(self.stop)
        await send({"type": "lifespan.shutdown.complete"})

    # -- access ----------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or the events of a server's lifespan."""
        if scope["type"] == "lifespan":
            await self._answer_lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._asgi(scope, receive, send)

    async def _guard(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request if the client has access, and count it."""
        headers = {name.lower(): value for name, value in scope["headers"]}
        status, request_id = 500, headers.get(b"x-request-id") or uuid.uuid4().hex.encode()

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        path, ending = _path_of(scope), contextlib.ExitStack()
        scope[_ENDING] = ending
        try:
            self._check_access(path, scope["method"], headers)
            async with asyncio.timeout(None) as scope[_LEAVING]:
                await self._api(scope, receive, send_counted)
        except APIError as error:
            await error.response()(scope, receive, send_counted)
        except ClientDisconnect:
            status = _CLIENT_GONE
        except Exception:  # `_explain` has logged it
            if scope[_LEAVING].expired():
                status = _CLIENT_GONE
        finally:
            ending.close()
            if scope["method"] == "POST" and path in _KINDS and self.engine is not None:
                self.metrics.statuses[status] += 1

    def _check_access(self, path: str, method: str, headers: dict[bytes, bytes]) -> None:
        host = headers.get(b"host", b"localhost").decode("latin-1")
        if not self.config.accepts_host(host):
            expected = "a name of this machine, such as localhost, without an access token"
            text = f"host: expected {expected}, got {host!r:.100}; set {KEY_VARIABLE} for others"
            raise APIError(421, text, code="wrong_host")
        if self._key is not None and not (path == "/health" and method in ("GET", "HEAD")):
            scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
            # Digests have the same length, so the comparison takes the same time for every token.
            equal = hmac.compare_digest(_digest(token.strip()), self._key)
            if not equal or scheme.lower() != b"bearer":
                raise APIError(
                    401,
                    "expected an access token in the header `Authorization: Bearer ...`",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
        if self.engine is None:
            raise APIError(503, _NOT_STARTED, code="not_started")

    def _started(self) -> Engine:
        """Return the engine. Raises APIError if it takes no requests."""
        engine = self.engine
        if self.stopping or engine is None:
            headers = {**_RETRY, "connection": "close"}
            raise APIError(503, STOPPING, code="stopping", headers=headers)
        if not engine.is_alive():
            text = f"the engine is not running: {self.failure}"
            raise APIError(503, text, code="engine_dead")
        return engine

    def _check_capacity(self) -> Engine:
        engine, waiting, limit = self._started(), self.metrics.waiting(), self.config.max_waiting
        if waiting >= limit:
            raise APIError(
                429,
                f"expected fewer than {limit} waiting requests, got {waiting}; try again later",
                code="too_many_requests",
                headers=_RETRY,
            )
        return engine

    # -- bodies ----------------------------------------------------------------------------------

    async def _read(self, request: Request, kind: type[schemas.Body]) -> tuple[Any, str]:
        """Return a request's body as an object, and the model's name for the answer.

        The bytes of the body count until the request has its answer.
        """
        limit, length = self.config.max_body, request.headers.get("content-length", "0")
        media = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if media != "application/json":
            raise APIError(415, f"content-type: expected application/json, got {media!r:.100}")
        if not (length.isascii() and length.isdigit()) or int(length[:20]) > limit:
            raise _too_large(limit)
        seconds = min(self.config.body_seconds, self.config.client_seconds)
        content, held = bytearray(), 0

        def release() -> None:
            self._held -= held

        request.scope[_ENDING].callback(release)
        try:
            async with asyncio.timeout(seconds):
                async for chunk in request.stream():
                    content += chunk
                    if len(content) > limit:
                        raise _too_large(limit)
                    counted = max(len(content) - _BUFFER, 0)
                    self._held += counted - held
                    held = counted
                    if counted and self._held > _BODIES * limit:
                        expected = f"at most {_BODIES * limit} bytes of all requests"
                        text = f"expected {expected}; try again later"
                        raise APIError(429, text, code="too_many_bytes", headers=_RETRY)
        except TimeoutError:
            text = f"expected a body within {seconds:g} s"
            raise APIError(408, text, headers={"connection": "close"}) from None
        if len(content) > _LONG:
            checked: tuple[Any, str] = await _run(self._bodies, self._check, kind, content)
            return checked
        return self._check(kind, content)

    def _check(self, kind: type[schemas.Body], content: bytearray) -> tuple[Any, str]:
        body = schemas.validate(kind, schemas.parse_body(content))
        name = self.served.check_name(body.model)
        if isinstance(body, schemas.Request):
            self.served.check(body)
            self._maker.check_length(body)
        return body, name

    # -- paths -----------------------------------------------------------------------------------

    def _build(self) -> FastAPI:
        kinds: tuple[Any, ...] = (APIError, HTTPException, Exception)
        api = FastAPI(
            title="hf-fp8kv", version=importlib.metadata.version("hf-fp8kv"),
            exception_handlers=dict.fromkeys(kinds, _explain),
        )  # fmt: skip

        def add(path: str, answer: Callable[..., Any], *methods: str) -> None:
            for method in methods:
                api.add_api_route(
                    path, answer, methods=[method], name=answer.__name__.strip("_"),
                    response_model=None, include_in_schema=method != "HEAD",
                )  # fmt: skip

        for path in _KINDS:
            add(path, self._generate, "POST")
        add("/v1/models", self._list_models, "GET")
        add("/v1/models/{name:path}", self._describe_model, "GET")
        add("/tokenize", self._tokenize, "POST")
        add("/detokenize", self._detokenize, "POST")
        add("/load_model", self._load_model, "POST")
        add("/health", self._health, "GET", "HEAD")
        add("/metrics", self._show_metrics, "GET", "HEAD")
        add("/version", self._version, "GET")
        return api

    async def _list_models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self.served.describe()]}

    async def _describe_model(self, name: str) -> dict[str, Any]:
        described = self.served.describe(self.served.check_name(name))
        return {**described, "max_model_len": self._started().max_tokens}

    async def _load_model(self, request: Request) -> Response:
        _, name = await self._read(request, schemas.Body)
        event = format_event({"status": "ready", "model": name, "cached": True})
        return Response(event, media_type="text/event-stream")

    async def _version(self) -> dict[str, str]:
        versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
        return {"version": versions["hf-fp8kv"], **versions}

    async def _show_metrics(self) -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self.metrics.format(), media_type=kind)

    async def _health(self) -> Any:
        try:
            engine = self._started()
        except APIError as error:
            reason = "stopping" if self.stopping else "cb_worker_dead"
            content = {"status": "unhealthy", "reason": reason, **error.body()}
            return JSONResponse(content, error.status)
        active, waiting = engine.active(), self.metrics.waiting()
        return {"status": "ok", "requests_active": active, "requests_waiting": waiting}

    async def _tokenize(self, request: Request) -> Response:
        body, _ = await self._read(request, schemas.TokenizeRequest)
        (tokens,) = await _run(self._prompts, self.served.make_prompts, body)
        most = self._started().max_tokens
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": most})

    async def _detokenize(self, request: Request) -> Response:
        body, _ = await self._read(request, schemas.DetokenizeRequest)
        most, vocabulary = self._started().max_tokens, self._started().vocabulary
        if len(body.tokens) > most or max(body.tokens, default=0) >= vocabulary:
            expected = f"a list of at most {most} integers from 0 to {vocabulary - 1}"
            raise schemas.invalid("tokens", expected, body.tokens)
        return JSONResponse({"prompt": self.served.tokenizer.decode(body.tokens)})

    # -- answers ---------------------------------------------------------------------------------

    async def _generate(self, request: Request) -> Response:
        self._check_capacity()
        body, name = await self._read(request, _KINDS[_path_of(request.scope)])
        running = RunningRequest(self._check_capacity(), self.metrics)
        self.metrics.unfinished[running] = 1
        request.scope[_ENDING].callback(self.metrics.unfinished.pop, running, None)
        choices: list[Choice] = []
        watch = asyncio.create_task(_watch(request, choices))
        request.scope[_ENDING].callback(watch.cancel)
        guide = await self._maker.grammars.compile(body)
        pool = self._prompts if sum(body.lengths) > _LONG else None
        choices += await _run(pool, self._maker.make, body, guide)
        answer: Answers | ResponseAnswer
        if isinstance(body, schemas.ResponseRequest):
            answer = ResponseAnswer(body, name, choices[0])
        else:
            answer = Answers(body, name, choices, self._texts)
        groups = running.run(choices, streaming=body.stream)
        if body.stream:
            return _Stream(_events(groups, answer), media_type="text/event-stream")
        parts = [part async for group in groups for part in group]
        # In a thread, because megabytes of log probabilities would delay other clients.
        return JSONResponse(await asyncio.to_thread(answer.collect, parts))


async def _events(
    groups: AsyncGenerator[Parts, None], answer: Answers | ResponseAnswer
) -> AsyncGenerator[str, None]:
    """Yield the events of a streamed answer. The last event may be an error."""
    try:
        async with contextlib.aclosing(groups):
            async for event in answer.stream(groups):
                yield event
    except Exception as error:
        if not isinstance(error, APIError):
            logger.exception("a streamed answer")
            error = APIError(500, INTERNAL)
        yield answer.error_events(error)


class _Stream(StreamingResponse):
    """A streamed answer, whose generator is closed at once if the client leaves."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events: Any = self.body_iterator
        async with contextlib.aclosing(events):
            await self.stream_response(send)


async def _watch(request: Request, choices: list[Choice]) -> None:
    """End a request when its client leaves before the last token of its choices."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    # A client that has its last token may leave before the last part, which is empty, is sent.
    if not choices or not all(choice.finish_reason for choice in choices):
        request.scope[_LEAVING].reschedule(asyncio.get_running_loop().time())


async def _explain(request: Request, error: Exception) -> Response:
    """Return the answer to a request that failed."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=_CLIENT_GONE)
    if isinstance(error, HTTPException):
        text, headers = f"{request.url.path}: {error.detail}", dict(error.headers or {})
        error = APIError(error.status_code, text, headers=headers)
    if not isinstance(error, APIError):
        logger.error("%s %s", request.method, request.url.path, exc_info=error)
        error = APIError(500, INTERNAL)
    return error.response()


def _too_large(limit: int) -> APIError:
    return APIError(413, f"expected a body of at most {limit} bytes", code="too_large")


async def _run(pool: ThreadPoolExecutor | None, work: Callable[..., Any], *given: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(pool, work, *given)


def _path_of(scope: Scope) -> str:
    """Return the path of a request within this application, which may be mounted."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
