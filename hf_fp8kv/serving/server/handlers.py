"""transformers' handlers, with the work on long prompts beside the event loop, and whole answers.

A handler makes a prompt's messages into tokens before it waits for anything, which takes seconds
for megabytes of text; on the event loop, all other clients would wait for that too.
"""

import asyncio
import contextlib
import json
import types
from collections.abc import Coroutine, Generator
from typing import Any

from .answers import TokenTexts, complete_json, complete_stream
from .errors import STOPPING, APIError
from .processor import RequestProcessor
from .requests import ServerRequest, current_request
from .validation import count_characters

# Characters of a request that takes turns with others like it: making a token takes hundreds of
# bytes.
_LONG = 100_000


def adapt(handler: Any, path: str, turns: asyncio.Semaphore, texts: TokenTexts) -> None:
    """Change one handler, not its class: where it tokenizes, the model's name, and its answers.

    The name is as the client gave it. `turns` is how many long prompts may be made into tokens at
    the same time.
    """
    resolve, handle = handler._resolve_model, handler.handle_request

    def resolve_model(body: dict[str, Any]) -> tuple[Any, ...]:
        _, model, processor = resolve(body)
        request = current_request.get()
        return request.model, model, RequestProcessor(processor, request)

    async def handle_request(body: dict[str, Any], request_id: str) -> Any:
        long = count_characters(body) > _LONG
        turn = turns if long else contextlib.nullcontext()
        answer = await _begin_in_thread(handle(body, request_id), turn)
        request = current_request.get()
        if request.logprobs is None:
            return _complete_answer(path, answer, request, texts)
        # Log probabilities of a long prompt take seconds, and megabytes.
        return await asyncio.to_thread(_complete_answer, path, answer, request, texts)

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


def _complete_answer(path: str, answer: Any, request: ServerRequest, texts: TokenTexts) -> Any:
    """Return the answer with what OpenAI's have, and transformers' do not."""
    from fastapi.responses import JSONResponse, StreamingResponse

    if isinstance(answer, StreamingResponse):
        answer.body_iterator = complete_stream(path, answer.body_iterator, request, texts)
    elif isinstance(answer, JSONResponse):
        content = complete_json(path, json.loads(bytes(answer.body)), request, texts)
        return JSONResponse(content, answer.status_code)
    return answer
