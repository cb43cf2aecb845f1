"""Staged rows: files that workers write and the last step reads. Files of failed bundles are never read."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.io.filesystems import FileSystems
from apache_beam.transforms.window import WindowedValue

from luminosity.core import TEMPORARY_FOLDER
from luminosity.errors import StoreError
from luminosity.io.run_owner import RunOwner, owner_in_name, owner_of
from luminosity.io.writing import filesystem
from luminosity.runs.run_ids import CheckpointedRun, RunIdentity, new_id

__all__ = ["StageDoFn", "Staged", "StagedFile", "StagedRows", "StagingFolder", "staging_folders"]

_STAGED = ".staged-"  # in the names of folders with the rows of a run
_MOST_WINDOWS = 20  # with open files at once: a bundle of old data may have rows of thousands of windows
Staged = tuple[str, int]
"""The path of a file and its number of rows."""


@dataclass(frozen=True)
class StagingFolder:
    """The folder in which a run stages rows. Its name tells which process, or which run with a checkpoint, owns it."""

    store: str  # the path of what the rows are written to, without a suffix
    identity: RunIdentity
    owner: str

    @classmethod
    def of(cls, store: str, identity: RunIdentity) -> StagingFolder:
        """Return the folder beside a store. Call it when the pipeline is built."""
        is_local = FileSystems.get_scheme(store) is None
        owner = str(owner_of(identity))
        if identity.is_durable:
            owner += f"-{identity.number(store)}"
        return cls(os.path.abspath(store) if is_local else store, identity, owner)

    def annotations(self) -> dict[str, bytes]:
        """Return the annotations of a step, so that a run with a checkpoint removes the folder at its end."""
        return {TEMPORARY_FOLDER: self._path("").encode()} if self.identity.is_durable else {}

    def make(self) -> str:
        """Make the folder, remove those that killed runs left, and return its path. Runs when the pipeline starts.

        The folder is new for each run of the pipeline, unless the run has a checkpoint: then it is always the same.
        """
        folder = self._path("" if self.identity.is_durable else f"-{new_id()}")
        if FileSystems.get_scheme(folder) is None:
            for left, other in staging_folders(self.store):
                if other.is_alive(left) is False:
                    shutil.rmtree(left, ignore_errors=True)
            os.makedirs(folder, exist_ok=True)
            if self.identity.run is not None:
                self.identity.run.mark(folder, self.identity.checkpoint_dir)
        return folder

    def _path(self, suffix: str) -> str:
        return f"{self.store}{_STAGED}{self.owner}{suffix}"


def staging_folders(store: str) -> list[tuple[str, RunOwner | CheckpointedRun]]:
    """Return the folders beside a store of this machine in which runs stage its rows, with their owners."""
    folder, name = os.path.split(store)
    try:
        names = [found for found in os.listdir(folder or ".") if found.startswith(f"{name}{_STAGED}")]
    except FileNotFoundError:
        return []
    return [(os.path.join(folder, each), owner) for each in names if (owner := owner_in_name(each)) is not None]


class StagedFile:
    """An Arrow file in a folder. It is created with its first batch."""

    def __init__(self, folder: str) -> None:
        self.path = FileSystems.join(folder, f"{uuid.uuid4().hex}.arrow")
        self.rows = 0
        self._folder = folder
        self._schema: Any = None
        self._sink: Any = None
        self._writer: Any = None

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows; raise if their columns differ from those before."""
        if self._writer is None:
            if not FileSystems.exists(self._folder):
                _make(self._folder)
            self._sink = FileSystems.create(self.path, "application/octet-stream")
            self._schema = batch.schema
            self._writer = pa.ipc.new_stream(self._sink, batch.schema)
        if not batch.schema.equals(self._schema):
            raise _differs(self._schema, batch.schema)
        self._writer.write_batch(batch)
        self.rows += batch.num_rows

    def close(self) -> None:
        """Finish the file."""
        if self._writer is not None:
            self._writer.close()
            self._sink.close()
            self._writer = None
            if CheckpointedRun.in_name(self._folder):  # The checkpoint says soon that the rows are written.
                filesystem.sync(self.path, self._folder)


class StageDoFn(beam.DoFn):
    """Writes the rows of each window to files of a folder, which is a side input, and emits these in their window."""

    def __init__(self, prepare: Callable[[pa.RecordBatch], pa.RecordBatch], rows_per_file: int) -> None:
        """``prepare`` checks a batch, and returns the rows to write."""
        self._prepare = prepare
        self._rows_per_file = rows_per_file

    def start_bundle(self) -> None:
        """Start without files. Those of a failed bundle are never read."""
        self._files: dict[Any, StagedFile] = {}

    def process(
        self, batch: pa.RecordBatch, folder: str, in_window: Any = beam.DoFn.WindowParam
    ) -> Iterator[WindowedValue]:
        """Write the rows of a batch, and emit files that are large enough."""
        file = self._files.setdefault(in_window, StagedFile(folder))
        file.write(self._prepare(batch))
        if file.rows >= self._rows_per_file:
            yield self._finished(in_window)
        elif len(self._files) > _MOST_WINDOWS:
            yield self._finished(next(iter(self._files)))

    def finish_bundle(self) -> Iterator[WindowedValue]:  # type: ignore[override]  # Beam declares None, and accepts these.
        """Emit the other files."""
        for in_window in list(self._files):
            yield self._finished(in_window)

    def _finished(self, in_window: Any) -> WindowedValue:
        file = self._files.pop(in_window)
        file.close()
        return WindowedValue((file.path, file.rows), in_window.max_timestamp(), (in_window,))


class StagedRows:
    """The rows of several files, read one batch at a time."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = sorted(paths)
        self.schema = self._common_schema()

    def batches(self, *paths: str) -> Iterator[pa.RecordBatch]:
        """Yield the batches of these files, or of all."""
        for path in paths or self.paths:
            with FileSystems.open(path, "application/octet-stream") as file, pa.ipc.open_stream(file) as reader:
                yield from reader

    def reader(self, *paths: str) -> Any:
        """Return a ``pyarrow.RecordBatchReader`` of these files, or of all."""
        return pa.RecordBatchReader.from_batches(self.schema, self.batches(*paths))

    def _common_schema(self) -> Any:
        common: Any = None
        for path in self.paths:
            with FileSystems.open(path, "application/octet-stream") as file, pa.ipc.open_stream(file) as reader:
                common = reader.schema if common is None else common
                if not reader.schema.equals(common):
                    raise _differs(common, reader.schema)
        return common


def _make(folder: str) -> None:
    try:
        FileSystems.mkdirs(folder)
    except OSError:
        if not FileSystems.exists(folder):  # Otherwise another worker was first.
            raise


def _differs(one: Any, other: Any) -> StoreError:
    return StoreError(f"found rows with the columns\n{one}\nand others with\n{other}\nexpected the same for all")
