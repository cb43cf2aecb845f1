"""Sinks that write a file per bundle gather elements first."""

from __future__ import annotations

import time
from pathlib import Path

import apache_beam as beam
import pytest

from luminosity.engine.loop import splits
from tests.runners import IS_REFERENCE, run

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does")


def _slowly(number: int) -> str:
    time.sleep(0.02)  # long enough that the step before the sink gets many bundles
    return f"line {number}"


@pytest.mark.usefixtures("patient_sinks")
def test_few_lines_are_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "_FIRST_TAKE_OF_SINK_S", 100.0)  # also on a slow machine, no file is cut in two

    def build(pipeline: beam.Pipeline) -> None:
        lines = pipeline | beam.Create(range(201)) | beam.Reshuffle() | beam.Map(_slowly)
        _ = lines | beam.io.WriteToText(str(tmp_path / "out"))

    run(build, "--cpu_workers=2")
    files = list(tmp_path.iterdir())
    assert len(files) <= 2
    written = [line for file in files for line in file.read_text().splitlines()]
    assert sorted(written) == sorted(f"line {number}" for number in range(201))
