"""A Qdrant server, reached over HTTP, with retries."""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from luminosity._shared.text import shorten
from luminosity.errors import Fix, InvalidArgument, StoreError
from luminosity.extras import require
from luminosity.io.run_owner import owner_in_name
from luminosity.io.stores.address import StoreAddress, TransientError, check_vectors, is_abandoned, retry, staged_name
from luminosity.io.stores.points import Point, PointColumns, PointId, TableFacts
from luminosity.io.stores.store import Distance, Hit, Query, SharedStore, Target, WriteMode

__all__ = ["ServerCollection"]

_REQUEST_BYTES = 32_000_000  # the most that a server accepts by default
_NUMBER_BYTES = 22  # the most that a float takes in JSON
_OTHER_BYTES = 100  # of a point in JSON, beside its vectors and payload
_RESPONSE_TIMEOUT_S = 10.0  # A server that is up responds much sooner, even from another continent.
_LONGEST_REQUEST_S = 60.0  # Longer waits are several requests.
_NOT_FOUND, _TIMED_OUT, _CONFLICT, _TOO_MANY, _SERVER_ERROR = 404, 408, 409, 429, 500
_RESPONSE_CHARACTERS = 500  # shown in a message: enough for any sentence, not for a whole page of HTML

T = TypeVar("T")


class _Refused(StoreError):
    """The server refuses this request, however often it is sent."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ServerCollection(SharedStore):
    """A collection on a Qdrant server. Requests are retried until the address's timeout."""

    kind = "qdrant"
    form = "an address (http://...)"

    def __init__(self, address: StoreAddress, on_retry: Callable[[], None] = lambda: None) -> None:
        self._client_module = require("qdrant_client", "qdrant")
        self._models = self._client_module.models
        self._address = address
        self._on_retry = on_retry
        self._key = address.key()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Api key is used with an insecure connection")  # It may be loopback.
            self._client = self._client_module.QdrantClient(
                url=address.where,
                api_key=self._key,
                timeout=math.ceil(min(address.timeout, _LONGEST_REQUEST_S)),
                check_compatibility=False,  # The check would run in another thread and print its findings.
            )

    @classmethod
    def handles(cls, where: str) -> bool:
        """Return whether it is an HTTP address."""
        return where.startswith(("http://", "https://"))

    @classmethod
    def address(cls, where: str, collection: str | None, **settings: Any) -> StoreAddress:
        """Return the address. Raises if there is a secret in it."""
        if "@" in urlsplit(where).netloc:
            raise InvalidArgument(
                f"found a user or password in the address of {urlsplit(where).hostname}, where logs show it",
                fix=Fix("pass api_key_env= with the name of an environment variable that holds the key"),
            )
        return super().address(where, collection, **settings)

    @classmethod
    def check_reachable(cls, address: StoreAddress) -> None:
        """Raise if the client is not installed here, or if no server responds.

        Any response counts, also an error: whether the key is valid is not checked.
        """
        require("qdrant_client", "qdrant")
        import urllib3

        try:
            urllib3.request("GET", address.where, timeout=_RESPONSE_TIMEOUT_S, retries=False)
        except urllib3.exceptions.HTTPError as error:
            raise StoreError(
                f"no server responds at {address.where} ({error})",
                fix="check that the server runs, or write to a folder, which needs no server",
            ) from None

    @classmethod
    def names(cls, address: StoreAddress) -> list[str]:
        """Return the names of all collections of the server."""
        with contextlib.closing(cls(address)) as server:
            return sorted(server.collections())

    @classmethod
    def check_writable(cls, address: StoreAddress, mode: WriteMode) -> None:
        """Do nothing: the server is asked when the pipeline starts."""

    def begin(self, mode: WriteMode, owner: str) -> str:
        """Return the name of a new collection; an empty one if points are added to a collection that exists."""
        address = self._address
        if mode.if_exists == "append" and self.vectors() is not None:
            return ""
        names, aliases = set(self.collections()), self.aliases()
        mode.check(address, address.collection in names or address.collection in aliases)
        if address.collection in names and mode.if_exists == "replace":
            raise StoreError(
                f"{address} can't be replaced at once: it is no alias, and Qdrant can't rename collections",
                fix="delete it before the run, or write to another collection, which this run creates with an alias",
            )
        for name in sorted(names - set(aliases.values())):
            if name.startswith(f"{address.collection}--") and is_abandoned(address, name, owner):
                self.drop(name)
        return staged_name(address, owner)

    def prepare(self, staged: str, facts: TableFacts, columns: PointColumns, mode: WriteMode) -> Target:
        """Create the collection that gets the points."""
        there = self.vectors()
        if not facts.points and mode.if_exists != "replace":
            return Target(is_needed=there is not None and facts.rows > 0)
        sizes = facts.sizes_for(there, columns)
        if not staged:
            if there is None:
                raise StoreError(f"{self._address} was deleted while the run was at work", fix="run it again")
            check_vectors(self._address, there, sizes, mode.distance)
            return Target()
        with contextlib.closing(ServerCollection(replace(self._address, staged=staged), self._on_retry)) as hidden:
            hidden.ensure(sizes, mode.distance, create=True)
        return Target(staged=staged, replaces=self.aliases().get(self._address.collection, ""))

    def publish(self, target: Target, mode: WriteMode) -> None:
        """Let the alias stand for the new collection, now that all points are in it."""
        name = self._address.collection
        found = self.aliases().get(name)
        if found != target.staged:
            if (found is None and self.vectors() is not None) or (found or "") != target.replaces:
                raise StoreError(
                    f"{self._address} was created by another run or program while this run was at work",
                    fix="run it again",
                )
            self.point_alias(name, target.staged, is_new=found is None)
        if owner_in_name(target.replaces):  # Otherwise the user has made the collection.
            self.drop(target.replaces)

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

    def collections(self) -> list[str]:
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


def _reason(content: bytes) -> str:
    """Return the reason in the JSON of a Qdrant server, or the whole text of another server."""
    text = content.decode(errors="replace")
    try:
        return str(json.loads(text)["status"]["error"])
    except (ValueError, LookupError, TypeError):
        return text
