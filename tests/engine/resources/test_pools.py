"""Tests of pools: how they divide a machine. No worker starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity.engine.options import EngineConfig
from luminosity.engine.plan.graph import Stage
from luminosity.engine.resources.hints import Needs
from luminosity.engine.resources.machine import Machine, visibility
from luminosity.engine.resources.pools import Assignment, Pool, assign
from luminosity.errors import ResourcesExceeded

_GIB = 1 << 30
_MACHINE = Machine(cores=8, ram_bytes=64 * _GIB, devices=("gpu:0", "gpu:1"))


def config(**changes: Any) -> EngineConfig:
    return replace(EngineConfig.of(PipelineOptions(["--progress=off"])), **changes)


def stage(name: str) -> Stage:
    return Stage(
        id=name,
        label=name,
        steps=(name,),
        environment_id="",
        reads=(),
        writes=(),
        side_inputs=(),
        timers=(),
        is_stateful=False,
        is_splittable=False,
        is_unbounded=False,
        is_sink=False,
        sorts_its_bundle=False,
        transforms=(),
        residual_reads={},
    )


def assigned(needs: dict[str, Needs], machine: Machine = _MACHINE, **changes: object) -> dict[str, Assignment]:
    return assign([(stage(name), need) for name, need in needs.items()], machine, config(**changes))


def pools(assignments: dict[str, Assignment]) -> list[Pool]:
    return list({id(a.pool): a.pool for a in assignments.values()}.values())


def test_steps_without_hints_share_all_cores() -> None:
    (pool,) = pools(assigned({"a": Needs(), "b": Needs()}))
    assert (pool.workers, pool.cores_per_worker, pool.slots) == (8, 1.0, 1)


def test_a_device_process_serves_steps_with_different_hints() -> None:
    found = assigned({"a": Needs(accelerator_count=1), "b": Needs(accelerator_count=1, min_ram_bytes=_GIB)})
    assert found["a"].pool is found["b"].pool
    assert found["a"].pool.device_groups == (("gpu:0",), ("gpu:1",))
    assert found["a"].pool.ram_per_worker == _GIB


def test_groups_of_devices_have_a_process_each() -> None:
    (pool,) = pools(assigned({"a": Needs(accelerator_count=2)}))
    assert pool.device_groups == (("gpu:0", "gpu:1"),)


def test_devices_leave_the_rest_of_the_cores_to_cpu_steps() -> None:
    found = assigned({"prepare": Needs(), "infer": Needs(accelerator_count=1)})
    assert found["infer"].pool.workers == 2
    assert found["prepare"].pool.workers == 6


@pytest.mark.parametrize("cores", [1, 2, 3, 8])
@pytest.mark.parametrize("cpu_workers", [None, 1, 5])
def test_the_sum_never_exceeds_the_machine(cores: int, cpu_workers: int | None) -> None:
    machine = Machine(cores, 64 * _GIB, ("gpu:0", "gpu:1"))
    needs = {
        "plain": Needs(),
        "ram": Needs(min_ram_bytes=20 * _GIB),
        "cores": Needs(cpu_count=1),
        "device": Needs(accelerator_count=1, min_ram_bytes=8 * _GIB),
        "group": Needs(accelerator_count=2),
    }
    found = pools(assigned(needs, machine, cpu_workers=cpu_workers))
    assert sum(p.cores_per_worker * p.workers for p in found) <= cores + 1e-9
    assert sum(p.ram_per_worker * p.workers for p in found) <= machine.ram_bytes
    assert all(p.workers >= 1 for p in found)


def test_a_third_of_the_ram_gives_three_workers_and_fewer_beside_another_pool() -> None:
    third = Needs(min_ram_bytes=_MACHINE.ram_bytes // 3)
    assert assigned({"a": third}, cpu_workers=8)["a"].pool.workers == 3
    other = Needs(min_ram_bytes=_MACHINE.ram_bytes // 3, cpu_count=1)
    found = assigned({"a": third, "b": other}, cpu_workers=8)
    assert found["a"].pool.workers + found["b"].pool.workers == 3


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        (Needs(min_ram_bytes=65 * _GIB), "65GiB"),
        (Needs(cpu_count=9), "cpu_count=9"),
    ],
)
def test_more_than_the_machine_has_is_refused(needs: Needs, said: str) -> None:
    with pytest.raises(ResourcesExceeded, match="'greedy'") as caught:
        assigned({"greedy": needs})
    assert said in str(caught.value)


def test_pools_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ResourcesExceeded, match=r"'one'.*'two'"):
        assigned({"one": Needs(min_ram_bytes=40 * _GIB), "two": Needs(min_ram_bytes=40 * _GIB, cpu_count=1)})


def test_a_process_sees_its_own_devices_only() -> None:
    assert visibility(("gpu:1",))["CUDA_VISIBLE_DEVICES"] == "1"
    assert visibility(("tpu:0", "tpu:1"))["TPU_VISIBLE_CHIPS"] == "0,1"
