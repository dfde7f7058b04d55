"""Errors of the server, in OpenAI's format."""

import json
from typing import Any

from starlette.responses import Response

STOPPING = "the server is stopping"
INTERNAL = "internal error; see the server's log"
UNSUPPORTED = "unsupported_parameter"

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class APIError(Exception):
    """An answer with a status of 400 or more. Any code of a request may raise it.

    Args:
        status: HTTP status.
        message: Text for the client.
        param: Field of the request that is wrong.
        code: Short name for programs.
        headers: Additional headers of the answer.
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

    def response(self) -> Response:
        """Return the answer."""
        # ASCII, because a message may repeat a text that UTF-8 cannot encode.
        return Response(json.dumps(self.body()), self.status, self.headers, "application/json")


def field_error(field: str, text: str, code: str | None = None) -> APIError:
    """Return the error of a field of a request."""
    return APIError(400, f"{field}: {text}", param=field, code=code)
