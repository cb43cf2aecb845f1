"""The transform that reads the files of a table into record batches."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.io.filesystems import FileSystems

import luminosity.tables  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers the coder of record batches
from luminosity._shared.text import list_some
from luminosity.core import READS
from luminosity.errors import Fix, TableError
from luminosity.io.formats import Format
from luminosity.io.lakes.by_name import is_name, open_by_name
from luminosity.io.reading.csv_dialect import CsvStyle
from luminosity.io.reading.file_rows import BYTES, FILE_COLUMNS
from luminosity.io.reading.find_files import TableFile, find_files
from luminosity.io.reading.named_table import NamedTable
from luminosity.io.reading.reader import BATCH_ROWS, MAX_BYTES
from luminosity.io.reading.readers import (
    UNREADABLE,
    ReadRanges,
    RowCount,
    Settings,
    all_rows,
    count_rows,
    first_rows,
    schema_of,
)
from luminosity.io.reading.selection import partition_schema, select
from luminosity.io.reading.text_lines import LETTERS, Doubts, Report, Unreadable, letters, raise_unreadable
from luminosity.tables.schemas import remember_schema

__all__ = ["ReadTable"]

_LOGGER = logging.getLogger(__name__)
_SHOWN_FILES = 3  # that are not read


class ReadTable(beam.PTransform[Any, Any]):
    """Reads Parquet, JSON lines, CSV, TSV and Arrow IPC files into ``pyarrow.RecordBatch`` elements.

    It also reads WebDataset shards, and folders of images, recordings, PDFs and texts, in which each file is a row.

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "reviews.csv")
    >>> with open(path, "w") as file:
    ...     _ = file.write("text,stars\\nfine,4\\npoor,1\\n")
    >>> import pyarrow.compute as pc
    >>> with beam.Pipeline("FnApiRunner") as pipeline:
    ...     table = pipeline | ReadTable(path, columns=["text"], where=pc.field("stars") > 2)
    ...     _ = table | beam.Map(lambda batch: print(batch.to_pylist()))
    [{'text': 'fine'}]

    The files are found and their columns checked when the transform is made, before the pipeline runs.

    Args:
      pattern: files on any of Beam's file systems, as ``FileSystems.match`` takes them, or a list of patterns. A folder
        means all table files in it, and those in folders below it that are named ``column=value``; these names become
        columns. Files whose names begin with ``_`` or ``.`` are left out. If a folder has images, recordings, PDFs or
        texts, and no table, each of these files is a row, also those in folders below it. The columns are ``path``,
        ``size``, ``modified`` and ``bytes``. Or the name of a table: ``iceberg:CATALOG.NAMESPACE.TABLE``,
        ``delta:FOLDER``, ``hf:DATASET/SPLIT`` or ``lance:FOLDER.lance``.
      columns: the columns to read; None reads all but the ``bytes`` of files that are rows. Other columns are not
        decoded, and no file is opened if ``bytes`` is not read.
      where: a condition on rows, such as ``pyarrow.compute.field("stars") >= 4``, on any column. Row groups of Parquet
        whose statistics exclude the condition are not read.
      schema: the columns of the files; None takes those of the first file that has any. Every file must have these
        columns, in any order. The types of CSV and JSON lines are guessed from the first megabyte of that file: pass a
        schema if that guess would be wrong.
      format: ``"parquet"``, ``"jsonl"``, ``"csv"``, ``"tsv"``, ``"arrow"`` or ``"webdataset"``, for files whose names
        do not tell; ``"files"`` makes each file a row, whatever its name is.
      rows_per_batch: the most rows of a batch. Choose fewer if each row is a lot of work: batches are what workers
        share.
      delimiter: the character between the values of CSV. None recognises a comma, a semicolon, a tab or a bar by the
        first rows of each file; in files named ``.tsv`` it is a tab.
      encoding: the encoding of CSV, such as ``"cp1252"``. None recognises UTF-8, and UTF-16 by its byte-order mark.
      newlines_in_values: whether quoted values of CSV may contain line breaks. Large local files are then scanned
        before they are cut, and files on other file systems are read in one piece. False promises that no value has
        any: then these files are cut, too.
      null_values: the texts that mean null in CSV, unless they are quoted. In columns of numbers, times and booleans,
        ``NA``, ``N/A``, ``#N/A``, ``NULL``, ``None`` and the like are null in any case, and so is a quoted empty value.
      decimal_point: ``","`` reads numbers of CSV such as ``1,5``; otherwise they are texts.
      max_bytes: the most bytes of a file that is a row, or of a member of a shard; larger ones can't be read. 64 MiB
        unless given.

    A line that can't be read ends the run with an error that shows it. :meth:`with_exception_handling` collects such
    lines instead.

    The counters in the namespace ``"ReadTable"`` are ``rows_read`` (rows that were emitted), ``bytes_read`` (bytes of
    the files that are done), ``files_read`` and ``lines_unreadable``.
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
        delimiter: str | None = None,
        encoding: str | None = None,
        newlines_in_values: bool = True,
        null_values: Sequence[str] = ("",),
        decimal_point: str = ".",
        max_bytes: int | None = None,
    ) -> None:
        super().__init__()
        if rows_per_batch < 1:
            raise TableError(f"found rows_per_batch={rows_per_batch}, expected 1 or more")
        if schema is not None and not isinstance(schema, pa.Schema):
            raise TableError(f"found schema= of type {type(schema).__name__}, expected pyarrow.schema(...)")
        patterns = [pattern] if isinstance(pattern, str | os.PathLike) else pattern
        self._patterns = [os.fspath(each) for each in patterns]
        csv = CsvStyle(delimiter, encoding, newlines_in_values, tuple(null_values), decimal_point)
        self._unreadable: list[Unreadable] = []  # among the lines that types were guessed from
        self._doubts: list[TableError] = []
        named = open_by_name(self._patterns)
        if named is not None:
            if schema is not None or format is not None or max_bytes is not None or csv != CsvStyle():
                raise TableError(
                    f"{named.name}: found schema=, format=, max_bytes= or an argument for CSV, which are for files",
                    fix=Fix("leave them out", command="leave out --delimiter and --encoding"),
                )
            self._open_named(named, columns, where, rows_per_batch)
            return
        left_out: list[str] = []
        self._files: Sequence[TableFile] = find_files(
            self._patterns, None if format is None else _format(format), left_out
        )
        _check_files(self._files, csv)
        _check_rows(self._files, schema, max_bytes)
        if columns is None and self.has_files:
            columns = [name for name in FILE_COLUMNS.names if name != BYTES]
        partition = partition_schema(self._files, schema)
        doubts: dict[str, TableError] = {}
        stored, origin = _stored(self._files, schema, partition, csv, self._unreadable, doubts.__setitem__)
        selection = select(stored, partition, columns, where, origin)
        self._doubts = [doubt for name, doubt in doubts.items() if name in selection.output.names]
        if left_out:
            self._doubts.append(_not_read(left_out))
        self._settings = Settings(selection, csv, rows_per_batch, max_bytes=max_bytes or MAX_BYTES)

    def _open_named(self, table: NamedTable, columns: Sequence[str] | None, where: Any, rows_per_batch: int) -> None:
        """Plan to read a table that is no pattern of files."""
        selection = select(table.stored, table.partition, columns, where, table.name)
        self._files = table.parts(where)
        self._settings = Settings(selection, CsvStyle(), rows_per_batch, table=table)

    @property
    def schema(self) -> pa.Schema:
        """The schema of the batches that are read."""
        return self._settings.selection.output

    @property
    def files(self) -> Sequence[TableFile]:
        """The files of the table, sorted by path."""
        return self._files

    @property
    def has_files(self) -> bool:
        """Whether each file is a row."""
        return bool(self._files) and self._files[0].format is Format.FILES  # a table that has a name may be empty

    @property
    def has_lines(self) -> bool:
        """Whether there may be lines that can't be read, or files or members of shards that are rows."""
        if self.has_files:
            return BYTES in self._settings.selection.loaded.names
        return any(file.format.is_text or file.format is Format.WEBDATASET for file in self._files)

    def take_doubts(self) -> list[TableError]:
        """Return what is doubtful about guessed types, and about files that were left out, and forget it.

        The caller shows it.

        Otherwise, it is logged as a warning when the pipeline is built.
        """
        taken, self._doubts = self._doubts, []
        return taken

    def with_exception_handling(self) -> ReadTable:
        """Collect lines of CSV and JSON lines that can't be read: the transform returns two tables, ``(good, bad)``.

        Each row of ``bad`` is such a line: its file in ``_file``, its number from 1 in ``_line`` (null deep in a file
        of more than a gigabyte), the line itself in ``_text`` and the reason in ``_reason``. If files are rows, each
        row of ``bad`` is a file; of a shard, it has the key in ``_text``.

        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "reviews.csv")
        >>> with open(path, "w") as file:
        ...     _ = file.write("text,stars\\nfine,4\\npoor\\n")
        >>> with beam.Pipeline("FnApiRunner") as pipeline:
        ...     good, bad = pipeline | ReadTable(path).with_exception_handling()
        ...     _ = bad | beam.Map(lambda batch: print(batch.select(["_line", "_text", "_reason"]).to_pylist()))
        [{'_line': 3, '_text': 'poor', '_reason': 'found 1 value, expected 2 as in the header'}]
        """
        self._settings = replace(self._settings, keeps_unreadable=True)
        return self

    def first(self, rows: int) -> list[pa.RecordBatch]:
        """Read the first rows in this process, without a pipeline, to look at a table or to try something on it.

        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "numbers.csv")
        >>> with open(path, "w") as file:
        ...     _ = file.write("n\\n1\\n2\\n3\\n")
        >>> [batch.to_pydict() for batch in ReadTable(path).first(2)]
        [{'n': [1, 2]}]
        """
        return first_rows(self._files, self._settings, rows)[0]

    def first_with_letters(self, rows: int) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch]]:
        """Read the first rows as :meth:`first` does; return them, and the lines that could not be read on the way."""
        found, unreadable = first_rows(self._files, self._settings, rows)
        return found, [letters(unreadable)] if unreadable else []

    def count(self) -> RowCount | None:
        """Return the number of rows, including those that ``where`` leaves out, or None if it can't be told.

        Footers of Parquet have it; for CSV and JSON lines it is estimated from the first rows.
        """
        return count_rows(self._files, self._settings.csv)

    def all(self, on_unreadable: Report = raise_unreadable) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Read all rows in this process, in the order of the files; yield the path of the file with each batch.

        ``on_unreadable`` is called with each line that can't be read; by default, the first one raises.
        """
        return all_rows(self._files, self._settings, on_unreadable)

    def expand(self, input_or_inputs: Any) -> Any:
        """Cut the files into ranges of bytes, and read these in parallel."""
        if self._unreadable and not self._settings.keeps_unreadable:
            raise self._unreadable[0].error()
        for doubt in self.take_doubts():
            _LOGGER.warning("%s", doubt)
        files = self._emit_files(input_or_inputs)
        read = beam.ParDo(ReadRanges(self._settings))
        if not self._settings.keeps_unreadable:
            return remember_schema(files | "Read" >> read.with_output_types(pa.RecordBatch), self.schema)
        outputs = files | "Read" >> read.with_outputs(UNREADABLE, main="good").with_output_types(pa.RecordBatch)
        bad = outputs[UNREADABLE]
        bad.element_type = pa.RecordBatch
        remember_schema(bad, LETTERS)
        return remember_schema(outputs.good, self.schema), bad

    def _emit_files(self, pipeline: Any) -> Any:
        return pipeline | "Files" >> beam.Create(self._files, reshuffle=False)

    def annotations(self) -> dict[str, Any]:
        """Return the transform's annotations, with the files that it reads."""
        places = [
            {"path": each}
            if "://" in each or is_name(each)
            else {"path": os.path.abspath(each), "is_relative": not os.path.isabs(each)}
            for each in self._patterns
        ]
        return {**super().annotations(), READS: json.dumps(places)}

    def display_data(self) -> dict[str, Any]:
        """Return the patterns and the number of files."""
        return {"pattern": ", ".join(self._patterns), "files": len(self._files)}


def _format(name: str) -> Format:
    try:
        return Format(name)
    except ValueError:
        raise TableError(f"found format={name!r}, expected one of {', '.join(each.value for each in Format)}") from None


def _check_files(files: Sequence[TableFile], csv: CsvStyle) -> None:
    if not files:
        raise TableError("found pattern=[], expected at least one pattern")
    for file in files:
        if file.compression is not None and file.format in (Format.PARQUET, Format.ARROW):
            raise TableError(
                f"{file.path}: found a {file.format.value} file that is compressed as a whole with {file.compression}, "
                "expected one whose columns are compressed",
                fix="decompress the file",
            )
    if csv != CsvStyle() and not any(file.format.is_csv for file in files):
        raise TableError(
            "found delimiter=, encoding=, newlines_in_values=, null_values= or decimal_point=, which are for CSV, "
            f"but no CSV file: the first file is {files[0].path}",
            fix=Fix("pass format='csv' if the files are CSV", command="leave out --delimiter and --encoding"),
        )


def _check_rows(files: Sequence[TableFile], schema: pa.Schema | None, max_bytes: int | None) -> None:
    """Check what only tables have whose rows are files or members of shards."""
    kinds = {file.format for file in files}
    if max_bytes is not None and (max_bytes < 1 or not kinds & {Format.FILES, Format.WEBDATASET}):
        where = "for tables whose rows are files or members of tar files"
        raise TableError(f"found max_bytes={max_bytes}, expected 1 or more, {where}")
    if Format.FILES not in kinds:
        return
    if len(kinds) > 1:
        table = next(file for file in files if file.format is not Format.FILES)
        row = next(file for file in files if file.format is Format.FILES)
        raise TableError(
            f"found files that are rows, such as {row.path}, beside a table, {table.path}",
            fix="name only one kind, or pass format='files' to make each file a row",
        )
    if schema is not None:
        raise TableError(f"found schema=, but files as rows have the columns {', '.join(FILE_COLUMNS.names)}")
    members = [member for file in files for member in file.members]
    is_local = FileSystems.get_scheme(members[0].path) is None
    if not any(each.size and (not is_local or os.access(each.path, os.R_OK)) for each in members):
        raise TableError(
            f"found {len(members):,} files, such as {members[0].path}, which are all empty, or which this user may not "
            "read",
            fix="check what wrote them",
        )


def _not_read(paths: Sequence[str]) -> TableError:
    """Return what to say about files of a folder that are not read."""
    count = "1 file is" if len(paths) == 1 else f"{len(paths):,} files are"
    return TableError(
        f"{count} not read: {list_some(paths, _SHOWN_FILES)}; a folder means the files in it whose names tell a "
        "format, and those in folders named column=value; or its images, recordings, PDFs and texts if it has no table"
    )


def _stored(
    files: Sequence[TableFile],
    given: pa.Schema | None,
    partition: pa.Schema,
    csv: CsvStyle,
    unreadable: list[Unreadable],
    doubts: Doubts,
) -> tuple[pa.Schema, str]:
    """Return the columns that every file must have, and the argument or file that they come from."""
    if given is not None:
        return pa.schema([field for field in given if field.name not in partition.names]), "schema="
    for file in files:
        found = schema_of(file, csv, unreadable.append, doubts)
        if found is not None:
            return found, file.path
    if unreadable:
        raise unreadable[0].error()
    name = files[0].path
    found = f"{name} is empty" if len(files) == 1 else f"all {len(files)} files are empty, the first is {name}"
    expected = "a header" if files[0].format.is_csv else "rows"
    raise TableError(f"{found}, expected {expected}", fix=Fix("pass schema=", command="check what wrote it"))
