"""Whole runs that get SIGTERM while they are busy, and are started again: they end in time, and results are exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from luminosity.testing import KafkaBroker
from tests.durability import jobs
from tests.durability.kills import Job, produce, published_rows
from tests.durability.test_kills import check_stream, is_complete
from tests.marks import notes

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]  # several starts, each of which imports everything

_KEYS, _PER_KEY = 5_000, 2


def test_a_stream_that_is_busy(tmp_path: Path) -> None:
    with KafkaBroker() as broker, Job("stream", tmp_path) as job:
        produce(broker, tmp_path, _KEYS, _PER_KEY)
        job.start()
        job.wait_for_checkpoint()
        assert job.terminate() == 143, job.output[-5_000:]
        assert job.state() == "stopped"
        assert published_rows(tmp_path / "table") < _KEYS * _PER_KEY
        assert "terminated: the run stops and keeps its checkpoint" in job.output
        job.start()
        job.wait_for(lambda: is_complete(tmp_path, _KEYS, _PER_KEY), "all results")
        assert job.terminate() == 143, job.output[-5_000:]
        check_stream(tmp_path, _KEYS, _PER_KEY)


def test_a_step_that_takes_longer_than_the_stop(tmp_path: Path) -> None:
    with Job("hanging", tmp_path, "--stop_timeout=1s") as job:
        job.start()
        job.wait_for((tmp_path / "hangs").exists, "the step that hangs")
        assert job.terminate() == 143, job.output[-5_000:]
        assert job.state() == "stopped"
        job.start()
        assert job.wait() == 0, job.output[-5_000:]
    members = [[n for n in range(jobs.ELEMENTS) if n % jobs.KEYS == key] for key in range(jobs.KEYS)]
    expected = {f"{key} {sum(values)} {len(values)}" for key, values in enumerate(members)}
    assert set(notes(tmp_path / "result")) == expected  # the last step may be repeated
