"""The step that writes points to a collection, batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.metrics import Metrics
from apache_beam.transforms.window import WindowedValue
from apache_beam.utils.timestamp import Timestamp

from luminosity.errors import Fix, StoreError
from luminosity.io.stores.connect import open_collection
from luminosity.io.stores.points import Changes, Point, PointColumns, PointId
from luminosity.io.stores.qdrant_collection import CollectionAddress, QdrantCollection, Write, WriteMode

__all__ = ["NAMESPACE", "Target", "UpsertDoFn", "check_sizes", "known_sizes", "point_writes"]

NAMESPACE = "luminosity.io.stores.write_qdrant.WriteQdrant"  # of the counters


@dataclass(frozen=True)
class Target:
    """Where the points of a bounded table go. It is known, and the collection exists, before the first is written."""

    is_needed: bool = True  # False: there is nothing to write, or nothing to delete from
    staged: str = ""  # the collection that gets the points, if it is published later
    replaces: str = ""  # the collection that the alias stands for until then


class UpsertDoFn(beam.DoFn):
    """Writes points in batches, and emits the number of rows of each write."""

    def __init__(self, address: CollectionAddress, columns: PointColumns, mode: WriteMode) -> None:
        self._address = address
        self._columns = columns
        self._mode = mode
        self._collection: QdrantCollection | None = None
        self._upserted = Metrics.counter(NAMESPACE, "points_upserted")
        self._deleted = Metrics.counter(NAMESPACE, "points_deleted")
        self._retries = Metrics.counter(NAMESPACE, "retries")

    def setup(self) -> None:
        """Start without a connection; the first batch tells the collection."""
        self._ensured: dict[str, int] = {}  # the vectors that the collection is known to have

    def start_bundle(self) -> None:
        """Forget the rows of a bundle that failed."""
        self._clear()

    def process(
        self,
        element: pa.RecordBatch,
        target: Target | None = None,
        window: Any = beam.DoFn.WindowParam,
        timestamp: Any = beam.DoFn.TimestampParam,
    ) -> Iterator[WindowedValue]:
        """Collect the rows of a batch, and write them whenever there are enough.

        Without a target, the collection is created with the first points.
        """
        self._is_needed = target is None or target.is_needed
        self._is_ready = target is not None
        if self._collection is None:
            address = self._address if target is None else replace(self._address, staged=target.staged)
            self._collection = open_collection(address, self._retries.inc)
        first = 0
        while first < element.num_rows:
            rows = element.slice(first, self._address.batch_size - len(self._points))
            self._add(self._columns.changes(rows, first))
            count, earliest = self._rows.get(window, (0, timestamp))
            self._rows[window] = count + rows.num_rows, min(earliest, timestamp)
            first += rows.num_rows
            if len(self._points) >= self._address.batch_size:
                yield from self._flush()

    def finish_bundle(self) -> Iterator[WindowedValue]:  # type: ignore[override]  # Beam declares None, and accepts these.
        """Write the rows that are left."""
        yield from self._flush()

    def teardown(self) -> None:
        """Close the connection."""
        if self._collection is not None:
            self._collection.close()

    def _clear(self) -> None:
        self._points: dict[PointId, Point | None] = {}
        self._sizes: dict[str, int] = {}
        self._rows: dict[Any, tuple[int, Timestamp]] = {}

    def _add(self, changes: Changes) -> None:
        self._points |= changes.points
        check_sizes(self._sizes, changes.sizes, self._columns)

    def _flush(self) -> Iterator[WindowedValue]:
        upserts, deletes = _split(self._points)
        if self._points and self._is_needed:
            assert self._collection is not None
            if upserts and not self._is_ready and not self._sizes.items() <= self._ensured.items():
                sizes = known_sizes(self._ensured | self._sizes, self._columns)
                self._collection.ensure(sizes, self._mode.distance, self._mode.create)
                self._ensured = sizes
            self._collection.write(upserts, deletes)
        self._upserted.inc(len(upserts))
        self._deleted.inc(len(deletes))
        for window, (count, earliest) in self._rows.items():
            yield WindowedValue(count, earliest, (window,))
        self._clear()


def point_writes(
    batches: Iterable[pa.RecordBatch], columns: PointColumns, batch_size: int
) -> Iterator[tuple[Write, int]]:
    """Yield the points of all batches in writes of about ``batch_size`` points, each with its number of rows."""
    points: dict[PointId, Point | None] = {}
    count = 0
    for batch in batches:
        first = 0
        while first < batch.num_rows:
            rows = batch.slice(first, batch_size - len(points))
            points |= columns.changes(rows, first).points
            first, count = first + rows.num_rows, count + rows.num_rows
            if len(points) >= batch_size:
                yield _split(points), count
                points, count = {}, 0
    if points:
        yield _split(points), count


def check_sizes(known: dict[str, int], found: dict[str, int | None], columns: PointColumns) -> None:
    """Add the sizes of vectors that a batch tells to ``known``; raise if another batch told others."""
    for name, size in found.items():
        if size is not None and known.setdefault(name, size) != size:
            raise StoreError(
                f"the vector {name or columns.vectors[name]!r} has {size} numbers in one batch and {known[name]} in "
                "another, expected the same in all batches"
            )


def known_sizes(sizes: dict[str, int], columns: PointColumns) -> dict[str, int]:
    """Return the sizes; raise if that of a vector is unknown."""
    if unknown := columns.vectors.keys() - sizes.keys():
        raise StoreError(
            f"the size of the vector {min(unknown)!r} is unknown: the column {columns.vectors[min(unknown)]!r} is null "
            "in all rows",
            fix=Fix("cast the column to fixed-size lists, whose type tells the size"),
        )
    return sizes


def _split(points: dict[PointId, Point | None]) -> tuple[list[Point], list[PointId]]:
    """Return the points to upsert, and the ids of those to delete."""
    upserts = [point for point in points.values() if point is not None]
    return upserts, [identity for identity, point in points.items() if point is None]
