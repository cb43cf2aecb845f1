"""Measures each candidate in fresh processes: nothing remains of the one before, and a crash is a result."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from apache_beam.internal import pickler

from luminosity._shared import descendants
from luminosity._shared.text import describe_exit, shorten
from luminosity.inference.adapting.adapt import adapt
from luminosity.inference.handler import Handler
from luminosity.inference.memory import is_out_of_memory
from luminosity.inference.threads import limit_threads
from luminosity.inference.tuning.measurement import Measurement, ModelUnderTest, preparing_rate
from luminosity.inference.tuning.search import Candidate, devices_here, heavy_modules, ways_here, with_settings

__all__ = ["CandidateFailed", "Survey", "TrialRunner"]

_LONGEST_REASON = 300  # characters, so that a reason fits into a few lines


class CandidateFailed(Exception):
    """A candidate has no measurement; the message says why in one line."""


@dataclass(frozen=True)
class Survey:
    """The settings that all candidates have in common."""

    prepared_per_second: float
    """How many rows one core prepares per second."""
    devices: tuple[str, ...]
    """The devices that the handler can use."""
    ways: tuple[str, ...] = ()
    """The ways in which a GPU can run the model."""


class TrialRunner:
    """Measures candidates of one handler on the same rows."""

    def __init__(self, handler: Handler[Any, Any, Any], examples: list[Any]) -> None:
        self._pickled = pickler.dumps((handler, examples))
        self._context = multiprocessing.get_context("forkserver")
        self._family = descendants.Keeper.shared().family
        self._context.set_forkserver_preload([__name__, *heavy_modules(handler)])

    def survey(self, timeout: float) -> Survey:
        """Measure how fast rows are prepared, and find the devices."""
        [found] = self._run(1, _survey, (), time.monotonic() + timeout)
        return found

    def measure(
        self, candidate: Candidate, seconds: float, timeout: float, worth: float = 0.0
    ) -> tuple[Measurement, dict[int, Any]]:
        """Return a measurement and predictions by row.

        Takes about ``seconds`` to warm up and as long to measure. A candidate with fewer than ``worth`` rows per second
        is not measured for longer. Raises ``CandidateFailed``.
        """
        deadline = time.monotonic() + timeout
        results = self._run(candidate.workers, _measure, (candidate, seconds, worth / candidate.workers), deadline)
        return _together([measured for measured, _ in results]), results[0][1]

    def _run(self, count: int, work: Callable[..., Any], arguments: Sequence[Any], deadline: float) -> list[Any]:
        """Run ``work`` in ``count`` processes that start the second half of their work at the same time."""
        with ExitStack() as stack:
            workers = [
                stack.enter_context(_Worker(self._context, self._family, work, self._pickled, arguments))
                for _ in range(count)
            ]
            for worker in workers:
                worker.receive(deadline)
            for worker in workers:
                worker.go()
            return [worker.receive(deadline) for worker in workers]


class _Worker:
    def __init__(
        self, context: Any, family: int, work: Callable[..., Any], pickled: bytes, arguments: Sequence[Any]
    ) -> None:
        self._connection, theirs = context.Pipe()
        self._family = family
        # A daemon ends with this process.
        self._process = context.Process(
            target=_serve, args=(theirs, family, work, pickled, tuple(arguments)), daemon=True
        )
        self._begun = time.monotonic()
        self._process.start()
        theirs.close()  # otherwise the end of the process would not be noticed here

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.kill()
        self._process.join()
        descendants.end_group(self._process.pid)
        descendants.end_owned_by(self._family, ())

    def go(self) -> None:
        """Let the process start the second half of its work."""
        try:
            self._connection.send("go")
        except OSError as error:
            raise CandidateFailed(self._ending()) from error

    def receive(self, deadline: float) -> Any:
        """Wait for the process's next message; raise ``CandidateFailed`` if there is none in time."""
        if not wait([self._connection], max(0.0, deadline - time.monotonic())):
            raise CandidateFailed(f"not done after {time.monotonic() - self._begun:.0f} s")
        try:
            value, reason = self._connection.recv()
        except (EOFError, OSError) as error:
            raise CandidateFailed(self._ending()) from error
        if reason:
            raise CandidateFailed(reason)
        return value

    def _ending(self) -> str:
        self._process.join(5)
        code = self._process.exitcode
        if code == -signal.SIGKILL:
            return "its process was killed by SIGKILL, as the system does when memory is full"
        return f"its process {describe_exit(code or 0)}"


def _serve(
    connection: Connection, family: int, work: Callable[..., Any], pickled: bytes, arguments: Sequence[Any]
) -> None:
    """Run ``work`` in a child process and send its result.

    The child's output is discarded, because it would disturb the progress bar.
    """
    descendants.join(family)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)

    def is_ready() -> None:
        connection.send((None, ""))
        connection.recv()

    try:
        result = work(pickled, is_ready, *arguments), ""
    except EOFError:
        return  # the parent has given up this candidate
    except BaseException as error:
        result = None, _reason(error)
    connection.send(result)


def _survey(pickled: bytes, is_ready: Callable[[], None]) -> Survey:
    limit_threads(1)  # as in a CPU worker
    handler, examples = pickler.loads(pickled)
    handler.set_environment_vars()
    is_ready()
    return Survey(preparing_rate(adapt(handler), examples), devices_here(handler), ways_here(handler))


def _measure(
    pickled: bytes, is_ready: Callable[[], None], candidate: Candidate, seconds: float, worth: float
) -> tuple[Measurement, dict[int, Any]]:
    limit_threads(candidate.threads)
    handler, examples = pickler.loads(pickled)
    handler.set_environment_vars()
    model = ModelUnderTest(adapt(with_settings(handler, candidate)), examples)
    model.warm_up(seconds, worth)
    is_ready()
    return model.measure(seconds), model.predictions


def _reason(error: BaseException) -> str:
    words = " ".join(f"{type(error).__name__}: {error}".split())
    if is_out_of_memory(error):
        words = f"out of memory, even with one row: {words}"
    return shorten(words, _LONGEST_REASON)


def _together(each: list[Measurement]) -> Measurement:
    """Add up the measurements of workers that ran at the same time."""
    return Measurement(
        sum(one.rows_per_second for one in each),
        sum(one.rows for one in each),
        max(one.seconds for one in each),
        sum(one.batches for one in each),
        sum(one.useful_cost for one in each),
        sum(one.padded_cost for one in each),
        max(one.budget for one in each),
        max(one.largest_batch for one in each),
        sum(one.busy_share for one in each) / len(each),
        sum(one.out_of_memory for one in each),
        sum(one.memory_bytes for one in each),
        each[0].memory_of,
        max(one.first_seconds for one in each),
        each[0].computed_by,
    )
