"""Errors for elements, references and arguments that can't be used."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from luminosity.drift import MMD, RBF, Aggregate, BlockKernel, FitPCA, MMDTest
from luminosity.errors import DriftError

X = np.random.default_rng(0).normal(size=(20, 3))


def fails(elements: list[Any], transform: Any, match: str) -> None:
    pipeline = beam.Pipeline("FnApiRunner")
    _ = pipeline | beam.Create(elements) | transform
    with pytest.raises(Exception, match=match):
        pipeline.run().wait_until_finish()


@pytest.mark.parametrize(
    ("elements", "options", "match"),
    [
        ([], {}, "the current sample has no rows, expected at least 2"),
        ([X[0]], {}, "the current sample has one row, expected at least 2"),
        ([X, [0.0, np.nan, 1.0]], {}, r"the current sample has one row that can't be compared: the row \[0, nan, 1\]"),
        ([X, X[:, :2]], {}, "the current sample has rows of 2 and of 3 numbers"),
        ([X[:, :2]], {}, "the reference has rows of 3 numbers, the current sample of 2"),
        (["text"], {}, "found an element of type str that is not a vector: text"),
        ([("a", X[0])], {}, "pass keyed=True"),
        ([X[0]], {"keyed": True}, "expected a pair of a key and a vector"),
        ([("a", [*X[0][:2], np.nan])], {"keyed": True}, "key='a': the current sample has one row that can't be"),
        ([pa.record_batch({"v": list(X)})], {}, "found a table with the columns v, but no column="),
        ([X], {"column": "v"}, "expected a pyarrow.RecordBatch"),
        (
            [pa.record_batch({"v": list(X), "n": [*range(19), None]})],
            {"column": "v", "id": "n"},
            r"one row that can't be compared: the row \[[^]]*\] has no id in column 'n'",
        ),
        ([pa.record_batch({"v": [[True, None]] * 2})], {"column": "v"}, "2 rows .* has NaN, null or infinity"),
        ([pa.record_batch({"a": [1, None]})], {"column": ["a"]}, "is null in column"),
        (
            [pa.record_batch({"v": list(X), "day": [date(2030, 1, 1)] * 20})],
            {"column": "v", "by": "day"},
            "the column 'day' holds date32.*, expected texts or numbers as keys",
        ),
        ([pa.record_batch({"v": list(X)})], {"column": "w"}, "found no column 'w', expected one of v"),
        ([pa.record_batch({"v": ["a"]})], {"column": "v"}, "the column 'v' holds string, expected numbers"),
        (
            [pa.record_batch({"v": [*X, None, [1.0]], "n": list(range(22))})],
            {"column": "v", "id": "n"},
            "2 rows that can't be compared: the row with n=20 is null in column 'v'",
        ),
    ],
)
def test_invalid_rows_are_errors(elements: list[Any], options: dict[str, Any], match: str) -> None:
    fails(elements, MMDTest(X, **options), match)


def test_invalid_references_are_errors(tmp_path: Path) -> None:
    pq.write_table(pa.table({"v": list(X)}), tmp_path / "x.parquet")
    current = [pa.record_batch({"w": list(X)})]
    fails(current, MMDTest(tmp_path / "none.parquet", column="w"), "found no file at .*none.parquet")
    fails(current, MMDTest(tmp_path, column="w"), "found a folder at .*pass what ReadTable reads as the reference")
    (tmp_path / "w=1").mkdir()
    pq.write_table(pa.table({"v": list(X)}), tmp_path / "w=1" / "x.parquet")
    keyed = [pa.record_batch({"v": list(X), "w": ["1"] * 20})]
    fails(
        keyed,
        MMDTest(tmp_path / "w=1" / "*", column="v", by="w"),
        "found no column 'w' in .*expected one of v; pass what ReadTable reads",
    )
    fails(current, MMDTest(tmp_path / "x.parquet", column="w"), "found no column 'w' in .*x.parquet, expected one of v")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: MMDTest(X, [BlockKernel(lambda a, b: a)]), "found a BlockKernel"),
        (lambda: MMDTest(X, []), "empty list of kernels"),
        (lambda: MMDTest(X, bins=2), "found bins=2"),
        (lambda: MMDTest(X[:1]), "the reference has one row"),
        (lambda: MMDTest("x.parquet"), "without column="),
        (lambda: MMDTest("x.parquet", column="v", keyed=True), "whose rows have no keys"),
        (lambda: MMDTest(X, by="language"), "without column="),
        (lambda: MMDTest(X, RBF), "expected one such as RBF()"),  # type: ignore[arg-type]
        (lambda: MMDTest(X, pca=0), "pca=0"),
        (lambda: MMD(X, Aggregate()), "expected a single kernel"),  # type: ignore[arg-type]
        (lambda: FitPCA(0), "components=0"),
    ],
)
def test_invalid_arguments_are_errors_before_the_pipeline_runs(make: Any, match: str) -> None:
    with pytest.raises(DriftError, match=match):
        make()


def test_a_single_row_can_not_be_fitted() -> None:
    fails([[1.0, 2.0]], FitPCA(1), "the collection has one row")
