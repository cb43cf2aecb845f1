"""The transform that reads records from Kafka, and the positions at which users let it begin and stop."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

import apache_beam as beam
import pyarrow as pa
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.utils.timestamp import Timestamp

import luminosity.tables  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers the coder of record batches
from luminosity._shared.record_places import parse_place
from luminosity._shared.text import shorten_repr
from luminosity.core import TELLS_LAG
from luminosity.errors import InvalidArgument, InvalidType, OptionError
from luminosity.extras import require
from luminosity.io.kafka.client import KafkaClient
from luminosity.io.kafka.consumer import OWN_SETTINGS, ConsumerSettings
from luminosity.io.kafka.deserialize import SchemaRegistry
from luminosity.io.kafka.emit import UNREADABLE, Outputs, Unpack, emitter_of
from luminosity.io.kafka.offsets import Position
from luminosity.io.kafka.progress import TimestampPolicy
from luminosity.io.kafka.read_step import ReadGroup, ReadSettings, ReadStream, check_brokers
from luminosity.io.kafka.record import KafkaRecord, Partition
from luminosity.runner_options import LuminosityOptions
from luminosity.tables.schemas import remember_schema

__all__ = ["ReadKafka"]

_STARTS = ("earliest", "latest", "committed")
_STOPS = ("now",)
_CLOCK_MS = 1_000  # "now" of another clock is not the future
_MOST_GROUPS = 8  # chosen by default; each one polls for itself
_CHECK_S = 5.0  # how long brokers may take to answer when a pipeline is built


class ReadKafka(beam.PTransform[Any, Any]):
    """Reads the records of Kafka topics, as a stream or up to an end.

    >>> from luminosity.testing import KafkaBroker
    >>> with KafkaBroker({"reviews": 1}) as broker:
    ...     broker.produce("reviews", "fine", key="movie-7")
    ...     broker.produce("reviews", None, key="movie-8")
    ...     with beam.Pipeline("FnApiRunner") as pipeline:
    ...         records = pipeline | ReadKafka(broker.bootstrap_servers, "reviews", stop="now", value="utf8")
    ...         _ = records | beam.Map(lambda record: print(record.offset, record.key, record.value))
    0 b'movie-7' fine
    1 b'movie-8' None

    Elements are :class:`KafkaRecord`. The ``value`` of a tombstone is None.

    Without ``stop``, the read has no end, and finds new partitions and topics while it runs. With ``stop``, it is
    bounded: the pipeline runs as a batch, and ends.

    Every record is read at least once, and exactly once into the runner's own state and tables. Records of a partition
    keep their order. Positions are part of the runner's state, not of the group's.

    Args:
        bootstrap_servers: the addresses of one or more brokers, such as ``"one:9092,two:9092"``, or a list of them; or
            a ``KafkaClient``, which has the settings, too.
        topics: a topic, or several.
        pattern: a regular expression that must match the whole name of a topic, instead of ``topics``.
        config: settings of librdkafka, such as ``{"security.protocol": "SASL_SSL", "sasl.username": "reader"}``.
        secrets: settings whose values are secret, each as ``"env:NAME"`` for an environment variable of the workers or
            ``"file:PATH"`` for a file there: ``{"sasl.password": "env:KAFKA_PASSWORD"}``.
        start: where to begin: ``"earliest"``, ``"latest"``, ``"committed"`` (the offsets of ``group_id``, and the
            beginning of partitions that have none), a ``datetime`` with a time zone (the first record with this
            timestamp or a later one), or an offset for each partition: ``{("reviews", 0): 100}``, or ``{0: 100}`` for
            a single topic.
        stop: where to stop: None never stops; ``"now"`` reads what is there when the pipeline starts; a ``datetime``
            stops before the first record with this timestamp or a later one; offsets stop before these.
        key: how to read keys: ``"bytes"``, ``"utf8"``, ``"json"``, ``"avro"`` (with ``schema_registry``), an Avro
            schema as a dict (with a registry, the fields to read; without, the schema of all), a class of Protobuf
            messages, or a function of bytes. None stays None.
        value: how to read values, in the same way.
        values_only: emit the values instead of records. A tombstone is None.
        as_table: emit tables, ``pyarrow.RecordBatch``, instead of records. Each has rows of one partition. The columns
            of the value come first: ``value``, or those of ``schema``. Then come ``_topic``, ``_partition``,
            ``_offset``, ``_timestamp`` (the event time), ``_timestamp_type``, ``_key``, ``_headers`` and
            ``_deleted``, which is true for tombstones: models skip these rows, and stores delete them. Window the rows
            with ``WindowTable``.
        schema: the columns of values with fields, if ``as_table``. Other fields are left out; missing ones are null.
        schema_registry: the address of a schema registry. Then Avro and Protobuf have a schema's number before them.
        schema_registry_auth: where ``user:password`` for it is: ``"env:NAME"`` or ``"file:PATH"``.
        timestamps: the event time of a record: ``"record"`` is its timestamp, ``"log_append"`` as well, if the topic
            has ``message.timestamp.type=LogAppendTime``, ``"processing"`` is the time at which it is read, and a
            function computes it from the record. A record without a timestamp has the time at which it is read.
        max_out_of_orderness: by how many seconds a record may be older than those before it in its partition, and how
            late it may be written. The watermark stays so far behind.
        group_id: commit the offsets that the pipeline has processed for this consumer group, so that tools show the
            lag. Nothing else depends on them, except for ``start="committed"``.
        isolation_level: ``"read_committed"`` leaves out records of transactions that are not committed;
            ``"read_uncommitted"`` reads all.
        on_lost: what to do if the topic's retention has removed records before they are read: ``"fail"`` or
            ``"skip"``.
        discover_every_s: how often to look for new partitions and topics.
        max_outage_s: how long brokers may be away before the run fails.
        groups: how many readers share the partitions of a stream; by default the number of cores, up to 8.

    The counters in the namespace ``"ReadKafka"`` are ``records_read``, ``bytes_read`` (of keys and values),
    ``records_unreadable`` and ``records_lost``. The time from a record's timestamp to its reading is counted in
    buckets, such as ``age_ms_to_100`` for those above 80 ms and up to 100 ms; the distribution ``age_ms`` has the
    oldest record of each bundle. A gauge for each partition, such as ``lag reviews[0]``, says how many offsets are
    left; beyond 100 partitions, ``lag of others in group 0`` is the sum of the rest.
    """

    def __init__(
        self,
        bootstrap_servers: str | Sequence[str] | KafkaClient,
        topics: str | Sequence[str] | None = None,
        *,
        pattern: str | None = None,
        config: Mapping[str, Any] | None = None,
        secrets: Mapping[str, str] | None = None,
        start: Any = "earliest",
        stop: Any = None,
        key: Any = "bytes",
        value: Any = "bytes",
        values_only: bool = False,
        as_table: bool = False,
        schema: pa.Schema | None = None,
        schema_registry: str | None = None,
        schema_registry_auth: str | None = None,
        timestamps: Any = "record",
        max_out_of_orderness: float = 5.0,
        group_id: str | None = None,
        isolation_level: Literal["read_committed", "read_uncommitted"] = "read_committed",
        on_lost: Literal["fail", "skip"] = "fail",
        discover_every_s: float = 30.0,
        max_outage_s: float = 300.0,
        groups: int | None = None,
    ) -> None:
        super().__init__()
        require("confluent_kafka", "kafka")
        self._topics = _check_topics(topics, pattern)
        self._pattern = pattern
        _check_one_of("isolation_level", isolation_level, ("read_committed", "read_uncommitted"))
        _check_one_of("on_lost", on_lost, ("fail", "skip"))
        _check_above_0("discover_every_s", discover_every_s)
        _check_above_0("max_outage_s", max_outage_s)
        if groups is not None and groups < 1:
            raise InvalidArgument(f"found groups={groups}, expected 1 or more")
        begin, end = parse_start(start, self._topics), parse_stop(stop, self._topics)
        check_order(begin, end)
        if begin.kind == "committed" and group_id is None:
            raise InvalidArgument("found start='committed' without group_id=, expected the group", fix="pass group_id=")
        self._is_bounded = end is not None and not (end.kind == "time" and end.time_ms > time.time() * 1000)
        client = KafkaClient.of(bootstrap_servers, config, secrets, OWN_SETTINGS)
        registry = SchemaRegistry.of(schema_registry, schema_registry_auth)
        policy = TimestampPolicy.of(timestamps, max_out_of_orderness)
        emitter = emitter_of(policy, key, value, registry, values_only=values_only, as_table=as_table, schema=schema)
        # The name is that of the pool in which workers keep consumers. A step that is restored keeps it.
        name = f"luminosity-{uuid.uuid4().hex[:12]}"
        self._settings = ReadSettings(
            ConsumerSettings(client, group_id, isolation_level, max_outage_s, name),
            self._topics,
            pattern,
            begin,
            end,
            emitter,
            groups=1 if self._is_bounded else groups or min(_MOST_GROUPS, os.cpu_count() or 1),
            look_every_s=discover_every_s,
            skips_lost=on_lost == "skip",
        )
        self._value = value

    def with_exception_handling(self) -> ReadKafka:
        """Collect records that can't be read: the transform returns two collections, ``(good, bad)``.

        Elements of ``bad`` are pairs of the record, with its key and value as bytes, and the reason.

        >>> from luminosity.testing import KafkaBroker
        >>> with KafkaBroker({"reviews": 1}) as broker:
        ...     broker.produce_many("reviews", ['{"stars": 5}', "{stars"])
        ...     with beam.Pipeline("FnApiRunner") as pipeline:
        ...         read = ReadKafka(broker.bootstrap_servers, "reviews", stop="now", value="json")
        ...         good, bad = pipeline | read.with_exception_handling()
        ...         _ = bad | beam.MapTuple(lambda record, reason: print(record.offset, record.value, reason))
        1 b'{stars' the value is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)
        """
        self._settings.emitter.keeps_unreadable = True
        return self

    def expand(self, input_or_inputs: Any) -> Any:
        """Divide the partitions into groups, and read these in parallel."""
        settings = self._settings = self._settings._replace(skips=_skips(input_or_inputs.pipeline.options))
        if getattr(input_or_inputs.pipeline.runner, "runs_on_this_machine", False):
            check_brokers(settings, _CHECK_S)
        groups = input_or_inputs | "Groups" >> beam.Create(list(range(settings.groups)), reshuffle=False)
        read: Any = beam.ParDo(ReadGroup(settings) if self._is_bounded else ReadStream(settings))
        with input_or_inputs.pipeline.transform_annotations(**{TELLS_LAG: ""}):
            packed = groups | "Read" >> read.with_output_types(Outputs)
        made: Any = self._element_type()
        unpack: Any = beam.ParDo(Unpack())
        if not settings.emitter.keeps_unreadable:
            return self._with_schema(packed | "Unpack" >> unpack.with_output_types(made))
        outputs = packed | "Unpack" >> unpack.with_outputs(UNREADABLE, main="good").with_output_types(made)
        outputs[UNREADABLE].element_type = tuple[KafkaRecord, str]
        return self._with_schema(outputs.good), outputs[UNREADABLE]

    def _with_schema(self, elements: Any) -> Any:
        schema = self._settings.emitter.schema
        return elements if schema is None else remember_schema(elements, schema)

    def _element_type(self) -> Any:
        if self._settings.emitter.schema is not None:
            return pa.RecordBatch
        if not self._settings.emitter.values_only:
            return KafkaRecord
        if not isinstance(self._value, str):
            return Any
        return {"bytes": bytes | None, "utf8": str | None}.get(self._value, Any)

    def display_data(self) -> dict[str, Any]:
        """Return the topics and the brokers, without settings."""
        topics = f"pattern {self._pattern}" if self._pattern is not None else ", ".join(self._topics)
        return {"topics": topics, "bootstrap_servers": self._settings.consumers.client.servers}


def _skips(options: PipelineOptions) -> dict[Partition, set[int]]:
    """Return the offsets of ``--skip_record`` by partition."""
    skips: dict[Partition, set[int]] = {}
    for text in options.view_as(LuminosityOptions).skip_record or ():
        place = parse_place(text)
        if place is None:
            raise OptionError(f"--skip_record={text}: expected TOPIC[PARTITION]@OFFSET, such as reviews[3]@1204")
        skips.setdefault(place[:2], set()).add(place[2])
    return skips


def _check_one_of(name: str, given: str, allowed: Sequence[str]) -> None:
    if given not in allowed:
        raise InvalidArgument(f"found {name}={given!r}, expected {' or '.join(map(repr, allowed))}")


def _check_above_0(name: str, seconds: float) -> None:
    if not seconds > 0:
        raise InvalidArgument(f"found {name}={seconds!r}, expected more than 0")


def _check_topics(topics: Any, pattern: str | None) -> list[str]:
    if (topics is None) == (pattern is None):
        raise InvalidArgument("found both or neither of topics= and pattern=, expected one of them")
    if pattern is not None:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise InvalidArgument(f"found pattern={pattern!r}, expected a regular expression: {error}") from None
        return []
    listed = [topics] if isinstance(topics, str) else list(topics)
    if not listed or not all(isinstance(name, str) and name for name in listed):
        raise InvalidType(f"found topics={topics!r}, expected a name or a list of names")
    if len(set(listed)) < len(listed):
        raise InvalidArgument(f"found topics={topics!r}, expected each name once")
    return listed


def parse_start(value: Any, topics: Sequence[str]) -> Position:
    """Return where to begin. Raises ``InvalidArgument`` for anything that is no position.

    >>> parse_start("latest", ["reviews"]).kind
    'latest'
    >>> parse_start({0: 100, 1: 0}, ["reviews"]).offsets
    {('reviews', 0): 100, ('reviews', 1): 0}
    >>> parse_start("erliest", ["reviews"])
    Traceback (most recent call last):
    luminosity.errors.InvalidArgument: found start='erliest', expected 'earliest', 'latest', 'committed', a datetime ...
    """
    return _parse("start", value, _STARTS, topics)


def parse_stop(value: Any, topics: Sequence[str]) -> Position | None:
    """Return where to stop, or None if the read has no end.

    >>> parse_stop("now", ["reviews"]).kind
    'now'
    """
    return None if value is None else _parse("stop", value, _STOPS, topics)


def check_order(start: Position, stop: Position | None) -> None:
    """Raise ``InvalidArgument`` if a read would begin in the future, or behind its own stop.

    Positions of different kinds are compared when the brokers have said which offsets they are.

    >>> check_order(Position("time", time_ms=2_000), Position("time", time_ms=1_000))
    Traceback (most recent call last):
    luminosity.errors.InvalidArgument: found stop= before start=: 1000 and 2000 ms since 1970, expected it after start=
    """
    if start.kind == "time" and start.time_ms > time.time() * 1000 + _CLOCK_MS:
        raise InvalidArgument(
            "found start= in the future, expected a time that has come",
            fix="pass start='latest' to read what comes from now on",
        )
    if stop is None or stop.kind != start.kind:
        return
    if stop.time_ms < start.time_ms:
        raise InvalidArgument(
            f"found stop= before start=: {stop.time_ms} and {start.time_ms} ms since 1970, expected it after start="
        )
    for (topic, number), at in start.offsets.items():
        if stop.offsets.get((topic, number), at) < at:
            raise InvalidArgument(
                f"found stop= before start= in {topic}[{number}]: {stop.offsets[topic, number]} and {at}, expected it "
                "after start="
            )


def _parse(name: str, value: Any, words: Sequence[str], topics: Sequence[str]) -> Position:
    if isinstance(value, str) and value in words:
        return Position(value)
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise InvalidArgument(
                f"found {name}={value!r} without a time zone, expected one with it",
                fix="pass a datetime such as datetime(2026, 1, 31, tzinfo=timezone.utc)",
            )
        return Position("time", time_ms=round(value.timestamp() * 1000))
    if isinstance(value, Timestamp):
        return Position("time", time_ms=value.micros // 1000)
    if isinstance(value, Mapping):
        return Position("offsets", offsets=_parse_offsets(name, value, topics))
    expected = ", ".join(map(repr, words))
    raise InvalidArgument(
        f"found {name}={shorten_repr(value, 80)}, expected {expected}, a datetime with a time zone, or offsets such as "
        "{('topic', 0): 100}"
    )


def _parse_offsets(name: str, given: Mapping[Any, Any], topics: Sequence[str]) -> dict[Partition, int]:
    offsets: dict[Partition, int] = {}
    for key, offset in given.items():
        if type(key) is int and len(topics) == 1:
            partition = topics[0], key
        elif isinstance(key, tuple) and len(key) == 2 and type(key[0]) is str and type(key[1]) is int:
            partition = key[0], key[1]
        else:
            raise InvalidArgument(
                f"found {shorten_repr(key, 80)} among the partitions of {name}=, expected pairs such as ('topic', 0)",
                fix="name the topic with the partition",
            )
        if type(offset) is not int or offset < 0:
            raise InvalidArgument(
                f"found the offset {shorten_repr(offset, 80)} of {partition[0]}[{partition[1]}] in {name}=, expected 0 "
                "or more"
            )
        offsets[partition] = offset
    if not offsets:
        raise InvalidArgument(f"found {name}={{}}, expected the offset of each partition")
    return offsets
