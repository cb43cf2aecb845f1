"""Measures how long the page's list of ten thousand runs takes: at first, with the file of lines, and for a search.

    python benchmarks/run_list.py            # about 3 minutes, most of them to make and to read the records
    python benchmarks/run_list.py 1000       # with as many runs

The records are those of one run with a dozen steps, under the ids of runs at other times. At first, nothing is known of
them: the list must begin with the newest ones within a second, and asks on until all are read.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _measure
import apache_beam as beam

from luminosity.operate.cost.prices import load_prices
from luminosity.operate.page.run_data import RunFiles
from luminosity.operate.page.run_list import Asked

_RUNS = 10_000
_JOBS = 40


def _build(pipeline: beam.Pipeline) -> None:
    numbers = pipeline | "Numbers" >> beam.Create(range(1000))
    for step in range(10):
        numbers = numbers | f"Step {step}" >> beam.Map(lambda number: number + 1)
    _ = numbers | "Sum" >> beam.CombineGlobally(sum)


def _make(folder: Path, runs: int) -> None:
    """Write the records of as many runs."""
    with tempfile.TemporaryDirectory() as made:
        _measure.run_ours(_build, f"--run_dir={made}", "--manifest=off")
        (path,) = Path(made).glob("*.json")
        content = json.loads(path.read_bytes())
    for number in range(runs):
        day, second = divmod(number, 400)
        run = f"2026{1 + day // 28:02}{1 + day % 28:02}T{second // 60:02}{second % 60:02}00-{number:06x}"
        started = {**content["started"], "run": run, "job": f"job {number % _JOBS}", "started_at": 1.7e9 + number}
        (folder / f"{run}.json").write_text(json.dumps({**content, "started": started}, separators=(",", ":")))


def _timed(task: Callable[[], Any]) -> tuple[float, Any]:
    before = time.perf_counter()
    found = task()
    return time.perf_counter() - before, found


def main() -> None:
    """Print what was measured."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else _RUNS
    with tempfile.TemporaryDirectory() as folder:
        _make(Path(folder), runs)
        files = RunFiles(Path(folder), load_prices())
        first, content = _timed(lambda: files.lines.content(Asked()))
        _measure.print_figure("the first list of unknown runs, s", first, at_most=1.0)
        took = first
        while content["unread"]:
            seconds, content = _timed(lambda: files.lines.content(Asked()))
            took += seconds
        _measure.print_figure(f"until all of {content['total']} runs are known, s", took)
        again = RunFiles(Path(folder), load_prices())
        _measure.print_figure(
            "the first list of another server, s", _timed(lambda: again.list(Asked()))[0], at_most=1.0
        )
        _measure.print_figure("records that it reads", again.lines.reads, at_most=0)
        _measure.print_figure("a search, s", _timed(lambda: again.list(Asked(words="job 7")))[0], at_most=1.0)


if __name__ == "__main__":
    main()
