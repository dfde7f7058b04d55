"""Answers of /v1/responses, whole and streamed: items of thoughts, a message and calls."""

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from .answers import Parts, count_usage, format_event
from .choices import Choice
from .errors import APIError
from .schemas import ResponseRequest
from .text import Part

_INCOMPLETE = {"reason": "max_output_tokens"}


class ResponseAnswer:
    """Writes the answer to one request; `name` is the model's, as the client gave it."""

    def __init__(self, request: ResponseRequest, name: str, choice: Choice) -> None:
        self._choice = choice
        self._id, self._sequence = uuid.uuid4().hex, 0
        self._base = {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": time.time(),
            "model": name,
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": bool(request.parallel_tool_calls),
        }
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the item that text is added to

    def whole(self, parts: Parts) -> dict[str, Any]:
        """Return the answer of all parts."""
        for _, part in parts:
            if part is not None:
                self._add(part)
        self._finish()
        return self._last()

    async def stream(self, found: AsyncIterator[Parts]) -> AsyncIterator[str]:
        """Yield the events of the answer."""
        yield "".join(
            self._event(f"response.{name}", response=self._response(status, []))
            for name, status in (("created", "queued"), ("in_progress", "in_progress"))
        )
        async for parts in found:
            written = [event for _, part in parts if part for event in self._add(part)]
            if written:
                yield "".join(written)
        yield "".join(self._finish())
        last = self._last()
        yield self._event(f"response.{last['status']}", response=last)

    def failed(self, error: APIError) -> str:
        """Return the events of an error in a stream."""
        inner = {"code": "server_error", "message": error.message}
        response = self._response("failed", [], error=inner)
        return self._event(
            "error", message=error.message, code=error.code, param=error.param
        ) + self._event("response.failed", response=response)

    def _response(self, status: str, output: list[Any], **more: Any) -> dict[str, Any]:
        return {**self._base, "status": status, "output": output, **more}

    def _last(self) -> dict[str, Any]:
        used = count_usage([self._choice])
        usage = {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used["total_tokens"],
        }
        if self._choice.finish_reason == "length":
            return self._response(
                "incomplete", self._items, usage=usage, incomplete_details=_INCOMPLETE
            )
        return self._response("completed", self._items, usage=usage)

    def _event(self, kind: str, **fields: Any) -> str:
        self._sequence += 1
        return format_event({"type": kind, "sequence_number": self._sequence - 1, **fields})

    def _place(self, kind: str, **fields: Any) -> str:
        """Return an event of the open item's text."""
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self._items)}
        return self._event(f"response.{kind}", **place, content_index=0, **fields)

    def _item(self, event: str, item: dict[str, Any], index: int) -> str:
        return self._event(f"response.output_item.{event}", output_index=index, item=item)

    def _add(self, part: Part) -> list[str]:
        """Add a part to the answer; return its events."""
        if part.call is not None:
            return self._add_call(*part.call)
        kind = "reasoning" if part.thought else "message"
        events = []
        if self._open is None or self._open["type"] != kind:
            events = [*self._close(), *self._begin(kind)]
        assert self._open is not None
        text = part.thought or part.text
        self._open["content"][0]["text"] += text
        if kind == "reasoning":
            return [*events, self._place("reasoning_text.delta", delta=text)]
        return [*events, self._place("output_text.delta", delta=text, logprobs=[])]

    def _begin(self, kind: str) -> list[str]:
        name = f"{'rs' if kind == 'reasoning' else 'msg'}_{self._id}_{len(self._items)}"
        item: dict[str, Any] = {"id": name, "type": kind, "status": "in_progress", "content": []}
        if kind == "reasoning":
            item["summary"] = []
        else:
            item["role"] = "assistant"
        events = [self._item("added", item, len(self._items))]
        content: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            content = {"type": "output_text", "text": "", "annotations": []}
        self._open = {**item, "content": [content]}
        if kind == "message":
            events.append(self._place("content_part.added", part=content))
        return events

    def _close(self) -> list[str]:
        """Finish the open item; return its events."""
        item = self._open
        if item is None:
            return []
        (content,) = item["content"]
        text = content["text"]
        item["status"] = "completed"
        if item["type"] == "reasoning":
            events = [self._place("reasoning_text.done", text=text)]
        else:
            events = [
                self._place("output_text.done", text=text, logprobs=[]),
                self._place("content_part.done", part=content),
            ]
        events.append(self._item("done", item, len(self._items)))
        self._items.append(item)
        self._open = None
        return events

    def _add_call(self, name: str, arguments: str) -> list[str]:
        events, index = self._close(), len(self._items)
        called = f"call_{self._id}_{index}"
        item = {
            "id": called, "call_id": called, "type": "function_call", "name": name,
            "arguments": arguments, "status": "completed",
        }  # fmt: skip
        self._items.append(item)
        done = {"item_id": called, "output_index": index, "arguments": arguments, "name": name}
        return [
            *events,
            self._item("added", item, index),
            self._event("response.function_call_arguments.done", **done),
            self._item("done", item, index),
        ]

    def _finish(self) -> list[str]:
        """Finish the answer, which has a message at least if it calls nothing."""
        events = self._close()
        if not self._items or all(item["type"] == "reasoning" for item in self._items):
            events += [*self._begin("message"), *self._close()]
        return events
