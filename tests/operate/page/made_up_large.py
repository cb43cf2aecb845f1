"""Made-up records of large runs: 500 stages with long names, 1,000 workers on 50 nodes that come and go, a month."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from luminosity.events import (
    BundleRetried,
    CheckpointDone,
    DeviceView,
    Event,
    LogMessage,
    MachineInfo,
    NodeChanged,
    NodeInfo,
    NodeView,
    PoolInfo,
    PoolView,
    RunEnded,
    RunStarted,
    Snapshot,
    StageView,
    WorkerLost,
    WorkerStarted,
    WorkerView,
)
from tests.operate.page import made_up, one_run
from tests.operate.page.flow import Flow, Part

__all__ = ["cluster", "many_stages", "month"]

_GB = 1_000_000_000
_DAY_S = 86_400.0
_LONG = "for every film of the catalogue that was reviewed in at least three languages"


def many_stages(run: str, stages: int = 500, *, upto: float = 300.0) -> Iterator[Event]:
    """Yield the events of a run that goes on, with lanes of ten stages, whose names are long."""
    for event in made_up.many_stages(run, stages):
        if isinstance(event, RunStarted):
            named = tuple(replace(each, label=f"{each.label} {_LONG} ({each.id})") for each in event.stages)
            yield replace(event, name="five_hundred.py", stages=named)
        elif isinstance(event, RunEnded) or event.seconds > upto:
            return
        else:
            yield event


def month(run: str, *, days: float = 30.0, apart_s: float = 600.0) -> Iterator[Event]:
    """Yield the events of a durable stream that has gone on for a month, faster by day than by night."""
    parts = [
        Part("s1", "ReadFromKafka + Decode", "cpu", per_second=40, is_stream=True),
        Part("s2", "Classify", "cpu", ("s1",), per_second=60, is_model=True, is_stream=True),
        Part("s3", "WriteToKafka", "cpu", ("s2",), per_second=90, is_stream=True),
    ]
    flow = Flow(parts, run, {"cpu": 4}, (), 3 * _GB)
    yield from made_up.beginning(run, "month.py", flow, durable=True)
    while flow.seconds < days * _DAY_S:
        parts[0].per_second = 35 + 20 * math.sin(flow.seconds / _DAY_S * 2 * math.pi)
        flow.step(apart_s)
        day = flow.seconds / _DAY_S
        yield flow.with_checkpoint(60.0)
        yield CheckpointDone(run, flow.seconds, int(flow.seconds / 60), 0.05, 3_400_000)
        if int(flow.seconds / apart_s) % 7 == 0:
            yield LogMessage(run, flow.seconds, "warning", f"day {int(day)}: the broker was slow", "kafka", "cpu-1")
        if int(flow.seconds / apart_s) % 50 == 0:
            yield BundleRetried(run, flow.seconds, "Classify", "TimeoutError: no answer", 1, 20, "Traceback …")
            yield WorkerLost(run, flow.seconds, "cpu-2", "cpu", "was killed by SIGKILL (out of memory?)", 1)
            yield WorkerStarted(run, flow.seconds, "cpu-2", "cpu", 9_000 + int(day))


def cluster(run: str, *, workers: int = 1_000, nodes: int = 50, seconds: float = 300.0) -> Iterator[Event]:
    """Yield the events of a run that goes on, on a cluster: one node joins late, one is lost and comes back."""
    ids = [f"{number:08x}{'e5' * 12}" for number in range(nodes)]
    infos = tuple(
        NodeInfo(node, f"10.0.{number // 250}.{number % 250}", 32.0, 128 * _GB, 2.0, "L4", 38 * _GB, number == 0)
        for number, node in enumerate(ids)
    )
    started = replace(
        one_run.STARTED,
        run=run,
        name="cluster.py",
        started_at=1_790_000_000.0,
        pools=(PoolInfo("cpu", workers, 1, (), 1.0, 4 * _GB),),
        machine=MachineInfo(32 * nodes, 128 * _GB * nodes, nodes=infos),
    )
    yield started
    for number in range(workers):
        yield WorkerStarted(run, 1.0 + number / 100, f"w{number}", "cpu", 0, (), ids[number % nodes])
    late, lost = ids[-1], ids[nodes // 2]
    yield from (NodeChanged(run, 1.0, node, f"node-{place}", "came") for place, node in enumerate(ids[:-1]))
    second = 0.0
    while second < seconds:
        second += 5.0
        if second == 60.0:
            yield NodeChanged(run, second, late, f"node-{nodes - 1}", "came")
        if second == 120.0:
            yield NodeChanged(run, second, lost, f"node-{nodes // 2}", "went")
            for number in range(nodes // 2, workers, nodes):
                yield WorkerLost(run, second, f"w{number}", "cpu", "was lost with its node", 1, node=lost)
        if second == 200.0:
            yield NodeChanged(run, second, lost, f"node-{nodes // 2}", "came")
        there = [n for n in ids if (n != late or second >= 60.0) and (n != lost or not 120.0 <= second < 200.0)]
        yield _of_cluster(run, second, ids, there, workers)


def _of_cluster(run: str, second: float, ids: list[str], there: list[str], workers: int) -> Snapshot:
    each = workers // len(ids)
    views = tuple(
        NodeView(
            node,
            f"node-{ids.index(node)}",
            each,
            0.5 + 0.45 * math.sin(second / 40 + ids.index(node)),
            int(_GB * (40 + ids.index(node))),
            128 * _GB,
            blocks=int(2e8 * (1 + ids.index(node) % 5)),
            devices=(
                DeviceView("gpu:0", 0.0, 0.8, 9 * _GB, 24 * _GB),
                DeviceView("gpu:1", 0.0, 0.3, 4 * _GB, 24 * _GB),
            ),
        )
        for node in there
    )
    some = tuple(
        WorkerView(f"w{number}", "cpu", 20_000 + number, ("s1",), second * 0.9, 3 * 10**8, node=ids[number % len(ids)])
        for number in range(0, workers, max(1, workers // 100))
    )
    done = int(second * 900)
    stages = (StageView("s0", "done", elements=7), StageView("s1", "busy", elements=done, rate=900.0))
    up = each * len(there)
    pools = (PoolView("cpu", up, up, workers, up * second, 0.9),)
    return Snapshot(run, second, stages, pools, workers=some, nodes=views)
