"""Elements of a bundle, gathered into blocks by key: one vector at a time would be slow."""

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

_BLOCK_BYTES = 8 << 20
_HELD_BYTES = 32 << 20


class Gather(beam.PTransform[Any, Any]):
    """Into pairs of a key and a block. Without keys there is a block even if there are no rows: a test can say so."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader = reader

    def expand(self, input_or_inputs: Any) -> Any:
        kind = tuple[Any, HashedRows]
        blocks = input_or_inputs | "Gather" >> beam.ParDo(_GatherDoFn(self._reader)).with_output_types(kind)
        if self._reader.key_name is not None or not isinstance(blocks.windowing.windowfn, GlobalWindows):
            return blocks
        nothing = HashedRows(np.empty(0, dtype=np.uint64), np.empty((0, 0)))
        empty = blocks.pipeline | "NoRows" >> beam.Create([(None, nothing)]).with_output_types(kind)
        return (blocks, empty) | "OrNoRows" >> beam.Flatten()


@dataclass
class _Held:
    """Of one key and window. ``matrices`` become blocks when no more are waited for."""

    timestamp: Any
    blocks: list[HashedRows] = field(default_factory=list[HashedRows])
    matrices: list[Any] = field(default_factory=list[Any])


class _GatherDoFn(beam.DoFn):
    """A block never crosses a window, and none outlives its bundle."""

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
            for of_row, block in self._reader.of_table(rows):
                self._hold(of_row if key is None else key, window, timestamp).blocks.append(block)
                self._bytes += block.rows.nbytes
        else:
            self._hold(key, window, timestamp).matrices.append(rows)
            self._bytes += rows.nbytes
        if self._bytes > _HELD_BYTES:
            yield from self.finish_bundle()

    def finish_bundle(self) -> Iterator[WindowedValue]:  # type: ignore[override]  # Beam's says None, and takes these.
        for (key, window), held in self._held.items():
            for block in by_width([*held.blocks, *self._reader.of_matrices(held.matrices)]):
                for piece in block.pieces(_BLOCK_BYTES):
                    yield WindowedValue((key, piece), held.timestamp, (window,))
        self.start_bundle()

    def _hold(self, key: Any, window: Any, timestamp: Any) -> _Held:
        held = self._held.setdefault((key, window), _Held(timestamp))
        held.timestamp = min(held.timestamp, timestamp)
        return held
