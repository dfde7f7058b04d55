"""transformers' handlers, with their work on long prompts beside the event loop.

A handler makes a prompt's messages into tokens before it waits for anything, which takes seconds
for megabytes of text; on the event loop, everybody else would wait for that too.
"""

import asyncio
import concurrent.futures
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from typing import Any, TypeVar

from .errors import APIError
from .requests import current_request
from .validation import RESPONSES, characters

__all__ = ["adapt", "on_the_loop"]

T = TypeVar("T")

# Characters of a request that others of its kind wait for: a token takes hundreds of bytes while it
# is made.
_LONG = 100_000
_DONE = "data: [DONE]\n\n"
_COMPLETED = '"type":"response.completed"'
_INCOMPLETE = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}


def adapt(handler: Any, path: str, turns: asyncio.Semaphore) -> None:
    """Changes one handler, not its class: where it tokenizes, and what OpenAI's answers have more.

    That is: the model's name as the client gave it, `[DONE]` at the end of a stream, and the status
    `incomplete` of a response that was cut short.

    Args:
        handler: one of transformers' for a path of GENERATES.
        path: that path.
        turns: how many long prompts may be made into tokens at the same time.
    """
    resolve, handle = handler._resolve_model, handler.handle_request

    def resolve_model(body: dict[str, Any]) -> tuple[Any, ...]:
        name, *found = resolve(body)
        call = current_request.get()
        return (name if call is None else call.model, *found)

    async def handle_request(body: dict[str, Any], request_id: str) -> Any:
        long = characters(body) > _LONG
        turn = turns if long else contextlib.nullcontext()
        return _completed(path, await _first_step_beside(handle(body, request_id), turn))

    handler._resolve_model, handler.handle_request = resolve_model, handle_request


# -- threads ---------------------------------------------------------------------------------------


async def _first_step_beside(
    handling: Coroutine[Any, Any, Any], turn: contextlib.AbstractAsyncContextManager[Any]
) -> Any:
    """Awaits a coroutine which runs in a thread up to where it first waits, then here."""

    def first() -> tuple[bool, Any]:
        call = current_request.get()
        if call is not None and call.over:
            handling.close()
            return True, None
        try:
            waits_for = handling.send(None)
        except StopIteration as end:
            return True, end.value
        if waits_for is not None:
            raise RuntimeError("expected a handler that first waits for the engine")
        return False, None

    async def begin() -> tuple[bool, Any]:
        async with turn:
            return await asyncio.to_thread(first)

    # Not cancelled with the request: the thread goes on, and its turn ends when it does.
    begun = asyncio.ensure_future(begin())
    begun.add_done_callback(lambda done: done.cancelled() or done.exception())
    over, answer = await asyncio.shield(begun)
    if over and answer is None:
        raise APIError(503, "the server is stopping", code="stopping")
    return answer if over else await _Rest(handling)


class _Rest:
    """What is left of a coroutine that has begun, which `await` does not take as it is."""

    def __init__(self, begun: Coroutine[Any, Any, Any]) -> None:
        self._begun = begun

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._begun.__await__()


def on_the_loop(loop: asyncio.AbstractEventLoop, work: Callable[[], T]) -> T:
    """Returns what a function returns that the event loop calls; waits for it in another thread."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    loop.call_soon_threadsafe(run)
    return done.result()


# -- answers ---------------------------------------------------------------------------------------


def _completed(path: str, answer: Any) -> Any:
    from fastapi.responses import JSONResponse, StreamingResponse

    if isinstance(answer, StreamingResponse):
        parts = _responses if path == RESPONSES else _with_done
        answer.body_iterator = parts(answer.body_iterator)
    elif path == RESPONSES and _was_cut():
        return JSONResponse(json.loads(answer.body) | _INCOMPLETE, answer.status_code)
    return answer


async def _with_done(texts: Any) -> AsyncIterator[str]:
    async with contextlib.aclosing(texts):
        async for text in texts:
            yield text
    yield _DONE


async def _responses(texts: Any) -> AsyncIterator[str]:
    async with contextlib.aclosing(texts):
        async for text in texts:
            # Text of the model has its quotes escaped.
            if _COMPLETED in text and _was_cut():
                event = json.loads(text.removeprefix("data: "))
                event["type"] = "response.incomplete"
                event["response"] |= _INCOMPLETE
                yield f"data: {json.dumps(event)}\n\n"
            else:
                yield text


def _was_cut() -> bool:
    call = current_request.get()
    return call is not None and call.cut
