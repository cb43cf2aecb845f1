"""Qdrant's engine in this process, with a collection in a folder.

Only one process at a time may have the folder open. So every call takes a lock, opens the folder, works, flushes and
closes the folder again, which takes some hundredths of a second: workers take turns, and a worker that is killed blocks
no other.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from luminosity._locks import locked
from luminosity.errors import Fix, StoreError, may_pass
from luminosity.extras import require
from luminosity.io.stores.points import Point, PointId
from luminosity.io.stores.qdrant_collection import (
    CollectionAddress,
    Distance,
    Hit,
    QdrantCollection,
    Query,
    check_vectors,
)

__all__ = ["EmbeddedCollection", "lock_file"]


_POLL_S = 0.05  # how late a folder that another program closes is noticed at most


class EmbeddedCollection(QdrantCollection):
    """A collection in a folder of this machine, which Qdrant's engine reads and writes in this process."""

    def __init__(self, address: CollectionAddress) -> None:
        self._engine = require("qdrant_edge", "qdrant")
        self._address = address
        self._folder = os.path.join(address.where, address.collection)

    def ensure(self, sizes: Mapping[str, int], distance: Distance, create: bool) -> None:
        """Create the collection's folder under the lock if it is missing, and check its vectors."""
        if not self._exists() and not create:
            raise StoreError(f"{self._address} does not exist, and create=False", fix=Fix("pass create=True"))
        try:
            os.makedirs(self._address.where, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{self._address} can't be created: {error}") from error
        with self._locked():
            if not self._exists():
                self._create(sizes, distance)
            check_vectors(self._address, self._vectors(), sizes, distance)

    def vectors(self) -> dict[str, tuple[int, str]] | None:
        """Read the vectors from the folder's configuration."""
        return self._vectors() if self._exists() else None

    def write(self, points: Sequence[Point], deleted: Sequence[PointId]) -> None:
        """Upsert and delete points in the folder, and flush them to disk. Waits while another worker has the folder."""
        if not points and not self._exists():
            return
        operation = self._engine.UpdateOperation
        with self._opened() as shard:
            if points:
                shard.update(operation.upsert_points([self._point(point) for point in points]))
            if deleted:
                shard.update(operation.delete_points(list(deleted)))
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

    def close(self) -> None:
        """Do nothing: the folder is not open between calls."""

    def _exists(self) -> bool:
        return os.path.isdir(self._folder)

    def _create(self, sizes: Mapping[str, int], distance: Distance) -> None:
        """Create the collection under another name first: a worker that is killed must not leave half of it."""
        unfinished = f"{self._folder}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        engine = self._engine
        metric = getattr(engine.Distance, distance.capitalize())
        config = engine.EdgeConfig(
            vectors={name: engine.EdgeVectorParams(size, metric) for name, size in sizes.items()}
        )
        with self._engine_errors():
            engine.EdgeShard.create(unfinished, config).close()
        os.rename(unfinished, self._folder)

    def _vectors(self) -> dict[str, tuple[int, str]]:
        with open(os.path.join(self._folder, "edge_config.json")) as file:
            vectors: dict[str, dict[str, Any]] = json.load(file)["vectors"]
        return {name: (vector["size"], vector["distance"].lower()) for name, vector in vectors.items()}

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        return lock_file(f"{self._folder}.lock", self._address.timeout)

    @contextlib.contextmanager
    def _opened(self) -> Generator[Any]:
        if not self._exists():
            raise StoreError(f"{self._address} does not exist", fix="check the folder, and that it was written before")
        with self._locked(), self._engine_errors():
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
                return self._engine.EdgeShard.load(self._folder)
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
        engine = self._engine
        return engine.Filter(
            must=[
                engine.FieldCondition(
                    key, engine.MatchAny(value) if isinstance(value, list) else engine.MatchValue(value)
                )
                for key, value in equal.items()
            ]
        )


def _plain(identity: Any) -> PointId:
    return identity if isinstance(identity, int) else str(identity)


@contextlib.contextmanager
def lock_file(path: str, timeout: float) -> Generator[None]:
    """Hold the lock of a file, between threads and processes; raise after waiting for ``timeout`` seconds."""
    with contextlib.ExitStack() as lock:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        lock.callback(os.close, descriptor)
        try:
            lock.enter_context(locked(descriptor, timeout))
        except TimeoutError:
            holder = os.pread(descriptor, 20, 0).decode(errors="replace") or "unknown"
            raise StoreError(
                f"waited {timeout:.3g} s for {path}, which process {holder} holds",
                fix=Fix(
                    "check whether that process is stuck; if it still writes, pass a longer timeout= or use a server",
                    command="check whether that process is stuck; if it still writes, use fewer workers or a server",
                ),
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
