"""Kafka → JSON → a count per key in state → Kafka: ``count_by_luminosity.py SERVERS --cpu_workers=2``.

With ``tables`` after the servers, records come as tables, whose JSON Arrow has parsed.
"""

import json
import sys
from collections.abc import Iterable
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.coders import VarIntCoder
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec

from luminosity import KafkaRecord, LuminosityRunner, ReadKafka, WriteKafka

_SEEN = beam.DoFn.StateParam(ReadModifyWriteStateSpec("seen", VarIntCoder()))


class Count(beam.DoFn):
    """Emits how often a key has been there, for each of its elements."""

    def process(self, element: tuple[str, int], seen: Any = _SEEN) -> Iterable[tuple[str, str]]:
        count = (seen.read() or 0) + 1
        seen.write(count)
        yield element[0], str(count)


def parse(record: KafkaRecord) -> tuple[str, int]:
    value = json.loads(record.value)
    return value["key"], value["n"]


def rows_of(table: pa.RecordBatch) -> Iterable[tuple[str, int]]:
    return zip(table["key"].to_pylist(), table["n"].to_pylist(), strict=True)


_SCHEMA = pa.schema({"key": pa.string(), "n": pa.int64()})


if __name__ == "__main__":
    servers, *flags = sys.argv[1:]
    with beam.Pipeline(LuminosityRunner(), PipelineOptions(flags)) as pipeline:
        if "tables" in flags:
            tables = pipeline | ReadKafka(servers, "in", stop="now", value="json", schema=_SCHEMA, as_table=True)
            numbers = tables | beam.FlatMap(rows_of).with_output_types(tuple[str, int])
        else:
            records = pipeline | ReadKafka(servers, "in", stop="now")
            numbers = records | beam.Map(parse).with_output_types(tuple[str, int])
        counts = numbers | beam.ParDo(Count()).with_output_types(tuple[str, str])
        _ = counts | WriteKafka(servers, "out")
