"""Records in Kafka that are counted by key: writes them, and checks the counts. All from and to the mock broker."""

from __future__ import annotations

import json
from collections import defaultdict

import _kafka
from confluent_kafka import Producer, TopicPartition

PARTITIONS = 4  # the mock broker keeps about 4.4 MB of each; 140,000 records are 2 MB in each

_KEYS = 100  # unless a benchmark asks for others
_TIMEOUT_S = 60.0


def fill(servers: str, records: int, keys: int = _KEYS) -> None:
    """Write records as JSON to the topic ``in``."""
    queue = {"linger.ms": 50, "queue.buffering.max.messages": 2 * records}
    producer = Producer({"bootstrap.servers": servers, "log_level": 2, **queue})
    for number in range(records):
        key = f"key-{number % keys}"
        producer.produce("in", json.dumps({"key": key, "n": number}), key)
    if left := producer.flush(_TIMEOUT_S):
        raise TimeoutError(f"{left} records were not delivered")


def check(servers: str, records: int, keys: int = _KEYS, partitions: int = PARTITIONS) -> None:
    """Check that each key has been counted from 1 to the number of its records, each count once."""
    consumer = _kafka.consumer_of(servers, "out", partitions)
    counts: defaultdict[bytes, list[int]] = defaultdict(list)
    try:
        found = 0
        for partition in range(partitions):
            first, end = consumer.get_watermark_offsets(TopicPartition("out", partition), timeout=_TIMEOUT_S)
            found += end - first
        if found != records:
            raise ValueError(f"found {found} counts, expected {records}")
        while found:
            messages = consumer.consume(min(found, 10_000), _TIMEOUT_S)
            if not messages:
                raise TimeoutError(f"{found} records did not arrive")
            for message in messages:
                if message.error() is not None:
                    raise RuntimeError(str(message.error()))
                counts[message.key()].append(int(message.value()))
            found -= len(messages)
    finally:
        consumer.close()
    expected = {b"key-%d" % n: list(range(1, len(range(n, records, keys)) + 1)) for n in range(min(records, keys))}
    if {key: sorted(each) for key, each in counts.items()} != expected:
        raise ValueError("counts are missing or repeated")
