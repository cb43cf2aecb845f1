"""The step that writes the rows of a bundle to files, one at a time for each partition."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from typing import Any
from urllib.parse import quote

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.metrics import Metrics
from apache_beam.utils.windowed_value import WindowedValue
from pyarrow import compute

from luminosity.errors import Fix, WriteError
from luminosity.io.writing import filesystem
from luminosity.io.writing.destination import Destination, check_same, check_writable
from luminosity.io.writing.filesystem import clear_errors
from luminosity.io.writing.table_files import FileWriter, WrittenFile

__all__ = ["NAMESPACE", "NULL_FOLDER", "OpenFiles", "WriteDoFn", "groups", "partitioned"]
pc: Any = compute  # It creates its functions on import, so type checkers see none.
NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"  # the name that Hive and Spark give to the folder of nulls
_MOST_FILES = 100  # open at once: well below the usual limit of open files
_MOST_WAITING_BYTES = 256 << 20  # of rows in all open files that are not written yet: fits into any worker


class OpenFiles:
    """The files of a bundle. They are passed on to the last step together, or removed together."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._schema = destination.schema
        self._is_checked = False
        self._has_rows = False
        self._files: OrderedDict[str, FileWriter] = OrderedDict()  # in the order of their last use
        self._done: list[WrittenFile] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Write the rows of a batch to the files of their partitions."""
        self._check(batch.schema)
        if batch.num_rows == 0:
            return
        self._has_rows = True
        for partition, rows in partitioned(batch, self._destination.partition_by):
            rest: pa.RecordBatch | None = rows
            while rest is not None:
                rest = self._add_to(partition, rest)
        if self._destination.partition_by:
            self._flush_largest()

    def close(self) -> list[WrittenFile]:
        """Finish and return all files. If there were batches without rows, an empty file keeps their schema."""
        if self._is_checked and not self._has_rows and not self._destination.partition_by:
            self._files[""] = FileWriter(self._destination, "", self._schema)
        while self._files:
            self._close(next(iter(self._files)))
        return self._done

    def abandon(self) -> None:
        """Remove all files of this bundle, including complete ones."""
        for file in self._files.values():
            file.abandon()
        self._files.clear()
        for written in self._done:
            written.remove()
        self._done.clear()

    def _check(self, schema: pa.Schema) -> None:
        if self._schema is None:
            self._schema = schema
        if not self._is_checked:
            check_writable(self._destination, schema)
            self._is_checked = True
        check_same(self._destination.path, self._schema, schema)

    def _add_to(self, partition: str, rows: pa.RecordBatch) -> pa.RecordBatch | None:
        file = self._files.get(partition)
        if file is None:
            if len(self._files) >= _MOST_FILES:
                self._close(next(iter(self._files)))
            file = self._files[partition] = FileWriter(self._destination, partition, rows.schema)
        self._files.move_to_end(partition)
        rest = file.add(rows)
        if file.is_full:
            self._close(partition)
        return rest

    def _close(self, partition: str) -> None:
        # The file stays among the open ones until it is complete, so that abandon() finds it.
        self._done.append(self._files[partition].close(self._schema))
        del self._files[partition]

    def _flush_largest(self) -> None:
        waiting = sum(file.waiting_bytes for file in self._files.values())
        while waiting > _MOST_WAITING_BYTES:
            largest = max(self._files.values(), key=lambda file: file.waiting_bytes)
            waiting -= largest.waiting_bytes
            largest.flush()


def partitioned(batch: pa.RecordBatch, by: Sequence[str]) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield the folder and the rows of each combination of values; the rows lack the columns ``by``.

    >>> batch = pa.record_batch({"lang": ["en", "de", "en"], "n": [1, 2, 3]})
    >>> [(folder, rows.to_pydict()) for folder, rows in partitioned(batch, ["lang"])]
    [('lang=en', {'n': [1, 3]}), ('lang=de', {'n': [2]})]
    """
    if not by:
        yield "", batch
        return
    rest = batch.drop_columns(list(by))
    for values, rows in groups([batch.column(name) for name in by]):
        # Copy the rows: a view would keep the whole batch in memory while they wait.
        yield "/".join(_folder(name, value) for name, value in zip(by, values, strict=True)), rest.take(rows)


def groups(columns: Sequence[pa.Array]) -> Iterator[tuple[tuple[Any, ...], pa.Array]]:
    """Yield each combination of values with the numbers of the rows that have it, in order.

    >>> [(values, rows.to_pylist()) for values, rows in groups([pa.array(["en", None, "en"])])]
    [(('en',), [0, 2]), ((None,), [1])]
    """
    codes = np.zeros(len(columns[0]), dtype=np.int64)
    values: list[Any] = []
    for column in columns:
        encoded = column if isinstance(column, pa.DictionaryArray) else pc.dictionary_encode(column)
        # The last number stands for null.
        numbers = pc.fill_null(encoded.indices.cast(pa.int64()), len(encoded.dictionary)).to_numpy()
        _, codes = np.unique(codes * (len(encoded.dictionary) + 1) + numbers, return_inverse=True)
        values.append((encoded.dictionary, numbers))
    order = np.argsort(codes, kind="stable")
    starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
    for rows in np.split(order, starts[1:]) if len(order) else []:
        yield tuple(_value(texts, int(numbers[rows[0]])) for texts, numbers in values), pa.array(rows)


def _value(values: Any, number: int) -> Any:
    return values[number].as_py() if number < len(values) else None


def _folder(name: str, value: Any) -> str:
    return f"{_quoted(name)}={NULL_FOLDER if value is None else _quoted(value)}"


def _quoted(value: Any) -> str:
    """Return a value as readers of such folders expect it, such as 2024-01-31 or 2024-01-31%2012%3A00%3A00."""
    return quote(str(value).lower() if isinstance(value, bool) else str(value), safe="")


NAMESPACE = "WriteTable"
_MOST_WINDOWS = 20  # with open files at once: a bundle of old data may have rows of thousands of windows


class WriteDoFn(beam.DoFn):
    """Writes temporary files and emits their names at the end of the bundle; a failed bundle emits none.

    A file has the rows of one window, and its name is emitted in that window.
    """

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._files: OrderedDict[Any, OpenFiles] = OrderedDict()  # by window, in the order of their last use
        self._done: list[tuple[Any, WrittenFile]] = []

    def start_bundle(self) -> None:
        """Remove the files of a bundle that failed before, and start without files."""
        self._abandon()  # Another step may have failed the bundle before.

    def process(self, element: pa.RecordBatch, window: Any = beam.DoFn.WindowParam) -> None:
        """Write the rows of one batch to the temporary files of their window and partitions."""
        if not isinstance(element, pa.RecordBatch):
            raise WriteError(
                f"{self._destination.path}: found an element of type {type(element).__name__}, expected a "
                "pyarrow.RecordBatch",
                fix=Fix("apply TableFromRows() first, which makes them from dicts, Beam Rows and dataclasses"),
            )
        with self._removing_files_on_error():
            self._files_of(window).add(element)

    def finish_bundle(self) -> Iterator[WindowedValue]:  # type: ignore[override]  # Beam declares None, and accepts these.
        """Complete the bundle's files, and emit them."""
        with self._removing_files_on_error():
            while self._files:
                self._close(next(iter(self._files)))
        done, self._done = self._done, []
        Metrics.counter(NAMESPACE, "rows_written").inc(sum(written.rows for _, written in done))
        for window, written in done:
            yield WindowedValue(written, window.max_timestamp(), (window,))

    def teardown(self) -> None:
        """Remove files of a bundle that did not finish."""
        self._abandon()

    def _files_of(self, window: Any) -> OpenFiles:
        if window not in self._files:
            if len(self._files) >= _MOST_WINDOWS:
                self._close(next(iter(self._files)))
            self._files[window] = OpenFiles(self._destination)
        self._files.move_to_end(window)
        return self._files[window]

    def _close(self, window: Any) -> None:
        # The files stay among the open ones until they are complete, so that they are found after an error.
        self._done += [(window, written) for written in self._files[window].close()]
        del self._files[window]

    @contextlib.contextmanager
    def _removing_files_on_error(self) -> Generator[None]:
        try:
            with clear_errors(self._destination.path):
                yield
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        if not self._files and not self._done:
            return
        for files in self._files.values():
            files.abandon()
        for _, written in self._done:
            written.remove()
        self._files, self._done = OrderedDict(), []
        filesystem.remove_folders_if_empty(self._destination.temporary_folder, self._destination.folder)
