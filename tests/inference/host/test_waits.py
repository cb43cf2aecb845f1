"""Tests of what a bundle that waits for a model tells about it: whether the model is loaded, works, or hangs."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import Handler, LuminosityRunner, RunInference
from luminosity.engine.loop import stalls
from luminosity.engine.loop.stalls import StallTimes
from luminosity.events import BundleStalled, Event, Snapshot, StallView
from tests.marks import note, notes, wait_for_file
from tests.runners import IS_REFERENCE, finished, flags

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does")

_TIMES = StallTimes(look=0.1, ask_after=0.3, ask_every=0.2, answer=60.0, stalled=0.8)


class Slow(Handler[int, int, None]):
    """Waits for a file, when it is loaded or when it computes."""

    def __init__(self, folder: str, *, is_slow_to_load: bool = False, is_large: bool = False) -> None:
        super().__init__()
        self.folder = folder
        self.is_slow_to_load = is_slow_to_load
        self.is_large = is_large

    def load_model(self) -> None:
        note(f"{self.folder}/pids", os.getpid())
        if self.is_slow_to_load:
            wait_for_file(f"{self.folder}/go")

    def predict(self, model: None, batch: Sequence[int], inference_args: Any = None) -> list[int]:
        if not self.is_slow_to_load:
            wait_for_file(f"{self.folder}/go")
        return list(batch)

    def share_model_across_processes(self) -> bool:
        return self.is_large


def events_of(handler: Slow, enough: Any, release: Any) -> list[Event]:
    """Run the model; ``release`` it as soon as ``enough`` holds for the events so far."""
    events: list[Event] = []

    def watch(event: Event) -> None:
        events.append(event)
        if not os.path.exists(f"{handler.folder}/go") and enough(events):
            release()

    options = PipelineOptions(flags("--cpu_workers=2"))
    pipeline = beam.Pipeline(runner=LuminosityRunner(on_event=watch), options=options)
    _ = pipeline | beam.Create(range(3)) | RunInference(handler)
    finished(pipeline.run())
    return events


def shown(events: list[Event]) -> list[StallView]:
    stages = [stage for event in events if isinstance(event, Snapshot) for stage in event.stages]
    return [stall for stage in stages for stall in stage.stalls]


def test_the_load_of_a_model_is_shown_and_never_stalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "TIMES", _TIMES)
    events = events_of(
        Slow(str(tmp_path), is_slow_to_load=True),
        lambda events: any(stall.seconds > 2 * _TIMES.stalled for stall in shown(events)),
        (tmp_path / "go").touch,
    )
    assert {(stall.doing, stall.is_stalled) for stall in shown(events)} <= {("setup", False), ("loading", False)}
    assert not [event for event in events if isinstance(event, BundleStalled)]


@pytest.mark.one_machine("other machines have other processes")
@pytest.mark.parametrize("kind", ["here", "stopped"])
def test_a_model_that_hangs_is_named_with_its_stack(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "TIMES", _TIMES)

    def stalled(events: list[Event]) -> list[BundleStalled]:
        return [event for event in events if isinstance(event, BundleStalled)]

    def enough(events: list[Event]) -> bool:
        if kind == "stopped" and len(stalled(events)) == 1:
            os.kill(int(notes(tmp_path / "pids")[0]), signal.SIGSTOP)
            return False
        return any(kind != "stopped" or event.stall.state == "stopped" for event in stalled(events))

    def release() -> None:
        (tmp_path / "go").touch()
        os.kill(int(notes(tmp_path / "pids")[0]), signal.SIGCONT)

    events = events_of(Slow(str(tmp_path), is_large=kind != "here"), enough, release)
    first = stalled(events)[0]
    assert first.stall.waits_for == "the model Slow"
    assert "in predict" in first.traceback
    assert "has waited for the model Slow for" in first.message
    if kind == "stopped":
        assert {event.stall.waits_for for event in stalled(events) if event.stall.state} == {"the shared model host"}
