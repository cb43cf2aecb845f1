"""Makes the parts of a run whose workers are on the nodes of a cluster."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.cluster import shared_folder, shipping
from luminosity.engine.cluster.agent.agent import RunOnNodes
from luminosity.engine.cluster.agent.node_folder import start_cleaner
from luminosity.engine.cluster.driver.node_launcher import NodeLauncher
from luminosity.engine.cluster.driver.ray_nodes import nodes
from luminosity.engine.cluster.driver.server import NodeServer
from luminosity.engine.cluster.driver.session import Session
from luminosity.engine.cluster.security import RunSecurity
from luminosity.engine.data.blocks import BlockStore
from luminosity.engine.data.state import StateStore
from luminosity.engine.durable.resume import Checkpoint
from luminosity.engine.fnapi.connection import WorkerServer
from luminosity.engine.fnapi.server import FnApiServer
from luminosity.engine.folders import RunFolders
from luminosity.engine.loop.workers import PoolRun
from luminosity.engine.plan.graph import BufferKind, Graph
from luminosity.engine.workers.launcher import modules_to_preload

__all__ = ["set_up_on_nodes"]


def set_up_on_nodes(
    graph: Graph,
    pools: dict[int, PoolRun],
    folders: RunFolders,
    blocks: BlockStore,
    state: StateStore,
    descriptors: dict[str, beam_fn_api_pb2.ProcessBundleDescriptor],
    checkpoint: Checkpoint | None,
    session: Session,
) -> tuple[WorkerServer, NodeLauncher]:
    """Return the server and the launcher of workers on nodes. The folders' address becomes the server's."""
    paths = session.paths
    assert paths is not None  # a pipeline that is only planned has no workers
    security = RunSecurity.create()
    small = [folders.main_classes, *(pool.load_ahead for pool in pools.values() if pool.load_ahead)]
    files = {os.path.basename(path): Path(path).read_bytes() for path in small}
    folders.guard(start_cleaner)
    marker = ""
    if checkpoint is not None:
        marker = shared_folder.mark(folders.spill)
        shared_folder.check_nodes(marker, nodes())
    inner = FnApiServer(f"{session.host}:0", state, descriptors, security)
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
        session.sent.archive,
        paths,
        url=inner.url,
        security=security,
        driver_node=session.node_id,
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
