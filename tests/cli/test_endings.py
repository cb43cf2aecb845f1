"""Tests of how commands end: signals, and output that takes only some characters."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import apache_beam as beam
import pytest

from luminosity.cli import runs
from luminosity.cli.common import exits
from luminosity.cli.enrich.shown import Report, print_report
from luminosity.cli.main import main
from luminosity.engine.process import Terminated, cancel_on_sigterm
from tests.runners import IS_REFERENCE, run

_WAIT_S = 60.0
NO_METRICS: Any = SimpleNamespace(query=lambda: {"counters": []})


def kill_and_wait(number: int) -> None:
    os.kill(os.getpid(), number)
    threading.Event().wait(_WAIT_S)  # the signal ends it at once


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")]
)
@pytest.mark.parametrize("command", ["show", "run"])
def test_a_signal_ends_a_command(
    command: str,
    number: int,
    code: int,
    word: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(runs, "find", lambda *_: kill_and_wait(number))
    script = tmp_path / "script.py"
    script.write_text(f"from tests.cli.test_endings import kill_and_wait\nkill_and_wait({int(number)})\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main([command, "last" if command == "show" else str(script)]) == code
    assert capsys.readouterr().err.endswith(f"lum {command}: {word}\n")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_during_a_garbage_collection_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def callback(*_: Any) -> None:
        if not sent:
            sent.append(1)
            os.kill(os.getpid(), signal.SIGTERM)

    def collect(*_: Any) -> None:
        gc.callbacks.append(callback)
        try:
            gc.collect()
            threading.Event().wait(_WAIT_S)
        finally:
            gc.callbacks.remove(callback)

    monkeypatch.setattr(runs, "find", collect)
    assert main(["show", "last"]) == 143


def ascii_output(errors: str = "strict") -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors=errors, write_through=True)


def written(stream: io.TextIOWrapper) -> str:
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode("ascii")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape", "backslashreplace"])
def test_characters_that_the_output_lacks(errors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    output = ascii_output(errors)
    monkeypatch.setattr(sys, "stdout", output)
    exits.print_any_character()
    print("MMD² … 3 → 4 · ├─ h\u00e9llo \u65e5 \udc80")
    assert written(output) == "MMD^2 ... 3 -> 4 - +- h\\xe9llo \\u65e5 \\udc80\n"


def test_a_choice_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    output = ascii_output("replace")
    monkeypatch.setattr(sys, "stdout", output)
    exits.print_any_character()
    print("h\u00e9llo")
    assert written(output) == "h?llo\n"


def test_sigterm_without_a_run_ends_the_process_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    cancel_on_sigterm(lambda: "")
    sent: list[tuple[int, int]] = []
    handler: Any = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(os, "kill", lambda *what: sent.append(what))
    handler(signal.SIGTERM, None)
    assert sent == [(os.getpid(), signal.SIGTERM)]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_handler_of_a_script_stays() -> None:
    own: Any = lambda *_: None  # noqa: E731
    signal.signal(signal.SIGTERM, own)
    cancel_on_sigterm(lambda: "the run is cancelled")
    assert signal.getsignal(signal.SIGTERM) is own


@pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does")
def test_sigterm_ends_a_debugged_run() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def build(pipeline: beam.Pipeline) -> None:
        _ = pipeline | beam.Create([int(signal.SIGTERM)]) | beam.Map(kill_and_wait)

    with pytest.raises(Terminated) as caught:
        run(build, "--debug")
    assert caught.value.code == 143


def closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize(
    ("output", "error"),
    [
        (closed_pipe, ""),
        (
            lambda: os.open("/dev/full", os.O_WRONLY),
            "lum: standard output can't be written and is lost: No space left on device\n",
        ),
    ],
    ids=["closed pipe", "full disk"],
)
def test_a_report_that_cannot_be_printed_fails_no_run(
    output: Callable[[], int], error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table is written by then; Rich would exit with 1, or raise."""
    with open(output(), "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert print_report(Report([], "out"), NO_METRICS, 1.5) == 0
        print("more", flush=True)  # goes nowhere
    assert capsys.readouterr().err == error


def test_a_report_has_no_blanks_at_the_ends_of_lines(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(Report([], "out"), NO_METRICS, 1.5)
    assert capsys.readouterr().out == "written  nothing\ntook     1.5 s, including start-up\n"
