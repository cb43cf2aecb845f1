"""Tables to files: Parquet, JSON lines, CSV or Arrow, on any of Beam's file systems."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

import apache_beam as beam
import pyarrow as pa
from apache_beam.pvalue import AsIter
from apache_beam.transforms.window import GlobalWindows

from luminosity.core import TEMPORARY_FOLDER, WRITES_A_FILE_PER_BUNDLE
from luminosity.errors import WriteError
from luminosity.io.writing import existing
from luminosity.io.writing.destination import Destination, IfExists
from luminosity.io.writing.finish_step import FinishDoFn
from luminosity.io.writing.write_errors import clear_errors
from luminosity.io.writing.write_step import WriteDoFn

__all__ = ["WriteTable"]


class WriteTable(beam.PTransform[beam.PCollection[pa.RecordBatch], beam.PCollection[str]]):
    """Writes record batches to files and gives the files' names, when all are complete.

    Workers write to temporary files; only when all is written do these get their names. So readers never see
    a part of a file, a bundle that is tried again leaves no row twice, and a run that fails no file at all.

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
    ) -> None:
        """
        Args:
            path: A folder; or one file, where it ends like one: ``out.parquet``, ``out.jsonl.gz``.
            partition_by: Columns by whose values rows go to folders, ``lang=en/``. They are left out of the files.
            rows_per_file: The most rows of a file. Files are cut, never joined: where workers have fewer rows at a
                time, files are smaller. Without it, they are cut at about 1 GB.
            if_exists: What to do if the folder has files, or the file is there: ``"fail"``, at once; ``"replace"``
                them when the new ones are complete; ``"append"``, add files beside them.
            format: Else the path's suffix tells, or it is Parquet.
            compression: Of Parquet ``"zstd"``, ``"snappy"``, ``"gzip"``, ``"lz4"``, ``"brotli"``, ``"none"``; by
                default snappy for floats and zstd for all else. Of Arrow ``"lz4"`` (default), ``"zstd"``, ``"none"``.
                Of text ``"gzip"``, ``"bz2"``, ``"zstd"``, ``"lz4"``; by default what the path's suffix says, or none.
            schema: What all batches must have; without it, what the first one has. Where there are no batches at all,
                an empty file is written only if it is given.
        """
        super().__init__()
        self._destination = Destination.of(
            os.fspath(path), partition_by, rows_per_file, if_exists, format, compression, schema
        )

    def expand(self, input_or_inputs: beam.PCollection[pa.RecordBatch]) -> beam.PCollection[str]:
        table = input_or_inputs
        destination = self._destination.for_another_run()  # One transform may be applied to several tables.
        if not table.is_bounded:
            raise WriteError(
                f"{destination.path}: the input never ends, so the files would never be complete; "
                "WriteTable takes bounded input, or write each window by beam.io.fileio.WriteToFiles"
            )
        with clear_errors(destination.path):
            existing.check(destination)
        if not table.windowing.is_default():
            table |= "Global" >> beam.WindowInto(GlobalWindows())
        # As bytes: of texts, Beam takes ASCII alone, and folders have other letters, too.
        annotations = {WRITES_A_FILE_PER_BUNDLE: b"", TEMPORARY_FOLDER: destination.temporary_folder.encode()}
        with table.pipeline.transform_annotations(**annotations):
            written: beam.PCollection[Any] = table | "Write" >> beam.ParDo(WriteDoFn(destination))  # pyright: ignore
        return (
            table.pipeline
            | "Once" >> beam.Impulse()
            | "Finish" >> beam.ParDo(FinishDoFn(destination), AsIter(written)).with_output_types(str)
        )
