"""One face for a Qdrant server and for Qdrant's engine in this process."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args
from urllib.parse import urlsplit

from luminosity.errors import StoreError
from luminosity.io.stores.points import Point, PointId

__all__ = ["DISTANCES", "CollectionAddress", "Distance", "Hit", "QdrantCollection", "Query", "check_vectors"]

Distance = Literal["cosine", "dot", "euclid", "manhattan"]
DISTANCES: tuple[str, ...] = get_args(Distance)

_COLLECTION = re.compile(r"[^/\\.\s][^/\\]*")


@dataclass(frozen=True)
class Query:
    """What all vectors of a search share."""

    using: str | None
    limit: int
    payload: Sequence[str]
    score_threshold: float | None
    equal: Mapping[str, Any]
    """Of each payload field: the value it must have, or a list of those it may have."""


@dataclass(frozen=True)
class Hit:
    id: PointId
    score: float
    payload: Mapping[str, Any]


class QdrantCollection(Protocol):
    """A collection. All of it may be called again with the same arguments to the same effect."""

    def ensure(self, sizes: Mapping[str, int], distance: Distance, create: bool) -> None:
        """Make the collection if there is none; raise where it has other vectors than these."""
        ...

    def write(self, points: Sequence[Point], deleted: Sequence[PointId]) -> None:
        """Durable when this returns."""
        ...

    def count(self) -> int: ...

    def search(self, vectors: Sequence[Sequence[float]], query: Query) -> list[list[Hit]]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class CollectionAddress:
    """A collection's place: what travels with the pipeline. Nothing is opened before a worker asks for it."""

    where: str
    collection: str
    timeout: float = 120.0
    batch_size: int = 1_000
    api_key_env: str | None = None
    api_key: Callable[[], str] | None = None

    def __post_init__(self) -> None:
        if not _COLLECTION.fullmatch(self.collection):
            raise ValueError(f"found the collection name {self.collection!r}, expected one such as 'reviews'")
        if self.timeout <= 0 or self.batch_size < 1:
            raise ValueError(
                f"found timeout={self.timeout!r} and batch_size={self.batch_size!r}, expected more than nothing"
            )
        if self.api_key is not None and not callable(self.api_key):
            raise TypeError(
                "api_key is not a function, expected one that returns the key; a key in a variable of the environment "
                "is named with api_key_env='...'"
            )
        if self.api_key is not None and self.api_key_env is not None:
            raise ValueError("found both api_key_env and api_key, expected one of them")
        if self.is_server:
            if "@" in urlsplit(self.where).netloc:
                raise ValueError(
                    f"found a user or a password in the address of {urlsplit(self.where).hostname}, where anyone may "
                    "read it; name the environment variable that holds the key instead: api_key_env='...'"
                )
        elif "://" in self.where:
            raise ValueError(
                f"found where={self.where!r}, expected an address (http://...) or a folder of this machine"
            )
        elif self.api_key is not None or self.api_key_env is not None:
            raise ValueError(f"found an API key for the folder {self.where}, expected one for servers only")

    @classmethod
    def of(cls, where: str | os.PathLike[str], collection: str, **settings: Any) -> CollectionAddress:
        return cls(os.fspath(where), collection, **settings)

    @property
    def is_server(self) -> bool:
        return self.where.startswith(("http://", "https://"))

    def __str__(self) -> str:
        return f"the collection {self.collection!r} at {self.where}"


def check_vectors(
    place: CollectionAddress, found: Mapping[str, tuple[int, str]], sizes: Mapping[str, int], distance: str
) -> None:
    """`found`: the size and the distance of each vector that the collection has."""
    for name, size in sizes.items():
        title = f"vector {name!r}" if name else "vector without a name"
        if name not in found:
            there = ", ".join(repr(other) for other in found) if any(found) else "one without a name"
            raise StoreError(
                f"{place} has no {title}, it has {there}; write into another collection, or delete this one"
            )
        if found[name] != (size, distance):
            raise StoreError(
                f"{place} has a {title} of {found[name][0]} numbers with {found[name][1]} distance, expected {size} "
                f"numbers with {distance} distance; write into another collection, or delete this one"
            )
