"""One worker on a node of a cluster, in the driver."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from luminosity.engine.resources.nodes import LeaseNeeds
from luminosity.engine.workers.launcher import OnExit

__all__ = ["KILLED", "NodeProcess"]

KILLED = -9  # the exit code of a worker that is gone, as if a signal had killed it

_USUAL_START_S = 10.0  # of a worker's place, on a busy cluster
_KILL_TIMEOUT_S = 3.0  # for its node to confirm the end of a worker; a frozen one never does


class NodeProcess:
    """Knows where the worker is and whether it has ended. Any thread may use it."""

    pid = 0  # of another machine, so that nobody here may look at it or signal it

    def __init__(
        self,
        worker_id: str,
        needs: LeaseNeeds,
        *,
        on_exit: OnExit,
        on_killed: Callable[[NodeProcess], None],
        on_ended: Callable[[NodeProcess], None],
    ) -> None:
        """``on_exit`` gets the exit code. ``on_killed`` is called to end the process, ``on_ended`` after its end."""
        self.worker_id = worker_id
        self.needs = needs
        self.node_id = ""  # empty until it has a place
        self.is_killed = False
        self._asked_at = time.monotonic()
        self._is_leaving = False
        self._on_exit: OnExit | None = on_exit
        self._on_killed = on_killed
        self._on_ended = on_ended
        self._has_ended = threading.Event()
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def kill(self) -> None:
        """End the process. Reports the end even if its node never confirms it: the worker is refused from then on."""
        with self._lock:
            if self.is_killed or self.has_ended:
                return
            self.is_killed = True
            self._timer = threading.Timer(_KILL_TIMEOUT_S, self.ended, (KILLED,))
            self._timer.daemon = True
            self._timer.start()
        self._on_killed(self)

    def waits_for(self) -> str:
        """Return the resources that the cluster has not given yet. The first seconds may be those of a usual start."""
        is_starting = self.node_id or time.monotonic() - self._asked_at < _USUAL_START_S
        return "" if is_starting else self.needs.words

    def node(self) -> str:
        """Return the id of its node; empty until it has a place."""
        return self.node_id

    def is_leaving(self) -> bool:
        """Return whether the worker's node will be gone soon."""
        return self._is_leaving

    def leave(self) -> None:
        """Note that the node will be gone soon."""
        self._is_leaving = True

    def ended(self, code: int) -> None:
        """Report the end, once."""
        with self._lock:
            if self.has_ended:
                return
            self._has_ended.set()
            # A timer may hold this object for seconds; it must not hold the run, and the files that it reads.
            on_exit, self._on_exit = self._on_exit, None
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        self._on_ended(self)
        if on_exit is not None:
            on_exit(code)

    @property
    def has_ended(self) -> bool:
        """Whether the end was reported."""
        return self._has_ended.is_set()
