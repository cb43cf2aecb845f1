"""The threads around a device: one cuts and stacks batches, one computes, one hands back."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from luminosity.errors import EndpointError
from luminosity.inference.blocks import as_block
from luminosity.inference.host.counting import as_part_of
from luminosity.inference.host.work import Batch, Stage

if TYPE_CHECKING:
    from luminosity.inference.host.host import ModelHost

__all__ = ["DeviceThreads"]

_SWITCH_S = 0.0005
"""How long another thread may keep the interpreter from the one that gives the device work, and loses it each time."""


class DeviceThreads:
    """Works until the host has no batch for it. Between the threads are queues; None in one ends who takes it."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host
        self._to_compute: queue.Queue[Batch | None] = queue.Queue(1)
        self._to_return: queue.Queue[tuple[Batch, Any] | None] = queue.Queue(2)
        self.computers = 0
        sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))
        self._spawn("schedule", self._schedule)
        self._spawn("return", self._hand_back)

    def grow_to(self, computers: int) -> None:
        """Have so many threads that compute."""
        while self.computers < computers:
            self.computers += 1
            self._spawn("compute", self._compute)

    def replace_thread_of(self, batch: Batch) -> None:
        """The thread that has this batch is given up."""
        if batch.stage is Stage.COMPUTING:
            batch.lane.model.slots.release()
            self._spawn("compute", self._compute)
        elif batch.stage is Stage.RETURNING:
            self._spawn("return", self._hand_back)

    def _spawn(self, name: str, target: Callable[[], None]) -> None:
        def run() -> None:
            try:
                target()
            except BaseException as error:
                with self._host.changed:
                    self._host.broken = error
                    self._host.wake()
                raise

        threading.Thread(target=run, name=f"model-host-{name}", daemon=True).start()

    def _schedule(self) -> None:
        while (batch := self._host.next_batch()) is not None:
            if self._stack(batch):
                self._to_compute.put(batch)  # Bounded by the batch that computes now, or by its timeout.
            del batch  # Its inputs are large.
        self._to_compute.put(None)
        self._to_return.put(None)

    def _stack(self, batch: Batch) -> bool:
        handler, stats = batch.lane.handler, batch.stats
        try:
            begun = self._host.now()
            collated = handler.collate(batch.prepared())
            stats.num_bytes = handler.get_num_bytes(collated)
            stats.count = handler.num_examples(collated, batch.count)
            stacked = self._host.now()
            batch.inputs = handler.transfer(collated)
            stats.collate, stats.transfer = stacked - begun, self._host.now() - stacked
        except BaseException as error:
            self._host.fates.failed(batch, error)
            return False
        return True

    def _compute(self) -> None:
        while (batch := self._to_compute.get()) is not None:
            slots = batch.lane.model.slots
            slots.acquire()  # Bounded as the batches that hold them are.
            with self._host.changed:
                batch.due_from, batch.stage = self._host.now(), Stage.COMPUTING
            outputs = self._predict(batch)
            with self._host.changed:
                if batch.abandoned:
                    return  # Another thread has taken this one's place, and its slot.
                batch.stage = Stage.WAITING
                slots.release()
            if outputs is not None:
                self._to_return.put((batch, outputs[0]))
            del batch, outputs  # They hold memory of the device.
        self._to_compute.put(None)  # For the next of these threads.

    def _predict(self, batch: Batch) -> tuple[Any] | None:
        lane = batch.lane
        with self._host.changed:
            copy = lane.model.next_copy()
        if copy is None:
            self._host.fates.put_back(batch)
            return None
        with as_part_of(batch.parts[0][0].session.step):
            batch.started, batch.started_ns = self._host.now(), lane.settings.clock.time_ns()
            try:
                return (lane.handler.predict(copy[0], batch.inputs, lane.settings.inference_args),)
            except BaseException as error:
                copy = None  # The error knows this frame, and may be kept for longer than the model.
                # An endpoint that can't be used fails all alike: looking for the example at fault would find none.
                self._host.fates.failed(batch, error, by_its_examples=not isinstance(error, EndpointError))
                return None

    def _hand_back(self) -> None:
        while (item := self._to_return.get()) is not None:
            batch = item[0]
            with self._host.changed:
                if batch.abandoned:
                    continue
                batch.stage = Stage.RETURNING
            self._collect(*item)
            if batch.abandoned:
                return  # Another thread has taken this one's place.
            del batch, item

    def _collect(self, batch: Batch, outputs: Any) -> None:
        handler = batch.lane.handler
        try:
            with as_part_of(batch.parts[0][0].session.step):
                handler.wait(outputs)
                ready, ready_ns = self._host.now(), batch.lane.settings.clock.time_ns()
                values, model_id = as_block(handler.collect(outputs)), handler.model_id
            if len(values) != batch.count:
                raise ValueError(
                    f"{handler} returned {len(values)} predictions for {batch.count} examples; "
                    "it must return one for each, in their order"
                )
        except BaseException as error:
            self._host.fates.failed(batch, error)
        else:
            self._host.fates.succeeded(batch, values, model_id, ready, ready_ns)
