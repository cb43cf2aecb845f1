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

from luminosity.errors import StoreError
from luminosity.extras import require
from luminosity.io.stores.points import Point, PointId
from luminosity.io.stores.qdrant_collection import CollectionAddress, Distance, Hit, Query, check_vectors

__all__ = ["ServerCollection", "TransientError", "retry"]


_REQUEST_BYTES = 32_000_000
"""What a server takes unless it is told otherwise."""
_NUMBER_BYTES = 22
_LONGEST_REQUEST_S = 60.0
_NOT_FOUND, _TIMED_OUT, _CONFLICT, _TOO_MANY = 404, 408, 409, 429
_TOLD_CHARACTERS = 500

T = TypeVar("T")

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 10.0


class _Refused(StoreError):
    """The server does not want this request, however often it is sent."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerCollection:
    def __init__(self, place: CollectionAddress, on_retry: Callable[[], None]) -> None:
        self._client_module = require("qdrant_client", "qdrant")
        self._models = self._client_module.models
        self._place = place
        self._on_retry = on_retry
        self._key = _read_key(place)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Api key is used with an insecure connection")  # It may be loopback.
            self._client = self._client_module.QdrantClient(
                url=place.where,
                api_key=self._key,
                timeout=math.ceil(min(place.timeout, _LONGEST_REQUEST_S)),
                check_compatibility=False,  # It would ask from a thread of its own, and print what it finds.
            )

    def ensure(self, sizes: Mapping[str, int], distance: Distance, create: bool) -> None:
        found = self._vectors()
        if found is None and not create:
            raise StoreError(f"{self._place} is not there, and create=False")
        if found is None:
            self._create(sizes, distance)
            found = self._vectors()
        check_vectors(self._place, found or {}, sizes, distance)

    def write(self, points: Sequence[Point], deleted: Sequence[PointId]) -> None:
        name, models = self._place.collection, self._models
        for part in cut(points, self._place.batch_size):
            structs = [models.PointStruct(id=p.id, vector=_vector(p.vectors), payload=dict(p.payload)) for p in part]
            self._ask(lambda structs=structs: self._client.upsert(name, structs, wait=True))
        if deleted:
            selected = models.PointIdsList(points=list(deleted))
            try:
                self._ask(lambda: self._client.delete(name, selected, wait=True))
            except _Refused as refused:
                if points or refused.status != _NOT_FOUND:
                    raise  # Else there is no such collection, and nothing to delete in it.

    def count(self) -> int:
        return self._ask(lambda: self._client.count(self._place.collection, exact=True)).count

    def search(self, vectors: Sequence[Sequence[float]], query: Query) -> list[list[Hit]]:
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
        answers = self._ask(lambda: self._client.query_batch_points(self._place.collection, requests))
        return [[Hit(found.id, found.score, found.payload or {}) for found in answer.points] for answer in answers]

    def close(self) -> None:
        self._client.close()

    def _vectors(self) -> dict[str, tuple[int, str]] | None:
        try:
            info = self._ask(lambda: self._client.get_collection(self._place.collection))
        except _Refused as refused:
            if refused.status == _NOT_FOUND:
                return None
            raise
        vectors = info.config.params.vectors or {}
        named = vectors if isinstance(vectors, dict) else {"": vectors}
        return {name: (vector.size, vector.distance.value.lower()) for name, vector in named.items()}

    def _create(self, sizes: Mapping[str, int], distance: Distance) -> None:
        """Another worker may be first: that is as good."""
        models = self._models
        metric = models.Distance(distance.capitalize())
        params = {name: models.VectorParams(size=size, distance=metric) for name, size in sizes.items()}
        try:
            self._ask(lambda: self._client.create_collection(self._place.collection, _vector(params)))
        except _Refused as refused:
            if refused.status != _CONFLICT:
                raise

    def _filter(self, equal: Mapping[str, Any]) -> Any:
        models = self._models
        must = [
            models.FieldCondition(
                key=key, match=models.MatchAny(any=value) if isinstance(value, list) else models.MatchValue(value=value)
            )
            for key, value in equal.items()
        ]
        return models.Filter(must=must) if must else None

    def _ask(self, ask: Callable[[], T]) -> T:
        return retry(lambda: self._ask_once(ask), self._place.timeout, self._on_retry)

    def _ask_once(self, ask: Callable[[], T]) -> T:
        http = require("qdrant_client.http.exceptions", "qdrant")
        exhausted = require("qdrant_client.common.client_exceptions", "qdrant").ResourceExhaustedResponse
        try:
            return ask()
        except exhausted as error:
            raise TransientError(self._told(f"429 {error}"), error.retry_after_s) from error
        except http.UnexpectedResponse as error:
            message = self._told(f"{error.status_code} {_reason(error.content)}")
            if error.status_code >= 500 or error.status_code in (_TIMED_OUT, _TOO_MANY):
                raise TransientError(message) from error
            raise _Refused(message, error.status_code) from None
        except http.ResponseHandlingException as error:
            raise self._broken(error.source) from error

    def _broken(self, source: Exception) -> Exception:
        """No answer, or none that can be read."""
        if not isinstance(source, require("httpx", "qdrant").TransportError):
            return StoreError(self._told(f"what no Qdrant server says ({source}); is the address right?"))
        if "CERTIFICATE_VERIFY_FAILED" in str(source):
            return StoreError(f"{self._place}: the server can't be trusted: {source}")
        return TransientError(f"{self._place} can't be reached: {source or type(source).__name__}")

    def _told(self, text: str) -> str:
        if self._key:
            text = text.replace(self._key, "***")  # Some servers tell a wrong key back.
        return f"{self._place}: the server answered {text[:_TOLD_CHARACTERS]}"


def cut(points: Sequence[Point], most: int, most_bytes: int = _REQUEST_BYTES) -> Iterator[list[Point]]:
    """Parts of so many points, and so many bytes in JSON.

    >>> points = [Point(number, {"": [0.5] * 10}, {"text": "x" * 100}) for number in range(5)]
    >>> [len(part) for part in cut(points, most=2)], [len(part) for part in cut(points, most=5, most_bytes=1_000)]
    ([2, 2, 1], [2, 2, 1])
    """
    part: list[Point] = []
    size = 0
    for point in points:
        numbers = sum(len(vector) for vector in point.vectors.values())
        bytes_of_point = _NUMBER_BYTES * numbers + len(json.dumps(point.payload)) + 100
        if part and (len(part) >= most or size + bytes_of_point > most_bytes):
            yield part
            part, size = [], 0
        part.append(point)
        size += bytes_of_point
    if part:
        yield part


def _vector(named: Mapping[str, Any]) -> Any:
    """A collection has named vectors, or one without a name."""
    return named[""] if list(named) == [""] else dict(named)


def _read_key(place: CollectionAddress) -> str | None:
    if place.api_key is not None:
        return place.api_key()
    if place.api_key_env is None:
        return None
    key = os.environ.get(place.api_key_env, "").strip()
    if not key:
        raise StoreError(
            f"the environment variable {place.api_key_env}, which api_key_env names, is not set on the worker; set it "
            f"before the pipeline starts: export {place.api_key_env}=..."
        )
    return key


def _reason(content: bytes) -> str:
    """What a server says, of which Qdrant's has a form."""
    text = content.decode(errors="replace")
    try:
        return str(json.loads(text)["status"]["error"])
    except (ValueError, LookupError, TypeError):
        return text


class TransientError(Exception):
    """The server may do better later; `wait` is how many seconds it asks for."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


def retry(
    ask: Callable[[], T],
    timeout: float,
    on_retry: Callable[[], None],
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """The answer of `ask`, which is tried again after `Trouble` until so many seconds have passed.

    >>> answers = iter([Trouble("busy"), Trouble("busy", wait=1), "done"])
    >>> waits = []
    >>> def ask():
    ...     answer = next(answers)
    ...     if isinstance(answer, Trouble):
    ...         raise answer
    ...     return answer
    >>> asked_patiently(ask, 60, lambda: None, waits.append), len(waits), waits[1] >= 1
    ('done', 2, True)
    """
    give_up_at = time.monotonic() + timeout
    tries = 0
    while True:
        try:
            return ask()
        except TransientError as trouble:
            tries += 1
            # The spread keeps workers that failed together from coming back together.
            delay = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** min(tries, 10)) * random.uniform(0.5, 1)
            delay = max(delay, trouble.wait)
            if time.monotonic() + delay > give_up_at:
                raise StoreError(f"{trouble}; gave up after {tries} tries in {timeout:.3g} s") from trouble
        on_retry()
        sleep(delay)
