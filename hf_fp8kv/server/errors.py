"""Errors of the server, in OpenAI's format."""

import json
from typing import Any

from starlette.responses import Response

STOPPING_MESSAGE = "the server is stopping"
INTERNAL_MESSAGE = "internal error. See the log of the server"
UNSUPPORTED_CODE = "unsupported_parameter"

_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class APIError(Exception):
    """An error that becomes the answer to a request. Any code that handles a request may raise it.

    Args:
        status: HTTP status, 400 or more.
        message: Text for the client.
        param: Name of the field of the request that is wrong.
        code: Short name of the error for programs.
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

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the answer."""
        default_type = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _ERROR_TYPES.get(self.status, default_type)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def to_response(self) -> Response:
        """Return the answer to the request."""
        # json.dumps writes ASCII, because a message may repeat a text that UTF-8 cannot encode.
        return Response(json.dumps(self.to_dict()), self.status, self.headers, "application/json")


def field_error(field: str, message: str, code: str | None = None) -> APIError:
    """Return the error for a field of a request."""
    return APIError(400, f"{field}: {message}", param=field, code=code)
