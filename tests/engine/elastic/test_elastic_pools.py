"""Pools of a run on a cluster: which workers are asked for, and which end. Nothing starts."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import cast

from luminosity.engine.loop.bundle import Bundle
from luminosity.engine.loop.workers import PoolRun
from tests.engine.elastic.pools import GPU, Cluster, node, pool, stage

_BUSY = cast(
    Bundle, SimpleNamespace(is_suspect=False, left=0, attempt=None, stage=SimpleNamespace(id="step", is_source=False))
)


def _keep_busy(of: PoolRun) -> None:
    for worker in of.workers.values():
        if worker.is_connected and not worker.bundles:
            worker.bundles["bundle"] = _BUSY
            of.with_free_streams.pop(worker.index, None)


def _nodes_of(of: PoolRun) -> Counter[str]:
    return Counter(of.places.values())


def test_all_accelerator_workers_are_asked_for_at_the_first_look_after_the_first_measured_bundle() -> None:
    device = pool("device", "gpu", "", "", "", needs=GPU)
    work = stage(device, queued=4000)
    cluster = Cluster([work], node("gpu", gpus=1), accelerators=4)
    _keep_busy(device)
    assert cluster.look(1.0) == 0, "nothing was measured yet"
    assert len(device.places) == 1, "workers on nodes to come wait for the rule"
    work.size.learn(10, 10 * 0.3)  # 1,200 s of work; the horizon is 300 s, since starts may take 60 s
    assert cluster.look(1.25) == 3
    assert device.wanted == 4
    assert _nodes_of(device) == {"gpu": 1, "": 3}
    assert cluster.look(1.5) == 0, "they are asked for once"


def test_work_shorter_than_a_start_asks_for_no_node() -> None:
    device = pool("device", "gpu", needs=GPU)
    cluster = Cluster([stage(device, queued=500, seconds=0.1)], node("gpu", gpus=1), accelerators=4)
    _keep_busy(device)
    assert [cluster.look(now) for now in (0.0, 1.0, 2.0)] == [0, 0, 0]


def test_a_pool_with_a_free_worker_asks_for_none() -> None:
    """Its source is slow: more workers would wait as well."""
    cpu = pool("cpu", "a")
    cluster = Cluster([stage(cpu, queued=10_000, seconds=1.0)], node("a", 1.0), max_workers={"": 8}, cpu_workers=8)
    assert cluster.look(0.0) == 0
    _keep_busy(cpu)
    assert cluster.look(0.25) == 7


def test_options_limit_each_pool_and_all_together() -> None:
    one, other = pool("cpu", "a", most=3), pool("cpu ram=1GiB", "a")
    stages = [stage(one, queued=100_000, seconds=1.0), stage(other, queued=100_000, seconds=1.0, name="other")]
    cluster = Cluster(stages, node("a"), cpu_workers=5)
    _keep_busy(one)
    _keep_busy(other)
    assert cluster.look(0.0) == 3
    assert (len(one.places), len(other.places)) == (3, 2)


def test_without_options_a_pool_asks_for_no_node() -> None:
    cpu = pool("cpu", "a", "a")
    cluster = Cluster([stage(cpu, queued=100_000, seconds=1.0)], node("a"))
    _keep_busy(cpu)
    assert cluster.look(0.0) == 0


def test_nodes_that_join_are_used_at_once_and_those_that_leave_are_not_waited_for() -> None:
    cpu = pool("cpu", "a", "a")
    cluster = Cluster([stage(cpu, queued=10)], node("a"))
    cluster.look(0.0)
    cluster.nodes = (node("a"), node("b"), node("c", 1.0))
    cluster.look(0.25)
    assert _nodes_of(cpu) == {"a": 2, "b": 2, "c": 1}
    assert cpu.unused_index() is not None
    assert cpu.all_slots() == cpu.most_workers() == 5
    cluster.nodes = (node("a"),)
    cluster.look(0.5)
    assert _nodes_of(cpu) == {"a": 2}
    assert cpu.unused_index() is None


def test_workers_that_wait_take_the_room_of_a_node_that_joins() -> None:
    device = pool("device", "", needs=GPU)
    cluster = Cluster([stage(device, queued=10)], node("head", 0.0))
    waiting = cluster.worker(device, 0)
    cluster.nodes = (node("head", 0.0), node("gpu", gpus=2))
    cluster.look(1.0)
    assert device.places[0] == "gpu"
    assert _nodes_of(device) == {"gpu": 2}
    assert waiting.is_to_come
    cluster.connect(waiting, "gpu")
    cluster.look(8.0)
    assert not waiting.is_to_come
    assert cluster.elastic._start_s(device) == 8.0  # pyright: ignore[reportPrivateUsage]


def test_a_pool_without_any_node_left_waits_for_one() -> None:
    cpu = pool("cpu", "a", "a")
    cluster = Cluster([stage(cpu, queued=10)], node("a"))
    cpu.workers.clear()  # they were lost with their node
    cluster.nodes = ()
    cluster.look(0.0)
    assert _nodes_of(cpu) == {"": 1}


def test_workers_that_would_come_too_late_are_withdrawn() -> None:
    device = pool("device", "gpu", needs=GPU, least=2)
    work = stage(device, queued=6000, seconds=0.3)
    cluster = Cluster([work], node("gpu", gpus=1), accelerators=6)
    _keep_busy(device)
    assert cluster.look(0.0) == 4, "one is there, and one was asked for by --min_workers"
    work.queued = 100
    cluster.look(0.25)
    assert len(cluster.ended) == 4, "--min_workers keeps one of those that wait"
    assert len(device.places) == 2


def test_idle_workers_end_after_the_timeout_but_one_and_the_least() -> None:
    cpu, device = pool("cpu", "a", "a", "a"), pool("device", "gpu", "gpu", needs=GPU, least=2)
    stages = [stage(cpu), stage(device, name="model")]
    cluster = Cluster(stages, node("a", 3.0), node("gpu", gpus=2))
    for now in (0.0, 5.0, 9.75):
        cluster.look(now)
    assert not cluster.ended
    cluster.look(10.0)
    assert [worker.pool.plan.name for worker in cluster.ended] == ["cpu", "cpu"]
    stages[1].is_done = lambda: True
    cluster.look(10.25)
    assert Counter(worker.pool.plan.name for worker in cluster.ended) == {"cpu": 2, "device": 2}


def test_a_worker_that_ran_a_short_bundle_between_two_looks_was_not_idle() -> None:
    cpu = pool("cpu", "a", "a")
    cluster = Cluster([stage(cpu)], node("a"))
    cluster.look(0.0)
    for index in (0, 1):
        cpu.worker_busy[index].begin()
        cpu.worker_busy[index].end()
    cluster.look(10.0)
    cluster.look(19.75)
    assert not cluster.ended
    cluster.look(20.0)
    assert len(cluster.ended) == 1


def test_a_pool_that_is_done_leaves_its_room_to_others() -> None:
    one, other = pool("cpu", "a"), pool("cpu cores=1", "a")
    stages = [stage(one), stage(other, queued=10, name="other")]
    cluster = Cluster(stages, node("a"))
    cluster.look(0.0)
    assert (len(one.places), len(other.places)) == (1, 1)
    stages[0].is_done = lambda: True
    one.workers.clear()
    cluster.look(0.25)
    assert (len(one.places), len(other.places)) == (0, 2)
