"""Rows of a bundle, gathered into record batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.transforms.window import WindowedValue

from luminosity.errors import TableError
from luminosity.tables.batch_builder import BatchBuilder
from luminosity.tables.row_times import with_times

__all__ = ["GatherDoFn", "bytes_of_rows", "pieces"]


_MANY_WINDOWS = 1000  # at once in a bundle: bounds the memory of batches that wait

_SAMPLE = 64


class GatherDoFn(beam.DoFn):
    """Gathers rows into batches. A batch has rows of one window and one bundle."""

    def __init__(self, builder: BatchBuilder, most_rows: int, most_bytes: int, with_timestamps: bool) -> None:
        self._builder = builder
        self._most_rows = most_rows
        self._most_bytes = most_bytes
        self._with_timestamps = with_timestamps
        self._gathered: dict[Any, _Gathered] = {}

    def start_bundle(self) -> None:
        """Drop rows that a failed bundle left behind."""
        self._gathered = {}

    def get_input_batch_type(self, input_element_type: Any) -> Any:
        """Return a list of elements, so that Beam passes many rows at once."""
        return list[input_element_type]

    @beam.DoFn.yields_elements
    def process_batch(  # type: ignore[override]  # Beam passes elements of one time and window together: a tenth of the cost.
        self, batch: list[Any], timestamp: Any = beam.DoFn.TimestampParam, window: Any = beam.DoFn.WindowParam
    ) -> Iterator[WindowedValue]:
        """Add rows to the batch of their window, and emit batches that are full."""
        for rows, size in pieces(batch, bytes_of_rows(batch), self._most_rows, self._most_bytes):
            gathered = self._gathered.setdefault(window, _Gathered())
            if gathered.rows and (
                len(gathered.rows) + len(rows) > self._most_rows or gathered.size + size > self._most_bytes
            ):
                yield from self._emit(window, gathered)
                gathered = self._gathered[window] = _Gathered()
            gathered.add(rows, timestamp, size)
        everything = self._gathered.values()
        if len(everything) > _MANY_WINDOWS or (
            len(everything) > 1 and sum(gathered.size for gathered in everything) > self._most_bytes
        ):
            yield from self.finish_bundle()

    def finish_bundle(self) -> Iterator[WindowedValue]:  # type: ignore[override]  # Beam declares None, and accepts these.
        """Emit the batches of all windows."""
        for window, gathered in self._gathered.items():
            yield from self._emit(window, gathered)
        self._gathered = {}

    def _emit(self, window: Any, gathered: _Gathered) -> Iterator[WindowedValue]:
        for start, batch in self._built(gathered.rows, 0):
            timestamps = gathered.timestamps[start : start + batch.num_rows]
            if self._with_timestamps:
                batch = with_times(batch, timestamps)
            # Most timestamps are the same object, and comparing them is slow.
            earliest = min({id(timestamp): timestamp for timestamp in timestamps}.values())
            yield WindowedValue(batch, earliest, (window,))

    def _built(self, rows: list[Any], start: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield batches within the limits, with the index of their first row: only now their real size is known."""
        try:
            batch = self._builder.build(rows)
        except OverflowError as error:
            if len(rows) == 1:
                raise TableError(f"found a row with {error}") from error
            middle = len(rows) // 2
            yield from self._built(rows[:middle], start)
            yield from self._built(rows[middle:], start + middle)
            return
        is_near = batch.nbytes <= 2 * self._most_bytes
        count = len(rows) if is_near else max(1, len(rows) * self._most_bytes // batch.nbytes)
        for offset in range(0, len(rows), count):
            yield start + offset, batch.slice(offset, count)


class _Gathered:
    """The rows of one window that wait for more."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.timestamps: list[Any] = []
        self.size = 0

    def add(self, rows: list[Any], timestamp: Any, size: int) -> None:
        self.rows += rows
        self.timestamps += [timestamp] * len(rows)
        self.size += size


def bytes_of_rows(rows: list[Any]) -> int:
    """Estimate the bytes of rows from a sample of them.

    >>> bytes_of_rows([{"text": "four", "stars": 5}] * 1000)
    12000
    """
    some = rows[:: -(-len(rows) // _SAMPLE)] if len(rows) > _SAMPLE else rows
    return sum(map(_size, some)) * len(rows) // max(len(some), 1)


def pieces(rows: list[Any], size: int, most_rows: int, most_bytes: int) -> Iterator[tuple[list[Any], int]]:
    """Yield pieces of rows within both limits, with their sizes; ``size`` is that of all rows.

    >>> [(len(piece), size) for piece, size in pieces([{}] * 10, 1000, most_rows=4, most_bytes=10_000)]
    [(4, 400), (4, 400), (2, 200)]
    """
    count = max(1, min(most_rows, len(rows) * most_bytes // max(size, 1)))
    for start in range(0, len(rows), count):
        piece = rows[start : start + count]
        yield piece, size * len(piece) // len(rows)


def _size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        # All items of a list have the same type.
        first = next(iter(value), None)
        return len(value) * _size(first) if isinstance(first, int | float) else sum(map(_size, value))
    if dataclasses.is_dataclass(value) or hasattr(value, "as_dict"):
        return sum(map(_size, getattr(value, "__dict__", {}).values()))
    return int(getattr(value, "nbytes", 8))
