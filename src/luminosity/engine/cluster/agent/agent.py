"""The node agent: the actor on each node that a run uses. It owns the run's folder there and forks its workers."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from luminosity._shared.model_sizes import NODE_FOLDER_VARIABLE
from luminosity.engine.cluster import packages, shipping
from luminosity.engine.cluster.agent.block_desk import BlockDesk, RayStore, read_first
from luminosity.engine.cluster.agent.forked_workers import Exit, ForkedWorkers
from luminosity.engine.cluster.agent.node_folder import NodeFolder
from luminosity.engine.cluster.agent.node_load import NodeLoad, NodeSample
from luminosity.engine.cluster.worker.node_worker import NodeWorker
from luminosity.engine.workers.request import WorkerRequest
from luminosity.errors import WorkerStartFailed
from luminosity.extras import require

__all__ = ["SHARE_CHECKPOINT", "NodeAgent", "RunOnNodes", "check_shared_folder"]

SHARE_CHECKPOINT = (
    "pass a folder of a file system that all nodes mount at the same path, such as NFS, or leave out --checkpoint_dir"
)


@dataclass(frozen=True)
class RunOnNodes:
    """What each node needs to know of a run."""

    run_id: str
    files: Mapping[str, bytes]  # small ones that all workers need, by name
    versions: Mapping[str, str]  # of the driver
    marker: str  # a file in the folder that all nodes share for blocks; empty if there is none
    preload: Sequence[str]  # modules that workers will import
    is_in_place: bool = False  # whether workers run in the driver's working folder, which all nodes see


class NodeAgent:
    """Serves one run on one node. The driver makes it: an actor, which Ray ends with the run, or an object of its own.

    It owns the run's folder, forks the workers, moves their blocks to and from the cluster's store, holds second copies
    of blocks, and samples the node. It holds no accelerator and runs no user code.
    """

    def __init__(self, run: RunOnNodes, sent: Any, *, is_driver: bool = False) -> None:
        """Make the run's folder on this node.

        ``sent`` is the archive of the user's code. ``is_driver`` says that this is the driver's process.
        """
        self._run = run
        self._shared_folder = ""  # for blocks, if all nodes see one
        self._node_id = _this_node()
        with contextlib.ExitStack() as made:  # if one of these fails, those before it are undone
            self._folder = NodeFolder.open(run.run_id, run.files, self._node_id)
            made.callback(self._folder.remove)
            self._desk = BlockDesk(os.path.join(self._folder.memory, "blocks"), _fetch)
            made.callback(self._desk.close)
            self._workers = ForkedWorkers(run.preload, is_shared=is_driver)  # imports Beam meanwhile
            made.callback(self._workers.close)
            self._sent = shipping.unpack(sent, os.path.join(self._folder.path, "sent"), in_place=run.is_in_place)
            self._load = NodeLoad(self._node_id)
            made.callback(self._load.close)
            self._made = made.pop_all()
        atexit.register(self.close)

    def install(self) -> None:
        """Check the node, and install the packages that the run brings along.

        Call it once, before the node's first worker starts. May take minutes. Raises :class:`WorkerStartFailed`: not
        the constructor, whose errors Ray does not pass on.
        """
        if wrong := shipping.check_versions(self._run.versions):
            raise WorkerStartFailed(wrong)
        if self._run.marker:
            self._shared_folder = check_shared_folder(self._run.marker)
        installed = packages.install(self._sent.root, os.path.join(self._folder.path, "packages"))
        self._sent = replace(self._sent, installed=installed)

    # Workers

    def start(self, request: WorkerRequest, worker: NodeWorker) -> None:
        """Fork a worker. Does not wait for it; :meth:`exits` tells if it fails."""
        folder, sent = self._folder, self._sent
        variables = {**self._workers.variables, **sent.variables, **request.environment}
        request = replace(
            request,
            environment={**variables, NODE_FOLDER_VARIABLE: folder.memory},
            working_directory=sent.working_folder,
            import_path=[*sent.import_path, *self._workers.import_path],
            memory_folder=folder.memory,
            spill_folder=folder.path,
            main_classes=os.path.join(folder.path, request.main_classes),
            load_ahead=request.load_ahead and os.path.join(folder.path, request.load_ahead),
        )
        paths = replace(worker.paths, copy=sent.working_folder if sent.is_copy else "")
        self._desk.expect(request.worker_id)
        self._workers.start(
            request, replace(worker, paths=paths, socket=self._desk.path, shared_folder=self._shared_folder)
        )

    def kill(self, worker_id: str) -> None:
        """Kill a worker, also one that starts just now."""
        self._workers.kill(worker_id)

    def exits(self) -> list[Exit]:
        """Return which workers have ended since the last call. Waits for some time until there is one.

        If the call fails, the agent is gone, and most likely its node.
        """
        found = self._workers.exits()
        for each in found:
            self._desk.ended(each.worker_id)
        return found

    def forget(self, worker_id: str) -> None:
        """Drop the blocks of a worker that the driver has given up."""
        self._desk.forget(worker_id)

    # Blocks

    def take(self, worker_id: str, number: int) -> tuple[Any, int]:
        """Hand a worker's block over to the driver, which owns it from now on; and its size, if all went well."""
        return self._desk.take(worker_id, number)

    def feed(self, worker_id: str, instruction_id: str, objects: dict[str, Any]) -> None:
        """Name the objects that a bundle reads: for each key the references to its copies."""
        self._desk.feed(worker_id, instruction_id, objects)

    def copy(self, block: Any) -> tuple[Any, int]:
        """Return a block, of which Ray then keeps a second copy on this node, and its size, which says that it does."""
        return block, len(block[0])

    # The node

    def ping(self) -> str:
        """Return the node's id; the answer shows that the node is alive."""
        return self._node_id

    def sample(self) -> NodeSample:
        """Return the load of the node since the last call, and its memory now."""
        return self._load.sample()

    def close(self) -> list[str]:
        """End the workers and remove the folder. The agent of a run that has ended needs no other call.

        Returns the files that steps have written to relative paths, and that are gone with the folder.
        """
        atexit.unregister(self.close)
        written = self._sent.written()
        self._made.close()
        return written


def _fetch(copies: list[Any]) -> tuple[Any, Any]:
    """Return a block, from the first of its copies that can be read."""
    store = RayStore()
    return read_first(copies, lambda reference, seconds: store.get(reference, seconds, lambda: False))


def check_shared_folder(marker: str) -> str:
    """Return the folder of the marker. Raises :class:`WorkerStartFailed` if this node sees it not, or another one."""
    folder, host = os.path.dirname(marker), socket.gethostname()
    if not os.path.exists(marker):
        message = f"node {host} does not see the checkpoint's folder {folder} of the driver"
        raise WorkerStartFailed(message, fix=SHARE_CHECKPOINT)
    if not os.access(folder, os.W_OK):
        raise WorkerStartFailed(f"node {host} can't write into the checkpoint's folder {folder}", fix=SHARE_CHECKPOINT)
    return folder


def _this_node() -> str:
    ray = require("ray", "ray")
    return str(ray.get_runtime_context().get_node_id())
