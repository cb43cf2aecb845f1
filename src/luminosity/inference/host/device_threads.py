"""The threads around a device, and the batches under way.

One thread cuts and collates batches, some compute, one hands results back. A model that takes examples as they come
gets them from a computing thread, and one more thread hands its answers back.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from apache_beam.runners.worker import statesampler

from luminosity._shared.hangs import Frames, frames_of
from luminosity._shared.user_code import is_users
from luminosity.errors import BudgetReached, EndpointError, HandlerError, ModelFailed
from luminosity.inference.blocks import Block, as_block, rows, size
from luminosity.inference.handler import PartlyFailed, noting
from luminosity.inference.host.interface import Outcome
from luminosity.inference.host.lane import Batch, Stage, Submitter

__all__ = ["BatchCallbacks", "DeviceThreads", "InFlight", "stacks_at_work"]
_SWITCH_S = 0.0005  # each wait for the interpreter of the thread that feeds the device is idle time of the device
_COLLATED = 1  # batches that wait to be computed; more would only hold memory
_COMPUTED = 2  # batches that wait to be handed back
_AT_WORK = frozenset({"_predict", "_collate", "_collect", "load"})  # functions around the calls of a handler
_MOST_STACKS = 4  # models that compute several batches at once have as many threads


@dataclass(frozen=True)
class BatchCallbacks:
    """The functions that device threads call, always without holding the lock."""

    next_batch: Callable[[], Batch | None]
    """Blocks until there is a batch; None ends the threads."""
    succeeded: Callable[[Batch, Block, str | None, float, int], None]
    """Takes a batch's predictions, the model's id, and when they were ready: in seconds, and by the lane's clock."""
    failed: Callable[[Batch, BaseException, bool], None]
    """Takes a batch's error, and whether its examples may have caused it."""
    put_back: Callable[[Batch], None]
    """Takes back a batch whose model is no longer in memory."""
    broke: Callable[[BaseException], None]
    """Takes the error that ended a thread, which is a bug of the host."""


class DeviceThreads:
    """Runs batches until ``next_batch`` returns None.

    Three kinds of daemon threads pass a batch on through two short queues; None in a queue ends the thread that gets
    it. While the device computes a batch, the next one is collated and moved, and the one before is handed back.

    ``lock`` is the host's: it protects ``stage``, ``due_from`` and ``abandoned`` of each batch, and the slots of
    models, so that a batch is either completed or abandoned, never both.
    """

    def __init__(self, lock: threading.Condition, now: Callable[[], float], calls: BatchCallbacks) -> None:
        self._lock = lock
        self._now = now
        self._calls = calls
        self._to_compute: queue.Queue[Batch | None] = queue.Queue(_COLLATED)
        self._to_return: queue.Queue[tuple[Batch, Any] | None] = queue.Queue(_COMPUTED)
        self._answered: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        """Examples that have their answer; never more than such models have taken."""
        self._computing_threads = 0
        sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))
        self._spawn("schedule", self._schedule)
        self._spawn("return", self._hand_back)
        self._spawn("answers", self._hand_back_answers)

    @property
    def capacity(self) -> int:
        """The most batches that can be under way: one in each thread, and those in the queues."""
        return self._computing_threads + 2 + _COLLATED + _COMPUTED

    def grow_to(self, threads: int) -> None:
        """Start threads until at least this many compute. The caller holds the lock."""
        while self._computing_threads < threads:
            self._computing_threads += 1
            self._spawn("compute", self._compute)

    def replace_thread_of(self, batch: Batch) -> None:
        """Start a thread in place of the one that an abandoned batch blocks. The caller holds the lock."""
        if batch.stage is Stage.COMPUTING:
            batch.lane.model.slots.release()
            self._spawn("compute", self._compute)
        elif batch.stage is Stage.RETURNING and batch.future is None:
            self._spawn("return", self._hand_back)
        elif batch.stage is Stage.RETURNING:
            self._spawn("answers", self._hand_back_answers)

    def _spawn(self, name: str, target: Callable[[], None]) -> None:
        def run() -> None:
            try:
                target()
            except BaseException as error:
                self._calls.broke(error)
                raise

        threading.Thread(target=run, name=f"model-host-{name}", daemon=True).start()

    def _schedule(self) -> None:
        while (batch := self._calls.next_batch()) is not None:
            if self._collate(batch):
                self._to_compute.put(batch)  # Waits at most as long as the current batch computes, or its timeout.
            del batch  # Its inputs are large.
        self._to_compute.put(None)
        self._to_return.put(None)
        self._answered.put(None)

    def _collate(self, batch: Batch) -> bool:
        handler, stats = batch.lane.handler, batch.stats
        try:
            begun = self._now()
            if batch.lane.submits:
                prepared = batch.prepared()
                batch.inputs, stats.num_bytes = rows(prepared)[0], size(prepared)
                return True
            collated = handler.collate(batch.prepared())
            stats.num_bytes = handler.get_num_bytes(collated)
            stats.count = handler.num_examples(collated, batch.count)
            stacked = self._now()
            batch.inputs = handler.transfer(collated)
            stats.collate, stats.transfer = stacked - begun, self._now() - stacked
        except BaseException as error:
            self._calls.failed(batch, error, True)
            return False
        return True

    def _compute(self) -> None:
        while (batch := self._to_compute.get()) is not None:
            slots = batch.lane.model.slots
            slots.acquire()  # Waits at most until a batch that holds a slot ends or times out.
            with self._lock:
                batch.due_from, batch.stage = self._now(), Stage.COMPUTING
            outputs = self._predict(batch)
            with self._lock:
                if batch.abandoned:
                    return  # A new thread has taken the place of this one, and its slot.
                batch.stage = Stage.WAITING
                slots.release()
                if batch.future is not None:
                    batch.lane.submitted.add(batch)
            if batch.future is not None:
                # The last step: it may run at once, and then the batch is no longer this thread's.
                batch.future.add_done_callback(partial(_put, self._answered, batch))
            if outputs is not None:
                self._to_return.put((batch, outputs[0]))
            del batch, outputs  # They hold memory of the device.
        self._to_compute.put(None)  # Ends the next computing thread.

    def _predict(self, batch: Batch) -> tuple[Any] | None:
        lane = batch.lane
        with self._lock:
            copy = lane.model.next_copy()  # Only this frame holds it: an evicted model must not live on.
        if copy is None:
            self._calls.put_back(batch)
            return None
        with _as_part_of(batch.parts[0][0].session.step), noting() as notes:
            batch.started, batch.started_ns = self._now(), lane.settings.clock.time_ns()
            try:
                if lane.submits:
                    batch.future = copy[0].submit(batch.inputs, lane.settings.inference_args)
                    return None
                outputs = lane.handler.predict(copy[0], batch.inputs, lane.settings.inference_args)
            except BaseException as error:
                copy = None  # The error refers to this frame, and may outlive the model.
                batch.stats.notes = notes
                # An unusable endpoint and a spent budget fail all examples alike: no example is at fault.
                self._calls.failed(batch, error, not isinstance(error, EndpointError | BudgetReached))
                return None
            batch.stats.notes = notes
            return (outputs,)

    def _hand_back(self) -> None:
        while (item := self._to_return.get()) is not None:
            batch = item[0]
            with self._lock:
                if batch.abandoned:
                    continue
                batch.stage = Stage.RETURNING
            self._collect(*item)
            if batch.abandoned:
                return  # A new thread has taken the place of this one.
            del batch, item

    def _hand_back_answers(self) -> None:
        while (batch := self._answered.get()) is not None:
            with self._lock:
                if batch.abandoned:
                    continue
                batch.stage = Stage.RETURNING
            self._answer(batch)
            if batch.abandoned:
                return  # A new thread has taken the place of this one.
            del batch

    def _answer(self, batch: Batch) -> None:
        """Hand back the answer of a model that takes examples as they come."""
        assert batch.future is not None
        try:
            answer = batch.future.result()
        except CancelledError:
            with self._lock:
                model = batch.lane.model
                was_closed = not model.is_ready or batch.attempt != model.attempt
            if was_closed:  # the model made room for another, or hung with another example
                self._calls.put_back(batch)
            else:
                self._calls.failed(batch, ModelFailed("the model has cancelled this example"), True)
        except BaseException as error:
            self._calls.failed(batch, error, not isinstance(error, EndpointError))
        else:
            with noting() as notes:
                self._collect(batch, [answer], notes)

    def _collect(self, batch: Batch, outputs: Any, notes: dict[str, int] | None = None) -> None:
        """Turn outputs into values and hand them back; ``notes`` are what the handler counts meanwhile."""
        handler = batch.lane.handler
        try:
            with _as_part_of(batch.parts[0][0].session.step):
                if not batch.lane.submits:
                    handler.wait(outputs)
                ready, ready_ns = self._now(), batch.lane.settings.clock.time_ns()
                values, model_id = handler.collect(outputs), handler.model_id
            if isinstance(values, PartlyFailed):
                batch.errors, values = values.errors, values.values
            values = as_block(values)
            if len(values) != batch.count:
                raise HandlerError(
                    f"{handler} returned {len(values)} predictions for {batch.count} examples",
                    fix="return one prediction for each example, in their order",
                )
            batch.stats.notes |= notes or {}
        except BaseException as error:
            self._calls.failed(batch, error, True)
        else:
            self._calls.succeeded(batch, values, model_id, ready, ready_ns)


class InFlight:
    """Keeps the batches that device threads work on, and turns their ends into outcomes for sessions.

    It delivers nothing itself: methods return pairs of a session and an outcome, and the host delivers them. The
    caller holds the host's lock in every method.
    """

    def __init__(self) -> None:
        self.running: set[Batch] = set()
        self._ready_before = 0.0
        """When the last batch was computed; the device was busy until then."""

    def begin(self, batch: Batch, now: float) -> None:
        """Add a batch that was just cut."""
        self.running.add(batch)
        batch.begun, batch.attempt = now, batch.lane.model.attempt
        batch.lane.model.users += 1

    def succeed(
        self, batch: Batch, values: Block, model_id: str | None, ready: float, ready_ns: int, now: float
    ) -> list[tuple[Submitter, Outcome]]:
        """End a batch whose predictions were ``ready`` at that time; learn its duration."""
        stats, lane = batch.stats, batch.lane
        stats.compute = ready - batch.started
        stats.busy = ready - max(batch.started, self._ready_before)
        stats.latency_micro_secs = (ready_ns - batch.started_ns) // 1000
        stats.collect = now - ready
        self._ready_before = ready
        lane.policy.budget.succeeded(batch.padded, max(stats.busy, 1e-9))
        lane.model.run_seconds += max(stats.busy, 0.0)
        self._end(batch, now)
        return batch.outcomes(values, model_id)

    def fail(
        self, batch: Batch, error: BaseException, now: float, *, too_large: bool, by_its_examples: bool
    ) -> list[tuple[Submitter, Outcome]]:
        """End a batch that failed.

        If the batch was too large for the memory, or its lane isolates failures, its halves go back to the lane and
        nothing is returned. Otherwise every example fails.
        """
        lane = batch.lane
        batch.stats.failed, batch.stats.out_of_memory = True, too_large
        self._count_failed_run(batch, now)
        if too_large:
            lane.policy.budget.out_of_memory(batch.padded, batch.count)
        self._end(batch, now)
        if batch.count > 1 and (too_large or (by_its_examples and lane.settings.isolate_failures)):
            lane.retry(batch.halves())
            return []
        return batch.failures(error, batch.count if by_its_examples else 0)

    def abandon(self, batch: Batch, error: BaseException, now: float) -> list[tuple[Submitter, Outcome]]:
        """Fail a batch that its thread still works on; the result of that thread will be ignored."""
        batch.abandoned = batch.stats.failed = True
        self._count_failed_run(batch, now)
        self._end(batch, now)
        return batch.failures(error, batch.count)

    def put_back(self, batch: Batch) -> None:
        """Return the examples to the front of their lane, as a new batch."""
        self.running.discard(batch)
        batch.lane.submitted.discard(batch)
        batch.lane.model.users -= 1
        batch.lane.retry([batch.again()])

    def _end(self, batch: Batch, now: float) -> None:
        self.running.remove(batch)
        batch.lane.submitted.discard(batch)
        batch.lane.model.users -= 1
        batch.lane.model.used_at = now
        batch.inputs = None

    def _count_failed_run(self, batch: Batch, now: float) -> None:
        """Count the time of a failed batch: a model that only fails has had its turn like any other."""
        batch.lane.model.run_seconds += now - (batch.started or batch.begun)


def _put(answered: queue.SimpleQueue[Batch | None], batch: Batch, _: object) -> None:
    answered.put(batch)


class _OneStep:
    """Replaces Beam's state tracker in a thread that belongs to no bundle: it knows one step."""

    def __init__(self, step: Any) -> None:
        self._step = step

    def current_state(self) -> Any:
        return self._step

    def update_metric(self, name: Any, value: Any) -> None:
        if self._step.metrics_container is not None:
            self._step.metrics_container.get_metric_cell(name).update(value)


@contextmanager
def _as_part_of(step: Any) -> Generator[None]:
    """Count what this thread counts and logs for that step; Beam finds the step by the thread."""
    if step is None:
        yield
        return
    statesampler.set_current_tracker(_OneStep(step))
    try:
        yield
    finally:
        statesampler.set_current_tracker(None)


def stacks_at_work() -> list[Frames]:
    """Return the stacks of this process's threads that load a model or work on a batch, from the user's code on."""
    threads = [thread.ident or 0 for thread in threading.enumerate() if thread.name.startswith("model-host-")]
    found: list[Frames] = []
    for frames in map(frames_of, threads):
        if _AT_WORK.intersection(frame.f_code.co_name for frame, _ in frames):
            first = next((place for place, (frame, _) in enumerate(frames) if is_users(frame)), 0)
            found.append(frames[first:])
    return found[:_MOST_STACKS]
