"""``lum simulate``: what made-up runs would take, where the answer is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from luminosity.cli.main import main
from luminosity.cli.simulate import pool
from luminosity.errors import OptionError, RecordError
from luminosity.events import (
    InferenceView,
    MachineInfo,
    PoolInfo,
    PoolView,
    Resources,
    RunEnded,
    RunStarted,
    Snapshot,
    StageInfo,
    StageView,
    WorkerStarted,
    to_json,
)
from luminosity.operate.cost.bill import bill_of
from luminosity.operate.cost.prices import load_prices
from luminosity.operate.simulation import simulator
from luminosity.operate.simulation.fitting import fit
from luminosity.operate.simulation.forecast import forecast
from luminosity.operate.simulation.workload import AutoscaleRange, PoolModel, PoolOrder, Scenario, StageModel, Workload
from luminosity.runs.records import Record
from tests.operate.made_up import GIB, T4, run_of_one_pool

READ = StageModel("read", "Read", "cpu", seconds_per_row=0.01)
INFER = StageModel("infer", "Infer", "device", ("read",), seconds_per_row=0.1)


def test_one_stage_takes_its_work_divided_by_its_workers() -> None:
    outcome = simulator.run(Workload(10_000, (READ,), (PoolModel("cpu", 4, startup_seconds=5.0),)))
    assert outcome.seconds == pytest.approx(5 + 10_000 * 0.01 / 4, rel=0.01)
    # From their starts, which the loop asks for one after the other, as there is work.
    assert outcome.worker_seconds["cpu"] == pytest.approx(4 * (outcome.seconds - 5), rel=0.01)
    assert outcome.busy_seconds["cpu"] == pytest.approx(100.0)


def test_the_pool_with_the_most_work_decides() -> None:
    pools = (PoolModel("cpu", 2), PoolModel("device", 4))
    outcome = simulator.run(Workload(10_000, (READ, INFER), pools))
    assert outcome.seconds == pytest.approx(10_000 * 0.1 / 4, rel=0.02)
    assert outcome.states["infer"]["needs worker: device"] > 0.8


def test_a_full_queue_holds_its_writer_back() -> None:
    pools = (PoolModel("cpu", 1), PoolModel("device", 1))
    bounded = simulator.run(Workload(10_000, (READ, replace(INFER, queue_rows=100.0)), pools))
    endless = simulator.run(Workload(10_000, (READ, INFER), pools))
    assert bounded.states["read"]["held back by Infer"] > 0.7
    assert "held back by Infer" not in endless.states["read"]
    assert bounded.seconds == pytest.approx(endless.seconds, rel=0.02)


def test_a_stage_that_waits_starts_after_the_one_before() -> None:
    grouped = replace(INFER, pool="cpu", waits_for=("read",))
    outcome = simulator.run(Workload(1000, (READ, grouped), (PoolModel("cpu", 1),)))
    assert outcome.seconds == pytest.approx(1000 * 0.11, rel=0.001)
    wide = simulator.run(
        Workload(1000, (READ, replace(grouped, pool="device")), (PoolModel("cpu", 1), PoolModel("device", 10)))
    )
    assert wide.seconds == pytest.approx(10 + 10, rel=0.02)


def test_workers_that_share_cores_take_longer() -> None:
    computing = replace(READ, cores=1.0)
    alone = simulator.run(Workload(10_000, (computing,), (PoolModel("cpu", 4),), cores=4))
    shared = simulator.run(Workload(10_000, (computing,), (PoolModel("cpu", 4),), cores=2))
    sleeping = simulator.run(Workload(10_000, (replace(READ, cores=0.05),), (PoolModel("cpu", 4),), cores=2))
    assert alone.seconds == pytest.approx(25, rel=0.01)
    assert shared.seconds == pytest.approx(50, rel=0.03)
    assert sleeping.seconds == pytest.approx(25, rel=0.01)


def test_lost_workers_add_time() -> None:
    pools = (PoolModel("cpu", 4, startup_seconds=60.0),)
    calm = simulator.run(Workload(10_000_000, (READ,), pools))
    losing = simulator.run(Workload(10_000_000, (READ,), pools, preempted_per_hour=1.0))
    assert losing.lost_workers > 10
    assert losing.seconds > calm.seconds + 0.8 * 60 * losing.lost_workers / 4
    once = simulator.run(Workload(10_000, (READ,), (PoolModel("cpu", 1, startup_seconds=30.0),), lost_at=(80.0,)))
    assert once.lost_workers == 1
    assert 160 <= once.seconds <= 162  # two starts, the work, and at most what ran when it was lost


def test_a_run_that_never_ends_is_refused_and_a_long_one_has_few_points() -> None:
    with pytest.raises(OptionError, match="more than 10 years"):
        simulator.run(Workload(1e14, (READ,), (PoolModel("cpu", 1),)))
    slow = PoolModel("cpu", 1, startup_seconds=50.0)
    outcome = simulator.run(Workload(100, (READ,), (slow,), preempted_per_hour=14_400), seed=1)
    assert outcome.seconds > 4 * 51
    assert len(outcome.points) < 1000
    assert sum(outcome.states["read"].values()) == pytest.approx(1.0)


def test_a_pool_is_named_with_its_equals_sign() -> None:
    assert pool("cpu ram=1GiB=4:T4,cores=2") == PoolOrder("cpu ram=1GiB", 4, "T4", cores=2.0)


def test_autoscaling_follows_the_work() -> None:
    pool = PoolModel("device", 1, autoscale=AutoscaleRange(1, 64))
    outcome = simulator.run(Workload(1_000_000, (replace(INFER, reads_from=()),), (pool,)))
    workers = [point.workers["device"] for point in outcome.points]
    assert workers[0] == 1
    assert max(workers) == outcome.most_workers["device"] == 64
    assert workers == sorted(workers)
    fixed = simulator.run(
        Workload(1_000_000, (replace(INFER, reads_from=()),), (replace(pool, workers=64, autoscale=None),))
    )
    assert fixed.seconds < outcome.seconds < 3 * fixed.seconds
    # A pool behind a slow reader has little to do, and shrinks.
    slow = replace(READ, seconds_per_row=0.02)
    ends = simulator.run(
        Workload(100_000, (slow, INFER), (PoolModel("cpu", 1), replace(pool, autoscale=AutoscaleRange(1, 64))))
    )
    assert max(point.workers["device"] for point in ends.points) <= 16


def test_seeds_repeat_and_differ() -> None:
    uneven = replace(READ, spread=(0.5, 1.0, 1.5, 1.0, 1.0), weights=(1.0,) * 5, rows_per_bundle=10.0)
    workload = Workload(10_000, (uneven,), (PoolModel("cpu", 2),))
    times = [simulator.run(workload, seed).seconds for seed in (0, 0, 1)]
    assert times[0] == times[1] != times[2]


def test_a_row_is_never_done_by_two_workers() -> None:
    outcome = simulator.run(Workload(3, (replace(READ, seconds_per_row=10.0),), (PoolModel("cpu", 8),)))
    assert outcome.seconds == pytest.approx(10.0, rel=0.05)
    assert outcome.busy_seconds["cpu"] == pytest.approx(30.0)


@pytest.mark.parametrize("range_of_workers", [None, AutoscaleRange(1, 12)])
def test_a_compressed_run_takes_as_long_as_an_exact_one(
    range_of_workers: AutoscaleRange | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one in which a worker of the loop stands for several."""
    uneven = replace(INFER, spread=(0.5, 0.8, 1.0, 1.2, 4.0), weights=(4.0, 4.0, 4.0, 4.0, 1.0), rows_per_bundle=5.0)
    pools = (PoolModel("cpu", 2), PoolModel("device", 12, 20.0, 5.0, range_of_workers, device="T4"))
    workload = Workload(8000, (READ, replace(uneven, queue_rows=500.0)), pools)
    monkeypatch.setattr(simulator, "_WORKER_SECONDS", 1e6)
    exact = simulator.run(workload)
    monkeypatch.setattr(simulator, "_WORKER_SECONDS", 100.0)
    compressed = simulator.run(workload)
    monkeypatch.setattr(simulator, "_MOST_WORKERS", 4)
    grouped = simulator.run(workload)
    for outcome in (compressed, grouped):
        assert outcome.seconds == pytest.approx(exact.seconds, rel=0.08)
        assert outcome.busy_seconds["device"] == pytest.approx(exact.busy_seconds["device"], rel=0.05)
        assert outcome.worker_seconds["device"] == pytest.approx(exact.worker_seconds["device"], rel=0.12)


def recorded(**changed: Any) -> Record:
    """Return a run of 10 s: it read 1,000 rows, ran a model over them, and wrote a count."""
    stages = (
        StageInfo("s0", "Read", "cpu"),
        StageInfo("s1", "Embed (Prepare)", "cpu", ("s0",)),
        StageInfo("s2", "Embed (Infer)", "cpu bundles=8", ("s1",)),
        StageInfo("s3", "Count", "cpu", ("s2",), reads_groups=True),
    )
    pools = (
        PoolInfo("cpu", 1, 1, cores_per_worker=1.0, ram_per_worker=1 << 30),
        PoolInfo("cpu bundles=8", 1, 8, cores_per_worker=1.0, ram_per_worker=2 << 30),
    )
    model = InferenceView(
        "Embed/Infer", inferences=1000, batches=100, padded_cost=5000, compute_seconds=8.5, device_busy_seconds=8.0
    )
    model = replace(model, worker_seconds=10.0, fixed_seconds=0.03, seconds_per_cost=0.001, loads=1, load_seconds=1.0)
    views = (
        StageView("s0", "done", elements=1000, busy_seconds=1.0, bundles=20, output_bytes=100_000),
        StageView("s1", "done", elements=1000, busy_seconds=2.0, bundles=20, cpu_seconds=2.0),
        StageView("s2", "done", elements=125, busy_seconds=9.0, bundles=10, inference=(model,)),
        StageView("s3", "done", elements=1, busy_seconds=0.2, bundles=1),
    )
    started = RunStarted(
        "20260301T101500-4f2a9c", 0.0, "embed.py", 0.0, stages, pools, 64 << 20, machine=MachineInfo(2)
    )
    last = Snapshot(started.run, 10.0, views, (PoolView("cpu", 1), PoolView("cpu bundles=8", 1)))
    happened = (WorkerStarted(started.run, 0.5, "w1", "cpu", 1),)
    record = Record(started, happened, 0, (), RunEnded(started.run, 10.0, "done", last), False)
    return replace(record, **changed)


def test_a_fit_takes_the_line_of_batches_and_marks_what_it_assumes() -> None:
    workload = fit(recorded(), Scenario(rows=2000, models=3, pools=(PoolOrder("device", 5, "T4", speed=0.5),)))
    read, prepare, infer, count = workload.stages
    assert read.seconds_per_row == pytest.approx(0.001)
    assert prepare.seconds_per_row == pytest.approx(3 * 0.002)
    computing = 0.03 * 100 + 0.001 * 5000
    assert infer.seconds_per_row == pytest.approx(3 * (computing / 0.5 + 9.0 - 1.0 - computing) / 1000)
    assert count.seconds_per_row * workload.rows == pytest.approx(0.2)
    assert count.waits_for == ("s2",)
    assert prepare.queue_rows == pytest.approx((64 << 20) / 100)
    cpu, device = workload.pools
    assert (cpu.workers, device.workers, device.device, device.load_seconds) == (1, 5, "T4", 3.0)
    assumed = {each.name for each in workload.inputs if not each.is_measured}
    assert {"rows", "models", "workers of pool cpu bundles=8", "speed of pool cpu bundles=8"} <= assumed
    assert "workers of pool cpu" not in assumed


def test_a_forecast_says_what_holds_it_back_and_what_it_costs() -> None:
    orders = (PoolOrder("cpu", 20, cores=4, ram=15 << 30), PoolOrder("device", 10, "T4", cores=4, ram=15 << 30))
    found = forecast(recorded(), Scenario(rows=10_000_000, pools=orders), load_prices(None), seeds=2)
    assert found.hold_up.pool == "cpu bundles=8"
    assert found.hold_up.doubled_seconds == pytest.approx(found.seconds[1] / 2, rel=0.05)
    assert found.device_share == 0.8
    hours = found.middle.worker_seconds["cpu bundles=8"] / 3600
    assert hours == pytest.approx(10_000_000 * 0.008 / 3600, rel=0.02)
    assert found.bill is not None
    assert found.bill.usage.device_hours == (("T4", pytest.approx(hours)),)
    assert found.bill.low is not None
    assert found.bill.total is not None
    assert found.bill.high is not None
    assert 0 < found.bill.low <= found.bill.total <= found.bill.high


def test_the_bill_of_the_measured_run_is_that_of_the_advice() -> None:
    """Also for declared devices, which have the type that steps ask for, and for RAM that was used, not asked for."""
    prices = load_prices(None)
    for record in (
        run_of_one_pool(),
        run_of_one_pool(workers=8, cpu=0.05),
        run_of_one_pool(asked=Resources(ram=GIB // 4), peak=GIB),
        run_of_one_pool(asked=Resources(accelerator=T4), devices=("declared:0", "declared:1")),
    ):
        found = forecast(record, Scenario(), prices, seeds=1)
        real = bill_of(record, prices)
        assert found.bill is not None
        assert found.bill.total == pytest.approx(real.total, rel=0.02)
        assert [name for name, _ in found.bill.usage.device_hours] == [name for name, _ in real.usage.device_hours]
        low, _, high = found.seconds
        assert low < real.seconds < high


def test_more_workers_start_one_after_the_other_and_need_the_memory_that_was_used() -> None:
    record = run_of_one_pool(cpu=0.05)  # a start takes 0.1 CPU seconds, on two cores
    workload = fit(record, Scenario(pools=(PoolOrder("cpu", 8),)))
    (pool,) = workload.pools
    assert (pool.startup_seconds, pool.start_gap, pool.ram) == (1.0, pytest.approx(0.05), GIB // 8)
    (note,) = [each.note for each in workload.inputs if each.name == "a worker of pool cpu has"]
    assert "ask for no RAM" in note
    (cores,) = [each for each in workload.inputs if each.name == "cores"]
    assert not cores.is_measured
    assert "--cores=2" in cores.note
    model = PoolModel("cpu", 4, startup_seconds=1.0, start_gap=2.0)
    outcome = simulator.run(Workload(40, (replace(READ, seconds_per_row=1.0),), (model,)))
    assert outcome.most_workers["cpu"] == 4
    busy = [point.busy["cpu"] for point in outcome.points if point.seconds > 3.5]
    assert busy[0] == pytest.approx(2.0)  # the third starts at 5 s
    shared = forecast(record, Scenario(pools=(PoolOrder("cpu", 8),), cores=2), load_prices(None), seeds=1)
    assert shared.bill is not None
    assert shared.bill.usage.core_hours <= 2 * shared.middle.seconds / 3600 * 1.001


def test_the_range_says_what_it_covers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "last", f"--run_dir={saved(tmp_path)}", "--seeds=2"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "2 simulations, and 10% between two runs" in text
    assert "difference between two runs 10% assumed" in text


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"ended": None}, "is lost"),
        ({"ended": None, "is_alive": True}, "still runs"),
    ],
)
def test_records_that_say_too_little_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(RecordError, match=said):
        fit(recorded(**changed), Scenario())


def test_a_record_without_work_and_a_stream_are_refused() -> None:
    record = recorded()
    assert record.ended is not None
    idle = replace(record.ended.last, stages=tuple(StageView(f"s{n}", "done") for n in range(4)))
    with pytest.raises(RecordError, match="no measured bundles"):
        fit(replace(record, ended=replace(record.ended, last=idle)), Scenario())
    stream = replace(record.started, stages=(replace(record.started.stages[0], is_stream=True),))
    with pytest.raises(RecordError, match="reads a stream"):
        fit(replace(record, started=stream), Scenario())
    with pytest.raises(OptionError, match="no pool 'gpu'"):
        fit(record, Scenario(pools=(PoolOrder("gpu", 2),)))


def saved(folder: Path) -> str:
    record = recorded()
    assert record.ended is not None
    content = {
        "format": 1,
        "process": {"host": "elsewhere", "pid": 1, "began": ""},
        "started": to_json(record.started),
        "happenings": [to_json(event) for event in record.happenings],
        "left_out": 0,
        "snapshots": [],
        "ended": to_json(record.ended),
    }
    (folder / f"{record.started.run}.json").write_text(json.dumps(content))
    return str(folder)


def test_the_command_prints_json_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "forecast.html"
    command = ["simulate", "last", f"--run_dir={saved(tmp_path)}", "--rows=100k", "--models=2", "--seeds=2"]
    assert main([*command, "--pool", "device=3:T4", "--autoscale=1:3", f"--out={page}"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("100,000 rows \N{MULTIPLICATION SIGN} 2 models: ")
    assert "1 to 3, autoscaled" in printed
    assert "a T4 as fast as what was measured" in printed
    text = page.read_text()
    assert text.count("<svg") == 3  # workers of two pools, and the work
    assert main([*command, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["rows"] == 100_000
    assert {each["source"] for each in data["inputs"]} == {"measured", "assumed"}
    assert data["workers_over_time"][-1]["done"] == pytest.approx(1, rel=0.001)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--rows=many", "such as 14, 1.5k or 100M"),
        ("--rows=0.1", "expected at least 1 row"),
        ("--pool=device", "NAME=WORKERS[:DEVICE]"),
        ("--pool=cpu=1G", "expected a whole number up to 10,000"),
        ("--autoscale=1:1000000", "expected at most 10,000"),
        ("--pool=device=5,core=4", "did you mean 'cores'?"),
        ("--autoscale=5:1", "[POOL=]MIN:MAX"),
    ],
)
def test_wrong_values_are_explained(option: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "last", option])
    assert said in capsys.readouterr().err
