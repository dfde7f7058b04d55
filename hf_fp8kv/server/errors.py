"""Errors of the server, in OpenAI's format."""

import http
import json
from typing import Any

from starlette.responses import Response

STOPPING = "the server is stopping"
INTERNAL = "internal error; see the server's log"

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class APIError(Exception):
    """An answer with a status of 400 or more; raised anywhere below the middleware, sent by it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,  # the field of the request that is meant
        code: str | None = None,  # a short name for programs
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

    def response(self) -> Response:
        """Return the answer."""
        # ASCII: a message may repeat a text that UTF-8 does not have.
        content = json.dumps(self.body())
        return Response(content, self.status, self.headers, "application/json")

    def http_response(self) -> bytes:
        """Return the bytes of the answer, for a connection that no application has yet."""
        response = self.response()
        lines = [f"HTTP/1.1 {self.status} {http.HTTPStatus(self.status).phrase}".encode()]
        lines += [name + b": " + value for name, value in response.raw_headers]
        return b"\r\n".join([*lines, b"", bytes(response.body)])
