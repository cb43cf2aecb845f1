"""Bills: what the workers of a recorded run would cost at the prices of a sheet."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from luminosity._shared.accelerators import parse_accelerator
from luminosity._shared.text import format_bytes, format_size
from luminosity.events import MachineInfo, PoolInfo, Snapshot, WorkerEnded, WorkerLost, WorkerStarted
from luminosity.operate.cost.prices import NO_USAGE, PriceSheet, Usage
from luminosity.runs.records import Record

__all__ = [
    "Bill",
    "PoolBill",
    "bill_of",
    "bill_of_usage",
    "device_names",
    "money",
    "peak_ram",
    "start_cpu",
    "within_machine",
    "worker_usage",
]

_HOUR = 3600.0
_GIB = 1 << 30
_MORE_CORES = 1.1  # times the given ones: less is within what the kernel counts
_NOT_COUNTED = (
    "Not counted: machine shapes (you pay for whole machines), their start-up, the shortest time that is billed, disks "
    "and traffic."
)


@dataclass(frozen=True)
class PoolBill:
    """What the workers of one pool cost."""

    pool: str
    total: float  # at the first list's prices, for the lifetimes of its workers
    low: float
    high: float
    workers: int = 0  # processes that were started
    peak_workers: int = 0  # that were up at once
    worker_seconds: float = 0.0  # the sum of their lifetimes
    usage: Usage = NO_USAGE  # over their lifetimes


@dataclass(frozen=True)
class Bill:
    """What a run costs. The numbers are None if its record does not say enough; then ``notes`` say what is missing."""

    currency: str
    total: float | None  # at the first list's prices, for the lifetimes of workers
    low: float | None  # this and the following: the range, for the reasons below
    high: float | None
    pools: tuple[PoolBill, ...] = ()
    reasons: tuple[str, ...] = ()  # why the bill is a range
    notes: tuple[str, ...] = ()  # what it leaves out, and what is not known
    usage: Usage = NO_USAGE
    seconds: float = 0.0  # of the run


def bill_of(record: Record, prices: PriceSheet) -> Bill:
    """Return what the workers of a run cost so far: lifetimes times cores, RAM and devices at their prices.

    A worker that used more RAM than it was given counts with what it used. The low end of the range takes the cheapest
    price list and the lifetimes of workers. The high end takes the dearest one, and keeps as many workers as were up at
    once for the whole run.
    """
    seconds = record.last.seconds if record.last is not None else 0.0
    machine = _with_later_nodes(record)
    notes: list[str] = []
    if not all(pool.cores_per_worker and pool.ram_per_worker for pool in record.started.pools):
        return _whole_machine(record, prices, seconds)
    lives = _lives(record, seconds, notes)
    spans_of = {pool.name: [span for name, span in lives if name == pool.name] for pool in record.started.pools}
    lifetimes = {name: sum(end - start for start, end in spans) for name, spans in spans_of.items()}
    peaks = {name: _most_at_once(spans) for name, spans in spans_of.items()}
    ones = {
        pool.name: worker_usage(
            pool,
            machine,
            notes,
            peak_ram(record, pool.name),
            _cpu_seconds(record, pool.name) / lifetimes[pool.name] if lifetimes[pool.name] else 0.0,
        )
        for pool in record.started.pools
    }
    all_used = sum((ones[name].times(lifetimes[name] / _HOUR) for name in ones), Usage())
    all_kept = sum((ones[name].times(peaks[name] * seconds / _HOUR) for name in ones), Usage())
    pools: list[PoolBill] = []
    kept = Usage()
    for pool in record.started.pools:
        lifetime, peak, one = lifetimes[pool.name], peaks[pool.name], ones[pool.name]
        used = within_machine(one.times(lifetime / _HOUR), all_used, machine, seconds)
        whole = within_machine(one.times(max(lifetime, peak * seconds) / _HOUR), all_kept, machine, seconds)
        kept += whole
        started = sum(isinstance(e, WorkerStarted) and e.pool == pool.name for e in record.happenings)
        costs = prices.costs(used)
        high = max(*costs, *prices.costs(whole))
        pools.append(PoolBill(pool.name, costs[0], min(costs), high, started, peak, lifetime, used))
    usage = sum((each.usage for each in pools), Usage())
    return bill_of_usage(usage, prices, tuple(pools), kept, tuple(notes), seconds)


def bill_of_usage(
    usage: Usage,
    prices: PriceSheet,
    pools: tuple[PoolBill, ...] = (),
    kept: Usage | None = None,
    notes: tuple[str, ...] = (),
    seconds: float = 0.0,
) -> Bill:
    """Return the bill for resources over time. ``kept`` is the usage if no worker ends before the run does."""
    costs = prices.costs(usage)
    high = max(prices.costs(kept if kept is not None else usage))
    reasons = [_prices_words(prices)]
    if kept is not None and high > max(costs):
        reasons.append(
            "the high end keeps every worker until the run ends; the others count from their start to their end"
        )
    unpriced = [
        f"No price is known for {name}: the bill leaves it out. Give it one with --prices FILE."
        for name in prices.unpriced(usage)
    ]
    every = (*notes, *unpriced, _NOT_COUNTED)
    return Bill(prices.currency, costs[0], min(costs), high, pools, tuple(reasons), every, usage, seconds)


def peak_ram(record: Record, pool: str) -> int:
    """Return the largest memory of a worker of the pool, in bytes; 0 if the record does not hold it."""
    views = record.last.workers if record.last is not None else ()
    seen = [view.peak_resident for view in views if view.pool == pool]
    seen += [e.peak_resident for e in record.happenings if isinstance(e, WorkerEnded) and e.pool == pool]
    return max(seen, default=0)


def _cpu_seconds(record: Record, pool: str) -> float:
    """Return the CPU seconds of all workers of a pool; 0 if the record does not hold them."""
    by_worker = {
        view.worker: view.cpu_seconds
        for view in (record.last.workers if record.last is not None else ())
        if view.pool == pool
    }
    by_worker |= {e.worker: e.cpu_seconds for e in record.happenings if isinstance(e, WorkerEnded) and e.pool == pool}
    return sum(by_worker.values())


def start_cpu(record: Record) -> float:
    """Return the CPU seconds that a worker takes to start: those beside its bundles; 0 if they are not known.

    It takes at most the time until the first worker was up; what is left is for the talk with the runner.
    """
    starts = [event.seconds for event in record.happenings if isinstance(event, WorkerStarted)]
    ends = [event.cpu_seconds for event in record.happenings if isinstance(event, WorkerEnded)]
    if not starts or not ends or record.last is None:
        return 0.0
    beside = max(0.0, sum(ends) - sum(view.cpu_seconds for view in record.last.stages))
    return min(beside / len(ends), min(starts))


def worker_usage(
    pool: PoolInfo, machine: MachineInfo, notes: list[str] | None = None, peak: int = 0, cores: float = 0.0
) -> Usage:
    """Return what one worker of a pool has for an hour: what it was given, or what it used if that is more.

    ``peak`` is the most RAM that a worker used, and ``cores`` the cores that it used on average, if they are known.
    """
    names = device_names(pool, machine, notes)
    given = pool.ram_per_worker
    if notes is not None and peak > given:
        notes.append(
            f"A worker of pool {pool.name!r} used {format_bytes(peak)}, more than the {format_size(given)} that it was "
            "given: each of them is billed with what it used."
        )
    if notes is not None and cores > pool.cores_per_worker * _MORE_CORES:
        notes.append(
            f"A worker of pool {pool.name!r} used {cores:.1f} cores on average, more than the "
            f"{pool.cores_per_worker:.2g} that it was given: each of them is billed with what it used."
        )
    count = len(pool.devices) / max(1, pool.workers)
    devices = tuple((name, count / len(names)) for name in names)
    return Usage(max(pool.cores_per_worker, cores), max(given, peak) / _GIB, devices)


def device_names(pool: PoolInfo, machine: MachineInfo, notes: list[str] | None = None) -> tuple[str, ...]:
    """Return the different names of a pool's devices: the driver's, or the type that its steps ask for."""
    names = {device.id: device.name for device in machine.devices}
    found = dict.fromkeys(names.get(each, "") or _asked_type(pool) or each for each in pool.devices)
    if notes is not None and any(not names.get(each) for each in pool.devices) and (asked := _asked_type(pool)):
        notes.append(
            f"The devices of pool {pool.name!r} have no name; they are billed as what its steps ask for: {asked}."
        )
    return tuple(found)


def money(amount: float | None, currency: str) -> str:
    """Return an amount with three digits that matter.

    >>> money(0.000421234, "USD"), money(12.3456, "USD"), money(2092.4, "USD"), money(None, "USD")
    ('0.000421 USD', '12.35 USD', '2,092 USD', 'not known')
    """
    if amount is None:
        return "not known"
    if amount >= 1000:
        return f"{amount:,.0f} {currency}"
    if amount >= 1 or amount == 0:
        return f"{amount:.2f} {currency}"
    digits = f"{amount:.3g}"
    return f"{float(digits):.10f}".rstrip("0") + f" {currency}" if "e" in digits else f"{digits} {currency}"


def _asked_type(pool: PoolInfo) -> str:
    found = parse_accelerator(pool.asked.accelerator) if pool.asked.accelerator else None
    return found[1] if found is not None else ""


def _prices_words(prices: PriceSheet) -> str:
    names = [f"{each.name} ({each.date}; {each.source})" for each in prices.lists]
    if len(names) == 1:
        return f"list prices in {prices.region}: {names[0]}"
    return f"list prices in {prices.region} of {' and '.join(names)}; the total is at those of {prices.lists[0].name}"


def within_machine(usage: Usage, together: Usage, machine: MachineInfo, seconds: float) -> Usage:
    """Return a pool's part of the machine if all pools together used more than it has.

    Workers that borrow the cores of an idle pool are up beside it, but the cores are there once.
    """
    hours = seconds / _HOUR
    cores = min(1.0, machine.cores * hours / together.core_hours) if machine.cores and together.core_hours else 1.0
    ram = min(1.0, machine.ram / _GIB * hours / together.gib_hours) if machine.ram and together.gib_hours else 1.0
    return Usage(usage.core_hours * cores, usage.gib_hours * ram, usage.device_hours)


def _with_later_nodes(record: Record) -> MachineInfo:
    """Return the machine of a run; without a limit on its cores and RAM if it used nodes that joined later."""
    machine = record.started.machine
    known = {node.id for node in machine.nodes}
    ran_on = {event.node for event in record.happenings if isinstance(event, WorkerStarted) and event.node}
    return machine if ran_on <= known else replace(machine, cores=0, ram=0)


def _whole_machine(record: Record, prices: PriceSheet, seconds: float) -> Bill:
    """Return the bill of a run whose record does not say what a worker had: the whole machine, for the whole run."""
    machine = record.started.machine
    if not machine.cores or not machine.ram:
        note = "The record does not say what its workers had, nor what the machine has: an older version wrote it."
        return Bill(prices.currency, None, None, None, notes=(note,), seconds=seconds)
    names = [device.name or device.id for device in machine.devices]
    hours = seconds / _HOUR
    usage = Usage(machine.cores, machine.ram / _GIB)
    for name in names:
        usage += Usage(device_hours=((name, 1.0),))
    note = "The record does not say what each worker had: this is the whole machine for the time of the run."
    return bill_of_usage(usage.times(hours), prices, notes=(note,), seconds=seconds)


def _lives(record: Record, seconds: float, notes: list[str]) -> list[tuple[str, tuple[float, float]]]:
    """Return the pool, start and end of every worker, in seconds since the run started."""
    started = {e.worker: e for e in record.happenings if isinstance(e, WorkerStarted)}
    if not started or record.left_out:
        notes.append("The record does not hold the start of every worker: lifetimes are those that its snapshots show.")
        return list(_lives_in_snapshots(record.snapshots, record.last))
    ends: dict[str, float] = {}
    for event in record.happenings:
        if isinstance(event, WorkerEnded | WorkerLost):
            ends[event.worker] = event.seconds
    return [
        (event.pool, (event.seconds, max(event.seconds, ends.get(worker, seconds))))
        for worker, event in started.items()
    ]


def _lives_in_snapshots(
    snapshots: Iterable[Snapshot], last: Snapshot | None
) -> Iterable[tuple[str, tuple[float, float]]]:
    """Yield for each worker that a snapshot shows the time until the next snapshot."""
    every = [*snapshots, *([last] if last is not None else [])]
    for before, after in itertools.pairwise(every):
        for pool in before.pools:
            for _ in range(pool.workers):
                yield pool.name, (before.seconds, max(before.seconds, after.seconds))


def _most_at_once(spans: list[tuple[float, float]]) -> int:
    """Return how many of the spans overlap at most."""
    # An end sorts before a start at the same moment.
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
