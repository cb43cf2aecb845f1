"""The entry point of a worker that is spawned rather than forked.

The command line gives two file descriptors, one to read the request from, and the lifeline; and the worker's family.
"""

from __future__ import annotations

import os
import sys

from luminosity._shared import descendants
from luminosity.engine.workers import harness
from luminosity.engine.workers.request import WorkerRequest


def main() -> None:
    """Run a worker until the runner has no more work."""
    request, lifeline, family = map(int, sys.argv[1:4])
    descendants.join(family)
    with os.fdopen(request) as file:
        # Not up to the end, which does not come if the script forks just now: that process holds the pipe, too.
        parsed = WorkerRequest.from_json(file.readline())
    harness.end_with(lifeline)
    harness.run(parsed)
    # As in a forked worker. Otherwise multiprocessing would wait for its processes, which the runner ends.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
