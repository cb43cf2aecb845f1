"""What the benchmarks of Kafka share: a broker in its own process, the pipeline, a steady producer, CPU by process."""

from __future__ import annotations

import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import apache_beam as beam
import psutil
from apache_beam.options.pipeline_options import PipelineOptions
from confluent_kafka import Consumer, Producer, TopicPartition

from luminosity import KafkaRecord, LuminosityRunner, ReadKafka, WriteKafka
from luminosity.testing import KafkaBroker, TransactionalKafka

PARTITIONS = 32
TRANSACTIONAL_PARTITIONS = 8
RECORD_BYTES = 200
KEYS = 1_000

_START_S = 60.0  # of a process that imports Beam, on a busy machine
_END_S = 30.0
_END = -1  # Kafka's number for the end of a partition, in the place of a timestamp
_RETENTION_S = 5.0  # between two looks at partitions that keep their newest records only
_TICK_S = 0.001  # how often the producer looks whether records are due


class _Process:
    """This module in a process of its own, which ends with the context, or with the process that started it."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments

    def __enter__(self) -> Self:
        command = [sys.executable, __file__, *self._arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        is_ready = select.select([self._process.stdout], [], [], _START_S)[0]
        self.answer = self._process.stdout.readline().strip() if is_ready else ""
        if not self.answer:
            self._process.kill()
            self._process.wait(_END_S)
            raise RuntimeError(f"{' '.join(self._arguments)} did not start")
        _own.add(self._process.pid)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(timeout=_END_S)  # which closes its input: it ends
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate(timeout=_END_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None


_own: set[int] = set()  # processes that are no part of the pipeline


class BrokerProcess(_Process):
    """librdkafka's mock broker, with the topics ``in`` and ``out`` of so many partitions.

    It keeps about 5 MB of a partition: older records vanish, so its memory is bounded. ``newest`` bounds the records of
    a partition as well. The mock broker searches a partition from its first record for each fetch, so if thousands of
    records came one by one, it is slow; real brokers have an index.
    """

    def __init__(self, newest: int = 0, partitions: int = PARTITIONS) -> None:
        super().__init__("broker", str(newest), str(partitions))

    @property
    def servers(self) -> str:
        return self.answer


class TransactionalProcess(_Process):
    """The broker with transactions, with the topics ``in`` and ``out`` of 8 partitions each."""

    def __init__(self) -> None:
        super().__init__("transactional")

    @property
    def servers(self) -> str:
        return self.answer

    def fill(self, topic: str, records: int, keys: int) -> None:
        """Write records of 200 B, whose keys are numbers in turn."""
        self._ask(f"fill {topic} {records} {keys}")

    def count(self, topic: str) -> int:
        """Return how many committed records a topic has."""
        return int(self._ask(f"count {topic}"))

    def transactions(self) -> int:
        """Return how many transactions were committed."""
        return int(self._ask("transactions"))

    def consume(self, topic: str) -> list[KafkaRecord]:
        """Return the records that readers of committed ones see."""
        consumer = consumer_of(self.servers, topic, TRANSACTIONAL_PARTITIONS, **{"isolation.level": "read_committed"})
        found: list[KafkaRecord] = []
        expected, deadline = self.count(topic), time.monotonic() + _START_S
        while len(found) < expected:
            if time.monotonic() > deadline:
                raise TimeoutError(f"found {len(found)} records, expected {expected}")
            for message in consumer.consume(10_000, 0.1):
                if message.error() is None:
                    place = message.topic(), message.partition(), message.offset()
                    found.append(KafkaRecord(*place, 0, 0, message.key(), message.value(), ()))
        consumer.close()
        return found

    def _ask(self, question: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], _START_S)[0]:
            raise RuntimeError(f"the broker did not answer: {question}")
        return self._process.stdout.readline().strip()


class ProducerProcess(_Process):
    """Writes records to topic ``in`` at a steady rate. A record has the time of its call of ``produce``."""

    def __init__(self, servers: str, per_second: float, linger_ms: float = 0) -> None:
        super().__init__("producer", servers, str(per_second), str(linger_ms))


def padded(head: bytes) -> bytes:
    return head.ljust(RECORD_BYTES, b".")


def upper(record: KafkaRecord) -> KafkaRecord:
    return record._replace(value=record.value.upper())


def same(record: KafkaRecord) -> KafkaRecord:
    return record


def stream(
    servers: str,
    function: Callable[[KafkaRecord], KafkaRecord],
    config: dict[str, Any] | None = None,
    on_event: Callable[[Any], None] | None = None,
) -> Any:
    """Start a stream from one topic to the other, with two workers."""
    flags = ["--progress=off", "--run_dir=off", "--cpu_workers=2"]
    pipeline = beam.Pipeline(LuminosityRunner(on_event=on_event), PipelineOptions(flags))
    records = pipeline | ReadKafka(servers, "in", config=config)
    _ = records | beam.Map(function).with_output_types(KafkaRecord) | WriteKafka(servers, "out")
    return pipeline.run()


def consumer_of(servers: str, topic: str, partitions: int = PARTITIONS, **settings: Any) -> Consumer:
    """Return a consumer of all partitions of a topic, from their beginning on."""
    consumer = Consumer(
        {"bootstrap.servers": servers, "group.id": "b", "auto.offset.reset": "earliest", "log_level": 2, **settings}
    )
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
    return consumer


class Ends:
    """Asks how many records a topic has had, with one request for all partitions."""

    def __init__(self, servers: str, topic: str) -> None:
        self._consumer = Consumer({"bootstrap.servers": servers, "group.id": "b", "log_level": 2})
        self._asked = [TopicPartition(topic, partition, _END) for partition in range(PARTITIONS)]

    def count(self) -> int:
        return sum(each.offset for each in self._consumer.offsets_for_times(self._asked, timeout=10))

    def close(self) -> None:
        self._consumer.close()


def children() -> list[psutil.Process]:
    """Return the processes of the pipeline besides this one."""
    return [child for child in psutil.Process().children(recursive=True) if child.pid not in _own]


def cpu_seconds(broker_pid: int) -> dict[str, float]:
    """Return the processor time of this process, of its workers, and of the broker."""
    return {
        "runner": _cpu(psutil.Process()),
        "workers": sum(map(_cpu, children())),
        "broker": _cpu(psutil.Process(broker_pid)),
    }


def _cpu(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def _serve(newest: int, partitions: int) -> None:
    with KafkaBroker({"in": partitions, "out": partitions}) as broker:
        print(broker.bootstrap_servers, flush=True)
        is_over = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
        consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "ends", "log_level": 2})
        while not is_over.wait(_RETENTION_S if newest else None):
            for topic in ("in", "out"):
                for partition in range(partitions):
                    low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=10)
                    if high - low > newest:
                        broker.delete_records(topic, partition, high - newest)
        consumer.close()


def _serve_transactions() -> None:
    with TransactionalKafka({"in": TRANSACTIONAL_PARTITIONS, "out": TRANSACTIONAL_PARTITIONS}) as kafka:
        print(kafka.bootstrap_servers, flush=True)
        for line in sys.stdin:
            question, *arguments = line.split()
            if question == "fill":
                topic, records, keys = arguments[0], int(arguments[1]), int(arguments[2])
                kafka.produce_many(topic, ((b"%d" % (n % keys), padded(b"")) for n in range(records)), timeout_s=60)
                print("filled", flush=True)
            elif question == "count":
                print(kafka.count(arguments[0]), flush=True)
            else:
                print(kafka.transactions[0], flush=True)


def _produce(servers: str, per_second: float, linger_ms: float) -> None:
    producer = Producer({"bootstrap.servers": servers, "linger.ms": linger_ms, "log_level": 2})
    is_over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
    print("started", flush=True)
    started_at, sent, value = time.monotonic(), 0, padded(b"")
    while not is_over.wait(_TICK_S):
        due = (time.monotonic() - started_at) * per_second
        while sent < due and not is_over.is_set():
            try:
                producer.produce("in", value, b"key-%d" % (sent % KEYS))
                sent += 1
            except BufferError:  # the broker is slower than that, or gets no processor time
                producer.poll(0.1)
        producer.poll(0)
    producer.flush(10)


if __name__ == "__main__":
    if sys.argv[1] == "transactional":
        _serve_transactions()
    elif sys.argv[1] == "broker":
        _serve(int(sys.argv[2]), int(sys.argv[3]))
    else:
        _produce(sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
