"""A stream between topics that is killed as a whole, and a worker that wakes up late: each record is there once."""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from luminosity.testing import TransactionalKafka
from tests.durability.kills import Job
from tests.io.kafka.exactly_once.sinks import CommitStep, batch, values

_KEYS, _PER_KEY = 200, 20
_ROOT = Path(__file__).resolve().parent.parent.parent
_WAIT_S = 120.0  # for a process that imports Beam, on a busy machine

# Writes a batch, but commits it only when it is told to. Says how that went.
_ZOMBIE = """
import sys
from luminosity.errors import KafkaError
from tests.io.kafka.exactly_once.sinks import CommitStep, batch

with CommitStep(sys.argv[1]) as step:
    step.begin(batch(0, "a"))
    assert step.step._producers[0]._producer.flush(30) == 0
    print("written", flush=True)
    sys.stdin.readline()
    try:
        step.finish()
    except KafkaError as error:
        print("fenced" if "_FENCED" in str(error) else error, flush=True)
    else:
        print("committed", flush=True)
"""


@pytest.mark.alone
@pytest.mark.timeout(900)  # many starts, each of which imports everything
def test_each_count_is_in_the_topic_once_although_everything_is_killed(tmp_path: Path) -> None:
    chance = random.Random(11)
    with TransactionalKafka({"in": 4, "out": 3}) as kafka, Job("topic", tmp_path) as job:
        (tmp_path / "servers").write_text(kafka.bootstrap_servers)
        everything = [(str(n % _KEYS), b"") for n in range(_KEYS * _PER_KEY)]
        for part in range(4):  # so that each start has something to do
            kafka.produce_many("in", everything[part::4])
            if part < 3:
                assert job.kill_at_random(chance, kills=1, spread_s=0.5) == 1
        job.start()
        job.wait_for(lambda: kafka.count("out") >= len(everything), "all counts")
        assert job.is_running, job.output[-5_000:]
        job.kill()
        found: dict[str, list[int]] = defaultdict(list)
        for record in kafka.consume("out"):
            found[(record.key or b"").decode()].append(int(record.value or b""))
    assert found == {str(key): list(range(1, _PER_KEY + 1)) for key in range(_KEYS)}


@pytest.mark.alone
@pytest.mark.timeout(900)
def test_each_count_is_in_the_topic_once_although_the_machine_is_lost(tmp_path: Path) -> None:
    """The topic never has what the copy lacks. A copy that is older is refused; another name continues with it."""
    chance = random.Random(12)
    copy, old = tmp_path / "copy", tmp_path / "old"
    options = f"--checkpoint_copy={copy}", f"--restore_from={copy}"
    with TransactionalKafka({"in": 4, "out": 3}) as kafka, Job("topic", tmp_path, *options) as job:
        (tmp_path / "servers").write_text(kafka.bootstrap_servers)
        everything = [(str(n % _KEYS), b"") for n in range(_KEYS * _PER_KEY)]
        for part in range(2):
            before = kafka.count("out")
            kafka.produce_many("in", everything[part::2])
            job.start()
            wanted = len(everything) if part == 1 else before + len(everything) // 6
            job.wait_for(lambda wanted=wanted: kafka.count("out") >= wanted, "counts in the topic")
            if part == 0:
                job.sleep(chance.uniform(0, 0.5))
            job.kill()
            if part == 0:
                shutil.copytree(copy, old)
            shutil.rmtree(tmp_path / "checkpoint")
            expire_lease(copy)
        assert job.output.count("restored ") == 1
        counts = [((record.key or b"").decode(), int(record.value or b"")) for record in kafka.consume("out")]
        assert sorted(counts) == sorted((str(key), n) for key in range(_KEYS) for n in range(1, _PER_KEY + 1))
        shutil.rmtree(copy)
        old.rename(copy)
        expire_lease(copy)
        job.start()
        assert job.wait() != 0
        assert "in Kafka, which this checkpoint does not know" in job.output
        assert "continue with another name as exactly_once=" in job.output
        job.start(SINK="counts-2")
        job.wait_for(lambda: kafka.count("out") >= len(everything) + _PER_KEY, "more counts in the topic")
        job.wait_for(lambda: str(_PER_KEY) in last_values(kafka, len(everything)), "the last counts")
        job.kill()
        again = [((record.key or b"").decode(), int(record.value or b"")) for record in kafka.consume("out")]
        assert set(again) == set(counts)


def expire_lease(copy: Path) -> None:
    """Let the lease of a copy look as it does after a while."""
    lease = json.loads((copy / "lease.json").read_text())
    (copy / "lease.json").write_text(json.dumps({**lease, "expires": lease["expires"] - 1_000}))


def last_values(kafka: TransactionalKafka, skipped: int) -> set[str]:
    """Return the values that came to the topic after some others."""
    return {(record.value or b"").decode() for record in kafka.consume("out")[skipped:]}


def test_a_worker_that_stands_still_and_wakes_up_later_writes_nothing() -> None:
    with TransactionalKafka({"t": 1}) as kafka:
        zombie = subprocess.Popen(
            [sys.executable, "-c", _ZOMBIE, kafka.bootstrap_servers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": f"{_ROOT / 'src'}{os.pathsep}{_ROOT}"},
        )
        try:
            assert _line_of(zombie) == "written"
            zombie.send_signal(signal.SIGSTOP)
            with CommitStep(kafka.bootstrap_servers) as step:
                assert step.bundle(batch(0, "a"), batch(1, "b")) == 2
                zombie.send_signal(signal.SIGCONT)
                assert zombie.stdin is not None
                zombie.stdin.write("\n")
                zombie.stdin.flush()
                assert _line_of(zombie) == "fenced"
                assert step.bundle(batch(2, "c")) == 1
        finally:
            zombie.kill()
            zombie.communicate(timeout=_WAIT_S)
        assert values(kafka) == ["a", "b", "c"]
        assert values(kafka, "read_uncommitted") == ["a", "a", "b", "c"]
        assert kafka.transactions == (2, 1)


def _line_of(process: subprocess.Popen[str]) -> str:
    """Return the next line that a process prints."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], _WAIT_S)[0], "the process says nothing"
    return process.stdout.readline().strip()
