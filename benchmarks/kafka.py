"""Measures Kafka → Map → Kafka: records a second beside the client's bare loop, latency, and what an idle stream costs.

The broker is librdkafka's mock cluster in the same process, so its work counts on both sides. It keeps about 5 MB of a
partition: the topics have many partitions.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import _measure
import apache_beam as beam
import psutil
from apache_beam.options.pipeline_options import PipelineOptions
from confluent_kafka import Consumer, Producer, TopicPartition

from luminosity import KafkaRecord, LuminosityRunner, ReadKafka, WriteKafka
from luminosity.testing import KafkaBroker

PARTITIONS = 32
RECORDS = 300_000
RECORD_BYTES = 200
KEYS = 1_000
RECORDS_PER_SECOND = 1_000
WARM_UP_S = 5.0  # of records that do not count
MEASURED_S = float(os.environ.get("KAFKA_SECONDS", "20"))
IDLE_START_S = 8.0  # until the workers have started
IDLE_S = 10.0
TIMEOUT_S = 300.0
AT_LEAST_RECORDS_PER_SECOND = 30_000
AT_MOST_P99_MS = 150.0
AT_MOST_IDLE_PERCENT = 5.0

# The mock broker answers a fetch without records after this time, even if some arrive meanwhile.
AT_ONCE = {"fetch.wait.max.ms": 5}

_SENT_AT = struct.Struct("<d")


def padded(head: bytes) -> bytes:
    return head.ljust(RECORD_BYTES, b".")


def upper(record: KafkaRecord) -> KafkaRecord:
    return record._replace(value=record.value.upper())


def same(record: KafkaRecord) -> KafkaRecord:
    return record


def stream(
    broker: KafkaBroker, function: Callable[[KafkaRecord], KafkaRecord], config: dict[str, Any] | None = None
) -> Any:
    """Start a stream from one topic to the other, with two workers."""
    servers = broker.bootstrap_servers
    flags = ["--progress=off", "--cpu_workers=2"]
    pipeline = beam.Pipeline(LuminosityRunner(), PipelineOptions(flags))
    records = pipeline | ReadKafka(servers, "in", config=config)
    _ = records | beam.Map(function).with_output_types(KafkaRecord) | WriteKafka(servers, "out")
    return pipeline.run()


def fill(broker: KafkaBroker) -> None:
    records = (
        {"key": f"key-{n % KEYS}", "value": padded(b"%d " % n), "partition": n % PARTITIONS} for n in range(RECORDS)
    )
    broker.produce_many("in", records, timeout_s=TIMEOUT_S)


def consumer_of(broker: KafkaBroker, topic: str) -> Consumer:
    consumer = Consumer(
        {"bootstrap.servers": broker.bootstrap_servers, "group.id": "b", "auto.offset.reset": "earliest", **AT_ONCE}
    )
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
    return consumer


def count_until_all(broker: KafkaBroker) -> float:
    """Return the records a second in topic ``out``, without the first tenth, in which workers start."""
    consumer = consumer_of(broker, "out")
    deadline = time.monotonic() + TIMEOUT_S
    began: tuple[float, int] | None = None
    count = 0
    while count < RECORDS:
        if time.monotonic() > deadline:
            raise TimeoutError(f"found {count} records, expected {RECORDS}")
        ends = [consumer.get_watermark_offsets(TopicPartition("out", partition))[1] for partition in range(PARTITIONS)]
        count = sum(ends)
        if began is None and count >= RECORDS / 10:
            began = time.monotonic(), count
        time.sleep(0.05)
    consumer.close()
    assert began is not None
    return (count - began[1]) / (time.monotonic() - began[0])


def throughput() -> dict[str, float]:
    with KafkaBroker({"in": PARTITIONS, "out": PARTITIONS}) as broker:
        fill(broker)
        result = stream(broker, upper)
        rate = count_until_all(broker)
        result.cancel()
        return {"records/s": rate}


def bare() -> dict[str, float]:
    """The ceiling: the client's own loop, with the same settings, in one process."""
    with KafkaBroker({"in": PARTITIONS, "out": PARTITIONS}) as broker:
        fill(broker)
        consumer = consumer_of(broker, "in")
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "enable.idempotence": True, "linger.ms": 5})
        count, began = 0, 0.0
        while count < RECORDS:
            for message in consumer.consume(1_000, 0.02):
                if message.error() is None:
                    began = began or time.monotonic()
                    value = message.value() or b""
                    producer.produce("out", value.upper(), message.key(), timestamp=message.timestamp()[1])
                    count += 1
            producer.poll(0)
        producer.flush()
        rate = count / (time.monotonic() - began)
        consumer.close()
        return {"records/s": rate}


def latency() -> dict[str, float]:
    with KafkaBroker({"in": PARTITIONS, "out": PARTITIONS}) as broker:
        result = stream(broker, same, AT_ONCE)
        stop = threading.Event()
        thread = threading.Thread(target=produce_steadily, args=(broker, stop), daemon=True)
        thread.start()
        consumer = consumer_of(broker, "out")
        first = 0.0
        found: list[float] = []
        while not first or time.time() < first + WARM_UP_S + MEASURED_S:
            for message in consumer.consume(1_000, 0.005):
                now = time.time()
                if message.error() is None:
                    (sent_at,) = _SENT_AT.unpack_from(message.value() or b"")
                    first = first or now
                    if sent_at > first + WARM_UP_S:
                        found.append(now - sent_at)
        stop.set()
        thread.join(10)
        consumer.close()
        result.cancel()
    found.sort()
    return {
        "p50 ms": found[len(found) // 2] * 1000,
        "p99 ms": found[int(len(found) * 0.99)] * 1000,
        "records/s": len(found) / MEASURED_S,
    }


def produce_steadily(broker: KafkaBroker, stop: threading.Event) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "linger.ms": 0})
    start, sent = time.time(), 0
    while not stop.is_set():
        while sent < (time.time() - start) * RECORDS_PER_SECOND:
            producer.produce("in", padded(_SENT_AT.pack(time.time())), b"key-%d" % (sent % KEYS))
            sent += 1
        producer.poll(0)
        time.sleep(0.001)
    producer.flush(10)


def idle() -> dict[str, float]:
    """The share of a core that a stream without records takes, with its workers and the broker."""
    with KafkaBroker({"in": PARTITIONS, "out": PARTITIONS}) as broker:
        result = stream(broker, same)
        time.sleep(IDLE_START_S)
        before = cpu_seconds()
        time.sleep(IDLE_S)
        share = 100 * (cpu_seconds() - before) / IDLE_S
        result.cancel()
    return {"idle %": share}


def cpu_seconds() -> float:
    me = psutil.Process()
    return sum(sum(each.cpu_times()[:2]) for each in [me, *me.children(recursive=True)])


def report(results: _measure.Results) -> None:
    _measure.print_table(results)
    ours, ceiling = results["throughput"]["records/s"], results["bare"]["records/s"]
    _measure.print_figure("Kafka to Kafka, records/s", ours, at_least=AT_LEAST_RECORDS_PER_SECOND)
    print(f"share of the client's bare loop: {ours / ceiling:.2f}")
    _measure.print_figure("p99 at 1,000 records/s, ms", results["latency"]["p99 ms"], at_most=AT_MOST_P99_MS)
    _measure.print_figure("idle, % of a core", results["idle"]["idle %"], at_most=AT_MOST_IDLE_PERCENT)


if __name__ == "__main__":
    _measure.main({"bare": bare, "throughput": throughput, "latency": latency, "idle": idle}, report)
