"""Responses of /v1/responses, as one object or streamed: items of reasoning, text and calls."""

import itertools
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from .answer_text import AnswerPart
from .choices import Choice
from .completions import ChoiceParts, count_usage, format_event
from .errors import APIError
from .schemas import ResponseBody

# For each type of item with text: the prefix of its id, its fields, and its initial content.
_TEXT_ITEMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "reasoning": ("rs", {"summary": []}, {"type": "reasoning_text", "text": ""}),
    "message": (
        "msg",
        {"role": "assistant"},
        {"type": "output_text", "text": "", "annotations": []},
    ),
}


class ResponseWriter:
    """Writes the response to one request. `name` is the model's name as the client sent it."""

    def __init__(self, body: ResponseBody, name: str, choice: Choice) -> None:
        self._choice = choice
        self._id = uuid.uuid4().hex
        self._sequence_numbers = itertools.count()
        self._common_fields = {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": time.time(),
            "model": name,
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": bool(body.parallel_tool_calls),
        }
        self._items: list[dict[str, Any]] = []
        self._open_type: str | None = None  # type of the last item while text may be added to it
        self._events: list[str] = []  # events that are not sent yet

    def collect(self, parts: ChoiceParts) -> dict[str, Any]:
        """Return the response for all parts."""
        self._add_parts(parts)
        return self._finish_response()

    async def stream(self, part_groups: AsyncIterator[ChoiceParts]) -> AsyncIterator[str]:
        """Yield the events of the response, for parts in groups that arrive together."""
        for event_name, status in (("created", "queued"), ("in_progress", "in_progress")):
            self._add_event(f"response.{event_name}", response=self._make_response(status, []))
        yield self._take_events()
        async for parts in part_groups:
            self._add_parts(parts)
            yield self._take_events()
        response = self._finish_response()
        self._add_event(f"response.{response['status']}", response=response)
        yield self._take_events()

    def format_error(self, error: APIError) -> str:
        """Return the events that report an error in a stream."""
        error_fields = {"code": "server_error", "message": error.message}
        response = self._make_response("failed", [], error=error_fields)
        self._add_event("error", message=error.message, code=error.code, param=error.param)
        self._add_event("response.failed", response=response)
        return self._take_events()

    def _make_response(self, status: str, items: list[Any], **fields: Any) -> dict[str, Any]:
        return {**self._common_fields, "status": status, "output": items, **fields}

    def _add_event(self, event_type: str, **fields: Any) -> None:
        event = {"type": event_type, **fields, "sequence_number": next(self._sequence_numbers)}
        self._events.append(format_event(event))

    def _take_events(self) -> str:
        """Return the events since the last call."""
        events = self._events
        self._events = []
        return "".join(events)

    def _add_item_event(self, event_name: str, **fields: Any) -> None:
        """Add an event for the last item."""
        self._add_event(
            f"response.{event_name}",
            item_id=self._items[-1]["id"],
            output_index=len(self._items) - 1,
            **fields,
        )

    def _add_parts(self, parts: ChoiceParts) -> None:
        for _, part in parts:
            if part is not None and part.call is not None:
                self._add_call(*part.call)
            elif part is not None:
                self._add_text("reasoning" if part.reasoning else "message", part)

    def _add_text(self, item_type: str, part: AnswerPart) -> None:
        if self._open_type != item_type:
            self._begin_text_item(item_type)
        text = part.reasoning or part.text
        self._items[-1]["content"][0]["text"] += text
        self._add_text_event("delta", delta=text)

    def _begin_text_item(self, item_type: str) -> None:
        """Finish the last item, and add an empty item, to which `_add_text` adds text."""
        self._finish_text_item()
        id_prefix, fields, content = _TEXT_ITEMS[item_type]
        self._add_item(id_prefix, type=item_type, status="in_progress", content=[], **fields)
        self._items[-1]["content"] = [dict(content)]
        self._open_type = item_type
        if item_type == "message":
            self._add_item_event("content_part.added", content_index=0, part=content)

    def _add_text_event(self, event_name: str, **fields: Any) -> None:
        """Add an event for the text of the open item."""
        if self._open_type == "message":
            fields["logprobs"] = []
        (content,) = self._items[-1]["content"]
        self._add_item_event(f"{content['type']}.{event_name}", content_index=0, **fields)

    def _finish_text_item(self) -> None:
        """Complete the item to which text is added, if there is one."""
        if self._open_type is None:
            return
        (content,) = self._items[-1]["content"]
        self._add_text_event("done", text=content["text"])
        if self._open_type == "message":
            self._add_item_event("content_part.done", content_index=0, part=content)
        self._open_type = None
        self._complete_item()

    def _add_item(self, id_prefix: str, **fields: Any) -> None:
        item = {"id": f"{id_prefix}_{self._id}_{len(self._items)}", **fields}
        self._add_event("response.output_item.added", output_index=len(self._items), item=item)
        self._items.append(item)

    def _complete_item(self) -> None:
        item = self._items[-1]
        item["status"] = "completed"
        self._add_event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _add_call(self, name: str, arguments: str) -> None:
        self._finish_text_item()
        call = {"name": name, "arguments": arguments}
        call_id = f"call_{self._id}_{len(self._items)}"
        self._add_item("call", call_id=call_id, type="function_call", status="completed", **call)
        self._add_item_event("function_call_arguments.done", **call)
        self._complete_item()

    def _finish_response(self) -> dict[str, Any]:
        """Finish and return the response. A response without calls has at least one message."""
        self._finish_text_item()
        if not self._items or all(item["type"] == "reasoning" for item in self._items):
            self._begin_text_item("message")
            self._finish_text_item()
        counts = count_usage([self._choice])
        usage = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        }
        if self._choice.finish_reason == "length":
            return self._make_response(
                "incomplete",
                self._items,
                usage=usage,
                incomplete_details={"reason": "max_output_tokens"},
            )
        return self._make_response("completed", self._items, usage=usage)
