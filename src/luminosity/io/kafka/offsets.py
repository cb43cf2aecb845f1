"""Positions in partitions, and the queries for their offsets: the first, the last, those of a time or of a group."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from luminosity._shared.text import did_you_mean, list_some
from luminosity.errors import KafkaError
from luminosity.extras import require
from luminosity.io.kafka.client import describe
from luminosity.io.kafka.record import Partition
from luminosity.io.outage import OutageLog

__all__ = ["BrokerQueries", "ErrorLog", "Position", "name_partitions", "partitions_of"]

_LOGGER = logging.getLogger(__name__)

_REQUEST_TIMEOUT_S = 5.0  # how long one request may take
_FIRST_TIMEOUT_S = 0.5  # the same for the first: then callbacks can say that the client is refused
_PROBE_TIMEOUT_S = 1.0  # the same in the middle of a read, which has to report to its runner
_RETRY_S = 0.2  # between two requests while the brokers don't answer

_END, _BEGINNING = -1, -2  # Kafka's numbers, in the place of a timestamp
_UNSET = -1001  # librdkafka's number for an offset that a group has not committed

_REFUSALS = frozenset(
    {
        "_AUTHENTICATION",
        "_SSL",
        "CLUSTER_AUTHORIZATION_FAILED",
        "GROUP_AUTHORIZATION_FAILED",
        "SASL_AUTHENTICATION_FAILED",
        "TOPIC_AUTHORIZATION_FAILED",
        "UNSUPPORTED_SASL_MECHANISM",
    }
)

# The brokers answer, but a topic or partition is not there.
_MISSING = frozenset({"UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_PARTITION", "_UNKNOWN_TOPIC"})

_Result = TypeVar("_Result")


class Position(NamedTuple):
    """A position in every partition.

    ``kind`` is ``"earliest"``, ``"latest"``, ``"committed"``, ``"now"``, ``"time"`` (then ``time_ms`` says when) or
    ``"offsets"`` (then ``offsets`` has one for each partition).
    """

    kind: str
    time_ms: int = 0
    offsets: Mapping[Partition, int] = {}


class ErrorLog:
    """Keeps the last errors that a client reports by callback, to say why the brokers don't answer."""

    def __init__(self) -> None:
        self.last = ""
        self.refusal = ""

    def __call__(self, error: Any) -> None:
        """Note an error. The client calls it in the thread that polls."""
        words = describe(error)
        if error.name() in _REFUSALS:
            self.refusal = words
        elif error.name() != "_ALL_BROKERS_DOWN" or not self.last:
            self.last = words

    @property
    def reason(self) -> str:
        """The error that says most."""
        return self.refusal or self.last or "they don't answer"

    def clear(self) -> None:
        """Forget all errors, because the brokers have answered."""
        self.last = self.refusal = ""


class BrokerQueries:
    """Sends requests through a consumer, repeats them while brokers are away, and says what is wrong.

    ``patience_s`` is how long brokers may be away. ``wait`` polls the consumer for some seconds, so that its callbacks
    run and say why brokers are away; it keeps the records that come meanwhile. One thread at a time may use it.
    """

    def __init__(
        self, consumer: Any, errors: ErrorLog, servers: str, patience_s: float, wait: Callable[[float], None]
    ) -> None:
        self._consumer = consumer
        self._wait = wait
        self._errors = errors
        self._servers = servers
        self._patience_s = patience_s
        self._outage = OutageLog(f"the brokers at {servers}", "reading")
        self._missing_since: dict[Partition, float] = {}
        self._has_answered = False
        self._kafka = require("confluent_kafka", "kafka")

    def check(self) -> dict[str, list[int]]:
        """Return all topics. Raises ``KafkaError`` if brokers refuse the client, or none answers in time."""
        try:
            return self.topics()
        except KafkaError as error:
            if not self.are_away:
                raise
            raise KafkaError(error.message, fix="check the addresses, and that the brokers run") from None

    @property
    def are_away(self) -> bool:
        """Whether brokers have not answered the last request, without a word why."""
        return self._outage.since is not None and not self._errors.refusal

    def partitions(self, topics: Sequence[str], pattern: str | None) -> list[Partition]:
        """Return all partitions of the topics, or of those that match the pattern. Raises if a topic is missing."""
        return partitions_of(self.topics(), topics, pattern, self._servers)

    def topics(self) -> dict[str, list[int]]:
        """Return all topics with the numbers of their partitions."""
        found = self._repeat(lambda timeout: self._consumer.list_topics(timeout=timeout).topics)
        return {name: sorted(topic.partitions) for name, topic in found.items() if topic.error is None}

    def partitions_now(self, topics: Sequence[str], pattern: str | None) -> list[Partition] | None:
        """Look once for partitions while reading; None if the brokers don't answer. A missing topic has none."""
        try:
            names = topics if pattern is None and len(topics) == 1 else [None]
            found: dict[str, Any] = {}
            for name in names:
                asked = {} if name is None else {"topic": name}
                found.update(self._consumer.list_topics(timeout=_PROBE_TIMEOUT_S, **asked).topics)
        except self._kafka.KafkaException as error:
            self.note_silence(error.args[0])
            return None
        wanted = re.compile(pattern) if pattern is not None else None
        return [
            (name, partition)
            for name, topic in sorted(found.items())
            if topic.error is None and (name in topics if wanted is None else _matches(wanted, name))
            for partition in sorted(topic.partitions)
        ]

    def resolve(self, position: Position, partitions: Sequence[Partition], *, name: str) -> dict[Partition, int]:
        """Return the offset of the position in each partition. ``name`` is the argument that it comes from."""
        if position.kind == "offsets":
            if missing := [partition for partition in partitions if partition not in position.offsets]:
                raise KafkaError(
                    f"found no offset for {name_partitions(missing)} in {name}=, expected one for each partition",
                    fix="add it; 0 is the beginning",
                )
            if unknown := [partition for partition in position.offsets if partition not in partitions]:
                raise KafkaError(f"found an offset for {name_partitions(unknown)} in {name}=, which does not exist")
            return {partition: position.offsets[partition] for partition in partitions}
        if position.kind == "earliest":
            return self.beginnings(partitions)
        if position.kind in ("latest", "now"):
            return self.ends(partitions)
        if position.kind == "committed":
            found = self.committed(partitions)
            missing = [partition for partition in partitions if partition not in found]
            return {**found, **(self.beginnings(missing) if missing else {})}
        ends = self.ends(partitions)  # first: a record that comes meanwhile must not be left out
        found = self._offsets(partitions, position.time_ms)
        return {partition: ends[partition] if found[partition] < 0 else found[partition] for partition in partitions}

    def beginnings(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Return the first offset that each partition still has."""
        return self._offsets(partitions, _BEGINNING)

    def ends(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Return the offset after the last record of each partition."""
        return self._offsets(partitions, _END)

    def ends_now(self, partitions: Iterable[Partition]) -> dict[Partition, int] | None:
        """Ask once for the ends while reading; None if the brokers don't answer. Partitions may be missing."""
        wanted = list(partitions)
        try:
            found = self._consumer.offsets_for_times(self._listed(wanted, _END), timeout=_PROBE_TIMEOUT_S)
        except self._kafka.KafkaException as error:
            if error.args[0].name() not in _MISSING:
                self.note_silence(error.args[0])
                return None
            self._note_missing(wanted)
            return {}
        failed = [each for each in found if each.error is not None]
        missing = [each for each in failed if each.error.name() in _MISSING]
        self._note_missing([(each.topic, each.partition) for each in missing])
        if len(missing) < len(failed):
            self.note_silence(next(each.error for each in failed if each not in missing))
        else:
            self.note_answer()
        return {(each.topic, each.partition): each.offset for each in found if each.error is None}

    def committed(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Return the offsets that the group has committed, for the partitions that have any."""
        listed = self._listed(partitions, _UNSET)
        found = self._repeat(lambda timeout: _checked(self._consumer.committed(listed, timeout=timeout)))
        return {(each.topic, each.partition): each.offset for each in found if each.offset >= 0}

    def note_silence(self, error: Any, since: float | None = None) -> None:
        """Note that brokers don't answer. Warns now and then; raises when they have been away for too long.

        ``since`` is when the request was sent; by default they are away from now on.
        """
        reason = self._errors.refusal or self._errors.last or describe(error)
        self._outage.note_silence(reason, since)
        away = self._outage.seconds()
        if self._errors.refusal and not self._has_answered:
            raise KafkaError(
                f"the brokers at {self._servers} refuse this client: {self._errors.refusal}",
                fix="check the settings security.protocol and sasl.* and the secrets",
            )
        if away >= self._patience_s:
            raise KafkaError(
                f"the brokers at {self._servers} have not answered for {away:.0f} s: {reason}",
                fix="check the addresses and the brokers; max_outage_s= says how long to wait",
                may_pass=False,
            )

    def _note_missing(self, partitions: Sequence[Partition]) -> None:
        """Note the partitions that brokers no longer know. Raises if one of them stays away for too long."""
        now = time.monotonic()
        known, self._missing_since = self._missing_since, {}
        for partition in partitions:
            since = self._missing_since[partition] = known.get(partition, now)
            if now - since >= self._patience_s:
                raise KafkaError(
                    f"{name_partitions([partition])} has not existed at {self._servers} for {now - since:.0f} s",
                    fix="check that the topic was not deleted; max_outage_s= says how long to wait for it",
                    may_pass=False,
                )
        if new := [partition for partition in partitions if partition not in known]:
            _LOGGER.warning("%s: not found at %s any more; reading waits", name_partitions(new), self._servers)

    def note_answer(self) -> None:
        """Note that the brokers have answered."""
        self._has_answered = True
        if self._outage.since is not None:
            self._errors.clear()
            self._outage.note_answer()

    def _offsets(self, partitions: Iterable[Partition], when: int) -> dict[Partition, int]:
        listed = self._listed(partitions, when)
        if not listed:
            return {}
        found = self._repeat(lambda timeout: _checked(self._consumer.offsets_for_times(listed, timeout=timeout)))
        return {(each.topic, each.partition): each.offset for each in found}

    def _listed(self, partitions: Iterable[Partition], offset: int) -> list[Any]:
        return [self._kafka.TopicPartition(topic, partition, offset) for topic, partition in partitions]

    def _repeat(self, request: Callable[[float], _Result]) -> _Result:
        """Send a request until it is answered. Blocks for ``patience_s`` at most, and a request's timeout."""
        began = time.monotonic()
        timeout = _FIRST_TIMEOUT_S
        while True:
            try:
                result = request(timeout)
            except self._kafka.KafkaException as error:
                self._wait(0)  # Callbacks say why.
                self.note_silence(error.args[0], began)
                self._wait(_RETRY_S)
                left = self._patience_s - (time.monotonic() - began)
                timeout = max(_FIRST_TIMEOUT_S, min(2 * timeout, _REQUEST_TIMEOUT_S, left))
            else:
                self.note_answer()
                return result


def _checked(found: list[Any]) -> list[Any]:
    """Return the answers, or raise the error of the first partition that has one."""
    kafka = require("confluent_kafka", "kafka")
    for each in found:
        if each.error is not None:
            raise kafka.KafkaException(each.error)
    return found


def partitions_of(
    found: dict[str, list[int]], topics: Sequence[str], pattern: str | None, servers: str
) -> list[Partition]:
    """Return the partitions of the wanted topics. Raises ``KafkaError`` if one of ``topics`` does not exist.

    >>> partitions_of({"reviews": [0, 1], "users": [0]}, ["reviews"], None, "broker:9092")
    [('reviews', 0), ('reviews', 1)]
    >>> partitions_of({"reviews": [0, 1]}, ["revews"], None, "broker:9092")
    Traceback (most recent call last):
    luminosity.errors.KafkaError: found no topic 'revews' at broker:9092; did you mean 'reviews'?
    """
    if pattern is not None:
        wanted = re.compile(pattern)
        names: Sequence[str] = sorted(name for name in found if _matches(wanted, name))
    else:
        names = topics
        for name in names:
            if name not in found:
                some = list_some(sorted(found), 5)
                fix = did_you_mean(name, found) or (f"the topics are {some}" if some else "create the topic first")
                raise KafkaError(f"found no topic {name!r} at {servers}", fix=fix)
    return [(name, partition) for name in names for partition in found[name]]


def _matches(pattern: re.Pattern[str], name: str) -> bool:
    """Return whether a pattern matches the whole name; internal topics such as ``__consumer_offsets`` never match."""
    return not name.startswith("__") and pattern.fullmatch(name) is not None


def name_partitions(partitions: Iterable[Partition]) -> str:
    """Return the partitions for a message.

    >>> name_partitions([("reviews", 0), ("reviews", 3)])
    'reviews[0], reviews[3]'
    """
    return list_some((f"{topic}[{partition}]" for topic, partition in partitions), 5)
