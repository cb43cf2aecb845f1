"""Tests of the progress that ``lum enrich`` shows, with made-up events."""

from __future__ import annotations

import io
import sys

import pytest

from luminosity.cli.enrich.shown import RowProgress
from luminosity.events import Event, InferenceView, RunEnded, Snapshot, StageView
from luminosity.io.reading.readers import RowCount


def snapshot(seconds: float, *rows: int) -> Snapshot:
    """Return a moment at which each model has computed this many rows."""
    views = tuple(InferenceView(step=f"Enrich/Infer {number}", inferences=each) for number, each in enumerate(rows))
    return Snapshot("id", seconds, (StageView("s", "busy", inference=views),), ())


def show(progress: RowProgress, *events: Event) -> None:
    for event in (*events, RunEnded("id", 1e4, "done", snapshot(1e4))):
        progress(event)


def test_lines_tell_rows_rate_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    progress = RowProgress(models=2, total=RowCount(4000, is_exact=False), is_line=False)
    show(progress, snapshot(1, 0), snapshot(5, 0), snapshot(6, 100), snapshot(15, 500, 400), snapshot(25, 1400, 1600))
    assert capsys.readouterr().err.splitlines() == [
        "lum enrich 5.0 s: starting, no row is done yet",
        "lum enrich 15 s: 400 of about 4,000 rows (10%) · 29 rows/s · about 2 min 6 s left",
        "lum enrich 25 s: 1,400 of about 4,000 rows (35%) · 58 rows/s · about 45 s left",
    ]


def test_there_are_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    progress = RowProgress(models=1, total=None, is_line=False)
    show(progress, *(snapshot(tenth / 5, tenth) for tenth in range(5 * 3600)))
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].endswith(" rows · 5 rows/s")
    assert 10 < len(lines) < 100


def test_a_short_run_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    show(RowProgress(1, None, is_line=False), *(snapshot(tenth / 10, tenth) for tenth in range(45)))
    assert capsys.readouterr() == ("", "")


def test_more_rows_than_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    show(RowProgress(1, RowCount(10, is_exact=False), is_line=False), snapshot(1, 0), snapshot(6, 50))
    assert capsys.readouterr().err == "lum enrich 6.0 s: 50 rows · 10 rows/s\n"


def test_one_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeTerminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    progress = RowProgress(1, RowCount(100, is_exact=True), is_line=True)
    for event in (snapshot(0.5, 10), snapshot(2, 10), snapshot(4, 50)):
        progress(event)
    assert "lum enrich 4.0 s: 50 of 100 rows (50%) · 11 rows/s · about 4.4 s left" in stream.getvalue()
    progress(RunEnded("id", 5, "done", snapshot(5)))
    assert sys.stderr is stream
    assert stream.getvalue().count("\n") < 3


def test_a_closed_stream_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    show(RowProgress(1, None, is_line=False), snapshot(6, 1), snapshot(60, 2))
