"""Tests of ReadTable on folders whose files are rows, and on WebDataset shards."""

from __future__ import annotations

import io
import os
import random
import tarfile
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from luminosity import ReadTable, WriteTable
from luminosity.errors import InvalidArgument, TableError
from luminosity.io.reading import find_files
from tests.io.reading.reads import counters, read_alone


def folder_of(path: Path, count: int, kind: str = ".jpg") -> dict[str, bytes]:
    """Write files below a folder and return their contents by path."""
    contents = {str(path / f"{n % 3}" / f"{n:03}{kind}"): f"file {n}".encode() * n for n in range(1, count + 1)}
    for name, content in contents.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
    return contents


def shard(path: Path, samples: dict[str, dict[str, bytes]], cut_to: int | None = None) -> str:
    """Write a WebDataset shard."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz" if path.suffix == ".gz" else "w") as archive:
        for key, members in samples.items():
            for extension, content in members.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    path.write_bytes(held.getvalue()[:cut_to])
    return str(path)


def test_each_file_is_a_row_and_none_is_opened_unless_its_bytes_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = folder_of(tmp_path, 30)
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "notes.xyz").write_text("unknown")
    (tmp_path / ".hidden.jpg").write_text("hidden")
    table = ReadTable(str(tmp_path))
    assert table.schema.names == ["path", "size", "modified"]
    assert "notes.xyz" in str(table.take_doubts()[0])
    opened: list[str] = []
    beams_open = find_files.FileSystems.open

    def open_(path: str, **options: Any) -> Any:
        opened.append(path)
        return beams_open(path, **options)

    monkeypatch.setattr(find_files.FileSystems, "open", open_)
    rows = read_alone(table)
    assert {row["path"]: row["size"] for row in rows} == {path: len(each) for path, each in contents.items()}
    assert all(abs(row["modified"].timestamp() - os.path.getmtime(row["path"])) < 0.001 for row in rows)
    assert table.count() == (30, True)
    assert not opened
    smallest = ReadTable(str(tmp_path), ["path", "bytes"], pc.field("size") < 20)
    found = {row["path"]: row["bytes"] for row in read_alone(smallest)}
    assert found == {path: each for path, each in contents.items() if len(each) < 20}
    assert sorted(opened) == sorted(found)  # the condition needs no contents


@pytest.mark.parametrize("seed", range(5))
def test_groups_of_files_are_read_once_however_they_are_split(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = folder_of(tmp_path, 40, ".txt")
    monkeypatch.setattr(find_files, "_GROUP_FILES", 15)
    table = ReadTable(str(tmp_path), ["path", "bytes"], rows_per_batch=4)
    assert len(table.files) == 3
    rows = read_alone(table, random.Random(seed))
    assert sorted((row["path"], row["bytes"]) for row in rows) == sorted(contents.items())


def test_files_that_can_not_be_read_are_dead_letters(tmp_path: Path) -> None:
    contents = folder_of(tmp_path, 12)
    gone, changed, *_, large = contents
    table = ReadTable(str(tmp_path), ["path", "bytes"], max_bytes=len(contents[large]) - 1).with_exception_handling()
    os.remove(gone)
    Path(changed).write_bytes(b"other than before")
    letters: list[dict[str, Any]] = []
    rows = read_alone(table, letters=letters)
    assert {row["path"]: row["bytes"] for row in rows} == {
        path: each for path, each in contents.items() if path not in (gone, changed, large)
    }
    reasons = {letter["_file"]: letter["_reason"] for letter in letters}
    assert set(reasons) == {gone, changed, large}
    assert "No such file" in reasons[gone]
    assert "has changed" in reasons[changed]
    assert "expected at most" in reasons[large]
    with pytest.raises(TableError, match="expected at most 50 B"):
        read_alone(ReadTable(str(tmp_path), ["path", "bytes"], max_bytes=50))


def test_counters_count_the_files_and_bytes_that_were_read(tmp_path: Path) -> None:
    contents = folder_of(tmp_path, 10)
    pipeline = beam.Pipeline("FnApiRunner")
    _ = pipeline | ReadTable(str(tmp_path), ["bytes"])
    result = pipeline.run()
    result.wait_until_finish()
    total = sum(map(len, contents.values()))
    assert counters(result) == {"rows_read": 10, "files_read": 10, "bytes_read": total}


def test_what_can_not_be_a_table_of_files_is_told_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="no table file matches"):
        ReadTable(str(tmp_path))
    (tmp_path / "a.jpg").touch()
    with pytest.raises(TableError, match="all empty"):
        ReadTable(str(tmp_path))
    folder_of(tmp_path, 3)
    with pytest.raises(TableError, match="found schema=, but files as rows have the columns path"):
        ReadTable(str(tmp_path), schema=pa.schema({"path": pa.string()}))
    (tmp_path / "x.csv").write_text("a\n1\n")
    with pytest.raises(TableError, match=r"that are rows, such as .*\.jpg, beside a table, .*x\.csv"):
        ReadTable([str(tmp_path / "x.csv"), str(tmp_path / "1" / "*.jpg")])
    with pytest.raises(TableError, match="found max_bytes=5"):
        ReadTable(str(tmp_path / "x.csv"), max_bytes=5)


def test_a_folder_with_a_table_is_that_table_unless_files_are_asked_for(tmp_path: Path) -> None:
    contents = folder_of(tmp_path, 3)
    (tmp_path / "labels.csv").write_text("name,label\n001.jpg,cat\n")
    table = ReadTable(str(tmp_path))
    assert read_alone(table) == [{"name": "001.jpg", "label": "cat"}]
    assert "3 files are not read" in str(table.take_doubts()[0])
    paths = {row["path"] for row in read_alone(ReadTable(str(tmp_path), format="files"))}
    assert paths == {*contents, str(tmp_path / "labels.csv")}
    assert len(read_alone(ReadTable(str(tmp_path / "*" / "*.jpg")))) == 3


SAMPLES = {
    "a/1": {"jpg": b"\xff\x01", "cls": b"3", "txt": "schön".encode()},
    "a/2": {"jpg": b"\xff\x02", "cls": b"-1\n", "seg.png": b"\x89"},
    "b/1": {"jpg": b"\xff\x03", "cls": b"4", "txt": b""},
}


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz"])
def test_members_of_a_shard_with_one_key_are_a_row(tmp_path: Path, name: str) -> None:
    table = ReadTable(shard(tmp_path / name, SAMPLES))
    kinds = {"jpg": pa.binary(), "cls": pa.int64(), "txt": pa.string(), "seg.png": pa.binary()}
    assert table.schema == pa.schema({"__key__": pa.string(), **kinds})
    assert read_alone(table) == [
        {"__key__": "a/1", "jpg": b"\xff\x01", "cls": 3, "txt": "schön", "seg.png": None},
        {"__key__": "a/2", "jpg": b"\xff\x02", "cls": -1, "txt": None, "seg.png": b"\x89"},
        {"__key__": "b/1", "jpg": b"\xff\x03", "cls": 4, "txt": "", "seg.png": None},
    ]
    some = ReadTable(str(tmp_path / name), ["cls"], pc.field("cls") > 0, rows_per_batch=2)
    assert [row["cls"] for row in read_alone(some)] == [3, 4]


def test_samples_that_can_not_be_rows_are_dead_letters(tmp_path: Path) -> None:
    shard(tmp_path / "1.tar", SAMPLES)
    shard(
        tmp_path / "2.tar",
        {
            "bad": {"cls": b"three"},
            "new": {"cls": b"1", "wav": b"RIFF"},
            "text": {"txt": b"\xff"},
            "large": {"jpg": b"x" * 200},
            "good": {"jpg": b"x", "cls": b"7"},
        },
    )
    table = ReadTable(str(tmp_path), ["__key__", "jpg", "cls", "txt"], max_bytes=100).with_exception_handling()
    letters: list[dict[str, Any]] = []
    rows = read_alone(table, letters=letters)
    assert [row["__key__"] for row in rows] == ["a/1", "a/2", "b/1", "good"]
    reasons = {letter["_text"]: letter["_reason"] for letter in letters}
    assert list(reasons) == ["bad", "new", "text", "large"]
    assert "its .cls is no int64" in reasons["bad"]
    assert "has a member .wav, expected one of __key__, jpg" in reasons["new"]
    assert "its .txt is no string" in reasons["text"]
    assert "expected at most 100 B" in reasons["large"]


@pytest.mark.parametrize(
    ("cut_to", "whole"),
    [(512 * 10, 2), (512 * 12, 2), (512 * 12 + 100, 2), (512 * 13, 3)],
    ids=["within a sample", "between samples", "within a header", "within a member"],
)
def test_the_rest_of_a_shard_that_is_cut_off_is_a_dead_letter(tmp_path: Path, cut_to: int, whole: int) -> None:
    path = shard(tmp_path / "x.tar", {str(n): {"cls": b"1", "jpg": b"x" * 500} for n in range(4)}, cut_to)
    letters: list[dict[str, Any]] = []
    rows = read_alone(ReadTable(path).with_exception_handling(), letters=letters)
    assert [row["__key__"] for row in rows] == [str(n) for n in range(whole)]
    [letter] = letters
    assert letter["_file"] == path
    assert "can't be read from the key" in letter["_reason"]


def test_a_file_that_is_no_shard_ends_the_run_when_it_is_built(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(b"no tar" * 200)
    with pytest.raises(TableError, match=r"x\.tar: can't be read from its beginning"):
        ReadTable(str(tmp_path / "x.tar"))


@pytest.mark.parametrize("options", [{"path": "x.tar"}, {"path": "out", "format": "files"}], ids=str)
def test_formats_that_are_only_read_can_not_be_written(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"can only be read|expected one of 'parquet'"):
        WriteTable(str(tmp_path / options.pop("path")), **options)
