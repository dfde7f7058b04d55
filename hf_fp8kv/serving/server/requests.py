"""The requests that are being answered, and counts of those that were."""

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

__all__ = ["RequestTracker", "ServerRequest", "current_request"]


class ServerRequest:
    """A request to generate, from when it was read until its answer is sent or its client has gone.

    Attributes:
        body: the checked JSON object.
        model: what the client called the model.
        loop: the server's event loop.
        id: the engine's name of it. Never one that a client chose: two alike would be mixed up.
        submitted: the engine has it, so an error is no longer that of the request.
        over: the engine is through with it, or was told to drop it.
        cut: its answer ended because it had all the tokens that it was given.
    """

    def __init__(self, body: dict[str, Any], model: str) -> None:
        self.body, self.model = body, model
        self.loop = asyncio.get_running_loop()
        self.id = uuid.uuid4().hex
        self.submitted = self.over = self.cut = False
        self._cancel: Callable[[], None] | None = None
        self._fail: Callable[[Exception], None] | None = None

    def begin(self, *, cancel: Callable[[], None], fail: Callable[[Exception], None]) -> None:
        """The engine has it: `cancel` gives its pages back, `fail` ends its answer."""
        self.submitted = True
        self._cancel, self._fail = cancel, fail

    def finish(self) -> None:
        """The engine is through with it."""
        self.over = True
        self._cancel = self._fail = None

    def close(self) -> None:
        """Nobody waits for it any longer: the engine drops it, if it has not finished it."""
        cancel = self._cancel
        self.finish()
        if cancel is not None:
            cancel()

    def fail(self, error: Exception) -> None:
        """Ends its answer early."""
        fail = self._fail
        self.close()
        if fail is not None:
            fail(error)


current_request: ContextVar[ServerRequest | None] = ContextVar("current_request", default=None)


class RequestTracker:
    """Requests that run, and counts since the start.

    Attributes:
        statuses: finished requests to generate, by HTTP status; 499 is a client that went away.
        prompt_tokens: of requests that were handed to the engine.
        new_tokens: that the engine delivered.
    """

    def __init__(self) -> None:
        self.running: set[ServerRequest] = set()
        self.statuses: Counter[int] = Counter()
        self.prompt_tokens = 0
        self.new_tokens = 0

    @contextlib.contextmanager
    def track(self, body: dict[str, Any], model: str) -> Iterator[ServerRequest]:
        """Count a request as running inside, and make it the `current_request`."""
        call = ServerRequest(body, model)
        self.running.add(call)
        token = current_request.set(call)
        try:
            yield call
        finally:
            current_request.reset(token)
            self.running.discard(call)
            call.close()
