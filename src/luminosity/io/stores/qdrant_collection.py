"""The interface of a Qdrant collection, on a server or embedded in this process, and its address."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, get_args
from urllib.parse import urlsplit

from luminosity._shared.text import did_you_mean, list_some
from luminosity.errors import Fix, InvalidArgument, InvalidType, StoreError
from luminosity.io.stores.points import Point, PointId

__all__ = [
    "DISTANCES",
    "CollectionAddress",
    "Distance",
    "Hit",
    "IfExists",
    "QdrantCollection",
    "Query",
    "Write",
    "WriteMode",
    "check_filter",
    "check_vectors",
    "chosen_vector",
]

Distance = Literal["cosine", "dot", "euclid", "manhattan"]
DISTANCES: tuple[str, ...] = get_args(Distance)
IfExists = Literal["append", "replace", "fail"]
Write = tuple[Sequence[Point], Sequence[PointId]]
"""Points to upsert, and ids of points to delete."""

_BOUNDS = frozenset({"gt", "gte", "lt", "lte"})  # of a range in a filter
_SHOWN_VECTORS = 20  # in a message, which stays readable
_COLLECTION = re.compile(r"[^/\\.\s][^/\\]*")
_OTHER_COLLECTION = Fix(
    "write to another collection, or delete this one", command="pass another --collection, or delete this one"
)


@dataclass(frozen=True)
class WriteMode:
    """What a write does with a collection that exists, with one that does not, and with a table without rows."""

    distance: Distance
    create: bool = True
    if_exists: IfExists = "append"
    allow_empty: bool = False

    def check(self, address: CollectionAddress, exists: bool) -> None:
        """Raise if the collection must not exist and does, or the other way round."""
        if exists and self.if_exists == "fail":
            raise StoreError(
                f"{address} exists already",
                fix=Fix("pass if_exists='append' or if_exists='replace', or choose another name"),
            )
        if not exists and not self.create:
            raise StoreError(f"{address} does not exist, and create=False", fix=Fix("pass create=True"))

    def check_rows(self, address: CollectionAddress, rows: int) -> None:
        """Raise if a collection would be replaced by nothing."""
        if not rows and self.if_exists == "replace" and not self.allow_empty:
            raise StoreError(
                f"found no rows, expected some to replace {address}; it stays as it was",
                fix=Fix("check the input, or pass allow_empty=True if the collection may be empty"),
            )


@dataclass(frozen=True)
class Query:
    """The settings that all vectors of a search share."""

    using: str | None
    limit: int
    payload: Sequence[str]
    score_threshold: float | None
    equal: Mapping[str, Any]
    """The value that each payload field must have, a list of values that it may have, or a range: ``{"gte": 4}``."""


@dataclass(frozen=True)
class Hit:
    """A point that a search found."""

    id: PointId
    score: float
    payload: Mapping[str, Any]


class QdrantCollection(Protocol):
    """A collection. Every call may be repeated with the same arguments to the same effect."""

    def ensure(self, sizes: Mapping[str, int], distance: Distance, create: bool) -> None:
        """Create the collection if it does not exist; raise if it has other vectors than these."""
        ...

    def vectors(self) -> dict[str, tuple[int, str]] | None:
        """Return the size and distance of each vector, by name; None if the collection does not exist."""
        ...

    def write(self, points: Sequence[Point], deleted: Sequence[PointId]) -> None:
        """Write and delete points. They are durable when this returns."""
        ...

    def count(self) -> int:
        """Return the number of points."""
        ...

    def search(self, vectors: Sequence[Sequence[float]], query: Query) -> list[list[Hit]]:
        """Return the nearest points of each vector, the best first."""
        ...

    def sample(self, limit: int, field: str | None = None) -> list[Hit]:
        """Return some points, at most ``limit``, without scores; with ``field``, points that have a value there."""
        ...

    def close(self) -> None:
        """Release connections."""
        ...


@dataclass(frozen=True)
class CollectionAddress:
    """The address of a collection and how to access it. It is sent to the workers, which open the collection."""

    where: str
    collection: str
    timeout: float = 120.0
    batch_size: int = 1_000
    api_key_env: str | None = None
    api_key: Callable[[], str] | None = None
    staged: str = ""
    """The collection that is written to instead, until it is published under the name of this one."""

    def __post_init__(self) -> None:
        if not _COLLECTION.fullmatch(self.collection):
            raise InvalidArgument(f"found the collection name {self.collection!r}, expected a name such as 'reviews'")
        if self.timeout <= 0 or self.batch_size < 1:
            raise InvalidArgument(
                f"found timeout={self.timeout!r} and batch_size={self.batch_size!r}, expected both to be positive"
            )
        if self.api_key is not None and not callable(self.api_key):
            raise InvalidType(
                f"found api_key= of type {type(self.api_key).__name__}, expected a function that returns the key",
                fix=Fix("pass api_key_env= with the name of an environment variable that holds the key"),
            )
        if self.api_key is not None and self.api_key_env is not None:
            raise InvalidArgument("found both api_key_env and api_key, expected one of them")
        if self.is_server:
            if "@" in urlsplit(self.where).netloc:
                raise InvalidArgument(
                    f"found a user or password in the address of {urlsplit(self.where).hostname}, where logs show it",
                    fix=Fix("pass api_key_env= with the name of an environment variable that holds the key"),
                )
        elif "://" in self.where:
            raise InvalidArgument(
                f"found where={self.where!r}, expected an address (http://...) or a folder of this machine"
            )
        elif self.api_key is not None or self.api_key_env is not None:
            raise InvalidArgument(f"found an API key for the folder {self.where}, expected one for servers only")

    @classmethod
    def of(cls, where: str | os.PathLike[str], collection: str, **settings: Any) -> CollectionAddress:
        """Return the address of a collection on a server or in a folder."""
        return cls(os.fspath(where), collection, **settings)

    @property
    def name_to_use(self) -> str:
        """The name for requests. Messages have the name that the user gave."""
        return self.staged or self.collection

    @property
    def is_server(self) -> bool:
        """Whether the collection is on a server, not in a folder."""
        return self.where.startswith(("http://", "https://"))

    @property
    def place(self) -> dict[str, str]:
        """What the annotations of a step say of the collection, see :data:`luminosity.core.READS`."""
        where = self.where if self.is_server else os.path.abspath(self.where)
        return {"path": where, "kind": "qdrant", "name": self.collection}

    def __str__(self) -> str:
        return f"the collection {self.collection!r} at {self.where}"


def check_filter(equal: Mapping[str, Any]) -> dict[str, Any]:
    """Return a filter as :class:`Query` takes it. Raises if a value is of a type that stores don't compare.

    >>> check_filter({"language": ["en", "de"], "rating": {"gte": 4}, "score": 0.5})["score"]
    {'gte': 0.5, 'lte': 0.5}
    """
    checked: dict[str, Any] = {}
    for name, value in equal.items():
        if isinstance(value, Mapping):
            bounds: dict[str, Any] = dict(cast("Mapping[str, Any]", value))
            numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in bounds.values())
            if not bounds or not numbers or not bounds.keys() <= _BOUNDS:
                raise InvalidArgument(
                    f"found filter={{{name!r}: {bounds!r}}}, expected numbers for some of {', '.join(sorted(_BOUNDS))}"
                )
            checked[name] = bounds
            continue
        values = cast("list[Any]", value) if isinstance(value, list) else [value]
        if isinstance(value, float) and math.isfinite(value):
            checked[name] = {"gte": value, "lte": value}  # stores compare whole numbers only
            continue
        if not values or not all(isinstance(each, str | int | bool) for each in values):
            raise InvalidArgument(
                f"found filter={{{name!r}: {value!r}}}, expected a text, a number, a boolean, a list of texts or of "
                'integers, or bounds such as {"gte": 4}'
            )
        checked[name] = value
    return checked


def chosen_vector(address: CollectionAddress, found: Mapping[str, tuple[int, str]] | None, using: str | None) -> str:
    """Return the name of the vector to compare with: ``using``, or the only one of the collection.

    >>> chosen_vector(CollectionAddress("stores", "reviews"), {"mood": (3, "cosine")}, None)
    'mood'
    """
    if found is None:
        raise StoreError(
            f"{address} does not exist", fix="check the name and the place, and that it was written before"
        )
    if using is None and len(found) == 1:
        return next(iter(found))
    if using is not None and using in found:
        return using
    if list(found) == [""]:
        raise StoreError(
            f"found using={using!r}, but {address} has one vector without a name", fix=Fix("leave out using=")
        )
    names = f"the vectors {list_some(list(found), _SHOWN_VECTORS)}" if found else "no vectors to search"
    if using is None:
        fix = Fix(f"choose one, such as using={next(iter(found))!r}") if found else None
        raise StoreError(f"found no using=, but {address} has {names}", fix=fix)
    fix = Fix(did_you_mean(using, found) or "choose one of them")
    raise StoreError(f"found using={using!r}, but {address} has {names}", fix=fix if found else None)


def check_vectors(
    address: CollectionAddress, found: Mapping[str, tuple[int, str]], sizes: Mapping[str, int], distance: str
) -> None:
    """Raise unless the collection has these vectors; ``found`` holds the size and distance of the vectors it has."""
    for name, size in sizes.items():
        title = f"vector {name!r}" if name else "vector without a name"
        if name not in found:
            there = ", ".join(repr(other) for other in found) if any(found) else "one without a name"
            raise StoreError(f"{address} has no {title}, it has {there}", fix=_OTHER_COLLECTION)
        if found[name] != (size, distance):
            raise StoreError(
                f"{address} has a {title} of {found[name][0]} numbers with {found[name][1]} distance, expected {size} "
                f"numbers with {distance} distance",
                fix=_OTHER_COLLECTION,
            )
