"""Fetches a copy into a fresh checkpoint folder."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from luminosity._shared.text import format_bytes
from luminosity.engine.durable.copies.lease import LeaseNote
from luminosity.engine.durable.copies.objects import Changes, CopiedFile, Manifest, Writer, base_of, damaged, decode
from luminosity.engine.durable.copies.places import Place
from luminosity.engine.durable.store import CheckpointFolder
from luminosity.engine.durable.tables import VERSION
from luminosity.engine.spill.files import write_all
from luminosity.errors import CheckpointError

__all__ = ["Found", "fetch", "find"]

_THREADS = 4  # that read objects; each may hold one of some megabytes


@dataclass(frozen=True)
class Found:
    """The newest copy in a place."""

    writer: Writer
    manifest: Manifest
    segments: int  # since the base


def find(place: Place, lease: LeaseNote | None) -> Found | None:
    """Return the newest copy in a place; None if there is none. ``lease`` is the one that the place had.

    Raises :class:`CheckpointError` if a part of it is missing or damaged, or if another release has written it.
    """
    names = place.names()
    manifests = [
        (writer, name) for name in names if name.startswith("manifest-") and (writer := Writer.of_object(name))
    ]
    last = lease.last if lease is not None else ""
    if not manifests:
        if last:
            raise damaged(place.address, "the manifest", f"is missing, though {last} was written")
        return None
    newest = max(writer.epoch for writer, _ in manifests)
    ours = [each for each in manifests if each[0].epoch == newest]
    if lease is not None and any(writer == lease.writer for writer, _ in ours):
        ours = [each for each in ours if each[0] == lease.writer]
    writer, name = max(ours, key=lambda each: (each[0], len(each[1]), each[1]))
    manifest = Manifest.unpack(place.address, name, _read(place, name))
    if manifest.version != VERSION:
        raise CheckpointError(
            f"the copy in {place.address} has version {manifest.version}, and this release reads version {VERSION}",
            fix="restore it with the release that wrote it",
        )
    base = manifest.base
    last_writer = Writer.of_object(last)
    # A start that ended before it renewed its lease has left the last object of the start before.
    is_older = last_writer is None or last_writer.epoch < writer.epoch
    if not is_older and (last_writer != writer or base_of(last) > base):
        raise damaged(place.address, "the manifest", f"is missing, though {last} was written")
    for missing in {writer.part(base, part + 1) for part in range(manifest.parts)} - names:
        raise damaged(place.address, missing, "is missing")
    prefix = writer.segment(base, 0)[:-8]
    numbers = {int(each.removeprefix(prefix)) for each in names if each.startswith(prefix) and each[-8:].isdigit()}
    segments = max(numbers, default=0)
    wanted = max(segments, manifest.segments)
    if last.startswith(prefix):
        wanted = max(wanted, int(last.removeprefix(prefix)))
    for number in range(1, wanted + 1):
        if number not in numbers:
            raise damaged(place.address, writer.segment(base, number), "is missing")
    return Found(writer, manifest, segments)


def fetch(place: Place, found: Found, folder: CheckpointFolder) -> str:
    """Write a copy to a folder that has nothing else. Returns in words what was fetched.

    Raises :class:`CheckpointError` if an object is damaged, and :class:`CheckpointFailed` if the disk is full.
    """
    live: dict[int | bytes, str] = {}
    files: dict[str, CopiedFile] = {}
    size = 0
    for changes, fetched in _changes(place, found):
        changes.apply_to(live)
        files.update(changes.files)
        size += fetched
        folder.write(changes.transaction())
        if folder.must_sync:
            folder.sync()
    paths = sorted(set(live.values()))
    for path in paths:
        if path not in files:
            raise damaged(place.address, found.writer.file(path), "is named nowhere")
    with ThreadPoolExecutor(_THREADS, "luminosity-fetch") as threads:
        size += sum(threads.map(lambda path: _fetch_file(place, files[path], folder, path), paths))
    folder.sync(os.path.join(folder.path, path) for path in paths)
    return f"{format_bytes(size)}: a base, {found.segments} segments and {len(paths)} files"


def _changes(place: Place, found: Found) -> Iterator[tuple[Changes, int]]:
    writer, base = found.writer, found.manifest.base
    parts = [writer.part(base, part + 1) for part in range(found.manifest.parts)]
    segments = [writer.segment(base, number + 1) for number in range(found.segments)]
    before = ""
    for number, (name, data) in enumerate(_read_ahead(place, [*parts, *segments])):
        changes, before = decode(place.address, name, data, before if number >= len(parts) else "")
        yield changes, len(data)


def _read_ahead(place: Place, names: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield objects in their order. Some are read at the same time, since each takes several requests."""
    waiting: deque[tuple[str, Future[bytes]]] = deque()
    with ThreadPoolExecutor(_THREADS, "luminosity-fetch") as threads:
        for name in names:
            waiting.append((name, threads.submit(_read, place, name)))
            if len(waiting) > _THREADS:
                first, data = waiting.popleft()
                yield first, data.result()
        for name, data in waiting:
            yield name, data.result()


def _read(place: Place, name: str) -> bytes:
    pieces = place.read(name)
    if pieces is None:
        raise damaged(place.address, name, "is missing")
    return b"".join(pieces)


def _fetch_file(place: Place, file: CopiedFile, folder: CheckpointFolder, relative: str) -> int:
    path = os.path.join(folder.path, relative)
    pieces = place.read(file.object)
    if pieces is None:
        raise damaged(place.address, file.object, "is missing")
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb", buffering=0) as local:
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
            with folder.explain_errors():
                write_all(local.fileno(), piece)
    if (size, digest.hexdigest()) != (file.size, file.digest):
        raise damaged(place.address, file.object, "is not what was written")
    return size
