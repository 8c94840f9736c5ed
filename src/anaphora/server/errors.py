"""Errors as clients of OpenAI's API expect them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A request that is answered with an error.

    param: the field at fault, as a path ("messages[0].content"), or None where no field of ours is.
    code: a word that programs can test, or None.
    headers: of the answer.
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

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer. Server-side faults (5xx) are of type "server_error"."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_field(param: str, problem: str, *, code: str | None = "invalid_value") -> ApiError:
    """A 400 for one field. `problem` says what is wrong with it and what is allowed."""
    return ApiError(400, f"{param}: {problem}", param=param, code=code)


def unsupported(param: str, allowed: str) -> ApiError:
    """A 400 for a field that would change the answer in a way that this server cannot give."""
    return bad_field(param, f"not supported by this server; {allowed}", code="unsupported_value")


def internal_error() -> ApiError:
    """A 500: some fault of ours, of which the client learns no more."""
    return ApiError(500, "The server had an error while processing the request; its log says more.", code="internal")


def deadline_passed() -> ApiError:
    """A 504: the answer was not whole at the request's own deadline. Clients that obey the header do not try again."""
    message = "deadline_s: that time has passed before the answer was whole."
    return ApiError(504, message, param="deadline_s", code="deadline_passed", headers={"x-should-retry": "false"})


def shutting_down() -> ApiError:
    """A 503 for requests that the end of the server cuts short."""
    return ApiError(503, "The server is shutting down.", code="shutting_down")


def draining(retry_after_s: int) -> ApiError:
    """A 503 for requests that come once the server was told to stop."""
    headers = {"retry-after": str(retry_after_s), "connection": "close"}
    return ApiError(503, "The server is shutting down; try another.", code="shutting_down", headers=headers)


def engine_stuck(busy_s: float) -> ApiError:
    """A 503: a step takes longer than any should."""
    return ApiError(503, f"The engine's step has been running for {busy_s:.0f} s.", code="engine_stuck")


def bad_key() -> ApiError:
    """A 401: no API key, or one that nobody has."""
    message = "Incorrect API key provided; expected one of this server's in the header 'Authorization: Bearer KEY'."
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def engine_stopped() -> ApiError:
    """A 503: the engine takes no requests."""
    return ApiError(503, "The engine has stopped; the server's log says why.", code="engine_stopped")
