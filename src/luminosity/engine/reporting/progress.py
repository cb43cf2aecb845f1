"""The progress of a stage: its rate, the fraction that is done, the time left, how its models do, or its stream."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable

from apache_beam.transforms.window import GlobalWindow

from luminosity.engine.data.blocks import Block
from luminosity.engine.data.event_time import MIN
from luminosity.engine.loop.bundle import Bundle
from luminosity.engine.loop.metrics import RunMetrics
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.reporting.lag_watch import LagWatch
from luminosity.engine.reporting.step_metrics import KafkaProgress, inference_views
from luminosity.events import InferenceView, StreamView

__all__ = ["Pace", "RecentRate", "StageProgress", "StreamProgress"]

_LEAST_ARRIVED = 0.02  # a smaller fraction of the input says nothing about the rest
_LEAST_SECONDS = 2.0  # before that, a stage's speed is that of its start

_WINDOW_S = 10.0  # a rate covers this time: long enough to be steady, short enough to follow changes
_POINT_EVERY_S = 0.5  # bounds the number of points
_FEWEST_STEPS = 4  # a slow stage changes rarely: its rate covers at least 4 changes, however old
_MOST_POINTS = int(_WINDOW_S / _POINT_EVERY_S) + _FEWEST_STEPS + 2
_LONGEST_WINDOW_S = 60.0  # for a stage that changes rarely, such as at the end of each window of a stream

_END_OF_TIME: int = GlobalWindow().max_timestamp().micros  # no element is later
_MOST_BACKLOG = 1e15  # a source that reports more has no end, and does not know its backlog
_MOST_RESTRICTIONS = 1000  # decoding more, five times a second, would slow the loop down
_SIZE = struct.Struct(">d")  # the last bytes of a splittable element: the size of its restriction


class StageProgress:
    """Tracks the progress of a stage.

    Work is counted in elements. The work of a splittable stage, whose elements are few and large, is counted in the
    sizes of its restrictions.
    """

    def __init__(self, stage: StageRun, metrics: RunMetrics, watch: LagWatch | None = None) -> None:
        self._stage = stage
        self._metrics = metrics
        self._bundles_seen = 0
        self._began_at: float | None = None
        self._updated_at = 0.0
        self._news_at = 0.0  # when a bundle was committed last
        self._clock = 0.0  # seconds in which it could work: the time without input says nothing about its speed
        self._element_rate = RecentRate(0.0)
        self._work_pace = Pace(0.0)
        self.elements = 0
        self.rate = 0.0
        self.fraction: float | None = None
        self.seconds_left: float | None = None
        self.inference: tuple[InferenceView, ...] = inference_views(stage, metrics)  # of an earlier start
        self.kafka = KafkaProgress(stage.id, metrics, watch)
        self.kafka.update(0.0)

    def update(
        self, seconds: float, running: int, waiting: int, arrived: float | None, *, is_stalled: bool = False
    ) -> None:
        """Recompute all attributes, ``seconds`` after the run's start.

        ``running`` bundles run, ``waiting`` elements are not committed, and the fraction ``arrived`` of the stage's
        input has arrived. If ``is_stalled``, one of the bundles does nothing: when it ends is not known.
        """
        has_news = self._stage.bundles_done != self._bundles_seen
        if has_news:
            self._bundles_seen = self._stage.bundles_done
            self.elements = self._metrics.elements(self._stage.id)
            self.inference = inference_views(self._stage, self._metrics)
            self.kafka.update(seconds)
        if self._stage.is_done():
            self.rate, self.fraction, self.seconds_left = 0.0, 1.0, None
            return
        if self._began_at is None:
            if not running and not self._stage.bundles_done:
                return
            self._began_at = self._updated_at = seconds
            self._element_rate = RecentRate(seconds)
            self._work_pace = Pace(0.0)
        # A sink gathers input before it starts a bundle.
        if has_news or running or (waiting and not self._stage.plan.is_sink):
            self._clock += seconds - self._updated_at
        self._updated_at = seconds
        if has_news:
            self._element_rate.reached(seconds, self.elements)
            self._work_pace.reached(self._clock, self._done())
            self._news_at = seconds
        is_quiet = is_stalled and seconds - self._news_at >= _WINDOW_S
        self.rate = 0.0 if is_quiet else self._element_rate.per_second(seconds)
        self._estimate(seconds, self._began_at, waiting, arrived)
        if is_stalled:
            self.seconds_left = None

    def _estimate(self, seconds: float, began_at: float, waiting: int, arrived: float | None) -> None:
        self.fraction = self.seconds_left = None
        if self._stage.plan.has_endless_input:
            return
        total_arrived = self._arrived(waiting)
        if total_arrived is None or arrived is None or arrived < _LEAST_ARRIVED:
            return
        total = total_arrived / arrived
        self.fraction = min(1.0, max(0.0, self._done() / total))
        pace = self._work_pace.per_second(self._clock)
        if pace > 0 and seconds - began_at >= _LEAST_SECONDS:
            self.seconds_left = max(0.0, total - self._done()) / pace

    def _done(self) -> float:
        sized_work = self._stage.sized_work
        return self._stage.elements_done if sized_work is None else sized_work.done

    def _arrived(self, waiting: int) -> float | None:
        """Return all work that has arrived so far, or None if there was none or it is unknown."""
        sized_work = self._stage.sized_work
        return self._stage.elements_done + waiting or None if sized_work is None else sized_work.total


class StreamProgress:
    """Tracks the watermark of a stage of a stream, and the backlog of its source."""

    def __init__(self, stage: StageRun, metrics: RunMetrics) -> None:
        self._stage = stage
        self._metrics = metrics
        self._backlog: float | None = None

    def view(self, running: Iterable[Bundle] | None, now_micros: int) -> StreamView:
        """Return what is known now. ``running`` are the stage's bundles, or None if the run has ended."""
        watermark = self._stage.output_watermark
        has_ended = watermark >= _END_OF_TIME
        is_known = watermark > MIN and not has_ended
        if self._stage.plan.is_splittable and running is not None:  # at the end, blocks have been released
            self._backlog = self._size(running)
        return StreamView(
            watermark=round(watermark / 1e6, 3) if is_known else None,
            behind_seconds=round((now_micros - watermark) / 1e6, 3) if is_known else None,
            has_ended=has_ended,
            backlog=None if has_ended else self._backlog,
            dropped_late=self._metrics.dropped(self._stage.id),
        )

    def _size(self, running: Iterable[Bundle]) -> float | None:
        """Return the size of all restrictions that are not finished, or None if they are too many, or have no end."""
        blocks = [*self._stage.waiting_blocks(), *self._stage.delayed.blocks()]
        blocks += [block for bundle in running for of_read in bundle.inputs.values() for block in of_read]
        if sum(block.count for block in blocks) > _MOST_RESTRICTIONS:
            return None
        total = sum(size for block in blocks for size in self._sizes(block))
        return round(total, 1) if total <= _MOST_BACKLOG else None

    def _sizes(self, block: Block) -> Iterable[float]:
        data = block.data()
        if block.count == 1:
            return _SIZE.unpack(data[-_SIZE.size :])
        (read,) = self._stage.plan.reads  # a splittable step is the first of its stage
        values = self._stage.codec(read.transform_id).elements(data)
        return (_SIZE.unpack(value[-_SIZE.size :])[0] for _, value in values)


class RecentRate:
    """The rate over the last ten seconds. It becomes zero soon after the elements stop.

    >>> rate = RecentRate(began_at=0.0)
    >>> for second in range(1, 31):
    ...     rate.reached(second, 5 * second)
    >>> rate.per_second(30), rate.per_second(41)
    (5.0, 0.0)
    """

    def __init__(self, began_at: float) -> None:
        # Totals and when they were reached, with at least half a second between two of them.
        self._points: deque[tuple[float, float]] = deque([(began_at, 0.0)])
        self._last = began_at, 0.0  # the newest total, which may be no point of its own

    def reached(self, seconds: float, amount: float) -> None:
        """Note that the total was ``amount`` at ``seconds``."""
        self._last = seconds, amount
        if seconds - self._points[-1][0] >= _POINT_EVERY_S:
            self._points.append((seconds, amount))
            # One point before the window stays: its total is that of the window's begin.
            while len(self._points) > 1 and self._points[1][0] <= seconds - _LONGEST_WINDOW_S:
                self._points.popleft()

    def per_second(self, now: float) -> float:
        """Return the rate over ten seconds; if changes are rare, over the time of the last few, up to a minute."""
        since = now - self._window()
        first_seconds, first_amount = self._points[0]
        for seconds, amount in (*self._points, self._last):
            if seconds > since:
                break
            first_seconds, first_amount = since, amount
        elapsed = now - first_seconds
        return (self._last[1] - first_amount) / elapsed if elapsed > 0 else 0.0

    def _window(self) -> float:
        """Return the seconds that the last few changes took, within bounds. The time since the last does not count."""
        few = min(_FEWEST_STEPS, len(self._points) - 1)
        took = self._points[-1][0] - self._points[-1 - few][0]
        return min(_LONGEST_WINDOW_S, max(_WINDOW_S, took))


class Pace:
    """How fast something grows, for estimates: it changes slowly if nothing happens for a moment.

    >>> pace = Pace(began_at=0.0)
    >>> for second in range(1, 31):
    ...     pace.reached(second, 5 * second)
    >>> pace.per_second(30)
    5.0
    """

    def __init__(self, began_at: float) -> None:
        self._points: deque[tuple[float, float]] = deque([(began_at, 0.0)], maxlen=_MOST_POINTS)

    def reached(self, seconds: float, amount: float) -> None:
        """Note that the total was ``amount`` at ``seconds``."""
        last_seconds, last_amount = self._points[-1]
        if amount != last_amount and (seconds - last_seconds >= _POINT_EVERY_S or len(self._points) == 1):
            self._points.append((seconds, amount))

    def per_second(self, now: float) -> float:
        """Return the rate over the last seconds, or over the last changes if they are rare."""
        points = list(self._points)
        candidates = range(len(points) - 1 - _FEWEST_STEPS, 0, -1)
        first = next((i for i in candidates if points[i][0] <= now - _WINDOW_S), 0)
        first_seconds, first_amount = points[first]
        last_seconds, last_amount = points[-1]
        # The next change is under way: its time counts only once it takes longer than changes usually do.
        usual = (last_seconds - first_seconds) / max(1, len(points) - 1 - first)
        elapsed = max(last_seconds, now - usual) - first_seconds
        return (last_amount - first_amount) / elapsed if elapsed > 0 else 0.0
