"""The private folders of a run on one node of a cluster. They are gone when the run has ended, however it ended.

The node agent makes them. If the agent ends without removing them, a small process does (``folder_cleaner.py``). If the
whole node is killed, the next run on it removes them, as on one machine (``engine/folders.py``).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping

from luminosity.engine.cluster.agent import folder_cleaner
from luminosity.engine.folders import SHARED_MEMORY, make_locked
from luminosity.errors import InvalidArgument

__all__ = ["NodeFolder", "start_cleaner"]

_SAFE_NAME = re.compile(r"[\w][\w.-]{0,99}", re.ASCII)
_ID_LENGTH = 12  # of the run's id in a folder's name: sockets lie in there, and the kernel limits their paths
_NODE_ID_LENGTH = 8
_START_TIMEOUT_S = 60.0  # the cleaner starts in tenths of a second, unless the machine is very busy


class NodeFolder:
    """Folders of one run on one node, which only this user can use.

    ``path`` has the given files, ``memory`` is in shared memory if there is any. The owner calls :meth:`remove`.
    """

    def __init__(self, path: str, memory: str, locks: list[int]) -> None:
        """Start the cleaner for folders that exist. Use :meth:`open`."""
        self.path = path
        self.memory = memory
        self._locks = locks
        self._lifeline = start_cleaner([path] if path == memory else [path, memory], locks)

    @classmethod
    def open(cls, run_id: str, files: Mapping[str, bytes], node_id: str) -> NodeFolder:
        """Make the folders of a run on a node, with ``files`` by name in ``path``.

        Several nodes may be one machine, so ``node_id`` is a part of the names.
        """
        for name in (run_id, node_id, *files):
            if not _SAFE_NAME.fullmatch(name):
                raise InvalidArgument(f"found {name[:100]!r}, expected up to 100 letters, digits, '.', '-' and '_'")
        label = f"{run_id[:_ID_LENGTH]}-{node_id[:_NODE_ID_LENGTH]}"
        made: list[str] = []
        locks: list[int] = []
        try:
            for root in _roots():
                folder, lock = make_locked(root, label)
                made.append(folder)
                locks.append(lock)
            for name, data in files.items():
                with open(
                    os.open(os.path.join(made[0], name), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb"
                ) as file:
                    file.write(data)
            return cls(made[0], made[-1], locks)
        except BaseException:
            for folder in made:
                shutil.rmtree(folder, ignore_errors=True)
            for lock in locks:
                os.close(lock)
            raise

    def remove(self) -> None:
        """Remove the folders. The cleaner ends, and removes what a worker has written meanwhile. May be repeated."""
        for folder in {self.path, self.memory}:
            shutil.rmtree(folder, ignore_errors=True)
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        while self._locks:
            os.close(self._locks.pop())


def _roots() -> list[str]:
    """Return the folders in which a run's folders on this node are made: on the disk, and in memory if possible."""
    disk = tempfile.gettempdir()
    return [disk, SHARED_MEMORY] if os.access(SHARED_MEMORY, os.W_OK) and disk != SHARED_MEMORY else [disk]


def start_cleaner(folders: list[str], locks: list[int]) -> int:
    """Start the process that removes the folders when this one has ended, and return the pipe that it watches.

    The caller keeps the pipe open while it needs the folders. The process shares their ``locks``.
    """
    read_end, lifeline = os.pipe()
    try:
        # The script must not import the package, which would import Beam.
        command = [sys.executable, "-I", "-S", folder_cleaner.__file__, str(read_end), *folders]
        subprocess.run(
            command,
            check=True,
            timeout=_START_TIMEOUT_S,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[read_end, *locks],
        )
    except BaseException:
        os.close(lifeline)
        raise
    finally:
        os.close(read_end)
    return lifeline
