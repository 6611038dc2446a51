"""Responses with an error, in OpenAI's form."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from jaxspec.serving.openai import ApiRequest, BadField, bad_field, error_of

_INVALID, _SERVER = "invalid_request_error", "server_error"


class Refused(Exception):
    """A request is answered with an error.

    Args:
      status: the status of the response.
      message: one line.
      param: the field that is wrong; None for none.
      code: a short name of the reason; None for none.

    Attributes:
      status, body: of the response.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        kind = "rate_limit_error" if status == 429 else _INVALID if status < 500 else _SERVER
        self.status, self.body = status, error_of(message, kind, param, code)

    def response(self) -> Response:
        """Returns the response."""
        headers = {"retry-after": "1"} if self.status in (429, 503) else {}
        if self.status == 401:
            headers = {"www-authenticate": "Bearer"}
        return JSONResponse(self.body, self.status, headers)


# Errors of requests and of the engine; others are errors of this program.
EXPECTED = (Refused, ValueError, OSError)


def refused(error: Exception, request: ApiRequest | None = None) -> Refused:
    """Returns the response to an error.

    Args:
      error: a wrong request (ValueError, or OSError for a missing file), `Refused`, TimeoutError, or a failure.
      request: the request, once it has been read; errors then have its names of fields.
    """
    match error:
        case Refused():
            return error
        case TimeoutError():
            return Refused(504, "the request has reached the server's time limit", code="timeout")
        case BadField():
            return Refused(400, str(error), error.param)
        case ValueError() | OSError():
            if request is None:
                return Refused(400, str(error))
            found = bad_field(ValueError(str(error)), request)
            return Refused(400, str(found), found.param)
    return Refused(500, f"{type(error).__name__}: {' '.join(str(error).split())}")
