"""Requests that get no answer, in the words of each protocol."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

__all__ = ["RequestError", "error_response", "json_response"]

_RETRY_AFTER_S = 1


class RequestError(Exception):
    """A request that can't be answered: the status, and what to say."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        """As OpenAI's clients know it, where they know one."""


def json_response(content: Any, status: int = 200) -> Response:
    return Response(json.dumps(content).encode(), status, media_type="application/json")


def error_response(error: RequestError, path: str) -> Response:
    """Under /v1 as OpenAI writes errors, elsewhere as KServe does."""
    content: Any = error.message
    if path.startswith("/v1/"):
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        content = {"message": error.message, "type": kind, "param": None, "code": error.code}
    response = json_response({"error": content}, error.status)
    if error.status == 503:
        response.headers["Retry-After"] = str(_RETRY_AFTER_S)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
