"""Runs the step of an exactly-once write that commits, without a pipeline."""

from __future__ import annotations

import marshal
import time
from typing import Any

from apache_beam.transforms.window import GlobalWindow, WindowedValue
from apache_beam.utils.timestamp import Timestamp

from luminosity.io.kafka.client import KafkaClient
from luminosity.io.kafka.exactly_once import batches
from luminosity.io.kafka.exactly_once.commit import CommitDoFn
from luminosity.io.kafka.exactly_once.sink import ExactlyOnce
from luminosity.testing import TransactionalKafka


class _Cell:
    def __init__(self) -> None:
        self.value: bytes | None = None

    def read(self) -> bytes | None:
        return self.value

    def write(self, value: bytes) -> None:
        self.value = value


class _Bag:
    def __init__(self) -> None:
        self.values: list[bytes] = []

    def read(self) -> list[bytes]:
        return list(self.values)

    def add(self, value: bytes) -> None:
        self.values.append(value)

    def clear(self) -> None:
        self.values = []


class States:
    """The state of each shard, as the runner keeps it: a copy is a checkpoint."""

    def __init__(self) -> None:
        self.next: dict[int, _Cell] = {}
        self.early: dict[int, _Bag] = {}


def batch(number: int, *values: str, start: str = "start--1", at: float | None = None) -> bytes:
    """Return an encoded batch of records without keys, in partition 0."""
    records = [("t", value.encode(), None, 0, 0, None) for value in values]
    numbered_ms = round(1000 * (time.time() if at is None else at))
    return batches._HEAD.pack(number, numbered_ms, start.encode()) + marshal.dumps((records, b"", 0))


class CommitStep:
    """A worker with the step, until its context ends. ``states`` is what the runner has for it."""

    def __init__(
        self,
        servers: str,
        states: States | None = None,
        *,
        run: str = "run",
        shards: int = 2,
        timeout_s: float = 10,
        name: str = "sink",
    ) -> None:
        client = KafkaClient(servers, {"linger.ms": 0, "retry.backoff.ms": 10})
        how = ExactlyOnce(client, "t", name, shards, timeout_s)
        how.run = run
        self.states = states or States()
        self.step = CommitDoFn(how)
        self.step.setup()

    def __enter__(self) -> CommitStep:
        return self

    def __exit__(self, *_: object) -> None:
        self.step.teardown()

    def bundle(self, *encoded: bytes, shard: int = 0) -> int:
        """Run one bundle; return how many records it says that Kafka has."""
        self.begin(*encoded, shard=shard)
        return self.finish()

    def begin(self, *encoded: bytes, shard: int = 0) -> None:
        """Start a bundle and process batches."""
        self.step.start_bundle()
        self.process(*encoded, shard=shard)

    def process(self, *encoded: bytes, shard: int = 0) -> None:
        next_number = self.states.next.setdefault(shard, _Cell())
        early = self.states.early.setdefault(shard, _Bag())
        for each in encoded:
            windowed = WindowedValue((shard, each), Timestamp(0), (GlobalWindow(),))
            self.step.process((shard, each), windowed, next_number, early)

    def finish(self) -> int:
        outputs: list[Any] = [output.value for output in self.step.finish_bundle()]
        assert all(topic == "t" for topic, _ in outputs)
        return sum(count for _, count in outputs)


def values(kafka: TransactionalKafka, isolation_level: str = "read_committed") -> list[str]:
    """Return the values that a reader sees, in the order of the topic."""
    return [(record.value or b"").decode() for record in kafka.consume("t", isolation_level=isolation_level)]
