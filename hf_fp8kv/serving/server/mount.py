"""The server as an ASGI application: `hf-fp8kv serve` runs it, and others can mount it."""

import asyncio
import contextlib
import logging
import threading
import traceback
from collections.abc import AsyncIterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send

from ...errors import FP8KVError
from .config import ServerConfig
from .engine import Engine, SingleEngineState
from .errors import APIError
from .latencies import Latencies
from .metrics import Metrics
from .middleware import Middleware
from .model import SingleModelManager
from .requests import RequestTracker
from .stock import build_application

logger = logging.getLogger(__name__)

_NOT_STARTED = (
    "the engine was not started: an application that this one is mounted in has to do it, with "
    "FastAPI(lifespan=application.lifespan), or inside `async with application.lifespan():`"
)


class Application:
    """An ASGI application for one model, whose engine runs from `start` to `stop`.

    A server that runs it as it is starts and stops it by the events of ASGI's lifespan. Starlette
    and FastAPI pass these on to no application that is mounted: there, give them `lifespan`.

    `batching` is a ContinuousBatchingConfig; `seed` and `max_model_tokens`: see `Engine`; `cors`:
    whether pages of other origins may read answers; `template_arguments` are filled into the chat
    template; `compile` is transformers' option of that name.
    """

    def __init__(
        self,
        model: SingleModelManager,
        config: ServerConfig,
        *,
        batching: Any,
        seed: int | None = None,
        max_model_tokens: int | None = None,
        cors: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
        compile: bool = False,
    ) -> None:
        self.model, self.config = model, config
        self.middleware: Middleware | None = None  # while it is started
        self._batching, self._seed, self._max_model_tokens = batching, seed, max_model_tokens
        self._cors, self._compile = cors, compile
        self._template_arguments = dict(template_arguments or {})
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the engine, and return when it takes requests. Do nothing if it is started.

        Raises:
            ConfigError: the engine has no pages, or cannot run the model like this.
        """
        with self._lock:
            if self.middleware is None:
                self.middleware = self._begin()

    def stop(self) -> None:
        """End the engine; requests that still run fail. Do nothing if it is not started."""
        with self._lock:
            middleware = self.middleware
            if middleware is not None:
                middleware.stopping = True
                middleware.engine.stop()
                self.middleware = None

    @property
    def failure(self) -> str | None:
        """Why it answers no requests: it is not started, or its engine has ended; None: it does."""
        middleware = self.middleware
        if middleware is None:
            return "the engine was not started"
        return None if middleware.engine.is_alive() else middleware.engine.why_dead() or "it ended"

    @contextlib.asynccontextmanager
    async def lifespan(self, _parent: Any = None) -> AsyncIterator[None]:
        """Run the engine inside: `FastAPI(lifespan=application.lifespan)`.

        Raises ConfigError: see `start`.
        """
        await asyncio.to_thread(self.start)
        try:
            yield
        finally:
            await asyncio.to_thread(self.stop)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or the events of a server that starts and stops."""
        if scope["type"] == "lifespan":
            await self._answer_lifespan(receive, send)
        elif self.middleware is not None:
            await self.middleware(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1013})
        else:
            error = APIError(503, _NOT_STARTED, code="not_started")
            await error.response()(scope, receive, send)

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

    def _begin(self) -> Middleware:
        tracker, registry = RequestTracker(), CollectorRegistry()
        latencies = Latencies(self.model.names[-1], registry)
        engine = Engine(
            self.model.model, self._batching, tracker, latencies, self._seed, self._max_model_tokens
        )
        try:
            engine.begin()
            state = SingleEngineState(engine, compile=self._compile)
            app, fields = build_application(
                self.model, state, cors=self._cors, template_arguments=self._template_arguments
            )
            metrics = Metrics(engine, tracker, registry)
            return Middleware(
                app, engine, self.model, tracker, self.config, metrics, fields=fields,
                cors=self._cors,
            )  # fmt: skip
        except BaseException:
            engine.stop()
            raise
