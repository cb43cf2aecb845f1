"""Reading requests and writing responses, for all endpoints."""

from __future__ import annotations

import json
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

__all__ = ["RequestError", "error_response", "json_response", "read_body", "read_json"]


_RETRY_AFTER_S = 1  # how long a client should wait when the server is full


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body of a request. Raises ``RequestError`` 413 if it is larger than ``limit`` bytes."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    received = 0
    async for chunk in request.stream():
        received += len(chunk)
        if received > limit:
            raise _too_large(limit)
        chunks.append(chunk)
    return b"".join(chunks)


def read_json(body: bytes | memoryview) -> dict[str, Any]:
    """Return the body as a JSON object. Raises ``RequestError`` 400 for anything else."""
    try:
        found: Any = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise RequestError(400, f"the body is a JSON {type(found).__name__}, expected an object")
    return cast("dict[str, Any]", found)


def _too_large(limit: int) -> RequestError:
    return RequestError(
        413, f"the body is larger than {limit:,} bytes; send fewer examples, or start lum serve with --max-body"
    )


class RequestError(Exception):
    """A request that can't be served: the HTTP status and a message for the client."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        """OpenAI's error code, if there is one."""


def json_response(content: Any, status: int = 200) -> Response:
    """Return a response with a JSON body."""
    return Response(json.dumps(content).encode(), status, media_type="application/json")


def error_response(error: RequestError, path: str) -> Response:
    """Return the response for an error: as OpenAI writes errors below /v1, otherwise as KServe does."""
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
