"""Kills whole runs with kill -9 again and again, at random times, and continues them: all results are exact.

``python benchmarks/kill_and_resume.py [--kills 20] [--seed N] [--only stream|batch]``. A stream counts records of
Kafka by key, and writes a table, a Lance dataset and a Qdrant collection. A batch runs a model, groups and joins, and
writes with several sinks. Prints the seed, the time of each start until its first checkpoint, and what differs.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
from luminosity.testing import KafkaBroker
from tests.durability.kills import Job, produce
from tests.durability.test_kills import check_batch, check_stream, is_complete

_KEYS, _PER_KEY = 10_000, 5


def _kill(job: Job, chance: random.Random, kills: int, spread_s: float) -> None:
    for number in range(1, kills + 1):
        started = time.monotonic()
        job.start()
        job.wait_for_checkpoint()
        ready = time.monotonic() - started
        time.sleep(chance.uniform(0, spread_s))
        if not job.is_running:
            print(f"{job.name}: ended before kill {number}")
            return
        job.kill()
        print(f"{job.name}: kill {number}, {ready:.1f} s to the first checkpoint of this start", flush=True)


def stream(folder: Path, chance: random.Random, kills: int) -> None:
    with KafkaBroker() as broker, Job("stream", folder) as job:
        produce(broker, folder, _KEYS, _PER_KEY)
        _kill(job, chance, kills, spread_s=1.5)
        job.start()
        job.wait_for(lambda: is_complete(folder, _KEYS, _PER_KEY), "all results")
        job.kill()
    check_stream(folder, _KEYS, _PER_KEY)


def batch(folder: Path, chance: random.Random, kills: int) -> None:
    with Job("batch", folder, "--checkpoint_interval=100ms") as job:
        _kill(job, chance, kills, spread_s=0.3)
        job.start()
        assert job.wait() == 0, job.output[-5_000:]
    check_batch(folder)


_JOBS = {"stream": stream, "batch": batch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--only", choices=_JOBS)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    for name, run in _JOBS.items():
        if arguments.only in (None, name):
            folder = tempfile.mkdtemp()
            print(f"{name} in {folder}, which stays if something differs", flush=True)
            run(Path(folder), random.Random(arguments.seed), arguments.kills)
            shutil.rmtree(folder)
            print(f"{name}: exact")


if __name__ == "__main__":
    main()
