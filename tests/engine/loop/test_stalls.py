"""Tests of bundles that do nothing any more: they are found, described and, if asked for, ended."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability.api import beam_fn_api_pb2

from luminosity import LuminosityRunner
from luminosity._shared.hangs import Wait
from luminosity.engine.data import wire
from luminosity.engine.loop import failures, stalls
from luminosity.engine.loop.stalls import Quiet, Stalls, StallTimes
from luminosity.engine.loop.workers import Worker
from luminosity.engine.workers.sdk.bundle_report import BundleReport, Stall
from luminosity.errors import ElementTimeout
from luminosity.events import BundleStalled, Event, LogMessage, RunStarted, Snapshot
from tests.marks import first_time, note, notes, wait_for_file
from tests.runners import IS_REFERENCE, finished, flags, run

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does")

# ---- the decision, with a clock that the test moves


class _Worker(SimpleNamespace):
    """A worker that answers when the test says so."""

    def __init__(self, *, is_source: bool = False, partitions: int = 0) -> None:
        super().__init__(id="w1", process=None, overdue=None, is_killed=False, asked=[])
        stage = SimpleNamespace(id="s1", is_source=is_source, plan=SimpleNamespace(label="Work", partitions=partitions))
        self.attempt = SimpleNamespace(
            instruction_id="b1", worker=self, started_at=0.0, outputs=[], ends={}, response=None, stall=None
        )
        self.bundles = {"b1": SimpleNamespace(stage=stage, attempt=self.attempt, inputs={})}

    def instruct(self, request: beam_fn_api_pb2.InstructionRequest) -> None:
        self.asked.append(request.instruction_id)

    def kill(self) -> None:
        self.is_killed = True


class _Run:
    """Looks at one bundle each second."""

    def __init__(self, *, element_timeout: float | None = None, is_source: bool = False, partitions: int = 0) -> None:
        self.worker = _Worker(is_source=is_source, partitions=partitions)
        self.told: list[Stall] = []
        self.stalls = Stalls(lambda _, stall: self.told.append(stall), lambda *_: "", element_timeout, StallTimes())
        self.now = 0.0

    def look(self, seconds: int, report: Callable[[float], BundleReport] | None) -> None:
        """Let time pass; the worker answers with ``report`` of the time, or not at all."""
        for _ in range(seconds):
            self.now += 1.0
            self.stalls.look([cast(Worker, self.worker)], self.now)
            for question in self.worker.asked if report is not None else ():
                assert report is not None
                response = beam_fn_api_pb2.InstructionResponse(instruction_id=question)
                response.process_bundle_progress.monitoring_data[wire.REPORT] = report(self.now).to_json().encode()
                assert self.stalls.answered(cast(Worker, self.worker), response, self.now)
                self.worker.asked.remove(question)


def test_a_bundle_that_does_nothing_for_half_a_minute_is_told_again_and_again_but_ever_more_rarely() -> None:
    run = _Run()
    run.look(900, lambda now: BundleReport("process", "Work", moves=3, seconds=now - 2.0, element="'x'"))
    assert [round(stall.seconds) for stall in run.told] == [30, 60, 120, 240, 480]
    assert {(stall.doing, stall.step, stall.element) for stall in run.told} == {("element", "Work", "'x'")}


def test_a_bundle_that_moves_on_is_never_stalled_however_long_it_takes() -> None:
    run = _Run()
    run.look(3600, lambda now: BundleReport("process", "Work", moves=int(now), seconds=now % 20))
    assert not run.told
    assert run.worker.attempt.stall is None


def test_elements_that_usually_take_long_are_stalled_later() -> None:
    run = _Run()
    # Each element takes 50 s: the first is told, since nothing is known about it, the others are not.
    run.look(500, lambda now: BundleReport("process", "Work", moves=int(now // 50), seconds=now % 50))
    assert [round(stall.seconds) for stall in run.told] == [30]
    last = run.now // 50
    run.look(200, lambda now: BundleReport("process", "Work", moves=int(last), seconds=now - 50 * last))
    assert [round(stall.seconds) for stall in run.told][1] >= 90


def test_a_setup_that_takes_two_minutes_is_shown_and_not_stalled() -> None:
    run = _Run(element_timeout=10.0)
    run.look(120, lambda now: BundleReport("setup", seconds=now))
    shown = run.worker.attempt.stall
    assert shown is not None
    assert (shown.doing, shown.is_stalled, round(shown.seconds)) == ("setup", False, 120)
    run.look(5, lambda now: BundleReport("process", "Work", moves=1, seconds=now - 120.0))
    assert run.worker.attempt.stall is None
    assert not run.told
    assert not run.worker.is_killed


def test_a_wait_for_a_model_that_is_loaded_or_works_for_others_is_not_stalled() -> None:
    run = _Run(element_timeout=10.0)
    loading = Wait("the model bert", quiet_seconds=500.0, is_loading=True)
    run.look(120, lambda now: BundleReport("finish", "Infer", moves=1, seconds=now, wait=loading))
    shown = run.worker.attempt.stall
    assert shown is not None
    assert (shown.doing, shown.is_stalled, shown.waits_for) == ("loading", False, "the model bert")
    busy = Wait("the model bert", quiet_seconds=1.0)
    run.look(120, lambda now: BundleReport("finish", "Infer", moves=1, seconds=now, wait=busy))
    assert not run.told
    assert not run.worker.is_killed


def test_a_model_that_gives_no_result_any_more_is_stalled() -> None:
    run = _Run()
    begin = 5.0
    run.look(
        60,
        lambda now: BundleReport(
            "finish", "Infer", 1, now, stack="worker", wait=Wait("the model bert", now - begin, stack="host")
        ),
    )
    assert [(stall.waits_for, stall.stack) for stall in run.told] == [("the model bert", "host\nworker")]


def test_a_source_of_a_stream_may_wait_for_an_hour_unless_its_worker_is_frozen() -> None:
    run = _Run(element_timeout=10.0, is_source=True)
    run.look(3600, lambda now: BundleReport("process", "Read", moves=2, seconds=now))
    assert not run.told
    assert not run.worker.is_killed
    run.look(120, None)
    assert run.told[0].doing == "nothing"
    assert run.told[0].state == "does not answer"


def test_a_partition_may_be_grouped_for_an_hour_unless_its_worker_is_frozen() -> None:
    run = _Run(element_timeout=10.0, partitions=32)
    run.look(3600, lambda now: BundleReport("process", "Group", seconds=now))
    assert not run.told
    run.look(120, None)
    assert run.told[0].doing == "nothing"
    assert not run.worker.is_killed, "no element is late"


def test_an_element_beyond_its_timeout_ends_the_worker_also_if_it_does_not_answer() -> None:
    for report in (None, lambda now: BundleReport("process", "Work", moves=2, seconds=now)):
        run = _Run(element_timeout=10.0)
        run.look(9, report)
        assert not run.worker.is_killed
        run.look(6, report)
        assert run.worker.is_killed
        assert run.worker.overdue.bundle is run.worker.bundles["b1"]
        assert len(run.told) == 1, "it is told once"


def test_time_in_which_the_loop_did_not_run_does_not_count() -> None:
    run = _Run(element_timeout=10.0)
    run.look(8, None)
    run.now += 3600.0  # the machine slept, or this process was stopped
    run.look(1, None)
    assert not run.told
    assert not run.worker.is_killed


def test_output_is_a_sign_of_life() -> None:
    quiet = Quiet(started_at=0.0)
    quiet.sent(1, now=50.0)
    assert quiet.seconds(60.0) == 10.0
    quiet.sent(1, now=60.0)
    assert quiet.seconds(60.0) == 10.0


# ---- real hangs


def hang(element: int, kind: str, released: str) -> int:
    """Hang at one element until the file ``released`` is there, or the FIFO beside it is opened."""
    if element != 7:
        return element
    if kind == "sleep":
        wait_for_file(Path(released))
    elif kind == "loop":
        while not os.path.exists(released):
            pass
    elif kind == "lock":
        lock = threading.Lock()
        lock.acquire()
        threading.Thread(target=lambda: (wait_for_file(Path(released)), lock.release()), daemon=True).start()
        lock.acquire()
    elif kind == "native":
        ctypes.PyDLL(None).open(f"{released}.fifo".encode(), os.O_RDONLY)  # holds the interpreter meanwhile
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    return element


@pytest.mark.one_machine("other machines have other processes")
@pytest.mark.parametrize("kind", ["sleep", "loop", "lock", "native", "stop"])
def test_a_hang_of_each_kind_is_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_silent = kind in ("native", "stop")
    times = StallTimes(look=0.1, ask_after=0.3, ask_every=0.2, answer=0.3 if is_silent else 60.0, stalled=0.8)
    monkeypatch.setattr(stalls, "TIMES", times)
    released = tmp_path / "released"
    os.mkfifo(f"{released}.fifo")
    events: list[Event] = []

    def hanging() -> list[BundleStalled]:
        """Return the events about the element. A busy machine may be slow to answer before it gets there."""
        found = [each for each in events if isinstance(each, BundleStalled) and "Work" in each.stall.step]
        return [each for each in found if (each.stall.state == "stopped" if kind == "stop" else each.stall.place)]

    def watch(event: Event) -> None:
        events.append(event)
        views = [stage for each in events if isinstance(each, Snapshot) for stage in each.stages]
        stalled = hanging()
        if released.exists() or not stalled or not any(view.stalled_seconds for view in views):
            return
        released.touch()
        if kind == "stop":
            os.kill(stalled[0].stall.pid, signal.SIGCONT)
        if kind == "native":
            os.close(os.open(f"{released}.fifo", os.O_WRONLY))

    with caplog.at_level(logging.WARNING):
        pipeline = beam.Pipeline(
            runner=LuminosityRunner(on_event=watch), options=PipelineOptions(flags("--cpu_workers=1"))
        )
        _ = pipeline | beam.Create(range(20)) | beam.Reshuffle() | "Work" >> beam.Map(hang, kind, str(released))
        finished(pipeline.run())
    found = hanging()[0]
    assert found.stall.pid > 0
    assert found.stall.doing == ("nothing" if is_silent else "element")
    assert found.stall.state == {"stop": "stopped", "native": "does not answer"}.get(kind, "")
    text = next(text for text in caplog.messages if text.startswith(found.message))
    assert f"pid {found.stall.pid}" in text
    if kind != "stop":
        assert ".py:" in found.stall.place
        assert "in hang" in found.traceback
        assert "in hang" in text
    assert "  element: 7" in text or (is_silent and "  element: one of " in text)
    recorded = [each.message for each in events if isinstance(each, LogMessage) and "worker w" in each.message]
    assert recorded
    assert not any("element:" in message for message in recorded), "elements are data, which is not recorded"
    during = [each for each in events if isinstance(each, Snapshot) and any(s.stalled_seconds for s in each.stages)]
    assert all(snapshot.seconds_left is None for snapshot in during)


@pytest.mark.one_machine("asks for two workers")
def test_elements_that_other_workers_took_from_a_bundle_that_hangs_count_once(tmp_path: Path) -> None:
    released = tmp_path / "released"
    seen: dict[int, float | None] = {}

    def watch(event: Event) -> None:
        for view in event.stages if isinstance(event, Snapshot) else ():
            if view.id in held and view.running == 1 and not view.queued and 0 < view.elements < 20:
                seen[view.elements] = view.fraction
                released.touch()
        if isinstance(event, RunStarted):
            held.extend(stage.id for stage in event.stages if "Work" in stage.label)

    held: list[str] = []
    pipeline = beam.Pipeline(runner=LuminosityRunner(on_event=watch), options=PipelineOptions(flags("--cpu_workers=2")))
    _ = pipeline | beam.Create(range(20)) | beam.Reshuffle() | "Work" >> beam.Map(hang, "sleep", str(released))
    finished(pipeline.run())
    assert seen
    assert seen == {elements: pytest.approx(elements / 20, abs=0.001) for elements in seen}


@pytest.mark.parametrize("kind", ["loop", "stop"])
def test_an_element_that_hangs_is_ended_tried_again_and_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "MAX_ATTEMPTS", 2)
    tries, released = tmp_path / "tries", tmp_path / "never"

    def work(element: int) -> int:
        if element == 7:
            note(tries, os.getpid())
        return hang(element, kind, str(released))

    # A worker that is stopped can't tell which of many elements it works on: they would be halved.
    elements = range(20) if kind == "loop" else [7]
    with pytest.raises(ElementTimeout) as caught:
        run(
            lambda p: p | beam.Create(elements) | beam.Reshuffle() | "Work" >> beam.Map(work),
            "--cpu_workers=1",
            "--element_timeout=1s",
        )
    message = str(caught.value)
    assert "step 'Work': one element took longer than --element_timeout=1s in each of 2 attempts" in message
    assert "element: 7" in message
    assert ("in hang" in message) == (kind == "loop")
    assert len(set(notes(tries))) == len(notes(tries)) == 2


def test_an_element_is_cut_out_of_its_bundle(tmp_path: Path) -> None:
    once, done = tmp_path / "once", tmp_path / "done"

    def work(element: int) -> int:
        if element == 7 and first_time(once):
            wait_for_file(tmp_path / "never")
        note(done, element)
        return element

    run(
        lambda p: p | beam.Create(range(20)) | beam.Reshuffle() | "Work" >> beam.Map(work),
        "--cpu_workers=1",
        "--element_timeout=1s",
    )
    assert set(notes(done)) == {str(number) for number in range(20)}
