"""Tests of runs that begin where the sources of a drained run have ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.pvalue import AsList
from apache_beam.runners.runner import PipelineState

from luminosity import ReadKafka
from luminosity.errors import CheckpointError, OptionError
from luminosity.testing import KafkaBroker
from tests.engine.durable.test_ends import Count, Total, counting, wait_for_numbers, wait_until
from tests.marks import note, notes
from tests.runners import IS_REFERENCE, finished, start

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does")


def drained(build: Any, folder: Path, *options: str) -> None:
    """Run a stream until it has counted a little further, then drain it."""
    before = len(notes(folder / "numbers"))
    result: Any = start(build, "--cpu_workers=1", *options)
    wait_for_numbers(folder, more_than=before)
    result.drain()
    finished(result)
    assert result.state == PipelineState.DRAINED


def numbers_in(folder: Path) -> list[int]:
    return [int(number) for number in notes(folder / "numbers")]


def next_version(folder: Path) -> Any:
    """Return a stream with the source of ``counting`` under another name, other steps, and another source."""

    def build(pipeline: beam.Pipeline) -> None:
        table = pipeline | "Table" >> beam.Create([("all", 1)])
        _ = table | "Note table" >> beam.Map(lambda row: note(folder / "table", row))
        numbers = pipeline | beam.Impulse() | "Count on" >> beam.ParDo(Count()).with_output_types(int)
        _ = numbers | "Write" >> beam.Map(lambda number, _: note(folder / "numbers", number), AsList(table))

    return build


def test_another_pipeline_begins_where_the_sources_of_a_drained_one_have_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    drained(counting(tmp_path), tmp_path, f"--checkpoint_dir={first}")
    assert len(notes(tmp_path / "groups")) == 1

    mapping = '--transform_name_mapping={"Count": "Count on"}'
    drained(next_version(tmp_path), tmp_path, f"--checkpoint_dir={second}", f"--continue_from={first}", mapping)
    assert f"beginning where the sources of the run in {first} have ended" in caplog.text
    # What begins with the new version gets all of its input; the source neither repeats nor leaves out a number.
    assert len(notes(tmp_path / "table")) == 1
    assert sorted(numbers_in(tmp_path)) == list(range(len(numbers_in(tmp_path))))

    drained(next_version(tmp_path), tmp_path, f"--checkpoint_dir={third}", f"--continue_from={second}")
    assert len(notes(tmp_path / "table")) == 2
    assert sorted(numbers_in(tmp_path)) == list(range(len(numbers_in(tmp_path))))


def test_a_start_after_the_first_goes_on_with_its_own_folder(tmp_path: Path) -> None:
    first, second = (str(tmp_path / name) for name in ("first", "second"))
    drained(counting(tmp_path), tmp_path, f"--checkpoint_dir={first}")
    options = [f"--checkpoint_dir={second}", f"--continue_from={first}", "--cpu_workers=1"]
    for _ in range(2):
        before = len(numbers_in(tmp_path))
        result = start(counting(tmp_path), *options)
        wait_until(lambda before=before: len(numbers_in(tmp_path)) > before)
        assert result.cancel() == PipelineState.STOPPED
    assert sorted(numbers_in(tmp_path)) == list(range(len(numbers_in(tmp_path))))


def test_a_run_that_was_not_drained_is_refused(tmp_path: Path) -> None:
    first, second = (str(tmp_path / name) for name in ("first", "second"))
    result = start(counting(tmp_path), f"--checkpoint_dir={first}", "--cpu_workers=1")
    wait_for_numbers(tmp_path)
    result.cancel()
    with pytest.raises(CheckpointError, match="is stopped, expected one that was drained"):
        start(counting(tmp_path), f"--checkpoint_dir={second}", f"--continue_from={first}")
    with pytest.raises(CheckpointError, match="no such folder"):
        start(counting(tmp_path), f"--checkpoint_dir={second}", f"--continue_from={tmp_path / 'none'}")
    with pytest.raises(OptionError, match="expected two folders"):
        start(counting(tmp_path), f"--checkpoint_dir={first}", "--restart", f"--continue_from={first}")
    with pytest.raises(OptionError, match="found no --checkpoint_dir"):
        start(counting(tmp_path), f"--continue_from={first}")
    assert start(counting(tmp_path), f"--checkpoint_dir={first}").cancel() == PipelineState.STOPPED  # nothing is lost


def test_kafka_is_read_on_from_the_offsets_of_a_drained_run(tmp_path: Path) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        records = pipeline | ReadKafka(broker.bootstrap_servers, "reviews", value="utf8", values_only=True, groups=1)
        _ = records | "Note" >> beam.Map(lambda value: note(tmp_path / "numbers", value))

    with KafkaBroker({"reviews": 2}) as broker:
        for version in range(3):
            broker.produce_many("reviews", [f"{version * 100 + number}" for number in range(100)])
            options = [f"--checkpoint_dir={tmp_path / f'v{version}'}", "--cpu_workers=1"]
            if version:
                options.append(f"--continue_from={tmp_path / f'v{version - 1}'}")
            result: Any = start(build, *options)
            wait_until(lambda version=version: len(numbers_in(tmp_path)) >= 100 * (version + 1))
            result.drain()
            finished(result)
    assert sorted(numbers_in(tmp_path)) == list(range(300))


def test_a_source_that_shares_its_beginning_is_refused(tmp_path: Path) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        shared = pipeline | "Shared" >> beam.Create(["all"])
        numbers = shared | "Count" >> beam.ParDo(Count()).with_output_types(int)
        keyed = numbers | "Key" >> beam.Map(lambda number: ("all", number)).with_output_types(tuple[str, int])
        _ = keyed | "Total" >> beam.ParDo(Total(tmp_path / "numbers"))
        _ = shared | "Other" >> beam.Map(lambda name: note(tmp_path / "other", name))

    first, second = (str(tmp_path / name) for name in ("first", "second"))
    drained(build, tmp_path, f"--checkpoint_dir={first}")
    with pytest.raises(CheckpointError, match="'Other' reads what also feeds a source"):
        start(build, f"--checkpoint_dir={second}", f"--continue_from={first}")
