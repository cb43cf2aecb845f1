"""A job of 60 s whose fork server is killed every 5 s for a minute: the result is exact, and how long it takes.

One that has no workers yet is left alone: on a busy machine, it may need more than 5 s to start.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import _measure
import apache_beam as beam
import psutil

sys.path.append(str(Path(__file__).resolve().parent.parent))
from tests.dofns import Counted
from tests.processes import fork_servers_of, workers_of

_ELEMENTS = 1_200
_KEYS = 20
_SECONDS_EACH = 0.1
_WORKERS = 2
_EVERY_S = 5.0
_KILLS = 12  # a minute of them


def work(x: int) -> int:
    time.sleep(_SECONDS_EACH)
    return x


def build(pipeline: beam.Pipeline) -> None:
    """Number the elements of each key with state: a lost element leaves a gap, a repeated one a double."""
    elements: Any = pipeline | beam.Create(range(_ELEMENTS)) | beam.Reshuffle() | "Work" >> beam.Map(work)
    _measure.check_count_and_sum(elements, _ELEMENTS, sum(range(_ELEMENTS)))  # a wrong result fails the run
    numbered = elements | beam.Map(lambda x: (x % _KEYS, x)) | beam.ParDo(Counted()) | beam.Values()
    each = _ELEMENTS // _KEYS
    _ = numbered | "Numbers" >> Checked(_ELEMENTS, _KEYS * each * (each + 1) // 2)


class Checked(beam.PTransform[Any, Any]):
    """The check, in a scope of its own."""

    def __init__(self, count: int, total: int) -> None:
        super().__init__()
        self._expected = count, total

    def expand(self, input_or_inputs: Any) -> None:
        """Let the run fail unless the numbers are these."""
        _measure.check_count_and_sum(input_or_inputs, *self._expected)


def undisturbed() -> dict[str, float]:
    return {"seconds": _measure.run_ours(build, f"--cpu_workers={_WORKERS}"), "kills": 0}


@contextlib.contextmanager
def _kills() -> Generator[list[int]]:
    """Within the context, kill the fork servers of this process every so often."""
    killed: list[int] = []
    stop = threading.Event()

    def kill() -> None:
        while len(killed) < _KILLS and not stop.wait(_EVERY_S):
            for server in fork_servers_of(os.getpid()) if workers_of(os.getpid()) else []:
                with contextlib.suppress(psutil.NoSuchProcess):
                    server.kill()
                    killed.append(server.pid)

    thread = threading.Thread(target=kill, name="kill-fork-servers", daemon=True)
    thread.start()
    try:
        yield killed
    finally:
        stop.set()
        thread.join(timeout=60)


def disturbed() -> dict[str, float]:
    with _kills() as killed:
        measured = undisturbed()
    return {**measured, "kills": len(killed)}


def report(results: _measure.Results) -> None:
    _measure.print_table(results)
    ratio = results["killed every 5 s"]["seconds"] / results["undisturbed"]["seconds"]
    print(f"exact on both sides; with kills it took {ratio:.2f} times as long")


if __name__ == "__main__":
    _measure.main({"undisturbed": undisturbed, "killed every 5 s": disturbed}, report)
