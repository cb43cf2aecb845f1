"""Tests of what a run under way and a long run leave: journals, what records keep, and how other processes follow."""

from __future__ import annotations

import itertools
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from luminosity.errors import RecordError
from luminosity.events import (
    BundleRetried,
    CheckpointDone,
    Event,
    InferenceView,
    MetricView,
    PoolInfo,
    PoolView,
    RunEnded,
    RunStarted,
    Snapshot,
    StageInfo,
    StageView,
    WorkerLost,
    WorkerView,
)
from luminosity.runs import recorder as recorder_module
from luminosity.runs.journal import path_beside
from luminosity.runs.recorder import Recorder
from luminosity.runs.records import Damaged, Record, load, path_of
from luminosity.runs.subscribers import Follower
from luminosity.runs.thinning import Happenings, Samples, Thinned

RUN = "20260101T000000-abcdef"
STARTED = RunStarted(RUN, 0.0, "pipeline.py", 1.0, (), (), queue_limit=1)
HOURS_12 = 12 * 3600.0


def at(seconds: float, **more: Any) -> Snapshot:
    return Snapshot(RUN, seconds, (), (), **more)


def lost(seconds: float) -> WorkerLost:
    return WorkerLost(RUN, seconds, "w1", "cpu", "was killed by SIGKILL", bundles=1)


def ended(seconds: float) -> RunEnded:
    return RunEnded(RUN, seconds, "done", at(seconds))


def begun(folder: Path, *events: Event) -> Recorder:
    recorder = Recorder(folder)
    for event in (STARTED, *events):
        recorder(event)
    return recorder


def loaded(folder: Path, *, only_last: bool = False) -> Record:
    record = load(path_of(folder, RUN), only_last=only_last)
    assert isinstance(record, Record), record
    return record


def journal_of(folder: Path) -> Path:
    return path_beside(path_of(folder, RUN))


@pytest.fixture
def small_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals of about 20 events."""
    monkeypatch.setattr(recorder_module, "_MOST_JOURNAL_BYTES", 2000)


def test_a_run_under_way_is_read_up_to_its_last_second(tmp_path: Path) -> None:
    recorder = begun(tmp_path, at(0.0), at(0.2), lost(0.5), at(0.9), at(1.0), at(1.9))
    record = loaded(tmp_path)
    assert [snapshot.seconds for snapshot in record.snapshots] == [0.0, 1.0]
    assert record.happenings == (lost(0.5),)
    assert (record.state, record.number) == ("running", 4)
    assert stat.S_IMODE(journal_of(tmp_path).stat().st_mode) == 0o600
    assert [snapshot.seconds for snapshot in loaded(tmp_path, only_last=True).snapshots] == [1.0]
    recorder(ended(2.0))
    record = loaded(tmp_path)
    assert (record.state, record.number, record.happenings) == ("done", 5, (lost(0.5),))
    assert os.listdir(tmp_path) == [f"{RUN}.json"]


@pytest.mark.usefixtures("small_journals")
def test_each_event_is_read_once_wherever_it_lies(tmp_path: Path) -> None:
    recorder = begun(tmp_path)
    for number in range(200):
        recorder(lost(float(number)))
        if number % 7 == 0:
            assert [event.seconds for event in loaded(tmp_path).happenings] == list(range(number + 1))
    # A reader may have read the old journal when the record takes its events.
    journal = journal_of(tmp_path).read_bytes()
    recorder(ended(200.0))
    journal_of(tmp_path).write_bytes(journal)
    assert [event.seconds for event in loaded(tmp_path).happenings] == list(range(200))
    assert loaded(tmp_path).state == "done"


def test_a_line_that_is_not_complete_is_ignored_and_read_later(tmp_path: Path) -> None:
    begun(tmp_path, at(0.0), at(1.0))
    journal = journal_of(tmp_path)
    whole = journal.read_bytes()
    follower = Follower(tmp_path, RUN)
    journal.write_bytes(whole[:-5])
    assert [event.seconds for _, event in follower.news()] == [0.0, 0.0]
    assert len(loaded(tmp_path).snapshots) == 1
    with journal.open("ab") as file:
        file.write(whole[-5:])
    assert [(number, event.seconds) for number, event in follower.news()] == [(3, 1.0)]
    follower.close()


@pytest.mark.usefixtures("small_journals")
def test_a_follower_sees_every_event_once_over_journals_and_the_end(tmp_path: Path) -> None:
    recorder = begun(tmp_path)
    follower = Follower(tmp_path, RUN)
    seen = follower.news()
    for number in range(100):
        recorder(lost(float(number)))
        if number % 13 == 0:
            seen += follower.news()
            assert not follower.has_missed
    assert follower.state() == "running"
    recorder(ended(100.0))
    seen += follower.news()
    assert [number for number, _ in seen] == list(range(1, 103))
    assert [event.seconds for _, event in seen] == [0.0, *map(float, range(100)), 100.0]
    assert (follower.state(), follower.news()) == ("done", [])
    # Another one continues in the middle, from the record.
    assert [number for number, _ in Follower(tmp_path, RUN, after=60).news()] == list(range(61, 103))


@pytest.mark.usefixtures("small_journals")
def test_a_follower_that_was_away_gets_what_the_record_keeps(tmp_path: Path) -> None:
    recorder = begun(tmp_path, at(0.0))
    follower = Follower(tmp_path, RUN)
    assert follower.record().number == 2
    assert follower.news() == []
    follower.close()
    for number in range(1, 1000):
        recorder(CheckpointDone(RUN, float(number), number, 0.1))
    assert [number for number, _ in Follower(tmp_path, RUN, after=998).news()] == [999, 1000, 1001]
    later = Follower(tmp_path, RUN, after=2)
    numbers = [number for number, _ in later.news()]
    assert later.has_missed
    assert numbers[:3] == [3, 4, 5]
    assert numbers[-1] == 1001
    assert 500 <= len(numbers) < 999
    later.close()


def test_a_follower_of_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no run is recorded in"):
        Follower(tmp_path, RUN).record()
    path_of(tmp_path, RUN).write_text("{}")
    with pytest.raises(RecordError, match="is damaged"):
        Follower(tmp_path, RUN).news()


def test_records_of_older_and_newer_versions_can_be_read(tmp_path: Path) -> None:
    begun(tmp_path, at(0.0), lost(0.5), at(1.0))(ended(2.0))
    path = path_of(tmp_path, RUN)
    content = json.loads(path.read_text())
    numbered = json.dumps(content)
    for name in ("number", "tracebacks"):
        del content[name]
    for event in (content["started"], content["ended"], *content["happenings"], *content["snapshots"]):
        del event["event_number"]
    path.write_text(json.dumps(content))  # as the first version wrote it
    assert [number for number, _ in Follower(tmp_path, RUN).news()] == [1, 2, 3, 4, 5]
    assert loaded(tmp_path).happenings == (lost(0.5),)
    later = json.loads(numbered)
    later["new"] = later["happenings"][0]["new"] = 1
    later["happenings"].append({"event": "OfALaterVersion", "run": RUN, "seconds": 1.0, "event_number": 9})
    path.write_text(json.dumps(later))
    assert loaded(tmp_path).happenings == (lost(0.5),)
    assert len(Follower(tmp_path, RUN).news()) == 5


def test_a_journal_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    begun(tmp_path, at(0.0))
    journal_of(tmp_path).rename(tmp_path / "elsewhere")
    journal_of(tmp_path).symlink_to(tmp_path / "elsewhere")
    assert isinstance(load(path_of(tmp_path, RUN)), Damaged)


def test_user_metrics_of_skipped_snapshots_and_old_samples_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = (MetricView("counter", "Step", "ns", "n", value=7),)
    stage = StageView("s1", "busy", elements=3, bundle_seconds=(0.5,), bundle_elements=(3,))
    recorder = begun(tmp_path, Snapshot(RUN, 0.0, (stage,), ()), at(0.4, metrics=counted))
    recorder(Snapshot(RUN, 1.0, (stage,), ()))
    assert journal_of(tmp_path).read_text().count("bundle_seconds") == 1
    last = loaded(tmp_path).last
    assert last is not None
    assert (last.seconds, last.stages) == (1.0, (stage,))
    recorder(Snapshot(RUN, 10.0, (stage,), ()))
    monkeypatch.setattr(recorder_module, "_MOST_JOURNAL_BYTES", 0)
    recorder(at(11.0, metrics=counted))
    recorder(Snapshot(RUN, 12.0, (stage,), ()))
    last = loaded(tmp_path).last
    assert last is not None
    assert (last.seconds, last.metrics, last.stages) == (12.0, counted, (stage,))


@pytest.mark.parametrize("count", [1, 200, 201, 5000])
def test_snapshots_are_thinned_out_evenly(count: int) -> None:
    thinned = Thinned(most=200, most_bytes=10**6)
    for number in range(count):
        thinned.add({"event": "Snapshot", "seconds": 0.2 * number, "stages": []})
    seconds = [json.loads(kept)["seconds"] for kept in thinned.kept]
    assert min(count, 100) <= len(seconds) <= 200
    assert seconds[0] == 0.0
    assert seconds[-1] > 0.9 * 0.2 * (count - 1) or count == 1
    gaps = [after - before for before, after in itertools.pairwise(seconds)]
    assert max(gaps, default=1.0) <= 2.1 * min(gaps, default=1.0)


def test_the_first_and_the_last_events_of_each_kind_are_kept() -> None:
    happenings = Happenings(most=10, most_bytes=10**6)
    for number in range(100):
        happenings.add(number, {"event": "LogMessage", "at": number})
    happenings.add(100, {"event": "WorkerLost", "at": 100})
    kept = [json.loads(text)["at"] for text in happenings.kept]
    assert kept == [0, 1, 2, 3, 4, 95, 96, 97, 98, 99, 100]
    assert happenings.left_out == {"LogMessage": 90}


def test_what_is_taken_out_of_a_snapshot_is_in_the_next_one_that_keeps_it() -> None:
    samples = Samples(every_s=10.0)
    found: list[int] = []
    for second in range(1, 32):
        metrics = {"metrics": [second]} if second % 10 == 0 else {}
        snapshot = {"event": "Snapshot", "seconds": float(second), "stages": [], **metrics}
        samples.thin(snapshot)
        found += snapshot.get("metrics", [])
    assert found == [10, 20, 30]  # in the snapshots of seconds 11, 21 and 31


def test_equal_tracebacks_are_kept_once_and_others_within_the_bytes(tmp_path: Path) -> None:
    def retried(number: int, traceback: str) -> BundleRetried:
        return BundleRetried(RUN, float(number), "Step", "ValueError", 1, 1, traceback)

    same = [retried(number, "same\n" * 5000) for number in range(100)]
    recorder = begun(tmp_path, *same)
    assert loaded(tmp_path).happenings == tuple(same)
    assert journal_of(tmp_path).stat().st_size < 60_000
    for number in range(300):
        recorder(retried(number, f"{number:04}\n" * 5000))
    recorder(ended(400.0))
    record = loaded(tmp_path)
    assert path_of(tmp_path, RUN).stat().st_size < 200_000
    assert record.happenings[:100] == tuple(same)
    assert record.happenings[-1] == retried(299, "0299\n" * 5000)
    assert len(record.happenings) + record.left_out == 400


def test_a_run_of_twelve_hours_with_a_hundred_stages_stays_small(tmp_path: Path) -> None:
    infos = tuple(StageInfo(f"s{n}", f"Read + Clean {n}", "cpu") for n in range(100))
    recorder = Recorder(tmp_path)
    recorder(RunStarted(RUN, 0.0, "p.py", 1.0, infos, (PoolInfo("cpu", 16, 1),), queue_limit=1))
    samples, sizes = (0.12345,) * 32, (1000,) * 32

    def snapshot(seconds: float) -> Snapshot:
        inference = (InferenceView("Score", 10**6, 10**4, 10**9, 10**9, 4096, seconds, seconds, seconds, seconds),)
        stages = tuple(
            StageView(info.id, "busy", (), int(seconds * 1000), 1234.5, 500, 5000, 1, 1, seconds, 0.5, 60.0, inference)
            for info in infos
        )
        stages = (*stages[1:], StageView("s0", "busy", bundle_seconds=samples, bundle_elements=sizes))
        workers = tuple(WorkerView(f"w{n}", "cpu", n, ("s1",), seconds, 1 << 30, 1 << 30, 1 << 29) for n in range(16))
        return Snapshot(RUN, seconds, stages, (PoolView("cpu", 16, 16, 16, seconds),), workers=workers)

    for number in range(250):
        recorder(snapshot(HOURS_12 * number / 250))
        for more in range(20):
            recorder(lost(HOURS_12 * number / 250 + more))
        if number % 20 == 0:
            assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 5_000_000
    recorder(RunEnded(RUN, HOURS_12, "done", snapshot(HOURS_12)))
    assert path_of(tmp_path, RUN).stat().st_size < 3_500_000
    record = loaded(tmp_path)
    seconds = [each.seconds for each in record.snapshots]
    assert len(seconds) >= 75
    assert seconds[0] == 0.0
    assert seconds[-1] > 0.9 * HOURS_12
    assert {len(each.stages) for each in record.snapshots} == {100}
    assert len(record.happenings) + record.left_out == 5000
    assert record.left_out_of == {"WorkerLost": record.left_out}
