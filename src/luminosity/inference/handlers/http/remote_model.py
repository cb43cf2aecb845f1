"""A model on a server: what ``HttpModelHandler.load_model`` returns."""

from __future__ import annotations

import logging
import math
import random
import time
from typing import Any

from luminosity.core import InferenceMetrics
from luminosity.errors import EndpointError, RemoteModelError
from luminosity.inference.blocks import Block
from luminosity.inference.handler import note
from luminosity.inference.handlers.http.concurrency import Permit, shared_gate
from luminosity.inference.handlers.http.connection import Connection, exchange
from luminosity.inference.handlers.http.protocol import HttpProtocol, Predictions, Request, Response
from luminosity.inference.handlers.http.retries import CircuitBreaker, RetryableError, check_status, delay

__all__ = ["RemoteModel"]

_LOGGER = logging.getLogger(__name__)
_WARN_AT_ATTEMPT = 4  # one or two retries are normal
_WARN_EVERY_S = 60.0  # many threads retry at once; one warning a minute is enough


class RemoteModel:
    """Sends requests to one endpoint and retries them. Any number of threads may use it."""

    def __init__(self, connection: Connection, protocol: HttpProtocol) -> None:
        self._connection = connection
        self._protocol = protocol
        self._key = connection.key()
        self._client = connection.open_client()
        self._gate = shared_gate(f"{connection.address.shown()} {protocol.model}", connection.concurrency)
        self._breaker = CircuitBreaker(time.monotonic)
        self._random = random.Random()
        self._warn_after = 0.0
        self._facts = protocol.load_facts(self.send)
        self._breaker = CircuitBreaker(time.monotonic)  # forget failures of requests that the protocol can do without

    def predict(self, prepared: Block, arguments: dict[str, Any]) -> Predictions:
        """Return the server's predictions for these examples. Blocks until its response or the deadline."""
        response = self.send(self._protocol.request(prepared, arguments, self._facts))
        try:
            predictions = self._protocol.read(response, len(prepared), self._facts)
        except EndpointError as error:
            raise self._breaker.refused(error) from error
        except RemoteModelError:
            self._breaker.succeeded()
            raise
        self._breaker.succeeded()
        return predictions

    def send(self, request: Request) -> Response:
        """Send a request and retry it until its deadline. The wait for the first permit does not count."""
        ends, attempts, outcome = math.inf, 0, None
        while permit := self._gate.enter(ends - time.monotonic()):
            with permit:
                self._breaker.check()
                note(InferenceMetrics.REQUESTS)
                if attempts:
                    note(InferenceMetrics.RETRIES)
                ends = min(ends, time.monotonic() + self._connection.deadline)
                attempts += 1
                outcome = self._attempt(request, permit, ends)
            if isinstance(outcome, Response):
                return outcome
            if outcome.is_throttled:
                note(InferenceMetrics.THROTTLED)
            if attempts == _WARN_AT_ATTEMPT:
                self._warn(outcome)
            pause = delay(attempts, outcome.retry_after_s, self._random)
            if time.monotonic() + pause >= ends:
                break
            note(InferenceMetrics.RETRY_WAIT, int(pause * 1e6))
            time.sleep(pause)
        assert outcome is not None, "only the wait for a second permit is bounded"
        raise self._gave_up(outcome, attempts, ends - self._connection.deadline) from outcome

    def _warn(self, error: RetryableError) -> None:
        now = time.monotonic()
        if now >= self._warn_after:
            self._warn_after = now + _WARN_EVERY_S
            deadline = self._connection.deadline
            _LOGGER.warning("%s. Requests are retried until their deadline of %g seconds.", error, deadline)

    def _attempt(self, request: Request, permit: Permit, ends: float) -> Response | RetryableError:
        seconds = min(self._connection.timeout, max(ends - time.monotonic(), 0.001))
        try:
            response = exchange(self._client, request, self._connection, self._key, seconds)
            if response.status >= 500:
                permit.overloaded()
            check_status(response)
        except RetryableError as error:
            permit.overloaded()
            return error
        except EndpointError as error:
            raise self._breaker.refused(error) from error
        except RemoteModelError:
            self._breaker.succeeded()
            raise
        permit.answered()
        return response

    def _gave_up(self, error: RetryableError, attempts: int, began: float) -> RemoteModelError:
        wait = error.retry_after_s
        requested = "" if wait is None else f" It asked to wait for {wait:.3g} seconds."
        often = "once" if attempts == 1 else f"{attempts} times"
        message = f"{error}. Tried {often} within deadline={self._connection.deadline:g} seconds.{requested}"
        return self._breaker.gave_up(message, error.by_examples, began)
