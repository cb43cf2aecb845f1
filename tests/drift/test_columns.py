"""The test of each column: against SciPy, its level and power, missing values, many rows, pipelines and keys."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from apache_beam.pipeline import PipelineVisitor
from apache_beam.pvalue import AsDict, AsMultiMap
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms.window import FixedWindows, TimestampedValue
from scipy import stats as scipy_stats

from luminosity.drift import ColumnTest, column_test
from luminosity.errors import DriftError
from luminosity.evaluation.description.changes import chi_squared_p_value, fisher_p_value, ks_p_value

pytestmark = pytest.mark.thorough

stats: Any = scipy_stats  # its results are named tuples that type checkers do not know
_RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize(("first", "second"), [(5, 7), (12, 12), (80, 31), (300, 300), (2000, 1500)])
def test_p_values_of_numbers_are_those_of_scipy(first: int, second: int) -> None:
    for shift in (0.0, 0.3, 1.0):
        before, now = _RANDOM.normal(size=first), _RANDOM.normal(shift, 1, size=second)
        (column,) = column_test({"x": before}, {"x": now}).columns
        expected = stats.ks_2samp(before, now, method="exact")
        assert column.statistic == pytest.approx(expected.statistic, abs=1e-12)
        is_exact = first * second <= 100_000
        assert column.p_value == pytest.approx(expected.pvalue, rel=1e-9 if is_exact else 0.05)


def test_p_values_of_categories_are_those_of_scipy() -> None:
    for freedom in (1, 3, 40, 5000):
        for expected in (0.99, 0.5, 0.05, 1e-8, 1e-60):
            statistic = stats.chi2.isf(expected, freedom)
            assert chi_squared_p_value(statistic, freedom) == pytest.approx(expected, rel=1e-7)
    for _ in range(50):
        table = _RANDOM.integers(0, 25, (2, 2)) + 1
        assert fisher_p_value(table) == pytest.approx(stats.fisher_exact(table).pvalue, rel=1e-9)
    before, now = _RANDOM.choice(list("abc"), 400), _RANDOM.choice(list("abc"), 300, p=[0.5, 0.3, 0.2])
    counts = [[int(np.sum(side == each)) for each in "abc"] for side in (before, now)]
    (column,) = column_test({"x": before}, {"x": now}).columns
    expected = stats.chi2_contingency(counts, correction=False)
    assert (column.method, column.statistic) == ("chi-squared", pytest.approx(expected.statistic))
    assert column.p_value == pytest.approx(expected.pvalue, rel=1e-9)


def test_columns_are_adjusted_by_holm() -> None:
    before = {name: _RANDOM.normal(size=200) for name in "abcd"}
    now = {name: _RANDOM.normal(shift, 1, size=200) for name, shift in zip("abcd", (0, 0.25, 0.5, 0), strict=True)}
    found = column_test(before, now)
    alone = sorted(stats.ks_2samp(before[name], now[name]).pvalue for name in "abcd")
    expected = np.maximum.accumulate([min(1.0, (4 - rank) * p) for rank, p in enumerate(alone)])
    assert [column.adjusted for column in found.columns] == pytest.approx(list(expected))
    assert found.p_value == found.columns[0].adjusted
    assert found.columns[0].name == "c"


def test_the_level_holds_and_a_shift_is_found() -> None:
    """Of 400 tables without drift, about 5% are reported, though each has five columns of four kinds."""
    random = np.random.default_rng(5)

    def drawn(shift: float = 0.0) -> dict[str, Any]:
        return {
            "number": random.normal(shift, 1, 120),
            "whole": random.poisson(3, 120),
            "category": random.choice(list("abcdefgh"), 120),
            "flag": random.random(120) < 0.03,
            "hole": np.where(random.random(120) < 0.1, np.nan, random.normal(size=120)),
        }

    alarms = sum(column_test(drawn(), drawn()).drift for _ in range(400))
    assert 4 <= alarms <= 33, "5% of 400 is 20; beyond these bounds chance alone comes once in a thousand times"
    found = [column_test(drawn(), drawn(0.8)) for _ in range(40)]
    assert sum("number" in each.drifted for each in found) >= 36


def test_what_differs_is_named() -> None:
    random = np.random.default_rng(1)
    before = {
        "plan": ["free"] * 150 + ["paid"] * 50,
        "hole": list(random.normal(size=200)),
        "same": [1] * 200,
        "gone": [1] * 200,
        "typed": [1] * 200,
        "id": [f"user {number:03}" for number in range(200)],
        "rare": [None] * 197 + [1.0] * 3,
    }
    now = {
        "plan": ["free"] * 90 + ["paid"] * 110,
        "hole": [None if number < 60 else random.normal() for number in range(200)],
        "same": [1] * 200,
        "typed": ["1"] * 200,
        "id": [f"user {number}" for number in range(200, 400)],
        "rare": [None] * 200,
    }
    found = column_test(before, now)
    columns = {column.name: column for column in found.columns}
    assert set(found.drifted) == {"plan", "hole", "gone", "typed"}
    assert columns["plan"].said == "'paid': 0.25 of the rows, now 0.55"
    assert columns["hole"].said == "missing values: 0 of the rows, now 0.3"
    assert (columns["gone"].said, columns["typed"].said) == ("the column is gone", "held numbers, now texts")
    assert columns["rare"].method == "Fisher"
    assert columns["id"].adjusted > 0.05, "ids that are all new are no drift"
    assert str(found).startswith("drift: p = 0, 4 of 7 columns drifted: ")
    few = column_test({"x": [1, 2]}, {"x": [3, 4]})
    assert (few.verdict, str(few)[:20]) == ("too few rows", "too few rows to tell")
    with pytest.raises(DriftError, match="the current sample has 1 rows, expected at least 2"):
        column_test({"x": [1, 2]}, {"x": [3]})


def test_more_distinct_values_than_are_kept() -> None:
    """Numbers are rounded alike in both samples, and many texts are compared by their lengths."""
    before, same, now = (_RANDOM.normal(shift, 1, 60_000) for shift in (0, 0, 0.05))
    texts = [f"text {number}" for number in range(40_000)]
    (column,) = column_test({"x": before}, {"x": same}).columns
    exact = stats.ks_2samp(before, same, method="asymp")
    assert column.statistic == pytest.approx(exact.statistic, abs=2e-3)
    assert column_test({"x": before}, {"x": now}).drift
    (column,) = column_test({"x": texts[:20_000]}, {"x": [f"a much longer {each}" for each in texts[20_000:]]}).columns
    assert (column.method, column.distance) == ("Kolmogorov-Smirnov", 1.0)
    assert ks_p_value(1.0, 10**6, 10**6) == 0


def test_a_pipeline_gives_the_result_of_the_function_for_each_key_and_window(tmp_path: Path) -> None:
    before = pa.table({"age": _RANDOM.normal(40, 9, 300), "land": ["de", "fr", "it"] * 100})
    now = pa.table({"age": _RANDOM.normal(44, 9, 240), "land": ["de", "fr", "es"] * 80})
    pq.write_table(before, tmp_path / "before.parquet")
    expected = column_test(before, now)

    def one(land: str) -> Any:
        sides = [table.filter(pc.field("land") == land).select(["age"]) for table in (before, now)]
        return column_test(*sides).as_dict()

    def check(found: list[Any]) -> None:
        by_key = dict(found)
        assert {key: each.verdict for key, each in by_key.items() if not each.is_compared} == {
            "it": "gone",
            "es": "new",
        }
        assert {key: each.as_dict() for key, each in by_key.items() if each.is_compared} == {
            "de": one("de"),
            "fr": one("fr"),
        }

    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        batches = pipeline | "Batches" >> beam.Create(now.to_batches(max_chunksize=50))
        whole = batches | "Whole" >> ColumnTest(str(tmp_path / "*.parquet"))
        assert_that(whole, equal_to([expected]), label="whole")
        reference = pipeline | "Reference" >> beam.Create(before.to_pylist())
        rows = pipeline | "Rows" >> beam.Create(now.to_pylist())
        assert_that(rows | "ByKey" >> ColumnTest(reference, by="land"), check, label="by key")
        assert_that(batches | "InMemory" >> ColumnTest(before, by="land"), check, label="by key, in memory")
        timed = rows | beam.Map(lambda row: TimestampedValue(row, 0 if row["age"] > 44 else 100))
        windows = timed | beam.WindowInto(FixedWindows(50)) | "Windows" >> ColumnTest(before, column="age")
        drifted = windows | beam.Map(lambda result: (result.drift, result.reference_rows))
        assert_that(drifted, equal_to([(True, 300), (True, 300)]), label="windows")
    with pytest.raises(DriftError, match=r"found level=1.5, expected a number between 0 and 1"):
        ColumnTest(before, level=1.5)
    assert math.isnan(column_test(before, before).columns[-1].statistic) is False


def test_windows_that_can_not_be_tested_become_failures() -> None:
    rows = [TimestampedValue({"age": at, "land": "de"}, at) for at in (*range(50), 60)]
    before = {"age": list(range(50))}

    def failed(found: list[Any]) -> None:
        ((key, (kind, text, trace)),) = found
        assert (key, kind) == (None, DriftError)
        assert "the window [50.0, 100.0): the current sample has 1 rows, expected at least 2" in text
        assert "DriftError" in trace[-1]

    def tested(found: list[Any]) -> None:
        assert [(each.current_rows, each.drift) for each in found] == [(50, False)]

    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        current: Any = pipeline | beam.Create(rows) | beam.WindowInto(FixedWindows(50))
        results, failures = current | ColumnTest(before, column="age").with_exception_handling()
        assert_that(results, tested, label="results")
        assert_that(failures, failed, label="failures")
        _, none = current | "ByKey" >> ColumnTest({**before, "land": ["de"] * 50}, by="land").with_exception_handling()
        assert_that(none, equal_to([]), label="a key with one row is not tested, which is no failure")


def test_the_reference_is_looked_up_by_key() -> None:
    """A worker must not hold the summaries of all keys."""
    seen: dict[str, list[type]] = {}

    class Steps(PipelineVisitor):
        def visit_transform(self, transform_node: Any) -> None:
            seen[transform_node.full_label] = [type(each) for each in transform_node.side_inputs]

    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        rows = pipeline | beam.Create([{"k": "a", "n": 1}])
        _ = rows | "Test" >> ColumnTest({"k": ["a", "b"], "n": [1, 2]}, by="k")
        pipeline.visit(Steps())
    (compare,) = (kinds for name, kinds in seen.items() if name.startswith("Test/Compare"))
    assert compare == [AsMultiMap]
    assert AsDict not in {kind for kinds in seen.values() for kind in kinds}
