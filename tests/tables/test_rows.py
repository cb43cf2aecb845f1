"""Tests of TableFromRows and RowsFromTable: dicts, Beam Rows, NamedTuples and dataclasses."""

from __future__ import annotations

import datetime
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated, Any, NamedTuple, TypedDict

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms.window import FixedWindows, GlobalWindow, TimestampedValue
from apache_beam.utils.timestamp import Timestamp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from luminosity import RowsFromTable, TableFromRows
from luminosity.errors import TableError
from luminosity.tables.batch_builder import BatchBuilder
from luminosity.tables.row_maker import RowMaker
from luminosity.tables.rows import GatherDoFn
from tests.both_runners import Pipelines

UTC = datetime.timezone.utc


class Author(NamedTuple):
    name: str
    born: datetime.date | None = None


class Review(NamedTuple):
    text: str
    stars: int | None
    vector: Annotated[list[float], pa.list_(pa.float32(), 2)]


@dataclass
class Book:
    title: str
    authors: list[Author]
    price: Decimal
    sold: Timestamp
    tags: frozenset[str] = frozenset()
    counts: dict[str, int] = field(default_factory=dict)
    size: tuple[float, float] = (0.0, 0.0)
    note: str | None = None


class Loose(NamedTuple):
    a: int
    b: Any


class Typed(TypedDict):
    text: str
    n: float


REVIEWS = [Review("fine", 5, [0.5, 1.0]), Review("no", None, [0.0, -1.0])]
BOOKS = [
    Book("Dune", [Author("Frank", datetime.date(1920, 10, 8))], Decimal("9.99"), Timestamp(12.5), frozenset(["sand"])),
    Book("Emma", [Author("Jane"), Author("?")], Decimal(5), Timestamp(0), frozenset(), {"a": 1}, (1.5, 2.0), "old"),
]


def schema_of(batch: pa.RecordBatch) -> str:
    return ", ".join(f"{column.name}: {column.type}" for column in batch.schema)


def test_types_of_a_named_tuple_become_the_schema_and_rows_come_back(pipelines: Pipelines) -> None:
    with pipelines() as (pipeline, _):
        table = pipeline | beam.Create(REVIEWS).with_output_types(Review) | TableFromRows()
        expected = "text: string, stars: int64, vector: fixed_size_list<item: float>[2]"
        assert_that(table | beam.Map(schema_of) | beam.Distinct(), equal_to([expected]), "Schema")
        assert_that(table | RowsFromTable(Review), equal_to(REVIEWS), "Rows")


def test_a_dataclass_with_everything_comes_back_as_it_was(pipelines: Pipelines) -> None:
    with pipelines() as (pipeline, _):
        books = pipeline | beam.Create(BOOKS) | TableFromRows(Book) | RowsFromTable(Book)
        assert_that(books | beam.Map(repr), equal_to([repr(_with_nine_digits(book)) for book in BOOKS]))


def _with_nine_digits(book: Book) -> Book:
    return Book(**{**book.__dict__, "price": book.price.quantize(Decimal("1.000000000"))})


def test_dicts_with_a_schema_may_lack_columns(pipelines: Pipelines) -> None:
    schema = pa.schema([("text", pa.string()), ("stars", pa.int8()), ("vector", pa.list_(pa.float32(), 2))])
    rows = [{"text": "fine", "vector": np.array([0.5, 1.5])}, {"stars": 3}]
    with pipelines() as (pipeline, _):
        back = pipeline | beam.Create(rows) | TableFromRows(schema) | RowsFromTable()
        expected = [{"text": "fine", "stars": None, "vector": [0.5, 1.5]}, {"text": None, "stars": 3, "vector": None}]
        assert_that(back, equal_to(expected))


def test_what_beam_knows_of_rows_is_the_schema(pipelines: Pipelines) -> None:
    with pipelines() as (pipeline, _):
        rows = pipeline | beam.Create([1, 2]) | beam.Map(lambda n: beam.Row(n=int(n), half=n / 2, name=str(n)))
        table = rows | TableFromRows()
        assert_that(
            table | beam.Map(schema_of) | beam.Distinct(),
            equal_to(["n: int64, half: double, name: string"]),
            "Schema",
        )
        back = table | RowsFromTable(beam.Row) | beam.Map(lambda row: (row.n, row.half, row.name))
        assert_that(back, equal_to([(1, 0.5, "1"), (2, 1.0, "2")]), "Rows")


def test_rows_with_a_schema_have_a_type_that_beam_knows(pipelines: Pipelines) -> None:
    kind = pa.struct([("name", pa.string())])
    schema = pa.schema([("who", kind), ("at", pa.timestamp("us", "UTC")), ("n", pa.float64())])
    batch = pa.record_batch({"who": [{"name": "A"}], "at": [datetime.datetime(1970, 1, 1, 0, 1)], "n": [3]})
    with pipelines() as (pipeline, _):
        rows = pipeline | beam.Create([batch]) | RowsFromTable(beam.Row, schema=schema)
        assert isinstance(beam.coders.registry.get_coder(rows.element_type), beam.coders.RowCoder)
        summed = (
            rows | beam.Reshuffle() | beam.GroupBy("n").aggregate_field("n", sum, "total")
        )  # It encodes the rows and uses their names.
        assert_that(summed | beam.Map(lambda row: row.total), equal_to([3.0]), "Sum")
        values = rows | beam.Map(lambda row: (row.who.name, row.at, row.n))
        assert_that(values, equal_to([("A", Timestamp(60), 3.0)]), "Values")


def test_batches_keep_windows_and_times(pipelines: Pipelines) -> None:
    """A batch has rows of one window and the time of its earliest row; rows get their times back."""
    with pipelines() as (pipeline, _):
        rows = pipeline | beam.Create([{"t": t} for t in range(20)])
        timed = rows | beam.Map(lambda row: TimestampedValue(row, row["t"])) | beam.WindowInto(FixedWindows(10))
        table = timed | TableFromRows(pa.schema([("t", pa.int64())]), with_timestamps=True)

        def check(batch: pa.RecordBatch, at: Any = beam.DoFn.TimestampParam) -> tuple[int, bool]:
            times = batch["t"].to_pylist()
            assert len({time // 10 for time in times}) == 1
            return batch.num_rows, at == Timestamp(min(times))

        checked = table | beam.Map(check)
        assert_that(checked | beam.Values() | beam.Distinct(), equal_to([True, True]), "Earliest in each window")
        assert_that(checked | beam.Keys() | beam.CombineGlobally(sum).without_defaults(), equal_to([10, 10]), "Counts")
        again = (
            table | RowsFromTable(with_timestamps=True) | beam.Map(lambda row, at=beam.DoFn.TimestampParam: (row, at))
        )
        assert_that(again, equal_to([({"t": t}, Timestamp(t)) for t in range(20)]), "Times")


def test_a_batch_is_bounded_in_rows_and_bytes() -> None:
    schema = pa.schema([("text", pa.string())])

    def batches(rows: list[Any], rows_per_batch: int = 10_000, bytes_per_batch: int = 16_000_000) -> list[int]:
        gather = GatherDoFn(BatchBuilder(schema, None), rows_per_batch, bytes_per_batch, with_timestamps=False)
        gather.start_bundle()
        out = [*gather.process_batch(rows, Timestamp(0), GlobalWindow()), *gather.finish_bundle()]
        assert [row for batch in out for row in batch.value.to_pylist()] == rows
        return [batch.value.num_rows for batch in out]

    assert batches([{"text": "a"}] * 5000, rows_per_batch=2000) == [2000, 2000, 1000]
    assert batches([{"text": "a" * 1000}] * 10, bytes_per_batch=5000) == [5, 5]
    assert batches([{"text": "a" * 1000}], bytes_per_batch=1) == [1]
    # Few of many rows are large: a batch whose size was estimated too low is cut after it is built.
    assert max(batches([{"text": "a"}] * 1000 + [{"text": "a" * 100_000}], bytes_per_batch=50_000)) < 600


def test_without_event_times_the_column_is_null() -> None:
    with beam.Pipeline("FnApiRunner") as pipeline:
        table = pipeline | beam.Create([{"n": 1}]) | TableFromRows(with_timestamps=True)
        assert_that(table | beam.Map(lambda batch: batch["_timestamp"].to_pylist()), equal_to([[None]]), "Null")
        assert_that(table | RowsFromTable(with_timestamps=True), equal_to([{"n": 1}]), "Rows")


class TestMistakes:
    def test_the_row_at_fault_is_named_in_a_pipeline(self, pipelines: Pipelines) -> None:
        def run() -> None:
            with pipelines() as (pipeline, _):
                rows = pipeline | beam.Create([{"n": 1}, {"n": "x", "text": "this one"}])
                _ = rows | TableFromRows(pa.schema([("n", pa.int64()), ("text", pa.string())]))

        with pytest.raises(Exception, match=r"column 'n'.*found 'x' \(str\), expected int64.*this one"):
            run()

    @pytest.mark.parametrize(
        ("schema", "rows", "message"),
        [
            (None, [{"n": None}], r"column 'n': nothing in 1 rows shows its type.*schema="),
            (None, [{"n": []}], r"so far: list<item: null>"),
            (None, [{"n": 1}, {"n": "a"}], r"found 'a' \(str\), which does not fit the rows before.*schema="),
            (None, [{"n": object()}], r"found <object object.*schema="),
            (pa.schema([("n", pa.int64())]), [{"n": 1.5}], r"found 1.5 \(float\), expected int64: 1.5 is not a whole"),
            (pa.schema([("n", pa.list_(pa.int64()))]), [{"n": [1, 1.5]}], r"1.5 is not a whole number"),
            (pa.schema([("n", pa.int8())]), [{"n": 1}, {"n": 1000}], r"found 1000 \(int\), expected int8"),
            (
                pa.schema([("n", pa.int64())]),
                [{"n": 1, "m": 2}],
                r"column 'm': found 2 \(int\), expected the columns n;",
            ),
            (
                pa.schema([pa.field("n", pa.int64(), nullable=False)]),
                [{"n": 1}, {}],
                r"column 'n': found null, expected int64",
            ),
            (pa.schema([("s", pa.struct([("a", pa.int64())]))]), [{"s": {"a": 1, "b": 2}}], r"has b, which is not in"),
            (pa.schema([("v", pa.list_(pa.float32(), 2))]), [{"v": [1.0]}], r"column 'v': found \[1.0\] \(list\)"),
            (None, [{}, {}], r"found 2 rows without columns"),
            (None, [3], r"found an element of type int, expected a dict"),
            (Loose, [Loose(1, 2)], r"the annotations of b in Loose do not tell"),
        ],
    )
    def test_messages(self, schema: Any, rows: list[Any], message: str) -> None:
        with pytest.raises((TableError, TypeError), match=message):
            BatchBuilder(schema, None).build(rows)

    @pytest.mark.parametrize(
        ("before", "after", "message"),
        [
            ({"n": 1}, {"n": 1.5}, r"column 'n': found 1.5 \(float\), expected int64 as in the rows before.*schema="),
            ({"n": 1}, {"n": 1, "m": 0}, r"column 'm': found 0 \(int\), expected the columns n as in the rows before"),
            ({"s": {"a": 1}}, {"s": {"a": 1, "b": 2}}, r"column 's': found {'a': 1, 'b': 2}"),
        ],
    )
    def test_later_rows_that_differ(self, before: Any, after: Any, message: str) -> None:
        builder = BatchBuilder(None, None)
        builder.build([before])
        with pytest.raises(TableError, match=message):
            builder.build([before, after])

    def test_limits_and_kinds_are_checked_at_once(self) -> None:
        with pytest.raises(ValueError, match="found rows_per_batch=0, expected 1 or more"):
            TableFromRows(rows_per_batch=0)
        with pytest.raises(TypeError, match=r"found schema=3, expected a pyarrow.Schema"):
            TableFromRows(3)
        with pytest.raises(TypeError, match=r"expected dict, beam.Row, or a dataclass"):
            RowsFromTable(list)
        with pytest.raises(TypeError, match=r"expected it only with beam.Row"):
            RowsFromTable(schema=pa.schema([]))

    def test_a_class_wants_what_the_table_does_not_have(self) -> None:
        with pytest.raises(TableError, match="found the columns text, expected also stars, vector, which Review"):
            RowMaker(Review).rows(pa.record_batch({"text": ["a"]}))

    def test_nanoseconds_are_not_lost_in_silence(self) -> None:
        exact = pa.record_batch({"t": pa.array([1000], pa.timestamp("ns"))})
        assert RowMaker(dict).rows(exact) == [{"t": datetime.datetime(1970, 1, 1, 0, 0, 0, 1)}]
        with pytest.raises(TableError, match=r"column 't' of type timestamp\[ns\].*MapTable"):
            RowMaker(dict).rows(pa.record_batch({"t": pa.array([1], pa.timestamp("ns"))}))


def test_later_rows_take_the_types_of_the_first() -> None:
    builder = BatchBuilder(None, None)
    first = builder.build([{"f": 0.5, "s": "a", "l": [1.5], "at": datetime.datetime(2024, 1, 1, tzinfo=UTC)}])
    later = builder.build([{"f": 1, "s": None, "l": []}])
    assert later.schema == first.schema
    assert later.to_pylist() == [{"f": 1.0, "s": None, "l": [], "at": None}]


def test_types_that_a_class_leaves_open_are_learned() -> None:
    builder = BatchBuilder(None, Loose)
    assert schema_of(builder.build([Loose(1, "x")])) == "a: int64, b: string"
    assert schema_of(builder.build([Loose(1, None)])) == "a: int64, b: string"


def test_a_typed_dict_is_a_schema() -> None:
    assert schema_of(BatchBuilder(Typed, None).build([{"text": "a", "n": 1}])) == "text: string, n: double"


def test_rows_of_several_kinds_may_meet() -> None:
    rows = [{"name": "a"}, beam.Row(name="b"), Author("c")]
    built = BatchBuilder(None, None).build([*rows[:2], Author("c", datetime.date(2000, 1, 1))])
    assert built["name"].to_pylist() == ["a", "b", "c"]


# For any schema and rows that it allows, the same rows come back.

_NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=4)


def _within(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a type, or null."""
    return st.none() | _SIMPLE[kind]() if kind in _SIMPLE else st.none() | _nested(kind)


def _nested(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_struct(kind):
        return st.fixed_dictionaries({child.name: _within(child.type) for child in kind})
    if pa.types.is_map(kind):
        return st.dictionaries(_NAMES, _within(kind.item_type), max_size=3)
    size = kind.list_size if pa.types.is_fixed_size_list(kind) else None
    return st.lists(_within(kind.value_type), min_size=size or 0, max_size=size if size is not None else 3)


def _integers(bits: int) -> Callable[[], st.SearchStrategy[Any]]:
    return lambda: st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


_SIMPLE: dict[pa.DataType, Callable[[], st.SearchStrategy[Any]]] = {
    pa.bool_(): st.booleans,
    pa.int8(): _integers(8),
    pa.int64(): _integers(64),
    pa.uint16(): lambda: st.integers(0, 2**16 - 1),
    pa.float32(): lambda: st.floats(width=32, allow_nan=False),
    pa.float64(): lambda: st.floats(allow_nan=False),
    pa.string(): lambda: st.text(max_size=5),
    pa.large_string(): lambda: st.text(max_size=5),
    pa.binary(): lambda: st.binary(max_size=5),
    pa.date32(): st.dates,
    pa.timestamp("us"): st.datetimes,
    pa.timestamp("us", "UTC"): lambda: st.datetimes(timezones=st.just(UTC)),
    pa.duration("us"): lambda: st.timedeltas(datetime.timedelta(-1000), datetime.timedelta(1000)),
    pa.decimal128(10, 2): lambda: st.decimals(-(10**6), 10**6, places=2),
    pa.dictionary(pa.int32(), pa.string()): lambda: st.text(max_size=2),
}
_TYPES: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(list(_SIMPLE)),
    lambda inner: (
        st.builds(pa.list_, inner)
        | st.builds(pa.list_, inner, st.integers(1, 3))
        | st.builds(
            lambda kinds: pa.struct(list(kinds.items())), st.dictionaries(_NAMES, inner, min_size=1, max_size=3)
        )
        | st.builds(lambda kind: pa.map_(pa.string(), kind), inner)
    ),
    max_leaves=4,
)


@given(data=st.data(), kinds=st.dictionaries(_NAMES, _TYPES, min_size=1, max_size=4))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_rows_come_back_as_they_were_for_any_schema(data: st.DataObject, kinds: dict[str, Any]) -> None:
    row = st.fixed_dictionaries({name: _within(kind) for name, kind in kinds.items()})
    rows = data.draw(st.lists(row, min_size=1, max_size=5))
    batch = BatchBuilder(pa.schema(list(kinds.items())), None).build(rows)
    skip = data.draw(st.integers(0, len(rows) - 1))

    assert RowMaker(dict).rows(batch) == rows
    assert RowMaker(dict).rows(batch.slice(skip)) == rows[skip:]


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (pa.date32(), datetime.datetime(2024, 1, 31, 12), "2024-01-31 12:00:00 is not only a date"),
        (pa.list_(pa.date32()), [datetime.datetime(2024, 1, 31, 12)], "2024-01-31 12:00:00 is not only a date"),
        (pa.list_(pa.string()), "abc", "a text is not a list"),
        (pa.list_(pa.list_(pa.string())), ["abc"], "a text is not a list"),
    ],
)
def test_values_that_would_change_without_a_word_are_refused(kind: pa.DataType, value: object, message: str) -> None:
    builder = BatchBuilder(pa.schema([("x", kind)]), None)
    with pytest.raises(TableError, match=message):
        builder.build([{"x": None}, {"x": value}])
    assert builder.build([{"x": None}]).num_rows == 1
