"""Errors in the form of OpenAI's API: {"error": {"message", "type", "param", "code"}}."""

from typing import Any


class ApiError(Exception):
    """An answer with an HTTP status of 400 or more. param: the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON data."""
        return {"error": {"message": self.message, "type": _kind(self.status), "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """The answer's headers."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def _kind(status: int) -> str:
    names = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    return names.get(status, "server_error" if status >= 500 else "invalid_request_error")
