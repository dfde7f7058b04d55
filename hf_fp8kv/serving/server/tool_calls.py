"""Forced calls of tools: answers that are JSON of a tool's arguments, whatever a model's own form.

The grammar of such an answer is made in structured_output.py; here it is read.
"""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from transformers.cli.serving.utils import ToolCall

CHOICE = "tool_choice"


def forced_tool(body: Mapping[str, Any]) -> str | None:
    """Return the name of the tool that a request must call; "": any of them; None: it need not."""
    choice = body.get(CHOICE)
    if choice == "required":
        return ""
    if not isinstance(choice, dict):
        return None
    return str(choice.get("function", choice)["name"])  # of a chat, or of a response


def tool_functions(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the functions among a request's tools."""
    return [tool.get("function", tool) for tool in body.get("tools", ())]


class ForcedCall:
    """The text of an answer that must call a tool; `name` as in `forced_tool`."""

    def __init__(self, name: str) -> None:
        self._name, self.text = name, ""

    def read(self) -> list[ToolCall | str]:
        """Return the calls; of several that were truncated, those that are whole.

        The text as it is, if it is only the beginning of what is no call yet.
        """
        if self._name:
            return [ToolCall(self._name, self.text)]
        calls: list[ToolCall | str] = []
        at, decode = 1, json.JSONDecoder().raw_decode  # after "["
        with contextlib.suppress(ValueError):
            while at < len(self.text):
                call, at = decode(self.text, at)
                calls.append(ToolCall(call["name"], json.dumps(call["parameters"])))
                at += len(", ")
        if not calls and self.text:
            calls.append(self.text)
        return calls
