"""Results of a pipeline in a history: one row for each key and window, however often a bundle is repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.transforms.window import FixedWindows, TimestampedValue
from apache_beam.utils.timestamp import Timestamp

from luminosity.drift import RBF, DriftAlert, DriftHistory, MMDTestResult, RecordDrift, mmd_test
from luminosity.drift.mmd.mmd_result import untested
from luminosity.drift.watch.record_drift import _RowMaker  # pyright: ignore[reportPrivateUsage]
from luminosity.errors import DriftError


def _results() -> tuple[MMDTestResult, MMDTestResult]:
    rows = np.random.default_rng(0).normal(size=(100, 2))
    kernels = [RBF(1.5), RBF(3.0)]
    return mmd_test(rows[:50], rows[50:], kernels), mmd_test(rows[:50], rows[50:] + 2, kernels)


class _FailsOnce(beam.DoFn):
    """Fails after the rows before it were written, so that a runner with retries repeats the bundle."""

    def __init__(self, mark: str) -> None:
        self._mark = Path(mark)

    def process(self, element: Any) -> Any:
        if not self._mark.exists():
            self._mark.touch()
            raise RuntimeError("the first attempt")
        yield element


@pytest.mark.alone
def test_a_row_for_each_key_and_window(tmp_path: Path) -> None:
    """Bundles are repeated, and so is the run, on another runner."""
    path, mark = tmp_path / "drift.sqlite", tmp_path / "mark"
    same, other = _results()
    gone = untested(50, 0, permutations=1000, level=0.05, seed=0, precision="float32")
    elements = [(("de", same), 1), (("de", other), 11), (("fr", other), 1), (("fr", gone), 11)]
    for runner in ("luminosity.LuminosityRunner", "FnApiRunner"):
        with beam.Pipeline(runner=runner) as pipeline:
            values = [TimestampedValue(element, time) for element, time in elements]
            results = pipeline | beam.Create(values) | beam.Map(lambda each: each) | beam.WindowInto(FixedWindows(10))
            recorded = results | RecordDrift(
                path, reference="r", by="language", bandwidth=1.5, reports=tmp_path / "reports"
            )
            _ = recorded | beam.ParDo(_FailsOnce(str(mark)))
    assert mark.exists()
    history = DriftHistory(path)
    german, french = (history.last("r", key=f"language={key}") for key in ("de", "fr"))
    assert [(test.verdict, test.bandwidth) for test in (*german, *french)] == [
        ("no drift", 1.5),
        ("drift", 1.5),
        ("drift", 1.5),
        ("gone", 1.5),
    ]
    assert german[1].window_start == "1970-01-01T00:00:10.000+00:00"
    assert german[1].time == german[1].window_end == "1970-01-01T00:00:20.000+00:00"
    assert german[1].mmd2 == german[1].statistic == next(k.mmd2 for k in other.kernels if k.bandwidth == 1.5)
    assert [test.report is not None for test in (*german, *french)] == [False, True, True, False]
    assert len(list((tmp_path / "reports").iterdir())) == 2
    assert "Drift" in Path(german[1].report or "").read_text()


def test_alerts_of_a_detector_and_runs_without_windows(tmp_path: Path) -> None:
    path = tmp_path / "drift.sqlite"
    result = _results()[0]
    alert = DriftAlert(120, 20, 0.5, 0.4, Timestamp(60), False)
    for _ in range(2):
        with beam.Pipeline(runner="FnApiRunner") as pipeline:
            start = pipeline | beam.Create([0])
            _ = start | "Result" >> beam.Map(lambda _: result) | RecordDrift(path, reference="whole")
            alerts = start | "Alert" >> beam.Map(lambda _: ("s", alert))
            _ = alerts | "RecordAlerts" >> RecordDrift(path, reference="stream")
    assert len(DriftHistory(path).last("whole")) == 2, "each run without windows is a row of its own"
    (row,) = DriftHistory(path).last("stream", key="s")
    assert (row.by_detector, row.drift, row.threshold, row.time[:16]) == (True, True, 0.4, "1970-01-01T00:01")


def test_wrong_uses_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DriftError, match=r"gs://bucket/drift\.sqlite.*a disk that all workers see"):
        RecordDrift("gs://bucket/drift.sqlite", reference="r")
    with pytest.raises(DriftError, match="there is no folder"):
        RecordDrift(tmp_path / "none" / "drift.sqlite", reference="r")
    maker = _RowMaker("r", "", "", "language", 2.0, None)
    with pytest.raises(DriftError, match=r"found RBF\(1\.5\), RBF\(3\) for language=de, expected .* 2"):
        maker.row(("de", _results()[0]), None)
    with pytest.raises(DriftError, match="found dict, expected results of MMDTest"):
        maker.row({"drift": True}, None)
