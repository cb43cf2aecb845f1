"""Tests of how durable runs end: stopped, drained, cancelled at once, and from another process."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.coders import VarIntCoder
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.runners.runner import PipelineState
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec
from apache_beam.transforms.window import FixedWindows, TimestampedValue
from apache_beam.utils.timestamp import Duration, Timestamp

from luminosity.cli import stop
from luminosity.cli.main import main
from luminosity.engine.durable.store import CheckpointFolder
from luminosity.errors import CheckpointError, CheckpointFailed, OptionError, RecordError
from luminosity.runs import journal, records
from tests.marks import first_time, note, notes, wait_for_file
from tests.runners import IS_REFERENCE, finished, start

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does")


class Provider(beam.transforms.core.RestrictionProvider):
    def initial_restriction(self, element: Any) -> OffsetRange:
        return OffsetRange(0, 1 << 60)

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return OffsetRestrictionTracker(restriction)

    def restriction_size(self, element: Any, restriction: OffsetRange) -> int:
        return 1

    def truncate(self, element: Any, restriction: OffsetRange) -> None:
        return None


_RESTRICTION = beam.DoFn.RestrictionParam(Provider())
_WATERMARK = beam.DoFn.WatermarkEstimatorParam(ManualWatermarkEstimator.default_provider())


class Count(beam.DoFn):
    """Counts up, some numbers at a time, with the watermark right behind. It has no end."""

    @beam.DoFn.unbounded_per_element()
    def process(self, element: Any, tracker: Any = _RESTRICTION, watermark: Any = _WATERMARK) -> Iterator[Any]:
        first = tracker.current_restriction().start
        for number in range(first, first + 5):
            if not tracker.try_claim(number):
                return
            yield TimestampedValue(number, number / 1000)
            watermark.set_watermark(Timestamp(number / 1000))
        tracker.defer_remainder(Duration(0.02))


def counting(notes_of: Path, window_s: float = 3600) -> Callable[[beam.Pipeline], Any]:
    """Return a stream that notes each number, and the sum of a window that is longer than the test."""

    def noted(number: int) -> int:
        note(notes_of / "numbers", number)
        return number

    def build(pipeline: beam.Pipeline) -> None:
        numbers = pipeline | beam.Impulse() | "Count" >> beam.ParDo(Count()).with_output_types(int)
        (
            numbers
            | beam.WindowInto(FixedWindows(window_s))
            | "Key" >> beam.Map(lambda number: ("all", number)).with_output_types(tuple[str, int])
            | "Group" >> beam.GroupByKey()
            | "Groups" >> beam.Map(lambda group: note(notes_of / "groups", sorted(group[1])))
        )
        numbers | "Note" >> beam.Map(noted)

    return build


_STOCK_SYNC = CheckpointFolder.sync
_TOTAL = beam.DoFn.StateParam(ReadModifyWriteStateSpec("total", VarIntCoder()))


class Total(beam.DoFn):
    """Counts its elements in state, and notes the count."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def process(self, element: Any, total: Any = _TOTAL) -> None:
        count = (total.read() or 0) + 1
        total.write(count)
        note(self._path, count)


def totals(folder: Path, name: str, *branches: str) -> Callable[[beam.Pipeline], Any]:
    """Return a stream with a stateful step of this name, and some branches beside it."""

    def build(pipeline: beam.Pipeline) -> None:
        numbers = pipeline | beam.Impulse() | "Count" >> beam.ParDo(Count()).with_output_types(int)
        keyed = numbers | "Key" >> beam.Map(lambda number: ("all", number)).with_output_types(tuple[str, int])
        for branch in branches:
            keyed | branch >> beam.Map(lambda _, path=folder / branch: note(path))
        keyed | name >> beam.ParDo(Total(folder / "numbers"))

    return build


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_numbers(folder: Path, more_than: int = 0) -> None:
    wait_until(lambda: len(notes(folder / "numbers")) > more_than)


def state_in(checkpoint: Path) -> str:
    with sqlite3.connect(f"file:{checkpoint}/checkpoint.sqlite?mode=ro", uri=True) as database:
        return database.execute("SELECT value FROM meta WHERE key = 'state'").fetchone()[0]


def test_a_stopped_stream_continues_and_a_drained_one_closes_its_windows(tmp_path: Path) -> None:
    checkpoint, runs = tmp_path / "checkpoint", tmp_path / "runs"
    options = [f"--checkpoint_dir={checkpoint}", f"--run_dir={runs}", "--cpu_workers=1"]
    result = start(counting(tmp_path), *options)
    wait_for_numbers(tmp_path)
    assert result.cancel() == PipelineState.STOPPED
    assert result.wait_until_finish() == PipelineState.STOPPED
    assert state_in(checkpoint) == "stopped"
    before = len(notes(tmp_path / "numbers"))

    result = start(counting(tmp_path), *options)
    wait_for_numbers(tmp_path, more_than=before)
    result.drain()
    finished(result)
    assert result.state == PipelineState.DRAINED
    assert state_in(checkpoint) == "drained"
    numbers = sorted(int(number) for number in notes(tmp_path / "numbers"))
    # A stop waits for its bundles, so that nothing is repeated; a drain closes the window.
    assert numbers == list(range(len(numbers)))
    assert notes(tmp_path / "groups") == [str(numbers)]
    states = [records.find(runs, run_id).state for run_id in records.run_ids(runs)]
    assert states == ["drained", "stopped"]

    assert finished(start(counting(tmp_path), *options)).state == PipelineState.DONE  # there is nothing to do
    assert len(notes(tmp_path / "numbers")) == len(numbers)


def test_a_changed_pipeline_continues_with_the_state_of_a_renamed_step(tmp_path: Path) -> None:
    options = [f"--checkpoint_dir={tmp_path / 'checkpoint'}", "--cpu_workers=1"]
    result = start(totals(tmp_path, "Old"), *options)
    wait_for_numbers(tmp_path)
    result.cancel()
    before = len(notes(tmp_path / "numbers"))
    changed = totals(tmp_path, "New", "Branch")
    with pytest.raises(CheckpointError, match="'Old': is missing, and 'Branch' is new there"):
        start(changed, *options)
    mapping = '--transform_name_mapping={"Old": "New"}'
    for _ in range(2):  # the second start finds the new name
        result = start(changed, *options, mapping)
        wait_for_numbers(tmp_path, more_than=before)
        assert result.cancel() == PipelineState.STOPPED
        before = len(notes(tmp_path / "numbers"))
    counts = [int(count) for count in notes(tmp_path / "numbers")]
    assert counts == list(range(1, len(counts) + 1))
    assert notes(tmp_path / "Branch")


def test_a_bundle_that_takes_too_long_to_stop_runs_again(tmp_path: Path) -> None:
    def slow(element: Any) -> Any:
        note(tmp_path / "begun")
        if first_time(tmp_path / "first"):
            wait_for_file(tmp_path / "never")
        note(tmp_path / "done")

    def build(pipeline: beam.Pipeline) -> Any:
        return pipeline | beam.Create([1]) | beam.Reshuffle() | beam.Map(slow)

    options = [f"--checkpoint_dir={tmp_path / 'checkpoint'}", "--stop_timeout=0"]
    result = start(build, *options)
    wait_until(lambda: bool(notes(tmp_path / "begun")))
    assert result.cancel() == PipelineState.STOPPED
    assert finished(start(build, *options)).state == PipelineState.DONE
    assert (len(notes(tmp_path / "begun")), len(notes(tmp_path / "done"))) == (2, 1)


def test_a_run_without_a_checkpoint_is_cancelled_and_not_drained(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    result = start(counting(tmp_path), f"--run_dir={runs}", "--cpu_workers=1")
    wait_for_numbers(tmp_path)
    with pytest.raises(OptionError, match="without --checkpoint_dir"):
        result.drain()
    wait_until(lambda: bool(records.run_ids(runs)))
    with pytest.raises(RecordError, match="has no --checkpoint_dir"):
        stop.end(runs, "last", "drain", 60)
    assert stop.end(runs, "last", "stop", 60) == 0
    assert finished(result).state == PipelineState.CANCELLED


def test_another_process_drains_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    result = start(counting(tmp_path), f"--checkpoint_dir={tmp_path / 'checkpoint'}", f"--run_dir={runs}")
    wait_for_numbers(tmp_path)
    assert stop.end(runs, "last", "drain", 60) == 0
    assert finished(result).state == PipelineState.DRAINED
    output = capsys.readouterr()
    assert output.out.endswith(": drained\n")
    assert output.err.startswith("draining run ")
    assert not list(runs.glob("*.request*"))
    with pytest.raises(RecordError, match="is drained, expected one that runs"):
        stop.end(runs, "last", "drain", 60)


def test_a_folder_without_a_checkpoint_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["stop", "empty"]) == 2
    assert "found no checkpoint in it" in capsys.readouterr().err


def test_another_process_ends_a_run_that_has_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tmp_path / "checkpoint"
    options = [f"--checkpoint_dir={checkpoint}", "--run_dir=off", "--cpu_workers=1"]
    with pytest.raises(CheckpointError, match="found no checkpoint in it"):
        stop.end_by_checkpoint(str(tmp_path), "stop", 60)
    result = start(counting(tmp_path), *options)
    wait_for_numbers(tmp_path)
    assert stop.end_by_checkpoint(str(checkpoint), "stop", 60) == 0
    assert finished(result).state == PipelineState.STOPPED
    assert (
        capsys.readouterr().out
        == f"{checkpoint}: stopped; start it again with --checkpoint_dir={checkpoint} to continue\n"
    )
    with pytest.raises(RecordError, match=r"no run uses .*; its last run is stopped"):
        stop.end_by_checkpoint(str(checkpoint), "drain", 60)
    journal.send(checkpoint, journal.IN_CHECKPOINT, "stop")  # it came too late, and is not for the next start

    before = len(notes(tmp_path / "numbers"))
    result = start(counting(tmp_path), *options)
    wait_for_numbers(tmp_path, more_than=before)
    assert stop.end_by_checkpoint(str(checkpoint), "drain", 60) == 0
    assert finished(result).state == PipelineState.DRAINED
    assert capsys.readouterr().out == f"{checkpoint}: drained\n"
    assert not list(checkpoint.glob("*.request*"))


def test_a_second_cancel_ends_a_durable_run_at_once(tmp_path: Path) -> None:
    def slow(element: Any) -> None:
        note(tmp_path / "begun")
        wait_for_file(tmp_path / "never")

    result: Any = start(
        lambda pipeline: pipeline | beam.Create([1]) | beam.Map(slow),
        f"--checkpoint_dir={tmp_path / 'checkpoint'}",
        "--stop_timeout=1h",
    )
    wait_until(lambda: bool(notes(tmp_path / "begun")))
    stopping = threading.Thread(target=result.cancel)
    stopping.start()
    result._run.cancel(at_once=True)
    assert finished(result).state == PipelineState.CANCELLED
    stopping.join(60)
    assert state_in(tmp_path / "checkpoint") == "running"


@pytest.fixture
def disk_that_fails_at_the_end(tmp_path: Path) -> Iterator[None]:
    """Let syncs fail once the checkpoint says that the run has finished, and leave a file that it did not remove."""

    def sync(folder: CheckpointFolder, files: Iterable[str] = ()) -> None:
        if folder.meta()["state"] in ("finished", "drained"):
            left = tmp_path / "checkpoint" / "blocks" / "1" / "left"
            left.parent.mkdir(parents=True, exist_ok=True)
            left.touch()
            raise CheckpointFailed("the disk is full", fix="make room")
        _STOCK_SYNC(folder, files)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointFolder, "sync", sync)
        yield


def assert_does_nothing(checkpoint: Path, build: Callable[[beam.Pipeline], Any], done: Path, state: str) -> None:
    assert state_in(checkpoint) == state
    before = notes(done)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointFolder, "sync", _STOCK_SYNC)
        assert finished(start(build, f"--checkpoint_dir={checkpoint}", "--cpu_workers=1")).state == PipelineState.DONE
    assert notes(done) == before
    assert not list((checkpoint / "blocks").glob("*/*"))


@pytest.mark.usefixtures("disk_that_fails_at_the_end")
def test_a_run_that_fails_once_its_end_is_saved_has_finished(tmp_path: Path) -> None:
    def build(pipeline: beam.Pipeline) -> Any:
        # Nothing in it waits for a checkpoint, so that its end is its first one.
        return pipeline | beam.Impulse() | beam.Map(lambda _: note(tmp_path / "done"))

    checkpoint = tmp_path / "checkpoint"
    with pytest.raises(CheckpointFailed, match="the disk is full"):
        finished(start(build, f"--checkpoint_dir={checkpoint}", "--cpu_workers=1"))
    assert len(notes(tmp_path / "done")) == 1
    assert_does_nothing(checkpoint, build, tmp_path / "done", "finished")


@pytest.mark.usefixtures("disk_that_fails_at_the_end")
def test_a_drain_that_fails_once_its_end_is_saved_leaves_a_drained_run(tmp_path: Path) -> None:
    checkpoint, build = tmp_path / "checkpoint", counting(tmp_path)
    result: Any = start(build, f"--checkpoint_dir={checkpoint}", "--cpu_workers=1")
    wait_for_numbers(tmp_path)
    result.drain()
    with pytest.raises(CheckpointFailed, match="the disk is full"):
        finished(result)
    assert_does_nothing(checkpoint, build, tmp_path / "numbers", "drained")
