"""Measures Kafka → Map → Kafka: records a second beside the client's bare loop, latency, and what an idle stream costs.

The broker is librdkafka's mock cluster in a process of its own, beside both sides. It keeps about 5 MB of a partition:
the topics have many partitions.

    python benchmarks/kafka.py
    KAFKA_SECONDS=600 python benchmarks/kafka.py latency    # one side, as JSON
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import _kafka
import _measure
from confluent_kafka import Producer

RECORDS = 300_000
RECORDS_PER_SECOND = 1_000
WARM_UP_S = 5.0  # of records that do not count
MEASURED_S = float(os.environ.get("KAFKA_SECONDS", "20"))
IDLE_START_S = 8.0  # until the workers have started
IDLE_S = 20.0
TIMEOUT_S = 300.0
AT_LEAST_RECORDS_PER_SECOND = 30_000
AT_MOST_P99_MS = 150.0
AT_MOST_IDLE_PERCENT = 5.0

NEWEST = 500  # records that a partition keeps: 16 s of them. A reader that is farther behind fails
# The mock broker answers a fetch without records after this time, even if some arrive meanwhile.
AT_ONCE = {"fetch.wait.max.ms": 5}


def fill(servers: str) -> None:
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 50, "log_level": 2})
    deadline = time.monotonic() + TIMEOUT_S
    for n in range(RECORDS):
        while True:
            try:
                producer.produce("in", _kafka.padded(b"%d " % n), b"key-%d" % (n % _kafka.KEYS), n % _kafka.PARTITIONS)
                break
            except BufferError:
                if time.monotonic() > deadline:
                    raise
                producer.poll(0.1)
    if producer.flush(TIMEOUT_S):
        raise TimeoutError(f"found {len(producer)} records that were not delivered")


class Meter:
    """Measures records a second in topic ``out`` and CPU time per record, without the first tenth of the records."""

    def __init__(self, broker: _kafka.BrokerProcess) -> None:
        self._broker = broker
        self._began: tuple[float, int, dict[str, float]] | None = None

    def note(self, count: int) -> None:
        if self._began is None and count >= RECORDS / 10:
            self._began = time.monotonic(), count, _kafka.cpu_seconds(self._broker.pid)

    def result(self, count: int) -> dict[str, float]:
        assert self._began is not None
        began, before, cpu = self._began
        now = _kafka.cpu_seconds(self._broker.pid)
        micros = {f"{name} µs": 1e6 * (now[name] - cpu[name]) / (count - before) for name in cpu}
        return {"records/s": (count - before) / (time.monotonic() - began), **micros}


def throughput() -> dict[str, float]:
    with _kafka.BrokerProcess() as broker:
        fill(broker.servers)
        result = _kafka.stream(broker.servers, _kafka.upper)
        ends = _kafka.Ends(broker.servers, "out")
        meter = Meter(broker)
        deadline = time.monotonic() + TIMEOUT_S
        while (count := ends.count()) < RECORDS:
            if time.monotonic() > deadline:
                raise TimeoutError(f"found {count} records, expected {RECORDS}")
            meter.note(count)
            time.sleep(0.05)
        found = meter.result(count)
        ends.close()
        result.cancel()
        return found


def bare() -> dict[str, float]:
    """The ceiling: the client's own loop, with the same settings, in one process."""
    with _kafka.BrokerProcess() as broker:
        fill(broker.servers)
        meter = Meter(broker)
        consumer = _kafka.consumer_of(broker.servers, "in")
        producer = Producer(
            {"bootstrap.servers": broker.servers, "enable.idempotence": True, "linger.ms": 5, "log_level": 2}
        )
        count = 0
        while count < RECORDS:
            for message in consumer.consume(1_000, 0.02):
                if message.error() is None:
                    value = message.value() or b""
                    while True:
                        try:
                            producer.produce("out", value.upper(), message.key(), timestamp=message.timestamp()[1])
                            break
                        except BufferError:
                            producer.poll(0.1)
                    count += 1
            meter.note(count)
            producer.poll(0)
        producer.flush()
        found = meter.result(count)
        consumer.close()
        return found


def latency(config: dict[str, Any] | None = None) -> dict[str, float]:
    """From the timestamp of a record, which is when it was produced, to its arrival from the topic ``out``."""
    with _kafka.BrokerProcess(newest=NEWEST) as broker:
        result = _kafka.stream(broker.servers, _kafka.same, config)
        consumer = _kafka.consumer_of(broker.servers, "out", **AT_ONCE)
        start = 0.0
        found: list[float] = []
        with _kafka.ProducerProcess(broker.servers, RECORDS_PER_SECOND):
            while not start or time.time() < start + WARM_UP_S + MEASURED_S:
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


def idle() -> dict[str, float]:
    """The share of a core that a stream without records takes, with its workers, and the broker's."""
    with _kafka.BrokerProcess() as broker:
        result = _kafka.stream(broker.servers, _kafka.same)
        time.sleep(IDLE_START_S)
        before = _kafka.cpu_seconds(broker.pid)
        time.sleep(IDLE_S)
        after = _kafka.cpu_seconds(broker.pid)
        result.cancel()
    return {f"{name} %": 100 * (after[name] - before[name]) / IDLE_S for name in before}


SIDES: dict[str, _measure.Side] = {
    "bare": bare,
    "throughput": throughput,
    "latency": latency,
    "latency, fetches at once": partial(latency, AT_ONCE),
    "idle": idle,
}


def report(results: _measure.Results) -> None:
    _measure.print_table(results)
    ours, ceiling = results["throughput"]["records/s"], results["bare"]["records/s"]
    _measure.print_figure("Kafka to Kafka, records/s", ours, at_least=AT_LEAST_RECORDS_PER_SECOND)
    print(f"share of the client's bare loop: {ours / ceiling:.2f}")
    for side in ("latency", "latency, fetches at once"):
        _measure.print_figure(f"{side}: p99 at 1,000 records/s, ms", results[side]["p99 ms"], at_most=AT_MOST_P99_MS)
    share = results["idle"]["runner %"] + results["idle"]["workers %"]
    _measure.print_figure("idle without the broker, % of a core", share, at_most=AT_MOST_IDLE_PERCENT)
    print(f"idle with the broker, % of a core: {share + results['idle']['broker %']:.2f}")


if __name__ == "__main__":
    _measure.main(SIDES, report)
