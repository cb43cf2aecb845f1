"""The messages that a process holds: their deadlines are extended until they are acknowledged or given back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import grpc

from luminosity.io.outage import OutageLog
from luminosity.io.pubsub.client import Connection, describe, is_transient

__all__ = ["Leases"]

_LOGGER = logging.getLogger(__name__)

_LONGEST_HOLD_S = 600.0  # a bundle is durable within seconds; a message that is held for longer belongs to no bundle
_IDS_PER_CALL = 2_000  # of about 200 bytes: a request may have 512 kB
_RETRY_S = 0.2  # after a call that has failed
_MOST_WAITING = 100_000  # ids for which a call fails: those before them have expired by then, and come again
_CLOSE_S = 3.0  # how long an ending process waits for its last acknowledgements


class Leases:
    """Holds messages of a subscription for this process. Several threads may use it; a thread of its own makes calls.

    A message that is neither acknowledged nor released within ten minutes is no longer extended, so that Pub/Sub
    delivers it again.
    """

    def __init__(self, connection: Connection, subscription: str, lease_s: int) -> None:
        self._connection = connection
        self._subscription = subscription
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._held: dict[str, float] = {}  # since when
        self._acknowledged: list[str] = []  # these wait for a call
        self._released: list[str] = []
        self._wake = threading.Event()
        self._is_closing = False
        self._extend_at = time.monotonic() + lease_s / 2
        self._outage = OutageLog(connection.service.name, "acknowledging")
        self._thread = threading.Thread(target=self._run, name="pubsub-leases", daemon=True)
        self._thread.start()

    @property
    def count(self) -> int:
        """How many messages are held."""
        return len(self._held)

    def hold(self, ack_ids: Iterable[str]) -> None:
        """Extend the deadlines of messages that have just come."""
        now = time.monotonic()
        with self._lock:
            self._held.update(dict.fromkeys(ack_ids, now))

    def acknowledge(self, ack_ids: Iterable[str]) -> None:
        """Let messages be acknowledged soon. Does not block."""
        with self._lock:
            for each in ack_ids:
                if self._held.pop(each, None) is not None:
                    self._acknowledged.append(each)
        self._wake.set()

    def release(self, ack_ids: Iterable[str]) -> None:
        """Let messages be delivered again soon. Does not block."""
        with self._lock:
            for each in ack_ids:
                if self._held.pop(each, None) is not None:
                    self._released.append(each)
        self._wake.set()

    def close(self) -> None:
        """Acknowledge what is due, give back all other messages, and end the thread. Blocks for seconds at most."""
        with self._lock:
            self._released += self._held
            self._held.clear()
            self._is_closing = True
        self._wake.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while True:
            wait = _RETRY_S if self._outage.since is not None else max(0.01, self._extend_at - time.monotonic())
            self._wake.wait(wait)
            self._wake.clear()
            with self._lock:
                acknowledged, self._acknowledged = self._acknowledged, []
                released, self._released = self._released, []
                is_closing = self._is_closing
            left = self._call_each(acknowledged, self._connection.acknowledge)
            returned = self._call_each(released, partial(self._connection.modify_deadline, seconds=0))
            with self._lock:
                self._acknowledged = (left + self._acknowledged)[-_MOST_WAITING:]
                self._released = (returned + self._released)[-_MOST_WAITING:]
            if is_closing:
                return
            if time.monotonic() >= self._extend_at:
                self._extend()

    def _extend(self) -> None:
        now = time.monotonic()
        self._extend_at = now + self._lease_s / 2
        with self._lock:
            old = [each for each, since in self._held.items() if now - since > _LONGEST_HOLD_S]
            for each in old:
                del self._held[each]
            # The service has given a new message its whole lease.
            due = [each for each, since in self._held.items() if now - since >= self._lease_s / 4]
        if old:
            _LOGGER.warning(
                "%s: %d messages were not committed within %.0f s; Pub/Sub delivers them again",
                self._subscription,
                len(old),
                _LONGEST_HOLD_S,
            )
        if self._call_each(due, partial(self._connection.modify_deadline, seconds=self._lease_s)):
            self._extend_at = time.monotonic() + _RETRY_S  # or they would come again before the next time

    def _call_each(self, ack_ids: list[str], call: Callable[[str, list[str]], Any]) -> list[str]:
        """Make a call for parts of the ids. Returns those for which it should be made again."""
        for begin in range(0, len(ack_ids), _IDS_PER_CALL):
            try:
                call(self._subscription, ack_ids[begin : begin + _IDS_PER_CALL])
            except grpc.RpcError as error:
                if is_transient(error):
                    self._outage.note_silence(describe(error))
                    return ack_ids[begin:]
                # These messages come again and are known then; the reader says more if the subscription is gone.
                _LOGGER.warning("%s: a request was refused: %s", self._subscription, describe(error))
            except ValueError:  # the channel is closed
                return []
            else:
                self._outage.note_answer()
        return []
