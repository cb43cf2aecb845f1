"""Whole runs that are stopped or drained while they are busy: they end in time, and results are exact."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from luminosity.cli import stop
from luminosity.io.stores.address import StoreAddress
from luminosity.io.stores.embedded_qdrant import EmbeddedCollection
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


def test_a_drained_stream_has_all_that_it_has_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Windows that nothing else would close are closed, their timers fire, and all sinks have the same records."""
    checkpoint = tmp_path / "checkpoint"
    with KafkaBroker() as broker, Job("open windows", tmp_path) as job:
        produce(broker, tmp_path, _KEYS, _PER_KEY)
        job.start()
        job.wait_for((tmp_path / "tally-has-begun").exists, "the first record")
        assert published_rows(tmp_path / "table") == 0
        assert stop.end_by_checkpoint(str(checkpoint), "drain", 240) == 0, job.output[-5_000:]
        assert capsys.readouterr().out == f"{checkpoint}: drained\n"
        assert job.wait() == 0, job.output[-5_000:]
        assert job.output.endswith("ended: DRAINED\n")
        assert job.state() == "drained"
    rows = pq.read_table(tmp_path / "table").to_pylist()
    assert rows
    assert notes(tmp_path / "tally") == [str(len(rows))]
    last = Counter({row["key"]: 0 for row in rows})
    for row in rows:
        last[row["key"]] = max(last[row["key"]], row["n"])
    expected = Counter((key, n) for key, most in last.items() for n in range(1, most + 1))
    assert Counter((row["key"], row["n"]) for row in rows) == expected
    assert EmbeddedCollection(StoreAddress(str(tmp_path / "qdrant"), "counts")).count() == len(last)
