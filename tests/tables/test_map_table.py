"""Tests of MapTable with functions of batches and of frames."""

from __future__ import annotations

import datetime
import functools
from typing import TYPE_CHECKING, Any

import apache_beam as beam
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms.window import TimestampedValue

from luminosity import MapTable
from luminosity.errors import TableError
from luminosity.tables.frames import from_result, kind_of, to_frame
from luminosity.tables.map_table import _Mapper  # pyright: ignore[reportPrivateUsage]
from luminosity.testing import equal_table
from tests.both_runners import Pipelines

if TYPE_CHECKING:
    import pandas as unknown_at_run_time

TABLE = pa.record_batch(
    {
        "text": ["fine", "no", None],
        "stars": [5, None, 1],
        "vector": pa.array([[0.5, 1.0], None, [2.0, 3.0]], pa.list_(pa.float32(), 2)),
    }
)


def double_in_arrow(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.set_column(1, "stars", pc.multiply(batch["stars"], 2))


def double_in_pandas(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(stars=frame["stars"] * 2)


def double_in_polars(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(pl.col("stars") * 2)


def double_in_a_table(table: pa.Table) -> pa.Table:
    return table.set_column(1, "stars", pc.multiply(table["stars"], 2))


DOUBLERS = [double_in_arrow, double_in_pandas, double_in_polars, double_in_a_table]
DOUBLED = TABLE.set_column(1, "stars", pa.array([10, None, 2]))


@pytest.mark.parametrize("double", DOUBLERS)
def test_every_kind_of_frame_keeps_the_types(double: Any) -> None:
    """Columns that the function does not change keep their types: integers and texts with nulls, vectors."""
    assert _Mapper(double, kind_of(double, None), None).run(TABLE) == [DOUBLED]


def test_functions_of_all_kinds_in_a_pipeline(pipelines: Pipelines) -> None:
    with pipelines() as (pipeline, _):
        table = pipeline | beam.Create([TABLE.slice(0, 1), TABLE.slice(1)])
        for double in DOUBLERS:
            assert_that(table | MapTable(double), equal_table(DOUBLED), double.__name__)


def longer_than(batch: pa.RecordBatch, least: int, at: Any = beam.DoFn.TimestampParam, column: str = "text") -> Any:
    assert at.micros == 7_000_000
    return batch.filter(pc.greater_equal(pc.utf8_length(batch[column]), least))


def test_arguments_side_inputs_and_beams_own_parameters(pipelines: Pipelines) -> None:
    with pipelines() as (pipeline, _):
        least = pipeline | "Least" >> beam.Create([4])
        table = pipeline | "Table" >> beam.Create([TABLE]) | beam.Map(lambda batch: TimestampedValue(batch, 7))
        one = table | "Argument" >> MapTable(longer_than, 4)
        two = table | "Side" >> MapTable(longer_than, beam.pvalue.AsSingleton(least), column="text")
        none = table | "None" >> MapTable(longer_than, 100)
        assert_that(one, equal_table(TABLE.slice(0, 1)), "One")
        assert_that(two, equal_table(TABLE.slice(0, 1)), "Two")
        assert_that(none, equal_to([]), "An empty result is no element")
        assert one.element_type is pa.RecordBatch


def fail_on_no(batch: pa.RecordBatch) -> pa.RecordBatch:
    if "no" in batch["text"].to_pylist():
        raise LookupError("no good")
    return batch


def test_batches_that_fail_go_their_own_way(pipelines: Pipelines) -> None:
    with pipelines() as (pipeline, _):
        table = pipeline | beam.Create([TABLE.slice(0, 1), TABLE.slice(1)])
        good, bad = table | MapTable(fail_on_no).with_exception_handling(exc_class=LookupError)
        assert_that(good, equal_table(TABLE.slice(0, 1)), "Good")
        told = bad | beam.Map(lambda letter: (letter[0].num_rows, letter[1][0], "test_map_table.py:" in letter[1][1]))
        assert_that(told, equal_to([(2, LookupError, True)]), "Bad")


def test_an_error_names_the_function_its_line_and_the_columns(pipelines: Pipelines) -> None:
    def run() -> None:
        with pipelines() as (pipeline, _):
            _ = pipeline | beam.Create([TABLE.select(["text", "stars"])]) | MapTable(fail_on_no)

    line = fail_on_no.__code__.co_firstlineno + 2
    expected = (
        rf"no good \[in fail_on_no, .*test_map_table.py:{line}, on a batch of 3 rows with the columns text: string, s"
    )
    with pytest.raises(Exception, match=expected):
        run()


class Cleaner:
    def __call__(self, frame: pl.DataFrame, least: int = 0) -> pl.DataFrame:
        return frame.filter(pl.col("stars") > least)

    def method(self, frame: pd.DataFrame) -> pd.DataFrame:
        return frame.head(1)


def in_quotes(frame: unknown_at_run_time.DataFrame) -> None: ...


def bare(frame: DataFrame) -> None: ...  # noqa: F821  # pyright: ignore


def test_what_a_function_wants_is_told_by_its_annotation() -> None:
    assert kind_of(Cleaner(), None) == "polars"
    assert kind_of(Cleaner().method, None) == "pandas"
    assert kind_of(functools.partial(double_in_polars), None) == "polars"
    assert kind_of(lambda batch: batch, None) == "arrow"
    assert kind_of(lambda frame: frame, "pandas") == "pandas"
    with pytest.raises(TypeError, match=r"in_quotes \(.*\) takes unknown_at_run_time.DataFrame, expected"):
        kind_of(in_quotes, None)
    with pytest.raises(TypeError, match=r"bare .* takes DataFrame, expected"):
        kind_of(bare, None)
    with pytest.raises(ValueError, match="found as_='spark', expected 'arrow', 'pandas' or 'polars'"):
        kind_of(bare, "spark")


def test_objects_and_methods_are_functions_too() -> None:
    with beam.Pipeline("FnApiRunner") as pipeline:
        table = pipeline | beam.Create([TABLE])
        called = table | "Called" >> MapTable(Cleaner())
        method = table | "Method" >> MapTable(Cleaner().method)
        partial = table | "Partial" >> MapTable(functools.partial(double_in_polars))
        assert_that(called, equal_table(TABLE.take(pa.array([0, 2]))), "C")
        assert_that(method, equal_table(TABLE.slice(0, 1)), "M")
        assert_that(partial, equal_table(DOUBLED), "P")


@pytest.mark.parametrize(
    ("fn", "as_", "message"),
    [
        (
            lambda batch: None,
            "arrow",
            r"<lambda> \(.*test_map_table.py:\d+\) returned NoneType.*missing return",
        ),
        (lambda frame: frame["text"], "pandas", r"returned pandas.Series, expected pandas.DataFrame"),
        (lambda frame: frame.lazy(), "polars", r"returned polars.LazyFrame, expected polars.DataFrame.*collect"),
        (lambda frame: pd.DataFrame({"a": [1]}), "polars", r"returned pandas.DataFrame, expected polars"),
        (
            lambda frame: frame.assign(mixed=[1, "a", 2]),
            "pandas",
            r"can't become a table: Conversion failed for column mixed",
        ),
        (lambda frame: frame.rename(columns={"text": 0}), "pandas", r"with the columns \[0, .*expected texts as names"),
        (lambda frame: frame.assign(new=None), "pandas", r"nothing in 3 rows shows the type of the new column 'new'"),
    ],
)
def test_wrong_results_say_found_and_expected(fn: Any, as_: Any, message: str) -> None:
    with pytest.raises(TableError, match=message):
        _Mapper(fn, as_, None).run(TABLE)


def test_types_that_depend_on_values_are_refused_or_said() -> None:
    """A score of 2 in one batch and 2.5 in the next; a column that is null in all rows."""

    def scored(frame: pd.DataFrame) -> pd.DataFrame:
        return pd.DataFrame({"score": [2.5 if text == "no" else 2 for text in frame["text"]], "note": None})

    schema = pa.schema([("score", pa.float32()), ("note", pa.string())])
    sized = _Mapper(scored, "pandas", schema)
    assert sized.run(TABLE.slice(0, 1))[0].schema == sized.run(TABLE.slice(1))[0].schema == schema

    def only_score(frame: pd.DataFrame) -> pd.DataFrame:
        return scored(frame)[["score"]]

    later = _Mapper(only_score, "pandas", None)
    later.run(TABLE.slice(0, 1))
    with pytest.raises(TableError, match=r"found score: double, expected score: int64.*schema="):
        later.run(TABLE.slice(1))
    other = _Mapper(only_score, "pandas", None)
    other.run(TABLE.slice(1))
    assert other.run(TABLE.slice(0, 1))[0]["score"].to_pylist() == [
        2.0
    ]  # Nothing is lost, so the result is cast to the type before.


def test_a_schema_is_held_to() -> None:
    schema = pa.schema([("text", pa.string())])
    with pytest.raises(
        TableError, match=r"found the columns text, stars, vector; expected text; not expected: stars, v"
    ):
        _Mapper(lambda batch: batch, "arrow", schema).run(TABLE)
    wrong = pa.schema([("text", pa.int64())])
    with pytest.raises(TableError, match=r"column 'text': found string, expected int64"):
        _Mapper(lambda batch: batch.select(["text"]), "arrow", wrong).run(TABLE)
    with pytest.raises(TableError, match=r"can't become a table: Conversion failed for column text"):
        _Mapper(lambda frame: frame[["text"]], "pandas", wrong).run(TABLE)


def test_a_text_column_without_a_text_stays_one() -> None:
    nothing = pa.record_batch({"text": pa.array([None], pa.string())})
    for kind in ("pandas", "polars"):
        frame = to_frame(nothing, kind)
        assert from_result(frame, kind, "f", nothing.schema, None).schema == nothing.schema


def test_a_result_in_several_pieces_is_one_element() -> None:
    def twice(batch: pa.RecordBatch) -> pa.Table:
        return pa.Table.from_batches([batch, batch])

    assert [batch.num_rows for batch in _Mapper(twice, "arrow", None).run(TABLE)] == [6]


def test_nothing_is_copied_of_a_batch() -> None:
    (out,) = _Mapper(lambda batch: batch.select(["stars"]), "arrow", None).run(TABLE)
    assert out["stars"].buffers()[1].address == TABLE["stars"].buffers()[1].address


def test_what_is_no_table_or_no_function_is_refused() -> None:
    with pytest.raises(TableError, match=r"MapTable\(double_in_arrow\): found an element of type dict.*TableFromRows"):
        _Mapper(double_in_arrow, "arrow", None).run({"a": 1})
    with pytest.raises(TypeError, match="found 3, expected a function"):
        MapTable(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_times_and_columns_of_nulls_come_back_as_they_were(kind: Any) -> None:
    batch = pa.record_batch({"none": pa.nulls(2), "time": pa.array([datetime.time(1), None], pa.time64("us"))})
    with beam.Pipeline("FnApiRunner") as pipeline:
        table = pipeline | beam.Create([batch]) | MapTable(lambda frame: frame, as_=kind)
        assert_that(
            table | beam.Map(lambda found: (found.schema.types, found.to_pylist())),
            equal_to([(batch.schema.types, batch.to_pylist())]),
        )
