"""Tests of WriteLance: every row is written once, also if workers die."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import apache_beam as beam
import lancedb
import pyarrow as pa
import pytest
from apache_beam.testing.util import assert_that, equal_to

from luminosity import WriteLance
from luminosity.errors import StoreError
from luminosity.io.run_owner import RunOwner
from luminosity.io.stores import lance_table
from luminosity.io.stores.lance_table import LanceTable
from luminosity.io.stores.staging import StagedFile, StagedRows
from tests.both_runners import Pipelines, counters
from tests.io.deadly import Deadly
from tests.io.stores.vectors import numbered, vectors
from tests.processes import waiting_process


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows = lancedb.connect(path.parent).open_table(path.stem).to_arrow().to_pylist()
    return sorted(rows, key=lambda row: row["id"])


def write(path: Path, *batches: pa.RecordBatch, **settings: Any) -> list[dict[str, Any]]:
    with beam.Pipeline("FnApiRunner") as pipeline:
        _ = pipeline | beam.Create(batches, reshuffle=False) | WriteLance(path, **settings)
    return rows_of(path)


def test_rows_are_appended_by_one_commit(pipelines: Pipelines, tmp_path: Path) -> None:
    path = tmp_path / "things.lance"
    write(path, numbered(0, 1_000))
    with pipelines() as (pipeline, run):
        written = (
            pipeline
            | beam.Create(range(1_000, 2_000, 100))
            | beam.Map(numbered, 100).with_output_types(pa.RecordBatch)
            | WriteLance(path, rows_per_file=150)
        )
        assert_that(written, equal_to([str(path)]))

    rows = rows_of(path)
    assert [row["id"] for row in rows] == list(range(2_000))
    assert rows[777]["vector"] == pytest.approx(numbered(777, 1).column("vector")[0].as_py())
    assert lancedb.connect(tmp_path).open_table("things").version == 2
    assert counters(run.result)["rows_written"] == 1_000
    assert os.listdir(tmp_path) == ["things.lance"]


def test_rows_are_exact_though_workers_are_killed(tmp_path: Path) -> None:
    path, markers = tmp_path / "data" / "things.lance", tmp_path / "markers"
    markers.mkdir()
    options = ["--runner=luminosity.LuminosityRunner", "--progress=off", "--cpu_workers=2"]
    with beam.Pipeline(argv=options) as pipeline:
        _ = (
            pipeline
            | beam.Create(range(0, 1_000, 10))
            | beam.Reshuffle()
            | beam.ParDo(Deadly(markers, {300, 700}, rows=10, after_s=0.0)).with_output_types(pa.RecordBatch)
            | WriteLance(path, rows_per_file=20)
        )

    assert len(os.listdir(markers)) == 2
    assert [row["id"] for row in rows_of(path)] == list(range(1_000))
    assert os.listdir(path.parent) == ["things.lance"]


@pytest.mark.parametrize("is_new", [True, False])
def test_a_commit_that_is_repeated_appends_once(is_new: bool, tmp_path: Path) -> None:
    """A worker dies after its commit; another job may have appended in the meantime."""
    path = tmp_path / "things.lance"
    if not is_new:
        write(path, numbered(0, 3))
    file = StagedFile(str(tmp_path / "staged"))
    file.write(numbered(10, 5))
    file.close()
    for _ in range(2):
        LanceTable(str(path)).append(StagedRows([file.path]), 5, str(tmp_path / "staged" / "note.json"))
        lancedb.connect(tmp_path).open_table("things").add(pa.table(numbered(20, 1)))

    ids = [row["id"] for row in rows_of(path)]
    assert ids == [*([] if is_new else range(3)), *range(10, 15), 20, 20]


def test_a_note_that_was_begun_and_not_written(tmp_path: Path) -> None:
    """A worker died before it appended anything."""
    path, note = tmp_path / "things.lance", tmp_path / "note.json"
    write(path, numbered(0, 5))
    file = StagedFile(str(tmp_path / "staged"))
    file.write(numbered(10, 5))
    file.close()
    note.touch()
    for _ in range(2):
        LanceTable(str(path)).append(StagedRows([file.path]), 5, str(note))
    assert [row["id"] for row in rows_of(path)] == [*range(5), *range(10, 15)]


def test_overwriting_and_merging(tmp_path: Path) -> None:
    path = tmp_path / "things.lance"
    write(path, numbered(100, 5))
    assert len(write(path, numbered(0, 5), mode="overwrite")) == 5
    changes = pa.record_batch(
        {
            "id": pa.array([1, 2, 2, 3, 3, 9], pa.uint64()),
            "text": ["one", "two", None, None, "three", "nine"],
            "vector": vectors([[1, 1, 1, 1]] * 6),
            "_deleted": [None, False, True, True, False, False],
        }
    )
    for _ in range(2):
        rows = write(path, changes, mode="merge", key="id")
        assert {row["id"]: row["text"] for row in rows} == {0: "text 0", 1: "one", 3: "three", 4: "text 4", 9: "nine"}


def test_merging_makes_the_dataset(tmp_path: Path) -> None:
    rows = pa.record_batch({"id": ["it's", "b"], "n": [1, 2], "_deleted": [True, None]})
    assert write(tmp_path / "new.lance", rows, mode="merge", key="id") == [{"id": "b", "n": 2}]


@pytest.mark.parametrize("empty", [[], [numbered(0, 0)]], ids=["no batch", "no rows"])
def test_no_rows_change_nothing_unless_asked(tmp_path: Path, empty: list[pa.RecordBatch]) -> None:
    path = tmp_path / "things.lance"
    write(path, numbered(0, 5))
    assert len(write(path, *empty)) == len(write(path, *empty, mode="merge", key="id")) == 5
    with pytest.raises(StoreError, match=r"found no rows.*stays as it was; .*allow_empty=True"):
        write(path, *empty, mode="overwrite")
    assert len(rows_of(path)) == 5
    assert write(path, *empty, mode="overwrite", allow_empty=True) == []
    assert lancedb.connect(tmp_path).open_table("things").schema.names == numbered(0, 1).schema.names


def test_what_another_run_writes_and_what_a_killed_run_left(tmp_path: Path) -> None:
    path = tmp_path / "things.lance"
    with waiting_process() as other:
        staged = tmp_path / f"things.staged-{RunOwner.of(other)}-abc"
        staged.mkdir()
        with pytest.raises(StoreError, match=rf"process {other} \(.*input.*\) is writing it right now"):
            WriteLance(path, mode="overwrite").check_writable()
        WriteLance(path).check_writable()  # Several runs may append.
    assert len(write(path, numbered(0, 5), mode="overwrite")) == 5
    assert os.listdir(tmp_path) == ["things.lance"]


MISTAKES: dict[str, tuple[pa.RecordBatch, dict[str, Any], str]] = {
    "columns": (
        numbered(0, 1).drop_columns(["vector"]).set_column(0, "id", pa.array([1])).append_column("n", pa.array([1])),
        {},
        "'id': found int64, expected uint64; .*'vector': found none, .*'n': found int64, expected none",
    ),
    "NaN": (numbered(0, 1).set_column(2, "vector", vectors([[1, 2, 3, float("nan")]])), {}, "things.lance: .*NaN"),
    "tombstones": (
        numbered(0, 1).append_column("_deleted", pa.array([True])),
        {},
        "found rows that are marked _deleted",
    ),
    "no key": (pa.record_batch({"id": [1, None]}), {"mode": "merge", "key": "id"}, "row 1 has no key"),
    "no column": (numbered(0, 1), {"mode": "merge", "key": "x"}, "there is no column 'x', expected one of id, text"),
    "type of key": (
        numbered(0, 1),
        {"mode": "merge", "key": "vector"},
        "is of type fixed_size_list.*expected integers",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, tmp_path: Path) -> None:
    path = tmp_path / "things.lance"
    write(path, numbered(0, 5))
    rows, settings, message = MISTAKES[name]
    with pytest.raises(Exception, match=message):
        write(path, rows, **settings)
    assert len(rows_of(path)) == 5


def test_rows_of_two_kinds(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"found rows with the columns\nid: (.|\n)*and others with\nn: int64"):
        write(tmp_path / "things.lance", numbered(0, 1), pa.record_batch({"n": [1]}))
    assert not (tmp_path / "things.lance").exists()


def test_settings_are_checked() -> None:
    for settings, message in [
        ({"path": "things"}, "expected one that ends in .lance"),
        ({"path": "café/my things.lance"}, "expected a name of Latin letters, digits"),
        ({"mode": "replace"}, "found mode='replace', expected one of append, overwrite, merge"),
        ({"mode": "merge"}, "expected a key for 'merge' and only for it"),
        ({"key": "id"}, "expected a key for 'merge' and only for it"),
        ({"rows_per_file": 0}, "expected 1 or more"),
    ]:
        with pytest.raises(ValueError, match=message):
            WriteLance(**{"path": "things.lance", **settings})


def test_two_jobs_that_find_no_dataset_lose_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, committed = tmp_path / "things.lance", [False]
    write_note = lance_table._write_note

    def write_note_while_another_is_first(note: str, version: int) -> None:
        write_note(note, version)
        if not committed[0]:
            committed[0] = True
            append(20)

    def append(first: int) -> None:
        file = StagedFile(str(tmp_path / f"staged {first}"))
        file.write(numbered(first, 5))
        file.close()
        LanceTable(str(path)).append(StagedRows([file.path]), 5, f"{file.path}.note")

    monkeypatch.setattr(lance_table, "_write_note", write_note_while_another_is_first)
    append(10)
    assert [row["id"] for row in rows_of(path)] == [*range(10, 15), *range(20, 25)]
