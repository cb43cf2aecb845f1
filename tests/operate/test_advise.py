"""The advisor's rules, predictions and command, from made-up records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from luminosity.cli.main import main
from luminosity.engine.reporting.run_names import RunName
from luminosity.engine.resources.fitting import load_hints
from luminosity.events import DeviceView, InferenceView, MachineInfo, PoolInfo, Resources, WorkerLost, to_json
from luminosity.operate.advice.advise import Report, advise, hints_content
from luminosity.operate.advice.measured import measure
from luminosity.operate.advice.prediction import asked_needs, predict
from luminosity.operate.advice.rules import Advice, hints_for_plan
from luminosity.operate.cost.prices import load_prices
from luminosity.runs import records
from luminosity.runs.records import Record
from tests.operate.made_up import GIB, run_of, run_of_one_pool


def report_of(*runs: Record, deadline_s: float | None = None) -> Report:
    (report,), _ = advise(runs, load_prices(), deadline_s)
    return report


def kinds(report: Report) -> set[str]:
    return {each.kind for pool in report.pools for each in pool.advice} | {each.kind for each in report.workers}


def the(kind: str, advice: Sequence[Advice]) -> Advice:
    (found,) = [each for each in advice if each.kind == kind]
    return found


def test_min_ram_is_the_largest_peak_of_all_runs_and_a_margin():
    smaller, larger = run_of(peaks=(GIB, 4 * GIB, 3 * GIB)), run_of(peaks=(GIB, 6 * GIB, 3 * GIB))
    io, large, device = report_of(larger, smaller).pools
    assert io.hints["min_ram"] == "1.25GiB"
    assert large.hints["min_ram"] == "7GiB"  # 6.9 GiB, rounded up to 256 MiB
    assert device.hints == {"min_ram": "3.5GiB"}
    advice = the("min_ram", large.advice)
    assert advice.write == ".with_resource_hints(min_ram=\"7GiB\")  # at 'Prepare'"
    assert "ask for 16GiB" in advice.why


def test_a_step_that_asks_for_less_than_it_used_is_told():
    _, large, _ = report_of(run_of(peaks=(GIB, 20 * GIB, GIB))).pools
    assert "may be killed" in the("min_ram", large.advice).why


def test_a_small_difference_is_not_worth_a_change():
    _, large, _ = report_of(run_of(peaks=(GIB, 4 * GIB, GIB), asked_ram=(2 * GIB, 4_950_000_000, 8 * GIB))).pools
    assert large.advice == ()  # 4.94 GB are needed, in steps of 256 MiB 5.1 GB
    assert large.hints == {}


@pytest.mark.parametrize(("cpu", "asked", "wanted"), [(2.4, 0, 3), (1.03, 0, None), (0.6, 4, 1), (3.7, 4, None)])
def test_cpu_count_is_what_a_worker_takes_in_a_second_rounded_up(cpu: float, asked: int, wanted: int | None):
    _, large, _ = report_of(run_of(cpu=cpu, cores=asked)).pools
    found = [each.write for each in large.advice if each.kind == "cpu_count"]
    assert found == ([] if wanted is None else [f".with_resource_hints(cpu_count=\"{wanted}\")  # at 'Prepare'"])


@pytest.mark.parametrize(
    "run",
    [
        run_of(),
        run_of_one_pool(),
        run_of_one_pool(workers=8, cpu=0.05),
        run_of_one_pool(cpu=0.97, burst=0.3, asked=Resources(ram=GIB // 4), peak=GIB),
        run_of_one_pool(cpu=1.9, workers=1),
    ],
)
def test_the_prediction_of_the_run_itself_is_the_run(run: Record):
    use = measure([run], load_prices())
    bill = predict(use, asked_needs(use), load_prices())
    assert bill.seconds == pytest.approx(use.seconds)
    assert bill.total == pytest.approx(use.bill.total, rel=0.02)


def test_steps_that_wait_get_more_workers_than_cores():
    report = report_of(run_of_one_pool(cpu=0.09))
    advice = the("workers", report.workers)
    assert (advice.write, advice.gain) == ("--cpu_workers=8", "saves")
    assert "mostly wait" in advice.why
    assert report.advised is not None
    # 38 s of work by 8 workers, 1 s until the first worker is up, and 6 further starts of 0.1 s on 2 cores.
    assert report.advised.seconds == pytest.approx(1.0 + 38 / 8 + 0.3)
    assert report.saving is not None
    assert report.saving > 0.5


@pytest.mark.parametrize(
    "run",
    [
        run_of_one_pool(cpu=0.9),  # computes
        run_of_one_pool(cpu=0.45),  # computes beside other programs
        run_of_one_pool(cpu=0.09, bundles=2),  # can't be divided among more workers
        run_of_one_pool(cpu=0.09, peak=10 * GIB),  # no RAM for more
        run_of_one_pool(cpu=0.09, workers=8),  # has them
        run_of_one_pool(cpu=0.09, devices=("gpu:0", "gpu:1")),  # has a worker for each device
    ],
)
def test_no_more_workers_where_they_do_not_help(run: Record):
    assert report_of(run).workers == ()


def test_a_step_with_several_threads_is_not_called_dearer_with_its_cores():
    # Two workers with two threads each share two cores; one worker with both cores takes as long, and half the RAM.
    report = report_of(run_of_one_pool(cpu=0.97, burst=0.3, asked=Resources(ram=4 * GIB), peak=int(3.3 * GIB)))
    advice = the("cpu_count", report.pools[0].advice)
    assert (advice.hints, advice.gain) == ({"cpu_count": 2}, "saves")
    assert advice.saving is not None
    assert 0.05 < advice.saving < 0.15
    assert report.advised is not None
    assert report.advised.seconds == pytest.approx(20.0, rel=0.05)
    # One worker computes on two cores: the bill counts both, also without the hint.
    report = report_of(run_of_one_pool(cpu=1.9, workers=1, asked=Resources(ram=GIB), peak=int(0.8 * GIB)))
    advice = the("cpu_count", report.pools[0].advice)
    assert advice.gain == "no gain"
    assert advice.saving == pytest.approx(0.0, abs=0.06)
    assert report.as_run.usage.core_hours == pytest.approx((1.9 * 19 + 0.1) / 3600)


def test_ram_that_is_needed_is_no_saving_and_every_bill_counts_what_was_used():
    asked = Resources(ram=GIB // 4)
    report = report_of(run_of_one_pool(asked=asked, peak=GIB))
    advice = the("min_ram", report.pools[0].advice)
    assert advice.gain == "needed"
    assert advice.saving is not None
    assert advice.saving < 0  # the margin of 15%
    assert hints_content([report])["steps"] == {"Call": {"min_ram": "1.25GiB"}}
    for bill in (report.as_run, report.uniform):
        assert bill is not None
        assert bill.usage.gib_hours == pytest.approx(2 * 1.0 * 19 / 3600)  # measured, not the 256 MiB asked for
    assert any("more than the 256MiB that it was given" in note for note in report.as_run.notes)


def test_hints_without_a_gain_are_told_but_not_written(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    # Its steps ask for 10% more than the advice would: that saves less than 1% of the bill.
    run = run_of_one_pool(asked=Resources(ram=GIB), peak=int(0.42 * GIB))
    folder, file = saved(tmp_path, run), tmp_path / "hints.json"
    advice = the("min_ram", report_of(run).pools[0].advice)
    assert advice.gain == "no gain"
    assert hints_content([report_of(run)])["steps"] == {}
    assert main(["advise", "last", "--run_dir", folder, "--write", str(file)]) == 2
    assert "none is needed, and none saves something" in capsys.readouterr().err
    assert not file.exists()
    assert main(["advise", "last", "--run_dir", folder]) == 0
    text = capsys.readouterr().out
    assert text.index("No gain: leave it as it is") < text.index('min_ram="512MiB"')
    assert "Nothing is to be saved" in text


def test_the_parts_of_the_advice_and_the_options_to_run_with(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    run = run_of_one_pool(cpu=0.09, asked=Resources(ram=GIB // 4), peak=GIB)
    file = tmp_path / "hints.json"
    assert main(["advise", "last", "--run_dir", saved(tmp_path, run), "--write", str(file)]) == 0
    text = capsys.readouterr().out
    assert text.index("Needed:") < text.index("min_ram=") < text.index("Saves money or time") < text.index("--cpu_work")
    assert f"--pools=fitted --hints={file} --cpu_workers=8" in " ".join(text.split())
    assert "as run, measured" in text


def test_hints_name_the_shortest_steps_that_are_one_pools_alone():
    (report,), _ = advise([run_of(model_step="Read/Infer")], load_prices())
    io, _, device = report.pools
    assert io.steps == ("Read/Impulse", "Read/Lines", "Write")  # a part of Read runs elsewhere
    assert device.steps == ("Read/Infer",)
    assert report_of(run_of()).pools[0].steps == ("Read", "Write")


def test_the_bill_is_shown_as_run_uniform_and_advised():
    report = report_of(run_of(peaks=(GIB, 6 * GIB, 3 * GIB)))
    assert report.as_run.total == pytest.approx(3 * 0.056 + 28 * 0.003557 + 0.42)
    assert report.uniform is not None
    assert report.advised is not None
    # All work on one worker with the T4 and 16 GiB: 5,400 s of work and 600 s that do not depend on workers.
    assert report.uniform.seconds == pytest.approx(6000.0)
    assert report.uniform.total == pytest.approx(6000 / 3600 * (0.056 + 16 * 0.003557 + 0.42))
    assert report.advised.total == pytest.approx(3 * 0.056 + (1.25 + 7 + 3.5) * 0.003557 + 0.42)
    assert report.is_worth_it
    assert "min_ram" in kinds(report)


def test_a_uniform_run_says_what_it_costs_but_not_what_steps_need():
    uniform = run_of(run="20260301T101500-aaaaaa", pools_mode="uniform", seconds=7200.0)
    alone = report_of(uniform)
    assert (alone.saving, hints_content([alone])["steps"]) == (None, {})
    assert any("This run was uniform" in note for note in alone.notes)
    both = report_of(uniform, run_of(peaks=(GIB, 6 * GIB, 3 * GIB)))
    assert both.uniform_is_measured
    assert both.uniform is not None
    assert both.uniform.seconds == 7200.0
    assert hints_content([both])["steps"]["Prepare"] == {"min_ram": "7GiB"}


def test_nothing_is_to_be_saved_from_a_run_that_fits(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    fitting = (int(0.9 * GIB), int(13.5 * GIB), int(6.5 * GIB))
    asked = (int(1.25 * GIB), int(15.75 * GIB), int(7.5 * GIB))
    record = run_of(peaks=fitting, asked_ram=asked)
    report = report_of(record)
    assert report.saving == pytest.approx(0.0)
    assert not report.is_worth_it
    assert main(["advise", "last", "--run_dir", saved(tmp_path, record)]) == 0
    assert "Nothing is to be saved" in capsys.readouterr().out


def test_an_accelerator_that_the_driver_saw_idle_is_not_asked_for():
    _, _, device = report_of(run_of(device=DeviceView("gpu:0", peak_utilization=0.0))).pools
    assert device.hints["accelerator"] == "count:0"


def test_a_server_that_refuses_requests_is_the_limit():
    view = InferenceView("Ask/Infer", 90, 90, 10, 10, 100, runs_on="server", requests=120, retries=30, throttled=30)
    _, _, device = report_of(run_of(inference=(view,))).pools
    advice = the("requests", device.advice)
    assert advice.why.startswith("model Ask/Infer: its server answered 25% of 120 requests with a demand to send less")
    assert "batches" not in kinds(report_of(run_of(inference=(view,)))), "the server makes its own batches"
    assert "requests" not in kinds(report_of(run_of(inference=(replace(view, throttled=1),))))


def test_batches_are_worth_a_look_only_where_a_rule_says_so():
    good = InferenceView("Infer", 1000, 10, 950, 1000, 1000, fixed_seconds=0.001, seconds_per_cost=0.01)
    assert "batches" not in kinds(report_of(run_of(inference=(good,))))
    for changed, reason in (
        (replace(good, fixed_seconds=0.5), "does not depend on their size"),
        (replace(good, out_of_memory=2), "did not fit into memory 2 time"),
        (replace(good, budget_cost=2000), "50% full"),
    ):
        _, _, device = report_of(run_of(inference=(changed,))).pools
        assert reason in the("batches", device.advice).why


def test_a_deadline_says_how_many_workers_meet_it():
    report = report_of(run_of(), deadline_s=1600.0)
    why = the("deadline", report.workers).why  # 600 s are fixed: 1,000 s for 900, 3,000 and 1,500 s of work
    assert "cpu io: 1 (was 1), cpu large: 3 (was 1), device: 2 (was 1)" in why
    assert "no number of workers" in the("deadline", report_of(run_of(), deadline_s=500.0).workers).why


def test_pipelines_that_do_the_same_work_could_be_branches_of_one():
    half = DeviceView("gpu:0", mean_utilization=0.3, memory_total=16 * GIB, peak_memory=6 * GIB)
    other = run_of("other.py", run="20260301T111500-81d0c2", model_step="Score", device=half)
    _, together = advise([run_of(device=half), other], load_prices())
    branches = the("branches", together)
    assert all(step in branches.why for step in ("'Read'", "'Prepare'", "'Write'"))
    assert "'Score'" not in branches.why
    assert "1 h 5 min of work" in branches.why  # 900 + 3,000 s
    assert "60% busy together" in the("sharing", together).why
    assert advise([run_of()], load_prices())[1] == []


def test_a_killed_worker_is_told_because_it_may_have_needed_more():
    record = run_of()
    lost = WorkerLost("r", 5.0, "w9", "cpu large", "was killed by SIGKILL", 1)
    report = report_of(replace(record, happenings=(*record.happenings, lost)))
    assert any("'cpu large' was killed" in note for note in report.notes)


def test_an_old_record_gives_no_numbers_but_says_so():
    record = run_of()
    bare = tuple(replace(pool, cores_per_worker=0.0, ram_per_worker=0) for pool in record.started.pools)
    old = replace(record, started=replace(record.started, pools=bare))
    report = report_of(old)
    assert report.saving is None
    assert any("does not hold enough" in note for note in report.notes)


def test_the_written_hints_are_those_that_a_run_reads(tmp_path: Path):
    file = tmp_path / "hints.json"
    file.write_text(json.dumps(hints_content([report_of(run_of(peaks=(GIB, 6 * GIB, 3 * GIB)))])))
    assert {each.step for each in load_hints(str(file))} == {"Read", "Write", "Prepare", "Infer"}


def test_the_command_prints_text_and_json_and_writes_hints(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    folder, hints = saved(tmp_path, run_of(peaks=(GIB, 6 * GIB, 3 * GIB))), tmp_path / "hints.json"
    assert main(["advise", "4f2a9c", "--run_dir", folder, "--write", str(hints)]) == 0
    text = capsys.readouterr().out
    assert '.with_resource_hints(min_ram="7GiB")' in text
    assert "uniform, predicted" in text
    assert json.loads(hints.read_text())["steps"]["Prepare"] == {"min_ram": "7GiB"}
    assert main(["advise", "last", "--run_dir", folder, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["pipelines"]
    assert found["bills"]["as_run"]["total"] > found["bills"]["advised"]["total"]
    assert found["pools"][1]["used"]["peak_ram"] == 6 * GIB


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--deadline=soon"], "expected a time such as"),
        (["--write=/no/such/folder/hints.json"], "expected the name of a file"),
        (["--prices=/no/such/prices.json"], "can't read it"),
    ],
)
def test_wrong_options_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    assert main(["advise", "last", "--run_dir", saved(tmp_path, run_of()), *options]) == 2
    assert message in capsys.readouterr().err


def test_hints_are_not_written_over_another_file_nor_for_several_pipelines(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    folder = saved(tmp_path, run_of())
    script = tmp_path / "talk.py"
    script.write_text("print()")
    assert main(["advise", "last", "--run_dir", folder, "--write", str(script)]) == 2
    assert "found another kind of file" in capsys.readouterr().err
    assert script.read_text() == "print()"
    hints = tmp_path / "hints.json"
    saved(tmp_path, run_of("other.py", run="20260301T101500-77aa77"))
    assert main(["advise", "4f2a9c", "77aa77", "--run_dir", folder, "--write", str(hints)]) == 2
    assert "found runs of several pipelines ('talk.py', 'other.py')" in capsys.readouterr().err
    assert not hints.exists()


def test_a_record_of_an_older_version_gives_no_hints_and_says_what_is_not_known(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    run = run_of(peaks=(0, 0, 0), cpu=0.0)
    bare = tuple(PoolInfo(pool.name, pool.workers, pool.slots, pool.devices) for pool in run.started.pools)
    old = replace(run, started=replace(run.started, machine=MachineInfo(), pools=bare))
    folder, hints = saved(tmp_path, old), tmp_path / "hints.json"
    hints.write_text('{"steps": {"Read": {"min_ram": "1GiB"}}}')
    assert main(["advise", "last", "--run_dir", folder, "--json", "--deadline=1h"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["pipelines"]
    assert [pool["used"]["busy_fraction"] for pool in found["pools"]] == [None] * 3
    assert any(note.startswith("How many workers meet a deadline") for note in found["notes"])
    assert main(["advise", "last", "--run_dir", folder, "--write", str(hints)]) == 2
    assert "no hints to write" in capsys.readouterr().err
    assert "1GiB" in hints.read_text()


def saved(folder: Path, record: Record) -> str:
    """Write the record as a run does; return the folder."""
    content: dict[str, Any] = {
        "format": records.FORMAT,
        "process": records.this_process(),
        "started": to_json(record.started),
        "ended": None if record.ended is None else to_json(record.ended),
        "happenings": [to_json(event) for event in record.happenings],
        "left_out": 0,
        "snapshots": [to_json(each) for each in record.snapshots],
    }
    records.path_of(folder, record.started.run).write_text(json.dumps(content))
    return str(folder)


def test_a_plan_names_the_steps_that_a_hint_would_help(tmp_path: Path):
    record = run_of(peaks=(GIB // 8, 20 * GIB, GIB), asked_ram=(0, 16 * GIB, 8 * GIB))
    folder = Path(saved(tmp_path, record))
    large, device = hints_for_plan(RunName("talk.py", "/anywhere"), folder)
    assert large.startswith("'Prepare': a worker used 21.5 GB, more than 16GiB; write min_ram=\"23GiB\"")
    assert device.startswith("'Infer': a worker used 1.07 GB of 8GiB; write min_ram=\"1.25GiB\"")
    assert hints_for_plan(RunName("other.py", "/anywhere"), folder) == []
    saved(tmp_path, run_of(run="20260302T101500-aaaaaa", pools_mode="uniform"))
    assert hints_for_plan(RunName("talk.py", ""), folder) == [large, device]
    assert hints_for_plan(RunName("talk.py", ""), None) == []
