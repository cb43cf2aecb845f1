"""A stream of which savepoints are saved while it runs, by commands that are killed; then a run begins with one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from luminosity.cli.main import main
from luminosity.engine.durable.stored_state import kept_by, steps_with_state
from luminosity.engine.durable.upkeep.savepoints import Savepoint, savepoints_of
from luminosity.testing import KafkaBroker
from tests.durability.jobs import RECORDS_PER_SECOND
from tests.durability.kills import Job, produce
from tests.marks import notes

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]  # many starts, each of which imports everything

_KEYS, _PER_KEY = 40, 500
_WINDOW_S = 20
_KILLS = 4
_CLOSES_ALL = 2_000_000  # seconds: the window of records that close all others
_ROOT = Path(__file__).resolve().parent.parent.parent
_SAVE = """
import sys
from luminosity.engine.durable.upkeep.saving import save

print("ready", flush=True)
for line in sys.stdin:
    save(sys.argv[1], line.strip())
    print("saved", flush=True)
"""


def truth() -> dict[tuple[int, int], int]:
    """Return how many records each key has in each window, by the number of the record."""
    found = Counter[tuple[int, int]]()
    for number in range(_KEYS * _PER_KEY):
        second = 1_000_000 + number // RECORDS_PER_SECOND
        found[number % _KEYS, second - second % _WINDOW_S] += 1
    return dict(found)


def counts(folder: Path) -> dict[tuple[int, int], int]:
    """Return the noted counts. A note may be repeated, but never with another count."""
    found: dict[tuple[int, int], int] = {}
    for line in notes(folder / "counts"):
        key, start, count = map(int, line.split())
        if start != _CLOSES_ALL:
            assert found.setdefault((key, start), count) == count, line
    return found


class Saver:
    """A process that saves savepoints when it is told to."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{_ROOT / 'src'}{os.pathsep}{_ROOT}"}
        self._process: Any = subprocess.Popen(
            [sys.executable, "-c", _SAVE, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def begin(self, name: str) -> None:
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()

    def wait(self, said: str) -> None:
        assert self._process.stdout.readline().strip() == said

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate(timeout=60)


def good_savepoints(folder: Path) -> list[str]:
    found = savepoints_of(str(folder))
    assert all(isinstance(each, Savepoint) for each in found), found
    return [each.name for each in found if isinstance(each, Savepoint)]


def save_and_kill(checkpoint: Path, savers: list[Saver], chance: random.Random) -> int:
    """Time a savepoint, then kill commands while they save; return how many had saved before."""
    first, *others = savers
    began = time.monotonic()
    first.begin("timed")
    first.wait("saved")
    took = time.monotonic() - began
    for number, saver in enumerate(others):
        saver.begin(f"killed-{number}")
        time.sleep(chance.uniform(0, took))
        saver.kill()
        for name in good_savepoints(checkpoint):
            assert main(["checkpoint", str(checkpoint / "savepoints" / name), "--check"]) == 0
    first.begin("last-one")
    first.wait("saved")
    assert [path.name for path in (checkpoint / "savepoints").glob("*.unfinished")] == []
    return len(good_savepoints(checkpoint)) - 3


def begin_with(savepoint: Path, folder: Path, servers: str, wanted: set[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Run the stream from a savepoint, with a kill on the way, until it has counted all that is wanted."""
    folder.mkdir()
    (folder / "servers").write_text(servers)
    with Job("windows", folder, f"--savepoint={savepoint}") as job:
        job.start()
        job.wait_for_checkpoint()
        job.kill()
        job.start()
        job.wait_for(lambda: counts(folder).keys() >= wanted, "all counts")
        assert job.is_running, job.output[-5_000:]
        job.kill()
    return counts(folder)


def test_a_run_that_begins_with_a_savepoint_counts_what_that_lacks_and_nothing_else(tmp_path: Path) -> None:
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")  # pytest shows it if the test fails
    first, checkpoint = tmp_path / "first", tmp_path / "first" / "checkpoint"
    first.mkdir()
    with KafkaBroker() as broker, Job("windows", first) as job:
        produce(broker, first, _KEYS, _PER_KEY)
        late = [{"key": "0", "value": b"", "timestamp": 1000 * _CLOSES_ALL, "partition": each} for each in range(4)]
        broker.produce_many("in", late)  # they close all windows
        savers = [Saver(checkpoint) for _ in range(1 + _KILLS)]
        try:
            for saver in savers:
                saver.wait("ready")
            job.start()
            job.wait_for(lambda: len(counts(first)) > _KEYS, "the first windows")
            before = counts(first)
            savers[0].begin("whole")
            savers[0].wait("saved")
            after = counts(first)
            done = save_and_kill(checkpoint, savers, random.Random(seed))
            print(f"{done} of {_KILLS} had saved before they were killed")
            assert job.is_running, job.output[-5_000:]
        finally:
            for saver in savers:
                saver.kill()
        job.kill()
        # What the savepoint has of a window that is open is a part of its count, and of one that has ended nothing.
        savepoint = tmp_path / "savepoint"
        shutil.copytree(checkpoint / "savepoints" / "whole", savepoint)
        assert "Count" in steps_with_state(str(savepoint))
        is_open = {(each.key, int(each.window[0])) for each in kept_by(str(savepoint), "Count")}  # pyright: ignore
        everything = truth()
        assert counts(first).items() <= everything.items()
        shutil.rmtree(first)
        found = begin_with(
            savepoint, tmp_path / "second", broker.bootstrap_servers, everything.keys() - (after.keys() - is_open)
        )
        assert found.items() <= everything.items()
        assert not found.keys() & (before.keys() - is_open)  # They had ended.
