"""The transform that writes rows to Qdrant."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.metrics import Metrics
from apache_beam.transforms.window import WindowedValue
from apache_beam.utils.timestamp import Timestamp

from luminosity.errors import Fix, InvalidArgument, StoreError
from luminosity.io.stores.connect import check_reachable, open_collection
from luminosity.io.stores.points import Changes, Point, PointColumns, PointId
from luminosity.io.stores.qdrant_collection import DISTANCES, CollectionAddress, Distance

__all__ = ["WriteQdrant"]


class WriteQdrant(beam.PTransform[Any, Any]):
    """Writes the rows of a table to Qdrant as points, and deletes the points of rows that are marked ``_deleted``.

    Writing a point again has no effect, so bundles may be retried. If rows of one batch have the same id, the last one
    counts; batches come in any order. The output is the number of rows of each write, once they are durable: steps
    that must run after the writes can use it as a side input.

    >>> import tempfile
    >>> import pyarrow as pa
    >>> folder = tempfile.mkdtemp()
    >>> rows = pa.record_batch({"id": [1, 2], "text": ["a", "b"], "embedding": [[0.0, 1.0], [1.0, 0.0]]})
    >>> with beam.Pipeline() as pipeline:
    ...     _ = pipeline | beam.Create([rows]) | WriteQdrant(folder, "letters", vectors="embedding")
    """

    def __init__(
        self,
        where: str | os.PathLike[str],
        collection: str,
        *,
        vectors: str | Mapping[str, str],
        id: str = "id",
        payload: Sequence[str] | None = None,
        distance: Distance = "cosine",
        create: bool = True,
        batch_size: int = 1_000,
        timeout: float = 120.0,
        api_key_env: str | None = None,
        api_key: Callable[[], str] | None = None,
    ) -> None:
        """
        Args:
            where: a server's address (``http://...``), or a folder of this machine, in which Qdrant's engine keeps the
                collection without a server.
            collection: the name of the collection. It is created with the first row if it does not exist.
            vectors: the column of the vector, or a mapping of vector names to columns. Nulls are left out; a row needs
                at least one vector.
            id: a column of unsigned integers, UUIDs, or other texts, which become UUIDs and are kept in the payload.
                :class:`~luminosity.AddRowIds` makes one.
            payload: the columns to keep beside the vectors; by default all others.
            distance: ``"cosine"``, ``"dot"``, ``"euclid"`` or ``"manhattan"``, for a collection that is created.
            create: False raises an error if the collection does not exist.
            batch_size: the most points of one write.
            timeout: how many seconds to retry while a server fails or other workers write to the folder.
            api_key_env: the environment variable of the workers that holds the server's key.
            api_key: a function that returns the key; it is called in the workers.
        """
        super().__init__()
        if distance not in DISTANCES:
            raise InvalidArgument(f"found distance={distance!r}, expected one of {', '.join(DISTANCES)}")
        named = {"": vectors} if isinstance(vectors, str) else dict(vectors)
        if not named:
            raise InvalidArgument("found no vectors, expected a column, or a mapping of vector names to columns")
        self._address = CollectionAddress.of(
            where, collection, timeout=timeout, batch_size=batch_size, api_key_env=api_key_env, api_key=api_key
        )
        self._columns = PointColumns(named, id, payload)
        self._distance: Distance = distance
        self._create = create

    def check_reachable(self) -> None:
        """Raise if the client library is not installed here, or if no server responds at the address.

        Call it before a long pipeline runs: workers retry a server that does not respond until their timeout.
        """
        check_reachable(self._address)

    def expand(self, input_or_inputs: Any) -> Any:
        """Write points in batches, and emit the number of rows of each write."""
        step = _Write(self._address, self._columns, self._distance, self._create)
        return input_or_inputs | "Upsert" >> beam.ParDo(step).with_output_types(int)

    def default_label(self) -> str:
        """Return a label with the collection's name, such as ``WriteQdrant(reviews)``."""
        return f"WriteQdrant({self._address.collection})"


class _Write(beam.DoFn):
    def __init__(self, address: CollectionAddress, columns: PointColumns, distance: Distance, create: bool) -> None:
        self._address = address
        self._columns = columns
        self._distance: Distance = distance
        self._create = create
        self._upserted = Metrics.counter(WriteQdrant, "points_upserted")
        self._deleted = Metrics.counter(WriteQdrant, "points_deleted")
        self._retries = Metrics.counter(WriteQdrant, "retries")

    def setup(self) -> None:
        self._collection = open_collection(self._address, self._retries.inc)
        self._ensured: dict[str, int] = {}  # the vectors that the collection is known to have

    def start_bundle(self) -> None:
        self._clear()

    def process(
        self, batch: pa.RecordBatch, window: Any = beam.DoFn.WindowParam, timestamp: Any = beam.DoFn.TimestampParam
    ) -> Iterator[WindowedValue]:
        first = 0
        while first < batch.num_rows:
            rows = batch.slice(first, self._address.batch_size - len(self._points))
            self._add(self._columns.changes(rows, first))
            count, earliest = self._rows.get(window, (0, timestamp))
            self._rows[window] = count + rows.num_rows, min(earliest, timestamp)
            first += rows.num_rows
            if len(self._points) >= self._address.batch_size:
                yield from self._flush()

    def finish_bundle(self) -> Iterator[WindowedValue]:  # type: ignore[override]  # Beam declares None, and accepts these.
        yield from self._flush()

    def teardown(self) -> None:
        self._collection.close()

    def _clear(self) -> None:
        self._points: dict[PointId, Point | None] = {}
        self._sizes: dict[str, int] = {}
        self._rows: dict[Any, tuple[int, Timestamp]] = {}

    def _add(self, changes: Changes) -> None:
        self._points |= changes.points
        for name, size in changes.sizes.items():
            if size is not None and self._sizes.setdefault(name, size) != size:
                raise StoreError(
                    f"the vector {name or self._columns.vectors[name]!r} has {size} numbers in one batch and "
                    f"{self._sizes[name]} in another, expected the same in all batches"
                )

    def _flush(self) -> Iterator[WindowedValue]:
        upserts = [point for point in self._points.values() if point is not None]
        deletes = [identity for identity, point in self._points.items() if point is None]
        if upserts and not self._sizes.items() <= self._ensured.items():
            self._ensure()
        if self._points:
            self._collection.write(upserts, deletes)
        self._upserted.inc(len(upserts))
        self._deleted.inc(len(deletes))
        for window, (count, earliest) in self._rows.items():
            yield WindowedValue(count, earliest, (window,))
        self._clear()

    def _ensure(self) -> None:
        sizes = self._ensured | self._sizes
        if unknown := self._columns.vectors.keys() - sizes.keys():
            raise StoreError(
                f"the size of the vector {min(unknown)!r} is unknown: the column "
                f"{self._columns.vectors[min(unknown)]!r} is null in all rows",
                fix=Fix("cast the column to fixed-size lists, whose type tells the size"),
            )
        self._collection.ensure(sizes, self._distance, self._create)
        self._ensured = sizes
