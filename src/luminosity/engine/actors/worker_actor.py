"""A worker in a process that Ray has started: Beam's harness on one of the actor's threads."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import grpc

from luminosity.core import WorkerShare
from luminosity.engine.actors import object_channel, shared_folder
from luminosity.engine.actors.object_channel import FedObjects, FileChannel, ObjectChannel, OutgoingBlocks
from luminosity.engine.actors.printed_lines import print_through_logs
from luminosity.engine.cluster import shipping
from luminosity.engine.resources.machine import detect_accelerators, visibility
from luminosity.engine.workers import harness
from luminosity.engine.workers.request import WorkerRequest
from luminosity.errors import BlockLost, WorkerStartFailed
from luminosity.lean_beam import collect_seldom, import_lean

__all__ = ["Place", "WorkerActor"]

_COPY_TIMEOUT_S = 5.0  # for one copy of a block, if there is another: its node may be gone without a word
_LAST_TIMEOUT_S = 60.0  # for the last copy: a busy node needs long to read what it has spilled


@dataclass(frozen=True)
class Place:
    """Where an actor runs."""

    node_id: str
    pid: int


class WorkerActor:
    """The methods that the driver calls. Ray runs them on several threads at once."""

    def __init__(self) -> None:
        self._outgoing = OutgoingBlocks()
        self._fed = FedObjects(_fetch)

    def place(self) -> Place:
        """Return where this actor runs. The driver's first call: it is answered when the actor has a place."""
        import ray

        return Place(ray.get_runtime_context().get_node_id(), os.getpid())

    def run(
        self, request: WorkerRequest, read_by_driver: frozenset[str], marker: str, versions: dict[str, str]
    ) -> None:
        """Serve the driver until it has no more work.

        ``read_by_driver`` are outputs whose elements the driver reads itself. ``marker`` is a file in the folder
        that all nodes share, if there is one: blocks are files there, then. ``versions`` are those of the driver.
        """
        if wrong := shipping.check_versions(versions):
            raise WorkerStartFailed(wrong)
        shipped = shipping.shipped(request.import_path)
        channel: type[FileChannel | ObjectChannel]
        if marker:
            FileChannel.writer = object_channel.file_writer(shared_folder.check_here(marker), request.worker_id)
            channel = FileChannel
        else:
            ObjectChannel.worker_id = request.worker_id
            ObjectChannel.outgoing, ObjectChannel.fed = self._outgoing, self._fed
            channel = ObjectChannel
        channel.read_by_driver = read_by_driver
        print_through_logs()
        import_lean()  # otherwise the worker would import torch, if installed, when a pipeline uses RunInference
        collect_seldom()
        request = replace(
            request,
            environment={**os.environ, **request.environment, **_own_share(request)},
            working_directory=shipped.working_folder,
            import_path=shipped.import_path,
        )
        try:
            harness.run(request, channel)
        except grpc.RpcError as error:
            # The driver is gone, or has given this worker up. An error of gRPC can't be pickled.
            raise ConnectionError(f"lost the connection to the driver: {error}") from None

    def take(self, number: int) -> tuple[Any, int]:
        """Hand a block over to the driver, which owns it from now on; and its size, which says that all went well."""
        return self._outgoing.take(number)

    def feed(self, instruction_id: str, objects: dict[str, Any]) -> None:
        """Name the objects that a bundle reads: for each key the references to its copies."""
        self._fed.feed(instruction_id, objects)


def _own_share(request: WorkerRequest) -> dict[str, str]:
    """Return the variables that tell user code its share, with the devices that Ray has given to this actor."""
    import ray

    given: dict[str, list[str]] = ray.get_runtime_context().get_accelerator_ids()
    share = WorkerShare.from_environment(request.environment)
    if not share.devices:
        return {**visibility(()), **share.to_environment()}
    real = {device.partition(":")[0] for device in detect_accelerators()}
    found = [
        f"{kind.lower() if kind.lower() in real else 'declared'}:{number}"
        for kind, numbers in given.items()
        for number in numbers
    ]
    # Ray has made only these devices visible.
    return replace(share, devices=tuple(found) or share.devices).to_environment()


def _fetch(copies: list[Any]) -> tuple[Any, Any]:
    """Return a block, from the first of its copies that can be read."""
    import ray
    from ray.exceptions import RayError

    failure: Exception | None = None
    for number, reference in enumerate(copies, 1):
        try:
            return ray.get(reference, timeout=_COPY_TIMEOUT_S if number < len(copies) else _LAST_TIMEOUT_S)
        except RayError as error:
            failure = error
    raise BlockLost(f"found none of the {len(copies)} copies of a block: {type(failure).__name__}") from failure
