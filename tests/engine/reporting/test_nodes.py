"""Which nodes of a cluster come and go while a run lasts, and what a record keeps of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from luminosity.engine.reporting.reporter import node_changes
from luminosity.events import DeviceView, NodeChanged, NodeView, Snapshot, from_json, to_json
from luminosity.runs import records
from luminosity.runs.recorder import Recorder
from luminosity.runs.worker_sampling import WorkerSampler
from tests.operate.page.one_run import RUN, STARTED

ONE, TWO = NodeView("1" * 8, "node-1"), NodeView("2" * 8)


def test_nodes_that_come_and_go_are_told_once() -> None:
    known: dict[str, str] = {}

    def changes(seconds: float, *nodes: NodeView) -> list[tuple[str, str, str]]:
        return [(each.node[0], each.address, each.change) for each in node_changes(RUN, seconds, known, nodes)]

    assert changes(1.0, ONE, TWO) == [("1", "node-1", "came"), ("2", "", "came")]
    assert changes(2.0, ONE, replace(TWO, address="node-2")) == []
    assert changes(3.0, replace(ONE, workers=3), TWO) == []  # whose address stays known
    assert changes(4.0, ONE) == [("2", "node-2", "went")]
    assert changes(5.0, ONE, TWO) == [("2", "", "came")]


def test_a_node_and_its_change_can_be_read_again() -> None:
    node = NodeView("n", "host", 3, 0.5, 7, 9, blocks=11, devices=(DeviceView("gpu:0", utilization=0.25),))
    snapshot = Snapshot(RUN, 1.0, (), (), nodes=(node,))
    for event in (snapshot, NodeChanged(RUN, 1.0, "n", "host", "went")):
        assert from_json(to_json(event)) == event


def test_a_worker_of_a_cluster_says_its_process_with_its_bundles() -> None:
    sampler = WorkerSampler()
    sampler.watch("w1", "cpu", 0, "n1")
    sampler.reported("w1", 0.0, 0, 0)
    (before,) = sampler.views({"w1": ()})
    sampler.reported("w1", 1.5, 1 << 20, 4711)
    (after,) = sampler.views({"w1": ("s0",)})
    assert (before.pid, before.node) == (0, "n1")
    assert (after.pid, after.node, after.cpu_seconds, after.running) == (4711, "n1", 1.5, ("s0",))


def test_a_long_run_on_many_nodes_keeps_a_small_record(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder(STARTED)
    devices = tuple(DeviceView(f"gpu:{number}", 0.0, 0.5, 1 << 30, 1 << 34) for number in range(2))
    nodes = tuple(
        NodeView(f"{number:056x}", f"node-{number}", 20, 0.5, 1 << 36, 1 << 37, 1, devices) for number in range(100)
    )
    for second in range(160):
        recorder(Snapshot(RUN, float(second), (), (), nodes=nodes))
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    record = records.load(records.path_of(tmp_path, RUN))
    assert isinstance(record, records.Record)
    assert size < 5_000_000
    assert len(record.snapshots) >= 80  # points of charts
    assert {len(snapshot.nodes) for snapshot in record.snapshots} == {100}
    assert record.snapshots[-1].nodes == nodes  # the newest one is whole
