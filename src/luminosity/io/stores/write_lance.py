"""The transform that writes rows to a Lance dataset."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import apache_beam as beam
import pyarrow as pa
from apache_beam.io.filesystems import FileSystems
from apache_beam.metrics import Metrics

from luminosity._shared.shared_files import text_digest
from luminosity.core import WRITES
from luminosity.errors import Fix, InvalidArgument, StoreError
from luminosity.io.run_owner import RunOwner, owner_of
from luminosity.io.stores.lance_store import LanceStore, check_dataset
from luminosity.io.stores.lance_table import NOTE_SUFFIX, LanceTable
from luminosity.io.stores.points import DELETED
from luminosity.io.stores.staging import StagedRows, write_staged
from luminosity.io.stores.store import Staged, StagedWriter
from luminosity.io.writing.window_files import check_windows
from luminosity.runs.run_ids import CheckpointedRun, run_identity

__all__ = ["WriteLance"]

Mode = Literal["append", "overwrite", "merge"]


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
        check_dataset(self._path)
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
        LanceStore.check_access(self._path, self._mode == "overwrite", *mine)

    def annotations(self) -> dict[str, Any]:
        """Return the transform's annotations, with the dataset that it writes."""
        path = self._path if "://" in self._path else os.path.abspath(self._path)
        return {**super().annotations(), WRITES: json.dumps([{"path": path, "kind": "lance"}])}

    def expand(self, input_or_inputs: Any) -> Any:
        """Stage rows in files, commit them in one step, or in one for each pane of a stream, then remove the files."""
        identity = run_identity(input_or_inputs.pipeline)
        self._check_writable(RunOwner.current(), owner_of(identity))
        if not input_or_inputs.is_bounded:
            self._check_stream(input_or_inputs)
        writer = _Writer(self._path, self._mode, self._key, self._allow_empty)
        store = self._path.removesuffix(".lance")
        return write_staged(input_or_inputs, store, writer, identity, str, self._rows_per_file)

    def _check_stream(self, rows: Any) -> None:
        check_windows(self._path, rows.windowing)
        if self._mode == "overwrite":
            raise StoreError(
                f"{self._path}: found a stream and mode='overwrite', expected 'append' or 'merge': the new dataset "
                "would never be complete",
                fix=Fix("pass mode='append', or mode='merge' and key="),
            )


@dataclass(frozen=True)
class _Writer(StagedWriter):
    """Commits rows by one of the modes. The output is the path of the dataset."""

    path: str
    mode: Mode
    key: str | None
    allow_empty: bool

    @property
    def has_keys(self) -> bool:
        """Whether rows are merged by a key."""
        return self.key is not None

    def check(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Check keys and marks of deletion, and count the rows."""
        if self.key is not None:
            _check_keys(batch, self.key)
        elif DELETED in batch.schema.names:
            batch = _without_marks(batch)
        Metrics.counter(WriteLance, "rows_written").inc(batch.num_rows)
        return batch

    def commit(self, staged: Sequence[Staged], folder: str) -> list[str]:
        """Commit the rows of all files."""
        count, table = sum(rows for _, rows in staged), LanceTable(self.path)
        if not count and self.mode == "overwrite" and not self.allow_empty:
            raise StoreError(
                f"{self.path}: found no rows, expected some to overwrite the dataset; it stays as it was",
                fix=Fix("check the input, or pass allow_empty=True if the dataset may be empty"),
            )
        if not count and (self.mode != "overwrite" or not staged):
            if self.mode == "overwrite":
                table.clear()
            return [self.path]
        rows = StagedRows([file for file, _ in staged])
        if self.mode == "overwrite":
            table.overwrite(rows.reader())
        elif self.key is not None:
            table.merge(rows, self.key)
        else:
            table.append(rows, count, FileSystems.join(folder, "note.json"))
        return [self.path]

    def commit_pane(
        self, staged: Sequence[Staged], newer: Collection[Hashable], folder: str
    ) -> tuple[list[str], Collection[Hashable], list[str]]:
        """Merge the rows of a pane, or append them once."""
        rows, table = StagedRows.with_rows(staged), LanceTable(self.path)
        if not rows.paths:
            return [self.path], (), []
        if self.key is not None:
            return [self.path], table.merge(rows, self.key, newer), []
        note = FileSystems.join(folder, text_digest(*rows.paths) + NOTE_SUFFIX)
        table.append_pane(rows, sum(rows for _, rows in staged), note)
        return [self.path], (), [note]


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
