"""A batch job that is killed near its end repeats only what its last checkpoint does not have."""

from __future__ import annotations

import contextlib
import marshal
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from tests.durability import jobs
from tests.durability.kills import Job
from tests.marks import notes

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]


def _saved_elements(folder: Path) -> int:
    """Return how many elements the slow step has done, as the checkpoint has it."""
    path = folder / "checkpoint" / "checkpoint.sqlite"
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(path, timeout=5)) as database:
        rows = database.execute("SELECT value FROM rows WHERE owner LIKE 'stage/%Slowly%'").fetchall()
        return sum(marshal.loads(value)[2] for (value,) in rows)
    return 0


def test_a_killed_batch_repeats_only_what_the_last_checkpoint_lacks(tmp_path: Path) -> None:
    with Job("notes", tmp_path, "--checkpoint_interval=100ms") as job:
        job.start()
        job.wait_for(lambda: _saved_elements(tmp_path) >= jobs.ELEMENTS // 2, "a checkpoint with half of the elements")
        assert job.is_running, job.output[-5_000:]
        job.kill()
        before, saved = len(notes(tmp_path / "notes")), _saved_elements(tmp_path)
        assert saved >= jobs.ELEMENTS // 2
        (tmp_path / "go").touch()
        job.start()
        assert job.wait() == 0, job.output[-5_000:]
    found = Counter(map(int, notes(tmp_path / "notes")))
    assert found.keys() == set(range(jobs.ELEMENTS))
    # Each element that the checkpoint counts as done was not done again, and each of the others was done after it.
    assert found.total() - before == jobs.ELEMENTS - saved
