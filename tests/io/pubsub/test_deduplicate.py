"""The memory of ids: how long it lasts, that a pause does not shorten it, and that a failed bundle leaves nothing."""

from __future__ import annotations

import pickle
from typing import Any

from luminosity.io.pubsub.deduplicate import DropRepeated

_SHARD = 3


class Bag:
    """A bag state, as Beam gives it to a DoFn."""

    def __init__(self) -> None:
        self.values: list[bytes] = []

    def read(self) -> list[bytes]:
        return list(self.values)

    def add(self, value: bytes) -> None:
        self.values.append(value)

    def clear(self) -> None:
        self.values.clear()


class Runner:
    """Gives messages to the step, at the times of its clock."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.bags = [Bag() for _ in range(5)]
        self.step = DropRepeated(clock=lambda: self.now)

    def send(self, *ids: int) -> list[int]:
        """Return the ids that go through."""
        packed: Any = [(each.to_bytes(16, "big"), 0, str(each).encode()) for each in ids]
        return [int(each.value) for each in self.step.process((_SHARD, pickle.dumps(packed)), *self.bags)]


def test_an_id_goes_through_once_within_ten_minutes() -> None:
    runner = Runner()
    assert runner.send(1, 2, 1) == [1, 2]
    for _ in range(10):
        runner.now += 60
        assert runner.send(1, 2) == []


def test_ids_are_forgotten_later_so_that_the_state_is_bounded() -> None:
    runner = Runner()
    for number in range(1_000):
        assert runner.send(number) == [number]
        runner.now += 10
    assert sum(len(value) for bag in runner.bags for value in bag.values) < 16 * 5 * 20
    assert runner.send(1) == [1]
    assert runner.send(999) == []


def test_a_pause_forgets_nothing() -> None:
    runner = Runner()
    assert runner.send(1) == [1]
    runner.now += 86_400
    assert runner.send(1) == []


def test_another_process_knows_the_same() -> None:
    runner = Runner()
    assert runner.send(1, 2) == [1, 2]
    runner.step = DropRepeated(clock=lambda: runner.now)
    assert runner.send(2, 3) == [3]


def test_what_a_failed_bundle_has_let_through_goes_through_again() -> None:
    runner = Runner()
    assert runner.send(1) == [1]
    before = [list(bag.values) for bag in runner.bags]
    assert runner.send(2) == [2]
    for bag, values in zip(runner.bags, before, strict=True):
        bag.values = values  # the state of the failed bundle is gone, and its process goes on
    assert runner.send(3, 2, 1) == [3, 2]
