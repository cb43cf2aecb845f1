"""Earlier states of a checkpoint: which are kept, what they cost, and how one is put back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from luminosity.cli.main import main
from luminosity.engine.durable.inspection import inspect
from luminosity.engine.durable.store import CheckpointFolder, StoredContent, Transaction
from luminosity.engine.durable.upkeep.kept_states import KeptStates
from luminosity.errors import CheckpointDamaged
from tests.durability.damages import everything_in


def write(folder: CheckpointFolder, number: int) -> Path:
    """Write a checkpoint with its number in a row, and a file."""
    path = Path(folder.blocks, "1", f"{number}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"file {number}")
    content = StoredContent(number, None, os.path.relpath(path, folder.path), size=path.stat().st_size)
    meta = {"generation": "1", "state": "running"}
    rows: dict[tuple[str, bytes], bytes | None] = {("a", b""): b"%d" % number}
    folder.write(Transaction(number, rows, contents=[content], dropped=[number - 1], files=[str(path)], meta=meta))
    return path


def opened(path: Path, most: int = 2) -> CheckpointFolder:
    return CheckpointFolder(str(path), kept=KeptStates(str(path), most, every_s=0.0, largest_share=1e9))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose run has kept the states 1 to 3 and has gone on; two of them are there."""
    path = tmp_path / "checkpoint"
    made = opened(path)
    for number in range(1, 5):
        write(made, number)
        if number < 4:
            made.keep_state()
    made.close()
    return path


def number_in(path: Path) -> int:
    ((_, value),) = everything_in(path)[1]["a"]
    return int(value)


def test_no_more_states_are_kept_than_asked_for_and_files_are_links(folder: Path) -> None:
    states = sorted((folder / "kept").iterdir())
    assert [state.name for state in states] == ["000000000002", "000000000003"]
    assert os.path.samefile(folder / "blocks" / "1" / "3", states[1] / "blocks" / "1" / "3")
    assert main(["checkpoint", str(folder), "--check"]) == 0


def test_readers_of_other_processes_leave_the_log_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    made = opened(path)
    try:
        for number in range(1, 4):
            write(made, number)
            made.keep_state()
            inspect(str(path))
            # Without the locks of this process, the last reader that closes the database takes its log away.
            seen = subprocess.run([sys.executable, "-c", _READER, str(path / "checkpoint.sqlite")], timeout=60)
            assert seen.returncode == 0
            write(made, 10 + number)
            assert (path / "checkpoint.sqlite-wal").exists()
            assert number_in_other_process(path) == 10 + number
    finally:
        made.close()


_READER = """
import contextlib, sqlite3, sys
with contextlib.closing(sqlite3.connect(sys.argv[1])) as rows:
    print(rows.execute("SELECT value FROM rows WHERE owner = 'a'").fetchone()[0].decode())
"""


def number_in_other_process(path: Path) -> int:
    command = [sys.executable, "-c", _READER, str(path / "checkpoint.sqlite")]
    return int(subprocess.run(command, timeout=60, capture_output=True, text=True, check=True).stdout)


def test_none_is_kept_before_the_time(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    made = CheckpointFolder(str(path), kept=KeptStates(str(path), 2, every_s=600.0))
    write(made, 1)
    made.keep_state()
    assert not (path / "kept").exists()
    made.close()
    made = CheckpointFolder(str(path), kept=KeptStates(str(path), 2, every_s=600.0))
    made.keep_state(at_start=True)  # What it continues with has been compared with its checksums.
    assert len(list((path / "kept").iterdir())) == 1
    made.forget_kept_states()
    assert not (path / "kept").exists()
    made.close()


@pytest.mark.parametrize("damage", ["database", "no database", "file", "mark"])
def test_the_last_good_state_is_put_back(folder: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    match damage:
        case "database":
            data = bytearray((folder / "checkpoint.sqlite").read_bytes())
            data[-200:] = bytes(200)
            (folder / "checkpoint.sqlite").write_bytes(data)
        case "no database":
            (folder / "checkpoint.sqlite").unlink()
        case "file":
            (folder / "blocks" / "1" / "4").unlink()
        case _:
            (folder / "synced").unlink()
    with pytest.raises(CheckpointDamaged, match=f"go back to the last good state with `lum checkpoint {folder} --rest"):
        everything_in(folder)
    assert main(["checkpoint", str(folder), "--restore", "last"]) == 0
    assert "went back to the state of 20" in capsys.readouterr().out
    assert main(["checkpoint", str(folder), "--check"]) == 0
    assert number_in(folder) == 3
    assert main(["checkpoint", str(folder)]) == 0
    assert "stopped; the next start continues" in capsys.readouterr().out
    made = opened(folder)
    assert made.meta()["generation"] == "1"
    write(made, 4)
    made.close()
    assert number_in(folder) == 4


def test_a_damaged_state_is_passed_over_and_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = folder / "kept" / "000000000003"
    (newest / "blocks" / "1" / "3").write_text("file X")
    assert main(["checkpoint", str(folder), "--check"]) == 1
    assert f"{newest}/blocks/1/3 has other bytes than were written" in capsys.readouterr().out
    assert main(["checkpoint", str(folder), "--restore", "last"]) == 0
    assert f"passed over: the checkpoint is damaged: {newest}" in capsys.readouterr().err
    assert number_in(folder) == 2


def test_nothing_changes_if_there_is_no_good_state_or_a_run_uses_the_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = opened(folder)
    assert main(["checkpoint", str(folder), "--restore", "last"]) == 2
    assert "is in use by process" in capsys.readouterr().err
    made.close()
    shutil.rmtree(folder / "kept")
    assert main(["checkpoint", str(folder), "--restore", "last"]) == 2
    assert "found no kept state" in capsys.readouterr().err
    assert number_in(folder) == 4


def test_a_damaged_checkpoint_is_not_kept(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = opened(folder)
    write(made, 5)
    made.sync()
    made._write_back()  # pyright: ignore[reportPrivateUsage]  # so that the database has everything
    data = (folder / "checkpoint.sqlite").read_bytes()
    (folder / "checkpoint.sqlite").write_bytes(data.replace(b"running", b"rUnning"))
    made.keep_state()
    assert "no earlier state" in caplog.text
    assert sorted(os.listdir(folder / "kept")) == ["000000000002", "000000000003"]
    made.close()
    with pytest.raises(CheckpointDamaged):
        everything_in(folder)


def test_a_file_system_without_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    made = opened(tmp_path / "checkpoint")
    write(made, 1)
    made.keep_state()
    made.close()
    kept = tmp_path / "checkpoint" / "kept" / "000000000001" / "blocks" / "1" / "1"
    assert kept.read_text() == "file 1"
    assert kept.stat().st_nlink == 1
    assert main(["checkpoint", str(tmp_path / "checkpoint"), "--restore", "last"]) == 0
    assert number_in(tmp_path / "checkpoint") == 1


def test_a_restore_that_is_killed_is_refused_until_it_is_repeated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("luminosity.engine.durable.upkeep.states.reset_mark", kill)
        with pytest.raises(Killed):
            main(["checkpoint", str(folder), "--restore", "last"])
    with pytest.raises(CheckpointDamaged, match="end with transaction 3, and transaction 4 was written"):
        everything_in(folder)
    assert main(["checkpoint", str(folder), "--restore", "last"]) == 0
    assert number_in(folder) == 3
