"""Measures what time costs in a stream: timers that wait, windows that are open, and early panes.

    python benchmarks/stream_time.py            # everything, about a minute
    python benchmarks/stream_time.py timers     # one of: timers, windows, panes

Timers: what it costs to move the watermark while timers of a stateful step wait, and to set and clear them. Windows:
what it costs to open and fire many windows of one key. Panes: how many elements a second go from one unbounded source
through a GroupByKey, or a CombinePerKey, with early panes. The first two are processor time, the third is time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import _measure
import apache_beam as beam
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.test_stream import TestStream
from apache_beam.transforms import trigger
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.userstate import TimeDomain, TimerSpec, on_timer
from apache_beam.transforms.window import FixedWindows, IntervalWindow, TimestampedValue
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import WindowedValue

from luminosity import LuminosityRunner
from luminosity.engine.data.blocks import BlockStore
from luminosity.engine.data.panes.trigger_panes import TriggerPanes
from luminosity.engine.data.world import ManualClock
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.plan.codecs import Codecs, TimerRecord
from luminosity.engine.plan.planner import plan
from luminosity.engine.spill.quota import Ledger

MOST_ADVANCE_US = 50.0
LEAST_ELEMENTS_PER_S = 10_000
ELEMENTS, KEYS, SOURCE_BATCH = 100_000, 1000, 500
PER_SECOND = 10_000  # of event time

_S = 1_000_000  # microseconds
_END, _TICK = TimerSpec("end", TimeDomain.WATERMARK), TimerSpec("tick", TimeDomain.REAL_TIME)
_END_PARAM, _TICK_PARAM = beam.DoFn.TimerParam(_END), beam.DoFn.TimerParam(_TICK)


class _Timers(beam.DoFn):
    def process(self, element: Any, end: Any = _END_PARAM, tick: Any = _TICK_PARAM) -> None:
        end.set(1)
        tick.set(1)

    @on_timer(_END)
    def at_end(self) -> None:
        pass

    @on_timer(_TICK)
    def at_tick(self) -> None:
        pass


def _stage() -> StageRun:
    """Return a stateful stage of a stream, without workers."""
    pipeline = beam.Pipeline(options=PipelineOptions(["--streaming"]))
    pairs = pipeline | TestStream() | beam.Map(lambda element: element).with_output_types(tuple[str, int])
    _ = pairs | beam.WindowInto(FixedWindows(3600)) | beam.ParDo(_Timers())
    environment = LuminosityRunner().default_environment(PipelineOptions([]))
    graph = plan(pipeline.to_runner_api(default_environment=environment))
    (stateful,) = [stage for stage in graph.stages if stage.is_stateful]
    pool: Any = SimpleNamespace(plan=SimpleNamespace(workers=2, slots=1))
    return StageRun(
        stateful,
        pool,
        1,
        Codecs(graph),
        BlockStore("", Ledger(None, 1 << 30, 1)),
        1 << 20,
        ManualClock(),
        has_test_stream=False,
    )


def _timer(number: int) -> TimerRecord:
    key = b"%d" % number
    return TimerRecord(key, key, False, (number % 3600 + 10**6) * _S, number, b"", 10**7 * _S)


def timers() -> bool:
    """Measure timers that wait."""
    fast_enough = True
    for count in (1000, 100_000, 1_000_000):
        stage = _stage()
        records = [_timer(number) for number in range(count)]
        now = time.process_time()
        for index, shard in enumerate(stage.shards):
            for family in stage.timer_codecs:
                some = records[index :: len(stage.shards)]
                shard.timers.apply(family, some)
                shard.timers.note_windows(family, some)
        setting = (time.process_time() - now) / count / len(stage.timer_codecs)
        rounds = 2000
        now = time.process_time()
        for number in range(rounds):
            stage.advance(number * _S)
            assert not stage.has_work(number)
            assert not list(stage.take_expired())
            stage.next_processing_timer()
        advancing = (time.process_time() - now) / rounds * 1e6
        now = time.process_time()
        cleared = [record._replace(is_clear=True) for record in records]
        longest = 0.0
        for index, shard in enumerate(stage.shards):
            some = cleared[index :: len(stage.shards)]
            for start in range(0, len(some), 1000):
                begin = time.process_time()
                for family in stage.timer_codecs:
                    shard.timers.apply(family, some[start : start + 1000])
                stage.next_processing_timer()
                longest = max(longest, time.process_time() - begin)
        clearing = (time.process_time() - now) / count / len(stage.timer_codecs)
        print(
            f"{2 * count:>9,} timers: advancing time {advancing:.0f} µs, setting {setting * 1e6:.1f} µs, clearing "
            f"{clearing * 1e6:.1f} µs a timer, 1,000 at once {longest * 1e3:.0f} ms at most"
        )
        fast_enough &= advancing <= MOST_ADVANCE_US or count > 100_000
    return fast_enough


def windows() -> bool:
    """Measure open windows of one key."""
    windowing: Any = Windowing(
        FixedWindows(1), trigger.AfterWatermark(early=trigger.AfterCount(1000)), trigger.AccumulationMode.DISCARDING
    )
    costs: list[float] = []
    for count in (500, 2000, 8000):
        panes = TriggerPanes(windowing, ManualClock())
        elements = [WindowedValue(b"v", Timestamp(n), (IntervalWindow(n, n + 1),)) for n in range(count)]
        start = time.process_time()
        for element in elements:
            list(panes.add(b"key", [element]))
        middle = time.process_time()
        fired = sum(pane is not None for pane in panes.advance(10**6 * _S))
        end = time.process_time()
        assert fired == count
        costs.append((end - start) / count)
        opening, firing = (middle - start) / count * 1e6, (end - middle) / count * 1e6
        print(f"{count:>9,} windows of one key: opening {opening:.0f} µs, firing {firing:.0f} µs each")
    return costs[-1] < 3 * costs[0]


class _Restrictions(beam.RestrictionProvider):
    def initial_restriction(self, element: int) -> OffsetRange:
        return OffsetRange(0, element // SOURCE_BATCH)

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return OffsetRestrictionTracker(restriction)

    def restriction_size(self, element: int, restriction: OffsetRange) -> float:
        return restriction.size()


_RESTRICTION = beam.DoFn.RestrictionParam(_Restrictions())
_TIME = beam.DoFn.WatermarkEstimatorParam(ManualWatermarkEstimator.default_provider())


class _Source(beam.DoFn):
    """Emits elements as fast as it can, and moves the watermark with them."""

    @beam.DoFn.unbounded_per_element()
    def process(self, element: int, tracker: Any = _RESTRICTION, estimator: Any = _TIME) -> Iterator[Any]:
        batch = tracker.current_restriction().start
        while tracker.try_claim(batch):
            for number in range(batch * SOURCE_BATCH, (batch + 1) * SOURCE_BATCH):
                at = Timestamp(micros=number * _S // PER_SECOND)
                yield TimestampedValue((number % KEYS, number), at)
            batch += 1
            estimator.set_watermark(Timestamp(micros=batch * SOURCE_BATCH * _S // PER_SECOND))


def _build(group: Callable[[], Any], early: Any) -> Callable[[beam.Pipeline], None]:
    def build(pipeline: beam.Pipeline) -> None:
        _ = (
            pipeline
            | beam.Create([ELEMENTS])
            | beam.ParDo(_Source()).with_output_types(tuple[int, int])
            | beam.WindowInto(
                FixedWindows(5),
                trigger=trigger.AfterWatermark(early=early),
                accumulation_mode=trigger.AccumulationMode.DISCARDING,
            )
            | group()
            | beam.Map(lambda element: None)
        )

    return build


def panes() -> bool:
    """Measure early panes."""
    fast_enough = True
    for name, group in (
        ("GroupByKey", beam.GroupByKey),
        ("CombinePerKey", lambda: beam.CombinePerKey(sum)),
    ):
        for early in (trigger.AfterCount(10), trigger.AfterProcessingTime(1)):
            seconds = _measure.run_ours(_build(group, early), "--cpu_workers=2")
            rate = ELEMENTS / seconds
            print(f"{name} with early={early}: {rate:,.0f} elements/s ({seconds:.1f} s, with the start of workers)")
            fast_enough &= rate >= LEAST_ELEMENTS_PER_S
    return fast_enough


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["timers", "windows", "panes"]
    results = [{"timers": timers, "windows": windows, "panes": panes}[name]() for name in chosen]
    sys.exit(0 if all(results) else 1)
