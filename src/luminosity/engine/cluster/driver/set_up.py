"""Makes the parts of a run whose workers are on the nodes of a cluster: their launcher, and the server for them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.cluster import shipping
from luminosity.engine.cluster.agent.agent import RunOnNodes
from luminosity.engine.cluster.agent.node_folder import start_cleaner
from luminosity.engine.cluster.driver import shared_paths
from luminosity.engine.cluster.driver.node_launcher import NodeLauncher
from luminosity.engine.cluster.driver.ray_calls import nodes
from luminosity.engine.cluster.driver.ray_connection import RayConnection
from luminosity.engine.cluster.security import RunSecurity
from luminosity.engine.data.blocks import BlockStore
from luminosity.engine.data.state import StateStore
from luminosity.engine.durable.resume import Checkpoint
from luminosity.engine.fnapi.connection import Callbacks, WorkerConnection, WorkerServer
from luminosity.engine.fnapi.server import FnApiServer
from luminosity.engine.folders import RunFolders
from luminosity.engine.loop.workers import PoolRun
from luminosity.engine.plan.graph import BufferKind, Graph
from luminosity.engine.workers.preloading import modules_to_preload

__all__ = ["set_up_on_nodes"]


class _NodeConnection:
    """A connection that names the objects of each bundle to the agent of the worker's node."""

    def __init__(self, inner: WorkerConnection, feed: Callable[[beam_fn_api_pb2.Elements], None]) -> None:
        self._inner = inner
        self._feed = feed
        self.instruct = inner.instruct
        self.cause = inner.cause
        self.finish = inner.finish
        self.close = inner.close

    def send(self, stream_id: str, messages: Iterable[beam_fn_api_pb2.Elements]) -> None:
        def fed() -> Iterable[beam_fn_api_pb2.Elements]:
            for elements in messages:
                self._feed(elements)
                yield elements

        self._inner.send(stream_id, fed())


class NodeServer:
    """The Fn API server, but the blocks of its workers are objects of the cluster."""

    def __init__(self, inner: WorkerServer, workers: NodeLauncher) -> None:
        self._inner = inner
        self._workers = workers

    def connect(self, worker_id: str, callbacks: Callbacks) -> WorkerConnection:
        """Expect a worker with this id."""

        def on_elements(elements: beam_fn_api_pb2.Elements) -> None:
            if self._workers.secure(worker_id, elements):
                callbacks.on_elements(elements)

        own = replace(
            callbacks, on_elements=on_elements, on_disconnected=lambda: self._workers.connection_lost(worker_id)
        )
        return _NodeConnection(
            self._inner.connect(worker_id, own), lambda elements: self._workers.feed(worker_id, elements)
        )

    def disconnect(self, worker_id: str) -> None:
        """Close the connection of a worker that has exited, and refuse it from now on."""
        self._inner.disconnect(worker_id)
        self._workers.forget(worker_id)

    def stop(self) -> None:
        """Close all connections, end all workers and stop serving."""
        self._inner.stop()
        self._workers.close()


def set_up_on_nodes(
    graph: Graph,
    pools: dict[int, PoolRun],
    folders: RunFolders,
    blocks: BlockStore,
    state: StateStore,
    descriptors: dict[str, beam_fn_api_pb2.ProcessBundleDescriptor],
    checkpoint: Checkpoint | None,
    connection: RayConnection,
) -> tuple[WorkerServer, NodeLauncher]:
    """Return the server and the launcher of workers on nodes. The folders' address becomes the server's."""
    paths = connection.paths
    assert paths is not None  # a pipeline that is only planned has no workers
    security = RunSecurity.create()
    small = [folders.main_classes, *(pool.load_ahead for pool in pools.values() if pool.load_ahead)]
    files = {os.path.basename(path): Path(path).read_bytes() for path in small}
    folders.guard(start_cleaner)
    marker = ""
    if checkpoint is not None:
        marker = shared_paths.mark(folders.spill)
        shared_paths.check_nodes(marker, nodes())
    inner = FnApiServer(f"{connection.host}:0", state, descriptors, security)
    folders.url = inner.url
    run = RunOnNodes(
        run_id=secrets.token_hex(6),
        files=files,
        versions=shipping.versions(),
        marker=marker,
        preload=modules_to_preload(),
        is_in_place=paths.is_in_place,
    )
    workers = NodeLauncher(
        run,
        connection.sent.archive,
        paths,
        url=inner.url,
        security=security,
        driver_node=connection.node_id,
        read_by_driver=sorted(_read_by_driver(graph)),
    )
    blocks.find_remote = workers.objects.find
    blocks.sends_files = checkpoint is not None  # whose folder all nodes see
    return NodeServer(inner, workers), workers


def _read_by_driver(graph: Graph) -> frozenset[str]:
    """Return the writes whose elements the loop reads: to groupings, side inputs, and stages that cut by element."""
    buffers = {buffer.id for buffer in graph.buffers.values() if buffer.kind is BufferKind.GROUP}
    for stage in graph.stages:
        buffers |= {side_input.buffer_id for side_input in stage.side_inputs}
        if stage.is_stateful or stage.is_splittable or any(each.is_unbounded for each in stage.side_inputs):
            buffers |= {read.buffer_id for read in stage.reads}
    return frozenset(w.transform_id for stage in graph.stages for w in stage.writes if w.buffer_id in buffers)
