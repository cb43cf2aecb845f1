"""What a larger run would take: simulated with several seeds, with its bill and what holds it back."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

from luminosity.events import MachineInfo
from luminosity.operate.cost.bill import Bill, bill_of_usage, within_machine
from luminosity.operate.cost.prices import PriceSheet, Usage
from luminosity.operate.simulation import simulator
from luminosity.operate.simulation.fitting import BETWEEN_RUNS, device_share, fit
from luminosity.operate.simulation.simulator import Outcome
from luminosity.operate.simulation.workload import Input, PoolModel, Scenario, Workload
from luminosity.runs.records import Record

__all__ = ["Check", "Forecast", "HoldUp", "forecast"]

_CHECK_SEEDS = 3  # of the measured run itself: it is small
_FULL = 0.85  # a pool whose workers are busy for this share of their time holds the run back
_HOUR = 3600.0
_GIB = 1 << 30


@dataclass(frozen=True)
class Check:
    """The measured run itself, simulated: how well the model explains it."""

    simulated_seconds: float
    measured_seconds: float


@dataclass(frozen=True)
class HoldUp:
    """What holds the run back."""

    pool: str  # empty if no pool is full
    stage: str  # the label of the stage that takes most of the pool's time
    busy: float  # the share of its workers' time
    doubled_seconds: float | None  # the run with twice as many workers of that pool


@dataclass(frozen=True)
class Forecast:
    """The simulated run: times of all seeds, and what they mean."""

    run: str  # the id of the measured run
    workload: Workload
    outcomes: tuple[Outcome, ...]  # one for each seed, in the order of their times
    check: Check
    hold_up: HoldUp
    bill: Bill | None
    device_share: float | None  # measured: the share of the time in which models computed

    @property
    def seconds(self) -> tuple[float, float, float]:
        """The shortest, the median and the longest time of all seeds, with what two equal runs differ by."""
        times = [outcome.seconds for outcome in self.outcomes]
        return times[0] * (1 - BETWEEN_RUNS), statistics.median(times), times[-1] * (1 + BETWEEN_RUNS)

    @property
    def middle(self) -> Outcome:
        """The outcome in the middle."""
        return self.outcomes[len(self.outcomes) // 2]

    @property
    def inputs(self) -> tuple[Input, ...]:
        """All numbers that the simulation used."""
        return self.workload.inputs

    def to_json(self) -> dict[str, Any]:
        """Return everything for ``json.dumps``."""
        low, median, high = self.seconds
        bill = self.bill
        return {
            "run": self.run,
            "rows": self.workload.rows,
            "seconds": {"low": low, "median": median, "high": high, "of_seeds": [o.seconds for o in self.outcomes]},
            "check": {"simulated": self.check.simulated_seconds, "measured": self.check.measured_seconds},
            "cost": None
            if bill is None
            else {"currency": bill.currency, "total": bill.total, "low": bill.low, "high": bill.high}
            | {"reasons": list(bill.reasons), "notes": list(bill.notes)},
            "held_back_by": {
                "pool": self.hold_up.pool,
                "stage": self.hold_up.stage,
                "busy": self.hold_up.busy,
                "seconds_with_twice_the_workers": self.hold_up.doubled_seconds,
            },
            "device_share": self.device_share,
            "pools": {
                pool.name: {
                    "most_workers": self.middle.most_workers[pool.name],
                    "worker_hours": self.middle.worker_seconds[pool.name] / _HOUR,
                    "busy": _busy(self.middle, pool.name),
                }
                for pool in self.workload.pools
            },
            "lost_workers": self.middle.lost_workers,
            "stages": {stage.label: self.middle.states[stage.id] for stage in self.workload.stages},
            "workers_over_time": [
                {"seconds": point.seconds, "workers": point.workers, "busy": point.busy, "done": point.done}
                for point in self.middle.points
            ],
            "inputs": [
                {"name": i.name, "value": i.value, "source": "measured" if i.is_measured else "assumed", "note": i.note}
                for i in self.inputs
            ],
        }


def forecast(record: Record, scenario: Scenario, prices: PriceSheet, seeds: int = 5) -> Forecast:
    """Simulate ``scenario`` with as many ``seeds``.

    Raises :class:`RecordError` if the record does not say enough, and :class:`OptionError` for an unknown pool.
    """
    as_measured = fit(record, Scenario(measured_rows=scenario.measured_rows))
    assert record.last is not None
    times = [simulator.run(as_measured, seed).seconds for seed in range(_CHECK_SEEDS)]
    check = Check(statistics.median(times), record.last.seconds)
    fixed = max(0.0, check.measured_seconds - check.simulated_seconds)
    workload = replace(fit(record, scenario), fixed_seconds=fixed)
    outcomes = sorted((simulator.run(workload, seed) for seed in range(seeds)), key=lambda outcome: outcome.seconds)
    share = device_share(record)
    result = Forecast(
        record.started.run,
        workload,
        tuple(outcomes),
        check,
        HoldUp("", "", 0.0, None),
        _bill(workload, outcomes, prices),
        share,
    )
    return replace(result, hold_up=_hold_up(workload, result.middle))


def _hold_up(workload: Workload, outcome: Outcome) -> HoldUp:
    fullest = max(workload.pools, key=lambda pool: _busy(outcome, pool.name))
    busy = _busy(outcome, fullest.name)
    if busy < _FULL:
        return HoldUp("", "", busy, None)
    slowest = max(
        (stage for stage in workload.stages if stage.pool == fullest.name), key=lambda stage: stage.seconds_per_row
    )
    pools = tuple(_doubled(pool) if pool is fullest else pool for pool in workload.pools)
    doubled = simulator.run(replace(workload, pools=pools), 0).seconds
    return HoldUp(fullest.name, slowest.label, busy, doubled)


def _doubled(pool: PoolModel) -> PoolModel:
    limits = pool.autoscale
    more = replace(limits, most=2 * limits.most) if limits is not None else None
    return replace(pool, workers=2 * pool.workers, autoscale=more)


def _busy(outcome: Outcome, pool: str) -> float:
    return outcome.busy_seconds[pool] / max(1e-9, outcome.worker_seconds[pool])


def _bill(workload: Workload, outcomes: list[Outcome], prices: PriceSheet) -> Bill | None:
    """Return the bill of the run in the middle, whose range includes the other seeds. None if workers have no sizes."""
    if not all(pool.cores and pool.ram for pool in workload.pools):
        return None
    middle = outcomes[len(outcomes) // 2]
    bill = bill_of_usage(_usage(workload, middle), prices, seconds=middle.seconds)
    costs = [cost for outcome in outcomes for cost in prices.costs(_usage(workload, outcome))]
    seeds = f"the range also covers {len(outcomes)} simulations, and {BETWEEN_RUNS:.0%} between two equal runs"
    low, high = min(costs) * (1 - BETWEEN_RUNS), max(costs) * (1 + BETWEEN_RUNS)
    return replace(bill, low=low, high=high, reasons=(*bill.reasons, seeds))


def _usage(workload: Workload, outcome: Outcome) -> Usage:
    total = Usage()
    for pool in workload.pools:
        devices = ((pool.device, float(pool.devices)),) if pool.device else ()
        one = Usage(pool.cores, pool.ram / _GIB, devices)
        total += one.times(outcome.worker_seconds[pool.name] / _HOUR)
    if workload.cores == float("inf"):
        return total
    # All workers share one machine, which is there once.
    return within_machine(
        total, total, MachineInfo(max(1, round(workload.cores)), round(workload.ram)), outcome.seconds
    )
