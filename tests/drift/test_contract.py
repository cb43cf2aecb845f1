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

from luminosity.cli.main import main
from luminosity.drift import Comparison, DriftHistory, DriftOption, DriftResult, DriftTest, RecordDrift
from luminosity.drift.registry import TESTS, drift_test
from luminosity.errors import DriftError
from luminosity.testing import check_drift_test

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


@dataclass(frozen=True)
class _Mean(DriftTest):
    """A user's own test: the z-test of the mean of all numbers. Shifts up to ``ignored`` do not count."""

    name: ClassVar[str] = "mean"
    reads: ClassVar[Literal["rows", "columns"]] = "rows"
    effect_name: ClassVar[str] = "shift"
    largest_effect: ClassVar[float] = np.inf
    summary: ClassVar[str] = "compares the mean of all numbers"
    options: ClassVar[tuple[DriftOption, ...]] = (
        DriftOption("ignored_shift", "number", "a shift that does not matter", "0"),
        DriftOption("permutations", "whole number", "is not used", least=7),  # mmd has another option of this name
    )

    ignored: float = 0.0

    @classmethod
    def from_options(cls, options: Mapping[str, Any], level: float) -> _Mean:
        return cls(options.get("ignored_shift", 0.0))

    def settings(self) -> dict[str, Any]:
        return {"ignored_shift": self.ignored}

    def compare(self, reference: Any, current: Any, *, level: float, seed: int, **_: Any) -> _MeanComparison:
        from scipy.stats import norm

        reference, current = (np.asarray(getattr(each, "rows", each)) for each in (reference, current))
        means = [each.mean(axis=1) for each in (reference, current)]
        shift = max(0.0, abs(means[1].mean() - means[0].mean()) - self.ignored)
        spread = np.hypot(*(each.std(ddof=1) / len(each) ** 0.5 for each in means))
        p_value = float(2 * norm.sf(shift / spread))
        return _MeanComparison(_MeanResult(float(shift), p_value, level, len(reference), len(current)))

    def untested(self, reference_rows: int, current_rows: int, *, level: float, seed: int) -> _MeanResult:
        p_value = 1.0 if bool(reference_rows) == bool(current_rows) else 0.0
        return _MeanResult(np.nan, p_value, level, reference_rows, current_rows, p_value)

    def transform(self, reference: Any, *, level: float = 0.05, seed: int = 0, **columns: Any) -> Any:
        raise NotImplementedError

    def rows_of(self, sample: Any) -> int:
        return len(getattr(sample, "rows", sample))


def test_a_test_of_your_own_passes_through_the_same_door(tmp_path: Path) -> None:
    check_drift_test(_Mean(), (_JANUARY, _SAME), (_JANUARY, _FEBRUARY), tmp_path)


def test_the_suite_says_what_a_test_does_not_keep(tmp_path: Path) -> None:
    class Blind(_Mean):
        largest_effect: ClassVar[float] = 0.0

    with pytest.raises(AssertionError, match="expected that the effect is at most largest_effect"):
        check_drift_test(Blind(), (_JANUARY, _SAME), (_JANUARY, _FEBRUARY), tmp_path)
    with pytest.raises(AssertionError, match="one distribution: found 'drift', expected 'no drift'"):
        check_drift_test(_Mean(), (_JANUARY, _FEBRUARY), (_JANUARY, _FEBRUARY), tmp_path)


@pytest.fixture
def third_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Register a third test, with its line alone, and write two samples."""
    monkeypatch.setitem(TESTS, "mean", _Mean)
    np.save(tmp_path / "old.npy", _JANUARY)
    np.save(tmp_path / "new.npy", _FEBRUARY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_takes_the_options_of_a_third_test(third_test: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drift", "old.npy", "new.npy", "--test=mean", "--permutations=8"]) == 3
    assert capsys.readouterr().out.startswith("drift: p = ")
    assert main(["drift", "old.npy", "new.npy", "--test=mean", "--ignored-shift=1.5", "--json"]) == 0
    assert '"ignored_shift": 1.5' in capsys.readouterr().out
    assert main(["drift", "old.npy", "new.npy", "--test=mean", "--permutations=5"]) == 2
    assert "--permutations=5: expected a whole number from 7" in capsys.readouterr().err
    assert main(["drift", "old.npy", "new.npy", "--test=mean", "--kernel=rbf"]) == 2
    assert "found --kernel, which the test 'mean' does not have; it takes --ignored" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["drift", "old.npy", "new.npy", "--test=mean", "--ignored-shift=much"])
    assert "'much': expected a number above 0" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["drift", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "mean compares the mean of all numbers" in said
    assert "--test mean: a shift that does not matter (default: 0)" in said


def test_a_watch_takes_the_options_of_a_third_test(third_test: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch = 'history = "h.sqlite"\n[[watch]]\nname = "w"\nreference = "old.npy"\ncurrent = "new.npy"\ntest = "mean"\n'
    for line, code, said in (
        ("ignored_shift = 1.5", 0, "0 keys drift"),
        ("", 3, "drift began: p = "),
        ("ignored_shift = 'much'", 2, "watch.toml:7: found ignored_shift='much', expected a number above 0"),
        ("kernel = 'rbf'", 2, "watch.toml:7: found kernel, which the test 'mean' does not have; remove kernel"),
    ):
        (third_test / "watch.toml").write_text(f"{watch}{line}\n")
        assert main(["drift", "watch", "watch.toml", "--once"]) == code, line
        printed = capsys.readouterr()
        assert said in printed.out + printed.err


def test_a_watch_takes_all_options_of_mmd(third_test: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch = '[[watch]]\nname = "w"\nreference = "old.npy"\ncurrent = "new.npy"\n'
    (third_test / "watch.toml").write_text(f'history = "h.sqlite"\n{watch}kernel = "laplacian"\nbandwidth = [0.5, 2]\n')
    assert main(["drift", "watch", "watch.toml", "--once"]) == 3
    (row,) = DriftHistory("h.sqlite").last(str(third_test / "old.npy"))
    assert (row.drift, row.kernel) == (True, "laplacian")
    (third_test / "watch.toml").write_text(f'{watch}kernel = "linear"\nbandwidth = 2\n')
    assert main(["drift", "watch", "watch.toml", "--once"]) == 2
    assert "watch.toml:5: found a bandwidth with the kernel linear, which has none" in capsys.readouterr().err
