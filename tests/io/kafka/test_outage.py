"""The log says now and then that brokers are away, and once that they are back: of readers and of writers."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from luminosity.io import outage
from luminosity.io.kafka import producer, read_step
from luminosity.io.outage import OutageLog
from luminosity.testing import KafkaBroker, ScriptedKafka
from tests.io.kafka.steps import WriteStep, values
from tests.io.kafka.test_read_step import Bundle, Log, script, step_of
from tests.streams import wait_for


@pytest.fixture(autouse=True)
def no_lines_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "_told_at", {})


def test_a_line_every_ten_seconds_and_one_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(outage.time, "monotonic", lambda: now)
    logs = [OutageLog("the brokers at broker:9092", "reading") for _ in range(2)]  # of two groups
    for _ in range(60):
        now += 0.5
        for log in logs:
            log.note_silence("refused")
    for log in logs:
        log.note_answer()
        log.note_answer()
    brief = OutageLog("the brokers at broker:9092", "reading")
    brief.note_silence("refused")
    brief.note_answer()
    away = "the brokers at broker:9092 have not answered for {} s (refused); reading goes on when they do"
    back = "the brokers at broker:9092 answer again, after 30 s; reading goes on"
    assert [record.getMessage() for record in caplog.records] == [away.format(10), away.format(20), back]


def _says(caplog: pytest.LogCaptureFixture, words: str) -> Callable[[], bool]:
    return lambda: words in caplog.text


def test_a_sink_tells_of_an_outage(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(outage, "WARN_EVERY_S", 0.3)
    monkeypatch.setattr(producer, "_FLUSH_S", 0.05)
    with KafkaBroker({"t": 1}) as broker, WriteStep(broker) as step:
        step.bundle("before")
        broker.stop_broker()
        waiting = threading.Thread(target=lambda: step.bundle("during"), daemon=True)
        waiting.start()
        assert wait_for(_says(caplog, "and 1 records wait for them; writing goes on when they do"))
        broker.start_broker()
        waiting.join(60)
        assert _says(caplog, "answer again")()
        assert values(broker) == [b"before", b"during"]


def test_a_reader_tells_of_an_outage(
    kafka: ScriptedKafka, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outage, "WARN_EVERY_S", 0.3)
    monkeypatch.setattr(read_step, "_CHECK_EVERY_S", 0.05)
    script(kafka, {("t", 0): Log(range(5))})
    step = step_of(kafka)
    group = step.initial_restriction(0)
    step.setup()
    kafka.stop_broker()
    bundle = Bundle(step, group)
    assert wait_for(_says(caplog, "reading goes on when they do"), 0)
    kafka.start_broker()
    assert len(Bundle(step, bundle.rest, bundle.state).outputs) == 5
    step.teardown()
    assert _says(caplog, "answer again")()
