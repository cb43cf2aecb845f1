"""Tests that dictionary-encoded columns count as their values, and which texts count as categories."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from luminosity import ReadTable
from luminosity.drift import column_test
from luminosity.evaluation import describe


def sample(seed: int, shares: list[float]) -> pa.Table:
    random = np.random.default_rng(seed)
    cities = pa.array(random.choice(["Basel", "Bern", "Genf"], 400, p=shares)).dictionary_encode()
    inner = pa.StructArray.from_arrays([cities], ["city"])
    free = pa.array([f"review number {number}" for number in random.permutation(10_000)[:400]])
    return pa.table({"city": cities, "place": inner, "text": free.dictionary_encode(), "is_new": cities.is_null()})


@pytest.mark.parametrize("in_files", [False, True], ids=["in memory", "in Parquet"])
def test_dictionaries_are_categories_and_free_texts_are_not(tmp_path: Path, in_files: bool) -> None:
    tables = {name: sample(at, shares) for at, (name, shares) in enumerate(_SHARES.items())}
    plain = {name: table.set_column(0, "city", table["city"].cast(pa.string())) for name, table in tables.items()}
    if in_files:
        for name, table in tables.items():
            pq.write_table(table, tmp_path / f"{name}.parquet")
            batches = [batch for _, batch in ReadTable(str(tmp_path / f"{name}.parquet")).all()]
            tables[name] = pa.Table.from_batches(batches)
            assert pa.types.is_dictionary(tables[name].schema.field("city").type)
    columns = ["city", "place.city", "text"]
    found = {each.name: each for each in column_test(tables["january"], tables["february"], columns).columns}
    assert {name: each.method for name, each in found.items()} == {
        "city": "chi-squared",
        "place.city": "chi-squared",
        "text": "Kolmogorov-Smirnov",  # of the lengths: no text occurs often
    }
    [expected] = column_test(plain["january"], plain["february"], ["city"]).columns
    assert (found["city"].distance, found["city"].statistic) == (expected.distance, expected.statistic)
    assert found["city"].adjusted < 0.001 < found["text"].adjusted
    described = describe(tables["january"], columns=columns)
    assert described.columns["city"].top == describe(plain["january"]).columns["city"].top
    assert (described.columns["city"].kind, described.columns["city"].distinct) == ("texts", 3)


def test_dictionaries_of_two_batches_may_differ() -> None:
    first, second = (
        pa.record_batch({"c": pa.array(values).dictionary_encode()}) for values in (["a", "b"], ["b", "c"])
    )
    assert describe([first, second]).columns["c"].top == [("b", 2), ("a", 1), ("c", 1)]


_SHARES = {"january": [0.5, 0.3, 0.2], "february": [0.2, 0.3, 0.5]}
