"""Log lines on the page: searched, in pages, as text; from a real run, too."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest

from luminosity.operate.page.app import Sources, app_of
from luminosity.runs import records
from luminosity.runs.log_lines import LogLine, LogWriter, paths_of
from luminosity.runs.recorder import Recorder
from tests.operate.page.asking import ACCESS, ask
from tests.operate.page.one_run import RUN, STARTED, ended
from tests.runners import IS_REFERENCE, run

_LOGS = f"/api/runs/{RUN}/logs"
_TEXT = f"/api/runs/{RUN}/log.txt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    recorder = Recorder(tmp_path / "runs")
    recorder(STARTED)
    recorder(ended())
    return tmp_path / "runs"


@pytest.fixture
def app(folder: Path) -> Any:
    return app_of(Sources(folder), ACCESS)


@pytest.fixture
def lines(folder: Path) -> None:
    writer = LogWriter(records.path_of(folder, RUN))
    for number in range(250):
        writer.write(LogLine(number / 10, "info", f"row {number}", "my.code", f"w{number % 2}", "Parse"))
    writer.write(LogLine(30.0, "warning", "step 'Infer' failed, attempt 1 of 4: ValueError: no stars", "luminosity"))
    writer.write(LogLine(31.0, "warning", "worker w7 of pool 'cpu' was killed by SIGKILL", "luminosity"))
    writer.write(
        LogLine(32.0, "error", "Boom \x1b[31m", "my.code", "w1", "Infer/Load", "Traceback …\nValueError: boom")
    )
    writer.close()


def found(app: Any, **asked: str | float) -> list[int]:
    query = "&".join(f"{name}={value}" for name, value in asked.items())
    return [line["number"] for line in ask(app, f"{_LOGS}?{query}").json["lines"]]


def test_a_run_without_lines_says_so(app: Any) -> None:
    assert ask(app, _LOGS).json == {"is_kept": False}
    assert ask(app, _TEXT).status == 404


def test_lines_come_in_pages_from_the_newest_on(app: Any, lines: None) -> None:
    first = ask(app, _LOGS).json
    assert [line["number"] for line in first["lines"]] == list(range(253, 153, -1))
    assert (first["has_older"], first["found"], first["newer"], first["dropped"]) == (True, 253, 0, 0)
    assert (first["steps"], first["workers"]) == (["Infer/Load", "Parse"], ["w0", "w1"])
    last = ask(app, f"{_LOGS}?before=54").json
    assert [line["number"] for line in last["lines"]] == list(range(53, 0, -1))
    assert (last["has_older"], last["newer"]) == (False, 200)


def test_lines_are_searched_by_words_level_step_worker_and_time(app: Any, lines: None) -> None:
    assert found(app, words="row 249") == [250]
    assert found(app, words="BOOM%20infer") == [253]
    assert found(app, words="nothing") == []
    assert found(app, level="warning") == [253, 252, 251]
    assert found(app, level="error") == [253]
    assert found(app, step="Infer") == [253, 251]  # also what the engine says of it
    assert found(app, step="Infer/Load/Deeper") == [253]
    assert found(app, worker="w7") == [252]
    assert found(app, worker="w1", level="error") == [253]
    assert found(app, until=1, step="Parse") == list(range(11, 0, -1))


def test_lines_as_text(app: Any, lines: None, folder: Path) -> None:
    answer = ask(app, f"{_TEXT}?level=warning")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["content-disposition"] == f'attachment; filename="{RUN}.log"'
    text = answer.body.decode().splitlines()
    assert len(text) == 5
    assert text[2] == "2026-09-21 14:13:52.000Z ERROR    w1 Infer/Load my.code: Boom  [31m"  # no code of a terminal
    assert text[-1] == "ValueError: boom"
    whole = ask(app, _TEXT).body.decode()
    assert whole.count("\n") == 255
    assert whole.startswith("2026-09-21 14:13:20.000Z INFO     w0 Parse my.code: row 0\n")


def test_what_is_gone_is_said(app: Any, folder: Path) -> None:
    writer = LogWriter(records.path_of(folder, RUN), most_bytes=8_000)
    for number in range(300):
        writer.write(LogLine(number, "info", f"row {number}"))
    page = ask(app, _LOGS).json
    assert page["dropped"] == 300 - page["found"] > 100
    assert ask(app, _TEXT).body.decode().startswith(f"# {page['dropped']} older lines have gone")
    writer.write(LogLine(301, "info", "the newest"))  # a reader sees what comes
    assert ask(app, _LOGS).json["lines"][0]["message"] == "the newest"
    writer.close()


@pytest.mark.parametrize(
    "target",
    [f"{_LOGS}?level=loud", f"{_LOGS}?before=-1", f"{_LOGS}?until=1e9", f"{_TEXT}?level=x", f"{_TEXT}?before=../x"],
)
def test_other_questions_are_refused(app: Any, lines: None, target: str) -> None:
    assert ask(app, target).status == 400


@pytest.mark.parametrize("run_id", ["..%2f..%2fetc", "last", f"{RUN}.log", "20260301T101500-000000", ".."])
def test_only_lines_of_recorded_runs_are_read(app: Any, lines: None, run_id: str) -> None:
    for name in ("logs", "log.txt"):
        assert ask(app, f"/api/runs/{run_id}/{name}").status == 404


def test_lines_go_with_their_record(folder: Path, lines: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("luminosity.runs.recorder._MOST_RUNS", 1)
    monkeypatch.setattr("luminosity.runs.recorder._MOST_PIPELINES", 0)
    Recorder(folder)(replace(STARTED, run="20260302T101500-000000"))
    assert not records.path_of(folder, RUN).exists()
    assert not any(path.exists() for path in paths_of(records.path_of(folder, RUN)))


def _say(number: int) -> int:
    logging.getLogger("my.code").warning("number %d, password=hunter2", number)
    logging.getLogger("my.code").info("not at this level")
    return number


@pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does")
def test_lines_of_workers_and_of_the_failure_are_kept_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUMINOSITY_RUN_DIR", str(tmp_path / "runs"))

    def fail(number: int) -> int:
        raise ValueError(f"api_key=hunter2 {number}")

    with pytest.raises(Exception, match="Fail"):
        run(lambda p: p | beam.Create(range(60), reshuffle=False) | "Say" >> beam.Map(_say) | "Fail" >> beam.Map(fail))
    (run_id,) = records.run_ids(tmp_path / "runs")
    app = app_of(Sources(tmp_path / "runs"), ACCESS)
    page = ask(app, f"/api/runs/{run_id}/logs").json
    assert page["lines"][0].items() >= {"level": "error", "step": "Fail"}.items()
    assert "api_key=***" in page["lines"][0]["traceback"]
    said = ask(app, f"/api/runs/{run_id}/logs?step=Say&words=number").json["lines"]
    assert {line["message"] for line in said} == {"number 0, password=***"}  # each attempt, which the record counts
    assert all(line["worker"] for line in said)
    assert all(b"hunter2" not in path.read_bytes() for path in (tmp_path / "runs").iterdir())
