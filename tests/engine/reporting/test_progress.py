"""The estimate of the time that a stage still needs, and what is known of a stage of a stream."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any, cast

import pytest

from luminosity.engine.data.event_time import MAX, MIN
from luminosity.engine.data.world import WallClock
from luminosity.engine.loop.metrics import BusyTime, RunMetrics
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.loop.workers import PoolRun
from luminosity.engine.reporting.progress import RecentRate, StageProgress, StreamProgress
from luminosity.engine.reporting.snapshots import pool_view
from luminosity.engine.resources.pools import Pool
from luminosity.events import StreamView


class _Stage(SimpleNamespace):
    """A stage with all that its progress looks at."""

    def __init__(self, *, is_sink: bool = False, is_endless: bool = False) -> None:
        pool = PoolRun(Pool("cpu", 1.0, 0, 1, (), 1, ()), first_writer=0, clock=WallClock())
        plan = SimpleNamespace(is_sink=is_sink, has_endless_input=is_endless)
        super().__init__(id="s", plan=plan, pool=pool, busy=BusyTime(WallClock()), sized_work=None)
        self.bundles_done = self.elements_done = 0

    def is_done(self) -> bool:
        return False

    def commit(self, elements: int) -> None:
        self.bundles_done += 1
        self.elements_done += elements


@pytest.mark.parametrize("is_sink", [False, True])
def test_time_without_input_does_not_count_against_a_stage(is_sink: bool) -> None:
    stage = _Stage(is_sink=is_sink)
    progress = StageProgress(cast(StageRun, stage), RunMetrics())
    progress.update(10.0, 1, 100, 0.1)
    stage.commit(50)
    progress.update(15.0, 1, 50, 0.1)
    stage.commit(50)
    progress.update(20.0, 0, 0, 0.1)
    assert progress.seconds_left == pytest.approx(90.0)
    progress.update(60.0, 0, 0, 0.1)  # nothing to do for 40 seconds
    assert progress.seconds_left == pytest.approx(90.0)
    progress.update(80.0, 0, 100, 0.2)
    assert progress.seconds_left is not None
    # A sink gathers its input; any other stage should have begun.
    assert progress.seconds_left == pytest.approx(90.0) if is_sink else progress.seconds_left > 100


def test_input_without_an_end_has_no_fraction_and_no_time_left() -> None:
    stage = _Stage(is_endless=True)
    progress = StageProgress(cast(StageRun, stage), RunMetrics())
    progress.update(10.0, 1, 100, 1.0)
    stage.commit(50)
    progress.update(15.0, 1, 50, 1.0)
    assert (progress.fraction, progress.seconds_left) == (None, None)


class _Restriction(SimpleNamespace):
    """A block with one restriction, or with several of the same size."""

    def __init__(self, size: float, count: int = 1) -> None:
        super().__init__(count=count)
        self._data = b"restriction" + struct.pack(">d", size)

    def data(self) -> bytes:
        return self._data


class _Source(SimpleNamespace):
    """A stage with all that the progress of a stream looks at."""

    def __init__(self, *, waiting: list[Any], delayed: list[Any]) -> None:
        plan = SimpleNamespace(is_splittable=True, reads=(SimpleNamespace(transform_id="r"),))
        super().__init__(id="s", plan=plan, output_watermark=MIN)
        self.waiting_blocks = lambda: iter(waiting)
        self.delayed = SimpleNamespace(blocks=lambda: iter(delayed))
        self.codec = lambda read_id: SimpleNamespace(elements=lambda data: [(None, data)] * 3)


def view(source: _Source, *running: Any, now_s: float = 0.0, metrics: RunMetrics | None = None) -> StreamView:
    progress = StreamProgress(cast(StageRun, source), metrics or RunMetrics())
    return progress.view(cast(Any, running), int(now_s * 1e6))


@pytest.mark.parametrize(
    ("watermark", "expected"),
    [
        (MIN, (None, None, False)),
        (100_000_000, (100.0, 2.5, False)),
        (110_000_000, (110.0, -7.5, False)),
        (MAX - 1, (None, None, True)),  # what is left holds the watermark just before the end
        (MAX, (None, None, True)),
    ],
)
def test_the_watermark_of_a_stream_and_how_far_it_is_behind(watermark: int, expected: tuple[Any, ...]) -> None:
    source = _Source(waiting=[], delayed=[])
    source.output_watermark = watermark
    seen = view(source, now_s=102.5)
    assert (seen.watermark, seen.behind_seconds, seen.has_ended) == expected


def test_the_backlog_is_the_size_of_all_restrictions_that_are_not_finished() -> None:
    running = SimpleNamespace(inputs={"r": [_Restriction(5.0)]})
    source = _Source(waiting=[_Restriction(1.0), _Restriction(10.0, count=3)], delayed=[_Restriction(2.5)])
    assert view(source, running).backlog == 1.0 + 3 * 10.0 + 2.5 + 5.0


@pytest.mark.parametrize("size", [float("inf"), float("nan"), 9e18])
def test_a_restriction_without_an_end_has_no_backlog(size: float) -> None:
    assert view(_Source(waiting=[_Restriction(size), _Restriction(1.0)], delayed=[])).backlog is None


def test_a_source_with_many_restrictions_is_not_decoded_for_its_backlog() -> None:
    assert view(_Source(waiting=[SimpleNamespace(count=1_000_000)], delayed=[])).backlog is None


def test_the_end_of_a_run_shows_the_last_backlog_without_a_look_at_released_blocks() -> None:
    source = _Source(waiting=[_Restriction(7.0)], delayed=[])
    progress = StreamProgress(cast(StageRun, source), RunMetrics())
    progress.view([], 0)
    source.waiting_blocks = pytest.fail
    assert progress.view(None, 0).backlog == 7.0
    source.output_watermark = MAX
    assert progress.view(None, 0).backlog is None  # it was finished after the last snapshot


def test_late_elements_are_counted_for_the_stage_that_would_have_read_them() -> None:
    metrics = RunMetrics()
    metrics.count_dropped("s", "Group", 2)
    metrics.count_dropped("s", "Other", 3)
    metrics.count_dropped("elsewhere", "Group", 5)
    assert view(_Source(waiting=[], delayed=[]), metrics=metrics).dropped_late == 5


def test_the_rate_of_a_stream_follows_the_last_seconds() -> None:
    rate = RecentRate(began_at=0.0)
    total = 0
    for tenth in range(1, 3001):  # five minutes, with a pause of a minute
        seconds = tenth / 10
        if not 100 < seconds <= 160:
            total += 100
        rate.reached(seconds, total)
        if seconds in (60.0, 100.0, 180.0, 300.0):
            assert rate.per_second(seconds) == pytest.approx(1000.0, rel=0.06)
        if seconds == 115.0:
            assert rate.per_second(seconds) == 0.0


@pytest.mark.parametrize("every", [0.5, 0.2])
@pytest.mark.parametrize("commits", [2, 8, 41, 400])
def test_the_rate_of_a_stage_that_stops_is_zero_after_ten_seconds_and_stays_zero(commits: int, every: float) -> None:
    stage, metrics = _Stage(), _Counted()
    progress = StageProgress(cast(StageRun, stage), cast(RunMetrics, metrics))
    progress.update(0.0, 1, 100, 0.5)
    seconds = 0.0
    for _ in range(commits):
        seconds += every
        stage.commit(50)
        metrics.count += 50
        progress.update(seconds, 1, 100, 0.5)
    assert progress.rate == pytest.approx(50 / every, rel=0.07)
    for later in range(11, 120):
        progress.update(seconds + later, 1, 100, 0.5)
        assert progress.rate == 0.0


class _Counted(RunMetrics):
    count = 0

    def elements(self, stage_id: str) -> int:
        return self.count


def test_a_stream_with_few_elements_has_a_steady_rate() -> None:
    rate = RecentRate(began_at=0.0)
    seen: list[float] = []
    for second in range(1, 601):  # ten elements each half a minute; only news are noted
        if second % 30 == 0:
            rate.reached(float(second), second // 30 * 10)
        if second > 120:
            seen.append(rate.per_second(float(second)))
    assert min(seen) > 0.15
    assert max(seen) < 0.55


def test_sources_do_not_count_as_busy_slots() -> None:
    """They have slots of their own: a pool would have more busy slots than there are."""

    def bundle(is_source: bool) -> Any:
        return SimpleNamespace(stage=SimpleNamespace(is_source=is_source))

    pool = PoolRun(Pool("cpu", 1.0, 0, 1, (), 1, ()), first_writer=0, clock=WallClock())
    pool.workers[0] = cast(Any, SimpleNamespace(is_connected=True, bundles={"a": bundle(True), "b": bundle(False)}))
    view = pool_view(pool, 10.0)
    assert (view.busy, view.slots) == (1, 1)
