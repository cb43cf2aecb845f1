"""A host with a lane for each of many keys: the work per lane does not grow with the number of lanes."""

from __future__ import annotations

from typing import Any

import pytest

from luminosity import Handler
from luminosity.inference.batching import BatchPolicy
from luminosity.inference.host import lane as lane_module
from luminosity.inference.host.host import ModelHost
from luminosity.inference.host.interface import LaneSettings


class Adds(Handler[int, int, int]):
    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def load_model(self) -> int:
        return self._number

    def memory(self, model: int) -> int:
        return 8

    def predict(self, model: int, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        return [example + model for example in batch]


def count_looks(monkeypatch: pytest.MonkeyPatch, lanes: int) -> int:
    """Ask every lane twice, all in one session; return how often the host looked at any lane."""
    looks = 0

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal looks
            looks += 1
            return function(*args, **kwargs)

        return call

    host = ModelHost(budget=1_000_000)
    entered = [host.enter(n, lambda n=n: Adds(1000 * n), LaneSettings()) for n in range(lanes)]
    with monkeypatch.context() as patch:
        patch.setattr(BatchPolicy, "next", counted(BatchPolicy.next))
        patch.setattr(lane_module.Lane, "has_work", counted(lane_module.Lane.has_work))
        for _ in range(2):
            session = host.open()
            for number, lane in enumerate(entered):
                session.submit(lane, [1, 2], [1.0, 1.0], number)
            found = [outcome for outcomes in session.finish() for outcome in outcomes]
            session.close()
            values = {(each.tag, value) for each in found for value in each.values or []}
            assert values == {(n, 1000 * n + example) for n in range(lanes) for example in (1, 2)}
    host.check_integrity()
    for lane in entered:
        host.leave(lane)
    return looks


def test_looks_grow_with_the_lanes_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = count_looks(monkeypatch, 50), count_looks(monkeypatch, 400)
    assert few > 50
    assert many < 3 * 8 * few
