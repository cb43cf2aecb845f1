"""Tries new seeds for as long as one likes, on all cores: ``make soak MINUTES=60``."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field

from luminosity.engine.folders import SHARED_MEMORY
from tests.engine.simulated.scenarios import scenario
from tests.engine.simulated.shrinking import as_test, shrunk

__all__ = ["Tried", "soak", "try_seeds"]

_CHUNK = 40  # seeds that a process takes at once: they share a pipeline
_CHUNKS_A_PROCESS = 100  # then another process takes over, without what Beam has kept
_MOST_A_SECOND = 60  # seeds on a core, for which chunks are prepared
_TELL_S = 60.0
_MOST_SHRUNK = 3  # failures: the others are mostly the same


@dataclass
class Tried:
    """What some seeds have shown."""

    seeds: int = 0
    starts: int = 0
    messages: int = 0
    simulated_s: float = 0.0
    worker_s: float = 0.0
    disasters: Counter[str] = field(default_factory=Counter[str])
    failures: dict[int, str] = field(default_factory=dict[int, str])

    def add(self, other: Tried) -> None:
        """Add what other seeds have shown."""
        self.seeds += other.seeds
        self.starts += other.starts
        self.messages += other.messages
        self.simulated_s += other.simulated_s
        self.worker_s += other.worker_s
        self.disasters += other.disasters
        self.failures |= other.failures


def try_seeds(first: int, count: int, until: float = float("inf")) -> Tried:
    """Run the scenarios of ``count`` seeds, or of those for which there is time, but of one at least.

    ``until`` is by the monotonic clock.
    """
    tried = Tried()
    for seed in range(first, first + count):
        if tried.seeds and time.monotonic() >= until:
            break
        tried.seeds += 1
        try:
            outcome = scenario(seed).run()
        except Exception as error:
            tried.failures[seed] = f"{type(error).__name__}: {error}"
            continue
        tried.starts += outcome.starts
        tried.messages += outcome.messages
        tried.simulated_s += outcome.seconds
        tried.worker_s += outcome.worker_s
        tried.disasters += outcome.disasters
    return tried


def _work_in(folder: str) -> None:
    tempfile.tempdir = folder


def _try_chunk(work: tuple[int, int, float]) -> Tried:
    return try_seeds(*work)


def _tell(tried: Tried, seconds: float) -> None:
    print(
        f"{tried.seeds:,} seeds in {seconds / 60:.1f} min ({60 * tried.seeds / seconds:,.0f} a minute), "
        f"{tried.starts:,} starts, {tried.messages:,} messages, {tried.worker_s / 3600:,.1f} worker-hours of "
        f"{tried.simulated_s / 3600:,.1f} simulated hours, {sum(tried.disasters.values()):,} disasters, "
        f"{len(tried.failures)} failures",
        flush=True,
    )


def soak(first: int, seeds: int, minutes: float, processes: int) -> Tried:
    """Try so many seeds, or as many as there is time for. Prints failures, and once a minute how far it is."""
    began = told = time.monotonic()
    until = began + 60 * minutes
    most = int(60 * minutes * processes * _MOST_A_SECOND) + processes * _CHUNK
    firsts = range(first, first + min(seeds, most), _CHUNK)
    total = Tried()
    print(f"from seed {first} on", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="soak-", dir=SHARED_MEMORY) as root,  # of processes that are ended, too
        multiprocessing.get_context("spawn").Pool(processes, _work_in, (root,), _CHUNKS_A_PROCESS) as pool,
    ):
        chunks = ((at, min(_CHUNK, first + seeds - at), until) for at in firsts)
        for tried in pool.imap_unordered(_try_chunk, chunks):
            total.add(tried)
            for seed, error in tried.failures.items():
                print(f"seed {seed} fails: {error[:300]}", flush=True)
            if time.monotonic() >= until:
                break  # which ends the processes
            if time.monotonic() - told > _TELL_S:
                told = time.monotonic()
                _tell(total, told - began)
    _tell(total, time.monotonic() - began)
    return total


def main() -> int:
    """Print what new seeds show. Return 1 if one of them fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--first", type=int, default=random.randrange(1_000_000) * 10_000)
    parser.add_argument("--seeds", type=int, default=sys.maxsize)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    total = soak(given.first, given.seeds, given.minutes, given.processes)
    for kind, count in total.disasters.most_common():
        print(f"{count:>10,} {kind}")
    for seed in sorted(total.failures)[:_MOST_SHRUNK]:
        print(f"\n{as_test(shrunk(scenario(seed)))}")
    return int(bool(total.failures))


if __name__ == "__main__":
    sys.exit(main())
