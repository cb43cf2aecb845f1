"""WriteLance in a stream: a version for each window, and each row once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apache_beam as beam
import lancedb
import pyarrow as pa
import pytest
from apache_beam.io.filesystem import BeamIOError
from apache_beam.io.filesystems import FileSystems
from apache_beam.transforms.window import FixedWindows

from luminosity import WriteLance
from luminosity.errors import StoreError, WriteError
from luminosity.io.stores import lance_table
from luminosity.io.stores.lance_table import NOTE_SUFFIX, LanceTable
from luminosity.io.stores.staging import StagedFile, StagedRows, remove_staged
from tests.runners import IS_REFERENCE
from tests.streams import Notes, early_and_late_panes, run_stream, stream_of, tables

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="it has no streams")


def _numbers(path: Path) -> list[int]:
    if not path.exists():
        return []
    return sorted(lancedb.connect(path.parent).open_table(path.stem).to_arrow()["n"].to_pylist())


@pytest.mark.parametrize("settings", [{}, {"mode": "merge", "key": "n"}])
def test_the_rows_of_a_window_appear_together_while_the_stream_runs(tmp_path: Path, settings: Any) -> None:
    path, notes = tmp_path / "data.lance", Notes(tmp_path / "notes")

    def build(pipeline: beam.Pipeline) -> None:
        events = tables(1, 2), tables(3), 10, tables(11), tables(12), 20, tables(21)
        table = pipeline | stream_of(*events, element_type=pa.RecordBatch)
        _ = table | notes.step(lambda table: [table["n"].to_pylist()[0], _numbers(path)])
        _ = table | beam.WindowInto(FixedWindows(10)) | WriteLance(path, **settings)

    run_stream(build)
    assert notes.read() == [[1, []], [2, []], [3, []], [11, [1, 2, 3]], [12, [1, 2, 3]], [21, [1, 2, 3, 11, 12]]]
    assert _numbers(path) == [1, 2, 3, 11, 12, 21]
    (staged,) = tmp_path.glob("data.staged-*")
    assert not list(staged.iterdir())


def test_a_merged_row_never_replaces_that_of_a_later_window(tmp_path: Path) -> None:
    path = tmp_path / "data.lance"

    def rows(at: int, *keys: int) -> list[tuple[pa.RecordBatch, int]]:
        return [(pa.record_batch({"n": keys, "at": [at] * len(keys)}), at)]

    def build(pipeline: beam.Pipeline) -> None:
        # The early pane of the second window comes before the first one, and then the first window has a late pane.
        events = rows(11, 1, 2), rows(5, 1, 3), 12, rows(6, 2, 3, 4), 20, rows(7, 1, 5), 100, rows(101, 6)
        table = pipeline | stream_of(*events, element_type=pa.RecordBatch)
        _ = table | early_and_late_panes() | WriteLance(path, mode="merge", key="n")

    run_stream(build)
    table = lancedb.connect(tmp_path).open_table("data").to_arrow()
    found = dict(zip(table["n"].to_pylist(), table["at"].to_pylist(), strict=True))
    assert found == {1: 11, 2: 11, 3: 6, 4: 6, 5: 7, 6: 101}


def test_staged_files_of_rows_that_came_too_late_are_removed(tmp_path: Path) -> None:
    path, notes = tmp_path / "data.lance", Notes(tmp_path / "notes")

    def build(pipeline: beam.Pipeline) -> None:
        events = tables(1), 20, tables(2), tables(21), 22, tables(23)
        table = pipeline | stream_of(*events, element_type=pa.RecordBatch)
        _ = table | notes.step(lambda table: [table["n"].to_pylist()[0], len(list(tmp_path.rglob("*.arrow")))])
        _ = table | beam.WindowInto(FixedWindows(10)) | WriteLance(path)

    run_stream(build)
    assert notes.read() == [[1, 0], [2, 0], [21, 0], [23, 1]]
    assert _numbers(path) == [1, 21, 23]


def test_files_that_another_step_removes_meanwhile_are_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / name for name in ("one", "two")]
    for file in files:
        file.touch()
    delete = FileSystems.delete

    def delete_late(paths: list[str]) -> None:
        files[0].unlink(missing_ok=True)
        if str(files[0]) in paths:
            raise BeamIOError("Match operation failed")  # before any is deleted
        delete(paths)

    monkeypatch.setattr(FileSystems, "delete", delete_late)
    remove_staged([str(file) for file in files])
    assert list(tmp_path.iterdir()) == []


def test_streams_that_can_not_be_complete_are_refused(tmp_path: Path) -> None:
    rows = beam.Pipeline() | stream_of(element_type=pa.RecordBatch)
    with pytest.raises(WriteError, match="found a stream in the global window without a trigger"):
        _ = rows | WriteLance(tmp_path / "data.lance")
    windows = rows | beam.WindowInto(FixedWindows(10))
    with pytest.raises(StoreError, match="found a stream and mode='overwrite', expected 'append' or 'merge'"):
        _ = windows | "Overwrite" >> WriteLance(tmp_path / "data.lance", mode="overwrite")


class _KilledError(BaseException):
    pass


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("is_appended", [False, True])
def test_a_pane_whose_worker_is_killed_is_appended_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_appended: bool, exists: bool
) -> None:
    """Another pane with as many rows is appended before the first is tried again."""
    folder = tmp_path / "staged"
    folder.mkdir()

    def pane(number: int) -> tuple[StagedRows, int, str]:
        file = StagedFile(str(folder))
        file.write(pa.record_batch({"n": [number]}))
        file.close()
        return StagedRows([file.path]), 1, str(folder / f"{number}{NOTE_SUFFIX}")

    table, write_note = LanceTable(str(tmp_path / "data.lance")), lance_table._write_note  # pyright: ignore[reportPrivateUsage]
    if exists:
        table.append_pane(*pane(0))
    first, second = pane(1), pane(2)
    writes = 0

    def killed(*arguments: Any) -> None:
        nonlocal writes
        writes += 1
        if writes == 2 or not is_appended:
            if not is_appended:
                write_note(*arguments)
            raise _KilledError
        write_note(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(lance_table, "_write_note", killed)
        with pytest.raises(_KilledError):
            table.append_pane(*first)
    table.append_pane(*second)
    table.append_pane(*first)
    table.append_pane(*first)
    assert _numbers(tmp_path / "data.lance") == ([0, 1, 2] if exists else [1, 2])
