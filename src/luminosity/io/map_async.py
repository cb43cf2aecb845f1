"""Calls a service for each element, many calls at a time: :class:`MapAsync`."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import random
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, get_type_hints

import apache_beam as beam
from apache_beam.metrics import Metrics
from apache_beam.pvalue import TaggedOutput
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.core import ELEMENT_AT_FAULT
from luminosity.errors import Fix, InvalidArgument, InvalidType
from luminosity.tables.frames import name_of as _name_of

__all__ = ["MapAsync"]

_T = TypeVar("_T")

_FIRST_PAUSE_S = 0.1  # before the first retry; each pause is twice as long as the one before, and random
_LONGEST_PAUSE_S = 10.0
_OPEN_S = 60.0  # how long a client may take to open
_END_S = 10.0  # how long the end of a worker waits for the event loop and the client
_FAILED = "failed"
_NAMESPACE = "MapAsync"
_SHOWN_CHARACTERS = 1000  # of an element in an error


class MapAsync(beam.PTransform[Any, Any]):
    """Maps each element with a function that waits for something else, such as a service or a database.

    Each worker has up to ``capacity`` calls on their way at a time, while ``beam.Map`` waits for each call before the
    next. The function is an ``async def``, or a plain function, which then runs in threads.

    >>> import asyncio
    >>> async def looked_up(name: str) -> str:
    ...     await asyncio.sleep(0.1)  # in place of a request
    ...     return name.upper()
    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     names = pipeline | beam.Create(["a", "b"])
    ...     _ = names | MapAsync(looked_up, ordered=True) | beam.Map(print)
    A
    B

    A bundle ends when all of its calls have been answered, so an element and its answer are committed together. If a
    bundle is repeated, its calls are made again: a call should be idempotent. For models behind a server, use
    ``HttpModelHandler``, which finds the server's limits by itself.

    Args:
        fn: the function: ``fn(element)``, or ``fn(element, client)``. What it returns is one element.
        client: makes what all calls of a worker share, such as ``httpx.AsyncClient``. If it is a context manager, it is
            entered before the first call and left when the worker ends.
        capacity: how many calls a worker has on their way at most.
        timeout_s: how long one attempt may take. An ``async def`` is cancelled then; a plain function keeps its thread
            until it returns, so give it a time-out of its own as well.
        retries: how often a call that failed or took too long is made again, after a pause that doubles.
        retry_on: only these exceptions are retried, and time-outs.
        ordered: emit the answers in the order of the elements. Without it, an answer is emitted when it is there.

    ``.with_exception_handling()`` works as for ``beam.Map``: elements whose last retry failed become a second output.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        client: Callable[[], Any] | None = None,
        capacity: int = 32,
        timeout_s: float = 60.0,
        retries: int = 2,
        retry_on: tuple[type[Exception], ...] = (Exception,),
        ordered: bool = False,
    ) -> None:
        super().__init__()
        if not callable(fn):
            raise InvalidType(f"found {fn!r}, expected a function of an element")
        if inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn):
            raise InvalidType(
                f"found {_name_of(fn)}, which yields, expected a function that returns one value",
                fix=Fix("return a list, and apply beam.FlatMap(lambda values: values) after MapAsync"),
            )
        if client is not None and not callable(client):
            raise InvalidType(
                f"found client={client!r}, expected a function that makes one, such as httpx.AsyncClient: a client "
                "itself can't be sent to the workers"
            )
        if capacity < 1:
            raise InvalidArgument(f"found capacity={capacity!r}, expected a whole number from 1")
        if not 0 < timeout_s < float("inf"):
            raise InvalidArgument(f"found timeout_s={timeout_s!r}, expected a number of seconds above 0")
        if retries < 0:
            raise InvalidArgument(f"found retries={retries!r}, expected a whole number from 0")
        self._calling = _Calling(fn, client, capacity, timeout_s, retries, retry_on, ordered)
        self._has_dead_letters = False

    def with_exception_handling(self) -> MapAsync:
        """Return ``(answers, failures)``: elements whose calls fail no longer fail the pipeline.

        A failure has the form that Beam uses: the element, and a tuple of the exception's type, its text and its
        traceback.
        """
        self._has_dead_letters = True
        return self

    def default_label(self) -> str:
        """Return a label with the function's name, such as ``MapAsync(looked_up)``."""
        return f"MapAsync({_name_of(self._calling.fn)})"

    def expand(self, input_or_inputs: Any) -> Any:
        """Call the function for each element."""
        step = beam.ParDo(_CallDoFn(self._calling, self._has_dead_letters))
        step = step.with_output_types(_answer_type(self._calling.fn))
        return input_or_inputs | "Call" >> (
            step.with_outputs(_FAILED, main="answers") if self._has_dead_letters else step
        )


@dataclass(frozen=True)
class _Calling:
    """The arguments of the transform."""

    fn: Callable[..., Any]
    client: Callable[[], Any] | None
    capacity: int
    timeout_s: float
    retries: int
    retry_on: tuple[type[Exception], ...]
    ordered: bool

    @property
    def is_async(self) -> bool:
        """Whether the function is a coroutine's, which needs no thread."""
        return _is_async(self.fn)

    @property
    def longest_s(self) -> float:
        """The time in which any call has ended, with all of its attempts, if it can be cancelled."""
        return (self.retries + 1) * (self.timeout_s + _LONGEST_PAUSE_S) + _END_S


@dataclass(frozen=True)
class _Answer:
    """What came of all attempts of a call. Metrics are counted where it is taken: in the thread of the bundle."""

    value: Any = None
    error: Exception | None = None
    retries: int = 0
    timeouts: int = 0


@dataclass
class _Call:
    """A call on its way, for one element."""

    element: Any
    timestamp: Any
    windows: tuple[Any, ...]
    answer: Future[_Answer]


class _CallDoFn(beam.DoFn):
    def __init__(self, calling: _Calling, has_dead_letters: bool) -> None:
        self._calling = calling
        self._has_dead_letters = has_dead_letters
        self._caller: _Caller | None = None
        self._calls: list[_Call] = []
        self._answers = Metrics.counter(_NAMESPACE, "calls_answered")
        self._failures = Metrics.counter(_NAMESPACE, "calls_failed")
        self._retries = Metrics.counter(_NAMESPACE, "calls_retried")
        self._timeouts = Metrics.counter(_NAMESPACE, "calls_timed_out")

    def setup(self) -> None:
        self._caller = _Caller(self._calling)

    def start_bundle(self) -> None:
        self._drop_calls()  # of a bundle that failed

    def process(
        self,
        element: Any,
        timestamp: Any = beam.DoFn.TimestampParam,
        window: Any = beam.DoFn.WindowParam,
    ) -> Iterator[Any]:
        assert self._caller is not None
        last = self._calls[-1] if self._calls else None
        if last is not None and last.element is element and last.timestamp == timestamp and window not in last.windows:
            last.windows += (window,)  # Beam calls this method once for each window of an element
        else:
            self._calls.append(_Call(element, timestamp, (window,), self._caller.submit(element)))
        yield from self._answered(most=self._calling.capacity - 1)

    def finish_bundle(self) -> Any:
        yield from self._answered(most=0)

    def teardown(self) -> None:
        self._drop_calls()
        if self._caller is not None:
            self._caller.close()

    def _drop_calls(self) -> None:
        for call in self._calls:
            call.answer.cancel()
        self._calls = []

    def _answered(self, most: int) -> Iterator[Any]:
        """Yield the answers that are there, and wait until at most ``most`` calls are left."""
        while self._calls:
            waited_for = self._calls[:1] if self._calling.ordered else self._calls
            must_wait = len(self._calls) > most
            done, _ = wait(
                [call.answer for call in waited_for],
                timeout=self._calling.longest_s if must_wait else 0,
                return_when=FIRST_COMPLETED,
            )
            if not done:
                if must_wait:
                    name = _name_of(self._calling.fn)
                    raise TimeoutError(f"{name} goes on although it was cancelled after {self._calling.timeout_s:g} s")
                return
            ended = [call for call in waited_for if call.answer in done]
            self._calls = [call for call in self._calls if call.answer not in done]
            for call in ended:
                yield self._emitted(call, call.answer.result())

    def _emitted(self, call: _Call, answer: _Answer) -> Any:
        self._retries.inc(answer.retries)
        self._timeouts.inc(answer.timeouts)
        error = answer.error
        if error is None:
            self._answers.inc()
            return WindowedValue(answer.value, call.timestamp, call.windows)
        self._failures.inc()
        if not self._has_dead_letters:
            setattr(error, ELEMENT_AT_FAULT, repr(call.element)[:_SHOWN_CHARACTERS])
            raise error
        told = type(error), repr(error), traceback.format_exception(error)
        return TaggedOutput(_FAILED, WindowedValue((call.element, told), call.timestamp, call.windows))


class _Caller:
    """Makes the calls of one worker, on an event loop in a thread of its own; plain functions run in more threads."""

    def __init__(self, calling: _Calling) -> None:
        self._calling = calling
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="luminosity-calls", daemon=True)
        self._thread.start()
        self._opened = contextlib.AsyncExitStack()
        self._threads = None if calling.is_async else ThreadPoolExecutor(calling.capacity, "luminosity-call")
        self._arguments: tuple[Any, ...] = self._in_loop(self._open()).result(_OPEN_S)

    def submit(self, element: Any) -> Future[_Answer]:
        """Begin a call."""
        return self._in_loop(self._call(element))

    def close(self) -> None:
        """End the client, and the threads that are idle."""
        self._in_loop(self._opened.aclose()).result(_END_S)
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_S)

    def _in_loop(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _open(self) -> tuple[Any, ...]:
        if self._calling.client is None:
            return ()
        client = self._calling.client()
        if hasattr(client, "__aenter__"):
            client = await self._opened.enter_async_context(client)
        elif hasattr(client, "__enter__"):
            client = self._opened.enter_context(client)
        return (client,)

    async def _call(self, element: Any) -> _Answer:
        calling, timeouts = self._calling, 0
        for attempt in itertools.count():
            try:
                value = await asyncio.wait_for(self._attempt(element), calling.timeout_s)
                return _Answer(value, retries=attempt, timeouts=timeouts)
            except Exception as error:
                # Before Python 3.11, that of asyncio is another one.
                is_late = isinstance(error, asyncio.TimeoutError | TimeoutError)
                timeouts += is_late
                if attempt == calling.retries or not (is_late or isinstance(error, calling.retry_on)):
                    if is_late and not error.args:
                        error = TimeoutError(f"{_name_of(calling.fn)} did not return within {calling.timeout_s:g} s")
                    return _Answer(error=error, retries=attempt, timeouts=timeouts)
            await asyncio.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt) * random.uniform(0.5, 1.0))
        raise AssertionError("attempts have no end")

    async def _attempt(self, element: Any) -> Any:
        if self._threads is None:
            return await self._calling.fn(element, *self._arguments)
        return await self._loop.run_in_executor(self._threads, self._calling.fn, element, *self._arguments)


def _is_async(fn: Callable[..., Any]) -> bool:
    whole = inspect.unwrap(fn)
    while isinstance(whole, partial):
        whole = whole.func
    return inspect.iscoroutinefunction(whole) or inspect.iscoroutinefunction(getattr(whole, "__call__", None))  # noqa: B004


def _answer_type(fn: Callable[..., Any]) -> Any:
    try:
        return get_type_hints(fn).get("return", Any)
    except (NameError, TypeError, AttributeError):  # names that only a type checker knows, or an object without hints
        return Any
