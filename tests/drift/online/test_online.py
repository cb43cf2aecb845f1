"""The statistic against its definition, measured run times against expected ones, and dependent rows."""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import cache
from typing import Any

import numpy as np
import pytest

from luminosity.drift import (
    RBF,
    AutocorrelationWarning,
    BlockKernel,
    Laplacian,
    Linear,
    OnlineDetector,
    OnlineMMD,
    RowKernel,
    mmd2,
)
from luminosity.errors import DriftError


@cache
def calibrated(rows: int = 300, width: int = 3, seed: int = 0, **options: Any) -> OnlineMMD:
    reference = np.random.default_rng((seed, 0)).normal(size=(rows, width))
    chosen: Any = {"expected_run_time": 500, "window": 10, "simulations": 100, "seed": seed, **options}
    return OnlineMMD(reference, **chosen)


def make(**options: Any) -> OnlineMMD:
    return copy.deepcopy(calibrated(**options))


def state(detector: OnlineMMD) -> tuple[Any, ...]:
    return detector.rows_seen, detector.detected_at, round(detector.statistic, 6), detector.threshold


DETECTORS = [make]


def test_the_calibration_reports_progress() -> None:
    reports: list[tuple[int, int]] = []
    reference = np.random.default_rng((0, 0)).normal(size=(300, 3))
    options: Any = {"expected_run_time": 500, "window": 10, "simulations": 100}
    detector = OnlineMMD(reference, **options, progress=lambda done, of: reports.append((done, of)))
    assert np.array_equal(detector.calibration.thresholds, make().calibration.thresholds)
    assert len(reports) > 10
    assert reports == sorted(set(reports))
    assert reports[-1][0] == reports[0][1] == reports[-1][1]


@pytest.mark.parametrize("new", DETECTORS)
class TestContract:
    """Tests that every ``OnlineDetector`` must pass."""

    def test_it_has_what_detectors_have(self, new: Any) -> None:
        assert isinstance(new(), OnlineDetector)

    def test_one_row_at_a_time_is_as_many_at_once(self, new: Any) -> None:
        rows = np.random.default_rng(1).normal(size=(310, 3))
        rows[290:] += 3
        single, whole, parts = new(), new(), new()
        for row in rows:
            single.update(row)
        whole.update(rows)
        for part in np.split(rows, [0, 7, 8, 280, 295]):
            parts.update(part)
        assert state(single) == state(whole) == state(parts)
        assert single.drift_detected

    def test_an_alarm_stays_until_reset_and_then_all_is_as_new(self, new: Any) -> None:
        rows = np.random.default_rng(2).normal(size=(30, 3))
        detector, fresh = new(), new()
        detector.update(rows + 3)
        detected_at = detector.detected_at
        detector.update(rows)
        assert detector.drift_detected
        assert detector.detected_at == detected_at
        assert detector.rows_seen == 60
        detector.reset()
        assert not detector.drift_detected
        assert detector.rows_seen == 0
        detector.update(rows[:7])
        fresh.update(rows[:7])
        assert state(detector) == state(fresh)

    def test_the_seed_decides(self, new: Any) -> None:
        once = new(seed=0).calibration.thresholds.tolist()
        calibrated.cache_clear()
        assert once == new(seed=0).calibration.thresholds.tolist() != new(seed=1).calibration.thresholds.tolist()

    def test_it_pickles_in_the_middle_of_a_stream(self, new: Any) -> None:
        rows = np.random.default_rng(3).normal(size=(40, 3))
        detector = new()
        detector.update(rows[:25])
        other = pickle.loads(pickle.dumps(detector))
        detector.update(rows[25:])
        other.update(rows[25:])
        assert state(other) == state(detector)

    def test_what_is_no_row_changes_nothing(self, new: Any) -> None:
        rows = np.random.default_rng(4).normal(size=(5, 3))
        detector = new()
        detector.update(rows)
        before = state(detector)
        for wrong in (
            np.full((2, 3), np.nan),
            rows[:, :2],
            [1.0, 2.0],
            [[1.0], [1.0, 2.0]],
            np.zeros((1, 1, 3)),
            ["a", "b", "c"],
        ):
            with pytest.raises(DriftError):
                detector.update(wrong)
        detector.update(rows[:0])
        detector.update([])
        assert state(detector) == before


@pytest.mark.parametrize(
    "kernel",
    [RBF(1.5), Laplacian(), Linear(), RowKernel(lambda x, y: 1 / (1 + ((x - y) ** 2).sum()))],
    ids=["rbf", "laplacian", "linear", "own"],
)
def test_the_statistic_is_mmd2_of_the_window(kernel: Any) -> None:
    detector = make(kernel=kernel)
    rows = np.random.default_rng(5).normal(5, 1, size=(25, 3))
    detector.update(rows)
    middle = np.median(np.random.default_rng((0, 0)).normal(size=(300, 3)), axis=0)
    reference = detector.calibration.reference.rows + middle
    if not kernel.shift_invariant:
        reference = detector.calibration.reference.rows
    assert detector.statistic == pytest.approx(mmd2(reference, rows[15:], detector.kernel, precision="float64"), 1e-4)
    assert len(reference) == 225


def test_run_times_without_drift_are_as_expected() -> None:
    """Mean, spread and the share of alarms while the window fills are those of a geometric distribution."""
    random = np.random.default_rng(6)
    found: list[int] = []
    for seed in range(25):
        reference = random.normal(size=(400, 5))
        detector = OnlineMMD(reference, expected_run_time=100, window=10, simulations=300, seed=seed)
        for _ in range(16):
            detector.reset()
            while not detector.drift_detected:
                detector.update(random.normal(size=(128, 5)))
            assert detector.detected_at is not None
            found.append(detector.detected_at)
    assert np.mean(found) == pytest.approx(100, rel=0.15)
    assert np.std(found) == pytest.approx(100, rel=0.2)
    assert np.mean(np.array(found) <= 10) == pytest.approx(1 - 0.99**9, abs=0.035)


@pytest.mark.parametrize("shift", [lambda rows: rows + 1, lambda rows: rows * 3], ids=["mean", "scale"])
def test_a_shift_is_detected_within_the_window(shift: Any) -> None:
    detector = make()
    random = np.random.default_rng(7)
    delays: list[int] = []
    for _ in range(20):
        detector.reset()
        detector.update(random.normal(size=(20, 3)))
        detector.update(shift(random.normal(size=(100, 3))))
        assert detector.detected_at is not None
        delays.append(detector.detected_at - 20)
    assert 0 < np.median(delays) <= 10


def dependent(random: Any, rows: int, weight: float) -> Any:
    found = random.normal(size=(rows, 3))
    for place in range(1, rows):
        found[place] = weight * found[place - 1] + np.sqrt(1 - weight**2) * found[place]
    return found


def test_dependent_rows_are_warned_about_once() -> None:
    detector = make()

    def follow(rows: Any) -> None:
        for some in rows.reshape(60, 10, 3):
            detector.update(some)
            if detector.drift_detected:
                detector.reset()  # Frequent alarms must not hide the dependence.

    with pytest.warns(AutocorrelationWarning, match="at lag 1") as caught:
        follow(dependent(np.random.default_rng(8), 600, 0.5))
    assert len(caught) == 1
    assert detector.autocorrelated
    assert 0.3 < detector.autocorrelation[1] < 0.6
    assert abs(detector.autocorrelation[8]) < 0.1


def test_independent_rows_and_drift_are_not_called_dependent() -> None:
    random = np.random.default_rng(9)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutocorrelationWarning)
        for _ in range(100):
            detector = make()
            detector.update(random.normal(size=(800, 3)))
            detector.update(random.normal(2, 1, size=(200, 3)))
            assert not detector.autocorrelated


def test_rows_of_one_column_may_be_numbers() -> None:
    detector = make(width=1)
    detector.update(0.5)
    detector.update([0.5, 1])
    detector.update([[0.5]])
    assert detector.rows_seen == 4


def test_a_large_reference_is_sampled() -> None:
    assert len(make(rows=5000, reference_rows=200).calibration.reference) == 150
    assert make(rows=5000, reference_rows=200, seed=1).kernel != make(rows=5000, reference_rows=200).kernel


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 199}, "199 rows of reference with window=10, expected at least 200"),
        ({"reference_rows": 50}, "50 rows of reference"),
        ({"window": 1}, "window=1, expected a whole number from 2 on"),
        ({"window": 10.0}, "window=10.0, expected a whole number from 2 on"),
        ({"window": 10.5}, "window=10.5"),
        ({"expected_run_time": 10}, "expected_run_time=10 with window=10"),
        ({"expected_run_time": float("nan")}, "expected_run_time=nan"),
        ({"expected_run_time": float("inf")}, "expected_run_time=inf"),
        ({"expected_run_time": 1e9}, "too many to simulate"),
        ({"simulations": 5}, "simulations=5"),
        ({"kernel": BlockKernel(lambda a, b: [[1.0 for _ in b] for _ in a])}, "kernel=BlockKernel"),
        ({"kernel": "rbf"}, "kernel=str"),
    ],
)
def test_invalid_options_are_errors(options: Any, message: str) -> None:
    with pytest.raises(DriftError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("reference", "message"),
    [([[np.nan, 1.0]] * 300, "NaN"), ([[1.0, 2.0]] * 300, "sampled rows are all equal"), ([], "no rows")],
)
def test_invalid_references_are_errors(reference: Any, message: str) -> None:
    with pytest.raises(DriftError, match=message):
        OnlineMMD(reference, expected_run_time=1000, window=10)
