"""Answers of /v1/responses, as one object or streamed: items of reasoning, text and calls."""

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

# For each kind of item: the prefix of its id, its fields, and its initial content.
_ITEM_KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "reasoning": ("rs", {"summary": []}, {"type": "reasoning_text", "text": ""}),
    "message": (
        "msg", {"role": "assistant"}, {"type": "output_text", "text": "", "annotations": []}
    ),
}  # fmt: skip


class ResponseWriter:
    """Writes the answer to one request. `name` is the model's name as the client sent it."""

    def __init__(self, request: ResponseRequest, name: str, choice: Choice) -> None:
        self._choice = choice
        self._id, self._event_numbers = uuid.uuid4().hex, itertools.count()
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
        self._open_kind: str | None = None  # kind of the last item, if text is added to it
        self._events: list[str] = []  # events that are not sent yet

    def collect(self, parts: Parts) -> dict[str, Any]:
        """Return the answer for all parts."""
        self._add_parts(parts)
        return self._finish_response()

    async def stream(self, part_groups: AsyncIterator[Parts]) -> AsyncIterator[str]:
        """Yield the events of the answer."""
        for name, status in (("created", "queued"), ("in_progress", "in_progress")):
            self._add_event(f"response.{name}", response=self._make_response(status, []))
        yield self._take_events()
        async for parts in part_groups:
            self._add_parts(parts)
            yield self._take_events()
        response = self._finish_response()
        self._add_event(f"response.{response['status']}", response=response)
        yield self._take_events()

    def error_events(self, error: APIError) -> str:
        """Return the events that report an error in a stream."""
        data = {"code": "server_error", "message": error.message}
        self._add_event("error", message=error.message, code=error.code, param=error.param)
        self._add_event("response.failed", response=self._make_response("failed", [], error=data))
        return self._take_events()

    def _make_response(self, status: str, output: list[Any], **fields: Any) -> dict[str, Any]:
        return {**self._base, "status": status, "output": output, **fields}

    def _add_event(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, **fields, "sequence_number": next(self._event_numbers)}
        self._events.append(format_event(event))

    def _take_events(self) -> str:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return "".join(events)

    def _add_item_event(self, kind: str, **fields: Any) -> None:
        """Add an event for the last item."""
        location = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        self._add_event(f"response.{kind}", **location, **fields)

    def _add_parts(self, parts: Parts) -> None:
        for _, part in parts:
            if part is not None and part.call is not None:
                self._add_call(*part.call)
            elif part is not None:
                self._add_text("reasoning" if part.reasoning else "message", part)

    def _add_text(self, kind: str, part: Part) -> None:
        if self._open_kind != kind:
            self._open_item(kind)
        text = part.reasoning or part.text
        self._items[-1]["content"][0]["text"] += text
        self._add_text_event("delta", delta=text)

    def _open_item(self, kind: str) -> None:
        self._close_item()
        prefix, fields, content = _ITEM_KINDS[kind]
        self._begin_item(prefix, type=kind, status="in_progress", content=[], **fields)
        self._items[-1]["content"], self._open_kind = [dict(content)], kind
        if kind == "message":
            self._add_item_event("content_part.added", content_index=0, part=content)

    def _add_text_event(self, kind: str, **fields: Any) -> None:
        """Add an event for the text of the open item."""
        logprobs: dict[str, Any] = {"logprobs": []} if self._open_kind == "message" else {}
        (content,) = self._items[-1]["content"]
        self._add_item_event(f"{content['type']}.{kind}", content_index=0, **fields, **logprobs)

    def _close_item(self) -> None:
        """Finish the open item, if there is one."""
        if self._open_kind is None:
            return
        (content,) = self._items[-1]["content"]
        self._add_text_event("done", text=content["text"])
        if self._open_kind == "message":
            self._add_item_event("content_part.done", content_index=0, part=content)
        self._open_kind = None
        self._end_item()

    def _begin_item(self, prefix: str, **fields: Any) -> None:
        item = {"id": f"{prefix}_{self._id}_{len(self._items)}", **fields}
        self._add_event("response.output_item.added", output_index=len(self._items), item=item)
        self._items.append(item)

    def _end_item(self) -> None:
        item, index = self._items[-1], len(self._items) - 1
        item["status"] = "completed"
        self._add_event("response.output_item.done", output_index=index, item=item)

    def _add_call(self, name: str, arguments: str) -> None:
        self._close_item()
        call = {"name": name, "arguments": arguments}
        call_id = f"call_{self._id}_{len(self._items)}"
        self._begin_item("call", call_id=call_id, type="function_call", status="completed", **call)
        self._add_item_event("function_call_arguments.done", **call)
        self._end_item()

    def _finish_response(self) -> dict[str, Any]:
        """Finish and return the answer. An answer without calls has at least one message."""
        self._close_item()
        if not self._items or all(item["type"] == "reasoning" for item in self._items):
            self._open_item("message")
            self._close_item()
        counts = count_usage([self._choice])
        usage = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        }
        if self._choice.finish_reason == "length":
            details = {"incomplete_details": {"reason": "max_output_tokens"}}
            return self._make_response("incomplete", self._items, usage=usage, **details)
        return self._make_response("completed", self._items, usage=usage)
