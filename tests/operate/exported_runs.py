"""Records of made-up runs with every field that is exported, for the tests of metrics and alert rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from luminosity.events import (
    CheckpointView,
    DeviceView,
    Event,
    InferenceView,
    KafkaView,
    MemoryUse,
    MetricView,
    PoolInfo,
    PoolView,
    ProcessMemory,
    RunEnded,
    RunStarted,
    Snapshot,
    StageInfo,
    StageView,
    StallView,
    StreamView,
    WorkerEnded,
    WorkerStarted,
    WorkerView,
)
from luminosity.runs.recorder import Recorder

STARTED_AT = 1_760_000_000.0


def run_id(number: int) -> str:
    return f"20260101T{number:06}-abcdef"


def started(
    number: int, name: str = "reviews.py", at: float = STARTED_AT, folder: str = "/jobs", job: str = ""
) -> RunStarted:
    stages = (
        StageInfo("s1", "Read", "cpu"),
        StageInfo("s2", 'Embed "x"\\y', "device", ("s1",), is_stream=True),
    )
    pools = (
        PoolInfo("cpu", 2, 1, cores_per_worker=1.0, ram_per_worker=4 << 30),
        PoolInfo("device", 1, 1, ("gpu:0",), cores_per_worker=1.0, ram_per_worker=8 << 30),
    )
    return RunStarted(run_id(number), 0.0, name, at, stages, pools, queue_limit=1, folder=folder, job=job)


def user_metrics(many: int = 1) -> tuple[MetricView, ...]:
    counters = [MetricView("counter", "Read", "main", f"rows{i}" if i else "rows", value=40 + i) for i in range(many)]
    return (
        *counters,
        MetricView("counter", "Read", "main", "balance", value=-3),
        MetricView("counter", "Read", "beam", "internal", of_library=True, value=9),
        MetricView("gauge", "Read", "main", "level", value=-7),
        MetricView("distribution", "Read", "main", "lengths", value=10, count=4, min=1, max=5),
    )


def batch(view: Snapshot) -> Snapshot:
    """Return the same state of a run without streams."""
    return replace(view, stages=tuple(replace(stage, stream=None) for stage in view.stages))


def stalled(view: Snapshot, seconds: float) -> Snapshot:
    """Return the same state with a bundle of the last stage that does nothing."""
    *others, last = view.stages
    return replace(view, stages=(*others, replace(last, stalls=(StallView("Embed", seconds, worker="w2", pid=1),))))


def with_device(view: Snapshot, busy: float, utilization: float | None) -> Snapshot:
    """Return the same state with another load of its device."""
    return replace(view, devices=(DeviceView("gpu:0", busy, utilization),))


def snapshot(number: int, seconds: float, elements: int = 100) -> Snapshot:
    model = InferenceView(
        "Embed/Model", inferences=elements, batches=4, useful_cost=75, padded_cost=100, compute_seconds=1.5
    )
    model = replace(model, loads=1, load_seconds=2.0, batch_p50_ms=250.0, batch_p99_ms=500.0, cut_texts=5)
    model = replace(model, runs_on="server", requests=40, retries=6, hedges=2, throttled=4, retry_wait_seconds=1.25)
    model = replace(
        model, prompt_tokens=900, new_tokens=300, cached_prompt_tokens=100, cost=0.5, limit_wait_seconds=2.0
    )
    model = replace(model, cached_answers=7, repeated_prompts=3, first_token_p50_ms=80.0, first_token_p99_ms=400.0)
    reads = KafkaView("Read/Kafka", "read", records=elements, dead_letters=1, lost=2, lag=30, partitions=2)
    read = StageView("s1", "held back", ("Embed",), elements=elements, queued=7, queued_bytes=700, running=1)
    read = replace(read, busy_seconds=12.5, cpu_seconds=9.25, bundles=6, retries=1, output_bytes=4096, kafka=(reads,))
    embed = StageView("s2", "busy", elements=elements // 2, busy_seconds=3.0, inference=(model,))
    stream = StreamView(watermark=STARTED_AT, behind_seconds=2.5, backlog=64.0, dropped_late=3)
    return Snapshot(
        run_id(number),
        seconds,
        (read, replace(embed, stream=stream)),
        (
            PoolView("cpu", 2, 1, 2, busy_seconds=12.5),
            PoolView("device", 1, 1, 1, busy_seconds=3.0, waiting=1, waits_for="1 GPU", wanted=2),
        ),
        (DeviceView("gpu:0", 0.25, 0.5, 1 << 30, 16 << 30, peak_memory=2 << 30),),
        MemoryUse(10, 20, 30, 40),
        ProcessMemory(1000, 2000),
        seconds_left=5.0,
        workers=(WorkerView("w1", "cpu", peak_resident=111), WorkerView("w2", "cpu", peak_resident=333)),
        checkpoint=CheckpointView(3, seconds - 1, 0.05, 12345, copy_lag_seconds=1.5),
        metrics=user_metrics(),
    )


def ended(number: int, seconds: float, state: str = "done", elements: int = 100, many: int = 1) -> RunEnded:
    last = snapshot(number, seconds, elements)
    failure = "" if state == "done" else "step 'Read' failed: hunter2"
    return RunEnded(run_id(number), seconds, state, last, failure, metrics=user_metrics(many))  # pyright: ignore


def record(folder: Path, *events: Event) -> None:
    """Write the record of one run, as the recorder of a run does."""
    write = Recorder(folder)
    for event in events:
        write(event)


def rich_events(number: int = 1, state: str = "done", **options: int) -> tuple[Event, ...]:
    """Return the events of a run that has ended, with a value for every metric."""
    begun = WorkerStarted(run_id(number), 1.0, "w3", "device", 1234)
    worker = WorkerEnded(run_id(number), 9.0, "w3", "device", 8.0, peak_resident=555)
    return started(number), begun, snapshot(number, 5.0), worker, ended(number, 10.0, state, **options)


def rich_run(folder: Path, number: int = 1, state: str = "done", **options: int) -> None:
    """Record a run that has ended, with a value for every metric."""
    record(folder, *rich_events(number, state, **options))
