"""What the benchmarks of Kafka share: a broker in its own process, the pipeline, a steady producer, CPU by process."""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import apache_beam as beam
import psutil
from apache_beam.options.pipeline_options import PipelineOptions
from confluent_kafka import Consumer, Producer, TopicPartition

from luminosity import KafkaRecord, LuminosityRunner, ReadKafka, WriteKafka
from luminosity.testing import KafkaBroker

PARTITIONS = 32
RECORD_BYTES = 200
KEYS = 1_000

_END = -1  # Kafka's number for the end of a partition, in the place of a timestamp
_TICK_S = 0.001  # of the steady producer


class BrokerProcess:
    """librdkafka's mock broker in a process of its own, with the topics ``in`` and ``out``.

    It keeps about 5 MB of a partition: older records vanish, so its memory is bounded.
    """

    def __enter__(self) -> BrokerProcess:
        command = [sys.executable, __file__, "--partitions", str(PARTITIONS)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.servers = self._process.stdout.readline().strip()
        if not self.servers:
            raise RuntimeError("the broker did not start")
        self.pid = self._process.pid
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # which closes its input: it ends


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


def consumer_of(servers: str, topic: str, **settings: Any) -> Consumer:
    """Return a consumer of all partitions of a topic, from their beginning on."""
    consumer = Consumer(
        {"bootstrap.servers": servers, "group.id": "b", "auto.offset.reset": "earliest", "log_level": 2, **settings}
    )
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
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


class SteadyProducer:
    """Writes records to topic ``in`` at a steady rate, in a thread, until ``stop``."""

    def __init__(self, servers: str, per_second: float) -> None:
        # The broker keeps whole batches, each in memory of its own: with few records in a batch it needs much more.
        self._producer = Producer({"bootstrap.servers": servers, "linger.ms": 0, "log_level": 2})
        self._per_second = per_second
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.sent = 0
        self._thread.start()

    def _run(self) -> None:
        started_at = time.monotonic()
        value = padded(b"")
        while not self._stop.wait(_TICK_S):
            due = (time.monotonic() - started_at) * self._per_second
            while self.sent < due:
                self._producer.produce("in", value, b"key-%d" % (self.sent % KEYS))
                self.sent += 1
            self._producer.poll(0)

    def stop(self) -> None:
        """Stop, and wait until the broker has all records."""
        self._stop.set()
        self._thread.join(10)
        self._producer.flush(10)


def children(broker_pid: int) -> list[psutil.Process]:
    """Return the processes of the pipeline besides this one, without the broker."""
    return [child for child in psutil.Process().children(recursive=True) if child.pid != broker_pid]


def cpu_seconds(broker_pid: int) -> dict[str, float]:
    """Return the processor time of this process, of its workers, and of the broker."""
    return {
        "runner": _cpu(psutil.Process()),
        "workers": sum(map(_cpu, children(broker_pid))),
        "broker": _cpu(psutil.Process(broker_pid)),
    }


def _cpu(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def _serve() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--partitions", type=int, required=True)
    partitions = parser.parse_args().partitions
    with KafkaBroker({"in": partitions, "out": partitions}) as broker:
        print(broker.bootstrap_servers, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _serve()
