"""The files of a bundle: one at a time for each partition, and a bounded number of them."""

from __future__ import annotations

from collections import OrderedDict

import pyarrow as pa

from luminosity.io.writing.partitions import partitioned
from luminosity.io.writing.schemas import check_same, check_writable
from luminosity.io.writing.table_file import TableFile, Written
from luminosity.io.writing.target import Target

__all__ = ["OpenFiles"]

_MOST_FILES = 100
_MOST_WAITING_BYTES = 256 << 20  # in all of them, before they are row groups


class OpenFiles:
    """A bundle's files are given to the last step all together, or removed all together."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._schema = target.schema
        self._is_checked = False
        self._has_rows = False
        self._files: OrderedDict[str, TableFile] = OrderedDict()  # in the order of their last use
        self._done: list[Written] = []

    def add(self, batch: pa.RecordBatch) -> None:
        self._check(batch.schema)
        if batch.num_rows == 0:
            return
        self._has_rows = True
        for partition, rows in partitioned(batch, self._target.partition_by):
            rest: pa.RecordBatch | None = rows
            while rest is not None:
                rest = self._add_to(partition, rest)
        if self._target.partition_by:
            self._flush_largest()

    def close(self) -> list[Written]:
        """All files, complete. Where there was no row, an empty one tells the schema."""
        if self._is_checked and not self._has_rows and not self._target.partition_by:
            self._files[""] = TableFile(self._target, "", self._schema)
        while self._files:
            self._close(next(iter(self._files)))
        return self._done

    def abandon(self) -> None:
        """Remove all files of this bundle, also those that are complete."""
        for file in self._files.values():
            file.abandon()
        self._files.clear()
        for written in self._done:
            written.remove()
        self._done.clear()

    def _check(self, schema: pa.Schema) -> None:
        if self._schema is None:
            self._schema = schema
        if not self._is_checked:
            check_writable(self._target, schema)
            self._is_checked = True
        check_same(self._target.path, self._schema, schema)

    def _add_to(self, partition: str, rows: pa.RecordBatch) -> pa.RecordBatch | None:
        file = self._files.get(partition)
        if file is None:
            if len(self._files) >= _MOST_FILES:
                self._close(next(iter(self._files)))
            file = self._files[partition] = TableFile(self._target, partition, rows.schema)
        self._files.move_to_end(partition)
        rest = file.add(rows)
        if file.is_full:
            self._close(partition)
        return rest

    def _close(self, partition: str) -> None:
        # It stays among the open ones until it is complete, so that `abandon` finds it.
        self._done.append(self._files[partition].close(self._schema))
        del self._files[partition]

    def _flush_largest(self) -> None:
        waiting = sum(file.waiting_bytes for file in self._files.values())
        while waiting > _MOST_WAITING_BYTES:
            largest = max(self._files.values(), key=lambda file: file.waiting_bytes)
            waiting -= largest.waiting_bytes
            largest.flush()
