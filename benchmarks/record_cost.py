"""Measures what it costs to record a run: the same pipeline with a record, and with ``--run_dir=off``.

    python benchmarks/record_cost.py     # about 20 s for each side, three times in turn

The pipeline sleeps for a given time in each of two workers, in bundles of about a tenth of a second, so that its own
time is the same on both sides also on a busy machine. The cost is the processor time of this process: of the threads
that sample and record, and of the loop, which makes the snapshots. What workers measure for each bundle is timed alone.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import _measure
import apache_beam as beam
from apache_beam.metrics import Metrics
from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.workers.sdk.bundle_report import BundleMeter

_SECONDS = 20.0
_ELEMENT_S = 0.005
_ROUNDS = 3
_LOOK_EVERY_S = 0.2  # how much of a thread's last moments may be missed
_OBSERVING = ("luminosity-sampler", "luminosity-events")
_LOOP = "luminosity-run"


def _sleep(number: int) -> int:
    time.sleep(_ELEMENT_S)
    Metrics.counter("bench", "numbers").inc()
    Metrics.distribution("bench", "sizes").update(number % 100)
    return number


def _build(pipeline: beam.Pipeline) -> None:
    count = int(2 * _SECONDS / _ELEMENT_S)
    numbers = pipeline | beam.Create(range(count)) | beam.Reshuffle() | "Sleep" >> beam.Map(_sleep)
    _measure.check_count_and_sum(numbers, count, count * (count - 1) // 2)


class _ThreadTimes:
    """Reads the processor time of this process's threads by name, until it is stopped."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, int], float] = {}
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, float]:
        """Stop reading. Returns the seconds by name, summed over threads of the same name."""
        self._is_stopped.set()
        self._thread.join()
        found: dict[str, float] = {}
        for (name, _), seconds in self._seconds.items():
            found[name] = found.get(name, 0.0) + seconds
        return found

    def _watch(self) -> None:
        while not self._is_stopped.wait(_LOOK_EVERY_S):
            for thread in threading.enumerate():
                if thread.name in (*_OBSERVING, _LOOP) and thread.ident is not None and thread.is_alive():
                    clock = time.pthread_getcpuclockid(thread.ident)
                    self._seconds[thread.name, thread.ident] = time.clock_gettime(clock)


def _side(run_dir: str) -> dict[str, float]:
    times = _ThreadTimes()
    before = time.process_time()
    seconds = _measure.run_ours(_build, "--cpu_workers=2", f"--run_dir={run_dir}")
    cpu = time.process_time() - before
    threads = times.stop()
    records = list(Path(run_dir).glob("*")) if run_dir != "off" else []
    return {
        "seconds": seconds,
        "CPU s": cpu,
        "observing s": sum(threads.get(name, 0.0) for name in _OBSERVING),
        "loop s": threads.get(_LOOP, 0.0),
        "record kB": sum(path.stat().st_size for path in records) / 1000,
    }


def _recorded() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return _side(folder)


def _not_recorded() -> dict[str, float]:
    return _side("off")


def _bundle_us() -> float:
    """Return the microseconds that a worker takes to measure one bundle."""
    meter, count = BundleMeter(), 5000
    before = time.thread_time()
    for _ in range(count):
        meter.measure(beam_fn_api_pb2.InstructionResponse)
    return 1e6 * (time.thread_time() - before) / count


def _report(results: _measure.Results) -> None:
    _measure.print_table(results)
    on, off = results["recorded"], results["not recorded"]
    _measure.print_figure("time, recorded / not recorded", on["seconds"] / off["seconds"], at_most=1.01)
    observing = on["observing s"] / on["seconds"]
    _measure.print_figure("threads that sample and record, % of a core", 100 * observing, at_most=1.0)
    more = (on["CPU s"] - off["CPU s"]) / on["seconds"]
    _measure.print_figure("this process takes more, with snapshots, % of a core", 100 * more)
    _measure.print_figure("to measure a bundle in a worker, microseconds", _bundle_us(), at_most=100)


if __name__ == "__main__":
    _measure.main({"recorded": _recorded, "not recorded": _not_recorded}, _report, _ROUNDS)
