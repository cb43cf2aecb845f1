"""A Qdrant server, reached over HTTP, with retries."""

from __future__ import annotations

import json
import math
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from luminosity._shared.text import shorten
from luminosity.errors import StoreError
from luminosity.extras import require
from luminosity.io.stores.points import Point, PointId
from luminosity.io.stores.qdrant_collection import (
    CollectionAddress,
    Distance,
    Hit,
    QdrantCollection,
    Query,
    WriteMode,
    check_vectors,
)

__all__ = ["ServerCollection", "TransientError", "retry"]

_REQUEST_BYTES = 32_000_000  # the most that a server accepts by default
_NUMBER_BYTES = 22  # the most that a float takes in JSON
_OTHER_BYTES = 100  # of a point in JSON, beside its vectors and payload
_LONGEST_REQUEST_S = 60.0  # Longer waits are several requests.
_NOT_FOUND, _TIMED_OUT, _CONFLICT, _TOO_MANY, _SERVER_ERROR = 404, 408, 409, 429, 500
_RESPONSE_CHARACTERS = 500  # shown in a message: enough for any sentence, not for a whole page of HTML
_FIRST_DELAY_S = 0.1  # doubled after every attempt
_LONGEST_DELAY_S = 10.0  # a server that is back is noticed within this time
_MOST_DOUBLINGS = 10  # beyond these, the delay is at its longest anyway

T = TypeVar("T")


class _Refused(StoreError):
    """The server refuses this request, however often it is sent."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ServerCollection(QdrantCollection):
    """A collection on a Qdrant server. Requests are retried until the address's timeout."""

    def __init__(self, address: CollectionAddress, on_retry: Callable[[], None]) -> None:
        self._client_module = require("qdrant_client", "qdrant")
        self._models = self._client_module.models
        self._address = address
        self._on_retry = on_retry
        self._key = _read_key(address)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Api key is used with an insecure connection")  # It may be loopback.
            self._client = self._client_module.QdrantClient(
                url=address.where,
                api_key=self._key,
                timeout=math.ceil(min(address.timeout, _LONGEST_REQUEST_S)),
                check_compatibility=False,  # The check would run in another thread and print its findings.
            )

    def ensure(self, sizes: Mapping[str, int], distance: Distance, create: bool) -> None:
        """Create the collection on the server if it is missing, and check its vectors."""
        found = self.vectors()
        WriteMode(distance, create).check(self._address, found is not None)
        if found is None:
            self._create(sizes, distance)
            found = self.vectors()
        check_vectors(self._address, found or {}, sizes, distance)

    def vectors(self) -> dict[str, tuple[int, str]] | None:
        """Ask the server for the vectors of the collection."""
        try:
            info = self._request(lambda: self._client.get_collection(self._address.name_to_use))
        except _Refused as refused:
            if refused.status == _NOT_FOUND:
                return None
            raise
        vectors = info.config.params.vectors or {}
        named = vectors if isinstance(vectors, dict) else {"": vectors}
        return {name: (vector.size, vector.distance.value.lower()) for name, vector in named.items()}

    def write(self, points: Sequence[Point], deleted: Sequence[PointId]) -> None:
        """Upsert points in requests that the server accepts, then delete others. Blocks until both are applied."""
        name, models = self._address.name_to_use, self._models
        for part in cut(points, self._address.batch_size):
            structs = [models.PointStruct(id=p.id, vector=_vector(p.vectors), payload=dict(p.payload)) for p in part]
            self._request(lambda structs=structs: self._client.upsert(name, structs, wait=True))
        if deleted:
            selected = models.PointIdsList(points=list(deleted))
            try:
                self._request(lambda: self._client.delete(name, selected, wait=True))
            except _Refused as refused:
                if points or refused.status != _NOT_FOUND:
                    raise  # Otherwise the collection does not exist, and there is nothing to delete.

    def count(self) -> int:
        """Return the exact number of points on the server."""
        return self._request(lambda: self._client.count(self._address.name_to_use, exact=True)).count

    def search(self, vectors: Sequence[Sequence[float]], query: Query) -> list[list[Hit]]:
        """Return the nearest points of each vector, found with one request."""
        models = self._models
        requests = [
            models.QueryRequest(
                query=list(vector),
                using=query.using,
                limit=query.limit,
                with_payload=list(query.payload) or False,
                filter=self._filter(query.equal),
                score_threshold=query.score_threshold,
            )
            for vector in vectors
        ]
        answers = self._request(lambda: self._client.query_batch_points(self._address.name_to_use, requests))
        return [[Hit(found.id, found.score, found.payload or {}) for found in answer.points] for answer in answers]

    def sample(self, limit: int, field: str | None = None) -> list[Hit]:
        """Return the server's first points."""
        models = self._models
        empty = None if field is None else models.IsEmptyCondition(is_empty=models.PayloadField(key=field))
        has_value = None if empty is None else models.Filter(must_not=[empty])
        found, _ = self._request(
            lambda: self._client.scroll(
                self._address.name_to_use, scroll_filter=has_value, limit=limit, with_payload=True
            )
        )
        return [Hit(point.id, 0.0, point.payload or {}) for point in found]

    def names(self) -> list[str]:
        """Return the names of all collections of the server."""
        return [found.name for found in self._request(self._client.get_collections).collections]

    def aliases(self) -> dict[str, str]:
        """Return the collection of every alias of the server."""
        found = self._request(self._client.get_aliases).aliases
        return {alias.alias_name: alias.collection_name for alias in found}

    def point_alias(self, alias: str, name: str, is_new: bool) -> None:
        """Let an alias stand for the collection ``name``, in one step: readers never find the alias missing."""
        models = self._models
        create = models.CreateAliasOperation(create_alias=models.CreateAlias(collection_name=name, alias_name=alias))
        delete = models.DeleteAliasOperation(delete_alias=models.DeleteAlias(alias_name=alias))
        self._request(lambda: self._client.update_collection_aliases([create] if is_new else [delete, create]))

    def drop(self, name: str) -> None:
        """Delete the collection ``name`` if it exists."""
        try:
            self._request(lambda: self._client.delete_collection(name))
        except _Refused as refused:
            if refused.status != _NOT_FOUND:
                raise

    def close(self) -> None:
        """Close the client's connections."""
        self._client.close()

    def _create(self, sizes: Mapping[str, int], distance: Distance) -> None:
        """Create the collection, unless another worker was first."""
        models = self._models
        metric = models.Distance(distance.capitalize())
        params = {name: models.VectorParams(size=size, distance=metric) for name, size in sizes.items()}
        try:
            self._request(lambda: self._client.create_collection(self._address.name_to_use, _vector(params)))
        except _Refused as refused:
            if refused.status != _CONFLICT:
                raise

    def _filter(self, equal: Mapping[str, Any]) -> Any:
        must = [self._condition(key, value) for key, value in equal.items()]
        return self._models.Filter(must=must) if must else None

    def _condition(self, key: str, value: Any) -> Any:
        models = self._models
        if isinstance(value, Mapping):
            return models.FieldCondition(key=key, range=models.Range(**value))
        match = models.MatchAny(any=value) if isinstance(value, list) else models.MatchValue(value=value)
        return models.FieldCondition(key=key, match=match)

    def _request(self, send: Callable[[], T]) -> T:
        return retry(lambda: self._send_once(send), self._address.timeout, self._on_retry)

    def _send_once(self, send: Callable[[], T]) -> T:
        http = require("qdrant_client.http.exceptions", "qdrant")
        exhausted = require("qdrant_client.common.client_exceptions", "qdrant").ResourceExhaustedResponse
        try:
            return send()
        except exhausted as error:
            raise TransientError(self._server_said(f"429 {error}"), error.retry_after_s) from error
        except http.UnexpectedResponse as error:
            message = self._server_said(f"{error.status_code} {_reason(error.content)}")
            if error.status_code >= _SERVER_ERROR or error.status_code in (_TIMED_OUT, _TOO_MANY):
                raise TransientError(message) from error
            raise _Refused(message, error.status_code) from None
        except http.ResponseHandlingException as error:
            raise self._broken(error.source) from error

    def _broken(self, source: Exception) -> Exception:
        """Return the error for a response that did not come or can't be read."""
        if not isinstance(source, require("httpx", "qdrant").TransportError):
            message = self._server_said(f"with something that Qdrant does not send ({source})")
            return StoreError(message, fix="check the address")
        if "CERTIFICATE_VERIFY_FAILED" in str(source):
            return StoreError(f"{self._address}: the server's certificate can't be verified: {source}")
        return TransientError(f"{self._address} can't be reached: {source or type(source).__name__}")

    def _server_said(self, text: str) -> str:
        if self._key:
            text = text.replace(self._key, "***")  # Some servers repeat a wrong key.
        return f"{self._address}: the server responded {shorten(text, _RESPONSE_CHARACTERS)}"


def cut(points: Sequence[Point], most: int, most_bytes: int = _REQUEST_BYTES) -> Iterator[list[Point]]:
    """Yield parts of at most ``most`` points and about ``most_bytes`` in JSON.

    >>> points = [Point(number, {"": [0.5] * 10}, {"text": "x" * 100}) for number in range(5)]
    >>> [len(part) for part in cut(points, most=2)], [len(part) for part in cut(points, most=5, most_bytes=1_000)]
    ([2, 2, 1], [2, 2, 1])
    """
    part: list[Point] = []
    size = 0
    for point in points:
        numbers = sum(len(vector) for vector in point.vectors.values())
        bytes_of_point = _NUMBER_BYTES * numbers + len(json.dumps(point.payload)) + _OTHER_BYTES
        if part and (len(part) >= most or size + bytes_of_point > most_bytes):
            yield part
            part, size = [], 0
        part.append(point)
        size += bytes_of_point
    if part:
        yield part


def _vector(named: Mapping[str, Any]) -> Any:
    """Return the vectors as Qdrant takes them: a mapping of names, or one vector without a name."""
    return named[""] if list(named) == [""] else dict(named)


def _read_key(address: CollectionAddress) -> str | None:
    if address.api_key is not None:
        return address.api_key()
    if address.api_key_env is None:
        return None
    key = os.environ.get(address.api_key_env, "").strip()
    if not key:
        raise StoreError(
            f"the environment variable {address.api_key_env}, which api_key_env names, is not set on the worker",
            fix=f"set it before the pipeline starts: export {address.api_key_env}=...",
        )
    return key


def _reason(content: bytes) -> str:
    """Return the reason in the JSON of a Qdrant server, or the whole text of another server."""
    text = content.decode(errors="replace")
    try:
        return str(json.loads(text)["status"]["error"])
    except (ValueError, LookupError, TypeError):
        return text


class TransientError(Exception):
    """The server may accept the request later; ``wait`` is the number of seconds that it asks for."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


def retry(
    send: Callable[[], T],
    timeout: float,
    on_retry: Callable[[], None],
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Return the result of ``send``, which is retried after a ``TransientError`` for ``timeout`` seconds.

    ``on_retry`` is called before every retry. Blocks between attempts.

    >>> responses = iter([TransientError("busy"), TransientError("busy", wait=1), "done"])
    >>> waits = []
    >>> def send():
    ...     response = next(responses)
    ...     if isinstance(response, TransientError):
    ...         raise response
    ...     return response
    >>> retry(send, 60, lambda: None, waits.append), len(waits), waits[1] >= 1
    ('done', 2, True)
    """
    give_up_at = time.monotonic() + timeout
    attempts = 0
    while True:
        try:
            return send()
        except TransientError as error:
            attempts += 1
            # The random spread keeps workers that failed together from retrying together.
            delay = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** min(attempts, _MOST_DOUBLINGS)) * random.uniform(0.5, 1)
            delay = max(delay, error.wait)
            if time.monotonic() + delay > give_up_at:
                raise StoreError(
                    f"{error}; gave up after {attempts} attempts in {timeout:.3g} s", may_pass=True
                ) from error
        on_retry()
        sleep(delay)
