"""Tests of the events of real runs: statuses, progress, lost workers, retries, and how a run ends."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import apache_beam as beam
import pytest
from apache_beam.io.restriction_trackers import OffsetRange
from apache_beam.metrics import Metrics
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing import test_stream
from apache_beam.transforms import window
from apache_beam.transforms.periodicsequence import PeriodicImpulse

from luminosity import LuminosityRunner
from luminosity.engine.data.world import Clock
from luminosity.engine.loop import splits
from luminosity.engine.loop.metrics import BusyTime
from luminosity.engine.reporting.progress import Pace
from luminosity.errors import StepFailed
from luminosity.events import (
    BundleRetried,
    CheckpointDone,
    Event,
    LogMessage,
    RunEnded,
    RunStarted,
    Snapshot,
    StageInfo,
    StageView,
    StreamView,
    Subscriber,
    WorkerEnded,
    WorkerLost,
    WorkerStarted,
    from_json,
    to_json,
)
from tests.dofns import Numbers, Ranges
from tests.marks import first_time, wait_for_file
from tests.processes import wait_for
from tests.runners import IS_REFERENCE, finished, flags

pytestmark = [
    pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does"),
    pytest.mark.usefixtures("leaves_nothing", "no_accelerators"),
]

_E = TypeVar("_E", bound=Event)
_MB = 1 << 20


def start(build: Callable[[beam.Pipeline], Any], on_event: Subscriber, *extra: str) -> Any:
    options = PipelineOptions(flags(*(extra or ("--cpu_workers=2",))))
    pipeline = beam.Pipeline(runner=LuminosityRunner(on_event=on_event), options=options)
    build(pipeline)
    return pipeline.run()


def events_of(build: Callable[[beam.Pipeline], Any], *extra: str) -> list[Event]:
    """Return all events of a run."""
    events: list[Event] = []
    finished(start(build, events.append, *extra))
    return events


def only(kind: type[_E], events: list[Event]) -> list[_E]:
    return [event for event in events if isinstance(event, kind)]


def views(events: list[Event], label: str) -> Iterator[StageView]:
    """Return the views of the stage with this label, one for each snapshot."""
    (run,) = only(RunStarted, events)
    (stage_id,) = (stage.id for stage in run.stages if stage.label == label)
    for snapshot in only(Snapshot, events):
        yield from (stage for stage in snapshot.stages if stage.id == stage_id)


def was_seen(events: list[Event], label: str, status: str, by: tuple[str, ...]) -> bool:
    return any((view.status, view.by) == (status, by) for view in views(events, label))


def test_a_run_tells_its_plan_its_workers_and_its_end() -> None:
    def build(pipeline: beam.Pipeline) -> None:
        numbers = pipeline | "Read" >> beam.Create(range(300)) | "Double" >> beam.Map(lambda n: 2 * n)
        device = numbers | "Embed" >> beam.Map(str).with_resource_hints(accelerator="type:any;count:1")
        _ = device | "Spread" >> beam.Reshuffle() | "Last" >> beam.Map(len)

    events = events_of(build, "--cpu_workers=1", "--accelerators=1")
    run, end = events[0], events[-1]
    assert isinstance(run, RunStarted)
    assert isinstance(end, RunEnded)
    assert {event.run for event in events} == {run.run}
    stages = {stage.label: stage for stage in run.stages}
    assert list(stages) == ["Read", "Read + Double", "Embed", "Last"]
    assert stages["Embed"].reads_from == (stages["Read + Double"].id,)
    assert {pool.name: pool.devices for pool in run.pools} == {"cpu": (), "device": ("declared:0",)}
    assert stages["Embed"].pool == "device"
    assert {worker.pool for worker in only(WorkerStarted, events)} == {"cpu", "device"}
    assert sorted(e.worker for e in only(WorkerEnded, events)) == sorted(e.worker for e in only(WorkerStarted, events))
    for ended in only(WorkerEnded, events):
        assert ended.lifetime_seconds > 0
        assert ended.cpu_seconds > 0
        assert ended.peak_resident > 10 * _MB
    assert {(view.worker, view.cpu_seconds) for view in end.last.workers} == {
        (ended.worker, ended.cpu_seconds) for ended in only(WorkerEnded, events)
    }
    assert (end.state, end.failure) == ("done", "")
    assert {stage.elements for stage in end.last.stages} == {300}
    assert {stage.status for stage in end.last.stages} == {"done"}
    assert [device.id for device in end.last.devices] == ["declared:0"]
    assert all(pool.busy_seconds > 0 for pool in end.last.pools)
    assert end.last.processes.peak > 10 * _MB
    assert stages["Embed"].steps == ("Embed",)
    assert stages["Embed"].asked.accelerator == "type:any;count:1"
    asked = {pool.name: (pool.asked.accelerator, pool.cores_per_worker > 0) for pool in run.pools}
    assert asked == {"cpu": ("", True), "device": ("type:any;count:1", True)}
    assert run.machine.cores > 0
    assert [device.id for device in run.machine.devices] == ["declared:0"]
    assert run.version == version("luminosity")
    for stage in end.last.stages:
        assert stage.cpu_seconds > 0
        assert stage.peak_resident > 10 * _MB
        assert 0 < len(stage.bundle_seconds) == len(stage.bundle_elements) == min(64, stage.bundles)
    read, *_ = end.last.stages
    assert read.output_bytes > 300
    # Only the last snapshot has the sample: the others come five times a second.
    assert not any(stage.bundle_seconds for snapshot in only(Snapshot, events) for stage in snapshot.stages)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[Callable[[Any], Any], Callable[[], None]]]:
    """A function that makes a step wait, and a function that releases it."""
    release = tmp_path / "release"

    def hold(element: Any) -> Any:
        wait_for_file(release)
        return element

    yield hold, release.touch
    release.touch()


@pytest.fixture
def slow_bundles_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split no bundle of the step "Slow": what it gives back comes on top of what is queued by then."""
    can_split = splits.can_split
    monkeypatch.setattr(splits, "can_split", lambda bundle: bundle.stage.plan.label != "Slow" and can_split(bundle))


@pytest.mark.usefixtures("slow_bundles_stay_whole")
def test_a_slow_step_holds_back_what_feeds_it_and_starves_what_follows(
    held: tuple[Callable[[Any], Any], Callable[[], None]], tmp_path: Path
) -> None:
    """A request to split is no lock: the source's pace gives it two seconds to arrive, until a size is known."""
    hold, release = held
    is_released = (tmp_path / "release").exists

    def blocks(_: int) -> bytes:
        time.sleep(0.0 if is_released() else 0.01)
        return bytes(28_000)

    def build(pipeline: beam.Pipeline) -> None:
        numbers = pipeline | "Count" >> beam.Create(range(300)) | "Spread" >> beam.Reshuffle()
        large = numbers | "Source" >> beam.Map(blocks)
        # Another pool, so that the source keeps its worker.
        slow = beam.Map(lambda block: len(hold(block))).with_resource_hints(accelerator="type:any;count:1")
        _ = large | "Slow" >> slow | "Spread again" >> beam.Reshuffle() | "Behind" >> beam.Map(str)

    events: list[Event] = []
    result = start(build, events.append, "--cpu_workers=1", "--accelerators=1", "--memory_budget=64MB")
    assert wait_for(lambda: only(Snapshot, events), timeout_s=60)
    (run,) = only(RunStarted, events)
    assert run.queue_limit < 300 * 28_000

    def most_queued() -> int:
        return max(view.queued_bytes for view in views(events, "Slow"))

    assert wait_for(lambda: was_seen(events, "Source", "held back", by=("Slow",)), timeout_s=60)
    assert wait_for(lambda: was_seen(events, "Slow", "busy", by=()), timeout_s=60)
    assert wait_for(lambda: was_seen(events, "Behind", "starved", by=("Slow",)), timeout_s=60)
    assert wait_for(lambda: most_queued() > run.queue_limit / 3, timeout_s=60)
    release()
    finished(result)
    assert most_queued() <= run.queue_limit


@pytest.mark.usefixtures("slow_bundles_stay_whole")
def test_queues_stay_within_their_limit_while_the_source_runs() -> None:
    """The source's bundles would produce far more at once. They are split; nothing is spilled.

    A request to split is no lock: the source's pace gives it most of two seconds to arrive.
    """

    def blocks(_: int) -> bytes:
        time.sleep(0.01)
        return bytes(40_000)

    def slow(block: bytes) -> int:
        time.sleep(0.02)
        return len(block)

    def build(pipeline: beam.Pipeline) -> None:
        numbers = pipeline | "Count" >> beam.Create(range(400)) | "Spread" >> beam.Reshuffle()
        large = numbers | "Source" >> beam.Map(blocks)
        _ = large | "Slow" >> beam.Map(slow).with_resource_hints(accelerator="type:any;count:1")

    events = events_of(build, "--cpu_workers=1", "--accelerators=1", "--memory_budget=64MB")
    (run,) = only(RunStarted, events)
    assert run.queue_limit < 10_000_000
    snapshots = only(Snapshot, events)
    under_way = [view for view in views(events, "Source") if view.status != "done"]
    assert len(under_way) > 5
    assert max(stage.queued_bytes for snapshot in snapshots for stage in snapshot.stages) <= run.queue_limit
    assert max(snapshot.memory.used for snapshot in snapshots) > run.queue_limit // 4
    (end,) = only(RunEnded, events)
    assert end.last.memory.peak <= 64_000_000
    assert end.last.memory.spilled == 0


def test_who_waits_for_a_side_input(
    held: tuple[Callable[[int], int], Callable[[], None]],
) -> None:
    hold, release = held

    def build(pipeline: beam.Pipeline) -> None:
        late = pipeline | "Late" >> beam.Create([1]) | "Hold" >> beam.Map(hold)
        main = pipeline | "Main" >> beam.Create([1, 2, 3], reshuffle=False)
        _ = main | "Spread" >> beam.Reshuffle() | "Use" >> beam.Map(max, beam.pvalue.AsSingleton(late))

    events: list[Event] = []
    result = start(build, events.append, "--cpu_workers=1")

    def one_is_busy_and_one_waits_for_it() -> bool:
        holder = "Late + Hold"
        return was_seen(events, holder, "busy", by=()) and was_seen(events, "Use", "waiting", by=(holder,))

    assert wait_for(lambda: len(events) > 1 and one_is_busy_and_one_waits_for_it(), timeout_s=60)
    release()
    finished(result)


def test_who_waits_for_a_worker(held: tuple[Callable[[int], int], Callable[[], None]]) -> None:
    hold, release = held

    def build(pipeline: beam.Pipeline) -> None:
        for name in ("A", "B"):
            _ = pipeline | name >> beam.Create([1], reshuffle=False) | f"Hold {name}" >> beam.Map(hold)

    events: list[Event] = []
    result = start(build, events.append, "--cpu_workers=1")

    def one_runs_and_one_waits(first: str, second: str) -> bool:
        return was_seen(events, f"{first} + Hold {first}", "busy", by=()) and was_seen(
            events, f"{second} + Hold {second}", "needs worker", by=("cpu",)
        )

    assert wait_for(
        lambda: len(events) > 1 and (one_runs_and_one_waits("A", "B") or one_runs_and_one_waits("B", "A")),
        timeout_s=60,
    )
    release()
    finished(result)


def test_a_failed_try_and_a_lost_worker_are_told(tmp_path: Path) -> None:
    failed, died = tmp_path / "failed", tmp_path / "died"

    def check(n: int) -> int:
        logging.getLogger("mine").warning("seen by the page")
        if n == 7 and first_time(failed):
            raise ValueError("once\nwith more lines")
        if n == 11 and first_time(died):
            os._exit(3)
        return n

    def build(pipeline: beam.Pipeline) -> None:
        _ = pipeline | beam.Create(range(20)) | beam.Reshuffle() | "Check" >> beam.Map(check)

    events = events_of(build)
    (retried,) = only(BundleRetried, events)
    assert (retried.step, retried.exception, retried.tries) == ("Check", "ValueError: once", 1)
    assert retried.traceback.endswith("ValueError: once\nwith more lines [while running 'Check']")
    assert retried.place.startswith(f"{__file__}:")
    logged = [event for event in only(LogMessage, events) if event.logger == "mine"]
    assert {(each.message, each.level, each.step) for each in logged} == {("seen by the page", "warning", "Check")}
    assert {each.worker for each in logged} <= {each.worker for each in only(WorkerStarted, events)}
    assert sum(each.count for each in logged) >= 20
    (lost,) = only(WorkerLost, events)
    assert (lost.pool, lost.reason, lost.bundles) == ("cpu", "exited with code 3", 1)
    assert lost.lifetime_seconds > 0
    (end,) = only(RunEnded, events)
    assert sum(stage.retries for stage in end.last.stages) == 2


def test_a_failed_run_ends_with_the_reason_in_one_line() -> None:
    events: list[Event] = []
    with pytest.raises(StepFailed):
        finished(start(lambda p: p | beam.Create([0]) | "Divide" >> beam.Map(lambda n: 1 // n), events.append))
    end = events[-1]
    assert isinstance(end, RunEnded)
    assert end.state == "failed"
    assert end.failure.startswith("step 'Divide' failed 4 times: ZeroDivisionError")
    assert "\n" not in end.failure
    assert end.step == "Divide"
    assert end.place.startswith(f"{__file__}:")
    assert "ZeroDivisionError" in end.traceback
    assert "element: 0" not in end.traceback
    assert len(only(BundleRetried, events)) == 3


def test_a_durable_run_reports_its_checkpoints_and_metrics(tmp_path: Path) -> None:
    def count(n: int) -> int:
        Metrics.counter("mine", "seen").inc()
        return n

    def build(pipeline: beam.Pipeline) -> None:
        _ = pipeline | beam.Create(range(20)) | beam.Reshuffle() | "Count" >> beam.Map(count)

    events = events_of(build, "--cpu_workers=1", f"--checkpoint_dir={tmp_path / 'checkpoint'}")
    (end,) = only(RunEnded, events)
    assert end.last.checkpoint is not None
    done = only(CheckpointDone, events)
    assert done[-1].number == end.last.checkpoint.count > 0
    assert all(after.seconds - before.seconds >= 1 for before, after in pairwise(done[:-1]))
    assert end.last.checkpoint.folder_bytes > 0
    assert [(metric.step, metric.name, metric.value) for metric in end.metrics] == [("Count", "seen", 20)]


class SplitOnce(Numbers):
    """A restriction that begins at 0 ends only after a split, and the rest only after ``release`` exists."""

    def __init__(self, release: Path) -> None:
        super().__init__(seconds_each=0.005)
        self._release = release

    def process(self, element: tuple[int, int], tracker: Any = beam.DoFn.RestrictionParam(Ranges())) -> Iterator[int]:  # noqa: B008
        if tracker.current_restriction().start > 0:
            wait_for_file(self._release)
        for number in super().process(element, tracker):
            yield number
            if number == element[1] - 2:
                wait_for(lambda: tracker.current_restriction() != OffsetRange(*element), timeout_s=60)


def test_a_splittable_source_knows_how_far_it_is(tmp_path: Path) -> None:
    release = tmp_path / "release"

    def build(pipeline: beam.Pipeline) -> None:
        numbers = pipeline | beam.Create([(0, 400)]) | "Numbers" >> beam.ParDo(SplitOnce(release))
        _ = numbers | "Use" >> beam.Map(str)

    events: list[Event] = []
    result = start(build, events.append)

    def fractions() -> list[float]:
        return [view.fraction for view in views(events, "Numbers + Use") if view.fraction is not None]

    assert wait_for(lambda: events and any(0.0 < fraction < 1.0 for fraction in fractions()), timeout_s=60)
    release.touch()
    finished(result)
    assert fractions() == sorted(fractions())
    end = events[-1]
    assert isinstance(end, RunEnded)
    assert end.last.stages[-1].elements == 400
    assert end.last.stages[-1].fraction == 1.0


def test_events_survive_json() -> None:
    def build(pipeline: beam.Pipeline) -> None:
        _ = pipeline | beam.Create(range(10)) | beam.Map(lambda n: time.sleep(0.05))

    for event in events_of(build):
        assert from_json(json.loads(json.dumps(to_json(event)))) == event


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"event": "Nothing"},
        {"event": "WorkerLost", "run": "r"},
        {"event": "WorkerLost", "run": "r", "seconds": "long", "worker": "w", "pool": "p", "reason": "r", "bundles": 1},
        {"event": "Snapshot", "run": "r", "seconds": 1.0, "stages": [{"id": "s", "status": "asleep"}], "pools": []},
    ],
)
def test_what_is_no_event_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match=r"expected|not an event"):
        from_json(data)


def test_a_subscriber_that_raises_is_dropped_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Event] = []

    def broken_subscriber(event: Event) -> None:
        calls.append(event)
        raise RuntimeError("not today")

    with caplog.at_level(logging.WARNING, logger="luminosity"):
        result = finished(start(lambda p: p | beam.Create(range(5)), broken_subscriber))
    assert result.state == "DONE"
    assert len(calls) == 1
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("luminosity")]
    assert "broken_subscriber" in warning


def test_a_subscriber_may_be_slow() -> None:
    """A slow subscriber misses snapshots, but no other event."""
    events: list[Event] = []

    def slow_subscriber(event: Event) -> None:
        if isinstance(event, Snapshot):  # they come every 0.2 s
            time.sleep(0.3)
        events.append(event)

    finished(start(lambda p: p | beam.Create(range(30)) | beam.Map(lambda n: time.sleep(0.05)), slow_subscriber))
    assert isinstance(events[0], RunStarted)
    assert isinstance(events[-1], RunEnded)
    assert only(WorkerStarted, events)


def test_a_pace_is_that_of_lately() -> None:
    pace = Pace(began_at=0.0)
    for second in range(1, 61):
        pace.reached(second, 100 * min(second, 20) + 10 * max(0, second - 20))
    assert pace.per_second(60) == pytest.approx(10)


def test_slow_steps_have_a_pace_too() -> None:
    pace = Pace(began_at=0.0)
    for step in range(1, 6):
        pace.reached(30 * step, step)
    assert pace.per_second(179) == pytest.approx(1 / 30)
    assert pace.per_second(600) < 1 / 60


def test_busy_time_sums_up_what_overlaps() -> None:
    clock = iter([1.0, 2.0, 4.0, 5.0, 9.0, 9.0])
    busy = BusyTime(cast(Clock, SimpleNamespace(monotonic=lambda: next(clock))))
    for change in (busy.begin, busy.begin, busy.end, busy.end):
        change()
    assert (busy.seconds, busy.spanned_seconds) == (6.0, 4.0)


def test_a_stream_can_be_turned_into_json_and_back() -> None:
    views = (StreamView(), StreamView(12.5, 0.25, backlog=3.0, dropped_late=2), StreamView(has_ended=True))
    stages = (StageView("s", "done"), *(StageView("s", "busy", stream=view) for view in views))
    snapshot = Snapshot("r", 1.0, stages, ())
    assert from_json(json.loads(json.dumps(to_json(snapshot)))) == snapshot
    run = RunStarted("r", 0.0, "watch.py", 0.0, (StageInfo("s", "Read", "cpu", is_stream=True),), (), 0)
    assert from_json(json.loads(json.dumps(to_json(run)))) == run


def test_fields_of_a_later_version_are_left_out() -> None:
    view = StageView("s", "busy", stream=StreamView(12.5, 0.25))
    data = to_json(Snapshot("r", 1.0, (view,), ()))
    data["weather"] = "fine"
    data["stages"][0]["colour"] = {"red": 1}
    data["stages"][0]["stream"]["depth"] = 3
    assert from_json(data) == Snapshot("r", 1.0, (view,), ())


def test_a_stream_reports_what_came_late_and_how_it_ended() -> None:
    late = window.TimestampedValue(("a", 1), 3)

    def build(pipeline: beam.Pipeline) -> None:
        stream = test_stream.TestStream().add_elements([late]).advance_watermark_to(50)
        _ = (
            pipeline
            | "Read" >> stream.add_elements([late]).add_elements([late]).advance_watermark_to_infinity()
            | "Window" >> beam.WindowInto(window.FixedWindows(10))
            | "Sum" >> beam.CombinePerKey(sum)
            | "Last" >> beam.Map(str)
        )

    events = events_of(build)
    (run,) = only(RunStarted, events)
    (ended,) = only(RunEnded, events)
    assert [stage.is_stream for stage in run.stages] == [True, True]
    assert [view.stream for view in ended.last.stages] == [
        StreamView(has_ended=True),
        StreamView(has_ended=True, dropped_late=2),
    ]
    assert all(view.seconds_left is None for snapshot in only(Snapshot, events) for view in snapshot.stages)


def test_a_stream_runs_until_it_is_stopped() -> None:
    def build(pipeline: beam.Pipeline) -> None:
        _ = pipeline | "Tick" >> PeriodicImpulse(fire_interval=0.02) | "Last" >> beam.Map(str)

    events: list[Event] = []
    result = start(build, events.append)
    assert wait_for(lambda: events and any(view.elements > 3 for view in views(events, "Tick + Last")), timeout_s=60)
    assert result.wait_until_finish(duration=1) is None
    assert result.cancel() == result.wait_until_finish() == "CANCELLED"
    (ended,) = only(RunEnded, events)
    _, last = ended.last.stages
    assert ended.state == "cancelled"
    assert last.stream is not None
    assert last.stream.watermark is not None
    assert last.stream.backlog is not None
    assert last.elements > 3
