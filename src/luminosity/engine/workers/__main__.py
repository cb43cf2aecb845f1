"""The entry point of a worker that is spawned rather than forked.

The command line gives two file descriptors: one to read the request from, and the lifeline.
"""

from __future__ import annotations

import os
import sys

from luminosity.engine.workers import harness
from luminosity.engine.workers.on_node import worker
from luminosity.engine.workers.request import WorkerRequest


def main() -> None:
    """Run a worker until the runner has no more work."""
    request, lifeline = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(request) as file:
        parsed = WorkerRequest.from_json(file.read())
    harness.end_with(lifeline)
    sys.exit(worker.run(parsed))


if __name__ == "__main__":
    main()
