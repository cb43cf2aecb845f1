"""Records of a shard as batches with numbers: the steps before those that write."""

from __future__ import annotations

import marshal
import struct
import time
import zlib
from array import array
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import apache_beam as beam
import pyarrow as pa
from apache_beam.coders import VarIntCoder
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.errors import Fix, KafkaError
from luminosity.io.kafka.metrics import WriteMetrics, row_micros
from luminosity.io.kafka.outgoing import UNWRITTEN, Outgoing, RecordParts, UnwrittenRecord

__all__ = ["Batch", "NumberDoFn", "PackDoFn"]

_BATCH_BYTES = 500_000  # of records: a batch is one element of the pipeline
_RECORD_BYTES = 100  # what a record takes beside its key, value and headers, at most
_HEAD = struct.Struct(">qq8s")  # of an encoded batch: its number, when it got it in ms, and which start gave it


class Batch(NamedTuple):
    """Records of one shard, and their number."""

    number: int
    numbered_ms: int
    start: str
    records: list[Outgoing]
    times: bytes
    """The event times of the records, of 64 bits each."""
    size: int
    """Bytes of keys and values."""

    @staticmethod
    def number_of(encoded: bytes) -> int:
        """Return the number of an encoded batch."""
        return _HEAD.unpack_from(encoded)[0]

    @classmethod
    def decode(cls, encoded: bytes) -> Batch:
        """Return the batch that ``NumberDoFn`` has emitted."""
        number, numbered_ms, start = _HEAD.unpack_from(encoded)
        return cls(number, numbered_ms, start.decode(), *marshal.loads(memoryview(encoded)[_HEAD.size :]))


class _Pack:
    """Records of one shard, which become one element."""

    __slots__ = ("bytes", "first", "records", "times")

    def __init__(self, first: WindowedValue) -> None:
        self.first = first
        self.records: list[tuple[Any, ...]] = []
        self.times = array("q")
        self.bytes = 0

    def element(self, shard: int) -> WindowedValue:
        return self.first.with_value((shard, marshal.dumps((self.records, self.times.tobytes(), self.bytes))))


class PackDoFn(beam.DoFn):
    """Makes records of elements, and packs those of a bundle that go to the same shard.

    Emits the number of a shard with a batch of its records, and elements that can't be made into records.
    """

    def __init__(self, parts: RecordParts, shards: int, most_bytes: int, *, keeps_unwritten: bool) -> None:
        self._shards = shards
        self._parts = parts
        self._keeps_unwritten = keeps_unwritten
        self._turn = 0
        self._metrics = WriteMetrics()
        self._most_bytes = most_bytes - _RECORD_BYTES

    def start_bundle(self) -> None:
        """Forget a bundle that failed."""
        self._packs: dict[int, _Pack] = {}
        self._unwritten = 0
        self._turn = (self._turn + 1) % self._shards  # of the records without a key, which stay together

    def process(self, element: Any, windowed: Any = beam.DoFn.WindowedValueParam) -> Iterable[Any]:
        """Pack the element's record, or those of a table's rows."""
        if element.__class__ is pa.RecordBatch:
            return self._rows(element, windowed)
        try:
            record = self._parts.record(element)
            return self._pack(record, windowed.timestamp_micros, windowed)
        except Exception as error:
            return [self._letter(element, error, windowed)]

    def finish_bundle(self) -> Iterator[Any]:  # type: ignore[override]  # Beam declares None, and accepts these.
        """Emit what is packed."""
        for shard, pack in self._packs.items():
            yield pack.element(shard)
        if self._unwritten:
            self._metrics.count(0, 0, self._unwritten)

    def _rows(self, table: pa.RecordBatch, windowed: WindowedValue) -> Iterator[Any]:
        times = row_micros(table, windowed.timestamp_micros)
        for number, make in enumerate(self._parts.rows(table)):
            try:
                yield from self._pack(make(), int(times[number]), windowed)
            except Exception as error:
                yield self._letter(table.slice(number, 1), error, windowed)

    def _letter(self, element: Any, error: Exception, windowed: WindowedValue) -> TaggedOutput[Any, Any]:
        """Return a dead letter, or raise the error if these are not collected."""
        if not self._keeps_unwritten:
            raise error
        self._unwritten += 1
        letter = UnwrittenRecord(element, f"{type(error).__name__}: {error}")
        return TaggedOutput(UNWRITTEN, windowed.with_value(letter))

    def _pack(self, record: Outgoing, micros: int, windowed: WindowedValue) -> Iterable[Any]:
        """Pack a record. Returns the batch if it is full."""
        _, value, key, partition, _, headers = record
        size = (0 if value is None else len(value)) + (0 if key is None else len(key))
        extra = sum(len(name) + len(each or b"") for name, each in headers) if headers else 0
        if size + extra > self._most_bytes:
            raise KafkaError(
                f"found a record of {size + extra} bytes, expected at most {self._most_bytes}",
                fix=Fix(
                    "raise message.max.bytes in config= and in the brokers, or pass such records on with "
                    "WriteKafka(...).with_exception_handling()"
                ),
            )
        if partition >= 0:
            shard = partition % self._shards
        else:
            shard = self._turn if key is None else zlib.crc32(key) % self._shards
        pack = self._packs.get(shard)
        if pack is None:
            pack = self._packs[shard] = _Pack(windowed)
        pack.records.append(tuple(record))
        pack.times.append(micros)
        pack.bytes += size + extra
        if pack.bytes < _BATCH_BYTES:
            return ()
        del self._packs[shard]
        return [pack.element(shard)]


class NumberDoFn(beam.DoFn):
    """Gives the batches of a shard numbers from 0 on."""

    _NEXT = beam.DoFn.StateParam(ReadModifyWriteStateSpec("next", VarIntCoder()))

    def __init__(self, start: str) -> None:
        self._start = start.encode()

    def process(self, element: tuple[int, bytes], next_number: Any = _NEXT) -> Iterator[tuple[int, bytes]]:
        """Emit the batch with its number."""
        shard, pack = element
        number = next_number.read() or 0
        next_number.write(number + 1)
        yield shard, _HEAD.pack(number, time.time_ns() // 1_000_000, self._start) + pack
