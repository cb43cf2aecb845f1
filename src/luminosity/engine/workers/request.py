"""The request that starts a worker process. Imports no Beam: the fork server starts before Beam is imported."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from luminosity.engine.resources.nodes import LeaseNeeds

__all__ = ["LocalPaths", "NodeBlocks", "WorkerRequest"]


@dataclass(frozen=True)
class NodeBlocks:
    """Where a worker on a node of a cluster has its blocks."""

    socket: str  # of the node's agent
    shared_folder: str  # a folder that all nodes see, in which blocks are files; empty if they are objects
    read_by_driver: list[str]  # outputs whose elements the driver reads itself


@dataclass(frozen=True)
class LocalPaths:
    """What a worker on a node of a cluster does not share with the driver."""

    copy: str = ""  # of the driver's working folder, in which the worker runs; empty if it runs in that folder itself
    source: str = ""  # the driver's working folder
    is_apart: bool = False  # whether the node is another machine
    shared: list[str] = field(default_factory=list[str])  # folders that are the same on all nodes


@dataclass(frozen=True)
class WorkerRequest:
    """Everything that a worker process needs to start."""

    worker_id: str
    url: str  # of the Fn API server
    environment: dict[str, str]
    arguments: list[str]  # the ``sys.argv`` of the runner's process, which user code may read
    working_directory: str
    import_path: list[str]
    memory_folder: str  # for blocks while the memory budget has room
    spill_folder: str  # for blocks beyond the budget
    quota: str  # the shared page that counts their bytes: see spill/quota.py
    writer: int  # this worker's place in the page
    main_classes: str  # a file: see main_classes.py
    private_folders: list[str]  # of the run, for the fork server to remove if the runner is killed
    python: str = ""  # the interpreter of another environment; empty for that of the runner
    load_ahead: str = ""  # a file: see load_ahead.py; empty if this worker loads no models ahead
    is_stream: bool = False  # whether it runs stages whose input may never end
    prints: dict[str, str] = field(default_factory=dict[str, str])  # standard stream → the socket to write to
    pipeline_options: dict[str, Any] = field(default_factory=dict[str, Any])
    # The fields of fnapi.security.WorkerAccess; None if the server is a unix socket. Not shown: it holds a token.
    access: dict[str, str] | None = field(default=None, repr=False)
    source_folder: str = ""  # of the driver, if the working directory is a copy of it: errors name its files
    lease: LeaseNeeds | None = None  # what to ask a cluster for; None for a process of this machine
    # The fields of NodeBlocks, once the worker has a place on a node of a cluster; None for a process of this machine.
    node_blocks: dict[str, Any] | None = None
    # The fields of LocalPaths for a worker on a node of a cluster that may not see all that the driver sees.
    local_paths: dict[str, Any] | None = None

    def to_json(self) -> str:
        """Return the request as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerRequest:
        """Read what :meth:`to_json` returned."""
        return cls(**json.loads(text))
