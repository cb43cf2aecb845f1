"""The loop itself: start bundles, take in results, commit, advance watermarks."""

from __future__ import annotations

import logging
import queue
from typing import Literal

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity._shared.record_places import take_places
from luminosity._shared.text import describe_exit
from luminosity.engine.data.event_time import MAX
from luminosity.engine.data.live_side_input import LiveSideInput
from luminosity.engine.data.scripted_stream import Played
from luminosity.engine.loop import splits, transfers
from luminosity.engine.loop.buffers import BufferRun
from luminosity.engine.loop.bundle import Attempt, AttemptWorker, Bundle, new_instruction_id
from luminosity.engine.loop.dispatch import Dispatch, Staff
from luminosity.engine.loop.parts import LoopListener, RunParts
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.loop.stalls import Stalls
from luminosity.engine.loop.transfers import commit, give_up
from luminosity.engine.loop.workers import (
    CancelRequested,
    CheckpointWritten,
    Connected,
    EventSent,
    Exited,
    Message,
    Responded,
    Sent,
    StopRequested,
    Worker,
)
from luminosity.engine.workers.failure import Failure
from luminosity.errors import RunCancelled, SpillFailed

__all__ = ["Scheduler"]

_LOGGER = logging.getLogger(__name__)

_FINISH_TIMEOUT_S = 10.0  # for workers to tear down their steps after their last bundle
_KILL_TIMEOUT_S = 10.0  # for the kernel to end killed workers
_IDLE_WAKE_S = 0.2  # how often the listener's ``tick`` is called at least
_LEAST_WAIT_S = 0.005  # between two looks for work that idle workers can take
_SUSPECT_S = 1.0  # a source that has run alone for this long does not kill workers: it may wait for hours
_LOOK_S = 0.25  # between two looks at all workers: short beside any time that is allowed to them
_PUMP_S = 0.02  # how long one grouping may keep the loop from its messages
_LEAST_TIMEOUT_S = 0.001  # of a wait for messages: threads that send them get the interpreter meanwhile
_MANY_WORKERS = 100  # for which the loop lets messages gather: a round of the loop costs as much as half a bundle
_GATHER_S = 0.004  # from one round to the next, with many workers: short beside their bundles
_HANDLE_S = 0.01  # how long messages may keep the loop from starting bundles: a worker that is done waits for its next


class Scheduler:
    """Runs a pipeline to its end, on the thread that calls :meth:`run`.

    All stages, buffers and workers are changed on that thread alone. Other threads only put messages into a queue: the
    server's threads what workers send, the launcher's threads that a process has exited, and any thread a request to
    cancel. The loop waits for that queue and for nothing else, except while it starts a worker process.
    """

    def __init__(self, parts: RunParts, listener: LoopListener) -> None:
        self._parts = parts
        self._listener = listener
        self._messages = parts.world.mailbox()  # of ``Message``
        self._monotonic, self._micros = parts.clock.monotonic, parts.clock.micros
        self._finalizing: dict[str, AttemptWorker] = {}  # by the instruction id of the request to finalize
        self._staff = Staff(parts, self._messages.put)
        self._stalls = Stalls(listener.bundle_stalled, parts.failures.element, parts.config.element_timeout)
        self._dispatch = Dispatch(parts, self._staff)
        self._is_pumping = False
        self._has_changed = False  # whether bundles have ended since the watermarks were computed
        self._look_at = 0.0  # when to look at all workers again
        self._round_at = 0.0  # when the last messages were handled
        self._stop_at = float("inf")  # when running bundles are given up; without end unless the run is to stop
        self._all_stages = parts.all_stages()
        self._stages = {stage.id: stage for stage in self._all_stages}
        # The loop looks at these all the time. Most buffers and stages only pass elements on.
        self._pumped = [buffer for buffer in parts.buffers.values() if buffer.does_work]
        self._expiring = [stage for stage in self._all_stages if stage.expiry is not None or stage.gate is not None]
        self._timed = [stage for stage in self._all_stages if stage.has_processing_timers]

    def cancel(self) -> None:
        """Ask the run to end soon. Any thread may call this; it does not wait."""
        self._messages.put(CancelRequested())

    def stop(self) -> None:
        """Ask the run to stop when its running bundles have ended. Any thread may call this; it does not wait.

        The run must have a checkpoint.
        """
        self._messages.put(StopRequested())

    def run(self, *, is_drain: bool = False) -> Literal["finished", "stopped"]:
        """Run the pipeline. Blocks until it is done or was stopped; no worker is left either way.

        ``is_drain`` says how the checkpoint names the end. Raises what ended the run before.
        """
        is_done = has_stopped = False
        test_streams = self._parts.test_streams
        try:
            if test_streams is not None:
                test_streams.start(lambda: self._messages.put(EventSent()))
            self._advance()
            self._staff.start_ahead()
            checkpoint = self._parts.checkpoint
            if checkpoint is not None:
                checkpoint.start(self._messages.put)
            while not self._is_done():
                if has_stopped := self._has_stopped():
                    break
                self._pump()
                if not self._is_stopping:
                    self._dispatch.start_bundles(self._monotonic(), self._micros())
                self._play_test_events()
                self._merge_metrics()
                self._handle_messages(self._wait_seconds())
                self._listener.tick()
                if checkpoint is not None:
                    checkpoint.tick(self._monotonic())
            if checkpoint is not None:
                checkpoint.before_end("stopped" if has_stopped else "drained" if is_drain else "finished")
            is_done = True
            return "stopped" if has_stopped else "finished"
        finally:
            if test_streams is not None:
                test_streams.close()
            self._end_workers(gracefully=is_done)
            for stage in self._all_stages:
                stage.release()
            for buffer in self._parts.buffers.values():
                buffer.release()
            self._parts.state.release()

    # Starting bundles

    def _pump(self) -> None:
        """Advance each grouping for a moment. The next round of the loop continues."""
        self._is_pumping = False
        for buffer in self._pumped:
            side_input = buffer.live_side_input
            if buffer.pump(self._monotonic() + _PUMP_S) or (side_input is not None and side_input.is_due()):
                self._is_pumping = True
            if (dropped := buffer.take_dropped()) and buffer.readers:
                self._parts.metrics.count_dropped(buffer.readers[0][0].id, buffer.step, dropped)
        for stage in self._expiring:
            self._forget_expired(stage)
        if self._is_pumping:
            self._advance()
        self._parts.spill_policy.check()

    def _forget_expired(self, stage: StageRun) -> None:
        """Forget state and timers of a stage's windows that have expired, and count elements that came after that."""
        has_expired = False
        for shard, cells in stage.take_expired():
            # Workers may go on with what they have cached: no bundle touches a cell of an expired window again.
            self._parts.state.remove(cells, shard)
            has_expired = True
        if stage.dropped:
            self._parts.metrics.count_dropped(stage.id, stage.plan.steps[0], stage.dropped)
            stage.dropped = 0
        if has_expired:
            self._is_pumping = True  # there may be more of them; and timers held the watermark back

    def _play_test_events(self) -> None:
        """Play the next events of TestStreams once all that came of the last ones is done."""
        test_streams = self._parts.test_streams
        if test_streams is None or self._is_pumping or self._finalizing:
            return
        now, micros = self._monotonic(), self._micros()
        if any(worker.bundles for worker in self._staff.workers.values()) or any(
            stage.is_ready and (stage.has_work(micros) or stage.delayed.next_due() <= now) for stage in self._all_stages
        ):
            return
        played = test_streams.play()
        if played == Played.WAITING:
            return
        if played == Played.ENDED and (fires := self._processing_timers()):
            # Nothing else will move the clock.
            test_streams.advance_clock_to(min(fires))
        self._is_pumping = True  # look again at once
        self._advance()

    def _processing_timers(self) -> list[int]:
        """Return when timers and triggers of processing time fire next, in microseconds since 1970."""
        fires = [stage.next_processing_timer() for stage in self._timed]
        fires += [buffer.next_fire() for buffer in self._pumped]
        return [fire for fire in fires if fire is not None]

    # Handling messages

    def _wait_seconds(self) -> float:
        """Return how long the loop may wait for messages before a deadline or timer is due."""
        if self._is_pumping:
            return 0.0
        now, micros = self._monotonic(), self._micros()
        wake = min(now + _IDLE_WAKE_S, self._stop_at)
        if self._parts.checkpoint is not None:
            wake = min(wake, self._parts.checkpoint.next_due())
        for stage in self._all_stages:
            wake = min(wake, stage.delayed.next_due())
        for fire in self._processing_timers():
            wake = min(wake, now + (fire - micros) / 1e6)
        for pool in self._parts.pools:
            wake = min(wake, pool.deadlines.next())
            if pool.has_free_slot() or pool.unused_index() is not None:
                wake = min(wake, max(splits.next_taking(pool), now + _LEAST_WAIT_S))
        return max(0.0, min(wake, self._staff.next_start(now)) - now)

    def _merge_metrics(self) -> None:
        """Merge metrics of committed bundles until a message arrives: nothing waits for them."""
        while self._messages.empty() and self._parts.metrics.merge_one():
            pass

    def _handle_messages(self, timeout: float) -> None:
        """Handle the messages that have arrived, for a moment. Waits up to ``timeout`` seconds for the first.

        If hundreds of workers end their bundles at the same time, the first of them get new ones before the messages of
        the last are handled. Messages that come one by one are handled together.
        """
        has_many = len(self._staff.workers) >= _MANY_WORKERS and not self._is_pumping
        try:
            message = self._messages.get(timeout=max(timeout, _GATHER_S if has_many else _LEAST_TIMEOUT_S))
            if has_many:
                self._parts.clock.sleep(max(0.0, self._round_at + _GATHER_S - self._monotonic()))
            self._round_at = self._monotonic()
            until = self._round_at + _HANDLE_S
            self._handle(message)
            while not self._messages.empty() and self._monotonic() < until:
                self._handle(self._messages.get_nowait())
        except queue.Empty:
            pass  # a deadline or timer is due
        if self._has_changed:
            self._advance()
        self._check_deadlines()

    def _check_deadlines(self) -> None:
        """Ask bundles that have run long enough to split, and kill workers that do not connect in time.

        A source that was suspected to kill workers, and has run alone for long enough, leaves its worker's other slots
        to others.
        """
        now = self._monotonic()
        for pool in self._parts.pools:
            for bundle, attempt in pool.deadlines.take_due(now):
                splits.request(bundle, attempt)
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        self._stalls.look(self._staff.workers.values(), now)
        if self._parts.elastic is not None and not self._is_stopping:
            self._parts.elastic.look(now, self._staff.start, lambda worker: self._let_leave(worker, now))
        for worker in self._staff.workers.values():
            self._staff.kill_if_late(worker, now)
            if worker.is_leaving or (worker.process is not None and worker.process.is_leaving()):
                self._let_leave(worker, now)
            for bundle in worker.bundles.values():
                if bundle.is_suspect and bundle.stage.is_source and bundle.attempt is not None:
                    bundle.is_suspect = now - bundle.attempt.started_at <= _SUSPECT_S

    def _let_leave(self, worker: Worker, now: float) -> None:
        """Give a worker that is not needed, or whose machine will be gone, no more bundles, and end it after them."""
        if worker.is_stopping:
            if now > worker.end_by:
                worker.kill()
            return
        if not worker.is_leaving:
            worker.is_leaving = True
            self._end_early(worker, now)
        if not worker.bundles and not self._has_to_finalize(worker):
            worker.is_stopping = True
            worker.end_by = now + _FINISH_TIMEOUT_S
            self._listener.worker_ends(worker)
            if worker.is_connected and worker.connection is not None:
                worker.connection.finish()
            else:
                worker.kill()

    def _has_to_finalize(self, worker: Worker) -> bool:
        """Return whether bundles of the worker are being finalized, or will be once their checkpoint is safe."""
        checkpoint = self._parts.checkpoint
        is_later = checkpoint is not None and checkpoint.will_finalize_in(worker)
        return is_later or worker in self._finalizing.values()

    def _handle(self, message: Message) -> None:
        if isinstance(message, Sent):
            for bundle in transfers.receive(message, self._parts):
                self._finish_if_complete(bundle)
        elif isinstance(message, Responded):
            self._take_response(message)
        elif isinstance(message, Connected):
            message.worker.has_connected()
            message.worker.pool.failed_starts = 0
            message.worker.pool.ready_at = self._monotonic()
            self._listener.worker_started(message.worker)
        elif isinstance(message, Exited):
            self._handle_exit(message.worker, message.code)
        elif isinstance(message, CancelRequested):
            raise RunCancelled("the run was cancelled")
        elif isinstance(message, StopRequested):
            self._begin_to_stop()
        elif isinstance(message, CheckpointWritten):
            assert self._parts.checkpoint is not None
            for attempt in self._parts.checkpoint.written(message):
                self._finalize(attempt)
            self._has_changed = True

    def _take_response(self, message: Responded) -> None:
        instruction_id = message.response.instruction_id
        if instruction_id in self._finalizing:
            del self._finalizing[instruction_id]
            return
        if (bundle := message.worker.bundles.get(instruction_id)) is not None and bundle.attempt is not None:
            bundle.attempt.response = message.response
            self._finish_if_complete(bundle)
            return
        for bundle in list(message.worker.bundles.values()):
            if bundle.attempt is not None and instruction_id in bundle.attempt.pending_splits:
                splits.apply(bundle, bundle.attempt, message.response, self._monotonic())
                self._finish_if_complete(bundle)
                return
        self._stalls.answered(message.worker, message.response, self._monotonic())

    def _finish_if_complete(self, bundle: Bundle) -> None:
        """Commit the bundle's attempt, or give it up and retry, if everything that the worker sends has arrived."""
        attempt = bundle.attempt
        if attempt is None or not attempt.is_complete():
            return
        assert attempt.response is not None
        attempt.worker.vacate(attempt)
        attempt.worker.warm_stages.add(bundle.stage.id)
        failure = self._failure(attempt, attempt.response)
        if failure is None:
            commit(bundle, attempt, attempt.response.process_bundle, self._parts)
            if attempt.response.process_bundle.requires_finalization:
                if self._parts.checkpoint is None:
                    self._finalize(attempt)
                else:
                    self._parts.checkpoint.finalize_later(attempt)
        else:
            give_up(bundle, attempt, self._parts)
            cause = attempt.worker.cause(attempt.instruction_id)
            next_bundles = self._parts.failures.after_exception(bundle, failure, cause)
            self._stages[bundle.stage.id].retry(bundle, next_bundles)
            if next_bundles == [bundle]:
                self._listener.bundle_retried(bundle, failure)
        self._has_changed = True

    def _failure(self, attempt: Attempt, response: beam_fn_api_pb2.InstructionResponse) -> Failure | None:
        error = self._parts.state.error(attempt.instruction_id)
        if isinstance(error, SpillFailed):
            return Failure.of(error)  # an error in the worker's response is a consequence
        if response.error:
            return Failure.from_json(response.error)
        if error is not None:
            text = f"{type(error).__name__}: {error}"
            return Failure(f"state could not be served: {text}", text)
        return None

    def _handle_exit(self, worker: Worker, code: int) -> None:
        """Handle the exit of a worker's process: its bundles are retried elsewhere."""
        self._staff.note_exit(worker)
        for instruction_id in [i for i, w in self._finalizing.items() if w is worker]:
            del self._finalizing[instruction_id]
        if worker.is_stopping:
            self._listener.worker_ended(worker)
            return
        overdue = worker.overdue
        self._listener.worker_lost(
            worker, describe_exit(code) if overdue is None else "was ended: an element took too long"
        )
        self._staff.check_start(worker, code)
        records = take_places(self._parts.folders.memory, worker.process.pid) if worker.process is not None else []
        if worker.bundles and overdue is None:
            _LOGGER.warning(
                "worker %s of pool %r%s %s; its bundles (%d) are retried%s",
                worker.id,
                worker.pool.plan.name,
                f" on node {worker.node[:8]}" if worker.node else "",
                describe_exit(code),
                len(worker.bundles),
                f"; it was at the record {', '.join(records)}" if records else "",
            )
        lost = worker.take_bundles()
        for bundle in lost:
            assert bundle.attempt is not None
            give_up(bundle, bundle.attempt, self._parts)
            if overdue is None:
                bundles = self._parts.failures.after_exit(bundle, code, len(lost) == 1, records)
            else:
                bundles = self._parts.failures.after_timeout(bundle, overdue, records)
            self._stages[bundle.stage.id].retry(bundle, bundles)
        blocks, state = self._parts.blocks, self._parts.state
        self._parts.folders.remove_blocks_of(worker.id, keep=blocks.files | blocks.kept | state.adopted_files())
        self._parts.blocks.ledger.writer_lost(worker.writer)
        self._has_changed = True

    def _finalize(self, attempt: Attempt) -> None:
        """Tell the worker that its bundle is committed, so that Beam's finalization callbacks run there."""
        if attempt.worker.has_exited:
            return  # they were lost with it
        request = beam_fn_api_pb2.InstructionRequest(instruction_id=new_instruction_id("finalize"))
        request.finalize_bundle.instruction_id = attempt.instruction_id
        self._finalizing[request.instruction_id] = attempt.worker
        attempt.worker.instruct(request)

    def _advance(self) -> None:
        """Recompute all watermarks, and let those stages and elements run whose side inputs are there."""
        self._has_changed = False
        buffers = self._parts.buffers
        readers: dict[LiveSideInput, int] = {}  # the watermark of all input that is still to read the side input
        for stage in self._all_stages:
            if not stage.is_ready:
                bounded = [buffers[s.buffer_id] for s in stage.plan.side_inputs if not s.is_unbounded]
                partitions = [buffers[r.buffer_id] for r in stage.plan.reads] if stage.plan.partitions else []
                is_complete = all(buffer.watermark() >= MAX for buffer in (*bounded, *partitions))
                # Beam's sinks remove files that their side inputs don't name: these must not change after a restart.
                is_saved = not (is_complete and bounded) or self._are_saved(stage)
                stage.is_ready = is_complete and is_saved
            sides = self._live_side_inputs(stage)
            for side_input, buffer in sides.items():
                side_input.advance(buffer.watermark())
            stage.add_ready()
            stage.advance(min((buffers[r.buffer_id].watermark() for r in stage.plan.reads), default=MAX))
            for side_input in sides:
                readers[side_input] = min(stage.input_watermark, readers.get(side_input, MAX))
        for side_input, watermark in readers.items():
            side_input.forget(watermark)

    def _are_saved(self, stage: StageRun) -> bool:
        """Return whether a checkpoint has the side inputs of a stage, which are complete."""
        return self._parts.checkpoint is None or self._parts.checkpoint.has_side_inputs(stage.id)

    def _live_side_inputs(self, stage: StageRun) -> dict[LiveSideInput, BufferRun]:
        """Return the unbounded side inputs of a stage, and the buffers that they belong to."""
        if stage.gate is None:
            return {}
        buffers = (self._parts.buffers[s.buffer_id] for s in stage.plan.side_inputs)
        return {buffer.live_side_input: buffer for buffer in buffers if buffer.live_side_input is not None}

    @property
    def _is_stopping(self) -> bool:
        return self._stop_at < float("inf")

    def _begin_to_stop(self) -> None:
        """Start no more bundles, and ask those that run to end early."""
        now = self._monotonic()
        self._stop_at = min(self._stop_at, now + self._parts.config.stop_timeout)
        for worker in self._staff.workers.values():
            self._end_early(worker, now)

    def _end_early(self, worker: Worker, now: float) -> None:
        """Ask the bundles of a worker to give back what they have not begun."""
        for bundle in worker.bundles.values():
            attempt = bundle.attempt
            if attempt is not None and not attempt.pending_splits and splits.can_split(bundle):
                bundle.split_at(now)

    def _has_stopped(self) -> bool:
        """Return whether the run is to stop, and either no bundle runs any more or the time for them is up.

        Bundles that still run count as not started: the checkpoint has their input.
        """
        if not self._is_stopping:
            return False
        if self._monotonic() >= self._stop_at:
            return True
        has_unsaved = self._parts.checkpoint is not None and self._parts.checkpoint.has_unsaved()
        is_running = any(worker.bundles for worker in self._staff.workers.values())
        return not (has_unsaved or self._finalizing or is_running)

    def _is_done(self) -> bool:
        if self._parts.checkpoint is not None and self._parts.checkpoint.has_unsaved():
            return False
        return not self._finalizing and all(stage.is_done() for stage in self._all_stages)

    # Ending workers

    def _end_workers(self, *, gracefully: bool) -> None:
        """Let workers tear down, or kill them. Blocks until they have exited or the timeouts have passed."""
        for worker in self._staff.workers.values():
            worker.is_stopping = True
            self._listener.worker_ends(worker)
            if gracefully and worker.connection is not None and worker.is_connected and not worker.bundles:
                worker.connection.finish()
            else:
                worker.kill()
        if gracefully:
            self._wait_for_exits(_FINISH_TIMEOUT_S)
            for worker in self._staff.workers.values():
                worker.kill()
        self._wait_for_exits(_KILL_TIMEOUT_S)
        for worker in self._staff.workers.values():
            self._listener.worker_ended(worker)  # it was killed, but the kernel takes long

    def _wait_for_exits(self, seconds: float) -> None:
        deadline = self._monotonic() + seconds
        while self._staff.workers and (left := deadline - self._monotonic()) > 0:
            try:
                message = self._messages.get(timeout=left)
            except queue.Empty:
                return
            if isinstance(message, Exited):
                self._handle_exit(message.worker, message.code)
            elif isinstance(message, CancelRequested):
                return  # the workers that are left are killed
