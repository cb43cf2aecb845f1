"""The web application: its endpoints, OpenAI's API for embeddings, the API key, limits and error responses."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import logging
import queue
import threading
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from luminosity.inference.handlers.http.tensors import HEADER_LENGTH
from luminosity.inference.serving import kserve_api
from luminosity.inference.serving.served_model import (
    RequestError,
    ServedModel,
    error_response,
    json_response,
    read_body,
    read_json,
)

__all__ = ["Limits", "app_of"]

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
_LOGGER = logging.getLogger(__name__)
_BODY_S = 60.0  # a client that sends its body more slowly gets 408
_WITHOUT_KEY = "/v2/health/"  # health checks need no key
T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """The most requests and bytes that the server accepts."""

    threads: int = 32
    """Requests handled at the same time; the host makes batches of their examples."""
    waiting: int = 256
    """Further requests that may wait; more get 503."""
    body_bytes: int = 64_000_000
    """The largest body of a request; larger ones get 413."""


def app_of(model: ServedModel, limits: Limits, api_key: str | None = None) -> Starlette:
    """Return the web application that serves a model."""
    threads = RequestThreads(limits.threads, limits.waiting)

    def get(path: str, respond: Callable[[Request], Response]) -> Route:
        async def endpoint(request: Request) -> Response:
            return respond(request)

        return Route(path, _guarded(endpoint, api_key), methods=["GET"])

    def post(path: str, respond: Callable[[Request, bytes], Response]) -> Route:
        async def endpoint(request: Request) -> Response:
            with threads.admit():
                body = await asyncio.wait_for(read_body(request, limits.body_bytes), _BODY_S)
                return await threads.run(lambda: respond(request, body))

        return Route(path, _guarded(endpoint, api_key), methods=["POST"])

    def infer(request: Request, body: bytes) -> Response:
        return kserve_api.infer(model, _name(request), body, request.headers.get(HEADER_LENGTH))

    return Starlette(
        routes=[
            get("/", lambda _: _home(model)),
            get("/v1/models", lambda _: models(model)),
            post("/v1/embeddings", lambda _, body: embeddings(model, body)),
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
            if api_key is not None and not path.startswith(_WITHOUT_KEY):
                _check_key(request, api_key)
            return await endpoint(request)
        except RequestError as error:
            return error_response(error, path)
        except asyncio.TimeoutError:
            return error_response(RequestError(408, f"the body did not arrive within {_BODY_S:g} seconds"), path)
        except ClientDisconnect:  # no client reads this response, but the endpoint must return one
            return error_response(RequestError(400, "the connection was closed before the body was complete"), path)
        except asyncio.CancelledError:  # the request took longer than the server waits when it shuts down
            return error_response(RequestError(503, "the server is shutting down"), path)
        except Exception as error:
            _LOGGER.exception("A request failed")
            return error_response(RequestError(500, f"{type(error).__name__}: {error}"), path)

    return guarded


def _check_key(request: Request, api_key: str) -> None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), api_key.encode()):
        raise RequestError(401, "expected the header Authorization: Bearer with the server's key", "invalid_api_key")


def _name(request: Request) -> str:
    return request.path_params["name"]


async def _not_found(request: Request, error: Exception) -> Response:
    """Return the response for an address or a method that does not exist."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = f"{request.method} {path} does not exist; GET / lists all endpoints"
    message = message if error.status_code == 404 else error.detail
    response = error_response(RequestError(error.status_code, message), path)
    response.headers.update(error.headers or {})
    return response


class RequestThreads:
    """Threads that handle requests, and a limit of the requests that may wait for one.

    The threads are daemons: one that hangs in a model does not keep the process from ending.
    """

    def __init__(self, threads: int, waiting: int) -> None:
        self._most = threads + waiting
        self._admitted = 0
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        for number in range(threads):
            threading.Thread(target=self._work, name=f"serve-{number}", daemon=True).start()

    @contextlib.contextmanager
    def admit(self) -> Generator[None]:
        """Count a request from before its body is read until its response. Call it in the event loop's thread.

        Raises ``RequestError`` 503 if there are too many requests.
        """
        if self._admitted >= self._most:
            raise RequestError(503, f"the server has {self._admitted} requests already, its limit; try again later")
        self._admitted += 1
        try:
            yield
        finally:
            self._admitted -= 1

    async def run(self, function: Callable[[], T]) -> T:
        """Run ``function`` on one of the threads and wait for its result."""
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


def models(model: ServedModel) -> Response:
    """Return the response of ``GET /v1/models``."""
    one = {"id": model.name, "object": "model", "created": 0, "owned_by": "luminosity"}
    return json_response({"object": "list", "data": [one]})


def embeddings(model: ServedModel, body: bytes) -> Response:
    """Return the response of ``POST /v1/embeddings``."""
    request = read_json(body)
    texts = _texts(request)
    form = request.get("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise RequestError(400, f"encoding_format is {form!r}, expected float or base64")
    name = request.get("model")
    if name not in (None, model.name):
        raise RequestError(404, f"found the model {name!r}, expected {model.name!r}", "model_not_found")
    predictions = model.predict(texts)
    vectors = [_vector(value) for value in predictions.values]
    dimensions = request.get("dimensions")
    if dimensions not in (None, len(vectors[0])):
        raise RequestError(400, f"dimensions is {dimensions!r}, expected {len(vectors[0])}")
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, form)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": predictions.cost, "total_tokens": predictions.cost}
    return json_response({"object": "list", "data": data, "model": model.name, "usage": usage})


def _texts(request: dict[str, Any]) -> list[str]:
    found = request.get("input")
    texts: list[Any] = cast("list[Any]", found) if isinstance(found, list) else [found]
    if not texts:
        raise RequestError(400, "input is an empty list, expected a string or a list of strings")
    for text in texts:
        if not isinstance(text, str):
            hint = "; token ids are not supported" if isinstance(text, int | list) else ""
            problem = "is missing" if found is None else f"has a value of type {type(text).__name__}"
            raise RequestError(400, f"input {problem}, expected a string or a list of strings{hint}")
    return texts


def _vector(value: Any) -> npt.NDArray[np.float32]:
    try:
        vector = np.asarray(value, np.float32)
    except (ValueError, TypeError):
        vector = np.empty(())
    if vector.ndim != 1:
        raise RequestError(
            400, f"this model returns a {type(value).__name__} for a text, not an embedding; use /v2 for predictions"
        )
    return cast("npt.NDArray[np.float32]", vector)


def _encoded(vector: npt.NDArray[np.float32], form: str) -> Any:
    if form == "float":
        return vector.tolist()
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
