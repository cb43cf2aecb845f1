"""A stream of a subscription's messages, which a thread reads ahead, and what its messages say about the watermark."""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import grpc

from luminosity.errors import LuminosityError, PubSubError
from luminosity.io.endless import StepUsers
from luminosity.io.outage import OutageLog
from luminosity.io.pubsub.client import MAX_OUTAGE_S, Service, describe, is_transient
from luminosity.io.pubsub.leases import Leases
from luminosity.io.pubsub.received import MessageReader, Received

__all__ = ["Puller", "Pullers", "Source"]

_LOGGER = logging.getLogger(__name__)

_MOST_MESSAGES = 20_000  # that wait in a reader or are not acknowledged; more are acknowledged within two seconds
_MOST_BYTES = 100 * 1024 * 1024
_IDLE_S = 2.0  # without a message for so long, a subscription has none
_RECENT_S = 10.0  # messages come nearly in order: those of the last seconds say how old the next ones may be
_BEHIND_MICROS = 5_000_000  # how late a message may be published and delivered, as with Kafka
_UNUSED_S = 5.0  # a reader that moved to another worker leaves its messages to others
_PING_S = 5.0
_PAUSE_S = 0.2  # before a stream is opened again
_OWN_DEADLINE_S = 10  # the shortest that a stream may ask for; tests of subscriptions with less use theirs


class Source(NamedTuple):
    """What a reader reads. It travels with the pipeline, as an element."""

    reader: int
    subscription: str
    lease_s: int
    is_new: bool = False  # made by this run: no other reader has had a message of it


class Puller:
    """Reads a subscription ahead. One thread at a time may use it, except for :meth:`acknowledge`."""

    def __init__(self, service: Service, source: Source, reader: MessageReader) -> None:
        self.holder = uuid.uuid4().hex[:16]
        self._connection = service.connect()
        self._source = source
        self._reader = reader
        self.leases = Leases(self._connection, source.subscription, source.lease_s)
        self._condition = threading.Condition()
        self._buffer: deque[Received] = deque()
        self._held: dict[str, tuple[int, bytes]] = {}  # event time and digest of what is not acknowledged
        self._due_again: dict[bytes, tuple[int, float]] = {}  # event times of released messages, and until when
        self._bundles: dict[int, list[str]] = {}  # what bundles have emitted
        self._recent: deque[tuple[float, int]] = deque()  # when messages came, and the earliest of their times
        self._error: LuminosityError | None = None
        self._call: Any = None
        self._generation = 0
        self._is_open = False
        self._is_closed = False
        self._unsure_until = 0.0
        self._last_came = time.monotonic()
        self.used_at = time.monotonic()
        self._outage = OutageLog(service.name, "reading")
        threading.Thread(target=self._run, name="pubsub-pull", daemon=True).start()

    # What a bundle does

    def begin(self, bundle: int, last_holder: str) -> None:
        """Begin a bundle. Releases what an attempt of the same bundle has emitted before, which was not committed."""
        self.used_at = time.monotonic()
        with self._condition:
            is_repeated = max(self._bundles, default=-1) >= bundle
        if is_repeated:
            self.restart()
        if last_holder != self.holder and not (self._source.is_new and not last_holder):
            self._unsure_until = time.monotonic() + self._source.lease_s + 1

    def take(self, most: int, wait_s: float) -> list[Received]:
        """Return up to ``most`` messages. Blocks for ``wait_s`` at most, until there is one.

        Raises ``PubSubError`` if the service refuses this reader or is away for too long.
        """
        with self._condition:
            if not self._buffer and self._error is None:
                self._condition.wait(wait_s)
            if self._error is not None and not self._buffer:
                raise self._error
            taken = [self._buffer.popleft() for _ in range(min(most, len(self._buffer)))]
            self._condition.notify_all()
        self.used_at = time.monotonic()
        return taken

    def emitted(self, bundle: int, messages: Iterable[Received]) -> None:
        """Note that a bundle emits messages."""
        with self._condition:
            self._bundles.setdefault(bundle, []).extend(each.ack_id for each in messages)

    def acknowledge(self, bundle: int) -> None:
        """Acknowledge what a bundle has emitted. Called when it is durable, by any thread."""
        with self._condition:
            ack_ids = self._bundles.pop(bundle, [])
            for each in ack_ids:
                self._held.pop(each, None)
        self.leases.acknowledge(ack_ids)

    def restart(self) -> None:
        """Give back all messages that are not committed, and read them again: in this way they stay in order."""
        with self._condition:
            self._generation += 1
            self._buffer.clear()
            until = time.monotonic() + self._source.lease_s
            for micros, digest in self._held.values():
                self._due_again[digest] = micros, until
            released = list(self._held)
            self._held.clear()
            self._bundles.clear()
            self._error = None
            call = self._call
            self._condition.notify_all()
        self.leases.release(released)
        if call is not None:
            call.cancel()

    def watermark_micros(self) -> int | None:
        """Return up to which event time messages have come, as far as this can be known; None if it can't."""
        now = time.monotonic()
        with self._condition:
            if now < self._unsure_until or not self._is_open:
                return None
            self._due_again = {d: each for d, each in self._due_again.items() if each[1] > now}
            times = [micros for micros, _ in self._held.values()]
            times += [micros for micros, _ in self._due_again.values()]
            while self._recent and now - self._recent[0][0] > _RECENT_S:
                self._recent.popleft()
            if now - self._last_came >= _IDLE_S:
                times.append(time.time_ns() // 1000 - _BEHIND_MICROS)
            else:
                times += [micros for _, micros in self._recent]
            return min(times, default=None)

    def close(self) -> None:
        """End the stream, acknowledge what is due, and give back all other messages."""
        with self._condition:
            self._is_closed = True
            call = self._call
            self._condition.notify_all()
        if call is not None:
            call.cancel()
        self.leases.close()
        self._connection.close()

    # What the thread does

    def _run(self) -> None:
        while not self._is_closed:
            try:
                self._ping()
                self._pull()
            except grpc.RpcError as error:
                self._note(error)
            except LuminosityError as error:
                self._fail(error)
            except ValueError:  # the channel is closed
                return
            self._is_open = False
            # Messages may be on their way that never arrive: they come again when their lease has ended.
            self._unsure_until = time.monotonic() + self._source.lease_s + 1
            if self._error is not None:
                with self._condition:
                    self._condition.wait_for(lambda: self._error is None or self._is_closed)
            elif not self._is_closed:
                time.sleep(_PAUSE_S)

    def _ping(self) -> None:
        """Ask for the subscription first: a stream without messages does not tell that it is open."""
        try:
            self._connection.subscription(self._source.subscription, _PING_S)
        except grpc.RpcError as error:
            if is_transient(error):
                raise
        self._outage.note_answer()

    def _pull(self) -> None:
        types = self._connection.types
        source = self._source
        request = types.StreamingPullRequest.pb()(
            subscription=source.subscription,
            stream_ack_deadline_seconds=source.lease_s if source.lease_s >= _OWN_DEADLINE_S else 0,
            max_outstanding_messages=_MOST_MESSAGES,
            max_outstanding_bytes=_MOST_BYTES,
            client_id=self.holder,
        )
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        requests.put(request)
        with self._condition:
            if self._is_closed:
                return
            generation = self._generation
            call = self._call = self._connection.streaming_pull(iter(requests.get, None), source.subscription)
        try:
            self._is_open = True
            for response in call:
                self._outage.note_answer()
                if not self._add(response.received_messages, generation):
                    return
        finally:
            call.cancel()
            requests.put(None)

    def _add(self, messages: Iterable[Any], generation: int) -> bool:
        """Take messages in. Returns False if the stream was restarted or closed meanwhile."""
        received = [self._reader.read(each.ack_id, each.message) for each in messages]
        self.leases.hold(each.ack_id for each in received)
        with self._condition:
            if generation != self._generation or self._is_closed:
                is_current = False
            else:
                is_current = True
                now = time.monotonic()
                for each in received:
                    self._held[each.ack_id] = each.micros, each.digest
                    self._due_again.pop(each.digest, None)
                if received:
                    self._last_came = now
                    self._recent.append((now, min(each.micros for each in received)))
                self._buffer.extend(received)
                self._condition.notify_all()
                self._condition.wait_for(lambda: len(self._buffer) < _MOST_MESSAGES or self._is_closed)
        if not is_current:
            self.leases.release(each.ack_id for each in received)
        return is_current

    def _note(self, error: grpc.RpcError) -> None:
        if self._is_closed or (isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.CANCELLED):
            return
        if not is_transient(error):
            self._fail(_refusal(self._source.subscription, error))
            return
        self._outage.note_silence(describe(error))
        if self._outage.seconds() > MAX_OUTAGE_S:
            self._fail(
                PubSubError(
                    f"{self._source.subscription} could not be read for {self._outage.seconds():.0f} s: "
                    f"{describe(error)}",
                    fix="check the network, and the address and the credentials of Pub/Sub",
                )
            )

    def _fail(self, error: LuminosityError) -> None:
        with self._condition:
            self._error = error
            self._condition.notify_all()


def _refusal(subscription: str, error: grpc.RpcError) -> PubSubError:
    return PubSubError(
        f"{subscription} can't be read: {describe(error)}",
        fix="check that the subscription exists, and that this account may read it (roles/pubsub.subscriber)",
    )


class Pullers:
    """The pullers of this process, by step and reader: the next bundle of a reader goes on with the same one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a bundle that was given up may be collected while it is held
        self._open: dict[tuple[str, int], Puller] = {}
        self._in_use: set[tuple[str, int]] = set()
        self._users = StepUsers()
        self._watch: threading.Thread | None = None

    def enter(self, step: str) -> None:
        """Count one more user of a step's pullers."""
        with self._lock:
            self._users.enter(step)

    def leave(self, step: str) -> None:
        """Count one user less. The last one closes the step's pullers."""
        with self._lock:
            if not self._users.leave(step):
                return
            closing = self._remove(lambda key, _: key[0] == step)
        for each in closing:
            each.close()

    def take(self, step: str, reader: int, make: Callable[[], Puller]) -> Puller:
        """Return the puller of a reader, which one bundle uses at a time."""
        key = step, reader
        with self._lock:
            found = self._open.get(key)
            if found is None:
                found = self._open[key] = make()
            self._in_use.add(key)
            if self._watch is None:
                self._watch = threading.Thread(target=self._close_unused, name="pubsub-unused", daemon=True)
                self._watch.start()
        return found

    def give_back(self, step: str, reader: int) -> None:
        """Note that no bundle uses a puller now. It is closed if none does for some seconds."""
        with self._lock:
            self._in_use.discard((step, reader))
            found = self._open.get((step, reader))
            if found is not None:
                found.used_at = time.monotonic()

    def _close_unused(self) -> None:
        is_watching = True
        while is_watching:
            time.sleep(_UNUSED_S / 5)
            with self._lock:
                closing = self._remove(self._is_unused)
                if not self._open:
                    self._watch, is_watching = None, False
            for each in closing:
                each.close()

    def _is_unused(self, key: tuple[str, int], puller: Puller) -> bool:
        return key not in self._in_use and time.monotonic() - puller.used_at > _UNUSED_S

    def _remove(self, is_old: Callable[[tuple[str, int], Puller], bool]) -> list[Puller]:
        found: Mapping[tuple[str, int], Puller] = {k: each for k, each in self._open.items() if is_old(k, each)}
        for key in found:
            del self._open[key]
        return list(found.values())
