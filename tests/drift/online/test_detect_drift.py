"""Streams in pipelines give the alerts of a detector alone, for each key."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms.window import TimestampedValue

from luminosity.drift import DetectDrift, DriftAlert, OnlineMMD
from luminosity.errors import DriftError
from tests.both_runners import Pipelines, counters

RANDOM = np.random.default_rng(0)
STREAMS = {
    "steady": RANDOM.normal(size=(60, 3)),
    "shifts": np.concatenate([RANDOM.normal(size=(30, 3)), RANDOM.normal(3, 1, size=(30, 3))]),
}


@pytest.fixture(scope="module")
def detector() -> OnlineMMD:
    reference = np.random.default_rng(1).normal(size=(300, 3))
    return OnlineMMD(reference, expected_run_time=2000, window=10, simulations=100)


def expected(detector: OnlineMMD, streams: dict[Any, Any]) -> list[tuple[Any, int, int]]:
    """Return the key, the row and the run length of each alert."""
    found: list[tuple[Any, int, int]] = []
    for key, rows in streams.items():
        detector.reset()
        for place, row in enumerate(rows):
            detector.update(row)
            if detector.drift_detected:
                found.append((key, place + 1, detector.rows_seen))
                detector.reset()
    detector.reset()
    return found


def shown(element: tuple[Any, DriftAlert]) -> tuple[Any, int, int]:
    key, alert = element
    assert alert.statistic > alert.threshold > 0
    return key, alert.rows_seen, alert.run_length


def test_each_key_is_a_stream_that_starts_again_after_an_alert(pipelines: Pipelines, detector: OnlineMMD) -> None:
    alerts = expected(detector, STREAMS)
    assert len([key for key, _, _ in alerts if key == "shifts"]) > 1
    rows = [(key, row) for place in range(60) for key in STREAMS for row in [STREAMS[key][place]]]
    with pipelines() as (pipeline, run):
        found = pipeline | beam.Create(rows, reshuffle=False) | DetectDrift(detector) | beam.Map(shown)
        assert_that(found, equal_to(alerts))
    assert counters(run.result)["rows"] == 120
    assert counters(run.result)["alerts"] == len(alerts)


def test_tables_and_a_detector_for_each_key(pipelines: Pipelines, detector: OnlineMMD) -> None:
    names = [key for _ in range(60) for key in STREAMS]
    vectors = [STREAMS[key][place] for place in range(60) for key in STREAMS]
    table = pa.record_batch({"name": names, "embedding": [row.tolist() for row in vectors]})
    detect = DetectDrift(dict.fromkeys(STREAMS, detector), column="embedding", by="name")
    with pipelines() as (pipeline, _):
        found = pipeline | beam.Create([table]) | detect | beam.Map(shown)
        assert_that(found, equal_to(expected(detector, STREAMS)))


def test_an_alert_has_the_timestamp_of_its_row_and_reports_dependent_rows(
    pipelines: Pipelines, detector: OnlineMMD
) -> None:
    repeated = np.repeat(np.random.default_rng(2).normal(size=(100, 3)), 4, axis=0)
    elements = [TimestampedValue(("a", repeated), 5), TimestampedValue(("a", repeated[:4] + 9), 7)]
    with pipelines() as (pipeline, run):
        alerts = pipeline | beam.Create(elements, reshuffle=False) | beam.Map(lambda each: each) | DetectDrift(detector)
        last = alerts | beam.Map(lambda each: (float(each[1].timestamp), each[1].autocorrelated)) | beam.Distinct()
        assert_that(last, equal_to([(5.0, False), (5.0, True), (7.0, True)]))
    assert counters(run.result)["autocorrelated_streams"] == 1


def test_invalid_arguments_are_errors(detector: OnlineMMD) -> None:
    with pytest.raises(DriftError, match="found a ndarray as detector"):
        DetectDrift(np.zeros((100, 2)))  # type: ignore[arg-type]
    with pytest.raises(DriftError, match="by='name' without column="):
        DetectDrift(detector, by="name")
    with (
        pytest.raises(Exception, match=r"found a row of 'c', for which DetectDrift has no detector, expected 'a'"),
        beam.Pipeline("FnApiRunner") as pipeline,
    ):
        _ = pipeline | beam.Create([("c", [1.0, 2, 3])]) | DetectDrift({"a": detector})
