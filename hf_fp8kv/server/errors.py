"""Errors of the server, in OpenAI's format."""

import json
from typing import Any

from starlette.responses import Response

INTERNAL_MESSAGE = "internal error. See the server's log"
UNSUPPORTED_CODE = "unsupported_parameter"
RETRY_HEADER = {"retry-after": "5"}

_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class APIError(Exception):
    """An error that becomes the response to a request. Code that handles requests may raise it.

    Args:
        status: HTTP status code, at least 400.
        message: Text for the client.
        param: Name of the invalid field of the request.
        code: Machine-readable name of the error.
        headers: Additional headers of the response.
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
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON body of the response."""
        default_type = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": self.message,
            "type": _ERROR_TYPES.get(self.status, default_type),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def to_response(self) -> Response:
        """Return the response to the request."""
        # json.dumps writes ASCII, because a message may quote text that UTF-8 cannot encode.
        return Response(json.dumps(self.to_dict()), self.status, self.headers, "application/json")


def make_field_error(field: str, message: str, code: str | None = None) -> APIError:
    """Return the error (status 400) for an invalid field of a request."""
    return APIError(400, f"{field}: {message}", param=field, code=code)


def make_busy_error(expected: str, code: str = "too_many_requests") -> APIError:
    """Return the error (status 429) for a request that exceeds what the server handles at once."""
    return APIError(429, f"expected {expected}. Try again later", code=code, headers=RETRY_HEADER)


def make_stopping_error(reason: str | None = None) -> APIError:
    """Return the error (status 503) for a request that the stopping server refuses or ends."""
    return APIError(
        503,
        reason or "the server is stopping",
        code="stopping",
        headers={**RETRY_HEADER, "connection": "close"},
    )
