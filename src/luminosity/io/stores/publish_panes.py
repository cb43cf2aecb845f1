"""Write a stream to Qdrant: the points of a window appear when it ends, or when its trigger fires."""

from __future__ import annotations

import os
from collections.abc import Collection, Hashable, Iterable, Iterator
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.metrics import Metrics
from apache_beam.pvalue import AsSingleton
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.trigger import DefaultTrigger
from apache_beam.transforms.window import GlobalWindows

from luminosity.io.stores.connect import open_collection
from luminosity.io.stores.embedded_qdrant import EmbeddedCollection
from luminosity.io.stores.points import PointColumns
from luminosity.io.stores.qdrant_collection import CollectionAddress, Write, WriteMode
from luminosity.io.stores.staging import Staged, StageDoFn, StagedRows, StagingFolder
from luminosity.io.stores.upsert_step import NAMESPACE, check_sizes, known_sizes, point_writes
from luminosity.io.writing import filesystem
from luminosity.io.writing.pane_steps import CommitPanes, PaneCommitter, PaneOfElement, RemoveDropped, pane_of
from luminosity.io.writing.window_files import GroupByPane, KeyByPane
from luminosity.runs.run_ids import RunIdentity

__all__ = ["has_panes", "publish_panes"]

_ROWS_PER_FILE = 100_000


def has_panes(windowing: Windowing) -> bool:
    """Return whether the rows of a stream come in panes that are complete at some time.

    They don't in the global window without a trigger, and in windows that merge, which rows have for themselves.
    """
    if windowing.windowfn.is_merging():
        return False
    return not (isinstance(windowing.windowfn, GlobalWindows) and isinstance(windowing.triggerfn, DefaultTrigger))


def publish_panes(
    rows: Any, address: CollectionAddress, columns: PointColumns, mode: WriteMode, identity: RunIdentity
) -> Any:
    """Write the rows of a stream pane by pane, and return the number of rows of each write, in its window."""
    windowing = rows.windowing
    if address.is_server:
        # There may be several machines, so that no folder is known to all workers: rows travel as elements.
        parts = rows | "KeyByPane" >> KeyByPane(pa.RecordBatch) | "Group" >> beam.GroupByKey()
        panes = parts | "Parts" >> beam.ParDo(_Parts(address.batch_size)).with_output_types(tuple[bytes, Any])
        commit = CommitPanes(_WriteToServer(address, columns, mode), windowing)
        return identity.stable(panes) | "Publish" >> commit.with_output_types(int)
    start = rows.pipeline | "One" >> beam.Create([None])
    staging = StagingFolder.of(os.path.join(address.where, address.collection), identity)
    folder = AsSingleton(start | "Folder" >> beam.Map(_make_folder, staging))
    stage = beam.ParDo(StageDoFn(_Check(columns), _ROWS_PER_FILE), folder).with_output_types(tuple[str, int])
    with rows.pipeline.transform_annotations(**staging.annotations()):
        # A source of a stream has short bundles: too many files.
        staged = rows | "Gather" >> beam.Reshuffle() | "Stage" >> stage
    commit = CommitPanes(_WriteToFolder(address, columns, mode), windowing)
    number = beam.ParDo(PaneOfElement()).with_output_types(tuple[bytes, Any])
    panes = staged | "ByPane" >> GroupByPane() | "Pane" >> number
    done = (
        identity.stable(panes)
        | "Publish" >> commit
        | "Once" >> beam.Reshuffle()  # Files stay until the points are committed: the step before may be retried.
        | "CleanUp" >> beam.FlatMap(_remove_files).with_output_types(int)
    )
    if not isinstance(windowing.windowfn, GlobalWindows):
        names = staged | "Names" >> beam.Map(lambda file: file[0]).with_output_types(str)
        _ = (names, done) | "CleanUpLate" >> RemoveDropped(windowing.allowed_lateness)
    return done


class _Parts(beam.DoFn):
    """Divides a pane into parts of about ``batch_size`` rows, so that it need not fit into memory."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size

    def process(
        self,
        element: tuple[None, Iterable[pa.RecordBatch]],
        window: Any = beam.DoFn.WindowParam,
        timestamp: Any = beam.DoFn.TimestampParam,
        pane: Any = beam.DoFn.PaneInfoParam,
    ) -> Iterator[tuple[bytes, Any]]:
        part: list[pa.RecordBatch] = []
        rows = 0
        for batch in element[1]:
            part.append(batch)
            rows += batch.num_rows
            if rows >= self._batch_size:
                yield pane_of(window, timestamp, pane, part)
                part, rows = [], 0
        if part:
            yield pane_of(window, timestamp, pane, part)


class _Check:
    """Checks all rows before they are staged: a bad row must fail the run before anything of its window is written."""

    def __init__(self, columns: PointColumns) -> None:
        self._columns = columns

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        self._columns.changes(batch)
        return batch


class _Writer(PaneCommitter):
    """Makes writes of the rows of a pane, and creates the collection before the first."""

    def __init__(self, address: CollectionAddress, columns: PointColumns, mode: WriteMode) -> None:
        self._address = address
        self._columns = columns
        self._mode = mode
        self._upserted = Metrics.counter(NAMESPACE, "points_upserted")
        self._deleted = Metrics.counter(NAMESPACE, "points_deleted")
        self._retries = Metrics.counter(NAMESPACE, "retries")

    def _ensure(self, collection: Any, batches: Iterable[pa.RecordBatch]) -> bool:
        """Create the collection if there are points. Returns whether it exists."""
        sizes: dict[str, int] = {}
        points = 0
        for batch in batches:
            changes = self._columns.changes(batch)
            check_sizes(sizes, changes.sizes, self._columns)
            points += sum(point is not None for point in changes.points.values())
        there = collection.vectors()
        if not points:
            return there is not None
        known = {name: (there or {})[name][0] for name in self._columns.vectors if name in (there or {})}
        collection.ensure(known_sizes(known | sizes, self._columns), self._mode.distance, self._mode.create)
        return True

    def _writes(
        self, batches: Iterable[pa.RecordBatch], newer: Collection[Hashable], keys: set[Hashable], counts: list[int]
    ) -> Iterator[Write]:
        """Yield the writes of points that are not ``newer``. Adds the ids of all, and the rows of each write."""
        for (upserts, deletes), rows in point_writes(batches, self._columns, self._address.batch_size):
            keys.update(point.id for point in upserts)
            keys.update(deletes)
            counts.append(rows)
            upserts = [point for point in upserts if point.id not in newer]
            deletes = [identity for identity in deletes if identity not in newer]
            yield upserts, deletes
            self._upserted.inc(len(upserts))
            self._deleted.inc(len(deletes))


class _WriteToServer(_Writer):
    """Writes a part of a pane to a server. Emits the number of rows of each write."""

    def commit(
        self, content: list[pa.RecordBatch], newer: Collection[Hashable]
    ) -> tuple[list[int], Collection[Hashable]]:
        """Write the rows batch by batch."""
        keys, counts = set[Hashable](), list[int]()
        collection = open_collection(self._address, self._retries.inc)
        try:
            exists = self._ensure(collection, content)
            for upserts, deletes in self._writes(content, newer, keys, counts):
                if exists:
                    collection.write(upserts, deletes)
        finally:
            collection.close()
        return counts, keys


class _WriteToFolder(_Writer):
    """Writes a pane to a folder. Emits the number of rows of each write, and the files that are not needed any more."""

    def commit(self, content: list[Staged], newer: Collection[Hashable]) -> tuple[list[Any], Collection[Hashable]]:
        """Write all rows of the pane while the folder is locked."""
        keys, counts = set[Hashable](), list[int]()
        files = [path for path, rows in content if rows]
        if files:
            staged, collection = StagedRows(files), EmbeddedCollection(self._address)
            exists = self._ensure(collection, staged.batches())
            writes = self._writes(staged.batches(), newer, keys, counts)
            if exists:
                collection.write_together(writes)
            else:
                counts += [sum(rows for _, rows in content)]  # There is nothing to delete from.
        return [(counts, [path for path, _ in content])], keys


def _remove_files(written: tuple[list[int], list[str]]) -> list[int]:
    counts, files = written
    for path in files:
        filesystem.remove_file(path)
    return counts


def _make_folder(_: None, staging: StagingFolder) -> str:
    return staging.make()
