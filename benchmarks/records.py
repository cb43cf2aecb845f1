"""Measures the record of a run of twelve hours: its size, the time to read it, and what recording costs.

The events are made up and given to the recorder as fast as it takes them: snapshots with 16 workers, a retry with a
traceback of its own each minute, a checkpoint each second. For the size, snapshots of 100 stages come every ten seconds
for twelve hours, since most of them are thinned out again. For the cost, which is processor time inside the recorder,
they come five times a second for some minutes, as a run sends them.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path

import _measure

from luminosity.events import (
    BundleRetried,
    CheckpointDone,
    Event,
    InferenceView,
    MetricView,
    PoolInfo,
    PoolView,
    RunEnded,
    RunStarted,
    Snapshot,
    StageInfo,
    StageView,
    WorkerView,
)
from luminosity.runs import records
from luminosity.runs.recorder import Recorder

RUN = "20260101T000000-abcdef"
LONG_S = 12 * 3600
SHORT_S = 600
WORKERS = 16
SIZES_EVERY_S = 20
AT_MOST_MB = 5.0
AT_MOST_LOAD_S = 0.5
AT_MOST_PERCENT = 1.0

_SAMPLE = tuple(0.1 + n / 997 for n in range(32))
_METRICS = tuple(MetricView("counter", f"Step {n}", "mine", f"name {n}", value=n) for n in range(50))


def record(stages: int, seconds: int, every_s: float) -> dict[str, float]:
    infos = tuple(
        StageInfo(f"s{n}", f"Read {n} + Clean + Filter", "cpu", steps=("Read", "Clean")) for n in range(stages)
    )
    largest, spent = 0, 0.0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = records.path_of(folder, RUN)
        recorder = Recorder(folder)
        recorder(RunStarted(RUN, 0.0, "pipeline.py", 1.0, infos, (PoolInfo("cpu", WORKERS, 1),), queue_limit=1 << 20))
        for second in range(seconds):
            events = _events(infos, second, every_s)
            began = time.thread_time()
            for event in events:
                recorder(event)
            spent += time.thread_time() - began
            if second % SIZES_EVERY_S == 0:
                largest = max(largest, sum(file.stat().st_size for file in folder.iterdir()))
        running_s = _load(path)
        recorder(RunEnded(RUN, float(seconds), "done", _snapshot(infos, float(seconds))))
        return {
            "CPU %": 100 * spent / seconds,
            "largest MB": largest / 1e6,
            "final MB": path.stat().st_size / 1e6,
            "load s, running": running_s,
            "load s": _load(path),
        }


def _load(path: Path) -> float:
    """Return the processor time of reading a record; the wall time is the same on a quiet machine."""
    began = time.thread_time()
    found = records.load(path)
    assert isinstance(found, records.Record), found
    return time.thread_time() - began


def _events(infos: tuple[StageInfo, ...], second: int, every_s: float) -> list[Event]:
    in_second = max(1, round(1 / every_s)) if every_s <= 1 or second % every_s == 0 else 0
    events: list[Event] = [_snapshot(infos, second + n * every_s) for n in range(in_second)]
    events.append(CheckpointDone(RUN, float(second), second, 0.1, 10**6))
    if second % 60 == 0:
        traceback = "Traceback\n" + "  File pipeline.py, line 3\n" * 100 + f"ValueError: {second}"
        events.append(BundleRetried(RUN, float(second), "Clean", f"ValueError: {second}", 1, 10, traceback, "p.py:3"))
    return events


def _snapshot(infos: tuple[StageInfo, ...], seconds: float) -> Snapshot:
    return Snapshot(
        RUN,
        seconds,
        tuple(_stage(infos, number, seconds) for number in range(len(infos))),
        (PoolView("cpu", WORKERS, WORKERS, WORKERS, seconds * 8, 0.97),),
        workers=tuple(
            WorkerView(f"w{n}", "cpu", 1000 + n, ("s1",), seconds * 0.9, 5 * 10**8 + n, 6 * 10**8, 3 * 10**8)
            for n in range(WORKERS)
        ),
        metrics=_METRICS if seconds % 10 == 0 else (),
    )


def _stage(infos: tuple[StageInfo, ...], number: int, seconds: float) -> StageView:
    is_busy = number % 2 == 1
    model = InferenceView("Score", 10**6, 10**4, 10**9, 10**9, 4096, *(seconds,) * 4)
    return StageView(
        infos[number].id,
        "busy" if is_busy else "held back",
        () if is_busy else (infos[(number + 1) % len(infos)].label,),
        elements=int(seconds * 1000) + number,
        rate=1000.25,
        queued=int(seconds) % 977,
        queued_bytes=int(seconds * 7) % 99_999,
        running=1,
        workers=1,
        busy_seconds=round(seconds * 0.9, 3),
        fraction=round(seconds / LONG_S, 3),
        seconds_left=LONG_S - seconds,
        inference=(model,) if number % 10 == 0 else (),
        bundles=int(seconds * 3),
        cpu_seconds=round(seconds * 0.8, 3),
        peak_resident=5 * 10**8 + number,
        output_bytes=int(seconds * 1e6),
        bundle_seconds=_SAMPLE,
        bundle_elements=tuple(range(1000, 1000 + len(_SAMPLE))),
    )


SIDES: dict[str, _measure.Side] = {
    "100 stages, 12 h": partial(record, stages=100, seconds=LONG_S, every_s=10.0),
    "100 stages": partial(record, stages=100, seconds=SHORT_S, every_s=0.2),
    "10 stages": partial(record, stages=10, seconds=SHORT_S, every_s=0.2),
}


def report(results: _measure.Results) -> None:
    _measure.print_table(results)
    long = results["100 stages, 12 h"]
    _measure.print_figure("record and journal in MB", long["largest MB"], at_most=AT_MOST_MB)
    _measure.print_figure("seconds to read", long["load s, running"], at_most=AT_MOST_LOAD_S)
    for name in ("100 stages", "10 stages"):
        _measure.print_figure(f"{name}: CPU in percent of a core", results[name]["CPU %"], at_most=AT_MOST_PERCENT)


if __name__ == "__main__":
    _measure.main(SIDES, report)
