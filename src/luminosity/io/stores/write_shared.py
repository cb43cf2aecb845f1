"""Writes rows to a store that all workers write at once: a server.

A bounded table is written when all its rows have arrived and are checked, so a run that fails because of its input, its
models or a row leaves the collection as it was. What a failure of the store itself leaves depends on the store: see
``docs/stores.md``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.metrics import Metrics
from apache_beam.pvalue import AsIter, AsSingleton
from apache_beam.transforms.window import GlobalWindows, WindowedValue
from apache_beam.utils.timestamp import Timestamp

from luminosity.io.run_owner import owner_of
from luminosity.io.stores.address import StoreAddress
from luminosity.io.stores.kinds import open_store
from luminosity.io.stores.points import (
    Changes,
    Point,
    PointColumns,
    PointId,
    TableFacts,
    check_sizes,
    facts_of,
    known_sizes,
    split,
)
from luminosity.io.stores.store import (
    COUNTERS,
    PointStore,
    SharedStore,
    Target,
    WriteMode,
    count_points,
    counted_writes,
)
from luminosity.io.writing.pane_steps import CommitPanes, PaneCommitter, pane_of
from luminosity.io.writing.window_files import KeyByPane
from luminosity.runs.run_ids import RunIdentity

__all__ = ["PointWrites", "UpsertDoFn", "write_panes", "write_table"]


@dataclass(frozen=True)
class PointWrites:
    """What the steps that write to a store of points share."""

    address: StoreAddress
    columns: PointColumns
    mode: WriteMode

    def open(self, staged: str = "") -> Any:
        """Open the store, or the collection that is published later, and count its retries."""
        return open_store(replace(self.address, staged=staged), Metrics.counter(COUNTERS, "retries").inc)


def write_table(rows: Any, writes: PointWrites, identity: RunIdentity) -> Any:
    """Write the rows of a PCollection, and return the numbers of rows of the writes, once all points are visible."""
    rows |= "Global" >> beam.WindowInto(GlobalWindows())
    # They are written before all are there, and must be the same if they come again.
    rows = identity.stable(rows, "StableRows")
    checked = (
        rows
        | "Check" >> beam.Map(lambda batch, columns=writes.columns: facts_of([batch], columns))
        | "Facts" >> beam.CombineGlobally(_MergeFacts(writes.columns)).with_output_types(TableFacts)
    )
    once = rows.pipeline | "Once" >> beam.Impulse()
    owner = str(owner_of(identity))
    begun = once | "Begin" >> beam.Map(_begin, writes, owner).with_output_types(str)
    target = AsSingleton(checked | "Target" >> beam.Map(_prepare, AsSingleton(begun), writes).with_output_types(Target))
    counts = rows | "Upsert" >> beam.ParDo(UpsertDoFn(writes), target).with_output_types(int)
    collect = beam.Map(lambda _, target, counts: (target, list(counts)), target, AsIter(counts))
    written = once | "Collect" >> collect.with_output_types(tuple[Target, list[int]])
    return (
        identity.stable(written)
        | "Publish" >> beam.Map(_publish, writes).with_output_types(tuple[Target, list[int]])
        | "Published" >> beam.Reshuffle()  # The step before may be repeated until here.
        | "CleanUp" >> beam.FlatMap(_clean_up, writes).with_output_types(int)
    )


def write_panes(rows: Any, writes: PointWrites, identity: RunIdentity) -> Any:
    """Write the rows of a stream pane by pane, and return the number of rows of each write, in its window.

    There may be several machines, so that no folder is known to all workers: rows travel as elements.
    """
    parts = rows | "KeyByPane" >> KeyByPane(pa.RecordBatch) | "Group" >> beam.GroupByKey()
    cut = beam.ParDo(_Parts(writes.address.batch_size)).with_output_types(tuple[bytes, Any])
    panes = parts | "Parts" >> cut
    commit = CommitPanes(_WritePane(writes), rows.windowing)
    return identity.stable(panes) | "Publish" >> commit.with_output_types(int)


def _begin(_: bytes, writes: PointWrites, owner: str) -> str:
    return writes.open().begin(writes.mode, owner)


def _prepare(facts: TableFacts, staged: str, writes: PointWrites) -> Target:
    writes.mode.check_rows(writes.address, facts.rows)
    return writes.open().prepare(staged, facts, writes.columns, writes.mode)


def _publish(written: tuple[Target, list[int]], writes: PointWrites) -> tuple[Target, list[int]]:
    if written[0].staged:
        writes.open().publish(written[0], writes.mode)
    return written


def _clean_up(written: tuple[Target, list[int]], writes: PointWrites) -> list[int]:
    target, counts = written
    if target.staged:
        writes.open().clean_up(target)
    return counts


class _MergeFacts(beam.CombineFn):
    def __init__(self, columns: PointColumns) -> None:
        self._columns = columns

    def create_accumulator(self) -> TableFacts:
        return TableFacts()

    def add_input(self, mutable_accumulator: TableFacts, element: TableFacts) -> TableFacts:
        return self.merge_accumulators([mutable_accumulator, element])

    def merge_accumulators(self, accumulators: Iterable[TableFacts]) -> TableFacts:
        rows, points, sizes = 0, 0, dict[str, int]()
        for each in accumulators:
            rows, points = rows + each.rows, points + each.points
            check_sizes(sizes, each.sizes, self._columns)
        return TableFacts(rows, points, sizes)

    def extract_output(self, accumulator: TableFacts) -> TableFacts:
        return accumulator


class UpsertDoFn(beam.DoFn):
    """Writes points in batches, and emits the number of rows of each write."""

    def __init__(self, writes: PointWrites) -> None:
        self._writes = writes
        self._store: PointStore | None = None

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
        if self._store is None:
            self._store = self._writes.open("" if target is None else target.staged)
        first, batch_size = 0, self._writes.address.batch_size
        while first < element.num_rows:
            rows = element.slice(first, batch_size - len(self._points))
            self._add(self._writes.columns.changes(rows, first))
            count, earliest = self._rows.get(window, (0, timestamp))
            self._rows[window] = count + rows.num_rows, min(earliest, timestamp)
            first += rows.num_rows
            if len(self._points) >= batch_size:
                yield from self._flush()

    def finish_bundle(self) -> Iterator[WindowedValue]:  # type: ignore[override]  # Beam declares None, and accepts these.
        """Write the rows that are left."""
        yield from self._flush()

    def teardown(self) -> None:
        """Close the connection."""
        if self._store is not None:
            self._store.close()

    def _clear(self) -> None:
        self._points: dict[PointId, Point | None] = {}
        self._sizes: dict[str, int] = {}
        self._rows: dict[Any, tuple[int, Timestamp]] = {}

    def _add(self, changes: Changes) -> None:
        self._points |= changes.points
        check_sizes(self._sizes, changes.sizes, self._writes.columns)

    def _flush(self) -> Iterator[WindowedValue]:
        upserts, deletes = split(self._points)
        if self._points and self._is_needed:
            assert self._store is not None
            if upserts and not self._is_ready and not self._sizes.items() <= self._ensured.items():
                sizes = known_sizes(self._ensured | self._sizes, self._writes.columns)
                self._store.ensure(sizes, self._writes.mode.distance, self._writes.mode.create)
                self._ensured = sizes
            self._store.write(upserts, deletes)
        count_points(len(upserts), len(deletes))
        for window, (count, earliest) in self._rows.items():
            yield WindowedValue(count, earliest, (window,))
        self._clear()


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


class _WritePane(PaneCommitter):
    """Writes a part of a pane, and creates the collection before the first. Emits the number of rows of each write."""

    def __init__(self, writes: PointWrites) -> None:
        self._writes = writes

    def commit(
        self, content: list[pa.RecordBatch], newer: Collection[Hashable]
    ) -> tuple[list[int], Collection[Hashable]]:
        """Write the rows batch by batch."""
        keys, counts = set[Hashable](), list[int]()
        columns, mode = self._writes.columns, self._writes.mode
        writes = counted_writes(content, columns, self._writes.address.batch_size, newer, keys, counts)
        store: SharedStore = self._writes.open()
        try:
            facts, there = facts_of(content, columns), store.vectors()
            if facts.points:
                store.ensure(facts.sizes_for(there, columns), mode.distance, mode.create)
            if facts.points or there is not None:
                store.write_together(writes)
            else:
                deque(writes, maxlen=0)  # They are counted, but there is nothing to delete from.
        finally:
            store.close()
        return counts, keys
