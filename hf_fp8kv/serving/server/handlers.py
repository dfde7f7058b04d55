"""transformers' handlers, with the work on long prompts beside the event loop.

A handler makes a prompt's messages into tokens before it waits for anything, which takes seconds
for megabytes of text; on the event loop, all other clients would wait for that too.
"""

import asyncio
import contextlib
import json
import types
from collections.abc import AsyncIterator, Coroutine, Generator
from typing import Any

from .errors import STOPPING, APIError
from .requests import ServerRequest, current_request
from .validation import RESPONSES, count_characters

# Characters of a request that takes turns with others like it: making a token takes hundreds of
# bytes.
_LONG = 100_000
_DONE = "data: [DONE]\n\n"
_USAGE = '"usage":{'
_COMPLETED = '"type":"response.completed"'
_INCOMPLETE = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}


def adapt(handler: Any, path: str, turns: asyncio.Semaphore) -> None:
    """Change one handler, not its class: where it tokenizes, and what OpenAI's answers have.

    That is: the model's name as the client gave it, `[DONE]` at the end of a stream, errors in
    OpenAI's format, and the status `incomplete` of a response that was truncated. `turns` is how
    many long prompts may be made into tokens at the same time.
    """
    resolve, handle = handler._resolve_model, handler.handle_request

    def resolve_model(body: dict[str, Any]) -> tuple[Any, ...]:
        _, *loaded = resolve(body)
        return (current_request.get().model, *loaded)

    async def handle_request(body: dict[str, Any], request_id: str) -> Any:
        long = count_characters(body) > _LONG
        turn = turns if long else contextlib.nullcontext()
        answer = await _begin_in_thread(handle(body, request_id), turn)
        return _complete_answer(path, answer, current_request.get())

    handler._resolve_model, handler.handle_request = resolve_model, handle_request


# -- threads ---------------------------------------------------------------------------------------


async def _begin_in_thread(
    handling: Coroutine[Any, Any, Any], turn: contextlib.AbstractAsyncContextManager[Any]
) -> Any:
    """Await a coroutine that runs in a thread up to where it first waits, and then here."""

    def run_first_part() -> tuple[bool, Any]:
        if current_request.get().done:
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
            return await asyncio.to_thread(run_first_part)

    # Not cancelled with the request: the thread goes on, and its turn ends when it does.
    begun = asyncio.ensure_future(begin())
    begun.add_done_callback(lambda task: task.cancelled() or task.exception())
    ended, answer = await asyncio.shield(begun)
    if ended and answer is None:
        raise APIError(503, STOPPING, code="stopping")
    return answer if ended else await _resume(handling)


@types.coroutine
def _resume(begun: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Await the remainder of a coroutine that has begun, which `await` does not take as it is."""
    return (yield from begun)


# -- answers ---------------------------------------------------------------------------------------


def _complete_answer(path: str, answer: Any, request: ServerRequest) -> Any:
    """Return the answer with what OpenAI's have, and transformers' do not."""
    from fastapi.responses import JSONResponse, StreamingResponse

    if isinstance(answer, StreamingResponse):
        complete = _complete_responses if path == RESPONSES else _complete_chunks
        answer.body_iterator = complete(answer.body_iterator, request)
    elif isinstance(answer, JSONResponse):
        content = json.loads(bytes(answer.body))
        _add_cached_tokens(content, request)
        if path == RESPONSES and request.truncated:
            content |= _INCOMPLETE
        return JSONResponse(content, answer.status_code)
    return answer


def _add_cached_tokens(content: dict[str, Any], request: ServerRequest) -> None:
    """Say how many of the prompt's tokens were not computed, where OpenAI's answers do."""
    usage = content.get("usage")
    if usage is not None:
        details = "input_tokens_details" if "input_tokens" in usage else "prompt_tokens_details"
        usage[details] = {**(usage.get(details) or {}), "cached_tokens": request.cached_tokens}


async def _complete_chunks(texts: Any, request: ServerRequest) -> AsyncIterator[str]:
    async with contextlib.aclosing(texts):
        async for text in texts:
            if request.error is not None:
                # As the handlers write it: the message between quotes, whatever it contains.
                stock = f'data: {{"error": "{request.error.message}"}}\n\n'
                if text.endswith(stock):
                    event = json.dumps(request.error.body())
                    text = f"{text.removesuffix(stock)}data: {event}\n\n"
            elif _USAGE in text:
                event = json.loads(text.removeprefix("data: "))
                _add_cached_tokens(event, request)
                text = f"data: {json.dumps(event)}\n\n"
            yield text
    yield _DONE


async def _complete_responses(texts: Any, request: ServerRequest) -> AsyncIterator[str]:
    async with contextlib.aclosing(texts):
        async for text in texts:
            # Text of the model has its quotes escaped.
            if _COMPLETED in text:
                event = json.loads(text.removeprefix("data: "))
                _add_cached_tokens(event["response"], request)
                if request.truncated:
                    event["type"] = "response.incomplete"
                    event["response"] |= _INCOMPLETE
                yield f"data: {json.dumps(event)}\n\n"
            else:
                yield text
