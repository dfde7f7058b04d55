"""Errors of the server, in OpenAI's format."""

import http
import json
from typing import Any

STOPPING = "the server is stopping"

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class APIError(Exception):
    """An answer with a status of 400 or more; raised anywhere below the middleware, sent by it.

    Args:
        status: the HTTP status.
        message: what was expected, what came, and what to do about it.
        param: the field of the request that is meant.
        code: a short name for programs.
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

    def body(self) -> dict[str, Any]:
        """Return the answer's JSON object."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, default)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def event(self) -> str:
        """Return the error as the last event of a stream."""
        return f"data: {json.dumps(self.body())}\n\n"

    def encode(self) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Return headers and body of the answer."""
        content = json.dumps(self.body()).encode()
        headers = {"content-type": "application/json", "content-length": str(len(content))}
        headers |= self.headers
        return [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()], content

    def http_response(self) -> bytes:
        """Return the whole answer, for a connection that no application has yet."""
        headers, content = self.encode()
        lines = [f"HTTP/1.1 {self.status} {http.HTTPStatus(self.status).phrase}".encode()]
        lines += [name + b": " + value for name, value in headers]
        return b"\r\n".join([*lines, b"", content])
