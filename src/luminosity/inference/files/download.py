"""Bringing a model's files over, several at a time."""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

from apache_beam.io.filesystem import CompressionTypes
from apache_beam.io.filesystems import FileSystems

from luminosity.errors import ModelUnavailable
from luminosity.inference.files.entry import CHUNK, FileRecord, fsync, model_path, write_manifest
from luminosity.inference.files.source import Source, SourceFile

__all__ = ["download"]

_FILES_AT_ONCE = 4  # large models come in parts, and one connection rarely fills the network


def download(source: Source, into: str) -> None:
    """Write the files and their manifest into an empty folder; all of it is on the disk then."""
    stop = threading.Event()
    errors: list[Exception] = []

    def fetch(file: SourceFile) -> FileRecord | None:
        try:
            return _fetch(file, into, stop)
        except Exception as error:
            errors.append(error)
            stop.set()
            return None

    with ThreadPoolExecutor(min(_FILES_AT_ONCE, len(source.files)), "fetch-model") as threads:
        try:
            records = [record for record in threads.map(fetch, source.files) if record is not None]
        finally:
            stop.set()  # where this thread is interrupted, the others need not go on
    if errors:
        raise errors[0]
    for folder, _, _ in os.walk(into):
        fsync(folder)
    write_manifest(into, source.address, records)


def _fetch(file: SourceFile, into: str, stop: threading.Event) -> FileRecord | None:
    path = model_path(into, file.relative)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    digest = hashlib.sha256()
    # Beam would else unpack a file whose name ends in .gz, and the copy would not be the model.
    as_it_is = CompressionTypes.UNCOMPRESSED
    with FileSystems.open(file.address, compression_type=as_it_is) as remote, open(path, "xb") as local:
        while chunk := remote.read(CHUNK):
            if stop.is_set():
                return None
            digest.update(chunk)
            local.write(chunk)
        local.flush()
        os.fsync(local.fileno())
    record = FileRecord.of(path, file.relative, digest.hexdigest())
    if record.size != file.size:
        raise ModelUnavailable(
            f"{file.address}: {record.size:,} bytes came, expected {file.size:,}; did it change while it was fetched?"
        )
    return record
