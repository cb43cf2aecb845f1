"""Advice for several pipelines: models as branches of one pipeline, and accelerators that they could share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from luminosity._shared.text import list_some
from luminosity.operate.advice.measured import PipelineUse
from luminosity.operate.advice.rules import Advice
from luminosity.operate.cost.bill import money
from luminosity.operate.cost.prices import LEAST_SAVING, PriceSheet
from luminosity.runs.views.words import duration, percent

__all__ = ["advise_together"]

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
