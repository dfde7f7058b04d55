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
        self._open: str | None = None  # kind of the last item, if text is added to it
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

    def _item_event(self, kind: str, **fields: Any) -> None:
        """Add an event about the last item."""
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        self._event(f"response.{kind}", **place, **fields)

    def _add(self, parts: Parts) -> None:
        for _, part in parts:
            if part is not None and part.call is not None:
                self._add_call(*part.call)
            elif part is not None:
                self._add_text("reasoning" if part.thought else "message", part)

    def _add_text(self, kind: str, part: Part) -> None:
        if self._open != kind:
            self._open_item(kind)
        text = part.thought or part.text
        self._items[-1]["content"][0]["text"] += text
        self._text_event("delta", delta=text)

    def _open_item(self, kind: str) -> None:
        self._close()
        prefix, fields, content = _KINDS[kind]
        self._begin(prefix, type=kind, status="in_progress", content=[], **fields)
        self._items[-1]["content"], self._open = [dict(content)], kind
        if kind == "message":
            self._item_event("content_part.added", content_index=0, part=content)

    def _text_event(self, kind: str, **fields: Any) -> None:
        """Add an event about the open item's text."""
        extra: dict[str, Any] = {"logprobs": []} if self._open == "message" else {}
        (content,) = self._items[-1]["content"]
        self._item_event(f"{content['type']}.{kind}", content_index=0, **fields, **extra)

    def _close(self) -> None:
        """Finish the open item."""
        if self._open is None:
            return
        (content,) = self._items[-1]["content"]
        self._text_event("done", text=content["text"])
        if self._open == "message":
            self._item_event("content_part.done", content_index=0, part=content)
        self._open = None
        self._end()

    def _begin(self, prefix: str, **fields: Any) -> None:
        item = {"id": f"{prefix}_{self._id}_{len(self._items)}", **fields}
        self._event("response.output_item.added", output_index=len(self._items), item=item)
        self._items.append(item)

    def _end(self) -> None:
        item, index = self._items[-1], len(self._items) - 1
        item["status"] = "completed"
        self._event("response.output_item.done", output_index=index, item=item)

    def _add_call(self, name: str, arguments: str) -> None:
        self._close()
        call = {"name": name, "arguments": arguments}
        call_id = f"call_{self._id}_{len(self._items)}"
        self._begin("call", call_id=call_id, type="function_call", status="completed", **call)
        self._item_event("function_call_arguments.done", **call)
        self._end()

    def _finish(self) -> dict[str, Any]:
        """Finish and return the answer. Without calls it has at least one message."""
        self._close()
        if not self._items or all(item["type"] == "reasoning" for item in self._items):
            self._open_item("message")
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
