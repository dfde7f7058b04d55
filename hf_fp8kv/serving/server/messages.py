"""Checks of messages and tools, in chats and in the input of responses."""

from collections.abc import Mapping
from typing import Any

from .checks import invalid, unsupported
from .tool_calls import tool_functions

# Items of the input of a response that are no messages, and the texts that they must have.
_ITEMS: Mapping[str, tuple[str, ...]] = {
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
_TEXT_PARTS = ("text", "input_text", "output_text")


def check_messages(body: Mapping[str, Any]) -> None:
    """Raise APIError unless `messages` is what a chat template takes."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "a list of one message or more", messages)
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message)


def _check_message(where: str, message: Any) -> None:
    if not isinstance(message, dict):
        raise invalid(where, "an object", message)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise invalid(f"{where}.role", "text", role)
    calls = message.get("tool_calls")
    if calls is None or calls == []:
        message.pop("tool_calls", None)  # handlers drop the content of a message that has them
    # An assistant that calls tools may have nothing to say.
    if not isinstance(content, str | list) and not (content is None and calls):
        raise invalid(f"{where}.content", "text, or a list of parts", content)
    for index, part in enumerate(content if isinstance(content, list) else []):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise invalid(f"{where}.content[{index}]", "a part with type text and a text", part)
    if calls is not None and not isinstance(calls, list):
        raise invalid(f"{where}.tool_calls", "a list", calls)
    for index, call in enumerate(calls or []):
        if not _has_name(call.get("function") if isinstance(call, dict) else None):
            expected = "an object with a function's name"
            raise invalid(f"{where}.tool_calls[{index}]", expected, call)


def check_item(where: str, item: Any) -> None:
    """Check one item of the input of a response."""
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    if kind == "message":
        _check_message(where, item)
        return
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise invalid(f"{where}.type", f"one of message, {', '.join(_ITEMS)}", kind)
    for name in _ITEMS[kind]:
        if not isinstance(item.get(name), str):
            raise invalid(f"{where}.{name}", "text", item.get(name))
    parts = item.get("content") or [] if kind == "reasoning" else []
    if not isinstance(parts, list) or not all(_has_text(part) for part in parts):
        raise invalid(f"{where}.content", "a list of parts with a text", parts)


def _has_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def check_tools(body: dict[str, Any]) -> None:
    """Check tools; leave them out where the request says that none are to be called."""
    if body.get("tool_choice") == "none":
        body.pop("tools", None)
    tools = body.get("tools", [])
    if not isinstance(tools, list):
        raise invalid("tools", "a list of functions", tools)
    for index, tool in enumerate(tools):
        function: Any = tool.get("function", tool) if isinstance(tool, dict) else None
        if not _has_name(function) or tool.get("type", "function") != "function":
            raise invalid(f"tools[{index}]", "a function with a name", tool)
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise invalid(f"tools[{index}].parameters", "a JSON schema, an object", parameters)
    choice = body.get("tool_choice", "auto")
    if isinstance(choice, dict):
        function = choice.get("function", choice)
        names = [function["name"] for function in tool_functions(body)]
        if choice.get("type") != "function" or not _has_name(function):
            raise invalid("tool_choice", "an object with type function and its name", choice)
        if function["name"] not in names:
            raise invalid("tool_choice", f"one of the tools {', '.join(names)}", function["name"])
    elif choice not in ("auto", "none", "required"):
        raise invalid("tool_choice", "auto, none, required or a function", choice)
    elif choice == "required" and not tools:
        raise invalid("tool_choice", "tools, one of which is to be called", choice)
    elif choice == "auto" and tools and body.get("parallel_tool_calls") is False:
        raise unsupported("parallel_tool_calls", "true with tool_choice auto", False)


def _has_name(function: Any) -> bool:
    return isinstance(function, dict) and isinstance(function.get("name"), str)
