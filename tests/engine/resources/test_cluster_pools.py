"""Tests of pools on a cluster: what fits on made-up nodes. Nothing starts, and Ray is not imported."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from hypothesis import given, settings
from hypothesis import strategies as st

from luminosity.engine.cluster.driver.ray_calls import node_of
from luminosity.engine.data.world import WallClock
from luminosity.engine.loop.workers import PoolRun
from luminosity.engine.options import EngineConfig
from luminosity.engine.resources.hints import Needs
from luminosity.engine.resources.machine import LeaseNeeds, Machine, Node
from luminosity.engine.resources.pools import Assignment, Pool, assign
from luminosity.errors import OptionError, ResourcesExceeded

_GIB = 1 << 30
_KNOWN = ("A100", "A100-80G", "H100", "L4", "T4")
_CONFIG = EngineConfig.of(PipelineOptions(["--progress=off"]))


@dataclass(frozen=True)
class Stage:
    id: str
    is_source: bool = False

    @property
    def label(self) -> str:
        return self.id


def node(name: str, cores: float = 4.0, ram: int = 16, gpus: float = 0.0, kind: str = "") -> Node:
    return Node(name, f"10.0.0.{name}", cores, ram * _GIB, gpus, kind)


def assigned(
    needs: dict[str, Needs], *nodes: Node, accelerators: int | None = None, **changes: Any
) -> dict[str, Assignment]:
    machine = Machine.of_cluster(nodes, accelerators, _KNOWN)
    return assign([(Stage(name), each) for name, each in needs.items()], machine, replace(_CONFIG, **changes))


def pools(assignments: dict[str, Assignment]) -> list[Pool]:
    return list({id(a.pool): a.pool for a in assignments.values()}.values())


def test_workers_are_what_fits_on_each_node() -> None:
    needs = {"a": Needs(cpu_count=3, min_ram_bytes=6 * _GIB)}
    (pool,) = pools(assigned(needs, node("1", 8), node("2", 4), node("3", 2)))
    assert Counter(pool.nodes) == {"1": 2, "2": 1}
    assert (pool.workers, pool.lease) == (3, LeaseNeeds(3.0, 6 * _GIB, 0))


def test_steps_without_hints_take_one_core_for_each_worker() -> None:
    (pool,) = pools(assigned({"a": Needs(), "b": Needs()}, node("1", 4), node("2", 2)))
    assert (pool.workers, pool.borrowed, pool.lease) == (6, 0, LeaseNeeds(1.0, 0, 0))
    assert pool.ram_per_worker == 4 * _GIB  # a quarter of the node with four workers


def test_device_workers_ask_for_their_devices_and_no_core() -> None:
    found = assigned({"a": Needs(), "b": Needs(accelerator_count=2)}, node("1", 4), node("2", 4, gpus=5))
    device, cpu = found["b"].pool, found["a"].pool
    assert device.lease == LeaseNeeds(0.0, 0, 2)
    assert device.nodes == ("2", "2")
    assert [len(group) for group in device.device_groups] == [2, 2]
    assert len({each for group in device.device_groups for each in group}) == 4
    assert Counter(cpu.nodes) == {"1": 4, "2": 4}


def test_types_of_accelerators_have_pools_of_their_own() -> None:
    needs = {
        "a": Needs(accelerator_count=1, accelerator_type="nvidia-tesla-t4"),
        "b": Needs(accelerator_count=1, accelerator_type="nvidia-l4"),
    }
    nodes = node("1", gpus=1, kind="L4"), node("2", gpus=2, kind="T4")
    found = assigned(needs, *nodes)
    assert {name: (a.pool.name, a.pool.nodes) for name, a in found.items()} == {
        "a": ("device T4", ("2", "2")),
        "b": ("device L4", ("1",)),
    }
    assert found["a"].pool.lease == LeaseNeeds(0.0, 0, 1, "T4")
    # A bill finds the price of a device by its name.
    names = {device.id: device.name for device in Machine.of_cluster(nodes).info().devices}
    assert [names[device] for (device,) in found["a"].pool.device_groups] == ["T4", "T4"]
    assert [names[device] for (device,) in found["b"].pool.device_groups] == ["L4"]


def test_any_type_shares_the_workers_of_the_only_type() -> None:
    needs = {"a": Needs(accelerator_count=1), "b": Needs(accelerator_count=1, accelerator_type="T4")}
    (pool,) = pools(assigned(needs, node("1", gpus=2, kind="T4")))
    assert (pool.name, pool.workers, pool.labels) == ("device T4", 2, ("b", "a"))


def test_pools_that_want_the_same_devices_share_workers() -> None:
    needs = {"a": Needs(accelerator_count=1), "b": Needs(accelerator_count=2)}
    (pool,) = pools(assigned(needs, node("1", gpus=2)))
    assert (pool.workers, pool.lease, set(pool.labels)) == (1, LeaseNeeds(0.0, 0, 2), {"a", "b"})


def test_a_pool_that_others_have_joined_may_join_another() -> None:
    t4 = Needs(accelerator_count=1, accelerator_type="T4")
    needs = {"a": Needs(accelerator_count=1), "b": t4, "c": replace(t4, accelerator_count=2)}
    (pool,) = pools(assigned(needs, node("1", gpus=2, kind="T4")))
    assert (pool.workers, set(pool.labels)) == (1, {"a", "b", "c"})


def test_a_large_worker_may_take_the_place_of_two_small_ones() -> None:
    t4 = Needs(accelerator_count=1, accelerator_type="T4")
    needs = {"a": Needs(accelerator_count=3), "b": t4, "c": replace(t4, accelerator_count=2)}
    (pool,) = pools(assigned(needs, node("1", gpus=3, kind="T4")))
    assert (pool.workers, pool.lease) == (1, LeaseNeeds(0.0, 0, 3, "T4"))


def test_a_node_may_have_several_names_for_its_type() -> None:
    resources = {"CPU": 8.0, "GPU": 1.0, "accelerator_type:A100": 1.0, "accelerator_type:A100-80G": 1.0}
    entry = {"NodeID": "1", "NodeManagerAddress": "10.0.0.1", "Resources": {**resources, "memory": 8e9}}
    needs = {"a": Needs(accelerator_count=1, accelerator_type="nvidia-a100-80gb")}
    assert pools(assigned(needs, node_of(entry, here="1")))[0].lease == LeaseNeeds(0.0, 0, 1, "A100-80G")


def test_chips_of_tpus_are_accelerators() -> None:
    resources = {"CPU": 8.0, "TPU": 4.0, "accelerator_type:TPU-V4": 1.0, "memory": 8e9}
    entry = {"NodeID": "1", "NodeManagerAddress": "10.0.0.1", "Resources": resources}
    (pool,) = pools(assigned({"a": Needs(accelerator_count=4)}, node_of(entry, here="1")))
    assert (pool.workers, pool.lease) == (1, LeaseNeeds(0.0, 0, 4, "", "tpu"))


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        (Needs(cpu_count=9), r"step 'a' asks for cpu_count=9; the largest node has 8 cores"),
        (Needs(min_ram_bytes=40 * _GIB), r"step 'a' asks for min_ram=40GiB; the largest node has 32GiB"),
        (
            Needs(cpu_count=6, min_ram_bytes=20 * _GIB),
            r"step 'a' asks for cpu_count=6; the largest node with 20GiB RAM has 4 cores",
        ),
        (
            Needs(min_ram_bytes=20 * _GIB, accelerator_count=1),
            r"step 'a' asks for min_ram=20GiB; the largest node with 1 accelerator\(s\) has 16GiB",
        ),
        (Needs(accelerator_count=3), r"step 'a' asks for 3 accelerator\(s\); the largest node has 2"),
        (
            Needs(accelerator_count=1, accelerator_type="nvidia-l4"),
            r"step 'a' asks for 1 accelerator\(s\) of type L4; no node of the cluster has one; it has T4",
        ),
    ],
)
def test_what_the_largest_node_lacks_is_named_with_its_step(
    needs: Needs, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = node("1", 8, 16), node("2", 4, 32), node("3", 8, 16, gpus=2, kind="T4")
    with pytest.raises(ResourcesExceeded, match=message):
        assigned({"a": needs}, *nodes, missing_resources="fail")
    with caplog.at_level(logging.WARNING, logger="luminosity"):
        (pool,) = pools(assigned({"a": needs}, *nodes))
    assert all(pool.nodes)
    assert caplog.text.count("step 'a'") == 1


def test_an_unknown_type_fails_in_any_case() -> None:
    needs = Needs(accelerator_count=1, accelerator_type="nvidia-t44")
    with pytest.raises(
        ResourcesExceeded, match=r"step 'a' .*'nvidia-t44', which Ray does not know; this cluster has T4"
    ):
        assigned({"a": needs}, node("1", gpus=2, kind="T4"))


def test_options_may_ask_for_more_than_there_is_now() -> None:
    needs = {"a": Needs(), "b": Needs(accelerator_count=1, accelerator_type="L4")}
    found = assigned(needs, node("1", 2), accelerators=3, cpu_workers=5)
    assert found["a"].pool.nodes == ("1", "1", "", "", "")
    assert found["b"].pool.nodes == ("", "", "")
    assert found["b"].pool.lease == LeaseNeeds(0.0, 0, 1, "L4")


def test_options_may_ask_for_less_than_there_is() -> None:
    needs = {"a": Needs(), "b": Needs(accelerator_count=1)}
    found = assigned(needs, node("1", 8, gpus=4), accelerators=2, cpu_workers=3)
    assert (found["a"].pool.workers, found["b"].pool.workers) == (3, 2)


def test_more_kinds_of_steps_than_cores_share_the_cores() -> None:
    needs = {name: Needs(max_active_bundles=i + 1) for i, name in enumerate("abc")}
    found = pools(assigned(needs, node("1", 2)))
    assert sorted((pool.workers, pool.lease.cpus) for pool in found if pool.lease) == [(1, 0.0), (1, 1.0), (1, 1.0)]


def test_a_cluster_without_cores_lets_workers_wait(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="luminosity"):
        (pool,) = pools(assigned({"a": Needs()}, node("1", 0)))
    assert (pool.nodes, pool.lease) == (("",), LeaseNeeds(1.0, 0, 0))
    assert "step 'a' needs 1 core, and no node of the cluster has it now: it waits until a node joins" in caplog.text


def test_idle_cores_of_other_pools_are_borrowed_where_they_are() -> None:
    found = assigned({"a": Needs(), "b": Needs(max_active_bundles=2)}, node("1", 2), node("2", 2))
    first, second = found["a"].pool, found["b"].pool
    assert (first.workers, first.borrowed, second.workers, second.borrowed) == (2, 2, 2, 2)
    assert first.nodes[2:] == second.nodes[:2]
    running = PoolRun(first, first_writer=0, clock=WallClock())
    asked = [running.lease_needs(index) for index in range(4)]
    assert [(needs.cpus, needs.node) for needs in asked if needs is not None] == [
        *((1.0, node) for node in first.nodes[:2]),
        *((0.0, node) for node in first.nodes[2:]),
    ]


_NODES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 64), st.integers(0, 4), st.sampled_from(["T4", "L4", ""])),
    min_size=1,
    max_size=4,
)
_NEEDS = st.lists(
    st.builds(
        Needs,
        min_ram_bytes=st.integers(0, 70).map(lambda gib: gib * _GIB),
        cpu_count=st.integers(0, 10),
        accelerator_count=st.integers(0, 4),
        accelerator_type=st.sampled_from(["", "T4", "L4"]),
        max_active_bundles=st.integers(0, 2),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(_NODES, _NEEDS)
def test_what_is_planned_fits_on_the_nodes(sizes: list[tuple[int, int, int, str]], needs: list[Needs]) -> None:
    nodes = [node(str(i), *size) for i, size in enumerate(sizes)]
    found = assigned({f"step {i}": each for i, each in enumerate(needs)}, *nodes)
    for each in nodes:
        here = [p.lease for p in pools(found) for name in p.nodes[: p.workers] if name == each.id]
        asked = [actor for actor in here if actor is not None]
        assert sum(actor.cpus for actor in asked) <= each.cores + 1e-6
        assert sum(actor.memory for actor in asked) <= each.ram_bytes
        assert sum(actor.gpus for actor in asked) <= each.accelerators
        assert all(each.is_of(actor.accelerator_type) for actor in asked if actor.gpus)
    has_cores = any(each.cores for each in nodes)
    for pool in pools(found):
        assert pool.workers >= 1
        assert pool.lease is not None
        # A worker that waits for ever would keep its run from ending.
        assert all(pool.nodes) or not has_cores
        assert pool.nodes[pool.workers :] == () or pool.borrowed == len(pool.nodes) - pool.workers


def test_limits_of_pools_leave_their_room_to_others() -> None:
    needs = {"a": Needs(), "b": Needs(min_ram_bytes=_GIB)}
    plain, large = (assigned(needs, node("1", 8), max_workers={"cpu": 6, "cpu ram": 2})[each].pool for each in "ab")
    assert (plain.workers, plain.most) == (6, 6)
    assert (large.workers, large.most) == (2, 2)
    assert assigned(needs, node("1", 8), min_workers={"": 3})["a"].pool.least == 3


def test_a_limit_for_a_pool_that_is_not_there_is_refused() -> None:
    with pytest.raises(OptionError, match=r"--max_workers=device=2: found no such pool, expected one of 'cpu'"):
        assigned({"a": Needs()}, node("1"), max_workers={"device": 2})
