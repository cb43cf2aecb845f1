"""``lum advise`` as a library: the advice for recorded runs, with the bills as run, uniform and advised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from luminosity.events import WorkerLost
from luminosity.operate.advice.choice import advise_together, choose
from luminosity.operate.advice.measured import PipelineUse, measure
from luminosity.operate.advice.prediction import (
    can_predict,
    cores_for,
    fixed_seconds,
    predict,
    uniform_needs,
    workers_for,
)
from luminosity.operate.advice.rules import Advice, PoolAdvice, advise_pool, step_names
from luminosity.operate.cost.bill import Bill
from luminosity.operate.cost.prices import LEAST_SAVING, PriceSheet
from luminosity.runs.records import Record
from luminosity.runs.views.step_times import slowest, step_times
from luminosity.runs.views.words import duration

__all__ = ["Report", "advise", "hints_content", "to_json"]

_UNIFORM = "uniform"  # --pools
_UNASKED_RAM = (
    "Steps that ask for no RAM share what the machine has, and the bill counts it. With min_ram you save it only where "
    "you pay for less RAM: on a smaller machine, or if other runs use the rest."
)
_KILLED = "SIGKILL"  # how the kernel ends a process if memory runs out


@dataclass(frozen=True)
class Report:
    """The advice for the runs of one pipeline."""

    use: PipelineUse
    pools: tuple[PoolAdvice, ...]
    workers: tuple[Advice, ...]
    as_run: Bill
    uniform: Bill | None  # None if it can't be predicted
    advised: Bill | None
    notes: tuple[str, ...]
    uniform_is_measured: bool = False  # whether it is the bill of a run with --pools=uniform

    @property
    def slowest(self) -> str:
        """A sentence about the step that takes most of the time; empty if none stands out."""
        return slowest(self.use.newest.started, self.use.newest.last)

    @property
    def saving(self) -> float | None:
        """The part of the bill that the advice saves; None if it is not known."""
        if self.advised is None or self.advised.total is None or not self.as_run.total:
            return None
        return 1.0 - self.advised.total / self.as_run.total

    @property
    def is_worth_it(self) -> bool:
        """Whether the advice saves a part of the bill that is larger than the differences between two runs."""
        return self.saving is not None and self.saving >= LEAST_SAVING


def advise(
    records: Sequence[Record], prices: PriceSheet, deadline_s: float | None = None
) -> tuple[list[Report], list[Advice]]:
    """Return the advice for each pipeline of the records, and that for all of them together."""
    by_pipeline: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        by_pipeline.setdefault(record.started.pipeline, []).append(record)
    uses: list[PipelineUse] = []
    reports: list[Report] = []
    for runs in by_pipeline.values():
        # In a uniform run, steps are fused that hints would keep apart: it says what it costs, not what steps need.
        uniform = [run for run in runs if run.started.pools_mode == _UNIFORM]
        others = [run for run in runs if run.started.pools_mode != _UNIFORM]
        uses.append(measure(others or uniform, prices))
        if not others:
            reports.append(_report_of_uniform(uses[-1], deadline_s))
        else:
            measured = measure(uniform, prices).bill if uniform else None
            reports.append(_report(uses[-1], prices, deadline_s, measured))
    return reports, advise_together(uses, prices)


def hints_content(reports: Sequence[Report]) -> dict[str, Any]:
    """Return the content of a file of hints, for ``--pools=fitted --hints FILE``."""
    return {
        "pipeline": ", ".join(report.use.name for report in reports),
        "runs": [record.started.run for report in reports for record in report.use.records],
        "steps": {step: pool.hints for report in reports for pool in report.pools if pool.hints for step in pool.steps},
    }


def to_json(reports: Sequence[Report], together: Sequence[Advice]) -> dict[str, Any]:
    """Return everything that ``lum advise`` says, for ``json.dumps``."""
    return {"pipelines": [_data(each) for each in reports], "together": [asdict(each) for each in together]}


def _report_of_uniform(use: PipelineUse, deadline_s: float | None) -> Report:
    names = step_names(use)
    pools = tuple(PoolAdvice(pool, names[pool.name], ()) for pool in use.pools)
    note = (
        "This run was uniform: its steps ran in the same workers, so that nobody knows what each of them needs. Run it "
        "once with --pools=hints, and name both runs."
    )
    notes = (*_notes(use), note, *_no_answer(deadline_s))
    return Report(use, pools, (), use.bill, use.bill, None, notes, uniform_is_measured=True)


def _report(use: PipelineUse, prices: PriceSheet, deadline_s: float | None, uniform: Bill | None) -> Report:
    names = step_names(use)
    pools = tuple(advise_pool(pool, names[pool.name]) for pool in use.pools)
    notes = list(_notes(use))
    if not can_predict(use):
        notes.append("The record does not hold enough to predict other bills: run it once with this version.")
        notes += _no_answer(deadline_s)
        return Report(use, pools, (), use.bill, uniform, None, tuple(notes), uniform is not None)
    choice = choose(use, pools, prices, is_with_workers=deadline_s is None)
    workers = choice.workers if deadline_s is None else (_for_deadline(use, deadline_s),)
    is_measured = uniform is not None
    if uniform is None:
        uniform = predict(use, uniform_needs(use), prices)
    if any(not pool.use.info.asked.ram and "min_ram" in pool.hints for pool in choice.pools):
        notes.append(_UNASKED_RAM)
    return Report(use, choice.pools, workers, use.bill, uniform, choice.bill, tuple(notes), is_measured)


def _for_deadline(use: PipelineUse, deadline_s: float) -> Advice:
    """Return the number of workers with which a run ends in time, if there is one."""
    wanted = workers_for(use, deadline_s)
    if wanted is None:
        why = f"{duration(fixed_seconds(use))} of the run do not get shorter with more workers"
        return Advice("deadline", "", f"no number of workers meets a deadline of {duration(deadline_s)}: {why}")
    parts = ", ".join(f"{pool.name}: {wanted[pool.name]} (was {pool.workers})" for pool in use.pools)
    total = sum(wanted[pool.name] for pool in use.pools if not pool.info.devices)
    needed, cores = cores_for(use, deadline_s), use.newest.started.machine.cores
    more = (
        f"; they compute on {needed} cores, and this machine has {cores}: take a larger one" if needed > cores else ""
    )
    why = f"to end within {duration(deadline_s)}: {parts}{more}"
    return Advice("deadline", f"--cpu_workers={total}" if total else "", why)


def _no_answer(deadline_s: float | None) -> list[str]:
    """Say that a deadline was asked for, if nothing can be said about it."""
    return [] if deadline_s is None else [f"How many workers meet a deadline of {duration(deadline_s)} is not known."]


def _notes(use: PipelineUse) -> list[str]:
    state = use.newest.state
    notes: list[str] = []
    if state == "running":
        notes.append("The run goes on: this is about what it did so far.")
    elif state not in ("done", "drained"):
        notes.append(f"The run is {state}: this is about what it did until then.")
    if not any(pool.peak_ram for pool in use.pools):
        notes.append("The record holds no memory of workers: nothing can be said about min_ram.")
    if all(pool.cpu_per_second is None for pool in use.pools):
        notes.append("The record holds no CPU time of workers: nothing can be said about cpu_count.")
    killed = {
        e.pool for run in use.records for e in run.happenings if isinstance(e, WorkerLost) and _KILLED in e.reason
    }
    notes += [
        f"A worker of pool {pool!r} was killed with {_KILLED}: if memory ran out, it needs more than its peak."
        for pool in sorted(killed)
    ]
    if len(use.records) == 1:
        notes.append("One run was looked at: other data may need more. `lum advise` takes several runs.")
    return notes


def _data(report: Report) -> dict[str, Any]:
    bills = {"as_run": report.as_run, "uniform": report.uniform, "advised": report.advised}
    return {
        "pipeline": report.use.name,
        "runs": [record.started.run for record in report.use.records],
        "pools": [_pool(pool) for pool in report.pools],
        "steps": [asdict(each) for each in step_times(report.use.newest.started, report.use.newest.last)],
        "workers": [asdict(each) for each in report.workers],
        "bills": {name: None if bill is None else asdict(replace(bill, notes=())) for name, bill in bills.items()},
        "saving": report.saving,
        "is_worth_it": report.is_worth_it,
        "notes": [*report.notes, *report.as_run.notes],
    }


def _pool(pool: PoolAdvice) -> dict[str, Any]:
    use = pool.use
    return {
        "pool": use.name,
        "steps": list(pool.steps),
        "given": {
            "workers": use.workers,
            "cores": use.info.cores_per_worker,
            "ram": use.info.ram_per_worker,
            "devices": list(use.info.devices),
        },
        "used": {
            "peak_ram": use.peak_ram or None,
            "cpu_per_second": use.cpu_per_second,
            "busy_fraction": use.busy_fraction if use.bill is not None else None,
            "device_busy": list(use.device_busy),
        },
        "hints": pool.hints,
        "advice": [asdict(each) for each in pool.advice],
    }
