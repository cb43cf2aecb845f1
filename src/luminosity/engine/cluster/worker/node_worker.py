"""A worker on a node of a cluster: how it differs from one of a single machine.

Its blocks go through the node's agent, it connects by TLS, and what it prints goes to the driver. Imports neither Beam
nor gRPC before the worker runs: the agent, which hands it to the fork server, has neither.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from luminosity.engine.cluster.worker.local_paths import LocalPaths, guard
from luminosity.engine.workers.request import WorkerRequest

if TYPE_CHECKING:
    from luminosity.engine.cluster.worker.node_channel import FileChannel, ObjectChannel

__all__ = ["NodeWorker"]

_LONGEST_LINE = 1 << 16  # characters held back while a line has no end


@dataclass(frozen=True)
class NodeWorker:
    """Runs a worker. The driver makes it, the agent adds what it knows of its node, the worker's process calls it."""

    access: dict[str, str] = field(repr=False)  # the fields of security.WorkerAccess, which hold a token
    paths: LocalPaths
    read_by_driver: Sequence[str]  # outputs whose elements the driver reads itself
    socket: str = ""  # of the node's agent
    shared_folder: str = ""  # a folder that all nodes see, in which blocks are files; empty if they are objects

    def __call__(self, request: WorkerRequest) -> int:
        """Serve the driver until it has no more work. Returns the exit code of the process."""
        import grpc

        from luminosity.engine.cluster import security
        from luminosity.engine.workers import harness

        security.use(security.WorkerAccess(**self.access), request.url)
        if self.paths.copy:
            harness.ReportingHarness.copied = self.paths.copy, self.paths.source
        if self.paths.copy or self.paths.is_apart:
            guard(self.paths)
        channel = self._channel(request.worker_id)
        errors = sys.stderr
        _print_through_logs()
        try:
            harness.run(request, channel)
        except grpc.RpcError as error:
            print(f"lost the connection to the driver: {error}", file=errors)  # it is gone, or has given this worker up
            return 1
        return 0

    def _channel(self, worker_id: str) -> type[FileChannel | ObjectChannel]:
        from luminosity.engine.cluster.worker.block_socket import BlockClient
        from luminosity.engine.cluster.worker.node_channel import FileChannel, ObjectChannel, file_writer
        from luminosity.engine.workers.harness import ReportingHarness

        kind: type[FileChannel | ObjectChannel]
        if self.shared_folder:
            kind = FileChannel
            FileChannel.writer = file_writer(self.shared_folder, worker_id)
        else:
            kind = ObjectChannel
            ObjectChannel.worker_id = worker_id
            ObjectChannel.agent = agent = BlockClient(self.socket, worker_id)
            ReportingHarness.on_failed = staticmethod(agent.end)  # it may not have asked for its input yet
        kind.read_by_driver = frozenset(self.read_by_driver)
        return kind


class _LoggedStream(io.TextIOBase):
    """A text stream whose lines are log records. Any thread may write."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._logger.setLevel(logging.INFO)
        self._rest = ""
        self._lock = threading.Lock()
        self._here = threading.local()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            if len(self._rest) > _LONGEST_LINE:
                lines.append(self._rest)
                self._rest = ""
        for line in lines:
            self._print(line)
        return len(text)

    def _print(self, line: str) -> None:
        if getattr(self._here, "is_printing", False):
            return  # a handler of log records prints itself
        self._here.is_printing = True
        try:
            self._logger.info("%s", line.rstrip("\r").rsplit("\r", 1)[-1])
        finally:
            self._here.is_printing = False


def _print_through_logs() -> None:
    """Send what this process prints from now on to the driver's terminal, with the log messages."""
    from luminosity.engine.fnapi.connection import PRINTED

    for name in ("stdout", "stderr"):
        setattr(sys, name, _LoggedStream(logging.getLogger(f"{PRINTED}.{name}")))
