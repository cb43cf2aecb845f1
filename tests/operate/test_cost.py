"""Price sheets and bills, from made-up records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from luminosity.errors import OptionError
from luminosity.events import (
    DeviceInfo,
    MachineInfo,
    NodeInfo,
    PoolInfo,
    PoolView,
    Resources,
    RunEnded,
    RunStarted,
    Snapshot,
    WorkerEnded,
    WorkerLost,
    WorkerStarted,
)
from luminosity.operate.cost.bill import bill_of
from luminosity.operate.cost.prices import load_prices
from luminosity.runs.records import Record

GIB = 1 << 30
CPU = PoolInfo("cpu", 2, 1, cores_per_worker=1.0, ram_per_worker=2 * GIB)
DEVICE = PoolInfo("device", 1, 1, ("gpu:0",), cores_per_worker=2.0, ram_per_worker=8 * GIB)
MACHINE = MachineInfo(4, 16 * GIB, (DeviceInfo("gpu:0", "Tesla T4", 16 * GIB),))


def record_of(*pools: PoolInfo, events: tuple[Any, ...] = (), machine: MachineInfo = MACHINE, seconds: float = 3600.0):
    last = Snapshot("r", seconds, (), tuple(PoolView(pool.name, pool.workers) for pool in pools))
    first = replace(last, seconds=0.0)
    started = RunStarted("r", 0.0, "p.py", 0.0, (), pools, 0, machine=machine)
    return Record(started, events, 0, (first, last), RunEnded("r", seconds, "done", last), is_alive=False)


def started(worker: str, pool: str, at: float) -> WorkerStarted:
    return WorkerStarted("r", at, worker, pool, 1)


def sheet(tmp_path: Path, **changes: Any) -> str:
    one = {"name": "Mine", "source": "s", "date": "2026-11-01", "core_hour": 1.0, "gib_hour": 0.5, "device_hour": {}}
    content = {"currency": "EUR", "region": "here", "lists": [{**one, **changes}]}
    path = tmp_path / "prices.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_a_bill_adds_lifetimes_times_shares_at_their_prices():
    events = (
        started("a", "cpu", 0.0),
        started("b", "cpu", 1800.0),
        started("c", "device", 0.0),
        WorkerLost("r", 900.0, "b2", "cpu", "was killed", 0),  # of a worker that is not known: counts for nothing
        WorkerEnded("r", 1800.0, "a", "cpu", 1800.0),
    )
    bill = bill_of(record_of(CPU, DEVICE, events=events), load_prices())
    cpu, device = bill.pools
    assert (cpu.workers, cpu.peak_workers, cpu.worker_seconds) == (2, 1, 3600.0)
    assert cpu.total == pytest.approx(0.056 + 2 * 0.003557)
    assert device.total == pytest.approx(2 * 0.056 + 8 * 0.003557 + 0.42)
    assert bill.total == pytest.approx(cpu.total + device.total)
    assert bill.low == pytest.approx(3 * 0.03161 + 10 * 0.004237 + 0.35)
    assert bill.high == pytest.approx(bill.total)  # nobody was idle: one worker of each pool was up all the time
    assert any("Dataflow batch" in reason and "2026-08-21" in reason for reason in bill.reasons)


def test_the_high_end_keeps_workers_until_the_run_ends():
    events = (started("a", "cpu", 0.0), started("b", "cpu", 0.0), WorkerEnded("r", 900.0, "b", "cpu", 900.0))
    bill = bill_of(record_of(CPU, events=events), load_prices())
    an_hour = 0.056 + 2 * 0.003557
    assert bill.total == pytest.approx(1.25 * an_hour)
    assert bill.high == pytest.approx(2 * an_hour)
    assert any("until the run ends" in reason for reason in bill.reasons)


def test_workers_that_borrow_cores_do_not_cost_more_than_the_machine_has():
    small = replace(MACHINE, cores=2, ram=4 * GIB, devices=())
    events = tuple(started(f"w{i}", "cpu", 0.0) for i in range(4))  # two of them are borrowed
    bill = bill_of(record_of(CPU, events=events, machine=small), load_prices())
    assert bill.total == pytest.approx(2 * 0.056 + 4 * 0.003557)
    assert bill.pools[0].worker_seconds == 4 * 3600.0


def test_workers_on_nodes_that_joined_later_are_billed_beyond_what_the_cluster_had_at_first():
    small = replace(MACHINE, cores=2, ram=4 * GIB, devices=(), nodes=(NodeInfo("a", cores=2.0, ram=4 * GIB),))
    events = tuple(replace(started(f"w{i}", "cpu", 0.0), node=node) for i, node in enumerate("aabb"))
    bill = bill_of(record_of(CPU, events=events, machine=small), load_prices())
    assert bill.total == pytest.approx(4 * 0.056 + 8 * 0.003557)


def test_the_range_of_each_pool_holds_its_total():
    """The whole machine bounds the high end of all pools together, so a pool that stays small gets less of it."""
    large = replace(CPU, name="large", ram_per_worker=14 * GIB)
    events = (started("a", "large", 0.0), started("b", "cpu", 3500.0), started("c", "cpu", 3500.0))
    small = replace(MACHINE, cores=2)
    bill = bill_of(record_of(large, CPU, events=events, machine=small), load_prices())
    assert all(pool.low <= pool.total <= pool.high for pool in bill.pools)


def test_devices_without_a_price_are_left_out_and_named():
    machine = replace(MACHINE, devices=(DeviceInfo("gpu:0", "NVIDIA H200"),))
    bill = bill_of(record_of(DEVICE, events=(started("a", "device", 0.0),), machine=machine), load_prices())
    assert bill.total == pytest.approx(2 * 0.056 + 8 * 0.003557)
    assert any("NVIDIA H200" in note for note in bill.notes)


def test_declared_devices_are_billed_as_what_the_steps_ask_for():
    pool = replace(DEVICE, devices=("declared:0",), asked=Resources(accelerator="type:nvidia-tesla-t4;count:1"))
    machine = replace(MACHINE, devices=(DeviceInfo("declared:0"),))
    bill = bill_of(record_of(pool, events=(started("a", "device", 0.0),), machine=machine), load_prices())
    assert bill.usage.device_hours == (("nvidia-tesla-t4", 1.0),)
    assert any("nvidia-tesla-t4" in note for note in bill.notes)


def test_a_record_without_shares_is_billed_as_the_whole_machine_or_not_at_all():
    bare = replace(CPU, cores_per_worker=0.0, ram_per_worker=0)
    bill = bill_of(record_of(bare, events=(started("a", "cpu", 0.0),)), load_prices())
    assert bill.total == pytest.approx(4 * 0.056 + 16 * 0.003557 + 0.42)
    assert any("whole machine" in note for note in bill.notes)
    unknown = bill_of(record_of(bare, machine=MachineInfo()), load_prices())
    assert (unknown.total, unknown.low, unknown.high) == (None, None, None)
    assert unknown.notes


def test_lifetimes_come_from_snapshots_if_events_were_left_out():
    record = replace(record_of(CPU, events=(started("a", "cpu", 0.0),)), left_out=5)
    bill = bill_of(record, load_prices())
    assert bill.pools[0].worker_seconds == 2 * 3600.0  # the snapshots show two workers
    assert any("snapshots" in note for note in bill.notes)


def test_your_own_prices_replace_the_sheet(tmp_path: Path):
    bill = bill_of(record_of(CPU, events=(started("a", "cpu", 0.0),)), load_prices(sheet(tmp_path)))
    assert (bill.total, bill.low, bill.high, bill.currency) == (2.0, 2.0, 2.0, "EUR")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"core_hour": -1}, "found -1 as the price 'core_hour', expected a number from 0"),
        ({"gib_hour": True}, "found True as the price 'gib_hour'"),
        ({"device_hour": {"T4": "cheap"}}, "found 'cheap' as the price 'T4'"),
        ({"core_hour": 10**400}, "as the price 'core_hour', expected a number from 0"),
        ({"device_hour": {" ": 1}}, "found ' ' as a name in 'device_hour'"),
        ({"kind": "spot"}, "found the fields"),
    ],
)
def test_a_wrong_sheet_says_what_is_wrong(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(OptionError, match=message):
        load_prices(sheet(tmp_path, **changes))


def test_a_sheet_that_is_no_json_or_not_there_says_so(tmp_path: Path):
    path = tmp_path / "prices.csv"
    with pytest.raises(OptionError, match="can't read it"):
        load_prices(str(path))
    path.write_text("T4,0.42")
    with pytest.raises(OptionError, match="found no JSON"):
        load_prices(str(path))
