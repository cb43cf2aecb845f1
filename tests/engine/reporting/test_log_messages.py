"""Tests of warnings and errors that become events."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from luminosity.engine.reporting.log_messages import LogCapture, Logged, LogTally, bounded_traceback

_LOGGER = logging.getLogger("tests.log_messages")


@pytest.fixture
def found() -> Iterator[list[Logged]]:
    """The messages that a capture emits while the test runs."""
    emitted: list[Logged] = []
    before = logging.getLogRecordFactory()
    capture = LogCapture(emitted.append, lambda url: False)
    capture.start()
    yield emitted
    capture.stop()
    assert logging.getLogRecordFactory() is before


def test_warnings_and_errors_of_this_process_are_captured_without_secrets(found: list[Logged]) -> None:
    _LOGGER.info("nothing of note")
    _LOGGER.warning("no answer from %s", "http://me:pw@host/x")
    try:
        raise KeyError("sk-0123456789abcdef")
    except KeyError:
        _LOGGER.exception("it failed")
    warning, error = found
    assert (warning.level, warning.message) == ("warning", "no answer from http://***@host/x")
    assert (warning.logger, warning.worker, warning.traceback) == ("tests.log_messages", "", "")
    assert (error.level, error.message) == ("error", "it failed")
    assert "test_log_messages.py" in error.traceback
    assert "sk-0123456789abcdef" not in error.traceback


def test_what_the_user_sees_stays_the_same(found: list[Logged], caplog: pytest.LogCaptureFixture) -> None:
    class Odd:
        def __str__(self) -> str:
            raise ValueError("no text")

    _LOGGER.warning("once")
    assert [record.getMessage() for record in caplog.records] == ["once"]
    logging.makeLogRecord({"msg": "without a level"})
    with pytest.raises(ValueError, match="no text"):  # pytest's handler raises what others would print
        _LOGGER.warning("%s", Odd())
    assert [logged.message for logged in found] == ["once", "%s"]


def test_a_factory_that_another_library_puts_around_is_kept_and_called_once() -> None:
    emitted: list[Logged] = []
    before = logging.getLogRecordFactory()
    first, second = (LogCapture(emitted.append, lambda url: True) for _ in range(2))
    first.start()
    inner = logging.getLogRecordFactory()

    def other(*arguments: Any, **named: Any) -> logging.LogRecord:
        return inner(*arguments, **named)

    try:
        logging.setLogRecordFactory(other)
        first.stop()
        assert logging.getLogRecordFactory() is other
        second.start()
        _LOGGER.warning("through both")
        second.stop()
        assert [logged.message for logged in emitted] == ["through both"]
    finally:
        logging.setLogRecordFactory(before)


def test_equal_messages_are_counted_with_longer_and_longer_pauses() -> None:
    tally = LogTally()
    warning = Logged("warning", "again", place=("a.py", 1))
    events: list[tuple[int, int]] = []
    for second in range(3600):
        now = [each for each in (tally.add(warning, second),) if each is not None]
        events += [(second, logged.count) for logged in now + tally.due(second)]
    events += [(3600, logged.count) for logged in tally.due(3600, is_last=True)]
    assert [second for second, _ in events] == [0, 5, 15, 35, 75, 155, 315, 635, 1275, 2555, 3600]
    assert sum(count for _, count in events) == 3600


def test_a_place_with_ever_new_messages_and_very_many_places_are_bounded() -> None:
    tally = LogTally()
    at_once = [tally.add(Logged("warning", f"file {n}", place=("a.py", 1)), 0.0) for n in range(100)]
    assert sum(logged is not None for logged in at_once) == 50
    (rest,) = tally.due(5.0)
    assert (rest.message, rest.count, rest.left_out) == ("50 more warnings of a.py:1 were left out", 1, 50)
    others = [tally.add(Logged("error", "no", place=("b.py", line)), 6.0) for line in range(1000)]
    assert sum(logged is not None for logged in others) == 500 - 51
    assert tally.due(1000.0) == []
    (rest,) = tally.due(1000.0, is_last=True)
    assert rest.left_out == 1000 - (500 - 51)


def test_only_messages_with_the_same_text_count_as_equal() -> None:
    emitted: list[Logged] = []
    capture = LogCapture(emitted.append, lambda url: True)
    capture.start()
    for number in range(40):
        _LOGGER.warning("file %d is empty", number)
    for number in range(3):
        _LOGGER.warning("%s", "x" * 3000 + str(number // 2))  # it is cut, and two are equal
    capture.stop()
    texts = [logged.message for logged in emitted if logged.message.startswith("file")]
    assert texts == [f"file {number} is empty" for number in range(40)]
    assert [logged.count for logged in emitted if logged.message.startswith("x")] == [1, 1, 1], "one of them again"
    assert sum(logged.count for logged in emitted) == 43


def test_a_long_traceback_loses_its_middle() -> None:
    text = "\n".join(["Traceback (most recent call last):", *(f"  frame {n}" for n in range(5000)), "ValueError: end"])
    cut = bounded_traceback(text)
    assert len(cut) <= 16_000
    assert cut.startswith("Traceback")
    assert cut.endswith("ValueError: end")
    assert "…" in cut
