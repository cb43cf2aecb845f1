"""Splits running bundles, and gives the input that they have not begun back to the queue at once.

A bundle is split when it has run for long enough, or when workers of its pool have nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.data.event_time import MIN
from luminosity.engine.loop.bundle import Attempt, Bundle, new_instruction_id, slice_blocks
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.loop.stage_input import StageInput
from luminosity.engine.loop.workers import PoolRun

__all__ = [
    "allow_taking",
    "apply",
    "can_split",
    "hasten",
    "may_give_work",
    "next_taking",
    "queue_residual",
    "request",
    "take_work",
    "work_to_take",
]

# How much of the rest of the element in progress the bundle keeps. A bounded source refuses 0, so later requests offer
# more.
_FRACTIONS = (0.0, 0.02, 0.1, 0.5)
_FRACTION_FOR_IDLE_WORKER = 0.5  # of the rest of a splittable element: both workers go on with it
_REQUEST_AGAIN_S = 0.05  # enough for an element that had not begun to begin
_LONGEST_WAIT_S = 1.0  # between two requests
_FIRST_TAKE_S = 0.03  # how long a bundle is left alone: most are done by then, or have begun what they will begin
_FIRST_ASK_S = 0.1  # how long a bundle of few elements is left alone if no worker is there to take some
_FEW_ELEMENTS = 8  # are not worth a second set-up of their steps as long as none of them is known to take long
_FIRST_TAKE_OF_SINK_S = 1.0  # the same if each bundle writes a file: short bundles would make many


def can_split(bundle: Bundle) -> bool:
    """Return whether the bundle could stop early and leave some of its input."""
    if bundle.search is not None:
        return False  # a search must run every part of the bundle itself
    if bundle.stage.takes_all:
        return False
    plan = bundle.stage.plan
    return bool(bundle.inputs) and ((plan.is_splittable and plan.can_cut_elements) or bundle.count > 1)


def request(bundle: Bundle, attempt: Attempt) -> None:
    """Ask the worker to end the bundle soon. The bundle commits only after the worker has responded."""
    plan = bundle.stage.plan
    # A restriction without an end is only cut at its current position: a part that begins later would wait there and
    # hold the watermark back, forever.
    has_end = plan.is_splittable and not plan.is_unbounded
    fraction = _FRACTIONS[attempt.splits_requested % len(_FRACTIONS)] if has_end else 0.0
    attempt.splits_requested += 1
    attempt.split_at = float("inf")
    _send(bundle, attempt, fraction, is_for_idle_worker=False)


def hasten(stage: StageRun) -> None:
    """Let the bundles of a source end soon, because more of its restrictions wait than there are slots.

    Otherwise restrictions without records would keep the slots from those that have some.
    """
    running = [b for worker in stage.pool.workers.values() for b in worker.bundles.values() if b.stage is stage]
    if not running:
        return  # What waits is a bundle whose worker was lost, and there is no worker yet.
    turn = stage.turns.seconds(len(running) + stage.queued, len(running))
    for bundle in running:
        attempt = bundle.attempt
        if attempt is None or attempt.is_patient or attempt.splits_requested:
            continue
        if can_split(bundle):
            bundle.split_at(min(attempt.split_at, attempt.started_at + turn))


def _request_for_idle_worker(bundle: Bundle, attempt: Attempt, now: float) -> None:
    """Ask the worker to give away input that an idle worker can process.

    A plain bundle gives away all elements that it has not begun, and gets its share of them back from the queue. So it
    ends between two batches, if its steps make batches. A splittable one gives away half of the rest and goes on.
    """
    attempt.take_wait = min(_LONGEST_WAIT_S, 2 * attempt.take_wait)
    attempt.take_at = now + attempt.take_wait
    fraction = _FRACTION_FOR_IDLE_WORKER if bundle.stage.plan.is_splittable else 0.0
    _send(bundle, attempt, fraction, is_for_idle_worker=True)


def _send(bundle: Bundle, attempt: Attempt, fraction: float, *, is_for_idle_worker: bool) -> None:
    message = beam_fn_api_pb2.InstructionRequest(instruction_id=new_instruction_id("split"))
    message.process_bundle_split.instruction_id = attempt.instruction_id
    for read_id, blocks in bundle.inputs.items():
        desired = message.process_bundle_split.desired_splits[read_id]
        desired.fraction_of_remainder = fraction
        desired.estimated_input_elements = count = sum(block.count for block in blocks)
        if bundle.stage.plan.is_splittable and not bundle.stage.plan.can_cut_elements:
            # The worker cuts an element only if it may split before and after it.
            desired.allowed_split_points.extend(range(0, count + 1, 2))
    attempt.pending_splits[message.instruction_id] = is_for_idle_worker
    attempt.worker.instruct(message)


def apply(bundle: Bundle, attempt: Attempt, response: beam_fn_api_pb2.InstructionResponse, now: float) -> None:
    """Queue what a split took from the bundle, or note when to request another if it took nothing.

    The bundle need not end first: if its attempt fails, only what is left of its input is retried.
    """
    is_for_idle_worker = attempt.pending_splits.pop(response.instruction_id)
    split = response.process_bundle_split
    stage = bundle.stage
    for channel in split.channel_splits:
        read_id, start = channel.transform_id, channel.first_residual_element
        end = attempt.ends.get(read_id, sum(b.count for b in bundle.inputs.get(read_id, ())))
        if start < end:
            blocks = slice_blocks(bundle.inputs[read_id], stage.codec(read_id), start, end)
            attempt.ends[read_id] = start
            attempt.given_back += end - start
            if stage.sized_work is not None:
                attempt.given_back_size += stage.sized_work.size(read_id, blocks)
            stage.give_back(bundle.shards, read_id, blocks)
            if not stage.plan.is_splittable:
                stage.size.speed.had_begun(start)
    primaries: dict[str, list[bytes]] = {}
    for primary in split.primary_roots:
        read_id = stage.plan.residual_reads[primary.transform_id, primary.input_id]
        primaries.setdefault(read_id, []).append(primary.element)
    attempt.primary_roots.update(primaries)
    if stage.is_source:
        attempt.residuals.extend(split.residual_roots)
    else:
        for residual in split.residual_roots:
            attempt.given_back_size += queue_residual(bundle, residual, now)
    if split.residual_roots and not is_for_idle_worker and not stage.is_source:
        stage.size.was_split(has_output=bool(attempt.outputs))
    if split.channel_splits:
        attempt.pending_output.keep(1 - attempt.given_back / bundle.count)
    is_cut = len(split.channel_splits) == len(bundle.inputs)
    has_ended = bool(split.residual_roots) if stage.plan.is_splittable else is_cut
    if is_for_idle_worker and stage.plan.is_splittable:
        return  # it goes on, and its own deadline stays
    if has_ended:
        attempt.split_at = attempt.take_at = float("inf")
    elif not is_for_idle_worker and attempt.response is None:
        # The request came too early, or during an element that could not be cut.
        # It may still set up its steps, which takes seconds if they load models: wait longer each time.
        rounds, fraction = divmod(attempt.splits_requested, len(_FRACTIONS))
        wait = _REQUEST_AGAIN_S if fraction else max(_REQUEST_AGAIN_S, stage.size.deadline_seconds(now))
        bundle.split_at(now + min(_LONGEST_WAIT_S, wait * 2**rounds))


def _where_residual_goes(bundle: Bundle, residual: beam_fn_api_pb2.DelayedBundleApplication) -> tuple[str, int, float]:
    """Return the id of the read in which the rest of an element waits, its hold, and for how many seconds it waits."""
    stage, application = bundle.stage, residual.application
    read_id = stage.plan.residual_reads[application.transform_id, application.input_id]
    # ToMicroseconds() would raise at the first and last timestamps of Beam.
    reported = [w.seconds * 1_000_000 + w.nanos // 1000 for w in application.output_watermarks.values()]
    hold = max(bundle.hold, min(reported, default=MIN))
    if stage.gate is not None:
        # It reads its side inputs again, however far its output is: their windows must not be forgotten meanwhile.
        hold = min(hold, stage.gate.expiry(read_id, application.element))
    return read_id, hold, residual.requested_time_delay.ToMicroseconds() / 1e6


def queue_residual(bundle: Bundle, residual: beam_fn_api_pb2.DelayedBundleApplication, now: float) -> float:
    """Queue the rest of an element that was cut, after its delay. Returns the size of the work that it stands for."""
    stage = bundle.stage
    read_id, hold, delay = _where_residual_goes(bundle, residual)
    block = stage.blocks.of_bytes(residual.application.element, 1, hold)
    if stage.is_source and bundle.attempt is not None:
        block.home = bundle.attempt.worker.id  # it may have a reader open
    size = stage.sized_work.size(read_id, (block,)) if stage.sized_work is not None else 0.0
    if delay > 0:
        stage.delayed.add(read_id, block, now + delay)
    else:
        bundle.shards[0].append(read_id, block, now)
    return size


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
    if not candidates:
        return
    wanted = pool.free_slots() - sum(any(attempt.pending_splits.values()) for _, attempt in _running(pool))
    candidates.sort(key=lambda candidate: -candidate[0])
    for _, bundle, attempt in candidates[: max(0, wanted)]:
        _request_for_idle_worker(bundle, attempt, now)


def work_to_take(pool: PoolRun, now: float, start_seconds: float) -> int:
    """Return how many more bundles could be made of those that run, if there were workers for them.

    A worker takes ``start_seconds`` to start. A bundle of few elements in a worker that has not run its stage before
    may still set up its steps, such as load a model, which one more worker would do as well. So it is asked to give
    back what it has not begun: a bundle that sets up its steps gives nothing, and any other one makes a queue of it.
    """
    work = 0
    for bundle, attempt in _takeable(pool, now):
        left = bundle.count - attempt.given_back - 1
        if not _can_give(bundle) or not _is_worth_it(bundle, attempt, now, is_cold=True, start_seconds=start_seconds):
            attempt.take_at = now + _FIRST_TAKE_S  # look again
        elif not _may_set_up(bundle, attempt):
            work += max(1, left)
        elif now - attempt.started_at >= _FIRST_ASK_S:
            _request_for_idle_worker(bundle, attempt, now)
        else:
            attempt.take_at = attempt.started_at + _FIRST_ASK_S
    return work


def may_give_work(pool: PoolRun, now: float) -> bool:
    """Return whether a bundle could have work for one more worker: it may still set up its steps, or is being split."""
    return any(
        now - attempt.started_at >= _FIRST_TAKE_S
        and attempt.take_at < float("inf")
        and _can_give(bundle)
        and (attempt.pending_splits or _may_set_up(bundle, attempt))
        for bundle, attempt in _running(pool)
    )


def _can_give(bundle: Bundle) -> bool:
    """Return whether the bundle could give elements to a worker that starts now. One that sorts has begun them all."""
    return not bundle.stage.plan.sorts_its_bundle


def _may_set_up(bundle: Bundle, attempt: Attempt) -> bool:
    is_small = bundle.count - attempt.given_back <= _FEW_ELEMENTS
    return is_small and not attempt.is_warm and not bundle.stage.plan.is_splittable


def _is_worth_it(bundle: Bundle, attempt: Attempt, now: float, *, is_cold: bool, start_seconds: float = 0.0) -> bool:
    stage = bundle.stage
    if stage.plan.is_splittable:
        return True  # the speed per element says nothing about the rest of an element
    left, elapsed = bundle.count - attempt.given_back, now - attempt.started_at
    return stage.size.worth_taking(left, elapsed, is_cold=is_cold, start_seconds=start_seconds)


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
    for worker in pool.with_bundles.values():
        for bundle in worker.bundles.values():
            if bundle.attempt is not None and bundle.attempt.response is None:
                yield bundle, bundle.attempt
