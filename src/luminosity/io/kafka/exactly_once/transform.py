"""The transform of a write that Kafka has exactly once."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
from apache_beam.transforms.window import GlobalWindows

from luminosity.io.kafka.exactly_once.batches import NumberDoFn, PackDoFn
from luminosity.io.kafka.exactly_once.commit import CommitDoFn
from luminosity.io.kafka.exactly_once.sink import ExactlyOnce
from luminosity.io.kafka.outgoing import UNWRITTEN, RecordParts
from luminosity.io.kafka.producer import MESSAGE_MAX_BYTES
from luminosity.runs.run_ids import AT_INTERVALS

__all__ = ["WriteExactlyOnce"]


class WriteExactlyOnce(beam.PTransform[Any, Any]):
    """Writes elements to Kafka, each once. ``WriteKafka`` applies it.

    Records with the same key go to the same shard, in batches. A stateful step gives the batches of a shard numbers.
    Behind it is a ``Reshuffle``: batches come out of it when the checkpoint has them, so a number means the same batch
    forever. Then a stateful step writes them in this order. Each of its transactions also commits the next number, as
    the offset of a group. So after a crash, Kafka says which of the batches that come again it has.
    """

    def __init__(self, how: ExactlyOnce, parts: RecordParts, *, keeps_unwritten: bool) -> None:
        super().__init__()
        self._how = how
        self._parts = parts
        self._keeps_unwritten = keeps_unwritten

    def expand(self, input_or_inputs: Any) -> Any:
        """Return the numbers of records that Kafka has, and dead letters if these are collected."""
        how = self._how
        how.check(input_or_inputs.pipeline)
        most_bytes = how.client.number("message.max.bytes", MESSAGE_MAX_BYTES)
        packing = PackDoFn(self._parts, how.shards, most_bytes, keeps_unwritten=self._keeps_unwritten)
        packed = input_or_inputs | "Pack" >> beam.ParDo(packing).with_outputs(UNWRITTEN, main="packed")
        packed.packed.element_type = tuple[int, bytes]
        written = (
            packed.packed
            | beam.WindowInto(GlobalWindows())
            | "Number" >> beam.ParDo(NumberDoFn(how.start)).with_output_types(tuple[int, bytes])
            | AT_INTERVALS >> beam.Reshuffle()
            | "Commit" >> beam.ParDo(CommitDoFn(how)).with_output_types(tuple[str, int])
        )
        return (written, packed[UNWRITTEN]) if self._keeps_unwritten else written
