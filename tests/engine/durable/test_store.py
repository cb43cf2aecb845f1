"""The folder of a checkpoint: what it refuses, and what survives."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from luminosity.engine.durable.store import CheckpointFolder, StoredContent, Transaction
from luminosity.errors import CheckpointDamaged, CheckpointError, CheckpointFailed


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoint")


def test_what_was_written_is_there_after_reopening(folder: str) -> None:
    opened = CheckpointFolder(folder)
    opened.write(
        Transaction(
            1,
            rows={("queue/a", b""): b"1", ("state/s", b"k"): b"2"},
            contents=[StoredContent(7, b"data", None, size=4)],
            meta={"state": "running"},
        )
    )
    opened.write(Transaction(2, rows={("queue/a", b""): None, ("state/s", b"l"): b"3"}, dropped=[7]))
    opened.close()
    again = CheckpointFolder(folder)
    assert again.owners() == {"state/s"}
    assert list(again.rows("state/s")) == [(b"k", b"2"), (b"l", b"3")]
    assert not list(again.contents())
    assert again.meta()["state"] == "running"
    again.close()


def test_a_second_run_is_refused_with_who_holds_the_folder(folder: str) -> None:
    first = CheckpointFolder(folder)
    with pytest.raises(CheckpointError, match=rf"is in use by process {os.getpid()} on .* since 20"):
        CheckpointFolder(folder)
    first.close()
    CheckpointFolder(folder).close()


def test_a_folder_with_other_files_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(CheckpointError, match=r"found 'thesis.txt' in .*, expected a new or empty folder"):
        CheckpointFolder(str(tmp_path))
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_a_folder_of_another_version_is_refused(folder: str) -> None:
    opened = CheckpointFolder(folder)
    opened.note(version="99")
    opened.close()
    with pytest.raises(CheckpointError, match="has version 99, and this release reads version 3"):
        CheckpointFolder(folder)
    _assert_restarts(folder)


def test_a_file_that_is_no_database_is_refused(folder: str) -> None:
    os.makedirs(folder)
    Path(folder, "checkpoint.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(CheckpointDamaged, match=r"checkpoint.sqlite can't be opened.*it held everything of the run"):
        CheckpointFolder(folder)
    _assert_restarts(folder)


def _assert_restarts(folder: str) -> None:
    """Check the remedy that the refusals name."""
    CheckpointFolder(folder, restart=True).close()
    opened = CheckpointFolder(folder)
    assert opened.meta() == {"version": "3"}
    opened.close()


def test_a_failed_write_leaves_the_last_checkpoint(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = CheckpointFolder(folder)
    opened.write(Transaction(1, rows={("state/s", b"k"): b"old"}))

    def fail(_: Transaction) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    write_rows = opened._apply  # pyright: ignore[reportPrivateUsage]  # the disk is full after some rows

    def write_some(changes: Transaction) -> None:
        write_rows(changes)
        fail(changes)

    monkeypatch.setattr(opened, "_apply", write_some)
    with pytest.raises(CheckpointFailed, match=r"disk is full \(.* free\); the last one stays as it is"):
        opened.write(Transaction(2, rows={("state/s", b"k"): b"new"}))
    opened.close()
    again = CheckpointFolder(folder)
    assert list(again.rows("state/s")) == [(b"k", b"old")]
    again.close()


def test_rows_move_to_new_owners_in_one_step_even_in_a_circle(folder: str) -> None:
    opened = CheckpointFolder(folder)
    opened.write(Transaction(1, rows={("a", b""): b"1", ("b", b""): b"2", ("c", b""): b"3"}))
    opened.rearrange({"a": ["b", "d"], "b": ["a"]}, ["c"], {"shape": "new"})
    assert {owner: dict(opened.rows(owner))[b""] for owner in opened.owners()} == {"a": b"2", "b": b"1", "d": b"1"}
    assert opened.meta()["shape"] == "new"
    opened.close()


def test_a_log_that_is_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    """A kill loses nothing that was written. SQLite alone would go on with an earlier checkpoint."""
    opened = CheckpointFolder(str(tmp_path / "a"))
    for number in range(1, 20):
        opened.write(Transaction(number, rows={("x", b"%d" % n): b"%d" % number for n in range(10)}))
    copy = shutil.copytree(tmp_path / "a", tmp_path / "b")
    opened.close()
    log = (copy / "checkpoint.sqlite-wal").read_bytes()
    (copy / "checkpoint.sqlite-shm").unlink()
    for cut in range(0, len(log), 2357):
        (cut_copy := tmp_path / f"cut{cut}").mkdir()
        shutil.copytree(copy, cut_copy, dirs_exist_ok=True)
        os.truncate(cut_copy / "checkpoint.sqlite-wal", cut)
        with pytest.raises(CheckpointDamaged, match=r"checkpoint.sqlite"):
            CheckpointFolder(str(cut_copy))
    with contextlib.closing(CheckpointFolder(str(copy))) as again:
        assert {value for _, value in again.rows("x")} == {b"19"}


def test_a_restart_removes_rows_and_files(folder: str) -> None:
    opened = CheckpointFolder(folder)
    os.makedirs(os.path.join(opened.blocks, "1"))
    Path(opened.blocks, "1", "w1.1").write_bytes(b"block")
    opened.write(Transaction(1, rows={("x", b""): b""}, contents=[StoredContent(1, None, "blocks/1/w1.1", size=5)]))
    opened.close()
    opened = CheckpointFolder(folder, restart=True)
    assert not opened.owners()
    assert not list(opened.contents())
    assert not os.path.exists(opened.blocks)
    opened.close()


def test_a_folder_that_is_removed_while_it_is_used_fails_the_next_write(folder: str) -> None:
    opened = CheckpointFolder(folder)
    opened.write(Transaction(1, rows={("x", b""): b"1"}))
    shutil.rmtree(folder)
    with pytest.raises(CheckpointFailed, match="was removed or replaced while the run used it"):
        opened.write(Transaction(2, rows={("x", b""): b"2"}))
    opened.close()
    assert not os.path.exists(folder)
