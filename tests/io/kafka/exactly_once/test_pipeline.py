"""``WriteKafka(exactly_once=...)`` in pipelines, and what is refused before they run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import LuminosityRunner, WriteKafka
from luminosity.errors import InvalidArgument, KafkaError
from luminosity.io.kafka.exactly_once.batches import Batch, NumberDoFn, PackDoFn
from luminosity.io.kafka.exactly_once.transactions import Progress
from luminosity.io.kafka.outgoing import RecordParts
from luminosity.testing import TransactionalKafka
from tests.marks import note, notes

_NUMBERS = 400


@pytest.fixture
def kafka() -> Iterator[TransactionalKafka]:
    with TransactionalKafka({"t": 3}) as made:
        yield made


def _pipeline(folder: Path | None) -> beam.Pipeline:
    durable = [f"--checkpoint_dir={folder}"] if folder else []
    return beam.Pipeline(LuminosityRunner(), PipelineOptions(["--progress=off", "--cpu_workers=2", *durable]))


def test_records_and_rows_are_written_once_and_counted(kafka: TransactionalKafka, tmp_path: Path) -> None:
    with _pipeline(tmp_path / "checkpoint") as pipeline:
        pairs: list[Any] = [(f"key {n % 10}", str(n)) for n in range(_NUMBERS)]
        table = pa.RecordBatch.from_pydict({"row": [1, 2]})
        elements: Any = pipeline | beam.Create([*pairs, table, 3.14, ("key", b"x" * 2_000_000)])
        write = WriteKafka(kafka.bootstrap_servers, "t", exactly_once="sink", shards=2).with_exception_handling()
        written, unwritten = elements | write
        _ = written | beam.Map(lambda count: note(tmp_path / "written", f"{count[0]} {count[1]}"))
        _ = unwritten | beam.Map(lambda letter: note(tmp_path / "unwritten", letter.reason[:50]))
    records = kafka.consume("t")
    expected = [*(str(n) for n in range(_NUMBERS)), '{"row":1}', '{"row":2}']
    assert sorted((record.value or b"").decode() for record in records) == sorted(expected)
    counts = [line.split() for line in notes(tmp_path / "written")]
    assert {topic for topic, _ in counts} == {"t"}
    assert sum(int(count) for _, count in counts) == len(expected)
    reasons = sorted(notes(tmp_path / "unwritten"))
    assert [reason[:30] for reason in reasons] == ["InvalidType: found an element ", "KafkaError: found a record of "]
    groups = [kafka.committed(f"sink-{shard}") for shard in range(2)]
    assert all(group["t", 0].offset > 0 for group in groups)
    assert len({json.loads(group["t", 0].metadata.rstrip("\0"))["run"] for group in groups}) == 1
    with pytest.raises(KafkaError, match="found exactly_once='sink', which another run has used"):
        _ = (
            _pipeline(tmp_path / "new")
            | beam.Create(["a"])
            | WriteKafka(kafka.bootstrap_servers, "t", exactly_once="sink", shards=2)
        )


def test_what_is_impossible_is_said_before_the_run(kafka: TransactionalKafka, tmp_path: Path) -> None:
    def apply(folder: Path | None = tmp_path / "checkpoint", pipeline: Any = None, **arguments: Any) -> None:
        given = {"bootstrap_servers": kafka.bootstrap_servers, "topic": "t", "exactly_once": "sink", **arguments}
        elements: Any = (pipeline or _pipeline(folder)) | beam.Create(["a"])
        _ = elements | WriteKafka(**given)

    with pytest.raises(InvalidArgument, match="without a checkpoint") as caught:
        apply(None)
    assert "--checkpoint_dir=DIR" in str(caught.value)
    with pytest.raises(InvalidArgument, match="without a checkpoint"):
        apply(pipeline=beam.Pipeline("FnApiRunner"))
    with pytest.raises(KafkaError, match="Unknown topic"):
        apply(topic="missing")
    with (
        TransactionalKafka({"t": 1}, transactions=False) as old,
        pytest.raises(KafkaError, match="transactions can't be used") as caught,
    ):
        apply(bootstrap_servers=old.bootstrap_servers)
    assert "or leave out exactly_once=" in str(caught.value)
    with (
        TransactionalKafka({"t": 1}, longest_transaction_s=60) as strict,
        pytest.raises(KafkaError, match="transactions can't be used") as caught,
    ):
        apply(bootstrap_servers=strict.bootstrap_servers)
    assert "pass a shorter delivery_timeout_s=" in str(caught.value)
    pipeline = _pipeline(tmp_path / "checkpoint")
    write = WriteKafka(kafka.bootstrap_servers, "t", exactly_once="sink")
    _ = pipeline | "One" >> beam.Create(["a"]) | "WriteOne" >> write
    with pytest.raises(InvalidArgument, match="found exactly_once='sink' twice in the pipeline"):
        _ = pipeline | "Other" >> beam.Create(["a"]) | "WriteOther" >> write


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"exactly_once": "a name"}, "found exactly_once='a name', expected 1 to 200 letters"),
        ({"exactly_once": ""}, "found exactly_once=''"),
        ({"exactly_once": "sink", "topic": str}, r"without a topic that is the same for all records"),
        ({"exactly_once": "sink", "topic": None}, r"without a topic that is the same for all records"),
        ({"exactly_once": "sink", "shards": 0}, "found shards=0, expected 1 to 100"),
        ({"shards": 7}, "found shards=7 without exactly_once="),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        WriteKafka("broker:9092", **{"topic": "t", **arguments})


def test_records_of_a_key_and_of_a_partition_have_one_shard_and_keep_their_order() -> None:
    elements = [{"key": f"key {n % 7}", "value": str(n)} for n in range(200)]
    elements += [{"value": str(n), "partition": n % 5} for n in range(200)]
    packing = PackDoFn(RecordParts("t"), 3, 1_000_000, keeps_unwritten=False)
    with beam.Pipeline("FnApiRunner") as pipeline:
        grouped = (
            pipeline
            | beam.Create([elements])
            | beam.FlatMap(list)
            | beam.ParDo(packing).with_output_types(tuple[int, bytes])
            | beam.ParDo(NumberDoFn("start--1")).with_output_types(tuple[int, bytes])
            | beam.GroupByKey()
        )
        _ = grouped | beam.combiners.ToList() | beam.Map(_check_order)


def _check_order(groups: list[tuple[int, Any]]) -> None:
    shards: dict[tuple[bytes | None, int], int] = {}
    found: dict[tuple[bytes | None, int], list[int]] = {}
    for shard, encoded in groups:
        batches = sorted(map(Batch.decode, encoded))
        assert [batch.number for batch in batches] == list(range(len(batches)))
        for batch in batches:
            for _, value, key, partition, _, _ in batch.records:
                assert shards.setdefault((key, partition), shard) == shard
                found.setdefault((key, partition), []).append(int(value or b""))
    assert len(found) == 12
    assert all(numbers == sorted(numbers) for numbers in found.values())
    assert sum(map(len, found.values())) == 400


def test_progress_remembers_the_last_starts_only() -> None:
    progress = Progress("c0a1b2c-r0123456789ab", 0, ())
    for number in range(100):
        progress = progress.with_batch(number, f"start-{number:02}")
    assert progress.next == 100
    assert (progress.maker_of(79), progress.maker_of(80), progress.maker_of(100)) == (None, "start-80", None)
    assert len(progress.encode()) < 1_000
