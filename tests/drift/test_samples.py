"""Samples that are prepared for a test: random rows, columns on one scale, components of both samples together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luminosity.cli.main import main
from luminosity.drift import (
    PCA,
    ColumnScale,
    DriftHistory,
    Linear,
    RowKernel,
    RowSampler,
    compare_keys,
    compare_samples,
    fit_components,
    mmd_test,
    prepare_samples,
    sample_rows,
)
from luminosity.errors import DriftError, InvalidType

_RANDOM = np.random.default_rng(0)
_OLD = _RANDOM.normal(size=(400, 60)).astype(np.float32)
_NEW = np.concatenate([_RANDOM.normal(size=(250, 60)), _RANDOM.normal(2, 1, size=(50, 60))]).astype(np.float32)


@pytest.mark.parametrize("rows", [None, 100])
def test_python_gives_what_the_command_gives(
    rows: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("old.npy", _OLD)
    np.save("new.npy", _NEW)
    options = [] if rows is None else [f"--rows={rows}"]
    assert main(["drift", "old.npy", "new.npy", "--json", "--seed=3", *options]) == 3
    found = json.loads(capsys.readouterr().out)
    comparison = compare_samples(_OLD, _NEW, seed=3, rows=rows)
    settings = found.pop("settings")
    del found["seconds"]
    assert found == json.loads(json.dumps(comparison.result.as_dict()))
    prepared = comparison.samples.settings()
    assert not prepared.pop("scaled")
    assert prepared == {name: settings[name] for name in prepared}


def test_the_result_is_that_of_scaled_and_projected_rows() -> None:
    comparison = compare_samples(_OLD, _NEW, Linear(), scale=True, components=4)
    both = np.concatenate([_OLD, _NEW]).astype(np.float64)
    scaled = (both - both.mean(axis=0)) / both.std(axis=0)
    pca = PCA.fit(scaled, 4)
    expected = mmd_test(pca.transform(scaled[:400]), pca.transform(scaled[400:]), Linear())
    assert comparison.result.p_value == expected.p_value
    assert comparison.result.mmd2 == pytest.approx(expected.mmd2, rel=1e-4)


def test_components_are_chosen_by_the_width_of_rows() -> None:
    assert len(prepare_samples(_OLD, _NEW).pca.components) == 50  # type: ignore[union-attr]
    assert prepare_samples(_OLD, _NEW, components=0).pca is None
    assert prepare_samples(_OLD[:, :50], _NEW[:, :50]).pca is None
    assert len(prepare_samples(_OLD[:10], _NEW[:9]).pca.components) == 19  # type: ignore[union-attr]  # as many as rows


def test_the_same_rows_are_drawn_however_they_arrive() -> None:
    whole = sample_rows(_OLD, 37, seed=5)
    pieces = sample_rows(np.array_split(_OLD, 7).__iter__(), 37, seed=5)
    assert np.array_equal(whole.rows, pieces.rows)
    assert np.array_equal(whole.rows, _OLD[whole.numbers])
    assert (whole.read, pieces.read) == (400, 400)
    assert not np.array_equal(whole.numbers, sample_rows(_OLD, 37, seed=6).numbers)


def test_a_sampler_forgets_rows_that_it_does_not_need() -> None:
    sampler = RowSampler(10)
    for start in range(0, 1_000_000, 50_000):
        sampler.add(np.arange(start, start + 50_000)[:, None])
        assert sum(len(rows) for rows, _, _ in sampler._held) < 200_000
    found = sampler.sample()
    assert (len(found.rows), found.read) == (10, 1_000_000)
    assert np.array_equal(found.rows[:, 0], found.numbers)
    assert found.numbers.max() > 500_000


def test_rows_with_missing_values_are_left_out_on_request() -> None:
    broken = _NEW.copy()
    broken[7, 2] = np.nan
    with pytest.raises(DriftError, match="the current sample has one row with NaN or infinity, the first at 7"):
        compare_samples(_OLD, broken)
    comparison = compare_samples(_OLD, broken, skip_missing=True)
    assert comparison.result.current_rows == 299
    assert comparison.samples.settings()["rows_skipped"] == [0, 1]


def test_a_constant_column_keeps_its_unit() -> None:
    rows = np.array([[1.0, 5.0], [3.0, 5.0]])
    assert ColumnScale.fit(rows).transform(rows).tolist() == [[-1, 0], [1, 0]]


def test_numbers_of_extreme_rows_are_those_of_the_given_arrays() -> None:
    comparison = compare_samples(_OLD, _NEW, rows=200)
    new = [number for number, _ in comparison.extremes().new]
    assert min(new[:10]) >= 250  # the rows that were moved


def test_a_kernel_of_your_own_finds_the_rows_that_differ(tmp_path: Path) -> None:
    comparison = compare_samples(_OLD, _NEW, RowKernel(lambda x, y: x @ y))
    assert comparison.extremes().new[0][0] >= 250
    seen: list[Any] = []

    def details(numbers: Any) -> list[dict[str, Any]]:
        seen.extend(numbers)
        return [{"text": f"row {number}"} for number in numbers]

    comparison.write_report(tmp_path / "drift.html", details=(details, details))
    assert f"row {seen[0]}" in (tmp_path / "drift.html").read_text()


def test_a_comparison_goes_into_a_history(tmp_path: Path) -> None:
    history = DriftHistory(tmp_path / "drift.sqlite")
    history.append(compare_samples(_OLD, _NEW).as_past_test(reference="old", current="new"))
    (test,) = history.last("old")
    assert (test.drift, test.settings["components"]) == (True, 50)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"components": 61}, "found 61 components to compare, expected at most 60: the rows have 60 numbers; pass"),
        ({"components": -1}, "found components=-1, expected a whole number"),
        ({"rows": 0}, "found 0 rows to draw, expected a whole number from 1"),
    ],
)
def test_errors_say_what_to_change(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(DriftError, match=said):
        prepare_samples(_OLD, _NEW, **arguments)


def test_components_of_very_wide_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("luminosity.drift.samples._WIDEST", 7)
    with pytest.raises(DriftError, match=r"60 numbers, too many .* components=0") as error:
        fit_components(_OLD, _NEW, 2)
    assert "--components=0" in error.value.for_command()


def test_a_key_whose_rows_are_all_left_out_of_both_samples_is_not_gone() -> None:
    rows, missing = np.random.default_rng(0).normal(size=(40, 3)), np.full((5, 3), np.nan)
    found = compare_keys({"de": rows[:20], "xx": missing}, {"de": rows[20:], "xx": missing}, skip_missing=True)
    assert found.results["xx"].verdict == "too few rows"
    assert str(found.results["xx"]) == "too few rows to tell: 0 against 0, expected at least 2 of each"
    assert not found.drift


def test_compare_keys_refuses_samples_without_keys() -> None:
    rows = np.zeros((4, 2))
    with pytest.raises(InvalidType, match=r"found current of type ndarray, expected a dict .*use compare_samples"):
        compare_keys({"de": rows}, rows)  # type: ignore[arg-type]
