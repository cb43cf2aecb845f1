"""Drift in a stream: a result for each window when it ends, and alerts when they arise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.transforms import trigger
from apache_beam.transforms.window import FixedWindows, GlobalWindows

from luminosity.drift import DetectDrift, DriftHistory, MMDTest, OnlineMMD, RecordDrift, mmd_test
from luminosity.errors import DriftError
from tests.runners import IS_REFERENCE
from tests.streams import Notes, run_stream, stream_of

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="it has no streams")

_RANDOM = np.random.default_rng(0)
_REFERENCE = _RANDOM.normal(size=(60, 2))
_SAMPLES = [_RANDOM.normal(mean, 1, size=(30, 2)) for mean in (0, 3, 0)]


def _noted(result: Any, window: Any = beam.DoFn.WindowParam) -> list[Any]:
    return [int(window.start), bool(result.drift)]


def _verdict(pair: Any, window: Any = beam.DoFn.WindowParam) -> list[Any]:
    return [int(window.start), pair[0], pair[1].verdict]


def _rows(sample: int, time: int) -> list[tuple[Any, int]]:
    return [(_SAMPLES[sample], time)]


@pytest.mark.parametrize("is_side_input", [False, True])
def test_a_window_is_tested_when_it_ends(tmp_path: Path, is_side_input: bool) -> None:
    notes = Notes(tmp_path / "notes")

    def build(pipeline: beam.Pipeline) -> None:
        rows = pipeline | stream_of(_rows(0, 1), 10, _rows(1, 11), 20, _rows(2, 21))
        reference = pipeline | "Reference" >> beam.Create([_REFERENCE]) if is_side_input else _REFERENCE
        _ = rows | notes.step(lambda _: "rows")
        results = rows | beam.WindowInto(FixedWindows(10)) | MMDTest(reference)
        _ = results | beam.Map(_noted) | "Note" >> notes.step(lambda noted: noted)

    run_stream(build)
    assert [mmd_test(_REFERENCE, sample).drift for sample in _SAMPLES] == [False, True, False]
    assert notes.read() == ["rows", [0, False], "rows", [10, True], "rows", [20, False]]


def test_late_rows_make_no_second_result_and_keys_vanish_by_window(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")

    def build(pipeline: beam.Pipeline) -> None:
        both = [(("a", _SAMPLES[0]), 1), (("b", _SAMPLES[0]), 1)]
        late = [(("a", _SAMPLES[1]), 2)]
        rows = pipeline | stream_of(both, 10, [*late, (("b", _SAMPLES[1]), 11)], 20, late)
        _ = rows | notes.step(lambda _: "rows")
        reference = pipeline | "Reference" >> beam.Create([("a", _REFERENCE), ("b", _REFERENCE)])
        results = rows | beam.WindowInto(FixedWindows(10), allowed_lateness=100) | MMDTest(reference, keyed=True)
        verdicts = results | beam.Map(_verdict)
        _ = verdicts | "Note" >> notes.step(lambda noted: noted)
        _ = results | RecordDrift(tmp_path / "drift.sqlite", reference="r", by="key")

    run_stream(build)
    recorded = {key: DriftHistory(tmp_path / "drift.sqlite").last("r", key=f"key={key}") for key in "ab"}
    assert [(test.time[17:19], test.verdict) for test in recorded["a"]] == [("10", "no drift"), ("20", "gone")]
    assert [(test.time[17:19], test.verdict) for test in recorded["b"]] == [("10", "no drift"), ("20", "drift")]
    found = notes.read()
    assert sorted(found[2:4]) == [[0, "a", "no drift"], [0, "b", "no drift"]]
    assert sorted(found[6:8]) == [[10, "a", "gone"], [10, "b", "drift"]]
    assert found[:2] + found[4:6] + found[8:] == ["rows"] * 5


def test_windows_that_never_end_are_refused() -> None:
    rows = beam.Pipeline() | stream_of()
    with pytest.raises(DriftError, match=r"found a stream in the global window, expected windows that end.*FixedWin"):
        _ = rows | MMDTest(_REFERENCE)
    early = beam.WindowInto(
        FixedWindows(10),
        trigger=trigger.AfterWatermark(early=trigger.AfterCount(1)),
        accumulation_mode=trigger.AccumulationMode.DISCARDING,
    )
    with pytest.raises(DriftError, match=r"found windows with the trigger .*, expected the default"):
        _ = rows | early | "Early" >> MMDTest(_REFERENCE)


def test_a_detector_raises_alerts_while_the_stream_runs(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")
    detector = OnlineMMD(_RANDOM.normal(size=(200, 2)), expected_run_time=1000, window=10, simulations=100)

    def build(pipeline: beam.Pipeline) -> None:
        events = [
            [((key, _SAMPLES[sample]), time)] for time, (key, sample) in enumerate(zip("abc", (0, 1, 0), strict=True))
        ]
        rows = pipeline | stream_of(*events)
        _ = rows | beam.WindowInto(GlobalWindows()) | notes.step(lambda pair: pair[0])
        first = rows | DetectDrift(detector) | beam.Filter(lambda pair: pair[1].rows_seen == pair[1].run_length)
        _ = first | "Alerts" >> notes.step(lambda pair: f"drift of {pair[0]}")

    run_stream(build)
    found = notes.read()
    assert found.index("drift of b") < found.index("c")
    assert {note for note in found if len(note) > 1} == {"drift of b"}
