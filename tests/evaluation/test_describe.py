"""Descriptions equal those of pandas and NumPy, whatever the sharding, and stay within their limits beyond them."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import apache_beam as beam
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms.periodicsequence import PeriodicImpulse
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from luminosity.errors import EvaluationError
from luminosity.evaluation import Describe, describe
from luminosity.evaluation.description.changes import ks_p_value
from luminosity.evaluation.description.describe_table import DescriptionState
from luminosity.evaluation.description.sketches import DistinctCount, TopValues


def mixed_table(rows: int = 500, seed: int = 0) -> pa.Table:
    random = np.random.default_rng(seed)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(random.normal(size=rows * 4)), 4)
    return pa.table(
        {
            "number": pa.array(random.normal(size=rows), mask=random.random(rows) < 0.1),
            "whole": random.integers(-5, 5, rows),
            "text": random.choice(["a", "", "ähnlich", "b" * 1500], rows),
            "ok": random.random(rows) < 0.3,
            "when": pa.array(random.integers(0, 10**9, rows), pa.timestamp("s")),
            "vector": vectors,
            "tags": [["x"] * int(count) for count in random.integers(0, 4, rows)],
            "bytes": [b"x" * int(count) for count in random.integers(0, 4, rows)],
            "struct": [{"a": 1}] * rows,
            "nothing": pa.nulls(rows),
        }
    )


@given(st.lists(st.integers(0, 500), max_size=5), st.lists(st.integers(0, 9), min_size=1, max_size=4))
@settings(max_examples=15, deadline=None)
def test_sharding_changes_nothing(cuts: list[int], order: list[int]) -> None:
    table = mixed_table()
    edges = [0, *sorted(cuts), table.num_rows]
    states: list[DescriptionState] = []
    for start, end in itertools.pairwise(edges):
        state = DescriptionState()
        for batch in table.slice(start, end - start).to_batches():
            state.add(batch)
        states.append(pickle.loads(pickle.dumps(state)))
    whole = DescriptionState()
    for at in sorted(range(len(states)), key=lambda at: order[at % len(order)]):
        whole.merge(states[at])
    found, expected = whole.description().as_dict(), describe(table).as_dict()
    for each in (found, expected):
        for column in each["columns"]:
            for name in ("mean", "deviation"):  # sums of floating-point numbers depend on their order
                if name in column:
                    column[name] = pytest.approx(column[name], rel=1e-12, abs=1e-12)
    assert found == expected


def test_numbers_equal_those_of_pandas() -> None:
    random = np.random.default_rng(0)
    values = random.lognormal(size=3000)
    values[:100] = np.nan
    series = pd.Series(values)
    column = describe({"x": pa.array(values, from_pandas=False)})["x"]

    assert (column.nan, column.nulls, column.count, column.distinct) == (100, 0, 2900, 2900)
    assert column.mean == pytest.approx(series.mean(), rel=1e-12)
    assert column.deviation == pytest.approx(series.std(), rel=1e-12)
    for share, value in column.quantiles.items():
        assert value == pytest.approx(series.quantile(share), rel=1e-12)
    assert column.histogram is not None
    assert sum(column.histogram.counts) == 2900


def test_many_distinct_numbers_are_close() -> None:
    random = np.random.default_rng(0)
    values = np.r_[random.normal(size=300_000), random.lognormal(0, 3, 100_000)]
    column = describe({"x": values})["x"]

    for share, value in column.quantiles.items():
        expected = np.quantile(values, share)
        assert value == pytest.approx(expected, rel=5e-3, abs=1e-6)
    assert not column.distinct_is_exact
    assert column.distinct == pytest.approx(400_000, rel=0.06)
    assert column.quantiles[0] == values.min()
    assert column.quantiles[1] == values.max()


def test_texts_vectors_and_others() -> None:
    table = mixed_table()
    found = describe(table)
    texts = table["text"].to_pylist()

    assert dict(found["text"].top) == {text: texts.count(text) for text in set(texts) if len(text) < 201}
    assert found["text"].distinct == 4
    assert found["text"].mean == pytest.approx(np.mean([len(text) for text in texts]))
    norms = np.linalg.norm(np.stack(table["vector"].to_pylist()), axis=1)
    assert found["vector"].quantiles[0.5] == pytest.approx(np.median(norms))
    assert found["vector"].width == (4, 4)
    assert found["tags"].quantiles[1] == 3
    assert found["bytes"].distinct == 4
    assert (found["struct"].kind, found["struct"].count) == ("other", 500)
    assert (found["nothing"].kind, found["nothing"].nulls) == ("nulls", 500)
    assert found["when"].kind == "times"
    assert found["when"].quantiles[0] == min(value.timestamp() for value in pd.to_datetime(table["when"].to_pandas()))


def test_the_most_frequent_of_many_texts() -> None:
    random = np.random.default_rng(0)
    top = TopValues()
    for _ in range(6):
        top.add(pa.array([*map(str, random.integers(0, 10**9, 20_000)), *["often"] * 3000, *["less"] * 900]))
    (first, second), error = top.top(2), top.error
    assert (first[0], second[0]) == ("often", "less")
    assert first[1] <= 18_000 <= first[1] + error
    assert error < 120_000 / 16_384 * 2


@given(st.lists(st.text(max_size=6), max_size=20))
@settings(max_examples=20, deadline=None)
def test_distinct_texts_are_counted(texts: list[str]) -> None:
    whole, parts = DistinctCount(), DistinctCount()
    whole.add(pa.array(texts, pa.string()))
    for text in texts:
        part = DistinctCount()
        part.add(pa.array(["?", text], pa.large_string())[1:])
        parts.merge(part)
    assert whole.estimate == parts.estimate == len(set(texts))


def test_what_changed_most_comes_first() -> None:
    random = np.random.default_rng(0)
    reference = {"a": random.normal(size=4000), "b": random.choice(["x", "y"], 4000), "same": random.normal(size=4000)}
    current = {
        "a": random.normal(2, 1, size=3000),
        "b": random.choice(["x", "y"], 3000, p=[0.8, 0.2]),
        "same": random.normal(size=3000),
        "new": [1] * 3000,
    }
    current["hole"], reference["hole"] = pa.array([1.0, None] * 1500), np.ones(4000)
    changes = {change.name: change for change in describe(current, reference).changes}

    assert list(changes) == ["new", "a", "hole", "b", "same"]
    test = stats.ks_2samp(reference["a"], current["a"])
    assert changes["a"].distance == pytest.approx(test.statistic, abs=1e-12)
    same = stats.ks_2samp(reference["same"], current["same"], method="asymp")
    assert changes["same"].distance == pytest.approx(same.statistic, abs=1e-12)
    assert changes["same"].p_value == pytest.approx(same.pvalue, abs=0.02)
    counts = [[np.sum(side["b"] == value) for value in "xy"] for side in (reference, current)]
    assert changes["b"].p_value == pytest.approx(stats.chi2_contingency(counts, correction=False).pvalue, abs=0.01)
    assert changes["b"].said.startswith("'y': 0.5") or changes["b"].said.startswith("'x': 0.")
    assert "missing values: 0 of the rows, now 0.5" in changes["hole"].said
    assert changes["new"].said == "new column"
    assert ks_p_value(0.0, 10, 10) == 1
    (change,) = describe({"x": ["long " * 50] * 40}, {"x": ["short"] * 40}).changes
    assert len(change.said) < 80


def test_odd_input() -> None:
    assert str(describe([])) == "0 rows, 0 columns"
    assert describe(pa.table({"x": pa.array([], pa.float64())}))["x"].quantiles == {}
    assert describe({"x": [np.inf, -np.inf, 1.0]})["x"].infinite == 2
    assert describe({"x": [1e308, -1e308, 5.0]})["x"].deviation is None
    assert describe({"x": [2**62, 2**62 + 1]})["x"].distinct == 2
    assert describe([{"x": 1}, {"y": 2}])["y"].nulls == 1
    with pytest.raises(EvaluationError, match="'x' holds numbers and texts, expected one kind"):
        describe([pa.record_batch({"x": [1]}), pa.record_batch({"x": ["a"]})])
    with pytest.raises(EvaluationError, match="found no column 'z', expected one of x"):
        describe({"x": [1]}, columns=["z"])


def test_a_reference_without_rows_or_values() -> None:
    empty = pa.table({"x": pa.array([], pa.int64())})
    for current, reference in ((empty, {"x": [1, None]}), ({"x": [1, None]}, empty), (empty, empty)):
        (change,) = describe(current, reference).changes
        assert (change.distance, change.p_value, change.said) == (0, None, "no rows to compare")
    (change,) = describe({"x": [1, 2]}, []).changes
    assert (change.distance, change.said) == (1, "new column")
    (change,) = describe([], {"x": [1, 2]}).changes
    assert (change.distance, change.said) == (1, "the column is gone")
    (change,) = describe({"x": [np.nan] * 40}, {"x": [1.0] * 40}).changes
    assert (change.distance, change.said) == (1, "missing values: 0 of the rows, now 1")
    (change,) = describe({"x": [np.inf] * 3}, {"x": [np.inf] * 3}).changes
    assert (change.distance, change.said) == (0, "no finite values to compare")
    with pytest.raises(EvaluationError, match="found no column 'b', expected one of a"):
        describe([{"a": 1}], columns=["b"])
    with pytest.raises(EvaluationError, match=r"found columns='a', expected a list; pass columns=\['a'\]"):
        Describe("a")


def test_a_pipeline_compares_with_a_reference() -> None:
    """A reference in windows of its own is compared window by window; a window without rows of it is empty."""
    table = mixed_table(200)
    reference = table.slice(0, 80)

    def changes(found: Any) -> list[Any]:
        return [(each.name, round(each.distance, 12), each.said) for each in found.changes]

    def at(*rows: tuple[int, int]) -> list[Any]:
        return [beam.window.TimestampedValue({"x": value}, second) for value, second in rows]

    expected = changes(describe(table, reference))
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        batches = pipeline | beam.Create(table.to_batches(max_chunksize=30), reshuffle=False)
        before = pipeline | "Before" >> beam.Create(reference.to_batches(max_chunksize=30), reshuffle=False)
        found = batches | "Files" >> Describe(reference=before) | "Changes" >> beam.Map(changes)
        assert_that(found, equal_to([expected]), label="a collection")
        found = batches | "Memory" >> Describe(reference=reference) | "Again" >> beam.Map(changes)
        assert_that(found, equal_to([expected]), label="a table")
        windows = beam.window.FixedWindows(10)
        now = pipeline | "Now" >> beam.Create(at((1, 1), (1, 2), (5, 11))) | "NowWindows" >> beam.WindowInto(windows)
        then = pipeline | "Then" >> beam.Create(at((1, 1), (4, 2))) | "ThenWindows" >> beam.WindowInto(windows)
        found = now | "Windows" >> Describe(reference=then) | "Each" >> beam.Map(lambda each: changes(each)[0])
        expected_windows = [("x", 0.5, "median 2.5, now 1"), ("x", 1.0, "new column")]
        assert_that(found, equal_to(expected_windows), label="windows")


def test_a_reference_that_never_ends_is_refused() -> None:
    pipeline = beam.Pipeline()
    endless = pipeline | PeriodicImpulse()
    with pytest.raises(EvaluationError, match="found a reference that never ends"):
        pipeline | beam.Create([{"x": 1}]) | Describe(reference=endless)


def test_a_pipeline_describes_tables_and_rows() -> None:
    table = mixed_table(200)

    def summary(found: Any) -> list[Any]:
        return [found.rows, found["whole"].distinct, found["text"].top[0], found["number"].nulls]

    expected = summary(describe(table))
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        batches = pipeline | beam.Create(table.to_batches(max_chunksize=30), reshuffle=False)
        assert_that(batches | "Batches" >> Describe() | beam.Map(summary), equal_to([expected]), label="tables")
        columns = ["whole", "text", "number"]
        rows = pipeline | "Rows" >> beam.Create(table.select(columns).to_pylist())
        found = rows | beam.WindowInto(beam.window.FixedWindows(10)) | "Windows" >> Describe(columns)
        assert_that(found | "Summary" >> beam.Map(summary), equal_to([expected]), label="rows")


def test_a_change_of_infinite_values_is_a_change() -> None:
    now, before = {"a": [1.0, 2.0] * 50}, {"a": [1.0, 2.0, np.inf, -np.inf] * 25}
    change = describe(now, reference=before).changes[0]
    assert (change.distance, change.said) == (0.5, "infinite values: 0.5 of the rows, now 0")
    assert change.p_value is not None
    assert change.p_value < 1e-6
    assert describe(now, reference={"a": [np.inf] * 100}).changes[0].distance == 1.0
