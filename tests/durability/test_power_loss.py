"""A checkpoint folder after a power loss: the end of the log may be missing, but not what was synced."""

from __future__ import annotations

import contextlib
import marshal
import os
import random
import shutil
from pathlib import Path

import pytest

from luminosity.engine.durable import synced_log
from luminosity.engine.durable.store import CheckpointFolder, StoredContent, Transaction
from luminosity.errors import CheckpointDamaged
from tests.durability import jobs
from tests.durability.kills import Job
from tests.marks import notes

_TRANSACTIONS, _CUTS = 60, 40


def _transaction(number: int, chance: random.Random) -> Transaction:
    """Return changes that leave the number in several rows, and the data of the last three contents."""
    value = marshal.dumps(number)
    rows: dict[tuple[str, bytes], bytes | None] = {(owner, b""): value for owner in ("queue/a", "state/b", "timers/c")}
    rows |= {("state/b", b"%d" % key): value + bytes(chance.randrange(2_000)) for key in chance.sample(range(1, 50), 5)}
    contents = [StoredContent(number, bytes(chance.randrange(20_000)), None)]
    return Transaction(number, rows, contents=contents, dropped=[number - 3], meta={"number": str(number)})


def _check(folder: Path) -> int:
    """Open a checkpoint, raise unless all parts are of the same transaction, and return its number."""
    with contextlib.closing(CheckpointFolder(str(folder))) as opened:
        number = int(opened.meta().get("number", 0))
        rows = [row for owner in ("queue/a", "state/b", "timers/c") for row in opened.rows(owner)]
        found = {marshal.loads(value) for key, value in rows if not key}
        assert found == ({number} if number else set())
        assert [content.id for content in opened.contents()] == list(range(max(1, number - 2), number + 1))
        return number


@pytest.mark.parametrize("seed", range(3))
def test_a_log_that_is_cut_off_leaves_what_was_synced(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    copies: list[tuple[Path, int, int, int]] = []  # the last checkpoint, the last synced one, where its log ends
    synced = synced_bytes = 0
    with contextlib.closing(CheckpointFolder(str(tmp_path / "run"))) as folder:
        for number in range(1, _TRANSACTIONS + 1):
            folder.write(_transaction(number, chance))
            if number % 20 == 0:
                folder.sync()
                synced, synced_bytes = number, (tmp_path / "run" / "checkpoint.sqlite-wal").stat().st_size
            if chance.random() < _CUTS / _TRANSACTIONS:
                copy = tmp_path / f"copy-{number}"
                shutil.copytree(tmp_path / "run", copy)  # No process writes meanwhile: as the disk is at one moment.
                copies.append((copy, number, synced, synced_bytes))
    assert copies
    for copy, number, *_ in copies:
        assert _check(_cut(copy, None, chance)) == number
    monkeypatch.setattr(synced_log, "boot_id", lambda: "another")
    for copy, number, synced, synced_bytes in copies:
        length = chance.randrange(synced_bytes, (copy / "checkpoint.sqlite-wal").stat().st_size + 1)
        assert _check(_cut(copy, length, chance)) == synced
        assert synced <= number
        if synced_bytes:
            with pytest.raises(CheckpointDamaged):  # The disk has lost what it had synced.
                _check(_cut(copy, chance.randrange(synced_bytes), chance))


@pytest.mark.alone
@pytest.mark.timeout(900)
@pytest.mark.parametrize("job_name", ["large", pytest.param("sums", marks=pytest.mark.slow)])
def test_a_run_continues_from_what_the_disk_had(tmp_path: Path, job_name: str) -> None:
    """The folder as it is at some moment, without files that were not synced, and with a part of the log."""
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")  # pytest shows it if the test fails
    chance = random.Random(seed)
    first = tmp_path / "first"
    first.mkdir()
    with Job(job_name, first, "--checkpoint_interval=50ms") as job:
        job.start(NOTE_SYNCS="1")
        job.wait_for(lambda: (first / "synced").exists(), "a sync")
        job.sleep(chance.uniform(0, 2))
        with job.stopped():
            synced = {line for name in ("synced", "syncing") for line in (first / name).read_text().splitlines()}
            shutil.copytree(first, copy := tmp_path / "copy")
    for path in (copy / "checkpoint" / "blocks").rglob("*.*"):
        if str(path.relative_to(copy)) not in synced:
            path.unlink()
    (copy / "checkpoint" / "checkpoint.sqlite-shm").unlink()
    with Job(job_name, copy) as job:
        job.start(BOOT_ID="another")
        assert job.wait() == 0, job.output[-5_000:]
    members = [[n for n in range(jobs.ELEMENTS) if n % jobs.KEYS == key] for key in range(jobs.KEYS)]
    expected = {f"{key} {sum(values)} {len(values)}" for key, values in enumerate(members)}
    assert set(notes(copy / "result")) == expected  # The last step may be repeated.


def _cut(copy: Path, length: int | None, chance: random.Random) -> Path:
    """Return another copy of the folder, the log of which has this length."""
    again = copy.with_name(f"{copy.name}-{chance.randrange(1 << 30)}")
    shutil.copytree(copy, again)
    (again / "checkpoint.sqlite-shm").unlink(missing_ok=True)  # It is in memory only, and lost with the power.
    if length is not None:
        os.truncate(again / "checkpoint.sqlite-wal", length)
    return again
