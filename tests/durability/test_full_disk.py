"""Whole runs whose checkpoint folder is on a full disk: they fail with a remedy, and go on when there is room."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from luminosity.engine.durable.store import CheckpointFolder
from luminosity.errors import CheckpointFailed
from tests.durability import jobs
from tests.durability.kills import Job
from tests.marks import notes

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]


def resize(folder: Path, size: str) -> None:
    """Mount a file system of this size, or change the size of the one that is there."""
    option = f"remount,size={size}" if folder.is_mount() else f"size={size}"
    command = ["mount", "-t", "tmpfs", "-o", option, "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system here")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint folder that is a file system of its own."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    resize(folder, "4k")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_without_any_room_is_named(checkpoint: Path) -> None:
    message = r"can't be written: .*(full|No space left on device) \(0 B of 4.1 kB free\).*; make room"
    for _ in range(2):
        with pytest.raises(CheckpointFailed, match=message):
            CheckpointFolder(str(checkpoint))


@pytest.mark.parametrize(
    ("name", "size", "options", "message"),
    [
        ("sums", "300k", ["--checkpoint_interval=50ms"], "can't be written: database or disk is full (0 B of 307 kB"),
        ("large", "1m", [], "the disk is full: no room in"),
    ],
    ids=["the database", "files of blocks"],
)
def test_a_run_goes_on_when_there_is_room_again(
    tmp_path: Path, checkpoint: Path, name: str, size: str, options: list[str], message: str
) -> None:
    resize(checkpoint, size)
    with Job(name, tmp_path, *options) as job:
        job.start()
        assert job.wait() == 1
        last = job.output.splitlines()[-1]
        assert message in last
        assert last.endswith("; make room, then start again with the same --checkpoint_dir")
        resize(checkpoint, "64m")
        job.start()
        assert job.wait() == 0, job.output[-5_000:]
        assert "continuing the run in" in job.output
    members = [[n for n in range(jobs.ELEMENTS) if n % jobs.KEYS == key] for key in range(jobs.KEYS)]
    expected = {f"{key} {sum(values)} {len(values)}" for key, values in enumerate(members)}
    assert set(notes(tmp_path / "result")) == expected  # the last step may be repeated
