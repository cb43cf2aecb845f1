"""How much work is left for each pool, in seconds of one worker, from measured rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from luminosity.engine.loop.buffers import BufferRun
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.loop.workers import PoolRun

__all__ = ["WorkLeft", "work_left"]

_LEAST_ARRIVED = 0.02  # a smaller fraction of the input says nothing about the rest


@dataclass
class WorkLeft:
    """The work that is left for a pool."""

    seconds: float = 0.0  # of one worker; stages that no bundle was measured of add nothing
    has_waiting: bool = False  # whether elements wait, or bundles run
    is_done: bool = True  # whether none of its stages gets any more input


def work_left(stages: Sequence[StageRun], buffers: Mapping[bytes, BufferRun]) -> dict[PoolRun, WorkLeft]:
    """Return the work that is left for each pool. ``stages`` come in topological order.

    What is still upstream counts with what came of it so far: if a third of the input has arrived, two thirds are to
    come. Of a stage with endless input, and of one behind a source whose size is not known, only what has arrived
    counts.
    """
    found: dict[PoolRun, WorkLeft] = {}
    running = _running(stages)
    fractions: dict[str, float | None] = {}  # by stage id: how much of its work is done, if that is known
    for stage in stages:
        left = found.setdefault(stage.pool, WorkLeft())
        if stage.is_done():
            fractions[stage.id] = 1.0
            continue
        left.is_done = False
        waiting = stage.queued + sum(bundle.count for bundle in stage.retries) + running.get(stage.id, 0)
        left.has_waiting |= waiting > 0
        amount, fraction = _amount_left(stage, waiting, _arrived(stage, buffers, fractions))
        fractions[stage.id] = fraction
        left.seconds += amount * _seconds_each(stage) / stage.pool.plan.slots
    return found


def _running(stages: Sequence[StageRun]) -> dict[str, int]:
    """Return how many elements run now, by stage."""
    found: dict[str, int] = {}
    for pool in {id(stage.pool): stage.pool for stage in stages}.values():
        for worker in pool.workers.values():
            for bundle in worker.bundles.values():
                found[bundle.stage.id] = found.get(bundle.stage.id, 0) + bundle.left
    return found


def _arrived(
    stage: StageRun, buffers: Mapping[bytes, BufferRun], fractions: Mapping[str, float | None]
) -> float | None:
    """Return the fraction of the stage's input that has arrived, or None if it is not known."""
    if stage.plan.has_endless_input:
        return None
    least = 1.0
    for read in stage.plan.reads:
        buffer = buffers[read.buffer_id]
        least = min(least, buffer.fraction_out())
        for writer in buffer.writers:
            if (fraction := fractions.get(writer.id)) is None:
                return None
            least = min(least, fraction)
    return least


def _amount_left(stage: StageRun, waiting: int, arrived: float | None) -> tuple[float, float | None]:
    """Return what a stage still has to do, in elements or in sizes of restrictions, and the fraction that is done."""
    sized = stage.sized_work
    done = float(stage.elements_done) if sized is None else sized.done
    here = done + waiting if sized is None else sized.total
    if not here:
        return float(waiting) if sized is None else 0.0, None
    if arrived is None or arrived < _LEAST_ARRIVED:
        return max(0.0, here - done), None
    total = here / arrived
    return max(0.0, total - done), min(1.0, max(0.0, done / total))


def _seconds_each(stage: StageRun) -> float:
    """Return how long a bundle takes for one element, or for one unit of size; 0 if nothing was measured yet."""
    sized, speed = stage.sized_work, stage.size.speed
    if sized is not None:
        return stage.busy.seconds / sized.done if sized.done > 0 else 0.0
    if not speed.is_observed:
        return 0.0
    fixed, each = speed.price()
    return each + fixed / max(1, speed.last)
