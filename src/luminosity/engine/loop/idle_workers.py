"""Lets workers that have nothing to do take work from bundles that run in other workers of their pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from luminosity.engine.loop import splits
from luminosity.engine.loop.bundle import Attempt, Bundle
from luminosity.engine.loop.stage_input import StageInput
from luminosity.engine.loop.workers import PoolRun

__all__ = ["allow_taking", "next_taking", "take_work", "work_to_take"]

_FIRST_TAKE_S = 0.03  # how long a bundle is left alone: most are done by then, or have begun what they will begin
_FIRST_TAKE_OF_SINK_S = 1.0  # the same if each bundle writes a file: short bundles would make many


def allow_taking(bundle: Bundle, attempt: Attempt, now: float) -> None:
    """Note from when on idle workers may take work from the attempt. The bundle must be one that can be split."""
    plan = bundle.stage.plan
    if plan.is_stateful or plan.is_unbounded:
        return  # a key's elements stay together; half of an endless restriction is endless, too
    if plan.is_sink:
        attempt.take_wait = _FIRST_TAKE_OF_SINK_S
    elif plan.is_splittable:
        # Halves of an element are unequal by chance, so it is cut less often.
        attempt.take_wait = max(_FIRST_TAKE_S, bundle.stage.size.target_seconds(now) / 2)
    else:
        attempt.take_wait = _FIRST_TAKE_S
    attempt.take_at = now + attempt.take_wait


def take_work(pool: PoolRun, now: float, is_held_back: Callable[[StageInput], bool]) -> None:
    """Ask running bundles of the pool to give work to its free slots. Call it once nothing that is queued can start."""
    wanted = pool.free_slots()
    if not wanted:
        return
    asked = sum(any(attempt.pending_splits.values()) for _, attempt in _running(pool))
    candidates: list[tuple[float, Bundle, Attempt]] = []
    for bundle, attempt in _takeable(pool, now):
        stage = bundle.stage
        worker = pool.free_worker(stage.id, stage.max_active_bundles, is_idle=False)
        if (
            worker is not None
            and not is_held_back(stage)
            and _is_worth_it(bundle, attempt, now, is_cold=stage.id not in worker.warm_stages)
        ):
            left = stage.size.speed.seconds_left(bundle.count - attempt.given_back, now - attempt.started_at)
            candidates.append((float("inf") if left is None else left, bundle, attempt))
        else:
            attempt.take_at = now + _FIRST_TAKE_S  # look again
    candidates.sort(key=lambda candidate: -candidate[0])
    for _, bundle, attempt in candidates[: max(0, wanted - asked)]:
        splits.request_for_idle_worker(bundle, attempt, now)


def work_to_take(pool: PoolRun, now: float) -> int:
    """Return how many more bundles could be made of those that run, if there were workers for them."""
    return sum(
        max(1, bundle.count - attempt.given_back - 1)
        for bundle, attempt in _takeable(pool, now)
        if _is_worth_it(bundle, attempt, now, is_cold=True)
    )


def _is_worth_it(bundle: Bundle, attempt: Attempt, now: float, *, is_cold: bool) -> bool:
    stage = bundle.stage
    if stage.plan.is_splittable:
        return True  # the speed per element says nothing about the rest of an element
    return stage.size.worth_taking(bundle.count - attempt.given_back, now - attempt.started_at, is_cold=is_cold)


def next_taking(pool: PoolRun) -> float:
    """Return when work may next be taken from a running bundle of the pool."""
    return min((attempt.take_at for _, attempt in _running(pool)), default=float("inf"))


def _takeable(pool: PoolRun, now: float) -> Iterator[tuple[Bundle, Attempt]]:
    """Yield bundles that idle workers may take from now. What is queued anyway comes first."""
    has_queue: dict[str, bool] = {}  # by the id of a stage
    for bundle, attempt in _running(pool):
        if attempt.take_at <= now and not attempt.pending_splits:
            stage = bundle.stage
            if stage.id not in has_queue:
                has_queue[stage.id] = bool(stage.queued)
            if not has_queue[stage.id]:
                yield bundle, attempt


def _running(pool: PoolRun) -> Iterator[tuple[Bundle, Attempt]]:
    for worker in pool.workers.values():
        for bundle in worker.bundles.values():
            if bundle.attempt is not None and bundle.attempt.response is None:
                yield bundle, bundle.attempt
