"""A model on the model host of this process, called by request threads; and reading requests, writing responses."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from apache_beam.ml.inference.base import PredictionResult
from starlette.requests import Request
from starlette.responses import Response

from luminosity.inference.blocks import rows
from luminosity.inference.files.local import use_cache
from luminosity.inference.handler import Handler
from luminosity.inference.host.host import host_of
from luminosity.inference.host.interface import LaneSettings
from luminosity.inference.options import ModelCacheConfig
from luminosity.inference.preparing import Prepared, Preparer
from luminosity.inference.threads import limit_threads

__all__ = ["RequestError", "ServedModel", "error_response", "json_response", "read_body", "read_json"]

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


@dataclass(frozen=True)
class Predictions:
    """A value for each example, and the total cost of the examples, which for texts is the number of tokens."""

    values: list[Any]
    cost: int


@dataclass
class Counts:
    """Counts of the server's work so far."""

    requests: int = 0
    examples: int = 0
    batches: int = 0


class ServedModel:
    """Loads a model and predicts for any number of threads. Examples of requests at the same time share batches."""

    def __init__(self, handler: Handler[Any, Any, Any], name: str, inputs: Sequence[dict[str, Any]] = ()) -> None:
        self.handler = handler
        self.name = name
        self.inputs = list(inputs)
        """The inputs that the user declares, for KServe clients."""
        self.counts = Counts()
        self._counting = threading.Lock()
        limit_threads()
        use_cache(ModelCacheConfig())
        handler.set_environment_vars()
        self._preparer = Preparer(handler)
        self._host = host_of(handler)
        tag = uuid.uuid4().hex
        # A bad example of one request must not fail other requests in its batch.
        self._lane = self._host.enter(tag, lambda: handler, LaneSettings(isolate_failures=True))

    def load(self) -> None:
        """Load the model. Blocks until it is loaded."""
        self._host.load(self._lane)

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded and its host works."""
        return self._lane.model.is_ready and self._host.broken is None

    def predict(self, examples: list[Any]) -> Predictions:
        """Return the values of these examples, in their order. Blocks.

        Raises ``RequestError`` if the model can't take them or fails.
        """
        prepared = self._prepare(examples)
        values: list[Any] = [None] * len(examples)
        session = self._host.open()
        try:
            session.submit(self._lane, prepared.block, prepared.costs, None, prepared.weights)
            for outcomes in session.finish():
                for outcome in outcomes:
                    if outcome.error is not None:
                        raise RequestError(500, f"the model failed: {_describe(outcome.error)}") from outcome.error
                    for place, value in zip(outcome.places.tolist(), rows(outcome.values), strict=True):
                        values[place] = self._value(examples[place], value, outcome.model_id)
            batches = len(session.take_stats().get(self._lane, []))
        finally:
            session.close()
        with self._counting:
            self.counts.requests += 1
            self.counts.examples += len(examples)
            self.counts.batches += batches
        return Predictions(values, int(prepared.costs.sum()))

    def close(self) -> None:
        """Release the model."""
        self._host.leave(self._lane)

    def _prepare(self, examples: list[Any]) -> Prepared:
        try:
            return self._preparer.prepare(examples)
        except Exception as error:
            raise RequestError(400, f"the model can't take this input: {_describe(error)}") from error

    def _value(self, example: Any, value: Any, model_id: str | None) -> Any:
        result = self.handler.result(example, value, model_id, True)
        return result.inference if isinstance(result, PredictionResult) else result


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
