"""Writes rows to a store that one process at a time may write: workers stage rows in files, and one step commits them.

Files of failed bundles are never read.
"""

from __future__ import annotations

import functools
import os
import shutil
import uuid
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.io.filesystem import BeamIOError
from apache_beam.io.filesystems import FileSystems
from apache_beam.pvalue import AsList, AsSingleton
from apache_beam.transforms.window import GlobalWindows, WindowedValue

from luminosity.core import TEMPORARY_FOLDER
from luminosity.errors import StoreError
from luminosity.io.run_owner import RunOwner, owner_in_name, owner_of
from luminosity.io.stores.store import Staged, StagedWriter
from luminosity.io.writing import filesystem
from luminosity.io.writing.pane_steps import CommitPanes, PaneCommitter, PaneOfElement, RemoveDropped
from luminosity.io.writing.window_files import GroupByPane
from luminosity.runs.run_ids import CheckpointedRun, RunIdentity, new_id

__all__ = ["StagedFile", "StagedRows", "StagingFolder", "remove_staged", "staging_folders", "write_staged"]

_STAGED = ".staged-"  # in the names of folders with the rows of a run
_ROWS_PER_FILE = 100_000  # about: a file is read at once if its rows are merged
_MOST_FILES = 20  # open at once: a bundle of old data may have rows of thousands of windows


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
        self._sink: Any = None
        self._writer: Any = None

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows. All have the columns of the first."""
        if self._writer is None:
            if not FileSystems.exists(self._folder):
                _make(self._folder)
            self._sink = FileSystems.create(self.path, "application/octet-stream")
            self._writer = pa.ipc.new_stream(self._sink, batch.schema)
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


class _Stage(beam.DoFn):
    """Writes the rows of each window to files of a folder, which is a side input, and emits these in their window."""

    def __init__(self, writer: StagedWriter, rows_per_file: int) -> None:
        self._writer = writer
        self._rows_per_file = rows_per_file

    def start_bundle(self) -> None:
        """Start without files. Those of a failed bundle are never read."""
        self._files: dict[Any, StagedFile] = {}  # by window and schema

    def process(
        self, batch: pa.RecordBatch, folder: str, in_window: Any = beam.DoFn.WindowParam
    ) -> Iterator[WindowedValue]:
        """Write the rows of a batch, and emit files that are large enough."""
        rows = self._writer.check(batch)
        key = in_window, rows.schema
        file = self._files.setdefault(key, StagedFile(folder))
        file.write(rows)
        if file.rows >= self._rows_per_file:
            yield self._finished(key)
        elif len(self._files) > _MOST_FILES:
            yield self._finished(next(iter(self._files)))

    def finish_bundle(self) -> Iterator[WindowedValue]:  # type: ignore[override]  # Beam declares None, and accepts these.
        """Emit the other files."""
        for key in list(self._files):
            yield self._finished(key)

    def _finished(self, key: tuple[Any, Any]) -> WindowedValue:
        file, in_window = self._files.pop(key), key[0]
        file.close()
        return WindowedValue((file.path, file.rows), in_window.max_timestamp(), (in_window,))


class StagedRows:
    """The rows of several files, read one batch at a time."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = sorted(paths)

    @classmethod
    def with_rows(cls, staged: Sequence[Staged]) -> StagedRows:
        """Return the rows of those files that have any."""
        return cls([path for path, rows in staged if rows])

    def batches(self, *paths: str) -> Iterator[pa.RecordBatch]:
        """Yield the batches of these files, or of all."""
        for path in paths or self.paths:
            with FileSystems.open(path, "application/octet-stream") as file, pa.ipc.open_stream(file) as reader:
                yield from reader

    def reader(self, *paths: str) -> Any:
        """Return a ``pyarrow.RecordBatchReader`` of these files, or of all."""
        return pa.RecordBatchReader.from_batches(self.schema, self.batches(*paths))

    @functools.cached_property
    def schema(self) -> Any:
        """The columns of all rows. Raises if they differ between files."""
        common: Any = None
        for path in self.paths:
            with FileSystems.open(path, "application/octet-stream") as file, pa.ipc.open_stream(file) as reader:
                common = reader.schema if common is None else common
                if not reader.schema.equals(common):
                    one, other = sorted((str(common), str(reader.schema)))  # The order of files is random.
                    raise StoreError(
                        f"found rows with the columns\n{one}\nand others with\n{other}\nexpected the same for all"
                    )
        return common


def write_staged(
    rows: Any,
    store: str,
    writer: StagedWriter,
    identity: RunIdentity,
    output: Any,
    rows_per_file: int = _ROWS_PER_FILE,
) -> Any:
    """Write the rows of a PCollection through files beside ``store``, and return the outputs of the writer.

    Workers stage rows in files; one step commits a bounded table, or each pane of a stream, then the files go.
    ``output`` is the type of the outputs.
    """
    pipeline, windowing = rows.pipeline, rows.windowing
    one = pipeline | "One" >> beam.Create([None])
    # The folder is named when the pipeline runs, since it may run twice.
    staging = StagingFolder.of(store, identity)
    folder = AsSingleton(one | "Folder" >> beam.Map(_make_folder, staging))
    stage = beam.ParDo(_Stage(writer, rows_per_file), folder).with_output_types(tuple[str, int])
    rows |= (
        "Global" >> beam.WindowInto(GlobalWindows())
        if rows.is_bounded
        else "Gather" >> beam.Reshuffle()  # A source of a stream has short bundles: too many files.
    )
    with pipeline.transform_annotations(**staging.annotations()):
        staged = rows | "Stage" >> stage
    if rows.is_bounded:
        files = one | "Collect" >> beam.Map(_collect, AsList(staged)).with_output_types(list[tuple[str, int]])
        committed = identity.stable(files) | "Commit" >> beam.Map(_commit, writer, folder)
    else:
        panes = staged | "ByPane" >> GroupByPane()
        if writer.has_keys:
            numbered = panes | "Pane" >> beam.ParDo(PaneOfElement()).with_output_types(tuple[bytes, Any])
            committed = identity.stable(numbered) | "Commit" >> CommitPanes(_PaneWriter(writer), windowing)
        else:
            committed = identity.stable(panes) | "Commit" >> beam.Map(_commit_pane, writer, folder)
    done = (
        committed
        | "Once" >> beam.Reshuffle()  # Files stay until the rows are committed: the step before may be retried.
        | "CleanUp" >> beam.ParDo(_Remove() if identity.run is None else _RemoveLater()).with_output_types(output)
    )
    if not rows.is_bounded and not isinstance(windowing.windowfn, GlobalWindows):
        names = staged | "Names" >> beam.Map(lambda file: file[0]).with_output_types(str)
        _ = (names, done) | "CleanUpLate" >> RemoveDropped(
            windowing.allowed_lateness, is_durable=identity.run is not None
        )
    return done


def _make_folder(_: None, staging: StagingFolder) -> str:
    return staging.make()


def _collect(_: None, staged: list[Staged]) -> list[Staged]:
    return staged


def _commit(staged: Sequence[Staged], writer: StagedWriter, folder: str) -> tuple[list[Any], list[str]]:
    """Commit all rows; return the outputs, and the folder, which is not needed any more."""
    return writer.commit(staged, folder), [folder]


def _commit_pane(staged: Sequence[Staged], writer: StagedWriter, folder: str) -> tuple[list[Any], list[str]]:
    outputs, _, notes = writer.commit_pane(staged, (), folder)
    return outputs, [*(file for file, _ in staged), *notes]


class _PaneWriter(PaneCommitter):
    """Commits the rows of a pane. Emits the outputs, and the files that are not needed any more."""

    def __init__(self, writer: StagedWriter) -> None:
        self._writer = writer

    def commit(self, content: list[Staged], newer: Collection[Hashable]) -> tuple[list[Any], Collection[Hashable]]:
        outputs, keys, notes = self._writer.commit_pane(content, newer, "")
        return [(outputs, [*(file for file, _ in content), *notes])], keys


class _Remove(beam.DoFn):
    """Removes the files of rows that are committed, and emits the outputs."""

    def process(self, element: tuple[list[Any], list[str]]) -> list[Any]:
        """Remove the files."""
        outputs, paths = element
        remove_staged(paths)
        return outputs


class _RemoveLater(beam.DoFn):
    """The same, but only once no loss of the machine can take back that the rows are committed.

    Otherwise a run that goes on from before the commit would look for its files. Those of a worker that is killed in
    between stay until the run ends.
    """

    def process(
        self,
        element: tuple[list[Any], list[str]],
        finalizer: Any = beam.DoFn.BundleFinalizerParam,
    ) -> list[Any]:
        """Remove the files later."""
        outputs, paths = element
        finalizer.register(functools.partial(remove_staged, paths))
        return outputs


def remove_staged(paths: Sequence[str]) -> None:
    """Remove files that are there. The step that removes what came too late may be at the same ones."""
    try:
        if there := [path for path in paths if FileSystems.exists(path)]:
            FileSystems.delete(there)
    except BeamIOError:  # One of them is gone, and perhaps none of the others was removed.
        for path in paths:
            try:
                if FileSystems.exists(path):
                    FileSystems.delete([path])
            except BeamIOError:
                if FileSystems.exists(path):
                    raise


def _make(folder: str) -> None:
    try:
        FileSystems.mkdirs(folder)
    except OSError:
        if not FileSystems.exists(folder):  # Otherwise another worker was first.
            raise
