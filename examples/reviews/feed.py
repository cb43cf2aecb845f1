"""Reviews as records of a Kafka topic: a thread that writes some each second, and deletes some of them later."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from luminosity.testing import KafkaBroker

_DELETE_EVERY = 25  # one record in so many is a tombstone of an earlier review
_DELETED_AFTER = 15  # how many records before the tombstone its review came

Table = Any  # a pyarrow.Table; pyarrow has no type annotations


class Feed:
    """Writes reviews to a topic from a thread, and ends when there are no more or when it is closed.

    Args:
        broker: the broker.
        topic: the topic.
        reviews: with the columns id, source, label and text, in the order in which they are written.
        rate: records per second.
        until: the time, in seconds since 1970, after which it writes no more.
    """

    def __init__(self, broker: KafkaBroker, topic: str, reviews: Table, rate: float, until: float) -> None:
        self._broker = broker
        self._topic = topic
        self._reviews = reviews.to_pylist()
        self._pause_s = 1 / rate
        self._until = until
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._write, name="feed", daemon=True)
        self.deleted: list[int] = []

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def close(self) -> None:
        """Stop writing, and wait until the thread has ended."""
        self._closed.set()
        self._thread.join()

    def _write(self) -> None:
        begin = time.monotonic()
        for number, review in enumerate(self._reviews):
            if self._closed.wait(max(0.0, begin + number * self._pause_s - time.monotonic())):
                return
            if time.time() > self._until:
                return
            self._broker.produce(self._topic, _value(review), key=str(review["id"]))
            if number % _DELETE_EVERY == _DELETE_EVERY - 1:
                earlier = self._reviews[number - _DELETED_AFTER]["id"]
                self._broker.produce(self._topic, None, key=str(earlier))
                self.deleted.append(earlier)


def _value(review: dict[str, Any]) -> str:
    return json.dumps({name: review[name] for name in ("source", "label", "text")})
