"""Answers of /v1/responses, in one piece and streamed: items of thoughts, text and calls."""

import itertools
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from .answers import Parts, count_usage, format_event
from .choices import Choice
from .errors import APIError
from .schemas import ResponseRequest
from .text import Part

# The beginning of an item's id, its fields, and its content.
_KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "reasoning": ("rs", {"summary": []}, {"type": "reasoning_text", "text": ""}),
    "message": (
        "msg", {"role": "assistant"}, {"type": "output_text", "text": "", "annotations": []}
    ),
}  # fmt: skip


class ResponseAnswer:
    """Writes the answer to one request. `name` is the model's, as the client gave it."""

    def __init__(self, request: ResponseRequest, name: str, choice: Choice) -> None:
        self._choice = choice
        self._id, self._numbers = uuid.uuid4().hex, itertools.count()
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
        self._events: list[str] = []  # not sent yet

    def collect(self, parts: Parts) -> dict[str, Any]:
        """Return the answer from all of its parts."""
        self._add(parts)
        return self._finish()

    async def stream(self, groups: AsyncIterator[Parts]) -> AsyncIterator[str]:
        """Yield the events of the answer."""
        for name, status in (("created", "queued"), ("in_progress", "in_progress")):
            self._event(f"response.{name}", response=self._response(status, []))
        yield self._take_events()
        async for parts in groups:
            self._add(parts)
            yield self._take_events()
        last = self._finish()
        self._event(f"response.{last['status']}", response=last)
        yield self._take_events()

    def error_events(self, error: APIError) -> str:
        """Return the events of an error in a stream."""
        inner = {"code": "server_error", "message": error.message}
        self._event("error", message=error.message, code=error.code, param=error.param)
        self._event("response.failed", response=self._response("failed", [], error=inner))
        return self._take_events()

    def _response(self, status: str, output: list[Any], **extra: Any) -> dict[str, Any]:
        return {**self._base, "status": status, "output": output, **extra}

    def _event(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, **fields, "sequence_number": next(self._numbers)}
        self._events.append(format_event(event))

    def _take_events(self) -> str:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return "".join(events)

    def _item(self, event: str, item: dict[str, Any]) -> None:
        self._event(f"response.output_item.{event}", output_index=len(self._items), item=item)

    def _text_event(self, kind: str, **fields: Any) -> None:
        """Add an event about the open item's text."""
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self._items)}
        self._event(f"response.{kind}", **place, content_index=0, **fields)

    def _add(self, parts: Parts) -> None:
        for _, part in parts:
            if part is not None and part.call is not None:
                self._add_call(*part.call)
            elif part is not None:
                self._add_text("reasoning" if part.thought else "message", part)

    def _add_text(self, kind: str, part: Part) -> None:
        if self._open is None or self._open["type"] != kind:
            self._close()
            self._begin(kind)
        assert self._open is not None
        text = part.thought or part.text
        self._open["content"][0]["text"] += text
        if kind == "reasoning":
            self._text_event("reasoning_text.delta", delta=text)
        else:
            self._text_event("output_text.delta", delta=text, logprobs=[])

    def _begin(self, kind: str) -> None:
        prefix, fields, content = _KINDS[kind]
        name = f"{prefix}_{self._id}_{len(self._items)}"
        item = {"id": name, "type": kind, "status": "in_progress", "content": [], **fields}
        self._item("added", item)
        self._open = {**item, "content": [dict(content)]}
        if kind == "message":
            self._text_event("content_part.added", part=content)

    def _close(self) -> None:
        """Finish the open item."""
        item = self._open
        if item is None:
            return
        (content,) = item["content"]
        if item["type"] == "reasoning":
            self._text_event("reasoning_text.done", text=content["text"])
        else:
            self._text_event("output_text.done", text=content["text"], logprobs=[])
            self._text_event("content_part.done", part=content)
        self._put({**item, "status": "completed"})
        self._open = None

    def _put(self, item: dict[str, Any]) -> None:
        self._item("done", item)
        self._items.append(item)

    def _add_call(self, name: str, arguments: str) -> None:
        self._close()
        call_id = f"call_{self._id}_{len(self._items)}"
        item = {
            "id": call_id, "call_id": call_id, "type": "function_call", "name": name,
            "arguments": arguments, "status": "completed",
        }  # fmt: skip
        self._item("added", item)
        place = {"item_id": call_id, "output_index": len(self._items)}
        kind = "response.function_call_arguments.done"
        self._event(kind, **place, arguments=arguments, name=name)
        self._put(item)

    def _finish(self) -> dict[str, Any]:
        """Finish and return the answer. Without calls it has at least one message."""
        self._close()
        if not self._items or all(item["type"] == "reasoning" for item in self._items):
            self._begin("message")
            self._close()
        used = count_usage([self._choice])
        usage = {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used["total_tokens"],
        }
        if self._choice.finish_reason == "length":
            cut = {"reason": "max_output_tokens"}
            return self._response("incomplete", self._items, usage=usage, incomplete_details=cut)
        return self._response("completed", self._items, usage=usage)
