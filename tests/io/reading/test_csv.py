"""Tests of CSV as it comes: delimiters, encodings, line breaks in values, and lines that can't be read."""

from __future__ import annotations

import csv
import io
import random
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.testing.util import assert_that, equal_to
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from luminosity import ReadTable, WriteTable
from luminosity.errors import TableError
from luminosity.io.reading import csv_reader, csv_rows
from luminosity.io.reading.readers import ReadRanges
from tests.both_runners import Pipelines
from tests.io.reading.reads import counters, read_alone, write_bytes

ROWS = [{"id": 1, "text": "fine"}, {"id": 2, "text": "poor"}]


def read(path: Path, data: bytes, **arguments: Any) -> list[dict[str, Any]]:
    write_bytes(path, data)
    return read_alone(ReadTable(path, **arguments))


def bad_lines(path: Path, data: bytes, **arguments: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows and the dead letters of a file."""
    write_bytes(path, data)
    good, bad = ReadTable(path, **arguments).with_exception_handling().first_with_letters(1 << 40)
    return [row for batch in good for row in batch.to_pylist()], [row for batch in bad for row in batch.to_pylist()]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_a_delimiter_is_recognised(delimiter: str, name: str, tmp_path: Path) -> None:
    assert read(tmp_path / name, f"id{delimiter}text\n1{delimiter}fine\n2{delimiter}poor\n".encode()) == ROWS


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("price;weight\n1,5;2\n2,5;3\n", ["price", "weight"]),  # decimal commas
        ("price, EUR;weight, kg\n1,5;2,5\n", ["price, EUR", "weight, kg"]),
        ("id,text\n1,a;b\n2,c|d\n", ["id", "text"]),
        ('id,"a;b;c"\n1,"x;y;z"\n', ["id", "a;b;c"]),
        ("weight;kg\n5\n6\n", ["weight;kg"]),
        ("text\na;b\nc;d\n", ["text"]),
        ("id;text", ["id", "text"]),
        ("id;text\n1;a;more\n2;b;more\n", ["id", "text"]),  # no line fits, but a semicolon it is
        ('id;text\n1;"a\n,b,\n;"\n2;c\n', ["id", "text"]),
        ("sep=;\nid;text,long\n1;a\n", ["id", "text,long"]),
        ("SEP=|\r\na|b\r\n1|2\r\n", ["a", "b"]),
    ],
)
def test_which_delimiter_it_is(text: str, names: list[str], tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    assert ReadTable(tmp_path / "t.csv").schema.names == names


def test_a_delimiter_that_is_given(tmp_path: Path) -> None:
    assert read(tmp_path / "t.csv", b"id:text\n1:fine\n2:poor\n", delimiter=":") == ROWS
    assert read(tmp_path / "t.csv", b"a;b\n1;2\n", delimiter=",") == [{"a;b": "1;2"}]
    for wrong in ("", ";;", '"', "\n", "ß"):
        with pytest.raises(TableError, match=r"found delimiter=.*, expected one ASCII character"):
            ReadTable(tmp_path / "t.csv", delimiter=wrong)


def test_files_of_one_table_may_have_different_delimiters(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id;text\n1;fine\n")
    (tmp_path / "b.csv").write_text("id,text\n2,poor; very; poor\n")
    (tmp_path / "c.tsv").write_text("text\tid\nso, so\t3\n")
    assert read_alone(ReadTable(tmp_path)) == [
        {"id": 1, "text": "fine"},
        {"id": 2, "text": "poor; very; poor"},
        {"id": 3, "text": "so, so"},
    ]


def test_decimal_commas_are_numbers_if_the_user_says_so(tmp_path: Path) -> None:
    found = read(tmp_path / "t.csv", b"a;b;c\n1,5;1.5;7\n2;2;8\n", decimal_point=",")
    assert found == [{"a": 1.5, "b": "1.5", "c": 7}, {"a": 2.0, "b": "2", "c": 8}]
    with pytest.raises(TableError, match=r"found decimal_point=';', expected '\.' or ','"):
        read(tmp_path / "t.csv", b"a\n1\n", decimal_point=";")


def test_decimal_commas_stay_texts(tmp_path: Path) -> None:
    assert read(tmp_path / "t.csv", b"a;b\n1,5;1.234,5\n") == [{"a": "1,5", "b": "1.234,5"}]


@pytest.mark.parametrize("name", ["t.tsv", "t.tsv.gz"])
def test_tabs_are_read_and_written(name: str, tmp_path: Path, pipelines: Pipelines) -> None:
    with pipelines() as (pipeline, _):
        _ = pipeline | beam.Create([pa.RecordBatch.from_pylist(ROWS)]) | WriteTable(str(tmp_path / name))
    assert read_alone(ReadTable(tmp_path / name)) == ROWS
    if name == "t.tsv":
        assert (tmp_path / name).read_text().splitlines() == ['"id"\t"text"', '1\t"fine"', '2\t"poor"']
    # The name says that it is a tab, whatever the values look like.
    assert read(tmp_path / "one.tsv", b"city, country\nBern, CH\n") == [{"city, country": "Bern, CH"}]


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252", "latin-1", "shift_jis"]
)
def test_encodings(encoding: str, tmp_path: Path) -> None:
    texts = ["東京", "表|示"] if encoding == "shift_jis" else ["Zürich", "Genève"]
    text = f"id;text\r\n1;{texts[0]}\r\n2;{texts[1]}\r\n"
    expected = [{"id": 1, "text": texts[0]}, {"id": 2, "text": texts[1]}]
    assert read(tmp_path / "t.csv", text.encode(encoding), encoding=encoding) == expected
    assert read(tmp_path / "t.csv.gz", text.encode(encoding), encoding=encoding) == expected
    if encoding.startswith("utf"):
        assert read(tmp_path / "t.csv", text.encode(encoding)) == expected


def test_an_encoding_that_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"found encoding='cp1253x', expected an encoding .*; did you mean 'cp125"):
        read(tmp_path / "t.csv", b"a\n1\n", encoding="cp1253x")
    with pytest.raises(TableError, match="found encoding='base64', expected an encoding"):
        read(tmp_path / "t.csv", b"a\n1\n", encoding="base64")


def test_what_is_not_utf8_names_the_likely_encoding(tmp_path: Path) -> None:
    text = "id,text\n1,plain\n2,Zürich\n"
    with pytest.raises(
        TableError,
        match=r"line 3: found bytes that are not utf-8, perhaps they are cp1252; .*'2,Z.*xfcrich'; .*'cp1252'",
    ) as error:
        read(tmp_path / "t.csv", text.encode("cp1252"))
    assert error.value.for_command().endswith("add --encoding cp1252 if that is its encoding")
    with pytest.raises(TableError, match=r"not utf-8 in the header .*; pass encoding='cp1252'"):
        read(tmp_path / "t.csv", "größe,text\n1,a\n".encode("cp1252"))
    with pytest.raises(TableError, match=r"not utf-8 in the header"):  # UTF-16 without a mark
        read(tmp_path / "t.csv", "大,text\n1,a\n".encode("utf-16-le"))


def test_lines_that_end_with_a_carriage_return(tmp_path: Path) -> None:
    assert read(tmp_path / "t.csv", b"id;text\r1;fine\r2;poor\r") == ROWS


TEXTS = st.text(st.sampled_from('ab",;\n\r \t|é'), max_size=8)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    texts=st.lists(TEXTS, max_size=30),
    delimiter=st.sampled_from(",;\t|"),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    line_end=st.sampled_from(["\n", "\r\n"]),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "latin-1", "utf-16"]),
    block=st.integers(1, 100),
    seed=st.integers(0, 1 << 30),
)
def test_line_breaks_in_values_wherever_the_file_is_cut(
    texts: list[str], delimiter: str, quoting: Any, line_end: str, encoding: str, block: int, seed: int
) -> None:
    if quoting == csv.QUOTE_MINIMAL:
        texts = [each.replace("\r", "") for each in texts]  # Python does not quote it.
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, quoting=quoting, lineterminator=line_end)
    writer.writerow(["id", "a\nheader", "more"])
    writer.writerows([number, each, "x"] for number, each in enumerate(texts))
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.multiple(csv_reader, TEXT_BYTES=block, _READ_AHEAD=block // 3 + 1),
        mock.patch("luminosity.io.reading.readers.PIECE_BYTES", block),
    ):
        (Path(folder) / "t.csv").write_bytes(text.getvalue().encode(encoding))
        schema = pa.schema({"id": pa.int64(), "a\nheader": pa.string(), "more": pa.string()})
        given = "latin-1" if encoding == "latin-1" else None
        transform = ReadTable(folder, schema=schema, encoding=given, null_values=[])
        for rng in (random.Random(seed), None):
            found = sorted(read_alone(transform, rng), key=lambda row: row["id"])
            assert [row["a\nheader"] for row in found] == texts


def test_a_large_file_is_cut_between_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("luminosity.io.reading.readers.PIECE_BYTES", 1000)
    monkeypatch.setattr(csv_reader, "TEXT_BYTES", 500)
    lines = [f'{number},"one\nnine 6"" pipes, {number}"\n' for number in range(300)]
    (tmp_path / "t.csv").write_text("id,text\n" + "".join(lines))
    transform = ReadTable(tmp_path)
    step = ReadRanges(transform._settings)
    (file,) = transform._files
    pieces = list(step.split(file, step.initial_restriction(file)))
    data = (tmp_path / "t.csv").read_bytes()
    assert len(pieces) > 5
    assert all(data[piece.start - 4 : piece.start].endswith(b'"\n') for piece in pieces[1:])
    assert sorted(row["id"] for row in read_alone(transform)) == list(range(300))


LOOSE = st.lists(
    st.sampled_from(
        ["1,2\n", '5" x,2\n', '"a"b,2\n', '"a,2\n', '"a\nb",2\n', 'a,"b\n', '"a","b"""\n', "\n", "a\rb,c\n"]
    ),
    max_size=15,
)


@settings(max_examples=100, deadline=None)
@given(parts=LOOSE, block=st.integers(1, 40), seed=st.integers(0, 1 << 30))
def test_quotes_in_odd_places_are_read_alike_wherever_the_file_is_cut(parts: list[str], block: int, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "t.csv").write_text("".join(["x,y\n", *parts]))
        schema = pa.schema({"x": pa.string(), "y": pa.string()})
        whole, letters = _all(ReadTable(folder, schema=schema))
        with mock.patch.multiple(csv_reader, TEXT_BYTES=block, _READ_AHEAD=block // 3 + 1):
            assert _all(ReadTable(folder, schema=schema), random.Random(seed)) == (whole, letters)


def _all(transform: ReadTable, rng: random.Random | None = None) -> tuple[list[Any], list[Any]]:
    letters: list[Any] = []
    rows = read_alone(transform.with_exception_handling(), rng, letters)
    key = lambda row: str(list(row.values()))  # noqa: E731
    return sorted(rows, key=key), sorted(letters, key=key)


def test_a_quote_that_is_not_closed_costs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b'id,text\n1,fine\n2,"oops\n3,good\n4,"good, too"\n5,good\n'
    with pytest.raises(
        TableError, match=r"t.csv, line 3: a quoted value begins in this line and does not end.*'2,\"oops'"
    ):
        read(tmp_path / "t.csv", data)
    for text in (data, data[:30], data.replace(b'"good, too"', b"good")):
        rows, letters = bad_lines(tmp_path / "t.csv", text)
        assert [row["id"] for row in rows][:2] == [1, 3]
        assert [(row["_line"], row["_text"]) for row in letters] == [(3, '2,"oops')]
    monkeypatch.setattr(csv_rows, "_MOST_ROW_BYTES", 1000)
    lines = b"".join(b"%d,good\n" % number for number in range(3, 1000))
    for block in (100, 1 << 20):
        monkeypatch.setattr(csv_reader, "TEXT_BYTES", block)
        rows, letters = bad_lines(tmp_path / "t.csv", b'id,text\n1,fine\n2,"oops\n' + lines)
        assert len(rows) == 998
        assert [row["_line"] for row in letters] == [3]


BAD = b"id,text\n1,fine\n2\n3,a,b\n4,Z\xfcrich\n5,good\n"


def test_lines_that_can_not_be_read_become_dead_letters(tmp_path: Path, pipelines: Pipelines) -> None:
    (tmp_path / "a.csv").write_bytes(BAD)
    (tmp_path / "b.csv").write_bytes(b"id,text\nsix,fine\n7,good\n")
    (tmp_path / "c.jsonl").write_text('{"id": 8, "text": "fine"}\n{"id": 9\n')

    with pipelines() as (pipeline, run):
        good, bad = pipeline | ReadTable(tmp_path).with_exception_handling()
        ids = good | "Ids" >> beam.FlatMap(lambda batch: batch["id"].to_pylist())
        assert_that(ids, equal_to([1, 5, 7, 8]), "good")
        letters = bad | "Letters" >> beam.FlatMap(pa.RecordBatch.to_pylist)
        short = letters | beam.Map(lambda row: (row["_file"].rpartition("/")[2], row["_line"], row["_text"]))
        expected = [
            ("a.csv", 3, "2"),
            ("a.csv", 4, "3,a,b"),
            ("a.csv", 5, r"4,Z\xfcrich"),
            ("b.csv", 2, "six,fine"),
            ("c.jsonl", 2, '{"id": 9'),
        ]
        assert_that(short, equal_to(expected), "bad")

    assert counters(run.result)["lines_unreadable"] == 5


def test_without_dead_letters_the_pipeline_is_refused_when_it_is_built(tmp_path: Path) -> None:
    """The lines that types are guessed from are read then, so that nothing has run yet."""
    (tmp_path / "t.csv").write_bytes(BAD)
    transform = ReadTable(tmp_path)
    assert transform.schema == pa.schema({"id": pa.int64(), "text": pa.string()})
    with pytest.raises(
        TableError, match=r"t\.csv, line 3: found 1 value, expected 2 as in the header; the line is '2'"
    ):
        _ = beam.Pipeline() | transform
    with pytest.raises(
        TableError, match=r"t\.csv, line 3: .*; correct the line \(a value that contains ',' needs quotes"
    ):
        list(transform.all())


def test_a_value_that_fits_no_more_behind_the_first_megabyte(tmp_path: Path) -> None:
    lines = b"".join(b"%d,%s\n" % (number, b"x" * 90) for number in range(12_000))
    (tmp_path / "t.csv").write_bytes(b"id,text\n" + lines + b"unknown,last\n")
    with pytest.raises(
        TableError, match=r"t\.csv, line 12002: found 'unknown' in column 'id', expected int64; .*'unknown,last'"
    ):
        read_alone(ReadTable(tmp_path))


def test_line_numbers_count_lines_in_values(tmp_path: Path) -> None:
    rows, letters = bad_lines(tmp_path / "t.csv", b'\n\nid,text\n1,"a\nb\nc"\n2\n\n3\n4,"d\ne",5\n')
    assert rows == [{"id": 1, "text": "a\nb\nc"}]
    assert [(row["_line"], row["_text"]) for row in letters] == [(7, "2"), (9, "3"), (10, '4,"d\ne",5')]


@pytest.mark.parametrize(
    ("text", "types", "rows"),
    [
        ("a,b\n1,NA\nNA,DE\n", "int64 string", "1 NA, None DE"),
        ('a,b\n1,"NA"\n"",DE\n#N/A,"-"\n,\n', "int64 string", "1 NA, None DE, None -, None None"),
        ("a,b\n1.5,true\nnull,NULL\nnan,false\n", "double bool", "1.5 True, None None, nan False"),
        ("a,b\n2026-01-02,x\nn/a,y\n", "date32[day] string", "2026-01-02 x, None y"),
        ("a,b\nNA,1\nNA,2\n", "string int64", "NA 1, NA 2"),
        ("a,b\n01234,1\nNA,2\n", "string int64", "01234 1, NA 2"),
        ("a,b\n12345678901234567890,1\n7,2\n", "string int64", "12345678901234567890 1, 7 2"),
        ("a,b\n9223372036854775807,0\n0,0.5\n", "int64 double", "9223372036854775807 0.0, 0 0.5"),
    ],
    ids=["numbers", "quotes", "booleans", "dates", "only marks", "leading zeros", "large numbers", "largest number"],
)
def test_marks_of_nulls_and_codes(text: str, types: str, rows: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    table = ReadTable(tmp_path / "t.csv")
    assert " ".join(map(str, table.schema.types)) == types
    assert ", ".join(" ".join(map(str, row.values())) for row in read_alone(table)) == rows


def test_a_column_that_is_text_against_expectations_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = ["price,amount,name", *(f'{number},"{number},5",x{number}' for number in range(99)), 'unknown,"1,5",y']
    (tmp_path / "t.csv").write_text("\n".join(lines))
    _ = beam.Pipeline("FnApiRunner") | ReadTable(tmp_path / "t.csv")
    first, second = (record.getMessage() for record in caplog.records if record.name == "luminosity.io.read_table")
    assert "column 'price' is text because of 'unknown' in 1 of 100 values; the others are numbers" in first
    assert "pass null_values=['', 'unknown'] if that means null" in first
    assert "column 'amount' is text because of decimal commas, such as '0,5'; pass decimal_point=','" in second
    caplog.clear()
    _ = beam.Pipeline("FnApiRunner") | ReadTable(tmp_path / "t.csv", columns=["name"])
    assert not caplog.records


def test_times_in_several_forms_are_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("when\n2026-01-02 10:00:00\n2026-01-03T10:00:00Z\n")
    [doubt] = ReadTable(tmp_path / "t.csv").take_doubts()
    assert doubt.message.endswith(
        "column 'when' is text because of times in several forms: '2026-01-02 10:00:00' is the first"
    )


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path: Path) -> None:
    for name in ("a.csv", "README.md", "b.xlsx", ".hidden.csv", "2026/c.csv", "day=1/_SUCCESS", "_x/d.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("n\n1\n")
    table = ReadTable(tmp_path)
    [doubt] = table.take_doubts()
    assert [file.path for file in table.files] == [str(tmp_path / "a.csv")]
    assert doubt.message.startswith("2 files are not read: ")
    assert all(str(tmp_path / name) in doubt.message for name in ("b.xlsx", "2026/c.csv"))


@pytest.mark.parametrize(
    ("other", "kind", "says"),
    [("1", "uint64", ""), ("-1", "double", "in which 12345678901234567890 loses digits; write such numbers as texts")],
)
def test_large_numbers_of_json_keep_their_digits_or_are_named(other: str, kind: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(f'{{"a": {other}, "b": 1.5}}\n{{"a": 12345678901234567890, "b": 2}}\n')
    table = ReadTable(tmp_path / "t.jsonl")
    assert str(table.schema.field("a").type) == kind
    assert [says in str(doubt) for doubt in table.take_doubts()] == [True] * bool(says)
    assert (read_alone(table)[1]["a"] == 12345678901234567890) is not bool(says)
