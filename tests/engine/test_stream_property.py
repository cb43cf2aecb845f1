"""A property test: random streams give the panes of Beam's own local runner for streams.

Each seed makes a TestStream and several windowings of it: windows, triggers, lateness, accumulation and timestamp
combiners at random. ``LUMINOSITY_STREAM_SEEDS=1000:2000`` runs other seeds than those of every day.

Beam's runner (``BundleBasedDirectRunner``) uses Beam's trigger machine, and so do we except for the default trigger.
The runner uses the machine wrongly in seven ways, which :class:`_MendedDriver` mends, and loses what triggers leave.
"""

from __future__ import annotations

import os
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.coders.coders import IntervalWindowCoder
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.direct import transform_evaluator
from apache_beam.runners.direct.direct_runner import BundleBasedDirectRunner
from apache_beam.testing import test_stream
from apache_beam.transforms import trigger, window
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.utils.timestamp import MAX_TIMESTAMP, MIN_TIMESTAMP, Duration
from apache_beam.utils.windowed_value import PaneInfoTiming

from luminosity.engine.loop import splits
from luminosity.engine.loop.sizing import BundleSize
from luminosity.engine.workers.sdk import channel
from tests.runners import IS_REFERENCE, finished, new_pipeline

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(IS_REFERENCE, reason="Beam's local runner has no streams"),
]

_FIRST, _LAST = map(int, os.environ.get("LUMINOSITY_STREAM_SEEDS", "0:12").split(":"))
_WINDOWINGS = 6  # of one stream, since a run costs more than its windowings
_MODES: tuple[Any, ...] = (trigger.AccumulationMode.DISCARDING, trigger.AccumulationMode.ACCUMULATING)
_COMBINERS: tuple[Any, ...] = (
    window.TimestampCombiner.OUTPUT_AT_EOW,
    window.TimestampCombiner.OUTPUT_AT_EARLIEST,
    window.TimestampCombiner.OUTPUT_AT_LATEST,
)


class Neighbours(window.WindowFn):
    """Windows of a few seconds that merge if they begin in the same ``span`` seconds, whether they overlap or not."""

    def __init__(self, span: int) -> None:
        self.span = span

    def assign(self, assign_context: Any) -> list[window.IntervalWindow]:
        start = int(assign_context.timestamp.micros // 1_000_000)
        return [window.IntervalWindow(start, start + 1 + start % 4)]

    def merge(self, merge_context: Any) -> None:
        groups: dict[int, list[window.IntervalWindow]] = defaultdict(list)
        for found in merge_context.windows:
            groups[found.start.micros // 1_000_000 // self.span].append(found)
        for found in groups.values():
            if len(found) > 1:
                merge_context.merge(
                    found, window.IntervalWindow(min(w.start for w in found), max(w.end for w in found))
                )

    def get_window_coder(self) -> Any:

        return IntervalWindowCoder()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Neighbours) and other.span == self.span

    def __hash__(self) -> int:
        return hash(self.span)


@dataclass(frozen=True)
class _Windowing:
    """One way to window the stream."""

    window_fn: window.WindowFn
    trigger_fn: trigger.TriggerFn
    mode: Any
    lateness: int
    combiner: Any

    def transform(self) -> beam.WindowInto:
        return beam.WindowInto(
            self.window_fn,
            trigger=self.trigger_fn,
            accumulation_mode=self.mode,
            allowed_lateness=self.lateness,
            timestamp_combiner=self.combiner,
        )


def _random_window_fn(draw: random.Random) -> window.WindowFn:
    size = draw.randint(2, 12)
    return draw.choice(
        [
            lambda: window.FixedWindows(size, draw.randint(0, size - 1)),
            lambda: window.SlidingWindows(size, draw.randint(1, size)),
            lambda: window.Sessions(size),
            window.GlobalWindows,
            lambda: Neighbours(2 * size),
        ]
    )()


def _random_trigger(draw: random.Random, depth: int) -> trigger.TriggerFn:
    inner: Callable[[], trigger.TriggerFn] = lambda: _random_trigger(draw, depth - 1)  # noqa: E731
    leaves: list[Callable[[], trigger.TriggerFn]] = [
        trigger.DefaultTrigger,
        trigger.Always,
        lambda: trigger.AfterCount(draw.randint(1, 4)),
        lambda: trigger.AfterProcessingTime(draw.randint(0, 9)),
        trigger.AfterWatermark,
    ]
    nested: list[Callable[[], trigger.TriggerFn]] = [
        lambda: trigger.AfterWatermark(early=inner()),
        lambda: trigger.AfterWatermark(late=inner()),
        lambda: trigger.AfterWatermark(early=inner(), late=inner()),
        lambda: trigger.Repeatedly(inner()),
        lambda: trigger.AfterAny(inner(), inner()),
        lambda: trigger.AfterAll(inner(), inner()),
        lambda: trigger.AfterEach(inner(), inner()),
        lambda: trigger.OrFinally(inner(), inner()),
    ]
    return draw.choice(nested if depth and draw.random() < 0.7 else leaves)()


def _random_windowing(draw: random.Random) -> _Windowing:
    return _Windowing(
        window_fn=_random_window_fn(draw),
        trigger_fn=_random_trigger(draw, depth=2),
        mode=draw.choice(_MODES),
        lateness=draw.choice([0, 0, 3, 15, 1000]),
        combiner=draw.choice(_COMBINERS),
    )


def _random_stream(draw: random.Random) -> test_stream.TestStream:
    stream = test_stream.TestStream()
    watermark, values = 0, iter(range(1000))
    for _ in range(draw.randint(4, 14)):
        kind = draw.random()
        if kind < 0.55:
            # Around the watermark: early, on time and late.
            elements = [
                window.TimestampedValue(
                    (draw.choice("ab"), next(values)), max(0, watermark + draw.randint(-12, 12)) + draw.choice([0, 0.5])
                )
                for _ in range(draw.randint(1, 5))
            ]
            stream.add_elements(elements)
        elif kind < 0.8:
            watermark += draw.randint(1, 12)
            stream.advance_watermark_to(watermark)
        else:
            stream.advance_processing_time(draw.randint(1, 8))
    # Beam's runner waits without end for timers of processing time that are left over.
    return stream.advance_processing_time(1000).advance_watermark_to_infinity()


# Key, sorted values, window, timestamp in milliseconds, and the pane: first, last, timing, index, nonspeculative index.
_Pane = tuple[str, tuple[int, ...], str, int, tuple[bool, bool, str, int, int]]

_seen: list[tuple[int, _Pane]] = []  # both runners run steps in this process


class _Record(beam.DoFn):
    """Notes each pane of a windowing."""

    def __init__(self, number: int) -> None:
        self._number = number

    def process(
        self,
        element: tuple[str, Iterable[int]],
        timestamp: Any = beam.DoFn.TimestampParam,
        found: Any = beam.DoFn.WindowParam,
        pane: Any = beam.DoFn.PaneInfoParam,
    ) -> None:
        key, values = element
        info = (
            pane.is_first,
            pane.is_last,
            PaneInfoTiming.to_string(pane.timing),
            pane.index,
            pane.nonspeculative_index,
        )
        _seen.append((self._number, (key, tuple(sorted(values)), str(found), timestamp.micros // 1000, info)))


def _panes(pipeline: beam.Pipeline, wait: Callable[[Any], Any], seed: int) -> dict[int, list[_Pane]]:
    """Run the pipeline of a seed. Returns its panes by windowing."""
    stream, windowings = _case(seed)
    _seen.clear()
    elements = pipeline | stream
    for number, windowing in enumerate(windowings):
        grouped = elements | f"Window {number}" >> windowing.transform() | f"Group {number}" >> beam.GroupByKey()
        _ = grouped | f"Record {number}" >> beam.ParDo(_Record(number))
    wait(pipeline.run())
    panes: dict[int, list[_Pane]] = defaultdict(list)
    for number, pane in _seen:
        panes[number].append(pane)
    return panes


def _wait_for_beams(result: Any) -> None:
    """Wait for Beam's runner. It takes no timeout, and stalls if a trigger leaves elements over: it raises a tuple."""
    try:
        result.wait_until_finish()
    except TypeError as error:
        if "must derive from BaseException" not in str(error):
            raise


def _case(seed: int) -> tuple[test_stream.TestStream, list[_Windowing]]:
    draw = random.Random(seed)
    return _random_stream(draw), [_random_windowing(draw) for _ in range(_WINDOWINGS)]


class _MendedDriver(trigger.GeneralTriggerDriver):
    """Beam's trigger machine as Beam's model means it, where Beam's local runner for streams uses it wrongly.

    1. A pane is early, on time or late by the watermark of the input. Beam's runner passes that of the output, which
       any other window may hold back.
    2. A timer of processing time says nothing about event time. Beam's runner passes its time as a watermark.
    3. A window expires when the watermark passes its last timestamp plus the allowed lateness. Beam's machine still
       takes elements when the watermark stands at the end of the window.
    4. A window that has expired is gone. Beam's machine keeps it, merges it with windows that come later, and fires it
       when the clock moves.
    5. A trigger that fires clears its timers. Beam's runner lists all timers that are due before it fires the first of
       them, so that those of nested triggers fire although they were cleared.
    6. A window holds the watermark at the timestamp of its next pane. Beam's runner holds it at the earliest of its
       elements, even if the pane is to have the timestamp of the latest.
    7. A window that has expired, or whose trigger has finished, holds no watermark. Beam's runner looks at the holds of
       a key only when it has input, and keeps that of a trigger that finishes before its window ends.

    6. and 7. matter for timestamps of panes: an element counts for that of its pane unless the watermark of the output
    has passed it.
    """

    _watermark: Any = MIN_TIMESTAMP

    def __init__(self, windowing: Any, clock: Any) -> None:
        super().__init__(windowing, clock)
        self._lateness: Duration = windowing.allowed_lateness

    def process_elements(
        self, state: Any, windowed_values: Any, output_watermark: Any, input_watermark: Any = MIN_TIMESTAMP
    ) -> Generator[Any]:
        self._watermark = input_watermark
        self._forget_expired(state)
        kept: list[Any] = []
        for value in windowed_values:
            windows = tuple(w for w in value.windows if not self._has_expired(w))
            if windows:
                kept.append(value.__class__(value.value, value.timestamp, windows, value.pane_info))
        if kept:
            yield from super().process_elements(state, kept, output_watermark, input_watermark)

    def process_timer(
        self,
        window_id: Any,
        unused_name: Any,
        time_domain: Any,
        timestamp: Any,
        state: Any,
        input_watermark: Any = None,
    ) -> Generator[Any]:
        self._watermark = input_watermark
        time = timestamp if time_domain == TimeDomain.WATERMARK else input_watermark
        if time_domain == TimeDomain.REAL_TIME:
            self._forget_expired(state)
        if not any(window_id in ids for ids in self._window_ids(state).values()):
            return
        yield from super().process_timer(window_id, unused_name, time_domain, time, state, input_watermark)

    def _output(self, window: Any, finished: Any, state: Any, output_watermark: Any, maybe_ontime: Any) -> Any:
        return super()._output(window, finished, state, self._watermark, maybe_ontime)

    def earliest_hold(self, state: Any, watermark: Any) -> Any:
        """Return where the windows of a key hold the watermark."""
        self._watermark = watermark
        holds: list[Any] = []
        for found, ids in self._window_ids(state).items():
            if self._has_expired(found):
                continue
            kept = [state.state[number] for number in ids if number in state.state]
            times = [time for tags in kept for time in tags.get(self.WATERMARK_HOLD.tag, ())]
            if times and not any(tags.get(self.TOMBSTONE.tag) for tags in kept):
                holds.append(self.timestamp_combiner_impl.combine_all(times))
        return min(holds, default=MAX_TIMESTAMP)

    def _has_expired(self, found: Any) -> bool:
        return found.max_timestamp() + self._lateness < self._watermark

    def _window_ids(self, state: Any) -> dict[Any, list[Any]]:
        return state.get_global_state(trigger.MergeableStateAdapter.WINDOW_IDS, {})

    def _forget_expired(self, state: Any) -> None:
        ids = self._window_ids(state)
        for found in [found for found in ids if self._has_expired(found)]:
            for window_id in ids.pop(found):
                state.state.pop(window_id, None)
                state.timers.pop(window_id, None)


_Evaluator: Any = transform_evaluator._StreamingGroupAlsoByWindowEvaluator  # pyright: ignore[reportPrivateUsage]
_process_element = _Evaluator.process_element


def _process_with_right_holds(evaluator: Any, element: Any) -> None:
    """Process the elements and timers of a key with the right holds: see 6. and 7. above."""
    watermarks = evaluator._evaluation_context._watermark_manager.get_watermarks(evaluator._applied_ptransform)
    if element.value.elements:
        for key, state in watermarks._keyed_states.items():
            watermarks.hold({key: evaluator.driver.earliest_hold(state, watermarks.input_watermark)})
        watermarks.refresh()
    _process_element(evaluator, element)
    key = element.value.encoded_key
    state = evaluator._step_context.get_keyed_state(key)
    evaluator.keyed_holds[key] = evaluator.driver.earliest_hold(state, watermarks.input_watermark)


def _fire_if_set(evaluator: Any, firing: Any) -> None:
    """Fire a timer of Beam's runner unless it was cleared after the runner listed it: see 5. above."""
    state = evaluator._step_context.get_keyed_state(firing.encoded_key)
    if (firing.name, firing.time_domain, firing.dynamic_timer_tag) in state.timers.get(firing.window, {}):
        state.clear_timer(firing.window, firing.name, firing.time_domain, firing.dynamic_timer_tag)
        evaluator.process_timer(firing)


def _not_left_over(expected: Iterable[_Pane], extra: Iterable[_Pane]) -> list[_Pane]:
    """Return the panes among ``extra`` that are not the rest of a window whose trigger did not fire for its elements.

    When a window expires, what its trigger has left comes out as its last pane, on every other runner of Beam's and
    on ours. Beam's local runner loses it.
    """
    fired: dict[tuple[str, str], set[int]] = defaultdict(set)
    for key, values, found, *_ in expected:
        fired[key, found].update(values)
    return [pane for pane in extra if not (pane[4][1] and set(pane[1]) - fired[pane[0], pane[2]])]


@pytest.mark.parametrize("seed", range(_FIRST, _LAST))
def test_panes_are_those_of_beams_runner(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Triggers such as Always fire once for what arrives together, so the elements of an event must stay together.
    monkeypatch.setattr(channel, "_BLOCK_SECONDS", 600)
    monkeypatch.setattr(splits, "can_split", lambda bundle: False)
    monkeypatch.setattr(BundleSize, "next", lambda self, now, queued, *_, **__: queued)
    flags = ["--streaming", "--allow_unsafe_triggers"]
    found = _panes(new_pipeline("--debug", *flags), finished, seed)
    monkeypatch.setattr(transform_evaluator, "create_trigger_driver", _MendedDriver)
    monkeypatch.setattr(_Evaluator, "process_element", _process_with_right_holds)
    monkeypatch.setattr(_Evaluator, "process_timer_wrapper", _fire_if_set)
    beams = beam.Pipeline(runner=BundleBasedDirectRunner(), options=PipelineOptions(flags))
    expected = _panes(beams, _wait_for_beams, seed)
    for number, windowing in enumerate(_case(seed)[1]):
        lacking = Counter(expected[number]) - Counter(found[number])
        extra = Counter(found[number]) - Counter(expected[number])
        wrong = _not_left_over(expected[number], extra.elements())
        assert (list(lacking), wrong) == ([], []), f"windowing {number}: {windowing}"
