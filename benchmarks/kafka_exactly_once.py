"""Writes to Kafka at least once and exactly once: records a second, latency, and what is there twice after kills.

Both sinks run with a checkpoint every second. The broker is ``TransactionalKafka`` in a process of its own.

    python benchmarks/kafka_exactly_once.py
    python benchmarks/kafka_exactly_once.py --kills 20    # of everything, at random moments

With ``--kills``, a stream counts the records of each key and writes each count. What readers with ``read_committed``
see at the end is compared with the right counts, byte for byte.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import _kafka
import _measure
import apache_beam as beam
from _killable import Killable
from apache_beam.coders import VarIntCoder
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec

from luminosity import KafkaRecord, LuminosityRunner, ReadKafka, WriteKafka

RECORDS = 400_000
RECORDS_PER_SECOND = 1_000
WARM_UP_S = 8.0
MEASURED_S = 20.0
TIMEOUT_S = 300.0
LEAST_SHARE = 0.7  # of the records a second that are written at least once

KEYS = 500
PER_START = 20_000  # records that a start finds, beside those that are left
SPREAD_S = 1.5  # after the first new records of a start, within which it is killed
SEED = 7

EXACTLY, AT_LEAST = "exactly once", "at least once"
MODES = {AT_LEAST: None, EXACTLY: "benchmark"}
_AT_ONCE = {"fetch.wait.max.ms": 5}


def options(folder: str) -> PipelineOptions:
    return PipelineOptions(
        [f"--checkpoint_dir={folder}", "--checkpoint_interval=1s", "--cpu_workers=2", "--progress=off", "--run_dir=off"]
    )


def stream(servers: str, mode: str, folder: str) -> Any:
    pipeline = beam.Pipeline(LuminosityRunner(), options(folder))
    records: Any = pipeline | ReadKafka(servers, "in")
    same = records | beam.Map(_kafka.same).with_output_types(KafkaRecord)
    _ = same | WriteKafka(servers, "out", exactly_once=MODES[mode])
    return pipeline.run()


def throughput(mode: str) -> dict[str, float]:
    with _kafka.TransactionalProcess() as broker, tempfile.TemporaryDirectory() as folder:
        broker.fill("in", RECORDS, _kafka.KEYS)
        result = stream(broker.servers, mode, f"{folder}/checkpoint")
        began: tuple[float, int, dict[str, float]] | None = None
        deadline = time.monotonic() + TIMEOUT_S
        while (count := broker.count("out")) < RECORDS:
            if time.monotonic() > deadline:
                raise TimeoutError(f"found {count} records, expected {RECORDS}")
            if began is None and count >= RECORDS / 10:
                began = time.monotonic(), count, _kafka.cpu_seconds(broker.pid)
            time.sleep(0.02)
        assert began is not None
        seconds, written = time.monotonic() - began[0], count - began[1]
        now = _kafka.cpu_seconds(broker.pid)
        result.cancel()
        micros = {f"{name} µs": 1e6 * (now[name] - began[2][name]) / written for name in now}
        return {"records/s": written / seconds, **micros, "transactions": broker.transactions()}


def latency(mode: str) -> dict[str, float]:
    """From the timestamp of a record, which is when it was produced, to its arrival at a reader of committed ones."""
    with _kafka.TransactionalProcess() as broker, tempfile.TemporaryDirectory() as folder:
        result = stream(broker.servers, mode, f"{folder}/checkpoint")
        settings = {"isolation.level": "read_committed", **_AT_ONCE}
        consumer = _kafka.consumer_of(broker.servers, "out", _kafka.TRANSACTIONAL_PARTITIONS, **settings)
        start, found = 0.0, []
        with _kafka.ProducerProcess(broker.servers, RECORDS_PER_SECOND):
            deadline = time.monotonic() + TIMEOUT_S
            while not start or time.time() < start + WARM_UP_S + MEASURED_S:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"found {len(found)} records")
                for message in consumer.consume(1_000, 0.005):
                    now = time.time()
                    if message.error() is None:
                        produced_at = message.timestamp()[1] / 1000
                        start = start or now
                        if produced_at > start + WARM_UP_S:
                            found.append(now - produced_at)
        consumer.close()
        result.cancel()
    found.sort()
    return {
        "records/s": len(found) / MEASURED_S,
        "p50 ms": found[len(found) // 2] * 1000,
        "p99 ms": found[int(len(found) * 0.99)] * 1000,
        "max ms": found[-1] * 1000,
    }


SIDES: dict[str, _measure.Side] = {
    **{f"throughput, {mode}": partial(throughput, mode) for mode in MODES},
    **{f"latency, {mode}": partial(latency, mode) for mode in MODES},
}


def report(results: _measure.Results) -> None:
    _measure.print_table(results)
    once, least = (results[f"throughput, {mode}"]["records/s"] for mode in (EXACTLY, AT_LEAST))
    _measure.print_figure("records/s, exactly once to at least once", once / least, at_least=LEAST_SHARE)


class Count(beam.DoFn):
    """Emits each key with the number of its records so far."""

    _COUNT = beam.DoFn.StateParam(ReadModifyWriteStateSpec("count", VarIntCoder()))

    def process(self, element: tuple[bytes, None], count: Any = _COUNT) -> Iterator[tuple[bytes, bytes]]:
        number = (count.read() or 0) + 1
        count.write(number)
        yield element[0], b"%d" % number


def count_for_ever(servers: str, mode: str, folder: str) -> None:
    """What is killed: a stream of counts."""
    pipeline = beam.Pipeline(LuminosityRunner(), options(folder))
    records: Any = pipeline | ReadKafka(servers, "in", max_out_of_orderness=0)
    keyed = records | beam.Map(lambda record: (record.key, None)).with_output_types(tuple[bytes, None])
    counts = keyed | beam.ParDo(Count()).with_output_types(tuple[bytes, bytes])
    _ = counts | WriteKafka(servers, "out", exactly_once=MODES[mode])
    pipeline.run().wait_until_finish()


def killed(mode: str, kills: int) -> dict[str, float]:
    chance = random.Random(SEED)
    with _kafka.TransactionalProcess() as broker, tempfile.TemporaryDirectory() as folder:
        arguments = ("stream", broker.servers, mode, f"{folder}/checkpoint")
        for _ in range(kills):
            broker.fill("in", PER_START, KEYS)
            before = broker.count("out")
            with Killable(Path(folder) / "output", *arguments) as run:
                run.wait_for(lambda before=before: broker.count("out") > before, "new records")
                time.sleep(chance.uniform(0, SPREAD_S))
        expected = Counter(
            {b"%d %d" % (key, n + 1): 1 for key in range(KEYS) for n in range(kills * PER_START // KEYS)}
        )
        with Killable(Path(folder) / "output", *arguments) as run:
            run.wait_for(lambda: broker.count("out") >= expected.total(), "all records")
            if mode == AT_LEAST:  # repeated ones count as well: the last ones come when nothing more does
                last = -1
                while last < (last := broker.count("out")):
                    time.sleep(5.0)
        found = Counter(b"%b %b" % (record.key, record.value) for record in broker.consume("out"))
        committed = broker.transactions()
    return {
        "kills": kills,
        "records": found.total(),
        "duplicates": (found - expected).total(),
        "missing": (expected - found).total(),
        "equal bytes": float(_digest(found) == _digest(expected)),
        "transactions": committed,
    }


def _digest(lines: Counter[bytes]) -> str:
    return hashlib.sha256(b"\n".join(sorted(lines.elements()))).hexdigest()


def main() -> None:
    if sys.argv[1:2] == ["stream"]:
        count_for_ever(*sys.argv[2:])
        return
    if sys.argv[1:2] and sys.argv[1] in SIDES:
        _measure.main(SIDES, report)
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=0, help="kill everything so often, and compare what is written")
    kills = parser.parse_args().kills
    if not kills:
        _measure.main(SIDES, report)
        return
    results = {mode: killed(mode, kills) for mode in (EXACTLY, AT_LEAST)}
    _measure.print_table(results)
    if not results[EXACTLY]["equal bytes"]:
        sys.exit("exactly once: the records differ from the right ones")


if __name__ == "__main__":
    main()
