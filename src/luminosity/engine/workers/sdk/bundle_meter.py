"""Measures the CPU time and memory of the bundles that run in this process."""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Callable

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.core import resident_bytes
from luminosity.engine.data import wire

__all__ = ["BundleMeter"]

_KIB = 1 if sys.platform == "darwin" else 1024  # the unit of the peak that the system reports


class BundleMeter:
    """Shares the CPU time of this process out among the bundles that run in it. Any thread may use it.

    A bundle gets the time of its own thread, and an equal part of the time of all other threads, such as those of
    models and of the connection, for as long as it runs. So the bundles that run at the same time never get more than
    the process took. The time between bundles belongs to none of them. A reading takes a few microseconds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[_Running, None] = {}
        self._counted = 0.0  # the process's CPU seconds at the last look
        self._shared = 0.0  # the part of one bundle that has run all the time: CPU seconds of other threads

    def measure(self, task: Callable[[], beam_fn_api_pb2.InstructionResponse]) -> beam_fn_api_pb2.InstructionResponse:
        """Run ``task``, which processes a bundle on this thread, and add to its response what it took."""
        running = self._begin()
        try:
            response = task()
        finally:
            cpu_seconds = self._end(running)
        peak = _peak_bytes()
        # The system knows only the peak of the whole process: it is this bundle's if the bundle has raised it.
        resident = peak if peak > running.peak_before else resident_bytes()
        response.process_bundle.monitoring_data[wire.USAGE] = wire.pack_usage(cpu_seconds, resident)
        return response

    def _begin(self) -> _Running:
        running = _Running()
        with self._lock:
            self._look()
            running.shared_before = self._shared
            self._running[running] = None
        return running

    def _end(self, running: _Running) -> float:
        with self._lock:
            self._look()
            del self._running[running]
            return running.seen - running.begun + self._shared - running.shared_before

    def _look(self) -> None:
        """Share out the CPU time of other threads since the last look."""
        counted = time.process_time()
        others = counted - self._counted - sum(running.look() for running in self._running)
        self._counted = counted
        if self._running:
            # The clocks are read one after the other, so that the difference may be slightly negative.
            self._shared += max(0.0, others) / len(self._running)


class _Running:
    """A bundle that runs on the thread that makes this object."""

    def __init__(self) -> None:
        # Systems without clocks of other threads share all time out equally.
        has_clocks = hasattr(time, "pthread_getcpuclockid")
        self._clock = time.pthread_getcpuclockid(threading.get_ident()) if has_clocks else None
        self.begun = self.seen = self._now()
        self.shared_before = 0.0
        self.peak_before = _peak_bytes()

    def look(self) -> float:
        """Return the CPU seconds of the bundle's thread since the last look. The bundle must be running."""
        before, self.seen = self.seen, self._now()
        return self.seen - before

    def _now(self) -> float:
        return 0.0 if self._clock is None else time.clock_gettime(self._clock)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
