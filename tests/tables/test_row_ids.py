"""Tests of AddRowIds."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.testing.util import assert_that, equal_to

from luminosity import AddRowIds
from tests.both_runners import Pipelines

ROWS = pa.record_batch({"text": ["a", "b", "a"], "score": [1.0, 2.0, 3.0]})
# The ids that stores hold already: they must never change.
IDS = {"a": "9a57a0a5-0316-426c-03d0-549e09a06878", "b": "546f70ce-fb4c-b6d0-9640-816b115e470d"}


def ids_of(batch: pa.RecordBatch) -> list[str]:
    return batch["id"].to_pylist()


def test_the_same_values_have_the_same_id_in_every_run(pipelines: Pipelines) -> None:
    with pipelines() as (pipeline, _):
        table = pipeline | beam.Create([ROWS]) | AddRowIds(columns=["text"])
        assert_that(table | beam.Map(ids_of), equal_to([[IDS["a"], IDS["b"], IDS["a"]]]))


def test_all_columns_count_by_default() -> None:
    with beam.Pipeline("FnApiRunner") as pipeline:
        table = pipeline | beam.Create([ROWS]) | AddRowIds("row")
        assert_that(table | beam.Map(lambda batch: len(set(batch["row"].to_pylist()))), equal_to([3]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "text"}, r"there is a column 'text' already.*; pass another name="),
        ({"columns": ["txt"]}, "there is no column 'txt', expected one of text, score"),
        ({"columns": "text"}, r"found columns='text', expected a list of names, such as \['text'\]"),
    ],
)
def test_mistakes(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message), beam.Pipeline("FnApiRunner") as pipeline:
        _ = pipeline | beam.Create([ROWS]) | AddRowIds(**settings)
