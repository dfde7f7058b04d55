"""The requests that are being answered, and counts of those that were."""

import asyncio
import contextlib
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from .errors import APIError
from .grammars import Guide
from .logits import Logprobs, TokenRules
from .tool_calls import ForcedCall


class ServerRequest:
    """A request to generate, until its answer is sent or its client has gone.

    `model` is what the client called it.
    """

    def __init__(self, body: dict[str, Any], model: str) -> None:
        self.body, self.model = body, model
        self.loop = asyncio.get_running_loop()
        self.id = uuid.uuid4().hex  # not one that a client chose: two alike would be mixed up
        self.submitted = False  # the engine has it: an error is no longer that of the request
        self.submitted_at = 0.0  # by `time.perf_counter`, as the engine counts
        self.cached_tokens = 0  # of its prompt, that were in the pages
        self.last_token: float | None = None  # when the engine had its last token
        self.done = False  # the engine has finished it, or was told to drop it
        self.truncated = False  # its answer had all the tokens that it was given
        self.prompt_tokens: list[int] | None = None  # as its body has them, instead of a text
        self.prompt_ids: list[int] = []  # that the engine has
        # For each part of its streamed answer, how many tokens the answer had then.
        self.part_tokens: deque[int] = deque()
        self.guide: Guide | None = None  # of its grammar
        self.rules: TokenRules | None = None
        self.logprobs: Logprobs | None = None
        self.stop_tokens = frozenset(body.get("stop_token_ids", ()))
        self.min_tokens: int = body.get("min_tokens", 0)
        self.tool_call: ForcedCall | None = None  # that it must make
        self.scores_only = False  # it wants nothing but what is said of its prompt
        self.cut_text: str | None = None  # of its answer, before a stop string
        self.first_token: asyncio.Event | None = None  # set when the engine has it, if wanted
        self.error: APIError | None = None  # what ended its streamed answer early
        self._cancel: Callable[[], None] | None = None
        self._on_error: Callable[[APIError], None] | None = None

    def begin(self, *, cancel: Callable[[], None], on_error: Callable[[APIError], None]) -> None:
        """Note that the engine has it: `cancel` frees its pages, `on_error` ends its answer."""
        self.submitted, self.submitted_at = True, time.perf_counter()
        self._cancel, self._on_error = cancel, on_error

    def finish(self) -> None:
        """Note that the engine has finished it."""
        self.done = True
        self._cancel = self._on_error = None

    def close(self) -> None:
        """Have the engine drop it, if it has not finished it: nobody waits for the answer."""
        cancel = self._cancel
        self.finish()
        if cancel is not None:
            cancel()

    def fail(self, error: APIError) -> None:
        """End its answer early."""
        on_error = self._on_error
        self.close()
        if on_error is not None:
            on_error(error)


# In everything that the middleware calls for a request.
current_request: ContextVar[ServerRequest] = ContextVar("current_request")


class RequestTracker:
    """Requests that run, and counts since the start."""

    def __init__(self) -> None:
        self.running: set[ServerRequest] = set()
        # Finished requests to generate by HTTP status; 499 is a client that went away.
        self.statuses: Counter[int] = Counter()
        self.prompt_tokens = 0  # of requests that were handed to the engine
        self.new_tokens = 0  # that the engine delivered

    @contextlib.contextmanager
    def track(self, body: dict[str, Any], model: str) -> Iterator[ServerRequest]:
        """Count a request as running inside, and make it the `current_request`."""
        request = ServerRequest(body, model)
        self.running.add(request)
        token = current_request.set(request)
        try:
            yield request
        finally:
            current_request.reset(token)
            self.running.discard(request)
            request.close()
