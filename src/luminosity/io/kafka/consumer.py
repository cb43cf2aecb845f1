"""Consumers that read groups of partitions, kept open between bundles."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from luminosity.extras import require
from luminosity.io.endless import StepUsers
from luminosity.io.kafka.client import KafkaClient, describe
from luminosity.io.kafka.offsets import BrokerQueries, ErrorLog
from luminosity.io.kafka.record import Partition

__all__ = ["OWN_SETTINGS", "ConsumerSettings", "GroupConsumer", "Pool"]

_LOGGER = logging.getLogger(__name__)

_IDLE_READERS = 8  # of one step and process; a group may move to another worker and leave one behind
_CLOSE_IDLE_AFTER_S = 30.0  # its connection and its prefetched records are then free
_GATHER_S = 0.001  # how long a record waits for others, because each claim has its price
_CHUNK_S = 0.01  # how long the steps that follow should take with the records of one claim
_MOST_RECORDS = 2_000  # of one claim
_COMMIT_EVERY_S = 0.5  # of the group's offsets, which only tools look at

# Settings that a read depends on, with the argument that is for it.
OWN_SETTINGS = {
    "group.id": "group_id=",
    "isolation.level": "isolation_level=",
    "auto.offset.reset": "start= and on_lost=",
    "enable.auto.commit": "group_id=, whose offsets are committed when the pipeline has committed the records",
    "enable.auto.offset.store": "group_id=",
    "enable.partition.eof": "stop=",
}
_DEFAULTS = {
    "fetch.wait.max.ms": 50,  # how soon an idle partition tells that its end is reached
    "queued.max.messages.kbytes": 16_384,  # prefetched by each consumer, for all its partitions
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 1_000,  # how late the end of an outage is noticed
}


class ConsumerSettings:
    """What all consumers of a step have in common. It travels with the pipeline."""

    def __init__(
        self, client: KafkaClient, group_id: str | None, isolation_level: str, max_outage_s: float, name: str
    ) -> None:
        self.client = client
        self.group_id = group_id
        self.isolation_level = isolation_level
        self.max_outage_s = max_outage_s
        self.name = name

    def open(self, max_outage_s: float | None = None) -> GroupConsumer:
        """Connect a consumer, which the caller closes."""
        return GroupConsumer(self, self.max_outage_s if max_outage_s is None else max_outage_s)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the client, without secrets."""
        return {
            **{name: value for name, value in _DEFAULTS.items() if not self.client.has(name)},
            "group.id": self.group_id or self.name,  # nothing joins the group: partitions are assigned
            "isolation.level": self.isolation_level,
            "auto.offset.reset": "error",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
        }


class GroupConsumer:
    """Reads some partitions from given offsets on. One thread at a time may use it, except for :meth:`commit`."""

    def __init__(self, settings: ConsumerSettings, max_outage_s: float) -> None:
        self._kafka = require("confluent_kafka", "kafka")
        self._settings = settings
        errors = ErrorLog()
        self._consumer = settings.client.consumer(settings.settings(), errors)
        self.queries = BrokerQueries(self._consumer, errors, settings.client.servers, max_outage_s, self._wait)
        self._positions: dict[Partition, int] = {}
        self._buffer: list[Any] = []
        self._begun_at: Mapping[Partition, int] = {}  # the positions of the last seek
        self._committed: Mapping[Partition, int] = {}
        self._commit_at = 0.0
        self._lock = threading.Lock()
        self._is_closed = False
        self.released_at = 0.0
        self.checked_at = 0.0  # when it was last looked for the ends of idle partitions
        self.failing_since: dict[Partition, float] = {}  # since when partitions report errors, and no records
        self.chunk = 100  # records that the steps that follow process in a moment

    def seek(self, positions: Mapping[Partition, int]) -> None:
        """Let the next record of each partition be the one at its position. Does nothing if it is there already."""
        if positions == self._positions:
            return
        self._buffer.clear()
        self._positions = dict(positions)
        self._begun_at = self._positions.copy()
        wanted = [self._kafka.TopicPartition(topic, number, at) for (topic, number), at in positions.items()]
        self._consumer.assign(wanted)

    def poll(self, most: int, wait_s: float) -> list[Any]:
        """Return up to ``most`` messages. Blocks for ``wait_s`` at most, until there is one."""
        if not self._buffer:
            if not self._positions:
                time.sleep(wait_s)
                return []
            message = self._consumer.poll(wait_s)
            if message is None:
                return []
            # consume() waits until it has as many as it may return, so its timeout is what the first record is delayed.
            self._buffer = [message, *self._consumer.consume(most - 1, _GATHER_S)] if most > 1 else [message]
        taken, self._buffer = self._buffer[:most], self._buffer[most:]
        return taken

    def adapt(self, records: int, seconds: float) -> None:
        """Adapt ``chunk`` to the time that the steps that follow took: a runner stops a reader only between claims."""
        if seconds > 2 * _CHUNK_S:
            self.chunk = max(1, int(records * _CHUNK_S / seconds))
        elif records >= self.chunk:
            self.chunk = min(_MOST_RECORDS, 2 * self.chunk)

    def unread(self, messages: list[Any]) -> None:
        """Take messages back that were not claimed: the next poll returns them again."""
        self._buffer = [*messages, *self._buffer]

    def moved(self, positions: Mapping[Partition, int]) -> None:
        """Note that records up to these positions are claimed."""
        self._positions.update(positions)

    def restart(self) -> None:
        """Forget all positions, so that the next :meth:`seek` assigns partitions again: something has failed."""
        self._positions = {}
        self._buffer.clear()

    def known_ends(self) -> dict[Partition, int]:
        """Return the ends of the partitions as the last fetches have brought them, without a request.

        They count records of open transactions, too. A partition that was not fetched yet is missing.
        """
        ends: dict[Partition, int] = {}
        for topic, number in self._positions:
            found = self._consumer.get_watermark_offsets(self._kafka.TopicPartition(topic, number), cached=True)
            if found is not None and found[1] >= 0:
                ends[topic, number] = found[1]
        return ends

    def commit_later(self, positions: Mapping[Partition, int], *, is_last: bool) -> Callable[[], None] | None:
        """Return a function that commits the positions for the group, or None if that is not due."""
        if self._settings.group_id is None or positions == self._committed:
            return None
        # Positions at which this consumer began are the business of the one before it. Its commits and these are not
        # ordered: these could arrive later than those of the next worker, and set the group back.
        if not is_last and (time.monotonic() < self._commit_at or positions == self._begun_at):
            return None
        self._commit_at = time.monotonic() + _COMMIT_EVERY_S
        self._committed = dict(positions)
        return lambda: self._commit(positions, is_last)

    def _commit(self, positions: Mapping[Partition, int], is_last: bool) -> None:
        """Commit offsets for tools that show the lag of a group. Failures are noted: nothing depends on them."""
        offsets = [self._kafka.TopicPartition(topic, number, at) for (topic, number), at in positions.items()]
        with self._lock:
            if self._is_closed:
                return
            try:
                self._consumer.commit(offsets=offsets, asynchronous=not is_last)
            except self._kafka.KafkaException as error:
                _LOGGER.warning(
                    "the offsets of the group %s were not committed: %s",
                    self._settings.group_id,
                    describe(error.args[0]),
                )

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._consumer.close()

    def _wait(self, seconds: float) -> None:
        """Let callbacks run, and keep what comes meanwhile."""
        message = self._consumer.poll(seconds)
        if message is not None:
            self._buffer.append(message)


class Pool:
    """The consumers of this process that no bundle uses now, by step and group."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a bundle that was given up may be collected while it is held
        self._idle: dict[tuple[str, Any], GroupConsumer] = {}
        self._users = StepUsers()

    def enter(self, step: str) -> None:
        """Count one more user of a step's consumers."""
        with self._lock:
            self._users.enter(step)

    def leave(self, step: str) -> None:
        """Count one user less. The last one closes the step's consumers."""
        with self._lock:
            if not self._users.leave(step):
                return
            closing = [self._idle.pop(key) for key in list(self._idle) if key[0] == step]
        for consumer in closing:
            consumer.close()

    def take(self, settings: ConsumerSettings, group: Any) -> GroupConsumer:
        """Return the consumer that has read the group before, or another one of the step, or a new one."""
        step = settings.name
        with self._lock:
            found = self._idle.pop((step, group), None)
            if found is None and sum(key[0] == step for key in self._idle) >= _IDLE_READERS:
                found = self._idle.pop(next(key for key in self._idle if key[0] == step))
        return settings.open() if found is None else found

    def give_back(self, settings: ConsumerSettings, group: Any, consumer: GroupConsumer) -> None:
        """Keep a consumer for the next bundle of its group, and close those that no bundle has used for long."""
        now = time.monotonic()
        consumer.released_at = now
        with self._lock:
            if settings.name not in self._users:
                closing = [consumer]
            else:
                before = self._idle.pop((settings.name, group), None)
                self._idle[settings.name, group] = consumer
                old = [key for key, each in self._idle.items() if now - each.released_at > _CLOSE_IDLE_AFTER_S]
                closing = [self._idle.pop(key) for key in old] + ([before] if before is not None else [])
        for each in closing:
            each.close()
