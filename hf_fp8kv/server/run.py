"""Running the server: loading the model, and answering requests until a signal."""

import asyncio
import contextlib
import gc
import logging
import math
import os
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from transformers.cli.serving.model_manager import ModelManager

from ..errors import ConfigError, EngineError
from .app import Application
from .connections import backlog, limit_connections, max_connections

logger = logging.getLogger(__name__)

# For sending the answers of requests that were ended.
_END_SECONDS = 5.0
# Exceptions transformers and PyTorch raise for an invalid model folder or option.
_LOADING_ERRORS = (
    OSError, ValueError, TypeError, LookupError, ImportError, RuntimeError, AssertionError
)  # fmt: skip


def run(app: Application, bound: socket.socket, on_ready: Callable[[str], None]) -> None:
    """Start an application's engine, and answer requests until a signal.

    After SIGTERM or SIGINT, new requests get 503, and running ones have `config.grace` seconds. A
    second signal ends them at once.

    Args:
        app: The application.
        bound: A socket that is bound and does not accept connections yet.
        on_ready: Called with the server's address when it answers requests.

    Raises:
        ConfigError: The engine cannot run the model with its configuration.
        EngineError: The engine ended while it served, which no request can cause. A supervisor must
            start the process again.
    """
    with contextlib.ExitStack() as stack:
        access = logging.getLogger("uvicorn.access")
        access.addFilter(_is_logged)
        stack.callback(access.removeFilter, _is_logged)
        stack.callback(app.stop)
        app.start()  # before uvicorn, so that an error is one line, and a signal ends the process
        engine = app.engine
        server = _Server(app, lambda: on_ready(_address(bound)))
        server.run(sockets=[bound])  # stops `app` at its end
        assert engine is not None
        failure = engine.failure or server.failure
        if failure is not None:
            raise EngineError(
                f"the engine ended: {failure}; start the server again, and if it ends again "
                "report what its log says"
            )


def load_model(name: str, **loading: Any) -> tuple[Any, Any]:
    """Return a model and its tokenizer.

    Args:
        name: A folder or a Hub id.
        loading: Keywords of transformers' ModelManager.

    Raises:
        ConfigError: The model is not available or cannot be loaded like this, or torchrun started
            several processes.
    """
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise ConfigError(
            "expected a single process, got several from torchrun (WORLD_SIZE); to serve a model "
            "on several GPUs use vLLM with the plugin of hf_fp8kv"
        )
    if name.startswith(("/", ".", "~")) and not os.path.isdir(name):
        raise ConfigError(
            f"expected the folder of a model or a hub id, got {name!r}: no such folder"
        )
    try:
        (loaded,) = ModelManager(force_model=name, **loading).loaded_models.values()
        return loaded.model, loaded.processor
    except _LOADING_ERRORS as error:
        given = ", ".join(f"{key}={value}" for key, value in loading.items() if value is not None)
        raise ConfigError(
            f"cannot load a language model from {name!r} with {given}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _is_logged(record: logging.LogRecord) -> bool:
    """Return whether uvicorn logs an access. Requests for /health may be very frequent."""
    return str(record.args[2]).partition("?")[0] != "/health"  # type: ignore[index]


def _address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """Stops when its requests are finished, and logs its metrics until then."""

    def __init__(self, app: Application, on_ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=limit_connections(
                    max_connections(), app.config.head_seconds, app.config.client_seconds
                ),
                backlog=backlog(),
                log_level="info",
                lifespan="on",
                ws="none",
                timeout_graceful_shutdown=int(_END_SECONDS),
            )
        )
        self._app, self._on_ready = app, on_ready
        self._signals = 0
        self._deadline = math.inf  # of running requests, after a signal
        self._ended = False  # whether running requests have been ended
        self.failure: str | None = None  # of the engine, if it ended by itself

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            # Objects that exist now stay, so collections need not look through them later.
            gc.collect()
            gc.freeze()
            self._log = asyncio.create_task(self._log_metrics())
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Count a signal, which does not end the process."""
        self._signals += 1

    async def on_tick(self, counter: int) -> bool:
        """Return whether to shut down. uvicorn calls this ten times a second."""
        if self.failure is None and self._app.failure is not None:
            # All later requests would be refused. The engine has ended the running ones.
            self.failure, self._signals = self._app.failure, 2
        return (self._signals > 0 and self._is_done()) or await super().on_tick(counter)

    def _is_done(self) -> bool:
        """Refuse new requests. Return whether running ones are finished or have run out of time."""
        running, now = self._app.metrics.unfinished, time.monotonic()
        if not self._app.stopping:
            self._app.stopping, grace = True, self._app.config.grace
            self._deadline = now + grace
            logger.info("stopping: %d requests get %g s", len(running), grace)
        if running and not self._ended and (now >= self._deadline or self._signals > 1):
            logger.warning("stopping: %d requests are ended", len(running))
            self._app.end_all()
            self._ended, self._deadline = True, now + _END_SECONDS
        return not running or (self._ended and now >= self._deadline)

    async def _log_metrics(self) -> None:
        """Log a line at intervals, while requests run or have run since the previous line."""
        metrics, engine = self._app.metrics, self._app.engine
        seconds = self._app.config.metrics_interval
        if seconds <= 0 or engine is None:
            return
        tokens, answered, last = 0, 0, time.monotonic()
        while True:
            await asyncio.sleep(seconds)
            now = time.monotonic()
            if metrics.unfinished or metrics.statuses.total() != answered:
                rate = (engine.new_tokens - tokens) / (now - last)
                logger.info("%s", metrics.summary(rate))
            tokens, answered, last = engine.new_tokens, metrics.statuses.total(), now
