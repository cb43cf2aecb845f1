"""The rows of a table, without a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

import pyarrow as pa

from luminosity.io.reading.files import TableFile
from luminosity.io.reading.opening import readable
from luminosity.io.reading.ranges import EVERYTHING
from luminosity.io.reading.readers import Settings, open_reader

__all__ = ["all_rows", "first_rows"]


def first_rows(files: Sequence[TableFile], settings: Settings, count: int) -> list[pa.RecordBatch]:
    """No more is read than the batches, blocks or row groups that have them."""
    found: list[pa.RecordBatch] = []
    for _, batch in all_rows(files, settings):
        found.append(batch.slice(0, count))
        count -= found[-1].num_rows
        if not count:
            break
    return [batch for batch in found if batch.num_rows]


def all_rows(files: Sequence[TableFile], settings: Settings) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Each batch with the path of its file."""
    for file in files:
        with readable(file), closing(open_reader(file, settings)) as reader:
            for batch in reader.batches(0, EVERYTHING, lambda position: position):
                yield file.path, settings.wanted.finish(batch, file.partition)
