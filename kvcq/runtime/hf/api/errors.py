"""Everything that goes wrong, in the shape that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kvcq.errors import KvcqError, visible
from kvcq.runtime.hf.engine.request import Failed

RETRY_AFTER = 5
STATUS = {"timeout": 504, "shutdown": 503, "memory": 503, "internal": 500}


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status.
        message: One line for the client.
        param: Field of the request at fault.
        code: Word for programs.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """Return the JSON object."""
        kind = "invalid_request_error" if self.status < 429 else "rate_limit_error" if self.status == 429 else None
        error = {"message": self.message, "type": kind or "server_error", "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """Return the HTTP answer; a client that may try again is told when."""
        headers = {"Retry-After": str(RETRY_AFTER)} if self.status in (429, 503) else None
        return JSONResponse(self.body(), self.status, headers)


def of_failure(failed: Failed) -> ApiError:
    """Return the error of a request that the engine could not complete."""
    return ApiError(STATUS[failed.trouble], visible(failed.message), code=failed.trouble)


def install(app: FastAPI) -> None:
    """Answer every exception of the app in this shape."""

    @app.exception_handler(ApiError)
    async def _api(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(KvcqError)
    async def _kvcq(_: Request, error: KvcqError) -> JSONResponse:
        return ApiError(400 if error.exit_code == 2 else 500, str(error)).response()

    @app.exception_handler(HTTPException)
    async def _http(_: Request, error: HTTPException) -> JSONResponse:
        return ApiError(error.status_code, visible(str(error.detail))).response()

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            where = next((part for part in first["loc"] if isinstance(part, int)), 0)
            reason = first.get("ctx", {}).get("error", "")
            return ApiError(400, visible(f"the body is not JSON, at character {where}: {reason}")).response()
        if first["loc"] == ("body",) and first["type"] in ("model_attributes_type", "dict_type", "missing"):
            fix = "send a JSON object with the header Content-Type: application/json"
            return ApiError(400, f"the body is not a JSON object: {fix}").response()
        path = [str(part) for part in first["loc"] if part != "body" and not _names_type(part)]
        name = ".".join(path) or None
        return ApiError(400, visible(f"{name or 'body'}: {first['msg']}"), param=name).response()

    @app.exception_handler(UnicodeError)
    async def _unicode(_: Request, error: UnicodeError) -> JSONResponse:
        return ApiError(400, "the body is not valid Unicode").response()

    @app.exception_handler(Exception)
    async def _bug(_: Request, error: Exception) -> JSONResponse:
        return ApiError(500, visible(f"unexpected {type(error).__name__}: {error}"), code="internal").response()


def _names_type(part: object) -> bool:
    """Say whether a step of pydantic's path names a member of a union, not a field: ``str``, ``list[int]`` ..."""
    return isinstance(part, str) and (part in ("str", "int") or "[" in part or "-" in part)
