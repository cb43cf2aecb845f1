"""The door to vector stores: what a store does, how it is addressed, and what is written and searched for.

A new store is one file with a subclass of :class:`SharedStore` or :class:`StagedStore`, named in ``kinds.py``.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast, get_args

import pyarrow as pa
from apache_beam.metrics import Metrics

from luminosity.errors import Fix, InvalidArgument, StoreError
from luminosity.io.stores.address import StoreAddress
from luminosity.io.stores.points import Point, PointColumns, PointId, TableFacts, point_writes, split

__all__ = [
    "COUNTERS",
    "DISTANCES",
    "Distance",
    "Hit",
    "IfExists",
    "PointStore",
    "Query",
    "SharedStore",
    "Staged",
    "StagedStore",
    "StagedWriter",
    "Store",
    "Target",
    "Write",
    "WriteMode",
    "check_filter",
    "count_points",
    "counted_writes",
    "is_near",
]

COUNTERS = "luminosity.io.stores.write_vectors.WriteVectors"
"""The namespace of the counters of all stores."""
Distance = Literal["cosine", "dot", "euclid", "manhattan"]
DISTANCES: tuple[str, ...] = get_args(Distance)
IfExists = Literal["append", "replace", "fail"]
Write = tuple[Sequence[Point], Sequence[PointId]]
"""Points to upsert, and ids of points to delete."""
Staged = tuple[str, int]
"""The path of a file with rows of a run, and its number of rows."""


_BOUNDS = frozenset({"gt", "gte", "lt", "lte"})  # of a range in a filter


@dataclass(frozen=True)
class Query:
    """The settings that all vectors of a search share."""

    using: str | None
    """The name of the vectors to search; None if the collection has one without a name (``""`` in ``vectors``)."""
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
    """The similarity for cosine and dot, so more is better; the distance for euclid and manhattan."""
    payload: Mapping[str, Any]


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


def is_near(distance: str, score: float, threshold: float | None) -> bool:
    """Return whether a score is at least as good as a threshold; a distance is better if it is less."""
    if threshold is None:
        return True
    return score <= threshold if distance in ("euclid", "manhattan") else score >= threshold


@dataclass(frozen=True)
class WriteMode:
    """What a write does with a collection that exists, with one that does not, and with a table without rows."""

    distance: Distance
    create: bool = True
    if_exists: IfExists = "append"
    allow_empty: bool = False

    def check(self, address: StoreAddress, exists: bool) -> None:
        """Raise if the collection must not exist and does, or the other way round."""
        if exists and self.if_exists == "fail":
            raise StoreError(
                f"{address} exists already",
                fix=Fix("pass if_exists='append' or if_exists='replace', or choose another name"),
            )
        if not exists and not self.create:
            raise StoreError(f"{address} does not exist, and create=False", fix=Fix("pass create=True"))

    def check_rows(self, address: StoreAddress, rows: int) -> None:
        """Raise if a collection would be replaced by nothing."""
        if not rows and self.if_exists == "replace" and not self.allow_empty:
            raise StoreError(
                f"found no rows, expected some to replace {address}; it stays as it was",
                fix=Fix("check the input, or pass allow_empty=True if the collection may be empty"),
            )


class StagedWriter(ABC):
    """Writes staged rows to a store that one process at a time may write. It is sent to the workers."""

    @property
    def has_keys(self) -> bool:
        """Whether rows replace others, so that panes must be committed one after the other."""
        return True

    @abstractmethod
    def check(self, batch: Any) -> Any:
        """Check a batch before it is staged, and return the rows to stage: a bad row must fail the run early."""

    @abstractmethod
    def commit(self, staged: Sequence[Staged], folder: str) -> list[Any]:
        """Make all rows of a table visible, and return the output. May be repeated with the same arguments.

        ``folder`` is the folder of the staged files, in which the writer may keep notes.
        """

    @abstractmethod
    def commit_pane(
        self, staged: Sequence[Staged], newer: Collection[Hashable], folder: str
    ) -> tuple[list[Any], Collection[Hashable], list[str]]:
        """Make the rows of a pane visible, except those whose key is in ``newer``. May be repeated.

        Returns the output, the keys that were written, and further files that can be removed with the staged ones.
        """


class Store(ABC):
    """A collection of points. Every call may be repeated with the same arguments to the same effect."""

    kind: ClassVar[str]
    """The name of the product in the records of runs."""
    form: ClassVar[str]
    """What addresses look like, in messages."""
    has_collections: ClassVar[bool] = True
    """Whether an address needs the name of a collection."""

    @abstractmethod
    def __init__(self, address: StoreAddress, on_retry: Callable[[], None] = lambda: None) -> None:
        """Open the store; ``on_retry`` is called before a request to a server is repeated."""

    @classmethod
    @abstractmethod
    def handles(cls, where: str) -> bool:
        """Return whether an address is one of this kind of store."""

    @classmethod
    def address(cls, where: str, collection: str | None, **settings: Any) -> StoreAddress:
        """Return the address, with the settings of :class:`StoreAddress`. Raises if it can't be one.

        Its collection is empty if neither argument names one.
        """
        return StoreAddress(where, collection or "", **settings)

    @classmethod
    def place(cls, address: StoreAddress) -> dict[str, str]:
        """Return what the annotations of a step say of the collection, see :data:`luminosity.core.READS`."""
        where = address.where if "://" in address.where else os.path.abspath(address.where)
        return {"path": where, "kind": cls.kind, "name": address.collection}

    @classmethod
    @abstractmethod
    def check_reachable(cls, address: StoreAddress) -> None:
        """Raise if the client library is not installed here, or if no server responds. Asks for no collection."""

    @classmethod
    def names(cls, address: StoreAddress) -> list[str]:
        """Return the names of the collections that are at the address, sorted."""
        return []

    @classmethod
    @abstractmethod
    def check_writable(cls, address: StoreAddress, mode: WriteMode) -> None:
        """Raise if it is known without asking a server that the collection can't be written."""

    @abstractmethod
    def vectors(self) -> dict[str, tuple[int, str]] | None:
        """Return the size and distance of each vector, by name; None if the collection does not exist."""

    @abstractmethod
    def count(self) -> int:
        """Return the number of points."""

    @abstractmethod
    def search(self, vectors: Sequence[Sequence[float]], query: Query) -> list[list[Hit]]:
        """Return the nearest points of each vector, the best first."""

    @abstractmethod
    def sample(self, limit: int, field: str | None = None) -> list[Hit]:
        """Return some points, at most ``limit``, without scores; with ``field``, points that have a value there."""

    @abstractmethod
    def close(self) -> None:
        """Release connections."""


class StagedStore(Store):
    """A store of files. Workers stage the rows of a table beside it, and one step writes them all."""

    @classmethod
    @abstractmethod
    def staging_place(cls, address: StoreAddress) -> str:
        """Return the path beside which runs stage rows."""

    @classmethod
    @abstractmethod
    def writer(cls, address: StoreAddress, columns: PointColumns, mode: WriteMode, run: str) -> StagedWriter:
        """Return what writes the staged rows. ``run`` names a run with a checkpoint, or is empty."""


class PointStore(Store):
    """A store that takes points one write after the other."""

    @abstractmethod
    def ensure(self, sizes: Mapping[str, int], distance: Distance, create: bool) -> None:
        """Create the collection if it does not exist; raise if it has other vectors than these."""

    @abstractmethod
    def write(self, points: Sequence[Point], deleted: Sequence[PointId]) -> None:
        """Write and delete points. They are durable when this returns."""


@dataclass(frozen=True)
class Target:
    """Where the points of a bounded table go. It is known, and the collection exists, before the first is written."""

    is_needed: bool = True  # False: there is nothing to write, or nothing to delete from
    staged: str = ""  # the collection that gets the points, if it is published later
    replaces: str = ""  # the collection that it stands for until then


class SharedStore(PointStore):
    """A store that many workers write at once: a server.

    A table goes through ``begin``, ``prepare``, ``write``, ``publish`` and ``clean_up``, in steps that may run on
    different machines and may be repeated. Each step opens the store anew. While points go to a staged collection,
    ``address.staged`` has its name, and ``address.name_to_use`` is the collection to write. If nothing is staged,
    ``publish`` and ``clean_up`` are left out; if the target is not needed, ``write`` is, too.
    """

    @abstractmethod
    def begin(self, mode: WriteMode, owner: str) -> str:
        """Check that the collection can be written, remove what killed runs left, and return a name to write to.

        The name contains ``owner``; it is empty if points go directly to the collection. Runs when the pipeline starts.
        """

    @abstractmethod
    def prepare(self, staged: str, facts: TableFacts, columns: PointColumns, mode: WriteMode) -> Target:
        """Create what gets the points, ``staged`` if that is not empty, and check that it has vectors of their sizes.

        All rows are checked by now; ``facts`` says what was found in them.
        """

    @abstractmethod
    def publish(self, target: Target, mode: WriteMode) -> None:
        """Show what was written to the target, all at once."""

    def clean_up(self, target: Target) -> None:
        """Remove what :meth:`publish` needs to recognize its own work. Called when that will not be repeated."""

    def write_together(self, writes: Iterable[Write]) -> None:
        """Apply the writes of a pane, all at once if the store can."""
        for points, deleted in writes:
            self.write(points, deleted)


def counted_writes(
    batches: Iterable[pa.RecordBatch],
    columns: PointColumns,
    batch_size: int,
    newer: Collection[Hashable],
    keys: set[Hashable],
    counts: list[int],
) -> Iterator[Write]:
    """Yield the changes of all batches in writes of about ``batch_size`` points, and count them.

    Points with ids in ``newer`` are left out. ``keys`` gets all ids, and ``counts`` the number of rows of each write.
    """
    for points, count in point_writes(batches, columns, batch_size):
        keys.update(points)
        counts.append(count)
        upserts, deletes = split(points, newer)
        yield upserts, deletes
        count_points(len(upserts), len(deletes))


def count_points(upserted: int, deleted: int) -> None:
    """Count the points of a write in the metrics of the run."""
    Metrics.counter(COUNTERS, "points_upserted").inc(upserted)
    Metrics.counter(COUNTERS, "points_deleted").inc(deleted)
