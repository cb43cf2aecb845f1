"""The reader for each format."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from luminosity.io.formats import Format
from luminosity.io.reading.arrow import ArrowReader, arrow_schema
from luminosity.io.reading.csv_lines import CsvReader, CsvStyle, csv_schema
from luminosity.io.reading.files import TableFile
from luminosity.io.reading.json_lines import JsonLinesReader, json_lines_schema
from luminosity.io.reading.opening import readable
from luminosity.io.reading.parquet import ParquetReader, parquet_schema
from luminosity.io.reading.reader import Reader
from luminosity.io.reading.wanted import Wanted

__all__ = ["Settings", "open_reader", "schema_of"]


@dataclass(frozen=True)
class Settings:
    wanted: Wanted
    csv: CsvStyle
    rows_per_batch: int


def open_reader(file: TableFile, settings: Settings) -> Reader:
    if file.format is Format.PARQUET:
        return ParquetReader(file, settings.wanted, settings.rows_per_batch)
    if file.format is Format.ARROW:
        return ArrowReader(file, settings.wanted)
    if file.format is Format.CSV:
        return CsvReader(file, settings.wanted, settings.csv)
    return JsonLinesReader(file, settings.wanted)


def schema_of(file: TableFile, csv: CsvStyle) -> pa.Schema | None:
    """The columns of a file; None where it is text with nothing in it."""
    with readable(file):
        if file.format is Format.PARQUET:
            return parquet_schema(file)
        if file.format is Format.ARROW:
            return arrow_schema(file)
        return csv_schema(file, csv) if file.format is Format.CSV else json_lines_schema(file)
