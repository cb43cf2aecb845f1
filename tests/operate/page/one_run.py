"""The events of one small run."""

from __future__ import annotations

from luminosity.events import (
    BundleRetried,
    Event,
    LogMessage,
    PoolInfo,
    PoolView,
    RunEnded,
    RunStarted,
    Snapshot,
    StageInfo,
    StageView,
    WorkerStarted,
)

__all__ = ["RUN", "STARTED", "ended", "happenings", "snapshot"]

RUN = "20260301T101500-4f2a9c"

STARTED = RunStarted(
    RUN,
    0.0,
    name="reviews.py",
    started_at=1_790_000_000.0,
    stages=(StageInfo("s0", "read", "cpu"), StageInfo("s1", "infer", "cpu", reads_from=("s0",))),
    pools=(PoolInfo("cpu", workers=1, slots=1, cores_per_worker=1.0, ram_per_worker=1 << 30),),
    queue_limit=1000,
)


def snapshot(seconds: float, elements: int = 0, rate: float = 0.0) -> Snapshot:
    views = (StageView("s0", "done", elements=7), StageView("s1", "busy", elements=elements, rate=rate))
    return Snapshot(RUN, seconds, views, (PoolView("cpu", workers=1, slots=1),))


def happenings() -> list[Event]:
    return [
        WorkerStarted(RUN, 0.5, "w0", "cpu", pid=1),
        BundleRetried(RUN, 1.5, "infer", "ValueError: no stars", tries=1, elements=3, traceback="Traceback …"),
        LogMessage(RUN, 1.6, "warning", "slow", count=4),
        snapshot(2.0, 100, rate=50.0),
        snapshot(4.0, 250, rate=75.0),
    ]


def ended(run: str = RUN) -> RunEnded:
    return RunEnded(run, 6.0, state="failed", last=snapshot(6.0, 300), failure="ValueError: no stars")
