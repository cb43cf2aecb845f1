"""Tests of records: what they contain, how many are kept, and what a killed run leaves."""

from __future__ import annotations

import json
import logging
import os
import pwd
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import apache_beam as beam
import pytest

from luminosity.cli.common import output
from luminosity.cli.main import main
from luminosity.engine.reporting.reporter import new_run_id
from luminosity.errors import RecordError, StepFailed
from luminosity.events import LogMessage, RunEnded, RunStarted, Snapshot, StageInfo, StageView, StallView
from luminosity.runs import recorder as recorder_module
from luminosity.runs import records
from luminosity.runs.recorder import Recorder, recorder
from luminosity.runs.records import Damaged, Record, find, folder, load, path_of, run_ids
from tests.marks import note, wait_for_file
from tests.processes import wait_for
from tests.runners import IS_REFERENCE, run, start

pytestmark = [
    pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does"),
]


def a_run(run_id: str) -> RunStarted:
    return RunStarted(run_id, 0.0, "pipeline.py", 1.0, (), (), queue_limit=1)


def at(seconds: float, run_id: str = "r") -> Snapshot:
    return Snapshot(run_id, seconds, (), ())


def run_id(number: int) -> str:
    return f"20260101T{number:06}-abcdef"


def record_of(path: Path) -> Record:
    record = load(path)
    assert isinstance(record, Record), record
    return record


def only_record(runs: Path) -> Record:
    (only,) = run_ids(runs)
    return record_of(path_of(runs, only))


def test_a_run_is_recorded_privately_and_without_its_options(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    flags = (f"--run_dir={runs}", "--cpu_workers=1", "--password=hunter2")
    run(lambda p: p | beam.Create(range(30)) | "Check" >> beam.Map(str), *flags)
    record = only_record(runs)
    assert record.state == "done"
    assert [stage.label for stage in record.started.stages] == ["Create", "Create + Check"]
    assert record.last is not None
    assert record.last.stages[-1].elements == 30
    for file in runs.iterdir():  # the record and, as soon as it is complete, the manifest
        if not file.name.endswith(".unfinished"):
            assert "hunter2" not in file.read_text()
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(runs.stat().st_mode) == 0o700


def test_a_narrow_terminal_shows_every_number_and_what_a_stage_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long names share the width with the last column, and a setup is one state however long it has lasted."""
    monkeypatch.setattr(output, "_PIPED_WIDTH", 80)
    label = "[3]: Create + [3]: TableFromRows + [3]: Enrich + [3]: WriteTable + [3]: Another step"
    started = replace(a_run(run_id(1)), stages=(StageInfo("s1", label, "cpu"),))
    record = Recorder(tmp_path)
    record(started)
    for seconds in range(1, 11):
        stall = StallView("Enrich", float(seconds), "setup", is_stalled=False)
        stage = StageView("s1", "busy", elements=1_234_567, busy_seconds=98.0, stalls=(stall,) if seconds < 6 else ())
        last = Snapshot(run_id(1), float(seconds), (stage,), ())
        record(last)
    record(RunEnded(run_id(1), 10.0, "done", last))
    assert main(["show", "last", f"--run_dir={tmp_path}"]) == 0
    table = capsys.readouterr().out.partition("stage  ")[2]
    assert "1,234,567  1 min 38 s" in table
    assert "sets up 50%, busy 50%" in " ".join(line[50:].strip() for line in table.splitlines())
    assert "Another step" in " ".join(line[:40].strip() for line in table.splitlines())


class _Connect(beam.DoFn):
    def process(self, element: int) -> Iterator[int]:
        logging.getLogger("db").warning("retry with password=hunter2")
        raise ConnectionError('{"password": "hunter2"} for postgres://me:hunter2@db, --token hunter2')
        yield element


def test_a_secret_in_an_exception_or_a_log_is_neither_recorded_nor_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StepFailed) as caught:
        run(lambda p: p | beam.Create([0]) | "Connect" >> beam.ParDo(_Connect()), f"--run_dir={tmp_path}")
    assert "hunter2" not in f"{caught.value} {caught.value.traceback}"
    assert "ConnectionError" in str(caught.value)
    for path in tmp_path.iterdir():
        assert "hunter2" not in path.read_text(), path
    record = only_record(tmp_path)
    assert any(isinstance(event, LogMessage) and "password=***" in event.message for event in record.happenings)
    assert main(["show", "last", f"--run_dir={tmp_path}"]) == 0
    assert "hunter2" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mode", "expected"), [(0o777, "can write there"), (0o1777, "can put files there"), (0o700, "")]
)
def test_a_folder_that_others_can_write_to_is_named_with_mode_and_owner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, expected: str
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    runs.chmod(mode)
    Recorder(runs)(a_run(run_id(1)))
    owner = pwd.getpwuid(os.geteuid()).pw_name
    assert (f"{runs} (mode {mode:04o}, owner {owner}, " in caplog.text) == bool(expected)
    assert expected in caplog.text
    assert run_ids(runs) == [run_id(1)], "the run is recorded all the same"


def test_a_failed_run_is_recorded_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(StepFailed):
        run(lambda p: p | beam.Create([0]) | "Divide" >> beam.Map(lambda n: 1 // n), f"--run_dir={tmp_path}")
    record = only_record(tmp_path)
    assert record.ended is not None
    assert record.state == "failed"
    assert record.ended.failure.startswith("step 'Divide' failed 4 times: ZeroDivisionError")
    assert len(record.happenings) >= 3


@pytest.mark.parametrize("off", [("--run_dir=off",), ()])
def test_recording_can_be_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off: tuple[str, ...]) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LUMINOSITY_RUN_DIR", str(tmp_path / "runs") if off else "off")
    run(lambda p: p | beam.Create([1]), "--cpu_workers=1", *off)
    assert list(tmp_path.iterdir()) == []


def test_where_runs_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LUMINOSITY_RUN_DIR")
    assert folder(None) == tmp_path / ".luminosity" / "runs"
    monkeypatch.setenv("LUMINOSITY_RUN_DIR", "/elsewhere")
    assert folder(None) == Path("/elsewhere")
    assert folder("~/mine") == tmp_path / "mine"
    assert folder("off") is None


def test_a_folder_that_cannot_be_written_is_named_once_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING, logger="luminosity"):
        result = run(lambda p: p | beam.Create(range(5)), f"--run_dir={tmp_path}/file/runs")
    assert result.state == "DONE"
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("luminosity")]
    assert f"{tmp_path}/file/runs" in warning
    assert "--run_dir=off" in warning


def test_a_user_without_a_home_runs_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("LUMINOSITY_RUN_DIR")
    monkeypatch.setattr(Path, "home", no_home)
    assert recorder(None) is None
    assert "not recorded" in caplog.text


def test_a_run_under_way_is_seen_as_running(tmp_path: Path) -> None:
    started, release = tmp_path / "started", tmp_path / "release"

    def hold(n: int) -> None:
        note(started)
        wait_for_file(release)

    result = start(lambda p: p | beam.Create([1]) | beam.Map(hold), f"--run_dir={tmp_path}/runs")
    try:
        assert wait_for(lambda: started.exists() and run_ids(tmp_path / "runs"), timeout_s=60)
        assert only_record(tmp_path / "runs").state == "running"
    finally:
        release.touch()
        result.wait_until_finish()


_KILLED = """
import os, signal
import apache_beam as beam
from luminosity import LuminosityRunner, Snapshot

def end(event):
    if isinstance(event, Snapshot) and any(n.endswith(".json") for n in os.listdir(os.environ["LUMINOSITY_RUN_DIR"])):
        os.kill(os.getpid(), signal.SIGKILL)

with beam.Pipeline(runner=LuminosityRunner(on_event=end)) as pipeline:
    pipeline | beam.Create(range(10)) | beam.Map(lambda n: __import__("time").sleep(1))
"""


def test_a_killed_run_is_seen_as_lost(tmp_path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED],
        env={**os.environ, "LUMINOSITY_RUN_DIR": str(tmp_path)},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    record = only_record(tmp_path)
    assert record.state == "lost"
    assert record.ended is None


def test_a_process_that_took_over_the_number_is_not_the_run(tmp_path: Path) -> None:
    Recorder(tmp_path)(a_run(run_id(1)))
    path = path_of(tmp_path, run_id(1))
    assert record_of(path).state == "running"
    content = json.loads(path.read_text())
    content["process"]["began"] = "1"
    path.write_text(json.dumps(content))
    assert record_of(path).state == "lost"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_killed_run_is_lost_before_its_parent_takes_notice(tmp_path: Path) -> None:
    Recorder(tmp_path)(a_run(run_id(1)))
    path = path_of(tmp_path, run_id(1))
    content = json.loads(path.read_text())
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
    path.write_text(json.dumps(content | {"process": content["process"] | {"pid": process.pid, "began": began}}))
    try:
        assert record_of(path).state == "running"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # the process has ended and keeps its number
        assert record_of(path).state == "lost"
    finally:
        process.kill()
        process.communicate()


def test_a_run_that_ends_while_its_record_is_read_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Recorder(tmp_path)
    record(a_run(run_id(1)))

    def is_alive(*_: object) -> bool:
        """Let the run write its end and exit between the reading of the record and the look at its process."""
        record(RunEnded(run_id(1), 2.0, "done", at(2.0), ""))
        return False

    monkeypatch.setattr(records, "is_alive", is_alive)
    assert only_record(tmp_path).state == "done"


def test_runs_of_the_same_second_are_listed_by_their_start(tmp_path: Path) -> None:
    second = datetime(2026, 1, 1, tzinfo=timezone.utc)
    ids = [new_run_id(second.replace(microsecond=each)) for each in (0, 1_000, 400_000, 999_999)]
    for each in ids:
        Recorder(tmp_path)(a_run(each))
    assert run_ids(tmp_path) == ids[::-1]


def test_the_newest_runs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "_MOST_RUNS", 5)
    (tmp_path / "notes.txt").write_text("the user's own")
    for number in range(12):
        a_whole_run(tmp_path, number)
    assert run_ids(tmp_path) == [run_id(number) for number in range(11, 6, -1)]
    assert (tmp_path / "notes.txt").exists()


def a_whole_run(runs: Path, number: int, where: str = "/jobs") -> None:
    recorder = Recorder(runs)
    recorder(replace(a_run(run_id(number)), folder=where))
    recorder(RunEnded(run_id(number), 1.0, "done", at(1.0)))


def test_many_runs_of_one_pipeline_remove_no_record_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "_MOST_RUNS", 3)
    monkeypatch.setattr(recorder_module, "_MOST_PIPELINES", 2)
    Recorder(tmp_path)(a_run(run_id(0)))  # it goes on, such as a stream
    for number, where in enumerate(["/a", "/b", "/b", "/c", "/d", "/d", "/d", "/d"], start=1):
        a_whole_run(tmp_path, number, where)
    assert run_ids(tmp_path) == [run_id(number) for number in (8, 7, 6, 4, 3, 0)], "the newest of /c and /b stay"
    assert len(list(tmp_path.glob("*.journal.jsonl"))) == 1


def test_what_was_never_finished_is_removed_after_a_while(tmp_path: Path) -> None:
    old, journal, new = (tmp_path / f"{run_id(1)}.{end}.unfinished" for end in ("json", "journal.jsonl", "2.json"))
    for path in (old, journal, new):
        path.touch()
    for path in (old, journal):
        os.utime(path, (0, 0))
    Recorder(tmp_path)(a_run(run_id(2)))
    assert [path.exists() for path in (old, journal, new)] == [False, False, True]


@pytest.fixture
def three_runs(tmp_path: Path) -> Path:
    for name in ("20260101T000000-aaaaaa", "20260101T000001-aabbbb", "20260202T000000-cccccc"):
        Recorder(tmp_path)(a_run(name))
    return tmp_path


@pytest.mark.parametrize("wanted", ["last", "20260202T000000-cccccc", "202602", "cccccc"])
def test_a_run_is_found_by_a_part_of_its_id(three_runs: Path, wanted: str) -> None:
    assert find(three_runs, wanted).started.run == "20260202T000000-cccccc"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("202601", r"'202601' matches 2 runs \(20260101T000001-aabbbb, 20260101T000000-aaaaaa\)"),
        ("nothing", "no run 'nothing' in .*; list the recorded runs with `lum runs`"),
    ],
)
def test_a_run_that_is_not_found(three_runs: Path, wanted: str, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        find(three_runs, wanted)


def test_no_run_at_all(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no run is recorded in"):
        find(tmp_path / "nowhere", "last")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "Expecting value"),
        ("[]", "TypeError"),
        ("{}", "format"),
        ('{"format": 99}', "another version"),
        (
            '{"format": 1, "happenings": [], "ended": 1, "snapshots": [], "started": {"event": "Snapshot"}}',
            "not an event",
        ),
        ('{"format": 1, "happenings": ["x"]}', "form of a record"),
        ("[" * 100_000, "form of a record"),
    ],
)
def test_a_damaged_file_is_named(three_runs: Path, content: str, reason: str) -> None:
    path = path_of(three_runs, "20260202T000000-cccccc")
    path.write_text(content)
    damaged = load(path)
    assert isinstance(damaged, Damaged)
    assert reason in damaged.reason
    with pytest.raises(RecordError, match=r"20260202T000000-cccccc\.json is damaged"):
        find(three_runs, "last")
