"""Starts a run's workers with fork servers, and a fork server again when it has died."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from luminosity._shared.text import LOST_WITH_FORK_SERVER
from luminosity.engine.workers.launcher import (
    ForkServer,
    Launcher,
    LocalProcess,
    OnExit,
    Process,
    SpawnLauncher,
    forks,
)
from luminosity.engine.workers.request import WorkerRequest
from luminosity.errors import Fix, WorkerStartFailed

if TYPE_CHECKING:
    from luminosity.engine.resources.python_environments import PythonEnvironment

__all__ = ["ForkLauncher", "launcher"]

_LOGGER = logging.getLogger(__name__)

_MOST_DEATHS = 10  # of one fork server, without a bundle that was done in between: then something keeps killing it
_ADVICE = (
    "look what ends processes of this machine, such as the kernel when memory runs out (dmesg); "
    "--worker_start=spawn needs no fork server"
)


def launcher(
    method: str,
    preload: Sequence[str] = (),
    environments: Iterable[PythonEnvironment] = (),
    openmp: Sequence[str] | None = None,
    *,
    progress: Callable[[], int],
) -> Launcher:
    """Return the launcher for ``--worker_start``: ``fork``, ``spawn``, or ``auto``, which forks where that is safe.

    The fork server imports the modules ``preload`` before it forks the next worker, and ``openmp`` as
    :meth:`ForkServer.of_run` says. Each of the ``environments`` has a fork server of its own. ``progress`` returns how
    many bundles of the run are done.
    """
    if not forks(method):
        return SpawnLauncher()

    def of(find: Callable[[], ForkServer]) -> Callable[[], ForkServer]:
        def living() -> ForkServer:
            server = find()
            if preload:
                server.preload(preload)
            return server

        return living

    servers = {"": of(lambda: ForkServer.of_run(openmp))}
    servers |= {each.python: of(lambda each=each: ForkServer.shared(each)) for each in environments}
    return ForkLauncher(servers, progress)


class _NeverStarted(LocalProcess):
    """A worker whose fork server died before it was forked. Its exit is reported."""

    pid = 0

    def kill(self) -> None:
        """Do nothing: it has ended."""


class ForkLauncher:
    """Starts workers with the fork servers of a run, by interpreter. Only the loop's thread uses it.

    When a fork server has died, its workers end, and the next start of a worker starts it again.
    """

    def __init__(self, servers: Mapping[str, Callable[[], ForkServer]], progress: Callable[[], int]) -> None:
        """Start the fork servers, without a wait for them.

        ``servers`` return living ones. ``progress`` returns a number that grows with what the run has done.
        """
        self._find = dict(servers)
        self._servers = {python: find() for python, find in servers.items()}
        self._progress = progress
        self._done = 0  # the progress at the last death
        self._deaths = 0  # since there was progress

    def start(self, request: WorkerRequest, on_exit: OnExit) -> Process:
        """Fork a worker. Blocks until it runs, or until the fork server has died, which counts as the worker's exit.

        Raises ``WorkerStartFailed`` if the fork server can't fork, or dies again and again.
        """
        server = self._living(request.python)
        try:
            return server.start(request, on_exit)
        except WorkerStartFailed:
            if server.is_alive() or server.broke():
                raise
            # It may have forked a worker and not reported it. So the next one has another id.
            on_exit(LOST_WITH_FORK_SERVER)
            return _NeverStarted()

    def _living(self, python: str) -> ForkServer:
        server = self._servers[python]
        if server.is_alive() or server.broke():
            return server
        done = self._progress()
        self._deaths = 1 if done > self._done else self._deaths + 1
        self._done = done
        if self._deaths >= _MOST_DEATHS:
            raise WorkerStartFailed(
                f"{server.name}, the process that starts workers, {server.describe_end()}, {self._deaths} times in a "
                "row without a bundle that was done in between",
                fix=Fix(_ADVICE, command=_ADVICE),
            )
        _LOGGER.warning(
            "%s, the process that starts workers, %s: it is started again, and the bundles of its workers are repeated",
            server.name,
            server.describe_end(),
        )
        self._servers[python] = self._find[python]()
        return self._servers[python]
