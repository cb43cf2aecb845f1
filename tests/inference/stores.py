"""Stores for models that Beam knows by a scheme, kept in a local folder; and processes that fetch from them."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

from apache_beam.io.filesystem import BeamIOError, CompressionTypes, FileMetadata, FileSystem

from luminosity.inference.files.local import local_copy, use_cache
from luminosity.inference.options import ModelCacheConfig

ROOT = "TEST_STORE_ROOT"
PAUSE = "TEST_STORE_PAUSE_S"
_PIECE = 1000


def opened() -> list[str]:
    """The addresses that were opened so far, by all processes."""
    log = Path(os.environ[ROOT], "opened")
    return log.read_text().splitlines() if log.exists() else []


def wait_for_tick(folder: Path) -> None:
    """Wait until files get a later time than those written before: their clock moves only every few milliseconds."""
    mark = folder / "tick"
    mark.touch()
    before = mark.stat().st_mtime_ns
    while mark.stat().st_mtime_ns == before:
        mark.touch()


class _Slow(io.FileIO):
    """Gives little at a time, and takes its time for it."""

    def read(self, size: int | None = -1) -> bytes:
        time.sleep(float(os.environ[PAUSE]))
        return super().read(_PIECE) or b""


class TestStore(FileSystem):
    """An object store: names with slashes, and no folders."""

    __test__ = False

    @classmethod
    def scheme(cls) -> str:
        return "teststore"

    def has_dirs(self) -> bool:
        return False

    def _list(self, dir_or_prefix: str) -> Iterator[FileMetadata]:
        root = Path(os.environ[ROOT])
        for path in sorted(root.rglob("*")):
            address = f"{self.scheme()}://{path.relative_to(root)}"
            if path.is_file() and address.startswith(dir_or_prefix):
                yield self.metadata(address)

    def open(self, path: str, mime_type: str = "", compression_type: str = CompressionTypes.AUTO) -> BinaryIO:
        with open(Path(os.environ[ROOT], "opened"), "a") as log:
            log.write(f"{path}\n")
        compression = self._get_compression_type(path, compression_type)
        assert compression == CompressionTypes.UNCOMPRESSED, f"{path} would be unpacked"
        return _Slow(self._local(path)) if os.environ.get(PAUSE) else io.FileIO(self._local(path))  # type: ignore[return-value]

    def exists(self, path: str) -> bool:
        return self._local(path).is_file()

    def metadata(self, path: str) -> FileMetadata:
        status = self._local(path).stat()
        return FileMetadata(path, 0 if self._local(path).is_dir() else status.st_size, status.st_mtime)

    def _local(self, path: str) -> Path:
        return Path(os.environ[ROOT], path.removeprefix(f"{self.scheme()}://"))

    def _not_needed(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("matching and opening is all that a model needs")

    create = delete = rename = copy = mkdirs = join = split = size = last_updated = checksum = _not_needed


class FolderStore(TestStore):
    """Folders as HDFS has them: listings show one level, folders have no size, and a file can't be listed."""

    @classmethod
    def scheme(cls) -> str:
        return "folderstore"

    def has_dirs(self) -> bool:
        return True

    def exists(self, path: str) -> bool:
        return self._local(path).exists()

    def _list(self, dir_or_prefix: str) -> Iterator[FileMetadata]:
        if not self._local(dir_or_prefix).is_dir():
            raise BeamIOError("List operation failed", {dir_or_prefix: "not a folder"})
        for name in sorted(os.listdir(self._local(dir_or_prefix))):
            yield self.metadata(f"{dir_or_prefix.rstrip('/')}/{name}")


class Fetcher:
    """Another process, which fetches what it is told to."""

    def __init__(self, config: ModelCacheConfig) -> None:
        self._connection, theirs = get_context("spawn").Pipe()
        self.process = get_context("spawn").Process(target=_serve, args=(theirs, config), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, address: str) -> None:
        self._connection.send(address)

    def result(self) -> Any:
        assert self._connection.poll(120), "the process does not answer"
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def fetch(self, address: str) -> str:
        self.start(address)
        return self.result()

    def end(self) -> None:
        self._connection.close()
        self.process.join(30)


@contextmanager
def fetchers(count: int, config: ModelCacheConfig) -> Iterator[list[Fetcher]]:
    started = [Fetcher(config) for _ in range(count)]
    try:
        for fetcher in started:
            assert fetcher.result() == "ready"
        yield started
    finally:
        for fetcher in started:
            fetcher.end()


def _serve(connection: Connection, config: ModelCacheConfig) -> None:
    use_cache(config)
    connection.send("ready")
    while True:
        try:
            address = connection.recv()
        except EOFError:
            return
        try:
            connection.send(local_copy(address))
        except Exception as error:
            connection.send(error)
