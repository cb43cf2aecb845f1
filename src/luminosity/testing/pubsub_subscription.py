"""One subscription of a fake Pub/Sub: which messages wait, which are leased until when, and which are acknowledged."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from typing import Any, NamedTuple

__all__ = ["FakeSubscription", "Leased"]


class Leased(NamedTuple):
    """A message on its way to a subscriber."""

    ack_id: str
    message: Any  # a google.pubsub.v1.PubsubMessage
    attempt: int


class _Lease(NamedTuple):
    key: Any
    at: int


class _Line:
    """The messages of one ordering key, in their order. A message without a key has a line of its own."""

    def __init__(self) -> None:
        self.first = 0  # the number of the first message that is left
        self.messages: deque[Any] = deque()
        self.next = 0  # the number of the message to deliver next
        self.acknowledged: set[int] = set()
        self.attempts: dict[int, int] = {}
        self.leases: dict[str, int] = {}
        self.holder: Any = None
        self.is_ready = False

    @property
    def waits(self) -> bool:
        return self.next < self.first + len(self.messages)

    def drop_acknowledged(self) -> None:
        while self.messages and self.first in self.acknowledged:
            self.acknowledged.remove(self.first)
            self.attempts.pop(self.first, None)
            self.messages.popleft()
            self.first += 1


class FakeSubscription:
    """Delivers messages as Pub/Sub does: at least once, and in order within a key if that is asked for.

    A message whose lease ends is delivered again, and with it all later messages of its key, acknowledged ones, too.
    Not thread-safe: the fake holds a lock.
    """

    def __init__(self, name: str, topic: str, ack_deadline_s: float, *, is_ordered: bool) -> None:
        self.name = name
        self.topic = topic
        self.ack_deadline_s = ack_deadline_s
        self.is_ordered = is_ordered
        self.repeats_every = 0  # deliver each message of this number again at once; 0 for none
        self.deliveries = 0
        self.redeliveries = 0
        self._numbers = itertools.count()
        self._lines: dict[Any, _Line] = {}
        self._ready: deque[Any] = deque()
        self._leases: dict[str, _Lease] = {}
        self._deadlines: dict[str, float] = {}
        self._expiries: list[tuple[float, str]] = []

    @property
    def unacknowledged(self) -> int:
        """How many messages wait or are leased."""
        return sum(len(line.messages) - len(line.acknowledged) for line in self._lines.values())

    def is_leased(self, ack_id: str) -> bool:
        """Return whether a subscriber has a message that it has not acknowledged."""
        return ack_id in self._leases

    def publish(self, message: Any) -> None:
        """Add a message."""
        key = message.ordering_key if self.is_ordered and message.ordering_key else next(self._numbers)
        line = self._lines.setdefault(key, _Line())
        line.messages.append(message)
        self._make_ready(key, line)

    def lease(self, most: int, holder: Any, now: float, deadline_s: float) -> list[Leased]:
        """Return up to ``most`` messages. They are delivered again if they are not acknowledged in time."""
        self.expire(now)
        found: list[Leased] = []
        passed: list[Any] = []
        while self._ready and len(found) < most:
            key = self._ready.popleft()
            line = self._lines.get(key)
            if line is None:
                continue
            if line.leases and line.holder is not holder:  # the rest of a key goes where its beginning is
                passed.append(key)
                continue
            line.is_ready, line.holder = False, holder
            while line.waits and len(found) < most:
                found.append(self._deliver(key, line, now + deadline_s))
            self._make_ready(key, line)
        self._ready.extendleft(reversed(passed))
        return found

    def _deliver(self, key: Any, line: _Line, expires: float) -> Leased:
        at, line.next = line.next, line.next + 1
        attempt = line.attempts[at] = line.attempts.get(at, 0) + 1
        line.acknowledged.discard(at)
        ack_id = f"{self.name}:{next(self._numbers)}"
        line.leases[ack_id] = at
        self._leases[ack_id] = _Lease(key, at)
        self._set_deadline(ack_id, expires)
        self.deliveries += 1
        self.redeliveries += attempt > 1
        if self.repeats_every and attempt == 1 and self.deliveries % self.repeats_every == 0:
            line.next = at  # and all that follow in its line
        return Leased(ack_id, line.messages[at - line.first], attempt)

    def acknowledge(self, ack_id: str) -> bool:
        """Return whether a lease was there. Its message is not delivered again then, unless one before it is."""
        lease = self._leases.pop(ack_id, None)
        if lease is None:
            return False
        self._deadlines.pop(ack_id, None)
        line = self._lines[lease.key]
        del line.leases[ack_id]
        if lease.at >= line.first:
            line.acknowledged.add(lease.at)
        if lease.at < line.next:
            line.drop_acknowledged()
        line.next = max(line.next, line.first)
        if not line.messages:
            for other in line.leases:
                self._leases.pop(other, None)
                self._deadlines.pop(other, None)
            del self._lines[lease.key]
        else:
            self._make_ready(lease.key, line)
        return True

    def modify(self, ack_id: str, deadline_s: float, now: float) -> bool:
        """Set the time that is left of a lease; none delivers the message again at once."""
        if ack_id not in self._leases:
            return False
        if deadline_s > 0:
            self._set_deadline(ack_id, now + deadline_s)
        else:
            self._return(ack_id)
        return True

    def expire(self, now: float) -> None:
        """Take messages back whose leases have ended."""
        while self._expiries and self._expiries[0][0] <= now:
            at, ack_id = heapq.heappop(self._expiries)
            if self._deadlines.get(ack_id) == at:
                self._return(ack_id)

    def next_expiry(self) -> float | None:
        """Return when a lease may end next."""
        return self._expiries[0][0] if self._expiries else None

    def _return(self, ack_id: str) -> None:
        """Deliver a message again, and with it all that follow in its line."""
        lease = self._leases[ack_id]
        line = self._lines[lease.key]
        for other, at in list(line.leases.items()):
            if at >= lease.at:
                del line.leases[other]
                self._leases.pop(other, None)
                self._deadlines.pop(other, None)
        line.next = max(line.first, min(line.next, lease.at))
        self._make_ready(lease.key, line)

    def _make_ready(self, key: Any, line: _Line) -> None:
        if line.waits and not line.is_ready:
            line.is_ready = True
            self._ready.append(key)

    def _set_deadline(self, ack_id: str, at: float) -> None:
        self._deadlines[ack_id] = at
        heapq.heappush(self._expiries, (at, ack_id))
