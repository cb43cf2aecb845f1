"""What all endpoints read alike."""

from __future__ import annotations

import json
from typing import Any, cast

from starlette.requests import Request

from luminosity.inference.serving.errors import RequestError

__all__ = ["read_body", "read_json"]


async def read_body(request: Request, limit: int) -> bytes:
    """The body, as long as it is no longer than this."""
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
    try:
        found: Any = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise RequestError(400, f"the body is a JSON {type(found).__name__}, expected an object")
    return cast("dict[str, Any]", found)


def _too_large(limit: int) -> RequestError:
    return RequestError(413, f"the body is larger than {limit:,} bytes: send fewer examples, or serve with --max-body")
