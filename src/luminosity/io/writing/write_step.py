"""The step that writes: one file for each bundle and partition, or several where they get large."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator

import apache_beam as beam
import pyarrow as pa
from apache_beam.metrics import Metrics
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.errors import WriteError
from luminosity.io.writing import filesystem
from luminosity.io.writing.destination import Destination
from luminosity.io.writing.open_files import OpenFiles
from luminosity.io.writing.write_errors import clear_errors

__all__ = ["NAMESPACE", "WriteDoFn"]

NAMESPACE = "WriteTable"


class WriteDoFn(beam.DoFn):
    """Names of temporary files leave it at the end of a bundle. Those of a bundle that fails nobody ever hears of."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._files: OpenFiles | None = None

    def start_bundle(self) -> None:
        self._abandon()  # of a bundle that another step has failed
        self._files = OpenFiles(self._destination)

    def process(self, element: pa.RecordBatch) -> None:
        if not isinstance(element, pa.RecordBatch):
            raise WriteError(
                f"{self._destination.path}: found an element of type {type(element).__name__}, expected a "
                "pyarrow.RecordBatch; TableFromRows() makes them of dicts, Beam Rows and dataclasses"
            )
        assert self._files is not None
        with self._nothing_left_behind():
            self._files.add(element)

    def finish_bundle(self) -> Iterator[WindowedValue]:  # type: ignore[override]  # Beam's says None, and takes these.
        assert self._files is not None
        with self._nothing_left_behind():
            done = self._files.close()
        self._files = None
        Metrics.counter(NAMESPACE, "rows_written").inc(sum(written.rows for written in done))
        window = GlobalWindow()
        for written in done:
            yield WindowedValue(written, window.max_timestamp(), (window,))

    def teardown(self) -> None:
        self._abandon()

    @contextlib.contextmanager
    def _nothing_left_behind(self) -> Generator[None]:
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
