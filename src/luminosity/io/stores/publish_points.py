"""Write a bounded table to Qdrant all at once: check every row first, then write the points, then show them.

A run that fails because of its input, its models or a row leaves the collection as it was. What a failure of the store
itself leaves depends on the store: see ``docs/stores.md``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.metrics import Metrics
from apache_beam.pvalue import AsIter, AsSingleton
from apache_beam.transforms.window import GlobalWindows

from luminosity.errors import StoreError
from luminosity.io.run_owner import owner_in_name, owner_of
from luminosity.io.stores.embedded_qdrant import EmbeddedCollection
from luminosity.io.stores.points import PointColumns
from luminosity.io.stores.qdrant_collection import CollectionAddress, WriteMode, check_vectors
from luminosity.io.stores.qdrant_server import ServerCollection
from luminosity.io.stores.upsert_step import (
    NAMESPACE,
    Target,
    UpsertDoFn,
    check_sizes,
    known_sizes,
    point_writes,
)
from luminosity.runs.run_ids import RunIdentity

__all__ = ["TableFacts", "begin_on_server", "publish_table"]

_ABANDONED_S = 86_400  # A collection of another machine that waits for so long was left by a run that was killed.


@dataclass(frozen=True)
class TableFacts:
    """What must be known of all rows before the first is written."""

    rows: int = 0
    points: int = 0  # without those that are deleted
    sizes: dict[str, int] = field(default_factory=dict[str, int])


def publish_table(
    rows: Any, address: CollectionAddress, columns: PointColumns, mode: WriteMode, identity: RunIdentity
) -> Any:
    """Write the rows of a PCollection, and return the numbers of rows of the writes, once all points are visible."""
    rows |= "Global" >> beam.WindowInto(GlobalWindows())
    if address.is_server:
        rows = identity.stable(
            rows, "StableRows"
        )  # They are written before all are there, and must be the same if they come again.
    checked = (
        rows
        | "Check" >> beam.ParDo(_Check(columns)).with_output_types(TableFacts)
        | "Facts" >> beam.CombineGlobally(_MergeFacts(columns)).with_output_types(TableFacts)
    )
    if not address.is_server:
        publish = _PublishInFolder(address, columns, mode, _run_of(address, identity))
        return identity.stable(checked) | "Publish" >> beam.ParDo(publish, AsIter(rows)).with_output_types(int)
    once = rows.pipeline | "Once" >> beam.Impulse()
    owner = str(owner_of(identity))
    begun = once | "Begin" >> beam.Map(lambda _: begin_on_server(address, mode, owner)).with_output_types(str)
    target = AsSingleton(
        checked
        | "Target" >> beam.Map(_target_on_server, AsSingleton(begun), address, columns, mode).with_output_types(Target)
    )
    counts = rows | "Upsert" >> beam.ParDo(UpsertDoFn(address, columns, mode), target).with_output_types(int)
    collect = beam.Map(lambda _, target, counts: (target, list(counts)), target, AsIter(counts))
    written = once | "Collect" >> collect.with_output_types(tuple[Target, list[int]])
    return identity.stable(written) | "Publish" >> beam.ParDo(_PublishOnServer(address)).with_output_types(int)


def _run_of(address: CollectionAddress, identity: RunIdentity) -> str:
    """Return the mark that a run with a checkpoint leaves in the collection that it publishes."""
    return f"{identity.run}-{identity.number(str(address))}" if identity.is_durable else ""


class _Check(beam.DoFn):
    """Checks all rows, as writing them would: a bad row must fail the run before anything is written."""

    def __init__(self, columns: PointColumns) -> None:
        self._columns = columns

    def process(self, element: pa.RecordBatch) -> Iterator[TableFacts]:
        changes = self._columns.changes(element)
        sizes = {name: size for name, size in changes.sizes.items() if size is not None}
        points = sum(point is not None for point in changes.points.values())
        yield TableFacts(element.num_rows, points, sizes)


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
            check_sizes(sizes, dict(each.sizes), self._columns)
        return TableFacts(rows, points, sizes)

    def extract_output(self, accumulator: TableFacts) -> TableFacts:
        return accumulator


class _PublishInFolder(beam.DoFn):
    """Writes all rows in one step, since only one process at a time may have the folder open anyway."""

    def __init__(self, address: CollectionAddress, columns: PointColumns, mode: WriteMode, run: str) -> None:
        self._address = address
        self._columns = columns
        self._mode = mode
        self._run = run
        self._upserted = Metrics.counter(NAMESPACE, "points_upserted")
        self._deleted = Metrics.counter(NAMESPACE, "points_deleted")

    def process(self, element: TableFacts, batches: Iterable[pa.RecordBatch]) -> Iterator[int]:
        facts = element
        self._mode.check_rows(self._address, facts.rows)
        collection = EmbeddedCollection(self._address)
        there = collection.vectors()
        if not collection.is_published_by(self._run):  # Otherwise the step is repeated after a restart.
            self._mode.check(self._address, there is not None)
        if not facts.points and self._mode.if_exists != "replace" and (there is None or not facts.rows):
            yield from ([facts.rows] if facts.rows else [])
            return
        counts: list[int] = []

        def writes() -> Iterator[Any]:
            for (upserts, deletes), rows in point_writes(batches, self._columns, self._address.batch_size):
                yield upserts, deletes
                counts.append(rows)
                self._upserted.inc(len(upserts))
                self._deleted.inc(len(deletes))

        collection.publish(writes(), _sizes(facts, there, self._columns), self._mode, self._run)
        yield from counts


def begin_on_server(address: CollectionAddress, mode: WriteMode, owner: str) -> str:
    """Check that the collection can be written, remove what killed runs left, and return a name for a new collection.

    Returns an empty name if points are added to a collection that exists. Runs when the pipeline starts.
    """
    server = _server(address)
    if mode.if_exists == "append" and server.vectors() is not None:
        return ""
    names, aliases = set(server.names()), server.aliases()
    mode.check(address, address.collection in names or address.collection in aliases)
    if address.collection in names and mode.if_exists == "replace":
        raise StoreError(
            f"{address} can't be replaced at once: it is no alias, and Qdrant can't rename collections",
            fix="delete it before the run, or write to another collection, which this run creates with an alias",
        )
    for name in sorted(names - set(aliases.values())):
        if name.startswith(f"{address.collection}--"):
            _remove_if_abandoned(server, address, name, owner)
    return f"{address.collection}--{owner}-{int(time.time()):x}-{secrets.token_hex(2)}"


def _remove_if_abandoned(server: ServerCollection, address: CollectionAddress, name: str, mine: str) -> None:
    """Remove a collection that a killed run left; raise if the run still writes it.

    If this step is repeated, ``mine`` owns a collection that no step knows. The folder that tells whether a run with a
    checkpoint is over is not known here: its collection counts as that of another machine.
    """
    owner = owner_in_name(name)
    if owner is None:
        return  # It belongs to the user.
    is_mine = str(owner) == mine
    is_alive = owner.is_alive("")
    if is_alive is None:
        made_at = int(name.split("-")[-2], 16)
        is_alive = time.time() - made_at < _ABANDONED_S
    elif is_alive and not is_mine:
        raise StoreError(
            f"{address}: {owner.describe()} is writing it right now, to {name!r}",
            fix="wait until that run has ended, or write to another collection",
        )
    if not is_alive or is_mine:
        server.drop(name)


def _target_on_server(
    facts: TableFacts, staged: str, address: CollectionAddress, columns: PointColumns, mode: WriteMode
) -> Target:
    """Create the collection that gets the points; all rows are checked by now. May be repeated."""
    mode.check_rows(address, facts.rows)
    server = _server(address)
    there = server.vectors()
    if not facts.points and mode.if_exists != "replace":
        return Target(is_needed=there is not None and facts.rows > 0)
    sizes = _sizes(facts, there, columns)
    if not staged:
        if there is None:
            raise StoreError(f"{address} was deleted while the run was at work", fix="run it again")
        check_vectors(address, there, sizes, mode.distance)
        return Target()
    _server(replace(address, staged=staged)).ensure(sizes, mode.distance, create=True)
    return Target(staged=staged, replaces=server.aliases().get(address.collection, ""))


class _PublishOnServer(beam.DoFn):
    """Lets the alias stand for the new collection, once all points are in it."""

    def __init__(self, address: CollectionAddress) -> None:
        self._address = address

    def process(self, element: tuple[Target, list[int]]) -> Iterator[int]:
        target, written = element
        if target.staged:
            self._publish(_server(self._address), target)
        yield from written

    def _publish(self, server: ServerCollection, target: Target) -> None:
        name = self._address.collection
        found = server.aliases().get(name)
        if found != target.staged:
            if (found is None and server.vectors() is not None) or (found or "") != target.replaces:
                raise StoreError(
                    f"{self._address} was created by another run or program while this run was at work",
                    fix="run it again",
                )
            server.point_alias(name, target.staged, is_new=found is None)
        if owner_in_name(target.replaces):  # Otherwise the user has made the collection.
            server.drop(target.replaces)


def _server(address: CollectionAddress) -> ServerCollection:
    return ServerCollection(address, Metrics.counter(NAMESPACE, "retries").inc)


def _sizes(facts: TableFacts, there: dict[str, tuple[int, str]] | None, columns: PointColumns) -> dict[str, int]:
    """Return the sizes of the vectors; those that no row tells are taken from the collection that exists."""
    known = {name: (there or {})[name][0] for name in columns.vectors if name in (there or {})}
    return known_sizes(known | facts.sizes, columns)
