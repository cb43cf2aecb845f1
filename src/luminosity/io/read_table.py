"""Files of a table into record batches."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import apache_beam as beam
import pyarrow as pa

import luminosity.tables  # noqa: F401  # pyright: ignore[reportUnusedImport]  # for its coder of record batches
from luminosity.errors import TableError
from luminosity.io.formats import Format
from luminosity.io.reading.csv_reader import CsvStyle
from luminosity.io.reading.find_files import TableFile, find_files
from luminosity.io.reading.partition_columns import partition_schema
from luminosity.io.reading.read_step import ReadRanges
from luminosity.io.reading.reader import BATCH_ROWS
from luminosity.io.reading.readers import Settings, all_rows, first_rows, schema_of
from luminosity.io.reading.selection import select

__all__ = ["ReadTable"]


class ReadTable(beam.PTransform[Any, Any]):
    """Reads Parquet, JSON lines, CSV and Arrow IPC files into `pyarrow.RecordBatch`\\ es.

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "reviews.csv")
    >>> with open(path, "w") as file:
    ...     _ = file.write("text,stars\\nfine,4\\npoor,1\\n")
    >>> import pyarrow.compute as pc
    >>> with beam.Pipeline("FnApiRunner") as pipeline:
    ...     table = pipeline | ReadTable(path, columns=["text"], where=pc.field("stars") > 2)
    ...     _ = table | beam.Map(lambda batch: print(batch.to_pylist()))
    [{'text': 'fine'}]

    Args:
      pattern: files on any of Beam's file systems, as `FileSystems.match` takes them, or a list of such. A folder means
        all tables' files in it, and in folders below it that are named `column=value`, which become columns. Files
        whose names begin with `_` or `.` are left out.
      columns: those to read; None: all. Others are not even decoded.
      where: a condition on rows, such as `pyarrow.compute.field("stars") >= 4`, on any column. Row groups of Parquet
        whose statistics exclude it are not read.
      schema: the columns of the files; None: those of the first file that has any. Every file must have them, in any
        order. Types of CSV and JSON lines are guessed from the first megabyte of that file: give a schema where that
        guess would be wrong.
      format: "parquet", "jsonl", "csv" or "arrow", for files whose names do not tell.
      rows_per_batch: the most rows of a batch. Fewer where a row is a lot of work: batches are what workers share.
      delimiter: of CSV.
      newlines_in_values: whether values of CSV have line breaks in them; such files are read in one piece each.
      null_values: what stands for null in CSV, unless it is quoted.

    Its counters, in the namespace "ReadTable": `rows_read` (that were emitted), `bytes_read` (of the files, as far as
    they are done), `files_read`.
    """

    def __init__(
        self,
        pattern: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        columns: Sequence[str] | None = None,
        where: Any = None,
        *,
        schema: pa.Schema | None = None,
        format: str | None = None,
        rows_per_batch: int = BATCH_ROWS,
        delimiter: str = ",",
        newlines_in_values: bool = False,
        null_values: Sequence[str] = ("",),
    ) -> None:
        super().__init__()
        if rows_per_batch < 1:
            raise TableError(f"rows_per_batch={rows_per_batch}: expected 1 or more")
        if schema is not None and not isinstance(schema, pa.Schema):
            raise TableError(f"schema= is of type {type(schema).__name__}, expected pyarrow.schema(...) of the columns")
        patterns = [pattern] if isinstance(pattern, str | os.PathLike) else pattern
        self._patterns = [os.fspath(each) for each in patterns]
        self._files = find_files(self._patterns, None if format is None else _format(format))
        csv = CsvStyle(delimiter, newlines_in_values, tuple(null_values))
        _check_files(self._files, csv)
        partition = partition_schema(self._files, schema)
        stored, origin = _stored(self._files, schema, partition, csv)
        selection = select(stored, partition, columns, where, origin)
        self._settings = Settings(selection, csv, rows_per_batch)

    @property
    def schema(self) -> pa.Schema:
        """Of the batches."""
        return self._settings.selection.output

    def first(self, rows: int) -> list[pa.RecordBatch]:
        """The first rows of the first files, read here and now: to look at a table, or to try something on it."""
        return first_rows(self._files, self._settings, rows)

    def all(self) -> Iterator[tuple[str, pa.RecordBatch]]:
        """All rows in the order of the files, read here and now, each batch with the path of its file."""
        return all_rows(self._files, self._settings)

    def expand(self, input_or_inputs: Any) -> Any:
        files = input_or_inputs | "Files" >> beam.Create(self._files, reshuffle=False)
        return files | "Read" >> beam.ParDo(ReadRanges(self._settings)).with_output_types(pa.RecordBatch)

    def display_data(self) -> dict[str, Any]:
        return {"pattern": ", ".join(self._patterns), "files": len(self._files)}


def _format(name: str) -> Format:
    try:
        return Format(name)
    except ValueError:
        raise TableError(f"format={name!r}: expected one of {', '.join(each.value for each in Format)}") from None


def _check_files(files: Sequence[TableFile], csv: CsvStyle) -> None:
    if not files:
        raise TableError("pattern=[]: expected at least one pattern")
    for file in files:
        if file.compression is not None and file.format in (Format.PARQUET, Format.ARROW):
            raise TableError(
                f"{file.path}: {file.format.value} can't be read while it is packed as a whole with "
                f"{file.compression}: unpack it; its columns are best compressed when it is written"
            )
    if csv != CsvStyle() and all(file.format is not Format.CSV for file in files):
        raise TableError(
            "delimiter=, newlines_in_values= and null_values= are for CSV, and none of the files is: "
            f"the first is {files[0].path}; give format='csv' if they are"
        )


def _stored(
    files: Sequence[TableFile], given: pa.Schema | None, partition: pa.Schema, csv: CsvStyle
) -> tuple[pa.Schema, str]:
    """The columns that every file must have, and who says so."""
    if given is not None:
        return pa.schema([field for field in given if field.name not in partition.names]), "schema="
    for file in files:
        found = schema_of(file, csv)
        if found is not None:
            return found, file.path
    raise TableError(f"{files[0].path} has no rows, nor has any other of the {len(files)} files; give schema=")
