"""A model on a server, which ``HttpModelHandler.load_model`` returns: asks the cache, waits for limits, retries."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import random
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from luminosity.core import InferenceMetrics
from luminosity.errors import EndpointError, IncompleteAnswer, RemoteModelError
from luminosity.inference.answer_cache import AnswerCache, CacheSettings, open_cache
from luminosity.inference.blocks import Block, rows, take
from luminosity.inference.handler import note
from luminosity.inference.handlers.first_token import note_first_token
from luminosity.inference.handlers.http.connection import Connection, exchange
from luminosity.inference.handlers.http.event_stream import is_event_stream, whole_answer
from luminosity.inference.handlers.http.gate import Permit, shared_gate
from luminosity.inference.handlers.http.hedging import Hedging
from luminosity.inference.handlers.http.limits import Claim, Limiter, RequestLimits
from luminosity.inference.handlers.http.protocol import HttpProtocol, Predictions, Request, Response
from luminosity.inference.handlers.http.retries import CircuitBreaker, RetryableError, check_status, delay
from luminosity.inference.handlers.http.usage import Usage

__all__ = ["RemoteModel"]

_LOGGER = logging.getLogger(__name__)
_WARN_AT_ATTEMPT = 4  # one or two retries are normal
_WARN_EVERY_S = 60.0  # many threads retry at once; one warning a minute is enough


class RemoteModel:
    """Sends requests to one endpoint and retries them. Any number of threads may use it."""

    def __init__(
        self,
        connection: Connection,
        protocol: HttpProtocol,
        limits: RequestLimits,
        cache: CacheSettings | None = None,
        hedge: float | None = None,
    ) -> None:
        """``hedge``: seconds without an answer until a request is sent a second time; None for never."""
        self._connection = connection
        self._protocol = protocol
        self._key = connection.key()
        self._client = connection.open_client()
        endpoint = f"{connection.address.shown()} {protocol.model}"
        self._gate = shared_gate(endpoint, connection.concurrency)
        self._limits = limits
        self._limiter = Limiter(limits, endpoint, protocol.counts_tokens, None if cache is None else cache.folder)
        self._breaker = CircuitBreaker(time.monotonic)
        self._random = random.Random()
        self._warn_after = 0.0
        self._cache_settings = cache
        if cache is not None:
            open_cache(cache)  # whether it can be used shows before the first request
        self._hedging = None if hedge is None else Hedging(hedge, connection.concurrency)
        self._facts = protocol.load_facts(self.send)
        self._breaker = CircuitBreaker(time.monotonic)  # forget failures of requests that the protocol can do without

    def predict(self, prepared: Block, arguments: dict[str, Any]) -> Predictions:
        """Return the server's predictions for these examples. Blocks until its response or the deadline.

        Those that the cache has are not asked for, and each one that comes is in the cache before it is returned.
        """
        if self._cache_settings is None:
            return self._read(self._ask(self._request(prepared, arguments), arguments), len(prepared))
        cache = open_cache(self._cache_settings)
        requests = [self._request([each], arguments) for each in rows(prepared)]
        keys = list(map(self._digest, requests))
        if self._protocol.one_by_one:
            return self._known_or_asked(cache, requests[0], arguments, keys[0])
        known = cache.get(keys)
        if known:
            note(InferenceMetrics.CACHED_ANSWERS, sum(key in known for key in keys))
        missing = [place for place, key in enumerate(keys) if key not in known]
        model_id = None
        if missing:
            request = self._request(take(prepared, np.array(missing)), arguments)
            found = self._read(self._ask(request, arguments), len(missing))
            model_id = found.model_id
            vectors = [np.asarray(each, "<f4").tobytes() for each in rows(found.values)]
            new = dict(zip([keys[place] for place in missing], vectors, strict=True))
            cache.put(new)
            known |= new
        lengths = sorted({len(known[key]) // 4 for key in keys})
        if len(lengths) > 1:
            raise RemoteModelError(
                f"found vectors of the lengths {lengths} for {self._protocol.model!r}, some of the cache and some of "
                "the server, expected one length",
                fix="choose another cache=FOLDER: the server's model has changed under its name",
            )
        return Predictions(np.stack([np.frombuffer(known[key], "<f4") for key in keys]), model_id)

    @property
    def shown(self) -> str:
        """The server's address, for messages."""
        return self._connection.address.shown()

    def asked_of(self, example: Any, arguments: dict[str, Any]) -> tuple[Request, bytes, int]:
        """Return the request for one example, its key in the cache, and the most tokens of its answer."""
        most_new = self._protocol.most_new_tokens(arguments)
        self._limits.check_tokens(self._protocol.counts_tokens, most_new)
        request = self._request([example], arguments)
        return request, self._digest(request), most_new or 0

    def claim(self, request: Request, most_new: int, seconds: float) -> Claim | float:
        """Reserve what a request may take within some time; return how long to wait if there is no room now."""
        return self._limiter.claim(len(request.body or b""), most_new, seconds)

    def usage(self, response: Response) -> Usage | None:
        """Return the tokens of an answer; None if the server does not say or it can't be read."""
        try:
            return self._protocol.usage(response)
        except RemoteModelError:
            return None

    def read(self, response: Response) -> Predictions:
        """Return the prediction in an answer. Raises ``RemoteModelError`` if there is none."""
        return self._protocol.read(response, 1, self._facts)

    def once(self, request: Request) -> Response:
        """Send a request that costs nothing itself, and don't retry it. Raises ``RetryableError`` if it may pass."""
        response = exchange(self._client, request, self._connection, self._key, self._connection.timeout)
        check_status(response)
        return response

    def _known_or_asked(
        self, cache: AnswerCache, request: Request, arguments: dict[str, Any], key: bytes
    ) -> Predictions:
        """Read the answer to one example, of the cache or of the server. Of equal examples, only one is asked.

        The cache has what the server sent: an answer that is cut or withheld was paid for, too, and would come again.
        """
        if found := self._known(cache, request, key):
            return found
        with cache.asking(key, self._connection.deadline):
            if found := self._known(cache, request, key):
                return found
            response = self._ask(request, arguments)
            try:
                predictions = self._read(response, 1)
            except IncompleteAnswer as error:
                if not error.may_pass:
                    cache.put({key: response.body})
                raise
            if not predictions.may_pass:
                cache.put({key: response.body})
            return predictions

    def _known(self, cache: AnswerCache, request: Request, key: bytes) -> Predictions | None:
        """Read the answer of the cache; None if it has none."""
        known = cache.get([key]).get(key)
        if known is None:
            return None
        url = self._connection.address.shown(request.path)
        found = self._protocol.read(Response(200, {}, known, url, request=request), 1, self._facts)
        if found.may_pass:
            cache.remove([key])  # of a version that kept what the server broke off
            return None
        note(InferenceMetrics.CACHED_ANSWERS)
        return found

    def _request(self, prepared: Block, arguments: dict[str, Any]) -> Request:
        return self._protocol.request(prepared, arguments, self._facts)

    def _digest(self, request: Request) -> bytes:
        """Return a digest of all that the answer to a request depends on: where it goes, and what is sent."""
        url = self._connection.address.url(request.path)
        headers = sorted({**self._connection.headers, **request.headers}.items())
        parts = [url.encode(), repr(headers).encode(), request.body or b""]
        return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()

    def _ask(self, request: Request, arguments: dict[str, Any]) -> Response:
        most_new = self._protocol.most_new_tokens(arguments)
        self._limits.check_tokens(self._protocol.counts_tokens, most_new)
        return self.send(request, most_new or 0, self._hedging)

    def _read(self, response: Response, count: int) -> Predictions:
        try:
            predictions = self._protocol.read(response, count, self._facts)
        except EndpointError as error:
            raise self._breaker.refused(error) from error
        except RemoteModelError:
            self._breaker.succeeded()
            raise
        self._breaker.succeeded()
        return predictions

    def send(self, request: Request, most_new: int = 0, hedging: Hedging | None = None) -> Response:
        """Send a request and retry it until its deadline. Waits for the first permit, and for limits, do not count.

        ``most_new`` is the most tokens that the answer may have. ``hedging`` sends one of the attempts twice at most.
        """
        ends, attempts, error = math.inf, 0, None
        num_bytes = len(request.body or b"") if self._protocol.counts_tokens else 0
        second = None if hedging is None else _Second(hedging, num_bytes, most_new)
        name, since = uuid.uuid4().hex, time.monotonic()
        while permit := self._gate.enter(ends - time.monotonic()):
            with permit:
                self._breaker.check()
                claim = self._limiter.claim(num_bytes, most_new, self._connection.timeout, name, since)
                if isinstance(claim, Claim):
                    ends = min(ends, time.monotonic() + self._connection.deadline)
                    outcome = self._attempt(request, permit, ends, claim, attempts > 0, second)
                    if isinstance(outcome, Response):
                        return outcome
                    attempts, error, since = attempts + 1, outcome, time.monotonic()
            if not isinstance(claim, Claim):
                note(InferenceMetrics.LIMIT_WAIT, int(claim * 1e6))
                ends += claim
                time.sleep(claim)
                continue
            assert error is not None
            pause = self._pause_after(error, attempts)
            if time.monotonic() + pause >= ends:
                break
            note(InferenceMetrics.RETRY_WAIT, int(pause * 1e6))
            time.sleep(pause)
        assert error is not None, "only the wait for a second permit is bounded"
        raise self._gave_up(error, attempts, ends - self._connection.deadline) from error

    def _pause_after(self, error: RetryableError, attempts: int) -> float:
        """Return how many seconds to wait before the next attempt; count and warn."""
        if error.is_throttled:
            note(InferenceMetrics.THROTTLED)
        if attempts == _WARN_AT_ATTEMPT:
            self._warn(error)
        return delay(attempts, error.retry_after_s, self._random)

    def _warn(self, error: RetryableError) -> None:
        now = time.monotonic()
        if now >= self._warn_after:
            self._warn_after = now + _WARN_EVERY_S
            deadline = self._connection.deadline
            _LOGGER.warning("%s. Requests are retried until their deadline of %g seconds.", error, deadline)

    def _attempt(
        self, request: Request, permit: Permit, ends: float, claim: Claim, is_again: bool, second: _Second | None
    ) -> Response | RetryableError:
        note(InferenceMetrics.REQUESTS)
        if is_again:
            note(InferenceMetrics.RETRIES)
        seconds = min(self._connection.timeout, max(ends - time.monotonic(), 0.001))
        with contextlib.ExitStack() as claims:
            claims.enter_context(claim)
            try:
                response = self._exchanged(request, seconds, second, claims)
                if request.is_stream and is_event_stream(response):
                    response = whole_answer(response)
                    if response.first_token_s is not None:
                        note_first_token(response.first_token_s)
                for each in [claim, *(second.claims if second else ())]:
                    self._count(response, each)
                if response.status >= 500:
                    permit.overloaded()
                check_status(response)
            except RetryableError as error:
                if not error.may_cost:
                    claim.took_nothing()  # a second one counts as if it had been answered
                permit.overloaded()
                return error
            except EndpointError as error:
                raise self._breaker.refused(error) from error
            except RemoteModelError:
                self._breaker.succeeded()
                raise
        permit.answered()
        return response

    def _exchanged(
        self, request: Request, seconds: float, second: _Second | None, claims: contextlib.ExitStack
    ) -> Response:
        """Send a request, and a second time if it takes long, but only once for all attempts, and within the limits."""

        def ask() -> Response:
            return exchange(self._client, request, self._connection, self._key, seconds)

        def may_ask_again() -> bool:
            assert second is not None
            try:
                claim = self._limiter.claim(second.num_bytes, second.most_new, seconds)
            except RemoteModelError:  # the budget has no room for a second one
                return False
            if not isinstance(claim, Claim):
                return False
            claims.enter_context(claim)
            second.claims.append(claim)
            second.was_sent = True
            note(InferenceMetrics.REQUESTS)
            note(InferenceMetrics.HEDGES)
            return True

        if second is not None:
            second.claims.clear()
        if second is None or second.was_sent or seconds <= second.hedging.after_s:
            return ask()
        return second.hedging.first(ask, may_ask_again)

    def _count(self, response: Response, claim: Claim) -> None:
        """Count the tokens of an answer, also of one that is refused later: it was paid for, too."""
        if response.status >= 300:
            claim.took_nothing()
            return
        usage = self.usage(response)  # None if it can't be read, for which ``read`` has the words
        claim.took(usage)
        if usage is not None:
            usage.note(self._limiter.prices)
        elif (prices := self._limiter.prices) is not None:
            note(InferenceMetrics.COST, prices.nanos(claim.most))  # as the budget counts it

    def _gave_up(self, error: RetryableError, attempts: int, began: float) -> RemoteModelError:
        wait = error.retry_after_s
        requested = "" if wait is None else f" It asked to wait for {wait:.3g} seconds."
        often = "once" if attempts == 1 else f"{attempts} times"
        message = f"{error}. Tried {often} within deadline={self._connection.deadline:g} seconds.{requested}"
        return self._breaker.gave_up(message, error.by_examples, began)


@dataclass
class _Second:
    """What is known about the second sending of a request."""

    hedging: Hedging
    num_bytes: int
    most_new: int
    was_sent: bool = False
    claims: list[Claim] = field(default_factory=list[Claim])
    """Of the second sending in the attempt that is under way."""
