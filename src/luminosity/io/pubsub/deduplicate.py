"""The step that lets each message through once: it remembers the ids of the last ten minutes, and longer if idle."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam import coders
from apache_beam.metrics.metric import Metrics
from apache_beam.transforms.userstate import BagStateSpec
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils import windowed_value

from luminosity.io.pubsub.received import DIGEST_BYTES

__all__ = ["DropRepeated"]

_GENERATION_S = 150.0  # four of them, before the current one, are the ten minutes that Beam's documentation names
_GENERATIONS = 5
_MOST_KNOWN = 500_000  # ids in the memory of a process beside its state: about 50 MB
_HEADER = 16  # bytes that begin a generation: its number, and when it began

_GLOBAL = (GlobalWindow(),)


def _spec(number: int) -> BagStateSpec:
    return BagStateSpec(f"ids_{number}", coders.BytesCoder())


class _Generation:
    """The ids of some minutes, of one shard."""

    def __init__(self, state: Any, known: _Known | None) -> None:
        self.state = state
        self.parts: list[bytes] = list(state.read())
        self.number, self.began = _parse(self.parts[0]) if self.parts else (-1, 0)
        # Ids that this process has collected from the state before count only if the state still begins with them.
        is_known = known is not None and known.parts == self.parts[: len(known.parts)]
        self.ids = known.ids if known is not None and is_known else set[bytes]()
        first = len(known.parts) if known is not None and is_known else 1
        for part in self.parts[first:]:
            self.ids.update(part[at : at + DIGEST_BYTES] for at in range(0, len(part), DIGEST_BYTES))

    def begin(self, number: int, began: int) -> None:
        """Forget all ids, and begin anew."""
        self.number, self.began, self.ids = number, began, set()
        self.state.clear()
        self.parts = []
        self.add(number.to_bytes(8, "big") + max(0, began).to_bytes(8, "big"))

    def add(self, part: bytes) -> None:
        """Add to the state."""
        self.state.add(part)
        self.parts.append(part)


class _Known(NamedTuple):
    """What a generation's state was when this process has looked at it last, and the ids in it."""

    parts: list[bytes]
    ids: set[bytes]


class _Memory:
    """The ids of the shards that this process has looked at lately, since it takes long to collect them."""

    def __init__(self) -> None:
        self._shards: dict[int, list[_Known]] = {}

    def take(self, shard: int) -> list[_Known] | None:
        """Return what is known of a shard, and forget it until it is kept again."""
        return self._shards.pop(shard, None)

    def keep(self, shard: int, generations: list[_Generation]) -> None:
        """Keep what is known of a shard. Forgets the shards that were not used for longest if it is too much."""
        self._shards[shard] = [_Known(each.parts, each.ids) for each in generations]
        while len(self._shards) > 1 and self._size() > _MOST_KNOWN:
            del self._shards[next(iter(self._shards))]

    def _size(self) -> int:
        return sum(len(known.ids) for shard in self._shards.values() for known in shard)


def _parse(header: bytes) -> tuple[int, int]:
    return int.from_bytes(header[:8], "big"), int.from_bytes(header[8:_HEADER], "big")


_0, _1, _2, _3, _4 = (beam.DoFn.StateParam(_spec(number)) for number in range(_GENERATIONS))


class DropRepeated(beam.DoFn):
    """Unpacks messages and lets each through that was not there within the last ten minutes.

    Ids move on by generations, one at a time. So after a pause of the pipeline nothing is forgotten: what Pub/Sub had
    delivered before it, and delivers again after it, is known.

    >>> with beam.Pipeline("FnApiRunner") as pipeline:
    ...     packed = [(7, pickle.dumps([(bytes(16), 0, b"fine"), (bytes(16), 0, b"again")]))]
    ...     _ = pipeline | beam.Create(packed) | beam.ParDo(DropRepeated()) | beam.Map(print)
    b'fine'
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._memory = _Memory()
        self._dropped = Metrics.counter("ReadFromPubSub", "repeated_messages_dropped")
        self._read = Metrics.counter("ReadFromPubSub", "messages_read")

    def process(
        self,
        element: tuple[int, bytes],
        ids_0: Any = _0,
        ids_1: Any = _1,
        ids_2: Any = _2,
        ids_3: Any = _3,
        ids_4: Any = _4,
    ) -> list[Any]:
        """Return the messages that are new, with their event times."""
        shard = element[0]
        known: list[_Known | None] = [*(self._memory.take(shard) or [None] * _GENERATIONS)]
        states = ids_0, ids_1, ids_2, ids_3, ids_4
        generations = [_Generation(*each) for each in zip(states, known, strict=True)]
        current = self._current(generations)
        new: list[bytes] = []
        found: list[Any] = []
        messages: list[tuple[bytes, int, bytes]] = pickle.loads(element[1])
        for digest, micros, payload in messages:
            if not any(digest in each.ids for each in generations):
                current.ids.add(digest)
                new.append(digest)
                found.append(windowed_value.create(payload, micros, _GLOBAL))
        if new:
            current.add(b"".join(new))
        self._memory.keep(shard, generations)
        self._read.inc(len(new))
        if len(new) < len(messages):
            self._dropped.inc(len(messages) - len(new))
        return found

    def _current(self, generations: list[_Generation]) -> _Generation:
        """Return the generation that gets new ids; the oldest one becomes it if the newest is full of time."""
        now = int(self._clock())
        newest = max(generations, key=lambda each: each.number)
        if newest.number >= 0 and now - newest.began < _GENERATION_S:
            return newest
        number = newest.number + 1
        begun = generations[number % _GENERATIONS]
        begun.begin(number, now)
        return begun
