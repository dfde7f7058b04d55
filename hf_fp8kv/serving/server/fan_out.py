"""Requests with several prompts, or several answers to each: one request of the engine for each.

Their answers become the choices of one. The first answer to a prompt begins first: the others find
the prompt in the pages, where the model's layers can share them.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Message, Scope, Send

from .answers import DONE, format_event, read_events
from .errors import APIError
from .requests import ServerRequest
from .validation import COMPLETIONS, split_prompts

# Told of a request that has begun.
OnBegin = Callable[[ServerRequest], None]
# Answers one body, to a `send`.
Answer = Callable[[dict[str, Any], Send, OnBegin], Awaitable[None]]
# Answers of one request that are made at the same time: others have requests, too.
_AT_ONCE = 16


def split_body(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a body for each choice: the answers to the first prompt, those to the second, ...

    The same seed for all would make the answers to a prompt the same: each has the next one.
    """
    one = {name: value for name, value in body.items() if name not in ("n", "best_of")}
    bodies = [one]
    if path == COMPLETIONS:
        bodies = [one | {"prompt": prompt} for prompt in split_prompts(body["prompt"])]
    count = body.get("n", 1)
    if count == 1:
        return bodies
    seeds = [{"seed": _next_seed(body["seed"], i)} if "seed" in body else {} for i in range(count)]
    return [each | seed for each in bodies for seed in seeds]


def _next_seed(seed: int, steps: int) -> int:
    return (seed + steps + 2**63) % 2**64 - 2**63


async def answer_all(
    bodies: Sequence[dict[str, Any]], count: int, answer: Answer, send: Send
) -> None:
    """Answer all bodies, `count` of each prompt, in one answer; an error of one is that of all."""
    first, room = bodies[0], asyncio.Semaphore(_AT_ONCE)
    with_usage = bool(first.get("stream_options", {}).get("include_usage"))
    whole = not first.get("stream")
    merged = _Whole(len(bodies), send) if whole else _Stream(send, with_usage=with_usage)
    stored = [asyncio.Event() for _ in range(len(bodies) // count)]  # prompts, in the pages

    async def run(index: int, body: dict[str, Any]) -> None:
        prompt, leads = stored[index // count], index % count == 0

        def on_begin(request: ServerRequest) -> None:
            if leads:
                request.first_token = prompt

        if not leads:
            await prompt.wait()
        try:
            async with room:
                await answer(body, merged.receiver(index, leads), on_begin)
        finally:
            prompt.set()

    error = None
    try:
        async with asyncio.TaskGroup() as group:
            for index, body in enumerate(bodies):
                group.create_task(run(index, body))
    except BaseExceptionGroup as errors:
        error = next((one for one in errors.exceptions if isinstance(one, APIError)), None)
        if error is None:
            raise
    await (merged.finish() if error is None else merged.fail(error))


def _add_usage(total: dict[str, Any], usage: dict[str, Any], *, with_prompt: bool) -> None:
    """Add what one answer used; a prompt counts once, however many answers it has."""
    for name in ("prompt_tokens", "completion_tokens"):
        if with_prompt or name != "prompt_tokens":
            total[name] = total.get(name, 0) + usage[name]
    total["total_tokens"] = total["prompt_tokens"] + total["completion_tokens"]
    if with_prompt:
        details = total.setdefault("prompt_tokens_details", {"cached_tokens": 0})
        details["cached_tokens"] += usage["prompt_tokens_details"]["cached_tokens"]


class _Whole:
    """Answers that are JSON objects."""

    def __init__(self, count: int, send: Send) -> None:
        self._send, self._contents = send, [b""] * count
        self._leads = [False] * count

    def receiver(self, index: int, leads: bool) -> Send:
        self._leads[index] = leads
        status = 200

        async def receive(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                return
            self._contents[index] += message.get("body", b"")
            if status != 200 and not message.get("more_body", False):
                raise _error_of(status, self._contents[index])

        return receive

    async def fail(self, error: APIError) -> None:
        raise error

    async def finish(self) -> None:
        # Log probabilities are megabytes, and other clients would wait for them.
        response = await asyncio.to_thread(self._join)
        await response(_SCOPE, _nothing, self._send)

    def _join(self) -> JSONResponse:
        answers = [json.loads(content) for content in self._contents]
        result, usage = answers[0], {"prompt_tokens": 0}
        for answer, leads in zip(answers, self._leads, strict=True):
            _add_usage(usage, answer["usage"], with_prompt=leads)
        choices = [choice for answer in answers for choice in answer["choices"]]
        numbered = [choice | {"index": index} for index, choice in enumerate(choices)]
        content = result | {"choices": numbered, "usage": usage}
        return JSONResponse(content)


class _Stream:
    """Answers that are streams of events: each event goes on as soon as it comes."""

    def __init__(self, send: Send, *, with_usage: bool) -> None:
        self._send, self._lock, self._with_usage = send, asyncio.Lock(), with_usage
        self._usage: dict[str, Any] = {"prompt_tokens": 0}
        self._last: dict[str, Any] = {}  # an event, for what is the same in all
        self._started = False

    def receiver(self, index: int, leads: bool) -> Send:
        status, kept = 200, ""

        async def receive(message: Message) -> None:
            nonlocal status, kept
            if message["type"] == "http.response.start":
                status = message["status"]
                if status == 200:
                    await self._start(message)
                return
            kept += message.get("body", b"").decode()
            if status != 200:
                if not message.get("more_body", False):
                    raise _error_of(status, kept.encode())
                return
            whole, separator, kept = kept.rpartition("\n\n")
            for event in read_events(whole + separator):
                if event is not None:
                    await self._pass_on(event, index, leads)

        return receive

    async def _start(self, message: Message) -> None:
        async with self._lock:
            if not self._started:
                self._started = True
                await self._send(message)

    async def _pass_on(self, event: dict[str, Any], index: int, leads: bool) -> None:
        if "error" in event:
            inner = event["error"]
            raise APIError(500, inner["message"], param=inner["param"], code=inner["code"])
        usage = event.pop("usage", None)
        if usage is not None:
            _add_usage(self._usage, usage, with_prompt=leads)
        event["id"] = self._last.get("id", event["id"])
        self._last = event
        if event["choices"]:
            event["choices"] = [choice | {"index": index} for choice in event["choices"]]
            await self._write(format_event(event))

    async def _write(self, text: str, *, more: bool = True) -> None:
        async with self._lock:
            body = {"type": "http.response.body", "body": text.encode(), "more_body": more}
            await self._send(body)

    async def fail(self, error: APIError) -> None:
        if not self._started:
            raise error
        await self._write(format_event(error.body()) + DONE, more=False)

    async def finish(self) -> None:
        event = {**self._last, "choices": [], "usage": self._usage}
        # Clients that did not ask for usage take the first choice of every event.
        last = format_event(event) if self._with_usage else ""
        await self._write(last + DONE, more=False)


def _error_of(status: int, content: bytes) -> APIError:
    """Return the error that an answer of the application is."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        error = json.loads(content)["error"]
        return APIError(status, error["message"], param=error["param"], code=error["code"])
    return APIError(status, content.decode("utf-8", "replace")[:300])


_SCOPE: Scope = {"type": "http"}


async def _nothing() -> Message:
    raise AssertionError("an answer reads no request")
