"""Tests of digests, of rows in any order, and of masked secrets."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from luminosity.runs.manifest.contents import compare_tables, content_digest, read_files
from luminosity.runs.manifest.files import digest_files, files_of
from luminosity.runs.manifest.masking import mask_words
from luminosity.runs.manifest.places import Place, seal

_COLUMNS: dict[str, Any] = {
    "text": ["a", "b", None, "b"],
    "number": pa.array([1, 2, None, 2**63], pa.uint64()),
    "vector": pa.array([[0.1, 0.2], [0.3, 0.4], None, [0.5, 0.6]], pa.list_(pa.float32(), 2)),
    "ragged": [[1], [], None, [2, 3]],
    "nested": [{"score": 0.5, "tags": ["x"]}, {"score": None, "tags": []}, None, {"score": 1.5, "tags": ["y", "z"]}],
    "day": [datetime.date(2026, 1, day) for day in (1, 2, 3, 4)],
    "time": pa.array([1, 2, None, 4], pa.timestamp("us", "UTC")),
    "flag": [True, False, None, True],
    "kind": pa.array(["u", "v", "u", None]).dictionary_encode(),
    "bytes": [b"1", b"", None, b"2"],
    "nothing": pa.nulls(4),
}


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [1, 0, 3, 2]])
def test_rows_of_every_type_are_the_same_in_any_order(order: list[int]) -> None:
    table = pa.table(_COLUMNS)
    assert content_digest(table) == content_digest(table.take(order))
    assert compare_tables(table, table.take(order)).is_same
    assert compare_tables(table, pa.concat_tables([table.slice(2), table.slice(0, 2)])).is_same


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("text", ["a", "b", "", "b"]),
        ("number", pa.array([1, 2, 0, 2**63], pa.uint64())),
        ("ragged", [[1], [], None, [3, 2]]),
        ("nested", [{"score": 0.5, "tags": ["x"]}, None, None, {"score": 1.5, "tags": ["y", "z"]}]),
        ("flag", [True, True, None, True]),
        ("bytes", [b"1", b"", None, b"3"]),
    ],
)
def test_one_changed_value_is_one_changed_row(name: str, values: Any) -> None:
    before = pa.table(_COLUMNS)
    now = pa.table({**_COLUMNS, name: values})
    found = compare_tables(before, now.take([2, 3, 0, 1]))
    assert not found.is_within(1)
    assert (found.before, found.now, found.changed) == (4, 4, 1)


def test_rounding_is_told_apart_from_other_values() -> None:
    before = pa.table(_COLUMNS)
    vector = pa.array([[0.1, 0.2], [0.3, 0.4000001], None, [0.5, 0.6]], pa.list_(pa.float32(), 2))
    found = compare_tables(before, pa.table({**_COLUMNS, "vector": vector}).take([3, 1, 0, 2]))
    assert not found.is_same
    assert found.largest is not None
    assert 5e-8 < found.largest < 2e-7
    assert found.is_within(1e-6)
    assert not found.is_within(1e-8)


def test_rows_that_repeat_and_columns_that_differ_are_told() -> None:
    once, twice = pa.table({"n": [1, 2]}), pa.table({"n": [1, 2, 2]})
    assert compare_tables(once, twice).changed == 1
    assert compare_tables(once, pa.table({"n": ["1", "2"]})).columns == "column 'n' was int64, is string"
    assert "column 'm' is new" in compare_tables(once, pa.table({"m": [1, 2]})).columns


def test_files_and_partitions_do_not_matter_for_the_content(tmp_path: Path) -> None:
    for folder, cuts in (("one", [(0, 4)]), ("two", [(2, 4), (0, 2)])):
        (tmp_path / folder / "lang=en").mkdir(parents=True)
        for number, (begin, end) in enumerate(cuts):
            part = pa.table({"n": list(range(begin, end))})
            pq.write_table(part, tmp_path / folder / "lang=en" / f"part-{number}.parquet")
            lines = "".join(f"{n}\n" for n in range(begin, end))
            (tmp_path / folder / f"part-{number}.csv").write_text("n\n" + lines)
    for pattern in ("lang=en", "*.csv"):
        one, two = (
            read_files(files_of(str(tmp_path / each / pattern)), str(tmp_path / each)) for each in ("one", "two")
        )
        assert one.num_rows == 4
        assert content_digest(one) == content_digest(two)
    assert "lang" in read_files(files_of(str(tmp_path / "one" / "lang=en")), str(tmp_path / "one")).schema.names


def test_digests_read_a_part_of_large_files_unless_all_is_asked_for(tmp_path: Path) -> None:
    large = tmp_path / "large.bin"
    with large.open("wb") as file:
        file.truncate(40 << 20)
    quick, full = digest_files([str(large)]), digest_files([str(large)], in_full=True)
    assert (quick.is_sampled, full.is_sampled) == (True, False)
    with large.open("r+b") as file:
        file.seek(5 << 20)  # not in a part that is read
        file.write(b"x")
    assert digest_files([str(large)]) == quick
    assert digest_files([str(large)], in_full=True).digest != full.digest
    with large.open("r+b") as file:
        file.seek(20 << 20)
        file.write(b"x")
    assert digest_files([str(large)]).digest != quick.digest


def test_a_place_without_files_says_why(tmp_path: Path) -> None:
    assert seal(Place("Read", str(tmp_path / "none*.csv"))).note == "no such file"
    assert seal(Place("Read", "gs://bucket/in.csv")).note == "not on this machine"
    (tmp_path / "broken.parquet").write_text("no table")
    sealed = seal(Place("Write", str(tmp_path / "broken.parquet")), with_content=True)
    assert sealed.digest
    assert (sealed.rows, sealed.content) == (None, "")


def test_secrets_are_masked_wherever_a_command_has_them() -> None:
    words = ["lum", "run", "p.py", "--api-key=abcdef", "--password", "xyz", "--max_tokens=96", "--db=http://u:p@h/d"]
    words += [
        '--jinja_variables={"input": "in.csv", "token": "t"}',
        "--where=http://h?api_key=k&n=1",
        "sk-abcdefghijklmnop",
    ]
    masked = " ".join(mask_words(words))
    for secret in ("abcdef", "xyz", "u:p", '"t"', "=k&", "sk-"):
        assert secret not in masked
    for kept in ("--max_tokens=96", "in.csv", "n=1", "p.py"):
        assert kept in masked
