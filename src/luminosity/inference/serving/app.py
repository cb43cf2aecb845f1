"""The endpoints, and what holds for all of them: a place, a key, a bounded body, errors that say why."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from luminosity.inference.serving import kserve, openai
from luminosity.inference.serving.errors import RequestError, error_response, json_response
from luminosity.inference.serving.model import ServedModel
from luminosity.inference.serving.requests import read_body
from luminosity.inference.serving.workers import Workers

__all__ = ["Limits", "app_of"]

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

_BODY_S = 60.0
_OPEN = "/v2/health/"
"""Who asks only whether the server lives needs no key."""


@dataclass(frozen=True)
class Limits:
    threads: int = 32
    """Requests that are worked on at the same time; the host makes batches of them."""
    waiting: int = 256
    """Requests that may wait beside those; more are refused."""
    body_bytes: int = 64_000_000


def app_of(model: ServedModel, limits: Limits, api_key: str | None = None) -> Starlette:
    workers = Workers(limits.threads, limits.waiting)

    def get(path: str, answer: Callable[[Request], Response]) -> Route:
        async def endpoint(request: Request) -> Response:
            return answer(request)

        return Route(path, _guarded(endpoint, api_key), methods=["GET"])

    def post(path: str, answer: Callable[[Request, bytes], Response]) -> Route:
        async def endpoint(request: Request) -> Response:
            with workers.place():
                body = await asyncio.wait_for(read_body(request, limits.body_bytes), _BODY_S)
                return await workers.run(lambda: answer(request, body))

        return Route(path, _guarded(endpoint, api_key), methods=["POST"])

    def infer(request: Request, body: bytes) -> Response:
        return kserve.infer(model, _name(request), body, request.headers.get(kserve.BINARY_HEADER))

    return Starlette(
        routes=[
            get("/", lambda _: _home(model)),
            get("/v1/models", lambda _: openai.models(model)),
            post("/v1/embeddings", lambda _, body: openai.embeddings(model, body)),
            get("/v2", lambda _: kserve.server_metadata()),
            get("/v2/health/live", lambda _: kserve.live()),
            get("/v2/health/ready", lambda _: kserve.ready(model)),
            get("/v2/models/{name}", lambda request: kserve.model_metadata(model, _name(request))),
            get("/v2/models/{name}/ready", lambda request: kserve.model_ready(model, _name(request))),
            post("/v2/models/{name}/infer", infer),
        ],
        exception_handlers={HTTPException: _not_found},
    )


def _home(model: ServedModel) -> Response:
    endpoints = ["/v1/models", "/v1/embeddings", "/v2", f"/v2/models/{model.name}", f"/v2/models/{model.name}/infer"]
    return json_response(
        {"model": model.name, "handler": str(model.handler), "endpoints": endpoints, "served": asdict(model.counts)}
    )


def _guarded(endpoint: Endpoint, api_key: str | None) -> Endpoint:
    async def guarded(request: Request) -> Response:
        path = request.url.path
        try:
            if api_key is not None and not path.startswith(_OPEN):
                _check_key(request, api_key)
            return await endpoint(request)
        except RequestError as error:
            return error_response(error, path)
        except asyncio.TimeoutError:
            return error_response(RequestError(408, f"the body was not here within {_BODY_S:g} seconds"), path)
        except ClientDisconnect:  # Nobody is there to read it.
            return error_response(RequestError(400, "the connection was closed before the whole body was here"), path)
        except asyncio.CancelledError:  # It took longer than a server that is told to stop can wait.
            return error_response(RequestError(503, "the server stops"), path)
        except Exception as error:
            logging.getLogger(__name__).exception("A request failed")
            return error_response(RequestError(500, f"{type(error).__name__}: {error}"), path)

    return guarded


def _check_key(request: Request, api_key: str) -> None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), api_key.encode()):
        raise RequestError(401, "expected the header Authorization: Bearer with the server's key", "invalid_api_key")


def _name(request: Request) -> str:
    return request.path_params["name"]


async def _not_found(request: Request, error: Exception) -> Response:
    """What starlette says of an address or a method that is not there."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = f"{request.method} {path} is not here; GET / lists what is" if error.status_code == 404 else error.detail
    response = error_response(RequestError(error.status_code, message), path)
    response.headers.update(error.headers or {})
    return response
