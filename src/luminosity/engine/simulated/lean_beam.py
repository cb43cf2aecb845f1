"""What simulated workers leave out of Beam's worker: threads, real time, and metrics that nobody reads in a simulation.

It has no part in what a bundle does to elements, and was a fifth of the time that simulated runs took.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from apache_beam.portability.api import metrics_pb2
from apache_beam.runners.worker import bundle_processor, statesampler
from apache_beam.transforms import userstate

__all__ = ["FUTURES", "NO_SHORT_IDS", "Processor", "Sampler", "dofn_specs"]

_stock_specs = userstate.get_dofn_specs
_specs: dict[type, Any] = {}  # of state and timers, by class of DoFn: a process knows few


class Sampler(statesampler.StateSampler):
    """Beam's sampler without its thread: it would measure real time, in which nothing lasts."""

    def start(self) -> None:
        """Begin a bundle."""
        self.tracked_thread = threading.current_thread()
        statesampler.set_current_tracker(self)
        self.started = True

    def stop(self) -> None:
        """End a bundle."""
        statesampler.set_current_tracker(None)
        self.finished = True


class Processor(bundle_processor.BundleProcessor):
    """Beam's bundle processor, which tells the metrics of steps alone: nobody looks at counts and times of elements."""

    def monitoring_infos(self) -> list[metrics_pb2.MonitoringInfo]:
        """Return the metrics that steps have set."""
        found: dict[Any, metrics_pb2.MonitoringInfo] = {}
        for transform_id, operation in self.ops.items():
            found.update(operation.user_monitoring_infos(transform_id))
        return list(found.values())


class _NoShortIds:
    """Stands for Beam's cache of short ids of metrics, which the engine does not use."""

    def get_short_id(self, _: metrics_pb2.MonitoringInfo) -> str:
        return ""


class _Caller:
    """An executor that calls functions at once, on the thread that asks for it."""

    def __init__(self, **_: Any) -> None:
        pass

    def __enter__(self) -> _Caller:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, call: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result(call(*args))
        return future


NO_SHORT_IDS = _NoShortIds()
# Stands for the module ``concurrent`` where Beam makes a thread for each processor that it makes.
FUTURES = SimpleNamespace(
    futures=SimpleNamespace(ThreadPoolExecutor=_Caller, TimeoutError=concurrent.futures.TimeoutError)
)


def dofn_specs(dofn: Any) -> Any:
    """Return the state and timers of a DoFn. Looks at each class once, where Beam does so ten times a processor."""
    kind = type(dofn)
    if any(name.startswith("_inspect_") for name in dir(kind)):
        return _stock_specs(dofn)  # it wraps a function, and its class does not say which
    if kind not in _specs:
        _specs[kind] = _stock_specs(dofn)
    return _specs[kind]
