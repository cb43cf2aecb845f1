"""Records as tables."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.utils.timestamp import Timestamp

from luminosity import KafkaRecord, ReadKafka
from luminosity.errors import KafkaError
from luminosity.io.kafka.deserialize import deserializer
from luminosity.io.kafka.emit import TableEmitter, Tally, table_schema
from luminosity.io.kafka.progress import TimestampPolicy
from luminosity.tables.schemas import known_schema
from luminosity.testing import KafkaBroker

_NOW = 1_800_000_000_000_000
_STARS = pa.schema([("stars", pa.int8()), ("text", pa.string())])


def emit(records: list[KafkaRecord], value: Any = "bytes", schema: Any = None, *, keeps: bool = True) -> list[Any]:
    policy = TimestampPolicy.of("record", 0)
    columns = table_schema("utf8", value, schema)
    emitter = TableEmitter(policy, deserializer("utf8", value), columns, has_fields=schema is not None)
    emitter.keeps_unreadable = keeps
    return list(emitter.emit(records, _NOW, Tally()))


def record(offset: int, value: bytes | None, timestamp: int = 5_000, key: bytes | None = b"k") -> KafkaRecord:
    return KafkaRecord("t", 2, offset, timestamp, 1, key, value, (("a", b"1"), ("a", None)))


def test_columns_of_the_value_and_of_the_record() -> None:
    (found,) = emit([record(7, b"fine", 5_000), record(9, None, 3_000, None), record(10, b"", -1)])
    assert found.timestamp == Timestamp(3)
    rows = found.value.to_pylist()
    assert [row["value"] for row in rows] == [b"fine", None, b""]
    assert [row["_deleted"] for row in rows] == [False, True, False]
    assert [row["_key"] for row in rows] == ["k", None, "k"]
    assert {(row["_topic"], row["_partition"], row["_timestamp_type"]) for row in rows} == {("t", 2, 1)}
    assert [row["_offset"] for row in rows] == [7, 9, 10]
    assert [row["_timestamp"].timestamp() for row in rows] == [5, 3, _NOW / 1e6]
    assert rows[0]["_headers"] == [("a", b"1"), ("a", None)]


def test_fields_become_columns() -> None:
    (found,) = emit([record(7, b'{"stars": 5, "other": 1}'), record(8, None)], "json", _STARS)
    assert found.value.schema.names[:2] == ["stars", "text"]
    assert found.value.select(["stars", "text", "_deleted"]).to_pylist() == [
        {"stars": 5, "text": None, "_deleted": False},
        {"stars": None, "text": None, "_deleted": True},
    ]


def test_rows_that_do_not_fit_are_dead_letters() -> None:
    values = [b'{"stars": 5}', b'{"stars": "five"}', b"[1]", b"{", b'{"stars": 500}', b'{"stars": 4}']
    found = emit([record(n, value) for n, value in enumerate(values)], "json", _STARS)
    letters, table = found[:-1], found[-1]
    assert table.value.column("_offset").to_pylist() == [0, 5]
    reasons = {letter.value.value[0].offset: letter.value.value[1] for letter in letters}
    assert sorted(reasons) == [1, 2, 3, 4]
    assert "column 'stars'" in reasons[1]
    assert reasons[2] == "the value is of type list, expected fields"
    assert "not JSON" in reasons[3]
    assert all(letter.value.value[0].value == values[letter.value.value[0].offset] for letter in letters)
    assert emit([record(1, b"[1]")], "json", _STARS)[0].tag == "unreadable"


def test_without_dead_letters_a_row_that_does_not_fit_raises() -> None:
    with pytest.raises(KafkaError, match=r"t\[2\] offset 8: column 'stars'"):
        emit([record(7, b'{"stars": 5}'), record(8, b'{"stars": "five"}')], "json", _STARS, keeps=False)


def test_a_table_in_a_pipeline_never_crosses_partitions() -> None:
    with KafkaBroker({"t": 2}) as broker:
        broker.produce_many("t", [{"value": f"v{n}", "partition": n % 2} for n in range(20)])
        with beam.Pipeline("FnApiRunner") as pipeline:
            table = pipeline | ReadKafka(broker.bootstrap_servers, "t", stop="now", value="utf8", as_table=True)
            assert table.element_type is pa.RecordBatch
            assert known_schema(table) == table_schema("bytes", "utf8", None)

            def check(batch: pa.RecordBatch) -> list[str]:
                assert len(set(batch.column("_partition").to_pylist())) == 1
                return batch.column("value").to_pylist()

            values = table | beam.FlatMap(check)
            beam.testing.util.assert_that(values, beam.testing.util.equal_to([f"v{n}" for n in range(20)]))
