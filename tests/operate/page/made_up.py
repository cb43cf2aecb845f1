"""Made-up records of runs, written by the real recorder: a batch, a failure, many stages, a stream, hostile names."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from luminosity.events import (
    BundleRetried,
    CheckpointDone,
    DeviceInfo,
    Event,
    LogMessage,
    MachineInfo,
    MetricView,
    ModelLoaded,
    PoolInfo,
    Resources,
    RunEnded,
    RunStarted,
    StageInfo,
    TransformInfo,
    WorkerEnded,
    WorkerLost,
    WorkerStarted,
)
from luminosity.runs.recorder import Recorder
from tests.operate.page.flow import Flow, Part

__all__ = ["ATTACK", "batch", "beginning", "ended", "failing", "hostile", "many_stages", "record", "stream"]

_GB = 1_000_000_000
_STARTED_AT = 1_790_000_000.0
ATTACK = "<img src=x onerror=\"document.title='broken into'\"><script>document.title='broken into'</script>"

_ELEMENT = "{'film': 12, 'stars': 'five', 'text': 'Ich habe selten so gelacht'}"
_VERBS = ("Read", "Parse", "Clean", "Split", "Join", "Embed", "Rank", "Pick", "Check", "Write")

_FRAMES = "".join(
    f'  File "/opt/python/apache_beam/runners/worker/operations.py", line {line}, in process\n    self.receive(row)\n'
    for line in range(560, 580)
)
_TRACEBACK = f"""\
Traceback (most recent call last):
  File "/home/ana/reviews/pipeline.py", line 88, in parse
    return Review(text=row["text"], stars=int(row["stars"]))
ValueError: invalid literal for int() with base 10: 'five'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
{_FRAMES}  File "/home/ana/reviews/pipeline.py", line 52, in process
    yield from self.reviews(element)
  File "/home/ana/reviews/pipeline.py", line 91, in reviews
    raise BadRow(f"row {{number}} has no stars") from error
pipeline.BadRow: row 48113 has no stars
"""


def record(folder: Path, events: Iterable[Event]) -> str:
    """Write events as a run would, and return the run's id. Without a last event, the run is alive."""
    recorder = Recorder(folder)
    run = ""
    for event in events:
        run = event.run
        recorder(event)
    return run


def _started(run: str, name: str, flow: Flow, *, durable: bool = False) -> RunStarted:
    stages = tuple(
        StageInfo(
            part.id,
            part.label,
            part.pool,
            part.reads_from,
            part.sides,
            part.is_stream,
            part.names,
            Resources(8 * _GB, 2.0, "type:nvidia-tesla-t4;count:1") if part.pool == "device" else Resources(),
        )
        for part in flow.parts
    )
    pools = tuple(
        PoolInfo(name, workers, 1, flow.devices if name == "device" else (), 2.0, 4 * _GB)
        for name, workers in flow.pools.items()
    )
    devices = tuple(DeviceInfo(each, "Tesla T4", 15_800_000_000) for each in flow.devices)
    machine = MachineInfo(8, 32 * _GB, devices)
    folder = "/var/lib/reviews/checkpoint" if durable else ""
    arguments = ("python", f"/home/ana/reviews/{name}", "--rows=900000", "--api_key=***")
    return RunStarted(
        run,
        0.0,
        name,
        _at(run),
        stages,
        pools,
        64_000_000,
        2_150_000_000,
        folder,
        (),
        machine,
        "0.1.0",
        transforms=flow.transforms(),
        arguments=arguments,
        user="ana",
    )


def beginning(run: str, name: str, flow: Flow, *, durable: bool = False) -> Iterator[Event]:
    """Yield the first events of a run: its plan, and its workers."""
    yield _started(run, name, flow, durable=durable)
    yield from _workers(flow)


def _at(run: str) -> float:
    """Return a start time that fits the order of ids."""
    return _STARTED_AT + int(run[9:15]) * 60


def _workers(flow: Flow) -> Iterator[Event]:
    for name, workers in flow.pools.items():
        for number in range(workers):
            devices = flow.devices[number : number + 1] if name == "device" else ()
            yield WorkerStarted(flow.run, 0.4, f"{name}-{number}", name, 4000 + number, devices)


def _batch_flow(run: str, speed: float = 1.0) -> Flow:
    parts = [
        Part(
            "s1",
            "ReadTable + Parse",
            "cpu",
            per_second=21_000,
            total=900_000,
            steps=("ReadTable/List files", "ReadTable/Read rows", "Parse"),
        ),
        Part("s2", "ReadPrices", "cpu", per_second=9_000, total=40_000),
        Part("s3", "CountWords", "cpu", ("s1",), per_second=16_000),
        Part("s4", "Tokenize", "cpu", ("s1",), per_second=12_500 * speed),
        Part(
            "s5",
            "Embed",
            "device",
            ("s4",),
            per_second=6_100 * speed,
            is_model=True,
            steps=("Embed/Batch", "Embed/Infer"),
        ),
        Part(
            "s6",
            "Classify",
            "device",
            ("s5",),
            per_second=9_000 * speed,
            is_model=True,
            steps=("Classify/Batch", "Classify/Infer"),
        ),
        Part("s7", "Group by film", "cpu", ("s3", "s6"), per_second=26_000, ratio=0.02),
        Part("s8", "JoinPrices", "cpu", ("s7",), ("s2",), per_second=3_000),
        Part("s9", "Rank", "cpu", ("s8",), per_second=3_000, ratio=0.5),
        Part("s10", "WriteTable", "cpu", ("s9",), per_second=4_000, steps=("WriteTable/Write parts",)),
        Part("s11", "WriteLance (vectors)", "cpu", ("s6",), per_second=9_500, steps=("WriteLance/Vectors",)),
        Part(
            "s12",
            "WriteTable (FinalizeWrite)",
            "cpu",
            ("s10", "s11"),
            per_second=9_000,
            ratio=0,
            steps=("WriteTable/Move parts",),
        ),
    ]
    return Flow(parts, run, {"cpu": 4, "device": 1}, ("gpu:0",), 9 * _GB)


def _metrics(flow: Flow) -> tuple[MetricView, ...]:
    rows = int(flow.parts[0].done)
    return (
        MetricView("counter", "Parse", "reviews", "rows_without_stars", value=rows // 900),
        MetricView("counter", "Parse", "reviews", "rows_in_german", value=rows // 9),
        MetricView("distribution", "Tokenize", "reviews", "tokens", value=rows * 83, count=rows, min=1, max=512),
        MetricView("gauge", "Embed", "reviews", "last_batch", value=64),
        MetricView("counter", "Embed", "RunInference", "num_inferences", True, rows),
    )


def batch(
    run: str, *, upto: float | None = None, speed: float = 1.0, apart_s: float = 1.0, name: str = "reviews.py"
) -> Iterator[Event]:
    """Yield the events of a batch with 12 stages and two models, up to its end or up to a second."""
    flow = _batch_flow(run, speed)
    yield from beginning(run, name, flow)
    yield ModelLoaded(run, 3.9, "Embed/Infer", "all-MiniLM-L6-v2", "device-0", "gpu:0", 3.42, 91_000_000)
    yield ModelLoaded(run, 5.2, "Classify/Infer", "stars-classifier", "device-0", "gpu:0", 1.21, 438_000_000)
    while not flow.is_done and (upto is None or flow.seconds < upto):
        flow.step(apart_s)
        is_tenth = int(flow.seconds / apart_s) % 10 == 0
        yield replace(flow.snapshot(), metrics=_metrics(flow) if is_tenth else ())
        if flow.seconds == 20 * apart_s:
            what = "Token indices sequence length is longer than 512: texts are cut"
            yield LogMessage(run, flow.seconds, "warning", what, "transformers.tokenization", "cpu-1", "Tokenize", 214)
        if flow.seconds == 40 * apart_s:
            place = "pipeline.py:88"
            yield BundleRetried(run, flow.seconds, "Parse", "BadRow: row 48113", 1, 500, _TRACEBACK, place)
            yield WorkerLost(run, flow.seconds, "cpu-2", "cpu", "was killed by SIGKILL (out of memory?)", 1)
    if upto is None:
        for name, workers in flow.pools.items():
            for number in range(workers):
                yield WorkerEnded(
                    run, flow.seconds, f"{name}-{number}", name, flow.seconds, flow.seconds * 0.8, 3 * _GB
                )
        yield RunEnded(run, flow.seconds, "done", flow.snapshot(), metrics=_metrics(flow))


def failing(run: str) -> Iterator[Event]:
    """Yield the events of a run that fails after 38 seconds in its own code."""
    yield from itertools.islice(batch(run), 45)
    flow = _batch_flow(run)
    for _ in range(38):
        flow.step(1.0)
    for tries in (1, 2, 3):
        at = 35.0 + tries
        yield BundleRetried(
            run, at, "Parse", "pipeline.BadRow: row 48113 has no stars", tries, 500, _TRACEBACK, "pipeline.py:88"
        )
    message = "row 48113: invalid literal for int() with base 10: 'five'"
    yield LogMessage(run, 38.0, "error", message, "reviews", "cpu-0", "Parse", 4, _TRACEBACK)
    failure = "step 'Parse' failed 4 times: pipeline.BadRow: row 48113 has no stars"
    last = flow.snapshot()
    yield RunEnded(
        run, 38.5, "failed", last, failure, _metrics(flow), 0, _TRACEBACK, "pipeline.py:88", "Parse", _ELEMENT
    )


def many_stages(run: str, count: int = 100) -> Iterator[Event]:
    """Yield the events of a run with a hundred stages: ten sources, each through nine steps with branches."""
    parts: list[Part] = []
    for lane in range(count // 10):
        for depth in range(10):
            reads = (f"s{lane}_{depth - 1}",) if depth else ()
            if depth == 5 and lane:
                reads = (*reads, f"s{lane - 1}_4")
            label = f"{_VERBS[depth]} {lane + 1}"
            speed = 900.0 + 300 * ((lane * 7 + depth * 3) % 5)
            parts.append(Part(f"s{lane}_{depth}", label, "cpu", reads, per_second=speed, total=0 if depth else 60_000))
    flow = Flow(parts, run, {"cpu": 8}, (), 6 * _GB)
    yield from beginning(run, "hundred.py", flow)
    while not flow.is_done and flow.seconds < 400:
        flow.step(4.0)
        yield flow.snapshot()
    yield RunEnded(run, flow.seconds, "done", flow.snapshot())


def stream(run: str, *, seconds: float = 600.0) -> Iterator[Event]:
    """Yield the events of a durable stream that goes on: it falls behind for a while, and catches up."""
    parts = [
        Part("s1", "ReadFromKafka + Decode", "cpu", per_second=1_000, is_stream=True),
        Part("s2", "Classify", "device", ("s1",), per_second=1_150, is_model=True, is_stream=True),
        Part("s3", "Count by minute", "cpu", ("s2",), per_second=2_600, ratio=0.05, is_stream=True),
        Part("s4", "WriteToKafka", "cpu", ("s3",), per_second=900, is_stream=True),
    ]
    flow = Flow(parts, run, {"cpu": 2, "device": 1}, ("gpu:0",), 3 * _GB)
    yield from beginning(run, "watch.py", flow, durable=True)
    checkpoints = 0
    while flow.seconds < seconds:
        parts[1].per_second = 700 if 0.35 < flow.seconds / seconds < 0.5 else 1_150
        flow.step(2.0)
        snapshot = flow.with_checkpoint(10.0)
        yield snapshot
        if snapshot.checkpoint is not None and snapshot.checkpoint.count > checkpoints:
            checkpoints = snapshot.checkpoint.count
            seconds_taken = 0.03 + 0.02 * (checkpoints % 5)
            yield CheckpointDone(run, flow.seconds, checkpoints, seconds_taken, snapshot.checkpoint.folder_bytes)


def hostile(run: str) -> Iterator[Event]:
    """Yield the events of a run whose names and messages are markup."""
    for event in itertools.islice(batch(run), 30):
        if isinstance(event, RunStarted):
            stages = tuple(replace(stage, label=f"{stage.label} {ATTACK}", steps=(ATTACK,)) for stage in event.stages)
            transforms = (TransformInfo(ATTACK), TransformInfo(ATTACK, inside=0), TransformInfo(ATTACK, -1, (1,)))
            yield replace(
                event,
                name=ATTACK,
                stages=stages,
                transforms=transforms,
                arguments=(ATTACK,),
                user=ATTACK,
                folder=ATTACK,
            )
        else:
            yield event
    last = _batch_flow(run)
    last.step(1.0)
    yield LogMessage(run, 30.0, "error", ATTACK, ATTACK, ATTACK, ATTACK, 1, ATTACK)
    yield BundleRetried(run, 30.0, ATTACK, ATTACK, 1, 5, ATTACK, ATTACK)
    metrics = (MetricView("counter", ATTACK, ATTACK, ATTACK, value=1),)
    yield RunEnded(run, 31.0, "failed", last.snapshot(), ATTACK, metrics, 0, ATTACK, ATTACK, ATTACK, ATTACK)


def ended(run: str) -> Iterator[Event]:
    """Yield the last event of a run that ends well."""
    flow = _batch_flow(run)
    flow.step(1.0)
    yield RunEnded(run, 900.0, "done", flow.snapshot())
