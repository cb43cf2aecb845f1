"""The page beside a run: a process of its own, which reads the run's record and ends with the run's process."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from luminosity._shared.shared_files import who_else_writes
from luminosity.extras import check
from luminosity.operate.web_server import TOKEN_FILE, address, bind, token_of

__all__ = ["PageBeside", "main"]

_END_TIMEOUT_S = 5.0
_NICE = 10  # the run comes first
_LOOK_S = 1.0  # how often to look for the parent if the system does not tell when it ends


class PageBeside:
    """A server of the page as a child process. Call :meth:`end` when it is not needed any more.

    The address is known at once: this process opens the port, and the child takes it over when it has started. The
    token goes to the child through a pipe, so that no list of processes shows it.
    """

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        """Open the port and start the process. With ``read_only``, the page can stop no run."""
        for module in ("starlette", "uvicorn"):
            check(module, "ui")
        # Why the page only reads, if other users can write to the folder.
        self.shared = who_else_writes(folder) if folder.is_dir() else ""
        can_act = not read_only and not self.shared
        try:
            token = token_of(folder)
            self.token_file: Path | None = folder / TOKEN_FILE
        except OSError:
            token = secrets.token_urlsafe()  # valid as long as the child runs
            self.token_file = None
        with bind() as listener:
            listener.listen()
            self.address = address(listener, token)
            settings = {
                "folder": str(folder.absolute()),
                "token": token,
                "listener": listener.fileno(),
                "can_act": can_act,
            }
            self._process = subprocess.Popen(
                [sys.executable, "-m", "luminosity.operate.page.beside"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C is for the run, which may take a while to stop
            )
        self.is_wanted = True  # False after the user has interrupted the run
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(json.dumps({**settings, "parent": os.getpid()}).encode())

    @property
    def pid(self) -> int:
        """The id of the server's process."""
        return self._process.pid

    def wait(self) -> None:
        """Wait until the server has ended."""
        self._process.wait()

    def end(self) -> None:
        """End the server. Does nothing if it has ended."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def main() -> None:
    """Serve in the child process until its parent ends it, or has ended itself.

    It gets its settings on standard input, and its listening socket from its parent.
    """
    os.nice(_NICE)
    settings = json.load(sys.stdin)
    _end_with(settings["parent"])
    with socket.socket(fileno=settings["listener"]) as listener:
        select.select([listener], [], [])  # until somebody opens the page: the imports take half a second of a core
        from luminosity.operate.page.app import Sources, serve_page

        folder = Path(settings["folder"])
        sources = Sources(folder, can_act=settings["can_act"])
        serve_page(sources, settings["token"], listener, lambda _: None)


def _end_with(parent: int) -> None:
    """Send this process SIGTERM as soon as its parent, process ``parent``, has ended."""
    threading.Thread(target=_wait_for_end, args=(parent,), name="parent", daemon=True).start()


def _wait_for_end(parent: int) -> None:
    try:
        descriptor = os.pidfd_open(parent)
    except (AttributeError, OSError):
        descriptor = None  # an old kernel, or the parent has ended already
    while os.getppid() == parent:  # not before: its number may belong to another process by now
        if descriptor is None:
            time.sleep(_LOOK_S)
        else:
            select.select([descriptor], [], [])  # readable when the process has ended
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
