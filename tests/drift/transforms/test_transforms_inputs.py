"""Rows, columns and keys of many types give the same results in pipelines as arrays."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.testing.util import assert_that

from luminosity.drift import PCA, ApplyPCA, MMDTest, MMDTestResult, mmd_test

_RANDOM = np.random.default_rng(0)
X, Y = _RANDOM.normal(size=(60, 3)), _RANDOM.normal(size=(50, 3))
IDS = np.arange(50)


def near(expected: float, within: float) -> Any:
    def check(found: list[MMDTestResult]) -> None:
        assert [result.mmd2 for result in found] == pytest.approx([expected], abs=within)

    return check


def vectors(kind: pa.DataType, rows: Any) -> pa.RecordBatch:
    column = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1]).cast(kind)
    return pa.record_batch({"v": column})


def test_columns_of_many_types() -> None:
    """One row is sliced off, so that the column does not begin at the start of its buffer."""
    expected = mmd_test(X, Y[1:])
    tables = {
        "list of float32": (vectors(pa.list_(pa.float32()), Y), "v"),
        "large list": (vectors(pa.large_list(pa.float64()), Y), "v"),
        "fixed list of float16": (vectors(pa.list_(pa.float16(), 3), Y.astype(np.float16)), "v"),
        "numbers": (pa.record_batch({name: Y[:, number] for number, name in enumerate("abc")}), ["a", "b", "c"]),
    }
    with beam.Pipeline("FnApiRunner") as pipeline:
        for name, (table, column) in tables.items():
            current = pipeline | f"a {name}" >> beam.Create([table[1:20], table[20:20], table[20:]])
            found = current | name >> MMDTest(X, column=column)
            assert_that(found, near(expected.mmd2, 0.02 * expected.null_sd), label=f"as {name}")


def test_a_single_column_of_numbers_or_flags() -> None:
    flags, others = _RANDOM.random(50) < 0.3, _RANDOM.random((60, 1)) < 0.3
    with beam.Pipeline("FnApiRunner") as pipeline:
        for name, column in {"flags": flags, "float16": flags.astype(np.float16)}.items():
            current = pipeline | name >> beam.Create([pa.record_batch({"a": column})])
            found = current | f"test {name}" >> MMDTest(others, column="a")
            assert_that(found, near(mmd_test(others, flags).mmd2, 1e-6), label=f"as {name}")


def test_vectors_of_bfloat16() -> None:
    with beam.Pipeline("FnApiRunner") as pipeline:
        current = pipeline | beam.Create([0]) | beam.Map(lambda _: Y.astype(ml_dtypes.bfloat16))
        expected = mmd_test(X, Y)
        assert_that(current | MMDTest(X), near(expected.mmd2, 0.1 * expected.null_sd))


def test_only_equal_rows_are_no_drift() -> None:
    constant = np.full((30, 3), 0.1)

    def check(found: list[MMDTestResult]) -> None:
        assert [(result.mmd2, result.p_value) for result in found] == [(0, 1)]

    def check_drift(found: list[MMDTestResult]) -> None:
        assert [result.drift for result in found] == [True]

    with beam.Pipeline("FnApiRunner") as pipeline:
        current = pipeline | beam.Create([constant[:20], constant[20:]])
        assert_that(current | "Plain" >> MMDTest(constant), check, label="plain")
        assert_that(current | "PCA" >> MMDTest(constant, pca=2), check, label="projected")
        given_ids = pipeline | "Table" >> beam.Create([pa.record_batch({"v": list(constant), "id": range(30)})])
        reference = pipeline | "Other" >> beam.Create([pa.record_batch({"v": list(constant + 1), "id": range(30)})])
        moved = given_ids | "Moved" >> MMDTest(reference, column="v", id="id")
        assert_that(moved, check_drift, label="moved")


def test_keys_of_numpy_types() -> None:
    def check(found: list[Any]) -> None:
        assert sorted((key, result.reference_rows) for key, result in found) == [("de", 30), ("en", 30)]

    keys = np.array(["de", "en"])
    with beam.Pipeline("FnApiRunner") as pipeline:
        reference = pipeline | "X" >> beam.Create([(str(keys[number % 2]), row) for number, row in enumerate(X)])
        current = pipeline | "Y" >> beam.Create([(keys[number % 2], row) for number, row in enumerate(Y)])
        assert_that(current | MMDTest(reference, keyed=True), check)


def test_projected_tables_keep_their_columns() -> None:
    """Batches without rows, which a filter may leave, are projected, too."""
    table = vectors(pa.list_(pa.float64()), Y).append_column("n", pa.array(IDS)).replace_schema_metadata({"of": "us"})

    def check(found: list[pa.RecordBatch]) -> None:
        assert sorted(batch.num_rows for batch in found) == [0, 50]
        for batch in found:
            assert batch.schema.names == ["v", "n"]
            assert batch.schema.metadata == {b"of": b"us"}
            assert batch.schema.field("v").type == pa.list_(pa.float32(), 2)

    with beam.Pipeline("FnApiRunner") as pipeline:
        batches = pipeline | beam.Create([table, table[:0]])
        assert_that(batches | ApplyPCA(PCA.fit(X, 2), column="v", output="v"), check)
