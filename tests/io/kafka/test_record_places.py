"""Errors name the record that they are about, and a record can be left out."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.testing.util import assert_that, equal_to

from luminosity import ReadKafka
from luminosity._shared.record_places import RecordRun, noting, take_left, take_places
from luminosity.errors import ElementKillsWorker, OptionError, StepFailed
from luminosity.io.kafka.emit import Emitter, Tally
from luminosity.io.kafka.progress import TimestampPolicy
from luminosity.io.kafka.record import KafkaRecord
from luminosity.testing import KafkaBroker
from tests.both_runners import counters
from tests.runners import run


@pytest.fixture(scope="module")
def broker() -> Iterator[KafkaBroker]:
    with KafkaBroker({"t": 2}) as made:
        made.produce_many("t", [{"value": str(n), "partition": n % 2} for n in range(20)])  # 13 is t[1]@6
        yield made


def _read(broker: KafkaBroker, **more: Any) -> ReadKafka:
    return ReadKafka(broker.bootstrap_servers, "t", stop="now", value=int, values_only=True, **more)


def _fail_at_13(x: int) -> int:
    if x == 13:
        raise ValueError("no good")
    return x


def _die_at_13(x: int) -> int:
    if x == 13:
        os._exit(3)
    return x


def test_an_error_in_a_step_names_the_record_and_how_to_leave_it_out(broker: KafkaBroker) -> None:
    with pytest.raises(StepFailed, match=r"record: t\[1\]@6") as caught:
        run(lambda p: p | _read(broker) | "Fail" >> beam.Map(_fail_at_13), "--cpu_workers=1")
    assert "element: 13" in str(caught.value)
    assert caught.value.fix is not None
    assert "'--skip_record=t[1]@6'" in caught.value.fix.command  # quoted: shells take [1] for a pattern


def test_a_record_that_kills_its_worker_is_named(broker: KafkaBroker) -> None:
    with pytest.raises(ElementKillsWorker, match=r"record: t\[1\]@6") as caught:
        run(lambda p: p | _read(broker) | "Die" >> beam.Map(_die_at_13), "--cpu_workers=1")
    assert "--skip_record=t[1]@6" in str(caught.value)


@pytest.mark.parametrize("flag", ["--cpu_workers=1", "--debug"])
def test_records_are_left_out_and_counted(broker: KafkaBroker, flag: str, caplog: pytest.LogCaptureFixture) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        values: Any = pipeline | _read(broker) | beam.Map(_die_at_13)
        assert_that(values, equal_to([n for n in range(20) if n not in (0, 13)]))

    skips = [f"--skip_record={place}" for place in ("t[1]@6", "t[0]@0", "t[1]@600")]
    assert counters(run(build, flag, *skips))["records_skipped"] == 2
    unmatched = [each.getMessage() for each in caplog.records if "no source has read" in each.getMessage()]
    assert unmatched == ["--skip_record=t[1]@600: no source has read this record"]


def test_an_option_that_names_no_record_is_refused(broker: KafkaBroker) -> None:
    with pytest.raises(OptionError, match="expected TOPIC"):
        run(lambda p: p | _read(broker), "--skip_record=t@6")


@pytest.mark.parametrize("flag", ["--cpu_workers=1", "--debug"])
def test_a_dead_letter_of_a_step_names_the_record(broker: KafkaBroker, flag: str, tmp_path: Path) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        values: Any = pipeline | _read(broker) | "Fail" >> beam.Map(_fail_at_13)
        assert_that(values, equal_to([n for n in range(20) if n != 13]))

    run(build, flag, f"--dead_letters={tmp_path}")
    (path,) = tmp_path.iterdir()
    (letter,) = map(json.loads, path.read_text().splitlines())
    assert (letter["step"], letter["element"], letter["record"]) == ("Fail", "13", "t[1]@6")


class NotANumber:
    def __repr__(self) -> str:
        return "nonsense"


@pytest.mark.parametrize("value", ["soon", None, float("nan"), float("inf"), 1e30, -1e30, 1 << 80, True, NotANumber()])
def test_a_time_that_is_none_is_a_dead_letter(value: Any) -> None:
    emitter = Emitter(TimestampPolicy.of(lambda _: value, 0), None, keeps_unreadable=True)
    record = KafkaRecord("t", 1, 6, 1_700_000_000_000, 1, None, b"x", ())
    tally = Tally()
    (letter,) = emitter.emit([record], 0, tally)
    assert tally.unreadable == 1
    assert letter.value.value[0] == record
    assert "from the function timestamps=, expected seconds since 1970" in letter.value.value[1]


def test_notes_of_a_process_that_has_ended(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("luminosity._shared.record_places._notes", None)
    monkeypatch.setenv("LUMINOSITY_RUN_FOLDER", str(tmp_path))
    runs = [*RecordRun.each("a", 0, [3, 4, 9]), RecordRun("b", 2, 10, 19, -1)]
    places: list[str] = []
    for count in range(1, 5):
        stopped = noting(range(4), runs)
        for _ in range(count):
            next(stopped)
        stopped.close()  # as by an exception in the step that takes the outputs
        places.append(take_left())
    assert places == ["a[0]@3", "a[0]@4", "a[0]@9", "b[2]@10 to 19"]
    assert len([*noting(range(4), runs)]) == 4
    assert take_left() == ""

    many = RecordRun.each("topic" * 40, 0, range(0, 400, 2))  # more than there is room for in the file
    ongoing = noting(range(200), many)
    next(ongoing)
    assert take_places(str(tmp_path), os.getpid()) == [f"{'topic' * 40}[0]@0 to 398"]
    assert take_places(str(tmp_path), os.getpid()) == []
    monkeypatch.setattr("luminosity._shared.record_places._notes", None)
