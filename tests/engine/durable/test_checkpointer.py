"""When input that waits for a checkpoint is passed on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from luminosity.engine.durable.checkpointer import Checkpointer
from luminosity.engine.loop.workers import CheckpointWritten


class StillClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class SlowToTell:
    """A copy that lacks something since a time. The thread that asks for the lag stands still before it goes on."""

    def __init__(self, clock: StillClock) -> None:
        self.since: float | None = clock.monotonic()
        self._clock = clock

    @property
    def lag_s(self) -> float:
        lag = self._clock.monotonic() - self.since if self.since is not None else 0.0
        self._clock.now += 5.0
        return lag


def test_input_of_patient_readers_waits_until_the_copy_has_its_checkpoint() -> None:
    clock = StillClock()
    copy: Any = SlowToTell(clock)
    released: list[int] = []
    buffer = SimpleNamespace(stable=SimpleNamespace(is_patient=True), release_saved=released.append)
    nothing: Any = SimpleNamespace(track=lambda: None)
    parts: Any = SimpleNamespace(stages=[], buffers={"b": buffer}, world=SimpleNamespace(clock=clock), state=nothing)
    checkpointer = Checkpointer(nothing, nothing, nothing, 1.0, parts, {}, copy)
    clock.now += 1.0
    checkpointer.written(CheckpointWritten(1, 1))
    assert released == [0]
    copy.since = None
    checkpointer.written(CheckpointWritten(1, 1))
    assert released == [0, 1]
