"""A power loss: the first start after a reboot goes back to the last sync, to whose files the disk has everything."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from luminosity.engine.durable import synced_log
from luminosity.engine.durable.store import CheckpointFolder, StoredContent, Transaction
from luminosity.engine.durable.writer import Removal


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


class Machine:
    """Tells programs when it was started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._starts = 0
        self._monkeypatch = monkeypatch
        self.reboot()

    def reboot(self) -> None:
        self._starts += 1
        self._monkeypatch.setattr(synced_log, "boot_id", lambda: f"start {self._starts}")

    def forget(self) -> None:
        """Let programs not know when the machine was started."""
        self._monkeypatch.setattr(synced_log, "boot_id", lambda: "")


def write(folder: CheckpointFolder, number: int, size: int = 10) -> str:
    """Write a checkpoint with its number in a row, and a file. Returns the path of the file."""
    path = os.path.join(folder.blocks, "1", f"{number}")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    Path(path).write_text(str(number))
    content = StoredContent(number, None, os.path.relpath(path, folder.path))
    rows: dict[tuple[str, bytes], bytes | None] = {("a", b""): b"%d" % number, ("b", b"%d" % number): bytes(size)}
    folder.write(Transaction(number, rows, contents=[content], dropped=[number - 1], files=[path]))
    return path


def copy(path: Path) -> Path:
    """Return a copy of a folder as the disk has it at this moment."""
    again = path.with_name(f"{path.name}-{random.randrange(1 << 40)}")
    shutil.copytree(path, again)
    (again / "checkpoint.sqlite-shm").unlink(missing_ok=True)
    return again


def number_in(path: Path) -> int:
    with contextlib.closing(CheckpointFolder(str(path))) as opened:
        ((_, value),) = [*opened.rows("a")] or [(b"", b"0")]
        assert [content.id for content in opened.contents()] == ([int(value)] if int(value) else [])
        return int(value)


def test_a_reboot_goes_back_to_the_last_sync_and_a_kill_does_not(tmp_path: Path, machine: Machine) -> None:
    with contextlib.closing(CheckpointFolder(str(tmp_path / "run"))) as folder:
        write(folder, 1)
        folder.sync()
        write(folder, 2)
        killed, off = copy(tmp_path / "run"), copy(tmp_path / "run")
    assert number_in(killed) == 2
    machine.reboot()
    assert number_in(off) == 1
    assert number_in(off) == 1  # once more, in the same start of the machine
    machine.reboot()
    assert number_in(off) == 1
    assert number_in(tmp_path / "run") == 2  # It was closed.


@pytest.mark.parametrize("seed", range(3))
def test_any_number_of_syncs_and_logs(tmp_path: Path, machine: Machine, seed: int) -> None:
    """The log is written back now and then, also while another process reads, so that it begins anew in its file."""
    chance = random.Random(seed)
    path = tmp_path / "run"
    synced, off = 0, list[tuple[Path, int]]()
    folder = CheckpointFolder(str(path))
    for number in range(1, 40):
        write(folder, number, size=chance.choice([10, 10, 300_000, 3_000_000]))
        with contextlib.closing(sqlite3.connect(path / "checkpoint.sqlite")) as reader:
            if chance.random() < 0.3:
                reader.execute("BEGIN")
                reader.execute("SELECT count(*) FROM rows").fetchone()
            if chance.random() < 0.4:
                folder.sync()
                synced = number
        if chance.random() < 0.2:  # The process is killed, and started again.
            folder = CheckpointFolder(str(shutil.copytree(path, path := tmp_path / f"run{number}")))
        if chance.random() < 0.5:
            off.append((copy(path), synced))
    machine.reboot()
    assert [number_in(each) for each, _ in off] == [number for _, number in off]
    assert len({number for _, number in off}) > 5


@pytest.mark.parametrize("calls", range(1, 4))
def test_a_power_loss_while_the_log_is_written_back(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """The mark is written twice: before the log is written back, and after it."""
    folder = CheckpointFolder(str(tmp_path / "run"))
    write(folder, 1)
    folder.sync()
    write(folder, 2, size=5_000_000)
    left = calls
    real = os.fsync

    class PowerLoss(BaseException):
        pass

    def fsync(descriptor: int) -> None:
        nonlocal left
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("synced"):
            left -= 1
            if not left:
                raise PowerLoss
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with contextlib.suppress(PowerLoss):
        folder.sync()
    assert left == max(0, calls - 2)
    off = copy(tmp_path / "run")
    torn = copy(tmp_path / "run")  # The last mark reached the disk in part.
    monkeypatch.undo()
    machine.reboot()
    assert number_in(off) == 2  # It was written, if not synced.
    with open(torn / "synced", "rb+") as mark:
        slots = [mark.read(512), mark.read(512)]
        newest = max(range(2), key=lambda slot: int.from_bytes(slots[slot][:8], "little"))
        mark.seek(512 * newest + 20)
        mark.write(b"\xff\xff")
    machine.reboot()
    assert number_in(torn) == (1 if calls == 1 else 2)


def test_everything_is_synced_at_once_if_reboots_can_not_be_told(tmp_path: Path, machine: Machine) -> None:
    with contextlib.closing(CheckpointFolder(str(tmp_path / "run"))) as folder:
        assert not folder.must_sync
    machine.forget()
    with contextlib.closing(CheckpointFolder(str(tmp_path / "run"))) as folder:
        assert folder.must_sync


def test_a_log_that_gets_long_is_synced_soon(tmp_path: Path) -> None:
    with contextlib.closing(CheckpointFolder(str(tmp_path / "run"))) as folder:
        write(folder, 1, size=20_000_000)
        assert folder.must_sync
        folder.sync()
        assert not folder.must_sync
        assert (tmp_path / "run" / "checkpoint.sqlite-wal").stat().st_size == 0


def test_a_file_that_was_removed_before_the_sync_is_left_out(tmp_path: Path) -> None:
    with contextlib.closing(CheckpointFolder(str(tmp_path / "run"))) as folder:
        os.unlink(write(folder, 1))
        write(folder, 2)
        folder.sync()


@pytest.mark.parametrize(
    ("first", "last", "written", "synced", "is_safe"),
    [
        (5, 7, 6, 4, False),  # The checkpoint without it is not written.
        (5, 7, 7, 4, True),  # A reboot goes back to the fourth, which did not have it.
        (5, 7, 7, 5, False),  # A reboot goes back to the fifth.
        (5, 7, 8, 7, True),
        (0, 1, 1, 0, False),  # An earlier start left it: what it synced may have it.
    ],
)
def test_when_a_file_may_go(first: int, last: int, written: int, synced: int, is_safe: bool) -> None:
    assert Removal(first, last, lambda: None).is_safe(written, synced) is is_safe
