"""The step that writes numbered batches to Kafka, in transactions."""

from __future__ import annotations

import concurrent.futures
import logging
import marshal
import time
import uuid
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
from apache_beam.coders import BytesCoder
from apache_beam.transforms.userstate import BagStateSpec, ReadModifyWriteStateSpec
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.errors import Fix, KafkaError
from luminosity.io.kafka.exactly_once.batches import Batch
from luminosity.io.kafka.exactly_once.sink import ExactlyOnce
from luminosity.io.kafka.exactly_once.transactions import ShardProducer, shard_id
from luminosity.io.kafka.metrics import WriteMetrics

__all__ = ["CommitDoFn"]

_LOGGER = logging.getLogger(__name__)

# Brokers forget the offsets of a group for which nothing was committed for long. They keep them for 7 days by default,
# and for at least a day, as we ask for.
_KEPT_S = 86_400.0
_GRACE_S = 30.0  # how much longer than the timeouts of its three steps a commit may take


class CommitDoFn(beam.DoFn):
    """Writes the batches of each shard in the order of their numbers, one transaction a shard and bundle.

    Its producers outlive bundles. The state of a shard is the next number, which worker has written last, and batches
    that have come before their turn. If another worker has written meanwhile, it has fenced the producer of this one.
    """

    _NEXT = beam.DoFn.StateParam(ReadModifyWriteStateSpec("next", BytesCoder()))
    _EARLY = beam.DoFn.StateParam(BagStateSpec("early", BytesCoder()))

    def __init__(self, how: ExactlyOnce) -> None:
        self._how = how
        self._metrics = WriteMetrics()

    def setup(self) -> None:
        """Begin without producers."""
        self._worker = uuid.uuid4().hex
        self._producers: dict[int, ShardProducer] = {}
        self._committing = concurrent.futures.ThreadPoolExecutor(self._how.shards, "kafka-commit")

    def start_bundle(self) -> None:
        """Abort what a bundle that failed has begun."""
        for shard in [shard for shard, producer in self._producers.items() if producer.is_open]:
            self._close(shard)
        self._metrics.start()
        self._first: WindowedValue | None = None
        self._count = self._size = 0
        self._skipped: dict[int, int] = {}  # records by shard

    def process(
        self,
        element: tuple[int, bytes],
        windowed: Any = beam.DoFn.WindowedValueParam,
        next_number: Any = _NEXT,
        early: Any = _EARLY,
    ) -> None:
        """Write a batch if it is its turn, and those that have waited for it."""
        shard, batch = element
        self._first = self._first or windowed
        stored = next_number.read()
        # The name came later: a checkpoint of a release before has none.
        expected, worker, waiting, *named = marshal.loads(stored) if stored else (0, "", 0, self._how.name)
        number = Batch.number_of(batch)
        if number < expected:
            return  # This run has committed it.
        if number > expected:
            early.add(batch)
            next_number.write(marshal.dumps((expected, worker, waiting + 1, *named)))
            return
        if worker != self._worker:
            self._close(shard)
        self._has_other_name = named not in ([], [self._how.name])
        self._write(shard, batch)
        expected += 1
        if waiting:
            kept = {Batch.number_of(each): each for each in early.read()}
            while expected in kept:
                self._write(shard, kept.pop(expected))
                expected += 1
            early.clear()
            for each in kept.values():
                early.add(each)
            waiting = len(kept)
        next_number.write(marshal.dumps((expected, self._worker, waiting, self._how.name)))

    def finish_bundle(self) -> Iterator[Any]:  # type: ignore[override]  # Beam declares None, and accepts these.
        """Commit the transactions, then emit how many records Kafka has."""
        committing = {
            shard: self._committing.submit(producer.commit)
            for shard, producer in self._producers.items()
            if producer.is_open
        }
        late = concurrent.futures.wait(committing.values(), 3 * self._how.delivery_timeout_s + _GRACE_S).not_done
        failed = {
            shard: KafkaError(f"{self._id(shard)}: the transaction does not end", may_pass=True)
            if each in late
            else each.exception()
            for shard, each in committing.items()
        }
        failed = {shard: error for shard, error in failed.items() if error is not None}
        for shard in failed:
            self._close(shard)
        for error in failed.values():
            raise error
        for shard, count in self._skipped.items():
            _LOGGER.info("%s has %s records already that come again", self._id(shard), count)
        self._metrics.count(self._count, self._size, 0)
        if self._count and self._first is not None:
            yield WindowedValue((self._how.topic, self._count), self._first.timestamp, (GlobalWindow(),))

    def teardown(self) -> None:
        """Abort what has begun, and close the connections."""
        for shard in list(self._producers):
            self._close(shard)
        self._committing.shutdown(wait=False)

    def _close(self, shard: int) -> None:
        producer = self._producers.pop(shard, None)
        if producer is not None:
            producer.close()

    def _write(self, shard: int, encoded: bytes) -> None:
        batch = Batch.decode(encoded)
        producer = self._producers.get(shard)
        if producer is None:
            producer = self._producers[shard] = self._how.open(shard)
        if not producer.is_known:
            self._check_first(shard, batch)
            producer.begin_at(batch.number)
        progress = producer.progress
        if batch.number < progress.next:
            if progress.maker_of(batch.number) != batch.start:
                raise self._rolled_back(shard, batch.number, progress.next)
            self._skipped[shard] = self._skipped.get(shard, 0) + len(batch.records)
        elif batch.number > progress.next:
            raise KafkaError(
                f"found the number {progress.next} in the group {self._id(shard)!r}, expected {batch.number}: Kafka "
                "has lost what this run has committed",
                fix=Fix("find out whether records are lost; then continue with another name as exactly_once="),
            )
        else:
            try:
                producer.write(batch)
            except BaseException:
                self._close(shard)
                raise
        self._count += len(batch.records)
        self._size += batch.size
        self._metrics.note_many(batch.times)

    def _check_first(self, shard: int, batch: Batch) -> None:
        """Raise if Kafka may have forgotten this batch. It knows nothing of its shard."""
        if self._has_other_name:
            return  # So it never knew.
        if batch.number and time.time() - batch.numbered_ms / 1000 > _KEPT_S:
            raise KafkaError(
                f"found nothing in the group {self._id(shard)!r}, expected the number of its next batch: brokers have "
                f"forgotten it, and batch {batch.number} waits for more than {_KEPT_S / 3600:.0f} hours, so the topic "
                "may have it",
                fix=Fix("look into the topic; then continue with another name as exactly_once="),
            )

    def _rolled_back(self, shard: int, number: int, end: int) -> KafkaError:
        return KafkaError(
            f"found batches {number} to {end - 1} of {self._id(shard)!r} in Kafka, which this checkpoint does not "
            "know: it is older than the topic, as a savepoint, a copy that was late, or after a power loss",
            fix=Fix(
                "continue with another name as exactly_once=: records that the topic has got since then come again, "
                "all others once; or write to another topic, with another name"
            ),
        )

    def _id(self, shard: int) -> str:
        return shard_id(self._how.name, shard)
