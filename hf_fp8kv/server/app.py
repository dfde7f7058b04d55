"""The server as an ASGI application, to run or to mount: access, limits and paths."""

import asyncio
import contextlib
import functools
import hashlib
import hmac
import logging
import threading
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from . import schemas
from .choices import Choice, ChoiceMaker, RunningRequest
from .completions import ChoiceParts, CompletionWriter
from .engine import Engine
from .errors import INTERNAL_MESSAGE, APIError, make_busy_error, make_stopping_error
from .jobs import JobPool
from .metrics import Metrics
from .model import ServedModel
from .responses import ResponseWriter
from .server_config import KEY_VARIABLE, ServerConfig
from .token_texts import TokenTexts

logger = logging.getLogger(__name__)

_PAGE = Path(__file__).with_name("page.html").read_bytes()
# The page loads nothing from other hosts, and no other page may embed it.
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none';style-src 'unsafe-inline';"
    "script-src 'unsafe-inline';connect-src 'self';frame-ancestors 'none'"
}
_OPEN_PATHS = ("/", "/health")  # paths that need no API key
_CLIENT_LEFT_STATUS = 499  # as in nginx's log
_LONG_BODY_SIZE = 100_000  # bytes
_NUM_SHORT_JOBS = 8  # number of threads for bodies that are not long, and for responses
# A body is large if it has more than this fraction of the maximum size. At most this number of
# requests with large bodies are handled at once, so that other requests always fit into memory.
_LARGE_FRACTION = 1 / 16
_MAX_LARGE_BODIES = 16
# Keys of a request's scope: an ExitStack, which is closed after the response, and a timeout, which
# ends the request when the client leaves.
_EXIT_STACK_KEY = "hf_fp8kv.exit_stack"
_TIMEOUT_KEY = "hf_fp8kv.timeout"


class Application:
    """An ASGI application for one model, whose engine runs from `start` to `stop`.

    A server starts and stops the engine with ASGI's lifespan events. Starlette and FastAPI do not
    pass these events to a mounted application, so `lifespan` must be passed to them.

    Args:
        served_model: The model.
        config: Access and limits.
        batching: A ContinuousBatchingConfig.
    """

    def __init__(self, served_model: ServedModel, config: ServerConfig, batching: Any) -> None:
        self.served_model = served_model
        self.config = config
        self._batching = batching
        self.engine: Engine | None = None  # set between `start` and `stop`
        self.is_stopping = False
        self.is_busy = False  # whether work of ended requests still ran after `stop`
        self._key_digest = None if config.api_key is None else _hash_key(config.api_key.encode())
        self._large_size = config.max_body_bytes * _LARGE_FRACTION  # bytes
        self._lock = threading.Lock()
        self._token_texts = TokenTexts(served_model.tokenizer)
        self._router = self._build_router()
        self._asgi: Any = self._handle_http
        if config.enable_cors:
            self._asgi = CORSMiddleware(
                self._handle_http, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"]
            )

    def start(self) -> None:
        """Start the engine, and return when it accepts requests. Do nothing if it is started.

        Raises:
            ConfigError: The engine has no pages, or cannot run the model with this configuration.
        """
        with self._lock:
            if self.engine is not None:
                return
            served_model = self.served_model
            max_tokens = self.config.max_model_tokens
            metrics = Metrics(served_model.short_name)
            engine = Engine(served_model.model, self._batching, metrics, max_tokens)
            metrics.engine = engine
            self.metrics = metrics
            self._choice_maker = ChoiceMaker(served_model, engine, self.config.seed)
            self._large_bodies = asyncio.Semaphore(_MAX_LARGE_BODIES)
            # One thread limits the memory and the cores for long bodies: parsing takes many times
            # the memory of a body, and tokenizing takes half a kilobyte per token.
            self._long_pool = JobPool("long bodies", 1)
            self._short_pool = JobPool("short jobs", _NUM_SHORT_JOBS)
            self.is_stopping = False
            self.engine = engine

    def stop(self) -> None:
        """Stop the engine, which fails running requests. Do nothing if it is not started."""
        with self._lock:
            if self.engine is not None:
                self.is_stopping = True
                has_ended = self.engine.stop(self.config.stop_seconds)
                self.engine = None
                pools = (self._choice_maker.grammars.pool, self._long_pool, self._short_pool)
                self.is_busy = not has_ended or any(pool.num_running for pool in pools)
                for pool in pools:
                    pool.close()

    @property
    def failure(self) -> str | None:
        """The reason why the application cannot answer requests. None means that it can."""
        if self.engine is None:
            return "the engine was not started"
        return None if self.engine.is_alive() else self.engine.failure or "it ended"

    def fail_requests(self) -> None:
        """End all unfinished requests with an error."""
        for running_request in list(self.metrics.unfinished_answers):
            running_request.fail(self._make_stopping_error())

    def _make_stopping_error(self) -> APIError:
        return make_stopping_error(None if self.engine is None else self.engine.failure)

    @contextlib.asynccontextmanager
    async def lifespan(self, _parent: Any = None) -> AsyncIterator[None]:
        """Run the engine inside the block. Pass it as `FastAPI(lifespan=application.lifespan)`.

        Raises:
            ConfigError: As in `start`.
        """
        await asyncio.to_thread(self.start)
        try:
            yield
        finally:
            await asyncio.to_thread(self.stop)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or the lifespan events of a server."""
        if scope["type"] == "http":
            await self._asgi(scope, receive, send)
        else:
            await self._router(scope, receive, send)  # which closes websockets

    async def _handle_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request if the client has access, and count the status of the response."""
        headers = {name.lower(): value for name, value in scope["headers"]}
        has_started = False
        status = 500
        request_id = headers.get(b"x-request-id") or uuid.uuid4().hex.encode()

        async def send_and_record(message: Message) -> None:
            nonlocal has_started, status
            if message["type"] == "http.response.start":
                has_started = True
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        path = _get_path(scope)
        exit_stack = scope[_EXIT_STACK_KEY] = contextlib.ExitStack()
        try:
            self._check_access(path, scope["method"], headers)
            async with asyncio.timeout(None) as scope[_TIMEOUT_KEY]:
                await self._router(scope, receive, send_and_record)
        except APIError as error:
            await error.to_response()(scope, receive, send_and_record)
        except asyncio.CancelledError:
            if not self.is_stopping:
                raise
            if not has_started:
                await self._make_stopping_error().to_response()(scope, receive, send_and_record)
        except Exception:  # `_make_error_response` has logged the error
            if scope[_TIMEOUT_KEY].expired():
                status = _CLIENT_LEFT_STATUS
        finally:
            exit_stack.close()
            if scope["method"] == "POST" and path in schemas.BODY_TYPES and self.engine is not None:
                self.metrics.status_counts[status] += 1

    def _check_access(self, path: str, method: str, headers: dict[bytes, bytes]) -> None:
        host = headers.get(b"host", b"localhost").decode("latin-1")
        if not self.config.accepts_host(host):
            raise APIError(
                421,
                "host: expected a name of this machine, such as localhost, without an API key, "
                f"got {host!r:.100}. Set {KEY_VARIABLE} to allow it",
                code="wrong_host",
            )
        is_open = path in _OPEN_PATHS and method in ("GET", "HEAD")
        if self._key_digest is not None and not is_open:
            scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
            # Digests have equal lengths, so the comparison takes the same time for every token.
            is_equal = hmac.compare_digest(_hash_key(token.strip()), self._key_digest)
            if not is_equal or scheme.lower() != b"bearer":
                raise APIError(
                    401,
                    "expected an API key in the header `Authorization: Bearer ...`",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
        if self.engine is None:
            raise APIError(
                503,
                "the engine was not started: the application that mounts this one must start it, "
                "with FastAPI(lifespan=application.lifespan), or inside "
                "`async with application.lifespan():`",
                code="not_started",
            )

    def _require_engine(self) -> Engine:
        """Return the engine. Raise APIError if it does not accept requests."""
        engine = self.engine
        if self.is_stopping or engine is None:
            raise self._make_stopping_error()
        if not engine.is_alive():
            raise APIError(503, f"the engine is not running: {self.failure}", code="engine_dead")
        return engine

    def _require_capacity(self) -> Engine:
        engine = self._require_engine()
        limit = self.config.max_waiting
        num_waiting = self.metrics.count_waiting()
        if num_waiting >= limit:
            raise make_busy_error(f"fewer than {limit} waiting requests, got {num_waiting}")
        return engine

    async def _read_body(self, request: Request) -> bytearray:
        """Return a request's body.

        A large body takes one of `_MAX_LARGE_BODIES` places until the request ends.
        """
        limit = self.config.max_body_bytes
        media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if media_type != "application/json":
            raise APIError(415, f"content-type: expected application/json, got {media_type!r:.100}")
        length = request.headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()) or int(length[:20]) > limit:
            raise _make_size_error(limit)
        seconds = min(self.config.body_seconds, self.config.client_seconds)
        content = bytearray()
        is_large = False
        try:
            async with asyncio.timeout(seconds):
                async for chunk in request.stream():
                    content += chunk
                    if len(content) > limit:
                        raise _make_size_error(limit)
                    if len(content) > self._large_size and not is_large:
                        await self._admit_large_body(request)
                        is_large = True
        except TimeoutError:
            raise APIError(
                408, f"expected a body within {seconds:g} s", headers={"connection": "close"}
            ) from None
        return content

    async def _admit_large_body(self, request: Request) -> None:
        if self._large_bodies.locked():
            raise make_busy_error(
                f"at most {_MAX_LARGE_BODIES} requests with large bodies", "too_many_bytes"
            )
        await self._large_bodies.acquire()
        request.scope[_EXIT_STACK_KEY].callback(self._large_bodies.release)

    def _parse_body(
        self, body_type: type[schemas.AnyBody], content: bytearray
    ) -> tuple[schemas.AnyBody, str]:
        """Return the body of a request, and the model's name for the response."""
        fields = schemas.parse_body(content)
        ignores_unknown = self.config.ignore_unknown_fields
        body = schemas.validate(body_type, fields, ignores_unknown=ignores_unknown)
        name = self.served_model.check_name(body.model)
        self.served_model.check_template_fields(body)
        self._choice_maker.check_length(body)
        return body, name

    def _build_router(self) -> Starlette:
        error_types: tuple[Any, ...] = (APIError, HTTPException, ClientDisconnect, Exception)
        return Starlette(
            routes=[
                *(
                    Route(path, functools.partial(self._generate, body_type), methods=["POST"])
                    for path, body_type in schemas.BODY_TYPES.items()
                ),
                Route("/", self._show_page),
                Route("/v1/models", self._list_models),
                Route("/v1/models/{name:path}", self._describe_model),
                Route("/health", self._show_health),
                Route("/metrics", self._show_metrics),
            ],
            exception_handlers=dict.fromkeys(error_types, _make_error_response),
            lifespan=self.lifespan,
        )

    async def _show_page(self, _request: Request) -> Response:
        return Response(_PAGE, 200, _PAGE_HEADERS, "text/html;charset=utf-8")

    async def _list_models(self, _request: Request) -> Response:
        entry = self.served_model.make_model_entry(self.served_model.short_name)
        return JSONResponse({"object": "list", "data": [entry]})

    async def _describe_model(self, request: Request) -> Response:
        name = self.served_model.check_name(request.path_params["name"])
        entry = self.served_model.make_model_entry(name)
        engine = self._require_engine()
        return JSONResponse({**entry, "max_model_len": engine.max_tokens, "kv_cache": engine.pages})

    async def _show_metrics(self, _request: Request) -> Response:
        return Response(
            self.metrics.format_prometheus(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def _show_health(self, _request: Request) -> Response:
        try:
            engine = self._require_engine()
        except APIError as error:
            reason = "stopping" if self.is_stopping else "cb_worker_dead"
            return JSONResponse(
                {"status": "unhealthy", "reason": reason, **error.to_dict()}, error.status
            )
        return JSONResponse(
            {
                "status": "ok",
                "requests_active": engine.count_active(),
                "requests_waiting": self.metrics.count_waiting(),
            }
        )

    async def _generate(self, body_type: type[schemas.AnyBody], request: Request) -> Response:
        self._require_capacity()
        content = await self._read_body(request)
        running_request = RunningRequest(self._require_capacity(), self.metrics)
        exit_stack = request.scope[_EXIT_STACK_KEY]
        self.metrics.unfinished_answers[running_request] = 1
        exit_stack.callback(self.metrics.unfinished_answers.pop, running_request, None)
        choices: list[Choice] = []
        watcher = asyncio.create_task(_watch_client(request, choices))
        exit_stack.callback(watcher.cancel)
        pool = self._long_pool if len(content) > _LONG_BODY_SIZE else self._short_pool
        body, name = await pool.run(self._parse_body, body_type, content)
        del content  # the request may wait for a long time
        guide = await self._choice_maker.grammars.compile(body)
        choices += await pool.run(self._choice_maker.make_choices, body, guide)
        writer: CompletionWriter | ResponseWriter
        if isinstance(body, schemas.ResponseBody):
            writer = ResponseWriter(body, name, choices[0])
        else:
            writer = CompletionWriter(body, name, choices, self._token_texts)
        part_groups = running_request.run(choices, streaming=body.stream)
        if body.stream:
            return _StreamedResponse(
                _stream_events(part_groups, writer), media_type="text/event-stream"
            )
        parts = [part async for group in part_groups for part in group]
        # A thread formats the response, because megabytes of logprobs would delay other clients.
        return await self._short_pool.run(lambda: JSONResponse(writer.collect(parts)))


async def _stream_events(
    part_groups: AsyncGenerator[ChoiceParts, None], writer: CompletionWriter | ResponseWriter
) -> AsyncGenerator[str, None]:
    """Yield the events of a streamed response. The last event may be an error."""
    try:
        async with contextlib.aclosing(part_groups):
            async for event in writer.stream(part_groups):
                yield event
    except Exception as error:
        if not isinstance(error, APIError):
            logger.exception("a streamed response failed")
            error = APIError(500, INTERNAL_MESSAGE)
        yield writer.format_error(error)


class _StreamedResponse(StreamingResponse):
    """A streamed response, whose generator is closed immediately if the client leaves."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events: Any = self.body_iterator
        async with contextlib.aclosing(events):
            await self.stream_response(send)


async def _watch_client(request: Request, choices: list[Choice]) -> None:
    """End a request when its client leaves before the last token of its choices."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    # A client that has the last token may leave before the final event, which has no text.
    if not choices or not all(choice.finish_reason for choice in choices):
        request.scope[_TIMEOUT_KEY].reschedule(asyncio.get_running_loop().time())


async def _make_error_response(request: Request, error: Exception) -> Response:
    """Return the response to a request that failed."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=_CLIENT_LEFT_STATUS)
    if isinstance(error, HTTPException):
        message = f"{request.url.path}: {error.detail}"
        headers = dict(error.headers or {})
        if error.status_code == 404:
            paths = ", ".join((*schemas.BODY_TYPES, "/v1/models"))
            message = f"{request.url.path:.100}: expected one of {paths}"
        error = APIError(error.status_code, message, headers=headers)
    if not isinstance(error, APIError):
        logger.error("%s %s", request.method, request.url.path, exc_info=error)
        error = APIError(500, INTERNAL_MESSAGE)
    return error.to_response()


def _make_size_error(limit: int) -> APIError:
    return APIError(413, f"expected a body of at most {limit} bytes", code="too_large")


def _get_path(scope: Scope) -> str:
    """Return the path of a request within this application, which may be mounted."""
    path = str(scope["path"])
    mount_path = str(scope.get("root_path", "")).rstrip("/")
    return path.removeprefix(mount_path) if path.startswith(f"{mount_path}/") else path


def _hash_key(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
