"""With --late_elements, what a grouping drops because it comes too late can be had."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms.window import FixedWindows

from luminosity.engine.debugging import letter_files
from luminosity.engine.debugging.late_elements import LateElements
from tests.runners import IS_REFERENCE
from tests.streams import run_stream, stream_of

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does")


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.glob("late-*.jsonl")) for line in path.read_text().splitlines()]


def test_late_elements_are_in_a_file(tmp_path: Path) -> None:
    events = [(("a", 1), 3)], 25, [(("a", 2), 4), (("a", 3), 26), (("b", 4), 5)]

    def build(pipeline: beam.Pipeline) -> None:
        pairs: Any = pipeline | stream_of(*([*each] if isinstance(each, list) else each for each in events))
        grouped = pairs | beam.WindowInto(FixedWindows(10)) | "Group" >> beam.GroupByKey()
        assert_that(grouped | beam.MapTuple(lambda key, values: (key, [*values])), equal_to([("a", [1]), ("a", [3])]))

    run_stream(build, f"--late_elements={tmp_path}")
    lines = _lines(tmp_path)
    assert sorted(each["element"] for each in lines) == ["('a', 2)", "('b', 4)"]
    assert {pickle.loads(base64.b64decode(each["pickle"])) for each in lines} == {("a", 2), ("b", 4)}
    of_b = next(each for each in lines if "b" in each["element"])
    assert of_b["step"] == "Group"
    assert of_b["time"] == "1970-01-01T00:00:05.000+00:00"
    assert of_b["windows"] == ["[0.0, 10.0)"]
    assert of_b["watermark"] == "1970-01-01T00:00:25.000+00:00"


def test_what_can_not_be_written_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(letter_files, "_MOST_BYTES", 400)

    def undecodable(encoded: bytes) -> Any:
        raise ValueError("a coder of the user")

    late = LateElements(str(tmp_path)).of("Group", undecodable)
    for _ in range(5):
        late([(b"x", [], 1 << 62)])
    assert 0 < len(_lines(tmp_path)) < 5
    assert _lines(tmp_path)[0]["element"] == "<can't be decoded: ValueError>"
    assert caplog.text.count("they are still counted") == 1
