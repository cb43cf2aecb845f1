"""Chooses the advice that counts: predicted bills tell what is needed, what saves something, and what has no gain.

For several pipelines there is advice on what they could share: one pipeline with models as branches, or accelerators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from luminosity._shared.text import list_some
from luminosity.operate.advice.measured import PipelineUse, PoolUse
from luminosity.operate.advice.prediction import asked_needs, most_workers, needs_with, predict
from luminosity.operate.advice.rules import Advice, Gain, PoolAdvice
from luminosity.operate.cost.bill import Bill, money
from luminosity.operate.cost.prices import LEAST_SAVING, PriceSheet
from luminosity.runs.views.words import duration, percent

__all__ = ["Choice", "advise_together", "choose"]
_LEAST_PART = 0.01  # of the bill: a single piece of advice that saves less is not worth a line in the code
_LEAST_TIME = 0.05  # of the time: two runs differ as much
_BUSY = 0.8  # of its workers' time: a pool that has enough to do for more workers
_WAITS = 0.25  # CPU seconds in a busy second: below, its steps wait; steps that compute beside other programs have more
_WORKERS_A_CORE = 4  # that wait: what they wait for must answer that many at once, and each needs memory
_AS_FAST = 1.05  # a run that takes 5% longer with fewer workers is as good


@dataclass(frozen=True)
class Choice:
    """The advice with its gains, and the predicted bill if all that is needed or saves is followed."""

    pools: tuple[PoolAdvice, ...]
    workers: tuple[Advice, ...]
    bill: Bill


@dataclass(frozen=True)
class _Item:
    """A piece of advice that changes the prediction."""

    advice: Advice
    pool: str = ""  # whose hints it changes
    cpu_workers: int | None = None
    accelerators: int | None = None


def choose(
    use: PipelineUse, pools: Sequence[PoolAdvice], prices: PriceSheet, *, is_with_workers: bool = True
) -> Choice:
    """Predict what each piece of advice saves, beside all others that are worth following.

    ``is_with_workers``: whether to look for a better number of workers, too.
    """
    items = [_item(pool.use.name, each) for pool in pools for each in pool.advice]
    items = [each for each in items if each is not None]
    # More requests at once don't help a server that refuses some of them already.
    refused = {pool.use.name for pool in pools for each in pool.advice if each.kind == "requests"}
    if is_with_workers and (workers := _workers(use, items, prices, refused)) is not None:
        items.append(workers)
    as_run = predict(use, asked_needs(use), prices)
    kept = _worth_it(use, items, prices, as_run)
    bill = _predicted(use, kept, prices)
    told: dict[int, Advice] = {}
    for item in items:
        gain: Gain = item.advice.gain or ("saves" if item in kept else "no gain")
        without = [each for each in kept if each is not item]
        one, other = (
            (bill, _predicted(use, without, prices))
            if item in kept
            else (
                _predicted(use, [*kept, item], prices),
                bill,
            )
        )
        told[id(item.advice)] = replace(item.advice, gain=gain, saving=_part(other, one, as_run))
    return Choice(
        tuple(replace(pool, advice=tuple(told.get(id(each), each) for each in pool.advice)) for pool in pools),
        tuple(told[id(item.advice)] for item in items if item.advice.kind == "workers"),
        bill,
    )


def _item(pool: str, advice: Advice) -> _Item | None:
    if advice.kind == "sharing":
        return _Item(advice, pool, accelerators=int(advice.write.partition("=")[2]))
    return _Item(advice, pool) if advice.hints else None


def _predicted(use: PipelineUse, items: Iterable[_Item], prices: PriceSheet) -> Bill:
    hints: dict[str, dict[str, Any]] = {}
    cpu_workers = accelerators = None
    for item in items:
        hints.setdefault(item.pool, {}).update(item.advice.hints)
        cpu_workers = item.cpu_workers or cpu_workers
        accelerators = item.accelerators or accelerators
    return predict(use, needs_with(use, hints), prices, cpu_workers=cpu_workers, accelerators=accelerators)


def _worth_it(use: PipelineUse, items: Sequence[_Item], prices: PriceSheet, as_run: Bill) -> list[_Item]:
    """Return what is needed, and what saves money or time beside the rest; nothing of it if it saves little together.

    Advice without a gain is left out one by one, the worst first: what is left may then save more, or less.
    """
    kept = list(items)
    while True:
        bill = _predicted(use, kept, prices)
        parts: list[tuple[float, _Item]] = []
        for item in kept:
            if item.advice.gain == "needed":
                continue
            without = _predicted(use, [each for each in kept if each is not item], prices)
            part = _part(without, bill, as_run)
            is_faster = bill.seconds < without.seconds * (1 - _LEAST_TIME) and part > -_LEAST_PART
            if part < _LEAST_PART and not is_faster:
                parts.append((part, item))
        if not parts:
            break
        worst = min(parts, key=lambda each: each[0])[1]
        kept.remove(worst)
    needed = [item for item in kept if item.advice.gain == "needed"]
    least = _predicted(use, needed, prices)  # what is needed may cost more: the rest need not save that, too
    is_faster = bill.seconds < least.seconds * (1 - _LEAST_TIME)
    return kept if _part(least, bill, as_run) >= LEAST_SAVING or is_faster else needed


def _part(before: Bill, after: Bill, as_run: Bill) -> float:
    """Return the part of the bill as run that is saved between two bills."""
    return ((before.total or 0.0) - (after.total or 0.0)) / as_run.total if as_run.total else 0.0


def _workers(use: PipelineUse, items: Sequence[_Item], prices: PriceSheet, refused: Collection[str]) -> _Item | None:
    """Return the smallest number of CPU workers with which a run is as fast as with any; None if it is that of the run.

    More workers than there were are only looked at for steps that wait.
    """
    cpu = [pool for pool in use.pools if not pool.info.devices]
    now = sum(pool.info.workers for pool in cpu)  # as --cpu_workers counts them
    waiting = [pool for pool in cpu if _waits(pool) and pool.name not in refused]
    least = len(cpu)  # each pool has a worker
    most = max(now, most_workers(use, _WORKERS_A_CORE)) if waiting else now
    if not cpu or most <= least:
        return None
    bills = {
        count: _predicted(use, [*items, _Item(Advice("workers", "", ""), cpu_workers=count)], prices)
        for count in range(least, most + 1)
    }
    fastest = min(bill.seconds for bill in bills.values())
    count = min(count for count, bill in bills.items() if bill.seconds <= fastest * _AS_FAST)
    as_now = _predicted(use, items, prices).seconds
    if count == now or (count > now and bills[count].seconds > as_now * (1 - _LEAST_TIME)):
        return None
    took, takes = duration(use.seconds), duration(bills[count].seconds)
    if count < now:
        why = (
            f"the slowest pool sets the pace: with {count} worker{'s' * (count != 1)} instead of {now}, a run takes "
            f"about {takes}; it took {took}"
        )
    else:
        parts = ", ".join(
            f"{pool.name}: {pool.busy_fraction:.0%} busy with {pool.cpu_while_busy or 0.0:.2f} CPU seconds in a second"
            for pool in waiting
        )
        why = (
            f"its workers mostly wait ({parts}), so that more of them than cores help: a run takes about {takes} "
            f"instead of {took}, if what they wait for answers {count} at once"
        )
    return _Item(Advice("workers", f"--cpu_workers={count}", why), cpu_workers=count)


def _waits(pool: PoolUse) -> bool:
    cpu = pool.cpu_while_busy
    return pool.busy_fraction >= _BUSY and cpu is not None and cpu <= _WAITS


_BUSY_LIMIT = 0.8
_MEMORY_LIMIT = 0.9
_MOST_NAMED = 3  # steps, in one line


def advise_together(uses: Sequence[PipelineUse], prices: PriceSheet) -> list[Advice]:
    """Return what to do about several pipelines that do the same work or leave accelerators idle."""
    if len(uses) < 2:
        return []
    return [*_branches(uses, prices), *_sharing(uses)]


def _branches(uses: Sequence[PipelineUse], prices: PriceSheet) -> list[Advice]:
    """Say what the steps that several pipelines have in common cost more than once."""
    counts = Counter(step for use in uses for step in _top_steps(use))
    common = [step for step, count in counts.items() if count > 1]
    if not common:
        return []
    repeated = 0.0  # seconds of workers
    cost = 0.0
    for step in common:
        work = sorted(_work(use, step, prices) for use in uses if step in _top_steps(use))
        repeated += sum(seconds for seconds, _ in work[:-1])  # it must run once
        cost += sum(money for _, money in work[:-1])
    total = sum(use.bill.total or 0.0 for use in uses)
    if total and cost / total < LEAST_SAVING:
        return []
    share = f", {percent(cost / total)} of their bills" if total else ""
    why = (
        f"{list_some(map(repr, common), _MOST_NAMED)} ran in {len(uses)} pipelines: {duration(repeated)} of work "
        f"({money(cost, prices.currency)}{share}) would not be done again in one pipeline with a branch for each model"
    )
    return [Advice("branches", "one pipeline with branches", why)]


def _sharing(uses: Sequence[PipelineUse]) -> list[Advice]:
    """Say whether the pipelines could share one accelerator."""
    pools = [(use, pool) for use in uses for pool in use.pools if pool.device_busy]
    if len({use.newest.started.pipeline for use, _ in pools}) < 2:
        return []
    busy = sum(sum(pool.device_busy) for _, pool in pools)
    memory = [pool.device_memory for _, pool in pools]
    names = list_some((repr(use.name) for use, _ in pools), _MOST_NAMED)
    if busy > _BUSY_LIMIT:
        return []
    if any(part is None for part in memory):
        why = f"{names} keep an accelerator {percent(busy)} busy together; whether their models fit is not known"
        return [Advice("sharing", "", why)]
    full = sum(part or 0.0 for part in memory)
    if full > _MEMORY_LIMIT:
        return []
    why = f"{names} keep an accelerator {percent(busy)} busy together, and fill {percent(full)} of its memory"
    return [Advice("sharing", "--when_busy=share", why)]


def _top_steps(use: PipelineUse) -> list[str]:
    steps = (step for pool in use.pools for stage in pool.stages for step in stage.steps)
    return list(dict.fromkeys(step.partition("/")[0] for step in steps))


def _work(use: PipelineUse, step: str, prices: PriceSheet) -> tuple[float, float]:
    """Return the seconds of workers that a step took, and their price. Fused steps share their stage."""
    seconds = cost = 0.0
    for pool in use.pools:
        for stage in pool.stages:
            named = [each.partition("/")[0] for each in stage.steps]
            if step not in named:
                continue
            part = use.busy.get(stage.id, 0.0) * named.count(step) / len(named)
            seconds += part
            if pool.bill is not None and pool.bill.worker_seconds:
                cost += pool.bill.total * part / pool.bill.worker_seconds
    return seconds, cost
