"""The host's side: a thread for each client, until the last one has left.

How it leaves without losing a client who is just coming: it takes the folder's lock, which whoever starts a host holds;
sees that nobody waits to be accepted; then closes its socket and removes the folder. A client that got into the socket
between these last two steps sees its connection end before it was authenticated, and begins anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable

from luminosity.inference.files.locks import try_exclusive
from luminosity.inference.ipc.authentication import AuthenticationFailed, is_same_user, prove_as_host, turn_away
from luminosity.inference.ipc.channel import Channel, ConnectionClosed
from luminosity.inference.ipc.folder import HostFolder, remove_abandoned
from luminosity.inference.ipc.logs import Logged, bound
from luminosity.inference.ipc.sockets import close_in_children

__all__ = ["serve"]

_LOGGER = logging.getLogger("luminosity")

_TICK_S = 0.1
_MOST_CONNECTIONS = 1024
_MOST_UNAUTHENTICATED = 64
_END_S = 5.0

Talk = Callable[[Channel], None]


def serve(
    folder: HostFolder,
    talk: Talk,
    *,
    idle_seconds: float = 2.0,
    first_seconds: float = 30.0,
    stop: threading.Event | None = None,
    take_logged: Callable[[], list[Logged]] = list,
) -> None:
    """Be the host of this folder's run; returns at once where there is one already.

    ``talk`` runs in a thread for each client, until it returns, or its channel raises `ConnectionClosed`. The host ends
    when for ``idle_seconds`` there was no client (``first_seconds`` before the first), or when ``stop`` is set.
    """
    with try_exclusive(folder.alive) as is_host:
        if not is_host:
            return
        remove_abandoned(folder.base)
        with open(folder.alive) as mark, _listener(folder.socket) as listener:
            server = _Server(folder, talk, listener, mark.fileno(), take_logged)
            server.run(idle_seconds, first_seconds, stop or threading.Event())


class _Server:
    def __init__(
        self,
        folder: HostFolder,
        talk: Talk,
        listener: socket.socket,
        mark: int,
        take_logged: Callable[[], list[Logged]],
    ) -> None:
        self._folder = folder
        self._talk = talk
        self._listener = listener
        self._mark = mark
        self._take_logged = take_logged
        self._secret = folder.secret()
        self._lock = threading.Lock()
        self._threads: dict[socket.socket, threading.Thread] = {}  # of connections
        self._unauthenticated: set[socket.socket] = set()
        self._had_clients = False
        self._alone_since = time.monotonic()
        self._said: set[str] = set()

    def run(self, idle_seconds: float, first_seconds: float, stop: threading.Event) -> None:
        while not stop.is_set():
            if select.select([self._listener], [], [], _TICK_S)[0]:
                self._accept()
            elif self._is_idle(idle_seconds if self._had_clients else first_seconds) and self._leave():
                return
            bound(self._folder.output)
        self._end()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            self._say_once(f"the model host can't accept a connection: {error.strerror or error}")
            time.sleep(_TICK_S)
            return
        close_in_children(connection)
        if not is_same_user(connection, os.getuid()):
            self._say_once("the model host refused a connection of another user")
            connection.close()
            return
        if not self._start_thread(connection):
            with connection, contextlib.suppress(OSError):
                turn_away(connection)

    def _start_thread(self, connection: socket.socket) -> bool:
        with self._lock:
            if len(self._threads) >= _MOST_CONNECTIONS or len(self._unauthenticated) >= _MOST_UNAUTHENTICATED:
                return False
            thread = threading.Thread(target=self._serve, args=(connection,), name="luminosity-client", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system gives no more threads
                self._say_once(f"the model host can't serve a connection: {error}")
                return False
            self._threads[connection] = thread
            self._unauthenticated.add(connection)
            return True

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                if self._is_client(connection):
                    with Channel(connection, self._take_logged) as channel:
                        self._talk(channel)
        except ConnectionClosed:
            _LOGGER.debug("a client of the model host left")
        except Exception:
            _LOGGER.exception("the model host ends the connection to a client, because of an error")
        finally:
            with self._lock:
                self._unauthenticated.discard(connection)
                del self._threads[connection]
                self._alone_since = time.monotonic()

    def _is_client(self, connection: socket.socket) -> bool:
        try:
            prove_as_host(connection, self._secret)
        except AuthenticationFailed as error:
            self._say_once(f"the model host refused a connection: the other side {error}")
            return False
        except OSError as error:
            _LOGGER.debug("a connection to the model host ended early: %s", error)
            return False
        with self._lock:
            self._unauthenticated.discard(connection)
            self._had_clients = True
        return True

    def _is_idle(self, seconds: float) -> bool:
        with self._lock:
            return not self._threads and time.monotonic() - self._alone_since >= seconds

    def _leave(self) -> bool:
        """False where somebody is just coming."""
        try:
            with try_exclusive(self._folder.lock) as is_ours:
                if not is_ours or select.select([self._listener], [], [], 0)[0]:
                    return False
                self._listener.close()
                if os.path.samestat(os.stat(self._folder.alive), os.fstat(self._mark)):
                    self._folder.remove()
        except FileNotFoundError:
            _LOGGER.debug("somebody else removed the folder of the model host")
        return True

    def _end(self) -> None:
        """Without waiting for clients, nor for what they asked for."""
        with self._lock:
            threads = list(self._threads.items())
        for connection, _ in threads:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _END_S
        for _, thread in threads:
            thread.join(max(0, deadline - time.monotonic()))
        if not self._leave():  # a client that is just coming starts the next host in this folder
            self._listener.close()

    def _say_once(self, words: str) -> None:
        _LOGGER.log(logging.DEBUG if words in self._said else logging.WARNING, "%s", words)
        self._said.add(words)


def _listener(path: str) -> socket.socket:
    """Who calls it is the host: a socket that is there belonged to one that was killed."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = close_in_children(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(128)
    return listener
