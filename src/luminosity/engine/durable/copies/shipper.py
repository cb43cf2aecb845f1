"""Ships what a run writes to its checkpoint folder to the copy, segment by segment, on a thread of its own."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from luminosity.engine.data.world import World
from luminosity.engine.durable.copies.bases import parts_of, reader
from luminosity.engine.durable.copies.lease import Lease
from luminosity.engine.durable.copies.objects import (
    LEASE,
    Changes,
    CopiedFile,
    Manifest,
    Writer,
    encode,
)
from luminosity.engine.durable.copies.places import Place
from luminosity.engine.durable.place import SPOOL
from luminosity.engine.durable.store import CheckpointFolder, Transaction
from luminosity.engine.durable.tables import VERSION
from luminosity.errors import CheckpointFailed, CopyError
from luminosity.runs import run_ids

__all__ = ["Shipper"]

_LOGGER = logging.getLogger(__name__)

_SHIP_S = 1.0  # between two segments: each is a request that places of the cloud charge for
_LARGEST_SHARE = 0.1  # of a core: libraries of the cloud compute for each request, beside the loop
_LONGEST_REST_S = 5.0  # after something that took much of it, such as a base: the lag grows meanwhile
_LONGEST_PAUSE_S = 30.0  # between two attempts while the place does not answer
_PENDING_BYTES = 64 << 20  # of changes that wait; beyond it, a new base takes their place
_MOST_SEGMENTS = 1_000  # since a base: a restore reads them one by one
_LEAST_BYTES = 32 << 20  # of segments and files since a base; a new base costs as much as the state
_PIECE_BYTES = 1 << 20  # of a file, read at once


class Shipper:
    """Writes the copy. :meth:`add` is called on the writer's thread, all else by the owner."""

    def __init__(
        self,
        place: Place,
        lease: Lease,
        folder: CheckpointFolder,
        folder_id: str,
        world: World,
        on_shipped: Callable[[str, str], None],
    ) -> None:
        """Ship what is written to ``folder`` from now on, after a base with all that is there.

        ``on_shipped`` is called on the shipper's thread with the time of the checkpoint that the copy has, if it is
        another than before, and with what went wrong.
        """
        self._place = place
        self._lease = lease
        self._folder = folder
        self._folder_id = folder_id
        self._on_shipped = on_shipped
        self._monotonic = world.clock.monotonic
        self._thread_time = world.clock.thread_time
        self._spool = os.path.join(folder.path, SPOOL)
        self._changed = threading.Condition()
        self._pending = Changes()
        self._waits_since: float | None = self._monotonic()  # since when something is not in the copy
        self._shipping_since: float | None = None  # the same for what is being shipped
        self._needs_base = True
        self._is_closed = self._is_urgent = self._has_ended = False
        self.error = ""  # why the last attempt failed
        # The shipper's thread alone uses what follows.
        self._batch = Changes()  # taken from what waits, and not shipped yet
        self._base = self._number = 0
        self._before = ""  # the digest of the last object
        self._live: dict[int | bytes, str] = {}  # files that the copy refers to
        self._used: set[str] = set()  # files that the base or a segment since refers to
        self._missing: set[str] = set()  # files of the base that were removed before they were copied
        self._copied: dict[str, CopiedFile] = {}
        self._base_bytes = self._segment_bytes = 0
        shutil.rmtree(self._spool, ignore_errors=True)
        folder.on_write = self.add
        self._thread = world.start_thread(self._run, "luminosity-copy")

    def add(self, changes: Transaction) -> None:
        """Take what was just written to the folder. Does not wait for the copy."""
        with self._changed:
            if self._waits_since is None:
                self._waits_since = self._monotonic()
            if self._needs_base:
                return
            self._pending.add(changes)
            if self._pending.size + self._batch.size > _PENDING_BYTES:
                self._needs_base, self._pending = True, Changes()
            self._changed.notify_all()

    def lag_s(self) -> float:
        """Return for how long there has been something that the copy lacks."""
        with self._changed:  # Between two looks, what waits could become what is being shipped.
            since = self._shipping_since if self._shipping_since is not None else self._waits_since
        return max(0.0, self._monotonic() - since) if since is not None else 0.0

    def finish(self, seconds: float) -> bool:
        """Wait until the copy has everything, but not longer than ``seconds``; return whether it has."""
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._has_ended or not self._has_work(), seconds)
            self._is_urgent = False
            return not self._has_work()

    def close(self, seconds: float) -> None:
        """End the thread. What is not shipped yet is not shipped."""
        self._folder.on_write = None
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(seconds)
        shutil.rmtree(self._spool, ignore_errors=True)

    def _has_work(self) -> bool:
        return self._waits_since is not None or self._shipping_since is not None

    def _run(self) -> None:
        next_at, failures = 0.0, 0
        while True:
            with self._changed:
                while not self._is_closed:
                    pause = next_at - self._monotonic()
                    if self._has_work() and (pause <= 0 or (self._is_urgent and not failures)):
                        break
                    self._changed.wait(max(0.01, pause) if self._has_work() else None)
                if self._is_closed:
                    return
            try:
                self._lease.check()
                before = self._thread_time()
                self._ship()
                if failures:
                    _LOGGER.warning("the copy in %s is written again", self._place.address)
                failures, self.error = 0, ""
                took = self._thread_time() - before
                next_at = self._monotonic() + min(max(_SHIP_S, took / _LARGEST_SHARE), _LONGEST_REST_S)
            except CheckpointFailed:
                with self._changed:
                    self._has_ended = True  # The loop ends the run, for the same reason.
                    self._changed.notify_all()
                return
            except Exception as error:  # of the place, of the disk: the run goes on without the copy
                if not failures:
                    is_known = isinstance(error, CopyError | OSError)
                    _LOGGER.warning("the copy can't be written, the run goes on: %s", error, exc_info=not is_known)
                failures, self.error = failures + 1, str(error)
                self._on_shipped("", self.error)
                next_at = self._monotonic() + min(_LONGEST_PAUSE_S, _SHIP_S * 2.0 ** min(failures, 8))

    def _ship(self) -> None:
        if self._needs_base or self._number >= _MOST_SEGMENTS or self._is_base_due():
            try:
                self._write_base()
            except BaseException:
                with self._changed:
                    self._needs_base = True
                raise
        if self._write_segment():
            with self._changed:
                self._shipping_since, self.error = None, ""  # together: `finish` returns when nothing is being shipped
                self._changed.notify_all()

    def _is_base_due(self) -> bool:
        return self._segment_bytes > max(_LEAST_BYTES, self._base_bytes)

    def _take(self) -> bool:
        """Move what waits into the batch; return whether there was something."""
        with self._changed:
            taken, self._pending = self._pending, Changes()
            if self._shipping_since is None:
                self._shipping_since = self._waits_since
            if not self._needs_base:
                self._waits_since = None
            self._batch.add(taken)
            return not taken.is_empty

    def _write_base(self) -> None:
        with self._folder.turn:  # Nothing is written between the start of the transaction and that of the next segment.
            rows = reader(self._folder.path)
            with self._changed:
                self._batch, self._pending, self._needs_base = Changes(), Changes(), False
                if self._shipping_since is None:
                    self._shipping_since = self._waits_since
                self._waits_since = None
        os.makedirs(self._spool, mode=0o700, exist_ok=True)
        try:
            live: dict[int | bytes, str] = {}
            spooled: list[str] = []
            meta: dict[str, str] = {}
            with contextlib.closing(rows):
                # To the disk first: while the transaction lasts, the log of the database grows.
                for part in parts_of(self._folder.path, rows):
                    live.update(part.new_paths())
                    meta.update(part.meta)
                    name = self._lease.writer.part(self._base + 1, len(spooled) + 1)
                    # The chain of digests does not go through parts: the manifest's number of them is enough.
                    data, _ = encode(name, "", part)
                    Path(self._spool, name).write_bytes(data)
                    spooled.append(name)
            self._base, self._number = self._base + 1, 0
            self._missing = self._copy_files(set(live.values()))
            self._live, self._used = live, set(live.values())
            self._base_bytes = sum(self._copied[path].size for path in self._used - self._missing)
            self._segment_bytes = 0
            for name in spooled:
                path = os.path.join(self._spool, name)
                self._base_bytes += os.path.getsize(path)
                self._place.write(name, _file_pieces(path))
                os.unlink(path)
            files = Changes(files={path: self._copied[path] for path in self._used - self._missing})
            name = self._lease.writer.part(self._base, len(spooled) + 1)
            data, self._before = encode(name, "", files)
            self._place.write(name, [data])
        finally:
            shutil.rmtree(self._spool, ignore_errors=True)
        if self._missing and not self._write_segment():
            raise CopyError("more has changed while a base was written than fits into memory")
        self._publish(len(spooled) + 1, meta)

    def _publish(self, parts: int, meta: dict[str, str]) -> None:
        """Let the base be the one that a restore reads, and remove what no restore needs any more."""
        writer = self._lease.writer
        name = writer.manifest(self._base)
        run = meta.get(run_ids.META_KEY, "")
        manifest = Manifest(VERSION, self._folder_id, run, self._base, parts, self._number)
        self._lease.check()
        self._place.write(name, [manifest.pack(name)])
        self._lease.wrote(name)
        if not self._number:
            self._on_shipped(meta.get("saved_at", ""), "")
        kept = {name, LEASE, *(writer.part(self._base, part + 1) for part in range(parts))}
        kept |= {writer.segment(self._base, number + 1) for number in range(self._number)}
        kept |= {writer.file(path) for path in self._used}
        found = {each for each in self._place.names() if _is_before(each, writer)}
        self._copied = {path: file for path, file in self._copied.items() if path in self._used}
        self._lease.check()
        self._place.remove(found - kept)

    def _write_segment(self) -> bool:
        """Write what waits; return whether that was possible: if not, only a new base helps."""
        self._take()
        while True:
            batch = self._batch
            if batch.is_empty and not self._missing:
                return True
            added = batch.new_paths()
            gone = self._copy_files(set(added.values()))
            live = dict(self._live) if self._missing else self._live
            if self._missing:
                batch.apply_to(live)
                gone |= self._missing & set(live.values())
            if not gone:
                break
            # Files go once a later transaction has dropped them, which is among those that wait by then.
            if not self._take():
                with self._changed:
                    self._needs_base = True
                return False
        self._missing = set()
        name = self._lease.writer.segment(self._base, self._number + 1)
        batch.files = {path: self._copied[path] for path in added.values()}
        data, digest = encode(name, self._before, batch)
        self._lease.check()
        self._place.write(name, [data])
        self._number += 1
        self._before = digest
        batch.apply_to(self._live)
        self._used.update(batch.files)
        self._segment_bytes += len(data) + sum(file.size for file in batch.files.values())
        self._batch = Changes()
        self._lease.wrote(name)
        self._on_shipped(batch.meta.get("saved_at", ""), "")
        return True

    def _copy_files(self, paths: set[str]) -> set[str]:
        """Copy files of blocks that the copy lacks; return those that are gone."""
        gone: set[str] = set()
        for path in sorted(paths - self._copied.keys()):
            name, digest, sizes = self._lease.writer.file(path), hashlib.sha256(), list[int]()
            try:
                file = open(os.path.join(self._folder.path, path), "rb", buffering=0)  # noqa: SIM115  # closed below
            except FileNotFoundError:
                gone.add(path)
                continue
            with file:  # The run may remove it meanwhile.
                self._place.write(name, _summed(file, digest, sizes))
            self._copied[path] = CopiedFile(name, sum(sizes), digest.hexdigest())
        return gone


def _summed(file: Any, digest: Any, sizes: list[int]) -> Iterator[bytes]:
    while piece := file.read(_PIECE_BYTES):
        digest.update(piece)
        sizes.append(len(piece))
        yield piece


def _file_pieces(path: str) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece


def _is_before(name: str, writer: Writer) -> bool:
    """Return whether an object was written by this start or one before it: those of a later one are not ours."""
    found = Writer.of_object(name)
    return found is not None and (found.epoch < writer.epoch or found == writer)
