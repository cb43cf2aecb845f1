"""Records that are rare in tests and frequent in topics, as records, values and rows, and written again."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import fastavro
import pyarrow as pa
import pytest

from luminosity import ReadKafka, WriteKafka
from luminosity.testing import KafkaBroker, ScriptedKafka
from tests.runners import collect_all

_AT = 1_700_000_000_000
_MEGABYTE = b"x" * 1_000_000
_HEADERS = (("a", b"1"), ("a", b"2"), ("b", None), ("", b""), ("ü", b"\xff"))

# Offset: key, value, headers, timestamp, its type.
_ODD: dict[int, tuple[Any, ...]] = {
    0: (b"gone", None, (), _AT, 1),  # a tombstone
    1: (None, None, (), _AT, 1),  # neither key nor value
    2: (None, b"", (), _AT, 1),
    3: (b"", b"{}", (), _AT, 1),
    4: (b"large", _MEGABYTE, (), _AT, 1),
    5: (b"headers", b"1", _HEADERS, _AT, 1),
    6: (b"\xff\xfe", b"\xff\xfe", (), _AT, 1),  # not UTF-8
    7: (b"not JSON", b'{"n": ', (), _AT, 1),
    8: (b"1970", b"[]", (), 0, 1),
    9: (b"no time", b"null", (), -1, 0),
    # 10 to 12 were compacted
    13: (b"appended", b'{"n": 7}', (), _AT, 2),
    # 14 was aborted, 15 is the marker of that
    16: (b"committed", b'"\\ud800"', (), _AT, 1),  # and 17 is its marker
}
_ABORTED = (b"aborted", b"0", (), _AT, 1)


@pytest.fixture(scope="module")
def kafka() -> Iterator[ScriptedKafka]:
    with ScriptedKafka({"odd": 1, "avro": 1}) as made:

        def put(record: tuple[Any, ...], offset: int, **more: Any) -> None:
            key, value, headers, timestamp, kind = record
            arguments = {"key": key, "headers": headers, "timestamp": timestamp, "timestamp_type": kind}
            made.produce("odd", value, offset=offset, **arguments, **more)

        for offset, record in _ODD.items():
            if offset == 16:
                put(_ABORTED, 14, transaction="first")
                made.end_transaction("first", commit=False)
                put(record, 16, transaction="second")
                made.end_transaction("second")
            else:
                put(record, offset)
        made.produce("odd", "open", transaction="third")  # It never ends.
        made.produce("odd", "behind it")
        yield made


def read_all(folder: Path, **reads: Any) -> dict[str, list[Any]]:
    """Run one pipeline with several reads; return the elements of each."""
    found, _ = collect_all(
        lambda pipeline: {name: pipeline | name >> read for name, read in reads.items()},
        folder,
        beam.Pipeline("FnApiRunner"),
    )
    return found


def test_as_records_and_as_values(kafka: ScriptedKafka, tmp_path: Path) -> None:
    found = read_all(
        tmp_path,
        records=ReadKafka(kafka.client, "odd", stop="now"),
        values=ReadKafka(kafka.client, "odd", stop="now", values_only=True),
        uncommitted=ReadKafka(kafka.client, "odd", stop="now", isolation_level="read_uncommitted"),
    )
    records = sorted(found["records"], key=lambda record: record.offset)
    made = {r.offset: (r.key, r.value, r.headers, r.timestamp, r.timestamp_type) for r in records}
    assert made == _ODD
    assert [record.is_tombstone for record in records[:4]] == [True, True, False, False]
    assert found["values"] == [record[1] for record in _ODD.values()], "in the order of the partition"
    uncommitted = {r.offset: (r.key, r.value, r.headers, r.timestamp, r.timestamp_type) for r in found["uncommitted"]}
    assert {**_ODD, 14: _ABORTED}.items() <= uncommitted.items()
    assert sorted(uncommitted) == sorted([*_ODD, 14, 18, 19])


def test_as_a_table(kafka: ScriptedKafka, tmp_path: Path) -> None:
    before = time.time()
    found = read_all(tmp_path, table=ReadKafka(kafka.client, "odd", stop="now", as_table=True))
    rows = [row for batch in found["table"] for row in batch.to_pylist()]
    assert [row["_offset"] for row in rows] == list(_ODD)
    for row in rows:
        key, value, headers, timestamp, kind = _ODD[row["_offset"]]
        assert (row["_key"], row["value"], row["_timestamp_type"]) == (key, value, kind)
        assert row["_deleted"] is (value is None)
        assert row["_headers"] == [*headers]
        if timestamp != -1:
            assert row["_timestamp"].timestamp() == timestamp / 1000
        else:
            assert before - 1 <= row["_timestamp"].timestamp() <= time.time() + 1, "when it was read"


def test_what_is_not_text_or_json_is_a_dead_letter(kafka: ScriptedKafka, tmp_path: Path) -> None:
    schema = pa.schema([("n", pa.int8())])

    def build(pipeline: beam.Pipeline) -> dict[str, beam.PCollection]:
        texts = ReadKafka(kafka.client, "odd", stop="now", key="utf8", value="utf8", values_only=True)
        objects = ReadKafka(kafka.client, "odd", stop="now", value="json")
        table = ReadKafka(kafka.client, "odd", stop="now", value="json", as_table=True, schema=schema)
        names = ("texts", "no_texts", "objects", "no_objects", "table", "no_rows")
        reads = {"Texts": texts, "Objects": objects, "Table": table}
        made = [each for name, read in reads.items() for each in pipeline | name >> read.with_exception_handling()]
        return dict(zip(names, made, strict=True))

    found, _ = collect_all(build, tmp_path, beam.Pipeline("FnApiRunner"))
    texts = [record[1] if record[1] is None else record[1].decode() for n, record in _ODD.items() if n != 6]
    assert found["texts"] == texts
    assert [(record.offset, reason) for record, reason in found["no_texts"]] == [
        (6, "the key is not UTF-8: invalid start byte at byte 0")
    ]
    objects = {record.offset: record.value for record in found["objects"]}
    assert objects == {0: None, 1: None, 3: {}, 5: 1, 8: [], 9: None, 13: {"n": 7}, 16: "\ud800"}
    reasons = {record.offset: reason for record, reason in found["no_objects"]}
    assert {offset: reason[:20] for offset, reason in reasons.items()} == {
        2: "the value is not JSO",
        4: "the value is not JSO",
        6: "the value is not UTF",
        7: "the value is not JSO",
    }
    rows = [row for batch in found["table"] for row in batch.to_pylist()]
    assert {row["_offset"]: (row["n"], row["_deleted"]) for row in rows} == {
        0: (None, True),
        1: (None, True),
        3: (None, False),
        9: (None, True),  # JSON's null
        13: (7, False),
    }
    letters = {record.offset: record for record, _ in found["no_rows"]}
    assert sorted(letters) == [2, 4, 5, 6, 7, 8, 16]
    assert all((letters[n].key, letters[n].value, letters[n].headers) == _ODD[n][:3] for n in letters)


def test_what_is_not_avro_is_a_dead_letter(kafka: ScriptedKafka, tmp_path: Path) -> None:
    schema = {"type": "record", "name": "Row", "fields": [{"name": "n", "type": "int"}]}
    good = io.BytesIO()
    fastavro.schemaless_writer(good, schema, {"n": 7})
    kafka.produce_many("avro", [("a", good.getvalue()), ("b", b"\xff" * 20), ("c", b""), ("d", None)])

    def build(pipeline: beam.Pipeline) -> dict[str, beam.PCollection]:
        records = ReadKafka(kafka.client, "avro", stop="now", value=schema).with_exception_handling()
        table = ReadKafka(
            kafka.client, "avro", stop="now", value=schema, as_table=True, schema=pa.schema([("n", pa.int8())])
        )
        good, bad = pipeline | "Records" >> records
        rows, bad_rows = pipeline | "Table" >> table.with_exception_handling()
        return {"good": good, "bad": bad, "rows": rows, "bad_rows": bad_rows}

    found, _ = collect_all(build, tmp_path, beam.Pipeline("FnApiRunner"))
    assert [(record.key, record.value) for record in found["good"]] == [(b"a", {"n": 7}), (b"d", None)]
    rows = [row for batch in found["rows"] for row in batch.to_pylist()]
    assert [(row["_key"], row["n"], row["_deleted"]) for row in rows] == [(b"a", 7, False), (b"d", None, True)]
    for name in ("bad", "bad_rows"):
        assert [(record.key, record.value) for record, _ in found[name]] == [(b"b", b"\xff" * 20), (b"c", b"")]
        assert all("the value" in reason for _, reason in found[name])


def test_they_are_written_as_they_were_read(kafka: ScriptedKafka) -> None:
    """A record without a time gets one, and the client can't write the time 0."""
    before = time.time()
    with KafkaBroker({"records": 1, "rows": 1, "values": 1}) as broker:
        servers = broker.bootstrap_servers
        with beam.Pipeline("FnApiRunner") as pipeline:
            records = pipeline | "Records" >> ReadKafka(kafka.client, "odd", stop="now")
            _ = records | "WriteRecords" >> WriteKafka(servers, "records")
            table = pipeline | "Rows" >> ReadKafka(kafka.client, "odd", stop="now", as_table=True)
            _ = table | "WriteRows" >> WriteKafka(
                servers, "rows", key="_key", value="value", headers="_headers", timestamp="_timestamp"
            )
            values = pipeline | "Values" >> ReadKafka(kafka.client, "odd", stop="now", values_only=True)
            _ = values | "WriteValues" >> WriteKafka(servers, "values")
        for topic in ("records", "rows"):
            written = broker.consume(topic)
            assert [(r.key, r.value, r.headers) for r in written] == [record[:3] for record in _ODD.values()]
            for record, (_, _, _, timestamp, _) in zip(written, _ODD.values(), strict=True):
                if timestamp == -1:
                    assert record.timestamp >= before * 1000 - 1
                else:
                    assert record.timestamp == max(timestamp, 1)
        assert [record.value for record in broker.consume("values")] == [record[1] for record in _ODD.values()]
