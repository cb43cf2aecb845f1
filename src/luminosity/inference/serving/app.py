"""The endpoints, and what holds for all of them: a place, a key, a bounded body, errors that say why."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import queue
import threading
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from luminosity.inference.serving import kserve_api, openai_api
from luminosity.inference.serving.requests import RequestError, error_response, json_response, read_body
from luminosity.inference.serving.served_model import ServedModel

__all__ = ["Limits", "Workers", "app_of"]


Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

_BODY_S = 60.0
_OPEN = "/v2/health/"
"""Who asks only whether the server lives needs no key."""

T = TypeVar("T")


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
        return kserve_api.infer(model, _name(request), body, request.headers.get(kserve_api.BINARY_HEADER))

    return Starlette(
        routes=[
            get("/", lambda _: _home(model)),
            get("/v1/models", lambda _: openai_api.models(model)),
            post("/v1/embeddings", lambda _, body: openai_api.embeddings(model, body)),
            get("/v2", lambda _: kserve_api.server_metadata()),
            get("/v2/health/live", lambda _: kserve_api.live()),
            get("/v2/health/ready", lambda _: kserve_api.ready(model)),
            get("/v2/models/{name}", lambda request: kserve_api.model_metadata(model, _name(request))),
            get("/v2/models/{name}/ready", lambda request: kserve_api.model_ready(model, _name(request))),
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


class Workers:
    """The threads are daemons: one that a model never returns to does not keep the process."""

    def __init__(self, threads: int, waiting: int) -> None:
        self._places = threads + waiting
        self._taken = 0
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        for number in range(threads):
            threading.Thread(target=self._work, name=f"serve-{number}", daemon=True).start()

    @contextlib.contextmanager
    def place(self) -> Generator[None]:
        """For one request, from before its body is read. Belongs to the event loop's thread."""
        if self._taken >= self._places:
            raise RequestError(503, f"{self._taken} requests are here already, which is all that may be; try again")
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1

    async def run(self, function: Callable[[], T]) -> T:
        future: Future[T] = Future()
        self._tasks.put((future, function))
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        while True:
            future, function = self._tasks.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
