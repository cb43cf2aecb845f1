"""A model that is elsewhere: what `load_model` returns."""

from __future__ import annotations

import logging
import math
import random
import time
from typing import Any

from luminosity.errors import EndpointError, RemoteModelError
from luminosity.inference.blocks import Block
from luminosity.inference.handlers.http.concurrency import Slot, gate_of
from luminosity.inference.handlers.http.connection import Connection, exchange
from luminosity.inference.handlers.http.protocol import Answer, HttpProtocol, Reply, Request
from luminosity.inference.handlers.http.retries import Busy, CircuitBreaker, check_status, delay

__all__ = ["RemoteModel"]

_LOGGER = logging.getLogger(__name__)
_TELL_AT = 4  # tries
_TELL_EVERY_S = 60.0


class RemoteModel:
    """Asks one endpoint, from any number of threads; keeps asking while that makes sense."""

    def __init__(self, connection: Connection, protocol: HttpProtocol) -> None:
        self._connection = connection
        self._protocol = protocol
        self._key = connection.key()
        self._pools = connection.pools()
        self._gate = gate_of(f"{connection.address.shown()} {protocol.model}", connection.concurrency)
        self._door = CircuitBreaker(time.monotonic)
        self._dice = random.Random()
        self._tell_after = 0.0
        self._facts = protocol.greet(self.send)
        self._door = CircuitBreaker(time.monotonic)  # What a protocol could do without is no reason to stay away.

    def answer(self, prepared: Block, arguments: dict[str, Any]) -> Answer:
        reply = self.send(self._protocol.request(prepared, arguments, self._facts))
        try:
            answer = self._protocol.read(reply, len(prepared), self._facts)
        except EndpointError as error:
            raise self._door.refused(str(error)) from error
        self._door.answered()
        return answer

    def send(self, request: Request) -> Reply:
        """The reply to it, tried until its deadline; the wait for its first turn does not count."""
        ends, tries, busy = math.inf, 0, None
        while slot := self._gate.enter(ends - time.monotonic()):
            with slot:
                self._door.check()
                ends = min(ends, time.monotonic() + self._connection.deadline)
                tries += 1
                busy = self._once(request, slot, ends)
            if isinstance(busy, Reply):
                return busy
            if tries == _TELL_AT:
                self._tell(busy)
            pause = delay(tries, busy.asked, self._dice)
            if time.monotonic() + pause >= ends:
                break
            time.sleep(pause)
        assert busy is not None, "only a second turn is waited for with a bound"
        raise self._gave_up(busy, tries, ends - self._connection.deadline) from busy

    def _tell(self, busy: Busy) -> None:
        """Somebody may wonder why nothing happens; once a minute will do."""
        now = time.monotonic()
        if now >= self._tell_after:
            self._tell_after = now + _TELL_EVERY_S
            deadline = self._connection.deadline
            _LOGGER.warning("%s. Requests are tried again until their deadline of %g seconds.", busy, deadline)

    def _once(self, request: Request, slot: Slot, ends: float) -> Reply | Busy:
        seconds = min(self._connection.timeout, max(ends - time.monotonic(), 0.001))
        try:
            reply = exchange(self._pools, request, self._connection, self._key, seconds)
            if reply.status >= 500:
                slot.overloaded()
            check_status(reply)
        except Busy as busy:
            slot.overloaded()
            return busy
        except EndpointError as error:
            raise self._door.refused(str(error)) from error
        except RemoteModelError:
            self._door.answered()
            raise
        slot.answered()
        return reply

    def _gave_up(self, busy: Busy, tries: int, began: float) -> RemoteModelError:
        asked = "" if busy.asked is None else f" It asked to wait for {busy.asked:.3g} seconds."
        often = "once" if tries == 1 else f"{tries} times"
        message = f"{busy}. Tried {often} within deadline={self._connection.deadline:g} seconds.{asked}"
        return self._door.gave_up(message, busy.by_examples, began)
