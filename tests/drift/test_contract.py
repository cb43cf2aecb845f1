"""Every drift test keeps the contract, in memory, in a pipeline, in a history and in a watch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.testing.util import assert_that

from luminosity.drift import Comparison, DriftHistory, DriftResult, DriftTest, RecordDrift
from luminosity.drift.registry import TESTS, drift_test
from luminosity.errors import DriftError
from tests.drift.conformance import check_drift_test

_RANDOM = np.random.default_rng(0)
_JANUARY = _RANDOM.normal(size=(300, 3))
_SAME = _RANDOM.normal(size=(250, 3))
_FEBRUARY = _RANDOM.normal(0.8, 1, size=(250, 3))


def samples(test: type[DriftTest], rows: Any) -> Any:
    """Return rows as the test reads them."""
    return rows if test.reads == "rows" else pa.table({f"c{at}": column for at, column in enumerate(rows.T)})


@pytest.mark.parametrize("name", TESTS)
def test_a_registered_test_keeps_the_contract(name: str, tmp_path: Path) -> None:
    kind = drift_test(name)
    assert kind.name == name
    january, same, february = (samples(kind, each) for each in (_JANUARY, _SAME, _FEBRUARY))
    check_drift_test(kind.from_options({}, 0.01), (january, same), (january, february), tmp_path)


@pytest.mark.parametrize("name", TESTS)
def test_a_pipeline_makes_the_same_test_and_records_it(name: str, tmp_path: Path) -> None:
    kind = drift_test(name)
    test = kind.from_options({}, 0.01)
    january, february = (samples(kind, each) for each in (_JANUARY, _FEBRUARY))
    expected = test.compare(january, february, level=0.01, seed=0).result
    elements = list(february) if kind.reads == "rows" else february.to_batches(max_chunksize=60)

    def check(found: list[Any]) -> None:
        assert [(each.test, each.drift, each.reference_rows, each.current_rows) for each in found] == [
            (name, True, 300, 250)
        ]
        assert found[0].effect == pytest.approx(expected.effect, rel=1e-3)

    path = tmp_path / "drift.sqlite"
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        results = pipeline | beam.Create(elements) | test.transform(january, level=0.01)
        assert_that(results, check)
        _ = results | RecordDrift(path, reference="january", reports=tmp_path / "reports")
    (row,) = DriftHistory(path).last("january")
    assert (row.test, row.drift, row.size_name) == (name, True, kind.effect_name)
    assert row.size == pytest.approx(expected.effect, rel=1e-3)
    assert "Drift" in Path(row.report or "").read_text()


def test_a_name_that_is_no_test() -> None:
    with pytest.raises(DriftError, match=r"found no drift test 'column', expected one of mmd, columns; .*'columns'"):
        drift_test("column")


@dataclass(frozen=True)
class _MeanResult(DriftResult):
    test: ClassVar[str] = "mean"
    effect_name: ClassVar[str] = "shift"

    shift: float
    p_value: float
    level: float
    reference_rows: int
    current_rows: int
    smallest_p_value: float = 0.0

    @property
    def effect(self) -> float:
        return self.shift

    @property
    def statistic(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.effect

    @property
    def is_compared(self) -> bool:
        return self.effect == self.effect

    def as_dict(self) -> dict[str, Any]:
        effect = self.effect if self.is_compared else None
        return {"drift": self.drift, "verdict": self.verdict, "p_value": self.p_value, "effect": effect}

    def figures(self) -> str:
        return f"p = {self.p_value:.4g}, shift = {self.effect:.4g}"


@dataclass(frozen=True)
class _MeanComparison(Comparison[_MeanResult]):
    result: _MeanResult

    def settings(self) -> dict[str, Any]:
        return {"rows_read": [self.result.reference_rows, self.result.current_rows], "rows_skipped": [0, 0]}


class _Mean(DriftTest):
    """A user's own test: the z-test of the mean of all numbers."""

    name: ClassVar[str] = "mean"
    reads: ClassVar[Literal["rows", "columns"]] = "rows"
    effect_name: ClassVar[str] = "shift"
    largest_effect: ClassVar[float] = np.inf

    @classmethod
    def from_options(cls, options: Mapping[str, Any], level: float) -> _Mean:
        return cls()

    def compare(self, reference: Any, current: Any, *, level: float, seed: int, **_: Any) -> _MeanComparison:
        from scipy.stats import norm

        means = [each.mean(axis=1) for each in (reference, current)]
        shift = abs(means[1].mean() - means[0].mean())
        spread = np.hypot(*(each.std(ddof=1) / len(each) ** 0.5 for each in means))
        p_value = float(2 * norm.sf(shift / spread))
        return _MeanComparison(_MeanResult(float(shift), p_value, level, len(reference), len(current)))

    def untested(self, reference_rows: int, current_rows: int, *, level: float, seed: int) -> _MeanResult:
        p_value = 1.0 if bool(reference_rows) == bool(current_rows) else 0.0
        return _MeanResult(np.nan, p_value, level, reference_rows, current_rows, p_value)

    def transform(self, reference: Any, *, level: float = 0.05, seed: int = 0, **columns: Any) -> Any:
        raise NotImplementedError

    def rows_of(self, sample: Any) -> int:
        return len(sample)


def test_a_test_of_your_own_passes_through_the_same_door(tmp_path: Path) -> None:
    check_drift_test(_Mean(), (_JANUARY, _SAME), (_JANUARY, _FEBRUARY), tmp_path)
