"""Tests of how error messages show an element: as the user's own data."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.coders import coder_impl
from apache_beam.io import ReadFromText
from apache_beam.io.restriction_trackers import OffsetRange

from luminosity.engine.workers.failure import Failure, describe_element, describe_input
from luminosity.inference.enrich.table_steps import TableBlock
from luminosity.inference.steps.messages import PreparedBlock, ResultBlock
from luminosity.io.formats import Format
from luminosity.io.reading.find_files import TableFile
from luminosity.io.reading.reader import ByteRange

_concat: Any = coder_impl._ConcatSequence  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
_TABLE = pa.record_batch({"text": ["a", "b"], "vector": [[1.0], [2.0]]})


class Broken:
    def __iter__(self) -> Any:
        raise RuntimeError("gone")


Broken.__module__ = "apache_beam.fake"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("text", "'text'"),
        (("key", _concat([1, 2], [3])), "('key', [1, 2, 3])"),
        (("key", {"left": _concat([1], [])}), "('key', {'left': [1]})"),
        (_concat(list(range(15)), list(range(15))), f"[{', '.join(map(str, [*range(15), *range(5)]))}, …]"),
        ((1,), "(1,)"),
        (TableBlock(_TABLE, own=1), "2 rows: {'text': 'a'}, {'text': 'b'}"),
        (pa.table({"n": range(5000)}), "5,000 rows: {'n': 0}, {'n': 1}, {'n': 2}, …"),
        (_TABLE.slice(0, 0), "0 rows"),
        (PreparedBlock(["a", "b"], [0, 0], None), "['a', 'b']"),
        (ResultBlock(["a"], [0], [1.0], None), "['a']"),
        (TableFile("/data/a.parquet", 9, Format.PARQUET), "'/data/a.parquet'"),
        (np.zeros((2, 2)), "array([[0., 0.], [0., 0.]])"),
        (Broken(), "<values that can't be read: RuntimeError>"),
        ("x" * 1000, "'" + "x" * 198 + "…"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_element_is_shown_as_the_users_data(value: Any, shown: str) -> None:
    assert describe_element(value) == shown


def test_a_part_of_a_file_is_shown_with_its_path() -> None:
    file = TableFile("/data/a.parquet", 900, Format.PARQUET)
    assert describe_input(((file, (ByteRange(0, 90), None)), 90.0)) == "'/data/a.parquet', bytes 0 to 90"
    assert describe_input((("a", (OffsetRange(2, 5), None)), 3.0)) == "'a', OffsetRange(start=2, stop=5)"
    source: Any = ReadFromText("/data/*.txt", validate=False)._source  # pyright: ignore[reportPrivateUsage]
    assert describe_input(((source, (Broken(), None)), 3.0)) == "files '/data/*.txt'"
    assert describe_input(b"") == ""
    mine = (("key", (1, 2)), 3.0)
    assert describe_input(mine) == repr(mine)


def test_a_function_of_a_tuples_parts_has_the_whole_tuple_as_its_element() -> None:
    def divide(a: int, b: int) -> float:
        return a / b

    wrapped: Any = beam.MapTuple(divide).fn
    with pytest.raises(ZeroDivisionError) as caught:
        wrapped.process((1, 0))
    error = caught.value.with_traceback(caught.value.__traceback__.tb_next)  # type: ignore[union-attr]
    assert Failure.of(error).element == "(1, 0)"
