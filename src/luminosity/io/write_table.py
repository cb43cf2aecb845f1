"""The transform that writes a table to files: Parquet, JSON lines, CSV or Arrow."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import apache_beam as beam
import pyarrow as pa
from apache_beam.pvalue import AsIter
from apache_beam.transforms.window import GlobalWindows

from luminosity.core import TEMPORARY_FOLDER, WRITES, WRITES_A_FILE_PER_BUNDLE
from luminosity.errors import WriteError
from luminosity.io.lakes.write import lake_by_name
from luminosity.io.writing import existing, filesystem
from luminosity.io.writing.destination import Destination, IfExists, check_writable
from luminosity.io.writing.filesystem import clear_errors
from luminosity.io.writing.finish_step import BeginDoFn, CollectDoFn, FinishDoFn
from luminosity.io.writing.pane_steps import RemoveDropped
from luminosity.io.writing.table_files import WrittenFile
from luminosity.io.writing.window_files import (
    BeginStreamDoFn,
    GroupByPane,
    NamePaneDoFn,
    PublishPaneDoFn,
    check_windows,
)
from luminosity.io.writing.write_step import WriteDoFn
from luminosity.runs.run_ids import run_identity

__all__ = ["WriteTable"]


class WriteTable(beam.PTransform[beam.PCollection[pa.RecordBatch], beam.PCollection[str]]):
    """Writes record batches to files on any of Beam's file systems, and emits the files' names when all are complete.

    Workers write to temporary files, which get their final names when all rows are written. So readers never see an
    incomplete file, retried bundles write no row twice, and a failed run leaves no files.

    In a stream, each window has its own files: they get their names when the window ends, or when its trigger fires.
    The names tell the window and the pane. The stream needs windows that end, or a trigger.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     table = pipeline | beam.Create([pa.record_batch({"n": [1, 2], "lang": ["en", "de"]})])
    ...     names = table | WriteTable(f"{folder}/out", partition_by="lang")
    >>> import os
    >>> sorted(os.listdir(f"{folder}/out"))
    ['lang=de', 'lang=en']
    >>> os.listdir(f"{folder}/out/lang=de")
    ['part-00000-of-00001.parquet']
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        partition_by: str | Sequence[str] | None = None,
        rows_per_file: int | None = None,
        if_exists: IfExists = "fail",
        *,
        format: Literal["parquet", "jsonl", "csv", "arrow"] | None = None,
        compression: str | None = None,
        schema: pa.Schema | None = None,
        allow_empty: bool | pa.Schema = False,
    ) -> None:
        """
        Args:
            path: A folder, or one file if it has the suffix of a format: ``out.parquet``, ``out.jsonl.gz``. Or the name
                of a table: ``iceberg:CATALOG.NAMESPACE.TABLE`` or ``delta:FOLDER``, as ``WriteIceberg`` and
                ``WriteDelta`` write it; the output is its name with the new version.
            partition_by: Columns whose values become folders, such as ``lang=en/``. The files do not contain them.
            rows_per_file: The most rows of a file. Without it, files are split at about 1 GB. Files below 4 MB are
                joined at the end, within this limit, so that a small table has one file.
            if_exists: What to do if the folder has files, or the file exists: ``"fail"`` before the run;
                ``"replace"`` them when the new files are complete; ``"append"`` files beside them. If there are no
                rows, ``"replace"`` keeps the old files and fails, unless ``allow_empty`` is set; ``"fail"`` and
                ``"append"`` lose nothing and succeed. In a stream, this is decided when it starts, and
                ``"replace"`` removes the old files when the first window is complete.
            format: The format; by default the one of the path's suffix, otherwise Parquet.
            compression: For Parquet ``"zstd"``, ``"snappy"``, ``"gzip"``, ``"lz4"``, ``"brotli"`` or ``"none"``; by
                default snappy for floats and zstd for other columns. For Arrow ``"lz4"`` (default), ``"zstd"`` or
                ``"none"``. For text ``"gzip"``, ``"bz2"``, ``"zstd"``, ``"lz4"`` or ``"none"``; by default the one of
                the path's suffix, otherwise none.
            schema: The schema that all batches must have; by default the one of the first batch. If there are no
                batches, an empty file is written only if a schema is given.
            allow_empty: Whether ``if_exists="replace"`` may replace a table by one without rows. The empty table has
                one file if its schema is known: that of batches without rows, ``schema=``, or a schema given here
                instead of True. Otherwise the old files are removed, and there is no new file.
        """
        super().__init__()
        self._lake = lake_by_name(os.fspath(path), partition_by, if_exists, schema, allow_empty)
        if self._lake is not None:
            if rows_per_file is not None or format is not None or compression is not None:
                raise WriteError(
                    f"{os.fspath(path)}: found rows_per_file=, format= or compression=, which are for files",
                    fix="leave them out: the properties of the table say how its files are written",
                )
            return
        self._destination = Destination.of(
            os.fspath(path), partition_by, rows_per_file, if_exists, format, compression, schema, allow_empty
        )

    def keep_if_empty(self) -> WriteTable:
        """Return the same transform, except that a table without rows leaves the old table and is no error.

        Use it if another output of the pipeline, such as dead letters, must be complete even then: an error would end
        the whole run. The counter ``rows_written`` tells whether there were rows.
        """
        other = copy.copy(self)
        if self._lake is not None:
            other._lake = self._lake.keep_if_empty()
            return other
        other._destination = replace(self._destination, if_empty="keep")
        return other

    def check(self, schema: pa.Schema) -> None:
        """Raise if a table with this schema can't be written.

        The format can't hold it, the destination exists, this user may not write there, or another run of this machine
        writes the table right now. All but the first are also checked when the transform is applied.

        Call it before a long pipeline runs; otherwise, types are checked with the first batch.

        >>> WriteTable("out.csv").check(pa.schema({"vector": pa.list_(pa.float32())}))
        Traceback (most recent call last):
        luminosity.errors.WriteError: ...out.csv: column 'vector' is list<item: float>, which CSV can't hold; write...
        """
        if self._lake is not None:
            self._lake.check(schema)
            return
        with clear_errors(self._destination.path):
            check_writable(self._destination, schema)
            existing.check(self._destination)
            existing.check_access(self._destination)

    def remove_leftovers(self) -> None:
        """Remove temporary files that runs of the same table have left which can't be continued.

        A run does so itself when it publishes its files. Call it if a checkpoint folder was removed since.
        """
        if self._lake is not None:
            return  # the commit removes what its own run has left
        for folder in existing.leftovers(self._destination):
            filesystem.remove_folder(folder)

    def expand(self, input_or_inputs: beam.PCollection[pa.RecordBatch]) -> beam.PCollection[str]:
        """Write temporary files in parallel, then give them their final names in one last step."""
        table: Any = input_or_inputs
        if self._lake is not None:
            return table | "Lake" >> self._lake
        identity = run_identity(table.pipeline)
        destination = self._destination.for_another_run(identity)  # The transform may be applied to several tables.
        if not table.is_bounded:
            self._check_stream(table)
        with clear_errors(destination.path):
            if not identity.is_resumed:  # Otherwise the files may be this run's own. The last step checks again.
                existing.check(destination)
            existing.check_access(destination)
        # Bytes, because Beam takes only ASCII in texts, and the names of folders may have other letters.
        annotations = {WRITES_A_FILE_PER_BUNDLE: b"", TEMPORARY_FOLDER: destination.temporary_folder.encode()}
        once = table.pipeline | "Once" >> beam.Impulse()
        if table.is_bounded:
            if not table.windowing.is_default():
                table |= "Global" >> beam.WindowInto(GlobalWindows())
        else:
            table |= "Gather" >> beam.Reshuffle()  # A source of a stream has short bundles: too many files.
        with table.pipeline.transform_annotations(**annotations):
            written: beam.PCollection[Any] = table | "Write" >> beam.ParDo(WriteDoFn(destination))  # pyright: ignore
        if table.is_bounded:
            made = once | "Begin" >> beam.ParDo(BeginDoFn(destination)).with_output_types(str)
            collect = beam.ParDo(CollectDoFn(), AsIter(written), AsIter(made))
            files = once | "Collect" >> collect.with_output_types(tuple[list[WrittenFile], list[str]])
            return identity.stable(files) | "Finish" >> beam.ParDo(FinishDoFn(destination)).with_output_types(str)
        begun = once | "Begin" >> beam.ParDo(BeginStreamDoFn(destination)).with_output_types(list[str])
        name = beam.ParDo(NamePaneDoFn(table.windowing.windowfn.get_window_coder()))
        panes: Any = written | "ByPane" >> GroupByPane()
        named = panes | "Name" >> name.with_output_types(tuple[str, list[WrittenFile]])
        publish = beam.ParDo(PublishPaneDoFn(destination), AsIter(begun)).with_output_types(str)
        published: Any = identity.stable(named) | "Finish" >> publish
        if not isinstance(table.windowing.windowfn, GlobalWindows):
            names = written | "Names" >> beam.Map(lambda file: file.path).with_output_types(str)
            _ = (names, published) | "CleanUp" >> RemoveDropped(
                table.windowing.allowed_lateness, is_durable=identity.run is not None
            )
        return published

    def annotations(self) -> dict[str, Any]:
        """Return the transform's annotations, with the table that it writes."""
        if self._lake is not None:
            return super().annotations()  # the transform inside has them
        return {**super().annotations(), WRITES: json.dumps([{"path": self._destination.path}])}

    def _check_stream(self, table: beam.PCollection[pa.RecordBatch]) -> None:
        if self._destination.is_one_file:
            raise WriteError(
                f"{self._destination.path}: found the name of one file, expected a folder: a stream writes files for "
                "each window",
                fix=f"write to {self._destination.path}/ instead",
            )
        check_windows(self._destination.path, table.windowing)
