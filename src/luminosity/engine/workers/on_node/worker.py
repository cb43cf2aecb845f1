"""Runs a worker: on this machine, or in a process that the agent of a node of a cluster has started."""

from __future__ import annotations

import sys

import grpc

from luminosity.engine.workers import harness
from luminosity.engine.workers.on_node import channel, local_paths
from luminosity.engine.workers.on_node.block_socket import BlockClient
from luminosity.engine.workers.on_node.channel import FileChannel, ObjectChannel
from luminosity.engine.workers.on_node.printed_lines import print_through_logs
from luminosity.engine.workers.request import LocalPaths, NodeBlocks, WorkerRequest

__all__ = ["run"]


def run(request: WorkerRequest) -> int:
    """Serve the driver until it has no more work. Returns the exit code of the process."""
    if request.node_blocks is None:
        harness.run(request)
        return 0
    kind = _channel(request.worker_id, NodeBlocks(**request.node_blocks))
    if request.local_paths is not None:
        local_paths.guard(LocalPaths(**request.local_paths))
    errors = sys.stderr
    print_through_logs()
    try:
        harness.run(request, kind)
    except grpc.RpcError as error:
        print(f"lost the connection to the driver: {error}", file=errors)  # it is gone, or has given this worker up
        return 1
    return 0


def _channel(worker_id: str, blocks: NodeBlocks) -> type[FileChannel | ObjectChannel]:
    kind: type[FileChannel | ObjectChannel]
    if blocks.shared_folder:
        kind = FileChannel
        FileChannel.writer = channel.file_writer(blocks.shared_folder, worker_id)
    else:
        kind = ObjectChannel
        ObjectChannel.worker_id = worker_id
        ObjectChannel.agent = agent = BlockClient(blocks.socket, worker_id)
        harness.ReportingHarness.on_failed = staticmethod(agent.end)  # it may not have asked for its input yet
    kind.read_by_driver = frozenset(blocks.read_by_driver)
    return kind
