"""The step that writes temporary files: one or more for each bundle and partition."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator

import apache_beam as beam
import pyarrow as pa
from apache_beam.metrics import Metrics
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.errors import Fix, WriteError
from luminosity.io.writing import filesystem
from luminosity.io.writing.destination import Destination
from luminosity.io.writing.open_files import OpenFiles
from luminosity.io.writing.write_errors import clear_errors

__all__ = ["NAMESPACE", "WriteDoFn"]

NAMESPACE = "WriteTable"


class WriteDoFn(beam.DoFn):
    """Writes temporary files and emits their names at the end of the bundle; a failed bundle emits none."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._files: OpenFiles | None = None

    def start_bundle(self) -> None:
        """Remove the files of a bundle that failed before, and start without files."""
        self._abandon()  # Another step may have failed the bundle before.
        self._files = OpenFiles(self._destination)

    def process(self, element: pa.RecordBatch) -> None:
        """Write the rows of one batch to the temporary files of their partitions."""
        if not isinstance(element, pa.RecordBatch):
            raise WriteError(
                f"{self._destination.path}: found an element of type {type(element).__name__}, expected a "
                "pyarrow.RecordBatch",
                fix=Fix("apply TableFromRows() first, which makes them from dicts, Beam Rows and dataclasses"),
            )
        assert self._files is not None
        with self._removing_files_on_error():
            self._files.add(element)

    def finish_bundle(self) -> Iterator[WindowedValue]:  # type: ignore[override]  # Beam declares None, and accepts these.
        """Complete the bundle's files, and emit them."""
        assert self._files is not None
        with self._removing_files_on_error():
            done = self._files.close()
        self._files = None
        Metrics.counter(NAMESPACE, "rows_written").inc(sum(written.rows for written in done))
        window = GlobalWindow()
        for written in done:
            yield WindowedValue(written, window.max_timestamp(), (window,))

    def teardown(self) -> None:
        """Remove files of a bundle that did not finish."""
        self._abandon()

    @contextlib.contextmanager
    def _removing_files_on_error(self) -> Generator[None]:
        try:
            with clear_errors(self._destination.path):
                yield
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        if self._files is not None:
            self._files.abandon()
            filesystem.remove_folders_if_empty(self._destination.temporary_folder, self._destination.folder)
        self._files = None
