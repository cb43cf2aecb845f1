"""The transform that writes rows to a Lance dataset."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Hashable, Sequence
from typing import Any, Literal, get_args

import apache_beam as beam
import pyarrow as pa
from apache_beam.io.filesystems import FileSystems
from apache_beam.metrics import Metrics
from apache_beam.pvalue import AsList, AsSingleton
from apache_beam.transforms import window

from luminosity.core import WRITES
from luminosity.errors import Fix, InvalidArgument, StoreError
from luminosity.io.folder_access import why_not_writable
from luminosity.io.run_owner import RunOwner, owner_of
from luminosity.io.stores.lance_table import NOTE_SUFFIX, LanceTable
from luminosity.io.stores.points import DELETED
from luminosity.io.stores.staging import Staged, StageDoFn, StagedRows, StagingFolder, staging_folders
from luminosity.io.writing.pane_steps import CommitPanes, PaneCommitter, PaneOfElement, RemoveDropped
from luminosity.io.writing.window_files import GroupByPane, check_windows
from luminosity.runs.run_ids import CheckpointedRun, RunIdentity, run_identity

__all__ = ["WriteLance"]

Mode = Literal["append", "overwrite", "merge"]
_NAME = r"[A-Za-z0-9_.-]+"  # Lance refuses other names, but only after all rows are written.


class WriteLance(beam.PTransform[Any, Any]):
    """Writes a table to a Lance dataset, and emits the dataset's path once all rows are in it.

    Workers write their rows to files beside the dataset, and one last step commits them: readers see all rows of a run
    or none. If bundles or the last step are retried, every row is still written once.

    In a stream, the rows of a window are committed together when it ends, or when its trigger fires, and the path is
    emitted each time. The stream needs windows that end, or a trigger.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/letters.lance"
    >>> rows = pa.record_batch({"id": [1, 2], "embedding": pa.array([[0, 1], [1, 0]], pa.list_(pa.float32(), 2))})
    >>> with beam.Pipeline() as pipeline:
    ...     _ = pipeline | beam.Create([rows]) | WriteLance(path)
    >>> import lancedb
    >>> lancedb.connect(os.path.dirname(path)).open_table("letters").count_rows()
    2
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: Mode = "append",
        key: str | None = None,
        rows_per_file: int = 100_000,
        allow_empty: bool = False,
    ) -> None:
        """
        Args:
            path: the dataset; it must end in ``.lance``. Workers on several machines must all reach it.
            mode: ``"append"`` adds rows; ``"overwrite"`` replaces all rows; ``"merge"`` replaces rows with the same
                key, adds the others, and deletes rows marked ``_deleted``. If rows of a batch have the same key, the
                last one counts; merged rows are committed file by file. Without any rows, nothing changes, and
                ``"overwrite"`` fails unless ``allow_empty`` is set.
            key: the column of integers or texts that identifies rows, for ``"merge"``.
            rows_per_file: about the number of rows in each file beside the dataset.
            allow_empty: whether ``"overwrite"`` may leave a dataset without rows. Its columns are those of batches
                without rows, otherwise those that the dataset has.
        """
        super().__init__()
        self._path = os.fspath(path)
        if not os.path.basename(self._path).endswith(".lance") or os.path.basename(self._path) == ".lance":
            raise InvalidArgument(
                f"found path={self._path!r}, expected one that ends in .lance, such as data/reviews.lance"
            )
        if not re.fullmatch(_NAME, os.path.basename(self._path).removesuffix(".lance")):
            raise InvalidArgument(
                f"found path={self._path!r}, expected a name of Latin letters, digits, '_', '-' and '.'"
            )
        if mode not in get_args(Mode):
            raise InvalidArgument(f"found mode={mode!r}, expected one of {', '.join(get_args(Mode))}")
        if (mode == "merge") != (key is not None):
            raise InvalidArgument(f"found mode={mode!r} and key={key!r}, expected a key for 'merge' and only for it")
        if rows_per_file < 1:
            raise InvalidArgument(f"found rows_per_file={rows_per_file!r}, expected 1 or more")
        self._mode: Mode = mode
        self._key = key
        self._rows_per_file = rows_per_file
        self._allow_empty = allow_empty

    def check_writable(self) -> None:
        """Raise if the dataset can't be written there. This is also checked when the transform is applied."""
        self._check_writable(RunOwner.current())

    def _check_writable(self, *mine: RunOwner | CheckpointedRun) -> None:
        if FileSystems.get_scheme(self._path) is not None:
            return
        if reason := why_not_writable(self._path):
            raise StoreError(f"{self._path}: {reason}", fix="choose another path, or make this one writable")
        for folder, owner in staging_folders(self._store) if self._mode == "overwrite" else ():
            if owner not in mine and owner.is_alive(folder):
                raise StoreError(
                    f"{self._path}: {owner.describe()} is writing it right now", fix="wait until that run has ended"
                )

    def annotations(self) -> dict[str, Any]:
        """Return the transform's annotations, with the dataset that it writes."""
        path = self._path if "://" in self._path else os.path.abspath(self._path)
        return {**super().annotations(), WRITES: json.dumps([{"path": path, "kind": "lance"}])}

    def expand(self, input_or_inputs: Any) -> Any:
        """Stage rows in files, commit them in one step, or in one for each pane of a stream, then remove the files."""
        pipeline = input_or_inputs.pipeline
        identity = run_identity(pipeline)
        self._check_writable(RunOwner.current(), owner_of(identity))
        if not input_or_inputs.is_bounded:
            self._check_stream(input_or_inputs)
        one = pipeline | "One" >> beam.Create([None])
        # The folder is named when the pipeline runs, since it may run twice.
        staging = StagingFolder.of(self._store, identity)
        folder = AsSingleton(one | "Folder" >> beam.Map(_make_folder, staging))
        stage = beam.ParDo(StageDoFn(_Prepare(self._key), self._rows_per_file), folder).with_output_types(
            tuple[str, int]
        )
        if not input_or_inputs.is_bounded:
            with pipeline.transform_annotations(**staging.annotations()):
                # A source has short bundles: too many files.
                staged = input_or_inputs | "Gather" >> beam.Reshuffle() | "Stage" >> stage
            return self._commit_panes(staged, input_or_inputs.windowing, folder, identity)
        rows = input_or_inputs | "Global" >> beam.WindowInto(window.GlobalWindows())
        with pipeline.transform_annotations(**staging.annotations()):
            staged = rows | "Stage" >> stage
        files = one | "Collect" >> beam.Map(_collect, AsList(staged)).with_output_types(list[tuple[str, int]])
        return (
            identity.stable(files)
            | "Commit" >> beam.Map(_commit, self._path, self._mode, self._key, folder, self._allow_empty)
            | "Once" >> beam.Reshuffle()
            | "CleanUp" >> beam.Map(_clean_up, self._path).with_output_types(str)
        )

    @property
    def _store(self) -> str:
        return self._path.removesuffix(".lance")

    def _commit_panes(self, staged: Any, windowing: Any, folder: AsSingleton, identity: RunIdentity) -> Any:
        panes = staged | "ByPane" >> GroupByPane()
        if self._key is None:
            append = beam.Map(_append_pane, self._path, folder).with_output_types(list[str])
            committed = identity.stable(panes) | "Commit" >> append
        else:
            merge = CommitPanes(_MergePane(self._path, self._key), windowing)
            numbered = panes | "Pane" >> beam.ParDo(PaneOfElement()).with_output_types(tuple[bytes, Any])
            committed = identity.stable(numbered) | "Commit" >> merge
        done = (
            committed
            | "Once" >> beam.Reshuffle()
            | "CleanUp" >> beam.Map(_remove_files, self._path).with_output_types(str)
        )
        if not isinstance(windowing.windowfn, window.GlobalWindows):
            names = staged | "Names" >> beam.Map(lambda file: file[0]).with_output_types(str)
            _ = (names, done) | "CleanUpLate" >> RemoveDropped(windowing.allowed_lateness)
        return done

    def _check_stream(self, rows: Any) -> None:
        check_windows(self._path, rows.windowing)
        if self._mode == "overwrite":
            raise StoreError(
                f"{self._path}: found a stream and mode='overwrite', expected 'append' or 'merge': the new dataset "
                "would never be complete",
                fix=Fix("pass mode='append', or mode='merge' and key="),
            )


class _Prepare:
    """Checks batches before they are staged, and counts their rows."""

    def __init__(self, key: str | None) -> None:
        self._key = key
        self._written = Metrics.counter(WriteLance, "rows_written")

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self._key is not None:
            _check_keys(batch, self._key)
        elif DELETED in batch.schema.names:
            batch = _without_marks(batch)
        self._written.inc(batch.num_rows)
        return batch


def _make_folder(_: None, staging: StagingFolder) -> str:
    return staging.make()


def _collect(_: None, staged: list[Staged]) -> list[Staged]:
    return staged


def _commit(staged: Sequence[Staged], path: str, mode: Mode, key: str | None, folder: str, allow_empty: bool) -> str:
    """Commit the rows of all files. May be repeated with the same arguments."""
    count = sum(rows for _, rows in staged)
    if not count and mode == "overwrite" and not allow_empty:
        raise StoreError(
            f"{path}: found no rows, expected some to overwrite the dataset; it stays as it was",
            fix=Fix("check the input, or pass allow_empty=True if the dataset may be empty"),
        )
    if not count and (mode != "overwrite" or not staged):
        if mode == "overwrite":
            LanceTable(path).clear()
        return folder
    rows, table = StagedRows([file for file, _ in staged]), LanceTable(path)
    if mode == "overwrite":
        table.overwrite(rows)
    elif key is not None:
        table.merge(rows, key)
    else:
        table.append(rows, count, FileSystems.join(folder, "note.json"))
    return folder


def _append_pane(staged: Sequence[Staged], path: str, folder: str) -> list[str]:
    """Append the rows of one pane of a stream, and return the files that are not needed any more."""
    files = sorted(file for file, rows in staged if rows)
    if not files:
        return [file for file, _ in staged]
    note = FileSystems.join(folder, hashlib.sha256("\n".join(files).encode()).hexdigest() + NOTE_SUFFIX)
    LanceTable(path).append_pane(StagedRows(files), sum(rows for _, rows in staged), note)
    return [*(file for file, _ in staged), note]


class _MergePane(PaneCommitter):
    """Merges the rows of one pane of a stream, and returns the files that are not needed any more."""

    def __init__(self, path: str, key: str) -> None:
        self._path = path
        self._key = key

    def commit(
        self, content: list[Staged], newer: Collection[Hashable]
    ) -> tuple[list[list[str]], Collection[Hashable]]:
        files = [file for file, rows in content if rows]
        keys: set[Hashable] = set()
        if files:
            keys = LanceTable(self._path).merge(StagedRows(files), self._key, newer)
        return [[file for file, _ in content]], keys


def _remove_files(files: list[str], path: str) -> str:
    if there := [file for file in files if FileSystems.exists(file)]:
        FileSystems.delete(there)
    return path


def _clean_up(folder: str, path: str) -> str:
    if FileSystems.exists(folder):
        FileSystems.delete([folder])
    return path


def _without_marks(batch: pa.RecordBatch) -> pa.RecordBatch:
    if True in batch.column(DELETED).to_pylist():
        raise StoreError(f"found rows that are marked {DELETED}, expected none", fix=Fix("pass mode='merge' and key="))
    return batch.drop_columns([DELETED])


def _check_keys(batch: pa.RecordBatch, key: str) -> None:
    if key not in batch.schema.names:
        raise StoreError(f"there is no column {key!r}, expected one of {', '.join(batch.schema.names)}")
    kind = batch.schema.field(key).type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise StoreError(f"the key column {key!r} is of type {kind}, expected integers or strings")
    if batch.column(key).null_count:
        row = batch.column(key).to_pylist().index(None)
        raise StoreError(f"row {row} has no key, expected one in the column {key!r}")
