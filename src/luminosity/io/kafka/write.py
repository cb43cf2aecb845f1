"""The transform that writes elements to Kafka."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms.window import WindowedValue

from luminosity.errors import InvalidArgument
from luminosity.io.kafka.client import KafkaClient
from luminosity.io.kafka.exactly_once.sink import ExactlyOnce
from luminosity.io.kafka.exactly_once.transform import WriteExactlyOnce
from luminosity.io.kafka.metrics import WriteMetrics
from luminosity.io.kafka.offsets import BrokerQueries, ErrorLog
from luminosity.io.kafka.outgoing import UNWRITTEN, Outgoing, Part, RecordParts, UnwrittenRecord
from luminosity.io.kafka.producer import OWN_SETTINGS, BundleProducer, DeliveryFailure

__all__ = ["UnwrittenRecord", "WriteKafka"]

_SHARDS = 4
_MOST_KEPT = 10_000  # records that may have to be sent again; then the step waits for Kafka
_CHECK_S = 5.0  # how long brokers may take to answer when a pipeline is built
_MOST_KEPT_BYTES = 16_000_000  # the same, in bytes


class WriteKafka(beam.PTransform[Any, Any]):
    """Writes elements to Kafka, and emits tuples of topic and number of records once Kafka has them.

    >>> from luminosity.testing import KafkaBroker
    >>> with KafkaBroker({"words": 2}) as broker:
    ...     with beam.Pipeline("FnApiRunner") as pipeline:
    ...         words = pipeline | beam.Create([("en", "good"), ("de", "gut"), ("en", None)])
    ...         _ = words | WriteKafka(broker.bootstrap_servers, "words") | beam.Map(print)
    ...     [record.value for record in broker.consume("words") if record.key == b"en"]
    ('words', 3)
    [b'good', None]

    An element is one of

    - a ``KafkaRecord``: its key, value, headers and timestamp are written, to its topic unless ``topic=`` is given. Its
      partition and offset are where it was read, so they are not used;
    - a tuple of key and value;
    - a dict with ``"value"`` and any of ``"key"``, ``"headers"``, ``"timestamp"``, ``"partition"`` and ``"topic"``;
    - bytes, a text or None: the value alone;
    - a ``pyarrow.RecordBatch``: each row is a record, with the row as JSON or the column ``value=`` as its value;
    - anything else if ``value=`` is a function.

    Keys and values are bytes, or texts, which are written as UTF-8. A value None is a tombstone: it deletes the key in
    a compacted topic.

    Every record is written at least once. A bundle is committed when Kafka has all its records; if it fails before, it
    is retried, and some of its records may be in the topic twice. A producer writes each record once, and in order,
    whatever happens to its requests (``enable.idempotence``). So records with the same key keep the order in which one
    bundle, or several bundles after each other, have them. Bundles that run at the same time have no order: after a
    source of Kafka without a ``Reshuffle`` between, the records of a partition never do.

    With ``exactly_once``, readers with ``read_committed`` see every record once, also if everything is killed and
    starts again from its checkpoint. Records are written in transactions, once the checkpoint has them, and those with
    the same key keep their order in all bundles. It needs ``LuminosityRunner`` with ``--checkpoint_dir``, and one topic
    for all records. The output is in the global window. A record that brokers refuse ends the run.

    A worker that is ahead of Kafka waits, with at most 64 MB of records in its queue (``queue.buffering.max.kbytes``).
    A broker may be away for ``delivery_timeout_s``; then the bundle fails, and is retried.

    The counters in the namespace ``"WriteKafka"`` are ``records_written``, ``bytes_written`` (keys and values) and
    ``records_unwritten`` (dead letters). The time from the event time of an element to the moment when Kafka has its
    record is counted in buckets, such as ``latency_ms_to_100`` for those above 80 ms and up to 100 ms; the distribution
    ``latency_ms`` has the longest of each bundle.

    Args:
        bootstrap_servers: the addresses of one or more brokers, such as ``"one:9092,two:9092"``, or a list of them; or
            a ``KafkaClient``, which has the settings, too.
        topic: the topic, or a function that returns it for an element.
        key: the part of the element that is the key: a function, or the name of a column of a table or of a dict's
            item. So are ``value``, ``headers`` (a dict, or tuples of name and value), ``timestamp`` (milliseconds
            since 1970, a datetime or Beam's ``Timestamp``; None or -1 is the time of writing; 0 becomes 1, because the
            client takes 0 for now) and ``partition`` (a number, or None to let the key choose). Functions get the
            element, or a row of a table as a dict.
        value: the value, as above.
        headers: the headers, as above.
        timestamp: the timestamp, as above.
        partition: the partition, as above. By default the same as from Java's clients for the same key.
        config: settings of librdkafka, such as ``{"compression.type": "zstd"}``.
        secrets: settings whose values are secret, each as ``"env:NAME"`` or ``"file:PATH"``.
        delivery_timeout_s: how long Kafka may take for a record, with all retries.
        exactly_once: write each record once, with this name for transactions and consumer groups. No other sink may
            have it, nor the same sink with another checkpoint.
        shards: how many transactions may be open at once with ``exactly_once``; about as many as there are workers.
            It may change between two starts, which gives up the order of records with the same key that wait then.
    """

    def __init__(
        self,
        bootstrap_servers: str | Sequence[str] | KafkaClient,
        topic: str | Callable[[Any], str] | None = None,
        *,
        key: Part = None,
        value: Part = None,
        headers: Part = None,
        timestamp: Part = None,
        partition: Part = None,
        config: Mapping[str, Any] | None = None,
        secrets: Mapping[str, str] | None = None,
        delivery_timeout_s: float = 120.0,
        exactly_once: str | None = None,
        shards: int = _SHARDS,
    ) -> None:
        super().__init__()
        self._parts = RecordParts(topic, key, value, headers, timestamp, partition)
        if not delivery_timeout_s > 0:
            raise InvalidArgument(f"found delivery_timeout_s={delivery_timeout_s!r}, expected more than 0")
        self._client = KafkaClient.of(bootstrap_servers, config, secrets, OWN_SETTINGS)
        self._delivery_timeout_s = float(delivery_timeout_s)
        self._keeps_unwritten = False
        self._exactly_once = None
        if exactly_once is not None:
            self._exactly_once = ExactlyOnce.of(self._client, topic, exactly_once, shards, self._delivery_timeout_s)
        elif shards != _SHARDS:
            raise InvalidArgument(f"found shards={shards} without exactly_once=, expected both or neither")

    def with_exception_handling(self) -> WriteKafka:
        """Collect elements that Kafka refuses: the transform returns ``(written, unwritten)``.

        ``unwritten`` has an ``UnwrittenRecord`` for each element that can't be made into a record, and for each record
        that Kafka refuses for its content, its size or its topic. If a broker is away, or refuses the client, the
        bundle still fails: that is not the fault of a record.

        A broker refuses all records that it gets in one request if one of them is at fault. So they are sent again one
        by one, with the bundle's records after them, which keeps the order within a key.

        >>> from luminosity.testing import KafkaBroker
        >>> with KafkaBroker({"words": 2}) as broker, beam.Pipeline("FnApiRunner") as pipeline:
        ...     write = WriteKafka(broker.bootstrap_servers, "words").with_exception_handling()
        ...     written, unwritten = pipeline | beam.Create(["a", b"b", 3.14]) | write
        ...     _ = unwritten | beam.Map(lambda letter: print(letter.element, letter.reason[:47]))
        3.14 InvalidType: found an element of type float, ex
        """
        self._keeps_unwritten = True
        return self

    def expand(self, input_or_inputs: Any) -> Any:
        """Write in the workers that have the elements: a step between would change their order."""
        if getattr(input_or_inputs.pipeline.runner, "runs_on_this_machine", False):
            _check_brokers(self._client)
        if self._exactly_once is not None:
            return input_or_inputs | "Write" >> WriteExactlyOnce(
                self._exactly_once, self._parts, keeps_unwritten=self._keeps_unwritten
            )
        step = WriteDoFn(self._client, self._parts, self._delivery_timeout_s, self._keeps_unwritten)
        if not self._keeps_unwritten:
            return input_or_inputs | "Write" >> beam.ParDo(step).with_output_types(tuple[str, int])
        outputs = input_or_inputs | "Write" >> beam.ParDo(step).with_outputs(UNWRITTEN, main="written")
        outputs.written.element_type = tuple[str, int]
        outputs[UNWRITTEN].element_type = UnwrittenRecord
        return outputs.written, outputs[UNWRITTEN]

    def display_data(self) -> dict[str, Any]:
        """Return the addresses and the topic."""
        topic = self._parts.topic
        return {"bootstrap_servers": self._client.servers, "topic": topic if isinstance(topic, str) else "per element"}


def _check_brokers(client: KafkaClient) -> None:
    """Raise if the brokers refuse this client, or don't answer: a bundle would wait for them for minutes."""
    errors = ErrorLog()
    producer = client.producer({}, errors)
    BrokerQueries(producer, errors, client.servers, _CHECK_S, producer.poll).check()


class _Sent:
    """A record of this bundle, with what is needed to send it again or to make it a dead letter."""

    __slots__ = ("element", "failure", "record", "windowed")

    def __init__(self, record: Outgoing, element: Any, windowed: WindowedValue) -> None:
        self.record = record
        self.element = element
        self.windowed = windowed
        self.failure: DeliveryFailure | None = None

    def fail(self, failure: DeliveryFailure) -> None:
        self.failure = failure


class WriteDoFn(beam.DoFn):
    """Sends elements as they come, and waits for Kafka at the end of the bundle. Its producer outlives bundles."""

    def __init__(
        self, client: KafkaClient, parts: RecordParts, delivery_timeout_s: float, keeps_unwritten: bool
    ) -> None:
        self._client = client
        self._parts = parts
        self._delivery_timeout_s = delivery_timeout_s
        self._keeps_unwritten = keeps_unwritten
        self._metrics = WriteMetrics()

    def setup(self) -> None:
        """Prepare a producer. It connects with the first record."""
        self._producer = BundleProducer(self._client, self._delivery_timeout_s)

    def start_bundle(self) -> None:
        """Forget a bundle that failed: its records that wait would come behind those of the next attempt."""
        self._producer.forget()
        self._metrics.start()
        self._window: Any = None  # of the last element, if it had one only
        self._in_windows: dict[str, int] = defaultdict(int)
        self._counts: dict[tuple[Any, ...], dict[str, int]] = {}  # by windows and topic
        self._times: dict[tuple[Any, ...], Any] = {}  # of the first element in these windows
        self._size = 0
        self._kept: list[_Sent] = []
        self._kept_bytes = 0
        self._letters: list[tuple[UnwrittenRecord, WindowedValue]] = []

    def process(self, element: Any, windowed: Any = beam.DoFn.WindowedValueParam) -> None:
        """Send the element's record, or those of a table's rows."""
        # The window and the time of each element as parameters would take Beam as long as all the rest of this step.
        if element.__class__ is not pa.RecordBatch and not self._keeps_unwritten:  # the most frequent way first
            record = self._parts.record(element)
            self._producer.send(record)
            if self._producer.failure is not None:
                raise self._failed(self._producer.failure)
            self._count(record, windowed)
            self._metrics.note(windowed.timestamp_micros)
        elif isinstance(element, pa.RecordBatch):
            self._metrics.note_rows(element, windowed.timestamp_micros)
            for row, make in enumerate(self._parts.rows(element)):
                if self._keeps_unwritten:
                    self._keep(make, lambda row=row: element.slice(row, 1), windowed)
                else:
                    self._send(make(), windowed)
        else:
            self._keep(lambda: self._parts.record(element), lambda: element, windowed)
            self._metrics.note(windowed.timestamp_micros)

    def _send(self, record: Outgoing, windowed: WindowedValue) -> None:
        producer = self._producer
        producer.send(record)
        if producer.failure is not None:
            raise self._failed(producer.failure)
        self._count(record, windowed)

    def _keep(self, make: Callable[[], Outgoing], element: Callable[[], Any], windowed: WindowedValue) -> None:
        """Send a record, and keep it until Kafka has it or refuses it."""
        try:
            record = make()
        except Exception as error:
            self._letters.append((UnwrittenRecord(element(), f"{type(error).__name__}: {error}"), windowed))
            return
        sent = _Sent(record, element(), windowed)
        self._kept.append(sent)
        self._kept_bytes += len(record.value or b"") + len(record.key or b"")
        self._producer.send(record, sent.fail)
        if len(self._kept) >= _MOST_KEPT or self._kept_bytes >= _MOST_KEPT_BYTES:
            self._settle()

    def finish_bundle(self) -> Iterator[Any]:  # type: ignore[override]  # Beam declares None, and accepts these.
        """Wait until Kafka has all records, then emit their number, and the dead letters."""
        if self._keeps_unwritten:
            self._settle()
        else:
            self._producer.wait()
            if self._producer.failure is not None:
                raise self._failed(self._producer.failure)
        written = sum(count for counts in self._counts.values() for count in counts.values())
        self._metrics.count(written, self._size, len(self._letters))
        for windows, counts in self._counts.items():
            for topic, count in counts.items():
                yield WindowedValue((topic, count), self._times[windows], windows)
        for letter, windowed in self._letters:
            yield TaggedOutput(UNWRITTEN, windowed.with_value(letter))

    def teardown(self) -> None:
        """Close the connection. Records that wait are dropped: their bundle has failed."""
        self._producer.abandon()

    def _failed(self, failure: DeliveryFailure) -> Exception:
        self._producer.abandon()
        return failure.error()

    def _count(self, record: Outgoing, windowed: WindowedValue) -> None:
        windows = windowed.windows
        if len(windows) != 1 or windows[0] is not self._window:  # a tuple is made for each element, the window is not
            windows = tuple(windows)
            self._window = windows[0] if len(windows) == 1 else None
            if windows not in self._counts:
                self._counts[windows] = defaultdict(int)
                self._times[windows] = windowed.timestamp
            self._in_windows = self._counts[windows]
        self._in_windows[record[0]] += 1
        value, key = record[1], record[2]
        if value is not None:
            self._size += len(value)
        if key is not None:
            self._size += len(key)

    def _settle(self) -> None:
        """Wait for the records that are kept, find those at fault, and send the others again."""
        self._producer.wait()
        first = self._check(self._kept)
        if first is not None:
            # The others of the same request are innocent. Those behind them may have arrived meanwhile: they are sent
            # again, too, so that the last record of a key in the topic is the last of the bundle.
            again = [sent for sent in self._kept[first:] if sent.failure is None or sent.failure.may_be_anothers_fault]
            for sent in again:
                is_suspect = sent.failure is not None
                sent.failure = None
                if is_suspect:
                    self._producer.wait()
                self._producer.send(sent.record, sent.fail)
                if is_suspect:
                    self._producer.wait()
            self._producer.wait()
            self._check(again)
        for sent in self._kept:
            if sent.failure is None:
                self._count(sent.record, sent.windowed)
            else:
                failure = sent.failure
                reason = f"KafkaError: {failure.reason}"
                letter = UnwrittenRecord(sent.element, reason, failure.topic, failure.partition, failure.key)
                self._letters.append((letter, sent.windowed))
        self._kept = []
        self._kept_bytes = 0

    def _check(self, records: list[_Sent]) -> int | None:
        """Raise if a failure is no record's fault; return the first record that may have failed for another one."""
        first = None
        for number, sent in enumerate(records):
            if sent.failure is None:
                continue
            if not sent.failure.is_records_fault:
                raise self._failed(sent.failure)
            if first is None and sent.failure.may_be_anothers_fault:
                first = number
        return first
