"""Tests of pools: how they divide a machine. No worker starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity.engine.options import EngineConfig
from luminosity.engine.plan.graph import Stage
from luminosity.engine.resources.hints import Needs, is_of_type
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
        can_cut_elements=True,
        is_sink=False,
        sorts_its_bundle=False,
        sorts_blocks=False,
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


def test_cpu_pools_may_borrow_each_others_cores_but_no_more_ram_than_is_left() -> None:
    quick, large = pools(assigned({"quick": Needs(), "large": Needs(min_ram_bytes=20 * _GIB)}))
    assert (quick.workers, large.workers) == (5, 3)
    assert (quick.borrowed, large.borrowed) == (3, 0)
    quick, large = pools(assigned({"quick": Needs(), "large": Needs(min_ram_bytes=1 * _GIB)}))
    assert quick.workers + quick.borrowed == large.workers + large.borrowed == 8
    ram = sum((pool.workers + pool.borrowed) * pool.ram_per_worker for pool in (quick, large))
    assert ram <= _MACHINE.ram_bytes


def test_workers_that_share_a_core_borrow_no_more_than_whole_cores() -> None:
    needs = {"quick": Needs(), "model": Needs(min_ram_bytes=1 * _GIB)}
    for cpu_workers, borrowed in ((16, 0), (12, 2), (8, 4)):
        quick, model = pools(assigned(needs, cpu_workers=cpu_workers))
        assert (quick.borrowed, model.borrowed) == (borrowed, borrowed)


def test_a_single_cpu_pool_and_device_pools_borrow_nothing() -> None:
    assert [pool.borrowed for pool in pools(assigned({"a": Needs(), "b": Needs(accelerator_count=1)}))] == [0, 0]


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
        assigned({"greedy": needs}, missing_resources="fail")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        (Needs(min_ram_bytes=65 * _GIB), "min_ram=65GiB; this machine has 64GiB: it runs in one worker with less RAM"),
        (Needs(cpu_count=9), "cpu_count=9; this machine has 8 cores: it runs in one worker with fewer cores"),
        (Needs(accelerator_count=3), "3 accelerator(s); this machine has 2: it runs on the CPU"),
    ],
)
def test_more_than_the_machine_has_runs_with_less_and_one_warning(
    needs: Needs, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = assigned({"greedy": needs, "plain": Needs()})
    (record,) = caplog.records
    assert record.getMessage().startswith(f"step 'greedy' asks for {said}")
    assert_fits(pools(found), _MACHINE)
    assert found["greedy"].pool.device_groups == ()
    if not needs.accelerator_count:
        assert found["greedy"].pool.workers == 1
        assert found["greedy"].pool.ram_per_worker > found["plain"].pool.ram_per_worker or needs.cpu_count
        assert found["greedy"].pool.cores_per_worker > found["plain"].pool.cores_per_worker or needs.min_ram_bytes


_T4 = Needs(accelerator_count=1, accelerator_type="nvidia-tesla-t4")
_H100 = Needs(accelerator_count=1, accelerator_type="nvidia-h100-80gb")
_ANY = Needs(accelerator_count=1, accelerator_type="any")


def _with_devices(**names: str) -> Machine:
    """Return a machine with these devices; an empty name stands for one of which only the id is known."""
    devices = {device.replace("_", ":"): name for device, name in names.items()}
    return Machine(8, 64 * _GIB, tuple(devices), names=devices)


def _devices(found: dict[str, Assignment]) -> dict[str, tuple[tuple[str, ...], ...]]:
    return {step: assignment.pool.device_groups for step, assignment in found.items()}


def test_steps_get_devices_of_the_type_that_they_ask_for() -> None:
    machine = _with_devices(gpu_0="NVIDIA H100 80GB HBM3", gpu_1="Tesla T4", gpu_2="Tesla T4")
    found = assigned({"small": _T4, "large": _H100, "open": _ANY}, machine, missing_resources="fail")
    t4s = (("gpu:1",), ("gpu:2",))
    assert _devices(found) == {"small": t4s, "large": (("gpu:0",),), "open": t4s}
    assert found["small"].pool is found["open"].pool


@pytest.mark.parametrize(
    ("machine", "has"),
    [
        (_with_devices(gpu_0="Tesla T4"), "gpu:0 (Tesla T4)"),
        (_with_devices(declared_0=""), "declared:0 (taken as nvidia-tesla-t4)"),
    ],
)
def test_one_device_is_not_of_two_types(machine: Machine, has: str, caplog: pytest.LogCaptureFixture) -> None:
    said = f"step 'large' asks for 1 accelerator(s) of type nvidia-h100-80gb; this machine has {has}"
    with pytest.raises(ResourcesExceeded) as caught:
        assigned({"small": _T4, "large": _H100}, machine, missing_resources="fail")
    assert str(caught.value).startswith(said)
    found = assigned({"small": _T4, "large": _H100}, machine)
    assert [record.getMessage() for record in caplog.records] == [f"{said}: it runs on what there is"]
    assert found["small"].pool is found["large"].pool


def test_devices_of_an_unknown_type_are_shared_out_among_the_types() -> None:
    machine = _with_devices(declared_0="", declared_1="", declared_2="")
    two = replace(_H100, accelerator_count=2)
    found = assigned({"small": _T4, "large": two}, machine, missing_resources="fail")
    assert _devices(found) == {"small": (("declared:0",),), "large": (("declared:1", "declared:2"),)}
    alone = assigned({"a": _T4, "b": replace(_T4, accelerator_type="T4"), "c": _ANY}, machine, missing_resources="fail")
    assert len(pools(alone)) == 1  # one type, in two spellings
    assert alone["a"].pool.device_groups == (("declared:0",), ("declared:1",), ("declared:2",))


def test_a_type_of_gpu_is_no_tpu() -> None:
    with pytest.raises(ResourcesExceeded, match=r"'small' asks for 1 accelerator.* this machine has tpu:0"):
        assigned({"small": _T4}, _with_devices(tpu_0=""), missing_resources="fail")
    tpu = Needs(accelerator_count=1, accelerator_type="tpu-v5-lite-podslice")
    assert _devices(assigned({"a": tpu}, _with_devices(tpu_0=""), missing_resources="fail")) == {"a": (("tpu:0",),)}
    with pytest.raises(ResourcesExceeded, match="tpu-v5"):
        assigned({"a": tpu}, _with_devices(gpu_0="NVIDIA L4"), missing_resources="fail")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("nvidia-tesla-t4", "Tesla T4"),
        ("nvidia-l4", "NVIDIA L4"),
        ("nvidia-tesla-a100", "NVIDIA A100-SXM4-40GB"),
        ("nvidia-a100-80gb", "NVIDIA A100-SXM4-80GB"),
        ("nvidia-tesla-v100", "Tesla V100-SXM2-16GB"),
        ("nvidia-tesla-p100", "Tesla P100-PCIE-16GB"),
        ("nvidia-h100-80gb", "NVIDIA H100 80GB HBM3"),
        ("nvidia-h100-mega-80gb", "NVIDIA H100 80GB HBM3"),
        ("nvidia-h200-141gb", "NVIDIA H200"),
        ("H200", "NVIDIA H200"),
        ("nvidia-rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
        ("NVIDIA_A10G", "NVIDIA A10G"),
    ],
)
def test_a_type_is_known_by_the_driver_s_name(kind: str, name: str) -> None:
    assert is_of_type(kind, "gpu:0", name)
    assert not is_of_type(kind, "gpu:0", "NVIDIA B200")


def test_pools_that_do_not_fit_together_share_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    needs = {
        "one": Needs(min_ram_bytes=90 * _GIB),
        "two": Needs(min_ram_bytes=32 * _GIB, cpu_count=6),
        "three": Needs(accelerator_count=2, min_ram_bytes=32 * _GIB, cpu_count=6),
        "plain": Needs(),
    }
    found = assigned(needs)
    (record,) = caplog.records
    lines = record.getMessage().splitlines()
    assert lines[0].startswith("step 'one' asks for min_ram=90GiB")
    assert lines[1] == (
        "one worker for each kind of step needs more RAM than this machine's 64GiB "
        "('one' 64GiB, 'two' 32GiB, 'three' 32GiB): each worker gets less"
    )
    assert lines[2].startswith("cpu_count of 'two', 'three' adds up to 12 cores")
    assert_fits(pools(found), _MACHINE)
    assert found["one"].pool.ram_per_worker // 2 == found["two"].pool.ram_per_worker


def assert_fits(found: list[Pool], machine: Machine) -> None:
    """Assert that all workers together fit into the machine, and that each has a share."""
    assert sum(p.cores_per_worker * p.workers for p in found) <= machine.cores + 1e-9
    assert sum(p.ram_per_worker * p.workers for p in found) <= machine.ram_bytes
    assert all(p.workers >= 1 and p.ram_per_worker > 0 and p.cores_per_worker > 0 for p in found)


def test_pools_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ResourcesExceeded, match=r"'one'.*'two'"):
        assigned(
            {"one": Needs(min_ram_bytes=40 * _GIB), "two": Needs(min_ram_bytes=40 * _GIB, cpu_count=1)},
            missing_resources="fail",
        )


def test_a_process_sees_its_own_devices_only() -> None:
    assert visibility(("gpu:1",))["CUDA_VISIBLE_DEVICES"] == "1"
    assert visibility(("tpu:0", "tpu:1"))["TPU_VISIBLE_CHIPS"] == "0,1"
