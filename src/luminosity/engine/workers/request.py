"""What crosses to a worker process when it starts. Imports no Beam: the runner starts workers before it needs that."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class WorkerRequest:
    """All that a worker process is told when it starts."""

    worker_id: str
    url: str  # of the Fn API server
    environment: dict[str, str]
    working_directory: str
    import_path: list[str]
    memory_folder: str  # where it writes blocks while the budget has room
    spill_folder: str  # where it writes them else
    quota: str  # the page that counts them: see spill/quota.py
    writer: int  # this worker's word in it
    main_classes: str  # a file: see main_classes.py
    private_folders: list[str]  # of the run, to be removed if the runner can't
    prints: dict[str, str] = field(default_factory=dict[str, str])  # standard stream → the socket it writes to
    pipeline_options: dict[str, Any] = field(default_factory=dict[str, Any])

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerRequest:
        return cls(**json.loads(text))
