"""Runs whose machine is lost: everything is killed, the checkpoint folder is removed, and the copy continues."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path

import pytest

from luminosity.testing import KafkaBroker
from tests.durability.kills import Job, produce, published_rows
from tests.durability.test_kills import check_stream, is_complete

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]  # many starts, each of which imports everything

_KEYS, _PER_KEY = 5_000, 3


def _segments(copy: Path) -> int:
    return len(list(copy.glob("segment-*")))


def _lose(job: Job) -> None:
    """Lose the machine: kill everything, and remove the folder of the checkpoint."""
    job.kill()
    shutil.rmtree(job.folder / "checkpoint")


def _expire(copy: Path) -> None:
    """Let the lease look as it does after a while."""
    lease = json.loads((copy / "lease.json").read_text())
    (copy / "lease.json").write_text(json.dumps({**lease, "expires": lease["expires"] - 1_000}))


def test_a_stream_goes_on_from_the_copy_wherever_its_machine_is_lost(tmp_path: Path) -> None:
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")  # pytest shows it if the test fails
    chance = random.Random(seed)
    copy = tmp_path / "elsewhere"
    options = f"--checkpoint_copy={copy}", f"--restore_from={copy}"
    with KafkaBroker() as broker, Job("stream", tmp_path, *options) as job:
        produce(broker, tmp_path, _KEYS, _PER_KEY)
        for part in (1, 2):
            job.start()
            rows = part * _KEYS * _PER_KEY // 4
            job.wait_for(lambda rows=rows: published_rows(tmp_path / "table") > rows, "rows in the table")
            segments = _segments(copy)
            job.wait_for(lambda segments=segments: _segments(copy) > segments, "a segment")
            time.sleep(chance.uniform(0, 1.5))
            assert job.is_running, job.output[-5_000:]
            _lose(job)
            job.start()  # the one before could still live
            assert job.wait() != 0
            assert "is in use by process" in job.output
            assert not (tmp_path / "checkpoint" / "blocks").exists()
            _expire(copy)
        job.start()
        # On a fast machine all results may be there before the last start has restored anything.
        job.wait_for(lambda: job.output.count("restored ") == 2, "the second restored copy")
        job.wait_for(lambda: is_complete(tmp_path, _KEYS, _PER_KEY), "all results")
        assert job.is_running, job.output[-5_000:]
        job.kill()
        assert job.output.count("restored ") == 2
        check_stream(tmp_path, _KEYS, _PER_KEY)
