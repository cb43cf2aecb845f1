"""Kills a stream that has a million keys, starts it again, and shows how long that takes and how much memory it needs.

Each case is a stream whose records reach every key once, and go on slowly. All its processes are killed once the
checkpoint has all keys. "Read" is the time that the run itself prints, from the planned pipeline to the first bundle.
CPU seconds are those of the runner until it has read the checkpoint, imports and planning included.

    python benchmarks/durable_restart.py [--keys 1000000] [--only value|bag|windows]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _measure
import apache_beam as beam
from _killable import Killable
from apache_beam.coders import VarIntCoder
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.userstate import BagStateSpec, ReadModifyWriteStateSpec, TimeDomain, TimerSpec, on_timer
from apache_beam.transforms.window import FixedWindows, TimestampedValue
from apache_beam.utils.timestamp import Duration, Timestamp

_AT_MOST_S = 5.0
_AT_MOST_MEMORY = 1.5  # the peak while the checkpoint is read / what the runner has afterwards
_PAUSE_S = 0.02  # between two records, once each key has one
_DAY_S = 86_400
_VALUES_AT_ONCE = 5  # that a record adds to its bag
_SOME_RESULTS = 200  # bytes, before the kill
_SETTLE_S = 2.0  # after the first result, until memory is looked at again

_COUNT = beam.DoFn.StateParam(ReadModifyWriteStateSpec("count", VarIntCoder()))
_VALUES = beam.DoFn.StateParam(BagStateSpec("values", VarIntCoder()))
_LATER = TimerSpec("later", TimeDomain.REAL_TIME)
_TIMER = beam.DoFn.TimerParam(_LATER)


class _Records(beam.RestrictionProvider):
    def initial_restriction(self, element: int) -> OffsetRange:
        return OffsetRange(0, sys.maxsize)

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return OffsetRestrictionTracker(restriction)

    def restriction_size(self, element: int, restriction: OffsetRange) -> float:
        return max(0.0, float(element - restriction.start))

    def truncate(self, element: int, restriction: OffsetRange) -> None:
        return None


_RECORDS = beam.DoFn.RestrictionParam(_Records())


class _Source(beam.DoFn):
    """Emits one record for each key as fast as it can, then one every now and then, for keys that it has seen."""

    @beam.DoFn.unbounded_per_element()
    def process(self, keys: int, tracker: Any = _RECORDS) -> Iterator[Any]:
        record = tracker.current_restriction().start
        while tracker.try_claim(record):
            yield TimestampedValue((f"user-{record % keys:08}", record), Timestamp(1_800_000_000))
            record += 1
            if record > keys:
                tracker.defer_remainder(Duration(_PAUSE_S))
                return


class _CountInValue(beam.DoFn):
    """Counts the records of each key, and sets a timer for one key in ten."""

    def __init__(self, keys: int) -> None:
        self._keys = keys

    def process(self, element: tuple[str, int], count: Any = _COUNT, timer: Any = _TIMER) -> Iterator[tuple[int, int]]:
        is_first = element[1] < self._keys  # there is nothing to read, which takes longest
        number = 1 if is_first else (count.read() or 0) + 1
        count.write(number)
        if element[0].endswith("0"):
            timer.set(Timestamp.of(time.time() + _DAY_S))
        yield element[1], number

    @on_timer(_LATER)
    def never(self) -> None:
        raise RuntimeError("the timer fired, expected that it waits for a day")


class _CountInBag(beam.DoFn):
    """Adds several values to the bag of each key."""

    def __init__(self, keys: int) -> None:
        self._keys = keys

    def process(self, element: tuple[str, int], values: Any = _VALUES) -> Iterator[tuple[int, int]]:
        for value in range(_VALUES_AT_ONCE):
            values.add(value)
        is_first = element[1] < self._keys
        yield element[1], 1 if is_first else sum(1 for _ in values.read()) // _VALUES_AT_ONCE


def _in_value(records: Any, keys: int) -> Any:
    return records | beam.ParDo(_CountInValue(keys)).with_output_types(tuple[int, int])


def _in_bag(records: Any, keys: int) -> Any:
    return records | beam.ParDo(_CountInBag(keys)).with_output_types(tuple[int, int])


def _in_windows(records: Any, keys: int) -> Any:
    """Group by key in a window that stays open. The results come from another branch."""
    _ = records | beam.WindowInto(FixedWindows(_DAY_S)) | beam.CombinePerKey(sum)
    return records | beam.Map(lambda element: (element[1], element[1] // keys + 1))


def _note_result(element: tuple[int, int], path: str, keys: int) -> None:
    """Append the record and its count to a file, unless it is the first record of its key."""
    if element[0] >= keys:
        with open(path, "ab", buffering=0) as file:
            file.write(b"%d %d\n" % element)


def run(case: str, folder: str, keys: int, flags: list[str]) -> None:
    """Run the stream of a case until the process is killed."""
    from luminosity import LuminosityRunner

    options = PipelineOptions(["--progress=off", "--run_dir=off", f"--checkpoint_dir={folder}/checkpoint", *flags])
    pipeline = beam.Pipeline(LuminosityRunner(), options)
    source = pipeline | beam.Create([keys]) | beam.ParDo(_Source()).with_output_types(tuple[str, int])
    results = {"value": _in_value, "bag": _in_bag, "windows": _in_windows}[case](source, keys)
    _ = results | "Note" >> beam.Map(_note_result, f"{folder}/results", keys)
    pipeline.run().wait_until_finish()


def _saved_keys(folder: str) -> int:
    """Return how many keys the checkpoint has."""
    path = Path(folder, "checkpoint", "checkpoint.sqlite")
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(path, timeout=5)) as database:
        owners = [owner for (owner,) in database.execute("SELECT DISTINCT owner FROM rows")]
        kept = [owner for owner in owners if owner.startswith(("state/", "grouping/"))]
        return sum(
            database.execute("SELECT count(*) FROM rows WHERE owner = ?", (owner,)).fetchone()[0] for owner in kept
        )
    return 0


def measure(case: str, keys: int, flags: list[str]) -> dict[str, float]:
    """Let a case save all keys, kill it, start it again, and return figures of the second start."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("CHECKPOINTS")) as folder:
        results = Path(folder, "results")
        arguments = Path(folder, "output"), "--run", case, "--folder", folder, f"--keys={keys}", *flags
        with Killable(*arguments) as job:
            job.wait_for(lambda: _saved_keys(folder) >= keys, "checkpoint with all keys", every_s=5.0)
            job.wait_for(lambda: results.exists() and results.stat().st_size > _SOME_RESULTS, "results")
            print(f"{case}: all keys are saved after {job.seconds:.0f} s", flush=True)
        before = results.stat().st_size
        with Killable(*arguments) as job:
            job.wait_for(lambda: "read in" in job.output, "line about the checkpoint")
            figures = {"read s": float(re.findall(r"read in ([\d.]+) s", job.output)[0]), "CPU s": job.cpu_seconds}
            figures["peak MB"] = job.memory_mb("VmHWM")
            figures["first result s"] = job.wait_for(lambda: results.stat().st_size > before, "new result")
            time.sleep(_SETTLE_S)
            figures["afterwards MB"] = job.memory_mb("VmRSS")
        _check(results, keys)
        return figures


def _check(results: Path, keys: int) -> None:
    """Check that all counts are exact: records may be noted twice, with the same count."""
    for line in results.read_bytes().splitlines():
        record, count = map(int, line.split())
        if count != record // keys + 1:
            raise ValueError(f"record {record} has count {count}, expected {record // keys + 1}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--only", choices=["value", "bag", "windows"])
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    own, flags = parser.parse_known_args()
    if own.run:
        run(own.run, own.folder, own.keys, flags)
        return
    cases = [own.only] if own.only else ["value", "bag", "windows"]
    results = {case: measure(case, own.keys, flags) for case in cases}
    _measure.print_table(results)
    for case, figures in results.items():
        _measure.print_figure(f"{case}: seconds to read the checkpoint", figures["read s"], at_most=_AT_MOST_S)
        ratio = figures["peak MB"] / figures["afterwards MB"]
        _measure.print_figure(f"{case}: peak memory / memory afterwards", ratio, at_most=_AT_MOST_MEMORY)


if __name__ == "__main__":
    main()
