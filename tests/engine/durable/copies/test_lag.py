"""Tests of what a run says about its copy, and when."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from luminosity.engine.data.world import WallClock, World
from luminosity.engine.durable.copies import shipper
from luminosity.engine.durable.copies.copied import CheckpointCopy, CopyNote
from luminosity.engine.durable.copies.lease import Lease
from luminosity.engine.durable.inspection import inspect
from luminosity.errors import CheckpointFailed
from tests.engine.durable.copies.test_shipping import Copied
from tests.engine.durable.test_ends import wait_until


class LateClock(WallClock):
    """A clock that a test moves forward."""

    def __init__(self) -> None:
        self.later = 0.0
        real = self.monotonic
        self.monotonic = lambda: real() + self.later  # pyright: ignore[reportIncompatibleVariableOverride]


@pytest.fixture
def clock() -> LateClock:
    return LateClock()


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Copied]:
    monkeypatch.setattr(shipper, "_SHIP_S", 0.001)
    monkeypatch.setattr(shipper, "_LONGEST_PAUSE_S", 0.001)
    copied = Copied(tmp_path)
    yield copied
    copied.close()


def test_a_late_copy_is_warned_of_once_and_shown(
    copied: Copied, clock: LateClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    world = World(clock=clock)
    copy = CheckpointCopy(
        copied.place, Lease(copied.place, "f00", 3600.0, world), CopyNote("f00", copied.place.address), world
    )
    copied.write(3)
    copy.begin(copied.folder)
    wait_until(lambda: copy.lag_s == 0.0)
    copy.check()
    assert not caplog.records
    copied.place.fails = lambda name: name.startswith("segment-")
    copied.write(3)
    wait_until(lambda: "the copy can't be written, the run goes on: the line is cut" in caplog.text)
    copy.check()
    clock.later = 90.0
    copy.check()
    copy.check()
    assert caplog.text.count("lacks what the run did in the last 90 s: the line is cut") == 1
    clock.later = 800.0
    copy.check()
    assert caplog.text.count("lacks what the run did") == 2
    wait_until(lambda: (found := inspect(str(copied.path)).copy) is not None and found.error == "the line is cut")
    copied.place.fails = lambda _: False
    wait_until(lambda: copy.lag_s == 0.0)
    copy.check()
    assert "is complete again" in caplog.text
    clock.later = 100_000.0  # nobody could renew the lease meanwhile
    with pytest.raises(CheckpointFailed, match="could not be renewed for 3600 s"):
        copy.check()
    copy.close()
