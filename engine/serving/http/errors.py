"""Errors in the form of OpenAI's API: {"error": {"message", "type", "param", "code"}}."""

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request


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


def other_model(served: str) -> ApiError:
    """For a request that names another model than the one that this server has."""
    return ApiError(404, f"model: this server has {served} only", "model", "model_not_found")


def _kind(status: int) -> str:
    names = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    return names.get(status, "server_error" if status >= 500 else "invalid_request_error")


def answer_errors_in_this_form(app: FastAPI, refused: Callable[[int], None]) -> None:
    """Refusals, requests that no endpoint takes, and errors of this program, whose traceback is in the server's log.

    refused: counts all of them by their status.
    """

    def response(error: ApiError, headers: Mapping[str, str] | None) -> JSONResponse:
        refused(error.status)
        return JSONResponse(error.body, error.status, headers)

    async def refusal(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return response(error, error.headers)

    async def not_taken(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        text = f"{request.method} {request.url.path[:100]}: {error.detail}"
        return response(ApiError(error.status_code, text), error.headers)

    async def internal(request: Request, error: Exception) -> JSONResponse:
        what = f"internal error, {type(error).__name__}; see the server's log"
        return response(ApiError(500, f"{request.method} {request.url.path[:100]}: {what}"), None)

    app.add_exception_handler(ApiError, refusal)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(HTTPException, not_taken)
    app.add_exception_handler(Exception, internal)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # it sent a part of its request; nobody reads an answer
