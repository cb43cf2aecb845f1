"""Asks brokers how far the partitions go that a run reads, so that a lag is that of now and not of the last bundle."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from apache_beam.internal import pickler
from apache_beam.portability.api import beam_runner_api_pb2

from luminosity.core import TELLS_LAG

__all__ = ["LagWatch"]

_LOGGER = logging.getLogger(__name__)

_ASK_EVERY_S = 2.0  # short beside what an alert waits for
_LAST_S = 3.0  # how long the end of a run may wait for the last numbers
_END_S = 5.0  # for the thread to end


class _Probe(Protocol):
    def ends(self, partitions: Iterable[str]) -> Mapping[str, int]: ...

    def close(self) -> None: ...


class LagWatch:
    """Knows the ends of the partitions of sources, which a thread asks for while they are shown.

    The thread starts with the first question. The owner closes it.
    """

    def __init__(self, transforms: Iterable[beam_runner_api_pb2.PTransform]) -> None:
        """Make a watch of the steps of a plan that can tell their lag."""
        self._payloads = {each.unique_name: each.spec.payload for each in transforms if TELLS_LAG in each.annotations}
        self._wanted: dict[str, Collection[str]] = {}  # partitions by step
        self._ends: dict[str, Mapping[str, int]] = {}
        self._rounds = 0  # that are done
        self._changed = threading.Condition()
        self._is_hurried = self._is_closed = False
        self._thread: threading.Thread | None = None

    def ends(self, step: str, partitions: Collection[str], *, is_last: bool = False) -> Mapping[str, int]:
        """Return the last known ends of partitions of a step. They are seconds old at most while brokers answer.

        Does not wait, but for the ends of now if ``is_last``.
        """
        if step not in self._payloads or not partitions:
            return {}
        with self._changed:
            self._wanted[step] = partitions
            if self._thread is None:
                self._thread = threading.Thread(target=self._ask, name="luminosity-lag", daemon=True)
                self._thread.start()
            if is_last:
                done = self._rounds + 2  # one may have begun before
                self._is_hurried = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._rounds >= done, _LAST_S)
                self._is_hurried = False
            return self._ends.get(step, {})

    def close(self) -> None:
        """End the thread and its connections."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_END_S)

    def _ask(self) -> None:
        probes: dict[str, _Probe] = {}
        try:
            while not self._is_closed:
                with self._changed:
                    wanted = dict(self._wanted)
                for step, partitions in wanted.items():
                    if step not in probes:
                        probes[step] = _probe(self._payloads[step])
                    found = probes[step].ends(partitions)
                    with self._changed:
                        self._ends[step] = found
                with self._changed:
                    self._rounds += 1
                    self._changed.notify_all()
                    until = time.monotonic() + _ASK_EVERY_S
                    while not (self._is_closed or self._is_hurried) and (left := until - time.monotonic()) > 0:
                        self._changed.wait(left)
        except Exception:  # of code that the pipeline brings along: the run goes on with what its readers tell
            _LOGGER.warning("the lag is that of the last bundles: the broker can't be asked", exc_info=True)
        finally:
            for probe in probes.values():
                probe.close()


def _probe(payload: bytes) -> _Probe:
    dofn = pickler.loads(beam_runner_api_pb2.ParDoPayload.FromString(payload).do_fn.payload)[0]
    return dofn.lag_probe()
