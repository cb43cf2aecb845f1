"""A fake device without hardware, a fake model for it, and a clock that tests move."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from apache_beam.ml.inference.base import PredictionResult

from luminosity.errors import InvalidArgument
from luminosity.inference.blocks import Block, rows
from luminosity.inference.handler import Handler

__all__ = ["Clock", "FakeBatch", "FakeClock", "FakeDevice", "FakeDeviceHandler", "FakeModel", "FakeOutOfMemory"]


class Clock(Protocol):
    """The functions of a clock; the module ``time`` is one."""

    def monotonic(self) -> float:
        """Return the time in seconds."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Wait for ``seconds``."""
        ...


class FakeClock:
    """A clock that stands still until ``advance`` or ``sleep`` moves it. Sleeping takes no real time.

    >>> clock = FakeClock()
    >>> clock.advance(1.5)
    >>> clock.sleep(1)
    >>> clock.monotonic()
    2.5
    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._lock = threading.Lock()

    def monotonic(self) -> float:
        """Return the time in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock."""
        with self._lock:
            self._now += seconds

    def sleep(self, seconds: float, /) -> None:
        """Move the clock instead of waiting."""
        self.advance(max(0.0, seconds))


class FakeOutOfMemory(RuntimeError):
    """The error of a device on which a batch does not fit."""


@dataclass(frozen=True)
class FakeBatch:
    """A batch that a device was given; one line in its log."""

    pid: int
    model: str
    count: int  # examples
    cost: float  # summed over the examples
    padded_cost: float  # the cost of the longest example times their number
    began_at: float  # on the device's clock
    fitted: bool


@dataclass(frozen=True)
class FakeDevice:
    """A device with memory for batches that cost at most ``memory``.

    It computes one batch at a time in each process. A batch takes ``seconds_per_batch`` plus ``seconds_per_cost`` times
    its padded cost. The batches of all processes are logged in the file ``log``; ``batches()`` reads them.
    """

    memory: float
    seconds_per_batch: float = 0.0
    seconds_per_cost: float = 0.0
    log: str | os.PathLike[str] | None = None
    clock: Clock | None = None

    def batches(self) -> list[FakeBatch]:
        """Return all batches so far, including those that did not fit."""
        if self.log is None:
            raise InvalidArgument("found a device without a log, expected one that logs batches", fix="pass log=PATH")
        if not os.path.exists(self.log):
            return []
        with open(self.log) as file:
            return [FakeBatch(**json.loads(line)) for line in file]

    def time(self) -> Clock:
        """Return the device's clock."""
        return self.clock if self.clock is not None else time

    def record(self, batch: FakeBatch) -> None:
        """Log a batch."""
        if self.log is not None:
            # A line is one write, so lines of several processes do not mix.
            with open(self.log, "a", buffering=1) as file:
                file.write(json.dumps(asdict(batch)) + "\n")


class FakeModel:
    """A loaded model, which knows until when its device is busy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy_until = 0.0

    def take_turn(self, now: float, seconds: float) -> float:
        """Reserve the device for ``seconds``, and return when the batch is done."""
        with self._lock:
            self._busy_until = max(now, self._busy_until) + seconds
            return self._busy_until


@dataclass(frozen=True)
class _Outputs:
    values: Block
    done_at: float


class FakeDeviceHandler(Handler[Any, PredictionResult, FakeModel]):
    """A handler of a model whose batches cost the longest example times their number, as padded batches do.

    >>> handler = FakeDeviceHandler(FakeDevice(memory=8), answer=str.upper)
    >>> [result.inference for result in handler.run_inference(["a", "bcd"], handler.load_model())]
    ['A', 'BCD']
    >>> handler.run_inference(["abcdefgh", "a"], handler.load_model())
    Traceback (most recent call last):
    luminosity.testing.fake_device.FakeOutOfMemory: CUDA out of memory (fake). Tried a batch of 2 x 8 = 16...

    ``predict`` returns at once; ``wait`` waits until the device is done.

    Args:
        device: the device that computes.
        cost_of: returns the cost of an example; by default its length.
        answer: returns the prediction for an example; by default the example itself.
        poison: examples that raise a ``ValueError`` in the hook that ``poison_in`` names.
        poison_in: ``"prepare"`` or ``"predict"``.
        seconds_per_prepare: how long a call of ``prepare`` takes.
        seconds_to_load: how long a call of ``load_model`` takes.
        model_memory: the bytes that ``memory`` returns.
        name: identifies the model in the log and as ``model_id``.
    """

    def __init__(
        self,
        device: FakeDevice,
        *,
        cost_of: Callable[[Any], float] = len,
        answer: Callable[[Any], Any] = lambda example: example,
        poison: Collection[Any] = (),
        poison_in: Literal["prepare", "predict"] = "predict",
        seconds_per_prepare: float = 0.0,
        seconds_to_load: float = 0.0,
        model_memory: int | None = None,
        name: str = "fake",
    ) -> None:
        super().__init__()
        self._device = device
        self._cost_of = cost_of
        self._answer = answer
        self._poison = poison
        self._poison_in = poison_in
        self._seconds_per_prepare = seconds_per_prepare
        self._seconds_to_load = seconds_to_load
        self._model_memory = model_memory
        self._name = name

    @property
    def model_id(self) -> str:
        """The ``name`` that the handler was given."""
        return self._name

    def load_model(self) -> FakeModel:
        """Sleep for ``seconds_to_load``, and return a model whose device is idle."""
        self._device.time().sleep(self._seconds_to_load)
        return FakeModel()

    def memory(self, model: FakeModel) -> int | None:
        """Return ``model_memory``."""
        return self._model_memory

    def prepare(self, block: Block) -> Block:
        """Sleep for ``seconds_per_prepare``, look for poison, and return the examples unchanged."""
        self._device.time().sleep(self._seconds_per_prepare)
        self._look_for_poison(block, "prepare")
        return block

    def cost(self, prepared: Block) -> npt.NDArray[np.float64]:
        """Return what ``cost_of`` returns for each example."""
        return np.array([self._cost_of(example) for example in rows(prepared)], np.float64)

    def predict(self, model: FakeModel, batch: Block, inference_args: dict[str, Any] | None = None) -> _Outputs:
        """Log the batch and reserve the device, without waiting. Raises ``FakeOutOfMemory`` if it does not fit."""
        costs = self.cost(batch)
        longest = costs.max(initial=0.0)
        padded_cost = float(longest * len(costs))
        now = self._device.time().monotonic()
        fitted = padded_cost <= self._device.memory
        record = FakeBatch(os.getpid(), self._name, len(costs), float(costs.sum()), padded_cost, now, fitted)
        self._device.record(record)
        if not fitted:
            raise FakeOutOfMemory(
                f"CUDA out of memory (fake). Tried a batch of {len(costs)} x {longest:g} = {padded_cost:g}, "
                f"expected at most {self._device.memory:g}."
            )
        self._look_for_poison(batch, "predict")
        seconds = self._device.seconds_per_batch + self._device.seconds_per_cost * padded_cost
        return _Outputs([self._answer(example) for example in rows(batch)], model.take_turn(now, seconds))

    def wait(self, outputs: _Outputs) -> None:
        """Sleep until the device is done with the batch."""
        clock = self._device.time()
        clock.sleep(max(0.0, outputs.done_at - clock.monotonic()))

    def collect(self, outputs: _Outputs) -> Block:
        """Return what ``answer`` returned for each example."""
        return outputs.values

    def _look_for_poison(self, block: Block, hook: str) -> None:
        if hook != self._poison_in:
            return
        for example in rows(block):
            if example in self._poison:
                raise ValueError(f"poison (fake): {example!r}")
