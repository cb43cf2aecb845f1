"""Gathers the vectors of a bundle into matrices by key: single vectors would be slow to process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.transforms.window import GlobalWindows, WindowedValue

from luminosity.drift.transforms.elements import Reader
from luminosity.drift.transforms.hashed_rows import HashedRows, by_width

__all__ = ["Gather"]

_ELEMENT_BYTES = 8 << 20  # rows of an element
_HELD_BYTES = 32 << 20  # rows that are held until they are passed on


class Gather(beam.PTransform[Any, Any]):
    """Turns elements into pairs of a key and ``HashedRows``.

    Without keys there is a pair even if there are no rows, so that the test can report that.
    """

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader = reader

    def expand(self, input_or_inputs: Any) -> Any:
        """Gather rows by key, and add a pair without rows, unless there are keys or windows."""
        kind = tuple[Any, HashedRows]
        rows = input_or_inputs | "Gather" >> beam.ParDo(_GatherDoFn(self._reader)).with_output_types(kind)
        if self._reader.key_name is not None or not isinstance(rows.windowing.windowfn, GlobalWindows):
            return rows
        nothing = HashedRows(np.empty(0, dtype=np.uint64), np.empty((0, 0)))
        empty = rows.pipeline | "NoRows" >> beam.Create([(None, nothing)]).with_output_types(kind)
        return (rows, empty) | "OrNoRows" >> beam.Flatten()


@dataclass
class _Held:
    """The rows of one key and window. ``matrices`` are hashed when they are passed on."""

    timestamp: Any
    hashed: list[HashedRows] = field(default_factory=list[HashedRows])
    matrices: list[Any] = field(default_factory=list[Any])


class _GatherDoFn(beam.DoFn):
    """Rows of different windows are never put together, and none are held beyond their bundle."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._held: dict[tuple[Any, Any], _Held] = {}
        self._bytes = 0

    def start_bundle(self) -> None:
        self._held, self._bytes = {}, 0

    def process(
        self, element: Any, timestamp: Any = beam.DoFn.TimestampParam, window: Any = beam.DoFn.WindowParam
    ) -> Iterator[WindowedValue]:
        key, rows = self._reader.parted(element)
        if isinstance(rows, pa.RecordBatch):
            for of_row, hashed in self._reader.of_table(rows):
                self._hold(of_row if key is None else key, window, timestamp).hashed.append(hashed)
                self._bytes += hashed.rows.nbytes
        else:
            self._hold(key, window, timestamp).matrices.append(rows)
            self._bytes += rows.nbytes
        if self._bytes > _HELD_BYTES:
            yield from self.finish_bundle()

    def finish_bundle(self) -> Iterator[WindowedValue]:  # type: ignore[override]  # Beam's annotation says None; it accepts these.
        for (key, window), held in self._held.items():
            for hashed in by_width([*held.hashed, *self._reader.of_matrices(held.matrices)]):
                for piece in hashed.pieces(_ELEMENT_BYTES):
                    yield WindowedValue((key, piece), held.timestamp, (window,))
        self.start_bundle()

    def _hold(self, key: Any, window: Any, timestamp: Any) -> _Held:
        held = self._held.setdefault((key, window), _Held(timestamp))
        held.timestamp = min(held.timestamp, timestamp)
        return held
