"""The request that starts a worker process. Imports no Beam: the fork server starts before Beam is imported."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from luminosity.engine.resources.machine import LeaseNeeds

__all__ = ["Entry", "WorkerRequest"]


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
    main_classes: str  # a file: see worker_files.py
    private_folders: list[str]  # of the run, for the fork server to remove if the runner is killed
    python: str = ""  # the interpreter of another environment; empty for that of the runner
    load_ahead: str = ""  # a file: see worker_files.py; empty if this worker loads no models ahead
    niceness: int = 0  # what to add to the process's: CPU workers give way to workers with devices
    is_stream: bool = False  # whether it runs stages whose input may never end
    prints: dict[str, str] = field(default_factory=dict[str, str])  # standard stream → the socket to write to
    pipeline_options: dict[str, Any] = field(default_factory=dict[str, Any])
    lease: LeaseNeeds | None = None  # what to ask a cluster for; None for a process of this machine

    def to_json(self) -> str:
        """Return the request as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerRequest:
        """Read what :meth:`to_json` returned."""
        return cls(**json.loads(text))


Entry = Callable[[WorkerRequest], int | None]  # runs a worker in its process; returns the exit code, None for 0
