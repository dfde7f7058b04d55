"""What a client is told that does not get what it asked for, in the form that OpenAI uses."""

import json
from typing import Any

__all__ = ["APIError"]

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class APIError(Exception):
    """An answer with a status of 400 or more; raised anywhere below the gate, sent by it.

    Args:
        status: the HTTP status.
        message: what was expected, what came, and what to do about it.
        param: the field of the request that is meant.
        code: a short name that programs may look at.
        headers: of the answer, beside the usual ones.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    @property
    def type(self) -> str:
        return _TYPES.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )

    def body(self) -> dict[str, Any]:
        """Returns the answer's JSON object."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def messages(self) -> list[dict[str, Any]]:
        """Returns the answer as the two messages of an ASGI application."""
        content = json.dumps(self.body()).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(content)),
            **self.headers,
        }
        return [
            {
                "type": "http.response.start",
                "status": self.status,
                "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()],
            },
            {"type": "http.response.body", "body": content},
        ]
