"""A server from its first page to its last answer."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import uvicorn

from ...errors import ConfigError
from .application import application, known_fields
from .config import ServerConfig, listen
from .connections import backlog, connection, most_connections
from .engine import Engine, SingleEngineState
from .metrics import summary
from .middleware import Middleware
from .model import SingleModelManager
from .options import batching_config, loading
from .requests import RequestTracker

__all__ = ["serve"]

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# How long answers get to be sent after they were ended.
_END_SECONDS = 5.0
# What transformers and PyTorch raise for a folder or an option that will not do.
_NOT_LOADED = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    ImportError,
    RuntimeError,
    AssertionError,
)


def serve(
    name: str,
    *,
    host: str,
    port: int,
    settings: ServerConfig,
    pages: Mapping[str, Any],
    given: Mapping[str, Any],
    ready: Callable[[str], None],
) -> None:
    """Serves a model until a signal ends it.

    SIGTERM or SIGINT: new requests get 503, running ones `settings.grace` seconds; a second signal
    ends these at once.

    Args:
        name: a folder or a hub id.
        host: where to listen.
        port: the same; 0: any that is free.
        settings: limits.
        pages: keywords of `hf_fp8kv.serving.enable`.
        given: the options of transformers' own command, by parameter.
        ready: called with the address when requests are answered.

    Raises:
        ConfigError: the model, the pages or the address cannot be had.
    """
    from transformers.utils import logging as transformers_logging

    level = str(given.get("log_level", "warning")).lower()
    transformers_logging.get_logger("transformers").setLevel(transformers_logging.log_levels[level])
    if given.get("default_seed") is not None:
        import torch

        torch.manual_seed(int(given["default_seed"]))
    config = batching_config(given)
    with contextlib.ExitStack() as stack:
        bound = stack.enter_context(contextlib.closing(listen(host, port)))
        model = _loaded(name, pages, given)
        stack.callback(model.shutdown)
        calls = RequestTracker()
        engine = Engine(model.model, config, calls)
        stack.callback(engine.stop)
        engine.begin()
        state = SingleEngineState(engine, compile=bool(given.get("compile", False)))
        app = application(model, state, given)
        cors = bool(given.get("enable_cors", False))
        gate = Middleware(app, engine, model, calls, settings, fields=known_fields(), cors=cors)
        server = _Server(gate, settings, lambda: ready(_address(bound)))
        server.run(sockets=[bound])


def _loaded(name: str, pages: Mapping[str, Any], given: Mapping[str, Any]) -> SingleModelManager:
    """Returns the model. Raises ConfigError if it cannot be loaded as the options say."""
    if name.startswith(("/", ".", "~")) and not os.path.isdir(name):
        raise ConfigError(
            f"expected the folder of a model or a hub id, got {name!r}: no such folder"
        )
    chosen = loading(given)
    try:
        return SingleModelManager(name, pages=pages, loading=chosen)
    except ConfigError:
        raise
    except _NOT_LOADED as error:
        options = ", ".join(f"{key}={value}" for key, value in chosen.items() if value is not None)
        raise ConfigError(
            f"cannot load a language model from {name!r} with {options}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """Stops when its requests are done, and tells in between how it is getting on."""

    def __init__(self, gate: Middleware, settings: ServerConfig, ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                gate,
                http=connection(most_connections(), settings.head_seconds),
                backlog=backlog(),
                log_level="info",
                lifespan="on",
                ws="none",
                timeout_graceful_shutdown=int(_END_SECONDS),
            )
        )
        self._gate, self._settings, self._ready = gate, settings, ready
        self._told = asyncio.Event()
        self._hurry = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            # What is there now stays: collections while requests run need not look through it.
            gc.collect()
            gc.freeze()
            self._ready()

    async def main_loop(self) -> None:
        work = [asyncio.create_task(self._stop()), asyncio.create_task(self._report())]
        try:
            await super().main_loop()
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Inside, a signal begins the stop; the process ends as if it had not been told to."""
        loop = asyncio.get_running_loop()

        def told(_signal: int, _frame: FrameType | None) -> None:
            loop.call_soon_threadsafe((self._hurry if self._told.is_set() else self._told).set)

        before = {number: signal.signal(number, told) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def _stop(self) -> None:
        """Waits for a signal, then for the requests that run, then ends those that still do."""
        await self._told.wait()
        gate, calls = self._gate, self._gate.calls
        gate.stopping = True
        running = len(calls.running)
        logger.info("stopping: %d requests get %g s", running, self._settings.grace)
        until = time.monotonic() + self._settings.grace
        while calls.running and time.monotonic() < until and not self._hurry.is_set():
            await asyncio.sleep(0.05)
        if calls.running:
            logger.warning("stopping: %d requests are ended", len(calls.running))
            gate.end_all()
        until = time.monotonic() + _END_SECONDS
        while calls.running and time.monotonic() < until:
            await asyncio.sleep(0.05)
        self.should_exit = True

    async def _report(self) -> None:
        """Writes a line into the log every so often, while requests run or have run since."""
        gate, seconds = self._gate, self._settings.metrics_interval
        if seconds <= 0:
            return
        tokens, answered, at = 0, 0, time.monotonic()
        while True:
            await asyncio.sleep(seconds)
            calls, now = gate.calls, time.monotonic()
            if calls.running or calls.statuses.total() != answered:
                rate = (calls.new_tokens - tokens) / (now - at)
                logger.info("%s", summary(gate.engine, calls, rate))
            tokens, answered, at = calls.new_tokens, calls.statuses.total(), now
