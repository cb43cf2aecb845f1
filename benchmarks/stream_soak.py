"""Runs a stream for minutes, and shows whether anything grows: memory of runner and workers, state, timers, blocks.

A source emits 1,000 records a second with 10,000 keys. One branch sums them in sliding windows, the other one has a
stateful step with a looping timer. Every 30 seconds you get a line. The last lines say whether the memory of the runner
stayed within 10 MB after the first two minutes, and whether state, timers and holds have a bound.

    python benchmarks/stream_soak.py --minutes 20
    python benchmarks/stream_soak.py --minutes 6 --trace    # and name the lines of code whose memory grew

With --check, the exit code is 1 if something grew.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import tracemalloc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.metrics import Metrics
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms import window
from apache_beam.transforms.userstate import CombiningValueStateSpec, TimeDomain, TimerSpec, on_timer
from apache_beam.utils.timestamp import Duration, Timestamp

from luminosity import LuminosityRunner, Snapshot
from luminosity.engine import run as engine_run
from luminosity.engine.loop.parts import RunParts
from luminosity.events import Event
from luminosity.runs.sampling import TreeMemory

KEYS = 10_000
POLL_S = 0.02  # how long the source waits if there is no record
WINDOW_S, PERIOD_S = 20, 5
STATE_WINDOW_S = 60
LOOP_S = 30  # between two firings of a key's timer
EVERY_S = 30
SETTLED_AFTER_S = 120  # until then, caches fill and windows open
MOST_GROWTH_MB = 10.0
MOST_WORKER_GROWTH_MB = 30.0  # of all workers together: their heaps settle for some minutes
MOST_GROWTH_OF_COUNTS = 1.25  # times the largest number before: figures swing with the windows

_TICK = TimerSpec("tick", TimeDomain.REAL_TIME)


class _Records(beam.RestrictionProvider):
    def initial_restriction(self, element: Any) -> OffsetRange:
        return OffsetRange(0, sys.maxsize)

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return OffsetRestrictionTracker(restriction)

    def restriction_size(self, element: tuple[float, float], restriction: OffsetRange) -> float:
        started_at, rate = element
        return max(0.0, (time.time() - started_at) * rate - restriction.start)

    def truncate(self, element: Any, restriction: OffsetRange) -> None:
        return None


_RECORDS = beam.DoFn.RestrictionParam(_Records())
_TIME = beam.DoFn.WatermarkEstimatorParam(ManualWatermarkEstimator.default_provider())
_TOTAL = beam.DoFn.StateParam(CombiningValueStateSpec("total", sum))
_TIMER = beam.DoFn.TimerParam(_TICK)


class Source(beam.DoFn):
    """Emits records at a steady rate. The element says when it started, and how many records a second it emits."""

    @beam.DoFn.unbounded_per_element()
    def process(
        self,
        element: tuple[float, float],
        tracker: Any = _RECORDS,
        time_of: Any = _TIME,
    ) -> Iterator[Any]:
        started_at, rate = element
        position = tracker.current_restriction().start
        while True:
            while position < (time.time() - started_at) * rate:
                if not tracker.try_claim(position):
                    return
                at = Timestamp.of(started_at + position / rate)
                yield window.TimestampedValue((f"key {position * 7919 % KEYS}", 1), at)
                time_of.set_watermark(at)
                position += 1
            tracker.defer_remainder(Duration.of(POLL_S))
            return


class Looping(beam.DoFn):
    """Counts the records of a key, and reports the count each few seconds, as long as its window is open."""

    def __init__(self) -> None:
        self._fired = Metrics.counter("soak", "fired")

    def process(
        self,
        element: tuple[str, int],
        total: Any = _TOTAL,
        tick: Any = _TIMER,
    ) -> None:
        if not total.read():  # the first record of its key and window
            tick.set(Timestamp.of(time.time() + LOOP_S))
        total.add(element[1])

    @on_timer(_TICK)
    def report(self, total: Any = _TOTAL, tick: Any = _TIMER) -> Iterable[int]:
        self._fired.inc()
        tick.set(Timestamp.of(time.time() + LOOP_S))
        yield total.read()


_SUMS = Metrics.counter("soak", "sums")


def _count(element: Any) -> None:
    _SUMS.inc()


def build(pipeline: beam.Pipeline, rate: float, is_global: bool) -> None:
    records = pipeline | beam.Create([(time.time(), rate)]) | "Source" >> beam.ParDo(Source())
    _ = (
        records
        | "Sliding" >> beam.WindowInto(window.SlidingWindows(WINDOW_S, PERIOD_S))
        | "Sums" >> beam.CombinePerKey(sum)
        | "Count sums" >> beam.Map(_count)
    )
    fixed = records if is_global else records | "Fixed" >> beam.WindowInto(window.FixedWindows(STATE_WINDOW_S))
    _ = fixed | "Looping" >> beam.ParDo(Looping())


@dataclass(frozen=True)
class Sample:
    """Everything that must not grow, at one moment."""

    seconds: float
    runner_mb: float
    workers_mb: float
    processes: int
    cells: int
    timers: int
    holds: int
    panes: int  # windows of the grouping, over all keys
    blocks: int  # files in shared memory
    held_mb: float
    objects: int  # that Python has allocated in the runner

    def counts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("cells", "timers", "holds", "panes", "blocks")}


def resident_mb(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def take(parts: RunParts, seconds: float, memory: TreeMemory) -> Sample:
    # Private attributes, and the loop's thread goes on meanwhile: the figures are those of about the same moment.
    shards = [shard for stage in parts.stages for shard in stage.shards]
    cells = parts.state._cells
    groupings = [buffer.live for buffer in parts.buffers.values() if buffer.live is not None]
    panes = 0
    for grouping in groupings:
        keys = getattr(grouping._panes, "_keys", None)
        windows = getattr(grouping._panes, "_windows", {})
        panes += len(keys) if keys is not None else sum(_size(found) for found in list(windows.values()))
    everything = memory.measure() / 1e6
    runner = resident_mb(os.getpid())
    return Sample(
        seconds,
        runner,
        sum(resident_mb(pid) for pid in memory._processes if pid != os.getpid()),
        len(memory._processes),
        len(cells._memory) + cells._on_disk,
        sum(len(shard.timers) for shard in shards),
        sum(len(shard.holds._counts) + len(shard.timers.holds._counts) for shard in shards),
        panes,
        len(parts.blocks.files),
        parts.blocks.ledger.used / 1e6 if everything else 0.0,
        sys.getallocatedblocks(),  # not gc.get_objects(), which other threads' unfinished tuples do not survive
    )


def _size(found: Any) -> int:
    return len(getattr(found, "keys", getattr(found, "values", ())))


def show(sample: Sample, last: Snapshot | None, sums: int, fired: int) -> None:
    stages = last.stages if last is not None else ()
    behind = [s.stream.behind_seconds for s in stages if s.stream is not None]
    lags = " ".join("-" if seconds is None else f"{seconds:.1f}" for seconds in behind)
    print(
        f"{sample.seconds:6.0f} s  runner {sample.runner_mb:6.1f} MB  workers {sample.workers_mb:6.1f} MB "
        f"({sample.processes - 1})  cells {sample.cells:6,}  timers {sample.timers:6,}  holds {sample.holds:6,}  "
        f"panes {sample.panes:7,}  blocks {sample.blocks:4,}  held {sample.held_mb:5.1f} MB  "
        f"objects {sample.objects:9,}  behind {lags} s  sums {sums:,}  fired {fired:,}",
        flush=True,
    )


def verdict(samples: list[Sample]) -> bool:
    """Print whether something grew; return whether nothing did."""
    settled = [sample for sample in samples if sample.seconds >= SETTLED_AFTER_S]
    if len(settled) < 2:
        print(f"too short to judge: the first {SETTLED_AFTER_S} s do not count")
        return True
    first = settled[0]
    span = max(s.runner_mb for s in settled) - min(s.runner_mb for s in settled)
    drift = max(abs(s.runner_mb - first.runner_mb) for s in settled)
    of_workers = max(s.workers_mb for s in settled) - first.workers_mb
    checks = {
        f"runner within ±{MOST_GROWTH_MB:.0f} MB: moved by {drift:.1f} MB, from lowest to highest {span:.1f} MB": drift
        <= MOST_GROWTH_MB,
        f"workers within {MOST_WORKER_GROWTH_MB:.0f} MB: grew by {of_workers:.1f} MB": of_workers
        <= MOST_WORKER_GROWTH_MB,
    }
    half = max(1, len(settled) // 2)
    for name in first.counts():
        before = max(s.counts()[name] for s in settled[:half])
        after = max(s.counts()[name] for s in settled[half:])
        checks[f"{name} bounded: at most {before:,}, then {after:,}"] = after <= MOST_GROWTH_OF_COUNTS * before + 100
    for text, is_good in checks.items():
        print(f"{'ok  ' if is_good else 'FAIL'} {text}")
    return all(checks.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, help="how long to run (default: 2)")
    parser.add_argument("--rate", type=float, default=1000.0, help="records a second (default: 1000)")
    parser.add_argument("--global_state", action="store_true", help="keep the state in the global window")
    parser.add_argument("--trace", action="store_true", help="show where memory was allocated that was not freed")
    parser.add_argument("--check", action="store_true", help="exit with 1 if something grew")
    own, flags = parser.parse_known_args()
    last: Snapshot | None = None

    def keep(event: Event) -> None:
        nonlocal last
        if isinstance(event, Snapshot):
            last = event

    options = PipelineOptions(["--progress=off", "--run_dir=off", *flags])
    pipeline = beam.Pipeline(LuminosityRunner(on_event=keep), options)
    build(pipeline, own.rate, own.global_state)
    result: Any = pipeline.run()
    (active,) = engine_run._active
    parts: RunParts = active._scheduler._parts
    memory = TreeMemory(os.getpid())
    samples: list[Sample] = []
    traced: Any = None
    began_at = time.monotonic()
    try:
        while (seconds := time.monotonic() - began_at) < 60 * own.minutes:
            left = min(EVERY_S, 60 * own.minutes - seconds)
            if result.wait_until_finish(duration=1000 * left) is not None:
                print(f"FAIL the run ended: {result.state}")
                return 1
            counters = {c.key.metric.name: c.committed for c in result.metrics().query()["counters"]}
            samples.append(take(parts, time.monotonic() - began_at, memory))
            show(samples[-1], last, counters.get("sums", 0), counters.get("fired", 0))
            if own.trace and traced is None and samples[-1].seconds >= SETTLED_AFTER_S:
                tracemalloc.start(3)
                traced = tracemalloc.take_snapshot()
    except KeyboardInterrupt:
        print("interrupted")
    if traced is not None:
        grown = tracemalloc.take_snapshot().compare_to(traced, "traceback")
        for difference in grown[:12]:
            print(f"{difference.size_diff / 1e6:+.2f} MB, {difference.count_diff:+,} objects")
            print("\n".join(difference.traceback.format()))
    result.cancel()
    return 0 if verdict(samples) or not own.check else 1


if __name__ == "__main__":
    sys.exit(main())
