"""The step that writes temporary files: one or more for each bundle and partition."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Generator, Iterator
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.metrics import Metrics
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.errors import Fix, WriteError
from luminosity.io.writing import filesystem
from luminosity.io.writing.destination import Destination
from luminosity.io.writing.file_writer import WrittenFile
from luminosity.io.writing.open_files import OpenFiles
from luminosity.io.writing.write_errors import clear_errors

__all__ = ["NAMESPACE", "WriteDoFn"]

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
