"""A worker's proxy of the shared host: requests, responses, and errors if the host can't be reached."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from luminosity import Handler
from luminosity.errors import HostUnavailable
from luminosity.inference.host.interface import LaneSettings, Outcome
from luminosity.inference.ipc.folder import HostFolder
from luminosity.inference.options import ModelCacheConfig
from luminosity.inference.shared_host import connections
from luminosity.inference.shared_host.proxy import ProxyLane, SharedHostProxy
from tests.processes import wait_for

_WAIT_S = 60.0


class Doubles(Handler[Any, Any, Any]):
    def load_model(self) -> None:
        return None

    def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        return [2 * example for example in batch]


@pytest.fixture
def run_id() -> Iterator[str]:
    made = uuid.uuid4().hex
    yield made
    assert wait_for(lambda: not os.path.exists(HostFolder(made).path), _WAIT_S), "the folder of the host is still there"


@pytest.fixture
def host(run_id: str) -> Iterator[SharedHostProxy]:
    made = SharedHostProxy(run_id, None, None, ModelCacheConfig())
    yield made
    for lane, users in list(made._lanes.values()):
        for _ in range(users):
            made.leave(lane)


def entered(host: SharedHostProxy, name: str, handler: Handler[Any, Any, Any]) -> ProxyLane:
    return host.enter(("step", name, ""), lambda: handler, LaneSettings())


def outcomes(host: SharedHostProxy, lane: ProxyLane, examples: list[Any]) -> list[Outcome]:
    session = host.open()
    try:
        session.submit(lane, examples, np.ones(len(examples)), None)
        return [outcome for some in session.finish() for outcome in some]
    finally:
        session.close()


def values(host: SharedHostProxy, lane: ProxyLane, examples: list[Any]) -> list[Any]:
    return [value for outcome in outcomes(host, lane, examples) for value in outcome.values or []]


def kill_host(run_id: str) -> None:
    (process,) = [each for each in psutil.Process().children() if run_id in _command(each)]
    process.send_signal(signal.SIGKILL)
    assert wait_for(lambda: not process.is_running(), _WAIT_S)


def _command(process: psutil.Process) -> list[str]:
    """Return the command line; an empty one if the process has just ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_lane_that_is_entered_after_a_death_does_not_hide_the_others(host: SharedHostProxy, run_id: str) -> None:
    one = entered(host, "one", Doubles())
    assert values(host, one, [1]) == [2]
    kill_host(run_id)
    entered(host, "other", Doubles())
    assert values(host, one, [3]) == [6]
    host.leave(one)


class ReturnsLocks(Doubles):
    def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        return [threading.Lock() for _ in batch]


class Unreadable:
    """Can be pickled, and not unpickled."""

    def __reduce__(self) -> Any:
        return _raise_unreadable, ()


def _raise_unreadable() -> None:
    raise ValueError("not to be read")


def test_what_cannot_be_pickled_is_an_error_and_no_death_of_the_host(host: SharedHostProxy, run_id: str) -> None:
    lane = entered(host, "locks", ReturnsLocks())
    with pytest.raises(TypeError, match=r"found a prediction that can't be sent to another process: .*lock"):
        outcomes(host, lane, [1])
    with pytest.raises(ValueError, match="not to be read"):
        outcomes(host, lane, [Unreadable()])
    good = entered(host, "good", Doubles())
    assert values(host, good, [3]) == [6]


def test_an_error_of_the_model_arrives_with_its_class_and_its_line(host: SharedHostProxy) -> None:
    class OutOfLuck(Exception):
        """A class of a script: other processes can't import it by its name."""

    class Unlucky(Doubles):
        def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
            raise OutOfLuck("thirteen")

    (outcome,) = outcomes(host, entered(host, "unlucky", Unlucky()), [13])
    assert isinstance(outcome.error, OutOfLuck)
    assert outcome.error.args == ("thirteen",)
    told = "".join(traceback.format_exception(outcome.error))
    assert 'raise OutOfLuck("thirteen")' in told
    assert __file__ in told


class Deadly(Doubles):
    def load_model(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_model_that_kills_its_host_ends_with_a_reason(host: SharedHostProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_DEATHS", 1)
    lane = entered(host, "deadly", Deadly())
    with pytest.raises(HostUnavailable, match="the shared model host died 2 times before it responded"):
        host.load(lane)


def test_a_host_that_was_told_of_nothing_does_not_stay(host: SharedHostProxy) -> None:
    class Unready(Doubles):
        def set_environment_vars(self) -> None:
            raise ValueError("not set")

    with pytest.raises(ValueError, match="not set"):
        entered(host, "unready", Unready())


def test_stats_of_a_version_that_only_another_worker_knows_are_not_lost(host: SharedHostProxy, run_id: str) -> None:
    other = SharedHostProxy(run_id, None, None, ModelCacheConfig())
    old, new = entered(host, "old", Slow(max_batch_size=1)), entered(other, "new", Doubles())
    session = host.open()
    session.submit(old, list(range(6)), np.ones(6), None)
    other.take_over(old, new)
    assert sum(len(outcome.places) for some in session.finish() for outcome in some) == 6
    stats = session.take_stats()
    assert sum(batch.count for batches in stats.values() for batch in batches) == 6
    session.close()
    other.leave(new)


class Slow(Doubles):
    def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        time.sleep(0.5)
        return super().predict(model, batch)
