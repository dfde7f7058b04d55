"""Run the server: load the model, and serve requests until a signal."""

import asyncio
import contextlib
import gc
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from transformers.cli.serving.model_manager import ModelManager

from ..errors import ConfigError, EngineError
from ..prefix.store import flush_stores
from ..utils.files import check_model_name
from .app import Application
from .connections import compute_connection_limits, make_connection_class

logger = logging.getLogger(__name__)

_SEND_SECONDS = 3  # time to send the errors of requests that were ended
# Exceptions that transformers and PyTorch raise for an invalid model folder or option.
_LOADING_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    ImportError,
    RuntimeError,
    AssertionError,
)


def run(app: Application, sock: socket.socket, on_ready: Callable[[str], None]) -> None:
    """Start an application's engine, and serve requests until a signal.

    After SIGTERM or SIGINT, new requests get 503. Running requests get `config.grace_seconds`.
    A second signal ends running requests at once.

    Args:
        app: The application.
        sock: A socket that is bound and does not accept connections yet.
        on_ready: Function that is called with the URL as soon as the server accepts requests.

    Raises:
        ConfigError: The engine cannot run the model with its configuration.
        EngineError: The engine ended while it served. No request can cause this. A supervisor must
            restart the process.
    """
    with contextlib.ExitStack() as stack:
        access_log = logging.getLogger("uvicorn.access")
        access_log.addFilter(_is_logged)
        stack.callback(access_log.removeFilter, _is_logged)
        stack.push(lambda _type, error, _traceback: _end_process(app, error))
        stack.callback(app.stop)
        app.start()  # before uvicorn, so that an error is one line and a signal ends the process
        engine = app.engine
        assert engine is not None
        server = _Server(app, lambda: on_ready(_format_url(sock)))
        server.run(sockets=[sock])  # stops `app` before it returns
        # The engine may fail after the last tick, or record its error after its end.
        failure = engine.failure or server.failure
        if failure is not None:
            raise EngineError(
                f"the engine ended: {failure}. Start the server again, and report its log if it "
                "ends again"
            )


def _end_process(app: Application, error: BaseException | None) -> None:
    """Write the pages of prefix stores, and end the process if work of ended requests still runs.

    Python would wait for this work before it exits, which takes minutes if a prompt is very long.
    """
    flush_stores()
    if app.is_busy and threading.current_thread() is threading.main_thread():
        if error is not None:
            logger.error("%s", error)
        os._exit(0 if error is None else 1)


def load_model(name: str, **options: Any) -> tuple[Any, Any]:
    """Return a model and its tokenizer.

    Args:
        name: A folder or a Hub id.
        options: Keyword arguments of transformers' ModelManager.

    Raises:
        ConfigError: The model is not available or cannot be loaded with these options, or torchrun
            started several processes.
    """
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise ConfigError(
            "WORLD_SIZE: expected a single process, got several from torchrun. To serve a model on "
            "several GPUs, use vLLM with the hf_fp8kv plugin"
        )
    check_model_name(name)
    try:
        (loaded,) = ModelManager(force_model=name, **options).loaded_models.values()
        return loaded.model, loaded.processor
    except _LOADING_ERRORS as error:
        passed_options = ", ".join(
            f"{key}={value}" for key, value in options.items() if value is not None
        )
        raise ConfigError(
            f"model: cannot load a language model from {name!r} with {passed_options}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _is_logged(record: logging.LogRecord) -> bool:
    """Return whether uvicorn logs a request. Requests to /health are too frequent for the log."""
    _client, _method, path, *_ = record.args or ("", "", "")
    return str(path).partition("?")[0] != "/health"


def _format_url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """A server that logs metrics, and stops after a signal when its requests are finished."""

    def __init__(self, app: Application, on_ready: Callable[[], None]) -> None:
        max_connections, backlog_size = compute_connection_limits()
        super().__init__(
            uvicorn.Config(
                app,
                http=make_connection_class(
                    max_connections, app.config.header_seconds, app.config.client_seconds
                ),
                backlog=backlog_size,
                log_level="info",
                lifespan="on",
                ws="none",
                timeout_graceful_shutdown=_SEND_SECONDS,
            )
        )
        self._app = app
        self._on_ready = on_ready
        self._num_signals = 0
        self._deadline = math.inf  # monotonic time at which running requests end after a signal
        self.failure: str | None = None  # why the engine ended, unless the server stopped it

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            # Later garbage collections need not traverse objects that already exist.
            gc.collect()
            gc.freeze()
            self._log_task = asyncio.create_task(self._log_metrics())
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Count a signal instead of ending the process."""
        self._num_signals += 1

    async def on_tick(self, counter: int) -> bool:
        """Return whether to shut down. uvicorn calls this ten times a second."""
        if self.failure is None and self._app.failure is not None:
            # The engine has ended all running requests, and later requests would be refused.
            self.failure = self._app.failure
        is_stopping = self._num_signals > 0 or self.failure is not None
        return (is_stopping and self._continue_stop()) or await super().on_tick(counter)

    def _continue_stop(self) -> bool:
        """Refuse new requests, and end late requests. Return whether to shut down."""
        unfinished_requests = self._app.metrics.unfinished_answers
        now = time.monotonic()
        if not self._app.is_stopping:
            self._app.is_stopping = True
            grace_seconds = self._app.config.grace_seconds
            self._deadline = now + grace_seconds
            logger.info("stopping: %d requests get %g s", len(unfinished_requests), grace_seconds)
        is_overdue = now >= self._deadline or self._num_signals > 1 or self.failure is not None
        if unfinished_requests and is_overdue:
            logger.warning("stopping: ending %d requests", len(unfinished_requests))
            self._app.fail_requests()
        return is_overdue or not unfinished_requests

    async def _log_metrics(self) -> None:
        """Log a line in each interval in which requests run or finish."""
        metrics = self._app.metrics
        engine = metrics.engine
        interval_seconds = self._app.config.log_seconds
        while interval_seconds > 0:
            num_tokens = engine.num_new_tokens
            num_finished = metrics.status_counts.total()
            start = time.monotonic()
            await asyncio.sleep(interval_seconds)
            if metrics.unfinished_answers or metrics.status_counts.total() != num_finished:
                rate = (engine.num_new_tokens - num_tokens) / (time.monotonic() - start)
                logger.info("%s", metrics.summarize(rate))
