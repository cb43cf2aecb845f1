"""Qdrant's engine in this process, with a collection in a folder.

Only one process at a time may have the folder open. So every call takes a lock, opens the folder, works, flushes and
closes the folder again, which takes some hundredths of a second: workers take turns, and a worker that is killed blocks
no other.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from luminosity.errors import InvalidArgument, StoreError, may_pass
from luminosity.extras import require
from luminosity.io.folders import ReplacedFolder, copy_folder, why_not_writable
from luminosity.io.run_owner import RunOwner
from luminosity.io.stores.address import StoreAddress, check_vectors, missing
from luminosity.io.stores.points import Point, PointColumns, PointId, facts_of
from luminosity.io.stores.staging import StagedRows
from luminosity.io.stores.store import (
    Distance,
    Hit,
    PointStore,
    Query,
    Staged,
    StagedStore,
    StagedWriter,
    Write,
    WriteMode,
    counted_writes,
)

__all__ = ["EmbeddedCollection"]


_CONFIGURATION = "edge_config.json"  # a file of every collection
_MARK = "luminosity-run"  # a file in a collection: the run with a checkpoint that published it
_PAGE_POINTS = 1_000  # points that are read at once
_POLL_S = 0.05  # how late a folder that another program closes is noticed at most


class EmbeddedCollection(PointStore, StagedStore):
    """A collection in a folder of this machine, which Qdrant's engine reads and writes in this process."""

    kind = "qdrant"
    form = "a folder of this machine"

    def __init__(self, address: StoreAddress, on_retry: Callable[[], None] = lambda: None) -> None:
        self._engine = require("qdrant_edge", "qdrant")
        self._address = address
        self._folder = ReplacedFolder(os.path.join(address.where, address.collection), address.timeout)

    @classmethod
    def handles(cls, where: str) -> bool:
        """Return whether it may be a folder."""
        return "://" not in where

    @classmethod
    def address(cls, where: str, collection: str | None, **settings: Any) -> StoreAddress:
        """Return the address. ``where`` may be the folder of the collection itself."""
        if settings.get("api_key") is not None or settings.get("api_key_env") is not None:
            raise InvalidArgument(f"found an API key for the folder {where}, expected one for servers only")
        if collection is None and os.path.isfile(os.path.join(where, _CONFIGURATION)):
            where, collection = os.path.split(os.path.abspath(where))
        return super().address(where, collection, **settings)

    @classmethod
    def check_reachable(cls, address: StoreAddress) -> None:
        """Raise if Qdrant's engine is not installed."""
        require("qdrant_edge", "qdrant")

    @classmethod
    def names(cls, address: StoreAddress) -> list[str]:
        """Return the folders in which there is a collection."""
        unfinished = (".unfinished", ".replaced")
        return [
            name
            for name in sorted(os.listdir(address.where))
            if not name.endswith(unfinished) and os.path.isfile(os.path.join(address.where, name, _CONFIGURATION))
        ]

    @classmethod
    def check_writable(cls, address: StoreAddress, mode: WriteMode) -> None:
        """Raise if the folder can't be written, if the collection exists and must not, or if a run replaces it."""
        if reason := why_not_writable(address.where):
            raise StoreError(f"{address} can't be written: {reason}", fix="choose another folder, or make it writable")
        may_create = replace(mode, create=True)  # Another pipeline may still create it.
        may_create.check(address, os.path.isdir(os.path.join(address.where, address.collection)))
        if mode.if_exists != "append" and (owner := cls(address).run_that_writes()):
            raise StoreError(
                f"{address}: {owner.describe()} is writing it right now", fix="wait until that run has ended"
            )

    @classmethod
    def staging_place(cls, address: StoreAddress) -> str:
        """Return the path of the collection in the folder."""
        return os.path.join(address.where, address.collection)

    @classmethod
    def writer(cls, address: StoreAddress, columns: PointColumns, mode: WriteMode, run: str) -> StagedWriter:
        """Return what writes staged rows to the folder."""
        return _FolderWriter(address, columns, mode, run)

    def ensure(self, sizes: Mapping[str, int], distance: Distance, create: bool) -> None:
        """Create the collection's folder under the lock if it is missing, and check its vectors."""
        WriteMode(distance, create).check(self._address, self.vectors() is not None)
        self._make_folder()
        with self._folder.writing(), self._folder.locked():
            if not self._folder.exists:
                self._create(self._folder.unfinished, sizes, distance)
                os.rename(self._folder.unfinished, self._folder.path)
            check_vectors(self._address, self._vectors(), sizes, distance)

    def publish(self, writes: Iterable[Write], sizes: Mapping[str, int], mode: WriteMode, run: str = "") -> None:
        """Make all writes visible at once. An error leaves the collection as it was.

        The writes go to a copy of the collection, or to a new one, which then takes the place of the old one. Other
        runs that write wait for the end of this; readers wait only while files are copied and while they are swapped.

        ``run`` names a run with a checkpoint, which may repeat the call after a restart: if the collection has its
        mark, nothing is written.
        """
        self._make_folder()
        with self._folder.writing(), contextlib.ExitStack() as at_end:
            self._folder.remove_unfinished()  # of a run that was killed
            at_end.callback(self._folder.remove_unfinished)
            with self._folder.locked():
                if self._has_mark(run):
                    collections.deque(writes, maxlen=0)  # The caller counts them.
                    return
                there = self._vectors() if self._folder.exists else None
                mode.check(self._address, there is not None)
                if there is not None:
                    self._load().close()  # Waits for other programs, which would not notice a swap.
                if there is not None and mode.if_exists == "append":
                    check_vectors(self._address, there, sizes, mode.distance)
                    copy_folder(self._folder.path, self._folder.unfinished)
            if not os.path.isdir(self._folder.unfinished):
                self._create(self._folder.unfinished, sizes, mode.distance)
            self._write_all(self._folder.unfinished, writes)
            if run:
                with open(os.path.join(self._folder.unfinished, _MARK), "w") as file:
                    file.write(run)
            with self._folder.locked():
                self._swap()

    def is_published_by(self, run: str) -> bool:
        """Return whether the collection is what the last call of ``publish`` for this run has left, or others since."""
        if not os.path.isdir(self._address.where):
            return False
        with self._folder.locked():
            return self._has_mark(run)

    def run_that_writes(self) -> RunOwner | None:
        """Return the process that writes the collection at this moment, if there is one."""
        pid = self._folder.writer()
        return None if pid is None else RunOwner.of(pid)

    def vectors(self) -> dict[str, tuple[int, str]] | None:
        """Read the vectors from the folder's configuration."""
        if not os.path.isdir(self._address.where):
            return None
        with self._folder.locked():
            return self._vectors() if self._folder.exists else None

    def write(self, points: Sequence[Point], deleted: Sequence[PointId]) -> None:
        """Upsert and delete points in the folder, and flush them to disk. Waits while another worker has the folder."""
        if not points and self.vectors() is None:
            return
        self._make_folder()
        with self._folder.writing(), self._opened() as shard:
            self._update(shard, points, deleted)
            shard.flush()

    def write_together(self, writes: Iterable[Write]) -> None:
        """Apply all writes while the folder is locked: readers, which wait for the lock, see all of them or none.

        A worker that is killed leaves a part of them, until the writes are repeated.
        """
        self._make_folder()
        with self._folder.writing(), self._opened() as shard:
            for points, deleted in writes:
                self._update(shard, points, deleted)
            shard.flush()

    def count(self) -> int:
        """Open the folder and count its points."""
        with self._opened() as shard:
            return shard.count(self._engine.CountRequest())

    def search(self, vectors: Sequence[Sequence[float]], query: Query) -> list[list[Hit]]:
        """Open the folder once, and return the nearest points of each vector."""
        engine = self._engine
        requests = [
            engine.QueryRequest(
                limit=query.limit,
                query=engine.Query.Nearest(list(vector), using=query.using),
                with_payload=list(query.payload) or None,
                filter=self._filter(query.equal),
                score_threshold=query.score_threshold,
            )
            for vector in vectors
        ]
        with self._opened() as shard:
            answers = shard.query_batch(engine.QueryBatchRequest(requests))
        return [[Hit(_plain(found.id), found.score, found.payload or {}) for found in answer] for answer in answers]

    def sample(self, limit: int, field: str | None = None) -> list[Hit]:
        """Open the folder, and return its first points."""
        engine = self._engine
        has_value = None if field is None else engine.Filter(must_not=[engine.IsEmptyCondition(field)])
        request = engine.ScrollRequest(limit=limit, filter=has_value, with_payload=True)
        with self._opened() as shard:
            found, _ = shard.scroll(request)
        return [Hit(_plain(point.id), 0.0, point.payload or {}) for point in found]

    def all_points(self) -> Iterator[Point]:
        """Open the folder, and yield all its points with their vectors, in the order of their ids."""
        engine = self._engine
        offset: Any = None
        with self._opened() as shard:
            while True:
                request = engine.ScrollRequest(offset=offset, limit=_PAGE_POINTS, with_payload=True, with_vector=True)
                found, offset = shard.scroll(request)
                for point in found:
                    vectors = point.vector if isinstance(point.vector, Mapping) else {"": point.vector}
                    named = {name: list(each) for name, each in vectors.items() if each is not None}
                    yield Point(_plain(point.id), named, dict(point.payload or {}))
                if offset is None:
                    return

    def close(self) -> None:
        """Do nothing: the folder is not open between calls."""

    def _has_mark(self, run: str) -> bool:
        with contextlib.suppress(FileNotFoundError), open(os.path.join(self._folder.path, _MARK)) as file:
            return bool(run) and file.read() == run
        return False

    def _make_folder(self) -> None:
        try:
            os.makedirs(self._address.where, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{self._address} can't be created: {error}") from error

    def _swap(self) -> None:
        if self._folder.exists:
            self._load().close()  # Waits for other programs, which would not notice a swap.
        self._folder.swap()

    def _write_all(self, folder: str, writes: Iterable[Write]) -> None:
        with self._engine_errors():
            shard = self._engine.EdgeShard.load(folder)
            try:
                for points, deleted in writes:
                    self._update(shard, points, deleted)
                shard.flush()
            finally:
                shard.close()

    def _update(self, shard: Any, points: Sequence[Point], deleted: Sequence[PointId]) -> None:
        operation = self._engine.UpdateOperation
        if points:
            shard.update(operation.upsert_points([self._point(point) for point in points]))
        if deleted:
            shard.update(operation.delete_points(list(deleted)))

    def _create(self, folder: str, sizes: Mapping[str, int], distance: Distance) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        engine = self._engine
        metric = getattr(engine.Distance, distance.capitalize())
        config = engine.EdgeConfig(
            vectors={name: engine.EdgeVectorParams(size, metric) for name, size in sizes.items()}
        )
        with self._engine_errors():
            engine.EdgeShard.create(folder, config).close()

    def _vectors(self) -> dict[str, tuple[int, str]]:
        with open(os.path.join(self._folder.path, _CONFIGURATION)) as file:
            vectors: dict[str, dict[str, Any]] = json.load(file)["vectors"]
        return {name: (vector["size"], vector["distance"].lower()) for name, vector in vectors.items()}

    @contextlib.contextmanager
    def _opened(self) -> Generator[Any]:
        if not os.path.isdir(self._address.where):
            raise missing(self._address)
        with self._folder.locked(), self._engine_errors():
            if not self._folder.exists:
                raise missing(self._address)
            shard = self._load()
            try:
                yield shard
            finally:
                shard.close()

    def _load(self) -> Any:
        """Open the folder. A program that does not use the lock may have it open: wait for it then."""
        give_up_at = time.monotonic() + self._address.timeout
        while True:
            try:
                return self._engine.EdgeShard.load(self._folder.path)
            except Exception as error:
                if "WouldBlock" not in str(error):
                    raise
                if time.monotonic() > give_up_at:
                    raise StoreError(
                        f"{self._address} was open in another program for {self._address.timeout:.3g} s, and only one "
                        "may have it open",
                        fix="close the EdgeShard there, or write to a server",
                        may_pass=True,
                    ) from None
            time.sleep(_POLL_S)

    @contextlib.contextmanager
    def _engine_errors(self) -> Generator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(f"{self._address}: {error}", may_pass=may_pass(error)) from error

    def _point(self, point: Point) -> Any:
        return self._engine.Point(point.id, dict(point.vectors), dict(point.payload))

    def _filter(self, equal: Mapping[str, Any]) -> Any:
        if not equal:
            return None
        return self._engine.Filter(must=[self._condition(key, value) for key, value in equal.items()])

    def _condition(self, key: str, value: Any) -> Any:
        engine = self._engine
        if any(isinstance(each, bool) for each in (value if isinstance(value, list) else [value])):
            # The engine takes True as the number 1, and would find nothing.
            raise StoreError(
                f"found the filter {key}={value}, but Qdrant's engine compares no booleans in a folder",
                fix="write the column as numbers or texts, or use a server",
            )
        if isinstance(value, Mapping):
            return engine.FieldCondition(key, range=engine.RangeFloat(**value))
        return engine.FieldCondition(
            key, engine.MatchAny(value) if isinstance(value, list) else engine.MatchValue(value)
        )


def _plain(identity: Any) -> PointId:
    return identity if isinstance(identity, int) else str(identity)


@dataclass(frozen=True)
class _FolderWriter(StagedWriter):
    """Writes all rows in one step, since only one process at a time may have the folder open anyway.

    The output is the number of rows of each write.
    """

    address: StoreAddress
    columns: PointColumns
    mode: WriteMode
    run: str  # the mark that a run with a checkpoint leaves in the collection that it publishes

    def check(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Check all rows as writing them would."""
        self.columns.changes(batch)
        return batch

    def commit(self, staged: Sequence[Staged], folder: str) -> list[int]:
        """Publish all rows at once."""
        rows = StagedRows.with_rows(staged)
        facts = facts_of(rows.batches(), self.columns)
        self.mode.check_rows(self.address, facts.rows)
        store = EmbeddedCollection(self.address)
        there = store.vectors()
        if not store.is_published_by(self.run):  # Otherwise the step is repeated after a restart.
            self.mode.check(self.address, there is not None)
        if not facts.points and self.mode.if_exists != "replace" and (there is None or not facts.rows):
            return [facts.rows] if facts.rows else []
        counts: list[int] = []
        writes = self._writes(rows, (), set(), counts)
        store.publish(writes, facts.sizes_for(there, self.columns), self.mode, self.run)
        return counts

    def commit_pane(
        self, staged: Sequence[Staged], newer: Collection[Hashable], folder: str
    ) -> tuple[list[int], Collection[Hashable], list[str]]:
        """Write all rows of the pane while the folder is locked."""
        keys, counts = set[Hashable](), list[int]()
        rows, store = StagedRows.with_rows(staged), EmbeddedCollection(self.address)
        if rows.paths:
            facts, there = facts_of(rows.batches(), self.columns), store.vectors()
            if facts.points:
                store.ensure(facts.sizes_for(there, self.columns), self.mode.distance, self.mode.create)
            if facts.points or there is not None:
                store.write_together(self._writes(rows, newer, keys, counts))
            else:
                counts.append(facts.rows)  # There is nothing to delete from.
        return counts, keys, []

    def _writes(
        self, rows: StagedRows, newer: Collection[Hashable], keys: set[Hashable], counts: list[int]
    ) -> Iterator[Write]:
        return counted_writes(rows.batches(), self.columns, self.address.batch_size, newer, keys, counts)
