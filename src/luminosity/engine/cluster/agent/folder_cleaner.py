"""A small process that removes the folders of a node agent when the agent has ended, however it ended.

The agent runs this file as a script, ``folder_cleaner.py PIPE FOLDER …``, in an interpreter that imports nothing else.
The script forks and its first process exits, so that the cleaner is not a child of the agent: Ray kills the children of
an actor's process. PIPE is the read end of a pipe whose write end only the agent has. The cleaner inherits the locks of
the folders. So other runs take a folder for abandoned only if agent and cleaner are gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

__all__ = ["main", "remove"]

_ATTEMPTS = 50  # workers of the run may end a moment later than the agent, and write files until then
_PAUSE_S = 0.2  # between two attempts


def main() -> None:
    """Wait in a process of its own until the pipe closes, then remove the folders."""
    pipe, folders = int(sys.argv[1]), sys.argv[2:]
    if os.fork():
        os._exit(0)
    # A service manager sends signals to all processes; the end of the agent closes the pipe soon after.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(pipe, 4096):
        pass
    for _ in range(_ATTEMPTS):
        for folder in folders:
            remove(folder)
        if not any(map(os.path.exists, folders)):
            return
        time.sleep(_PAUSE_S)


def remove(folder: str) -> None:
    """Remove a folder with its contents, as far as possible. ``shutil`` would do it, but its import takes memory."""
    for parent, folders, names in os.walk(folder, topdown=False):
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(parent, name))
        for name in folders:
            path = os.path.join(parent, name)
            with contextlib.suppress(OSError):
                if os.path.islink(path):
                    os.unlink(path)
                else:
                    os.rmdir(path)
    with contextlib.suppress(OSError):
        os.rmdir(folder)


if __name__ == "__main__":
    main()
