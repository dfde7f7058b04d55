"""A model's tokenizer as the handlers of one request see it."""

import logging
from typing import Any

from .grammars import inner_tokenizer
from .requests import ServerRequest
from .tool_calls import ForcedCall

logger = logging.getLogger(__name__)


class RequestProcessor:
    """A tokenizer that knows a request: its prompt may be tokens, and its answer cut or forced.

    Everything else is that of `processor`, or of the tokenizer within it.
    """

    def __init__(self, processor: Any, request: ServerRequest) -> None:
        self._outer, self._request = processor, request
        self._inner = inner_tokenizer(processor)

    @property
    def tokenizer(self) -> "RequestProcessor":
        """This one, for the handlers, which look for a tokenizer within a processor."""
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outer if hasattr(self._outer, name) else self._inner, name)

    def __call__(self, text: Any, **kwargs: Any) -> Any:
        """Return the tokens of a prompt; `text` does not count if the request has tokens."""
        tokens = self._request.prompt_tokens
        if tokens is not None:
            return {"input_ids": list(tokens)}
        special = self._request.body.get("add_special_tokens", True)
        return self._inner(text, add_special_tokens=special, **kwargs)

    @property
    def response_template(self) -> Any:
        """The form of the model's answers; that of a forced call is not the model's."""
        if self._request.tool_call is not None and not self._request.body.get("stream"):
            return {}  # not None: `parse_response` is called
        return getattr(self._inner, "response_template", None)

    def parse_response(self, tokens: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the parts of an answer; of one that is no whole message, all of it as content."""
        request = self._request
        if request.tool_call is not None:
            return _read_calls(request.tool_call)
        given = tokens if request.cut_text is None else request.cut_text
        try:
            return dict(self._inner.parse_response(given, *args, **kwargs))
        except (ValueError, RuntimeError) as error:
            logger.warning("an answer is no whole message: %s", error)
            whole = isinstance(given, str)
            return {"content": given if whole else self._inner.decode(given, True)}


def _read_calls(forced: ForcedCall) -> dict[str, Any]:
    parts = forced.read()
    calls = [
        {"type": "function", "function": {"name": part.name, "arguments": part.arguments}}
        for part in parts
        if not isinstance(part, str)
    ]
    return {"content": "".join(p for p in parts if isinstance(p, str)), "tool_calls": calls}
