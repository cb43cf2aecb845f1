"""Measures how long records of a stream take from their source to the last step, and what an idle stream costs.

1,000 records a second go through a Reshuffle and a stateful step with 10,000 keys. One source checkpoints itself if no
record is there; the other waits for the next record inside its poll. A record's latency counts from the moment it
exists, so the time until the source sees it is included. Both run once more with ``--checkpoint_dir``, where elements
behind the Reshuffle wait for the next checkpoint, every 50 ms. The folder is below ``CHECKPOINTS``, if that is set.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import _measure
import apache_beam as beam
import psutil
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.core import RestrictionProvider
from apache_beam.transforms.userstate import CombiningValueStateSpec
from apache_beam.utils.timestamp import Duration

RECORDS_PER_SECOND = 1_000
KEYS = 10_000
START_S = 1.0  # from the first call of the source to the first record
IDLE_START_S = 6.0  # until the workers have started
WARM_UP_S = 3.0  # of records that do not count
MEASURED_S = float(os.environ.get("STREAM_LATENCY_SECONDS", "20"))
IDLE_S = 10.0
LONGEST_POLL_S = 1.0  # of the source that blocks
AT_MOST_P99_MS = 100.0
AT_MOST_DURABLE_P99_MS = 150.0
AT_MOST_IDLE_PERCENT = 5.0

_LATENCY = "<dd"  # when the record existed, and its latency in seconds
_COUNT = beam.DoFn.StateParam(CombiningValueStateSpec("count", sum))


class Records(RestrictionProvider):
    """The numbers of the records. Record ``n`` exists from ``start + n / RECORDS_PER_SECOND`` on."""

    def __init__(self, records: int) -> None:
        self._records = records

    def initial_restriction(self, element: str) -> OffsetRange:
        return OffsetRange(0, self._records)

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return OffsetRestrictionTracker(restriction)

    def restriction_size(self, element: str, restriction: OffsetRange) -> int:
        return restriction.size()

    def truncate(self, element: str, restriction: OffsetRange) -> None:
        return None


def start_time(path: str) -> float:
    """Return when the first record exists, which the first caller decides."""
    with contextlib.suppress(FileExistsError), open(path, "x") as file:  # Another caller was the first.
        file.write(f"{time.time() + START_S}\n")
    while not (text := Path(path).read_text()).endswith("\n"):
        time.sleep(0.001)
    return float(text)


def exists_at(start: float, record: int) -> float:
    return start + record / RECORDS_PER_SECOND


def source(records: int, is_blocking: bool, pause_s: float) -> beam.DoFn:
    """Return a source that blocks in its poll, or one that defers the rest by ``pause_s`` if no record is there."""
    tracker_param: Any = beam.DoFn.RestrictionParam(Records(records))

    class Source(beam.DoFn):
        @beam.DoFn.unbounded_per_element()
        def process(self, path: str, tracker: Any = tracker_param) -> Iterable[tuple[int, float]]:
            start = start_time(path)
            record = tracker.current_restriction().start
            while True:
                wait = exists_at(start, record) - time.time()
                if is_blocking and wait > 0 and record < records:
                    time.sleep(min(wait, LONGEST_POLL_S))
                    if wait > LONGEST_POLL_S:
                        continue
                elif wait > 0 and record < records:
                    tracker.defer_remainder(Duration(pause_s))
                    return
                if not tracker.try_claim(record):
                    return
                yield record * 7919 % KEYS, exists_at(start, record)
                record += 1

    return Source()


class CountPerKey(beam.DoFn):
    """Counts the records of each key."""

    def process(self, element: tuple[int, float], count: Any = _COUNT) -> Iterator[float]:
        count.add(1)
        yield element[1]


class NoteLatency(beam.DoFn):
    """Appends the latencies of a bundle to a file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._notes = b""

    def process(self, existed_at: float) -> None:
        self._notes += struct.pack(_LATENCY, existed_at, time.time() - existed_at)

    def finish_bundle(self) -> None:
        with open(self._path, "ab", buffering=0) as file:
            file.write(self._notes)  # one write: the pieces of several workers do not mix
        self._notes = b""


def build(pipeline: beam.Pipeline, step: beam.DoFn, start_path: str, path: str) -> None:
    (
        pipeline
        | beam.Create([start_path])
        | beam.ParDo(step).with_output_types(tuple[int, float])
        | beam.Reshuffle()
        | beam.ParDo(CountPerKey())
        | beam.ParDo(NoteLatency(path))
    )


def latency(is_blocking: bool, is_durable: bool = False) -> dict[str, float]:
    """Return the median and the 99th percentile of all latencies, in milliseconds."""
    records = int((WARM_UP_S + MEASURED_S) * RECORDS_PER_SECOND)
    with tempfile.TemporaryDirectory(dir=os.environ.get("CHECKPOINTS")) as folder:
        path, start_path = str(Path(folder, "latencies")), str(Path(folder, "start"))
        flags = [*_FLAGS, f"--checkpoint_dir={folder}/checkpoint"] if is_durable else _FLAGS
        step = source(records, is_blocking, pause_s=0.01)
        cpu = _cpu_seconds()
        seconds = _measure.run_ours(lambda pipeline: build(pipeline, step, start_path, path), *flags)
        cores = (_cpu_seconds() - cpu) / seconds
        start = start_time(start_path)
        notes = [(at, late) for at, late in struct.iter_unpack(_LATENCY, Path(path).read_bytes())]
    if len(notes) != records:
        raise ValueError(f"found {len(notes)} records at the end, expected {records}")
    late = sorted(1000 * late for at, late in notes if at >= start + WARM_UP_S)
    part = lambda share: late[min(len(late) - 1, int(share * len(late)))]  # noqa: E731
    return {"p50 ms": part(0.5), "p99 ms": part(0.99), "max ms": late[-1], "runner's cores": cores}


def idle() -> dict[str, float]:
    """Return the CPU time of the runner and of its workers while the source has no record, in percent of a core."""
    from luminosity import LuminosityRunner

    with tempfile.TemporaryDirectory() as folder:
        pipeline = beam.Pipeline(LuminosityRunner(), PipelineOptions(["--progress=off", *_FLAGS]))
        step = source(10, is_blocking=False, pause_s=0.1)
        Path(folder, "start").write_text(f"{time.time() + 10_000}\n")
        build(pipeline, step, str(Path(folder, "start")), str(Path(folder, "latencies")))
        result = pipeline.run()
        time.sleep(IDLE_START_S)
        before = _cpu_seconds(), _workers_cpu_seconds(), time.monotonic()
        time.sleep(IDLE_S)
        seconds = time.monotonic() - before[2]
        percent = {
            "runner %": 100 * (_cpu_seconds() - before[0]) / seconds,
            "workers %": 100 * (_workers_cpu_seconds() - before[1]) / seconds,
        }
        result.cancel()
        _wait_for_end(result)
    return percent


def _wait_for_end(result: Any) -> None:
    thread = threading.Thread(target=partial(_swallow, result), daemon=True)
    thread.start()
    thread.join(10)


def _swallow(result: Any) -> None:
    try:
        result.wait_until_finish()
    except Exception as error:  # the run was cancelled
        print(f"ended: {type(error).__name__}")


def _cpu_seconds() -> float:
    return time.process_time()


def _workers_cpu_seconds() -> float:
    return sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children(recursive=True))


_FLAGS = ("--cpu_workers=2",)

SIDES: dict[str, _measure.Side] = {
    "checkpoints itself": partial(latency, is_blocking=False),
    "blocks in its poll": partial(latency, is_blocking=True),
    "checkpoints itself, durable": partial(latency, is_blocking=False, is_durable=True),
    "blocks in its poll, durable": partial(latency, is_blocking=True, is_durable=True),
    "idle": idle,
}


def report(results: _measure.Results) -> None:
    _measure.print_table(results)
    for name in ("checkpoints itself", "blocks in its poll"):
        _measure.print_figure(f"{name}: p99 in ms", results[name]["p99 ms"], at_most=AT_MOST_P99_MS)
        durable = f"{name}, durable"
        _measure.print_figure(f"{durable}: p99 in ms", results[durable]["p99 ms"], at_most=AT_MOST_DURABLE_P99_MS)
    _measure.print_figure("idle: runner's CPU in percent", results["idle"]["runner %"], at_most=AT_MOST_IDLE_PERCENT)


if __name__ == "__main__":
    _measure.main(SIDES, report)
