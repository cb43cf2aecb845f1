"""The step in which workers write data files: one at a time for each partition, under names that nobody else gives."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Generator, Iterator
from typing import Any
from uuid import uuid4

import apache_beam as beam
import pyarrow as pa
from apache_beam.metrics import Metrics
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.errors import Fix, WriteError
from luminosity.io.lakes.columns import as_stored, check_fits, check_keys, storable
from luminosity.io.lakes.contract import DataFile, Lake, Layout, NewTable
from luminosity.io.writing import filesystem
from luminosity.io.writing.encoders import ParquetEncoder

__all__ = ["Begun", "WriteFiles"]

_GROUP_ROWS = 1 << 16  # Small row groups are slow to read and compress badly.
_GROUP_BYTES = 64 << 20  # bounds the memory that waiting batches need
_MOST_BYTES = 512 << 20  # of a file: what Iceberg and Delta aim at
_MOST_FILES = 100  # open at once: well below the usual limit of open files
_MOST_WAITING_BYTES = 256 << 20  # of rows in all open files that are not written yet: fits into any worker
_MOST_WINDOWS = 20  # with open files at once: a bundle of old data may have rows of thousands of windows


class Begun:
    """What the first step of a run decides: the layout of the table, and the id in the names of its files.

    There is no layout yet if the table does not exist, and its columns are those of the first rows.
    """

    def __init__(self, layout: Layout | None, run: str, *, is_staged: bool, is_durable: bool) -> None:
        self._layout = layout
        self.run = run
        self.is_staged = is_staged
        self.is_durable = is_durable

    @property
    def has_layout(self) -> bool:
        """Whether the table exists."""
        return self._layout is not None

    @property
    def layout(self) -> Layout:
        """How the files of the table are written."""
        assert self._layout is not None
        return self._layout

    def with_table(self, lake: Lake, schema: pa.Schema, partition_by: tuple[str, ...]) -> Begun:
        """Return the same with the layout of the table, which is made if there is none. Several workers may do so."""
        lake.create(NewTable(storable(lake.name, schema), partition_by))
        return Begun(lake.layout(), self.run, is_staged=self.is_staged, is_durable=self.is_durable)

    def new_path(self, partition: Any) -> str:
        """Return a path that no other process and no earlier attempt writes to."""
        name = f"luminosity-{self.run}-{uuid4().hex}.parquet"
        return self.layout.staged_path(name) if self.is_staged else self.layout.new_path(partition, name)


class _OpenFile:
    def __init__(self, begun: Begun, partition: Any, schema: pa.Schema) -> None:
        self._begun = begun
        self._partition = partition
        self._schema = schema
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        self._rows = 0
        self.waiting_bytes = 0
        self._path = begun.new_path(partition)
        self._sink = begun.layout.open_output(self._path)
        self._encoder = ParquetEncoder(self._sink, schema, begun.layout.compression)

    def add(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch)
        self._rows += batch.num_rows
        self._waiting_rows += batch.num_rows
        self.waiting_bytes += batch.nbytes
        if self._waiting_rows >= _GROUP_ROWS or self.waiting_bytes >= _GROUP_BYTES:
            self.flush()

    @property
    def is_full(self) -> bool:
        return self._sink.tell() >= _MOST_BYTES

    def flush(self) -> None:
        if self._waiting:
            self._encoder.write(pa.Table.from_batches(self._waiting, self._schema))
        self._waiting, self._waiting_rows, self.waiting_bytes = [], 0, 0

    def close(self) -> DataFile:
        self.flush()
        self._encoder.close()
        size = self._sink.tell()
        self._sink.close()
        layout = self._begun.layout
        if self._begun.is_durable and (local := layout.local(self._path)) is not None:
            filesystem.sync(local, filesystem.split(local)[0])  # The checkpoint says soon that the rows are written.
        detail = None
        if not self._begun.is_staged:
            detail = layout.describe(self._path, self._partition, self._encoder.metadata, size)
        return DataFile(self._path, self._rows, size, detail)

    def abandon(self) -> None:
        self._waiting.clear()
        with contextlib.suppress(OSError, ValueError, pa.ArrowException):
            self._encoder.close()
        with contextlib.suppress(OSError, ValueError):
            self._sink.close()
        with contextlib.suppress(OSError):
            self._begun.layout.remove(self._path)


class _WindowFiles:
    """The files with rows of one window."""

    def __init__(self, begun: Begun) -> None:
        self._begun = begun
        self._files: OrderedDict[Any, _OpenFile] = OrderedDict()  # by partition, in the order of their last use
        self._done: list[DataFile] = []

    def add(self, batch: pa.RecordBatch) -> None:
        for partition, rows in [(None, batch)] if self._begun.is_staged else self._begun.layout.split(batch):
            file = self._files.get(partition)
            if file is None:
                if len(self._files) >= _MOST_FILES:
                    self._close(next(iter(self._files)))
                file = self._files[partition] = _OpenFile(self._begun, partition, rows.schema)
            self._files.move_to_end(partition)
            file.add(rows)
            if file.is_full:
                self._close(partition)
        waiting = sum(file.waiting_bytes for file in self._files.values())
        while waiting > _MOST_WAITING_BYTES:
            largest = max(self._files.values(), key=lambda file: file.waiting_bytes)
            waiting -= largest.waiting_bytes
            largest.flush()

    def close(self) -> list[DataFile]:
        while self._files:
            self._close(next(iter(self._files)))
        return self._done

    def _close(self, partition: Any) -> None:
        # The file stays among the open ones until it is complete, so that abandon() finds it.
        self._done.append(self._files[partition].close())
        del self._files[partition]

    def abandon(self) -> None:
        for file in self._files.values():
            file.abandon()
        for done in self._done:
            with contextlib.suppress(OSError):
                self._begun.layout.remove(done.path)
        self._files.clear()
        self._done.clear()


class WriteFiles(beam.DoFn):
    """Writes data files and emits them at the end of the bundle; a failed bundle emits none, and removes its files."""

    def __init__(self, lake: Lake, keys: tuple[str, ...] = (), partition_by: tuple[str, ...] = ()) -> None:
        """``partition_by`` are the partitions of a table that does not exist yet."""
        self._lake = lake
        self._keys = keys
        self._partition_by = partition_by
        self._files: OrderedDict[Any, _WindowFiles] = OrderedDict()  # by window, in the order of their last use
        self._done: list[tuple[Any, list[DataFile]]] = []
        self._checked: pa.Schema | None = None
        self._begun: Begun | None = None

    def start_bundle(self) -> None:
        """Remove the files of a bundle that failed before, and start without files."""
        self._abandon()  # Another step may have failed the bundle before.

    def process(self, element: pa.RecordBatch, begun: Begun, window: Any = beam.DoFn.WindowParam) -> None:
        """Write the rows of one batch to the files of their window and partitions."""
        name = self._lake.name
        if not isinstance(element, pa.RecordBatch):
            raise WriteError(
                f"{name}: found an element of type {type(element).__name__}, expected a pyarrow.RecordBatch",
                fix=Fix("apply TableFromRows() first, which makes them from dicts, Beam Rows and dataclasses"),
            )
        if element.schema != self._checked:
            check_keys(name, self._keys, element.schema)
        if not begun.has_layout:
            if self._begun is None or self._begun.run != begun.run:
                self._begun = begun.with_table(self._lake, element.schema, self._partition_by)
            begun = self._begun
        self._begun = begun
        with self._removing_files_on_error():
            if element.schema != self._checked:
                check_fits(name, begun.layout.schema, element.schema, may_add=False)
                self._checked = element.schema
            rows = as_stored(name, element, begun.layout.schema)
            for key in self._keys:
                if rows.column(key).null_count:
                    raise WriteError(f"{name}: found a row without a value in the key {key!r}, expected one")
            if rows.num_rows:
                self._files_of(window, begun).add(rows)

    def finish_bundle(self) -> Iterator[WindowedValue]:  # type: ignore[override]  # Beam declares None, and accepts these.
        """Complete the bundle's files, and emit them."""
        with self._removing_files_on_error():
            while self._files:
                self._close(next(iter(self._files)))
        done, self._done = self._done, []
        for window, files in done:
            Metrics.counter(self._lake.kind, "rows_written").inc(sum(file.rows for file in files))
            for file in files:
                yield WindowedValue(file, window.max_timestamp(), (window,))

    def teardown(self) -> None:
        """Remove files of a bundle that did not finish."""
        self._abandon()

    def _files_of(self, window: Any, begun: Begun) -> _WindowFiles:
        if window not in self._files:
            if len(self._files) >= _MOST_WINDOWS:
                self._close(next(iter(self._files)))
            self._files[window] = _WindowFiles(begun)
        self._files.move_to_end(window)
        return self._files[window]

    def _close(self, window: Any) -> None:
        # The files stay among the open ones until they are complete, so that they are found after an error.
        self._done.append((window, self._files[window].close()))
        del self._files[window]

    @contextlib.contextmanager
    def _removing_files_on_error(self) -> Generator[None]:
        try:
            yield
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        for files in self._files.values():
            files.abandon()
        if self._begun is not None:
            for _, done in self._done:
                for file in done:
                    with contextlib.suppress(OSError):
                        self._begun.layout.remove(file.path)
        self._files, self._done = OrderedDict(), []
